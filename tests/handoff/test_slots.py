from __future__ import annotations

import pytest
from handoff_sides import CONSUMER, build_side_layout, describe_attention

from onnxkvrename.handoff import slots
from onnxkvrename.handoff.selection import select_values
from onnxkvrename.handoff.slots import MemorySlot, find_clipped_axes
from onnxkvrename.layout.layout import Layout


def build_slots(side: Layout, tokens: int | None) -> tuple[MemorySlot, ...]:
    """The slots of all inputs that the consumer selects."""
    return slots.build_slots(select_values(side, CONSUMER).inputs, side, CONSUMER, tokens)


def test_a_size_that_is_not_known_is_said() -> None:
    with pytest.raises(ValueError, match="ctx_len"):
        build_slots(build_side_layout(*describe_attention(0)), 3)


def test_a_shape_that_is_not_known_is_said() -> None:
    side = build_side_layout(*describe_attention(0))
    shapeless = side._replace(inputs=tuple(one._replace(shape=None) for one in side.inputs))
    with pytest.raises(ValueError, match=r"past_key\.0_\w+"):
        build_slots(shapeless, 1)


def test_only_the_context_is_cut_and_never_a_batch() -> None:
    assert find_clipped_axes(CONSUMER, 4, full_transfer=False) == {2}
    assert find_clipped_axes(CONSUMER, 3, full_transfer=False) == set()
    assert find_clipped_axes(CONSUMER, 4, full_transfer=True) == set()
