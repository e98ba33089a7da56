"""Compute the memory that vLLM 0.24 registers with NIXL.

This follows ``register_kv_caches``, ``_register_packed_kv_cache`` and ``_compute_desc_ids`` of
``distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py``, and ``TransferTopology`` of
``kv_connector/utils.py``. It assumes the backend FLASH_ATTN, or FLASH_ATTN_DIFFKV if keys and
values differ in size, and an MLA backend for MLA. It treats a model with any layer of MLA as MLA.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxkvrename.vllm.nixl import (
    BlockCost,
    NixlRegistration,
    explain_states_only,
    split_states,
)
from onnxkvrename.vllm.specs import MLA_KINDS, KvCacheGroup, KvCacheSpec, RefusalError


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
    """
    try:
        states = split_states(groups, "0.24")
    except RefusalError as error:
        return NixlRegistration(None, refused=error.refusal.reason)
    refused = _explain_refusal(groups, tensors) or explain_states_only(groups)
    if refused is not None:
        return NixlRegistration(None, refused=refused)
    is_split = _splits_keys_and_values(groups)
    regions = sum(1 + (is_split and layers[0].kind not in MLA_KINDS) for layers in tensors)
    page_bytes = sum(layers[0].page_size for layers in tensors)
    costs = tuple(
        BlockCost(len(tensors) * states.descriptors, len(tensors) * states.bytes)
        if states is not None and group.first_spec.is_state
        else BlockCost(regions, page_bytes)
        for group in groups
    )
    specs = [spec for group in groups for spec in group.specs]
    largest = max((spec.unpadded_page_size for spec in specs if spec.is_state), default=0)
    incomplete = None
    if states is not None and largest > states.bytes:
        incomplete = f"states of {largest} bytes move with {states.bytes}, as the first ones have"
    return NixlRegistration(regions, costs, incomplete=incomplete)


def _find_first_spec(groups: Sequence[KvCacheGroup]) -> KvCacheSpec:
    """Return the spec of the first layer, whose backend decides for all."""
    return min((spec for group in groups for spec in group.specs), key=lambda spec: spec.layer)


def _splits_keys_and_values(groups: Sequence[KvCacheGroup]) -> bool:
    """Return whether vLLM splits blocks in two (``virtually_split_kv_in_blocks``)."""
    first = _find_first_spec(groups)
    has_states = any(spec.is_state for group in groups for spec in group.specs)
    return has_states or (first.kind not in MLA_KINDS and first.head_size == first.head_size_v)


def _explain_refusal(
    groups: Sequence[KvCacheGroup], tensors: Sequence[Sequence[KvCacheSpec]]
) -> str | None:
    """Return why an assertion of vLLM fails; ``None`` if none does."""
    specs = [spec for group in groups for spec in group.specs]
    if any(spec.is_state for group in groups if group.has_per_layer_specs for spec in group.specs):
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
    return None
