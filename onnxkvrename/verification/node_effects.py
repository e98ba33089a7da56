"""Find what one node does to its operands by its attributes and its constant operands.

`operators` says what is true of every node of a type.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import eq

from onnxkvrename.verification.constants import SmallConstants
from onnxkvrename.verification.graph_bodies import Operation
from onnxkvrename.verification.operators import OperandFlow, SizeChange, find_operand_flows
from onnxkvrename.verification.provenance import (
    REVERSED_AXES,
    SAME_SIZE,
    Origin,
    Resizing,
    build_resizing,
)
from onnxkvrename.verification.scattered_axes import find_scattered_axes

_LARGEST_END = 2**31 - 1
"""The smallest end of a Slice that exporters write for all that is there."""
_LOSING_OPS = frozenset(
    ("Where", "Mul", "And", "Sub", "Xor", "BitwiseXor", "Div", "Add", "Pow", "Slice")
)


def find_lost_operands(operation: Operation, constants: SmallConstants) -> Collection[int]:
    """Return the positions of the operands of which nothing reaches the output.

    Those are what a constant condition does not choose, what is multiplied by a constant 0 or has
    it for its exponent, what is subtracted from itself or divided by itself, and a part without
    elements.
    """
    domain, op_type, _ = operation.function_key
    if op_type not in _LOSING_OPS or domain:
        return ()
    inputs = operation.inputs
    if op_type == "Where":
        truth = constants.find_truth(inputs[0]) if len(inputs) == 3 else None
        return {True: (2,), False: (1,), None: ()}[truth]
    everything = range(len(inputs))
    if op_type in ("Mul", "And"):
        return everything if any(constants.find_truth(name) is False for name in inputs) else ()
    if op_type == "Slice":
        return everything if _is_empty_slice(inputs, constants) else ()
    if len(inputs) != 2:
        return ()
    if op_type == "Pow":
        return everything if constants.find_truth(inputs[1]) is False else ()
    if op_type == "Add":
        return everything if constants.are_opposite(*inputs) else ()
    return everything if constants.are_equal(*inputs) else ()


def _is_empty_slice(inputs: Sequence[str], constants: SmallConstants) -> bool:
    """Return whether a Slice has constant bounds between which there is nothing."""
    starts, ends = (constants.find_integers(name) for name in (*inputs, "", "")[1:3])
    return starts is not None and ends is not None and any(map(eq, starts, ends))


def find_resizings(
    flow: OperandFlow, node: Operation, constants: SmallConstants
) -> frozenset[Resizing]:
    """Return what a node does to the size of an operand, by its operator and its attributes."""
    if flow.fixing_attribute and _read_integer(node, flow.fixing_attribute):
        return build_resizing(flow.fixed_change, None)
    if node.op_type == "Slice" and flow.size_change == SizeChange.CUTS:
        return _find_slice_resizing(node, constants)
    if node.op_type == "Transpose":
        return frozenset({Resizing(SizeChange.MOVES_AXES, axes=_read_axes_order(node))})
    if node.op_type == "Einsum":
        return frozenset({Resizing(SizeChange.MOVES_AXES, axes=read_einsum_order(node))})
    if node.op_type == "Reshape":
        sizes = constants.find_integers("".join(node.inputs[1:2]))
        reshaped = None if sizes is None else ((), sizes)
        return frozenset({Resizing(SizeChange.MOVES_AXES, axes=None, reshaped=reshaped)})
    if node.op_type == "ScatterND" and flow.is_written:
        return frozenset({Resizing(written_axes=find_scattered_axes(node, constants))})
    axis: int | None
    if isinstance(flow.axis, str):
        is_said = node.find_attribute(flow.axis) is not None
        axis = _read_integer(node, flow.axis) if is_said else flow.default_axis
    else:
        axis = flow.axis
    if flow.is_written:
        return frozenset({Resizing(written_axes=frozenset({axis}))})
    if node.op_type == "Gather" and constants.find_integers("".join(node.inputs[1:2])) is not None:
        return build_resizing(flow.size_change & ~SizeChange.DROPS_AXIS, axis)
    if flow.room_operand is not None and not "".join(node.inputs[flow.room_operand :][:1]):
        return build_resizing(SizeChange.APPENDS, axis)
    return build_resizing(flow.size_change, axis)


def _find_slice_resizing(node: Operation, constants: SmallConstants) -> frozenset[Resizing]:
    """Return what a Slice cuts: nothing along an axis that it takes from 0 to the largest end."""
    names = [*node.inputs, "", "", "", ""][1:5]
    starts, ends, axes, steps = (constants.find_integers(name) if name else None for name in names)
    if axes is None:
        return build_resizing(SizeChange.CUTS, None)
    has_no_gaps = not names[3] or steps == (1,) * len(axes)
    cut = [
        axis
        for number, axis in enumerate(axes)
        if not (
            starts is not None
            and ends is not None
            and len(starts) == len(ends) == len(axes)
            and starts[number] == 0
            and ends[number] >= _LARGEST_END
            and has_no_gaps
        )
    ]
    if not cut:
        return SAME_SIZE
    changes, sliced_axes = SizeChange.CUTS, frozenset[int]()
    if starts is not None and len(starts) == len(axes):
        cut_starts = [start for start, axis in zip(starts, axes, strict=True) if axis in cut]
        if has_no_gaps and not any(cut_starts):
            changes |= SizeChange.KEEPS_FIRST
        if ends is not None:
            sliced_axes = frozenset(cut)
    return frozenset({Resizing(changes, cut_axes=frozenset(cut), sliced_axes=sliced_axes)})


def find_flows(node: Operation, output: int) -> tuple[OperandFlow, ...] | None:
    """Return which operands a node carries into one of its outputs.

    That is as `find_operand_flows` says, except for an Einsum that only reorders axes.
    """
    domain, op_type, _ = node.function_key
    count = len(node.inputs)
    if op_type == "Einsum" and not domain and read_einsum_order(node) is not None:
        return find_operand_flows("", "Transpose", output, count)
    return find_operand_flows(domain, op_type, output, count)


def join_resizings(
    node: Operation,
    origins: Sequence[Origin],
    position: int,
    resizing: frozenset[Resizing],
    constants: SmallConstants,
) -> dict[int, frozenset[Resizing]]:
    """Return the resizings by a Concat for the sources of an operand that it joins others to.

    Parts of the same source are not other, unless they come in another order. Whether another
    source is may depend on the caller of a function.

    Args:
        node: The Concat.
        origins: The origins of all operands.
        position: The operand.
        resizing: What the Concat does to its size.
        constants: The constants of its body.
    """
    sources = [{number for paths in origin for number, _ in paths} for origin in origins]
    joined = {}
    for number in sources[position]:
        others = [each for each in sources if number not in each]
        if others or _is_rolled(node, constants):
            is_known = not all(others) or not others
            joined[number] = frozenset(
                each._replace(written_axes=(is_known and each.grown_axes) or frozenset({None}))
                for each in resizing
            )
    return joined


def _is_rolled(node: Operation, constants: SmallConstants) -> bool:
    """Return whether a Concat joins parts of one value in another order than they have there."""
    places: list[int] = []
    whole: set[str] = set()
    for name in node.inputs:
        maker = constants.find_producer(name)
        if maker is None or maker.domain or maker.op_type not in ("Slice", "Split"):
            return False
        whole.add("".join(maker.inputs[:1]))
        if maker.op_type == "Split":
            places.append(maker.outputs.index(name))
        else:
            starts = constants.find_integers("".join(maker.inputs[1:2]))
            if starts is None or len(starts) != 1:
                return False
            places.append(starts[0] + (_LARGEST_END if starts[0] < 0 else 0))
    return len(whole) == 1 and places != sorted(places)


def read_einsum_order(node: Operation) -> tuple[int, ...] | None:
    """Return the order into which an Einsum brings the axes; ``None`` if it does anything else."""
    attribute = node.find_attribute("equation")
    if len(node.inputs) != 1 or attribute is None or attribute.is_of_caller:
        return None
    equation = (attribute.get_bytes(4) or b"").decode("ascii", "replace").replace(" ", "")
    before, arrow, after = equation.partition("->")
    is_reordered = arrow and before.isalpha() and sorted(before) == sorted(set(after))
    if not is_reordered or len(before) != len(after):
        return None
    order = tuple(map(before.index, after))
    return () if order == tuple(range(len(order))) else order


def _read_axes_order(node: Operation) -> tuple[int, ...] | None:
    """Return the order into which a Transpose brings the axes; `None` if its caller decides it."""
    attribute = node.find_attribute("perm")
    if attribute is None:
        return REVERSED_AXES
    return None if attribute.is_of_caller else attribute.integers


def _read_integer(node: Operation, name: str) -> int | None:
    """Return an attribute; `None` if the node has none, or a function's caller decides it."""
    attribute = node.find_attribute(name)
    return None if attribute is None or attribute.is_of_caller else attribute.integer
