"""Buffers that are alike, folded into rows for tables."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

TraitsT = TypeVar("TraitsT", bound=Hashable)


def fold_alike(
    buffers: Iterable[tuple[str, int, TraitsT]],
) -> list[tuple[tuple[str, ...], tuple[int, ...], TraitsT]]:
    """Fold buffers with the same traits into rows, their layers first, then their parts.

    Args:
        buffers: The part, the layer and the traits of each buffer.

    Returns:
        The parts, the layers and the traits of each row, all in the order of their first
        buffer.
    """
    layers_of: dict[tuple[str, TraitsT], list[int]] = {}
    for part, layer, traits in buffers:
        layers_of.setdefault((part, traits), []).append(layer)
    parts_of: dict[tuple[tuple[int, ...], TraitsT], list[str]] = {}
    for (part, traits), layers in layers_of.items():
        parts_of.setdefault((tuple(layers), traits), []).append(part)
    return [(tuple(parts), layers, traits) for (layers, traits), parts in parts_of.items()]
