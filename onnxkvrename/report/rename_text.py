"""A rename as text: changed names, a diff, a line for each model; strings out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from onnxkvrename.errors import FlushError, UndoError
from onnxkvrename.findings import format_count, format_layer_ranges
from onnxkvrename.renaming.request import Request
from onnxkvrename.report.formats import (
    Answer,
    FileResult,
    Line,
    Note,
    Span,
    build_file_result,
    build_line,
)
from onnxkvrename.report.formats.text import (
    BOLD,
    CYAN,
    DIM,
    GREEN,
    RED,
    YELLOW,
    format_files,
    render_finding_lines,
)
from onnxkvrename.report.inert import escape_text
from onnxkvrename.report.tables import Cell, render_facts, render_table, wrap_line
from onnxkvrename.rules.plan import REASON_NOT_RETAINED, KvPair, PairSide
from onnxkvrename.rules.results import ModelReport, Report, SidecarReport, Status

_MAX_LISTED_MODELS = 4
"""Models that each have a line, and on a terminal more than one."""
_LAYER_HEADS = ("layer", "input", "retained output")
_STATUS_STYLES = {
    "renamed": GREEN,
    "would-rename": YELLOW,
    "held back": YELLOW,
    "unchanged": CYAN,
    "failed": RED,
}
STAMP_LABEL = "metadata onnxkvrename.kv_layout_sha256"
"""The name of a stamp in a diff."""


class StateRow(NamedTuple):
    """What became of one model, or of several with the same outcome.

    Attributes:
        models: The models.
        outcome: Their status, or ``held back``: they would change without another model's error.
        state: What became of them, in a few words.
        has_result: Whether there is a file at the place of the result, so that it can be used.
    """

    models: tuple[ModelReport, ...]
    outcome: Status | Literal["held back"]
    state: str
    has_result: bool

    @property
    def label(self) -> str:
        """The path of the model, or the number of the models and the first paths."""
        if len(self.models) == 1:
            return escape_text(self.models[0].path)
        if self.outcome == "held back":
            return format_count(len(self.models), "other model")
        return escape_text(format_files([model.path for model in self.models]))

    @property
    def destination(self) -> str:
        """Where the results went, or would go, after an arrow; nothing for those in place.

        It is empty for models of which no name changes: a refused run does not copy them.
        """
        if self.outcome not in ("renamed", "would-rename"):
            return ""
        if len(self.models) == 1 or self.models[0].output == self.models[0].path:
            return _format_destination(self.models[0])
        directory = os.path.commonpath([os.path.dirname(model.output) for model in self.models])
        return f" -> {escape_text(directory)}" if directory else ""


def build_rename_answer(report: Report, request: Request) -> Answer:
    """Return the answer of a rename.

    Args:
        report: What became of the models and sidecars.
        request: What was asked for, and how to show it.
    """
    code = report.compute_exit_code(check_only=request.only_checks)
    has_total = len(report.models) > 1 and not request.quiet
    notes = [Note("total", format_total(report, dry_run=not request.writes))] if has_total else []
    if not request.quiet:
        notes += [Note("checks", text) for text in list_passed_checks(report)]
    return Answer(
        "rename",
        code,
        build_content=partial(_describe, report),
        render_text=partial(render_rename, report, request),
        files=tuple(_list_files(report, request)),
        notes=tuple(notes),
    )


def _describe(report: Report) -> tuple[Any, ...]:
    from onnxkvrename.report.documents.rename_json import describe_report  # not for text

    return describe_report(report)


def _list_files(report: Report, request: Request) -> Iterator[FileResult]:
    is_single = len(report.models) == 1
    for model in report.models:
        yield build_file_result(model, *_list_model_notes(model, request, is_single))
    for sidecar in report.sidecars if request.only_checks else ():
        if sidecar.status == "would-rename":
            note = Note("names", _format_sidecar_state(sidecar), sidecar.path, "error")
            yield FileResult(sidecar.path, notes=(note,))


def _list_model_notes(model: ModelReport, request: Request, is_single: bool) -> Iterator[Note]:
    """Yield what became of a model; of several models the total counts those that stayed."""
    if model.error is not None:
        return
    state = format_model_state(model)
    is_pending = model.status == "would-rename"
    if request.only_checks and is_pending:
        yield Note("names", state, model.path, "error")
    elif not request.quiet and (
        is_single or model.status == "renamed" or (not request.writes and is_pending)
    ):
        yield Note(model.status, state, model.path)


def render_rename(report: Report, request: Request, width: int | None) -> Iterator[Line]:
    """Yield findings, then what changed: names for a pipe, a summary for a terminal.

    Args:
        report: What became of the models and sidecars.
        request: How to show it.
        width: The columns of the terminal; `None` for a pipe.
    """
    yield from render_finding_lines(report.models, verbose=request.verbose)
    if request.quiet:
        yield from _render_pending(report) if request.only_checks else ()
        return
    if width is not None and not request.diff:
        yield from render_summary(
            report,
            width,
            dry_run=not request.writes,
            verbose=request.verbose,
        )
        return
    if request.diff:
        yield from render_diff(report)
    elif not request.only_checks:
        yield from map(Line, render_changes(report, dry_run=not request.writes))
    states = render_states(report, dry_run=not request.writes, verbose=request.verbose)
    yield from (Line(text, err=True) for text in states)


def render_summary(report: Report, width: int, *, dry_run: bool, verbose: bool) -> Iterator[Line]:
    """Yield a headline for each model; of a few models also buffers and the next command.

    Headlines and commands are never folded, so that they can be copied.

    Args:
        report: What became of the models and sidecars.
        width: The columns of the terminal.
        dry_run: Describe what would change, because nothing was written.
        verbose: Show every layer.
    """
    is_short = is_folded(report, verbose=verbose)
    for row in list_state_rows(report, dry_run=dry_run, verbose=verbose):
        yield build_line(
            Span(row.label, BOLD),
            Span(f"  {row.state}", _STATUS_STYLES[row.outcome]),
            f" {row.destination}" if row.destination else "",
        )
        model = row.models[0]
        if not is_short and row.outcome not in ("failed", "held back") and model.pairs:
            yield from render_facts(list(_list_buffer_facts(model)), width, indent="  ")
            if verbose:
                yield from render_table(_list_layer_rows(model), width, indent="  ", right=(0,))
            if row.has_result and model.feed_back_call is not None:
                yield build_line(Span("  next  ", DIM), escape_text(model.feed_back_call))
    yield from map(Line, render_sidecar_states(report, dry_run=dry_run))
    if len(report.models) > 1:
        yield build_line(Span(format_total(report, dry_run=dry_run), BOLD))
    for text in list_passed_checks(report):
        yield from wrap_line(build_line(Span(text, GREEN)), width)


def _list_buffer_facts(model: ModelReport) -> Iterator[tuple[str, str]]:
    """Yield a label and its text: each kind, the first changed name, the names kept."""
    kinds: dict[str, list[KvPair]] = {}
    for pair in model.pairs:
        kinds.setdefault(pair.kind, []).append(pair)
    for kind, pairs in kinds.items():
        buffers = ", ".join(dict.fromkeys(pair.buffer for pair in pairs))
        layers = sorted({pair.layer for pair in pairs})
        yield escape_text(kind), f"{escape_text(buffers)} of {format_layer_ranges(layers)}"
    for old, new in list(model.name_map.items())[:1]:
        yield "names", f"{escape_text(old)} -> {escape_text(new)}"
    kept = [item for item in model.unchanged_names if item.reason != REASON_NOT_RETAINED]
    for reason in dict.fromkeys(item.reason for item in kept):
        names = ", ".join(escape_text(item.name) for item in kept if item.reason == reason)
        yield "kept", f"{escape_text(reason)}: {names}"


def _list_layer_rows(model: ModelReport) -> list[tuple[Cell, ...]]:
    """Return each buffer under its new names; those that change are green."""
    heads: tuple[Cell, ...] = tuple(Span(head, DIM) for head in _LAYER_HEADS)
    return [
        heads,
        *(
            (str(pair.layer), *map(_show_new_name, (pair.input, pair.output)))
            for pair in model.pairs
        ),
    ]


def _show_new_name(side: PairSide | None) -> Cell:
    if side is None:
        return "-"
    return Span(escape_text(side.new_name), GREEN if side.new_name != side.old_name else "")


def _render_pending(report: Report) -> Iterator[Line]:
    """Yield why ``--check`` exits with 1, where no finding says so."""
    counts = []
    items: Sequence[Sequence[ModelReport | SidecarReport]] = (report.models, report.sidecars)
    for noun, reports in zip(("model", "sidecar"), items, strict=True):
        pending = sum(item.status == "would-rename" for item in reports)
        if pending:
            counts.append(f"{pending:,} of {format_count(len(reports), noun)}")
    if counts:
        yield Line(f"{' and '.join(counts)} would change", err=True)


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

    It is for people: characters that a terminal acts on are escaped, and a diff cannot be applied
    to a model.
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


def render_states(report: Report, *, dry_run: bool, verbose: bool = False) -> Iterator[str]:
    """Yield what became of the models and sidecars; for several models also the total.

    Models with an error have no line, as the error is one. The total counts those that were
    held back because of another model, and, of many models, those that are unchanged.

    Args:
        report: What became of the models and sidecars.
        dry_run: Describe what would change, because nothing was written.
        verbose: Give each model a line.
    """
    is_short = is_folded(report, verbose=verbose)
    for row in list_state_rows(report, dry_run=dry_run, verbose=verbose):
        is_counted = row.outcome == "held back" or (is_short and row.outcome == "unchanged")
        if not is_counted and row.models[0].error is None:
            yield f"{row.label}: {row.state}{row.destination}"
    yield from render_sidecar_states(report, dry_run=dry_run)
    if len(report.models) > 1:
        yield format_total(report, dry_run=dry_run)
    yield from list_passed_checks(report)


def list_passed_checks(report: Report) -> list[str]:
    """Return what was checked with success, and what that rests on; nothing after a refusal.

    Args:
        report: What became of the models.
    """
    if report.failed:
        return []
    checks = []
    taken = [model for model in report.models if model.consumer and model.pairs]
    if taken:
        buffers = format_count(sum(len(model.pairs) for model in taken), "buffer")
        checks.append(
            f"checked for {escape_text(taken[0].consumer)}: it selects, pairs and moves {buffers} "
            "(by names, shapes and the graph; not run on a device)"
        )
    proved = [model for model in report.models if model.proved is not None and model.pairs]
    if proved:
        total = sum(len(pair.sides) == 2 for model in proved for pair in model.pairs)
        checks.append(
            f"verified: {sum(model.proved or 0 for model in proved):,} of "
            f"{format_count(total, 'buffer')} retained as the rules say (by the graph and onnx's "
            "checker; values not computed)"
        )
    return checks


def is_folded(report: Report, *, verbose: bool) -> bool:
    """Return whether models with the same outcome share a line: there are too many."""
    return len(report.models) > _MAX_LISTED_MODELS and not verbose


def list_state_rows(report: Report, *, dry_run: bool, verbose: bool) -> list[StateRow]:
    """Return what became of the models: first of those that failed, then of the others.

    Args:
        report: What became of the models.
        dry_run: Describe what would change, because nothing was written.
        verbose: Give each model a row.
    """
    is_short = is_folded(report, verbose=verbose)
    stays = report.failed and not dry_run
    groups: dict[object, list[ModelReport]] = {}
    texts = dict[object, tuple[Status | Literal["held back"], str, bool]]()
    for index, model in sorted(enumerate(report.models), key=lambda item: not item[1].failed):
        outcome: Status | Literal["held back"] = model.status
        state = format_model_state(model)
        if stays and model.status == "would-rename":
            outcome, state = "held back", "left alone: another model failed"
        elif model.failed and not dry_run:
            outcome, state = "failed", _format_failure(model)
        has_own_row = not is_short and (verbose or outcome != "held back")
        key = index if has_own_row else (outcome, state, model.error is None)
        groups.setdefault(key, []).append(model)
        texts[key] = outcome, state, _has_result(report, model, dry_run=dry_run)
    return [StateRow(tuple(models), *texts[key]) for key, models in groups.items()]


def _has_result(report: Report, model: ModelReport, *, dry_run: bool) -> bool:
    if model.status != "unchanged":
        return model.status == "renamed"
    is_there = model.output == model.path or bool(model.name_map)  # in place, or up to date
    return is_there or not (dry_run or report.failed)


def _format_failure(model: ModelReport) -> str:
    if isinstance(model.error, (UndoError, FlushError)):
        return "failed"  # the error says what was written
    return "failed: nothing was written"


def format_total(report: Report, *, dry_run: bool) -> str:
    """Return how many models there are, what became of how many, and how many buffers they have.

    Args:
        report: What became of the models.
        dry_run: Count what would change, because nothing was written.
    """
    counts = Counter(model.status for model in report.models)
    changed = counts["would-rename" if dry_run else "renamed"]
    parts = [
        f"{changed:,} {'would change' if dry_run else 'renamed'}",
        f"{counts['unchanged']:,} unchanged",
    ]
    if counts["failed"]:
        parts.append(f"{counts['failed']:,} failed")
    if counts["would-rename"] and not dry_run:
        parts.append(f"{counts['would-rename']:,} left alone (another model failed)")
    text = f"{format_count(len(report.models), 'model')}: {', '.join(parts)}"
    if counts["failed"] and not dry_run and not changed and not _is_half_done(report):
        return f"{text}; nothing was written"
    return f"{text}; {format_count(sum(len(m.pairs) for m in report.models), 'KV buffer')}"


def _is_half_done(report: Report) -> bool:
    return any(isinstance(model.error, (UndoError, FlushError)) for model in report.models)


def render_sidecar_states(report: Report, *, dry_run: bool) -> Iterator[str]:
    """Yield one line for each sidecar that changed, or would.

    Args:
        report: What became of the models and sidecars.
        dry_run: Describe what would change, because nothing was written.
    """
    if report.failed:
        return
    for sidecar in report.sidecars:
        is_done = sidecar.status == ("would-rename" if dry_run else "renamed")
        if is_done or (sidecar.copied and sidecar.status != "failed"):
            state = f"{_format_sidecar_state(sidecar)}{_format_destination(sidecar)}"
            yield f"{escape_text(sidecar.path)}: {state}"


def _format_sidecar_state(sidecar: SidecarReport) -> str:
    would = "would " if sidecar.status == "would-rename" else ""
    state = f"{format_count(sidecar.changed, 'name')} {would}change{'' if would else 'd'}"
    if sidecar.copied:
        verb = "would be copied" if would else "copied"
        state += f", {format_count(sidecar.copied, 'other file')} of its folder {verb}"
    return state


def _format_destination(item: ModelReport | SidecarReport) -> str:
    """Return where a result went, or would go; nothing for one in place."""
    has_moved = item.output != item.path and item.status in ("renamed", "would-rename")
    return f" -> {escape_text(item.output)}" if has_moved else ""


def format_model_state(model: ModelReport) -> str:
    """Return in a few words what became of a model, whatever became of others."""
    if model.status == "failed":
        return "failed"
    if model.status == "would-rename":
        return _format_change(model, "would change")
    if model.status == "renamed":
        return _format_change(model, "changed")
    if not model.pairs:
        if any(finding.code == "KV001" for finding in model.findings):
            return "unchanged: another profile knows its names"
        return f"unchanged: {describe_no_pairs(model)}"
    if model.name_map:
        return f"unchanged: {escape_text(model.output)} is up to date"
    if model.new_profile:
        profile = escape_text(model.new_profile)
        return f"unchanged: the buffers already have the names of profile {profile}"
    tokens = {side.token for pair in model.pairs for side in pair.sides}
    carried = ", ".join(sorted(escape_text(token) for token in tokens if token))
    return f"unchanged: every buffer carries {carried}" if carried else "unchanged: no token in it"


def describe_no_pairs(report: ModelReport) -> str:
    """Return why a model has no KV buffer: it fills those of a decoder, or there is none."""
    if not report.feeds:
        return "no KV buffer in it"
    return f"it fills {format_count(len(report.feeds), 'KV buffer')} of another model"


def _format_change(model: ModelReport, verb: str) -> str:
    """Return how many names of a model change, and what becomes of its stamp."""
    if model.stamp:
        return "stamped"
    changes = [f"{format_count(len(model.name_map), 'name')} {verb}"] if model.name_map else []
    if model.stamp is not None:
        changes.append("its stamp is removed")
    return "; ".join(changes)
