"""A rename as text: changed names, a diff, a line for each model; strings out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from onnxkvrename.report.formats import (
    Answer,
    FileResult,
    Line,
    Note,
    Screen,
    Span,
    build_file_result,
    build_line,
)
from onnxkvrename.report.formats.text import BOLD, GREEN, RED, render_finding_lines
from onnxkvrename.report.inert import escape_text
from onnxkvrename.rules.results import ModelReport, Report, SidecarReport

STAMP_LABEL = "metadata onnxkvrename.kv_layout_sha256"
"""The name of a stamp in a diff."""


class RenameView(NamedTuple):
    """Settings for showing a rename.

    Attributes:
        quiet: Show findings and errors only.
        verbose: Show every finding and every layer.
        show_diff: Show the names as a diff.
        dry_run: Nothing was written, so report what would change.
        check_only: Report each name that would change as an error.
    """

    quiet: bool = False
    verbose: bool = False
    show_diff: bool = False
    dry_run: bool = False
    check_only: bool = False


def build_rename_answer(report: Report, view: RenameView) -> Answer:
    """Return the answer of a rename.

    Args:
        report: What became of the models and sidecars.
        view: How to show it.
    """
    code = report.compute_exit_code(check_only=view.check_only)
    return Answer(
        "rename",
        code,
        render_json=partial(_render_json, report, code),
        render_text=partial(render_rename, report, view),
        files=tuple(_list_files(report, view)),
    )


def _render_json(report: Report, code: int) -> str:
    from onnxkvrename.report.documents.rename_json import report_to_json  # not for text

    return report_to_json(report, "rename", code)


def _list_files(report: Report, view: RenameView) -> Iterator[FileResult]:
    for model in report.models:
        yield build_file_result(model, *_list_model_notes(model, view))
    for sidecar in report.sidecars if view.check_only else ():
        if sidecar.status == "would-rename":
            note = Note("names", _format_sidecar_state(sidecar), sidecar.path, "error")
            yield FileResult(sidecar.path, notes=(note,))


def _list_model_notes(model: ModelReport, view: RenameView) -> Iterator[Note]:
    if model.error is not None:
        return
    state = format_model_state(model, dry_run=view.dry_run)
    if view.check_only and model.status == "would-rename":
        yield Note("names", state, model.path, "error")
    elif not view.quiet:
        yield Note(model.status, state, model.path)


def render_rename(report: Report, view: RenameView, screen: Screen) -> Iterator[Line]:
    """Yield findings, then what changed: names for a pipe, a summary for a terminal.

    Args:
        report: What became of the models and sidecars.
        view: How to show it.
        screen: Where it is shown.
    """
    yield from render_finding_lines(report.models, verbose=view.verbose)
    if view.quiet:
        return
    if screen.is_terminal and not view.show_diff:
        from onnxkvrename.report.rename_rich import draw_report  # rich only for terminals

        yield from draw_report(
            report, dry_run=view.dry_run, verbose=view.verbose, color=screen.color
        )
        return
    if view.show_diff:
        yield from render_diff(report)
    elif not view.check_only:
        yield from map(Line, render_changes(report, dry_run=view.dry_run))
    yield from (Line(text, err=True) for text in render_states(report, dry_run=view.dry_run))


def render_changes(report: Report, *, dry_run: bool) -> Iterator[str]:
    """Yield ``old -> new`` for each changed name, after its model where there are several.

    Args:
        report: What became of the models.
        dry_run: Show the names that would change, because nothing was written.
    """
    has_several = len(report.models) > 1
    for model in report.models:
        changes = model.status == ("would-rename" if dry_run else "renamed")
        for old, new in model.name_map.items() if changes else ():
            line = f"{escape_text(old)} -> {escape_text(new)}"
            yield f"{escape_text(model.path)}: {line}" if has_several else line


def render_diff(report: Report) -> Iterator[Line]:
    """Yield the old and the new names as the lines of a diff.

    It is for people: what a terminal acts on is escaped in it, and models are no text that
    a diff could be applied to.
    """
    for model in report.models:
        if model.status == "would-rename":
            yield build_line(Span(f"--- {model.path}", BOLD))
            yield build_line(Span(f"+++ {model.output}", BOLD))
            for old, new in model.name_map.items():
                yield build_line(Span(f"-{old}", RED))
                yield build_line(Span(f"+{new}", GREEN))
            if model.stamp is not None:
                yield build_line(Span(f"-{STAMP_LABEL}", RED))


def render_states(report: Report, *, dry_run: bool) -> Iterator[str]:
    """Yield one line for each model and sidecar: what became of it.

    Models with an error have none, nor have those that were left alone because of it: the
    error is a line of its own.

    Args:
        report: What became of the models and sidecars.
        dry_run: Describe what would change, because nothing was written.
    """
    for model in report.models:
        if model.error is None and (dry_run or model.status != "would-rename"):
            state = format_model_state(model, dry_run=dry_run)
            yield f"{escape_text(model.path)}: {state}{_format_destination(model)}"
    yield from render_sidecar_states(report)


def render_sidecar_states(report: Report) -> Iterator[str]:
    """Yield one line for each sidecar that changed, or would; none if a model failed."""
    if any(model.failed for model in report.models):
        return
    for sidecar in report.sidecars:
        if sidecar.status in ("renamed", "would-rename") or sidecar.copied:
            state = f"{_format_sidecar_state(sidecar)}{_format_destination(sidecar)}"
            yield f"{escape_text(sidecar.path)}: {state}"


def _format_sidecar_state(sidecar: SidecarReport) -> str:
    would = "would " if sidecar.status == "would-rename" else ""
    state = f"{sidecar.changed} names {would}change{'' if would else 'd'}"
    if sidecar.copied:
        verb = "would be copied" if would else "copied"
        state += f", {sidecar.copied} other files of its folder {verb}"
    return state


def _format_destination(item: ModelReport | SidecarReport) -> str:
    """Return where a result went, or would go; nothing for one in place."""
    has_moved = item.output != item.path and item.status in ("renamed", "would-rename")
    return f" -> {escape_text(item.output)}" if has_moved else ""


def format_model_state(model: ModelReport, *, dry_run: bool) -> str:
    """Return in a few words what became of a model.

    Args:
        model: The model.
        dry_run: Describe what would change, because nothing was written.
    """
    if model.status == "failed":
        return "failed: nothing was written"
    if model.status == "would-rename":
        return (
            _format_change(model, "would change") if dry_run else "left alone: another model failed"
        )
    if model.status == "renamed":
        return _format_change(model, "changed")
    if not model.pairs:
        return "unchanged: no KV buffer in it"
    if model.name_map:
        return f"unchanged: {escape_text(model.output)} is up to date"
    tokens = {side.token for pair in model.pairs for side in pair.sides}
    carried = ", ".join(sorted(escape_text(token) for token in tokens if token))
    return f"unchanged: every buffer carries {carried}" if carried else "unchanged: no token in it"


def _format_change(model: ModelReport, verb: str) -> str:
    """Return how many names of a model change, and what becomes of its stamp."""
    if model.stamp:
        return "stamped"
    changes = [f"{len(model.name_map)} names {verb}"] if model.name_map else []
    if model.stamp is not None:
        changes.append("its stamp goes")
    return "; ".join(changes)
