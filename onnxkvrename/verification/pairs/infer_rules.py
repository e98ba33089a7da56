"""Make rules from the dataflow of models, and check that they recognise exactly its pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError, RulesError
from onnxkvrename.findings import format_list
from onnxkvrename.model.file import open_model
from onnxkvrename.model.signature import Signature
from onnxkvrename.rules.load import parse_rules
from onnxkvrename.rules.plan import RenamePlan, TokenChange, build_rename_plan
from onnxkvrename.rules.profile import Rules, find_token_error
from onnxkvrename.rules.suggestion.frames import StateNames, split_token
from onnxkvrename.rules.suggestion.rules_text import SuggestedRules, write_rules
from onnxkvrename.verification.pairs.find_pairs import find_state_pairs
from onnxkvrename.verification.pairs.hidden_states import StatePair
from onnxkvrename.verification.strip_weights import read_model_without_weights

_RULES_NAME = "dataflow"
"""What messages call rules that were made from the dataflow."""


class TracedModel(NamedTuple):
    """A model with the pairs that its dataflow shows.

    Attributes:
        path: The model.
        signature: Its graph inputs and outputs.
        pairs: Each input that an output is a later state of, with that output.
    """

    path: Path
    signature: Signature
    pairs: tuple[StatePair, ...]


class InferredRules(NamedTuple):
    """Rules that recognise the pairs of the dataflow, and nothing else.

    Attributes:
        rules: The rules, ready for use.
        suggestion: Their text, and the names that are only listed in it.
    """

    rules: Rules
    suggestion: SuggestedRules


def trace_model(path: Path) -> TracedModel:
    """Find the pairs of a model.

    Args:
        path: The model.

    Raises:
        ModelError: The file is not a readable model, or may have too many states.
    """
    with open_model(path) as opened:
        model = read_model_without_weights(opened.source)
        try:
            pairs = find_state_pairs(model, opened.signature)
        except ModelError as error:
            raise opened.source.build_error(error.message, hint=error.hint) from None
        return TracedModel(path, opened.signature, pairs)


def infer_rules(models: Sequence[TracedModel], token: str = "") -> InferredRules:
    """Return rules for the pairs of some models, which hold for each of them.

    Args:
        models: The models with their pairs.
        token: The token that names may carry already, and the only one that the rules
            recognise; empty for none, and rules that recognise any.

    Raises:
        RulesError: No model has pairs, or no rules recognise exactly those of each model.
    """
    states: dict[tuple[str, str, str], StateNames] = {}
    for model in models:
        for pair in model.pairs:
            state = _name_state(pair, token)
            states.setdefault((state.input, state.output, state.suffix), state)
    title = format_list([model.path.name for model in models if model.pairs])
    if not states:
        raise RulesError(
            "the graph has no state: no output is a later state of an input",
            path=str(models[0].path) if len(models) == 1 else None,
            hint="`onnxkvrename inspect MODEL... --profile auto` shows what the model has",
        )
    ordered = list(states.values())
    suggestion = write_rules(ordered, title, token)
    try:
        rules = parse_rules(suggestion.text, _RULES_NAME)
        extra = _list_extra_names(models, rules)
        if extra:
            suggestion = write_rules(ordered, title, token, extra)
            rules = parse_rules(suggestion.text, _RULES_NAME)
    except RulesError as error:
        raise _build_misfit_error(f"the rules would not be valid: {error.message}") from None
    for model in models:
        _check_exact(model, rules)
    return InferredRules(rules, suggestion)


def find_common_token(models: Iterable[TracedModel]) -> str:
    """Return the token that all names of pairs carry, if there is one.

    The graph does not tell a token from a part of a name. So a token needs a capital letter
    here, as those of all known consumers have, and must be on both sides of each pair.

    Args:
        models: The models with their pairs.

    Returns:
        The token; empty if names carry none, several ones or one in lower case.
    """
    pairs = [pair for model in models for pair in model.pairs]
    token = pairs[0].input.name.rpartition("_")[2] if pairs else ""
    if find_token_error(token) is not None or token == token.lower():
        return ""
    return token if all(_carries(pair, token) for pair in pairs) else ""


def _carries(pair: StatePair, token: str) -> bool:
    core, output, suffix = split_token(pair.input.name, pair.output.name, token)
    names = f"{core}_{token}", f"{output}_{token}{suffix}"
    return names == (pair.input.name, pair.output.name)


def _build_misfit_error(reason: str, path: str | None = None) -> RulesError:
    return RulesError(
        f"no rules fit the dataflow of all models: {reason}",
        path=path,
        hint="name the models one by one",
    )


def _name_state(pair: StatePair, token: str) -> StateNames:
    core, output, suffix = split_token(pair.input.name, pair.output.name, token)
    update = "inplace" if pair.update.kind == "shift" else pair.update.kind
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
