"""docs/vllm.md: its example is what the program prints, and its links exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from build_layouts import build_gpt_oss
from cache_models import build_layout_model
from models import saved

from onnxkvrename.vllm.memory_v033 import KV_CACHE_LAYOUTS

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "vllm.md").read_text("utf-8")
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
    assert (outcome.code, outcome.out + outcome.err) == (0, printed)


def test_the_example_has_the_published_stride_and_prompts_that_add_up() -> None:
    assert EXAMPLE is not None
    rows = [
        line.replace(" tokens", "").split()
        for line in EXAMPLE[2].splitlines()
        if re.match(r"  packed +\d", line)
    ]
    prompts = {row[1]: int(row[3]) for row in rows}
    assert prompts == {"300": 8, "360": 9}
    assert 18 * prompts["300"] + 15 * prompts["360"] == 279
    assert EXAMPLE[2].count("(131,072 bytes)") == 2
    assert "(1,572,864 bytes)" in EXAMPLE[2]
    assert 279 * 1_572_864 == 438_829_056


def test_the_table_of_what_decode_posts_is_what_compare_prints(
    run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = re.search(
        r"<!-- reads -->\n```console\n\$ onnxkvrename ([^\n]+)\n(.*?)```", TEXT, re.DOTALL
    )
    assert found is not None
    monkeypatch.chdir(ROOT)
    assert run(*shlex.split(found[1])).out.endswith(found[2])


def test_the_default_layout_is_documented() -> None:
    assert f"In 0.33 that is `{KV_CACHE_LAYOUTS[0]}`" in TEXT
