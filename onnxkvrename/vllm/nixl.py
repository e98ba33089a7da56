"""NIXL's transfers for a prompt: blocks of each group, regions, descriptors and bytes.

This follows ``distributed/kv_transfer/kv_connector/v1/nixl`` of vLLM 0.24.0 and 0.33.0:
``base_scheduler.py`` (``get_sw_clipped_blocks`` of 0.24, ``get_exchange_clipped_blocks`` of 0.33)
and ``base_worker.py`` (``register_kv_caches``, ``_compute_desc_ids``). It supposes that the
kernel's blocks are vLLM's, that nothing is cached, and that both sides have as many ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxkvrename.vllm.specs import (
    CHUNKED_KINDS,
    ENCODER_KINDS,
    MLA_KINDS,
    SLIDING_KINDS,
    KvCacheGroup,
    KvCacheSpec,
)

_DESCRIPTORS_PER_STATE = 4
"""In 0.24 three projections of a convolution state, and the recurrent state."""
_UNCOUNTABLE_KINDS = ENCODER_KINDS | CHUNKED_KINDS
"""Kinds whose blocks do not follow from the prompt alone."""


class NixlTransfer(NamedTuple):
    """The amounts that NIXL transfers for one prompt; unknown ones are ``None``.

    Attributes:
        tokens: The length of the prompt.
        blocks: The number of blocks of each group.
        regions: The number of regions as vLLM counts them: two for a tensor that keeps keys and
            values apart.
        descriptors: The number of descriptors. NIXL merges neighbours, so what it posts may be
            less.
        bytes: Bytes of all descriptors.
        unknown: The reason why amounts are unknown; ``None`` if all are known.
    """

    tokens: int
    blocks: tuple[int | None, ...]
    regions: int | None
    descriptors: int | None
    bytes: int | None
    unknown: str | None = None


class NixlRegion(NamedTuple):
    """A piece of memory that has one descriptor for each block.

    Attributes:
        size: Bytes of a block in it.
        groups: The indexes of the groups whose blocks it holds.
        multiplicity: The number of such regions.
    """

    size: int
    groups: frozenset[int]
    multiplicity: int = 1


def count_blocks(groups: Iterable[KvCacheGroup], prompt_length: int) -> tuple[int | None, ...]:
    """Return the number of blocks of each group that NIXL transfers for a prompt.

    Args:
        groups: The groups.
        prompt_length: The length of the prompt in tokens.
    """
    return tuple(_count_spec_blocks(group.first_spec, prompt_length) for group in groups)


def transfer_v024(
    prompt_length: int,
    blocks: tuple[int | None, ...],
    groups: Sequence[KvCacheGroup],
    page_sizes: Sequence[int],
    block_stride: int | None,
) -> NixlTransfer:
    """Return what 0.24 transfers.

    Args:
        prompt_length: The length of the prompt in tokens.
        blocks: The number of blocks of each group, from `count_blocks`.
        groups: The groups.
        page_sizes: Bytes of a page in each tensor.
        block_stride: Bytes of a block that holds all layers, which is one descriptor; ``None``
            where every block is transferred from every tensor.
    """
    known_blocks = [count for count in blocks if count is not None]
    unknown = explain_unknown_blocks(groups)
    if unknown is None and block_stride is not None:
        descriptors = sum(known_blocks)
        return NixlTransfer(prompt_length, blocks, 1, descriptors, descriptors * block_stride)
    unknown = unknown or _explain_unknown_descriptors(groups, page_sizes)
    if unknown is not None:
        return NixlTransfer(prompt_length, blocks, None, None, None, unknown)
    regions = _count_regions_per_tensor(groups) * len(page_sizes)
    descriptors = size = 0
    for group, block_count in zip(groups, known_blocks, strict=True):
        if group.first_spec.is_state:
            descriptors += block_count * _DESCRIPTORS_PER_STATE * len(page_sizes)
            size += block_count * group.first_spec.unpadded_page_size * len(page_sizes)
        else:
            descriptors += block_count * regions
            size += block_count * sum(page_sizes)
    return NixlTransfer(prompt_length, blocks, regions, descriptors, size)


def transfer_v033(
    prompt_length: int,
    blocks: tuple[int | None, ...],
    regions: Sequence[NixlRegion] | None,
    unknown: str | None = None,
) -> NixlTransfer:
    """Return what 0.33 transfers.

    A region of one group transfers the blocks of that group, a region of several groups those
    of all groups.

    Args:
        prompt_length: The length of the prompt in tokens.
        blocks: The number of blocks of each group, from `count_blocks`.
        regions: The regions that NIXL registers; ``None`` where they are not known.
        unknown: Why the regions or the blocks are not known.
    """
    if regions is None:
        return NixlTransfer(prompt_length, blocks, None, None, None, unknown)
    region_count = sum(region.multiplicity for region in regions)
    known_blocks = [count for count in blocks if count is not None]
    if len(known_blocks) < len(blocks):
        return NixlTransfer(prompt_length, blocks, region_count, None, None, unknown)
    descriptors = size = 0
    for region in regions:
        indexes = region.groups if len(region.groups) == 1 else range(len(known_blocks))
        count = sum(known_blocks[index] for index in indexes) * region.multiplicity
        descriptors += count
        size += count * region.size
    return NixlTransfer(prompt_length, blocks, region_count, descriptors, size)


def explain_unknown_blocks(groups: Iterable[KvCacheGroup]) -> str | None:
    """Return why the blocks of some group are not known; ``None`` where all are known."""
    for group in groups:
        if _count_spec_blocks(group.first_spec, 1) is None:
            window = group.first_spec.window
            if isinstance(window, str):
                return f"the size of {window} (--dim {window}=SIZE)"
            return f"how many blocks {group.kind} takes: it does not follow from the prompt alone"
    return None


def _count_spec_blocks(spec: KvCacheSpec, prompt_length: int) -> int | None:
    """Return the blocks of a prompt; ``None`` if not known.

    vLLM clips windows to ``blocks_per_sw``. A window may start within a block, and so takes one
    block more than it fills.
    """
    if spec.is_state:
        return 1
    if spec.kind in _UNCOUNTABLE_KINDS or spec.block_size is None:
        return None
    prompt_blocks = -(-prompt_length // spec.block_size)
    if spec.kind not in SLIDING_KINDS:
        return prompt_blocks
    if not isinstance(spec.window, int):
        return None
    return min(prompt_blocks, -(-spec.window // spec.block_size) + 1)


def _explain_unknown_descriptors(
    groups: Sequence[KvCacheGroup], page_sizes: Sequence[int]
) -> str | None:
    """Return why the descriptors of a block in 0.24 are not known; ``None`` where they are."""
    specs = [spec for group in groups for spec in group.specs]
    attention = [spec for spec in specs if not spec.is_state]
    state_sizes = {spec.unpadded_page_size for spec in specs if spec.is_state}
    mla_flags = {spec.kind in MLA_KINDS for spec in attention}
    if not attention:
        return "what NIXL moves of states that stand alone"
    if len(mla_flags) > 1:
        return "what NIXL moves where only some layers are MLA"
    if len(state_sizes) > 1:
        return "what NIXL moves of states that differ in size"
    if True in mla_flags:
        return "what NIXL moves of states beside MLA" if state_sizes else None
    if any(spec.head_size != spec.head_size_v for spec in attention):
        return "what NIXL moves where keys and values differ in size"
    if len(set(page_sizes)) > 1:
        return "NIXL refuses attention in tensors of several sizes"
    return None


def _count_regions_per_tensor(groups: Sequence[KvCacheGroup]) -> int:
    """Return 2 where a tensor keeps keys and values apart, 1 for MLA's latent."""
    kinds = {spec.kind for group in groups for spec in group.specs}
    return 1 if kinds & MLA_KINDS else 2
