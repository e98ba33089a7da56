"""A process with both NIXL agents, which returns what is in their memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from disaggregated_example import prompts, workers
from nixl_example import kvlayout, records, roles


class Seen(NamedTuple):
    """The memory on both sides, and the tokens."""

    remote: np.ndarray
    before: np.ndarray
    after: np.ndarray
    remote_blocks: kvlayout.Blocks
    local_blocks: kvlayout.Blocks
    tokens: list[int]


def watch(questions: workers.Questions, setup: records.Setup) -> None:
    """Hand prompts of these lengths over between two pools that are full of noise."""
    from agent import Agent

    owner = roles.Prefill(setup, Agent)
    reader = roles.Decode(setup._replace(seed=5), Agent, owner.agent.peer)
    drawn = np.random.default_rng(4)
    for pool in (owner.pool, reader.pool):
        pool.memory[:] = drawn.integers(0, 256, pool.memory.size)
    for length in questions:
        if length is None:
            questions.answer(list_listening_addresses())
            continue
        handed = owner.run(prompts.draw(owner.device, length))
        before = reader.pool.memory.copy()
        taken = reader.run(handed)
        after = reader.pool.memory
        memory = (owner.pool.memory, before, after)
        questions.answer(Seen(*memory, taken.read, taken.blocks, taken.tokens))


def list_listening_addresses() -> list[str]:
    """Return the addresses on which this process listens, as Linux writes them."""
    sockets = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            sockets |= set(re.findall(r"^socket:\[(\d+)\]", os.readlink(entry)))
        except FileNotFoundError:  # that of the directory itself
            continue
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/self/net", table).read_text("ascii").splitlines()[1:]
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets]
