"""Check that heads and states can be divided among the tensor parallel ranks of both sides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onnxkvrename.findings import (
    Finding,
    build_finding,
    format_count,
    format_layers,
    report_names,
)
from onnxkvrename.layout.layout import KvBuffer, Layout


class TensorParallelSizes(NamedTuple):
    """The number of tensor parallel ranks on each side.

    Attributes:
        prefill: Ranks of prefill.
        decode: Ranks of decode.
    """

    prefill: int
    decode: int


class _ShardedAxis(NamedTuple):
    """The axis of a buffer that is divided among ranks.

    The unit, in the singular, is what the axis counts. Several ranks may hold the same one if it
    can replicate.
    """

    unit: str
    size: int
    can_replicate: bool


def check_tensor_parallelism(
    prefill: Layout, decode: Layout, ranks: TensorParallelSizes
) -> Iterator[Finding]:
    """Yield KV619 for each kind of buffer that cannot be divided.

    Heads are divided among ranks. If there are more ranks than heads, each head is replicated on
    the same number of ranks. States are divided, never replicated. MLA buffers are whole on every
    rank. The ranks of one side must be a multiple of the other's, because a rank reads whole heads
    from whole ranks.

    Source: vLLM 0.24, ``ModelConfig.get_num_kv_heads``, ``MambaStateShapeCalculator``, and
    ``tp_ratio`` in ``kv_connector/utils.py``.
    """
    for side, layout, count in (
        ("prefill", prefill, ranks.prefill),
        ("decode", decode, ranks.decode),
    ):
        yield from _check_divisible(side, layout, count)
    if max(ranks) % min(ranks):
        yield build_finding(
            "KV619",
            "",
            f"prefill has {format_count(ranks.prefill, 'rank')} and decode has {ranks.decode}: "
            "neither is a multiple of the other",
            "choose numbers of ranks so that one is a multiple of the other",
        )


def list_sharding_notes(
    prefill: Layout, decode: Layout, ranks: TensorParallelSizes
) -> Iterator[str]:
    """Yield notes on replicated heads, and on states whose segments the graph does not show."""
    for side, layout, count in (
        ("prefill", prefill, ranks.prefill),
        ("decode", decode, ranks.decode),
    ):
        axes = [axis for buffer in layout.buffers if (axis := _find_sharded_axis(layout, buffer))]
        fewest = min((axis.size for axis in axes if axis.can_replicate), default=count)
        if fewest < count and count % fewest == 0:
            heads = format_count(fewest, "head")
            yield f"{side}: {heads} on {count} ranks, each on {count // fewest} of them"
    if any(map(_is_convolution, prefill.buffers)) and ranks.prefill != ranks.decode:
        yield (
            "not checked: convolution states divide in segments (query, key, value), and the "
            "graph does not show where these begin"
        )


def _check_divisible(side: str, layout: Layout, ranks: int) -> Iterator[Finding]:
    groups: dict[tuple[str, int], list[KvBuffer]] = {}
    for buffer in layout.buffers:
        axis = _find_sharded_axis(layout, buffer)
        if axis is None or axis.size % ranks == 0:
            continue
        if not (axis.can_replicate and ranks % axis.size == 0):
            groups.setdefault((axis.unit, axis.size), []).append(buffer)
    for (unit, size), buffers in groups.items():
        layers = format_layers(sorted({buffer.layer for buffer in buffers}))
        yield from report_names(
            "KV619",
            [buffer.names[0] for buffer in buffers],
            ("has", "have"),
            f"{format_count(size, unit)}, which cannot be divided among "
            f"{format_count(ranks, 'rank')} of {side} ({layers})",
            f"choose a number of ranks that divides {size}",
            "buffers",
        )


def _find_sharded_axis(layout: Layout, buffer: KvBuffer) -> _ShardedAxis | None:
    """Return axis 1; `None` if it is the context, its size is unknown, or the buffer is MLA's."""
    shape = buffer.shape
    if shape is None or len(shape) < 3 or buffer.traits.is_mla or buffer.sequence_axis == 1:
        return None
    size = layout.resolve_shape(shape)[1]
    if not isinstance(size, int) or size < 1:
        return None
    if buffer.is_state:
        unit = "channel" if _is_convolution(buffer) else "state head"
        return _ShardedAxis(unit, size, can_replicate=False)
    return _ShardedAxis("head", size, can_replicate=True) if len(shape) == 4 else None


def _is_convolution(buffer: KvBuffer) -> bool:
    return buffer.is_state and buffer.shape is not None and len(buffer.shape) == 3
