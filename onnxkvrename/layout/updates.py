"""How the retained output of a buffer is made from its input, and whether it can go back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.limits import MAX_MATCHED_CHARS
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import Dim, format_shape
from onnxkvrename.records import Spread
from onnxkvrename.rules.checks import is_other_shape
from onnxkvrename.rules.plan import KvPair, RenamePlan
from onnxkvrename.text import format_list

UpdateKind = Literal["inplace", "shift", "append", "delta", "once", "unknown", "untraced"]
"""The ways to update a buffer.

``inplace``: written into at some positions; ``shift``: the oldest positions make room for the
new ones, in a buffer of one size; ``append``: longer by the new positions; ``delta``: the output
has the new positions only; ``once``: passed through, or written in full without the input.
``unknown``: the graph was read, and does not show it; ``untraced``: the graph was not read.
"""
_KINDS_WORST_FIRST: tuple[UpdateKind, ...] = (
    "append",
    "delta",
    "unknown",
    "untraced",
    "shift",
    "inplace",
    "once",
)
_LABELS: dict[UpdateKind, str] = {
    "inplace": "written in place",
    "shift": "shifted in place",
    "append": "grows",
    "delta": "new positions only",
    "once": "written once",
    "unknown": "",
    "untraced": "",
}
_RESIZING_KINDS: tuple[UpdateKind, ...] = ("append", "delta")

_Shapes = tuple[tuple[Dim, ...] | None, tuple[Dim, ...] | None]
"""The declared shapes of an input and of its output."""
DimChange = Literal["same", "grows", "shrinks", "open"]
"""How the size of an axis changes from input to output; ``open`` if the shapes do not say."""


class BufferFault(NamedTuple):
    """Why a retained output is not a later state of its own input.

    Attributes:
        other_inputs: The inputs of other buffers that it is made of instead: the model mixes up
            its buffers. None if it is made of no buffer, or for another reason.
        written_axes: The axis along which new values are written, and the one that they should be
            written along; ``None`` for another reason.
        order: The axes of the input in the order in which they come out, empty if only the
            declared shapes tell; ``None`` for another reason.
    """

    other_inputs: tuple[str, ...] = ()
    written_axes: tuple[int, int] | None = None
    order: tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.order is not None:
            return "its axes come out in another order"
        if self.written_axes is not None:
            return "new values are written along axis {}, not along axis {}".format(
                *self.written_axes
            )
        return f"it is computed from {format_list(list(self.other_inputs)) or 'no buffer'}"


class BufferUpdate(NamedTuple):
    """How a retained output is made from its input.

    Attributes:
        kind: How the retained output is made from its input.
        axis: For append and delta the axis with another size, `None` if it is not known.
        fault: Why the output is not a later state of its own input; `None` if nothing shows that
            it is not.
    """

    kind: UpdateKind = "unknown"
    axis: int | None = None
    fault: BufferFault | None = None

    @property
    def is_resized(self) -> bool:
        """True if the output has another size than the input, so that it cannot go back."""
        return self.kind in _RESIZING_KINDS

    @property
    def label(self) -> str:
        """The update in words; empty if it is not known."""
        axis = "" if self.axis is None else f" along axis {self.axis}"
        return f"{_LABELS[self.kind]}{axis}"

    def __str__(self) -> str:
        if self.axis is None:
            return self.kind
        return f"{self.kind} along axis {self.axis}"


ShownUpdate = Annotated[BufferUpdate, Spread(("update", "update_axis"))]
"""An update as JSON has it, in a record of a buffer."""
UNKNOWN_UPDATE = BufferUpdate()
UNTRACED_UPDATE = BufferUpdate("untraced")

Updates = Mapping[str, BufferUpdate]
"""How the buffers of a model are updated, by the names of their retained outputs."""
UpdateTracer = Callable[[ByteSource, Sequence[KvPair]], Updates]
"""Takes a model and its buffers; `verification.trace_buffer_updates` is one, which is handed in."""


def choose_worst_update(updates: list[BufferUpdate]) -> BufferUpdate:
    """Return the update that does the most harm; unknown for an empty list."""
    ranks = {kind: rank for rank, kind in enumerate(_KINDS_WORST_FIRST)}
    return min(updates, key=lambda update: ranks[update.kind], default=UNKNOWN_UPDATE)


def compare_dims(
    into: tuple[Dim, ...] | None, out: tuple[Dim, ...] | None
) -> tuple[DimChange, ...] | None:
    """Return how the size of each axis changes, as far as the declared shapes say.

    ``None`` if a shape is missing, or the ranks differ.
    """
    if into is None or out is None or len(into) != len(out):
        return None
    return tuple(_compare_dim(before, after) for before, after in zip(into, out, strict=True))


def are_same_sizes(changes: Sequence[DimChange] | None) -> bool:
    """Return whether `compare_dims` shows that no axis changes."""
    return changes is not None and all(change == "same" for change in changes)


def find_growth(changes: Sequence[DimChange] | None) -> BufferUpdate | None:
    """Return the growth that `compare_dims` shows; ``None`` without one."""
    if changes is None or "grows" not in changes:
        return None
    return BufferUpdate("append", changes.index("grows"))


def build_delta(changes: Sequence[DimChange] | None) -> BufferUpdate:
    """Return the update of an output that has the new positions only."""
    different = [axis for axis, change in enumerate(changes or ()) if change != "same"]
    return BufferUpdate("delta", different[0] if len(different) == 1 else None)


def find_declared_growth(pair: KvPair, producer: str) -> BufferUpdate | None:
    """Return the growth that the declared shapes of a pair show, where no graph is followed.

    Where a Concat makes the output, another symbol after the batch is that of a longer axis:
    torch.onnx makes one up, as ``Concatpast_key.0_RetainedState_dim_2``.

    The `producer` is the op type of the node that makes the pair's output.
    """
    if pair.input is None or pair.output is None:
        return None
    into, out = pair.input.value.shape, pair.output.value.shape
    changes = compare_dims(into, out)
    grown = find_growth(changes)
    if grown is not None or changes is None or producer != "Concat":
        return grown
    renamed = [
        axis
        for axis, (before, after) in enumerate(zip(into or (), out or (), strict=True))
        if axis and before != after and isinstance(before, str) and isinstance(after, str)
    ]
    return BufferUpdate("append", renamed[0]) if len(renamed) == 1 else None


def is_meant_without_input(update: BufferUpdate, meant: str) -> bool:
    """Return whether rules say that the output need not be a later state of its input."""
    return update.kind == meant and meant in ("delta", "once")


def build_fault_finding(
    input_name: str, output_name: str, fault: BufferFault, shapes: _Shapes = (None, None)
) -> Finding:
    """Return KV110 for a retained output that is not a later state of its own input.

    It is KV104 if only the order of its axes is another one. The shapes are those of input and
    output.
    """
    if fault.order is not None:
        return _build_order_finding(input_name, output_name, fault.order, shapes)
    message = (
        f"is computed from {format_list(list(fault.other_inputs)) or 'no buffer'}, not from its "
        f"own input {input_name}"
    )
    if fault.written_axes is not None:
        written, expected = (
            f"axis {axis}{'' if shapes[0] is None else f' ({shapes[0][axis]})'}"
            for axis in fault.written_axes
        )
        message = (
            f"takes new values along {written} of its own input {input_name}, but positions are "
            f"along {expected}: heads or their elements are overwritten"
        )
    hint = "the cache would be mixed up or lost; export the model again"
    return build_finding("KV110", output_name, message, hint)


def _build_order_finding(
    input_name: str, output_name: str, order: tuple[int, ...], shapes: _Shapes
) -> Finding:
    into, out = shapes
    message = f"has the axes of its input {input_name} in another order"
    if order:
        message += f" ({', '.join(map(str, order))})"
    if into is not None and out is not None and into != out:
        message += f": {format_shape(into)} becomes {format_shape(out)}"
    hint = "both sides of a buffer share one piece of memory; export the model again"
    return build_finding("KV104", output_name, message, hint)


def is_reported_shape(pair: KvPair, fault: BufferFault, meant: str) -> bool:
    """Return whether the declared shapes have KV104 already, so that the order adds nothing."""
    return (
        fault.order is not None
        and pair.input is not None
        and pair.output is not None
        and is_other_shape(pair.input.value, pair.output.value, meant)
    )


def find_faults(plan: RenamePlan, updates: Updates) -> Iterator[Finding]:
    """Yield KV110 or KV104 for each buffer with a fault, under the names after a rename.

    The updates are by the old names of retained outputs. An output that has only the new positions
    is left to KV120.
    """
    new_names = {pair.input.old_name: pair.input.new_name for pair in plan.pairs if pair.input}
    for pair in plan.pairs:
        if pair.input is None or pair.output is None:
            continue
        update = updates.get(pair.output.old_name, UNKNOWN_UPDATE)
        meant = plan.updates_by_kind.get(pair.kind, "")
        if (
            update.fault is not None
            and update.kind != "delta"
            and not is_reported_shape(pair, update.fault, meant)
            and not is_meant_without_input(update, meant)
        ):
            names = [new_names[name] for name in update.fault.other_inputs]
            fault = update.fault._replace(other_inputs=tuple(names))
            shapes = pair.input.value.shape, pair.output.value.shape
            yield build_fault_finding(pair.input.new_name, pair.output.new_name, fault, shapes)


def build_update_finding(
    input_name: str,
    output_name: str,
    update: BufferUpdate,
    shapes: _Shapes,
    *,
    needed_by: str | None,
    more: int = 0,
    hint: str = "",
) -> Finding:
    """Return KV120 for a buffer whose output has another size than its input.

    Args:
        input_name: The name of the input.
        output_name: The name of the retained output.
        update: How the output is made.
        shapes: The declared shapes of input and output.
        needed_by: Who needs the output to go back into its input; ``None`` if nothing says,
            which makes the finding a warning.
        more: The number of further buffers that the finding is also about.
        hint: How to get rules that say how the output is made, where nobody needs another.
    """
    size = "is longer than" if update.kind == "append" else "has only the new positions of"
    need = f"{needed_by} retains buffers in place" if needed_by else "no rule says how to join them"
    finding = build_finding(
        "KV120",
        output_name,
        f"{size} {input_name}{_format_axis(update, shapes)}{f', like {more} more' if more else ''}"
        f", so it does not fit: {need}",
        "export it with a static cache, which is written in place"
        if needed_by
        else hint
        or f'say in the rules that it is meant: update = "{update.kind}" (`--rules FILE`, as '
        "pairs writes it)",
    )
    return finding._replace(severity="error") if needed_by else finding


def _format_axis(update: BufferUpdate, shapes: _Shapes) -> str:
    """Return which axis has another size, and the declared sizes if both are there."""
    if update.axis is None:
        return ""
    sizes = [shape[update.axis] for shape in shapes if shape and update.axis < len(shape)]
    declared = "" if len(set(sizes)) < 2 or None in sizes else f" ({sizes[0]} -> {sizes[1]})"
    return f" along axis {update.axis}{declared}"


def _compare_dim(before: Dim, after: Dim) -> DimChange:
    if before is None or after is None:
        return "open"
    if before == after:
        return "same"
    if isinstance(before, int) and isinstance(after, int):
        return "grows" if after > before else "shrinks"
    if isinstance(before, str) and isinstance(after, str):
        return "grows" if _is_larger_symbol(before, after) else "open"
    return "open"


def _is_larger_symbol(before: str, after: str) -> bool:
    """Return whether a symbol is a sum with another one in it, or the total of its past."""
    if max(len(before), len(after)) > MAX_MATCHED_CHARS:
        return False
    terms = [term.strip() for term in after.split("+")]
    if len(terms) > 1 and before.strip() in terms:
        return True
    return "past_" in before and after in (
        before.replace("past_", "total_", 1),
        before.replace("past_", "present_", 1),
    )
