"""Everything that would make the renamed model wrong, as findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.model.signature import NameUses, Signature, format_shape, is_shape_compatible
from onnxkvrename.rules.plan import REASON_UNKNOWN, KvPair, RenamePlan, find_conflicting_symbols


def check_pairs(signature: Signature, plan: RenamePlan, uses: NameUses) -> Iterator[Finding]:
    """What is wrong with the pairs of one model, or would be after renaming."""
    yield from _check_duplicates(signature, plan)
    inputs = {value.name for value in signature.inputs}
    for pair in plan.pairs:
        yield from _check_both_sides(pair, inputs)
        yield from _check_types(pair)
        yield from _check_usage(pair, inputs, uses)
        if not plan.token_change.normalize:
            yield from _check_suffix(pair)
    yield from _check_tokens(plan)
    yield from _check_layers(plan)
    yield from _check_unknown_states(plan)
    yield from _check_collisions(plan, uses)


def build_no_buffers_finding(outputs: Iterable[str]) -> Finding:
    """KV001, saying what there is instead."""
    names = format_list(list(outputs))
    return build_finding(
        "KV001",
        "",
        f"no KV buffer here: the outputs are {names}" if names else "no KV buffer here",
        "choose the profile that knows these names, or give --rules FILE",
    )


def _check_duplicates(signature: Signature, plan: RenamePlan) -> Iterator[Finding]:
    kv = {end.old_name for pair in plan.pairs for end in pair.sides}
    for side, values in (("input", signature.inputs), ("output", signature.outputs)):
        for name, count in Counter(value.name for value in values).items():
            if count > 1 and name in kv:
                yield build_finding(
                    "KV106", name, f"stands {count} times as graph {side}", "export the model again"
                )
    for name, taken in plan.duplicates:
        if name != taken:
            yield build_finding(
                "KV106", name, f"claims the same buffer as {taken}", "leave one of the two"
            )


def _check_both_sides(pair: KvPair, inputs: set[str]) -> Iterator[Finding]:
    if pair.output is not None and pair.output.old_name in inputs:
        yield build_finding(
            "KV106",
            pair.output.old_name,
            "is a graph input and a retained output at once: the cache is never updated",
            "export without the token, then rename",
        )
    elif pair.output is not None and pair.input is None:
        yield build_finding(
            "KV101",
            pair.output.old_name,
            f"has no input to carry {pair.buffer} of layer {pair.layer} into the next step",
            "the compiler refuses this model; export it again",
        )
    elif pair.output is None and pair.input is not None:
        yield build_finding(
            "KV102",
            pair.input.old_name,
            f"is a KV input, but no retained output hands {pair.buffer} of layer {pair.layer} on",
            "what is written to this buffer is lost; export the model again",
        )


def _check_types(pair: KvPair) -> Iterator[Finding]:
    if pair.input is None or pair.output is None:
        return
    into, out = pair.input.value, pair.output.value
    if into.dtype != out.dtype:
        yield build_finding(
            "KV103",
            out.name,
            f"is {out.dtype}, but its input {into.name} is {into.dtype}",
            "both sides of a buffer share one piece of memory; export the model again",
        )
    if (
        into.shape is not None
        and out.shape is not None
        and not is_shape_compatible(into.shape, out.shape)
    ):
        yield build_finding(
            "KV104",
            out.name,
            f"is {format_shape(out.shape)}, but its input {into.name} is {format_shape(into.shape)}",
            "both sides of a buffer share one piece of memory; export the model again",
        )


def _check_usage(pair: KvPair, inputs: set[str], uses: NameUses) -> Iterator[Finding]:
    if pair.output is not None and pair.output.old_name not in uses.producer_op_types:
        yield build_finding(
            "KV105",
            pair.output.old_name,
            "is produced by no node: the buffer is never updated",
            "export without the token, then rename"
            if pair.output.old_name in inputs
            else "export the model again",
        )
    if pair.input is not None and pair.input.old_name not in uses.read_names:
        yield build_finding(
            "KV107",
            pair.input.old_name,
            "is read by nothing: what the last step retained is not used",
            "check the export; harmless only if this layer shares another one's cache",
        )


def _check_suffix(pair: KvPair) -> Iterator[Finding]:
    if pair.output is not None and not pair.output.has_normal_suffix:
        yield build_finding(
            "KV112",
            pair.output.old_name,
            "has a suffix that consumers do not pair with its input",
            "--normalize makes it _RetainedState",
        )


def _check_tokens(plan: RenamePlan) -> Iterator[Finding]:
    carried = [
        end
        for pair in plan.pairs
        for end in pair.sides
        if not plan.token_change.can_replace(end.token)
    ]
    if carried:
        tokens = format_list(sorted({end.token for end in carried}))
        yield build_finding(
            "KV202",
            carried[0].old_name,
            f"carries another token already, one of {len(carried)} such names: {tokens}",
            "--replace puts the new token in its place, --strip takes it out",
        )


def _check_layers(plan: RenamePlan) -> Iterator[Finding]:
    found: dict[tuple[int, str], dict[str, str]] = {}
    for pair in plan.pairs:
        found.setdefault((pair.layer, pair.kind), {})[pair.buffer] = pair.sides[0].old_name
    for (layer, kind), buffers in sorted(found.items()):
        for part in plan.buffers_by_kind[kind]:
            if part not in buffers:
                yield build_finding(
                    "KV108",
                    next(iter(buffers.values())),
                    f"stands alone: layer {layer} has no {part}",
                    "check the export: the parts of a layer move together",
                )
    layers = sorted({pair.layer for pair in plan.pairs})
    gaps = [(a, b) for a, b in pairwise(layers) if b > a + 1]
    if gaps:
        missing = [f"{a + 1}" if b == a + 2 else f"{a + 1} to {b - 1}" for a, b in gaps]
        yield build_finding(
            "KV109",
            "",
            f"layers {layers[0]} to {layers[-1]}, but without {format_list(missing)}",
            "check the export, unless these layers keep no cache",
        )


def _check_unknown_states(plan: RenamePlan) -> Iterator[Finding]:
    for kept in plan.unchanged_names:
        if kept.reason == REASON_UNKNOWN:
            yield build_finding(
                "KV111",
                kept.name,
                "is a retained state that no rule knows, and is left alone",
                "if it is KV, name it in a rules file (--rules FILE)",
            )


def _check_collisions(plan: RenamePlan, uses: NameUses) -> Iterator[Finding]:
    names = plan.name_map
    for new, count in Counter(names.values()).items():
        if count > 1:
            olds = [old for old, name in names.items() if name == new]
            yield build_finding(
                "KV201", new, f"would be the new name of {format_list(olds)}", "mend the templates"
            )
    for new, where in uses.taken_names.items():
        yield build_finding(
            "KV201", new, f"is already {where}", "choose another token, or rename that value first"
        )
    for symbol in sorted(find_conflicting_symbols(uses.symbols, uses.producer_op_types, plan)):
        yield build_finding(
            "KV201",
            symbol,
            "is already a dimension, and would pass for one made of an output's new name",
            "choose another token, or rename that dimension first",
        )
