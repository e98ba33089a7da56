"""NIXL's transfers for a prompt: regions, blocks of each group, descriptors and bytes.

This follows ``distributed/kv_transfer/kv_connector/v1/nixl`` of vLLM 0.24.0:
``base_scheduler.py`` (``get_sw_clipped_blocks``) and, for what decode reads of them,
``pull_scheduler.py`` and ``allocate_slots`` of ``v1/core/kv_cache_manager.py``;
``register_kv_caches``, ``_register_packed_kv_cache`` and ``_compute_desc_ids`` of
``base_worker.py``; and ``TransferTopology`` of ``kv_connector/utils.py``.

It assumes that both sides are alike, that kernel blocks are vLLM's blocks, and that no prefix is
cached; the backend FLASH_ATTN, or FLASH_ATTN_DIFFKV if keys and values differ in size, and an MLA
backend for MLA. It treats a model with any layer of MLA as MLA.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxkvrename.layout.layout import format_size_option
from onnxkvrename.vllm.specs import (
    CHUNKED_KINDS,
    ENCODER_KINDS,
    MLA_KINDS,
    SLIDING_KINDS,
    KvCacheGroup,
    KvCacheSpec,
)


class NixlTransfer(NamedTuple):
    """The amounts that NIXL transfers for one prompt; unknown ones are ``None``.

    Attributes:
        tokens: The length of the prompt.
        blocks: The number of blocks of each group that prefill offers.
        read_blocks: The number of them that decode reads.
        regions: The number of regions as vLLM counts them: two for a tensor with keys and values
            apart.
        descriptors: The number of descriptors that decode posts, on each rank. NIXL merges
            neighbours, so its telemetry counts fewer.
        bytes: Bytes of all descriptors.
        unknown: The reason why amounts are unknown; ``None`` if all are known.
        refused: As in `NixlRegistration`.
        incomplete: Why the descriptors do not cover all data in the blocks; ``None`` if they do.
    """

    tokens: int
    blocks: tuple[int | None, ...]
    read_blocks: tuple[int | None, ...]
    regions: int | None
    descriptors: int | None
    bytes: int | None
    unknown: str | None = None
    refused: str | None = None
    incomplete: str | None = None


class BlockCost(NamedTuple):
    """The descriptors that NIXL needs for one block of a group.

    Attributes:
        descriptors: The number of descriptors.
        bytes: Bytes of these descriptors.
    """

    descriptors: int
    bytes: int


class NixlRegistration(NamedTuple):
    """The memory that vLLM registers with NIXL.

    Attributes:
        regions: The number of regions; ``None`` if vLLM refuses.
        costs: The cost of one block, for each group; empty if vLLM refuses.
        refused: Why vLLM refuses to register it, or to connect two workers that did; ``None`` if
            it does not.
        incomplete: Why the descriptors do not cover all data in the blocks; ``None`` if they do.
    """

    regions: int | None
    costs: tuple[BlockCost, ...] = ()
    refused: str | None = None
    incomplete: str | None = None


def build_transfers(
    groups: Sequence[KvCacheGroup],
    registration: NixlRegistration | None,
    prompt_lengths: Iterable[int],
) -> tuple[NixlTransfer, ...]:
    """Return the transfer of each prompt, by its length in tokens; none without a registration."""
    if registration is None:
        return ()
    return tuple(_build_transfer(groups, registration, length) for length in prompt_lengths)


def _build_transfer(
    groups: Sequence[KvCacheGroup], registration: NixlRegistration, length: int
) -> NixlTransfer:
    blocks, read_blocks = _count_blocks(groups, length), _count_read_blocks(groups, length)
    amounts = NixlTransfer(length, blocks, read_blocks, None, None, None)
    if registration.refused is not None:
        return amounts._replace(refused=registration.refused)
    amounts = amounts._replace(regions=registration.regions)
    unknown = _explain_unknown_blocks(groups)
    if unknown is not None:
        return amounts._replace(unknown=unknown)
    pairs = [*zip((count or 0 for count in read_blocks), registration.costs, strict=True)]
    return amounts._replace(
        descriptors=sum(count * cost.descriptors for count, cost in pairs),
        bytes=sum(count * cost.bytes for count, cost in pairs),
        incomplete=registration.incomplete,
    )


def _count_transferred_tokens(groups: Iterable[KvCacheGroup], prompt_length: int) -> int:
    """Return how many tokens of a prompt prefill computes for decode.

    Beside states it is one less than the prompt has: decode computes the last token again, and
    vLLM truncates the prompt of prefill (``_truncate_mamba_request_for_prefill``).
    """
    return prompt_length - 1 if _list_states(groups) and prompt_length > 1 else prompt_length


def _count_blocks(groups: Iterable[KvCacheGroup], prompt_length: int) -> tuple[int | None, ...]:
    """Return the number of blocks of each group that prefill offers for a prompt.

    The length of the prompt is in tokens. ``None`` where a number is not known.
    """
    groups = tuple(groups)
    tokens = _count_transferred_tokens(groups, prompt_length)
    return tuple(_count_spec_blocks(group.first_spec, tokens) for group in groups)


def _count_read_blocks(
    groups: Iterable[KvCacheGroup], prompt_length: int
) -> tuple[int | None, ...]:
    """Return the number of blocks of each group that decode reads.

    Decode does not allocate the blocks that the next token does not see, so it does not read them.

    The length of the prompt is in tokens. ``None`` where a number is not known.
    """
    groups = tuple(groups)
    tokens = _count_transferred_tokens(groups, prompt_length)
    return tuple(_count_read_spec_blocks(group.first_spec, tokens) for group in groups)


def _explain_unknown_blocks(groups: Iterable[KvCacheGroup]) -> str | None:
    """Return why the blocks of a group are not known; ``None`` if those of all groups are."""
    for group in groups:
        if _count_read_spec_blocks(group.first_spec, 1) is None:
            window = group.first_spec.window
            if isinstance(window, str):
                return f"the size of {window} ({format_size_option(window)})"
            return f"how many blocks {group.kind} takes: it does not follow from the prompt alone"
    return None


def _count_spec_blocks(spec: KvCacheSpec, prompt_length: int) -> int | None:
    """Return the blocks of a prompt; ``None`` if not known.

    vLLM clips windows to ``blocks_per_sw``. A window may start within a block, and so takes one
    block more than it fills. Chunks are not clipped.
    """
    if spec.is_state:
        return 1
    if spec.kind in ENCODER_KINDS or spec.block_size is None:
        return None
    prompt_blocks = -(-prompt_length // spec.block_size)
    if spec.kind not in SLIDING_KINDS:
        return prompt_blocks
    if not isinstance(spec.window, int):
        return None
    return min(prompt_blocks, -(-spec.window // spec.block_size) + 1)


def _count_read_spec_blocks(spec: KvCacheSpec, tokens: int) -> int | None:
    """Return the number of blocks that the next token sees (``get_num_skipped_tokens``)."""
    offered = _count_spec_blocks(spec, tokens)
    is_limited = spec.kind in SLIDING_KINDS | CHUNKED_KINDS
    if offered is None or not is_limited or spec.block_size is None:
        return offered
    if not isinstance(spec.window, int):
        return None
    if spec.kind in CHUNKED_KINDS:
        skipped = tokens // spec.window * spec.window
    else:
        skipped = max(0, tokens - spec.window + 1)
    return min(offered, -(-tokens // spec.block_size) - skipped // spec.block_size)


def register_block(
    groups: Sequence[KvCacheGroup], block_stride: int, *, is_packed: bool
) -> NixlRegistration:
    """Return the registration of one region whose blocks contain all layers.

    It is packed if vLLM registers the tensors of all layers, which it recognizes as packed;
    otherwise it registers one tensor with all layers. The block stride is in bytes.
    """
    incomplete = None
    if is_packed and _splits_keys_and_values(groups):
        incomplete = (
            "decode posts half of these bytes: where the backend's cache is (blocks, 2, ...), as "
            "FLASH_ATTN's in 0.24.0, vLLM splits a block in two, and decode posts the first half"
        )
    costs = (BlockCost(1, block_stride),) * len(groups)
    return NixlRegistration(1, costs, incomplete=incomplete)


def register_tensors(
    groups: Sequence[KvCacheGroup], tensors: Sequence[Sequence[KvCacheSpec]]
) -> NixlRegistration:
    """Return the registration of a region for each tensor, or of two if keys and values are apart.

    The specs are those of the layers that share each tensor, in the order of their groups. The
    registration has the reason if vLLM refuses it.

    The first layer of states decides for all tensors (``derive_mamba_conv_split``): the state of a
    convolution has a descriptor for each of its three projections, the recurrent state has one.
    """
    refused = _explain_refusal(groups, tensors)
    if refused is not None:
        return NixlRegistration(None, refused=refused)
    is_split = _splits_keys_and_values(groups)
    regions = sum(1 + (is_split and layers[0].kind not in MLA_KINDS) for layers in tensors)
    page_bytes = sum(layers[0].page_size for layers in tensors)
    sizes = [spec.unpadded_page_size for spec in _list_states(groups)]
    costs = tuple(
        BlockCost(len(tensors) * 4, len(tensors) * sizes[0])
        if group.first_spec.is_state
        else BlockCost(regions, page_bytes)
        for group in groups
    )
    incomplete = None
    if sizes and max(sizes) > sizes[0]:
        incomplete = f"states of {max(sizes)} bytes move with {sizes[0]}, as the first ones have"
    return NixlRegistration(regions, costs, incomplete=incomplete)


def _list_states(groups: Iterable[KvCacheGroup]) -> list[KvCacheSpec]:
    return [spec for group in groups for spec in group.specs if spec.is_state]


def _find_first_spec(groups: Sequence[KvCacheGroup]) -> KvCacheSpec:
    """Return the spec of the first layer, whose backend decides for all."""
    return min((spec for group in groups for spec in group.specs), key=lambda spec: spec.layer)


def _splits_keys_and_values(groups: Sequence[KvCacheGroup]) -> bool:
    """Return whether vLLM splits blocks in two (``virtually_split_kv_in_blocks``)."""
    first = _find_first_spec(groups)
    return bool(_list_states(groups)) or (
        first.kind not in MLA_KINDS and first.head_size == first.head_size_v
    )


def _explain_refusal(
    groups: Sequence[KvCacheGroup], tensors: Sequence[Sequence[KvCacheSpec]]
) -> str | None:
    """Return why vLLM fails; ``None`` if it does not.

    It does when it registers these tensors or, where all layers are states, when decode meets
    prefill: its ``_build_fa_remote`` takes the first group of attention.
    """
    specs = [spec for group in groups for spec in group.specs]
    states = _list_states(groups)
    if states and not _is_mamba_2(states[0].state_shapes):
        found = " and ".join(str(list(shape)) for shape in states[0].state_shapes)
        return f"NIXL's connector takes only states of Mamba 2 and GDN, but these are {found}"
    if any(group.has_per_layer_specs and _list_states([group]) for group in groups):
        return "NIXL's connector does not take states of several sizes in one group"
    has_mla = any(spec.kind in MLA_KINDS for spec in specs)
    if not has_mla and not _splits_keys_and_values(groups):
        return (
            "All kv cache tensors must have the same number of blocks: the first layer's keys "
            "and values differ in size, and vLLM takes its blocks for keys and values"
        )
    page_sizes = {layers[0].page_size for layers in tensors if layers[0].kind not in MLA_KINDS}
    if len(page_sizes) > 1:
        sizes = " and ".join(map(str, sorted(page_sizes)))
        return f"All non-MLA kv cache tensors must have the same size: pages have {sizes} bytes"
    if len(states) == len(specs):
        return (
            "StopIteration when decode meets prefill: no layer is attention, and vLLM looks for one"
        )
    return None


def _is_mamba_2(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether vLLM takes states for those of Mamba 2 or GDN: by their numbers of axes."""
    return [len(shape) for shape in shapes] == [2, 3]
