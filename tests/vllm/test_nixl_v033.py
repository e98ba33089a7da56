"""What vLLM 0.33 registers with NIXL; the figures are worked out by hand."""

from __future__ import annotations

import pytest
from build_layouts import (
    build_attention,
    build_layers,
    build_linear,
    build_mla,
    build_sliding,
)

from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.nixl import NixlTransfer
from onnxkvrename.vllm.projection import project_layout
from onnxkvrename.vllm.specs import ProjectionRequest

LAYER_OUTERMOST = ["LBNHC", "LBHNC"]
"""The layouts with layers outermost that take pages of several heads; NIXL asks for the last."""


def move(model: Layout, name: str, length: int = 128) -> NixlTransfer:
    """What a prompt moves in the layout of that name, with blocks of 16."""
    request = ProjectionRequest(16, vllm_version="0.33", prompt_lengths=(length,))
    allocations = project_layout(model, request).allocations
    (transfer,) = next(a for a in allocations if a.name == name).transfers
    return transfer


def mix(*, windowed_size: int, heads: int = 2, count: int = 4) -> Layout:
    """Whole layers with heads of 64 in turn with windows of 128 tokens."""
    return build_layers(
        *(
            build_sliding(layer, heads, windowed_size, 128)
            if layer % 2
            else build_attention(layer, heads, 64)
            for layer in range(count)
        )
    )


@pytest.mark.parametrize("name", LAYER_OUTERMOST)
def test_pages_with_padding_are_refused_where_layers_are_outermost(name: str) -> None:
    # Whole pages of 8,192 bytes are padded to the windows' 12,288, and do not divide them.
    transfer = move(mix(windowed_size=96), name)
    assert (transfer.regions, transfer.descriptors, transfer.bytes) == (None, None, None)
    assert transfer.refused == (
        "KV cache view cannot be partitioned into NIXL regions: layer 0 has 8192 bytes in pages "
        "of 12288"
    )


@pytest.mark.parametrize("name", LAYER_OUTERMOST)
def test_padding_is_accepted_where_a_page_is_a_block(name: str) -> None:
    transfer = move(mix(windowed_size=96, count=2), name)
    assert (transfer.regions, transfer.descriptors, transfer.bytes) == (1, 16, 16 * 12288)
    assert transfer.incomplete is None


def test_layers_that_start_alike_have_the_first_ones_block_length() -> None:
    # A page of 4,096 bytes at byte 0 of the block, and one of 8,192 there for another group.
    model = build_layers(build_attention(0, 1, 64), build_sliding(1, 1, 128, 128))
    transfer = move(model, "BLHNC")
    assert (transfer.regions, transfer.descriptors, transfer.bytes) == (1, 16, 65_536)
    assert transfer.incomplete is not None
    assert transfer.incomplete.startswith("too little is moved")
    reverse = build_layers(build_sliding(0, 1, 128, 128), build_attention(1, 1, 64))
    transfer = move(reverse, "BLHNC")
    assert (transfer.regions, transfer.descriptors, transfer.bytes) == (1, 16, 131_072)
    assert transfer.incomplete is None


def test_pages_that_are_not_one_piece_move_whole_blocks() -> None:
    model = mix(windowed_size=64, count=4)
    assert move(model, "BLHNC")[3:6] == (2, 32, 32 * 8192)
    assert move(model, "BLNHC")[3:6] == (1, 16, 16 * 16384)


def test_whole_blocks_come_beside_pages_where_only_some_are_one_piece() -> None:
    # Heads of 512 are one piece in any order, eight heads of 32 are not.
    one_group = build_layers(build_attention(0, 1, 256), build_attention(1, 8, 32))
    assert move(one_group, "BLHNC")[3:6] == (2, 16, 16 * 16384)
    # The first page starts where the block does: its length stays.
    transfer = move(one_group, "BLNHC")
    assert transfer[3:6] == (1, 8, 8 * 16384)
    assert transfer.incomplete is not None
    transfer = move(build_layers(build_attention(0, 8, 32), build_attention(1, 1, 256)), "BLNHC")
    assert transfer[3:6] == (2, 16, 8 * (32768 + 16384))
    assert transfer.incomplete is None


def test_mla_corrects_the_block_length_of_what_came_first() -> None:
    # A whole page at byte 0 is registered first, then the block that holds all.
    latents = build_layers(build_mla(0), build_mla(1))
    assert move(latents, "BLHNC", 100)[3:6] == (1, 7, 7 * 36864)
    mixed = move(build_layers(build_attention(0), build_mla(1)), "BLHNC", 100)
    assert mixed[3:6] == (1, 7, 7 * (32768 + 18432))
    assert mixed.incomplete is None


def test_heads_outside_of_blocks_have_a_region_each() -> None:
    assert move(build_layers(build_attention(0), build_attention(1)), "LHBNC")[3:6] == (
        16,
        16 * 8,
        16 * 8 * 4096,
    )


def test_a_hybrid_moves_every_region_for_attention_and_states_in_pieces() -> None:
    model = build_layers(build_attention(0, 2, 256), build_linear(1, (12288, 3)))
    transfer = move(model, "LBHNC", 700)
    page, states = 560 * 2048, (12288 * 3 + 32 * 128 * 128) * 2
    assert transfer.blocks == (2, 1)
    assert transfer[3:6] == (1, 2 + 4, 2 * page + states)
    assert transfer.incomplete is None


def test_states_beside_other_layers_in_a_block_are_not_moved_whole() -> None:
    layers = [
        build_linear(layer, (12288, 3)) if layer % 4 < 2 else build_attention(layer, 2, 256)
        for layer in range(8)
    ]
    whole, too_little = move(build_layers(*layers), "LBHNC"), move(build_layers(*layers), "BLHNC")
    assert whole.incomplete is None
    assert too_little.incomplete is not None
    assert "vLLM steps by a page, not by a block" in too_little.incomplete


def test_states_alone_do_not_meet() -> None:
    transfer = move(build_layers(build_linear(0, (12288, 3)), build_linear(1, (12288, 3))), "LBHNC")
    assert (transfer.blocks, *transfer[3:6]) == ((1,), None, None, None)
    assert "StopIteration" in str(transfer.refused)


def test_chunks_are_known() -> None:
    chunked = build_layers(build_attention(0, kind="chunked_local_attention", window=64))
    transfer = move(chunked, "LBHNC", 200)
    assert (transfer.blocks, transfer.read_blocks) == ((13,), (1,))
    assert transfer[3:6] == (1, 1, 32768)
