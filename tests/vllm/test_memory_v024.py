"""Where vLLM 0.24 puts pages; the figures are worked out by hand."""

from __future__ import annotations

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


def arranged(found: Layout, name: str, *tokens: int, block: int = 16) -> Allocation:
    projection = project_layout(
        found, ProjectionRequest(block, vllm_version="0.24", prompt_lengths=tokens)
    )
    return next(one for one in projection.allocations if one.name == name)


def states(found: Allocation) -> dict[str, str]:
    return {condition.name: condition.state for condition in found.conditions}


def test_gpt_oss_comes_out_to_the_byte() -> None:
    # vllm#46252: blocks of 64 tokens. A window of 128 takes 128 / 64 + 1 = 3 blocks, so
    # the 279 published are 3 and 276, which are 17,601 to 17,664 tokens.
    found = arranged(gpt_oss(), "packed", 17_600, 17_601, 17_664, block=64)
    assert found.bytes_per_block == 1_572_864 == 12 * 131_072
    assert found.padding_share == 0
    assert [(t.blocks, t.regions, t.descriptors, t.bytes) for t in found.transfers] == [
        ((3, 275), 1, 278, 437_256_192),
        ((3, 276), 1, 279, 438_829_056),
        ((3, 276), 1, 279, 438_829_056),
    ]


def test_unpacked_gpt_oss_moves_key_and_value_of_each_place_apart() -> None:
    (transfer,) = arranged(gpt_oss(), "unpacked", 17_664, block=64).transfers
    assert (transfer.regions, transfer.descriptors) == (24, 24 * 279)
    assert transfer.bytes == 438_829_056


def test_gpt_oss_may_have_one_block_for_all_places() -> None:
    found = arranged(gpt_oss(), "canonical", block=64)
    assert (found.state, found.bytes_per_block) == ("requires", 1_572_864)
    assert states(found) == {
        "version": "requires",
        "several groups": "met",
        "attention": "met",
        "one page size": "met",
        "equal tensors": "met",
        "connector": "requires",
        "block stride indexing": "requires",
    }


def test_layers_of_several_groups_share_a_tensor() -> None:
    found = arranged(layout(sliding(0, window=32), attention(1), attention(2)), "unpacked")
    # Two whole layers and one window: groups of one layer.
    assert found.placements == (
        Placement((GroupLayer(0, 0), GroupLayer(1, 1), GroupLayer(2, 2)), 32768, 0, 0, 32768),
    )
    assert found.canonical == CanonicalKvCaches(
        (32768,), tuple((CanonicalKvCacheRef(0, 32768),) for _ in range(3))
    )


def test_padding_does_not_count_in_the_canonical_view() -> None:
    found = arranged(layout(attention(0), sliding(1, heads=3, window=32)), "unpacked")
    assert found.canonical == CanonicalKvCaches(
        (32768,), ((CanonicalKvCacheRef(0, 32768),), (CanonicalKvCacheRef(0, 12288),))
    )
    assert found.padding_share == round((32768 - 12288) / 65536, 6)


def test_pages_of_several_sizes_have_tensors_of_their_own() -> None:
    found = arranged(layout(attention(0), attention(1, heads=2)), "unpacked", 100)
    assert found.canonical == CanonicalKvCaches(
        (32768, 8192), ((CanonicalKvCacheRef(0, 32768), CanonicalKvCacheRef(1, 8192)),)
    )
    # NIXL refuses tensors of several sizes that are not MLA.
    assert found.transfers[0].descriptors is None


def test_one_group_is_taken_by_cross_layers_and_by_nothing_else() -> None:
    plain = layout(*(attention(at) for at in range(4)))
    found = arranged(plain, "cross_layers", 33)
    assert (found.state, found.bytes_per_block) == ("requires", 4 * 32768)
    assert found.placements[0].block_stride == 4 * 32768
    assert found.canonical == CanonicalKvCaches(
        (4 * 32768,), ((CanonicalKvCacheRef(0, 4 * 32768),),)
    )
    assert [(t.regions, t.descriptors, t.bytes) for t in found.transfers] == [(1, 3, 3 * 4 * 32768)]
    for name in ("canonical", "packed"):
        assert states(arranged(plain, name))["several groups"] == "not met"
    assert arranged(gpt_oss(), "cross_layers").state == "not met"
    uneven = layout(attention(0), attention(1, heads=2))
    assert states(arranged(uneven, "cross_layers"))["one group"] == "not met"


def test_one_group_has_a_tensor_for_each_layer_unless_a_connector_wants_one_for_all() -> None:
    for found in (layout(attention(0), attention(1)), layout(mla(0), mla(1))):
        assert states(arranged(found, "unpacked"))["connector"] == "requires"
    for found in (layout(linear(0), linear(1)), layout(attention(0), attention(1, heads=2))):
        assert arranged(found, "unpacked").state == "met"


def test_mla_across_layers_is_for_offloading_and_not_for_nixl() -> None:
    found = arranged(layout(mla(0), mla(1)), "cross_layers", 100)
    assert (found.state, found.bytes_per_block, found.transfers) == ("requires", 2 * 18432, ())
    (connector,) = [one.why for one in found.conditions if one.name == "connector"]
    assert connector.startswith("it prefers cross-layer blocks: offloading, but not NIXL")


def test_states_are_neither_packed_nor_canonical() -> None:
    hybrid = layout(attention(0), linear(1))
    for name in ("canonical", "packed"):
        found = arranged(hybrid, name)
        assert (found.state, states(found)["attention"]) == ("not met", "not met")
        assert (found.bytes_per_block, found.placements, found.canonical) == (None, (), None)


def test_a_hybrid_moves_a_state_in_four_pieces_and_attention_in_two() -> None:
    # A token takes 2048 bytes and the states 1,097,728: blocks of 544 tokens.
    found = arranged(layout(attention(0, heads=2, size=256), linear(1)), "unpacked", 600)
    (transfer,) = found.transfers
    assert transfer.blocks == (2, 1)
    assert (transfer.regions, transfer.descriptors) == (2, 2 * 2 + 4)
    assert transfer.bytes == 2 * 544 * 2048 + 1_097_728


def test_windowed_mla_is_packed_always() -> None:
    both = layout(mla(0), mla(1, window=32), mla(2), mla(3, window=32))
    found = arranged(both, "packed", 160)
    assert states(found)["flag"] == "met"
    assert found.bytes_per_block == 2 * 16 * 576 * 2
    assert [place.members for place in found.placements] == [
        (GroupLayer(0, 0), GroupLayer(1, 1)),
        (GroupLayer(0, 2), GroupLayer(1, 3)),
    ]
    assert [place.offset for place in found.placements] == [0, 18432]
    assert found.transfers[0].blocks == (10, 3)
    assert arranged(both, "unpacked").state == "not met"


def test_a_latent_is_moved_in_one_piece() -> None:
    (transfer,) = arranged(layout(mla(0), mla(1)), "unpacked", 100).transfers
    assert (transfer.regions, transfer.descriptors) == (2, 2 * 7)
    assert transfer.bytes == 2 * 7 * 18432


def test_what_does_not_follow_from_the_prompt_is_not_known() -> None:
    cross = layout(attention(0), attention(0, kind="cross_attention"))
    (transfer,) = arranged(cross, "unpacked", 100).transfers
    assert (transfer.blocks, transfer.bytes) == ((7, None), None)
    unsized = layout(attention(0), sliding(1))
    (transfer,) = arranged(unsized, "unpacked", 100).transfers
    assert (transfer.blocks, transfer.descriptors) == ((7, None), None)


def test_a_short_prompt_does_not_fill_its_window() -> None:
    (transfer,) = arranged(gpt_oss(), "packed", 64, block=64).transfers
    assert transfer.blocks == (1, 1)


def test_groups_that_are_refused_are_not_arranged() -> None:
    refused = project_layout(
        layout(attention(0), mla(1, window=32)), ProjectionRequest(16, vllm_version="0.24")
    )
    assert refused.groupings[0].refusal is not None
    assert (refused.refusals, refused.allocations) == ((), ())
