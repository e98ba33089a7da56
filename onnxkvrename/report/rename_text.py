"""Results as lines, a diff, JSON or GitHub's workflow commands; strings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from click import style

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, render_json_document, serialize_error, serialize_finding
from onnxkvrename.rules.plan import KvPair, PairSide
from onnxkvrename.rules.results import ModelReport, Report, SidecarReport
from onnxkvrename.rules.window_diff import format_layer_numbers

SCHEMA = "onnxkvrename.report/1"
STAMP_LABEL = "metadata onnxkvrename.kv_layout_sha256"
"""What a stamp is called in a diff."""
_MAX_SHOWN_FINDINGS = 3
_SEVERITY_COLORS = {"error": "red", "warning": "yellow"}


def escape_unprintable(text: str) -> str:
    """Text from a file, fit to be shown: what moves, hides or reorders is escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape_code_point(ord(char)) for char in text)


def _escape_code_point(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:
        code -= 0xDC00
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def render_changes(report: Report, *, look: bool) -> Iterator[str]:
    """``old -> new`` for each name that changed, to ``look`` for each that would.

    The model stands before it if there are several.
    """
    many = len(report.models) > 1
    for model in report.models:
        changes = model.status == ("would-rename" if look else "renamed")
        for old, new in model.name_map.items() if changes else ():
            line = f"{escape_unprintable(old)} -> {escape_unprintable(new)}"
            yield f"{escape_unprintable(model.path)}: {line}" if many else line


def render_diff(report: Report, *, color: bool) -> Iterator[str]:
    """The names that would go, and those that would come, as a diff shows lines."""
    for model in report.models:
        if model.status == "would-rename":
            yield _apply_style(f"--- {escape_unprintable(model.path)}", color, bold=True)
            yield _apply_style(f"+++ {escape_unprintable(model.output)}", color, bold=True)
            for old, new in model.name_map.items():
                yield _apply_style(f"-{escape_unprintable(old)}", color, fg="red")
                yield _apply_style(f"+{escape_unprintable(new)}", color, fg="green")
            if model.stamp is not None:
                yield _apply_style(f"-{STAMP_LABEL}", color, fg="red")


def render_states(report: Report, *, look: bool) -> Iterator[str]:
    """A line for each model: what became of it, or to ``look`` what would.

    An error has spoken for itself, and for the models that were left alone because of it.
    """
    for model in report.models:
        if model.error is None and (look or model.status != "would-rename"):
            yield f"{escape_unprintable(model.path)}: {format_model_state(model, look=look)}{_format_destination(model)}"
    yield from render_sidecar_states(report)


def render_sidecar_states(report: Report) -> Iterator[str]:
    """A line for each text that changed, or would; none if a model failed."""
    for text in report.sidecars:
        if text.status in ("renamed", "would-rename") and not any(m.failed for m in report.models):
            yield f"{escape_unprintable(text.path)}: {_format_sidecar_state(text)}{_format_destination(text)}"


def _format_sidecar_state(text: SidecarReport) -> str:
    verb = "would change" if text.status == "would-rename" else "changed"
    return f"{text.changed} names {verb}"


def _format_destination(item: ModelReport | SidecarReport) -> str:
    """Where a result went, or would go, if not back to its source."""
    moved = item.output != item.path and item.status in ("renamed", "would-rename")
    return f" -> {escape_unprintable(item.output)}" if moved else ""


def format_model_state(model: ModelReport, *, look: bool) -> str:
    """What became of a model, or to ``look`` would, in a few words."""
    if model.status == "failed":
        return "failed: nothing was written"
    if model.status == "would-rename":
        return _format_change(model, "would change") if look else "left alone: another model failed"
    if model.status == "renamed":
        return _format_change(model, "changed")
    if not model.pairs:
        return "unchanged: no KV buffer in it"
    tokens = {end.token for pair in model.pairs for end in pair.sides}
    if model.name_map:
        return f"unchanged: {escape_unprintable(model.output)} is up to date"
    carried = ", ".join(sorted(escape_unprintable(token) for token in tokens if token))
    return f"unchanged: every buffer carries {carried}" if carried else "unchanged: no token in it"


def _format_change(model: ModelReport, verb: str) -> str:
    """What changes in a model: names, and the stamp of a layout that they make void."""
    if model.stamp:
        return "stamped"
    said = [f"{len(model.name_map)} names {verb}"] if model.name_map else []
    return "; ".join([*said, *(["its stamp goes"] if model.stamp is not None else [])])


def format_layer_ranges(layers: Sequence[int]) -> str:
    """``layers 0-5, 7``, of numbers in order."""
    text = format_layer_numbers(layers)
    return f"layer {text}" if len(layers) == 1 else f"layers {text}"


def render_findings(model: ModelReport, *, color: bool, verbose: bool) -> Iterator[str]:
    """One line for each finding and for the error of a model.

    What is wrong with one layer is mostly wrong with all of them, so those of one code
    stand together, and only the first few are given, unless verbose.
    """
    seen: Counter[str] = Counter()
    order = list(dict.fromkeys(found.code for found in model.findings))
    for found in sorted(model.findings, key=lambda found: order.index(found.code)):
        seen[found.code] += 1
        where = _apply_style(escape_unprintable(model.path), color, bold=True)
        code = _apply_style(
            f"{found.severity} {found.code}", color, fg=_SEVERITY_COLORS[found.severity]
        )
        if verbose or seen[found.code] <= _MAX_SHOWN_FINDINGS:
            yield f"{where}: {code}: {_format_finding(found)}"
        elif seen[found.code] == _MAX_SHOWN_FINDINGS + 1:
            more = sum(other.code == found.code for other in model.findings) - _MAX_SHOWN_FINDINGS
            yield f"{where}: {code}: and {more} more like this (-v shows all)"
    if model.error is not None:
        yield format_error(model.error, color=color)


def format_error(fault: KvRenameError, *, color: bool) -> str:
    """The one line that says what is wrong, where, and how to mend it."""
    return f"{_apply_style('error', color, fg='red', bold=True)}: {escape_unprintable(str(fault))}"


def _format_finding(found: Finding) -> str:
    about = f"{found.name} {found.message}" if found.name else found.message
    return escape_unprintable(f"{about} ({found.hint})")


def report_to_json(
    report: Report, command: str, code: int, fault: KvRenameError | None = None
) -> str:
    """One document, held against ``schemas/report-1.json`` by the tests."""
    counts = {"renamed": 0, "unchanged": 0, "would-rename": 0, "failed": 0}
    for model in report.models:
        counts[model.status] += 1
    models = [_serialize_model(model) for model in report.models]
    texts = [text._asdict() for text in report.sidecars]
    return render_json_document(
        SCHEMA, command, code, fault, models=models, texts=texts, summary=counts
    )


def _serialize_model(model: ModelReport) -> dict[str, Any]:
    return {
        "path": model.path,
        "output": model.output,
        "status": model.status,
        "pairs": [serialize_pair(pair) for pair in model.pairs],
        "kept": [{"name": kept.name, "reason": kept.reason} for kept in model.unchanged_names],
        "unstamped": model.stamp == "",
        "findings": [serialize_finding(found) for found in model.findings],
        "error": serialize_error(model.error),
    }


def serialize_pair(pair: KvPair) -> dict[str, Any]:
    """A pair for programs."""
    return {
        "layer": pair.layer,
        "buffer": pair.buffer,
        "kind": pair.kind,
        "scope": pair.scope,
        "input": _serialize_side(pair.input),
        "output": _serialize_side(pair.output),
    }


def _serialize_side(end: PairSide | None) -> dict[str, str] | None:
    return None if end is None else {"old": end.old_name, "new": end.new_name}


def render_github_report(report: Report, *, look: bool, judge: bool, quiet: bool) -> Iterator[str]:
    """Workflow commands that GitHub shows beside the files.

    To ``judge``, a name that would change is an error. No name may end a command,
    begin another, or stop later ones:
    https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
    """
    for model in report.models:
        yield from render_workflow_commands(model)
        if model.error is not None:
            continue
        if judge and model.status == "would-rename":
            title = {"file": model.path, "title": "names"}
            yield format_workflow_command("error", title, format_model_state(model, look=look))
        elif not quiet:
            title = {"file": model.path, "title": model.status}
            yield format_workflow_command("notice", title, format_model_state(model, look=look))
    for text in report.sidecars if judge else ():
        if text.status == "would-rename":
            yield format_workflow_command(
                "error", {"file": text.path, "title": "names"}, _format_sidecar_state(text)
            )


def render_workflow_commands(model: ModelReport) -> Iterator[str]:
    """The findings and the error of a model as workflow commands."""
    for found in model.findings:
        title = {"file": model.path, "title": found.code}
        yield format_workflow_command(found.severity, title, _format_finding(found))
    if model.error is not None:
        yield format_workflow_command(
            "error", {"file": model.path, "title": "failed"}, escape_unprintable(str(model.error))
        )


def format_workflow_command(kind: str, properties: Mapping[str, str], message: str) -> str:
    """One workflow command, its parts escaped."""
    given = ",".join(
        f"{key}={_escape_command_text(escape_unprintable(value)).replace(':', '%3A').replace(',', '%2C')}"
        for key, value in properties.items()
    )
    return f"::{kind} {given}::{_escape_command_text(message)}"


def _escape_command_text(text: str) -> str:
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return escaped.replace("##[", "## [")


def _apply_style(text: str, color: bool, **how: Any) -> str:
    return style(text, **how) if color else text
