"""Check a layout for one consumer.

`find_problems` runs all checks. ``verify --target`` and ``rename --target`` report its findings;
`compare` runs it for each side, and reports the problems that stop a side in its own words. The
checks here and in `name_checks` apply to every consumer that selects by name. Checks for a single
consumer are in its module in `consumers/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from onnxkvrename.findings import UNKNOWN_TRANSFER, Finding, report_names
from onnxkvrename.handoff import name_checks
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.selection import ConsumerView, SelectedValue, build_view
from onnxkvrename.layout.layout import KvBuffer, Layout, Shape
from onnxkvrename.layout.updates import BufferUpdate, build_update_finding
from onnxkvrename.rules.plan import REASON_POSITION
from onnxkvrename.rules.request import Request

StartupCause = Literal["layer", "dtype", "shape", "output_count"]
"""The reason why a consumer stops before it moves anything.

``layer``: it cannot read the layer in a name; ``dtype``: it has no size for a dtype; ``shape``: it
cannot compute bytes from a shape; ``output_count``: it counts more or fewer outputs than inputs.
"""
_UNKNOWN_UPDATES = (
    (
        "unknown",
        "the graph does not show that",
        "examples/run_retention.py runs the model and compares the sizes",
    ),
    (
        "untraced",
        "the graph was not traced to see whether",
        "pass the model itself, or write the layout file again",
    ),
)
"""Kinds of updates that do not show whether an output fits into its input.

Each with the reason, and what to do.
"""


class ConsumerProblem(NamedTuple):
    """A problem that a consumer has with a layout.

    Attributes:
        findings: The problem as findings about KV buffers; empty if other findings of the same
            layout report it already.
        startup_cause: Why the consumer stops before it moves anything, `None` if it does not
            stop for this.
        values: The selected values that make it stop, in the consumer's order, inputs first,
            including those that are not KV buffers.
    """

    findings: tuple[Finding, ...]
    startup_cause: StartupCause | None = None
    values: tuple[SelectedValue, ...] = ()


def check_consumer(
    layout: Layout,
    consumer: Consumer,
    *,
    full_transfer: bool = False,
    rename: Request | None = None,
) -> Iterator[Finding]:
    """Yield the findings about a layout for a consumer.

    With `full_transfer` the consumer moves all of each buffer, whatever the prompt. The `rename`
    makes the names those that it selects; by default it is one of the layout's models.
    """
    for problem in find_problems(build_view(layout, consumer, full_transfer, rename)):
        yield from problem.findings


def find_problems(view: ConsumerView) -> Iterator[ConsumerProblem]:
    """Yield the problems that a consumer has with a layout; none for a layout without buffers.

    A cache that it cannot use under any name (KV120, KV610) has no findings about its names.
    """
    if not view.layout.buffers:
        return
    own = [finding for check in view.consumer.checks for finding in check(view)]
    own += _check_paged_caches(view)
    refusals = [finding for finding in own if finding.code == "KV610"]
    unusable = (*refusals, *_check_updates(view))
    yield ConsumerProblem(unusable)
    unread = view.selection.unreadable
    if unusable:
        yield ConsumerProblem((), "layer", unread)
    else:
        yield ConsumerProblem(tuple(name_checks.check_selected_names(view)))
        yield ConsumerProblem(tuple(name_checks.check_unreadable_layers(view)), "layer", unread)
        yield ConsumerProblem(tuple(name_checks.check_layer_numbers(view)))
    yield ConsumerProblem(
        (
            *name_checks.check_order(view),
            *_check_unknown_updates(view),
            *_check_counters(view),
        )
    )
    yield _check_dtypes(view)
    yield _check_shapes(view)
    if has_wrong_output_count(view):
        yield ConsumerProblem((), "output_count")
    yield ConsumerProblem(tuple(finding for finding in own if finding not in refusals))


def find_owning_model(layout: Layout, name: str) -> str:
    """Return the model with the buffer of this name, or the layout's first model without one."""
    models = (buffer.model for buffer in layout.buffers if name in buffer.names)
    return next(models, layout.models[0])


def is_empty_shape(shape: Shape) -> bool:
    """Return whether one sequence of this shape has no elements; the first axis is the batch."""
    return any(isinstance(dim, int) and dim < 1 for dim in shape[1:])


def describe_content(buffer: KvBuffer) -> str:
    """Return what a buffer contains that a cut to the prompt's length destroys: ``a state``."""
    if buffer.is_state:
        return "a state"
    if buffer.traits.grows_with == "encoder":
        return "the encoder's output"
    if buffer.has_no_prompt_axis:
        return "values written once, whatever the prompt"
    return "the context is on another axis"


def count_appended_outputs(view: ConsumerView) -> int:
    """Return how many outputs prefill adds to the outputs of buffers."""
    is_appended = view.consumer.is_appended_output
    if is_appended is None:
        return 0
    return sum(is_appended(value.name) for value in view.layout.outputs)


def has_wrong_output_count(view: ConsumerView) -> bool:
    """Return whether prefill stops because the numbers of inputs and outputs do not match.

    If prefill appends outputs to those of buffers, it drops the last one of all. The number of the
    others must be that of the inputs, or one more. Only prefill counts them.
    """
    consumer, selection = view.consumer, view.selection
    is_counted = consumer.is_appended_output is not None or consumer.memory == "separate"
    if not is_counted or not selection.inputs:
        return False
    outputs = len(selection.outputs)
    if consumer.is_appended_output is not None:
        outputs += count_appended_outputs(view) - 1
    return outputs - len(selection.inputs) not in (0, 1)


def find_count_failure(layout: Layout, consumer: Consumer) -> str:
    """Return when a side with wrong numbers of inputs and outputs fails, to follow ``fails``."""
    has_trial = any(value.name == consumer.trial_output for value in layout.outputs)
    return "at start-up" if has_trial else "at the first prompt"


def _check_updates(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV120, once for all buffers that change their size in the same way."""
    layout = view.layout
    groups: dict[BufferUpdate, list[KvBuffer]] = {}
    for buffer in layout.buffers:
        if buffer.update.is_resized:
            groups.setdefault(buffer.update, []).append(buffer)
    shapes = {value.name: value.shape for value in (*layout.outputs, *layout.inputs)}
    for update, (buffer, *others) in groups.items():
        yield build_update_finding(
            buffer.input or "its input",
            buffer.output or "",
            update,
            (shapes.get(buffer.input or ""), shapes.get(buffer.output or "")),
            needed_by=view.consumer.name,
            more=len(others),
        )


def _check_unknown_updates(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV113, once for all buffers that are not proved to fit back into their inputs."""
    for kind, reason, hint in _UNKNOWN_UPDATES:
        buffers = [
            buffer
            for buffer in view.layout.buffers
            if buffer.update.kind == kind and len(buffer.names) == 2
            if buffer.update.fault is None  # KV110 says more
        ]
        inputs = f"its input {buffers[0].input}" if len(buffers) == 1 else "their inputs"
        yield from report_names(
            "KV113",
            [buffer.output or "" for buffer in buffers],
            ("is", "are"),
            f"not proved to fit back into {inputs}, as {view.consumer.name} requires: {reason} "
            "size and order of the content stay the same",
            hint,
            "outputs",
        )


def _check_paged_caches(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV610 for caches that a consumer would cut as if their first axis were the batch."""
    return report_names(
        "KV610",
        [buffer.names[0] for buffer in view.layout.buffers if buffer.traits.is_paged],
        ("is", "are"),
        "paged: blocks of all sequences, which a block table assigns; "
        f"{view.consumer.name} takes the first axis for the batch and hands over one block",
        "export the model without paged attention",
        "buffers",
    )


def _check_counters(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV630 for inputs that say where a cache is written, which no consumer moves."""
    inputs = {value.name for value in view.layout.inputs}
    kept = [item.name for item in view.layout.kept if item.reason == REASON_POSITION]
    return report_names(
        UNKNOWN_TRANSFER,
        [name for name in kept if name in inputs],
        ("counts", "count"),
        f"the positions that are written; {view.consumer.name} moves no such value, and "
        "whether decode gets it is not known",
        "if your runner feeds the length of the prompt to decode, rename with "
        f"`--prefix {view.consumer.token or 'TOKEN'}`, without --target",
        "inputs",
    )


def _check_dtypes(view: ConsumerView) -> ConsumerProblem:
    """Find KV610: dtypes for which the consumer has no size."""
    consumer = view.consumer
    names_of: dict[str, list[str]] = {}
    for buffer in view.buffers:
        if consumer.itemsize_of(buffer.dtype) is None:
            names_of.setdefault(buffer.dtype, []).append(buffer.names[0])
    findings = tuple(
        finding
        for dtype, names in names_of.items()
        for finding in report_names(
            "KV610",
            names,
            ("has", "have"),
            f"the dtype {dtype}, for which {consumer.name} has no element size",
            "export the caches in another dtype, such as FLOAT16",
            "buffers",
        )
    )
    inputs = view.selection.inputs
    values = (each for each in inputs if consumer.itemsize_of(each.value.dtype) is None)
    return ConsumerProblem(findings, "dtype", tuple(values))


def _check_shapes(view: ConsumerView) -> ConsumerProblem:
    """Find KV610: shapes from which the consumer cannot compute bytes.

    An axis without a name or a size matters only for a hand-off: no option of `compare` can set
    its size. So it is not a finding, but its value is among the problem's values.
    """
    buffers = (b for b in view.buffers if not b.shape or is_empty_shape(b.shape))
    findings = report_names(
        "KV610",
        [buffer.names[0] for buffer in buffers],
        ("has", "have"),
        f"no shape or an empty one; {view.consumer.name} cannot compute the bytes to move",
        "export the model again, with shapes",
        "buffers",
    )
    shapes = ((each, each.value.shape) for each in view.selection.inputs)
    values = (v for v, shape in shapes if not shape or None in shape[1:] or is_empty_shape(shape))
    return ConsumerProblem(tuple(findings), "shape", tuple(values))
