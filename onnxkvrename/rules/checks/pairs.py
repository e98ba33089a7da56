"""Check the KV pairs of one model, and what its new names would break."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.model.signature import NameUses, Signature, format_shape, is_shape_compatible
from onnxkvrename.rules.plan import REASON_UNKNOWN, KvPair, RenamePlan, find_conflicting_symbols
from onnxkvrename.rules.profile import Rules

WINDOW_SIZE_HINT = (
    "export again, layer by layer with layerwise_window_size=1: QEfficient gives larger windows "
    "the inputs of their first layer only"
)
"""How to export windows with all inputs; the same export again would lack them again."""

_RESIZING_UPDATES = ("append", "delta")


def check_pairs(signature: Signature, plan: RenamePlan, uses: NameUses) -> Iterator[Finding]:
    """Check the pairs of one model, as they are and as they will be after the rename.

    Args:
        signature: The model's graph inputs and outputs.
        plan: Its pairs, and their new names.
        uses: Where the graph uses the names that matter to the plan.

    Yields:
        Findings KV101 to KV109, KV111, KV112, KV201 and KV202.
    """
    yield from _check_duplicates(signature, plan)
    inputs = {value.name for value in signature.inputs}
    fed_layers = {pair.layer for pair in plan.pairs if pair.input is not None}
    for pair in plan.pairs:
        yield from _check_both_sides(pair, inputs, fed_layers)
        yield from _check_types(pair, plan.updates_by_kind.get(pair.kind, ""))
        yield from _check_usage(pair, inputs, uses)
        if not plan.token_change.normalize:
            yield from _check_suffix(pair)
    yield from _check_tokens(plan)
    yield from _check_layers(plan)
    yield from _check_unknown_states(plan)
    yield from _check_collisions(plan, uses)


def build_no_buffers_finding(outputs: Iterable[str], profile: str = "") -> Finding:
    """Return finding KV001 for a model without buffers.

    Args:
        outputs: The names of its outputs.
        profile: The profile that knows none of them, which the hint does not name.
    """
    from onnxkvrename.rules.load import find_profiles  # only after a mistake

    names = list(outputs)
    others = [name for name in find_profiles(names) if name != profile]
    return build_finding(
        "KV001",
        "",
        f"no KV buffer here: the outputs are {format_list(names)}"
        if names
        else "no KV buffer here",
        f"--profile {others[0]} knows these names"
        if others
        else "an encoder has no KV cache: pass the decoder; `onnxkvrename pairs` shows caches "
        "under names that no profile knows",
    )


def check_other_profiles(outputs: Iterable[str], rules: Rules) -> Iterator[Finding]:
    """Yield KV001 for a model without buffers, beside others, that another profile knows.

    It is an error where the rules were picked for the user, who may not know that they leave
    a model out, else a warning.

    Args:
        outputs: The names of its outputs.
        rules: The rules; only a built-in profile is compared with the others.
    """
    from onnxkvrename.rules.load import find_profiles, is_built_in  # only without buffers

    if not is_built_in(rules.name):
        return
    for name in find_profiles(list(outputs)):
        finding = build_finding(
            "KV001",
            "",
            f"profile {rules.name} knows no KV buffer here, but profile {name} does",
            f"use a command of its own for this model, with --profile {name}",
        )
        is_picked = rules.choice is not None and rules.choice.is_picked
        yield finding if is_picked else finding._replace(severity="warning")
        return


def _check_duplicates(signature: Signature, plan: RenamePlan) -> Iterator[Finding]:
    for side, values in (("input", signature.inputs), ("output", signature.outputs)):
        for name, count in Counter(value.name for value in values).items():
            if count > 1 and name in plan.old_names:
                yield build_finding(
                    "KV106", name, f"stands {count} times as graph {side}", "export the model again"
                )
    ambiguous = [item.name_with_token for item in plan.duplicates]
    keep_pattern = _build_keep_pattern(name for name in ambiguous if name is not None)
    for duplicate in plan.duplicates:
        ambiguous_name = duplicate.name_with_token
        if ambiguous_name is not None:
            others = {duplicate.name: duplicate.token, duplicate.first_name: duplicate.first_token}
            token = others.pop(ambiguous_name)
            yield build_finding(
                "KV106",
                ambiguous_name,
                f"is read as {next(iter(others))} with the token {token}, "
                "and that is there without one",
                "if it is something else, the rules have to leave it alone: "
                f"[[keep]] with a reason and pattern = '{keep_pattern}'",
            )
        elif duplicate.name != duplicate.first_name:
            yield build_finding(
                "KV106",
                duplicate.name,
                f"claims the same buffer as {duplicate.first_name}",
                "leave one of the two",
            )


def _build_keep_pattern(names: Iterable[str]) -> str:
    """Return a pattern that matches these names, and those of other layers."""
    parts = dict.fromkeys(re.sub("[0-9]+", "[0-9]+", re.escape(name)) for name in names)
    return "|".join(parts)


def _check_both_sides(pair: KvPair, inputs: set[str], fed_layers: set[int]) -> Iterator[Finding]:
    if pair.output is not None and pair.output.old_name in inputs:
        yield build_finding(
            "KV106",
            pair.output.old_name,
            "is a graph input and a retained output at once: the cache is never updated",
            "export without the token, then rename",
        )
    elif pair.may_be_alone:
        return
    elif pair.output is not None and pair.input is None:
        yield build_finding(
            "KV101",
            pair.output.old_name,
            f"has no input to carry {pair.buffer} of layer {pair.layer} into the next step",
            "the compiler refuses this model; export it again"
            if pair.layer in fed_layers
            else f"the compiler refuses this model; {WINDOW_SIZE_HINT}",
        )
    elif pair.output is None and pair.input is not None:
        yield build_finding(
            "KV102",
            pair.input.old_name,
            f"is a KV input, but no retained output hands {pair.buffer} of layer {pair.layer} on",
            "what is written to this buffer is lost; export the model again",
        )


def _check_types(pair: KvPair, update: str) -> Iterator[Finding]:
    """Yield KV103 and KV104; other sizes are right where rules say that the output has them."""
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
        and not (update in _RESIZING_UPDATES and len(into.shape) == len(out.shape))
    ):
        yield build_finding(
            "KV104",
            out.name,
            f"is {format_shape(out.shape)}, "
            f"but its input {into.name} is {format_shape(into.shape)}",
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
    sides = [side for pair in plan.pairs for side in pair.sides]
    sides += [feed.side for feed in plan.feeds]
    conflicting = [side for side in sides if not plan.token_change.can_replace(side.token)]
    if conflicting:
        tokens = format_list(sorted({side.token for side in conflicting}))
        yield build_finding(
            "KV202",
            conflicting[0].old_name,
            f"carries another token already, one of {len(conflicting)} such names: {tokens}",
            "--replace puts the new token in its place, --strip takes it out",
        )


def _check_layers(plan: RenamePlan) -> Iterator[Finding]:
    names_by_layer: dict[tuple[int, int, str], dict[str, str]] = {}
    mains_by_layer: dict[tuple[int, int, str], set[str]] = {}
    for pair in plan.pairs:
        key = pair.layer, pair.rule, pair.kind
        names_by_layer.setdefault(key, {})[pair.buffer] = pair.sides[0].old_name
        mains_by_layer.setdefault(key, set()).update({pair.beside} - {""})
    for (layer, rule, kind), names in sorted(names_by_layer.items()):
        required = plan.required_parts[rule, kind]
        mains = mains_by_layer[layer, rule, kind]
        for buffer in dict.fromkeys((*required, *sorted(mains))):
            if buffer not in names:
                yield build_finding(
                    "KV108",
                    next(iter(names.values())),
                    f"stands alone: layer {layer} has no {buffer}",
                    "check the export: the parts of a layer move together",
                )
    layers = sorted({pair.layer for pair in plan.pairs})
    gaps = [(low + 1, high - 1) for low, high in pairwise(layers) if high > low + 1]
    if gaps:
        missing = [f"{low}" if low == high else f"{low} to {high}" for low, high in gaps]
        yield build_finding(
            "KV109",
            "",
            f"layers {layers[0]} to {layers[-1]}, but without {format_list(missing)}",
            "check the export, unless these layers keep no cache",
        )


def _check_unknown_states(plan: RenamePlan) -> Iterator[Finding]:
    for unchanged in plan.unchanged_names:
        if unchanged.reason == REASON_UNKNOWN:
            yield build_finding(
                "KV111",
                unchanged.name,
                "is a retained state that no rule knows, and is left alone",
                "if it is KV, name it in a rules file (--rules FILE)",
            )


def _check_collisions(plan: RenamePlan, uses: NameUses) -> Iterator[Finding]:
    old_names_by_new: dict[str, list[str]] = {}
    for old_name, new_name in plan.name_map.items():
        old_names_by_new.setdefault(new_name, []).append(old_name)
    for new_name, names in old_names_by_new.items():
        if len(names) > 1:
            old_names = format_list(names)
            yield build_finding(
                "KV201", new_name, f"would be the new name of {old_names}", "mend the templates"
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
            f"is already {use}, which onnx and onnxruntime refuse",
            "choose another token, or rename that value first",
        )
        # Taking a token out may give back a model that was like this before.
        yield finding._replace(severity="warning") if plan.token_change.strip else finding
    for symbol in sorted(find_conflicting_symbols(uses.symbols, uses.producer_op_types, plan)):
        yield build_finding(
            "KV201",
            symbol,
            "is already a dimension, and would pass for one made of an output's new name",
            "choose another token, or rename that dimension first",
        )
