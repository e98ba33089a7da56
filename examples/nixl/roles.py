"""The two workers: prefill fills blocks, decode reads them with NIXL and generates."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from device import Device
from kvlayout import Blocks, count_runs
from paging import Pool
from prompts import COUNT, Drawn
from records import HandOff, Peer, Setup, Taken
from workers import Questions

if TYPE_CHECKING:
    from agent import Agent

_PATIENCE = 30
"""Seconds to wait for blocks."""


def prefill(questions: Questions, setup: Setup) -> None:
    """Answer each prompt with a hand-off, and any other question with the data for NIXL."""
    from agent import Agent  # NIXL is loaded by the workers only

    role = Prefill(setup, Agent)
    for question in questions:
        questions.answer(role.run(question) if isinstance(question, Drawn) else role.agent.peer)


def decode(questions: Questions, setup: Setup) -> None:
    """Connect to the peer, which comes first, then answer each hand-off with its result."""
    from agent import Agent

    role = Decode(setup, Agent, next(iter(questions)))
    questions.answer("connected")
    for handed in questions:
        questions.answer(role.run(handed))


class Prefill:
    """The prefill worker, whose blocks decode reads."""

    def __init__(self, setup: Setup, agent: type[Agent]) -> None:
        self.layout = setup.layout
        self.device = _load(setup)
        self.pool = Pool(setup.layout, setup.seed)
        self.agent = agent("prefill", self.pool.memory)
        self._held: dict[str, Blocks] = {}
        self._numbers = itertools.count(1)

    def run(self, prompt: Drawn) -> HandOff:
        """Run a prompt in one piece, and copy the graph's buffers into blocks.

        Raises:
            ValueError: There are too few free blocks after 30 seconds.
        """
        tokens = self.layout.count_held_tokens(len(prompt.tokens))
        blocks = self._take([group.count_offered_blocks(tokens) for group in self.layout.groups])
        self.device.reset()
        self.device.buffers.update(prompt.features)
        generated = self.device.run(prompt.tokens[:tokens], 0)
        self.pool.write(self.device.buffers, tokens, blocks)
        request = f"request {next(self._numbers)}"
        self._held[request] = blocks
        is_generated = tokens == len(prompt.tokens)
        token = generated if is_generated else prompt.tokens[-1]
        return HandOff(request, tokens, token, is_generated, blocks)

    def _take(self, counts: list[int]) -> Blocks:
        """Free the blocks that decode has read, wait for enough of them, and take some."""
        end = time.monotonic() + _PATIENCE
        while True:
            for request in self.agent.list_messages():
                self.pool.give_back(self._held.pop(request))
            if sum(counts) <= len(self.pool.free) or not self._held or time.monotonic() > end:
                return self.pool.take(counts)


class Decode:
    """The decode worker, which reads the blocks."""

    def __init__(self, setup: Setup, agent: type[Agent], peer: Peer) -> None:
        self.layout = setup.layout
        self.device = _load(setup)
        self.pool = Pool(setup.layout, setup.seed)
        self.agent = agent("decode", self.pool.memory)
        self.agent.connect(peer)

    def run(self, handed: HandOff) -> Taken:
        """Read the blocks, fill the graph's buffers from them, and generate."""
        tokens = handed.tokens
        blocks = self.pool.take([group.count_read_blocks(tokens) for group in self.layout.groups])
        read = tuple(
            far[len(far) - len(near) :] for far, near in zip(handed.blocks, blocks, strict=True)
        )
        remote, local = map(self.layout.list_descriptors, (read, blocks))
        moved = self.agent.read(remote, local, handed.request)
        self.device.reset()
        self.pool.read(self.device.buffers, tokens, blocks)
        self.pool.give_back(blocks)
        count = COUNT if handed.is_generated else COUNT + 1
        generated = self.device.generate(handed.token, tokens, count)[-COUNT:]
        return Taken(generated, read, blocks, moved, count_runs(remote, local))


def _load(setup: Setup) -> Device:
    device = Device(setup.model, setup.sizes)
    wanted = [buffer.name for buffer in setup.layout.list_buffers()]
    if missing := ", ".join(name for name in wanted if name not in device.buffers):
        raise ValueError(f"the model has no buffer {missing}")
    return device
