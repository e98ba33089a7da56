from __future__ import annotations

import pytest

from onnxkvrename import Finding, ModelReport, WriteError
from onnxkvrename.report.formats.text import escape_unprintable, format_error, render_findings


def report(*findings: Finding) -> ModelReport:
    return ModelReport("m.onnx", "m.onnx", "failed", findings=findings)


def fault(code: str = "KV101", severity: str = "error", name: str = "past_key.0") -> Finding:
    return Finding(code, severity, name, "is wrong", "mend it")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("past_key.0 é ✓ [red] :smiley: \\", "past_key.0 é ✓ [red] :smiley: \\"),
        ("a\nb\r\t", "a\\x0ab\\x0d\\x09"),
        ("\x1b[2J\x07\x9b", "\\x1b[2J\\x07\\x9b"),
        ("\u202eab\u2066\u200b", "\\u202eab\\u2066\\u200b"),
        ("\U000e0001", "\\U000e0001"),
        (b"\xff\x80".decode("utf-8", "surrogateescape"), "\\xff\\x80"),
        ("\ud800", "\\ud800"),
        ("\u2028\xa0", "\\u2028\\xa0"),
    ],
)
def test_what_moves_hides_or_reorders_is_escaped(text: str, shown: str) -> None:
    assert escape_unprintable(text) == shown


def test_of_each_code_a_few_findings_are_shown_unless_verbose() -> None:
    many = report(*(fault(name=f"past_key.{n}") for n in range(5)), fault("KV105"))
    lines = list(render_findings(many, color=False, verbose=False))
    assert lines == [
        *(f"m.onnx: error KV101: past_key.{n} is wrong (mend it)" for n in range(3)),
        "m.onnx: error KV101: and 2 more like this (-v shows all)",
        "m.onnx: error KV105: past_key.0 is wrong (mend it)",
    ]
    assert len(list(render_findings(many, color=False, verbose=True))) == 6


def test_findings_of_one_code_stand_together() -> None:
    mixed = report(
        *(fault(code, name=f"past_key.{at}") for at in range(2) for code in ("KV106", "KV105"))
    )
    said = [line.split()[2] for line in render_findings(mixed, color=False, verbose=False)]
    assert said == ["KV106:", "KV106:", "KV105:", "KV105:"]


def test_findings_are_painted_by_severity() -> None:
    both = report(fault("KV109", "warning"), fault())
    warning, error = render_findings(both, color=True, verbose=False)
    assert "\x1b[33mwarning KV109" in warning
    assert "\x1b[31merror KV101" in error


def test_an_error_is_one_line_whatever_it_names() -> None:
    line = format_error(WriteError("no", path="a\n::error::b", hint="mend"), color=False)
    assert line == "error: a\\x0a::error::b: no (mend)"
