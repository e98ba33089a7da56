"""Decide how a retained output is made from its input, by its path and the declared shapes."""

from __future__ import annotations

from collections.abc import Sequence

from onnxkvrename.errors import ModelError
from onnxkvrename.layout.updates import (
    UNKNOWN_UPDATE,
    BufferUpdate,
    DimChange,
    choose_worst_update,
)
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.verification.operators import SizeChange
from onnxkvrename.verification.provenance import FlowPath, Resizing

_INPLACE = BufferUpdate("inplace")
_SHIFT = BufferUpdate("shift")
_ONCE = BufferUpdate("once")


def trace_buffer_updates(source: ByteSource, pairs: Sequence[KvPair]) -> dict[str, BufferUpdate]:
    """Return how each retained output is made from its input, by its name.

    Args:
        source: The bytes of a model.
        pairs: Its buffers.

    Returns:
        Nothing for a model that protobuf refuses; that is for other checks to say.
    """
    from onnxkvrename.verification.dataflow import trace_buffer_flows  # onnx, only for models
    from onnxkvrename.verification.strip_weights import read_model_without_weights

    try:
        flows = trace_buffer_flows(read_model_without_weights(source), pairs)
    except ModelError:
        return {}
    return {flow.pair.output.old_name: flow.update for flow in flows if flow.pair.output}


def decide_update(path: FlowPath, changes: Sequence[DimChange] | None) -> BufferUpdate:
    """Return how an output is made that is a later state of its input.

    What the operators do is proved, a declared shape is only a claim. So a Concat makes a
    buffer longer whatever its shapes say, unless something on the path takes a part of it;
    where the operators leave the size open, the shapes decide.

    Args:
        path: The path from the input to the output.
        changes: How the declared size of each axis changes; ``None`` if that is not known.
    """
    if path.uncertainty:
        return decide_update_without_input(changes, is_read=True)
    updates = [_decide_resizing(resizing, path, changes) for resizing in path.resizings]
    return choose_worst_update(updates)


def decide_update_without_input(
    changes: Sequence[DimChange] | None, *, is_read: bool
) -> BufferUpdate:
    """Return how an output is made that is not a later state of its input, or not surely.

    Args:
        changes: How the declared size of each axis changes; ``None`` if that is not known.
        is_read: Whether the output depends on the input at all.
    """
    grown = _find_grown(changes)
    if grown is not None:
        return grown
    if is_read or changes is None:
        return UNKNOWN_UPDATE
    if "shrinks" in changes:
        return BufferUpdate("delta", changes.index("shrinks"))
    return _ONCE if _is_same(changes) else UNKNOWN_UPDATE


def _decide_resizing(
    resizing: Resizing, path: FlowPath, changes: Sequence[DimChange] | None
) -> BufferUpdate:
    flags = resizing.changes
    if flags & ~SizeChange.MOVES_AXES == SizeChange.SHIFTS:
        return _SHIFT  # the operator keeps the size, whatever the symbols are called
    grown = _find_grown(changes)
    appends, cuts = bool(flags & SizeChange.APPENDS), bool(flags & SizeChange.CUTS)
    is_written_over = path.cost[0] > 0  # then the size is that of the other value
    is_open = is_written_over or bool(flags & (SizeChange.RESIZES | SizeChange.SEVERAL))
    if appends and not (cuts or is_open):
        return grown or BufferUpdate("append", _find_axis(resizing, changes))
    if grown is not None:
        return grown
    if flags & SizeChange.FITS and changes is not None and not _is_same(changes):
        return BufferUpdate("append", _find_axis(resizing, changes))
    if appends or cuts or is_open or flags & SizeChange.FITS:
        if not _is_same(changes):
            return UNKNOWN_UPDATE
        return _SHIFT if appends and cuts else _INPLACE
    if changes is not None and "shrinks" in changes:
        return UNKNOWN_UPDATE
    return _ONCE if path.updated_by is None else _INPLACE


def _find_grown(changes: Sequence[DimChange] | None) -> BufferUpdate | None:
    """Return the growth that the declared shapes state."""
    if changes is None or "grows" not in changes:
        return None
    return BufferUpdate("append", changes.index("grows"))


def _find_axis(resizing: Resizing, changes: Sequence[DimChange] | None) -> int | None:
    """Return the axis that grows: the one that shapes leave open, else the operators'."""
    if changes is None:
        return resizing.axis if resizing.axis is None or resizing.axis >= 0 else None
    candidates = [axis for axis, change in enumerate(changes) if change != "same"]
    if resizing.axis is not None and -len(changes) <= resizing.axis < len(changes):
        return resizing.axis % len(changes)
    return candidates[0] if len(candidates) == 1 else None


def _is_same(changes: Sequence[DimChange] | None) -> bool:
    return changes is not None and all(change == "same" for change in changes)
