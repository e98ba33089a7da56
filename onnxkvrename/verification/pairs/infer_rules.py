"""Make rules from the dataflow of models, and check that they recognise exactly its pairs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError, RulesError
from onnxkvrename.findings import format_list, quote_path
from onnxkvrename.model.file import open_model
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import Signature
from onnxkvrename.rules.load import DATAFLOW_RULES
from onnxkvrename.rules.name_tokens import (
    NamedModel,
    NamedPair,
    find_tokens,
    has_token,
    select_for_token,
    split_token,
)
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import REASON_UNKNOWN, RenamePlan, TokenChange, build_rename_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.rules_text import StateNames, write_rules
from onnxkvrename.storage.read import ModelSource
from onnxkvrename.verification.graph_bodies import read_graph
from onnxkvrename.verification.pairs.features import find_features
from onnxkvrename.verification.pairs.find_pairs import find_state_pairs
from onnxkvrename.verification.pairs.hidden_states import StatePair
from onnxkvrename.verification.pairs.lone_states import LoneState, find_lone_states


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


class InferredRules(NamedTuple):
    """Rules that recognise the pairs of the dataflow and nothing else, and the same in TOML."""

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
        pairs = find_state_pairs(graph, signature)
    except ModelError as error:
        raise source.build_error(error.message, hint=error.hint) from None
    return TracedModel(
        path,
        signature,
        pairs,
        find_features(graph, pairs),
        find_lone_states(graph, pairs, signature),
        node_count,
    )


def infer_rules(models: Sequence[TracedModel], tokens: Collection[str] = ()) -> InferredRules:
    """Return rules for the buffers of some models, which hold for each of them.

    Buffers are all pairs, except for features without a token, and for pairs without a token that
    are unlike those with one.

    Names may carry the tokens already; the rules list them without.

    Raises:
        RulesError: No model has pairs, or no rules recognise exactly the buffers of each model.
    """
    kept_names: dict[str, str] = {}
    chosen = [_choose_buffers(model, tokens, kept_names) for model in models]
    states: dict[tuple[str, str, str], StateNames] = {}
    for model in chosen:
        for pair in model.pairs:
            state = _name_state(pair, tokens)
            states.setdefault((state.input, state.output, state.suffix), state)
    title = format_list([model.path.name for model in models if model.pairs])
    if not states:
        path = str(models[0].path)
        command = f"onnxkvrename inspect {quote_path(path)} --profile auto"
        raise RulesError(
            "no cache found in the graph: no output is proved to be a later state of an input",
            path=path if len(models) == 1 else None,
            hint=f"`{command}` shows what the model has",
        )
    ordered = list(states.values())
    notes = {
        state.output: f"{state.output} may be a later state of {state.input}, which is not proved: "
        f"{state.reason}"
        for model in models
        for state in model.lone_states
    }
    text = write_rules(ordered, title, kept_names, notes)
    try:
        rules = parse_rules(text, DATAFLOW_RULES)
        extra = _list_extra_names(chosen, rules)
        if extra:
            kept_names |= dict.fromkeys(extra, "not a state")
            text = write_rules(ordered, title, kept_names, notes)
            rules = parse_rules(text, DATAFLOW_RULES)
    except RulesError as error:
        raise _build_misfit_error(f"the rules would not be valid: {error.message}") from None
    for model in chosen:
        _check_exact(model, rules)
    return InferredRules(rules, text)


def find_last_word(pairs: Sequence[StatePair]) -> str:
    """Return the word with a capital letter that all names end with, as tokens do; or nothing."""
    word = pairs[0].input.name.rpartition("_")[2] if pairs else ""
    is_last = word != word.lower() and all(carries_token(pair, word) for pair in pairs)
    return word if is_last else ""


def carries_token(pair: StatePair, token: str) -> bool:
    """Return whether both names of a pair have a token where a rename puts it."""
    name, output = pair.input.name, pair.output.name
    return name.endswith(f"_{token}") and (output.startswith(name) or output.endswith(f"_{token}"))


def find_carried_tokens(models: Iterable[TracedModel], requested: str = "") -> tuple[str, ...]:
    """Return the tokens that names of buffers carry.

    A command was told the `requested` one; empty for none.

    Raises:
        RulesError: `requested` may be a part of the names, or is in another place.
    """
    return find_tokens([_name_model(model) for model in models], requested)


def _name_model(model: TracedModel) -> NamedModel:
    names = {value.name for value in (*model.signature.inputs, *model.signature.outputs)}
    caches = [pair for pair in model.pairs if pair.input.name not in model.features]
    return NamedModel([_name_pair(pair) for pair in caches], names)


def _name_pair(pair: StatePair) -> NamedPair:
    update = pair.update.kind, pair.input.dtype
    return NamedPair(pair.input.name, pair.output.name, update, pair.input.shape)


def _choose_buffers(
    model: TracedModel, tokens: Collection[str], kept_names: dict[str, str]
) -> TracedModel:
    """Return a model with those of its pairs that are buffers, and note why others are none."""
    kept_names |= {state.output: REASON_UNKNOWN for state in model.lone_states}
    named = [_name_pair(pair) for pair in model.pairs]
    is_chosen = select_for_token(named, tokens)
    buffers = []
    for pair, names, should_carry in zip(model.pairs, named, is_chosen, strict=True):
        if pair.input.name in model.features and not has_token(names, tokens):
            kept_names |= dict.fromkeys((names.input, names.output), "features")
        elif should_carry:
            buffers.append(pair)
        else:
            kept_names[names.output] = REASON_UNKNOWN
    return model._replace(pairs=tuple(buffers))


def _build_misfit_error(reason: str, path: str | None = None) -> RulesError:
    return RulesError(
        f"no rules fit the dataflow of all models: {reason}",
        path=path,
        hint="name the models one by one",
    )


def _name_state(pair: StatePair, tokens: Collection[str]) -> StateNames:
    core, output, suffix = split_token(pair.input.name, pair.output.name, tokens)
    update: str = pair.update.kind
    if update == "shift":  # where it is declared to grow, as genai does, nothing is said
        update = "inplace" if pair.input.shape == pair.output.shape else ""
    is_quantized = "INT" in pair.input.dtype
    return StateNames(core, output, suffix, _choose_kind(pair), update, is_quantized)


def _choose_kind(pair: StatePair) -> str:
    """Return the kind of a state, by how it is updated and whether it has an axis of positions."""
    if pair.update.kind == "once":
        return "cross"
    rank = len(pair.input.shape or ())
    if pair.is_computed or (pair.update.kind == "shift" and rank == 3):
        return "linear"
    return "attention"


def _map_planned_pairs(plan: RenamePlan) -> Mapping[str, str]:
    """Return the names of the complete pairs of a plan, input to output."""
    return {
        pair.input.old_name: pair.output.old_name
        for pair in plan.pairs
        if pair.input is not None and pair.output is not None
    }


def _list_extra_names(models: Iterable[TracedModel], rules: Rules) -> list[str]:
    """Return the names that rules recognise, but are of no pair in any model."""
    paired = {
        value.name
        for model in models
        for pair in model.pairs
        for value in (pair.input, pair.output)
    }
    extra: dict[str, None] = {}
    for model in models:
        signature = model.signature
        for side, values in (("input", signature.inputs), ("output", signature.outputs)):
            extra.update(
                (value.name, None)
                for value in values
                if value.name not in paired and rules.match(side, value.name) is not None
            )
    return list(extra)


def _check_exact(model: TracedModel, rules: Rules) -> None:
    """Raise RulesError unless rules recognise exactly the pairs of a model."""
    plan = build_rename_plan(model.signature, rules, TokenChange(None))
    expected = {pair.input.name: pair.output.name for pair in model.pairs}
    names = {name for pair in expected.items() for name in pair}
    wrong = sorted(plan.old_names ^ names) or [item.name for item in plan.duplicates]
    if not wrong and _map_planned_pairs(plan) != expected:
        wrong = sorted(names)
    if wrong:
        reason = (
            f"{wrong[0]} is a state in one of them, but not in this one, or with a different output"
        )
        raise _build_misfit_error(reason, str(model.path))
