"""What NIXL moves of a prompt: blocks of each group, regions, descriptors and bytes.

After vLLM 0.24.0 and 0.33.0, ``distributed/kv_transfer/kv_connector/v1/nixl``:
``base_scheduler.py`` (windows are clipped to ``blocks_per_sw``) and ``base_worker.py``
(``register_kv_caches``, ``_compute_desc_ids``). Blocks are as large for the kernel as
for vLLM, nothing is cached, and both sides have as many ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxkvrename.pages import MLA, Spec
from onnxkvrename.uniformity import Group

_STATE_STREAMS = 4
"""In 0.24 three projections of a convolution state, and the recurrent state."""


class Transfer(NamedTuple):
    """What a prompt of so many tokens takes; ``None`` is what is not known.

    ``blocks`` are those of each group. ``regions`` counts as vLLM does: with
    key and value apart where they are.
    """

    tokens: int
    blocks: tuple[int | None, ...]
    regions: int | None
    descriptors: int | None
    bytes: int | None


class Region(NamedTuple):
    """A piece of memory with a descriptor for each block: its bytes, and whose blocks it holds."""

    size: int
    groups: frozenset[int]


def blocks_of(groups: Iterable[Group], tokens: int) -> tuple[int | None, ...]:
    """The blocks of each group that are moved for a prompt."""
    return tuple(_blocks(group.first, tokens) for group in groups)


def moved(
    tokens: int,
    blocks: tuple[int | None, ...],
    groups: Sequence[Group],
    pages: Sequence[int],
    stride: int | None,
) -> Transfer:
    """What 0.24 moves: blocks of ``stride`` bytes, or each group's blocks in all ``pages``."""
    known = [count for count in blocks if count is not None]
    nothing = Transfer(tokens, blocks, None, None, None)
    if len(known) < len(blocks):
        return nothing
    if stride is not None:
        return Transfer(tokens, blocks, 1, sum(known), sum(known) * stride)
    streams = _streams(groups, pages)
    if streams is None:
        return nothing
    regions = streams * len(pages)
    descriptors = size = 0
    for group, count in zip(groups, known, strict=True):
        state = group.first.kind == "mamba"
        descriptors += count * (_STATE_STREAMS * len(pages) if state else regions)
        size += count * (group.first.unpadded * len(pages) if state else sum(pages))
    return Transfer(tokens, blocks, regions, descriptors, size)


def through(
    tokens: int, blocks: tuple[int | None, ...], regions: Sequence[Region] | None
) -> Transfer:
    """What 0.33 moves through regions.

    A region of one group takes that group's blocks only, unless all are of
    one group; a region of several takes those of all groups.
    """
    known = [count for count in blocks if count is not None]
    if regions is None or len(known) < len(blocks):
        return Transfer(tokens, blocks, None if regions is None else len(regions), None, None)
    descriptors = size = 0
    for region in regions:
        shared = len(region.groups) > 1
        count = sum(n for at, n in enumerate(known) if shared or at in region.groups)
        descriptors += count
        size += count * region.size
    return Transfer(tokens, blocks, len(regions), descriptors, size)


def _blocks(spec: Spec, tokens: int) -> int | None:
    """Blocks of a prompt; a window may start within a block, and so takes one more."""
    if spec.kind == "mamba":
        return 1
    if spec.kind in ("cross_attention", "chunked_local_attention") or spec.block_size is None:
        return None
    whole = -(-tokens // spec.block_size)
    if spec.kind not in ("sliding_window", "sliding_window_mla"):
        return whole
    if not isinstance(spec.window, int):
        return None
    return min(whole, -(-spec.window // spec.block_size) + 1)


def _streams(groups: Sequence[Group], pages: Sequence[int]) -> int | None:
    """Descriptors of a block in one tensor: key and value apart, MLA's latent as one.

    Not known where some layers are MLA, where values differ from keys in size, and
    where states differ or stand alone; attention in tensors of several sizes is refused.
    """
    specs = [spec for group in groups for spec in group.specs]
    attention = [spec for spec in specs if spec.kind != "mamba"]
    states = {spec.unpadded for spec in specs if spec.kind == "mamba"}
    mla = {spec.kind in MLA for spec in attention}
    if len(mla) != 1 or len(states) > 1:
        return None
    if True in mla:
        return None if states else 1
    uneven = any(spec.head_size != spec.head_size_v for spec in attention)
    return None if uneven or len(set(pages)) > 1 else 2
