"""What a consumer moves of one side for a prompt: its slots, in its order, at its offsets.

After quic/vllm-qaic, ``model_loader/qaic_session_np.py`` (selection and order) and
``kv_connector/v1/qaic_connector.py`` (``ShmBuffer``): a side lays out the memory by
its own *inputs*; prefill's *outputs*, in the order of the names that they go by
among inputs, are matched with those places one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.consumer_checks import format_similar_count, is_empty_shape, select_values
from onnxkvrename.layout.dims import Shape, list_symbols
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.model.proto_reader import get_dtype_bits
from onnxkvrename.model.signature import Value, format_shape

BufferId = tuple[int, str]
"""Layer and part of a buffer; of a value that is none, -1 and its name among inputs."""


class SelectedValue(NamedTuple):
    """A graph input or output that the consumer takes, and the buffer that it belongs to.

    ``called`` is the name that it goes by among inputs.
    """

    value: Value
    buffer: Buffer | None
    input_name: str

    @property
    def buffer_id(self) -> BufferId:
        """What it holds, whatever it is called."""
        found = self.buffer
        return (-1, self.input_name) if found is None else (found.layer, found.part)


class MemorySlot(NamedTuple):
    """A buffer's place in the memory that is handed over; ``shape`` is what is moved of it."""

    name: str
    buffer_id: BufferId
    shape: Shape
    dtype: str
    nbytes: int
    offset: int


def list_selected_inputs(layout: Layout, target: Consumer) -> tuple[SelectedValue, ...]:
    """The inputs that the consumer selects, in its order: one slot each."""
    owners = {buffer.input: buffer for buffer in layout.buffers}
    chosen = select_values(layout, target).inputs
    return tuple(SelectedValue(value, owners.get(value.name), value.name) for value in chosen)


def list_selected_outputs(layout: Layout, target: Consumer) -> tuple[SelectedValue, ...]:
    """The outputs that it selects, in its order: each is written to the slot in its position."""
    owners = {buffer.output: buffer for buffer in layout.buffers}
    chosen = select_values(layout, target).outputs
    return tuple(
        SelectedValue(value, owners.get(value.name), target.input_name_of(value.name))
        for value in chosen
    )


def build_slots(layout: Layout, target: Consumer, tokens: int | None) -> tuple[MemorySlot, ...]:
    """The slots of a side for a prompt of so many tokens; ``None`` for all of each buffer.

    Raises ``ValueError`` where :func:`faults` finds something, or a size that
    matters is not known.
    """
    for found in check_transferable(layout, target):
        raise ValueError(f"{found.name} {found.message}")
    return lay_out_slots(list_selected_inputs(layout, target), layout, target, tokens)


def lay_out_slots(
    found: Sequence[SelectedValue], layout: Layout, target: Consumer, tokens: int | None
) -> tuple[MemorySlot, ...]:
    """The slots of inputs that are in the consumer's order.

    Raises ``ValueError`` where a size is not known. A dtype of which the consumer
    knows no size counts with ONNX's own.
    """
    shapes = [target.transferred_shape(_resolve_shape(one, layout), tokens) for one in found]
    sizes = [
        prod(dim or 0 for dim in shape if not isinstance(dim, str)) * _resolve_itemsize(one, target)
        for one, shape in zip(found, shapes, strict=True)
    ]
    offsets = (0, *accumulate(sizes))
    return tuple(
        MemorySlot(one.value.name, one.buffer_id, shape, one.value.dtype, size, offset)
        for one, shape, size, offset in zip(found, shapes, sizes, offsets, strict=False)
    )


def find_clipped_axes(target: Consumer, rank: int, whole: bool) -> frozenset[int]:
    """The axes of a buffer of this rank of which a prompt moves no more than its length."""
    if whole:
        return frozenset()
    every: Shape = (2,) * rank
    pairs = zip(
        target.transferred_shape(every, 1), target.transferred_shape(every, None), strict=True
    )
    return frozenset(axis for axis, (short, full) in enumerate(pairs) if short != full)


def check_transferable(layout: Layout, target: Consumer) -> Iterator[Finding]:
    """What keeps the consumer from laying out a side at all: it stops at start-up."""
    chosen = list_selected_inputs(layout, target)
    strange = [
        name for name in _list_input_names(layout, target) if not _can_read_layer(target, name)
    ]
    if strange:
        yield build_finding(
            "KV603",
            strange[0],
            f"has no layer where {target.name} reads one{format_similar_count(strange)}: "
            "it stops at start-up",
            "the layer stands behind the first dot, as in past_key.3_TOKEN",
        )
    sizeless = [o.value.name for o in chosen if target.itemsize_of(o.value.dtype) is None]
    if sizeless:
        dtypes = format_list(
            sorted({one.value.dtype for one in chosen if one.value.name in sizeless})
        )
        yield build_finding(
            "KV610",
            sizeless[0],
            f"is {dtypes}, which {target.name} cannot move{format_similar_count(sizeless)}: "
            "it stops at start-up",
            "compile with a precision that it knows, and give its --custom-io",
        )
    shapes = {one.value.name: one.value.shape for one in chosen}
    shapeless = [
        name
        for name, shape in shapes.items()
        if not shape or None in shape[1:] or is_empty_shape(shape)
    ]
    if shapeless:
        shape = shapes[shapeless[0]]
        said = "no rank" if shape is None else format_shape(shape)
        yield build_finding(
            "KV610",
            shapeless[0],
            f"has {said}{format_similar_count(shapeless)}: what is moved of it cannot be told, or is "
            "nothing",
            "export it with the names or sizes of its dimensions",
        )


def _list_input_names(layout: Layout, target: Consumer) -> Iterator[str]:
    yield from (one.input_name for one in list_selected_inputs(layout, target))
    yield from (one.input_name for one in list_selected_outputs(layout, target))


def _can_read_layer(target: Consumer, name: str) -> bool:
    try:
        target.sort_key(name)
    except ValueError:
        return False
    return True


def _resolve_shape(one: SelectedValue, layout: Layout) -> Shape:
    """The shape with all sizes; the batch, of which one sequence is moved, need not have one."""
    if not one.value.shape:
        raise ValueError(f"the shape of {one.value.name} is not known")
    rest = layout.resolve_shape(one.value.shape[1:])
    unknown = list_symbols([rest]) or (("?",) if None in rest else ())
    if unknown:
        raise ValueError(f"the size of {unknown[0]} is not known")
    return (1, *rest)


def _resolve_itemsize(one: SelectedValue, target: Consumer) -> int:
    dtype = one.value.dtype
    known = target.itemsize_of(dtype)
    return known if known is not None else max(1, get_dtype_bits(dtype) // 8)


def format_token_count(tokens: int) -> str:
    """The length of a prompt: ``1 token``, ``8 tokens``."""
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def find_unselected_buffers(
    found: Iterable[SelectedValue], buffers: Iterable[Buffer]
) -> tuple[Buffer, ...]:
    """The buffers that are not among what is selected."""
    there = {one.buffer_id for one in found}
    return tuple(buffer for buffer in buffers if (buffer.layer, buffer.part) not in there)
