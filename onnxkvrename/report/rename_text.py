"""A rename as text: changed names, a line for each model; strings out."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from onnxkvrename.errors import FlushError, UndoError
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
    MAX_LISTED_MODELS,
    RED,
    YELLOW,
    build_verdict_line,
    format_files,
)
from onnxkvrename.report.inert import escape_text
from onnxkvrename.report.tables import measure_text, render_facts, wrap_line
from onnxkvrename.rules.plan import REASON_NOT_RETAINED, KvPair, TokenChange
from onnxkvrename.rules.request import Request
from onnxkvrename.rules.results import ModelReport, Report, SidecarReport
from onnxkvrename.text import format_count, format_layers, format_list

_STATUS_STYLES = {
    "renamed": GREEN,
    "would-rename": YELLOW,
    "unchanged": CYAN,
    "failed": RED,
}
_LABELS = {"renamed": "wrote", "would-rename": "would write"}
"""What is said before the path of a result that has a line of its own."""
_COUNT = re.compile("[0-9,]+")
_MAX_KEPT = 6
"""Names that stay, of one reason, that are listed; `inspect` lists as many."""


class StateRow(NamedTuple):
    """What became of one model, or of several with the same outcome.

    Attributes:
        models: The models.
        state: What became of them, in a few words.
        style: How a terminal shows the state.
        is_refused: Whether the run failed, so that models of which no name changes are not copied.
    """

    models: tuple[ModelReport, ...]
    state: str
    style: str
    is_refused: bool = False

    @property
    def label(self) -> str:
        """The path of the model, or the number of the models and the first paths."""
        if len(self.models) == 1:
            return self.models[0].path
        return format_files([model.path for model in self.models])

    @property
    def destination(self) -> str:
        """Where the results went, or would go; empty for those in place."""
        first = self.models[0]
        if not _is_change(first) and (self.is_refused or first.name_map):  # or up to date there
            return ""
        if len(self.models) == 1 or first.output == first.path:
            return _find_destination(first)
        return os.path.commonpath([os.path.dirname(model.output) for model in self.models])


class PendingNames(NamedTuple):
    """The names of a model that `--check` finds: those that a rename would change.

    Attributes:
        number: How many.
        total: The names of all KV buffers of the model.
        fault: What is wrong with them, said of several: ``lack VLLM``.
        first: The first of them.
        more: What else would change.
    """

    number: int
    total: int
    fault: str
    first: str
    more: str = ""


def find_pending_names(model: ModelReport, change: TokenChange) -> PendingNames | None:
    """Return the names of a model that would change; ``None`` if none would.

    Args:
        model: The outcome for the model.
        change: The token to add or to remove.
    """
    if model.status != "would-rename":
        return None
    tokens = {side.old_name: side.token for pair in model.pairs for side in pair.sides}
    own = {*tokens, *model.feeds, *model.name_map}
    names = list(model.name_map)
    token = change.final_token
    lacking = [name for name in names if tokens.get(name) != token]
    if change.strip:
        fault = f"have {change.token or 'a token'}"
    elif lacking:
        names, fault = lacking, f"lack {token}"
    else:
        fault = "have a suffix that some consumers do not pair"
    more = []
    if len(names) < len(model.name_map):
        more.append(f"{len(model.name_map) - len(names):,} have another suffix")
    if model.function_name_map:
        more.append(f"{len(model.function_name_map):,} in local functions as well")
    if model.result_state:
        more.append(f"the result is {model.result_state}")
    return PendingNames(len(names), len(own), fault, names[0], "".join(f"; {m}" for m in more))


def format_pending_names(models: Sequence[PendingNames]) -> str:
    """Return in a sentence what `--check` found in one model, or in several alike.

    Args:
        models: What it found in each.
    """
    first = models[0]
    count = _format_range([names.number for names in models])
    total = _format_range([names.total for names in models])
    fault = first.fault
    if count == "1":
        fault = fault.replace("have", "has", 1).replace("lack", "lacks", 1)
    each = " in each" if len(models) > 1 else ""
    return f"{count} of {total} names {fault}{each} (first: {first.first}){first.more}"


def build_rename_answer(report: Report, request: Request, command: str = "") -> Answer:
    """Return the answer of a rename.

    Args:
        report: What became of the models and sidecars.
        request: What was asked for, and how to show it.
        command: The command that renames what ``--check`` found.
    """
    code = report.compute_exit_code(check_only=request.check)
    has_total = len(report.models) > 1 and not request.quiet
    notes = [Note("total", format_total(report, dry_run=not request.writes))] if has_total else []
    if not request.quiet:
        notes += [Note("checks", text) for text in list_passed_checks(report, request.check)]
    is_fixed = request.check and not _has_other_fix(report, command)
    fix = command if is_fixed and (has_pending(report) or report.failed) else ""
    return Answer(
        "rename",
        code,
        build_content=partial(_describe, report, request, fix),
        render_text=partial(render_rename, report, request, fix=fix),
        files=tuple(_list_files(report, request, fix)),
        notes=tuple(notes),
        is_verbose=request.verbose,
    )


def has_pending(report: Report) -> bool:
    """Return whether something would change."""
    items: tuple[ModelReport | SidecarReport, ...] = (*report.models, *report.sidecars)
    return any(item.status == "would-rename" for item in items)


def _has_other_fix(report: Report, command: str) -> bool:
    """Return whether an error must be fixed first, or a finding has the right command for a cache.

    A set of which only some files have the token (KV303) is what the command fixes, if it says so.
    """
    return any(model.error is not None for model in report.models) or any(
        finding.code == "KV402"
        or (finding.severity == "error" and f"`{command}`" not in finding.hint)
        for finding in report.findings
    )


def _describe(report: Report, request: Request, fix: str) -> tuple[Any, ...]:
    from onnxkvrename.report.documents.rename_json import describe_report  # not for text

    pending = {
        model.path: format_pending_names([names])
        for model in (report.models if request.check else ())
        if (names := find_pending_names(model, request.change)) is not None
    }
    return describe_report(report, pending, fix or None)


def _list_files(report: Report, request: Request, fix: str) -> Iterator[FileResult]:
    is_single = len(report.models) == 1
    for model in report.models:
        yield build_file_result(model, *_list_model_notes(model, request, is_single, fix))
    for sidecar in report.sidecars if request.check else ():
        if sidecar.status == "would-rename":
            state = _add_fix(_format_sidecar_state(sidecar, dry_run=True), fix)
            note = Note("names", state, sidecar.path, "error")
            yield FileResult(sidecar.path, notes=(note,))


def _add_fix(sentence: str, fix: str) -> str:
    """Return a sentence with the command that fixes what it says."""
    return f"{sentence}; run `{fix}`" if fix else sentence


def _list_model_notes(
    model: ModelReport, request: Request, is_single: bool, fix: str
) -> Iterator[Note]:
    """Yield what became of a model; of several models the total counts those that stayed."""
    if model.error is not None:
        return
    state = format_model_state(model)
    is_pending = model.status == "would-rename"
    pending = find_pending_names(model, request.change) if request.check else None
    if pending is not None:
        title = f"KV token {'present' if request.strip else 'missing'}"
        yield Note(title, _add_fix(format_pending_names([pending]), fix), model.path, "error")
    elif not request.quiet and (
        is_single or model.status == "renamed" or (not request.writes and is_pending)
    ):
        yield Note(model.status, state, model.path)


def render_rename(
    report: Report, request: Request, width: int | None, fix: str = ""
) -> Iterator[Line]:
    """Yield names, then what became of each model and sidecar.

    A pipe gets each name on stdout, and the rest on stderr. A terminal shows the first name only,
    unless the answer is to be verbose.

    Args:
        report: What became of the models and sidecars.
        request: How to show it.
        width: The columns of the terminal; `None` for a pipe.
        fix: The command that renames what ``--check`` found.
    """
    if request.quiet:
        yield from _render_pending(report) if request.check else ()
        return
    dry_run = not request.writes
    if (width is None and not request.check) or request.verbose:
        yield from map(Line, render_changes(report, dry_run=dry_run))
    checked = request.change if request.check else None
    for line in render_states(
        report, width, dry_run=dry_run, verbose=request.verbose, checked=checked
    ):
        yield line._replace(err=width is None)
    if fix and not any(f"`{fix}`" in finding.hint for finding in report.findings):
        yield build_line("  ", Span("->", CYAN), f" run `{fix}`", err=width is None)


def render_states(
    report: Report,
    width: int | None,
    *,
    dry_run: bool,
    verbose: bool = False,
    checked: TokenChange | None = None,
) -> Iterator[Line]:
    """Yield a line for each model and sidecar, the total of several, and what was checked.

    A terminal also gets, in place of all names, the buffers of each of a few models, the first
    name, and the next command. Paths and commands are never folded, so that they can be copied.
    Models with an error have no line, as the error is one, nor do those that were held back
    because of another model: the total counts both.

    Args:
        report: What became of the models and sidecars.
        width: The columns of the terminal; `None` for a pipe.
        dry_run: Describe what would change, because nothing was written.
        verbose: Give each model a line.
        checked: What ``--check`` looks for: it says what is wrong with names, and not what it
            would do with them.
    """
    is_short = is_folded(report, verbose=verbose)
    for row in list_state_rows(report, dry_run=dry_run, verbose=verbose, checked=checked):
        verdict = build_verdict_line(row.label, row.state, row.style)
        yield from _render_destination(
            verdict, row.destination, _LABELS.get(row.models[0].status, "result"), width
        )
        is_pending = checked is not None and row.models[0].status == "would-rename"
        if width is not None and not is_short and not is_pending:
            has_result = _has_result(report, row.models[0], dry_run=dry_run)
            yield from _render_model(row.models[0], width, has_result=has_result)
    for sidecar, state in list_sidecar_states(report, dry_run=dry_run):
        line = Line(f"{sidecar.path}: {state}")
        label = _LABELS[sidecar.status]
        yield from _render_destination(line, _find_destination(sidecar), label, width)
    if len(report.models) > 1:
        yield build_line(Span(format_total(report, dry_run=dry_run), BOLD))
    for text in list_passed_checks(report, checked is not None):
        yield from wrap_line(build_verdict_line("", text, GREEN), width)


def _render_destination(
    line: Line, destination: str, label: str, width: int | None
) -> Iterator[Line]:
    """Yield what became of a file, and where the result is: on a line of its own if both do not
    fit into one, so that no path is broken."""
    arrow = f" -> {destination}" if destination else ""
    if width is None or measure_text(escape_text(line.text + arrow)) <= width:
        spans = (*line.spans, Span(arrow)) if line.spans else ()
        yield line._replace(text=line.text + arrow, spans=spans)
        return
    yield from wrap_line(line, width)
    if destination:
        yield build_line(Span(f"  {label}  ", DIM), destination)


def _render_model(model: ModelReport, width: int, *, has_result: bool) -> Iterator[Line]:
    """Yield the buffers of a model and, if there is a result, what to do with it."""
    if model.failed or not model.pairs:
        return
    yield from render_facts(list(_list_buffer_facts(model)), width, indent="  ")
    if has_result and model.feed_back_call is not None:
        yield build_line(Span("  next  ", DIM), model.feed_back_call)


def _list_buffer_facts(model: ModelReport) -> Iterator[tuple[str, str]]:
    """Yield a label and its text: each kind, the first changed name, the names kept."""
    kinds: dict[str, list[KvPair]] = {}
    for pair in model.pairs:
        kinds.setdefault(pair.kind, []).append(pair)
    for kind, pairs in kinds.items():
        buffers = ", ".join(dict.fromkeys(pair.buffer for pair in pairs))
        layers = sorted({pair.layer for pair in pairs if pair.has_layer})
        yield kind, f"{buffers} of {format_layers(layers)}"
    for old, new in list(model.name_map.items())[:1] if _is_change(model) else ():
        yield "names", f"{old} -> {new}"
    kept = [item for item in model.unchanged_names if item.reason != REASON_NOT_RETAINED]
    for reason in dict.fromkeys(item.reason for item in kept):
        names = [item.name for item in kept if item.reason == reason]
        yield "kept", f"{reason}: {format_list(names, limit=_MAX_KEPT)}"


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
            line = f"{old} -> {new}"
            yield f"{model.path}: {line}" if has_several else line


def list_passed_checks(report: Report, is_check: bool = False) -> list[str]:
    """Return what was checked with success, and what that rests on.

    Nothing was after a refusal, nor if ``--check`` found a name: results that are not there pass
    no check.

    Args:
        report: What became of the models.
        is_check: Whether this is ``--check``.
    """
    if report.failed or (is_check and has_pending(report)):
        return []
    checks = []
    taken = [model for model in report.models if model.consumer and model.pairs]
    if taken:
        buffers = format_count(len(taken[0].pairs), "buffer")
        if len(taken) > 1:  # windows and what is merged from them have the same ones
            buffers = f"all buffers of {len(taken):,} models"
        checks.append(
            f"checked for {taken[0].consumer}: it selects, pairs and moves {buffers} "
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
    return len(report.models) > MAX_LISTED_MODELS and not verbose


def list_state_rows(
    report: Report, *, dry_run: bool, verbose: bool, checked: TokenChange | None = None
) -> list[StateRow]:
    """Return what became of the models: first of those that failed, then of the others.

    Of many models, those that failed have no row: their findings and the total say so.

    Args:
        report: What became of the models.
        dry_run: Describe what would change, because nothing was written.
        verbose: Give each model a row.
        checked: What ``--check`` looks for.
    """
    is_short = is_folded(report, verbose=verbose)
    are_held_back = report.failed and not dry_run
    groups: dict[object, list[tuple[ModelReport, str]]] = {}
    pending: dict[object, list[tuple[ModelReport, PendingNames]]] = {}
    for index, model in sorted(enumerate(report.models), key=lambda item: not item[1].failed):
        if model.error is not None or (are_held_back and model.status == "would-rename"):
            continue
        if is_short and model.failed:
            continue
        names = None if checked is None or model.failed else find_pending_names(model, checked)
        if names is not None:
            alike = (names.fault, bool(names.more), model.result_state) if is_short else index
            pending.setdefault(alike, []).append((model, names))
            continue
        state = format_model_state(model)
        if model.failed and not dry_run:
            state = "failed: nothing was written"
        frame = _COUNT.sub("0", state) if _is_change(model) else state
        key = (model.status, frame) if is_short else index
        groups.setdefault(key, []).append((model, state))
    rows = [_build_row(*zip(*group, strict=True)) for group in groups.values()]
    for found in pending.values():
        models, each = zip(*found, strict=True)
        rows.append(StateRow(models, format_pending_names(each), _STATUS_STYLES["would-rename"]))
    return [row._replace(is_refused=report.failed) for row in rows]


def _is_change(item: ModelReport | SidecarReport) -> bool:
    return item.status in ("renamed", "would-rename")


def _build_row(models: tuple[ModelReport, ...], states: tuple[str, ...]) -> StateRow:
    """Return the row of models whose states are the same, of changes except for the counts."""
    first, state = models[0], states[0]
    if len(models) > 1 and _is_change(first):
        columns = zip(*map(_COUNT.findall, states), strict=True)
        ranges = (
            _format_range([int(count.replace(",", "")) for count in column]) for column in columns
        )
        state = f"{_COUNT.sub(lambda _: next(ranges), state)} in each"
    return StateRow(models, state, _STATUS_STYLES["failed" if first.failed else first.status])


def _format_range(counts: Sequence[int]) -> str:
    """Return the least and the most of some counts, or the one that all are."""
    ends = dict.fromkeys((min(counts), max(counts)))
    return " to ".join(f"{number:,}" for number in ends)


def _has_result(report: Report, model: ModelReport, *, dry_run: bool) -> bool:
    if model.status != "unchanged":
        return model.status == "renamed"
    is_there = model.output == model.path or bool(model.name_map)  # in place, or up to date
    return not report.failed and (is_there or not dry_run)


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


def list_sidecar_states(report: Report, *, dry_run: bool) -> Iterator[tuple[SidecarReport, str]]:
    """Yield each sidecar that changed, or would, with what becomes of it.

    Args:
        report: What became of the models and sidecars.
        dry_run: Describe what would change, because nothing was written.
    """
    if report.failed:
        return
    for sidecar in report.sidecars:
        is_done = sidecar.status == ("would-rename" if dry_run else "renamed")
        if is_done:
            yield sidecar, _format_sidecar_state(sidecar, dry_run=dry_run)


def _format_sidecar_state(sidecar: SidecarReport, *, dry_run: bool) -> str:
    verb = "would change" if dry_run else "changed"
    return f"{format_count(sidecar.changed, 'name')} {verb}"


def _find_destination(item: ModelReport | SidecarReport) -> str:
    """Return where a result went, or would go; empty for one in place."""
    return item.output if item.output != item.path else ""


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
            return "unchanged: the rules match none of its names"
        return f"unchanged: {describe_no_pairs(model)}"
    if model.name_map:
        return f"unchanged: {model.output} is already up to date"
    tokens = {side.token for pair in model.pairs for side in pair.sides}
    carried = ", ".join(sorted(token for token in tokens if token))
    return f"unchanged: every buffer carries {carried}" if carried else "unchanged: no token"


def describe_no_pairs(report: ModelReport) -> str:
    """Return why a model has no KV buffer: it fills those of a decoder, or there is none."""
    if not report.feeds:
        return "no KV buffer"
    return f"it fills {format_count(len(report.feeds), 'KV buffer')} of another model"


def _format_change(model: ModelReport, verb: str) -> str:
    """Return how many names of a model change."""
    changes = [f"{format_count(len(model.name_map), 'name')} {verb}"] if model.name_map else []
    if model.function_name_map:
        changes.append(f"{len(model.function_name_map):,} in local functions as well")
    return "; ".join(changes)
