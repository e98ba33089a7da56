"""Progress bars on a terminal, for work that takes long; only then, rich is loaded."""

from __future__ import annotations

import sys
from contextlib import suppress
from threading import Lock, Timer
from typing import IO, TYPE_CHECKING, Any, cast

from onnxkvrename.files.temp_file import ProgressCallback

if TYPE_CHECKING:
    from rich.progress import Progress

_SECONDS_WITHOUT_BARS = 1.0
"""For work that takes no longer, a bar would only flicker."""


class _LossyStream:
    """A stream that drops what it cannot write: a terminal that is gone is not an error."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class _Bar:
    """How far one step of the work is.

    Attributes:
        doing: The step.
        total: How much there is to do.
        is_bytes: Whether bytes are counted, else files.
        done: How much is done.
        task: Its number on the display, once there is one.
    """

    def __init__(self, doing: str, total: int, is_bytes: bool) -> None:
        self.doing = doing
        self.total = total
        self.is_bytes = is_bytes
        self.done = 0
        self.task: Any = None


class ProgressBars:
    """Bars on stderr that appear if the work takes long, and disappear at the end of the context.

    Until then, nothing is loaded or drawn. A ``Progress`` of :mod:`onnxkvrename.renaming.write`.
    """

    def __init__(self) -> None:
        self.progress: Progress | None = None
        self._bars: list[_Bar] = []
        self._lock = Lock()
        self._timer = Timer(_SECONDS_WITHOUT_BARS, self.show)
        self._timer.daemon = True

    def __enter__(self) -> ProgressBars:
        self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()
        self._timer.join()
        if self.progress is not None:
            self.progress.stop()

    def track_models(self, doing: str, count: int) -> ProgressCallback | None:
        """Start a bar for `count` models; ``None`` for a single one."""
        return self._start_bar(_Bar(doing, count, is_bytes=False)) if count > 1 else None

    def track_bytes(self, doing: str, size: int) -> ProgressCallback:
        """Start a bar for `size` bytes."""
        return self._start_bar(_Bar(doing, size, is_bytes=True))

    def _start_bar(self, bar: _Bar) -> ProgressCallback:
        with self._lock:
            self._bars.append(bar)
            self._update(bar)

        def advance(amount: int) -> None:
            with self._lock:
                bar.done += amount
                self._update(bar)

        return advance

    def show(self) -> None:
        """Draw the bars from now on, if the system lets it."""
        with suppress(ImportError, OSError):
            from rich.console import Console  # only for work that takes long
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
                TimeRemainingColumn(elapsed_when_finished=True),
            )
            console = Console(file=cast(IO[str], _LossyStream(sys.stderr)))
            with self._lock:
                self.progress = Progress(*columns, console=console, transient=True)
                for bar in self._bars:
                    self._update(bar)
                self.progress.start()

    def _update(self, bar: _Bar) -> None:
        """Draw a bar as it is; one of bytes stays, as the disk takes longer than the copy."""
        if self.progress is None:
            return
        from rich.filesize import decimal  # as above

        if bar.task is None:
            bar.task = self.progress.add_task(bar.doing, total=bar.total, amount="")
        is_done = bar.done >= bar.total
        format_amount = decimal if bar.is_bytes else "{:,}".format
        speed = next(task.speed for task in self.progress.tasks if task.id == bar.task)
        rate = f", {decimal(int(speed))}/s" if speed and bar.is_bytes else ""
        self.progress.update(
            bar.task,
            completed=bar.done,
            description="waiting for the disk" if is_done and bar.is_bytes else bar.doing,
            amount=f"{format_amount(bar.done)} of {format_amount(bar.total)}{rate}",
            visible=bar.is_bytes or not is_done,
        )
