"""Compute the memory that a consumer hands over: one slot for each selected input.

Source: qualcomm/vllm-qaic, files ``model_loader/qaic_session_np.py`` (selection and order) and
``kv_connector/v1/qaic_connector.py`` (class ``ShmBuffer``). Each side computes the slots from its
own *inputs*. Prefill writes its *outputs*, sorted by their input names, to these slots one by
one. With separate memory, as in QEfficient's session, each slot is a separate array, and its
offset is its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.selection import BufferId, SelectedValue
from onnxkvrename.layout.layout import Layout, Shape, list_symbols
from onnxkvrename.model.proto_reader import get_dtype_bits
from onnxkvrename.text import format_count


class MemorySlot(NamedTuple):
    """The place of one input in the memory that is handed over, with the part that is moved.

    Its shape has numbers only. The offset is the first byte, counted from the beginning of the
    memory; with separate memory the position among the arrays.
    """

    name: str
    buffer_id: BufferId
    shape: Shape
    dtype: str
    nbytes: int
    offset: int


def build_slots(
    values: Sequence[SelectedValue], layout: Layout, consumer: Consumer, tokens: int | None
) -> tuple[MemorySlot, ...]:
    """Return the slots of selected inputs, in shared memory one directly after the other.

    The inputs are in the consumer's order. If the consumer has no size for a dtype, ONNX's is used.
    Without `tokens`, the prompt's length, a slot takes all of its buffer.

    Raises:
        ValueError: A shape is missing, or the size of an axis is not known.
    """
    shapes = [consumer.transferred_shape(_resolve_shape(each, layout), tokens) for each in values]
    sizes = [
        prod(dim or 0 for dim in shape if not isinstance(dim, str))
        * _resolve_itemsize(each.value.dtype, consumer)
        for each, shape in zip(values, shapes, strict=True)
    ]
    offsets = tuple(range(len(sizes))) if consumer.memory == "separate" else (0, *accumulate(sizes))
    return tuple(
        MemorySlot(each.value.name, each.buffer_id, shape, each.value.dtype, size, offset)
        for each, shape, size, offset in zip(values, shapes, sizes, offsets, strict=False)
    )


def compute_memory_size(slots: Sequence[MemorySlot]) -> int:
    """Return the bytes of all slots together."""
    return sum(slot.nbytes for slot in slots)


def find_clipped_axes(consumer: Consumer, rank: int, full_transfer: bool) -> frozenset[int]:
    """Return the axes that are moved only up to the prompt's length; none for a full transfer.

    The rank of the buffer includes the batch.
    """
    if full_transfer or not rank:
        return frozenset()
    probe: Shape = (2,) * rank
    pairs = zip(
        consumer.transferred_shape(probe, 1), consumer.transferred_shape(probe, None), strict=True
    )
    return frozenset(axis for axis, (short, full) in enumerate(pairs) if short != full)


def format_token_count(tokens: int) -> str:
    """Return the length of a prompt as text: ``1 token``, ``4,096 tokens``."""
    return format_count(tokens, "token")


def _resolve_shape(selected: SelectedValue, layout: Layout) -> Shape:
    """Return the shape of one sequence in numbers, with a batch of 1."""
    value = selected.value
    if not value.shape:
        raise ValueError(f"the shape of {value.name} is not known")
    dims = layout.resolve_shape(value.shape[1:])
    unknown = list_symbols([dims]) or (("?",) if None in dims else ())
    if unknown:
        raise ValueError(f"the size of {unknown[0]} is not known")
    return (1, *dims)


def _resolve_itemsize(dtype: str, consumer: Consumer) -> int:
    itemsize = consumer.itemsize_of(dtype)
    return itemsize if itemsize is not None else max(1, get_dtype_bits(dtype) // 8)
