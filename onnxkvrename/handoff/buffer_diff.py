"""Buffers of two sides, paired by layer and part, and how the two of a pair differ."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.handoff.slots import BufferId, format_token_count
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.model.signature import Dim, format_shape
from onnxkvrename.rules.window_diff import format_layers

_HINTS = {
    "KV612": "compile both with the same precision, and give its --custom-io",
    "KV613": "export both from the same model, in the same way",
    "KV614": "export and compile both alike (enable_chunking, retain_full_kv, sliding_window)",
    "KV615": "export both with the same release of the exporter",
    "KV618": "compile both for the same context",
}
_MAX_DRAFT_LAYERS = 3
"""The most layers of a draft model."""


class BufferPair(NamedTuple):
    """A buffer as prefill has it and as decode has it; a side that lacks it is ``None``."""

    prefill: Buffer | None
    decode: Buffer | None

    @property
    def present_buffer(self) -> Buffer:
        """Either of the two, prefill's if it is there."""
        found = self.prefill or self.decode
        assert found is not None
        return found

    @property
    def buffer_id(self) -> BufferId:
        """Its layer and part."""
        return self.present_buffer.layer, self.present_buffer.part

    @property
    def name(self) -> str:
        """What it is called, by the side that has it."""
        return self.present_buffer.names[0]


class Difference(NamedTuple):
    """How the two of a pair differ, in themselves.

    ``prefill`` and ``decode`` say what each has. ``certain`` is false where it takes
    a prompt of some length to tell. ``ask`` are the symbols whose sizes are wanted,
    ``option`` is what they are given with. ``windows`` are those of the two sides where
    both have one of a known size, in tokens.
    """

    code: str
    prefill: str
    decode: str
    is_certain: bool = True
    needed_symbols: tuple[str, ...] = ()
    size_option: str = "--dim"
    window_sizes: tuple[int, int] | None = None

    @property
    def is_undecided(self) -> bool:
        """Whether the two may be alike, depending on sizes that are not known."""
        return bool(self.needed_symbols) and not self.is_certain


def pair_buffers(prefill: Layout, decode: Layout) -> tuple[BufferPair, ...]:
    """Every buffer of the two sides, in the order of layers."""
    mine, theirs = (
        {(buffer.layer, buffer.part): buffer for buffer in layout.buffers}
        for layout in (prefill, decode)
    )
    idents = dict.fromkeys((*mine, *theirs))
    pairs = [BufferPair(mine.get(ident), theirs.get(ident)) for ident in idents]
    return tuple(sorted(pairs, key=lambda twin: twin.present_buffer.layer))


def format_buffer_type(layout: Layout, buffer: Buffer) -> str:
    """Dtype and shape of what one sequence has: ``FLOAT16 [8, ctx_len=4096, 64]``."""
    if buffer.sequence_shape is None:
        return buffer.dtype
    dims: list[Dim] = []
    for dim, size in zip(
        buffer.sequence_shape, layout.resolve_shape(buffer.sequence_shape), strict=True
    ):
        dims.append(dim if dim == size else f"{dim}={size}")
    return f"{buffer.dtype} {format_shape(tuple(dims))}"


def find_differences(
    twin: BufferPair, prefill: Layout, decode: Layout, clipped: frozenset[int]
) -> Iterator[Difference]:
    """How the two of a pair differ; ``clipped`` are the axes that are moved up to the prompt."""
    mine, theirs = twin
    if mine is None or theirs is None:
        return
    said = format_buffer_type(prefill, mine), format_buffer_type(decode, theirs)
    if mine.dtype != theirs.dtype:
        yield Difference("KV612", mine.dtype, theirs.dtype)
    if mine.sequence_shape is None or theirs.sequence_shape is None:
        return
    one, other = (
        prefill.resolve_shape(mine.sequence_shape),
        decode.resolve_shape(theirs.sequence_shape),
    )
    if len(one) != len(other):
        yield Difference("KV613", *said)
    elif _has_permuted_axes(mine, theirs, one, other):
        yield Difference("KV615", *said)
    else:
        told = _compare_axes(mine, theirs, one, other, clipped)
        yield from _keep_gravest(fault._replace(prefill=said[0], decode=said[1]) for fault in told)


def _keep_gravest(found: Iterable[Difference]) -> list[Difference]:
    """The gravest of what the axes show: what is certain before what is not."""
    return sorted(found, key=lambda one: (not one.is_certain, one.code))[:1]


def _has_permuted_axes(
    mine: Buffer, theirs: Buffer, one: Sequence[Dim], other: Sequence[Dim]
) -> bool:
    """Whether the same sizes stand in another order; how long the context is does not matter."""
    if one == other:
        return False
    rests = [
        [dim for axis, dim in enumerate(dims, 1) if axis != buffer.sequence_axis]
        for buffer, dims in ((mine, one), (theirs, other))
    ]
    if Counter(map(str, rests[0])) != Counter(map(str, rests[1])):
        return False
    return rests[0] != rests[1] or mine.sequence_axis != theirs.sequence_axis


def _compare_axes(
    mine: Buffer,
    theirs: Buffer,
    one: Sequence[Dim],
    other: Sequence[Dim],
    clipped: frozenset[int],
) -> Iterator[Difference]:
    """Axis by axis: what differs, whether it is certain, and what is to be asked."""
    for axis, (a, b) in enumerate(zip(one, other, strict=True), 1):
        if a == b:
            continue
        known = isinstance(a, int) and isinstance(b, int)
        ask = tuple(dim for dim in (a, b) if isinstance(dim, str))
        option = _choose_size_option(a, b)
        if not all(_can_grow(buffer, axis) for buffer in (mine, theirs)):
            yield Difference("KV613" if known else "KV618", "", "", known, ask, option)
        elif mine.window is not None or theirs.window is not None:
            windows = [side.window for side in (mine, theirs) if side.window is not None]
            unknown = tuple(dict.fromkeys(str(symbol) for symbol in windows if symbol in ask))
            one_sided = len(windows) == 1 and (bool(unknown) or axis not in clipped)
            certain = one_sided or (known and axis not in clipped)
            two = (
                (a, b) if isinstance(a, int) and isinstance(b, int) and len(windows) == 2 else None
            )
            yield Difference("KV614", "", "", certain, unknown, option, two)
        elif axis not in clipped:
            yield Difference("KV618", "", "", known, ask, option)
        else:
            yield Difference("KV614", "", "", is_certain=False)


def _choose_size_option(mine: Dim, theirs: Dim) -> str:
    """What sizes are given with: for one side only where the other has one already."""
    if isinstance(mine, int):
        return "--decode-dim"
    return "--prefill-dim" if isinstance(theirs, int) else "--dim"


def _can_grow(buffer: Buffer, axis: int) -> bool:
    """Whether a buffer may grow along an axis: one of fixed sizes does not say."""
    return buffer.sequence_axis == axis or buffer.kind == "unknown"


def build_difference_finding(
    code: str, group: Sequence[tuple[BufferPair, Difference]], longer: int | None
) -> Finding:
    """One finding for buffers that differ alike.

    ``longer`` is the longest prompt at which they do not show it, ``None`` where that is not known.
    """
    twin, fault = group[0]
    message = f"is {fault.prefill} on prefill and {fault.decode} on decode"
    message += format_other_buffers([twin for twin, _ in group])
    if fault.window_sizes:
        message += ": windows of {} and {} tokens".format(*fault.window_sizes)
    if code == "KV614" and longer:
        message += ", which" if fault.window_sizes else ": they"
        message += f" differ for prompts longer than {format_token_count(longer)}"
    elif code == "KV614" and fault.needed_symbols and fault.is_certain and longer is None:
        message += f": they differ for prompts longer than {' or '.join(fault.needed_symbols)}"
    elif fault.is_undecided:
        message += ": whether they differ depends on the sizes"
    hint = _HINTS[code]
    if fault.needed_symbols:
        option = "--dim" if fault.is_certain else fault.size_option
        dims = " ".join(
            f"{option} {symbol}=SIZE" for symbol in fault.needed_symbols if symbol != "?"
        )
        hint = f"{dims} says from which prompt length on" if fault.is_certain else f"give {dims}"
    return build_finding(code, twin.name, message, hint)


def describe_windows(found: Finding) -> str:
    """What a KV614 is about, in general words; the sizes where it is two windows of known ones."""
    told = re.search(r": (windows of \d+ and \d+ tokens)(, which [^:]*)?$", found.message)
    return told[1] if told else "a window on one side, the whole context on the other"


def format_other_buffers(group: Sequence[BufferPair]) -> str:
    """How many buffers more, and of which layers they all are."""
    if len(group) == 1:
        return ""
    layers = format_layers(sorted({twin.present_buffer.layer for twin in group}))
    more = "so is 1 more" if len(group) == 2 else f"so are {len(group) - 1} more"
    return f", and {more} (of {layers})"


def check_missing_buffers(
    pairs: Sequence[BufferPair], *, alike: bool
) -> Iterator[tuple[Finding, tuple[BufferPair, ...]]]:
    """Buffers on one side only. KV620 for those that may be a draft model's, otherwise KV611.

    They may be where one side has a few whole layers more, right behind the last of the
    other, fewer than both have, and all else is ``alike``: draft models that share a graph
    with their target have one layer, or up to three.
    """
    mine = {twin.present_buffer.layer for twin in pairs if twin.prefill is not None}
    theirs = {twin.present_buffer.layer for twin in pairs if twin.decode is not None}
    lacking = [twin for twin in pairs if None in twin]
    for side, other, layers in (("prefill", "decode", theirs), ("decode", "prefill", mine)):
        alone = [twin for twin in lacking if getattr(twin, other) is None]
        if not alone:
            continue
        text = f"{_format_missing_layers(alone, layers)} on {side} only: {_format_buffers(alone)}"
        if alike and alone == lacking and _can_be_draft_layers(alone, layers):
            text += f", right behind {other}'s last layer {max(layers)}"
            hint = "give both sides the draft model's layers, or neither; or one is cut short"
            yield build_finding("KV620", "", text, hint), tuple(alone)
        else:
            hint = "one side may be another model, cut short, or without some of its windows"
            yield build_finding("KV611", "", text, hint), tuple(alone)


def _can_be_draft_layers(alone: Sequence[BufferPair], layers: Set[int]) -> bool:
    """Whether layers that one side has alone may be those of a draft model."""
    more = sorted({twin.present_buffer.layer for twin in alone})
    last = max(layers, default=-1)
    return len(more) <= min(_MAX_DRAFT_LAYERS, len(layers) - 1) and more == [
        *range(last + 1, last + 1 + len(more))
    ]


def _format_missing_layers(alone: Sequence[BufferPair], layers: Set[int]) -> str:
    """The layers, with the parts where the other side has the rest: ``value of layer 1``."""
    text = format_layers(sorted({twin.present_buffer.layer for twin in alone}))
    if all(twin.present_buffer.layer not in layers for twin in alone):
        return text
    return (
        f"{format_list(list(dict.fromkeys(twin.present_buffer.part for twin in alone)))} of {text}"
    )


def _format_buffers(group: Sequence[BufferPair]) -> str:
    first = group[0]
    if len(group) == 1:
        return f"a buffer, {first.name}"
    parts = format_list(list(dict.fromkeys(twin.present_buffer.part for twin in group)))
    return f"{len(group)} buffers ({parts}), {first.name} the first"
