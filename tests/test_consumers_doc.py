"""docs/consumers.md: every consumer has its passage."""

from __future__ import annotations

from pathlib import Path

from onnxkvrename.handoff.find_consumers import list_consumers, load_consumer

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "consumers.md").read_text("utf-8")


def test_every_consumer_has_a_passage_with_its_source() -> None:
    for name in list_consumers():
        passage = TEXT.partition(f"\n### {name}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
        assert "Source: [" in passage or load_consumer(name).setting in passage
        assert "efused" in passage or "refuses" in passage
        assert f"| `{name}` |" in TEXT
