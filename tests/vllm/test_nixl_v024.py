"""What vLLM 0.24 registers with NIXL; the figures are worked out by hand."""

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
from onnxkvrename.vllm.nixl import NixlTransfer
from onnxkvrename.vllm.projection import project_layout
from onnxkvrename.vllm.specs import ProjectionRequest


def move(model: Layout, name: str, length: int = 100) -> NixlTransfer:
    """What a prompt moves in the allocation of that name, with blocks of 16."""
    request = ProjectionRequest(16, vllm_version="0.24", prompt_lengths=(length,))
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
