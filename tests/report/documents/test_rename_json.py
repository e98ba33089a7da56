from __future__ import annotations

import json
from pathlib import Path

from onnxkvrename import Report, rename
from onnxkvrename.report.documents.rename_json import DOCUMENT, describe_report


def test_json_has_the_names_as_they_are(decoder: Path) -> None:
    planned = rename(decoder, "VLLM", dry_run=True)
    hostile = planned._replace(path="\x1b[2J\udcff")
    document = json.loads(DOCUMENT.render(describe_report(Report((hostile,))), 0))
    (model,) = document["models"]
    assert model["path"] == "\x1b[2J\udcff"
    assert model["pairs"][0] == {
        "layer": 0,
        "buffer": "past_key",
        "kind": "attention",
        "scope": "",
        "input": {"old": "past_key.0", "new": "past_key.0_VLLM"},
        "output": {"old": "past_key.0_RetainedState", "new": "past_key.0_VLLM_RetainedState"},
    }
    assert {"name": "logits", "reason": "not retained"} in model["kept"]
    assert document["summary"] == {"renamed": 0, "unchanged": 0, "would-rename": 1, "failed": 0}
    assert document["texts"] == []
    assert DOCUMENT.render(DOCUMENT.empty, 2).isascii()
