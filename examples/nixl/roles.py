"""What the two workers do: prefill fills blocks, decode reads them by NIXL and goes on."""

from __future__ import annotations

import itertools
import time

from agent import Agent
from device import Device
from kvlayout import Blocks, count_runs
from paging import Pool
from prompts import COUNT, Drawn
from records import HandOff, Peer, Setup, Taken

_PATIENCE = 30
"""Seconds to wait for blocks."""


class Prefill:
    """The owner of the blocks."""

    def __init__(self, setup: Setup) -> None:
        self.device = _load(setup)
        self.pool = Pool(setup.layout, setup.seed)
        self.agent = Agent("prefill", self.pool.memory)
        self._held: dict[str, Blocks] = {}
        self._numbers = itertools.count(1)

    def run(self, prompt: Drawn) -> HandOff:
        """Run a prompt in one piece, and put what the graph keeps into blocks."""
        tokens = len(prompt.tokens)
        self._wait_for_blocks(tokens)
        self.device.reset()
        self.device.buffers.update(prompt.features)
        first = self.device.run(prompt.tokens, 0)
        blocks = self.pool.take(tokens)
        self.pool.write(self.device.buffers, tokens, blocks)
        request = f"request {next(self._numbers)}"
        self._held[request] = blocks
        return HandOff(request, tokens, first, blocks)

    def _wait_for_blocks(self, tokens: int) -> None:
        """Free the blocks that have been read, at least until there are enough."""
        end = time.monotonic() + _PATIENCE
        while True:
            for request in self.agent.hear():
                self.pool.give_back(self._held.pop(request))
            if self.pool.can_take(tokens) or not self._held or time.monotonic() > end:
                return


class Decode:
    """The reader of the blocks."""

    def __init__(self, setup: Setup, peer: Peer) -> None:
        self.device = _load(setup)
        self.pool = Pool(setup.layout, setup.seed)
        self.agent = Agent("decode", self.pool.memory)
        self.agent.connect(peer)

    def run(self, handed: HandOff) -> Taken:
        """Read the blocks, fill the graph's buffers from them, and generate."""
        tokens = handed.prompt_length
        blocks = self.pool.take(tokens)
        remote, local = (
            self.pool.layout.list_descriptors(each) for each in (handed.blocks, blocks)
        )
        moved = self.agent.read(remote, local, handed.request)
        self.device.reset()
        self.pool.read(self.device.buffers, tokens, blocks)
        self.pool.give_back(blocks)
        generated = self.device.generate(handed.first_token, tokens, COUNT)
        return Taken(generated, blocks, moved, count_runs(remote, local))


def _load(setup: Setup) -> Device:
    device = Device(setup.model, setup.sizes)
    wanted = [buffer.name for buffer in setup.layout.list_buffers()]
    if missing := ", ".join(name for name in wanted if name not in device.buffers):
        raise ValueError(f"the model has no buffer {missing}")
    return device
