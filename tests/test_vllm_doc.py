"""docs/inspect.md: its example of vLLM is what the program prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from build_layouts import build_gpt_oss
from cache_models import build_layout_model
from models import saved

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "inspect.md").read_text("utf-8")
EXAMPLE = re.search(
    r"<!-- gpt-oss -->\n```console\n\$ onnxkvrename ([^\n]+)\n(.*?)```\n<!-- /gpt-oss -->",
    TEXT,
    re.DOTALL,
)


def test_the_example_is_what_the_program_prints(
    tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert EXAMPLE is not None
    command, printed = EXAMPLE.groups()
    saved(build_layout_model(build_gpt_oss()), tmp_path / "gpt-oss-20b.onnx")
    monkeypatch.chdir(tmp_path)
    outcome = run(*shlex.split(command))
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith(f"\n\n{printed}")


def test_the_example_has_the_published_stride_and_prompts_that_add_up() -> None:
    assert EXAMPLE is not None
    rows = [
        line.replace(" tokens", "").split()
        for line in EXAMPLE[2].splitlines()
        if re.match(r"  packed \(vllm#46252\) +\d", line)
    ]
    prompts = {row[2]: int(row[4]) for row in rows}
    assert prompts == {"300": 8, "360": 9}
    assert 18 * prompts["300"] + 15 * prompts["360"] == 279
    assert EXAMPLE[2].count("(131,072 bytes)") == 2
    assert "(1,572,864 bytes)" in EXAMPLE[2]
    assert 279 * 1_572_864 == 438_829_056
