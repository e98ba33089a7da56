"""The allocations of vLLM 0.33; the figures are worked out by hand."""

from __future__ import annotations

import pytest
from build_layouts import (
    build_attention,
    build_gpt_oss,
    build_layers,
    build_linear,
    build_mla,
    build_sliding,
)

from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.memory import (
    Allocation,
    CanonicalKvCacheRef,
    CanonicalKvCaches,
    GroupLayer,
    Placement,
)
from onnxkvrename.vllm.projection import project_layout
from onnxkvrename.vllm.specs import ProjectionRequest

PAGE = 131_072
"""Bytes of a page of gpt-oss in blocks of 64 tokens: 64 * 8 * (64 + 64) * 2."""


def allocate(model: Layout, name: str, *prompt_lengths: int, block_size: int = 16) -> Allocation:
    """The allocation of that name, with a transfer for each prompt length."""
    request = ProjectionRequest(block_size, vllm_version="0.33", prompt_lengths=prompt_lengths)
    allocations = project_layout(model, request).allocations
    return next(allocation for allocation in allocations if allocation.name == name)


@pytest.mark.parametrize(
    ("name", "layer_stride", "block_stride", "per_block"),
    [
        ("LBHNC", PAGE, PAGE, True),
        ("LBNHC", PAGE, PAGE, True),
        ("LHBNC", PAGE, PAGE // 8, True),
        ("BLHNC", PAGE, 12 * PAGE, False),
        ("BLNHC", PAGE, 12 * PAGE, False),
        ("BHLNC", PAGE // 8, 12 * PAGE, False),
    ],
)
def test_gpt_oss_in_every_layout(
    name: str, layer_stride: int, block_stride: int, per_block: bool
) -> None:
    allocation = allocate(build_gpt_oss(), name, block_size=64)
    assert (allocation.state, allocation.bytes_per_block) == ("requires", 12 * PAGE)
    assert allocation.placements == tuple(
        Placement(
            tuple(GroupLayer(number, layer) for layer in range(number, 24, 2)),
            PAGE,
            0,
            layer_stride,
            block_stride,
            per_block,
        )
        for number in (0, 1)
    )


@pytest.mark.parametrize(
    ("name", "regions", "size"),
    [
        ("LBHNC", 12, PAGE),
        ("LBNHC", 12, PAGE),
        ("LHBNC", 96, PAGE // 8),
        ("BLHNC", 12, PAGE),
        ("BLNHC", 1, 12 * PAGE),
        ("BHLNC", 1, 12 * PAGE),
    ],
)
def test_a_prompt_of_gpt_oss_moves_equal_bytes_in_every_layout(
    name: str, regions: int, size: int
) -> None:
    (transfer,) = allocate(build_gpt_oss(), name, 17_601, block_size=64).transfers
    assert (transfer.blocks, transfer.regions) == ((3, 276), regions)
    assert transfer.descriptors == 279 * regions
    assert transfer.bytes == 279 * regions * size == 438_829_056


def test_allocations_of_0_24_that_0_33_removed_are_not_met() -> None:
    for name in ("canonical", "packed"):
        allocation = allocate(build_gpt_oss(), name)
        assert (allocation.state, allocation.placements) == ("not met", ())
        assert "in a layout with B outermost one block" in allocation.conditions[0].why


def test_pages_of_several_sizes_are_side_by_side_in_a_block() -> None:
    mixed = build_layers(
        build_attention(0),
        build_sliding(1, heads=3, window=32),
        build_sliding(2, heads=3, window=32),
    )
    allocation = allocate(mixed, "BLHNC", 100)
    assert allocation.placements == (
        Placement((GroupLayer(0, 0),), 32768, 0, 32768, 32768),
        Placement((GroupLayer(1, 1), GroupLayer(1, 2)), 12288, 0, 12288, 32768),
    )
    assert allocation.padding_share == round((32768 - 24576) / 65536, 6)
    assert allocation.canonical == CanonicalKvCaches(
        (32768,), ((CanonicalKvCacheRef(0, 32768),), (CanonicalKvCacheRef(0, 32768),))
    )
    assert allocate(mixed, "LBHNC").grouping_index == 0
    assert allocate(mixed, "BHLNC").state == allocate(mixed, "LHBNC").state == "not met"


def test_one_group_may_have_pages_of_several_sizes_with_layers_outermost() -> None:
    uneven = build_layers(build_attention(0), build_attention(1, heads=2))
    allocation = allocate(uneven, "LBHNC", 100)
    assert allocation.placements == (
        Placement((GroupLayer(0, 0),), 32768, 0, 32768, 32768, per_block=True),
        Placement((GroupLayer(0, 1),), 8192, 32768, 8192, 8192, per_block=True),
    )
    assert allocation.canonical == CanonicalKvCaches(
        (32768, 8192), ((CanonicalKvCacheRef(0, 32768), CanonicalKvCacheRef(1, 8192)),)
    )
    assert [(t.regions, t.descriptors, t.bytes) for t in allocation.transfers] == [
        (2, 14, 7 * (32768 + 8192))
    ]


def test_layers_with_equal_specs_are_placed_together() -> None:
    allocation = allocate(
        build_layers(build_attention(0), build_attention(1, heads=2), build_attention(2)), "LBHNC"
    )
    assert [(place.members, place.offset) for place in allocation.placements] == [
        ((GroupLayer(0, 0), GroupLayer(0, 2)), 0),
        ((GroupLayer(0, 1),), 65536),
    ]


def test_states_without_attention_in_a_shared_block_have_no_known_canonical_view() -> None:
    states = build_layers(build_linear(0), build_linear(1))
    assert allocate(states, "BLHNC").canonical is None
    assert allocate(states, "LBHNC").canonical == CanonicalKvCaches(
        (1_097_728, 1_097_728),
        ((CanonicalKvCacheRef(0, 1_097_728), CanonicalKvCacheRef(1, 1_097_728)),),
    )


def test_the_last_layer_of_a_larger_group_has_its_own_region() -> None:
    # Three windows and four whole layers: groups of four, one place empty.
    layers = [
        build_sliding(layer, window=16) if layer % 2 else build_attention(layer)
        for layer in range(7)
    ]
    allocation = allocate(build_layers(*layers), "LBHNC", 160)
    (transfer,) = allocation.transfers
    assert transfer.blocks == (10, 2)
    assert transfer.descriptors == 3 * (10 + 1) + 1 * 10
    assert transfer.bytes == 43 * 32768
    assert allocation.padding_share == round(1 / 8, 6)
    assert allocation.canonical is not None
    assert [len(refs) for refs in allocation.canonical.references] == [4, 3]
    assert allocation.canonical.tensors == (32768,) * 4


def test_mla_in_a_shared_block_is_one_region() -> None:
    latents = build_layers(build_mla(0), build_mla(1))
    (transfer,) = allocate(latents, "BLHNC", 100).transfers
    assert (transfer.regions, transfer.descriptors, transfer.bytes) == (1, 7, 7 * 36864)
    (transfer,) = allocate(latents, "LBHNC", 100).transfers
    assert (transfer.regions, transfer.descriptors, transfer.bytes) == (2, 14, 7 * 36864)


def test_mla_that_cannot_be_padded_requires_blocks_outermost() -> None:
    mixed = build_layers(
        build_mla(0), build_attention(1, kind="chunked_local_attention", window=128)
    )
    refused = allocate(mixed, "LBHNC")
    assert (refused.state, refused.conditions[0].name) == ("not met", "groups")
    assert allocate(mixed, "BLHNC").state == "requires"


def test_the_canonical_view_of_states_leaves_padding_out() -> None:
    allocation = allocate(
        build_layers(build_attention(0, heads=2, size=256), build_linear(1)), "LBHNC", 600
    )
    assert allocation.transfers[0].blocks == (2, 1)
    assert allocation.canonical == CanonicalKvCaches(
        (544 * 2048,), ((CanonicalKvCacheRef(0, 544 * 2048),), (CanonicalKvCacheRef(0, 1_097_728),))
    )


def test_regions_of_very_many_heads_are_counted_without_listing_them() -> None:
    many = build_layers(build_attention(0, heads=1 << 40, size=2))
    (transfer,) = allocate(many, "LHBNC", 1).transfers
    assert (transfer.regions, transfer.descriptors) == (1 << 40, 1 << 40)
    assert transfer.bytes == 16 * 4 * 2 << 40


def test_heads_outside_of_blocks_have_no_known_canonical_view() -> None:
    assert allocate(build_gpt_oss(), "LHBNC").canonical is None
    single = build_layers(build_attention(0, heads=1), build_attention(1, heads=1))
    assert allocate(single, "LHBNC").canonical == allocate(single, "LBHNC").canonical
