"""Does retention hold: everything that can be proved of a model, without changing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, build_finding, format_list, promote_to_errors
from onnxkvrename.layout.digest import check_stamp
from onnxkvrename.model.file import OpenModel, open_model
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import Signature
from onnxkvrename.rules.kv_model import KvModel, check_models_together, scan_model
from onnxkvrename.rules.patterns import Pattern
from onnxkvrename.rules.plan import KvPair, RenamePlan, TokenChange, build_minimal_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport, report_model
from onnxkvrename.verification.dataflow import BufferFlow, check_buffer_flows, trace_buffer_flows
from onnxkvrename.verification.onnx_checker import check_onnx_validity
from onnxkvrename.verification.retention_loop import RetentionRun, RunnableModel, check_retention
from onnxkvrename.verification.strip_weights import read_model_without_weights


class VerifyRequest(NamedTuple):
    """What is to be proved beside the pairs themselves.

    ``token`` is on every pair and on nothing else; ``select`` fits the names of
    KV buffers and no others. To ``run`` is to try the retention loop in
    onnxruntime, with sizes for symbols (``dims``), against a ``reference``.
    """

    token: str | None = None
    select_pattern: Pattern | None = None
    run_in_onnxruntime: bool = False
    reference: Path | None = None
    dims: Mapping[str, int] = MappingProxyType({})
    strict: bool = False
    group_windows: bool = True


class VerifiedModel(NamedTuple):
    """What was found; ``flows`` and ``run`` say how, and ``part`` what sets are judged by.

    ``reference`` is the model that gave the same results.
    """

    report: ModelReport
    flows: tuple[BufferFlow, ...] = ()
    run: RetentionRun | None = None
    reference: Path | None = None
    model: KvModel | None = None


def verify_model(path: Path, rules: Rules, aim: VerifyRequest) -> VerifiedModel:
    """Look at one model as it stands. What keeps it from being read is its report's error.

    Raises :class:`RulesError` where the rules make names that could not be
    undone, and :class:`KvRenameError` to ``run`` without onnxruntime, or against
    a reference that cannot be read.
    """
    report = ModelReport(str(path), str(path), "failed")
    try:
        with open_model(path) as model:
            verified = _verify_open_model(model, rules, aim)
    except ModelError as error:
        return VerifiedModel(report._replace(error=error))
    if not aim.run_in_onnxruntime:
        return verified
    run, findings = _run_retention(path, verified.report.pairs, rules, aim)
    found = (*verified.report.findings, *findings)
    reference = aim.reference if run is not None and not findings else None
    report = verified.report._replace(findings=found)
    return verified._replace(run=run, reference=reference, report=report)


def verify_window_sets(
    verified: Sequence[VerifiedModel], rules: Rules, aim: VerifyRequest
) -> tuple[VerifiedModel, ...]:
    """The same models, with what they show together; then all is judged."""
    findings: list[list[Finding]] = [[] for _ in verified]
    models = [item.model for item in verified if item.model is not None]
    if len(models) == len(verified):
        findings = check_models_together(models, rules, TokenChange(aim.token), judge=True)
    return tuple(
        _finish_report(item, found, aim) for item, found in zip(verified, findings, strict=True)
    )


def _finish_report(
    item: VerifiedModel, further: Iterable[Finding], aim: VerifyRequest
) -> VerifiedModel:
    findings = (*item.report.findings, *further)
    if aim.strict:
        findings = promote_to_errors(findings)
    report = item.report._replace(findings=findings)
    report = report._replace(status="failed" if report.failed else "unchanged")
    return item._replace(report=report, model=None)


def _verify_open_model(opened: OpenModel, rules: Rules, request: VerifyRequest) -> VerifiedModel:
    path = opened.file.path
    model = scan_model(opened.source, opened.signature, path, rules).model
    flows, proofs = prove_retention(opened.source, model.pairs)
    select = request.select_pattern
    findings = (
        *model.findings,
        *proofs,
        *_check_token(model.signature, model.plan, request.token),
        *(_check_selection(model.signature, model.plan, select) if select is not None else ()),
        *_check_stamp(model),
    )
    report = report_model(model)._replace(findings=findings)
    if not request.group_windows:
        model = model._replace(part=None)
    return VerifiedModel(report, flows, model=model)


def prove_retention(
    source: ByteSource, pairs: Sequence[KvPair]
) -> tuple[tuple[BufferFlow, ...], tuple[Finding, ...]]:
    """What can be proved of the bytes of a model: KV110, KV113, KV114 and KV115.

    Raises :class:`ModelError` where they are no model to protobuf.
    """
    model = read_model_without_weights(source)
    flows = trace_buffer_flows(model, pairs)
    return flows, (*check_buffer_flows(flows), *check_onnx_validity(model))


def _check_stamp(model: KvModel) -> Iterator[Finding]:
    """Yield KV621 unless the stamp is that of the graph; a window does not know its set's."""
    finding = None if model.is_window else check_stamp(model, model.stamp)
    if finding is not None:
        yield finding


def _check_token(signature: Signature, plan: RenamePlan, token: str | None) -> Iterator[Finding]:
    """KV116: consumers take every name that holds the token, and none without it."""
    carried = {end.old_name: end.token for pair in plan.pairs for end in pair.sides}
    wanted = plan.token_change.final_token if token is None else token
    without = [name for name, found in carried.items() if found != wanted]
    if wanted and without:
        yield build_finding(
            "KV116",
            without[0],
            f"does not carry {wanted}, one of {len(without)} such names of {len(carried)}",
            f"onnxkvrename MODEL --prefix {wanted}",
        )
    names = {value.name for value in (*signature.inputs, *signature.outputs)}
    others = sorted(name for name in names - carried.keys() if wanted and wanted in name)
    if others:
        yield build_finding(
            "KV116",
            others[0],
            f"holds {wanted}, but is no KV buffer; a consumer would take {format_list(others)}",
            "choose another token",
        )


def _check_selection(signature: Signature, plan: RenamePlan, select: Pattern) -> Iterator[Finding]:
    """KV117: an expression must take all KV names and no others."""
    buffers = {end.old_name for pair in plan.pairs for end in pair.sides}
    names = dict.fromkeys(value.name for value in (*signature.inputs, *signature.outputs))
    taken = {name for name in names if select.matches(name)}
    for wrong, what in (
        ([name for name in names if name in buffers - taken], "is missed by the expression"),
        ([name for name in names if name in taken - buffers], "is taken, but is no KV buffer"),
    ):
        if wrong:
            yield build_finding(
                "KV117",
                wrong[0],
                f"{what}; all such names: {format_list(wrong)}",
                "an expression must match whole names, as in .*vllmKvCache.*",
            )


def _run_retention(
    path: Path, pairs: Sequence[KvPair], rules: Rules, aim: VerifyRequest
) -> tuple[RetentionRun | None, tuple[Finding, ...]]:
    """The retention loop; KV119 where it could not be tried."""
    reference = None
    if aim.reference is not None:
        with open_model(aim.reference) as other:
            reference = RunnableModel(
                aim.reference, build_minimal_plan(other.signature, rules).pairs
            )
    try:
        return check_retention(RunnableModel(path, pairs), reference, dims=aim.dims)
    except ModelError as error:
        where = f" ({error.path})" if error.path not in (None, str(path)) else ""
        hint = error.hint or "what can be proved without running is proved above"
        message = f"the retention loop could not be run{where}: {error.message}"
        return None, (build_finding("KV119", "", message, hint),)
