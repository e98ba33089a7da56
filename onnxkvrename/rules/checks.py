"""Check the KV pairs of one model, and what its new names would break."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from onnxkvrename.findings import Finding, build_finding, build_names_finding
from onnxkvrename.limits import MAX_MATCHED_CHARS
from onnxkvrename.model.signature import (
    NameUses,
    Signature,
    Value,
    format_shape,
    is_dtype_compatible,
    is_shape_compatible,
)
from onnxkvrename.rules.kinds import is_state
from onnxkvrename.rules.plan import (
    REASON_TOO_LONG,
    REASON_UNKNOWN,
    KvPair,
    RenamePlan,
    find_conflicting_symbols,
)
from onnxkvrename.text import format_layer_runs, format_list, quote_word

WINDOW_SIZE_HINT = (
    "export again, layer by layer with layerwise_window_size=1: QEfficient gives larger windows "
    "the inputs of their first layer only"
)
"""How to export windows with all inputs; repeating the same export would not add them."""

_QEFFICIENT_SUFFIX = "_RetainedState"
"""How QEfficient ends the names of retained outputs, also those of windows."""

CONSUMER_TOKENS = {"vllmkvcache": ("vllmKvCache", "vllm-qaic")}
"""Tokens of known consumers with their names, by the token in lower case.

Consumers themselves are in `handoff`, which a plain rename does not load.
"""
_RESIZING_UPDATES = ("append", "delta")
_MIN_RANK = 3
"""The axes of the smallest cache: batch, context and size."""


def check_model(signature: Signature, plan: RenamePlan, uses: NameUses) -> Iterator[Finding]:
    """Check the pairs of one model, as it is and as it will be after the rename.

    Yields:
        Findings, those of a pair together.
    """
    yield from _check_duplicates(signature, plan)
    inputs = {value.name for value in signature.inputs}
    fed_layers = {pair.layer for pair in plan.pairs if pair.input is not None}
    flat = find_flat_values(plan)
    for pair in plan.pairs:
        if not any(side.old_name in flat for side in pair.sides):
            yield from _check_both_sides(pair, inputs, fed_layers, plan)
        yield from _check_types(pair, plan.updates_by_kind.get(pair.kind, ""))
        yield from _check_usage(pair, inputs, uses)
    yield from _check_rank(flat)
    if not plan.token_change.normalize:
        yield from _check_suffixes(plan)
    yield from _check_tokens(plan)
    if not flat:  # layers look incomplete without them
        yield from _check_layers(plan)
    yield from _check_unknown_states(plan)
    yield from _check_collisions(plan, uses)


def find_appended_word(pairs: Iterable[KvPair]) -> str:
    """Return the word that some names end with as with a token, but never both sides of a buffer.

    A rename adds a token to both sides. Another tool, such as a quantizer, appends a word to one.
    Empty if there is none, or several, or if it is the token of a consumer.
    """
    sides = [[side.token for side in pair.sides] for pair in pairs if len(pair.sides) == 2]
    words = {token for tokens in sides for token in tokens if token}
    is_appended = len(words) == 1 and all("" in tokens for tokens in sides)
    is_token = any(word.lower() in CONSUMER_TOKENS for word in words)
    return words.pop() if is_appended and not is_token else ""


def _check_duplicates(signature: Signature, plan: RenamePlan) -> Iterator[Finding]:
    for side, values in (("input", signature.inputs), ("output", signature.outputs)):
        for name, count in Counter(value.name for value in values).items():
            if count > 1 and name in plan.old_names:
                yield build_finding(
                    "KV106",
                    name,
                    f"is declared {count} times as a graph {side}",
                    "export the model again",
                )
    for duplicate in plan.duplicates:
        ambiguous_name = duplicate.name_with_token
        if ambiguous_name is not None:
            others = {duplicate.name: duplicate.token, duplicate.first_name: duplicate.first_token}
            token = others.pop(ambiguous_name)
            yield build_finding(
                "KV106",
                ambiguous_name,
                f"matches the rules as {next(iter(others))} with the token {token}, "
                "but that name exists without a token, too",
                "if it is not a KV buffer, exclude it in your rules: [[keep]] with a reason and a "
                "pattern",
            )
        elif duplicate.name != duplicate.first_name:
            yield build_finding(
                "KV106",
                duplicate.name,
                f"is the same buffer as {duplicate.first_name} by the rules: same part, same layer",
                "exclude one of the two in your rules: [[keep]] with a reason and a pattern",
            )


def _check_both_sides(
    pair: KvPair, inputs: set[str], fed_layers: set[int], plan: RenamePlan
) -> Iterator[Finding]:
    patterns = "" if plan.is_built_in else "; if it has one, correct the patterns of your rules"
    if pair.output is not None and pair.output.old_name in inputs:
        yield build_finding(
            "KV106",
            pair.output.old_name,
            "is both a graph input and a retained output, so the cache is never updated",
            "export without the token, then rename",
        )
    elif pair.may_be_alone:
        return
    elif pair.output is not None and pair.input is None:
        hint = "export the model again"
        if not fed_layers:  # no state has an input by this name, so perhaps by another
            hint = "add `--rules FILE` with rules that name it, as pairs writes them"
        elif pair.layer not in fed_layers and pair.output.old_name.endswith(_QEFFICIENT_SUFFIX):
            hint = WINDOW_SIZE_HINT
        yield build_finding(
            "KV101",
            pair.output.old_name,
            f"has no input, so the next step cannot read {pair.buffer} of layer {pair.layer}",
            f"{hint}{patterns}",
        )
    elif pair.output is None and pair.input is not None:
        hint = "export the model again"
        if any(unchanged.name.isdecimal() for unchanged in plan.unchanged_names):
            hint += " without use_onnx_subfunctions, which leaves outputs with bare numbers"
        yield build_finding(
            "KV102",
            pair.input.old_name,
            f"has no retained output, so {pair.buffer} of layer {pair.layer} is lost after a step",
            f"{hint}{patterns}",
        )


def _check_types(pair: KvPair, update: str) -> Iterator[Finding]:
    """Yield KV103 and KV104; other sizes are right where rules say that the output has them."""
    if pair.input is None or pair.output is None:
        return
    into, out = pair.input.value, pair.output.value
    if not is_dtype_compatible(into, out):
        yield build_finding(
            "KV103",
            out.name,
            f"is {out.dtype}, but its input {into.name} is {into.dtype}",
            "both sides of a buffer share one piece of memory; export the model again",
        )
    if into.shape is not None and out.shape is not None and is_other_shape(into, out, update):
        yield build_finding(
            "KV104",
            out.name,
            f"is {format_shape(out.shape)}, "
            f"but its input {into.name} is {format_shape(into.shape)}",
            "both sides of a buffer share one piece of memory; export the model again",
        )


def is_other_shape(into: Value, out: Value, update: str) -> bool:
    """Return whether the declared shapes of a pair do not fit, however rules say it is updated."""
    return (
        into.shape is not None
        and out.shape is not None
        and not is_shape_compatible(into.shape, out.shape)
        and not (update in _RESIZING_UPDATES and len(into.shape) == len(out.shape))
    )


def find_flat_values(plan: RenamePlan) -> dict[str, Value]:
    """Return the values with the name of a cache, but with too few axes, one of each pair.

    A state may have any axes, as what the user's own rules name, and the scales of a cache.
    """
    flat: dict[str, Value] = {}
    for pair in plan.pairs if plan.is_built_in else ():
        if not (pair.beside or is_state(pair.cache or pair.kind)):
            shapes = ((side.value, side.value.shape) for side in pair.sides)
            few = [value for value, shape in shapes if shape is not None and len(shape) < _MIN_RANK]
            flat.update((value.name, value) for value in few[:1])
    return flat


def _check_rank(flat: Mapping[str, Value]) -> Iterator[Finding]:
    """Yield KV125, once for all values with the name of a cache, but with too few axes."""
    if flat:
        shape = format_shape(next(iter(flat.values())).shape or ())
        yield build_names_finding(
            "KV125",
            list(flat),
            (
                f"is {shape}: a cache has at least {_MIN_RANK} axes, so this is a different value "
                "with the name of one",
                f"have fewer than {_MIN_RANK} axes ({shape}): these are different values with the "
                "names of caches",
            ),
            "if it is a KV buffer, say so in your own rules (--rules FILE)",
        )


def _check_usage(pair: KvPair, inputs: set[str], uses: NameUses) -> Iterator[Finding]:
    output = pair.output.old_name if pair.output is not None else None
    if output is not None and output not in uses.producer_op_types and output not in inputs:
        yield build_finding(  # of one that is an input, KV106 says that it is never updated
            "KV105",
            output,
            "is not produced by any node, so the buffer is never updated",
            "export the model again",
        )
    if pair.input is not None and pair.input.old_name not in uses.read_names:
        yield build_finding(
            "KV107",
            pair.input.old_name,
            "is not read by any node: the model ignores what the previous step retained",
            "check the export; harmless only if this layer shares another one's cache",
        )


def _check_suffixes(plan: RenamePlan) -> Iterator[Finding]:
    outputs = [
        pair.output for pair in plan.pairs if pair.output and not pair.output.has_normal_suffix
    ]
    if outputs:
        yield build_names_finding(
            "KV112",
            [output.old_name for output in outputs],
            (
                "has a suffix that some consumers do not match with its input",
                "have a suffix that some consumers do not match with their inputs",
            ),
            "a rename with `--normalize` makes the suffix _RetainedState",
        )


def _check_tokens(plan: RenamePlan) -> Iterator[Finding]:
    token = plan.token_change.final_token
    known, consumer = CONSUMER_TOKENS.get(token.lower(), (token, ""))
    if token != known and plan.pairs:
        yield build_finding(
            "KV204",
            "",
            f"the token {token} differs from {known} only in capitals; {consumer} selects names "
            f"with {known} and ignores these buffers",
            f"rename with `--prefix {known}{' --replace' if plan.token_counts else ''}`",
        )
    for runner in plan.runners if plan.name_map and not plan.token_change.strip else ():
        yield build_finding(
            "KV205",
            "",
            f"{runner} looks for the names of the export, so it does not run the renamed model",
            "keep a copy of the export for it",
        )
    sides = [side for pair in plan.pairs for side in pair.sides]
    sides += [feed.side for feed in plan.feeds]
    twice = f"_{token}_{token}"
    doubled = [s.old_name for s in sides if twice in s.new_name and twice not in s.old_name]
    if token and doubled:  # rules that list names know those of the model that they are made from
        unknown = f"{token}, which these rules do not know as a token"
        yield build_names_finding(
            "KV202",
            doubled,
            (f"already carries {unknown}", f"already carry {unknown}"),
            "use the rules of the rename that added it, or choose another token",
        )
    conflicting = [side for side in sides if not plan.token_change.can_replace(side.token)]
    if conflicting:
        tokens = sorted({side.token for side in conflicting})
        asked = plan.token_change.token
        different = f"a different token{f' than {asked}' if asked else ''}: {format_list(tokens)}"
        strip = "`--strip` removes any token"
        if len(tokens) == 1:
            strip = f"`--strip --prefix {quote_word(tokens[0])}` removes it"
        yield build_names_finding(
            "KV202",
            [side.old_name for side in conflicting],
            (f"already carries {different}", f"already carry {different}"),
            strip
            if plan.token_change.strip
            else "a rename with `--replace` replaces it, one with `--strip` removes it",
        )


def _check_layers(plan: RenamePlan) -> Iterator[Finding]:
    names_by_layer: dict[tuple[int, str], dict[str, str]] = {}
    mains_by_layer: dict[tuple[int, str], set[str]] = {}
    for pair in plan.pairs:
        key = pair.layer, pair.kind
        names_by_layer.setdefault(key, {})[pair.buffer] = pair.sides[0].old_name
        mains_by_layer.setdefault(key, set()).update({pair.beside} - {""})
    for (layer, kind), names in sorted(names_by_layer.items()):
        required = plan.required_parts[kind]
        mains = mains_by_layer[layer, kind]
        for buffer in dict.fromkeys((*required, *sorted(mains))):
            if buffer not in names:
                yield build_finding(
                    "KV108",
                    next(iter(names.values())),
                    f"is incomplete: layer {layer} has no {buffer}",
                    "check the export: consumers need all parts of a layer",
                )
    layers = sorted({pair.layer for pair in plan.pairs})
    gaps = [range(low + 1, high) for low, high in pairwise(layers) if high > low + 1]
    if gaps:
        first, last, missing = layers[0], layers[-1], format_layer_runs(gaps)
        yield build_finding(
            "KV109",
            "",
            f"the model has layers from {first} to {last}, but not {missing}",
            "check the export, unless these layers have no cache",
        )


def _check_unknown_states(plan: RenamePlan) -> Iterator[Finding]:
    for unchanged in plan.unchanged_names:
        if unchanged.reason == REASON_UNKNOWN:
            yield build_finding(
                "KV111",
                unchanged.name,
                "looks like a retained state, but no rule matches it, so it is not renamed",
                "if it is a KV buffer, add it to a rules file (`--rules FILE`, as pairs writes it)",
            )
        elif unchanged.reason == REASON_TOO_LONG:
            yield build_finding(
                "KV111",
                unchanged.name,
                f"has more than {MAX_MATCHED_CHARS:,} characters: no rule is tried on it, and it "
                "is not renamed",
                "export the model again with shorter names, if it is a KV buffer",
            )


def _check_collisions(plan: RenamePlan, uses: NameUses) -> Iterator[Finding]:
    old_names_by_new: dict[str, list[str]] = {}
    for old_name, new_name in plan.name_map.items():
        old_names_by_new.setdefault(new_name, []).append(old_name)
    for new_name, names in old_names_by_new.items():
        if len(names) > 1:
            old_names = format_list(names)
            yield build_finding(
                "KV201",
                new_name,
                f"would be the new name of {old_names}",
                "give both sides patterns in the rules that no name has in common",
            )
    for new_name, use in uses.taken_names.items():
        yield build_finding(
            "KV201",
            new_name,
            f"is already {use}",
            "choose another token, or rename that value first",
        )
    for new_name, use in uses.hidden_names.items():
        if new_name in uses.taken_names:
            continue
        finding = build_finding(
            "KV201",
            new_name,
            f"is already {use}; onnx or onnxruntime rejects such a model",
            "choose another token, or rename that value first",
        )
        # Removing a token may restore a model that was like this before.
        yield finding._replace(severity="warning") if plan.token_change.strip else finding
    for symbol in sorted(find_conflicting_symbols(uses.symbols, uses.producer_op_types, plan)):
        yield build_finding(
            "KV201",
            symbol,
            "is already a dimension; it would look like one derived from an output's new name",
            "choose another token, or rename that dimension first",
        )
