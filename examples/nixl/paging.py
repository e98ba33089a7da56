"""A pool of blocks, and the copies between the buffers of a graph and the pages of blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from kvlayout import Blocks, Buffer, KvLayout, Layer


class Pool:
    """The memory of one worker, with a list of the free blocks. As in vLLM, block 0 is unused.

    Args:
        layout: The groups and pages, and the number of blocks.
        seed: Shuffle the free blocks, as in a pool that has served other requests; ``None`` for
            ascending order.
    """

    def __init__(self, layout: KvLayout, seed: int | None = None) -> None:
        self.layout = layout
        self.memory = np.zeros(layout.size, np.uint8)
        self.free = list(range(1, layout.blocks))
        if seed is not None:
            random.Random(seed).shuffle(self.free)

    def take(self, counts: Sequence[int]) -> Blocks:
        """Remove blocks from the free ones, and return them.

        Args:
            counts: The number of blocks for each group.

        Raises:
            ValueError: There are too few free blocks; then all stay free.
        """
        if sum(counts) > len(self.free):
            raise ValueError(f"{sum(counts)} blocks are needed, and {len(self.free)} are free")
        return tuple(tuple(self.free.pop(0) for _ in range(count)) for count in counts)

    def give_back(self, blocks: Blocks) -> None:
        """Free the blocks of a prompt."""
        self.free += [block for group in blocks for block in group]

    def write(self, buffers: Mapping[str, np.ndarray], tokens: int, blocks: Blocks) -> None:
        """Copy the buffers of the graph into pages, for the first `tokens` tokens."""
        for page, buffer in self._pair(buffers, tokens, blocks):
            page[...] = buffer

    def read(self, buffers: Mapping[str, np.ndarray], tokens: int, blocks: Blocks) -> None:
        """Copy pages into the buffers of the graph."""
        for page, buffer in self._pair(buffers, tokens, blocks):
            buffer[...] = page

    def _pair(
        self, buffers: Mapping[str, np.ndarray], tokens: int, blocks: Blocks
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield each piece of a page with the piece of a buffer that belongs there, as bytes."""
        for group, own in zip(self.layout.groups, blocks, strict=True):
            for layer in group.layers:
                pages = [self._page(layer, block) for block in own]
                if group.block_size is None:
                    yield from _pair_states(layer, pages[0], buffers)
                elif pages:
                    heads = layer.buffers[0].shape[0]
                    shaped = [self._shape(page, heads, group.block_size) for page in pages]
                    yield from _pair_tokens(layer, shaped, buffers, tokens)

    def _page(self, layer: Layer, block: int) -> np.ndarray:
        start = layer.start + block * layer.stride
        return self.memory[start : start + layer.page_size]

    def _shape(self, page: np.ndarray, heads: int, tokens: int) -> np.ndarray:
        """Return a page with the axes head, token and content, without a copy."""
        if self.layout.name.endswith("HNC"):
            return page.reshape(heads, tokens, -1)
        return page.reshape(tokens, heads, -1).transpose(1, 0, 2)


def _pair_states(
    layer: Layer, page: np.ndarray, buffers: Mapping[str, np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the states of a layer, which follow one another in the page."""
    start = 0
    for buffer in layer.buffers:
        yield page[start : start + buffer.size], _as_bytes(buffers[buffer.name]).reshape(-1)
        start += buffer.size


def _pair_tokens(
    layer: Layer, pages: list[np.ndarray], buffers: Mapping[str, np.ndarray], tokens: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield key and value of each token and head, which are side by side in a page.

    The graph keeps position p in slot ``p % slots``, so a window is a ring. In pages, tokens are
    in the order of their positions.
    """
    block_size = pages[0].shape[1]
    start = (-(-tokens // block_size) - len(pages)) * block_size
    content = 0
    for buffer in layer.buffers:
        heads, slots, _ = buffer.shape
        width = buffer.size // (heads * slots)
        kept = _as_bytes(buffers[buffer.name])
        for position in range(max(start, tokens - slots), tokens):
            index, token = divmod(position - start, block_size)
            part = pages[index][:, token, content : content + width]
            yield part, _slot(kept, buffer, position)
        content += width


def _slot(kept: np.ndarray, buffer: Buffer, position: int) -> np.ndarray:
    slot = position % buffer.shape[1]
    if slot >= kept.shape[1]:
        raise ValueError(f"{buffer.name} has no slot {slot}: it keeps {kept.shape[1]} tokens")
    return kept[:, slot]


def _as_bytes(buffer: np.ndarray) -> np.ndarray:
    """Return the only sequence of a buffer, with the last axis as bytes, without a copy."""
    return buffer[0].view(np.uint8)
