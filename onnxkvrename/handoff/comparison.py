"""Pair and simulate two sides: the facts from which findings and the verdict follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnxkvrename.handoff.buffer_diff import (
    BufferPair,
    Difference,
    find_differences,
    pair_buffers,
)
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.simulate import (
    SimulationResult,
    TransferSetup,
    build_transfer_setup,
    simulate_transfer,
)
from onnxkvrename.handoff.slots import find_clipped_axes
from onnxkvrename.handoff.worker import HandoffSide, fill_missing_sizes, find_longest_prompt

_LONGEST_WINDOW_PLACEHOLDER = 1 << 30
"""Stands for a window of unknown size, and is shorter than the longest prompt."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides with their buffers paired, and the simulated hand-off.

    Attributes:
        pairs: All buffers of both sides, empty if one side has none.
        differences: The differences between the two buffers of each pair.
        setup: Both sides with a size for every symbol.
        simulation: The simulated hand-off, or `None` if its result depends on sizes that
            are not known.
        window_placeholder: The tokens that stand for a window of unknown size in `setup`;
            `None` if there is no such window that matters.
    """

    pairs: tuple[BufferPair, ...]
    differences: tuple[tuple[BufferPair, Difference], ...]
    setup: TransferSetup
    simulation: SimulationResult | None
    window_placeholder: int | None


def build_comparison(
    prefill: HandoffSide, decode: HandoffSide, consumer: Consumer, full_transfer: bool
) -> Comparison:
    """Pair the buffers of two sides, compare each pair, and simulate the hand-off.

    Args:
        prefill: The side that writes the buffers.
        decode: The side that reads them.
        consumer: The consumer on both sides.
        full_transfer: Whether each buffer is moved in full, even for a short prompt.
    """
    longest = min(find_longest_prompt(prefill.layout), find_longest_prompt(decode.layout))
    pairs: tuple[BufferPair, ...] = ()
    if prefill.original_layout.buffers and decode.original_layout.buffers:
        pairs = pair_buffers(prefill.original_layout, decode.original_layout)
    differences = tuple(
        (pair, difference)
        for pair in pairs
        for difference in _compare_pair(pair, prefill, decode, consumer, full_transfer)
    )
    has_unsized_window = any(
        difference.code == "KV614" and difference.is_certain and difference.needed_symbols
        for _, difference in differences
    )
    placeholder = (
        max(1, min(longest, _LONGEST_WINDOW_PLACEHOLDER) // 2) if has_unsized_window else None
    )
    setup = build_transfer_setup(
        fill_missing_sizes(prefill.layout, placeholder),
        fill_missing_sizes(decode.layout, placeholder),
        consumer,
        full_transfer=full_transfer,
        longest_prompt=longest,
    )
    is_undecided = any(difference.is_undecided for _, difference in differences)
    simulation = None if is_undecided else try_simulation(setup)
    return Comparison(pairs, differences, setup, simulation, placeholder)


def try_simulation(setup: TransferSetup) -> SimulationResult | None:
    """Simulate a hand-off; `None` if a shape is not known, or a side selects nothing."""
    if not setup.prefill_inputs or not setup.decode_inputs:
        return None
    try:
        return simulate_transfer(setup)
    except ValueError:
        return None


def _compare_pair(
    pair: BufferPair,
    prefill: HandoffSide,
    decode: HandoffSide,
    consumer: Consumer,
    full_transfer: bool,
) -> Iterator[Difference]:
    shape = pair.present_buffer.shape
    clipped_axes = (
        find_clipped_axes(consumer, len(shape), full_transfer) if shape else frozenset[int]()
    )
    yield from find_differences(pair, prefill.original_layout, decode.original_layout, clipped_axes)
