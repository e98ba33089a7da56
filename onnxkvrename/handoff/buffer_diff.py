"""Buffers of two sides, paired by layer and part, and how the two of a pair differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from onnxkvrename.findings import Finding, finding, listed
from onnxkvrename.handoff.slots import Ident, length_text
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.model.signature import Dim, shape_text
from onnxkvrename.rules.window_diff import layers_text

_HINTS = {
    "KV612": "compile both with the same precision, and give its --custom-io",
    "KV613": "export both from the same model, in the same way",
    "KV614": "export and compile both alike (enable_chunking, retain_full_kv, sliding_window)",
    "KV615": "export both with the same release of the exporter",
    "KV618": "compile both for the same context",
}
_DRAFTED = 3
"""The most layers of a draft model."""


class Twin(NamedTuple):
    """A buffer as prefill has it and as decode has it; a side that lacks it is ``None``."""

    prefill: Buffer | None
    decode: Buffer | None

    @property
    def any(self) -> Buffer:
        """Either of the two, prefill's if it is there."""
        found = self.prefill or self.decode
        assert found is not None
        return found

    @property
    def ident(self) -> Ident:
        """Its layer and part."""
        return self.any.layer, self.any.part

    @property
    def name(self) -> str:
        """What it is called, by the side that has it."""
        return self.any.names[0]


class Fault(NamedTuple):
    """How the two of a pair differ, in themselves.

    ``prefill`` and ``decode`` say what each has. ``certain`` is false where it takes
    a prompt of some length to tell. ``ask`` are the symbols whose sizes are wanted,
    ``option`` is what they are given with. ``windows`` are those of the two sides where
    both have one of a known size, in tokens.
    """

    code: str
    prefill: str
    decode: str
    certain: bool = True
    ask: tuple[str, ...] = ()
    option: str = "--dim"
    windows: tuple[int, int] | None = None

    @property
    def open(self) -> bool:
        """Whether the two may be alike, depending on sizes that are not known."""
        return bool(self.ask) and not self.certain


def twins(prefill: Layout, decode: Layout) -> tuple[Twin, ...]:
    """Every buffer of the two sides, in the order of layers."""
    mine, theirs = (
        {(buffer.layer, buffer.part): buffer for buffer in layout.buffers}
        for layout in (prefill, decode)
    )
    idents = dict.fromkeys((*mine, *theirs))
    pairs = [Twin(mine.get(ident), theirs.get(ident)) for ident in idents]
    return tuple(sorted(pairs, key=lambda twin: twin.any.layer))


def type_text(layout: Layout, buffer: Buffer) -> str:
    """Dtype and shape of what one sequence has: ``FLOAT16 [8, ctx_len=4096, 64]``."""
    if buffer.state is None:
        return buffer.dtype
    dims: list[Dim] = []
    for dim, size in zip(buffer.state, layout.sized(buffer.state), strict=True):
        dims.append(dim if dim == size else f"{dim}={size}")
    return f"{buffer.dtype} {shape_text(tuple(dims))}"


def faults(twin: Twin, prefill: Layout, decode: Layout, clipped: frozenset[int]) -> Iterator[Fault]:
    """How the two of a pair differ; ``clipped`` are the axes that are moved up to the prompt."""
    mine, theirs = twin
    if mine is None or theirs is None:
        return
    said = type_text(prefill, mine), type_text(decode, theirs)
    if mine.dtype != theirs.dtype:
        yield Fault("KV612", mine.dtype, theirs.dtype)
    if mine.state is None or theirs.state is None:
        return
    one, other = prefill.sized(mine.state), decode.sized(theirs.state)
    if len(one) != len(other):
        yield Fault("KV613", *said)
    elif _turned(mine, theirs, one, other):
        yield Fault("KV615", *said)
    else:
        told = _along(mine, theirs, one, other, clipped)
        yield from _first(fault._replace(prefill=said[0], decode=said[1]) for fault in told)


def _first(found: Iterable[Fault]) -> list[Fault]:
    """The gravest of what the axes show: what is certain before what is not."""
    return sorted(found, key=lambda one: (not one.certain, one.code))[:1]


def _turned(mine: Buffer, theirs: Buffer, one: Sequence[Dim], other: Sequence[Dim]) -> bool:
    """Whether the same sizes stand in another order; how long the context is does not matter."""
    if one == other:
        return False
    rests = [
        [dim for axis, dim in enumerate(dims, 1) if axis != buffer.sequence]
        for buffer, dims in ((mine, one), (theirs, other))
    ]
    if Counter(map(str, rests[0])) != Counter(map(str, rests[1])):
        return False
    return rests[0] != rests[1] or mine.sequence != theirs.sequence


def _along(
    mine: Buffer,
    theirs: Buffer,
    one: Sequence[Dim],
    other: Sequence[Dim],
    clipped: frozenset[int],
) -> Iterator[Fault]:
    """Axis by axis: what differs, whether it is certain, and what is to be asked."""
    for axis, (a, b) in enumerate(zip(one, other, strict=True), 1):
        if a == b:
            continue
        known = isinstance(a, int) and isinstance(b, int)
        ask = tuple(dim for dim in (a, b) if isinstance(dim, str))
        option = _option(a, b)
        if not all(_grows(buffer, axis) for buffer in (mine, theirs)):
            yield Fault("KV613" if known else "KV618", "", "", known, ask, option)
        elif mine.window is not None or theirs.window is not None:
            windows = [side.window for side in (mine, theirs) if side.window is not None]
            unknown = tuple(dict.fromkeys(str(symbol) for symbol in windows if symbol in ask))
            one_sided = len(windows) == 1 and (bool(unknown) or axis not in clipped)
            certain = one_sided or (known and axis not in clipped)
            two = (
                (a, b) if isinstance(a, int) and isinstance(b, int) and len(windows) == 2 else None
            )
            yield Fault("KV614", "", "", certain, unknown, option, two)
        elif axis not in clipped:
            yield Fault("KV618", "", "", known, ask, option)
        else:
            yield Fault("KV614", "", "", certain=False)


def _option(mine: Dim, theirs: Dim) -> str:
    """What sizes are given with: for one side only where the other has one already."""
    if isinstance(mine, int):
        return "--decode-dim"
    return "--prefill-dim" if isinstance(theirs, int) else "--dim"


def _grows(buffer: Buffer, axis: int) -> bool:
    """Whether a buffer may grow along an axis: one of fixed sizes does not say."""
    return buffer.sequence == axis or buffer.kind == "unknown"


def said(code: str, group: Sequence[tuple[Twin, Fault]], longer: int | None) -> Finding:
    """One finding for buffers that differ alike.

    ``longer`` is the longest prompt at which they do not show it, ``None`` where that is not known.
    """
    twin, fault = group[0]
    message = f"is {fault.prefill} on prefill and {fault.decode} on decode"
    message += others([twin for twin, _ in group])
    if fault.windows:
        message += ": windows of {} and {} tokens".format(*fault.windows)
    if code == "KV614" and longer:
        message += ", which" if fault.windows else ": they"
        message += f" differ for prompts longer than {length_text(longer)}"
    elif code == "KV614" and fault.ask and fault.certain and longer is None:
        message += f": they differ for prompts longer than {' or '.join(fault.ask)}"
    elif fault.open:
        message += ": whether they differ depends on the sizes"
    hint = _HINTS[code]
    if fault.ask:
        option = "--dim" if fault.certain else fault.option
        dims = " ".join(f"{option} {symbol}=SIZE" for symbol in fault.ask if symbol != "?")
        hint = f"{dims} says from which prompt length on" if fault.certain else f"give {dims}"
    return finding(code, twin.name, message, hint)


def windows_text(found: Finding) -> str:
    """What a KV614 is about, in general words; the sizes where it is two windows of known ones."""
    told = re.search(r": (windows of \d+ and \d+ tokens)(, which [^:]*)?$", found.message)
    return told[1] if told else "a window on one side, the whole context on the other"


def others(group: Sequence[Twin]) -> str:
    """How many buffers more, and of which layers they all are."""
    if len(group) == 1:
        return ""
    layers = layers_text(sorted({twin.any.layer for twin in group}))
    more = "so is 1 more" if len(group) == 2 else f"so are {len(group) - 1} more"
    return f", and {more} (of {layers})"


def missing(pairs: Sequence[Twin], *, alike: bool) -> Iterator[tuple[Finding, tuple[Twin, ...]]]:
    """Buffers on one side only. KV620 for those that may be a draft model's, otherwise KV611.

    They may be where one side has a few whole layers more, right behind the last of the
    other, fewer than both have, and all else is ``alike``: draft models that share a graph
    with their target have one layer, or up to three.
    """
    mine = {twin.any.layer for twin in pairs if twin.prefill is not None}
    theirs = {twin.any.layer for twin in pairs if twin.decode is not None}
    lacking = [twin for twin in pairs if None in twin]
    for side, other, layers in (("prefill", "decode", theirs), ("decode", "prefill", mine)):
        alone = [twin for twin in lacking if getattr(twin, other) is None]
        if not alone:
            continue
        text = f"{_whole(alone, layers)} on {side} only: {_parts(alone)}"
        if alike and alone == lacking and _drafted(alone, layers):
            text += f", right behind {other}'s last layer {max(layers)}"
            hint = "give both sides the draft model's layers, or neither; or one is cut short"
            yield finding("KV620", "", text, hint), tuple(alone)
        else:
            hint = "one side may be another model, cut short, or without some of its windows"
            yield finding("KV611", "", text, hint), tuple(alone)


def _drafted(alone: Sequence[Twin], layers: Set[int]) -> bool:
    """Whether layers that one side has alone may be those of a draft model."""
    more = sorted({twin.any.layer for twin in alone})
    last = max(layers, default=-1)
    return len(more) <= min(_DRAFTED, len(layers) - 1) and more == [
        *range(last + 1, last + 1 + len(more))
    ]


def _whole(alone: Sequence[Twin], layers: Set[int]) -> str:
    """The layers, with the parts where the other side has the rest: ``value of layer 1``."""
    text = layers_text(sorted({twin.any.layer for twin in alone}))
    if all(twin.any.layer not in layers for twin in alone):
        return text
    return f"{listed(list(dict.fromkeys(twin.any.part for twin in alone)))} of {text}"


def _parts(group: Sequence[Twin]) -> str:
    first = group[0]
    if len(group) == 1:
        return f"a buffer, {first.name}"
    parts = listed(list(dict.fromkeys(twin.any.part for twin in group)))
    return f"{len(group)} buffers ({parts}), {first.name} the first"
