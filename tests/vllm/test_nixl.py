"""Blocks of a prompt, and what they take; the figures are worked out by hand."""

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
from onnxkvrename.vllm.groups import group_layers
from onnxkvrename.vllm.layer_specs import build_specs
from onnxkvrename.vllm.nixl import BlockCost, NixlRegistration, NixlTransfer, build_transfers
from onnxkvrename.vllm.projection import project_layout
from onnxkvrename.vllm.specs import KvCacheGroup, ProjectionRequest


def form_groups(model: Layout) -> tuple[KvCacheGroup, ...]:
    return group_layers(build_specs(model, ProjectionRequest(16)).specs).groups


def count_blocks(
    groups: tuple[KvCacheGroup, ...], *lengths: int
) -> list[tuple[tuple[int | None, ...], tuple[int | None, ...]]]:
    """The blocks that prefill offers and those that decode reads, for each prompt."""
    registration = NixlRegistration(1, (BlockCost(1, 1),) * len(groups))
    transfers = build_transfers(groups, registration, lengths)
    return [(each.blocks, each.read_blocks) for each in transfers]


WINDOWED = form_groups(build_layers(build_sliding(0, window=40), build_attention(1)))


def test_a_window_takes_one_block_more_than_it_fills() -> None:
    # 40 tokens fill three blocks of 16, and may start within a fourth.
    offered = [each for each, _ in count_blocks(WINDOWED, 1, 16, 17, 48, 49, 64, 65, 1000)]
    assert offered == [(1, 1), (1, 1), (2, 2), (3, 3), (4, 4), (4, 4), (4, 5), (4, 63)]


def test_decode_reads_no_block_that_its_window_has_passed() -> None:
    # The token after 64 others sees the last 39 of them: those from number 25 on, three blocks.
    read = [each for _, each in count_blocks(WINDOWED, 1, 48, 55, 56, 64, 65, 71)]
    assert read == [(1, 1), (3, 3), (3, 4), (3, 4), (3, 4), (4, 5), (3, 5)]


def test_chunks_are_offered_whole_and_read_from_the_last_chunk_on() -> None:
    chunked = form_groups(
        build_layers(build_attention(0, kind="chunked_local_attention", window=64))
    )
    # The next token sees its own chunk only: the eight tokens from number 192 on, or none. Where
    # it begins within a block, decode reads that block.
    assert count_blocks(chunked, 200, 192) == [((13,), (1,)), ((12,), (0,))]
    uneven = form_groups(
        build_layers(build_attention(0, kind="chunked_local_attention", window=40))
    )
    assert count_blocks(uneven, 200) == [((13,), (1,))]


def test_beside_states_prefill_leaves_the_last_token_to_decode() -> None:
    states = form_groups(build_layers(build_linear(0)))
    assert count_blocks((*WINDOWED, *states), 17) == [((1, 1, 1), (1, 1, 1))]
    assert count_blocks(WINDOWED, 17) == [((2, 2), (2, 2))]


def test_decode_posts_what_the_blocks_that_it_reads_take() -> None:
    registration = NixlRegistration(3, (BlockCost(2, 100), BlockCost(3, 1000)), incomplete="why")
    assert build_transfers(WINDOWED, registration, [64]) == (
        NixlTransfer(64, (4, 4), (3, 4), 3, 18, 4300, incomplete="why"),
    )


def test_a_refused_registration_has_blocks_only() -> None:
    assert build_transfers(WINDOWED, NixlRegistration(None, refused="why"), [64]) == (
        NixlTransfer(64, (4, 4), (3, 4), None, None, None, refused="why"),
    )


def move(model: Layout, name: str, length: int = 100) -> NixlTransfer:
    """What a prompt moves in the allocation of that name, with blocks of 16."""
    request = ProjectionRequest(16, prompt_lengths=(length,))
    allocations = project_layout(model, request).allocations
    (transfer,) = next(a for a in allocations if a.name == name).transfers
    return transfer


def test_keys_and_values_of_a_tensor_are_a_region_each() -> None:
    model = build_layers(build_sliding(0, window=40), build_attention(1))
    transfer = move(model, "unpacked")
    # One slot: a page of 16 * 8 * (64 + 64) * 2 bytes, four blocks of the window and seven.
    assert (transfer.blocks, transfer.regions) == ((4, 7), 2)
    assert (transfer.descriptors, transfer.bytes) == (2 * 11, 11 * 32768)


def test_one_slot_that_is_packed_is_registered_as_if_it_were_not() -> None:
    # vLLM takes tensors for packed if they start at several places.
    model = build_layers(build_sliding(0, window=40), build_attention(1))
    assert move(model, "packed") == move(model, "unpacked")
    two_slots = build_layers(
        *(
            build_attention(layer) if layer % 2 else build_sliding(layer, window=40)
            for layer in range(4)
        )
    )
    transfer = move(two_slots, "packed")
    assert (transfer.regions, transfer.descriptors, transfer.bytes) == (1, 11, 11 * 2 * 32768)


def test_packed_blocks_of_keys_and_values_lose_their_second_half() -> None:
    transfer = move(build_gpt_oss(), "packed")
    assert transfer.incomplete is not None
    assert "vLLM splits a block in two, and decode posts the first half" in transfer.incomplete
    assert move(build_gpt_oss(), "unpacked").incomplete is None
    windowed_mla = build_layers(build_mla(0), build_mla(1), build_mla(2, window=32))
    assert move(windowed_mla, "packed").incomplete is None


def test_the_first_layer_decides_whether_blocks_are_split() -> None:
    # Only some layers are MLA: the page of 16 * 576 * 2 bytes is larger or not, each has a tensor.
    first = move(build_layers(build_mla(0), build_attention(1)), "unpacked")
    assert (first.regions, first.descriptors, first.bytes) == (2, 14, 7 * (18432 + 32768))
    last = move(build_layers(build_attention(0), build_mla(1)), "unpacked")
    assert (last.regions, last.descriptors, last.bytes) == (3, 21, 7 * (32768 + 18432))


def test_values_of_another_size_are_refused_if_they_come_first() -> None:
    refused = move(build_layers(build_attention(0, size=64, size_v=32)), "unpacked")
    assert (refused.regions, refused.descriptors, refused.bytes) == (None, None, None)
    assert refused.refused is not None
    assert refused.refused.startswith("All kv cache tensors must have the same number of blocks")


def test_tensors_of_several_sizes_are_refused() -> None:
    refused = move(build_layers(build_attention(0), build_attention(1, heads=2)), "unpacked")
    assert refused.refused == (
        "All non-MLA kv cache tensors must have the same size: pages have 8192 and 32768 bytes"
    )
    sizes = build_layers(build_mla(0), build_attention(1), build_mla(2))
    assert move(sizes, "unpacked").refused is None


def test_states_alone_do_not_meet() -> None:
    transfer = move(
        build_layers(build_linear(0, (12288, 3)), build_linear(1, (12288, 3))), "unpacked"
    )
    assert (transfer.blocks, *transfer[3:6]) == ((1,), None, None, None)
    assert "StopIteration" in str(transfer.refused)


def test_states_of_several_sizes_in_one_group_are_refused() -> None:
    model = build_layers(build_linear(0), build_linear(1, recurrent=(16, 128, 128)))
    refused = move(model, "unpacked").refused
    assert refused == "NIXL's connector does not take states of several sizes in one group"


def test_states_that_nixl_does_not_know_are_refused() -> None:
    refused = move(build_layers(build_linear(0, recurrent=(4096, 16))), "unpacked").refused
    assert refused is not None
    assert "but these are [8192, 3] and [4096, 16]" in refused
