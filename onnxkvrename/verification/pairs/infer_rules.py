"""Make rules from the dataflow of a model, and check that they recognise exactly its caches."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError, RulesError
from onnxkvrename.files.read import ModelSource
from onnxkvrename.limits import shorten_text
from onnxkvrename.model.file import open_model
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.name_patterns import (
    KvTable,
    Nature,
    PlacedState,
    StateNames,
    build_tables,
    join_natures,
)
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import REASON_UNKNOWN, RenamePlan, TokenChange, build_rename_plan
from onnxkvrename.rules.profile import EXAMPLE_TOKEN, UPDATES, NameMatch, Rules
from onnxkvrename.rules.rules_text import clean_comment, find_suffixes, split_end, write_rules
from onnxkvrename.text import quote_path
from onnxkvrename.verification.graph_bodies import read_graph
from onnxkvrename.verification.pairs.features import find_features
from onnxkvrename.verification.pairs.find_pairs import find_states
from onnxkvrename.verification.pairs.hidden_states import LoneState, StatePair
from onnxkvrename.verification.pairs.lone_states import find_lone_states, find_stopped_states

_DIGITS = re.compile("[0-9]+")
_RANK_OF_STACK = 5
"""The axes of a cache with keys and values one after the other, 2 by batch and heads."""
_NAME = "pairs"
"""What messages call rules that were made from the dataflow."""


class TracedModel(NamedTuple):
    """A model with the pairs that its dataflow shows.

    Attributes:
        path: The model.
        signature: Its graph inputs and outputs.
        pairs: Each input that an output is a later state of, with that output.
        features: The inputs of pairs that are not caches, such as the features of a picture.
        lone_states: Outputs that look like later states of inputs, though nothing proves it.
        node_count: The number of nodes that were read for it.
    """

    path: Path
    signature: Signature
    pairs: tuple[StatePair, ...]
    features: frozenset[str] = frozenset()
    lone_states: tuple[LoneState, ...] = ()
    node_count: int = 0

    @property
    def buffers(self) -> tuple[StatePair, ...]:
        """The pairs that are caches."""
        return tuple(pair for pair in self.pairs if pair.input.name not in self.features)

    def list_names(self) -> list[tuple[str, str]]:
        """Return the input and the output of each cache; without one, of what may be caches."""
        if self.buffers:
            return [(pair.input.name, pair.output.name) for pair in self.buffers]
        return [(state.input, state.output) for state in self.lone_states]


class InferredRules(NamedTuple):
    """Rules that recognise the caches of a model and nothing else, and the same in TOML."""

    rules: Rules
    text: str


def trace_model(path: ModelSource) -> TracedModel:
    """Find the pairs of a model.

    Raises:
        ModelError: The file is not a readable model, or may have too many states.
    """
    with open_model(path) as opened:
        traced = trace_source(opened.source, opened.signature, opened.file.path)
    assert traced is not None  # without a limit
    return traced


def trace_source(
    source: ByteSource, signature: Signature, path: Path, max_nodes: int | None = None
) -> TracedModel | None:
    """Find the pairs of a model that is open or in memory; ``None`` beyond `max_nodes` nodes.

    Raises:
        ModelError: The model cannot be read, or may have too many states.
    """
    try:
        graph = read_graph(source)
        node_count = sum(body.size for body in (graph.main, *graph.functions.values()))
        if max_nodes is not None and node_count > max_nodes:
            return None
        states = find_states(graph, signature)
    except ModelError as error:
        raise source.build_error(error.message, hint=error.hint) from None
    if states.pairs:
        lone = find_lone_states(graph, states.pairs, signature)
    else:
        lone = find_stopped_states(graph, signature)
    unproved = {state.output: state for state in (*lone, *states.unproved)}
    return TracedModel(
        path,
        signature,
        states.pairs,
        find_features(graph, states.pairs),
        tuple(unproved.values()),
        node_count,
    )


def infer_rules(*models: TracedModel) -> InferredRules:
    """Return rules for the caches of a model, or of several whose names are those of one exporter.

    A pattern is in them only if it reads back: it matches caches that were found, each with its
    layer and part, and no other value of a model. All other names are listed.

    Raises:
        RulesError: A model has no caches, two of them contradict each other, or no rules recognise
            exactly the caches.
    """
    found = _list_found(models)
    for model, own in zip(models, found, strict=True):
        if not own:
            raise _build_no_cache_error(model)
    states = _join_states(models, found)
    kept = dict(_list_kept_names(models, states))
    listed: set[str] = set()
    try:
        while True:
            tables = build_tables(states, listed)
            text = _write_text(models, tables, kept)
            rules = parse_rules(text, _NAME)
            extra, misread = _find_misread(models, tables, rules)
            if not extra and not misread:
                break
            kept |= dict.fromkeys(extra, "not a state")
            listed |= {state.input for state in states} if listed and misread else misread
    except RulesError as error:
        path = str(models[0].path)
        raise _build_misfit_error(f"they would not be valid: {error.message}", path) from None
    for model, own in zip(models, found, strict=True):
        _check_exact(model, rules, {name for _, name in own})
    return InferredRules(rules, text)


def draft_rules(*models: TracedModel) -> str:
    """Return rules for what may be the caches of models without proved ones, as comments.

    Raises:
        RulesError: The models have nothing like that, or a name cannot be written in TOML.
    """
    lone = {state.output: state for model in models for state in model.lone_states}
    if not lone or any(model.buffers for model in models):
        return infer_rules(*models).text
    values = {
        value.name: value
        for model in models
        for value in (*model.signature.inputs, *model.signature.outputs)
    }
    names = [_name_lone_state(values[s.input], values[s.output]) for s in lone.values()]
    tables = build_tables(names, {state.input for state in names})
    notes = [
        *map(_describe_lone_state, lone.values()),
        "If these are caches, remove the first two characters of each line below.",
    ]
    rows = (row for row in write_rules(tables, "").splitlines() if not row.startswith("#"))
    lines = [
        *(f"## {clean_comment(note)}" for note in notes),
        *(f"# {row}".rstrip() for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _build_no_cache_error(model: TracedModel) -> RulesError:
    command = f"onnxkvrename inspect {quote_path(str(model.path))} --profile auto"
    reason = "no output is proved to be a later state of an input"
    if model.lone_states:
        reason = _describe_lone_state(model.lone_states[0])
    return RulesError(
        f"no cache found in the graph: {reason}",
        path=str(model.path),
        hint=f"`{command}` shows what the model has",
    )


def _describe_lone_state(state: LoneState) -> str:
    return (
        f"{state.output} may be a later state of {state.input}, which is not proved: {state.reason}"
    )


def find_last_word(model: TracedModel) -> str:
    """Return the word with a capital letter that all names end with, as tokens do; or nothing."""
    pairs = model.list_names()
    word = split_end(pairs[0][0])[0].rpartition("_")[2] if pairs else ""
    is_last = word != word.lower() and all(carries_token(pair, word) for pair in pairs)
    return word if is_last else ""


def carries_token(names: tuple[str, str], token: str) -> bool:
    """Return whether an input and its output have a token where a rename puts it."""
    name, output = names
    (stem, _), (output_stem, _) = map(split_end, names)
    has_word = name.endswith(f"_{token}") or stem.endswith(f"_{token}")
    return has_word and (output.startswith(name) or output_stem.endswith(f"_{token}"))


def _list_found(models: Sequence[TracedModel]) -> list[frozenset[tuple[str, str]]]:
    """Return the names of the caches of each model, each with its side.

    A model without caches has the outputs of others' caches alone: it makes the first step, and
    has no cache as an input.
    """
    found = [{name for pair in model.buffers for name in _list_sides(pair)} for model in models]
    outputs = {(side, name) for side, name in set().union(*found) if side == "output"}
    return [
        frozenset(own or outputs.intersection(_list_values(model)))
        for own, model in zip(found, models, strict=True)
    ]


def _list_sides(pair: StatePair) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("input", pair.input.name), ("output", pair.output.name)


def _join_states(
    models: Sequence[TracedModel], found: Sequence[Collection[tuple[str, str]]]
) -> list[StateNames]:
    """Return the caches of all models, each once.

    Args:
        models: The models.
        found: The names of the caches of each, as :func:`_list_found` returns them.

    Raises:
        RulesError: Two models contradict each other.
    """
    owners: dict[tuple[str, str], tuple[StatePair, TracedModel]] = {}
    states: dict[str, StateNames] = {}
    for model in models:
        for pair in model.buffers:
            state = _name_state(pair)
            for key in _list_sides(pair):
                first, owner = owners.setdefault(key, (pair, model))
                if _list_sides(first) != _list_sides(pair):
                    raise _build_contradiction(key[1], owner, model)
            known = states.setdefault(state.input, state)
            nature = join_natures((known.nature, state.nature))
            if nature is None:
                raise _build_contradiction(state.input, owners["input", state.input][1], model)
            states[state.input] = known._replace(nature=nature)
    members: dict[str, set[int]] = {}
    alone: set[str] = set()
    for number, (model, own) in enumerate(zip(models, found, strict=True)):
        for key in _list_values(model):
            if key in owners and key not in own:
                raise _build_contradiction(key[1], owners[key][1], model)
        for _, name in own:
            members.setdefault(name, set()).add(number)
        if not model.buffers:
            alone |= {name for _, name in own}
    return [
        state._replace(
            nature=state.nature._replace(is_alone=state.output in alone),
            models=frozenset(members[state.output]),
        )
        for state in states.values()
    ]


def _build_contradiction(name: str, first: TracedModel, second: TracedModel) -> RulesError:
    """Return the error about a name that is not in the same cache of two models."""

    def describe(model: TracedModel) -> str:
        for pair in model.buffers:
            if name in (pair.input.name, pair.output.name):
                names = f"{shorten_text(pair.input.name)} -> {shorten_text(pair.output.name)}"
                return f"{names} {pair.update.label or 'is a cache'} in {model.path}"
        return f"{shorten_text(name)} is not a cache in {model.path}"

    command = f"onnxkvrename pairs {quote_path(str(second.path))} --as rules"
    return RulesError(
        f"one rules file cannot be for both: {describe(first)}, but {describe(second)}",
        hint=f"write one for each model: `{command}`",
    )


def _list_values(model: TracedModel) -> Iterator[tuple[str, str]]:
    """Yield the names of all inputs and outputs, each with its side."""
    yield from (("input", value.name) for value in model.signature.inputs)
    yield from (("output", value.name) for value in model.signature.outputs)


def _list_kept_names(
    models: Iterable[TracedModel], states: Iterable[StateNames]
) -> Iterator[tuple[str, str]]:
    """Yield names that are not those of caches, though they may look so, with the reasons."""
    names = {state.output for state in states}
    for model in models:
        for state in model.lone_states:
            if state.output not in names:
                yield state.output, REASON_UNKNOWN
        for pair in model.pairs:
            if pair.input.name in model.features:
                yield pair.input.name, "features"
                yield pair.output.name, "features"


def _write_text(
    models: Sequence[TracedModel], tables: Sequence[KvTable], kept: Mapping[str, str]
) -> str:
    """Return the rules with the names that they leave alone.

    Names that differ in numbers become one pattern, if all such names are left alone.
    """
    alike: dict[str, set[str]] = {}
    for _, name in chain.from_iterable(map(_list_values, models)):
        alike.setdefault(_DIGITS.sub("0", name), set()).add(name)
    keep = {}
    for name, reason in kept.items():
        are_all = all(kept.get(each) == reason for each in alike[_DIGITS.sub("0", name)])
        is_pattern = are_all and any(table.is_pattern for table in tables)
        pattern = re.escape(name)
        keep[_DIGITS.sub("[0-9]+", pattern) if is_pattern else pattern] = reason
    lone = [state for model in models for state in model.lone_states if state.output in kept]
    notes = {REASON_UNKNOWN: [*dict.fromkeys(map(_describe_lone_state, lone))]}
    return write_rules(tables, ", ".join(model.path.name for model in models), keep, notes)


def _find_misread(
    models: Iterable[TracedModel], tables: Sequence[KvTable], rules: Rules
) -> tuple[set[str], set[str]]:
    """Return the names that rules recognise though they are of no cache, to be left alone.

    Then the inputs of caches in patterns that do not read back.
    """
    expected: dict[tuple[str, str], tuple[int, PlacedState, str]] = {}
    for number, table in enumerate(tables):
        for state in table.states:
            names = state.names
            new_names = names.add_token(EXAMPLE_TOKEN)
            expected["input", names.input] = number, state, new_names[0]
            expected["output", names.output] = number, state, new_names[1]
    extra: set[str] = set()
    misread: set[int] = set()
    for side, name in dict.fromkeys(chain.from_iterable(map(_list_values, models))):
        match = rules.match(side, name)
        if (side, name) in expected:
            number, state, new_name = expected[side, name]
            if tables[number].is_pattern and not _is_read_back(
                match, number, state, new_name, rules
            ):
                misread.add(number)
            if match is not None and match.rule.number != number:
                misread.add(match.rule.number)
        elif match is not None and (match.token or not tables[match.rule.number].is_pattern):
            extra.add(name)
        elif match is not None:
            misread.add(match.rule.number)
    patterns = [tables[number] for number in misread if tables[number].is_pattern]
    return extra, {state.names.input for table in patterns for state in table.states}


def _is_read_back(
    match: NameMatch | None, number: int, state: PlacedState, new_name: str, rules: Rules
) -> bool:
    """Return whether a name is read as the one of a cache, and gets the token in its place."""
    if match is None or match.token or match.rule.number != number:
        return False
    if (match.part, match.layer) != (state.part, state.layer):
        return False
    with suppress(RulesError):
        return rules.rename(match, EXAMPLE_TOKEN) == new_name
    return False


def _build_misfit_error(reason: str, path: str) -> RulesError:
    return RulesError(f"no rules fit the caches of this model: {reason}", path=path)


def _name_state(pair: StatePair) -> StateNames:
    names = pair.input.name, pair.output.name
    update: str = pair.update.kind
    if update == "shift":  # where it is declared to grow, as genai does, nothing is said
        update = "inplace" if pair.input.shape == pair.output.shape else ""
    nature = Nature(_choose_kind(pair), update if update in UPDATES else "")
    shape = pair.input.shape or ()
    return StateNames(
        *names,
        find_suffixes(*names),
        nature,
        is_quantized="INT" in pair.input.dtype,
        is_stack=len(shape) == _RANK_OF_STACK and shape[0] == 2,
    )


def _name_lone_state(source: Value, output: Value) -> StateNames:
    suffixes = find_suffixes(source.name, output.name)
    rank = len(source.shape or output.shape or ())
    update = "inplace" if source.shape is not None and source.shape == output.shape else ""
    nature = Nature("linear" if rank == 3 else "attention", update)
    return StateNames(source.name, output.name, suffixes, nature, "INT" in source.dtype)


def _choose_kind(pair: StatePair) -> str:
    """Return the kind of a state, by how it is updated and whether it has an axis of positions."""
    if pair.update.kind == "once":
        return "cross"
    rank = len(pair.input.shape or ())
    if pair.is_computed or (pair.update.kind == "shift" and rank == 3):
        return "linear"
    return "attention"


def _check_exact(model: TracedModel, rules: Rules, names: Collection[str]) -> None:
    """Raise RulesError unless rules recognise exactly the caches of a model, which have `names`."""
    plan = build_rename_plan(model.signature, rules, TokenChange(None))
    expected = {pair.input.name: pair.output.name for pair in model.buffers}
    wrong = sorted(plan.old_names.symmetric_difference(names)) or [
        item.name for item in plan.duplicates
    ]
    if not wrong and _map_planned_pairs(plan) != expected:
        wrong = sorted(names)
    if wrong:
        raise _build_misfit_error(f"{wrong[0]} would be mistaken for another one", str(model.path))


def _map_planned_pairs(plan: RenamePlan) -> Mapping[str, str]:
    """Return the names of the complete pairs of a plan, input to output."""
    return {
        pair.input.old_name: pair.output.old_name
        for pair in plan.pairs
        if pair.input is not None and pair.output is not None
    }
