"""Look for caches in the graphs of models whose names no profile knows, and say so in KV001."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import KvRenameError, ModelError, RulesError
from onnxkvrename.findings import CheckError, Finding, format_count, quote_path, quote_word
from onnxkvrename.limits import MAX_SEARCHED_NODES
from onnxkvrename.model.file import open_model
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import Signature
from onnxkvrename.options import list_options
from onnxkvrename.renaming.request import Request
from onnxkvrename.rules.load import find_profiles
from onnxkvrename.rules.plan import KvPair, TokenChange, build_rename_plan
from onnxkvrename.rules.results import Report
from onnxkvrename.storage.read import MemoryFile, ModelSource
from onnxkvrename.verification.pairs.find_pairs import may_be_state
from onnxkvrename.verification.pairs.infer_rules import (
    TracedModel,
    find_carried_tokens,
    infer_rules,
    trace_source,
)
from onnxkvrename.verification.pairs.lone_states import LoneState

_LEFT_OUT = {
    *("models", "profile", "rules", "pairs", "jobs", "dask", "output_format", "quiet", "verbose"),
    *("check", "diff", "dry_run"),
}
"""The fields of a request that change no result, or that exclude ``--pairs``."""
_NO_CACHE_HINT = (
    "export the model with its cache as inputs and outputs; if it is an encoder, pass its decoder"
)
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
    searched: list[TracedModel | ModelError] = []
    left = MAX_SEARCHED_NODES
    for model in report.models:
        searched.append(_search_file(Path(model.path), left))
        left -= getattr(searched[-1], "node_count", left)
    if any(isinstance(each, TracedModel) and _is_known(each.signature) for each in searched):
        return report
    is_complete = all(isinstance(each, TracedModel) for each in searched)
    traced = [each for each in searched if isinstance(each, TracedModel)]
    buffers, fault = _list_buffers(traced, token)
    if request.strip and not token:
        with suppress(RulesError, ValueError):  # not one token, or none that can be told
            (found,) = find_carried_tokens(traced)
            request = request._replace(token=found)
    command = format_dataflow_command(request) if is_complete else ""
    models = []
    for model, result in zip(report.models, searched, strict=True):
        pairs_command = f"`onnxkvrename pairs {quote_path(model.path)}` searches the graph"
        effect = "renames them" if request.target is None else "renames them, if all checks pass"
        if request.strip:
            effect = "removes the token"
        hint = f"`{command}` {effect}" if command else pairs_command
        if request.strip and not request.token:
            hint = "add the token with --prefix, and `--pairs dataflow`"
        own = buffers.get(Path(model.path), ())
        lone = result.lone_states if isinstance(result, TracedModel) else ()
        findings = (
            _explain(each, result if isinstance(result, ModelError) else fault, own, hint, lone)
            if each.code == "KV001"
            else each
            for each in model.findings
        )
        models.append(model._replace(findings=tuple(findings)))
    return report._replace(models=tuple(models))


def explain_unknown_model(error: CheckError, model: MemoryFile, token: str) -> CheckError:
    """Return the error about a model in memory, with what its graph shows in KV001."""
    result = _search_file(model, MAX_SEARCHED_NODES)
    found = [result] if isinstance(result, TracedModel) else []
    buffers, rules_fault = _list_buffers(found, token)
    fault = result if isinstance(result, ModelError) else rules_fault
    (finding,) = (each for each in error.findings if each.code == "KV001")
    explained = _explain(finding, fault, buffers.get(model.path, ()), MEMORY_HINT)
    findings = tuple(explained if each is finding else each for each in error.findings)
    return CheckError(f"KV001: {explained.message}", findings, hint=explained.hint)


def format_dataflow_command(request: Request) -> str:
    """Return the command that renames by dataflow what is asked for; empty if there is none.

    A rename by dataflow needs the token, also to remove it.
    """
    if (request.token or request.target) is None:
        return ""
    words = ["onnxkvrename", *(quote_path(str(path)) for path in request.models)]
    for name, option in list_options(Request).items():
        value = getattr(request, name)
        if name in _LEFT_OUT or value == Request._field_defaults[name]:
            continue
        for item in value if isinstance(value, tuple) else (value,):
            words.append(option.flags.split()[0])
            if not isinstance(item, bool):
                words.append(quote_path(str(item)) if isinstance(item, Path) else quote_word(item))
    return " ".join((*words, "--pairs dataflow"))


def suggest_rename(models: Sequence[TracedModel], paths: Sequence[Path]) -> str:
    """Return the command that renames the pairs of some models, if only dataflow knows them.

    Empty if a profile knows a name, a name carries a token already, or no rules fit all models.
    """
    request = Request(tuple(paths), "KV")
    if any(_is_known(model.signature) for model in models):
        return ""
    try:
        is_offered = not find_carried_tokens(models) and _list_buffers(models, "KV")[0]
    except RulesError:
        return ""
    return format_dataflow_command(request) if is_offered else ""


def _explain(
    finding: Finding,
    fault: KvRenameError | None,
    buffers: Sequence[KvPair],
    hint: str,
    lone_states: Sequence[LoneState] = (),
) -> Finding:
    """Return KV001 with what is known of a graph: its buffers, or why there are none."""
    if isinstance(fault, RulesError):
        message = f"{finding.message}; the graph has states, but {fault.message}"
        return finding._replace(message=message, hint=fault.hint or hint)
    if fault is not None:
        message = f"{finding.message}; caches in the graph are not known: {fault.message}"
        return finding._replace(message=message, hint=hint)
    if not buffers:
        message = f"{finding.message}; no cache found in the graph either"
        return finding._replace(message=message, hint=_NO_CACHE_HINT)
    first, last = (side.old_name for side in buffers[0].sides)
    count = format_count(len(buffers), "cache")
    message = (
        f"no profile matches these names, but the graph has {count} (first: {first} -> {last})"
    )
    if lone_states:
        outputs = format_count(len(lone_states), "output")
        message += (
            f"; there may be more, which is not proved ({outputs}, first: {lone_states[0].output})"
        )
    return finding._replace(message=message, hint=hint)


def _search_file(model: ModelSource, max_nodes: int) -> TracedModel | ModelError:
    path = model.path if isinstance(model, MemoryFile) else model
    try:
        with open_model(model) as opened:
            return _search(opened.source, opened.signature, path, max_nodes)
    except ModelError as error:
        return error


def _search(source: ByteSource, signature: Signature, path: Path, max_nodes: int) -> TracedModel:
    """Return a model with its pairs; its graph is not read if no types could be those of a pair.

    Raises:
        ModelError: The graph cannot be searched, or has more than `max_nodes` nodes.
    """
    dtypes = {value.dtype for value in signature.inputs if may_be_state(value.dtype)}
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


def _list_buffers(
    models: Sequence[TracedModel], token: str
) -> tuple[dict[Path, tuple[KvPair, ...]], RulesError | None]:
    """Return the buffers that a rename by dataflow would take, or why it would take none."""
    if not any(model.pairs for model in models):
        return {}, None
    try:
        rules = infer_rules(models, find_carried_tokens(models, token)).rules
    except RulesError as error:
        return {}, error
    change = TokenChange(None)
    return {m.path: build_rename_plan(m.signature, rules, change).pairs for m in models}, None
