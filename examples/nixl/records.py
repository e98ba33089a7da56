"""Messages between the processes."""

from __future__ import annotations

from typing import NamedTuple

from kvlayout import Blocks, KvLayout


class Setup(NamedTuple):
    """The arguments of a worker.

    Attributes:
        model: The path of the model.
        sizes: Sizes of the symbolic dimensions.
        layout: The layout of its pool.
        seed: Shuffle the free blocks of its pool; ``None`` for ascending order.
    """

    model: str
    sizes: dict[str, int]
    layout: KvLayout
    seed: int | None = None


class Peer(NamedTuple):
    """The data that a reader needs: NIXL's own metadata, and the address of the memory."""

    metadata: bytes
    address: int


class HandOff(NamedTuple):
    """The message from prefill to decode, which is all that travels besides the blocks themselves.

    Attributes:
        request: An identifier, which decode sends back after it has read the blocks.
        tokens: The number of tokens in the blocks.
        token: The next token to run.
        is_generated: Whether that token is generated; otherwise it is the prompt's last one.
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
    """The result of a hand-off on decode.

    Attributes:
        tokens: The generated tokens.
        read: Prefill's blocks that were read.
        blocks: Decode's blocks that they were read into.
        moved: The transfer as NIXL reports it.
        runs: The number of descriptors that should remain after merging.
    """

    tokens: list[int]
    read: Blocks
    blocks: Blocks
    moved: Moved
    runs: int
