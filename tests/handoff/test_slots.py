from __future__ import annotations

import pytest
from handoff_sides import CONSUMER, build_side_layout, describe_attention

from onnxkvrename.handoff import slots
from onnxkvrename.handoff.selection import select_values
from onnxkvrename.handoff.slots import MemorySlot, find_clipped_axes, format_token_count
from onnxkvrename.layout.layout import Layout
from onnxkvrename.model.signature import Value


def build_slots(side: Layout, tokens: int | None) -> tuple[MemorySlot, ...]:
    """The slots of all inputs that the consumer selects."""
    return slots.build_slots(select_values(side, CONSUMER).inputs, side, CONSUMER, tokens)


def test_slots_stand_in_the_consumers_order_one_behind_the_other() -> None:
    side = build_side_layout(*describe_attention(10, 2), ctx_len=8)
    found = build_slots(side, 3)
    assert [(slot.name.removesuffix("_vllmKvCache"), slot.offset) for slot in found] == [
        ("past_key.2", 0),
        ("past_value.2", 48),
        ("past_key.10", 96),
        ("past_value.10", 144),
    ]
    assert {(slot.shape, slot.dtype, slot.nbytes) for slot in found} == {
        ((1, 2, 3, 4), "FLOAT16", 48)
    }


def test_a_full_buffer_is_moved_no_further_than_it_goes() -> None:
    side = build_side_layout(*describe_attention(0, shape="2,sliding_window,4"), sliding_window=4)
    assert [build_slots(side, n)[0].shape[2] for n in (1, 4, 5)] == [1, 4, 4]


def test_whole_buffers_do_not_mind_the_prompt() -> None:
    side = build_side_layout(*describe_attention(0), ctx_len=8)
    assert build_slots(side, None)[0].shape == (1, 2, 8, 4)


def test_a_state_of_rank_three_is_moved_as_it_is() -> None:
    side = build_side_layout("conv_state.0:8,3", "recurrent_state.0:2,4,4")
    assert [slot.shape for slot in build_slots(side, 1)] == [(1, 8, 3), (1, 2, 1, 4)]


def test_a_dtype_of_the_device_counts_with_its_bytes() -> None:
    side = build_side_layout(*describe_attention(0, dtype="MXINT8"), ctx_len=8)
    assert build_slots(side, 1)[1].offset == 8


def test_a_size_that_is_not_known_is_said() -> None:
    with pytest.raises(ValueError, match="ctx_len"):
        build_slots(build_side_layout(*describe_attention(0)), 3)


def test_a_shape_that_is_not_known_is_said() -> None:
    side = build_side_layout(*describe_attention(0))
    shapeless = side._replace(inputs=tuple(one._replace(shape=None) for one in side.inputs))
    with pytest.raises(ValueError, match=r"past_key\.0_\w+"):
        build_slots(shapeless, 1)


def test_a_length_is_told_as_it_is_said() -> None:
    assert [format_token_count(tokens) for tokens in (1, 2)] == ["1 token", "2 tokens"]


def test_a_vision_buffer_with_the_token_has_a_slot_of_its_own() -> None:
    side = build_side_layout(*describe_attention(0), ctx_len=8)
    vision = Value("vision_embeds_vllmKvCache", "FLOAT", ("batch_size", 4, 8))
    found = build_slots(side._replace(inputs=(*side.inputs, vision)), 1)
    assert [slot.buffer_id for slot in found] == [(0, "key"), (0, "value"), (-1, vision.name)]


def test_only_the_context_is_cut_and_never_a_batch() -> None:
    assert find_clipped_axes(CONSUMER, 4, full_transfer=False) == {2}
    assert find_clipped_axes(CONSUMER, 3, full_transfer=False) == set()
    assert find_clipped_axes(CONSUMER, 4, full_transfer=True) == set()
