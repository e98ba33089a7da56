"""Everything that would make the renamed model wrong, as findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from onnxkvrename.findings import Finding, finding, listed
from onnxkvrename.model.signature import Signature, Uses, fit, shape_text
from onnxkvrename.rules.plan import UNKNOWN, Pair, Plan, foreign


def check(signature: Signature, plan: Plan, uses: Uses) -> Iterator[Finding]:
    """What is wrong with the pairs of one model, or would be after renaming."""
    yield from _doubles(signature, plan)
    inputs = {value.name for value in signature.inputs}
    for pair in plan.pairs:
        yield from _ends(pair, inputs)
        yield from _agreement(pair)
        yield from _flow(pair, inputs, uses)
        if not plan.wish.normalize:
            yield from _suffix(pair)
    yield from _tokens(plan)
    yield from _layers(plan)
    yield from _unknown(plan)
    yield from _collisions(plan, uses)


def no_buffers(outputs: Iterable[str]) -> Finding:
    """KV001, saying what there is instead."""
    names = listed(list(outputs))
    return finding(
        "KV001",
        "",
        f"no KV buffer here: the outputs are {names}" if names else "no KV buffer here",
        "choose the profile that knows these names, or give --rules FILE",
    )


def _doubles(signature: Signature, plan: Plan) -> Iterator[Finding]:
    kv = {end.old for pair in plan.pairs for end in pair.ends}
    for side, values in (("input", signature.inputs), ("output", signature.outputs)):
        for name, count in Counter(value.name for value in values).items():
            if count > 1 and name in kv:
                yield finding(
                    "KV106", name, f"stands {count} times as graph {side}", "export the model again"
                )
    for name, taken in plan.doubles:
        if name != taken:
            yield finding(
                "KV106", name, f"claims the same buffer as {taken}", "leave one of the two"
            )


def _ends(pair: Pair, inputs: set[str]) -> Iterator[Finding]:
    if pair.output is not None and pair.output.old in inputs:
        yield finding(
            "KV106",
            pair.output.old,
            "is a graph input and a retained output at once: the cache is never updated",
            "export without the token, then rename",
        )
    elif pair.output is not None and pair.input is None:
        yield finding(
            "KV101",
            pair.output.old,
            f"has no input to carry {pair.buffer} of layer {pair.layer} into the next step",
            "the compiler refuses this model; export it again",
        )
    elif pair.output is None and pair.input is not None:
        yield finding(
            "KV102",
            pair.input.old,
            f"is a KV input, but no retained output hands {pair.buffer} of layer {pair.layer} on",
            "what is written to this buffer is lost; export the model again",
        )


def _agreement(pair: Pair) -> Iterator[Finding]:
    if pair.input is None or pair.output is None:
        return
    into, out = pair.input.value, pair.output.value
    if into.dtype != out.dtype:
        yield finding(
            "KV103",
            out.name,
            f"is {out.dtype}, but its input {into.name} is {into.dtype}",
            "both sides of a buffer share one piece of memory; export the model again",
        )
    if into.shape is not None and out.shape is not None and not fit(into.shape, out.shape):
        yield finding(
            "KV104",
            out.name,
            f"is {shape_text(out.shape)}, but its input {into.name} is {shape_text(into.shape)}",
            "both sides of a buffer share one piece of memory; export the model again",
        )


def _flow(pair: Pair, inputs: set[str], uses: Uses) -> Iterator[Finding]:
    if pair.output is not None and pair.output.old not in uses.producers:
        yield finding(
            "KV105",
            pair.output.old,
            "is produced by no node: the buffer is never updated",
            "export without the token, then rename"
            if pair.output.old in inputs
            else "export the model again",
        )
    if pair.input is not None and pair.input.old not in uses.read:
        yield finding(
            "KV107",
            pair.input.old,
            "is read by nothing: what the last step retained is not used",
            "check the export; harmless only if this layer shares another one's cache",
        )


def _suffix(pair: Pair) -> Iterator[Finding]:
    if pair.output is not None and not pair.output.normal:
        yield finding(
            "KV112",
            pair.output.old,
            "has a suffix that consumers do not pair with its input",
            "--normalize makes it _RetainedState",
        )


def _tokens(plan: Plan) -> Iterator[Finding]:
    carried = [end for pair in plan.pairs for end in pair.ends if not plan.wish.yields(end.token)]
    if carried:
        tokens = listed(sorted({end.token for end in carried}))
        yield finding(
            "KV202",
            carried[0].old,
            f"carries another token already, one of {len(carried)} such names: {tokens}",
            "--replace puts the new token in its place, --strip takes it out",
        )


def _layers(plan: Plan) -> Iterator[Finding]:
    found: dict[tuple[int, str], dict[str, str]] = {}
    for pair in plan.pairs:
        found.setdefault((pair.layer, pair.kind), {})[pair.buffer] = pair.ends[0].old
    for (layer, kind), buffers in sorted(found.items()):
        for part in plan.parts[kind]:
            if part not in buffers:
                yield finding(
                    "KV108",
                    next(iter(buffers.values())),
                    f"stands alone: layer {layer} has no {part}",
                    "check the export: the parts of a layer move together",
                )
    layers = sorted({pair.layer for pair in plan.pairs})
    gaps = [(a, b) for a, b in pairwise(layers) if b > a + 1]
    if gaps:
        missing = [f"{a + 1}" if b == a + 2 else f"{a + 1} to {b - 1}" for a, b in gaps]
        yield finding(
            "KV109",
            "",
            f"layers {layers[0]} to {layers[-1]}, but without {listed(missing)}",
            "check the export, unless these layers keep no cache",
        )


def _unknown(plan: Plan) -> Iterator[Finding]:
    for kept in plan.kept:
        if kept.reason == UNKNOWN:
            yield finding(
                "KV111",
                kept.name,
                "is a retained state that no rule knows, and is left alone",
                "if it is KV, name it in a rules file (--rules FILE)",
            )


def _collisions(plan: Plan, uses: Uses) -> Iterator[Finding]:
    names = plan.names
    for new, count in Counter(names.values()).items():
        if count > 1:
            olds = [old for old, name in names.items() if name == new]
            yield finding(
                "KV201", new, f"would be the new name of {listed(olds)}", "mend the templates"
            )
    for new, where in uses.taken.items():
        yield finding(
            "KV201", new, f"is already {where}", "choose another token, or rename that value first"
        )
    for symbol in sorted(foreign(uses.symbols, uses.producers, plan)):
        yield finding(
            "KV201",
            symbol,
            "is already a dimension, and would pass for one made of an output's new name",
            "choose another token, or rename that dimension first",
        )
