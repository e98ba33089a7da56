"""What decode reads from prefill; the figures are worked out by hand, `make witness` has more."""

from __future__ import annotations

from typing import NamedTuple

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
from onnxkvrename.vllm.handshake import Handshake, check_handshake
from onnxkvrename.vllm.reads import PromptReads
from onnxkvrename.vllm.specs import ProjectionRequest

PLAIN = build_layers(build_attention(0, heads=4, size=64), build_attention(1, heads=4, size=64))
TOKEN = 2 * 64 * 2
"""Bytes of a token of a head: key and value of 64 elements, two bytes each."""
MLA = build_layers(build_mla(0, 512, 64))
HYBRID = build_layers(build_attention(0, heads=2, size=256), build_linear(1, (512, 3), (8, 64, 64)))
MLA_HYBRID = build_layers(build_mla(0, 512, 64), build_linear(1, (512, 3), (8, 64, 64)))
CHUNKED = build_layers(
    build_attention(0, kind="chunked_local_attention", window=64), build_attention(1)
)


class Pair(NamedTuple):
    """Two workers: ranks and blocks of prefill and decode."""

    model: Layout
    ranks: tuple[int, int]
    blocks: tuple[int, int]
    version: str = "0.33"
    kernel: int | None = None

    def meet(self, tokens: int) -> Handshake:
        """Return what comes of a prompt."""
        prefill, decode = (
            ProjectionRequest(size, count, self.version, (tokens,))
            for size, count in zip(self.blocks, self.ranks, strict=True)
        )
        handshake = check_handshake((self.model, self.model), (prefill, decode), self.kernel)
        assert handshake.findings == ()
        return handshake

    def read(self, tokens: int) -> PromptReads:
        """Return what decode posts for a prompt."""
        (reads,) = self.meet(tokens).reads
        return reads


@pytest.mark.parametrize(
    ("pair", "sources", "descriptors", "size"),
    [
        # Three blocks of 16 in two layers. In 0.24 keys and values are apart.
        (Pair(PLAIN, (1, 1), (16, 16)), [(0,)], 6, 2 * 48 * 4 * TOKEN),
        (Pair(PLAIN, (1, 1), (16, 16), "0.24"), [(0,)], 12, 2 * 48 * 4 * TOKEN),
        # Decode reads prefill's blocks, whatever its own are, and its own heads.
        (Pair(PLAIN, (1, 2), (16, 32)), [(0,), (0,)], 6, 2 * 48 * 2 * TOKEN),
        (Pair(PLAIN, (2, 4), (16, 64)), [(0,), (0,), (1,), (1,)], 6, 2 * 48 * TOKEN),
        # With more ranks than heads, two ranks read the same head.
        (Pair(PLAIN, (4, 8), (16, 16)), [(r // 2,) for r in range(8)], 6, 2 * 48 * TOKEN),
        # From two ranks of prefill, one rank reads two heads of each.
        (Pair(PLAIN, (2, 1), (16, 16)), [(0, 1)], 12, 2 * 48 * 4 * TOKEN),
        (Pair(PLAIN, (4, 2), (16, 16)), [(0, 1), (2, 3)], 12, 2 * 48 * 2 * TOKEN),
        # MLA is the same on every rank.
        (Pair(MLA, (4, 2), (16, 32), "0.24"), [(0,), (2,)], 3, 48 * 576 * 2),
    ],
)
def test_a_rank_reads_its_heads_of_prefills_blocks(
    pair: Pair, sources: list[tuple[int, ...]], descriptors: int, size: int
) -> None:
    ranks = pair.read(33).ranks
    assert [rank.rank for rank in ranks] == [*range(pair.ranks[1])]
    assert [rank.sources for rank in ranks] == sources
    assert {(rank.descriptors, rank.bytes) for rank in ranks} == {(descriptors, size)}


def test_of_ranks_with_the_same_head_the_first_is_read_and_states_of_all() -> None:
    reads = Pair(HYBRID, (4, 2), (48, 96)).read(10)
    assert [rank.sources for rank in reads.ranks] == [(0, 1), (2, 3)]
    # One block of attention from one source, and four pieces of a state from each of two.
    assert {rank.descriptors for rank in reads.ranks} == {1 + 2 * 4}
    assert (reads.transfers, reads.descriptors) == (4, 18)
    assert reads.bytes == 2 * reads.ranks[0].bytes


@pytest.mark.parametrize(
    ("pair", "tokens", "is_fault"),
    [
        # Two kernel blocks of prefill are one of its blocks: the last one is read for the first.
        (Pair(PLAIN, (1, 1), (128, 64), kernel=64), 10, True),
        (Pair(PLAIN, (1, 1), (128, 64), kernel=64), 65, False),
        # Decode's first block begins before the first that prefill offers.
        (Pair(build_gpt_oss(), (1, 1), (16, 32)), 160, False),
        (Pair(build_gpt_oss(), (1, 1), (16, 32)), 180, True),
    ],
)
def test_tokens_that_arrive_in_other_places_are_a_fault(
    pair: Pair, tokens: int, is_fault: bool
) -> None:
    handshake = pair.meet(tokens)
    (reads,) = handshake.reads
    assert (reads.incomplete is not None) == is_fault
    assert reads.ranks  # vLLM reads all the same
    assert handshake.fault is not None
    assert handshake.fault.tokens <= tokens or not is_fault


@pytest.mark.parametrize(
    ("pair", "tokens"),
    [
        # Decode has more kernel blocks for a prompt than prefill.
        (Pair(PLAIN, (1, 1), (64, 128), kernel=64), 10),
        # No token of the last chunk is left to see.
        (Pair(CHUNKED, (1, 1), (16, 16)), 64),
        (Pair(CHUNKED, (1, 1), (16, 16), "0.24"), 64),
        (Pair(MLA_HYBRID, (2, 1), (64, 64), "0.24", kernel=64), 10),
    ],
)
def test_an_assertion_of_decode_is_a_fault(pair: Pair, tokens: int) -> None:
    reads = pair.read(tokens)
    assert reads.refused is not None
    assert reads.ranks == ()


def test_a_window_of_unknown_size_leaves_the_reads_unknown() -> None:
    model = build_layers(build_sliding(0, window="sliding_window"), build_attention(1))
    handshake = Pair(model, (1, 1), (16, 16)).meet(10)
    (reads,) = handshake.reads
    assert reads.unknown is not None
    assert handshake.fault is None
