"""Blocks of a prompt, and what they take; the figures are worked out by hand."""

from __future__ import annotations

import pytest
from build_layouts import build_attention, build_layers, build_linear, build_sliding

from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.groups import group_layers
from onnxkvrename.vllm.layer_specs import build_specs
from onnxkvrename.vllm.nixl import (
    BlockCost,
    NixlRegistration,
    NixlTransfer,
    build_transfers,
    count_blocks,
    count_read_blocks,
    split_states,
)
from onnxkvrename.vllm.specs import KvCacheGroup, ProjectionRequest, RefusalError


def form_groups(model: Layout) -> tuple[KvCacheGroup, ...]:
    return group_layers(build_specs(model, ProjectionRequest(16)).specs, "0.24").groups


WINDOWED = form_groups(build_layers(build_sliding(0, window=40), build_attention(1)))


def test_a_window_takes_one_block_more_than_it_fills() -> None:
    # 40 tokens fill three blocks of 16, and may start within a fourth.
    assert [count_blocks(WINDOWED, length) for length in (1, 16, 17, 48, 49, 64, 65, 1000)] == [
        (1, 1),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (4, 4),
        (4, 5),
        (4, 63),
    ]


def test_decode_reads_no_block_that_its_window_has_passed() -> None:
    # The token after 64 others sees the last 39 of them: those from number 25 on, three blocks.
    assert [count_read_blocks(WINDOWED, length) for length in (1, 48, 55, 56, 64, 65, 71)] == [
        (1, 1),
        (3, 3),
        (3, 4),
        (3, 4),
        (3, 4),
        (4, 5),
        (3, 5),
    ]


def test_chunks_are_offered_whole_and_read_from_the_last_chunk_on() -> None:
    chunked = form_groups(
        build_layers(build_attention(0, kind="chunked_local_attention", window=64))
    )
    assert count_blocks(chunked, 200) == (13,)
    # The next token sees its own chunk only: the eight tokens from number 192 on, or none. Where
    # it begins within a block, decode reads that block.
    assert count_read_blocks(chunked, 200) == (1,)
    assert count_read_blocks(chunked, 192) == (0,)
    uneven = form_groups(
        build_layers(build_attention(0, kind="chunked_local_attention", window=40))
    )
    assert count_read_blocks(uneven, 200) == (1,)


def test_beside_states_prefill_leaves_the_last_token_to_decode() -> None:
    states = form_groups(build_layers(build_linear(0)))
    assert count_blocks((*WINDOWED, *states), 17) == (1, 1, 1)
    assert count_read_blocks((*WINDOWED, *states), 17) == (1, 1, 1)
    assert count_read_blocks(WINDOWED, 17) == (2, 2)


def test_decode_posts_what_the_blocks_that_it_reads_take() -> None:
    registration = NixlRegistration(3, (BlockCost(2, 100), BlockCost(3, 1000)), incomplete="why")
    assert build_transfers(WINDOWED, registration, [64]) == (
        NixlTransfer(64, (4, 4), (3, 4), 3, 18, 4300, incomplete="why"),
    )


def test_a_refused_registration_has_blocks_only() -> None:
    assert build_transfers(WINDOWED, NixlRegistration(None, refused="why"), [64]) == (
        NixlTransfer(64, (4, 4), (3, 4), None, None, None, refused="why"),
    )


@pytest.mark.parametrize(
    ("shapes", "version", "descriptors"),
    [
        (((1536, 3), (8, 64, 128)), "0.24", 4),
        (((1536, 3), (8, 64, 128)), "0.33", 4),
        (((512, 3), (512, 16)), "0.33", 2),
        (((512, 3), (512, 16)), "0.24", None),
        (((512, 3), (256, 16)), "0.33", None),
        (((1536, 3),), "0.33", None),
        (((64, 8, 128), (8, 64, 128)), "0.33", None),
    ],
)
def test_states_are_split_by_their_shapes(
    shapes: tuple[tuple[int, ...], ...], version: str, descriptors: int | None
) -> None:
    """A convolution of three projections, or of one in Mamba 1; no other."""
    (spec,) = build_specs(build_layers(build_linear(0)), ProjectionRequest(16)).specs
    spec = spec._replace(state_shapes=shapes, dtypes=("FLOAT16",) * len(shapes))
    group = KvCacheGroup((spec,), has_per_layer_specs=False)
    if descriptors is None:
        with pytest.raises(RefusalError, match="NIXL's connector takes only states of Mamba"):
            split_states([group], version)
    else:
        states = split_states([group], version)
        assert states is not None
        assert states.descriptors == descriptors
        assert states.bytes == spec.unpadded_page_size


def test_without_states_nothing_is_split() -> None:
    assert split_states(WINDOWED, "0.33") is None
