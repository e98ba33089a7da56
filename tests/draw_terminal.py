"""Show lines as a terminal shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from onnxkvrename.report.formats import Line

_Shown = TypeVar("_Shown")


def draw_plain(
    render: Callable[[_Shown, int], Iterator[Line]], shown: _Shown, width: int = 80
) -> str:
    """Return the text that a terminal without color shows."""
    return "".join(f"{line.text}\n" for line in render(shown, width))
