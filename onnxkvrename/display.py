"""What a user of the library sees of a large record: one line as its repr, and its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from onnxkvrename.limits import shorten_text

_Record = TypeVar("_Record")
_MAX_LENGTH = 200
_renderers: list[Callable[[Any], str]] = []


def show_briefly(record: type[_Record]) -> type[_Record]:
    """Make a named tuple have one short line as its repr, and what a terminal shows as its str."""
    setattr(record, "__repr__", describe_briefly)  # noqa: B010 - not a member of the type
    setattr(record, "__str__", _render)  # noqa: B010
    return record


def render_with(renderer: Callable[[Any], str]) -> None:
    """Take the function that knows what a terminal shows of a record: those are further up."""
    _renderers[:] = [renderer]


def _render(record: Any) -> str:
    return _renderers[0](record) if _renderers else describe_briefly(record)


def describe_briefly(record: Any) -> str:
    """Return a named tuple as one line: its plain fields, and how much is in the others."""
    defaults = record._field_defaults
    shown = (
        f"{name}={_describe_value(value)}"
        for name, value in zip(record._fields, record, strict=True)
        if name not in defaults or value != defaults[name]
    )
    text = f"{type(record).__name__}({', '.join(shown)})"
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 2]}…)"


def _describe_value(value: Any) -> str:
    if value is None or isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return repr(shorten_text(str(value)))
    if isinstance(value, (tuple, frozenset, Mapping)) and not hasattr(value, "_fields"):
        return f"<{len(value)}>"
    return f"<{type(value).__name__}>"
