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
    """From prefill to decode: all that travels beside the blocks themselves."""

    request: str
    prompt_length: int
    first_token: int
    blocks: Blocks


class Moved(NamedTuple):
    """A transfer: descriptors that were posted, descriptors that NIXL moved, and bytes."""

    posted: int
    merged: int
    size: int


class Taken(NamedTuple):
    """What decode makes of a hand-off; ``runs`` is what merging should leave."""

    tokens: list[int]
    blocks: Blocks
    moved: Moved
    runs: int
