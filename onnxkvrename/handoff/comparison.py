"""Pair the buffers of two sides, compare the two of each pair, and simulate the hand-off.

These are the facts from which findings and the verdict follow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.handoff.selection import BufferId
from onnxkvrename.handoff.side_checks import CheckedSide
from onnxkvrename.handoff.simulate import (
    SimulationResult,
    TransferSetup,
    build_transfer_setup,
    simulate_transfer,
)
from onnxkvrename.handoff.slots import find_clipped_axes
from onnxkvrename.handoff.worker import (
    fill_missing_sizes,
    find_longest_prompt,
)
from onnxkvrename.layout.layout import KvBuffer, Layout, format_size_option
from onnxkvrename.model.signature import UNDECLARED, Dim, format_dtype, format_shape

_LONGEST_WINDOW_PLACEHOLDER = 1 << 30
"""Twice the longest placeholder for a window of unknown size, in tokens."""


class BufferPair(NamedTuple):
    """A buffer as prefill has it and as decode has it; `None` for a side that lacks it."""

    prefill: KvBuffer | None
    decode: KvBuffer | None

    @property
    def present_buffer(self) -> KvBuffer:
        """Prefill's buffer, or decode's if prefill lacks it."""
        buffer = self.prefill or self.decode
        assert buffer is not None
        return buffer

    @property
    def buffer_id(self) -> BufferId:
        """The layer and the part."""
        return self.present_buffer.layer, self.present_buffer.part

    @property
    def name(self) -> str:
        """The name on prefill, or on decode if prefill lacks it."""
        return self.present_buffer.names[0]


class Difference(NamedTuple):
    """A difference between the two buffers of a pair.

    Attributes:
        prefill: The dtype, or the dtype and the shape, on prefill.
        is_certain: Whether the two differ whatever the prompt.
        needed_symbols: The symbols without a size on which the result depends.
        size_prefix: The side for which ``--dim`` sets their sizes.
        window_sizes: The windows of prefill and decode in tokens, if both have one of known size.
        has_moved_batch: Whether the batch is another axis, which a hand-off of one sequence
            cannot show.
    """

    code: str
    prefill: str
    decode: str
    is_certain: bool = True
    needed_symbols: tuple[str, ...] = ()
    size_prefix: str = ""
    window_sizes: tuple[int, int] | None = None
    has_moved_batch: bool = False

    @property
    def is_undecided(self) -> bool:
        """True if the two may be equal, depending on sizes that are not known."""
        return bool(self.needed_symbols) and not self.is_certain

    @property
    def size_arguments(self) -> tuple[str, ...]:
        """The arguments that would decide, such as ``--dim sliding_window=SIZE``."""
        prefix = "" if self.is_certain else self.size_prefix
        return tuple(format_size_option(dim, prefix) for dim in self.needed_symbols if dim != "?")


def pair_buffers(prefill: Layout, decode: Layout) -> tuple[BufferPair, ...]:
    """Return a pair for every buffer of the two sides, sorted by layer."""
    prefill_buffers, decode_buffers = (
        {(buffer.layer, buffer.part): buffer for buffer in layout.buffers}
        for layout in (prefill, decode)
    )
    buffer_ids = dict.fromkeys((*prefill_buffers, *decode_buffers))
    pairs = (BufferPair(prefill_buffers.get(i), decode_buffers.get(i)) for i in buffer_ids)
    return tuple(sorted(pairs, key=lambda pair: pair.present_buffer.layer))


def format_buffer_type(layout: Layout, buffer: KvBuffer) -> str:
    """Return the dtype and the shape of one sequence: ``FLOAT16 [8, ctx_len=4096, 64]``."""
    dtype = format_dtype(buffer.dtype)
    if buffer.sequence_shape is None:
        return dtype
    sizes = layout.resolve_shape(buffer.sequence_shape)
    dims: list[Dim] = [
        dim if dim == size else f"{dim}={size}"
        for dim, size in zip(buffer.sequence_shape, sizes, strict=True)
    ]
    return f"{dtype} {format_shape(tuple(dims))}"


def find_ambiguous_symbols(
    pairs: Sequence[BufferPair], prefill: Layout, decode: Layout
) -> frozenset[str]:
    """Return the symbols without a size that cannot be another name for one of the other side.

    Where each side has one symbol for the same axis of all buffers, the exports may only have named
    it differently. Where one side has two and the other one, at most one of the two can be it.
    """
    matches: dict[tuple[str, Dim], set[Dim]] = defaultdict(set)
    for pair in pairs:
        if pair.prefill is None or pair.decode is None:
            continue
        shapes = (
            prefill.resolve_shape(pair.prefill.sequence_shape or ()),
            decode.resolve_shape(pair.decode.sequence_shape or ()),
        )
        for dim, other in zip(*shapes, strict=False):
            matches["prefill", dim].add(other)
            matches["decode", other].add(dim)
    groups = ((dim, *others) for (_, dim), others in matches.items() if len(others) > 1)
    return frozenset(dim for group in groups for dim in group if isinstance(dim, str))


def find_differences(
    pair: BufferPair,
    prefill: Layout,
    decode: Layout,
    clipped_axes: frozenset[int],
    ambiguous: frozenset[str] = frozenset(),
) -> Iterator[Difference]:
    """Yield the differences between the two buffers of a pair; a missing side is none.

    The layouts tell the sizes of symbols. Along `clipped_axes` a buffer is moved only up to the
    prompt's length, whatever its size; `ambiguous` symbols may be windows even there.
    """
    if pair.prefill is None or pair.decode is None:
        return
    dtypes = pair.prefill.dtype, pair.decode.dtype
    if dtypes[0] != dtypes[1] and UNDECLARED not in dtypes:
        yield Difference("KV612", pair.prefill.dtype, pair.decode.dtype)
    if pair.prefill.sequence_shape is None or pair.decode.sequence_shape is None:
        return
    prefill_shape = prefill.resolve_shape(pair.prefill.sequence_shape)
    decode_shape = decode.resolve_shape(pair.decode.sequence_shape)
    types = (
        format_buffer_type(prefill, pair.prefill),
        format_buffer_type(decode, pair.decode),
    )
    if len(prefill_shape) != len(decode_shape):
        yield Difference("KV613", *types)
        return
    comparison = _ShapeComparison(
        pair.prefill, pair.decode, prefill_shape, decode_shape, clipped_axes, ambiguous
    )
    if comparison.has_moved_batch():
        before, after = (
            f"{buffer.dtype} {format_shape(buffer.shape or ())}"
            for buffer in (pair.prefill, pair.decode)
        )
        yield Difference("KV615", before, after, has_moved_batch=True)
        return
    if comparison.has_permuted_axes():
        yield Difference("KV615", *types)
        return
    axes = sorted(comparison.compare_axes(), key=lambda each: (not each.is_certain, each.code))
    for gravest in axes[:1]:
        yield gravest._replace(prefill=types[0], decode=types[1])


class _ShapeComparison(NamedTuple):
    """Two buffers of the same rank, and the resolved shape of one sequence of each."""

    prefill: KvBuffer
    decode: KvBuffer
    prefill_shape: Sequence[Dim]
    decode_shape: Sequence[Dim]
    clipped_axes: frozenset[int]
    ambiguous: frozenset[str]

    def has_permuted_axes(self) -> bool:
        """Return whether the axes have the same sizes in different orders, ignoring the context."""
        if self.prefill_shape == self.decode_shape:
            return False
        prefill_dims, decode_dims = (
            [dim for axis, dim in enumerate(shape, 1) if axis != buffer.prompt_axis]
            for buffer, shape in (
                (self.prefill, self.prefill_shape),
                (self.decode, self.decode_shape),
            )
        )
        if Counter(map(str, prefill_dims)) != Counter(map(str, decode_dims)):
            return False
        return prefill_dims != decode_dims or self.prefill.prompt_axis != self.decode.prompt_axis

    def has_moved_batch(self) -> bool:
        """Return whether the batch is a symbol, and changes places with that of another axis."""
        before, after = self.prefill.shape or (), self.decode.shape or ()
        first, second = (buffer.batch_axis for buffer in (self.prefill, self.decode))
        if first != second or Counter(map(str, before)) != Counter(map(str, after)):
            return False
        return isinstance(before[first], str) and before[first] != after[first]

    def compare_axes(self) -> Iterator[Difference]:
        """Yield a difference for each axis that has one, without the text of the types."""
        dims = zip(self.prefill_shape, self.decode_shape, strict=True)
        for axis, (prefill_dim, decode_dim) in enumerate(dims, 1):
            if prefill_dim != decode_dim:
                yield self._compare_axis(axis, prefill_dim, decode_dim)

    def _compare_axis(self, axis: int, prefill_dim: Dim, decode_dim: Dim) -> Difference:
        symbols = tuple(dim for dim in (prefill_dim, decode_dim) if isinstance(dim, str))
        both_known = isinstance(prefill_dim, int) and isinstance(decode_dim, int)
        prefix = _choose_size_prefix(prefill_dim, decode_dim)
        if not all(_can_grow(buffer, axis) for buffer in (self.prefill, self.decode)):
            code = "KV613" if both_known else "KV618"
            return Difference(code, "", "", both_known, symbols, prefix)
        windows = [b.window for b in (self.prefill, self.decode) if b.window is not None]
        if not windows and axis in self.clipped_axes:
            needed = tuple(symbol for symbol in symbols if symbol in self.ambiguous)
            return Difference("KV614", "", "", False, needed, prefix)
        if not windows:
            return Difference("KV618", "", "", both_known, symbols, prefix)
        needed = tuple(dict.fromkeys(str(window) for window in windows if window in symbols))
        is_clipped = axis in self.clipped_axes
        is_one_sided = len(windows) == 1 and (bool(needed) or not is_clipped)
        sizes = None
        if isinstance(prefill_dim, int) and isinstance(decode_dim, int) and len(windows) == 2:
            sizes = (prefill_dim, decode_dim)
        is_certain = is_one_sided or (both_known and not is_clipped)
        return Difference("KV614", "", "", is_certain, needed, prefix, sizes)


def _choose_size_prefix(prefill_dim: Dim, decode_dim: Dim) -> str:
    """Return the side that misses a size, if the other has one."""
    if isinstance(prefill_dim, int):
        return "decode:"
    return "prefill:" if isinstance(decode_dim, int) else ""


def _can_grow(buffer: KvBuffer, axis: int) -> bool:
    """Return whether a buffer may grow along an axis: one of unknown kind may along any."""
    return buffer.prompt_axis == axis or buffer.kind == "unknown"


class Comparison(NamedTuple):
    """Two sides with their buffers paired, and the simulated hand-off.

    Attributes:
        pairs: All buffers of both sides, empty if one side has none.
        setup: Both sides with a size for every symbol.
        any_simulation: With these sizes, also with those that are not known: what it says of a
            buffer itself does not depend on the sizes that another one needs. `None` if a shape is
            not known or a side selects nothing.
        window_placeholder: The tokens that `setup` has for windows of unknown size; `None` if
            the result does not depend on such a window.
    """

    pairs: tuple[BufferPair, ...]
    differences: tuple[tuple[BufferPair, Difference], ...]
    setup: TransferSetup
    any_simulation: SimulationResult | None
    window_placeholder: int | None

    @property
    def simulation(self) -> SimulationResult | None:
        """The simulated hand-off; `None` if its result depends on sizes that are not known."""
        is_undecided = any(difference.is_undecided for _, difference in self.differences)
        return None if is_undecided else self.any_simulation


def build_comparison(writer: CheckedSide, reader: CheckedSide) -> Comparison:
    """Pair the buffers of two sides, compare each pair, and simulate the hand-off."""
    views = (writer.view, reader.view)
    consumer, full_transfer = writer.view.consumer, writer.view.full_transfer
    longest = min(find_longest_prompt(view.layout) for view in views)
    prefill, decode = writer.side.original_layout, reader.side.original_layout
    pairs: tuple[BufferPair, ...] = ()
    if prefill.buffers and decode.buffers:
        pairs = pair_buffers(prefill, decode)
    ambiguous = find_ambiguous_symbols(pairs, prefill, decode)
    differences = tuple(
        (pair, difference)
        for pair in pairs
        for difference in find_differences(
            pair,
            prefill,
            decode,
            find_clipped_axes(consumer, len(pair.present_buffer.shape or ()), full_transfer),
            ambiguous,
        )
    )
    has_unsized_window = any(
        difference.code == "KV614" and difference.is_certain and difference.needed_symbols
        for _, difference in differences
    )
    placeholder = (
        max(1, min(longest, _LONGEST_WINDOW_PLACEHOLDER) // 2) if has_unsized_window else None
    )
    sized = (view._replace(layout=fill_missing_sizes(view.layout, placeholder)) for view in views)
    setup = build_transfer_setup(*sized, longest_prompt=longest)
    return Comparison(pairs, differences, setup, _try_simulation(setup), placeholder)


def _try_simulation(setup: TransferSetup) -> SimulationResult | None:
    if not setup.prefill_inputs or not setup.decode_inputs:
        return None
    try:
        return simulate_transfer(setup)
    except ValueError:
        return None
