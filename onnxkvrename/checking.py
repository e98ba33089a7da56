"""Everything that would make the renamed model wrong, as findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from onnxkvrename.planning import UNKNOWN, Pair, Plan, foreign
from onnxkvrename.signature import Dim, Signature, Uses

Severity = Literal["error", "warning"]

CODES: Mapping[str, tuple[Severity, str]] = {
    "KV001": ("error", "no KV buffer in any model given"),
    "KV101": ("error", "retained output without its input"),
    "KV102": ("error", "KV input without its retained output"),
    "KV103": ("error", "dtype differs between the two"),
    "KV104": ("error", "rank or a static dimension differs between the two"),
    "KV105": ("error", "retained output that no node produces"),
    "KV106": ("error", "one name is both input and retained output, or stands twice"),
    "KV107": ("warning", "KV input that nothing reads"),
    "KV108": ("warning", "a layer with a part missing (a key without its value)"),
    "KV109": ("warning", "layers missing between the first and the last"),
    "KV110": ("error", "retained output not computed from its own input"),
    "KV111": ("warning", "retained buffer that no rule knows: left alone, and named"),
    "KV112": ("warning", "KV output with a suffix that consumers do not pair"),
    "KV113": ("warning", "retained output that could not be traced to its input: not proved"),
    "KV114": ("warning", "buffer passes through unchanged: read, but never written"),
    "KV115": ("error", "refused by onnx's checker"),
    "KV116": ("error", "a KV buffer without the token, or the token on something else"),
    "KV117": ("error", "an expression misses KV buffers, or takes others"),
    "KV118": ("error", "retention loop breaks off, or gives other results than the reference"),
    "KV119": ("warning", "retention loop that could not be run: not tried"),
    "KV201": ("error", "a new name is already in use"),
    "KV202": ("error", "buffers already carry another token"),
    "KV301": ("error", "a layer in two windows"),
    "KV302": ("error", "a layer in no window"),
    "KV303": ("error", "windows with different tokens, or only some with one"),
    "KV304": ("error", "the layers in a file differ from its name's range"),
    "KV305": ("error", "windows that do not fit together at the seam"),
    "KV306": ("error", "windows of different models or exports mixed"),
    "KV307": ("error", "merged file and windows disagree"),
    "KV401": ("error", "export directory whose hash does not follow from its JSON"),
    "KV402": ("warning", "renamed in place in an export cache: a later export would reuse it"),
    "KV403": ("error", "the directory of the seeded export already holds something else"),
    "KV404": ("warning", "a sidecar's name matches nothing in the model; an error if none does"),
    "KV405": ("warning", "a sidecar names only one half of a pair"),
    "KV501": ("error", "external data outside the model's directory"),
    "KV502": ("error", "external data missing, or no plain file"),
    "KV503": ("error", "external data shorter than the model says, or a malformed entry"),
    "KV504": ("error", "another file stands where one would be written"),
    "KV601": ("error", "a KV buffer without the consumer's token: not selected"),
    "KV602": ("error", "an output that the consumer selects, but never pairs"),
    "KV603": ("error", "a layer that the consumer cannot read in a name, or reads as another"),
    "KV604": ("error", "not exactly one output that starts with log"),
    "KV605": ("error", "a state that the consumer cuts as if it were a context"),
    "KV606": ("warning", "hybrid buffers, which the consumer's LMCache connector refuses"),
    "KV607": ("warning", "buffers that the consumer declares as full attention, and are not"),
    "KV608": ("error", "the consumer's token on what is no KV buffer"),
    "KV609": ("error", "inputs and outputs that the consumer pairs otherwise than the graph"),
    "KV610": ("error", "a dtype or a shape that the consumer cannot move"),
    "KV611": ("error", "a buffer on one side of a hand-off only"),
    "KV612": ("error", "dtype differs between prefill and decode"),
    "KV613": ("error", "rank or a fixed dimension differs between prefill and decode"),
    "KV614": ("error", "a window on one side, another one or the whole context on the other"),
    "KV615": ("error", "axes in another order on the other side"),
    "KV616": ("error", "tokens differ between prefill and decode, or nothing is selected"),
    "KV617": ("error", "a buffer handed over into another one's place"),
    "KV618": ("error", "bytes of a buffer at other offsets on the other side"),
    "KV619": ("error", "heads or states that do not divide by tensor parallelism"),
    "KV620": ("error", "layers of a draft model on one side only"),
    "KV621": ("error", "the layout's stamp in a model is not that of its graph"),
    "KV622": ("error", "a layer that vLLM would refuse, or has no cache for"),
}
"""Severity and meaning of every code; the table in the README is made from this."""

_SHOWN = 5


class Finding(NamedTuple):
    """Something that is, or may be, wrong with a model.

    ``name`` is the value or file it is about; ``hint`` says how to mend it.
    """

    code: str
    severity: Severity
    name: str
    message: str
    hint: str


def finding(code: str, name: str, message: str, hint: str) -> Finding:
    """A finding with the severity of its code."""
    return Finding(code, CODES[code][0], name, message, hint)


def as_errors(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The same findings as errors, all of them: what ``strict`` asks for."""
    return tuple(found._replace(severity="error") for found in findings)


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


def listed(names: Sequence[str], between: str = ", ") -> str:
    """A few names, and how many more there are."""
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return between.join(names[:_SHOWN]) + rest


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


def fit(one: tuple[Dim, ...], other: tuple[Dim, ...]) -> bool:
    """Whether two shapes agree as far as they are known; symbols may differ."""
    return len(one) == len(other) and all(
        a == b for a, b in zip(one, other, strict=True) if isinstance(a, int) and isinstance(b, int)
    )


def shape_text(shape: tuple[Dim, ...]) -> str:
    """A shape as it is shown: ``[batch, 2, ?]``."""
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in shape) + "]"


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
