"""What a consumer makes of a layout: what it selects, in which order, and what goes wrong.

What is found here goes for every consumer that selects by name; what goes for one
only is in its own module.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import Buffer, Layout, build_layout
from onnxkvrename.model.signature import Value
from onnxkvrename.rules.kv_model import KvModel


class Selection(NamedTuple):
    """What a consumer selects, each side in its order: it pairs the two by position.

    ``partners`` are the inputs' names that the outputs belong to in the graph.
    ``ordered`` is false where it can read no order in the names; then both sides
    are as they stand in the graph.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    partner_names: tuple[str, ...]
    ordered: bool

    @property
    def is_paired(self) -> bool:
        """Whether every output meets its own input."""
        return tuple(value.name for value in self.inputs) == self.partner_names

    @property
    def positional_pairs(self) -> tuple[tuple[Value | None, Value | None], ...]:
        """Inputs and outputs as the consumer brings them together."""
        count = max(len(self.inputs), len(self.outputs))
        rest = (None,) * count
        inputs, outputs = (*self.inputs, *rest)[:count], (*self.outputs, *rest)[:count]
        return tuple(zip(inputs, outputs, strict=True))


class _BufferName(NamedTuple):
    """One name of a buffer, and whether it is that of its input or its output."""

    buffer: Buffer
    name: str
    side: str


def select_values(layout: Layout, target: Consumer) -> Selection:
    """What a consumer selects of a layout, strangers that carry its token among it."""
    partners = {
        buffer.output: buffer.input
        for buffer in layout.buffers
        if buffer.input is not None and buffer.output is not None
    }
    inputs = [value for value in layout.inputs if target.selects_input(value.name)]
    outputs = [value for value in layout.outputs if target.selects_output(value.name)]
    ordered = True
    try:
        inputs.sort(key=lambda value: target.sort_key(value.name))
        outputs.sort(key=lambda value: target.sort_key(target.input_name_of(value.name)))
    except ValueError:
        ordered = False
        inputs = [value for value in layout.inputs if target.selects_input(value.name)]
        outputs = [value for value in layout.outputs if target.selects_output(value.name)]
    names = (partners.get(value.name, target.input_name_of(value.name)) for value in outputs)
    return Selection(tuple(inputs), tuple(outputs), tuple(names), ordered)


def find_selected_buffers(layout: Layout, target: Consumer) -> tuple[Buffer, ...]:
    """The buffers whose inputs a consumer selects."""
    return tuple(b for b in layout.buffers if b.input is not None and target.selects_input(b.input))


def find_distinct_types(
    layout: Layout, values: Iterable[Value]
) -> frozenset[tuple[Shape | None, str]]:
    """The distinct shapes and dtypes of values, with the sizes that are known."""
    return frozenset(
        (None if value.shape is None else layout.resolve_shape(value.shape), value.dtype)
        for value in values
    )


def is_hybrid(layout: Layout, target: Consumer) -> bool:
    """Whether what is selected has more than one shape or dtype."""
    return len(find_distinct_types(layout, select_values(layout, target).inputs)) > 1


def find_non_kv_selected(layout: Layout, target: Consumer) -> tuple[Value, ...]:
    """What a consumer selects that is no KV buffer: inputs first."""
    known = {name for buffer in layout.buffers for name in buffer.names}
    chosen = select_values(layout, target)
    return tuple(v for v in (*chosen.inputs, *chosen.outputs) if v.name not in known)


def check_consumer(layout: Layout, target: Consumer, *, whole: bool = False) -> Iterator[Finding]:
    """What would go wrong with a layout; ``whole`` says that all of each buffer is moved."""
    if not layout.buffers:
        return
    yield from _check_unselected_names(layout, target)
    yield from _check_output_suffixes(layout, target)
    yield from _check_layer_numbers(layout, target)
    yield from _check_order(layout, target)
    yield from _check_byte_sizes(layout, target)
    for one in target.checks:
        yield from one(layout, whole)


def check_sets(
    sources: Sequence[KvModel], sets: Iterable[Sequence[int]], target: Consumer, *, whole: bool
) -> list[list[Finding]]:
    """What would go wrong with each of ``sets`` of sources, for each source its own.

    Raises :class:`ModelError` where two sources of a set have the same buffer.
    """
    findings: list[list[Finding]] = [[] for _ in sources]
    for numbers in sets:
        layout = build_layout([sources[number] for number in numbers])
        for found in check_consumer(layout, target, whole=whole):
            findings[numbers[layout.models.index(find_owning_model(layout, found.name))]].append(
                found
            )
    return findings


def find_owning_model(layout: Layout, name: str) -> str:
    """The model that a finding with this name is about: the first, unless it is a buffer's."""
    models = (buffer.model for buffer in layout.buffers if name in buffer.names)
    return next(models, layout.models[0])


def format_rename_command(layout: Layout, target: Consumer, *options: str) -> str:
    """The rename that gives a layout's models the names that a consumer looks for."""
    model = shlex.quote(layout.models[0]) if len(layout.models) == 1 else "MODEL..."
    return " ".join(("onnxkvrename", model, "--target", target.name, *options))


def is_empty_shape(shape: Shape) -> bool:
    """Whether a sequence has nothing of this shape: one of its sizes is below 1."""
    return any(isinstance(dim, int) and dim < 1 for dim in shape[1:])


def format_similar_count(names: Sequence[str]) -> str:
    """How many such names there are, where there are more than the one that is shown."""
    return f", like {len(names) - 1} more" if len(names) > 1 else ""


def _list_buffer_names(layout: Layout) -> Iterator[_BufferName]:
    for buffer in layout.buffers:
        if buffer.input is not None:
            yield _BufferName(buffer, buffer.input, "input")
        if buffer.output is not None:
            yield _BufferName(buffer, buffer.output, "output")


def _is_selected(one: _BufferName, target: Consumer) -> bool:
    return (
        target.selects_input(one.name) if one.side == "input" else target.selects_output(one.name)
    )


def _check_unselected_names(layout: Layout, target: Consumer) -> Iterator[Finding]:
    """KV601, one finding for all names that lack the token in the same way."""
    sides = list(_list_buffer_names(layout))
    chosen = {one.name for one in sides if _is_selected(one, target)}
    found: dict[tuple[str, str, str], list[str]] = {}
    for one in sides:
        if one.name not in chosen:
            half = any(name in chosen for name in one.buffer.names)
            where = f"its {one.side} only" if half else "both sides"
            found.setdefault((*_explain_unselected(one, target), where), []).append(one.name)
    for (reason, option, where), names in found.items():
        lost = "is handed over" if where == "both sides" else "pairs"
        yield build_finding(
            "KV601",
            names[0],
            f"{reason}, on {where}{format_similar_count(names)}: {target.name} does not select it, and nothing "
            f"of it {lost}",
            format_rename_command(layout, target, *option.split()),
        )


def _explain_unselected(one: _BufferName, target: Consumer) -> tuple[str, str]:
    """Why a name is not selected, and what a rename needs to mend it."""
    if target.token in one.name:
        return "carries the token, but ends otherwise than what is selected", "--normalize"
    if target.token.lower() in one.name.lower():
        return f"carries {target.token} with other capitals", "--replace"
    if one.buffer.token != "":
        return f"carries another token than {target.token}", "--replace"
    return f"does not carry {target.token}", ""


def _check_output_suffixes(layout: Layout, target: Consumer) -> Iterator[Finding]:
    """KV602, an output whose end the consumer does not take off."""
    names = [
        buffer.output
        for buffer in layout.buffers
        if buffer.output is not None
        and target.selects_output(buffer.output)
        and target.input_name_of(buffer.output) == buffer.output
    ]
    if names:
        yield build_finding(
            "KV602",
            names[0],
            f"is selected{format_similar_count(names)}, but its end is not what {target.name} takes off, so "
            "that it never goes by its input's name",
            format_rename_command(layout, target, "--normalize"),
        )


def _check_layer_numbers(layout: Layout, target: Consumer) -> Iterator[Finding]:
    """KV603, for names in which the consumer reads no layer, and for those with another one."""
    unread, other = list[str](), list[tuple[str, int, int]]()
    for one in _list_buffer_names(layout):
        if _is_selected(one, target):
            name = one.name if one.side == "input" else target.input_name_of(one.name)
            try:
                layer = target.sort_key(name)[0]
            except ValueError:
                unread.append(one.name)
                continue
            if layer != one.buffer.layer:
                other.append((one.name, layer, one.buffer.layer))
    hint = "mend the template in your rules (--rules FILE): the consumer expects another place"
    if unread:
        yield build_finding(
            "KV603",
            unread[0],
            f"has no number where {target.name} reads the layer{format_similar_count(unread)}: it cannot start",
            hint,
        )
    if other:
        name, read, layer = other[0]
        more = format_similar_count([one for one, _, _ in other])
        yield build_finding(
            "KV603",
            name,
            f"is of layer {layer}, but {target.name} reads {read}{more}: its order is not that of "
            "the layers",
            hint,
        )


def _check_order(layout: Layout, target: Consumer) -> Iterator[Finding]:
    """KV609, unless a side that is not selected or a stranger is what is to blame."""
    chosen = select_values(layout, target)
    half = any(not _is_selected(one, target) for one in _list_buffer_names(layout))
    if not chosen.ordered or chosen.is_paired or half or find_non_kv_selected(layout, target):
        return
    if len(chosen.inputs) != len(chosen.outputs):
        yield build_finding(
            "KV609",
            _find_unpaired_name(layout, chosen),
            f"stands alone: {target.name} selects {len(chosen.inputs)} inputs and "
            f"{len(chosen.outputs)} outputs, and pairs them by position",
            "export the model again: a buffer needs both sides",
        )
        return
    # One name on both is a broken graph (KV106): no order would mend it.
    at = next(
        (
            number
            for number, (value, output) in enumerate(
                zip(chosen.inputs, chosen.outputs, strict=True)
            )
            if value.name not in (chosen.partner_names[number], output.name)
        ),
        None,
    )
    if at is None:
        return
    yield build_finding(
        "KV609",
        chosen.outputs[at].name,
        f"comes in place {at} of the outputs, where {chosen.inputs[at].name} stands among the "
        f"inputs: {target.name} would hand it to that one",
        "both names of a buffer must sort alike: mend the templates in your rules (--rules FILE)",
    )


def _find_unpaired_name(layout: Layout, chosen: Selection) -> str:
    """A name that has no partner: of a buffer with one side, or an output among the inputs."""
    single = (b.names[0] for b in layout.buffers if b.input is None or b.output is None)
    given = {buffer.input for buffer in layout.buffers}
    made = {buffer.output for buffer in layout.buffers}
    strays = (
        *(value.name for value in chosen.inputs if value.name not in given),
        *(value.name for value in chosen.outputs if value.name not in made),
    )
    return (*single, *strays)[0]


def _check_byte_sizes(layout: Layout, target: Consumer) -> Iterator[Finding]:
    """KV610, what has no bytes for the consumer: by dtype, and by shape."""
    dtypes: dict[str, list[str]] = {}
    shapeless = list[str]()
    for buffer in find_selected_buffers(layout, target):
        assert buffer.input is not None
        if target.itemsize_of(buffer.dtype) is None:
            dtypes.setdefault(buffer.dtype, []).append(buffer.input)
        if not buffer.shape or is_empty_shape(buffer.shape):
            shapeless.append(buffer.input)
    for dtype, names in dtypes.items():
        yield build_finding(
            "KV610",
            names[0],
            f"is {dtype}{format_similar_count(names)}, of which {target.name} does not know the size",
            "compile it to another precision, and check with its file: --custom-io FILE",
        )
    if shapeless:
        yield build_finding(
            "KV610",
            shapeless[0],
            f"has no shape that tells its bytes{format_similar_count(shapeless)}",
            "export the model again, with shapes",
        )
