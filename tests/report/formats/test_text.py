from __future__ import annotations

import re

import pytest

from onnxkvrename import Finding, ModelReport, WriteError
from onnxkvrename.report.formats import Span, build_file_result
from onnxkvrename.report.formats.text import (
    BOLD,
    CYAN,
    RED,
    YELLOW,
    build_error_line,
    render_finding_lines,
)


def report(*findings: Finding) -> ModelReport:
    return ModelReport("m.onnx", "m.onnx", "failed", findings=findings)


def fault(code: str = "KV101", severity: str = "error", name: str = "past_key.0") -> Finding:
    return Finding(code, severity, name, "is wrong", "mend it")  # type: ignore[arg-type]


def told(*reports: ModelReport, verbose: bool = False) -> list[str]:
    files = map(build_file_result, reports)
    return [line.text for line in render_finding_lines(files, verbose=verbose)]


def test_findings_that_are_alike_come_once_unless_verbose() -> None:
    many = report(*(fault(name=f"past_key.{n}") for n in range(5)), fault("KV105"))
    lines = told(many)
    assert lines == [
        "m.onnx: error KV101: past_key.0 is wrong; likewise 4 more",
        "  -> mend it; -v shows each",
        "m.onnx: error KV105: past_key.0 is wrong",
        "  -> mend it",
    ]
    assert len(told(many, verbose=True)) == 6 * 2


def test_errors_about_results_elsewhere_come_once() -> None:
    reports = [
        ModelReport(
            f"{name}.onnx",
            f"out/{name}.onnx",
            "failed",
            error=WriteError("needs 9 bytes", path=f"out/{name}.onnx", hint="free some"),
        )
        for name in "ab"
    ]
    (line,) = told(*reports)
    assert line.endswith(
        "for example, out/a.onnx: needs 9 bytes; likewise out/b.onnx (free some; -v shows each)"
    )


def test_of_findings_that_differ_the_first_three_are_shown() -> None:
    messages = ("is wrong", "is empty", "is missing", "is odd", "is new")
    lines = told(report(*(fault()._replace(message=message) for message in messages)))
    assert lines[4:] == [
        "m.onnx: error KV101: past_key.0 is missing",
        "  -> mend it",
        "m.onnx: error KV101: and 2 more like this",
        "  -> -v shows all",
    ]


def test_findings_with_different_numbers_are_not_alike() -> None:
    numbers = ("1.2e-05", "3.4e+02", "1.5MB")
    lines = told(report(*(fault()._replace(message=f"differs by {each}") for each in numbers)))
    assert lines[::2] == [f"m.onnx: error KV101: past_key.0 differs by {each}" for each in numbers]


def test_findings_of_one_code_stand_together() -> None:
    mixed = report(
        *(
            fault(code)._replace(message=message)
            for message in ("is wrong", "is empty")
            for code in ("KV106", "KV105")
        )
    )
    said = [line.split()[2] for line in told(mixed)[::2]]
    assert said == ["KV106:", "KV106:", "KV105:", "KV105:"]


def test_findings_are_painted_by_severity() -> None:
    both = report(fault("KV109", "warning"), fault())
    error, fix, warning, _ = render_finding_lines([build_file_result(both)], verbose=False)
    assert warning.spans[:3] == (
        Span("m.onnx", BOLD),
        Span(": "),
        Span("warning KV109", YELLOW),
    )
    assert fix.spans == (Span("  "), Span("->", CYAN), Span(" mend it"))
    assert error.spans[2] == Span("error KV101", RED)


@pytest.mark.parametrize(
    ("verbose", "order"),
    [(False, ["KV101", "KV102", "KV109"]), (True, ["KV101", "KV109", "KV102", "KV109"])],
)
def test_errors_come_first_of_all_files_or_of_each_if_verbose(
    verbose: bool, order: list[str]
) -> None:
    many = [report(fault("KV109", "warning"), fault(code)) for code in ("KV101", "KV102")]
    many = [each._replace(path=f"{n}.onnx") for n, each in enumerate(many)]
    assert re.findall("KV[0-9]+", "".join(told(*many, verbose=verbose))) == order


def test_an_error_is_one_line_for_stderr_whatever_it_names() -> None:
    line = build_error_line(WriteError("no", path="a\n::error::b", hint="mend"))
    assert line.err
    assert line.text == "error: a\\x0a::error::b: no (mend)"


def test_long_names_do_not_make_a_long_line() -> None:
    """Each part keeps its beginning and its end, and the short ones are whole."""
    long = "first" + "x" * 65536 + "last"
    line, _ = told(report(fault(name=long)))
    assert len(line) <= 400
    assert line.startswith("m.onnx: error KV101: firstxxx")
    assert line.endswith("xxxlast is wrong")
    assert " characters ...]" in line
    error = build_error_line(WriteError(long, path=long, hint=long))
    assert len(error.text) <= 400
    assert error.text.count("last") == error.text.count("first") == 3


def test_verbose_shows_all_but_what_no_reader_can_use() -> None:
    """Lists and names are whole with -v, up to some thousand characters."""
    names = ", ".join(f"past_key.{n}{'x' * 90}" for n in range(9))
    finding = Finding("KV101", "error", "", f"{names} are wrong", "mend them")
    line, _ = told(report(finding))
    assert len(line) < 500
    assert " characters ...]" in line
    assert told(report(finding), verbose=True) == [
        f"m.onnx: error KV101: {names} are wrong",
        "  -> mend them",
    ]
    line, _ = told(report(fault(name="x" * 65536)), verbose=True)
    assert len(line) <= 4000
