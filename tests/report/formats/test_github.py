from __future__ import annotations

import pytest

from onnxkvrename import Finding
from onnxkvrename.report.formats import Answer, FileResult
from onnxkvrename.report.formats.github import FORMAT, format_workflow_command


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("x\n::error::y", "x\\x0a::error::y"),
        ("##[stop-commands]x", "#\\x23[stop-commands]x"),
        ("100%0A", "100%250A"),
    ],
)
def test_a_name_cannot_give_github_commands_of_its_own(name: str, shown: str) -> None:
    finding = Finding("KV101", "error", name, "is wrong", "mend it")
    answer = Answer("rename", 1, str, files=(FileResult("m.onnx", (finding,)),))
    (line,) = FORMAT.render(answer, None)
    assert line.text == f"::error file=m.onnx,title=KV101::{shown} is wrong (mend it)"


def test_a_path_cannot_end_the_properties_of_a_command() -> None:
    line = format_workflow_command("error", "m", title="t", path="a:b,c%##[x\r")
    assert line == "::error file=a%3Ab%2Cc%25#\\x23[x\\x0d,title=t::m"


def test_an_annotation_is_short_and_never_of_another_file() -> None:
    """A path is whole or left out; a long name loses its middle."""
    finding = Finding("KV101", "error", "n" * 65536, "is wrong", "mend it")
    for path, file in (("m.onnx", "file=m.onnx,"), ("d/" * 2000, "")):
        answer = Answer("rename", 1, str, files=(FileResult(path, (finding,)),))
        (line,) = FORMAT.render(answer, None)
        assert len(line.text.partition("KV101::")[2]) <= 400
        assert line.text.startswith(f"::error {file}title=KV101::nnn")
        assert line.text.endswith("nnn is wrong (mend it)")


def test_a_long_path_takes_nothing_from_an_annotation() -> None:
    message = "8 names carry a different token than vllmKvCache, " * 5
    path = "d/" * 105
    line = format_workflow_command("error", message, title="KV204", path=path)
    assert line == f"::error file={path},title=KV204::{message}"


def test_an_annotation_keeps_the_reason() -> None:
    """A message and its hint stay whole, however long their line is."""
    finding = Finding("KV101", "error", "", "it is wrong " * 25, "mend it " * 25)
    answer = Answer("rename", 1, str, files=(FileResult("m.onnx", (finding,)),))
    (line,) = FORMAT.render(answer, None)
    assert line.text.endswith(f"::{finding.message} ({finding.hint})")
