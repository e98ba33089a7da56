"""Name a layout in one line: its models, and how many buffers they have."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from onnxkvrename.findings import format_count, format_layers
from onnxkvrename.layout.layout import Layout


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


def _is_uniform(names: Sequence[str]) -> bool:
    return len({*names}) == 1
