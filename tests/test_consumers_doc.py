"""docs/consumers.md: its examples of an Optimum export are what the program prints."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from hugging_face import save_decoder

from onnxkvrename.handoff.find_consumers import list_consumers, load_consumer

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "consumers.md").read_text("utf-8")
EXAMPLES = re.findall(r"<!-- optimum ?(\d*) -->\n```console\n(.*?)```", TEXT, re.DOTALL)
TEMPLATES = {
    "inputs": {
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    },
    "outputs": {
        "present_key_names": "present.%d.key",
        "present_value_names": "present.%d.value",
    },
}


@pytest.mark.parametrize(("code", "text"), EXAMPLES)
def test_an_example_is_what_the_program_prints(
    code: str, text: str, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_decoder(tmp_path)
    config = {"model": {"type": "llama", "decoder": TEMPLATES}}
    (tmp_path / "genai_config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "renamed").mkdir()
    monkeypatch.chdir(tmp_path)
    printed, status = "", 0
    for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
        program, *words = shlex.split(command)
        if program == "cp":
            shutil.copy(*words)
            printed += f"$ {command}\n"
            continue
        outcome = run(*words)
        printed, status = f"{printed}$ {command}\n{outcome.out}{outcome.err}", outcome.code
    assert (printed, status) == (text, int(code or 0))


def test_every_consumer_has_a_passage_with_its_source() -> None:
    for name in list_consumers():
        passage = TEXT.partition(f"\n### {name}\n")[2].partition("\n### ")[0].partition("\n## ")[0]
        assert "Source: [" in passage or load_consumer(name).setting in passage
        assert "efused" in passage or "refuses" in passage
        assert f"| `{name}` |" in TEXT
