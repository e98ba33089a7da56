"""A rename as a summary on a terminal; loads rich, so imported only for one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onnxkvrename.findings import format_layer_ranges
from onnxkvrename.report.formats import Line
from onnxkvrename.report.inert import escape_text
from onnxkvrename.report.rename_text import (
    StateRow,
    format_total,
    is_folded,
    list_passed_checks,
    list_state_rows,
    render_sidecar_states,
)
from onnxkvrename.report.tables import build_table, render_lines
from onnxkvrename.rules.plan import REASON_NOT_RETAINED, KvPair, PairSide, UnchangedName
from onnxkvrename.rules.results import ModelReport, Report

_STATUS_STYLES = {
    "renamed": "green",
    "would-rename": "yellow",
    "unchanged": "cyan",
    "failed": "red",
}


def draw_report(report: Report, *, dry_run: bool, verbose: bool, color: bool) -> Iterator[Line]:
    """Yield the summary as lines.

    Args:
        report: What became of the models and sidecars.
        dry_run: Describe what would change, because nothing was written.
        verbose: Show every layer.
        color: Whether to colour it.
    """
    return render_lines([render_report(report, dry_run=dry_run, verbose=verbose)], color=color)


def render_report(report: Report, *, dry_run: bool, verbose: bool) -> RenderableType:
    """Return a headline for each model; of a few models also buffers and the next command.

    Args:
        report: What became of the models and sidecars.
        dry_run: Describe what would change, because nothing was written.
        verbose: Show every layer.
    """
    parts: list[RenderableType] = []
    is_short = is_folded(report, verbose=verbose)
    for row in list_state_rows(report, dry_run=dry_run, verbose=verbose):
        parts.append(_render_headline(row))
        model = row.models[0]
        if not is_short and row.outcome not in ("failed", "held back") and model.pairs:
            details = [_render_buffers(model), *([_render_layer_table(model)] if verbose else [])]
            parts.append(Padding(Group(*details), (0, 0, 0, 2)))
            parts += _render_next_command(model) if row.has_result else ()
    sidecar_states = render_sidecar_states(report, dry_run=dry_run)
    parts += (Text(line, no_wrap=True, overflow="ignore") for line in sidecar_states)
    if len(report.models) > 1:
        parts.append(Text(format_total(report, dry_run=dry_run), style="bold"))
    parts += (Text(line, style="green") for line in list_passed_checks(report))
    return Group(*parts)


def _render_headline(row: StateRow) -> Text:
    # Never folded: a path that is broken in two cannot be copied.
    text = Text(row.label, style="bold", no_wrap=True, overflow="ignore")
    style = "yellow" if row.outcome == "held back" else _STATUS_STYLES[row.outcome]
    text.append(f"  {row.state}", style=style)
    return text.append(f" {row.destination}" if row.destination else "", style="not bold")


def _render_buffers(model: ModelReport) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _list_buffer_rows(model):
        grid.add_row(Text(label), Text(text))
    return grid


def _list_buffer_rows(model: ModelReport) -> Iterator[tuple[str, str]]:
    """Yield a label and its text: each kind, the first changed name, the names kept."""
    kinds: dict[str, list[KvPair]] = {}
    for pair in model.pairs:
        kinds.setdefault(pair.kind, []).append(pair)
    for kind, pairs in kinds.items():
        buffers = ", ".join(dict.fromkeys(pair.buffer for pair in pairs))
        layers = sorted({pair.layer for pair in pairs})
        text = f"{escape_text(buffers)} of {format_layer_ranges(layers)}"
        yield escape_text(kind), text
    for old, new in list(model.name_map.items())[:1]:
        yield "names", f"{escape_text(old)} -> {escape_text(new)}"
    for reason, names in _group_unchanged_names(model.unchanged_names).items():
        yield "kept", f"{escape_text(reason)}: {', '.join(names)}"


def _render_next_command(model: ModelReport) -> Iterator[RenderableType]:
    """Yield the call that hands the result back, never folded, so that it can be copied."""
    if model.feed_back_call is not None:
        text = Text("  next  ", style="dim", no_wrap=True, overflow="ignore")
        yield text.append(escape_text(model.feed_back_call), style="not dim")


def _group_unchanged_names(unchanged_names: Iterable[UnchangedName]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for item in unchanged_names:
        if item.reason != REASON_NOT_RETAINED:
            reasons.setdefault(item.reason, []).append(escape_text(item.name))
    return reasons


def _render_layer_table(model: ModelReport) -> RenderableType:
    """Return each buffer under its new names; those that change are green."""
    rows = (
        (
            pair.layer,
            *(
                "-" if side is None else _render_new_name(side)
                for side in (pair.input, pair.output)
            ),
        )
        for pair in model.pairs
    )
    return build_table(("layer", "input", "retained output"), rows, right=("layer",))


def _render_new_name(side: PairSide) -> Text:
    style = "green" if side.new_name != side.old_name else ""
    return Text(escape_text(side.new_name), style=style)
