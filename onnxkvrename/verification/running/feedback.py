"""Decide what a step's outputs become in the next step, by how each buffer is meant to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from onnxkvrename.verification.running.dim_sizes import advance_sizes
from onnxkvrename.verification.running.ort_session import (
    OrtSession,
    OutputResult,
    SessionValue,
    join_positions,
)

_FIXED_UPDATES = ("inplace", "once")
"""What a buffer must be meant to do for its size never to change."""


class Feedback(NamedTuple):
    """A retained output and the input that it goes back into.

    The update, as rules mean it, is one of `rules.profile.UPDATES`, or empty.
    """

    output: str
    input: str
    update: str = "inplace"


class FedBack(NamedTuple):
    """What goes from one step to the next.

    Attributes:
        feeds: The values of inputs, by name.
        sizes: The sizes of the next step's symbols.
        faults: Outputs that cannot go back, each with the reason.
        is_last: True if there is no next step: a cache that may grow has no room in an input of
            a fixed size.
    """

    feeds: Mapping[str, Any]
    sizes: Mapping[str, int]
    faults: tuple[tuple[str, str], ...]
    is_last: bool = False


class Step(NamedTuple):
    """One step of the loop.

    Attributes:
        session: The loaded model.
        sizes: The sizes of the step's symbols.
        feeds: What it was fed, by name.
        outputs: What came out, by name.
        results: The same, as types and shapes.
        is_first: For a model with a branch of its own for the first step, whether this was it.
    """

    session: OrtSession
    sizes: Mapping[str, int]
    feeds: Mapping[str, Any]
    outputs: Mapping[str, Any]
    results: Mapping[str, OutputResult]
    is_first: bool | None = None


def feed_back(step: Step, feedback: Sequence[Feedback], meanings: Mapping[str, str]) -> FedBack:
    """Return what a step's outputs become in the next step.

    An output that is longer by the new positions goes back as it is, and the sizes of symbols
    follow it. New positions alone are joined to what was fed. What is written once is kept.

    The `feedback` are the outputs that go back, the `meanings` what rules say of symbols.
    """
    values = {value.name: value.resize(step.sizes) for value in step.session.inputs}
    next_feeds: dict[str, Any] = {}
    measured: dict[str, int] = {}
    faults, is_last = [], False
    for each in feedback:
        value = values[each.input]
        if each.update == "append" and _has_outgrown(value, step.results[each.output]):
            is_last = True
            continue
        fed, grown = _choose_feed(each, value, step)
        if fed is None or any(measured.get(name, size) != size for name, size in grown.items()):
            faults.append((each.output, _describe_fault(step.results[each.output], value)))
            continue
        next_feeds[each.input] = fed
        measured |= grown
    next_sizes = advance_sizes(step.sizes, measured, meanings)
    return FedBack(next_feeds, next_sizes, tuple(faults), is_last)


def _has_outgrown(value: SessionValue, result: OutputResult) -> bool:
    """Return whether an output is longer along an axis where its input has a fixed size."""
    if result.dtype != value.dtype or len(result.shape) != len(value.shape):
        return False
    axes = [axis for axis, dim in enumerate(value.dims) if isinstance(dim, int)]
    return any(result.shape[axis] > value.shape[axis] for axis in axes)


def _choose_feed(feedback: Feedback, value: SessionValue, step: Step) -> tuple[Any, dict[str, int]]:
    """Return what an input gets next, and the symbols whose sizes that settles."""
    result, output = step.results[feedback.output], step.outputs[feedback.output]
    fed = step.feeds[feedback.input]
    if feedback.update == "once" and step.is_first is False:
        return fed, {}
    if result.dtype != value.dtype or len(result.shape) != len(value.shape):
        return None, {}
    changed = [axis for axis, size in enumerate(result.shape) if size != value.shape[axis]]
    if feedback.update == "delta" and len(changed) == 1:
        (axis,) = changed
        if result.shape[axis] < value.shape[axis]:
            return join_positions(step.session, fed, output, axis), {}
    is_fixed = feedback.update in _FIXED_UPDATES and not step.is_first
    sizes = dict(_list_symbol_sizes(value, result))
    if changed and (is_fixed or not all(isinstance(value.dims[axis], str) for axis in changed)):
        return None, {}
    return output, sizes


def _list_symbol_sizes(value: SessionValue, result: OutputResult) -> Iterator[tuple[str, int]]:
    for dim, size in zip(value.dims, result.shape, strict=True):
        if isinstance(dim, str):
            yield dim, size


def _describe_fault(result: OutputResult, value: SessionValue) -> str:
    return (
        f"comes out as {format_dtype_and_shape(result)}, "
        f"which does not fit into {value.name}, {format_dtype_and_shape(value)}"
    )


def format_dtype_and_shape(value: OutputResult | SessionValue) -> str:
    """Return the dtype and the sizes of a value."""
    return f"{value.dtype} {list(value.shape)}"
