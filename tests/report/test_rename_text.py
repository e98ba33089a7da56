from __future__ import annotations

from pathlib import Path

import pytest

from onnxkvrename import Finding, ModelReport, Report, WriteError, rename
from onnxkvrename.report.formats import load_format
from onnxkvrename.report.rename_text import (
    build_rename_answer,
    format_model_state,
    render_changes,
    render_rename,
    render_states,
)
from onnxkvrename.rules.request import Request
from onnxkvrename.rules.results import SidecarReport, Status


def report(*findings: Finding, path: str = "m.onnx", **parts: object) -> ModelReport:
    return ModelReport(path, path, "failed", findings=findings, **parts)  # type: ignore[arg-type]


def fault(code: str = "KV101", severity: str = "error", name: str = "past_key.0") -> Finding:
    return Finding(code, severity, name, "is wrong", "mend it")  # type: ignore[arg-type]


@pytest.fixture
def ahead(decoder: Path) -> ModelReport:
    """Return the report of a dry run of the decoder, named m.onnx here."""
    found = rename(decoder, "VLLM", dry_run=True)
    return found._replace(path="m.onnx", output="m.onnx")


def states(report: Report, *, dry_run: bool, verbose: bool = False) -> list[str]:
    """Return what a pipe gets of each model."""
    lines = render_states(report, None, dry_run=dry_run, verbose=verbose)
    return [line.text for line in lines]


def annotated(report: Report, request: Request) -> list[str]:
    """Return what GitHub gets."""
    answer = build_rename_answer(report, request)
    return [line.text for line in load_format("github").render(answer, None)]


def test_lines_say_old_and_new(ahead: ModelReport) -> None:
    lines = list(render_changes(Report((ahead,)), dry_run=True))
    assert lines[0] == "past_key.0 -> past_key.0_VLLM"
    assert lines[1] == "past_key.0_RetainedState -> past_key.0_VLLM_RetainedState"
    assert len(lines) == 8


def test_of_several_models_each_line_names_its_own(ahead: ModelReport) -> None:
    other = ahead._replace(path="n.onnx")
    lines = list(render_changes(Report((ahead, other)), dry_run=True))
    assert lines[0] == "m.onnx: past_key.0 -> past_key.0_VLLM"
    assert lines[8] == "n.onnx: past_key.0 -> past_key.0_VLLM"


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
    assert len(list(render_changes(report, dry_run=look))) == told


def test_a_state_is_a_few_words(decoder: Path, ahead: ModelReport) -> None:
    assert format_model_state(ahead) == "8 names would change"
    one_name = dict(list(ahead.name_map.items())[:1])
    assert format_model_state(ahead._replace(name_map=one_name)) == "1 name would change"
    unchanged = ahead._replace(status="unchanged")
    assert format_model_state(unchanged) == "unchanged: m.onnx is already up to date"
    assert format_model_state(unchanged._replace(pairs=())) == "unchanged: no KV buffer"
    assert format_model_state(rename(decoder, "VLLM")) == "8 names changed"
    assert format_model_state(rename(decoder, "VLLM")) == "unchanged: every buffer carries VLLM"
    rename(decoder, strip=True)
    assert format_model_state(rename(decoder, strip=True)) == "unchanged: no token"


def test_only_a_refusal_says_that_nothing_was_written(ahead: ModelReport) -> None:
    """A dry run and --check never write."""
    other = ahead._replace(path="n.onnx", output="n.onnx")
    failed = Report((report(fault()), ahead, other))
    assert states(failed, dry_run=False) == [
        "m.onnx: failed: nothing was written",
        "3 models: 0 renamed, 0 unchanged, 1 failed, 2 left alone (another model failed); "
        "nothing was written",
    ]
    assert states(failed, dry_run=True) == [
        "m.onnx: failed",
        "m.onnx: 8 names would change",
        "n.onnx: 8 names would change",
        "3 models: 2 would change, 0 unchanged, 1 failed; 8 KV buffers",
    ]


def test_what_was_not_written_points_nowhere(ahead: ModelReport) -> None:
    bad = ahead._replace(status="failed", findings=(fault(),))
    found = Report(
        tuple(bad._replace(path=f"set/{n}.onnx", output=f"new/{n}.onnx") for n in range(9))
    )
    assert states(found, dry_run=False) == [
        "9 models: 0 renamed, 0 unchanged, 9 failed; nothing was written",
    ]


def test_states_leave_out_what_an_error_has_said(ahead: ModelReport) -> None:
    told = Report((ahead, report(error=WriteError("no"))))
    assert states(told, dry_run=True) == [
        "m.onnx: 8 names would change",
        "2 models: 1 would change, 0 unchanged, 1 failed; 4 KV buffers",
    ]


def test_many_models_with_one_outcome_are_one_line(ahead: ModelReport) -> None:
    same = [ahead._replace(path=f"set/{n}.onnx", output=f"new/{n}.onnx") for n in range(9)]
    done = ahead._replace(status="unchanged", name_map={})
    paths = [f"set/{n}.onnx" for n in range(9, 12)]
    told = Report((*same, *(done._replace(path=path, output=path) for path in paths)))
    assert states(told, dry_run=True) == [
        "9 files in set (first: 0.onnx): 8 names would change in each -> new",
        "3 files in set (first: 9.onnx): unchanged: no token",
        "12 models: 9 would change, 3 unchanged; 48 KV buffers",
    ]
    each = states(told, dry_run=True, verbose=True)
    assert each[8:10] == [
        "set/8.onnx: 8 names would change -> new/8.onnx",
        "set/9.onnx: unchanged: no token",
    ]
    assert len(each) == 13


def test_a_quiet_check_says_why_it_exits_with_1(ahead: ModelReport) -> None:
    """No finding does."""
    done = ahead._replace(status="unchanged")
    told = Report((ahead, done), (TEXT,))
    quiet = Request(quiet=True, check=True)
    (line,) = render_rename(told, quiet, None)
    assert (line.text, line.err) == ("1 of 2 models and 1 of 1 sidecar would change", True)
    assert not list(render_rename(Report((done,)), quiet, None))
    assert not list(render_rename(told, quiet._replace(check=False, dry_run=True), None))


TEXT = SidecarReport("p.json", "new/p.json", "would-rename", 4)


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("would-rename", ["p.json: 4 names would change -> new/p.json"]),
        ("renamed", ["p.json: 4 names changed -> new/p.json"]),
        ("unchanged", []),
        ("failed", []),
    ],
)
def test_a_text_that_changes_gets_a_line(
    status: Status, told: list[str], ahead: ModelReport
) -> None:
    texts = (TEXT._replace(status=status),)
    dry_run = status != "renamed"
    first, *rest = states(Report((ahead,), texts), dry_run=dry_run)
    assert (first, rest) == ("m.onnx: 8 names would change", told)
    failed = ahead._replace(findings=(fault(),), status="failed")
    assert len(states(Report((failed,), texts), dry_run=True)) == 1


def test_github_is_told_of_a_text_that_would_change(ahead: ModelReport) -> None:
    report = Report((ahead._replace(status="unchanged"),), (TEXT,))
    *_, last = annotated(report, Request(check=True, quiet=True))
    assert last == "::error file=p.json,title=names::4 names would change"
    assert not annotated(report, Request(dry_run=True, quiet=True))


def test_github_gets_a_command_for_each_finding_and_each_model(ahead: ModelReport) -> None:
    models = Report((report(fault(), error=WriteError("no", path="m.onnx")), ahead))
    assert annotated(models, Request(dry_run=True)) == [
        "::error file=m.onnx,title=KV101::past_key.0 is wrong (mend it)",
        "::error file=m.onnx,title=failed::m.onnx: no",
        "::notice file=m.onnx,title=would-rename::8 names would change",
        "::notice title=total::2 models: 1 would change, 0 unchanged, 1 failed; 4 KV buffers",
    ]
    *_, pending, _ = annotated(models, Request(token="VLLM", check=True))
    assert pending == (
        "::error file=m.onnx,title=KV token missing::8 of 8 names lack VLLM (first: past_key.0)"
    )


def test_github_hears_of_unchanged_models_by_their_number(ahead: ModelReport) -> None:
    done = ahead._replace(status="unchanged", pairs=())
    assert annotated(Report((done,)), Request()) == [
        "::notice file=m.onnx,title=unchanged::unchanged: no KV buffer"
    ]
    assert annotated(Report((done, done)), Request()) == [
        "::notice title=total::2 models: 0 renamed, 2 unchanged; 0 KV buffers"
    ]
