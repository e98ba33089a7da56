"""The JSON schema of `inspect`: real documents fit it, and its page has all fields."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from conftest import COMMAND, FIXTURES
from schema_tables import MARK, PAGE, SCHEMA, find_undescribed, render_tables
from schemas import validate

from onnxkvrename.report.documents import MODULES, load_document
from onnxkvrename.report.documents.inspect_json import DOCUMENT

PLAIN = FIXTURES / "plain"
PAGE_TEXT = (FIXTURES.parent / "docs" / PAGE).read_text("utf-8")
COMMANDS_PAGE = (FIXTURES.parent / "docs" / "commands.md").read_text("utf-8")


@pytest.mark.parametrize(
    "command",
    [(PLAIN,), (PLAIN, "--vllm", "--tokens", "8"), (FIXTURES / "README.md",)],
    ids=lambda command: Path(str(command[0])).name,
)
def test_documents_fit_the_schema(command: tuple[object, ...], run: Any) -> None:
    outcome = run("inspect", *command, "--format", "json")
    document = json.loads(outcome.out)
    assert document["exit_code"] == outcome.code
    validate(document)


@pytest.mark.parametrize(
    "spoilt",
    [{"exit_code": 3}, {"command": "rename"}, {"models": [{}]}, {"more": 1}, {"error": "no"}],
)
def test_the_schema_refuses_what_is_not_promised(spoilt: dict[str, object]) -> None:
    document = json.loads(DOCUMENT.render(DOCUMENT.empty, 0))
    validate(document)
    with pytest.raises(jsonschema.ValidationError):
        validate(document | spoilt)


def test_the_page_has_the_schema_and_its_records() -> None:
    assert PAGE_TEXT.count(MARK) == 1
    page = render_tables(PAGE_TEXT)
    assert all(f"| `{field}` |" in page for field in SCHEMA["properties"])
    headings = re.findall("^#+ (.*)", page, re.MULTILINE)
    anchors = {re.sub("[^a-z-]", "", each.lower().replace(" ", "-")) for each in headings}
    assert set(re.findall(r"\(#([^)]*)\)", page)) <= anchors
    assert len(anchors) == len(headings)


@pytest.mark.parametrize("command", [name for name in MODULES if name != "inspect"])
def test_the_page_of_the_commands_names_the_members_of_a_document(command: str) -> None:
    """Those that are not in every document."""
    (row,) = re.findall(rf"^\| `{command}` \| (.*) \|$", COMMANDS_PAGE, re.MULTILINE)
    assert set(load_document(command).empty._fields) <= set(re.findall(r"`(\w+)(?:\[\])?`", row))


@pytest.mark.skipif(not COMMAND.exists(), reason="onnxkvrename is not installed")
def test_the_example_of_the_page_reads_a_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    block = re.search(r"<!-- example -->\n```python\n(.*?)```", COMMANDS_PAGE, re.DOTALL)
    assert block is not None
    shutil.copytree(FIXTURES, tmp_path / "fixtures")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(COMMAND.parent), prepend=os.pathsep)
    exec(block[1], {})
    assert capsys.readouterr().out == re.findall("# (.*)", block[1])[-1] + "\n"


def test_every_field_has_a_meaning() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert find_undescribed(SCHEMA) == []
