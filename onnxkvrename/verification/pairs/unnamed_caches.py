"""Search the graphs of models without buffers for caches whose names no profile matches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from onnxkvrename.errors import KvRenameError, ModelError, RulesError
from onnxkvrename.findings import Finding, build_finding, format_count
from onnxkvrename.limits import MAX_SEARCHED_NODES
from onnxkvrename.model.file import open_model
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import UNDECLARED, Signature
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.load import find_profiles
from onnxkvrename.storage.read import MemoryFile, ModelSource
from onnxkvrename.verification.pairs.find_pairs import may_be_state
from onnxkvrename.verification.pairs.infer_rules import (
    TracedModel,
    carries_token,
    find_last_word,
    infer_rules,
    trace_source,
)
from onnxkvrename.verification.pairs.other_sides import OWN_RULES_HINT, join_commands

_NO_CACHE_HINT = (
    "export the model with its cache as inputs and outputs; if it is an encoder, pass its decoder"
)


def find_unnamed_caches(
    models: Sequence[KvModel],
    unmatched: Sequence[int],
    token: str | None,
    format_command: Callable[[Path], str] | None,
) -> Iterator[tuple[int, Finding]]:
    """Yield KV001 for models whose caches only their graphs show, beside models with buffers.

    It is an error, and a warning where the names have the token already, or where the graph is too
    large to be searched.

    Args:
        models: All models of the command.
        unmatched: Those without buffers that may have such caches, by their positions.
        token: The token that is asked for; ``None`` for any.
        format_command: Returns the command for one model, without its rules; ``None`` where tokens
            are removed, which concerns the models that have one.
    """
    graphs = search_graphs([Path(models[index].path) for index in unmatched])
    for index, graph in zip(unmatched, graphs, strict=True):
        if isinstance(graph, TracedModel) and not graph.buffers:
            continue
        word = find_last_word(graph.buffers) if isinstance(graph, TracedModel) else ""
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


def explain_graph(
    finding: Finding, graph: TracedModel | KvRenameError, token: str, hint: str
) -> Finding:
    """Return KV001 with the caches of a graph, or why there are none.

    Args:
        finding: What is known without the graph.
        graph: What `search_graphs` yields.
        token: The token of the rename; empty for none.
        hint: What to do about caches that rules can be written for.
    """
    if isinstance(graph, RulesError):
        message = f"{finding.message}; the graph has caches, but {graph.message}"
        return finding._replace(message=message, hint=graph.hint or hint)
    if isinstance(graph, KvRenameError):
        message = f"{finding.message}; caches in the graph are not known: {graph.message}"
        return finding._replace(message=message, hint=hint)
    if not graph.buffers:
        message = f"{finding.message}; no cache found in the graph either"
        return finding._replace(message=message, hint=_NO_CACHE_HINT)
    count, first = format_count(len(graph.buffers), "cache"), graph.buffers[0]
    message = (
        f"no built-in profile knows these names, but the graph has {count} "
        f"(first: {first.input.name} -> {first.output.name})"
    )
    if graph.lone_states:
        outputs = format_count(len(graph.lone_states), "more output")
        what = "a state" if len(graph.lone_states) == 1 else "states"
        message += f", and {outputs} may be {what} (first: {graph.lone_states[0].output})"
    if carries_any(graph, token):
        return finding._replace(
            message=f"{message}; names already carry {token}", hint=OWN_RULES_HINT
        )
    return finding._replace(message=message, hint=hint)


def carries_any(graph: TracedModel, token: str) -> bool:
    """Return whether a cache has a token already, so that a rename would add a second one."""
    return bool(token) and any(carries_token(pair, token) for pair in graph.buffers)


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
    dtypes = {value.dtype for value in signature.inputs if may_be_state(value.dtype)}
    dtypes |= {UNDECLARED} if dtypes else set()
    if is_known(signature) or dtypes.isdisjoint(value.dtype for value in signature.outputs):
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
