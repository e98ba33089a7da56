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

from onnxkvrename.report.rename_text import ranges, show, state, text_states
from onnxkvrename.rules.plan import PLAIN, End, Kept, Pair
from onnxkvrename.rules.results import ModelReport, Report
from onnxkvrename.storage.temp_file import Heard

_STYLES = {"renamed": "green", "would-rename": "yellow", "unchanged": "cyan", "failed": "red"}
_FEW = 4
"""Models of which more is said than one line."""
_MANY = 64
"""Models that take long enough for a bar to be read."""
_LONG = 1 << 28
"""Bytes that take as long to copy."""


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
    parts += (Text(line, no_wrap=True, overflow="ignore") for line in text_states(report))
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
        yield show(kind), f"{show(buffers)} of {ranges(layers)}"
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


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """A table of texts from a model, which are no markup; a cell that does not fit is folded."""
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        drawn.add_column(head.lower(), overflow="fold")
    for row in rows:
        drawn.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return drawn


def printed(parts: Iterable[RenderableType], *, color: bool) -> Iterator[str]:
    """What is drawn, as lines; a text is not folded, so that it can be copied.

    To a reader who has gone, rich itself would end the process.
    """
    paper = Console(highlight=False, color_system="auto" if color else None)
    with paper.capture() as drawn:
        for part in parts:
            paper.print(part, soft_wrap=isinstance(part, Text), crop=False)
    yield from (line.rstrip(" ") for line in drawn.get().splitlines())


class Bars:
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

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.progress.tasks:  # on a dumb terminal it would leave an empty line behind
            self.progress.stop()

    def models(self, doing: str, count: int) -> Heard | None:
        """A bar for many models."""
        return self._bar(doing, count, str) if count >= _MANY else None

    def data(self, name: str, size: int) -> Heard | None:
        """A bar for a large file."""
        return self._bar(f"copying {show(name)}", size, decimal) if size >= _LONG else None

    def _bar(self, what: str, total: int, amount: Callable[[int], str]) -> Heard:
        task = self.progress.add_task(what, total=total, amount="")
        self.progress.start()
        done = 0

        def heard(more: int) -> None:
            nonlocal done
            done += more
            said = f"{amount(done)} of {amount(total)}"
            self.progress.update(task, completed=done, amount=said, visible=done < total)

        return heard
