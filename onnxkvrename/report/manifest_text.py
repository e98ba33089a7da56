"""A layout for a person: what is in it, what it weighs, and what is not known; strings out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from onnxkvrename.findings import format_list
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.layout.manifest import (
    classify_growth,
    compute_byte_totals,
    compute_kv_layout_sha256,
)
from onnxkvrename.model.signature import format_shape
from onnxkvrename.report.rename_text import escape_unprintable, format_layer_ranges
from onnxkvrename.rules.window_diff import format_layer_numbers

COLUMN_HEADS = ("KIND", "PARTS", "LAYERS", "DTYPE", "SHAPE", "BYTES EACH")
_BYTE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


class BufferRow(NamedTuple):
    """Buffers that are alike in the same layers; each field is a text under its head."""

    kind: str
    parts: str
    layers: str
    dtype: str
    shape: str
    bytes_each: str


def format_layout_title(layout: Layout) -> str:
    """The model, or all models of a set, and how much is in them."""
    if not layout.buffers:
        return (
            format_model_paths(layout.models)
            if layout.models
            else "no KV buffer in any model given"
        )
    return f"{format_model_paths(layout.models)}: {format_layout_summary(layout)}"


def format_model_paths(models: Sequence[str]) -> str:
    """What to call a model, or several: by their directory, and how many they are."""
    if len(models) == 1:
        return escape_unprintable(models[0])
    folders = [model.split("/")[:-1] for model in models]
    shared = [names[0] for names in takewhile(_is_uniform, zip(*folders, strict=False))]
    if not shared and any(model.startswith("/") for model in models):
        return f"{len(models)} models"
    directory = "/".join(shared) or ("/" if shared else ".")
    return f"{escape_unprintable(directory)} ({len(models)} models)"


def _is_uniform(names: Sequence[str]) -> bool:
    return len({*names}) == 1


def format_layout_summary(layout: Layout) -> str:
    """How many buffers there are, and in which layers."""
    if not layout.buffers:
        return "no KV buffer"
    count = len(layout.buffers)
    return f"{count} {_pluralize('buffer', count)}, {format_layer_ranges(layout.layers)}"


def build_buffer_rows(layout: Layout) -> tuple[BufferRow, ...]:
    """The buffers, those alike in one row, in the order of their layers."""
    found: dict[tuple[str, str, str, str, str], list[int]] = {}
    for buffer in layout.buffers:
        shape = (
            "rank unknown"
            if buffer.shape is None
            else format_shape(_annotate_shape(layout, buffer.shape))
        )
        key = (buffer.kind, buffer.part, buffer.dtype, shape, _format_bytes_each(layout, buffer))
        found.setdefault(key, []).append(buffer.layer)
    alike: dict[tuple[str, tuple[int, ...], str, str, str], list[str]] = {}
    for (kind, part, dtype, shape, each), layers in found.items():
        alike.setdefault((kind, tuple(layers), dtype, shape, each), []).append(part)
    return tuple(
        BufferRow(
            *map(
                escape_unprintable,
                (kind, ", ".join(parts), format_layer_numbers(sorted(layers)), dtype, shape, each),
            )
        )
        for (kind, layers, dtype, shape, each), parts in alike.items()
    )


def list_layout_facts(layout: Layout) -> Iterator[tuple[str, str]]:
    """The totals, what is missing, and the digest, each with a label."""
    if not layout.buffers:
        return
    found = compute_byte_totals(layout)
    kinds = {buffer.kind for buffer in layout.buffers}
    grows = {classify_growth(buffer) for buffer in layout.buffers}
    if "context" in grows:
        yield "a token", format_bytes(found.context)
    if "window" in grows:
        yield "more within a window", format_bytes(found.window)
    if "encoder" in grows:
        yield "a token of the encoder's", format_bytes(found.encoder)
    if "mamba" in kinds:
        yield "states of a sequence", format_bytes(found.states)
    yield "a sequence", format_bytes(found.sequence)
    batch = layout.buffers[0].shape
    if found.batch is not None and found.batch != found.sequence and batch:
        yield f"a batch of {layout.resolve_shape(batch)[0]}", format_bytes(found.batch)
    if layout.unresolved_symbols:
        asked = " ".join(
            f"--dim {escape_unprintable(symbol)}=SIZE" for symbol in layout.unresolved_symbols
        )
        yield (
            "missing",
            f"{format_list([escape_unprintable(symbol) for symbol in layout.unresolved_symbols])}: {asked}",
        )
    if layout.sizes:
        known = (f"{escape_unprintable(symbol)}={size}" for symbol, size in layout.sizes.items())
        yield "with", ", ".join(known)
    yield "kv_layout_sha256", compute_kv_layout_sha256(layout) or ""


def render_layout(layout: Layout) -> Iterator[str]:
    """All of it as lines, in columns."""
    yield format_layout_title(layout)
    table = [COLUMN_HEADS, *build_buffer_rows(layout)] if layout.buffers else []
    yield from format_columns(table)
    yield from format_columns(list(list_layout_facts(layout)))


def format_columns(table: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of texts, each column as wide as it must be."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield "  " + "  ".join(cells).rstrip()


def format_bytes(size: int | None) -> str:
    """Bytes in a unit that fits, and exactly."""
    if size is None:
        return "not known"
    exact = f"{size:,} {_pluralize('byte', size)}"
    power = min((size.bit_length() - 1) // 10, len(_BYTE_UNITS) - 1) if size else 0
    if not power:
        return exact
    return f"{size / (1 << 10 * power):.4g} {_BYTE_UNITS[power]} ({exact})"


def _format_bytes_each(layout: Layout, buffer: Buffer) -> str:
    """What one buffer of a row takes."""
    if buffer.sequence_axis is not None:
        size, per = layout.compute_token_bytes(buffer), "a token"
    else:
        size, per = layout.compute_sequence_bytes(buffer), "a sequence"
    return "not known" if size is None else f"{size:,} {per}"


def _annotate_shape(layout: Layout, shape: Shape) -> Shape:
    """A shape with each size beside its symbol."""
    return tuple(
        f"{dim}={layout.sizes[dim]}" if isinstance(dim, str) and dim in layout.sizes else dim
        for dim in shape
    )


def _pluralize(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
