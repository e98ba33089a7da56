"""Find buffers whose axes change places, or that are written along another axis than positions.

Each operator on the path from an input to its output tells how it reorders the axes, and along
which of them other values are joined or written. Where the positions are, the profile, symbols or
sizes that change say (:func:`onnxkvrename.layout.kinds.find_position_axis`); where nothing says
it, nothing is wrong.
"""

from __future__ import annotations

from onnxkvrename.layout.kinds import find_pair_shape, find_position_axis, is_axis_of_heads
from onnxkvrename.layout.updates import BufferFault
from onnxkvrename.model.signature import Dim
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.verification.operators import SizeChange
from onnxkvrename.verification.provenance import REVERSED_AXES, FlowPath, Resizing

_Shape = tuple[Dim, ...]


def find_axis_fault(pair: KvPair, path: FlowPath) -> BufferFault | None:
    """Return what is wrong with the axes of an output that its own input is carried into.

    The path is the cheapest one from the input to the output.
    """
    shape = find_pair_shape(pair)
    if shape is None or pair.input is None or pair.output is None or path.cost[0]:
        return None
    return _find_order_fault(pair.input.value.shape, pair.output.value.shape, path) or (
        _find_written_fault(pair, shape, path)
    )


def _find_order_fault(
    into: _Shape | None, out: _Shape | None, path: FlowPath
) -> BufferFault | None:
    """Return the fault of axes that come out in another order.

    Where the input is only moved, one branch in another order is enough. Where it is computed
    with, it may be combined with itself.
    """
    if into is None or (out is not None and len(out) != len(into)):
        return None
    orders = [_find_order(each, len(into), is_rank_kept=out is not None) for each in path.resizings]
    turned = [order for order in orders if order is not None and _is_turned(order, into)]
    if turned and (len(turned) == len(orders) or not path.cost[1]):
        return BufferFault(order=min(turned))
    if out is not None and None in orders and _are_exchanged(into, out):
        return BufferFault(order=())
    if any(_is_reshaped_otherwise(each, into) for each in path.resizings):
        return BufferFault(order=())
    return None


def _is_reshaped_otherwise(resizing: Resizing, into: _Shape) -> bool:
    """Return whether a Reshape gives axes the sizes of others, or back their own in a wrong order.

    A size of -1, and one of 0 where the order before is not known, may be any.
    """
    if resizing.reshaped is None or len(resizing.reshaped[1]) != len(into):
        return False
    if resizing.changes & SizeChange.SEVERAL:
        return False
    before, sizes = resizing.reshaped
    order = _find_order(resizing._replace(axes=before), len(into), is_rank_kept=False)
    turned = into if order is None else tuple(into[axis] for axis in order)
    out = tuple(
        size if size > 0 else turned[axis] if size == 0 and order is not None else f"?{axis}"
        for axis, size in enumerate(sizes)
    )
    if _are_exchanged(into, out):
        return True
    is_turned = order is not None and _is_turned(order, into)
    return is_turned and _may_be_equal(out, into) and not _may_be_equal(out, turned)


def _may_be_equal(first: _Shape, second: _Shape) -> bool:
    """Return whether sizes are equal: one that is not known only where the other is a symbol."""
    return all(
        isinstance(one, str) and isinstance(other, str) if isinstance(one, str) else one == other
        for one, other in zip(first, second, strict=True)
    )


def _find_order(resizing: Resizing, rank: int, *, is_rank_kept: bool) -> tuple[int, ...] | None:
    """Return the order in which axes come out, ``None`` if it is not known."""
    in_order = tuple(range(rank))
    if resizing.axes is None or resizing.changes & SizeChange.SEVERAL:
        return None
    if resizing.changes & SizeChange.DROPS_AXIS and not is_rank_kept:
        return None
    if not resizing.axes:
        return in_order
    if resizing.axes == REVERSED_AXES and rank > 1:
        return in_order[::-1]
    return resizing.axes if sorted(resizing.axes) == [*in_order] else None


def _is_turned(order: tuple[int, ...], shape: _Shape) -> bool:
    """Return whether an order of axes puts values to other places: axes of size 1 do not count."""
    wide = [axis for axis in order if shape[axis] != 1]
    return wide != sorted(wide)


def _are_exchanged(into: _Shape, out: _Shape) -> bool:
    """Return whether two axes have changed places, by their declared sizes.

    One has a size where the other has a symbol; or both are symbols, each in the place of the
    other.
    """
    for first, size in enumerate(into):
        for second, symbol in enumerate(into):
            if not isinstance(symbol, str) or first == second or size == symbol:
                continue
            is_size = isinstance(size, int) and size > 1 and isinstance(out[first], str)
            is_symbol = isinstance(size, str) and out[first] == symbol
            if out[second] == size and (is_size or is_symbol):
                return True
    return False


def _find_written_fault(pair: KvPair, shape: _Shape, path: FlowPath) -> BufferFault | None:
    """Return the fault of new values that are written along heads, or along the size of a head."""
    written = [axes for each in path.resizings if (axes := _list_written_axes(each, len(shape)))]
    expected = find_position_axis(pair) if written else None
    for axes in written:
        wrong = [axis for axis in sorted(axes) if is_axis_of_heads(pair, axis)]
        if expected is not None and expected not in axes and wrong:
            return BufferFault(written_axes=(wrong[0], expected))
    return None


def _list_written_axes(resizing: Resizing, rank: int) -> frozenset[int]:
    """Return the axes along which values are written, from the front; none if not all are known."""
    known = [axis for axis in resizing.written_axes if axis is not None]
    is_rank_known = resizing.axes is not None or not resizing.changes & SizeChange.DROPS_AXIS
    if len(known) < len(resizing.written_axes) or not is_rank_known:
        return frozenset()
    if not all(-rank <= axis < rank for axis in known):
        return frozenset()
    return frozenset(axis % rank for axis in known)
