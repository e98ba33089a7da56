"""Progress bars on stderr for work that takes long; loads rich, so imported only for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, cast

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn

from onnxkvrename.report.inert import escape_text
from onnxkvrename.storage.temp_file import ProgressCallback

_MIN_MODELS_FOR_BAR = 64
"""Models that take long enough for a bar to be read."""
_MIN_BYTES_FOR_BAR = 1 << 28
"""Bytes that take as long to copy."""


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


class ProgressBars:
    """Bars on stderr that disappear at the end of the context.

    A ``Progress`` of :mod:`onnxkvrename.renaming.place`.
    """

    def __init__(self) -> None:
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            console=Console(file=cast(IO[str], _LossyStream(sys.stderr))),
            transient=True,
        )

    def __enter__(self) -> ProgressBars:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.progress.tasks:  # on a dumb terminal it would leave an empty line behind
            self.progress.stop()

    def track_models(self, doing: str, count: int) -> ProgressCallback | None:
        """Start a bar for `count` models; ``None`` for a few."""
        return self._start_bar(doing, count, str) if count >= _MIN_MODELS_FOR_BAR else None

    def track_data_file(self, name: str, size: int) -> ProgressCallback | None:
        """Start a bar for a file of `size` bytes; ``None`` for a small one."""
        if size < _MIN_BYTES_FOR_BAR:
            return None
        return self._start_bar(f"copying {escape_text(name)}", size, decimal)

    def _start_bar(
        self, description: str, total: int, format_amount: Callable[[int], str]
    ) -> ProgressCallback:
        task = self.progress.add_task(description, total=total, amount="")
        self.progress.start()
        done = 0

        def advance(amount: int) -> None:
            nonlocal done
            done += amount
            text = f"{format_amount(done)} of {format_amount(total)}"
            self.progress.update(task, completed=done, amount=text, visible=done < total)

        return advance
