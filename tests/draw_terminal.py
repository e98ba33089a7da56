"""Draw rich renderables as a terminal shows them."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def draw_plain(renderable: RenderableType, width: int = 80, encoding: str = "utf-8") -> str:
    """Return the text that a terminal without colour shows."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding, newline="\n")
    Console(file=file, width=width, highlight=False).print(renderable, crop=False)
    file.flush()
    return "".join(f"{line.rstrip()}\n" for line in raw.getvalue().decode(encoding).splitlines())
