"""Search the graphs of models without buffers for caches whose names no profile matches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import KvRenameError, ModelError, RulesError
from onnxkvrename.files.read import MemoryFile, ModelSource, is_in_memory
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.limits import MAX_SEARCHED_NODES
from onnxkvrename.model.file import open_model
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import Signature
from onnxkvrename.rules.check_together import NO_CACHE_HINT, is_about_own_rules
from onnxkvrename.rules.checks import CONSUMER_TOKENS
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.load import find_profiles
from onnxkvrename.text import format_count, quote_path
from onnxkvrename.verification.pairs.infer_rules import (
    TracedModel,
    carries_token,
    find_last_word,
    infer_rules,
    trace_source,
)
from onnxkvrename.verification.pairs.lone_states import may_be_carried
from onnxkvrename.verification.pairs.other_sides import (
    MEMORY_DRAFT_HINT,
    MEMORY_HINT,
    OWN_RULES_HINT,
    join_commands,
    join_draft_commands,
)

_SHOWN_REASONS = 3
_MAX_TOGETHER = 4
"""Models that one command writes rules for, at most: more make no readable line."""
FormatCommand = Callable[..., str]
"""Returns the command for some models, by their paths, with the file of rules that is suggested."""


def find_unnamed_caches(
    models: Sequence[KvModel],
    unmatched: Sequence[int],
    token: str | None,
    format_command: FormatCommand | None,
) -> Iterator[tuple[int, Finding]]:
    """Yield KV001 for models whose caches only their graphs show, beside models with buffers.

    It is an error, and a warning where the names have the token already, or where the graph is too
    large to be searched.

    Args:
        models: All models of the command.
        unmatched: Those without buffers that may have such caches, by their positions.
        token: The token that is asked for; ``None`` for any.
        format_command: As for :func:`suggest_rules_file`; ``None`` where tokens are removed, which
            concerns the models that have one.
    """
    graphs = search_graphs([Path(models[index].path) for index in unmatched])
    for index, graph in zip(unmatched, graphs, strict=True):
        if isinstance(graph, TracedModel) and not graph.buffers:
            continue
        word = find_last_word(graph) if isinstance(graph, TracedModel) else ""
        path = Path(models[index].path)
        hint = OWN_RULES_HINT
        if format_command is not None:
            hint = join_commands(str(path), format_command(path))
        elif isinstance(graph, TracedModel) and not word:
            continue
        base = build_finding("KV001", "", "no rule matches a name of this model", "")
        finding = explain_graph(base, graph, word if token is None else token, hint)
        is_left = finding.hint == OWN_RULES_HINT or isinstance(graph, ModelError)
        is_warning = is_left and format_command is not None
        yield index, finding._replace(severity="warning") if is_warning else finding


def explain_no_buffers(
    findings: Sequence[Sequence[Finding]],
    models: Sequence[ModelSource],
    token: str | None,
    format_command: FormatCommand | None,
) -> list[tuple[Finding, ...]]:
    """Return the findings of models, with what the graphs of those without buffers show in KV001.

    A graph that another profile knows is left to that hint. Beyond `MAX_SEARCHED_NODES` nodes, in
    all models together, no graph is searched. All hints have the same commands: for all models that
    need rules, where one file can be for all, else for the first of them.

    Args:
        findings: What is known of each model.
        models: The same models.
        token: The token that is asked for; ``None`` for any.
        format_command: As for :func:`suggest_rules_file`.
    """
    asked = [
        index
        for index, own in enumerate(findings)
        if any(each.code == "KV001" and not is_about_own_rules(each) for each in own)
    ]
    graphs = dict(zip(asked, search_graphs([models[index] for index in asked]), strict=True))
    traced = [
        graph
        for graph in graphs.values()
        if isinstance(graph, TracedModel) and graph.list_names() and not find_token(graph, token)
    ]
    traced.sort(key=lambda graph: not graph.buffers)
    common = suggest_rules_file(_choose_models(traced), format_command) if traced else ""
    explained = [tuple(own) for own in findings]
    for index, graph in graphs.items():
        hint = common
        if not hint and not isinstance(graph, TracedModel):
            path = str(models[index])
            hint = f"`onnxkvrename pairs {quote_path(path)}` searches the graph"
        explained[index] = tuple(
            explain_graph(each, graph, token, hint) if each.code == "KV001" else each
            for each in findings[index]
        )
    return explained


def _choose_models(traced: Sequence[TracedModel]) -> Sequence[TracedModel]:
    """Return the models of one file of rules: all, or the first where that cannot be."""
    proved = [model for model in traced if model.buffers]
    if 1 < len(proved) <= _MAX_TOGETHER:
        with suppress(RulesError):  # two of them contradict each other
            infer_rules(*proved)
            return proved
    return traced[:1]


def explain_graph(
    finding: Finding, graph: TracedModel | KvRenameError, token: str | None, hint: str
) -> Finding:
    """Return KV001 with the caches of a graph, or why there are none.

    Args:
        finding: What is known without the graph.
        graph: What `search_graphs` yields.
        token: The token that is asked for; ``None`` for any.
        hint: What to do about caches that rules can be written for.
    """
    if is_about_own_rules(finding):
        return finding
    if isinstance(graph, RulesError):
        message = f"{finding.message}; the graph has caches, but {graph.message}"
        return finding._replace(message=message, hint=graph.hint or hint)
    if isinstance(graph, KvRenameError):
        message = f"{finding.message}; caches in the graph are not known: {graph.message}"
        return finding._replace(message=message, hint=hint)
    if is_known(graph.signature):
        return finding
    if not graph.list_names():
        message = f"{finding.message}; no cache found in the graph either"
        return finding._replace(message=message, hint=NO_CACHE_HINT)
    message = _describe_caches(graph) if graph.buffers else _describe_stops(finding, graph)
    carried = find_token(graph, token)
    if carried:
        message, hint = f"{message}; names already carry {carried}", OWN_RULES_HINT
    return finding._replace(message=message, hint=hint)


def _describe_caches(graph: TracedModel) -> str:
    """Return how many caches a graph has, and which one is the first."""
    count, first = format_count(len(graph.buffers), "cache"), graph.buffers[0]
    message = (
        f"no built-in profile knows these names, but the graph has {count} "
        f"(first: {first.input.name} -> {first.output.name})"
    )
    if graph.lone_states:
        outputs = format_count(len(graph.lone_states), "more output")
        what = "a state" if len(graph.lone_states) == 1 else "states"
        message += f", and {outputs} may be {what} (first: {graph.lone_states[0].output})"
    return message


def _describe_stops(finding: Finding, graph: TracedModel) -> str:
    """Return which outputs may be caches, and why the search of the graph ended before that."""
    states = graph.lone_states
    names = f"{states[0].input} -> {states[0].output}"
    what = f"1 output may be a cache ({names})"
    if len(states) > 1:
        what = f"{len(states):,} outputs may be caches (first: {names})"
    reasons = [*dict.fromkeys(state.reason for state in states)]
    more = f"; and {len(reasons) - _SHOWN_REASONS} more" if len(reasons) > _SHOWN_REASONS else ""
    shown = "; ".join(reasons[:_SHOWN_REASONS])
    return f"{finding.message}; {what}, but that is not proved: {shown}{more}"


def suggest_rules_file(graphs: Sequence[TracedModel], format_command: FormatCommand | None) -> str:
    """Return how to get rules for the caches of graphs, and the command that uses them.

    Args:
        graphs: Graphs with caches; or one with outputs that may be some.
        format_command: Returns the command; ``None`` where tokens are removed.
    """
    if format_command is None:
        return OWN_RULES_HINT
    first, *others = graphs
    if is_in_memory(str(first.path)):
        return MEMORY_HINT if first.buffers else MEMORY_DRAFT_HINT
    command = format_command(*(graph.path for graph in graphs))
    if first.buffers:
        return join_commands(str(first.path), command, [str(each.path) for each in others])
    return join_draft_commands(str(first.path), command)


def find_token(graph: TracedModel, token: str | None) -> str:
    """Return the token that names of caches have already: a rename would add a second one.

    Empty if they have none. Without a `token` that is asked for, it is the word that all names end
    with, or the token of a consumer.
    """
    pairs = graph.list_names()
    if token and any(carries_token(pair, token) for pair in pairs):
        return token
    word = find_last_word(graph)
    if word or not pairs:
        return word
    known = (name for name, _ in CONSUMER_TOKENS.values())
    return next((n for n in known if all(n in name for pair in pairs for name in pair)), "")


def search_graphs(models: Iterable[ModelSource]) -> Iterator[TracedModel | KvRenameError]:
    """Yield the models with their pairs, or why they are not known or no rules name them."""
    left = MAX_SEARCHED_NODES
    for model in models:
        path = model.path if isinstance(model, MemoryFile) else model
        traced = None
        try:
            with open_model(model) as opened:
                traced = _search(opened.source, opened.signature, path, left)
            if traced.buffers:
                infer_rules(traced)
            yield traced
        except (ModelError, RulesError) as error:
            yield error
        left -= left if traced is None else traced.node_count


def _search(source: ByteSource, signature: Signature, path: Path, max_nodes: int) -> TracedModel:
    """Return a model with its pairs; its graph is not read if no types could be those of a pair.

    Raises:
        ModelError: The graph cannot be searched, or has more than `max_nodes` nodes.
    """
    has_states = any(map(may_be_carried, signature.inputs)) and any(
        map(may_be_carried, signature.outputs)
    )
    if is_known(signature) or not has_states:
        return TracedModel(path, signature, ())
    traced = trace_source(source, signature, path, max_nodes) if max_nodes > 0 else None
    if traced is None:
        raise ModelError(
            f"a rename searches up to {MAX_SEARCHED_NODES:,} nodes, in all models together"
        )
    return traced


def is_known(signature: Signature) -> bool:
    """Return whether a profile knows a name of a model."""
    return any(find_profiles([value.name for value in signature.outputs]))
