"""Format the results of `verify` as an answer: lines and JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import partial
from typing import Literal

from onnxkvrename.handoff.target import TargetCheck
from onnxkvrename.report.documents.verify_json import describe_verified
from onnxkvrename.report.formats import (
    Answer,
    FileResult,
    Line,
    Note,
    build_file_result,
)
from onnxkvrename.report.formats.text import (
    GREEN,
    LAYERS_PATTERN,
    MAX_LISTED_MODELS,
    RED,
    build_verdict_line,
    format_files,
)
from onnxkvrename.report.layout_text import format_model_paths
from onnxkvrename.report.rename_text import describe_no_pairs
from onnxkvrename.report.tables import wrap_line
from onnxkvrename.report.target_text import (
    TargetVerdict,
    format_slots,
    group_target_verdicts,
    judge_target_check,
)
from onnxkvrename.rules.profile import ProfileChoice
from onnxkvrename.rules.results import ModelReport, Report
from onnxkvrename.text import format_count, format_layers, format_list
from onnxkvrename.verification.dataflow import BufferFlow
from onnxkvrename.verification.renamed_from import RenameProof
from onnxkvrename.verification.verify import VerifiedModel

_FLOW_CODES = ("KV110", "KV113", "KV114", "KV120")
"""Findings about how a buffer is updated."""
_FlowState = Literal["retained", "meant", "resized", "unsized", "not retained"]
"""What becomes of a buffer: `meant` is what the rules say, where it is not updated in place."""
_PLURAL_LABELS = {"append": "grow", "delta": "with new positions only", "once": "written once"}
"""For updates that the rules can expect, words after a number of buffers."""


def build_verify_answer(
    models: Sequence[VerifiedModel],
    profile: ProfileChoice,
    check: TargetCheck | None = None,
    *,
    quiet: bool,
    verbose: bool,
) -> Answer:
    """Return the answer of a verification.

    Args:
        models: The models with what was proved.
        profile: The profile that recognizes KV names.
        check: What a consumer makes of them; ``None`` if none was named.
        quiet: Show findings only.
        verbose: Show every finding, and each buffer.
    """
    target = None if check is None else check.consumer.name
    code = Report(tuple(model.report for model in models)).compute_exit_code()
    proofs = [model.rename_proof for model in models if model.rename_proof is not None]
    shown, notes = list(models), list[Note]()
    if len(models) > 1 and proofs:  # one line for all of them
        shown = [model._replace(rename_proof=None) for model in models]
        notes.append(Note("renamed-from", _format_rename_proofs(proofs)))
    verdicts: Sequence[TargetVerdict] = ()
    if check is not None:
        verdicts = judge_target_check(check, [model.report for model in models])
        shown = [_drop_findings_of(check, model) for model in shown]
        for verdict in verdicts:
            notes.append(Note("target", verdict.text, verdict.paths[0]))
    if len(models) > MAX_LISTED_MODELS:
        notes.append(Note("total", _format_total(models)))
    return Answer(
        "verify",
        code,
        build_content=partial(describe_verified, models, profile, target, verdicts),
        render_text=partial(_render_text, shown, verdicts, notes, quiet, verbose),
        files=tuple(
            _build_file(model.report, each, quiet=quiet)
            for model, each in zip(models, shown, strict=True)
        ),
        notes=() if quiet else tuple(notes),
        is_verbose=verbose,
    )


def _drop_findings_of(check: TargetCheck, model: VerifiedModel) -> VerifiedModel:
    """Return a model for its own verdict, which is not about the consumer.

    That an output is not made of its input is about the model in any case.
    """
    found = {(finding.code, finding.name) for each in check.sets for finding in each.findings}
    unmade = (flow.pair.sides for flow in model.flows if flow.verdict == "not from its input")
    found -= {("KV120", sides[-1].old_name) for sides in unmade}
    findings = (f for f in model.report.findings if (f.code, f.name) not in found)
    return model._replace(report=model.report._replace(findings=tuple(findings)))


def _build_file(report: ModelReport, shown: VerifiedModel, *, quiet: bool) -> FileResult:
    if quiet or report.error is not None:
        return build_file_result(report)
    note = Note("verify", summarize_verdict(shown), report.path)
    return build_file_result(report, note)


def _render_text(
    models: Sequence[VerifiedModel],
    verdicts: Sequence[TargetVerdict],
    notes: Sequence[Note],
    quiet: bool,
    verbose: bool,
    width: int | None,
) -> Iterator[Line]:
    if quiet:
        return
    readable = [model for model in models if model.report.error is None]
    is_short = len(models) > MAX_LISTED_MODELS and not verbose
    for group in _group_verdicts(readable) if is_short else ([model] for model in readable):
        yield from wrap_line(_build_verdict(_join_models(group)), width)
        yield from (Line(f"  {text}") for text in format_buffer_flows(group[0]) if verbose)
    groups = group_target_verdicts(verdicts) if is_short else [[each] for each in verdicts]
    for sets in groups:
        yield from wrap_line(_build_target_verdict(sets), width)
        yield from (Line(f"  {text}") for text in format_slots(sets[0]) if verbose)
    for note in notes:
        if note.path is None:
            yield Line(note.message, err=note.title == "total")


def _build_target_verdict(verdicts: Sequence[TargetVerdict]) -> Line:
    """Return the line with what a consumer makes of models, or of several with the same text."""
    paths = [path for verdict in verdicts for path in verdict.paths]
    where = format_model_paths(paths) if len(verdicts) == 1 else format_files(paths)
    return build_verdict_line(where, verdicts[0].text, GREEN if verdicts[0].is_ready else RED)


def _group_verdicts(models: Iterable[VerifiedModel]) -> Iterable[list[VerifiedModel]]:
    """Return groups of models with the same result, except for their layers."""
    groups: dict[tuple[bool, str], list[VerifiedModel]] = {}
    for model in models:
        verdict = re.sub(LAYERS_PATTERN, "", summarize_verdict(model))
        groups.setdefault((model.report.failed, verdict), []).append(model)
    return groups.values()


def _join_models(models: Sequence[VerifiedModel]) -> VerifiedModel:
    """Return one verified model with what was shown of several."""
    if len(models) == 1:
        return models[0]
    reports = [model.report for model in models]
    report = reports[0]._replace(
        path=format_files([report.path for report in reports]),
        pairs=tuple(pair for report in reports for pair in report.pairs),
        findings=tuple(finding for report in reports for finding in report.findings),
    )
    flows = tuple(flow for model in models for flow in model.flows)
    return models[0]._replace(report=report, flows=flows)


def _format_total(models: Sequence[VerifiedModel]) -> str:
    failed = sum(model.report.failed for model in models)
    buffers = format_count(sum(len(model.report.pairs) for model in models), "KV buffer")
    return (
        f"{len(models):,} models: {len(models) - failed:,} verified, {failed:,} failed; {buffers}"
    )


def _build_verdict(verified: VerifiedModel) -> Line:
    report = verified.report
    style = RED if report.failed else GREEN
    return build_verdict_line(report.path, summarize_verdict(verified), style)


def summarize_verdict(verified: VerifiedModel) -> str:
    """Return the verdict on a model in a few words.

    Args:
        verified: A model that could be read.
    """
    report = verified.report
    if report.failed:
        return "does not verify"
    return "; ".join(_describe_proofs(verified))


def _describe_proofs(verified: VerifiedModel) -> Iterator[str]:
    yield _describe_retention(verified)
    if verified.rename_proof is not None:
        yield _describe_rename_proof(verified.rename_proof)
    if verified.report.pairs:
        yield _describe_tokens(verified.report)


def _describe_tokens(report: ModelReport) -> str:
    """Return the token of the buffers; names that do not have it are a finding of their own."""
    tokens = {side.token for pair in report.pairs for side in pair.sides if side.token}
    return f"token {format_list(sorted(tokens))}" if tokens else "no token"


def _describe_retention(verified: VerifiedModel) -> str:
    report = verified.report
    if not report.pairs:
        return describe_no_pairs(report)
    faults = {finding.name for finding in report.findings if finding.code in _FLOW_CODES}
    groups: dict[_FlowState, list[BufferFlow]] = {}
    for flow in verified.flows:
        state = _judge_flow(flow, faults | verified.filled)
        groups.setdefault(state, []).append(flow)
    retained, resized, unsized = (
        len(groups.get(state, ())) for state in ("retained", "resized", "unsized")
    )
    meant, lone = groups.get("meant", []), sum(pair.may_be_alone for pair in report.pairs)
    verdict = f"{retained} of {format_count(len(report.pairs), 'buffer')} retained by dataflow"
    if meant or lone:
        verdict = _describe_expected(len(report.pairs), retained, meant, lone)
    if verified.filled:
        verdict += f", {len(verified.filled)} filled by another model"
    if resized:
        updates = ", ".join(dict.fromkeys(flow.update.label for flow in groups["resized"]))
        verdict += f", {resized} cannot go back into their inputs ({updates})"
    if unsized:
        verdict += f", {unsized} not shown to keep {'its' if unsized == 1 else 'their'} size"
    verdict += f", {format_layers(sorted({p.layer for p in report.pairs if p.has_layer}))}"
    op_types = Counter(
        flow.updated_by.op_type
        for flow in verified.flows
        if flow.verdict == "updated" and flow.updated_by
    )
    if op_types:
        most_common = (op_type for op_type, _ in op_types.most_common())
        verdict += ", updated by " + ", ".join(most_common)
    return verdict


def _judge_flow(flow: BufferFlow, faults: Set[str]) -> _FlowState:
    """Return what the verdict on a model counts a buffer as.

    Args:
        flow: How its output is made from its input.
        faults: The outputs that something is wrong with, or that another model fills.
    """
    name, is_updated = flow.pair.sides[-1].old_name, flow.verdict == "updated"
    is_expected = flow.update.is_resized or (flow.update.kind == "once" and not is_updated)
    if is_expected and name not in faults:
        return "meant"
    if not is_updated:
        return "not retained"
    if flow.update.is_resized:
        return "resized"
    return "retained" if flow.update.kind != "unknown" else "unsized"


def _describe_expected(total: int, retained: int, meant: Sequence[BufferFlow], lone: int) -> str:
    """Return how many buffers are as the rules say, where not all are retained in place.

    Args:
        total: The number of buffers.
        retained: Those that are updated in place.
        meant: Those that grow, have the new positions only or are written once, by the rules.
        lone: Those of which the rules expect one side only.
    """
    texts = [f"{retained} retained in place"] if retained else []
    updates = Counter(_PLURAL_LABELS[flow.update.kind] + _format_axis(flow) for flow in meant)
    texts += [f"{number} {label}" for label, number in updates.items()]
    texts += [f"{lone} with one side"] if lone else []
    count = retained + len(meant) + lone
    subject = "all" if count == total > 1 else f"{count} of"
    verb = "is" if total == 1 else "are"
    buffers = format_count(total, "buffer")
    return f"{subject} {buffers} {verb} as the rules say, by dataflow ({', '.join(texts)})"


def _format_axis(flow: BufferFlow) -> str:
    axis = flow.update.axis
    return "" if axis is None else f" along axis {axis}"


def _describe_rename_proof(proof: RenameProof) -> str:
    """Return what was shown about a model and its source, and no more than that."""
    count = len(proof.names)
    names = f"except for {format_count(count, 'name')}" if count else "with the same names"
    return f"the same bytes as {proof.source} {names}{_format_unread([proof])}"


def _format_rename_proofs(proofs: Sequence[RenameProof]) -> str:
    """Return what was shown about several models and their sources, as one line."""
    equal = [proof for proof in proofs if proof.equal]
    count = f"{len(equal):,} of " if len(equal) < len(proofs) else ""
    names = format_count(sum(len(proof.names) for proof in equal), "name")
    total = format_count(len(proofs), "model")
    beginning = f"{count}{total}: the same bytes as the sources except for {names}"
    return beginning + _format_unread(equal)


def _format_unread(proofs: Iterable[RenameProof]) -> str:
    files = sum(len(proof.data_files) for proof in proofs)
    return (
        f"; {format_count(files, 'file')} of external data not read (use sha256sum)"
        if files
        else ""
    )


def format_buffer_flows(verified: VerifiedModel) -> Iterator[str]:
    """Yield a line for each buffer: its names, the verdict, and the node that updates it."""
    for flow in verified.flows:
        input_name, output_name = (side.old_name for side in flow.pair.sides)
        yield f"{input_name} -> {output_name}: {_format_flow_verdict(flow)}"


def _format_flow_verdict(flow: BufferFlow) -> str:
    update = f", {flow.update.label}" if flow.update.label else ""
    if flow.updated_by is None:
        return flow.verdict + update
    op_type, node_name = (text for text in flow.updated_by)
    separator = " by " if flow.verdict == "updated" else ": "
    node = f" ({node_name})" if node_name else ""
    return f"{flow.verdict}{separator}{op_type}{node}{update}"
