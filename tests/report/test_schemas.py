"""The JSON schemas: real documents fit them, and docs/schemas.md shows all fields."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import COMMAND, FIXTURES
from schemas import load_schema
from schemas_page import COMMANDS, PAGE, find_undescribed, list_schema_files, render_page

jsonschema = pytest.importorskip("jsonschema")

PLAIN = FIXTURES / "plain"
DECODER = PLAIN / "decoder.onnx"
DOCUMENTS: dict[str, list[tuple[object, ...]]] = {
    "report-1.json": [
        (PLAIN / "windows", "--prefix", "VLLM", "--check"),
        (PLAIN / "vlm_dual" / "encoder.onnx", "--prefix", "VLLM"),
        (PLAIN / "none.onnx", "--prefix", "VLLM"),
    ],
    "verify-1.json": [("verify", PLAIN / "vlm_dual"), ("verify", PLAIN / "none.onnx")],
    "inspect-1.json": [("inspect", PLAIN), ("inspect", FIXTURES / "README.md")],
    "check-consumer-1.json": [
        ("check-consumer", PLAIN),
        ("check-consumer", DECODER, "--target", "none"),
    ],
    "compare-1.json": [
        ("compare", DECODER, FIXTURES / "VLLM" / "decoder.onnx", "--dim", "ctx_len=32"),
        ("compare", DECODER, PLAIN / "none.onnx"),
    ],
    "manifest-1.json": [
        ("manifest", PLAIN / "hybrid.onnx"),
        ("manifest", PLAIN / "windows"),
        ("manifest", PLAIN / "none.onnx"),
    ],
    "pairs-1.json": [("pairs", DECODER), ("pairs", PLAIN / "none.onnx")],
    "recover-1.json": [("recover", PLAIN)],
}


@pytest.mark.parametrize(
    ("file", "command"),
    [(file, command) for file, commands in DOCUMENTS.items() for command in commands],
    ids=lambda value: value if isinstance(value, str) else Path(str(value[0])).name,
)
def test_documents_fit_their_schema(file: str, command: tuple[object, ...], run: Any) -> None:
    outcome = run(*command, "--format", "json")
    document = json.loads(outcome.out)
    assert document["schema"] == f"onnxkvrename.{file.replace('-1.json', '/1')}"
    assert document["exit_code"] == outcome.code
    jsonschema.Draft202012Validator(load_schema(file)).validate(document)


def test_what_vllm_makes_of_a_layout_fits_its_schema(run: Any) -> None:
    outcome = run("manifest", DECODER, "--format", "json", "--block-size", "16", "--tokens", "8")
    document = json.loads(outcome.out)
    jsonschema.Draft202012Validator(load_schema("projection-1.json")).validate(document["vllm"])


def test_the_page_has_every_schema_and_is_current() -> None:
    assert sorted(COMMANDS) == list_schema_files()
    text = PAGE.read_text("utf-8")
    assert render_page(text) == text, "python tests/schemas_page.py writes it"


@pytest.mark.skipif(not COMMAND.exists(), reason="onnxkvrename is not installed")
def test_the_example_of_the_page_reads_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.search(r"<!-- example -->\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert block is not None
    shutil.copytree(FIXTURES, tmp_path / "fixtures")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(COMMAND.parent), prepend=os.pathsep)
    exec(block[1], {})
    assert capsys.readouterr().out == re.findall("# (.*)", block[1])[-1] + "\n"


@pytest.mark.parametrize("file", list_schema_files())
def test_every_field_has_a_meaning(file: str) -> None:
    schema = load_schema(file)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert find_undescribed(schema) == []
