"""Select the graph values that a consumer treats as KV buffers, in its order.

What it selects, beside the layout, is a `ConsumerView`: all checks and the hand-off start from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.layout.layout import KvBuffer, Layout, Shape
from onnxkvrename.model.signature import Value
from onnxkvrename.rules.request import Request

BufferId = tuple[int, str]
"""A buffer's layer and part; for a value that is not a KV buffer, -1 and its input name."""


class SelectedValue(NamedTuple):
    """A graph input or output that a consumer selects; without a buffer it is not a KV buffer.

    The consumer uses the `input_name` for it: the name of an input, or the input name that it
    derives from an output's.
    """

    value: Value
    buffer: KvBuffer | None
    input_name: str

    @property
    def buffer_id(self) -> BufferId:
        """The buffer's layer and part, or -1 and the input name without a buffer."""
        if self.buffer is None:
            return -1, self.input_name
        return self.buffer.layer, self.buffer.part

    @property
    def graph_input_name(self) -> str:
        """The name of the buffer's input in the graph, or `input_name` if there is none."""
        if self.buffer is None or self.buffer.input is None:
            return self.input_name
        return self.buffer.input


class Selection(NamedTuple):
    """The inputs and outputs that a consumer selects.

    Attributes:
        inputs: The selected inputs in the consumer's order, or in the graph's if it cannot sort.
        outputs: The selected outputs, likewise.
        unreadable: The values in whose names the consumer cannot read a layer. If there are any,
            it cannot sort.
    """

    inputs: tuple[SelectedValue, ...]
    outputs: tuple[SelectedValue, ...]
    unreadable: tuple[SelectedValue, ...] = ()

    @property
    def is_ordered(self) -> bool:
        """True if the consumer can sort the values."""
        return not self.unreadable

    @property
    def is_paired(self) -> bool:
        """True if the consumer pairs each output with its own input."""
        return all(
            first is not None and second is not None and second.graph_input_name == first.value.name
            for first, second in zip_longest(self.inputs, self.outputs)
        )

    @property
    def value_pairs(self) -> tuple[tuple[Value | None, Value | None], ...]:
        """Inputs and outputs as the consumer pairs them; `None` for a missing partner."""
        return tuple(
            (None if first is None else first.value, None if second is None else second.value)
            for first, second in zip_longest(self.inputs, self.outputs)
        )


class BufferName(NamedTuple):
    """A name of a buffer, and its side of the graph: ``input`` or ``output``."""

    buffer: KvBuffer
    name: str
    side: str
    is_selected: bool


class ConsumerView(NamedTuple):
    """A layout as a consumer sees it, with the inputs and outputs that it selects.

    With `full_transfer` it moves all of each buffer, whatever the prompt. The `rename` makes the
    names those that it selects.
    """

    layout: Layout
    consumer: Consumer
    selection: Selection
    full_transfer: bool
    rename: Request

    @property
    def buffers(self) -> tuple[KvBuffer, ...]:
        """The buffers whose inputs are selected, in the layout's order."""
        selects = self.consumer.selects_input
        return tuple(b for b in self.layout.buffers if b.input is not None and selects(b.input))

    @property
    def buffer_names(self) -> tuple[BufferName, ...]:
        """All names of KV buffers, each with whether it is selected."""
        selects = {"input": self.consumer.selects_input, "output": self.consumer.selects_output}
        return tuple(
            BufferName(buffer, name, side, bool(selects[side](name)))
            for buffer in self.layout.buffers
            for side, name in (("input", buffer.input), ("output", buffer.output))
            if name is not None
        )

    @property
    def non_kv_values(self) -> tuple[SelectedValue, ...]:
        """The selected values that do not have the name of a KV buffer, inputs first."""
        kv_names = {name for buffer in self.layout.buffers for name in buffer.names}
        values = (*self.selection.inputs, *self.selection.outputs)
        return tuple(each for each in values if each.value.name not in kv_names)

    @property
    def underived_outputs(self) -> list[str]:
        """The selected outputs of buffers from whose names the consumer derives no input name."""
        outputs = (b.output for b in self.layout.buffers if b.output is not None)
        selects, derive = self.consumer.selects_output, self.consumer.input_name_of
        return [name for name in outputs if selects(name) and derive(name) == name]

    @property
    def is_hybrid(self) -> bool:
        """Whether the selected inputs have more than one shape or dtype."""
        return len(find_distinct_types(self.layout, self.selection.inputs)) > 1


def build_view(
    layout: Layout,
    consumer: Consumer,
    full_transfer: bool = False,
    rename: Request | None = None,
) -> ConsumerView:
    """Return a layout as a consumer sees it; by default a rename would be one of its models."""
    models = tuple(map(Path, (*layout.models, *layout.other_stages)))
    rename = rename or Request(models, target=consumer.name)
    selection = select_values(layout, consumer)
    return ConsumerView(layout, consumer, selection, full_transfer, rename)


def select_values(layout: Layout, consumer: Consumer) -> Selection:
    """Return the inputs and outputs that a consumer selects, also those that are not KV buffers."""
    inputs_to_buffers = {buffer.input: buffer for buffer in layout.buffers}
    outputs_to_buffers = {buffer.output: buffer for buffer in layout.buffers}
    inputs = [
        SelectedValue(value, inputs_to_buffers.get(value.name), value.name)
        for value in layout.inputs
        if consumer.selects_input(value.name)
    ]
    outputs = [
        SelectedValue(value, outputs_to_buffers.get(value.name), consumer.input_name_of(value.name))
        for value in layout.outputs
        if consumer.selects_output(value.name)
    ]
    keys = _read_sort_keys((*inputs, *outputs), consumer.sort_key)
    unreadable = tuple(each for each in (*inputs, *outputs) if each.input_name not in keys)
    if not unreadable:
        inputs.sort(key=lambda each: keys[each.input_name])
        outputs.sort(key=lambda each: keys[each.input_name])
    return Selection(tuple(inputs), tuple(outputs), unreadable)


def _read_sort_keys(
    values: Iterable[SelectedValue], sort_key: Callable[[str], tuple[int, str]]
) -> Mapping[str, tuple[int, str]]:
    """Return the sort key of each input name in which the consumer can read a layer."""
    keys: dict[str, tuple[int, str]] = {}
    for each in values:
        try:
            keys[each.input_name] = sort_key(each.input_name)
        except ValueError:
            continue
    return keys


def find_misnamed_logits(layout: Layout) -> str:
    """Return the first output that is called logits at another place than the beginning."""
    return next((each.name for each in layout.outputs if "logits" in each.name.lower()), "")


def find_unselected_buffers(
    values: Iterable[SelectedValue], buffers: Iterable[KvBuffer]
) -> tuple[KvBuffer, ...]:
    """Return the buffers that are not among the selected values."""
    selected_ids = {each.buffer_id for each in values}
    return tuple(b for b in buffers if (b.layer, b.part) not in selected_ids)


def find_distinct_types(
    layout: Layout, values: Sequence[SelectedValue]
) -> frozenset[tuple[Shape | None, str]]:
    """Return the distinct shapes and dtypes of values, with known sizes for symbols."""
    return frozenset(
        (None if value.shape is None else layout.resolve_shape(value.shape), value.dtype)
        for value in (each.value for each in values)
    )
