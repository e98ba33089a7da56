"""Tensor parallelism on two sides: do heads and states divide, and do the two fit together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.rules.window_diff import format_layers

_REPLICATED_KINDS = ("mla_attention", "sliding_window_mla")


class TensorParallelSizes(NamedTuple):
    """How many ranks share the heads, on each side."""

    prefill: int
    decode: int


class _ShardedAxis(NamedTuple):
    """What of a buffer is divided among ranks."""

    unit: str
    size: int
    can_replicate: bool


def check_tensor_parallelism(
    prefill: Layout, decode: Layout, ranks: TensorParallelSizes
) -> Iterator[Finding]:
    """KV619: what does not divide, each kind of fault once.

    Heads divide among ranks, or, where there are fewer heads than ranks, each head
    stands on as many. States divide only. MLA buffers stand whole on every rank.
    Ranks of one side must be a multiple of the other's, since a rank takes whole
    heads from whole ranks. After vLLM: ``ModelConfig.get_num_kv_heads``,
    ``MambaStateShapeCalculator``, and ``tp_ratio`` of ``kv_connector/utils.py`` (0.24).
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
            f"{ranks.prefill} ranks of prefill and {ranks.decode} of decode: neither is a multiple "
            "of the other",
            "choose ranks of which one is a multiple of the other",
        )


def list_sharding_notes(
    prefill: Layout, decode: Layout, ranks: TensorParallelSizes
) -> Iterator[str]:
    """What is no fault, but worth knowing: heads that are repeated, states cut in segments."""
    for side, layout, count in (
        ("prefill", prefill, ranks.prefill),
        ("decode", decode, ranks.decode),
    ):
        shares = [
            share for buffer in layout.buffers if (share := _find_sharded_axis(layout, buffer))
        ]
        fewest = min((share.size for share in shares if share.can_replicate), default=count)
        if fewest < count and count % fewest == 0:
            yield f"{side}: {fewest} heads on {count} ranks, each on {count // fewest} of them"
    conv = [buffer for buffer in prefill.buffers if _is_convolution(buffer)]
    if conv and ranks.prefill != ranks.decode:
        yield (
            "convolution states are divided in segments (query, key, value), whose borders "
            "the graph does not show: not checked"
        )


def _check_divisible(side: str, layout: Layout, ranks: int) -> Iterator[Finding]:
    groups: dict[tuple[str, int], list[Buffer]] = {}
    for buffer in layout.buffers:
        share = _find_sharded_axis(layout, buffer)
        if share is None or share.size % ranks == 0:
            continue
        if not (share.can_replicate and ranks % share.size == 0):
            groups.setdefault((share.unit, share.size), []).append(buffer)
    for (what, count), found in groups.items():
        layers = format_layers(sorted({buffer.layer for buffer in found}))
        yield build_finding(
            "KV619",
            found[0].names[0],
            f"has {count} {what}, which {ranks} ranks of {side} cannot share ({layers})",
            f"choose ranks that divide {count}",
        )


def _find_sharded_axis(layout: Layout, buffer: Buffer) -> _ShardedAxis | None:
    """What is divided: axis 1, unless it is the context or the buffer is MLA's."""
    shape = buffer.shape
    if (
        shape is None
        or len(shape) < 3
        or buffer.kind in _REPLICATED_KINDS
        or buffer.sequence_axis == 1
    ):
        return None
    count = layout.resolve_shape(shape)[1]
    if not isinstance(count, int):
        return None
    if buffer.kind == "mamba":
        return _ShardedAxis(
            "channels" if _is_convolution(buffer) else "heads of a state", count, False
        )
    return _ShardedAxis("heads", count, True) if len(shape) == 4 else None


def _is_convolution(buffer: Buffer) -> bool:
    return buffer.kind == "mamba" and buffer.shape is not None and len(buffer.shape) == 3
