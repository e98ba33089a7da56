"""Prefill and decode with other ranks and other blocks: each rank has a pool and an agent.

    python ranks.py     exit code 0 if the tokens, and what `compare` predicts, are right

The ranks of a worker divide the KV heads, as in vLLM's tensor parallelism. Here, only the caches
are divided: each worker runs its graph in one piece. What a rank of decode reads follows
vLLM 0.33's NIXL connector (``_build_fa_remote`` and ``_build_local_splits_from_plan`` of
``distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py``).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

import numpy as np
from calling import ROOT, call
from device import Device
from kvlayout import Blocks, Descriptor, KvLayout, read_layout
from paging import Pool
from prompts import COUNT, SIZES, Drawn, draw, format_tokens, generate_undivided
from transfer import write_specializations
from workers import Questions, Worker

if TYPE_CHECKING:
    from agent import Agent
    from records import Peer

MODEL = ROOT / "fixtures" / "plain" / "serving" / "decoder.onnx"
PAIRS = (((1, 4), (2, 8)), ((2, 4), (1, 4)), ((1, 4), (1, 12)))
"""Prefill and decode of each part: ranks, and tokens in a block."""
LENGTH = 9


class Reads(NamedTuple):
    """What a rank of decode reads: transfers, descriptors and bytes."""

    transfers: int
    descriptors: int
    size: int


class HandOff(NamedTuple):
    """What prefill tells decode: the next token to run, and the blocks, the same in each rank."""

    tokens: int
    token: int
    blocks: Blocks


class Result(NamedTuple):
    """The tokens that decode generates, and what each of its ranks has read."""

    tokens: list[int]
    reads: list[Reads]


def prefill(questions: Questions, layout: KvLayout) -> None:
    """Answer each prompt with a hand-off, and any other question with the data for NIXL."""
    from agent import Agent  # NIXL is loaded by the workers only

    device = Device(str(MODEL), SIZES)
    pools = [Pool(layout) for _ in range(layout.ranks)]
    agents = [Agent(f"prefill {rank}", pool.memory) for rank, pool in enumerate(pools)]
    for question in questions:
        if not isinstance(question, Drawn):
            questions.answer([agent.peer for agent in agents])
            continue
        tokens = len(question.tokens)
        token = device.run(question.tokens, 0)
        for rank, pool in enumerate(pools):
            blocks = pool.take([group.count_offered_blocks(tokens) for group in layout.groups])
            pool.write(take_heads(device, layout, rank), tokens, blocks)
        questions.answer(HandOff(tokens, token, blocks))


def decode(questions: Questions, layout: KvLayout, remote: KvLayout) -> None:
    """Connect to the peers, which come first, then answer each hand-off with its result."""
    from agent import Agent

    device = Device(str(MODEL), SIZES)
    peers = next(iter(questions))
    pools = [Pool(layout, seed=rank) for rank in range(layout.ranks)]
    readers = [
        connect(Agent, f"decode {rank}", pool, [peers[source] for source in sources])
        for rank, pool in enumerate(pools)
        for sources in [list_sources(rank, layout, remote)]
    ]
    questions.answer("connected")
    for handed in questions:
        reads = []
        for rank, (pool, agents) in enumerate(zip(pools, readers, strict=True)):
            blocks = pool.take([group.count_read_blocks(handed.tokens) for group in layout.groups])
            pairs = partial(pair_descriptors, layout, remote, rank, blocks, handed.blocks)
            reads.append(read_pieces(agents, [[*pairs(slot)] for slot in range(len(agents))]))
            join_blocks(pool, remote, blocks)
            pool.read(take_heads(device, layout, rank), handed.tokens, blocks)
        questions.answer(Result(device.generate(handed.token, handed.tokens, COUNT), reads))


def read_pieces(
    agents: Sequence[Agent], pairs: Sequence[Sequence[tuple[Descriptor, Descriptor]]]
) -> Reads:
    """Let each agent read its pieces, and return what all have read."""
    moved = [
        agent.read([far for far, _ in each], [near for _, near in each], "")
        for agent, each in zip(agents, pairs, strict=True)
    ]
    return Reads(len(moved), sum(each.posted for each in moved), sum(each.size for each in moved))


def connect(agent: type[Agent], name: str, pool: Pool, peers: list[Peer]) -> list[Agent]:
    """Return an agent for each rank of prefill that a rank of decode reads."""
    agents = [agent(f"{name} from {slot}", pool.memory) for slot in range(len(peers))]
    for each, peer in zip(agents, peers, strict=True):
        each.connect(peer)
    return agents


def take_heads(device: Device, layout: KvLayout, rank: int) -> dict[str, np.ndarray]:
    """Return the heads of each buffer that a rank has, without a copy."""
    heads = {buffer.name: buffer.shape[0] for buffer in layout.list_buffers()}
    return {
        name: device.buffers[name][:, rank * count : (rank + 1) * count]
        for name, count in heads.items()
    }


def list_sources(rank: int, local: KvLayout, remote: KvLayout) -> list[int]:
    """Return the ranks of prefill that have the heads of a rank of decode."""
    if local.ranks >= remote.ranks:
        return [rank * remote.ranks // local.ranks]
    share = remote.ranks // local.ranks
    return [*range(rank * share, (rank + 1) * share)]


def pair_descriptors(
    local: KvLayout, remote: KvLayout, rank: int, blocks: Blocks, read: Blocks, slot: int
) -> Iterator[tuple[Descriptor, Descriptor]]:
    """Yield pieces of a source's pool with the pieces of a rank's pool that they go to.

    A block of decode has room for several of prefill's: they are put side by side, each with its
    heads, until `join_blocks`. With more ranks in prefill, each source fills a part of the heads.

    Args:
        local: The layout of decode's pools.
        remote: The layout of prefill's pools.
        rank: The rank of decode.
        blocks: The blocks of decode.
        read: The blocks of prefill.
        slot: The position of the source among the ranks that the rank reads from.
    """
    near_heads, far_heads = (layout.list_buffers()[0].shape[0] for layout in (local, remote))
    sources = len(list_sources(rank, local, remote))
    for near, far in zip(local.regions, remote.regions, strict=True):
        for group in sorted(near.groups):
            ratio = find_ratio(local, remote, group)
            unit = near.size // ratio
            size = unit // sources
            head_offset = rank * near_heads % far_heads * (unit // near_heads)
            for index, block in enumerate(read[group]):
                page = near.start + blocks[group][index // ratio] * near.stride
                start = page + index % ratio * unit + slot * size
                yield (far.start + block * far.stride + head_offset, size), (start, size)


def find_ratio(local: KvLayout, remote: KvLayout, group: int) -> int:
    """Return how many blocks of prefill make one of decode."""
    sizes = (local.groups[group].block_size, remote.groups[group].block_size)
    return (sizes[0] or 1) // (sizes[1] or 1)


def join_blocks(pool: Pool, remote: KvLayout, blocks: Blocks) -> None:
    """Bring each head's tokens together in blocks that were made of several of prefill's.

    vLLM does so after it has received them (``kv_postprocess_blksize_on_receive``).
    """
    for index, group in enumerate(pool.layout.groups):
        ratio = find_ratio(pool.layout, remote, index)
        for layer in group.layers:
            for block in blocks[index]:
                start = layer.start + block * layer.stride
                page = pool.memory[start : start + layer.page_size]
                pieces = page.reshape(ratio, layer.buffers[0].shape[0], -1)
                page[...] = pieces.transpose(1, 0, 2).reshape(-1).copy()


def serve(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Hand a prompt over, print what was read, and return whether all is as predicted.

    Args:
        first: The ranks of prefill, and its tokens in a block.
        second: Those of decode.
    """
    with tempfile.TemporaryDirectory() as directory:
        sizes = str(write_specializations(SIZES, Path(directory)))
        layouts = [read_layout(describe(*side, sizes), "LBHNC", 64) for side in (first, second)]
        predicted = predict(first, second)
    with (
        Worker("prefill", prefill, layouts[0]) as writer,
        Worker("decode", decode, layouts[1], layouts[0]) as reader,
    ):
        undivided = Device(str(MODEL), SIZES)
        prompt = draw(undivided, LENGTH)
        reader.ask(writer.ask("who are you?"))
        result = reader.ask(writer.ask(prompt))
    expected = generate_undivided(undivided, prompt)
    print(f"prefill {_format(first)}, decode {_format(second)}: a prompt of {LENGTH} tokens")
    for rank, (read, said) in enumerate(zip(result.reads, predicted, strict=True)):
        print(f"  rank {rank} of decode posts  {_count(read)}")
        print(f"  compare predicts       {_count(said)}")
    print("\n".join(format_tokens(result.tokens, expected)), flush=True)
    return result.reads == predicted and result.tokens == expected


def describe(ranks: int, block_size: int, sizes: str) -> dict[str, Any]:
    """Return the manifest of a side."""
    words = ["manifest", str(MODEL), "--vllm", "0.33", "--specializations", sizes]
    return _load([*words, "--serve", f"-tp {ranks} --block-size {block_size}"])


def predict(first: tuple[int, int], second: tuple[int, int]) -> list[Reads]:
    """Return what each rank of decode reads, as ``onnxkvrename compare`` predicts it."""
    size = f"ctx_len={SIZES['ctx_len']}"
    words = ["compare", str(MODEL), str(MODEL), "--vllm", "0.33", "--dim", size]
    for side, (ranks, block_size) in (("prefill", first), ("decode", second)):
        words += ["--serve", f"{side}:-tp {ranks} --block-size {block_size}"]
    (reads,) = _load([*words, "--tokens", str(LENGTH), "--format", "json"])["reads"]
    return [
        Reads(len(rank["sources"]), rank["descriptors"], rank["bytes"]) for rank in reads["ranks"]
    ]


def _load(words: list[str]) -> dict[str, Any]:
    # The exit code of compare is 1: names without a token do not matter to vLLM.
    return dict(json.loads(call(words).stdout))


def _format(side: tuple[int, int]) -> str:
    ranks, block_size = side
    return f"{ranks} rank{'s'[: ranks > 1]} with blocks of {block_size}"


def _count(reads: Reads) -> str:
    transfers = f"{reads.transfers} transfer{'s'[: reads.transfers > 1]}"
    return f"{transfers}, {reads.descriptors} descriptors, {reads.size:,} bytes"


if __name__ == "__main__":
    results = [serve(*pair) for pair in PAIRS]
    sys.exit(0 if all(results) else 1)
