"""Compute the memory that vLLM 0.33 registers with NIXL.

This follows ``register_kv_caches``, ``_build_mamba_local`` and ``_compute_desc_ids`` of
``distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py``. It treats a model with any layer of
MLA as MLA.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxkvrename.vllm.memory import Placement, index_specs, is_block_outermost
from onnxkvrename.vllm.nixl import (
    BlockCost,
    NixlRegistration,
    explain_states_only,
    split_states,
)
from onnxkvrename.vllm.specs import MLA_KINDS, KvCacheGroup, KvCacheSpec, RefusalError

_PARTITION_ERROR = "KV cache view cannot be partitioned into NIXL regions"


class _PlacedLayer(NamedTuple):
    """A layer with the place of its pages.

    Attributes:
        spec: The layer's spec.
        group: The index of its group.
        start: Where its block 0 starts, in bytes; with layers outermost, multiply this by the
            number of blocks.
        block_stride: Bytes from a block to the next one.
        has_contiguous_pages: Whether a page is one piece of memory in its logical order, without
            padding.
    """

    spec: KvCacheSpec
    group: int
    start: int
    block_stride: int
    has_contiguous_pages: bool


class _Memory(NamedTuple):
    """The memory of all layers.

    Attributes:
        bytes_per_block: Bytes of one block of all layers.
        num_blocks: The number of blocks; ``None`` for as many as vLLM needs to tell regions apart.
    """

    bytes_per_block: int
    num_blocks: int | None

    def is_block_major(self, stride: int) -> bool:
        """Return whether vLLM takes blocks with this stride for the whole memory."""
        remaining = self.bytes_per_block - stride
        return (self.num_blocks or self.bytes_per_block) * remaining < stride

    def count_fewest_blocks(self, layer: _PlacedLayer) -> int:
        """Return from how many blocks on vLLM does not take a layer for the whole memory."""
        remaining = self.bytes_per_block - layer.block_stride
        if layer.spec.is_state or layer.has_contiguous_pages or not remaining:
            return 1
        return -(-layer.block_stride // remaining)


class _Region(NamedTuple):
    """Pieces of memory, one after the other, each with one descriptor for each block.

    Attributes:
        length: Bytes of a descriptor.
        stride: Bytes from a block to the next one.
        groups: The indexes of the groups that have pages in it.
        has_states: Whether it contains states.
        multiplicity: The number of pieces.
    """

    length: int
    stride: int
    groups: frozenset[int]
    has_states: bool
    multiplicity: int = 1


def register_layers(
    layout: str,
    groups: Sequence[KvCacheGroup],
    placements: Iterable[Placement],
    bytes_per_block: int,
    num_blocks: int | None = None,
) -> NixlRegistration:
    """Return the registration of groups in a memory layout; with the reason if vLLM refuses it.

    One block takes `bytes_per_block` for all layers. `num_blocks` is the number of blocks, ``None``
    for as many as vLLM needs to tell regions apart.
    """
    layers = _locate_layers(layout, groups, placements)
    block_outermost = is_block_outermost(layout)
    memory = _Memory(bytes_per_block, num_blocks)
    fewest = 1 if num_blocks else max(map(memory.count_fewest_blocks, layers))
    try:
        states = split_states(groups, "0.33")
        regions = _build_regions(layers, memory, block_outermost, states is not None)
    except RefusalError as error:
        return NixlRegistration(None, refused=error.refusal.reason, fewest_blocks=fewest)
    refused = explain_states_only(groups)
    if refused is not None:
        return NixlRegistration(None, refused=refused)
    costs = tuple(_sum_cost(index, group, regions, states) for index, group in enumerate(groups))
    incomplete = None
    # With layers outermost a page of attention is a region, or is refused.
    shared = layers if block_outermost else [layer for layer in layers if layer.spec.is_state]
    if not _are_covered(shared, regions, states):
        incomplete = _explain_gap(states)
    elif any(_is_merged(layer, regions) for layer in layers if not block_outermost):
        incomplete = (
            f"too little is moved: with {num_blocks:,} blocks vLLM treats the largest layer as the "
            "whole memory"
        )
    region_count = sum(region.multiplicity for region in regions.values())
    return NixlRegistration(region_count, costs, incomplete=incomplete, fewest_blocks=fewest)


def _locate_layers(
    layout: str, groups: Sequence[KvCacheGroup], placements: Iterable[Placement]
) -> list[_PlacedLayer]:
    """Return all layers with the places of their pages, in the order of their numbers."""
    specs = index_specs(groups)
    layers = [
        _PlacedLayer(
            specs[member],
            member.group,
            start,
            placement.block_stride,
            _has_contiguous_pages(layout, specs[member]),
        )
        for placement in placements
        for member, start in placement.locate_members()
    ]
    return sorted(layers, key=lambda layer: layer.spec.layer)


def _build_regions(
    layers: Sequence[_PlacedLayer],
    memory: _Memory,
    block_outermost: bool,
    has_states: bool,
) -> dict[int, _Region]:
    """Return the regions by their starts. The first of the layers with the same start decides.

    Raises:
        RefusalError: A page has padding, layers are outermost, and a group has several layers.
    """
    has_whole_rows = (
        block_outermost and not has_states and any(layer.spec.kind in MLA_KINDS for layer in layers)
    )
    regions: dict[int, _Region] = {}
    for layer in layers:
        start, region = _build_region(layer, memory, has_whole_rows)
        known = regions.get(start)
        if known is not None:
            # MLA alone corrects the length that an earlier layer left.
            kept = region if layer.spec.kind in MLA_KINDS else known
            region = kept._replace(
                groups=known.groups | region.groups,
                has_states=known.has_states or region.has_states,
            )
        regions[start] = region
    return regions


def _build_region(
    layer: _PlacedLayer, memory: _Memory, has_whole_rows: bool
) -> tuple[int, _Region]:
    """Return the start of a layer's regions, and the regions."""
    spec, stride = layer.spec, layer.block_stride
    groups = frozenset({layer.group})
    if spec.is_state:
        # vLLM steps by pages, whatever lies between them.
        return layer.start, _Region(spec.page_size, spec.page_size, groups, True)
    if memory.is_block_major(stride):
        if (has_whole_rows and spec.kind in MLA_KINDS) or not layer.has_contiguous_pages:
            return 0, _Region(stride, stride, groups, False)
        return layer.start, _Region(spec.page_size, stride, groups, False)
    if spec.unpadded_page_size % stride:
        raise RefusalError(
            [spec.layer],
            f"{_PARTITION_ERROR}: layer {spec.layer} has {spec.unpadded_page_size} bytes in pages "
            f"of {spec.page_size}",
            "choose a layout that is block-outermost",
        )
    # Heads outside of blocks have a region each.
    count = spec.unpadded_page_size // stride
    length = stride if count > 1 else spec.page_size
    return layer.start, _Region(length, stride, groups, False, count)


def _sum_cost(
    group_index: int,
    group: KvCacheGroup,
    regions: dict[int, _Region],
    states: BlockCost | None,
) -> BlockCost:
    """Return the cost of a block of a group.

    Without states, vLLM reads the blocks of a group from the regions of this group alone and from
    those of several groups. With states, it reads the blocks of attention from every region, and
    those of states from the regions with states.
    """
    if states is not None and group.first_spec.is_state:
        count = sum(region.has_states for region in regions.values())
        return BlockCost(count * states.descriptors, count * states.bytes)
    moved = [
        region
        for region in regions.values()
        if states is not None or _holds_group(region, group_index)
    ]
    return BlockCost(
        sum(region.multiplicity for region in moved),
        sum(region.multiplicity * region.length for region in moved),
    )


def _holds_group(region: _Region, group_index: int) -> bool:
    return len(region.groups) > 1 or group_index in region.groups


def _are_covered(
    layers: Sequence[_PlacedLayer], regions: dict[int, _Region], states: BlockCost | None
) -> bool:
    """Return whether the descriptors of the layers' blocks cover the data of their pages."""
    layers_by_view: dict[tuple[int, bool, int], list[_PlacedLayer]] = {}
    for layer in layers:
        view = (layer.group, layer.spec.is_state, layer.block_stride)
        layers_by_view.setdefault(view, []).append(layer)
    for (group_index, is_state, block_stride), alike in layers_by_view.items():
        pieces = [
            (start, states.bytes if is_state and states is not None else region.length)
            for start, region in sorted(regions.items())
            if region.stride == block_stride
            and (region.has_states if is_state else states or _holds_group(region, group_index))
        ]
        if not _cover(pieces, [(layer.start, layer.spec.unpadded_page_size) for layer in alike]):
            return False
    return True


def _cover(pieces: Sequence[tuple[int, int]], pages: Iterable[tuple[int, int]]) -> bool:
    """Return whether pieces of memory cover pages; both are (start, length), the pieces sorted."""
    remaining = iter(pieces)
    piece = next(remaining, None)
    covered_from = covered_to = 0
    for start, length in sorted(pages):
        while piece is not None and piece[0] <= max(start, covered_to):
            if piece[0] > covered_to:
                covered_from = piece[0]
            covered_to = max(covered_to, sum(piece))
            piece = next(remaining, None)
        # A page may extend over pieces that follow one another without a gap.
        while piece is not None and piece[0] <= covered_to < start + length:
            covered_to = max(covered_to, sum(piece))
            piece = next(remaining, None)
        if not covered_from <= start <= start + length <= covered_to:
            return False
    return True


def _is_merged(layer: _PlacedLayer, regions: dict[int, _Region]) -> bool:
    """Return whether a layer with layers outermost has no region of its own blocks."""
    region = regions.get(layer.start)
    return not layer.spec.is_state and (region is None or region.stride != layer.block_stride)


def _explain_gap(states: BlockCost | None) -> str:
    if states is None:
        return (
            "too little is moved: of layers whose pages have the same start, vLLM registers only "
            "the block length of the first"
        )
    return (
        "too little is moved: for states vLLM steps by a page, not by a block, and uses one size "
        "for all of them"
    )


def _has_contiguous_pages(layout: str, spec: KvCacheSpec) -> bool:
    if spec.page_size_padded is not None and spec.page_size_padded != spec.unpadded_page_size:
        return False
    if layout[-3:] == "HNC" or spec.is_state or spec.kv_heads == 1:
        return True
    return layout[-3:] == "NHC" and spec.block_size == 1
