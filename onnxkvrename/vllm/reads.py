"""Compute what decode reads from prefill where both sides differ: reads, descriptors and bytes.

This follows, in vLLM 0.24.0 and 0.33.0, ``compute_tp_mapping`` of
``distributed/kv_transfer/kv_connector/v1/nixl/tp_mapping.py``, ``_read_blocks_for_req`` and
``_read_blocks`` of ``pull_worker.py``, and ``_build_fa_remote``, ``_build_local_splits_from_plan``,
``_split_remote_blocks`` and ``_apply_prefix_caching`` of ``base_worker.py``. Both sides have met
without a refusal (`handshake`), and no prefix is cached.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.vllm.nixl import (
    BlockCost,
    NixlRegistration,
    count_blocks,
    count_read_blocks,
    count_transferred_tokens,
    explain_unknown_blocks,
)
from onnxkvrename.vllm.specs import CHUNKED_KINDS, KvCacheGroup

_MAX_LENGTH = 1 << 15
"""The longest prompt, in tokens, that is tried for a fault."""


class NixlSide(NamedTuple):
    """One worker's cache.

    Attributes:
        ranks: Its tensor parallel size.
        block_size: Tokens in a kernel block, in which NIXL counts.
        kernel_blocks: The number of kernel blocks in one of vLLM's blocks.
        memory_layout: The layout of its memory, as ``VLLM_KV_CACHE_LAYOUT`` names it; empty if that
            is not known.
        regions: The regions that it registers; ``None`` if that is not known.
        region_layers: The layer by which 0.33 names each region; empty for other versions.
        uses_mla: Whether all its attention is MLA.
        has_states: Whether it has layers of states.
        is_hybrid: Whether it has layers that are not full attention (``_is_hma_required``).
    """

    ranks: int
    block_size: int
    kernel_blocks: int
    memory_layout: str
    regions: int | None
    region_layers: tuple[int, ...]
    uses_mla: bool
    has_states: bool
    is_hybrid: bool


class NixlWorker(NamedTuple):
    """A side with the groups of its layers, and what it registers with NIXL."""

    side: NixlSide
    groups: tuple[KvCacheGroup, ...]
    registration: NixlRegistration


class RankReads(NamedTuple):
    """What one rank of decode posts for a prompt.

    Attributes:
        rank: The rank of decode, from 0.
        sources: The ranks of prefill that it reads from: one transfer for each.
        descriptors: The number of descriptors of these transfers.
        bytes: Bytes of these descriptors.
    """

    rank: int
    sources: tuple[int, ...]
    descriptors: int
    bytes: int


class PromptReads(NamedTuple):
    """What the ranks of decode post for one prompt.

    Attributes:
        tokens: The length of the prompt.
        ranks: What each rank posts; empty if that is not known, or if decode fails.
        unknown: Why it is not known; ``None`` if it is.
        refused: Why decode fails before it reads; ``None`` if it does not.
        incomplete: Why decode does not get what prefill wrote; ``None`` if it does.
    """

    tokens: int
    ranks: tuple[RankReads, ...] = ()
    unknown: str | None = None
    refused: str | None = None
    incomplete: str | None = None

    @property
    def fault(self) -> str | None:
        """Why decode does not get what prefill wrote; ``None`` if it does, or not known."""
        return self.incomplete if self.refused is None else self.refused

    @property
    def stops(self) -> bool:
        """Whether decode fails before it reads."""
        return self.refused is not None

    @property
    def transfers(self) -> int:
        """The number of transfers of all ranks."""
        return sum(len(rank.sources) for rank in self.ranks)

    @property
    def descriptors(self) -> int:
        """The number of descriptors of all ranks."""
        return sum(rank.descriptors for rank in self.ranks)

    @property
    def bytes(self) -> int:
        """Bytes that all ranks read."""
        return sum(rank.bytes for rank in self.ranks)


class _ReadError(Exception):
    """Decode fails before it reads, or for a reason that this program does not know of."""


class _Span(NamedTuple):
    """Blocks of a group, one after the other.

    Attributes:
        start: The number of the first block, counted from the prompt's first token.
        length: How many there are.
        size: Tokens in a block; 0 for states, which have one block.
    """

    start: int
    length: int
    size: int

    def divide(self, parts: int) -> _Span:
        """Return these blocks divided into `parts` each; states stay as they are."""
        if not self.size:
            return self
        return _Span(self.start * parts, self.length * parts, self.size // parts)

    def take_first(self, count: int) -> _Span:
        return self._replace(length=min(count, self.length))

    def take_last(self, count: int) -> _Span:
        dropped = max(0, self.length - count)
        return self._replace(start=self.start + dropped, length=self.length - dropped)


def predict_reads(
    prefill: NixlWorker, decode: NixlWorker, heads: int | None, tokens: int, version: str
) -> PromptReads:
    """Return what each rank of decode posts for a prompt of `tokens` tokens.

    Args:
        prefill: The worker that is read.
        decode: The worker that reads. vLLM's handshake has accepted both.
        heads: The KV heads of all ranks together; ``None`` if layers have different numbers.
        tokens: The length of the prompt.
        version: One of `VLLM_VERSIONS`.
    """
    unknown = explain_unknown_blocks((*prefill.groups, *decode.groups))
    if unknown is not None:
        return PromptReads(tokens, unknown=unknown)
    try:
        spans = _pair_blocks(prefill, decode, tokens, version)
    except _ReadError as error:
        return PromptReads(tokens, refused=str(error))
    if not spans:
        # Decode tells prefill that it needs nothing.
        ranks = tuple(RankReads(rank, (), 0, 0) for rank in range(decode.side.ranks))
        return PromptReads(tokens, ranks)
    ratio = _divide_sides(prefill.side, decode.side)[1]
    costs = [*_divide_costs(decode, ratio)]
    counts = [local.length for local, _ in spans]
    ranks = tuple(
        _sum_reads(rank, prefill.side, decode, heads or 1, [*zip(counts, costs, strict=True)])
        for rank in range(decode.side.ranks)
    )
    return PromptReads(tokens, ranks, incomplete=_explain_misplacement(spans))


def explain_unknown_reads(prefill: NixlWorker, decode: NixlWorker) -> str | None:
    """Return why it is not known whether decode gets every prompt; ``None`` if it is.

    Workers that are alike read what is written, whatever the size of a window. Of chunks, decode
    reads only the last one, so their size counts.
    """
    groups = (*prefill.groups, *decode.groups)
    return None if _is_sure(prefill, decode) else explain_unknown_blocks(groups)


def _is_sure(prefill: NixlWorker, decode: NixlWorker) -> bool:
    """Return whether decode gets every prompt, whatever sizes are not known."""
    has_chunks = any(
        group.first_spec.kind in CHUNKED_KINDS for group in (*prefill.groups, *decode.groups)
    )
    return prefill == decode and not has_chunks


def find_read_fault(
    prefill: NixlWorker, decode: NixlWorker, heads: int | None, version: str
) -> PromptReads | None:
    """Return the shortest prompt that decode does not get as prefill wrote it.

    ``None`` if there is none, or if blocks are not known (`explain_unknown_reads`). The arguments
    are those of `predict_reads`. Only lengths are tried at which the number of blocks of a group
    changes.
    """
    groups = (*prefill.groups, *decode.groups)
    if _is_sure(prefill, decode) or explain_unknown_blocks(groups) is not None:
        return None
    for tokens in _list_critical_lengths(groups):
        try:
            spans = _pair_blocks(prefill, decode, tokens, version)
        except _ReadError:
            return predict_reads(prefill, decode, heads, tokens, version)
        if _explain_misplacement(spans) is not None:
            return predict_reads(prefill, decode, heads, tokens, version)
    return None


def _list_critical_lengths(groups: Iterable[KvCacheGroup]) -> list[int]:
    """Return the lengths at which the blocks of a group, or those it still sees, change.

    Once all windows are full, they repeat with the size that all blocks divide; chunks with the
    size that these divide, too.
    """
    specs = [group.first_spec for group in groups]
    sizes = {spec.block_size for spec in specs if spec.block_size and not spec.is_state}
    windows = {spec.window for spec in specs if isinstance(spec.window, int)}
    chunks = {
        spec.window for spec in specs if spec.kind in CHUNKED_KINDS and isinstance(spec.window, int)
    }
    period = math.lcm(*sizes, *chunks)
    longest = min(max(windows, default=0) + 2 * period, _MAX_LENGTH)
    starts = {
        offset + multiple
        for size in sizes | chunks
        for offset in {0, *windows}
        for multiple in range(0, longest - offset, size)
    }
    # Beside states a token of the prompt is not transferred.
    return sorted({start + more for start in starts for more in (-1, 0, 1, 2)} - {-1, 0})


def _reads_states_of_mla_ranks(prefill: NixlSide, decode: NixlSide) -> bool:
    return decode.uses_mla and decode.has_states and prefill.ranks > decode.ranks


def _divide_sides(prefill: NixlSide, decode: NixlSide) -> tuple[int, int]:
    """Return the pieces of a kernel block of prefill, and of decode, that are paired."""
    if decode.block_size % prefill.block_size == 0:
        return 1, decode.block_size // prefill.block_size
    unit = math.gcd(prefill.block_size, decode.block_size)
    return prefill.block_size // unit, decode.block_size // unit


def _pair_blocks(
    prefill: NixlWorker, decode: NixlWorker, tokens: int, version: str
) -> list[tuple[_Span, _Span]]:
    """Return the blocks of each group that decode writes, and those that it reads for them.

    None if decode reads nothing.

    Raises:
        _ReadError: vLLM fails with an assertion.
    """
    if version == "0.24" and _reads_states_of_mla_ranks(prefill.side, decode.side):
        raise _ReadError(
            "AssertionError when decode reads: vLLM 0.24 takes one rank of prefill for MLA, and "
            "the states are on several"
        )
    counts = count_read_blocks(decode.groups, tokens)
    if version != "0.24" and not any(counts):
        return []
    pairs = []
    pieces, ratio = _divide_sides(prefill.side, decode.side)
    remote_parts = prefill.side.kernel_blocks * pieces
    local_parts = decode.side.kernel_blocks
    offered = _list_spans(prefill.groups, count_blocks(prefill.groups, tokens), tokens)
    allocated = _list_spans(decode.groups, counts, tokens)
    for remote, local in zip(offered, allocated, strict=True):
        remote = remote.divide(remote_parts)
        local = local.divide(local_parts)
        if ratio > 1 and local.size:
            local = local.divide(ratio).take_first(remote.length)
        if not local.size:
            pairs.append((local, remote))
        elif decode.side.has_states:
            pair = _pair_beside_states(local, remote, local_parts, remote_parts, version)
            pairs.append(pair)
        else:
            pairs.append(_pair_without_states(local, remote))
    return pairs


def _list_spans(
    groups: Sequence[KvCacheGroup], counts: Iterable[int | None], tokens: int
) -> Iterator[_Span]:
    """Yield the blocks of each group: the last ones of the prompt."""
    tokens = count_transferred_tokens(groups, tokens)
    for group, count in zip(groups, counts, strict=True):
        size = group.first_spec.block_size or 0
        if group.first_spec.is_state or not size:
            yield _Span(0, 1, 0)
        else:
            yield _Span(-(-tokens // size) - (count or 0), count or 0, size)


def _pair_without_states(local: _Span, remote: _Span) -> tuple[_Span, _Span]:
    if local.length > remote.length or (not local.length and remote.length):
        raise _ReadError(
            f"AssertionError when decode reads: prefill offers {remote.length} blocks, and decode "
            f"allocates {local.length}"
        )
    return local, remote.take_last(local.length)


def _pair_beside_states(
    local: _Span, remote: _Span, local_parts: int, remote_parts: int, version: str
) -> tuple[_Span, _Span]:
    if local_parts == remote_parts and local.length < remote.length:
        return local, remote.take_last(local.length)
    most = local_parts + remote_parts + 1 if version != "0.24" else max(local_parts, remote_parts)
    if abs(local.length - remote.length) >= most:
        raise _ReadError(
            f"AssertionError when decode reads: prefill offers {remote.length} blocks, and decode "
            f"allocates {local.length}"
        )
    return local.take_first(remote.length), remote.take_first(local.length)


def _divide_costs(decode: NixlWorker, ratio: int) -> Iterator[BlockCost]:
    """Yield the cost of a block that is paired, for each group."""
    for group, cost in zip(decode.groups, decode.registration.costs, strict=True):
        parts = 1 if group.first_spec.is_state else decode.side.kernel_blocks * ratio
        yield cost._replace(bytes=cost.bytes // parts)


def _sum_reads(
    rank: int,
    prefill: NixlSide,
    decode: NixlWorker,
    heads: int,
    counted: Sequence[tuple[int, BlockCost]],
) -> RankReads:
    """Return what a rank posts for the number of blocks of each group, and the cost of one."""
    attention = _list_attention_sources(rank, prefill, decode.side, heads)
    sources = attention
    if decode.side.has_states and prefill.ranks > decode.side.ranks:
        share = prefill.ranks // decode.side.ranks
        sources = tuple(range(rank * share, (rank + 1) * share))
    descriptors = size = 0
    for group, (count, cost) in zip(decode.groups, counted, strict=True):
        reads = len(sources) if group.first_spec.is_state else len(attention)
        descriptors += reads * count * cost.descriptors
        size += count * (cost.bytes // reads) * reads
    return RankReads(rank, sources, descriptors, size)


def _list_attention_sources(
    rank: int, prefill: NixlSide, decode: NixlSide, heads: int
) -> tuple[int, ...]:
    """Return the ranks of prefill whose attention a rank of decode reads.

    Of several ranks with the same head, vLLM reads the first.
    """
    if decode.uses_mla or decode.ranks >= prefill.ranks:
        return (rank * prefill.ranks // decode.ranks,)
    share = prefill.ranks // decode.ranks
    first_by_head: dict[int, int] = {}
    for source in range(rank * share, (rank + 1) * share):
        first_by_head.setdefault(source * heads // prefill.ranks, source)
    return tuple(first_by_head.values())


def _explain_misplacement(spans: Iterable[tuple[_Span, _Span]]) -> str | None:
    """Return why tokens arrive in other places than prefill had them; ``None`` if none does."""
    for local, remote in spans:
        written, read = local.start * local.size, remote.start * remote.size
        if local.length and written != read:
            return (
                f"decode puts the tokens from number {read:,} on where it looks for those from "
                f"number {written:,} on"
            )
    return None
