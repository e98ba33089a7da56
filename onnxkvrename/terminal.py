"""Results as a person at a terminal wants to read them. Imported only where there is one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from onnxkvrename import drafts
from onnxkvrename.planning import PLAIN, End, Kept, Pair
from onnxkvrename.reporting import show, state
from onnxkvrename.results import ModelReport, Report

_STYLES = {"renamed": "green", "would-rename": "yellow", "unchanged": "cyan", "failed": "red"}
_FEW = 4
"""Models of which more is said than one line."""
_LONG = 1 << 28
"""Bytes that take long enough to copy for a bar to be read."""


def summary(report: Report, *, look: bool, verbose: bool) -> RenderableType:
    """What happened, or to ``look`` would; of a few models also their buffers and what is next."""
    parts: list[RenderableType] = []
    detailed = verbose or len(report.models) <= _FEW
    for model in report.models:
        parts.append(_headline(model, look=look))
        if detailed and not model.failed and model.pairs:
            details = [_buffers(model), *([_layers(model)] if verbose else [])]
            parts.append(Padding(Group(*details), (0, 0, 0, 2)))
            parts += _next(model)
    if len(report.models) > 1:
        parts.append(_total(report, look=look))
    return Group(*parts)


def _headline(model: ModelReport, *, look: bool) -> Text:
    # Never folded: a path that is broken in two cannot be copied.
    text = Text(show(model.path), style="bold", no_wrap=True, overflow="ignore")
    text.append(f"  {state(model, look=look)}", style=_STYLES[model.status])
    if model.output != model.path and model.status in ("renamed", "unchanged") and not look:
        text.append(f"  -> {show(model.output)}", style="not bold")
    return text


def _buffers(model: ModelReport) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _rows(model):
        grid.add_row(label, Text(text))
    return grid


def _rows(model: ModelReport) -> Iterator[tuple[str, str]]:
    kinds: dict[str, list[Pair]] = {}
    for pair in model.pairs:
        kinds.setdefault(pair.kind, []).append(pair)
    for kind, pairs in kinds.items():
        buffers = ", ".join(dict.fromkeys(pair.buffer for pair in pairs))
        layers = sorted({pair.layer for pair in pairs})
        yield show(kind), f"{show(buffers)} of {_ranges(layers)}"
    first = next((end for pair in model.pairs for end in pair.ends if end.old != end.new), None)
    if first is not None:
        yield "names", f"{show(first.old)} -> {show(first.new)}"
    for reason, names in _kept(model.kept).items():
        yield "kept", f"{show(reason)}: {', '.join(names)}"


def _next(model: ModelReport) -> Iterator[RenderableType]:
    """The call that hands the result back, on one line however narrow the terminal: to copy."""
    if model.feed_back is not None and model.status in ("renamed", "unchanged"):
        text = Text("  next  ", style="dim", no_wrap=True, overflow="ignore")
        yield text.append(show(model.feed_back), style="not dim")


def _kept(kept: Iterable[Kept]) -> dict[str, list[str]]:
    reasons: dict[str, list[str]] = {}
    for item in kept:
        if item.reason != PLAIN:
            reasons.setdefault(item.reason, []).append(show(item.name))
    return reasons


def _ranges(layers: list[int]) -> str:
    """``layers 0-5, 7``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer {text}" if len(layers) == 1 else f"layers {text}"


def _layers(model: ModelReport) -> Table:
    """Each buffer under its new names; what changes is green."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("layer", justify="right")
    table.add_column("input", overflow="fold")
    table.add_column("retained output", overflow="fold")
    for pair in model.pairs:
        ends = (pair.input, pair.output)
        table.add_row(str(pair.layer), *(Text("-") if end is None else _new(end) for end in ends))
    return table


def _new(end: End) -> Text:
    return Text(show(end.new), style="green" if end.new != end.old else "")


def _total(report: Report, *, look: bool) -> Text:
    words = {"would-rename": "would change" if look else "left alone"}
    counts = Counter(words.get(model.status, model.status) for model in report.models)
    text = ", ".join(f"{count} {word}" for word, count in counts.items())
    return Text(f"{len(report.models)} models: {text}", style="bold")


@contextmanager
def copy_bar(name: str, size: int) -> Iterator[drafts.Progress | None]:
    """A bar on stderr for the file ``name`` of ``size`` bytes, if it takes long to copy.

    It is gone when the file is there, and when the context ends, whatever ends it.
    """
    if size < _LONG:
        yield None
        return
    bar = Progress(
        TextColumn("copying {task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(show(name), total=size)

    def heard(copied: int) -> None:
        bar.update(task, advance=copied)
        if bar.finished:
            bar.stop()

    with bar:
        yield heard
