"""What NIXL moves of a prompt: blocks of each group, regions, descriptors and bytes.

After vLLM 0.24.0 and 0.33.0, ``distributed/kv_transfer/kv_connector/v1/nixl``:
``base_scheduler.py`` (windows are clipped to ``blocks_per_sw``) and ``base_worker.py``
(``register_kv_caches``, ``_compute_desc_ids``). Blocks are as large for the kernel as
for vLLM, nothing is cached, and both sides have as many ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxkvrename.vllm.specs import MLA_KINDS, KvCacheSpec
from onnxkvrename.vllm.uniform_specs import KvCacheGroup

_STATE_DESCRIPTORS = 4
"""In 0.24 three projections of a convolution state, and the recurrent state."""


class NixlTransfer(NamedTuple):
    """What a prompt of so many tokens takes; ``None`` is what is not known.

    ``blocks`` are those of each group. ``regions`` counts as vLLM does: with
    key and value apart where they are. ``unknown`` says why something is not known.
    """

    tokens: int
    blocks: tuple[int | None, ...]
    regions: int | None
    descriptors: int | None
    bytes: int | None
    unknown: str | None = None


class NixlRegion(NamedTuple):
    """A piece of memory with a descriptor for each block: its bytes, and whose blocks it holds.

    ``number`` is how many there are of such a piece.
    """

    size: int
    groups: frozenset[int]
    multiplicity: int = 1


def count_blocks(groups: Iterable[KvCacheGroup], tokens: int) -> tuple[int | None, ...]:
    """The blocks of each group that are moved for a prompt."""
    return tuple(_count_spec_blocks(group.first_spec, tokens) for group in groups)


def transfer_v024(
    tokens: int,
    blocks: tuple[int | None, ...],
    groups: Sequence[KvCacheGroup],
    pages: Sequence[int],
    stride: int | None,
) -> NixlTransfer:
    """What 0.24 moves: blocks of ``stride`` bytes, or each group's blocks in all ``pages``."""
    known = [count for count in blocks if count is not None]
    unknown = explain_unknown_blocks(groups)
    if unknown is None and stride is not None:
        return NixlTransfer(tokens, blocks, 1, sum(known), sum(known) * stride)
    unknown = unknown or _explain_unknown_descriptors(groups, pages)
    if unknown is not None:
        return NixlTransfer(tokens, blocks, None, None, None, unknown)
    regions = _count_descriptors(groups) * len(pages)
    descriptors = size = 0
    for group, count in zip(groups, known, strict=True):
        state = group.first_spec.kind == "mamba"
        descriptors += count * (_STATE_DESCRIPTORS * len(pages) if state else regions)
        size += count * (group.first_spec.unpadded_page_size * len(pages) if state else sum(pages))
    return NixlTransfer(tokens, blocks, regions, descriptors, size)


def transfer_v033(
    tokens: int,
    blocks: tuple[int | None, ...],
    regions: Sequence[NixlRegion] | None,
    unknown: str | None = None,
) -> NixlTransfer:
    """What 0.33 moves through regions; ``unknown`` is why they or the blocks are not known.

    A region of one group takes that group's blocks only, unless all are of
    one group; a region of several takes those of all groups.
    """
    known = [count for count in blocks if count is not None]
    if regions is None:
        return NixlTransfer(tokens, blocks, None, None, None, unknown)
    pieces = sum(region.multiplicity for region in regions)
    if len(known) < len(blocks):
        return NixlTransfer(tokens, blocks, pieces, None, None, unknown)
    descriptors = size = 0
    for region in regions:
        taken = known if len(region.groups) > 1 else [known[at] for at in region.groups]
        count = sum(taken) * region.multiplicity
        descriptors += count
        size += count * region.size
    return NixlTransfer(tokens, blocks, pieces, descriptors, size)


def explain_unknown_blocks(groups: Iterable[KvCacheGroup]) -> str | None:
    """Why the blocks of some group are not known; ``None`` where those of all are."""
    for group in groups:
        if _count_spec_blocks(group.first_spec, 1) is None:
            if isinstance(group.first_spec.window, str):
                return (
                    f"the size of {group.first_spec.window} (--dim {group.first_spec.window}=SIZE)"
                )
            return f"how many blocks {group.kind} takes: it does not follow from the prompt alone"
    return None


def _count_spec_blocks(spec: KvCacheSpec, tokens: int) -> int | None:
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


def _explain_unknown_descriptors(
    groups: Sequence[KvCacheGroup], pages: Sequence[int]
) -> str | None:
    """Why the descriptors of a block in one tensor are not known; ``None`` where they are."""
    specs = [spec for group in groups for spec in group.specs]
    attention = [spec for spec in specs if spec.kind != "mamba"]
    states = {spec.unpadded_page_size for spec in specs if spec.kind == "mamba"}
    mla = {spec.kind in MLA_KINDS for spec in attention}
    if not attention:
        return "what NIXL moves of states that stand alone"
    if len(mla) > 1:
        return "what NIXL moves where only some layers are MLA"
    if len(states) > 1:
        return "what NIXL moves of states that differ in size"
    if True in mla:
        return "what NIXL moves of states beside MLA" if states else None
    if any(spec.head_size != spec.head_size_v for spec in attention):
        return "what NIXL moves where keys and values differ in size"
    return "NIXL refuses attention in tensors of several sizes" if len(set(pages)) > 1 else None


def _count_descriptors(groups: Sequence[KvCacheGroup]) -> int:
    """Descriptors of a block in one tensor: key and value apart, MLA's latent as one."""
    kinds = {spec.kind for group in groups for spec in group.specs}
    return 1 if kinds & MLA_KINDS else 2
