from __future__ import annotations

import json
from pathlib import Path

import pytest

from onnxkvrename import Finding, ModelReport, Report, WriteError, rename
from onnxkvrename.report.rename_text import (
    escape_unprintable,
    format_error,
    format_model_state,
    format_workflow_command,
    render_changes,
    render_diff,
    render_findings,
    render_github_report,
    render_states,
    report_to_json,
)
from onnxkvrename.rules.results import SidecarReport, Status


def report(*findings: Finding, path: str = "m.onnx", **parts: object) -> ModelReport:
    return ModelReport(path, path, "failed", findings=findings, **parts)  # type: ignore[arg-type]


def fault(code: str = "KV101", severity: str = "error", name: str = "past_key.0") -> Finding:
    return Finding(code, severity, name, "is wrong", "mend it")  # type: ignore[arg-type]


@pytest.fixture
def ahead(decoder: Path) -> ModelReport:
    """What would become of the decoder, here called m.onnx."""
    found = rename(decoder, "VLLM", dry_run=True)
    return found._replace(path="m.onnx", output="m.onnx")


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


def test_lines_say_old_and_new(ahead: ModelReport) -> None:
    lines = list(render_changes(Report((ahead,)), look=True))
    assert lines[0] == "past_key.0 -> past_key.0_VLLM"
    assert lines[1] == "past_key.0_RetainedState -> past_key.0_VLLM_RetainedState"
    assert len(lines) == 8


def test_of_several_models_each_line_names_its_own(ahead: ModelReport) -> None:
    other = ahead._replace(path="n\n.onnx")
    lines = list(render_changes(Report((ahead, other)), look=True))
    assert lines[0] == "m.onnx: past_key.0 -> past_key.0_VLLM"
    assert lines[8] == "n\\x0a.onnx: past_key.0 -> past_key.0_VLLM"


@pytest.mark.parametrize(
    ("status", "look", "told"),
    [
        ("renamed", False, 8),
        ("renamed", True, 0),
        ("would-rename", False, 0),
        ("would-rename", True, 8),
        ("unchanged", True, 0),
        ("failed", False, 0),
    ],
)
def test_names_that_did_not_change_are_not_told(
    status: Status, look: bool, told: int, ahead: ModelReport
) -> None:
    report = Report((ahead._replace(status=status),))
    assert len(list(render_changes(report, look=look))) == told


def test_a_diff_has_the_names_that_go_and_come(ahead: ModelReport) -> None:
    lines = list(render_diff(Report((ahead,)), color=False))
    assert lines[:4] == ["--- m.onnx", "+++ m.onnx", "-past_key.0", "+past_key.0_VLLM"]
    assert len(lines) == 2 + 2 * 8
    assert not list(render_diff(Report((ahead._replace(status="unchanged"),)), color=False))
    painted = list(render_diff(Report((ahead,)), color=True))
    assert painted[2] == "\x1b[31m-past_key.0\x1b[0m"


def test_a_state_is_a_few_words(decoder: Path, ahead: ModelReport) -> None:
    assert format_model_state(ahead, look=True) == "8 names would change"
    assert (
        format_model_state(ahead._replace(status="failed"), look=True)
        == "failed: nothing was written"
    )
    assert (
        format_model_state(ahead._replace(status="unchanged"), look=True)
        == "unchanged: m.onnx is up to date"
    )
    assert format_model_state(rename(decoder, "VLLM"), look=True) == "8 names changed"
    again = rename(decoder, "VLLM")
    assert format_model_state(again, look=True) == "unchanged: every buffer carries VLLM"
    rename(decoder, strip=True)
    assert format_model_state(rename(decoder, strip=True), look=True) == "unchanged: no token in it"
    assert format_model_state(ahead._replace(status="unchanged", pairs=()), look=True).endswith(
        "no KV buffer in it"
    )


def test_states_leave_out_what_an_error_has_said(ahead: ModelReport) -> None:
    told = Report((ahead, report(error=WriteError("no"))))
    assert list(render_states(told, look=True)) == ["m.onnx: 8 names would change"]


TEXT = SidecarReport("p\n.json", "new/p.json", "would-rename", 4)


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("would-rename", ["p\\x0a.json: 4 names would change -> new/p.json"]),
        ("renamed", ["p\\x0a.json: 4 names changed -> new/p.json"]),
        ("unchanged", []),
        ("failed", []),
    ],
)
def test_a_text_that_changes_gets_a_line(
    status: Status, told: list[str], ahead: ModelReport
) -> None:
    texts = (TEXT._replace(status=status),)
    first, *rest = render_states(Report((ahead,), texts), look=True)
    assert (first, rest) == ("m.onnx: 8 names would change", told)
    failed = ahead._replace(findings=(fault(),), status="failed")
    assert len(list(render_states(Report((failed,), texts), look=True))) == 1


def test_github_is_told_of_a_text_that_would_change(ahead: ModelReport) -> None:
    report = Report((ahead._replace(status="unchanged"),), (TEXT,))
    *_, last = render_github_report(report, look=True, judge=True, quiet=True)
    assert last == "::error file=p\\x0a.json,title=names::4 names would change"
    assert not list(render_github_report(report, look=True, judge=False, quiet=True))


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


def test_json_has_the_names_as_they_are(ahead: ModelReport) -> None:
    hostile = ahead._replace(path="\x1b[2J\udcff")
    document = json.loads(report_to_json(Report((hostile,)), "rename", 0))
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
    assert report_to_json(Report(()), "rename", 2).isascii()


def test_github_gets_a_command_for_each_finding_and_each_model(ahead: ModelReport) -> None:
    models = Report((report(fault(), error=WriteError("no", path="m.onnx")), ahead))
    assert list(render_github_report(models, look=True, judge=False, quiet=False)) == [
        "::error file=m.onnx,title=KV101::past_key.0 is wrong (mend it)",
        "::error file=m.onnx,title=failed::m.onnx: no",
        "::notice file=m.onnx,title=would-rename::8 names would change",
    ]
    *_, last = render_github_report(models, look=True, judge=True, quiet=False)
    assert last == "::error file=m.onnx,title=names::8 names would change"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("x\n::error::y", "x\\x0a::error::y"),
        ("##[stop-commands]x", "## [stop-commands]x"),
        ("100%0A", "100%250A"),
    ],
)
def test_a_name_cannot_give_github_commands_of_its_own(name: str, shown: str) -> None:
    (line, _) = render_github_report(
        Report((report(fault(name=name)),)), look=True, judge=False, quiet=False
    )
    assert line == f"::error file=m.onnx,title=KV101::{shown} is wrong (mend it)"


def test_a_path_cannot_end_the_properties_of_a_command() -> None:
    line = format_workflow_command("error", {"file": "a:b,c%##[x\r"}, "m")
    assert line == "::error file=a%3Ab%2Cc%25## [x\\x0d::m"
