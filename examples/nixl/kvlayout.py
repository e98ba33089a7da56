"""Read from a manifest how the KV buffers of a model are stored in blocks.

``onnxkvrename manifest MODEL --vllm 0.33 --block-size N`` lists which layers form a group, the
place of each layer's page in a block, and the buffers of the graph. This module computes from it
what vLLM 0.33's NIXL connector registers and posts
(``distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py``). It is independent of
onnxkvrename, so that the manifest's own figures can be compared with the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
"""Orders of layer, block, head, token and content in which a page is one piece of memory.

NIXL selects the first one.
"""
_ITEMSIZES = {"FLOAT": 4, "FLOAT16": 2, "BFLOAT16": 2}

Blocks = tuple[tuple[int, ...], ...]
"""For each group the numbers of the blocks that contain the end of a prompt, in order."""
Descriptor = tuple[int, int]
"""A piece of the pool: its start and its size, in bytes."""


class Buffer(NamedTuple):
    """A buffer of the graph.

    Attributes:
        name: The graph's input.
        shape: The shape of one sequence on a rank: heads, slots, content; any shape for a state.
        itemsize: Bytes of an element.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def size(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.itemsize


class Layer(NamedTuple):
    """The pages of a layer; the one of block b starts at ``start + b * stride``.

    Attributes:
        number: The layer's number.
        buffers: Its buffers, in the order of the manifest.
        start: Where the page of block 0 starts, in bytes.
        stride: Bytes from a page to the next one.
        page_size: Bytes of a page.
    """

    number: int
    buffers: tuple[Buffer, ...]
    start: int
    stride: int
    page_size: int


class Group(NamedTuple):
    """Layers that share one block table.

    Attributes:
        kind: vLLM's ``KVCacheSpecKind``.
        layers: The layers.
        block_size: Tokens in a block; ``None`` for states.
        window: Tokens in the window; ``None`` without one.
    """

    kind: str
    layers: tuple[Layer, ...]
    block_size: int | None
    window: int | None

    def count_offered_blocks(self, tokens: int) -> int:
        """Return how many of the blocks of these tokens prefill offers.

        A window takes one block more than it fills, because it may start within a block.
        """
        if self.block_size is None:
            return 1
        blocks = -(-tokens // self.block_size)
        if self.window is None:
            return blocks
        return min(blocks, -(-self.window // self.block_size) + 1)

    def count_read_blocks(self, tokens: int) -> int:
        """Return how many of them decode reads: the last ones, those that the next token sees."""
        offered = self.count_offered_blocks(tokens)
        if self.block_size is None or self.window is None:
            return offered
        unseen = max(0, tokens - self.window + 1)
        if unseen == tokens:
            return 0
        return min(offered, -(-tokens // self.block_size) - unseen // self.block_size)


class Region(NamedTuple):
    """Memory with one descriptor for each block; block b starts at ``start + b * stride``.

    Attributes:
        start: Where block 0 starts, in bytes.
        size: Bytes of a descriptor.
        stride: Bytes from a block to the next one.
        groups: The indexes of the groups whose blocks are read from it.
    """

    start: int
    size: int
    stride: int
    groups: frozenset[int]


class KvLayout(NamedTuple):
    """The groups and regions of a model in a pool.

    Attributes:
        name: vLLM's name of the memory layout.
        blocks: The number of blocks in the pool.
        size: Bytes of the pool.
        groups: The groups.
        regions: The regions that NIXL registers.
        ranks: The ranks that divide the heads; each has such a pool.
    """

    name: str
    blocks: int
    size: int
    groups: tuple[Group, ...]
    regions: tuple[Region, ...]
    ranks: int = 1

    @property
    def has_states(self) -> bool:
        """True if any group has states."""
        return any(group.block_size is None for group in self.groups)

    def count_held_tokens(self, tokens: int) -> int:
        """Return how many tokens of a prompt are handed over.

        With states, it is one less: decode always runs the last token of the prompt itself, and
        a state cannot be set back by one token.
        """
        return tokens - 1 if self.has_states and tokens > 1 else tokens

    def list_buffers(self) -> list[Buffer]:
        """Return the buffers of all layers."""
        layers = [layer for group in self.groups for layer in group.layers]
        return [buffer for layer in layers for buffer in layer.buffers]

    def list_descriptors(self, blocks: Blocks) -> list[Descriptor]:
        """Return the descriptors of these blocks, in the same order on both sides."""
        return [
            descriptor
            for region in self.regions
            for index in sorted(region.groups)
            for block in blocks[index]
            for descriptor in self._list_pieces(region, self.groups[index], block)
        ]

    def _list_pieces(self, region: Region, group: Group, block: int) -> Iterator[Descriptor]:
        start = region.start + block * region.stride
        if group.block_size is not None:
            yield start, region.size
            return
        convolution, recurrent = group.layers[0].buffers
        for size in _split(convolution, 3 if len(recurrent.shape) == 3 else 1):
            yield start, size
            start += size
        yield start, recurrent.size


def count_runs(remote: Sequence[Descriptor], local: Sequence[Descriptor]) -> int:
    """Return how many descriptors remain after NIXL merges neighbors of the same size."""
    runs = 0
    awaited = (-1, -1, -1)
    for (far, size), (near, _) in zip(remote, local, strict=True):
        runs += (far, near, size) != awaited
        awaited = (far + size, near + size, size)
    return runs


class Figure(NamedTuple):
    """What decode reads for a prompt according to the manifest; ``None`` for unknown values."""

    regions: int | None
    blocks: tuple[int, ...] | None = None
    descriptors: int | None = None
    size: int | None = None


def read_layout(manifest: Mapping[str, Any], name: str, blocks: int) -> KvLayout:
    """Return the layout of a pool.

    Args:
        manifest: A manifest with a projection onto vLLM 0.33.
        name: The memory layout, one of `LAYOUTS`.
        blocks: The number of blocks in the pool.

    Raises:
        ValueError: vLLM cannot use the model in this layout, or this example does not support it.
    """
    arrangement = _find_arrangement(manifest, name)
    found = manifest["vllm"]["groupings"][arrangement["grouping"]]["groups"]
    buffers = _read_buffers(manifest)
    layers: list[list[Layer]] = [[] for _ in found]
    for placement in arrangement["placements"]:
        scale = blocks if placement["per_block"] else 1
        for place, member in enumerate(placement["members"]):
            start = (placement["offset"] + place * placement["layer_stride"]) * scale
            own = buffers[member["layer"]]
            layers[member["group"]].append(
                Layer(
                    member["layer"], own, start, placement["block_stride"], placement["page_size"]
                )
            )
    groups = tuple(_read_group(group, own) for group, own in zip(found, layers, strict=True))
    block_size = arrangement["bytes_per_block"]
    regions = _find_regions(name, groups, block_size)
    ranks = manifest["vllm"]["tp"]
    return KvLayout(name, blocks, blocks * block_size, groups, regions, ranks)


def read_figure(manifest: Mapping[str, Any], name: str, tokens: int) -> Figure:
    """Return the manifest's figures for a prompt of this many tokens."""
    transfers = _find_arrangement(manifest, name)["transfers"]
    (found,) = [each for each in transfers if each["tokens"] == tokens]
    if found["descriptors"] is None:
        return Figure(found["regions"])
    blocks = tuple(found["read_blocks"])
    return Figure(found["regions"], blocks, found["descriptors"], found["bytes"])


def _find_arrangement(manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    vllm = manifest["vllm"]
    for refusal in vllm["refusals"]:
        raise ValueError(f"vLLM refuses this model: {refusal['reason']}")
    found = next((each for each in vllm["arrangements"] if each["name"] == name), None)
    if found is None:
        raise ValueError("vLLM forms no groups of its layers")
    for condition in found["conditions"]:
        if condition["state"] == "not met":
            raise ValueError(f"vLLM cannot use {name} for this model: {condition['why']}")
    return dict(found)


def _read_buffers(manifest: Mapping[str, Any]) -> dict[int, tuple[Buffer, ...]]:
    buffers: dict[int, tuple[Buffer, ...]] = {}
    ranks = manifest["vllm"]["tp"]
    for each in manifest["buffers"]:
        heads, *rest = each["sized_shape"][1:]
        if heads % ranks:
            raise ValueError(f"{each['input']} does not divide among {ranks} ranks")
        shape = (heads // ranks, *rest)
        is_state = each["sequence_axis"] is None
        if each["dtype"] not in _ITEMSIZES or not (
            is_state or (len(shape), each["sequence_axis"]) == (3, 2)
        ):
            shown = f"{each['dtype']} {each['shape']}"
            raise ValueError(f"{each['input']} is not supported by this example: {shown}")
        buffer = Buffer(each["input"], shape, _ITEMSIZES[each["dtype"]])
        buffers[each["layer"]] = (*buffers.get(each["layer"], ()), buffer)
    return buffers


def _read_group(group: Mapping[str, Any], layers: Sequence[Layer]) -> Group:
    kind = group["kind"]
    if kind != "mamba" and group["page_sizes"] != group["unpadded_page_sizes"]:
        raise ValueError("this example does not support padded pages")
    if kind == "mamba" and any(len(layer.buffers) != 2 for layer in layers):
        raise ValueError("a layer does not have exactly a convolution state and a recurrent state")
    window = group["window"] if kind.startswith("sliding_window") else None
    return Group(kind, tuple(layers), group["block_size"], window)


def _find_regions(name: str, groups: Sequence[Group], bytes_per_block: int) -> tuple[Region, ...]:
    """Return the regions that NIXL registers: one for each place that contains pages.

    If several groups have pages in a region, vLLM reads the blocks of all groups from it. With
    blocks outermost, a whole block is one descriptor for MLA, and also if the heads of a page do
    not follow one another in memory.
    """
    everything = frozenset(range(len(groups)))
    states = {index for index, group in enumerate(groups) if group.block_size is None}
    if name[0] == "B" and states:
        raise ValueError(f"states are not supported in {name}: choose a layout that starts with L")
    is_split = any(
        layer.buffers[0].shape[0] > 1 and group.block_size != 1
        for group in groups
        for layer in group.layers
    )
    has_mla = any("mla" in group.kind for group in groups)
    if name[0] == "B" and (has_mla or (name == "BLNHC" and is_split)):
        return (Region(0, bytes_per_block, bytes_per_block, everything),)
    places: dict[tuple[int, int, int], set[int]] = {}
    for index, group in enumerate(groups):
        for layer in group.layers:
            places.setdefault((layer.start, layer.page_size, layer.stride), set()).add(index)
    if len({start for start, *_ in places}) < len(places):
        raise ValueError("pages of different sizes have the same address")
    return tuple(
        Region(*place, _find_readers(owners, everything, states))
        for place, owners in places.items()
    )


def _find_readers(owners: set[int], everything: frozenset[int], states: set[int]) -> frozenset[int]:
    if len(owners) == 1 and not states:
        return frozenset(owners)
    return (everything - states) | (owners & states)


def _split(convolution: Buffer, parts: int) -> list[int]:
    """Return the sizes of a convolution state's projections, in whole rows.

    vLLM moves each by itself, because the ranks divide each: three for Mamba 2 and gated delta
    nets, whose recurrent state has three axes, and one for Mamba 1.
    """
    rows = convolution.shape[0]
    row = convolution.size // rows
    share, rest = divmod(rows, parts)
    return [(share + (part < rest)) * row for part in range(parts)]
