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
)
from onnxkvrename.limits import MAX_SEARCHED_NODES
from onnxkvrename.model.file import open_model
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import UNDECLARED, Signature
from onnxkvrename.renaming.rename_command import format_rename
from onnxkvrename.renaming.request import Request
from onnxkvrename.rules.kv_model import scan_model
from onnxkvrename.rules.load import find_profiles
from onnxkvrename.rules.profile import Rules
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
from onnxkvrename.verification.pairs.other_sides import (
    MEMORY_HINT,
    OWN_RULES_HINT,
    explain_lone_sides,
    join_commands,
)

if TYPE_CHECKING:
    from onnxkvrename.layout.inspect import ModelSummary

_NO_CACHE_HINT = (
    "export the model with its cache as inputs and outputs; if it is an encoder, pass its decoder"
)


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


def explain_summaries(
    summaries: Sequence[ModelSummary], models: Sequence[ModelSource], rules: Rules
) -> tuple[ModelSummary, ...]:
    """Return summaries with what their graphs show of names that no rule matches.

    These are the caches of models without buffers, and the other sides of buffers with one side.

    Args:
        summaries: What `inspect` shows of some models.
        models: The same models.
        rules: The rules that recognize KV names.
    """
    explained = [
        summary
        if summary.error or all(each.input and each.output for each in summary.buffers)
        else _explain_lone_buffers(summary, model, rules)
        for summary, model in zip(summaries, models, strict=True)
    ]
    unknown = [
        index
        for index, summary in enumerate(summaries)
        if not (summary.buffers or summary.feeds or summary.error)
    ]
    graphs = _search_models([models[index] for index in unknown])
    for index, graph in zip(unknown, graphs, strict=True):
        if isinstance(graph, TracedModel) and graph.buffers:
            path = summaries[index].path
            hint = MEMORY_HINT
            if not is_in_memory(path):
                hint = join_commands(path, _format_inspect(path))
            finding = _explain(build_finding("KV001", "", "", ""), graph, "", hint)
            findings = (*summaries[index].findings, finding._replace(severity="warning"))
            explained[index] = summaries[index]._replace(findings=findings)
    return tuple(explained)


def _explain_lone_buffers(summary: ModelSummary, model: ModelSource, rules: Rules) -> ModelSummary:
    """Return a summary with the other sides of buffers with one side, which are broken then."""
    with open_model(model) as opened:
        scanned = scan_model(
            opened.source, opened.signature, opened.file.path, rules, data_beside=None
        )
        command = _format_inspect(summary.path)
        findings = explain_lone_sides(opened.source, scanned.model, summary.findings, command)
    broken = {finding.name for finding in findings if finding.code in ("KV101", "KV102")}
    buffers = tuple(
        buffer._replace(state="broken") if broken & {buffer.input, buffer.output} else buffer
        for buffer in summary.buffers
    )
    return summary._replace(findings=findings, buffers=buffers)


def _format_inspect(path: str) -> str:
    return f"onnxkvrename inspect {quote_path(path)}"


def suggest_rename(models: Iterable[TracedModel]) -> str:
    """Return the commands that rename the first model with caches that no profile knows.

    Empty if there is none, or its names have a token already.
    """
    for model in models:
        if model.buffers and not (_is_known(model.signature) or find_last_word(model.buffers)):
            request = Request((model.path,), "KV")
            return join_commands(str(model.path), format_rename(request, request.models))
    return ""


def _choose_commands(
    report: Report, graphs: Sequence[TracedModel | KvRenameError], request: Request, token: str
) -> str:
    """Return the commands that rename the first model that they can rename; empty without one."""
    for model, graph in zip(report.models, graphs, strict=True):
        if isinstance(graph, TracedModel) and graph.buffers and not _carries(graph, token):
            if request.strip:
                return OWN_RULES_HINT
            models = request.models if len(report.models) == 1 else (Path(model.path),)
            return join_commands(model.path, format_rename(request, models))
    return ""


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
            message=f"{message}; names already carry {token}", hint=OWN_RULES_HINT
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
