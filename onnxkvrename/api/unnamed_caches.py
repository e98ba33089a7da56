"""Say what the graphs of models have under names that no rule matches, and what renames it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import (
    CheckError,
    build_finding,
    quote_path,
)
from onnxkvrename.model.file import open_model
from onnxkvrename.rules.kv_model import scan_model
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import RULES_FILE, Request, format_rename
from onnxkvrename.rules.results import Report
from onnxkvrename.storage.read import MemoryFile, ModelSource, is_in_memory
from onnxkvrename.verification.pairs.infer_rules import (
    TracedModel,
    find_last_word,
)
from onnxkvrename.verification.pairs.other_sides import (
    MEMORY_HINT,
    OWN_RULES_HINT,
    explain_lone_sides,
    join_commands,
)
from onnxkvrename.verification.pairs.unnamed_caches import (
    carries_any,
    explain_graph,
    is_known,
    search_graphs,
)

if TYPE_CHECKING:
    from onnxkvrename.layout.inspect import ModelSummary


def explain_unknown_names(report: Report, request: Request, token: str) -> Report:
    """Return the report on models without buffers, with what their graphs show in KV001.

    A graph that another profile knows is left to that hint. Beyond `MAX_SEARCHED_NODES` nodes, in
    all models together, no graph is searched.

    Args:
        report: The report, with KV001 for each model.
        request: What is asked for, as it was typed.
        token: The token that it means.
    """
    graphs = list(search_graphs([Path(model.path) for model in report.models]))
    if any(isinstance(graph, TracedModel) and is_known(graph.signature) for graph in graphs):
        return report
    commands = _choose_commands(report, graphs, request, token)
    models = []
    for model, graph in zip(report.models, graphs, strict=True):
        hint = commands or f"`onnxkvrename pairs {quote_path(model.path)}` searches the graph"
        findings = (
            explain_graph(each, graph, token, hint) if each.code == "KV001" else each
            for each in model.findings
        )
        models.append(model._replace(findings=tuple(findings)))
    return report._replace(models=tuple(models))


def explain_unknown_model(error: CheckError, model: MemoryFile, token: str) -> CheckError:
    """Return the error about a model in memory, with what its graph shows in KV001."""
    (graph,) = search_graphs([model])
    (finding,) = (each for each in error.findings if each.code == "KV001")
    explained = explain_graph(finding, graph, token, MEMORY_HINT)
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
    graphs = search_graphs([models[index] for index in unknown])
    for index, graph in zip(unknown, graphs, strict=True):
        if isinstance(graph, TracedModel) and graph.buffers:
            path = summaries[index].path
            hint = MEMORY_HINT
            if not is_in_memory(path):
                hint = join_commands(path, _format_inspect(path))
            finding = explain_graph(build_finding("KV001", "", "", ""), graph, "", hint)
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
    return f"onnxkvrename inspect {quote_path(path)} --rules {RULES_FILE}"


def suggest_rename(models: Iterable[TracedModel]) -> str:
    """Return the commands that rename the first model with caches that no profile knows.

    Empty if there is none, or its names have a token already.
    """
    for model in models:
        if model.buffers and not (is_known(model.signature) or find_last_word(model.buffers)):
            request = Request((model.path,), "KV")
            return join_commands(str(model.path), format_rename(request, RULES_FILE))
    return ""


def _choose_commands(
    report: Report, graphs: Sequence[TracedModel | KvRenameError], request: Request, token: str
) -> str:
    """Return the commands that rename the first model that they can rename; empty without one."""
    for model, graph in zip(report.models, graphs, strict=True):
        if isinstance(graph, TracedModel) and graph.buffers and not carries_any(graph, token):
            if request.strip:
                return OWN_RULES_HINT
            models = request.models if len(report.models) == 1 else (Path(model.path),)
            return join_commands(
                model.path, format_rename(request._replace(models=models), RULES_FILE)
            )
    return ""
