"""Say what the graphs of models have under names that no rule matches, and what renames it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onnxkvrename.errors import ModelError
from onnxkvrename.files.read import MemoryFile, ModelSource
from onnxkvrename.findings import CheckError, Finding
from onnxkvrename.layout.load import LoadedLayout, replace_findings
from onnxkvrename.model.file import open_model
from onnxkvrename.rules.check_together import build_no_buffers_finding
from onnxkvrename.rules.kv_model import scan_model
from onnxkvrename.rules.lone_sides import list_unmatched
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import RULES_FILE, Request, format_rename
from onnxkvrename.rules.results import Report
from onnxkvrename.text import quote_path
from onnxkvrename.verification.pairs.infer_rules import TracedModel, find_last_word
from onnxkvrename.verification.pairs.other_sides import explain_lone_sides, join_commands
from onnxkvrename.verification.pairs.unnamed_caches import (
    explain_graph,
    explain_no_buffers,
    find_unnamed_caches,
    is_known,
    search_graphs,
    suggest_rules_file,
)

if TYPE_CHECKING:
    from onnxkvrename.layout.inspect import ModelSummary


def explain_unknown_names(report: Report, request: Request, token: str | None) -> Report:
    """Return the report on models without buffers, with what their graphs show in KV001.

    Args:
        report: The report, with KV001 for each model.
        request: What is asked for, as it was typed.
        token: The token that it means.
    """

    def format_command(*paths: Path) -> str:
        models = request.models if len(report.models) == len(paths) else paths
        return format_rename(request._replace(models=models), RULES_FILE)

    explained = explain_no_buffers(
        [model.findings for model in report.models],
        [Path(model.path) for model in report.models],
        token,
        None if request.strip else format_command,
    )
    models = zip(report.models, explained, strict=True)
    return report._replace(models=tuple(model._replace(findings=own) for model, own in models))


def explain_unknown_model(error: CheckError, model: MemoryFile, token: str | None) -> CheckError:
    """Return the error about a model in memory, with what its graph shows in KV001."""
    (findings,) = explain_no_buffers([error.findings], [model], token, str)
    (finding,) = (each for each in findings if each.code == "KV001")
    return CheckError(f"KV001: {finding.message}", findings, hint=finding.hint)


def explain_layout(
    loaded: LoadedLayout, models: Sequence[ModelSource], rules: Rules, command: str, *, strict: bool
) -> LoadedLayout:
    """Return a layout with what the graphs of its models show of names that no rule matches.

    Args:
        loaded: The layout.
        models: Its models; one layout file stays as it is.
        rules: The rules that recognize KV names.
        command: The command for them, with the file of rules that hints suggest; empty for one
            that shows a model.
        strict: Whether every warning is an error.

    Raises:
        ModelError: Only the graph of a model beside those of the layout has its caches.
    """
    if str(models[0]).endswith(".json"):
        return loaded

    def format_command(*paths: Path) -> str:
        return command or _format_inspect(*paths)

    findings = [report.findings for report in loaded.reports]
    if not loaded.layout.buffers:
        explained = explain_no_buffers(findings, models, None, format_command)
    elif len(models) > 1 or any(len(buffer.names) < 2 for buffer in loaded.layout.buffers):
        explained = []
        scanned = []
        for source, own in zip(models, findings, strict=True):
            with open_model(source) as opened:
                path, signature = opened.file.path, opened.signature
                model = scan_model(opened.source, signature, path, rules, data_beside=None).model
                again = format_command(path)
                explained.append(explain_lone_sides(opened.source, model, own, again))
            scanned.append(model)
        unmatched = list_unmatched(scanned, rules)
        for index, finding in find_unnamed_caches(scanned, unmatched, None, format_command):
            message = f"is not the same model as {loaded.layout.models[0]}: {finding.message}"
            hint = f"pass one of them, such as {quote_path(loaded.layout.models[0])}"
            raise ModelError(message, path=scanned[index].path, hint=hint)
    else:
        return loaded
    reports = zip(loaded.reports, explained, strict=True)
    return loaded._replace(
        reports=tuple(replace_findings(report, own, strict=strict) for report, own in reports)
    )


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
        if isinstance(graph, TracedModel) and graph.list_names():
            outputs = [value.name for value in graph.signature.outputs]
            base = build_no_buffers_finding(outputs, rules, summaries[index].path)
            base = base._replace(severity="warning")
            hint = suggest_rules_file([graph], _format_inspect)
            findings = (*summaries[index].findings, explain_graph(base, graph, None, hint))
            explained[index] = summaries[index]._replace(findings=findings)
    return tuple(explained)


def _explain_lone_buffers(summary: ModelSummary, model: ModelSource, rules: Rules) -> ModelSummary:
    """Return a summary with the other sides of buffers with one side, which are broken then."""
    with open_model(model) as opened:
        scanned = scan_model(
            opened.source, opened.signature, opened.file.path, rules, data_beside=None
        )
        command = _format_inspect(Path(summary.path))
        findings = explain_lone_sides(opened.source, scanned.model, summary.findings, command)
    broken = {finding.name for finding in findings if finding.code in ("KV101", "KV102")}
    buffers = tuple(
        buffer._replace(state="broken") if broken & {buffer.input, buffer.output} else buffer
        for buffer in summary.buffers
    )
    return summary._replace(findings=findings, buffers=buffers)


def _format_inspect(*paths: Path) -> str:
    words = " ".join(quote_path(str(path)) for path in paths)
    return f"onnxkvrename inspect {words} --rules {RULES_FILE}"


def warn_of_stops(model: TracedModel) -> tuple[Finding, ...]:
    """Return KV001 as a warning for a model of which no pair is proved, but some may be pairs."""
    if model.pairs or not model.lone_states:
        return ()
    base = build_no_buffers_finding(value.name for value in model.signature.outputs)
    hint = suggest_rules_file([model], _format_first_rename)
    return (explain_graph(base, model, None, hint)._replace(severity="warning"),)


def _format_first_rename(path: Path) -> str:
    return format_rename(Request((path,), "KV"), RULES_FILE)


def suggest_first_rename(models: Iterable[TracedModel]) -> str:
    """Return the commands that rename the first model with caches that no profile knows.

    Empty if there is none, or its names have a token already.
    """
    for model in models:
        if model.buffers and not (is_known(model.signature) or find_last_word(model)):
            return join_commands(str(model.path), _format_first_rename(model.path))
    return ""
