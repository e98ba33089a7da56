"""Find along which axes a ScatterND writes, by the way in which its indices are made.

The last axis of the indices has a column for each axis that is indexed. Exporters join the
columns: a range over all heads, say, and the positions that come in. Only the latter choose where
something is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnxkvrename.verification.constants import SmallConstants
from onnxkvrename.verification.graph_bodies import Operation
from onnxkvrename.verification.operators import is_shape_only

_STEPS = 64
"""Nodes that are looked at for one column."""
_PASSING_OPS = ("Identity", "Cast")
_UNKNOWN = frozenset((None,))


def find_scattered_axes(node: Operation, constants: SmallConstants) -> frozenset[int | None]:
    """Return the axes along which a ScatterND writes; ``None`` among them is not known.

    Of indices whose columns are not known, but their number, all axes that they index are
    returned: it is one of them.
    """
    name = _find_root("".join(node.inputs[1:2]), constants)
    indices = constants.find_producer(name)
    if indices is None or indices.domain or indices.op_type == "Constant":
        count = (constants.find_shape(name) or (None,))[-1]
        return frozenset(range(count)) if isinstance(count, int) else _UNKNOWN
    columns = indices.inputs if indices.op_type == "Concat" else ("".join(indices.outputs[:1]),)
    axis = indices.find_attribute("axis")
    last = -1 if axis is None or axis.is_of_caller else axis.integer
    if not columns or not all(_is_column(name, last, constants) for name in columns):
        return _UNKNOWN
    varying = [number for number, name in enumerate(columns) if not _is_fixed(name, constants)]
    return frozenset(varying) or _UNKNOWN


def _find_root(name: str, constants: SmallConstants) -> str:
    """Return the value that is passed on as this one, whatever its integers are cast to."""
    for _ in range(_STEPS):
        node = constants.find_producer(name)
        if node is None or node.domain or node.op_type not in _PASSING_OPS:
            break
        name = "".join(node.inputs[:1])
    return name


def _is_column(name: str, last: int, constants: SmallConstants) -> bool:
    """Return whether a value has one element along its last axis, which has this number."""
    node = constants.find_producer(name)
    if node is None or node.domain:
        return False
    if node.op_type == "Unsqueeze":
        axes = _read_axes(node, constants)
        source = constants.find_shape(_find_root(node.inputs[0], constants))
        own_last = -1 if source is None else len(source) + len(axes) - 1
        return bool({-1, own_last} & {*axes}) and last in (-1, own_last)
    if node.op_type == "Expand":  # to a shape that ends in 1
        shape = constants.find_producer("".join(node.inputs[1:2]))
        sizes: Sequence[str] = shape.inputs if shape is not None else ()
        is_joined = shape is not None and not shape.domain and shape.op_type == "Concat"
        is_last = last in (-1, len(sizes) - 1)
        return is_joined and is_last and constants.find_integers("".join(sizes[-1:])) == (1,)
    return False


def _read_axes(node: Operation, constants: SmallConstants) -> tuple[int, ...]:
    """Return the axes of an Unsqueeze, an operand or before opset 13 an attribute."""
    if len(node.inputs) > 1:
        return constants.find_integers(node.inputs[1]) or ()
    attribute = node.find_attribute("axes")
    return () if attribute is None or attribute.is_of_caller else attribute.integers


def _is_fixed(name: str, constants: SmallConstants) -> bool:
    """Return whether a value follows from constants and from shapes alone."""
    pending, seen = [name], {name}
    while pending:
        value = pending.pop()
        node = constants.find_producer(value)
        if node is None:
            if not constants.is_weight(value):
                return False
            continue
        if len(seen) > _STEPS or (node.attribute_bytes and constants.has_subgraphs(node)):
            return False
        if is_shape_only(node.domain, node.op_type):
            continue
        new = [each for each in node.inputs if each and each not in seen]
        seen.update(new)
        pending += new
    return True
