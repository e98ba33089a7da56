"""One side of a hand-off as a consumer sees it, and what of it keeps a hand-off from beginning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.consumer_checks import (
    check_consumer,
    format_rename_command,
    format_similar_count,
)
from onnxkvrename.handoff.slots import (
    check_transferable,
    find_clipped_axes,
    find_unselected_buffers,
    list_selected_inputs,
    list_selected_outputs,
)
from onnxkvrename.layout.dims import list_symbols
from onnxkvrename.layout.layout import Layout, apply_sizes
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.plan import TokenChange, build_rename_plan
from onnxkvrename.rules.profile import Rules

BufferOrder = Literal["numeric", "lexical", "graph"]
"""By layer, by name as text, or neither: the graph's own."""

UNLIMITED_LENGTH = 1 << 31
"""A prompt that no graph limits; longer than any size that can be given."""
UNKNOWN_SIZE = 1 << 50
"""Stands for a size that is not known: longer than any prompt."""
STARTUP_FAILURE_CODES = ("KV001", "KV603", "KV604", "KV610", "KV619")
"""What is found before any hand-off, aloud."""


class HandoffSide(NamedTuple):
    """One side as it stands: ``given``; ``layout`` has the names that the consumer would see.

    ``bare`` says that no buffer has the consumer's token, so that those are the
    names after a rename; ``tokens`` are what the names carry as they stand.
    ``order`` is how the graph itself lists its buffers. ``path`` is what was given for it;
    ``broken`` is what is wrong with its models whatever they are used for.
    """

    label: str
    original_layout: Layout
    layout: Layout
    lacks_token: bool
    tokens: tuple[str, ...]
    order: BufferOrder
    path: str = ""
    model_finding: Finding | None = None


def build_handoff_side(label: str, found: Layout, target: Consumer, rules: Rules) -> HandoffSide:
    """A side as the consumer sees it; if it selects none of its buffers, as after a rename."""
    names = [buffer.input for buffer in found.buffers if buffer.input is not None]
    bare = not any(map(target.selects_input, names))
    signature = Signature(found.inputs, found.outputs)
    plan = build_rename_plan(signature, rules, TokenChange(target.token, replace=True))
    renamed = _rename_layout(found, plan.name_map) if bare else found
    return HandoffSide(
        label, found, renamed, bare, tuple(sorted(plan.token_counts)), _detect_order(found)
    )


def _rename_layout(found: Layout, names: Mapping[str, str]) -> Layout:
    """The layout under other names."""

    def values(given: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(value._replace(name=names.get(value.name, value.name)) for value in given)

    def name(old: str | None) -> str | None:
        return None if old is None else names.get(old, old)

    buffers = (b._replace(input=name(b.input), output=name(b.output)) for b in found.buffers)
    return found._replace(
        inputs=values(found.inputs), outputs=values(found.outputs), buffers=tuple(buffers)
    )


def _detect_order(found: Layout) -> BufferOrder:
    owners = {buffer.input: buffer for buffer in found.buffers}
    listed = [value.name for value in found.inputs if value.name in owners]
    layers = [owners[name].layer for name in listed]
    if layers == sorted(layers):
        return "numeric"
    return "lexical" if listed == sorted(listed) else "graph"


def find_longest_prompt(found: Layout) -> int:
    """The longest prompt that a side has room for; windows and states do not limit it."""
    sizes = []
    for buffer in found.buffers:
        shape = found.resolve_shape(buffer.shape or ())
        if buffer.sequence_axis is not None and buffer.window is None:
            sizes.append(shape[buffer.sequence_axis])
        elif buffer.kind == "unknown" and len(shape) > 3:
            sizes.append(shape[2])
    known = [size for size in sizes if isinstance(size, int)]
    return max(known) if known and len(known) == len(sizes) else UNLIMITED_LENGTH


def fill_missing_sizes(found: Layout, near: int | None = None) -> Layout:
    """The layout with a size for every symbol.

    One that is not known is longer than any prompt, but ``near``, if it is given, for a
    window.
    """
    symbols = list_symbols(value.shape for value in found.inputs)
    sizes = {symbol: UNKNOWN_SIZE for symbol in symbols if symbol not in found.sizes}
    if near is not None:
        windows = {buffer.window for buffer in found.buffers}
        sizes |= {symbol: near for symbol in sizes if symbol in windows}
    return apply_sizes(found, sizes)


def find_shared_symbols(
    both: Iterable[HandoffSide], target: Consumer, whole: bool
) -> tuple[str, ...]:
    """The symbols without a size that must be the same on both sides, in alphabetical order.

    A context that is moved up to the prompt may be of any length on either side.
    """
    wanted = set[str]()
    for found, buffer in ((side.layout, one) for side in both for one in side.layout.buffers):
        shape = found.resolve_shape(buffer.shape or ())
        clipped = find_clipped_axes(target, len(shape), whole)
        for axis, dim in enumerate(shape[1:], 1):
            grows = axis in clipped and axis == buffer.sequence_axis and buffer.window is None
            if isinstance(dim, str) and not grows:
                wanted.add(dim)
    return tuple(sorted(wanted))


def check_buffers_exist(prefill: HandoffSide, decode: HandoffSide) -> Iterator[Finding]:
    """KV001: a side without a buffer, with which there is no hand-off at all."""
    for side in (prefill, decode):
        if not side.layout.buffers:
            where = f"{side.label}: {side.path}" if side.path else side.label
            hint = "give the model that has the cache; --profile and --rules know names"
            yield build_finding("KV001", "", f"no KV buffer on {where}", hint)


def check_side_tokens(
    prefill: HandoffSide, decode: HandoffSide, target: Consumer
) -> Iterator[Finding]:
    """KV616: what carries another token, or none."""
    bare = [side for side in (prefill, decode) if side.lacks_token and side.layout.buffers]
    if len(bare) == 2 and prefill.tokens == decode.tokens:
        yield _build_token_finding("prefill and decode", prefill, target)
    else:
        yield from (_build_token_finding(side.label, side, target) for side in bare)
    for side in (prefill, decode):
        yield from _check_partial_token(side, target)


def _build_token_finding(label: str, side: HandoffSide, target: Consumer) -> Finding:
    carried = format_list(side.tokens) if side.tokens else "no token"
    replace = ("--replace",) if side.tokens else ()
    mend = " ".join(("onnxkvrename MODEL --target", target.name, *replace, "for both"))
    return build_finding(
        "KV616",
        "",
        f"{label}: the names carry {carried}, not {target.token}: {target.name} selects none",
        mend
        if label != side.label
        else format_rename_command(side.original_layout, target, *replace),
    )


def _check_partial_token(side: HandoffSide, target: Consumer) -> Iterator[Finding]:
    """Buffers without the token beside others that have it."""
    if side.lacks_token:
        return
    left = find_unselected_buffers(list_selected_inputs(side.layout, target), side.layout.buffers)
    if side.label == "prefill":
        written = list_selected_outputs(side.layout, target)
        left = tuple(dict.fromkeys((*left, *find_unselected_buffers(written, side.layout.buffers))))
    if left:
        yield build_finding(
            "KV616",
            left[0].names[0],
            f"is {_format_buffer_count(len(left))} of {side.label} that {target.name} does not select: "
            f"{target.token} is not on all of {'their' if len(left) > 1 else 'its'} names",
            format_rename_command(side.original_layout, target, "--replace"),
        )


def _format_buffer_count(count: int) -> str:
    return f"one of {count} buffers" if count > 1 else "a buffer"


def check_startup(prefill: HandoffSide, decode: HandoffSide, target: Consumer) -> Iterator[Finding]:
    """What stops the consumer before any hand-off."""
    for side in (prefill, decode):
        for found in check_transferable(side.layout, target):
            yield found._replace(message=f"{found.message} ({side.label})")
    yield from _check_output_count(prefill.layout, target)


def check_each_side(
    prefill: HandoffSide, decode: HandoffSide, target: Consumer, whole: bool
) -> Iterator[Finding]:
    """What each side gets wrong by itself, a hand-off or not: KV602, KV609, KV610.

    Of the other checks of a consumer some are about what is compared here in more detail
    (KV601, KV603 to KV605, KV608), and some about what takes no part in it (KV606, KV607).
    """
    for side in (prefill, decode):
        for found in check_consumer(side.layout, target, whole=whole):
            if found.code in ("KV602", "KV609", "KV610"):
                yield found._replace(message=f"{found.message} ({side.label})")


def _check_output_count(prefill: Layout, target: Consumer) -> Iterator[Finding]:
    """Prefill's list of outputs is as long as that of inputs, or longer by one.

    In it stand outputs of buffers and what is appended, and of all the last is taken off.
    """
    given, written = (
        len(find(prefill, target)) for find in (list_selected_inputs, list_selected_outputs)
    )
    appended = sum(target.is_appended_output(value.name) for value in prefill.outputs)
    if not given or written + appended - 1 - given in (0, 1):
        return
    if written - given in (0, 1):
        yield build_finding(
            "KV604",
            "",
            f"prefill has {appended or 'no'} outputs that start with log, of which it takes one "
            "off: its buffers are not as many as it counts, and it stops at the first prompt",
            "export prefill with logits, without sampling on the device",
        )
    else:
        yield build_finding(
            "KV610",
            "",
            f"prefill selects {given} inputs, but {written} outputs: it stops at the first prompt",
            "onnxkvrename verify MODEL says which pairs are broken",
        )


def check_unmatched_non_kv(
    prefill: HandoffSide, decode: HandoffSide, target: Consumer
) -> Iterator[Finding]:
    """KV608: places of what is no buffer, and that only one side has."""
    given = list_selected_inputs(prefill.layout, target)
    written = list_selected_outputs(prefill.layout, target)[: len(given)]
    taken = list_selected_inputs(decode.layout, target)
    for label, places, others in (
        ("prefill", (*given, *written), taken),
        ("decode", taken, written),
    ):
        there = {one.buffer_id for one in others}
        alone = [one for one in places if one.buffer is None and one.buffer_id not in there]
        names = list(dict.fromkeys(one.input_name for one in alone))
        if names:
            yield build_finding(
                "KV608",
                names[0],
                f"is no KV buffer{format_similar_count(names)}, but carries {target.token}, and has a "
                f"place among the buffers of {label} only",
                f"take {target.token} out of that name where the model is exported",
            )


def list_order_notes(prefill: HandoffSide, decode: HandoffSide, target: Consumer) -> Iterator[str]:
    """Worth knowing: graphs that list their buffers differently, which sorting makes good."""
    words = {"numeric": "by layer", "lexical": "by name", "graph": "in an order of its own"}
    if prefill.order != decode.order:
        yield (
            f"the graphs list their buffers in different orders, prefill {words[prefill.order]} "
            f"and decode {words[decode.order]}: {target.name} sorts them by itself"
        )
