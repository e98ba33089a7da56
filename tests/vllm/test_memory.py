"""Where vLLM puts the pages; the figures are worked out by hand."""

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
    request = ProjectionRequest(block_size, prompt_lengths=prompt_lengths)
    allocations = project_layout(model, request).allocations
    return next(allocation for allocation in allocations if allocation.name == name)


def condition_states(allocation: Allocation) -> dict[str, str]:
    return {condition.name: condition.state for condition in allocation.conditions}


def find_reason(allocation: Allocation, name: str) -> str:
    (reason,) = [condition.why for condition in allocation.conditions if condition.name == name]
    return reason


def test_packed_gpt_oss_moves_the_published_bytes() -> None:
    # vllm#46252 says "33 transfers, 279 descriptors, 438,829,056 bytes" of 32 requests: totals.
    # Only the stride is exact, 438,829,056 / 279. That blocks have 64 tokens is derived; then a
    # window of 128 takes 128 / 64 + 1 = 3 blocks, unless the next token sees only two, and 33
    # prompts of 257 to 382 tokens add up.
    published_bytes, published_descriptors = 438_829_056, 279
    allocation = allocate(build_gpt_oss(), "packed", 257, 318, 321, 382, block_size=64)
    assert published_bytes == published_descriptors * 1_572_864
    assert allocation.bytes_per_block == 1_572_864 == 12 * 131_072
    assert allocation.padding_share == 0
    assert [(t.blocks, t.regions, t.descriptors) for t in allocation.transfers] == [
        ((3, 5), 1, 8),
        ((3, 5), 1, 8),
        ((3, 6), 1, 9),
        ((3, 6), 1, 9),
    ]
    shorter, longer = allocation.transfers[0], allocation.transfers[-1]
    assert 18 * (shorter.descriptors or 0) + 15 * (longer.descriptors or 0) == 279
    assert 18 * (shorter.bytes or 0) + 15 * (longer.bytes or 0) == published_bytes


def test_unpacked_gpt_oss_moves_key_and_value_of_each_slot_apart() -> None:
    (transfer,) = allocate(build_gpt_oss(), "unpacked", 382, block_size=64).transfers
    assert (transfer.regions, transfer.descriptors) == (24, 24 * 9)
    assert transfer.bytes == 9 * 1_572_864


def test_canonical_gpt_oss_has_one_block_for_all_slots() -> None:
    allocation = allocate(build_gpt_oss(), "canonical", block_size=64)
    assert (allocation.state, allocation.bytes_per_block) == ("requires", 1_572_864)
    assert condition_states(allocation) == {
        "version": "requires",
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


def test_cross_layers_has_one_block_for_one_group() -> None:
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
    assert condition_states(allocate(plain, "packed"))["several groups"] == "not met"
    assert allocate(build_gpt_oss(), "cross_layers").state == "not met"
    uneven = build_layers(build_attention(0), build_attention(1, heads=2))
    assert condition_states(allocate(uneven, "cross_layers"))["one group"] == "not met"


def test_the_canonical_allocation_takes_one_group_too() -> None:
    # vllm#37885 asked for several groups at first; its last state does not.
    plain = build_layers(*(build_attention(layer) for layer in range(4)))
    allocation = allocate(plain, "canonical")
    assert (allocation.state, allocation.bytes_per_block) == ("requires", 4 * 32768)
    assert [place.offset for place in allocation.placements] == [0, 32768, 65536, 98304]
    assert "before cross_layers" in find_reason(allocation, "version")
    uneven = build_layers(build_attention(0), build_attention(1, heads=2))
    states = condition_states(allocate(uneven, "canonical"))
    assert (states["one page size"], states["equal tensors"]) == ("not met", "not met")


def test_cross_layers_requires_model_runner_v1() -> None:
    plain = build_layers(build_attention(0), build_attention(1))
    allocation = allocate(plain, "cross_layers")
    assert condition_states(allocation)["model runner"] == "requires"
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in find_reason(allocation, "model runner")
    assert "model runner" not in condition_states(allocate(build_gpt_oss(), "packed"))


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
    connector = find_reason(allocation, "connector")
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


def test_the_flag_packs_several_groups_and_only_those() -> None:
    request = ProjectionRequest(16, enable_cross_layers_blocks=True)
    groups = build_layers(build_attention(0), build_sliding(1, window=32))
    found = {each.name: each for each in project_layout(groups, request).allocations}
    assert condition_states(found["packed"])["flag"] == "met"
    assert condition_states(found["unpacked"])["flag"] == "not met"
    assert [each.name for each in found.values() if each.is_default] == ["packed"]
    plain = build_layers(build_attention(0), build_attention(1))
    found = {each.name: each for each in project_layout(plain, request).allocations}
    assert not found["packed"].is_possible
    assert found["unpacked"].is_default


def test_refused_groups_are_not_allocated() -> None:
    refused = project_layout(
        build_layers(build_attention(0), build_mla(1, window=32)), ProjectionRequest(16)
    )
    assert (refused.grouping, refused.allocations) == (None, ())
    assert [refusal.layers for refusal in refused.refusals] == [(0,)]
