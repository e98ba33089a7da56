"""The types that describe where pages are in memory, for every version of vLLM.

`memory_v024` and `memory_v033` build them for their versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.vllm.capacity import Capacity
from onnxkvrename.vllm.nixl import NixlRegistration, NixlTransfer
from onnxkvrename.vllm.specs import (
    Condition,
    ConditionState,
    KvCacheGroup,
    KvCacheSpec,
    combine_states,
)


class GroupLayer(NamedTuple):
    """A layer of a group.

    Attributes:
        group: The number of the group, from 0.
        layer: The number of the layer.
    """

    group: int
    layer: int


class Placement(NamedTuple):
    """The place of some layers' pages in memory: vLLM's ``KVCacheTensor``.

    The page of block ``b`` of the l-th member starts at byte
    ``offset + l * layer_stride + b * block_stride``.

    Attributes:
        members: The layers. Without a `layer_stride` they share the place, which is sound
            because a block belongs to one group at a time.
        page_size: Bytes of a page.
        offset: Where the first member's block 0 starts, in bytes.
        layer_stride: Bytes from a member to the next one.
        block_stride: Bytes from a block to the next one.
        per_block: Whether `offset` and `layer_stride` are to be multiplied by the number of
            blocks, as in layouts with layers outermost.
    """

    members: tuple[GroupLayer, ...]
    page_size: int
    offset: int
    layer_stride: int
    block_stride: int
    per_block: bool = False

    def locate_members(self) -> Iterator[tuple[GroupLayer, int]]:
        """Yield each layer with the first byte of its block 0."""
        for index, member in enumerate(self.members):
            yield member, self.offset + index * self.layer_stride


class CanonicalKvCacheRef(NamedTuple):
    """A layer's data in the canonical view: vLLM's ``CanonicalKVCacheRef``.

    Attributes:
        tensor: The index of the tensor.
        page_size: Bytes of the tensor's page that hold data, without padding.
    """

    tensor: int
    page_size: int


class CanonicalKvCaches(NamedTuple):
    """The canonical view of a KV cache: unique tensors of bytes.

    vLLM's ``CanonicalKVCaches`` (``v1/kv_offload/base.py``, vllm-project/vllm#37853).

    Attributes:
        tensors: The second size of each tensor of shape ``(blocks, page_size)``, in bytes.
        references: The layers' data in these tensors, for each group.
    """

    tensors: tuple[int, ...]
    references: tuple[tuple[CanonicalKvCacheRef, ...], ...]


class Allocation(NamedTuple):
    """A way in which vLLM may put the pages of groups into memory.

    An allocation that is not possible has no sizes, places or transfers.

    Attributes:
        name: vLLM's name of it; for 0.33 the name of a memory layout.
        conditions: The conditions under which vLLM uses it.
        grouping_index: The index of the grouping that it places.
        bytes_per_block: Bytes that one block takes in all tensors; ``None`` if not possible.
        padding_share: The part of one block of each group that holds no data, from 0 to 1.
        placements: The places of all pages.
        canonical: The canonical view; ``None`` if it is not known.
        registration: What vLLM registers with NIXL; ``None`` if NIXL's connector does not use this
            allocation, or if it is divided among pipeline stages.
        transfers: What NIXL moves, for each prompt length.
        is_default: Whether vLLM uses it unless a setting, a backend or a connector selects another.
        capacity: The blocks of a request of ``--max-model-len``, and how many such requests fit;
            ``None`` if that is not known.
    """

    name: str
    conditions: tuple[Condition, ...]
    grouping_index: int = 0
    bytes_per_block: int | None = None
    padding_share: float | None = None
    placements: tuple[Placement, ...] = ()
    canonical: CanonicalKvCaches | None = None
    registration: NixlRegistration | None = None
    transfers: tuple[NixlTransfer, ...] = ()
    is_default: bool = False
    capacity: Capacity | None = None

    @property
    def state(self) -> ConditionState:
        """The state of all conditions together."""
        return combine_states(self.conditions)

    @property
    def is_possible(self) -> bool:
        """True if no condition fails."""
        return self.state != "not met"


def is_block_outermost(layout: str) -> bool:
    """Return whether in 0.33 one block holds all layers (``KVCacheLayout.is_block_outermost``)."""
    return layout.startswith("B")


def compute_padding_share(groups: Sequence[KvCacheGroup], bytes_per_block: int) -> float:
    """Return the share of padding in one block for each group, from 0 to 1 with 6 decimals.

    One block takes `bytes_per_block` in all tensors together.
    """
    data_bytes = sum(spec.unpadded_page_size for group in groups for spec in group.specs)
    return round(1 - data_bytes / (bytes_per_block * len(groups)), 6)


def index_specs(groups: Iterable[KvCacheGroup]) -> dict[GroupLayer, KvCacheSpec]:
    """Return the specs of all layers, in the order of the groups."""
    return {
        GroupLayer(group_index, spec.layer): spec
        for group_index, group in enumerate(groups)
        for spec in group.specs
    }


def build_canonical_caches(
    groups: Iterable[KvCacheGroup], tensors: Mapping[GroupLayer, int], page_sizes: Iterable[int]
) -> CanonicalKvCaches:
    """Return the canonical view of tensors, from the index of each layer's tensor."""
    references = tuple(
        tuple(
            CanonicalKvCacheRef(
                tensors[GroupLayer(group_index, spec.layer)], spec.unpadded_page_size
            )
            for spec in group.specs
        )
        for group_index, group in enumerate(groups)
    )
    return CanonicalKvCaches(tuple(page_sizes), references)


def build_single_tensor_caches(
    groups: Sequence[KvCacheGroup], block_stride: int
) -> CanonicalKvCaches:
    """Return the canonical view of blocks with all layers: one tensor for all groups.

    The block stride is in bytes.
    """
    reference = CanonicalKvCacheRef(0, block_stride)
    return CanonicalKvCaches((block_stride,), tuple((reference,) for _ in groups))
