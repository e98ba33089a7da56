"""Make rules from the dataflow of a model, and check that they recognise exactly its caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError, RulesError
from onnxkvrename.files.read import ModelSource
from onnxkvrename.findings import quote_path
from onnxkvrename.model.file import open_model
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import REASON_UNKNOWN, RenamePlan, TokenChange, build_rename_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.rules_text import StateNames, clean_comment, split_suffix, write_rules
from onnxkvrename.verification.graph_bodies import read_graph
from onnxkvrename.verification.pairs.features import find_features
from onnxkvrename.verification.pairs.find_pairs import find_states
from onnxkvrename.verification.pairs.hidden_states import LoneState, StatePair
from onnxkvrename.verification.pairs.lone_states import find_lone_states, find_stopped_states

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


def infer_rules(model: TracedModel) -> InferredRules:
    """Return rules for the caches of a model, by the names that they have.

    Raises:
        RulesError: The model has no caches, or no rules recognise exactly those.
    """
    path = str(model.path)
    if not model.buffers:
        command = f"onnxkvrename inspect {quote_path(path)} --profile auto"
        reason = "no output is proved to be a later state of an input"
        if model.lone_states:
            reason = _describe_lone_state(model.lone_states[0])
        raise RulesError(
            f"no cache found in the graph: {reason}",
            path=path,
            hint=f"`{command}` shows what the model has",
        )
    states = [_name_state(pair) for pair in model.buffers]
    kept_names = dict(_list_kept_names(model))
    notes = {state.output: _describe_lone_state(state) for state in model.lone_states}
    text = write_rules(states, model.path.name, kept_names, notes)
    try:
        rules = parse_rules(text, _NAME)
        extra = _list_extra_names(model, rules)
        if extra:
            kept_names |= dict.fromkeys(extra, "not a state")
            text = write_rules(states, model.path.name, kept_names, notes)
            rules = parse_rules(text, _NAME)
    except RulesError as error:
        raise _build_misfit_error(f"they would not be valid: {error.message}", path) from None
    _check_exact(model, rules)
    return InferredRules(rules, text)


def draft_rules(model: TracedModel) -> str:
    """Return rules for what may be the caches of a model without proved ones, as comments.

    Raises:
        RulesError: The model has nothing like that, or a name cannot be written in TOML.
    """
    if model.buffers or not model.lone_states:
        return infer_rules(model).text
    values = {value.name: value for value in (*model.signature.inputs, *model.signature.outputs)}
    names = [_name_lone_state(values[s.input], values[s.output]) for s in model.lone_states]
    notes = [
        *map(_describe_lone_state, model.lone_states),
        "If these are caches, remove the first two characters of each line below.",
    ]
    rows = (row for row in write_rules(names, "").splitlines() if not row.startswith("#"))
    lines = [
        *(f"## {clean_comment(note)}" for note in notes),
        *(f"# {row}".rstrip() for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _describe_lone_state(state: LoneState) -> str:
    return (
        f"{state.output} may be a later state of {state.input}, which is not proved: {state.reason}"
    )


def find_last_word(model: TracedModel) -> str:
    """Return the word with a capital letter that all names end with, as tokens do; or nothing."""
    pairs = model.list_names()
    word = pairs[0][0].rpartition("_")[2] if pairs else ""
    is_last = word != word.lower() and all(carries_token(pair, word) for pair in pairs)
    return word if is_last else ""


def carries_token(names: tuple[str, str], token: str) -> bool:
    """Return whether an input and its output have a token where a rename puts it."""
    name, output = names
    return name.endswith(f"_{token}") and (output.startswith(name) or output.endswith(f"_{token}"))


def _list_kept_names(model: TracedModel) -> Iterator[tuple[str, str]]:
    """Yield names that are not those of caches, though they may look so, with the reasons."""
    for state in model.lone_states:
        yield state.output, REASON_UNKNOWN
    for pair in model.pairs:
        if pair.input.name in model.features:
            yield pair.input.name, "features"
            yield pair.output.name, "features"


def _build_misfit_error(reason: str, path: str) -> RulesError:
    return RulesError(f"no rules fit the caches of this model: {reason}", path=path)


def _name_state(pair: StatePair) -> StateNames:
    output, suffix = split_suffix(pair.input.name, pair.output.name)
    update: str = pair.update.kind
    if update == "shift":  # where it is declared to grow, as genai does, nothing is said
        update = "inplace" if pair.input.shape == pair.output.shape else ""
    is_quantized = "INT" in pair.input.dtype
    return StateNames(pair.input.name, output, suffix, _choose_kind(pair), update, is_quantized)


def _name_lone_state(source: Value, output: Value) -> StateNames:
    name, suffix = split_suffix(source.name, output.name)
    rank = len(source.shape or output.shape or ())
    update = "inplace" if source.shape is not None and source.shape == output.shape else ""
    kind = "linear" if rank == 3 else "attention"
    return StateNames(source.name, name, suffix, kind, update, "INT" in source.dtype)


def _choose_kind(pair: StatePair) -> str:
    """Return the kind of a state, by how it is updated and whether it has an axis of positions."""
    if pair.update.kind == "once":
        return "cross"
    rank = len(pair.input.shape or ())
    if pair.is_computed or (pair.update.kind == "shift" and rank == 3):
        return "linear"
    return "attention"


def _list_extra_names(model: TracedModel, rules: Rules) -> list[str]:
    """Return the names that rules recognise, but that are of no cache."""
    names = {value.name for pair in model.buffers for value in (pair.input, pair.output)}
    sides = (("input", model.signature.inputs), ("output", model.signature.outputs))
    extra = (
        value.name
        for side, values in sides
        for value in values
        if value.name not in names and rules.match(side, value.name) is not None
    )
    return list(dict.fromkeys(extra))


def _check_exact(model: TracedModel, rules: Rules) -> None:
    """Raise RulesError unless rules recognise exactly the caches of a model."""
    plan = build_rename_plan(model.signature, rules, TokenChange(None))
    expected = {pair.input.name: pair.output.name for pair in model.buffers}
    names = {name for pair in expected.items() for name in pair}
    wrong = sorted(plan.old_names ^ names) or [item.name for item in plan.duplicates]
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
