"""What is said between the processes."""

from __future__ import annotations

from typing import NamedTuple

from kvlayout import Blocks, KvLayout


class Setup(NamedTuple):
    """What a worker is started with; ``seed`` puts the free blocks of its pool in any order."""

    model: str
    sizes: dict[str, int]
    layout: KvLayout
    seed: int | None = None


class Peer(NamedTuple):
    """What a reader must know of an owner: NIXL's own metadata, and where the memory is."""

    metadata: bytes
    address: int


class HandOff(NamedTuple):
    """From prefill to decode: all that travels beside the blocks themselves.

    Attributes:
        request: Comes back when the blocks have been read.
        tokens: How many tokens the blocks hold.
        token: The next one to run.
        is_generated: Whether that one is generated, or the prompt's last.
        blocks: The blocks that prefill offers.
    """

    request: str
    tokens: int
    token: int
    is_generated: bool
    blocks: Blocks


class Moved(NamedTuple):
    """A transfer: descriptors that were posted, descriptors that NIXL moved, and bytes."""

    posted: int
    merged: int
    size: int


class Taken(NamedTuple):
    """What decode makes of a hand-off.

    Attributes:
        tokens: The tokens that it generates.
        read: Prefill's blocks that were read.
        blocks: Its own blocks.
        moved: What NIXL says of it.
        runs: The descriptors that merging should leave.
    """

    tokens: list[int]
    read: Blocks
    blocks: Blocks
    moved: Moved
    runs: int
