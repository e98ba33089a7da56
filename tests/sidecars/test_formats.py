"""Sidecar formats: rows of a table."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome, Run

import onnxkvrename
from onnxkvrename.sidecars import formats
from onnxkvrename.sidecars.formats import SidecarFormat
from onnxkvrename.sidecars.tree import ScalarNode, SequenceNode

Rename = Callable[..., Outcome]
WITH_SIDECAR = ("--sidecar", "kv_map.txt")
NAMES = "past_key.0 -> past_key.0_RetainedState\n"
RENAMED = "past_key.0_VLLM -> past_key.0_VLLM_RetainedState\n"


def parse(text: str) -> SequenceNode:
    matches = re.finditer(r"[\w.]+", text)
    return SequenceNode(tuple(ScalarNode(m[0], m.start(), m.end(), "") for m in matches))


ARROWS = SidecarFormat(
    caption="arrows",
    expected_form="INPUT -> OUTPUT",
    parse=parse,
    find_names=lambda tree: iter(tree.items),
    has_file_name=re.compile(r"kv_.*\.txt").fullmatch,
    only_graph_values=True,
    requires_pairs=True,
)


@pytest.fixture
def rename(decoder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Rename:
    """Return a function that renames the decoder with a sidecar beside it."""

    def rename_with(*options: str) -> Outcome:
        monkeypatch.chdir(decoder.parent)
        return run(decoder.name, "--prefix", "VLLM", *options)

    return rename_with


@pytest.fixture
def sidecar(decoder: Path) -> Path:
    """A sidecar of a format that nobody knows yet."""
    path = decoder.parent / "kv_map.txt"
    path.write_text(NAMES, "utf-8")
    return path


@pytest.mark.usefixtures("sidecar")
def test_without_its_format_a_file_is_refused(rename: Rename) -> None:
    outcome = rename(*WITH_SIDECAR)
    assert outcome.code == 2
    assert "kv_map.txt: is not a sidecar of a known format (known formats: " in outcome.err


def test_a_format_is_one_row(
    rename: Rename, sidecar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "BUILT_IN", (*formats.BUILT_IN, ARROWS))
    outcome = rename(*WITH_SIDECAR)
    assert (outcome.code, sidecar.read_text("utf-8")) == (0, RENAMED)
    assert outcome.err.endswith("kv_map.txt: 2 names changed\n")


def test_a_built_in_format_keeps_its_files(rename: Rename, decoder: Path) -> None:
    """Rules may name any file; a known format comes first."""
    rules = decoder.parent / "mine.toml"
    known = Path(onnxkvrename.__file__).parent / "rules" / "profiles" / "qeff.toml"
    rules.write_text(
        f"{known.read_text('utf-8')}\n[[sidecar]]\nfile = '.*json'\nreader = 'x'\n", "utf-8"
    )
    batch = decoder.parent / "aic_batch_io.json"
    batch.write_text('{"IO-files": [[{"map-to": "past_key.0"}]], "past_key.0": 1}', "utf-8")
    assert rename("--sidecar", batch.name, "--rules", "mine.toml").code == 0
    kept = '{"IO-files": [[{"map-to": "past_key.0_VLLM"}]], "past_key.0": 1}'
    assert batch.read_text("utf-8") == kept
