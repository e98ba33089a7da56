"""Name a layout in one line: its models, and how many buffers they have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from onnxkvrename.layout.layout import Layout
from onnxkvrename.rules.qefficient import MERGED, WINDOW_SETS
from onnxkvrename.text import format_count, format_layers


def format_layout_title(layout: Layout) -> str:
    """Return the paths of a layout's models with the number of their buffers and layers."""
    buffers = format_count(len(layout.buffers), "buffer")
    return f"{format_model_paths(layout.models)}: {buffers}, {format_layers(layout.layers)}"


def format_model_paths(models: Sequence[str]) -> str:
    """Return the path of a model, or the directory that several share and their number."""
    if len(models) == 1:
        return models[0]
    folders = [model.split("/")[:-1] for model in models]
    shared = [names[0] for names in takewhile(_is_uniform, zip(*folders, strict=False))]
    if not shared and any(model.startswith("/") for model in models):
        return f"{len(models)} models"
    directory = "/".join(shared) or ("/" if shared else ".")
    return f"{directory} ({len(models)} models)"


def format_missing_windows(layout: Layout) -> str:
    """Return which layers no window has, after a verdict on all of them; empty for a whole model.

    Before the last layer, what a window returns is as wide as what the next one takes.
    """
    parts = [WINDOW_SETS.parse_path(path) for path in layout.models]
    names = [part.name for part in parts if part is not None and part.name.stage != MERGED]
    if not names or len(names) < len(parts):
        return ""
    first, last = min(name.first_layer for name in names), max(layout.layers)
    missing = [format_layers(range(first))] if first else []
    widths = [
        value.shape[-1]
        for name, values in zip(
            WINDOW_SETS.seam or (), (layout.outputs, layout.inputs), strict=False
        )
        for value in values
        if value.name.rpartition("/")[2] == name and value.shape
    ]
    is_last_there = len(widths) == 2 and all(isinstance(width, int) for width in widths)
    if not is_last_there or len({*widths}) == 1:
        missing.append(f"layers after {last} if the model has any")
    missed = ", and ".join(missing)
    return f"; not there: {missed} (pass all its windows)" if missing else ""


def _is_uniform(names: Sequence[str]) -> bool:
    return len({*names}) == 1
