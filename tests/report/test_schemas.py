"""The JSON schemas: real documents fit them, and the page about them has all fields."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import COMMAND, FIXTURES
from schema_tables import MARK, PAGE, SCHEMAS, find_undescribed, render_tables

jsonschema = pytest.importorskip("jsonschema")

PLAIN = FIXTURES / "plain"
DECODER = PLAIN / "decoder.onnx"
PAGE_TEXT = (FIXTURES.parent / "docs" / PAGE).read_text("utf-8")
DOCUMENTS: dict[str, list[tuple[object, ...]]] = {
    "report-1": [
        (PLAIN / "windows", "--prefix", "VLLM", "--check"),
        (PLAIN / "vlm_dual" / "encoder.onnx", "--prefix", "VLLM"),
        (PLAIN / "none.onnx", "--prefix", "VLLM"),
    ],
    "verify-1": [("verify", PLAIN / "vlm_dual"), ("verify", PLAIN / "none.onnx")],
    "inspect-2": [
        ("inspect", PLAIN),
        ("inspect", PLAIN, "--vllm", "--tokens", "8"),
        ("inspect", FIXTURES / "README.md"),
    ],
    "check-consumer-1": [
        ("check-consumer", PLAIN),
        ("check-consumer", DECODER, "--target", "none"),
    ],
    "compare-1": [
        ("compare", DECODER, FIXTURES / "VLLM" / "decoder.onnx", "--dim", "ctx_len=32"),
        ("compare", DECODER, PLAIN / "none.onnx"),
    ],
    "manifest-1": [
        ("manifest", PLAIN / "hybrid.onnx"),
        ("manifest", PLAIN / "windows"),
        ("manifest", PLAIN / "none.onnx"),
    ],
    "pairs-1": [("pairs", DECODER), ("pairs", PLAIN / "none.onnx")],
}


@pytest.mark.parametrize(
    ("name", "command"),
    [(name, command) for name, commands in DOCUMENTS.items() for command in commands],
    ids=lambda value: value if isinstance(value, str) else Path(str(value[0])).name,
)
def test_documents_fit_their_schema(name: str, command: tuple[object, ...], run: Any) -> None:
    outcome = run(*command, "--format", "json")
    document = json.loads(outcome.out)
    assert document["schema"] == "onnxkvrename.{}/{}".format(*name.rsplit("-", 1))
    assert document["exit_code"] == outcome.code
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(document)


def test_the_page_has_every_schema_and_its_records() -> None:
    assert MARK.findall(PAGE_TEXT) == [*SCHEMAS, ""]
    page = render_tables(PAGE_TEXT)
    for schema in SCHEMAS.values():
        assert all(f"| `{field}` |" in page for field in schema["properties"])
    headings = re.findall("^#+ (.*)", page, re.MULTILINE)
    anchors = {re.sub("[^a-z-]", "", each.lower().replace(" ", "-")) for each in headings}
    assert set(re.findall(r"\(#([^)]*)\)", page)) <= anchors
    assert len(anchors) == len(headings)


@pytest.mark.skipif(not COMMAND.exists(), reason="onnxkvrename is not installed")
def test_the_example_of_the_page_reads_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.search(r"<!-- example -->\n```python\n(.*?)```", PAGE_TEXT, re.DOTALL)
    assert block is not None
    shutil.copytree(FIXTURES, tmp_path / "fixtures")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(COMMAND.parent), prepend=os.pathsep)
    exec(block[1], {})
    assert capsys.readouterr().out == re.findall("# (.*)", block[1])[-1] + "\n"


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_field_has_a_meaning(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    assert find_undescribed(SCHEMAS[name]) == []
