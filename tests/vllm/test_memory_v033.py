"""Where vLLM 0.33 puts pages; the figures are worked out by hand."""

from __future__ import annotations

import pytest
from layers import attention, gpt_oss, layout, linear, mla, sliding

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
"""Of gpt-oss, in blocks of 64 tokens: 64 * 8 * (64 + 64) * 2."""


def arranged(found: Layout, name: str, *tokens: int, block: int = 16) -> Allocation:
    projection = project_layout(
        found, ProjectionRequest(block, vllm_version="0.33", prompt_lengths=tokens)
    )
    return next(one for one in projection.allocations if one.name == name)


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
    found = arranged(gpt_oss(), name, block=64)
    assert (found.state, found.bytes_per_block) == ("requires", 12 * PAGE)
    assert found.placements == tuple(
        Placement(
            tuple(GroupLayer(number, at) for at in range(number, 24, 2)),
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
def test_a_prompt_of_gpt_oss_takes_as_many_bytes_in_every_layout(
    name: str, regions: int, size: int
) -> None:
    (transfer,) = arranged(gpt_oss(), name, 17_664, block=64).transfers
    assert (transfer.blocks, transfer.regions) == ((3, 276), regions)
    assert transfer.descriptors == 279 * regions
    assert transfer.bytes == 279 * regions * size == 438_829_056


def test_what_0_33_has_no_more_is_said() -> None:
    for name in ("canonical", "packed"):
        found = arranged(gpt_oss(), name)
        assert (found.state, found.placements) == ("not met", ())
        assert "in a layout with B outermost one block" in found.conditions[0].why


def test_pages_of_several_sizes_stand_side_by_side_in_a_block() -> None:
    mixed = layout(attention(0), sliding(1, heads=3, window=32), sliding(2, heads=3, window=32))
    found = arranged(mixed, "BLHNC", 100)
    assert found.placements == (
        Placement((GroupLayer(0, 0),), 32768, 0, 32768, 32768),
        Placement((GroupLayer(1, 1), GroupLayer(1, 2)), 12288, 0, 12288, 32768),
    )
    assert found.padding_share == round((32768 - 24576) / 65536, 6)
    assert found.canonical == CanonicalKvCaches(
        (32768,), ((CanonicalKvCacheRef(0, 32768),), (CanonicalKvCacheRef(0, 32768),))
    )
    assert arranged(mixed, "LBHNC").grouping_index == 0
    assert arranged(mixed, "BHLNC").state == arranged(mixed, "LHBNC").state == "not met"


def test_one_group_with_pages_of_several_sizes_needs_no_block_for_all() -> None:
    uneven = layout(attention(0), attention(1, heads=2))
    found = arranged(uneven, "LBHNC", 100)
    assert found.placements == (
        Placement((GroupLayer(0, 0),), 32768, 0, 32768, 32768, per_block=True),
        Placement((GroupLayer(0, 1),), 8192, 32768, 8192, 8192, per_block=True),
    )
    assert found.canonical == CanonicalKvCaches(
        (32768, 8192), ((CanonicalKvCacheRef(0, 32768), CanonicalKvCacheRef(1, 8192)),)
    )
    assert [(t.regions, t.descriptors, t.bytes) for t in found.transfers] == [
        (2, 14, 7 * (32768 + 8192))
    ]


def test_layers_with_one_spec_stand_together() -> None:
    found = arranged(layout(attention(0), attention(1, heads=2), attention(2)), "LBHNC")
    assert [(place.members, place.offset) for place in found.placements] == [
        ((GroupLayer(0, 0), GroupLayer(0, 2)), 0),
        ((GroupLayer(0, 1),), 65536),
    ]


def test_states_alone_in_a_block_for_all_have_no_known_canonical_view() -> None:
    states = layout(linear(0), linear(1))
    assert arranged(states, "BLHNC").canonical is None
    assert arranged(states, "LBHNC").canonical == CanonicalKvCaches(
        (1_097_728, 1_097_728),
        ((CanonicalKvCacheRef(0, 1_097_728), CanonicalKvCacheRef(1, 1_097_728)),),
    )


def test_a_group_with_a_layer_more_has_a_region_to_itself() -> None:
    # Three windows and four whole layers: groups of four, one place empty.
    kinds = [sliding(at, window=16) if at % 2 else attention(at) for at in range(7)]
    found = arranged(layout(*kinds), "LBHNC", 160)
    (transfer,) = found.transfers
    assert transfer.blocks == (10, 2)
    assert transfer.descriptors == 3 * (10 + 2) + 1 * 10
    assert transfer.bytes == 46 * 32768
    assert found.padding_share == round(1 / 8, 6)
    assert found.canonical is not None
    assert [len(refs) for refs in found.canonical.references] == [4, 3]
    assert found.canonical.tensors == (32768,) * 4


def test_mla_in_a_block_for_all_layers_is_moved_as_one_piece() -> None:
    latents = layout(mla(0), mla(1))
    (transfer,) = arranged(latents, "BLHNC", 100).transfers
    assert (transfer.regions, transfer.descriptors, transfer.bytes) == (1, 7, 7 * 36864)
    (transfer,) = arranged(latents, "LBHNC", 100).transfers
    assert (transfer.regions, transfer.descriptors, transfer.bytes) == (2, 14, 7 * 36864)


def test_mla_that_cannot_be_padded_goes_with_b_outermost_only() -> None:
    mixed = layout(mla(0), attention(1, kind="chunked_local_attention", window=128))
    refused = arranged(mixed, "LBHNC")
    assert (refused.state, refused.conditions[0].name) == ("not met", "groups")
    assert arranged(mixed, "BLHNC").state == "requires"


def test_what_nixl_makes_of_states_in_0_33_is_not_known() -> None:
    found = arranged(layout(attention(0, heads=2, size=256), linear(1)), "LBHNC", 600)
    (transfer,) = found.transfers
    assert transfer.blocks == (2, 1)
    assert (transfer.regions, transfer.descriptors, transfer.bytes) == (None, None, None)
    assert found.canonical == CanonicalKvCaches(
        (544 * 2048,), ((CanonicalKvCacheRef(0, 544 * 2048),), (CanonicalKvCacheRef(0, 1_097_728),))
    )


def test_pages_of_which_only_some_are_in_one_piece_are_not_known_to_nixl() -> None:
    uneven = layout(attention(0, heads=1, size=512), attention(1, heads=8, size=32))
    assert arranged(uneven, "BLNHC", 100).transfers[0].regions is None
    assert arranged(uneven, "BLHNC", 100).transfers[0].regions == 2


def test_however_many_heads_stand_outside_of_blocks_regions_are_counted_at_once() -> None:
    many = layout(attention(0, heads=1 << 40, size=2))
    (transfer,) = arranged(many, "LHBNC", 1).transfers
    assert (transfer.regions, transfer.descriptors) == (1 << 40, 1 << 40)
    assert transfer.bytes == 16 * 4 * 2 << 40


def test_heads_outside_of_blocks_have_no_known_canonical_view() -> None:
    assert arranged(gpt_oss(), "LHBNC").canonical is None
    single = layout(attention(0, heads=1), attention(1, heads=1))
    assert arranged(single, "LHBNC").canonical == arranged(single, "LBHNC").canonical
