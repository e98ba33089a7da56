"""The allocations of vLLM 0.24; the figures are worked out by hand."""

from __future__ import annotations

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


def allocate(model: Layout, name: str, *prompt_lengths: int, block_size: int = 16) -> Allocation:
    """The allocation of that name, with a transfer for each prompt length."""
    request = ProjectionRequest(block_size, vllm_version="0.24", prompt_lengths=prompt_lengths)
    allocations = project_layout(model, request).allocations
    return next(allocation for allocation in allocations if allocation.name == name)


def condition_states(allocation: Allocation) -> dict[str, str]:
    return {condition.name: condition.state for condition in allocation.conditions}


def test_packed_gpt_oss_moves_the_published_bytes() -> None:
    # vllm#46252: blocks of 64 tokens. A window of 128 takes 128 / 64 + 1 = 3 blocks, so
    # the 279 published are 3 and 276, which are 17,601 to 17,664 tokens.
    allocation = allocate(build_gpt_oss(), "packed", 17_600, 17_601, 17_664, block_size=64)
    assert allocation.bytes_per_block == 1_572_864 == 12 * 131_072
    assert allocation.padding_share == 0
    assert [(t.blocks, t.regions, t.descriptors, t.bytes) for t in allocation.transfers] == [
        ((3, 275), 1, 278, 437_256_192),
        ((3, 276), 1, 279, 438_829_056),
        ((3, 276), 1, 279, 438_829_056),
    ]


def test_unpacked_gpt_oss_moves_key_and_value_of_each_slot_apart() -> None:
    (transfer,) = allocate(build_gpt_oss(), "unpacked", 17_664, block_size=64).transfers
    assert (transfer.regions, transfer.descriptors) == (24, 24 * 279)
    assert transfer.bytes == 438_829_056


def test_canonical_gpt_oss_has_one_block_for_all_slots() -> None:
    allocation = allocate(build_gpt_oss(), "canonical", block_size=64)
    assert (allocation.state, allocation.bytes_per_block) == ("requires", 1_572_864)
    assert condition_states(allocation) == {
        "version": "requires",
        "several groups": "met",
        "attention": "met",
        "one page size": "met",
        "equal tensors": "met",
        "connector": "requires",
        "block stride indexing": "requires",
    }


def test_layers_of_several_groups_share_a_tensor() -> None:
    allocation = allocate(
        build_layers(build_sliding(0, window=32), build_attention(1), build_attention(2)),
        "unpacked",
    )
    # Two whole layers and one window: groups of one layer.
    assert allocation.placements == (
        Placement((GroupLayer(0, 0), GroupLayer(1, 1), GroupLayer(2, 2)), 32768, 0, 0, 32768),
    )
    assert allocation.canonical == CanonicalKvCaches(
        (32768,), tuple((CanonicalKvCacheRef(0, 32768),) for _ in range(3))
    )


def test_padding_does_not_count_in_the_canonical_view() -> None:
    allocation = allocate(
        build_layers(build_attention(0), build_sliding(1, heads=3, window=32)), "unpacked"
    )
    assert allocation.canonical == CanonicalKvCaches(
        (32768,), ((CanonicalKvCacheRef(0, 32768),), (CanonicalKvCacheRef(0, 12288),))
    )
    assert allocation.padding_share == round((32768 - 12288) / 65536, 6)


def test_pages_of_several_sizes_have_tensors_of_their_own() -> None:
    allocation = allocate(
        build_layers(build_attention(0), build_attention(1, heads=2)), "unpacked", 100
    )
    assert allocation.canonical == CanonicalKvCaches(
        (32768, 8192), ((CanonicalKvCacheRef(0, 32768), CanonicalKvCacheRef(1, 8192)),)
    )
    # NIXL refuses tensors of several sizes that are not MLA.
    assert allocation.transfers[0].descriptors is None


def test_only_cross_layers_has_one_block_for_one_group() -> None:
    plain = build_layers(*(build_attention(layer) for layer in range(4)))
    allocation = allocate(plain, "cross_layers", 33)
    assert (allocation.state, allocation.bytes_per_block) == ("requires", 4 * 32768)
    assert allocation.placements[0].block_stride == 4 * 32768
    assert allocation.canonical == CanonicalKvCaches(
        (4 * 32768,), ((CanonicalKvCacheRef(0, 4 * 32768),),)
    )
    assert [(t.regions, t.descriptors, t.bytes) for t in allocation.transfers] == [
        (1, 3, 3 * 4 * 32768)
    ]
    for name in ("canonical", "packed"):
        assert condition_states(allocate(plain, name))["several groups"] == "not met"
    assert allocate(build_gpt_oss(), "cross_layers").state == "not met"
    uneven = build_layers(build_attention(0), build_attention(1, heads=2))
    assert condition_states(allocate(uneven, "cross_layers"))["one group"] == "not met"


def test_unpacked_requires_that_no_connector_prefers_cross_layer_blocks() -> None:
    for model in (
        build_layers(build_attention(0), build_attention(1)),
        build_layers(build_mla(0), build_mla(1)),
    ):
        assert condition_states(allocate(model, "unpacked"))["connector"] == "requires"
    for model in (
        build_layers(build_linear(0), build_linear(1)),
        build_layers(build_attention(0), build_attention(1, heads=2)),
    ):
        assert allocate(model, "unpacked").state == "met"


def test_cross_layer_blocks_of_mla_are_not_for_nixl() -> None:
    allocation = allocate(build_layers(build_mla(0), build_mla(1)), "cross_layers", 100)
    assert (allocation.state, allocation.bytes_per_block, allocation.transfers) == (
        "requires",
        2 * 18432,
        (),
    )
    (connector,) = [
        condition.why for condition in allocation.conditions if condition.name == "connector"
    ]
    assert connector.startswith("it prefers cross-layer blocks: offloading, but not NIXL")


def test_states_are_neither_packed_nor_canonical() -> None:
    hybrid = build_layers(build_attention(0), build_linear(1))
    for name in ("canonical", "packed"):
        allocation = allocate(hybrid, name)
        assert (allocation.state, condition_states(allocation)["attention"]) == (
            "not met",
            "not met",
        )
        assert (allocation.bytes_per_block, allocation.placements, allocation.canonical) == (
            None,
            (),
            None,
        )


def test_a_hybrid_moves_a_state_in_four_pieces_and_attention_in_two() -> None:
    # A token takes 2048 bytes and the states 1,097,728: blocks of 544 tokens.
    allocation = allocate(
        build_layers(build_attention(0, heads=2, size=256), build_linear(1)), "unpacked", 600
    )
    (transfer,) = allocation.transfers
    assert transfer.blocks == (2, 1)
    assert (transfer.regions, transfer.descriptors) == (2, 2 * 2 + 4)
    assert transfer.bytes == 2 * 544 * 2048 + 1_097_728


def test_windowed_mla_is_always_packed() -> None:
    both = build_layers(
        build_mla(0), build_mla(1, window=32), build_mla(2), build_mla(3, window=32)
    )
    allocation = allocate(both, "packed", 160)
    assert condition_states(allocation)["flag"] == "met"
    assert allocation.bytes_per_block == 2 * 16 * 576 * 2
    assert [place.members for place in allocation.placements] == [
        (GroupLayer(0, 0), GroupLayer(1, 1)),
        (GroupLayer(0, 2), GroupLayer(1, 3)),
    ]
    assert [place.offset for place in allocation.placements] == [0, 18432]
    assert allocation.transfers[0].blocks == (10, 3)
    assert allocate(both, "unpacked").state == "not met"


def test_a_page_of_mla_is_one_descriptor() -> None:
    (transfer,) = allocate(build_layers(build_mla(0), build_mla(1)), "unpacked", 100).transfers
    assert (transfer.regions, transfer.descriptors) == (2, 2 * 7)
    assert transfer.bytes == 2 * 7 * 18432


def test_blocks_that_do_not_follow_from_the_prompt_are_not_known() -> None:
    cross = build_layers(build_attention(0), build_attention(0, kind="cross_attention"))
    (transfer,) = allocate(cross, "unpacked", 100).transfers
    assert (transfer.blocks, transfer.bytes) == ((7, None), None)
    unsized = build_layers(build_attention(0), build_sliding(1))
    (transfer,) = allocate(unsized, "unpacked", 100).transfers
    assert (transfer.blocks, transfer.descriptors) == ((7, None), None)


def test_a_short_prompt_does_not_fill_its_window() -> None:
    (transfer,) = allocate(build_gpt_oss(), "packed", 64, block_size=64).transfers
    assert transfer.blocks == (1, 1)


def test_refused_groups_are_not_allocated() -> None:
    refused = project_layout(
        build_layers(build_attention(0), build_mla(1, window=32)),
        ProjectionRequest(16, vllm_version="0.24"),
    )
    assert refused.groupings[0].refusal is not None
    assert (refused.refusals, refused.allocations) == ((), ())
