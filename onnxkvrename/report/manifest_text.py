"""Show a layout as text: its buffers, their bytes, and unknown sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from onnxkvrename.findings import (
    format_bytes,
    format_count,
    format_layer_numbers,
    format_layers,
    format_list,
)
from onnxkvrename.layout.layout import (
    KvBuffer,
    Layout,
    Shape,
    classify_growth,
    compute_byte_totals,
    fold_alike,
    format_size_option,
)
from onnxkvrename.layout.manifest import compute_kv_layout_sha256
from onnxkvrename.model.signature import format_shape
from onnxkvrename.report.formats import Line, Span, build_line
from onnxkvrename.report.formats.text import BOLD
from onnxkvrename.report.tables import render_facts, render_table

COLUMN_HEADS = ("KIND", "PARTS", "LAYERS", "DTYPE", "SHAPE", "UPDATE", "BYTES EACH")


class BufferRow(NamedTuple):
    """Equal buffers of the same layers, as texts.

    Attributes:
        kind: vLLM's kind of cache, with a remark if it is a guess.
        parts: The parts of a layer, such as ``key, value``.
        layers: Runs of layers, such as ``0-5, 7``.
        dtype: ONNX's dtype.
        shape: The shape, with known sizes next to their symbols.
        update: How the outputs are made from the inputs.
        bytes_each: Bytes of one buffer for a token, or for a sequence where none grows.
    """

    kind: str
    parts: str
    layers: str
    dtype: str
    shape: str
    update: str
    bytes_each: str


def format_layout_title(layout: Layout) -> str:
    """Return the paths of a layout's models with the number of their buffers and layers."""
    if not layout.models and not layout.buffers:
        return "no KV buffer in any of the models"
    if not layout.buffers:
        return format_model_paths(layout.models)
    return f"{format_model_paths(layout.models)}: {format_layout_summary(layout)}"


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


def format_layout_summary(layout: Layout) -> str:
    """Return the number of buffers and the layers that have them."""
    if not layout.buffers:
        return "no KV buffer"
    buffers = format_count(len(layout.buffers), "buffer")
    return f"{buffers}, {format_layers(layout.layers)}"


def build_buffer_rows(layout: Layout) -> tuple[BufferRow, ...]:
    """Return the buffers as rows, equal ones merged, in the order of their layers."""
    rows = fold_alike(
        (buffer.part, buffer.layer, _describe_buffer(layout, buffer)) for buffer in layout.buffers
    )
    return tuple(
        BufferRow(kind, ", ".join(parts), format_layer_numbers(sorted(layers)), *traits)
        for parts, layers, (kind, *traits) in rows
    )


def _describe_buffer(layout: Layout, buffer: KvBuffer) -> tuple[str, str, str, str, str]:
    """Return the kind, dtype, shape, update and bytes of a buffer, which make a row."""
    kind = buffer.kind + " (a guess)" * buffer.kind_guessed
    shape = _format_buffer_shape(layout, buffer)
    return kind, buffer.dtype, shape, str(buffer.update), _format_bytes_each(layout, buffer)


def list_layout_facts(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield labels and texts: the totals in bytes, unknown and known sizes, and the digest."""
    if not layout.buffers:
        return
    totals = compute_byte_totals(layout)
    growths = {classify_growth(buffer) for buffer in layout.buffers}
    if "context" in growths:
        yield "per token", format_bytes(totals.bytes_per_token.context)
    if "window" in growths:
        yield "per token in a window, in addition", format_bytes(totals.bytes_per_token.window)
    if "encoder" in growths:
        yield "per token of the encoder", format_bytes(totals.bytes_per_token.encoder)
    if any(buffer.is_state for buffer in layout.buffers):
        yield "states per sequence", format_bytes(totals.state_bytes)
    yield "per sequence", format_bytes(totals.sequence_bytes)
    first_shape, batch_bytes = layout.buffers[0].shape, totals.batch_bytes
    if batch_bytes is not None and batch_bytes != totals.sequence_bytes and first_shape:
        yield f"per batch of {layout.resolve_shape(first_shape)[0]}", format_bytes(batch_bytes)
    symbols = layout.unresolved_symbols
    if symbols:
        options = " ".join(map(format_size_option, symbols))
        yield "unknown sizes", f"{format_list(symbols)}; pass {options}"
    if layout.sizes:
        known_sizes = (f"{symbol}={size}" for symbol, size in layout.sizes.items())
        yield "sizes", ", ".join(known_sizes)
    yield "kv_layout_sha256", compute_kv_layout_sha256(layout) or ""


def render_layout(layout: Layout, width: int | None) -> Iterator[Line]:
    """Yield a layout as lines: a title, the buffers in columns, then the facts.

    Args:
        layout: The layout.
        width: The columns of the terminal; `None` for a pipe.
    """
    yield build_line(Span(format_layout_title(layout), BOLD))
    table = [COLUMN_HEADS, *build_buffer_rows(layout)] if layout.buffers else []
    yield from render_table(table, width, indent="  ")
    yield from render_facts(list(list_layout_facts(layout)), width, indent="  ")


def _format_buffer_shape(layout: Layout, buffer: KvBuffer) -> str:
    if buffer.shape is None:
        return "rank unknown"
    return format_shape(_annotate_shape(layout, buffer.shape))


def _format_bytes_each(layout: Layout, buffer: KvBuffer) -> str:
    """Return the bytes that a token adds to a buffer, or those of a sequence."""
    if buffer.sequence_axis is not None:
        size, per = layout.compute_token_bytes(buffer), "per token"
    else:
        size, per = layout.compute_sequence_bytes(buffer), "per sequence"
    return "unknown" if size is None else f"{size:,} {per}"


def _annotate_shape(layout: Layout, shape: Shape) -> Shape:
    """Return a shape with each known size next to its symbol."""
    return tuple(
        f"{dim}={layout.sizes[dim]}" if isinstance(dim, str) and dim in layout.sizes else dim
        for dim in shape
    )
