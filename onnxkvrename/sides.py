"""One side of a hand-off as a consumer sees it, and what of it keeps a hand-off from beginning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from onnxkvrename import consuming, layouts, planning, sizing, transfer
from onnxkvrename.checking import Finding, finding, listed
from onnxkvrename.layouts import Layout
from onnxkvrename.planning import Wish
from onnxkvrename.rules import Rules
from onnxkvrename.signature import Signature, Value
from onnxkvrename.targets import Target

Order = Literal["numeric", "lexical", "graph"]
"""By layer, by name as text, or neither: the graph's own."""

LONGEST = 1 << 31
"""A prompt that no graph limits; longer than any size that can be given."""
FAR = 1 << 50
"""Stands for a size that is not known: longer than any prompt."""
STOPS = ("KV001", "KV603", "KV610", "KV619")
"""What is found before any hand-off, aloud."""


class Side(NamedTuple):
    """One side as it stands: ``given``; ``layout`` has the names that the consumer would see.

    ``bare`` says that no buffer has the consumer's token, so that those are the
    names after a rename; ``tokens`` are what the names carry as they stand.
    ``order`` is how the graph itself lists its buffers.
    """

    label: str
    given: Layout
    layout: Layout
    bare: bool
    tokens: tuple[str, ...]
    order: Order


def side(label: str, found: Layout, target: Target, rules: Rules) -> Side:
    """A side as the consumer sees it; if it selects none of its buffers, as after a rename."""
    names = [buffer.input for buffer in found.buffers if buffer.input is not None]
    bare = not any(map(target.takes, names))
    signature = Signature(found.inputs, found.outputs)
    plan = planning.plan(signature, rules, Wish(target.token, replace=True))
    renamed = _renamed(found, plan.names) if bare else found
    return Side(label, found, renamed, bare, tuple(sorted(plan.tokens)), _order(found))


def _renamed(found: Layout, names: Mapping[str, str]) -> Layout:
    """The layout under other names."""

    def values(given: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(value._replace(name=names.get(value.name, value.name)) for value in given)

    def name(old: str | None) -> str | None:
        return None if old is None else names.get(old, old)

    buffers = (b._replace(input=name(b.input), output=name(b.output)) for b in found.buffers)
    return found._replace(
        inputs=values(found.inputs), outputs=values(found.outputs), buffers=tuple(buffers)
    )


def _order(found: Layout) -> Order:
    owners = {buffer.input: buffer for buffer in found.buffers}
    listed = [value.name for value in found.inputs if value.name in owners]
    layers = [owners[name].layer for name in listed]
    if layers == sorted(layers):
        return "numeric"
    return "lexical" if listed == sorted(listed) else "graph"


def capacity(found: Layout) -> int:
    """The longest prompt that a side has room for; windows and states do not limit it."""
    sizes = []
    for buffer in found.buffers:
        shape = found.sized(buffer.shape or ())
        if buffer.sequence is not None and buffer.window is None:
            sizes.append(shape[buffer.sequence])
        elif buffer.kind == "unknown" and len(shape) > 3:
            sizes.append(shape[2])
    known = [size for size in sizes if isinstance(size, int)]
    return max(known) if known and len(known) == len(sizes) else LONGEST


def filled(found: Layout, near: int | None = None) -> Layout:
    """The layout with a size for every symbol.

    One that is not known is longer than any prompt, but ``near``, if it is given, for a
    window.
    """
    symbols = sizing.symbols(value.shape for value in found.inputs)
    sizes = {symbol: FAR for symbol in symbols if symbol not in found.sizes}
    if near is not None:
        windows = {buffer.window for buffer in found.buffers}
        sizes |= {symbol: near for symbol in sizes if symbol in windows}
    return layouts.with_sizes(found, sizes)


def unselected(prefill: Side, decode: Side, target: Target) -> Iterator[Finding]:
    """KV616: what carries another token, or none."""
    bare = [side for side in (prefill, decode) if side.bare and side.layout.buffers]
    if len(bare) == 2 and prefill.tokens == decode.tokens:
        yield _bare("prefill and decode", prefill, target)
    else:
        yield from (_bare(side.label, side, target) for side in bare)
    for side in (prefill, decode):
        yield from _half(side, target)


def _bare(label: str, side: Side, target: Target) -> Finding:
    carried = listed(side.tokens) if side.tokens else "no token"
    replace = ("--replace",) if side.tokens else ()
    mend = " ".join(("onnxkvrename MODEL --target", target.name, *replace, "for both"))
    return finding(
        "KV616",
        "",
        f"{label}: the names carry {carried}, not {target.token}: {target.name} selects none",
        mend if label != side.label else consuming.command(side.given, target, *replace),
    )


def _half(side: Side, target: Target) -> Iterator[Finding]:
    """Buffers without the token beside others that have it."""
    if side.bare:
        return
    left = transfer.lost(transfer.inputs(side.layout, target), side.layout.buffers)
    if side.label == "prefill":
        written = transfer.outputs(side.layout, target)
        left = tuple(dict.fromkeys((*left, *transfer.lost(written, side.layout.buffers))))
    if left:
        yield finding(
            "KV616",
            left[0].names[0],
            f"is one of {len(left)} buffers of {side.label} that {target.name} does not select: "
            f"{target.token} is not on all of their names",
            consuming.command(side.given, target, "--replace"),
        )


def stops(prefill: Side, decode: Side, target: Target) -> Iterator[Finding]:
    """What stops the consumer before any hand-off."""
    for side in (prefill, decode):
        if not side.layout.buffers:
            yield finding(
                "KV001", "", f"no KV buffer on {side.label}", "give the model that has the cache"
            )
            continue
        for found in transfer.faults(side.layout, target):
            yield found._replace(message=f"{found.message} ({side.label})")
    given, written = (
        len(find(prefill.layout, target)) for find in (transfer.inputs, transfer.outputs)
    )
    if written - given not in (0, 1) and prefill.layout.buffers:
        yield finding(
            "KV610",
            "",
            f"prefill selects {given} inputs, but {written} outputs: it stops at the first prompt",
            "onnxkvrename verify MODEL says which pairs are broken",
        )


def order_notes(prefill: Side, decode: Side, target: Target) -> Iterator[str]:
    """Worth knowing: graphs that list their buffers differently, which sorting makes good."""
    words = {"numeric": "by layer", "lexical": "by name", "graph": "in an order of its own"}
    if prefill.order != decode.order:
        yield (
            f"the graphs list their buffers in different orders, prefill {words[prefill.order]} "
            f"and decode {words[decode.order]}: {target.name} sorts them by itself"
        )
