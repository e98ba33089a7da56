"""Results as a person at a terminal wants to read them. Imported only where there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from onnxkvrename.report.rename_text import (
    escape_unprintable,
    format_layer_ranges,
    format_model_state,
    render_sidecar_states,
)
from onnxkvrename.rules.plan import REASON_NOT_RETAINED, KvPair, PairSide, UnchangedName
from onnxkvrename.rules.results import ModelReport, Report
from onnxkvrename.storage.temp_file import ProgressCallback

_STATUS_STYLES = {
    "renamed": "green",
    "would-rename": "yellow",
    "unchanged": "cyan",
    "failed": "red",
}
_MAX_DETAILED_MODELS = 4
"""Models of which more is said than one line."""
_MIN_MODELS_FOR_BAR = 64
"""Models that take long enough for a bar to be read."""
_MIN_BYTES_FOR_BAR = 1 << 28
"""Bytes that take as long to copy."""


def render_report(report: Report, *, look: bool, verbose: bool) -> RenderableType:
    """What happened, or to ``look`` would; of a few models also their buffers and what is next."""
    parts: list[RenderableType] = []
    detailed = verbose or len(report.models) <= _MAX_DETAILED_MODELS
    for model in report.models:
        parts.append(_render_headline(model, look=look))
        if detailed and not model.failed and model.pairs:
            details = [_render_buffers(model), *([_render_layer_table(model)] if verbose else [])]
            parts.append(Padding(Group(*details), (0, 0, 0, 2)))
            parts += _render_next_command(model)
    parts += (Text(line, no_wrap=True, overflow="ignore") for line in render_sidecar_states(report))
    if len(report.models) > 1:
        parts.append(_render_total(report, look=look))
    return Group(*parts)


def _render_headline(model: ModelReport, *, look: bool) -> Text:
    # Never folded: a path that is broken in two cannot be copied.
    text = Text(escape_unprintable(model.path), style="bold", no_wrap=True, overflow="ignore")
    text.append(f"  {format_model_state(model, look=look)}", style=_STATUS_STYLES[model.status])
    if model.output != model.path and model.status in ("renamed", "unchanged") and not look:
        text.append(f"  -> {escape_unprintable(model.output)}", style="not bold")
    return text


def _render_buffers(model: ModelReport) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _list_buffer_rows(model):
        grid.add_row(label, Text(text))
    return grid


def _list_buffer_rows(model: ModelReport) -> Iterator[tuple[str, str]]:
    kinds: dict[str, list[KvPair]] = {}
    for pair in model.pairs:
        kinds.setdefault(pair.kind, []).append(pair)
    for kind, pairs in kinds.items():
        buffers = ", ".join(dict.fromkeys(pair.buffer for pair in pairs))
        layers = sorted({pair.layer for pair in pairs})
        yield (
            escape_unprintable(kind),
            f"{escape_unprintable(buffers)} of {format_layer_ranges(layers)}",
        )
    first = next(
        (end for pair in model.pairs for end in pair.sides if end.old_name != end.new_name), None
    )
    if first is not None:
        yield (
            "names",
            f"{escape_unprintable(first.old_name)} -> {escape_unprintable(first.new_name)}",
        )
    for reason, names in _group_unchanged_names(model.unchanged_names).items():
        yield "kept", f"{escape_unprintable(reason)}: {', '.join(names)}"


def _render_next_command(model: ModelReport) -> Iterator[RenderableType]:
    """The call that hands the result back, on one line however narrow the terminal: to copy."""
    if model.feed_back_call is not None and model.status in ("renamed", "unchanged"):
        text = Text("  next  ", style="dim", no_wrap=True, overflow="ignore")
        yield text.append(escape_unprintable(model.feed_back_call), style="not dim")


def _group_unchanged_names(kept: Iterable[UnchangedName]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for item in kept:
        if item.reason != REASON_NOT_RETAINED:
            reasons.setdefault(item.reason, []).append(escape_unprintable(item.name))
    return reasons


def _render_layer_table(model: ModelReport) -> Table:
    """Each buffer under its new names; what changes is green."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("layer", justify="right")
    table.add_column("input", overflow="fold")
    table.add_column("retained output", overflow="fold")
    for pair in model.pairs:
        ends = (pair.input, pair.output)
        table.add_row(
            str(pair.layer), *(Text("-") if end is None else _render_new_name(end) for end in ends)
        )
    return table


def _render_new_name(end: PairSide) -> Text:
    return Text(
        escape_unprintable(end.new_name), style="green" if end.new_name != end.old_name else ""
    )


def _render_total(report: Report, *, look: bool) -> Text:
    words = {"would-rename": "would change" if look else "left alone"}
    counts = Counter(words.get(model.status, model.status) for model in report.models)
    text = ", ".join(f"{count} {word}" for word, count in counts.items())
    return Text(f"{len(report.models)} models: {text}", style="bold")


def build_table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """A table of texts from a model, which are no markup; a cell that does not fit is folded."""
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        drawn.add_column(head.lower(), overflow="fold")
    for row in rows:
        drawn.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return drawn


def render_lines(parts: Iterable[RenderableType], *, color: bool) -> Iterator[str]:
    """What is drawn, as lines; a text is not folded, so that it can be copied.

    To a reader who has gone, rich itself would end the process.
    """
    paper = Console(highlight=False, color_system="auto" if color else None)
    with paper.capture() as drawn:
        for part in parts:
            paper.print(part, soft_wrap=isinstance(part, Text), crop=False)
    yield from (line.rstrip(" ") for line in drawn.get().splitlines())


class ProgressBars:
    """Bars on stderr, for work that is long; a context that takes them away.

    A :class:`onnxkvrename.running.Watch`.
    """

    def __init__(self) -> None:
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            console=Console(stderr=True),
            transient=True,
        )

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.progress.tasks:  # on a dumb terminal it would leave an empty line behind
            self.progress.stop()

    def track_models(self, doing: str, count: int) -> ProgressCallback | None:
        """A bar for many models."""
        return self._start_bar(doing, count, str) if count >= _MIN_MODELS_FOR_BAR else None

    def track_data_file(self, name: str, size: int) -> ProgressCallback | None:
        """A bar for a large file."""
        return (
            self._start_bar(f"copying {escape_unprintable(name)}", size, decimal)
            if size >= _MIN_BYTES_FOR_BAR
            else None
        )

    def _start_bar(self, what: str, total: int, amount: Callable[[int], str]) -> ProgressCallback:
        task = self.progress.add_task(what, total=total, amount="")
        self.progress.start()
        done = 0

        def heard(more: int) -> None:
            nonlocal done
            done += more
            said = f"{amount(done)} of {amount(total)}"
            self.progress.update(task, completed=done, amount=said, visible=done < total)

        return heard
