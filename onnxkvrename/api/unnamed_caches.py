"""Look for caches in the graphs of models whose names no profile knows, and say so in KV001."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onnxkvrename.errors import KvRenameError, ModelError, RulesError
from onnxkvrename.findings import (
    CheckError,
    Finding,
    build_finding,
    format_count,
    quote_path,
    quote_word,
)
from onnxkvrename.limits import MAX_SEARCHED_NODES
from onnxkvrename.model.file import open_model
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import UNDECLARED, Signature
from onnxkvrename.options import list_options
from onnxkvrename.renaming.request import Request
from onnxkvrename.rules.load import find_profiles
from onnxkvrename.rules.results import Report
from onnxkvrename.storage.read import MemoryFile, ModelSource, is_in_memory
from onnxkvrename.verification.pairs.find_pairs import may_be_state
from onnxkvrename.verification.pairs.infer_rules import (
    TracedModel,
    carries_token,
    find_last_word,
    infer_rules,
    trace_source,
)

if TYPE_CHECKING:
    from onnxkvrename.layout.inspect import ModelSummary

_LEFT_OUT = {
    *("models", "profile", "rules", "jobs", "dask", "output_format", "quiet", "verbose"),
    *("check", "diff", "dry_run"),
}
"""The fields of a request that change no result, or that exclude ``--rules``."""
_RULES_FILE = "rules.toml"
_NO_CACHE_HINT = (
    "export the model with its cache as inputs and outputs; if it is an encoder, pass its decoder"
)
_OWN_RULES_HINT = "add `--rules FILE` with the rules of the rename"
MEMORY_HINT = "save the model to a file, and pass rules=onnxkvrename.suggest_rules(PATH)"
"""How to rename a model in memory whose names no profile matches."""


def explain_unknown_names(report: Report, request: Request, token: str) -> Report:
    """Return the report on models without buffers, with what their graphs show in KV001.

    A graph that another profile knows is left to that hint. Beyond `MAX_SEARCHED_NODES` nodes, in
    all models together, no graph is searched.

    Args:
        report: The report, with KV001 for each model.
        request: What is asked for, as it was typed.
        token: The token that it means.
    """
    graphs = list(_search_models([Path(model.path) for model in report.models]))
    if any(isinstance(graph, TracedModel) and _is_known(graph.signature) for graph in graphs):
        return report
    commands = _choose_commands(report, graphs, request, token)
    models = []
    for model, graph in zip(report.models, graphs, strict=True):
        hint = commands or f"`onnxkvrename pairs {quote_path(model.path)}` searches the graph"
        findings = (
            _explain(each, graph, token, hint) if each.code == "KV001" else each
            for each in model.findings
        )
        models.append(model._replace(findings=tuple(findings)))
    return report._replace(models=tuple(models))


def explain_unknown_model(error: CheckError, model: MemoryFile, token: str) -> CheckError:
    """Return the error about a model in memory, with what its graph shows in KV001."""
    (graph,) = _search_models([model])
    (finding,) = (each for each in error.findings if each.code == "KV001")
    explained = _explain(finding, graph, token, MEMORY_HINT)
    findings = tuple(explained if each is finding else each for each in error.findings)
    return CheckError(f"KV001: {explained.message}", findings, hint=explained.hint)


def explain_unknown_summaries(
    summaries: Sequence[ModelSummary], models: Sequence[ModelSource]
) -> tuple[ModelSummary, ...]:
    """Return summaries, those of models without buffers with the caches that their graphs show.

    Args:
        summaries: What `inspect` shows of some models.
        models: The same models.
    """
    unknown = [
        index
        for index, summary in enumerate(summaries)
        if not (summary.buffers or summary.feeds or summary.error)
    ]
    explained = list(summaries)
    graphs = _search_models([models[index] for index in unknown])
    for index, graph in zip(unknown, graphs, strict=True):
        if isinstance(graph, TracedModel) and graph.buffers:
            path = summaries[index].path
            hint = MEMORY_HINT
            if not is_in_memory(path):
                inspection = f"onnxkvrename inspect {quote_path(path)} --rules {_RULES_FILE}"
                hint = _join_commands(path, inspection)
            finding = _explain(build_finding("KV001", "", "", ""), graph, "", hint)
            findings = (*summaries[index].findings, finding._replace(severity="warning"))
            explained[index] = summaries[index]._replace(findings=findings)
    return tuple(explained)


def suggest_rename(models: Iterable[TracedModel]) -> str:
    """Return the commands that rename the first model with caches that no profile knows.

    Empty if there is none, or its names have a token already.
    """
    for model in models:
        if model.buffers and not (_is_known(model.signature) or find_last_word(model.buffers)):
            request = Request((model.path,), "KV")
            return _join_commands(str(model.path), _format_rename(request, request.models))
    return ""


def _choose_commands(
    report: Report, graphs: Sequence[TracedModel | KvRenameError], request: Request, token: str
) -> str:
    """Return the commands that rename the first model that they can rename; empty without one."""
    for model, graph in zip(report.models, graphs, strict=True):
        if isinstance(graph, TracedModel) and graph.buffers and not _carries(graph, token):
            if request.strip:
                return _OWN_RULES_HINT
            models = request.models if len(report.models) == 1 else (Path(model.path),)
            return _join_commands(model.path, _format_rename(request, models))
    return ""


def _join_commands(path: str, command: str) -> str:
    """Return the command that writes rules for a model, and the one that uses them."""
    return f"`onnxkvrename pairs {quote_path(path)} --as rules > {_RULES_FILE}`, then `{command}`"


def _format_rename(request: Request, models: Iterable[Path]) -> str:
    """Return the command that renames some models as it was asked for, with a file of rules."""
    words = ["onnxkvrename", *(quote_path(str(path)) for path in models)]
    for name, option in list_options(Request).items():
        value = getattr(request, name)
        if name in _LEFT_OUT or value == Request._field_defaults[name]:
            continue
        for item in value if isinstance(value, tuple) else (value,):
            words.append(option.flags.split()[0])
            if not isinstance(item, bool):
                words.append(quote_path(str(item)) if isinstance(item, Path) else quote_word(item))
    return " ".join((*words, f"--rules {_RULES_FILE}"))


def _explain(
    finding: Finding, graph: TracedModel | KvRenameError, token: str, hint: str
) -> Finding:
    """Return KV001 with the caches of a graph, or why there are none.

    The hint is for caches that rules can be written for.
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
        message += f", and {outputs} may be states (first: {graph.lone_states[0].output})"
    if _carries(graph, token):
        return finding._replace(
            message=f"{message}; names already carry {token}", hint=_OWN_RULES_HINT
        )
    return finding._replace(message=message, hint=hint)


def _carries(graph: TracedModel, token: str) -> bool:
    """Return whether a cache has a token already, so that a rename would add a second one."""
    return bool(token) and any(carries_token(pair, token) for pair in graph.buffers)


def _search_models(models: Iterable[ModelSource]) -> Iterator[TracedModel | KvRenameError]:
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
    if _is_known(signature) or dtypes.isdisjoint(value.dtype for value in signature.outputs):
        return TracedModel(path, signature, ())
    traced = trace_source(source, signature, path, max_nodes) if max_nodes > 0 else None
    if traced is None:
        raise ModelError(
            f"a rename searches up to {MAX_SEARCHED_NODES:,} nodes, in all models together"
        )
    return traced


def _is_known(signature: Signature) -> bool:
    """Return whether a profile knows a name of a model."""
    return any(find_profiles([value.name for value in signature.outputs]))
