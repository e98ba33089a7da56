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

from onnxkvrename.findings import Finding, finding, listed
from onnxkvrename.handoff import consumer_checks as consuming
from onnxkvrename.handoff.consumer import Target
from onnxkvrename.layout import dims as sizing
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.model.proto_reader import bits_of
from onnxkvrename.model.signature import Value, shape_text

Ident = tuple[int, str]
"""Layer and part of a buffer; of a value that is none, -1 and its name among inputs."""


class Selected(NamedTuple):
    """A graph input or output that the consumer takes, and the buffer that it belongs to.

    ``called`` is the name that it goes by among inputs.
    """

    value: Value
    buffer: Buffer | None
    called: str

    @property
    def ident(self) -> Ident:
        """What it holds, whatever it is called."""
        found = self.buffer
        return (-1, self.called) if found is None else (found.layer, found.part)


class Slot(NamedTuple):
    """A buffer's place in the memory that is handed over; ``shape`` is what is moved of it."""

    name: str
    ident: Ident
    shape: Shape
    dtype: str
    bytes: int
    offset: int


def inputs(layout: Layout, target: Target) -> tuple[Selected, ...]:
    """The inputs that the consumer selects, in its order: one slot each."""
    owners = {buffer.input: buffer for buffer in layout.buffers}
    chosen = consuming.selection(layout, target).inputs
    return tuple(Selected(value, owners.get(value.name), value.name) for value in chosen)


def outputs(layout: Layout, target: Target) -> tuple[Selected, ...]:
    """The outputs that it selects, in its order: each is written to the slot in its position."""
    owners = {buffer.output: buffer for buffer in layout.buffers}
    chosen = consuming.selection(layout, target).outputs
    return tuple(
        Selected(value, owners.get(value.name), target.paired(value.name)) for value in chosen
    )


def slots(layout: Layout, target: Target, tokens: int | None) -> tuple[Slot, ...]:
    """The slots of a side for a prompt of so many tokens; ``None`` for all of each buffer.

    Raises ``ValueError`` where :func:`faults` finds something, or a size that
    matters is not known.
    """
    for found in faults(layout, target):
        raise ValueError(f"{found.name} {found.message}")
    return laid(inputs(layout, target), layout, target, tokens)


def laid(
    found: Sequence[Selected], layout: Layout, target: Target, tokens: int | None
) -> tuple[Slot, ...]:
    """The slots of inputs that are in the consumer's order.

    Raises ``ValueError`` where a size is not known. A dtype of which the consumer
    knows no size counts with ONNX's own.
    """
    shapes = [target.moved(_numbers(one, layout), tokens) for one in found]
    sizes = [
        prod(dim or 0 for dim in shape if not isinstance(dim, str)) * _itemsize(one, target)
        for one, shape in zip(found, shapes, strict=True)
    ]
    offsets = (0, *accumulate(sizes))
    return tuple(
        Slot(one.value.name, one.ident, shape, one.value.dtype, size, offset)
        for one, shape, size, offset in zip(found, shapes, sizes, offsets, strict=False)
    )


def clipped(target: Target, rank: int, whole: bool) -> frozenset[int]:
    """The axes of a buffer of this rank of which a prompt moves no more than its length."""
    if whole:
        return frozenset()
    every: Shape = (2,) * rank
    pairs = zip(target.moved(every, 1), target.moved(every, None), strict=True)
    return frozenset(axis for axis, (short, full) in enumerate(pairs) if short != full)


def faults(layout: Layout, target: Target) -> Iterator[Finding]:
    """What keeps the consumer from laying out a side at all: it stops at start-up."""
    chosen = inputs(layout, target)
    strange = [name for name in _names(layout, target) if not _readable(target, name)]
    if strange:
        yield finding(
            "KV603",
            strange[0],
            f"has no layer where {target.name} reads one{consuming.counted(strange)}: "
            "it stops at start-up",
            "the layer stands behind the first dot, as in past_key.3_TOKEN",
        )
    sizeless = [o.value.name for o in chosen if target.itemsize(o.value.dtype) is None]
    if sizeless:
        dtypes = listed(sorted({one.value.dtype for one in chosen if one.value.name in sizeless}))
        yield finding(
            "KV610",
            sizeless[0],
            f"is {dtypes}, which {target.name} cannot move{consuming.counted(sizeless)}: "
            "it stops at start-up",
            "compile with a precision that it knows, and give its --custom-io",
        )
    shapes = {one.value.name: one.value.shape for one in chosen}
    shapeless = [
        name
        for name, shape in shapes.items()
        if not shape or None in shape[1:] or consuming.empty(shape)
    ]
    if shapeless:
        shape = shapes[shapeless[0]]
        said = "no rank" if shape is None else shape_text(shape)
        yield finding(
            "KV610",
            shapeless[0],
            f"has {said}{consuming.counted(shapeless)}: what is moved of it cannot be told, or is "
            "nothing",
            "export it with the names or sizes of its dimensions",
        )


def _names(layout: Layout, target: Target) -> Iterator[str]:
    yield from (one.called for one in inputs(layout, target))
    yield from (one.called for one in outputs(layout, target))


def _readable(target: Target, name: str) -> bool:
    try:
        target.key(name)
    except ValueError:
        return False
    return True


def _numbers(one: Selected, layout: Layout) -> Shape:
    """The shape with all sizes; the batch, of which one sequence is moved, need not have one."""
    if not one.value.shape:
        raise ValueError(f"the shape of {one.value.name} is not known")
    rest = layout.sized(one.value.shape[1:])
    unknown = sizing.symbols([rest]) or (("?",) if None in rest else ())
    if unknown:
        raise ValueError(f"the size of {unknown[0]} is not known")
    return (1, *rest)


def _itemsize(one: Selected, target: Target) -> int:
    dtype = one.value.dtype
    known = target.itemsize(dtype)
    return known if known is not None else max(1, bits_of(dtype) // 8)


def length_text(tokens: int) -> str:
    """The length of a prompt: ``1 token``, ``8 tokens``."""
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def lost(found: Iterable[Selected], buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    """The buffers that are not among what is selected."""
    there = {one.ident for one in found}
    return tuple(buffer for buffer in buffers if (buffer.layer, buffer.part) not in there)
