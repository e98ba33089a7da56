"""Layer numbers as text: ranges of consecutive layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnxkvrename.findings import format_list


def format_layers(layers: Iterable[int]) -> str:
    """Format sorted layers, as ``layer 3`` or ``layers 0-2, 5``, the first five runs of them."""
    return format_layer_runs(group_layer_runs(layers))


def group_layer_runs(layers: Iterable[int]) -> tuple[range, ...]:
    """Return sorted layers as runs without a gap."""
    ends: list[list[int]] = []
    for layer in layers:
        if ends and ends[-1][1] == layer - 1:
            ends[-1][1] = layer
        else:
            ends.append([layer, layer])
    return tuple(range(first, last + 1) for first, last in ends)


def format_layer_run(run: range) -> str:
    """Format a run as ``3`` or ``0-2``."""
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def format_layer_numbers(layers: Iterable[int]) -> str:
    """Format all of some sorted layers, as ``0-2, 5``."""
    return ", ".join(map(format_layer_run, group_layer_runs(layers)))


def format_layer_runs(runs: Sequence[range]) -> str:
    """Format runs of layers as :func:`format_layers` does, without listing the layers."""
    texts = [format_layer_run(run) for run in runs if run]
    if not texts:
        return "no layer"
    is_single = len(texts) == 1 and texts[0].isdigit()
    return f"layer {texts[0]}" if is_single else f"layers {format_list(texts)}"


def format_layer_ranges(layers: Sequence[int]) -> str:
    """Return sorted layers in full: ``layer 3``, ``layers 0-5, 7``."""
    numbers = format_layer_numbers(layers)
    return f"layer {numbers}" if len(layers) == 1 else f"layers {numbers}"
