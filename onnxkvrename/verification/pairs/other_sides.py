"""Say which value the graph pairs with a buffer of which the rules match one side alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import ModelError, RulesError
from onnxkvrename.files.read import is_in_memory
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.lone_sides import list_lone_sides
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.rules.request import RULES_FILE
from onnxkvrename.text import quote_path
from onnxkvrename.verification.pairs.infer_rules import infer_rules, trace_source

OWN_RULES_HINT = "add `--rules FILE` with the rules of the rename"
"""How to name the buffers of a model that carries a token under names that no profile matches."""
MEMORY_HINT = "save the model to a file, and pass rules=onnxkvrename.suggest_rules(PATH)"
"""How to rename a model in memory whose names no profile matches."""
MEMORY_DRAFT_HINT = "if these are caches, write rules for their names, and pass them as rules=PATH"
"""The same where nothing proves what rules would rename."""
_REPLACED = ("KV101", "KV102", "KV111")
"""Findings that say less about a name than its other side does."""


def join_commands(path: str, command: str, others: Iterable[str] = ()) -> str:
    """Return the command that writes rules for a model, and the one that uses them.

    Args:
        path: The model.
        command: The second command, with that file of rules.
        others: Further models that the rules are for.
    """
    paths = " ".join(map(quote_path, (path, *others)))
    rules = f"onnxkvrename pairs {paths} --as rules > {RULES_FILE}"
    return f"`{rules}`, then `{command}`"


def join_draft_commands(path: str, command: str) -> str:
    """Return the same where rules are only drafted, as nothing proves what they would rename."""
    rules = f"onnxkvrename pairs {quote_path(path)} --as rules > {RULES_FILE}"
    return (
        f"if these are caches, name them in rules: `{rules}` drafts some as comments; remove the # "
        f"where they are right, then `{command}`; if this is an encoder, pass its decoder"
    )


def explain_lone_sides(
    source: ByteSource, model: KvModel, findings: Sequence[Finding], command: str
) -> tuple[Finding, ...]:
    """Return the findings of a model, with the other sides of buffers that its graph shows.

    A buffer with one side has KV101 or KV102 if the graph carries a value into it, or it into a
    value, that no rule matches. Nothing changes for a model that cannot be read, which is for
    other checks to say.

    Args:
        source: The bytes of the model.
        model: The model.
        findings: What is known of it.
        command: The command that was typed, for the hint; empty for a removal of tokens.
    """
    others, misfit = _find_other_sides(source, model)
    if not others:
        return tuple(findings)
    hint = misfit or _format_hint(model, command)
    explained = {*others, *others.values()}
    kept = (each for each in findings if each.code not in _REPLACED or each.name not in explained)
    found = (
        _build_finding(pair, others[pair.sides[0].old_name], hint)
        for pair in model.pairs
        if pair.sides[0].old_name in others
    )
    return (*kept, *found)


def _find_other_sides(source: ByteSource, model: KvModel) -> tuple[dict[str, str], str]:
    """Return the names that no rule matches, by those of the buffers that they are a side of.

    Then why no rules fit the caches of the model; empty if `infer_rules` makes some.
    """
    lone = list(list_lone_sides(model))
    traced = None
    with suppress(ModelError):
        traced = trace_source(source, model.signature, Path(model.path)) if lone else None
    if traced is None:
        return {}, ""
    inputs = {pair.output.name: pair.input.name for pair in traced.buffers}
    outputs = {pair.input.name: pair.output.name for pair in traced.buffers}
    others = {}
    for pair in lone:
        name = pair.sides[0].old_name
        other = (inputs if pair.input is None else outputs).get(name)
        if other is not None and other not in model.plan.old_names:
            others[name] = other
    try:
        if others:
            infer_rules(traced)
    except RulesError as error:
        return others, f"name both sides in a rules file (--rules FILE): {error.message}"
    return others, ""


def _build_finding(pair: KvPair, other: str, hint: str) -> Finding:
    """Return the finding about a buffer whose other side has a name that no rule matches."""
    name = pair.sides[0].old_name
    if pair.input is None:
        message = f"is the next state of the input {other}, which no rule matches"
        return build_finding("KV101", name, message, hint)
    message = f"has its next state in the output {other}, which no rule matches"
    return build_finding("KV102", name, message, hint)


def _format_hint(model: KvModel, command: str) -> str:
    """Return how to get rules for both sides; names that have a token lose it first."""
    if not command:
        return OWN_RULES_HINT
    if is_in_memory(model.path):
        return MEMORY_HINT
    commands = join_commands(model.path, command)
    if model.plan.token_counts:
        return f"first a rename with `--strip`, then {commands}"
    return commands
