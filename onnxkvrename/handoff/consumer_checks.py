"""Check what goes wrong with a layout at one consumer.

`find_problems` is the one check. `check-consumer` and ``rename --target`` report its findings;
`compare` runs it for each side, and reports the problems that stop the side in its own words.
The checks here hold for every consumer that selects by name; those of one consumer alone are
in its own module.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.selection import (
    SelectedValue,
    Selection,
    find_non_kv_selected,
    find_selected_buffers,
    select_values,
)
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import KvBuffer, Layout, apply_updates, build_layout
from onnxkvrename.layout.updates import BufferUpdate, build_update_finding
from onnxkvrename.rules.kv_model import KvModel

StartupCause = Literal["layer", "dtype", "shape", "output_count"]
"""The reason why a consumer stops before it moves anything: it cannot read a layer in a name, has
no size for a dtype, cannot compute bytes from a shape, or counts more or fewer outputs than
inputs."""

_TEMPLATE_HINT = (
    "mend the template in your rules (--rules FILE): the consumer expects another place"
)


class ConsumerProblem(NamedTuple):
    """One thing that goes wrong with a layout at a consumer.

    Attributes:
        findings: The problem as findings about KV buffers; empty where other findings of the
            same layout already say it.
        startup_cause: Why the consumer stops before it moves anything, `None` if it does not
            stop for this.
        values: The selected values that make it stop, in the consumer's order, inputs first,
            including those that are not KV buffers.
    """

    findings: tuple[Finding, ...]
    startup_cause: StartupCause | None = None
    values: tuple[SelectedValue, ...] = ()


class _BufferName(NamedTuple):
    """The input or output name of a buffer."""

    buffer: KvBuffer
    name: str
    side: Literal["input", "output"]
    is_selected: bool


def check_consumer(
    layout: Layout, consumer: Consumer, *, full_transfer: bool = False
) -> Iterator[Finding]:
    """Yield the findings about a layout at a consumer.

    Args:
        layout: The buffers of a model, or of its windows together.
        consumer: The consumer that would receive them.
        full_transfer: Whether the consumer moves all of each buffer, whatever the prompt.
    """
    for problem in find_problems(layout, consumer, full_transfer):
        yield from problem.findings


def find_problems(
    layout: Layout, consumer: Consumer, full_transfer: bool
) -> Iterator[ConsumerProblem]:
    """Yield the problems that a consumer has with a layout.

    Args:
        layout: The KV buffers and the other values of the graph.
        consumer: The consumer.
        full_transfer: Whether it moves each buffer in full, even for a short prompt.
    """
    if not layout.buffers:
        return
    selection = select_values(layout, consumer)
    names = list(_list_buffer_names(layout, consumer))
    yield ConsumerProblem(tuple(_check_unselected_names(names, layout, consumer)))
    yield ConsumerProblem(tuple(_check_output_suffixes(layout, consumer)))
    yield ConsumerProblem(
        tuple(_check_unreadable_layers(names, selection, consumer)), "layer", selection.unreadable
    )
    yield ConsumerProblem(tuple(_check_layer_numbers(names, selection, consumer)))
    yield ConsumerProblem(tuple(_check_order(names, layout, selection, consumer)))
    yield ConsumerProblem(tuple(_check_updates(layout, consumer)))
    yield _check_dtypes(layout, selection, consumer)
    yield _check_shapes(layout, selection, consumer)
    if has_wrong_output_count(layout, selection, consumer):
        yield ConsumerProblem((), "output_count")
    for check in consumer.checks:
        yield ConsumerProblem(tuple(check(layout, full_transfer)))


def check_sets(
    models: Sequence[KvModel],
    sets: Iterable[Sequence[int]],
    consumer: Consumer,
    updates: Mapping[str, Mapping[str, BufferUpdate]],
    *,
    full_transfer: bool,
) -> list[list[Finding]]:
    """Return the findings about each model, each checked together with its set.

    Args:
        models: The models, with the names that the consumer would see.
        sets: The indexes of models that the consumer receives together.
        consumer: The consumer.
        updates: For each model's path how its buffers are updated, by the names of outputs.
        full_transfer: Whether the consumer moves all of each buffer.

    Raises:
        ModelError: Two models of a set have the same buffer.
    """
    findings: list[list[Finding]] = [[] for _ in models]
    for indexes in sets:
        layout = apply_updates(build_layout([models[index] for index in indexes]), updates)
        for finding in check_consumer(layout, consumer, full_transfer=full_transfer):
            owner = layout.models.index(find_owning_model(layout, finding.name))
            findings[indexes[owner]].append(finding)
    return findings


def find_owning_model(layout: Layout, name: str) -> str:
    """Return the model with the buffer of this name, or the layout's first if there is none."""
    models = (buffer.model for buffer in layout.buffers if name in buffer.names)
    return next(models, layout.models[0])


def format_rename_command(layout: Layout, consumer: Consumer, *options: str) -> str:
    """Return the command that gives a layout's models the names that a consumer selects."""
    model = shlex.quote(layout.models[0]) if len(layout.models) == 1 else "MODEL..."
    return " ".join(("onnxkvrename", model, "--target", consumer.name, *options))


def is_empty_shape(shape: Shape) -> bool:
    """Return whether a sequence has no element of this shape, whose first axis is the batch."""
    return any(isinstance(dim, int) and dim < 1 for dim in shape[1:])


def describe_content(buffer: KvBuffer) -> str:
    """Return why a cut to the prompt's length loses a part of a buffer: ``is a state``."""
    if buffer.is_state:
        return "is a state"
    if buffer.traits.grows_with == "encoder":
        return "holds what the encoder wrote"
    if buffer.has_no_prompt_axis:
        return "is written once, whatever the prompt"
    return "has its context on another axis"


def format_similar_count(names: Sequence[str]) -> str:
    """Return how many names there are besides the first: ``, like 7 more``, or nothing."""
    return f", like {len(names) - 1} more" if len(names) > 1 else ""


def count_appended_outputs(layout: Layout, consumer: Consumer) -> int:
    """Return how many outputs prefill adds to those of buffers."""
    is_appended = consumer.is_appended_output
    if is_appended is None:
        return 0
    return sum(is_appended(value.name) for value in layout.outputs)


def has_wrong_output_count(layout: Layout, selection: Selection, consumer: Consumer) -> bool:
    """Return whether prefill would stop as it has not as many outputs as inputs.

    Prefill appends outputs to those of buffers and drops the last of all. The rest must be as
    many as the inputs, or one more. Only prefill counts them.
    """
    if consumer.is_appended_output is None or not selection.inputs:
        return False
    outputs = len(selection.outputs) + count_appended_outputs(layout, consumer) - 1
    return outputs - len(selection.inputs) not in (0, 1)


def _list_buffer_names(layout: Layout, consumer: Consumer) -> Iterator[_BufferName]:
    for buffer in layout.buffers:
        if buffer.input is not None:
            is_selected = consumer.selects_input(buffer.input)
            yield _BufferName(buffer, buffer.input, "input", is_selected)
        if buffer.output is not None:
            is_selected = consumer.selects_output(buffer.output)
            yield _BufferName(buffer, buffer.output, "output", is_selected)


def _check_unselected_names(
    names: Sequence[_BufferName], layout: Layout, consumer: Consumer
) -> Iterator[Finding]:
    """Yield KV601, once for all names that are not selected for the same reason."""
    selected = {each.name for each in names if each.is_selected}
    groups: dict[tuple[str, str, str], list[str]] = {}
    for each in names:
        if each.name not in selected:
            is_half = any(name in selected for name in each.buffer.names)
            where = f"its {each.side} only" if is_half else "both sides"
            groups.setdefault((*_explain_unselected(each, consumer), where), []).append(each.name)
    for (reason, option, where), unselected in groups.items():
        lost = "is handed over" if where == "both sides" else "pairs"
        yield build_finding(
            "KV601",
            unselected[0],
            f"{reason}, on {where}{format_similar_count(unselected)}: {consumer.name} does not "
            f"select it, and nothing of it {lost}",
            format_rename_command(layout, consumer, *option.split()),
        )


def _explain_unselected(unselected: _BufferName, consumer: Consumer) -> tuple[str, str]:
    """Return why a name is not selected, and the option of a rename that changes this."""
    if consumer.token in unselected.name:
        return "carries the token, but ends otherwise than what is selected", "--normalize"
    if consumer.token.lower() in unselected.name.lower():
        return f"carries {consumer.token} with other capitals", "--replace"
    if unselected.buffer.token != "":
        return f"carries another token than {consumer.token}", "--replace"
    return f"does not carry {consumer.token}", ""


def _check_output_suffixes(layout: Layout, consumer: Consumer) -> Iterator[Finding]:
    """Yield KV602 for selected outputs from whose names no input name is derived."""
    names = [
        buffer.output
        for buffer in layout.buffers
        if buffer.output is not None
        and consumer.selects_output(buffer.output)
        and consumer.input_name_of(buffer.output) == buffer.output
    ]
    if names:
        yield build_finding(
            "KV602",
            names[0],
            f"is selected{format_similar_count(names)}, but its end is not what {consumer.name} "
            "takes off, so that it never goes by its input's name",
            format_rename_command(layout, consumer, "--normalize"),
        )


def _check_unreadable_layers(
    names: Sequence[_BufferName], selection: Selection, consumer: Consumer
) -> Iterator[Finding]:
    """Yield KV603 for the buffers in whose names the consumer cannot read a layer."""
    unreadable = {each.value.name for each in selection.unreadable}
    affected = [each.name for each in names if each.is_selected and each.name in unreadable]
    if affected:
        yield build_finding(
            "KV603",
            affected[0],
            f"has no number where {consumer.name} reads the layer"
            f"{format_similar_count(affected)}: it cannot start",
            _TEMPLATE_HINT,
        )


def _check_layer_numbers(
    names: Sequence[_BufferName], selection: Selection, consumer: Consumer
) -> Iterator[Finding]:
    """Yield KV603 for the buffers in whose names the consumer reads another layer."""
    unreadable = {each.value.name for each in selection.unreadable}
    wrong: list[tuple[_BufferName, int]] = []
    for each in names:
        if each.is_selected and each.name not in unreadable:
            name = each.name if each.side == "input" else consumer.input_name_of(each.name)
            layer, _ = consumer.sort_key(name)
            if layer != each.buffer.layer:
                wrong.append((each, layer))
    if wrong:
        first, layer = wrong[0]
        more = format_similar_count([each.name for each, _ in wrong])
        yield build_finding(
            "KV603",
            first.name,
            f"is of layer {first.buffer.layer}, but {consumer.name} reads {layer}{more}: its order "
            "is not that of the layers",
            _TEMPLATE_HINT,
        )


def _check_order(
    names: Sequence[_BufferName], layout: Layout, selection: Selection, consumer: Consumer
) -> Iterator[Finding]:
    """Yield KV609, unless a name that is not selected or is not a KV buffer explains it."""
    if not selection.is_ordered or selection.is_paired:
        return
    if not all(each.is_selected for each in names) or find_non_kv_selected(layout, selection):
        return
    if len(selection.inputs) != len(selection.outputs):
        yield build_finding(
            "KV609",
            _find_unpaired_name(layout, selection),
            f"stands alone: {consumer.name} selects {len(selection.inputs)} inputs and "
            f"{len(selection.outputs)} outputs, and pairs them by position",
            "export the model again: a buffer needs both sides",
        )
        return
    pairs = zip(selection.inputs, selection.outputs, strict=True)
    for position, (selected_input, output) in enumerate(pairs):
        # One name on both sides is a broken graph (KV106), which no order repairs.
        if selected_input.value.name not in (output.graph_input_name, output.value.name):
            yield build_finding(
                "KV609",
                output.value.name,
                f"comes in place {position} of the outputs, where {selected_input.value.name} "
                f"stands among the inputs: {consumer.name} would hand it to that one",
                "both names of a buffer must sort alike: mend the templates in your rules "
                "(--rules FILE)",
            )
            return


def _check_updates(layout: Layout, consumer: Consumer) -> Iterator[Finding]:
    """Yield KV120, once for all buffers that change their size in the same way."""
    if consumer.needs_in_place is False:
        return
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
            needed_by=consumer.name if consumer.needs_in_place else None,
            more=len(others),
        )


def _find_unpaired_name(layout: Layout, selection: Selection) -> str:
    """Return a name of a buffer with one side only, or one that is on the wrong side as well."""
    single = (b.names[0] for b in layout.buffers if b.input is None or b.output is None)
    values = (*selection.inputs, *selection.outputs)
    return (*single, *(each.value.name for each in values if each.buffer is None))[0]


def _check_dtypes(layout: Layout, selection: Selection, consumer: Consumer) -> ConsumerProblem:
    """Find KV610: dtypes for which the consumer has no size."""
    names_of: dict[str, list[str]] = {}
    for buffer in find_selected_buffers(layout, consumer):
        if consumer.itemsize_of(buffer.dtype) is None:
            names_of.setdefault(buffer.dtype, []).append(buffer.names[0])
    findings = tuple(
        build_finding(
            "KV610",
            names[0],
            f"is {dtype}{format_similar_count(names)}, of which {consumer.name} does not know the "
            "size",
            "compile it to another precision, and check with its file: --custom-io FILE",
        )
        for dtype, names in names_of.items()
    )
    values = (v for v in selection.inputs if consumer.itemsize_of(v.value.dtype) is None)
    return ConsumerProblem(findings, "dtype", tuple(values))


def _check_shapes(layout: Layout, selection: Selection, consumer: Consumer) -> ConsumerProblem:
    """Find KV610: shapes from which the consumer cannot compute bytes.

    An axis without a name or a size only matters for what is handed over: `compare` cannot be
    given its size.
    """
    names = [
        buffer.names[0]
        for buffer in find_selected_buffers(layout, consumer)
        if not buffer.shape or is_empty_shape(buffer.shape)
    ]
    findings: tuple[Finding, ...] = ()
    if names:
        finding = build_finding(
            "KV610",
            names[0],
            f"has no shape that tells its bytes{format_similar_count(names)}",
            "export the model again, with shapes",
        )
        findings = (finding,)
    shapes = ((each, each.value.shape) for each in selection.inputs)
    values = (v for v, shape in shapes if not shape or None in shape[1:] or is_empty_shape(shape))
    return ConsumerProblem(findings, "shape", tuple(values))
