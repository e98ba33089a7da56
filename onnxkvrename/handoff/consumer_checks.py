"""What a consumer makes of a layout: what it selects, in which order, and what goes wrong.

What is found here goes for every consumer that selects by name; what goes for one
only is in its own module.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.findings import Finding, finding
from onnxkvrename.handoff.consumer import Target
from onnxkvrename.layout import layout as layouts
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import Buffer, Layout, Source
from onnxkvrename.model.signature import Value


class Selection(NamedTuple):
    """What a consumer selects, each side in its order: it pairs the two by position.

    ``partners`` are the inputs' names that the outputs belong to in the graph.
    ``ordered`` is false where it can read no order in the names; then both sides
    are as they stand in the graph.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    partners: tuple[str, ...]
    ordered: bool

    @property
    def paired(self) -> bool:
        """Whether every output meets its own input."""
        return tuple(value.name for value in self.inputs) == self.partners

    @property
    def slots(self) -> tuple[tuple[Value | None, Value | None], ...]:
        """Inputs and outputs as the consumer brings them together."""
        count = max(len(self.inputs), len(self.outputs))
        rest = (None,) * count
        inputs, outputs = (*self.inputs, *rest)[:count], (*self.outputs, *rest)[:count]
        return tuple(zip(inputs, outputs, strict=True))


class _Side(NamedTuple):
    """One name of a buffer, and whether it is that of its input or its output."""

    buffer: Buffer
    name: str
    side: str


def selection(layout: Layout, target: Target) -> Selection:
    """What a consumer selects of a layout, strangers that carry its token among it."""
    partners = {
        buffer.output: buffer.input
        for buffer in layout.buffers
        if buffer.input is not None and buffer.output is not None
    }
    inputs = [value for value in layout.inputs if target.takes(value.name)]
    outputs = [value for value in layout.outputs if target.gives(value.name)]
    ordered = True
    try:
        inputs.sort(key=lambda value: target.key(value.name))
        outputs.sort(key=lambda value: target.key(target.paired(value.name)))
    except ValueError:
        ordered = False
        inputs = [value for value in layout.inputs if target.takes(value.name)]
        outputs = [value for value in layout.outputs if target.gives(value.name)]
    names = (partners.get(value.name, target.paired(value.name)) for value in outputs)
    return Selection(tuple(inputs), tuple(outputs), tuple(names), ordered)


def selected(layout: Layout, target: Target) -> tuple[Buffer, ...]:
    """The buffers whose inputs a consumer selects."""
    return tuple(b for b in layout.buffers if b.input is not None and target.takes(b.input))


def families(layout: Layout, values: Iterable[Value]) -> frozenset[tuple[Shape | None, str]]:
    """The distinct shapes and dtypes of values, with the sizes that are known."""
    return frozenset(
        (None if value.shape is None else layout.sized(value.shape), value.dtype)
        for value in values
    )


def hybrid(layout: Layout, target: Target) -> bool:
    """Whether what is selected has more than one shape or dtype."""
    return len(families(layout, selection(layout, target).inputs)) > 1


def strangers(layout: Layout, target: Target) -> tuple[Value, ...]:
    """What a consumer selects that is no KV buffer: inputs first."""
    known = {name for buffer in layout.buffers for name in buffer.names}
    chosen = selection(layout, target)
    return tuple(v for v in (*chosen.inputs, *chosen.outputs) if v.name not in known)


def check(layout: Layout, target: Target, *, whole: bool = False) -> Iterator[Finding]:
    """What would go wrong with a layout; ``whole`` says that all of each buffer is moved."""
    if not layout.buffers:
        return
    yield from _unselected(layout, target)
    yield from _unpaired(layout, target)
    yield from _layers(layout, target)
    yield from _order(layout, target)
    yield from _unmovable(layout, target)
    for one in target.checks:
        yield from one(layout, whole)


def foreseen(
    sources: Sequence[Source], sets: Iterable[Sequence[int]], target: Target, *, whole: bool
) -> list[list[Finding]]:
    """What would go wrong with each of ``sets`` of sources, for each source its own.

    Raises :class:`ModelError` where two sources of a set have the same buffer.
    """
    findings: list[list[Finding]] = [[] for _ in sources]
    for numbers in sets:
        layout = layouts.layout([sources[number] for number in numbers])
        for found in check(layout, target, whole=whole):
            findings[numbers[layout.models.index(owner(layout, found.name))]].append(found)
    return findings


def owner(layout: Layout, name: str) -> str:
    """The model that a finding with this name is about: the first, unless it is a buffer's."""
    models = (buffer.model for buffer in layout.buffers if name in buffer.names)
    return next(models, layout.models[0])


def command(layout: Layout, target: Target, *options: str) -> str:
    """The rename that gives a layout's models the names that a consumer looks for."""
    model = shlex.quote(layout.models[0]) if len(layout.models) == 1 else "MODEL..."
    return " ".join(("onnxkvrename", model, "--target", target.name, *options))


def empty(shape: Shape) -> bool:
    """Whether a sequence has nothing of this shape: one of its sizes is below 1."""
    return any(isinstance(dim, int) and dim < 1 for dim in shape[1:])


def counted(names: Sequence[str]) -> str:
    """How many such names there are, where there are more than the one that is shown."""
    return f", like {len(names) - 1} more" if len(names) > 1 else ""


def _sides(layout: Layout) -> Iterator[_Side]:
    for buffer in layout.buffers:
        if buffer.input is not None:
            yield _Side(buffer, buffer.input, "input")
        if buffer.output is not None:
            yield _Side(buffer, buffer.output, "output")


def _chosen(one: _Side, target: Target) -> bool:
    return target.takes(one.name) if one.side == "input" else target.gives(one.name)


def _unselected(layout: Layout, target: Target) -> Iterator[Finding]:
    """KV601, one finding for all names that lack the token in the same way."""
    sides = list(_sides(layout))
    chosen = {one.name for one in sides if _chosen(one, target)}
    found: dict[tuple[str, str, str], list[str]] = {}
    for one in sides:
        if one.name not in chosen:
            half = any(name in chosen for name in one.buffer.names)
            where = f"its {one.side} only" if half else "both sides"
            found.setdefault((*_lack(one, target), where), []).append(one.name)
    for (reason, option, where), names in found.items():
        lost = "is handed over" if where == "both sides" else "pairs"
        yield finding(
            "KV601",
            names[0],
            f"{reason}, on {where}{counted(names)}: {target.name} does not select it, and nothing "
            f"of it {lost}",
            command(layout, target, *option.split()),
        )


def _lack(one: _Side, target: Target) -> tuple[str, str]:
    """Why a name is not selected, and what a rename needs to mend it."""
    if target.token in one.name:
        return "carries the token, but ends otherwise than what is selected", "--normalize"
    if target.token.lower() in one.name.lower():
        return f"carries {target.token} with other capitals", "--replace"
    if one.buffer.token != "":
        return f"carries another token than {target.token}", "--replace"
    return f"does not carry {target.token}", ""


def _unpaired(layout: Layout, target: Target) -> Iterator[Finding]:
    """KV602, an output whose end the consumer does not take off."""
    names = [
        buffer.output
        for buffer in layout.buffers
        if buffer.output is not None
        and target.gives(buffer.output)
        and target.paired(buffer.output) == buffer.output
    ]
    if names:
        yield finding(
            "KV602",
            names[0],
            f"is selected{counted(names)}, but its end is not what {target.name} takes off, so "
            "that it never goes by its input's name",
            command(layout, target, "--normalize"),
        )


def _layers(layout: Layout, target: Target) -> Iterator[Finding]:
    """KV603, for names in which the consumer reads no layer, and for those with another one."""
    unread, other = list[str](), list[tuple[str, int, int]]()
    for one in _sides(layout):
        if _chosen(one, target):
            name = one.name if one.side == "input" else target.paired(one.name)
            try:
                layer = target.key(name)[0]
            except ValueError:
                unread.append(one.name)
                continue
            if layer != one.buffer.layer:
                other.append((one.name, layer, one.buffer.layer))
    hint = "mend the template in your rules (--rules FILE): the consumer expects another place"
    if unread:
        yield finding(
            "KV603",
            unread[0],
            f"has no number where {target.name} reads the layer{counted(unread)}: it cannot start",
            hint,
        )
    if other:
        name, read, layer = other[0]
        more = counted([one for one, _, _ in other])
        yield finding(
            "KV603",
            name,
            f"is of layer {layer}, but {target.name} reads {read}{more}: its order is not that of "
            "the layers",
            hint,
        )


def _order(layout: Layout, target: Target) -> Iterator[Finding]:
    """KV609, unless a side that is not selected or a stranger is what is to blame."""
    chosen = selection(layout, target)
    half = any(not _chosen(one, target) for one in _sides(layout))
    if not chosen.ordered or chosen.paired or half or strangers(layout, target):
        return
    if len(chosen.inputs) != len(chosen.outputs):
        yield finding(
            "KV609",
            _lone(layout, chosen),
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
            if value.name not in (chosen.partners[number], output.name)
        ),
        None,
    )
    if at is None:
        return
    yield finding(
        "KV609",
        chosen.outputs[at].name,
        f"comes in place {at} of the outputs, where {chosen.inputs[at].name} stands among the "
        f"inputs: {target.name} would hand it to that one",
        "both names of a buffer must sort alike: mend the templates in your rules (--rules FILE)",
    )


def _lone(layout: Layout, chosen: Selection) -> str:
    """A name that has no partner: of a buffer with one side, or an output among the inputs."""
    single = (b.names[0] for b in layout.buffers if b.input is None or b.output is None)
    given = {buffer.input for buffer in layout.buffers}
    made = {buffer.output for buffer in layout.buffers}
    strays = (
        *(value.name for value in chosen.inputs if value.name not in given),
        *(value.name for value in chosen.outputs if value.name not in made),
    )
    return (*single, *strays)[0]


def _unmovable(layout: Layout, target: Target) -> Iterator[Finding]:
    """KV610, what has no bytes for the consumer: by dtype, and by shape."""
    dtypes: dict[str, list[str]] = {}
    shapeless = list[str]()
    for buffer in selected(layout, target):
        assert buffer.input is not None
        if target.itemsize(buffer.dtype) is None:
            dtypes.setdefault(buffer.dtype, []).append(buffer.input)
        if not buffer.shape or empty(buffer.shape):
            shapeless.append(buffer.input)
    for dtype, names in dtypes.items():
        yield finding(
            "KV610",
            names[0],
            f"is {dtype}{counted(names)}, of which {target.name} does not know the size",
            "compile it to another precision, and check with its file: --custom-io FILE",
        )
    if shapeless:
        yield finding(
            "KV610",
            shapeless[0],
            f"has no shape that tells its bytes{counted(shapeless)}",
            "export the model again, with shapes",
        )
