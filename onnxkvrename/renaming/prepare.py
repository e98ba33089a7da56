"""Prepare one model of a rename: read, plan and check it, and build the plan of its result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError, RulesError
from onnxkvrename.files.find import RenameJob
from onnxkvrename.files.read import FileIdentity, is_occupied
from onnxkvrename.files.targets import check_output, check_result_size, has_result
from onnxkvrename.findings import Finding
from onnxkvrename.model.external_data import DataFile, plan_data_copies
from onnxkvrename.model.file import (
    OpenModel,
    build_spliced_source,
    open_model,
    read_pieces,
    sum_piece_sizes,
)
from onnxkvrename.model.protobuf import ByteSource, Piece
from onnxkvrename.model.signature import Signature
from onnxkvrename.renaming.parallel import name_worker
from onnxkvrename.rules.kv_model import (
    KvModel,
    ScannedModel,
    read_kv_model,
    scan_model,
    splice_model,
)
from onnxkvrename.rules.lone_sides import has_lone_sides
from onnxkvrename.rules.plan import TokenChange, build_rename_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import format_compile_call
from onnxkvrename.rules.request import RULES_FILE, Request, format_rename
from onnxkvrename.rules.results import ModelReport, ResultState, report_model
from onnxkvrename.rules.sidecar_files import find_files_beside


class SplicePlan(NamedTuple):
    """The parts that make up a result, and the signature that reading it back must give.

    The pieces, new bytes and spans of the source, are in the order of the result. The identity is
    that of the source that they refer to. The size is that of the result, in bytes.
    """

    model_path: Path
    identity: FileIdentity
    pieces: tuple[Piece, ...]
    expected_signature: Signature
    size: int


class SidecarPlan(NamedTuple):
    """The new content of a text file, and the state that the file had when it was read."""

    path: Path
    identity: FileIdentity
    content: bytes

    @property
    def size(self) -> int:
        """The bytes of the new content."""
        return len(self.content)


class PreparedModel(NamedTuple):
    """A model that was read, planned and checked for a rename; it travels between processes.

    Attributes:
        job: The model and where its result goes.
        report: The result that the user sees.
        model: The input of the checks across models; ``None`` once they are done, and for a
            model that could not be read.
        splice_plan: The bytes of the result; ``None`` for a model that could not be read.
        data_files: The files of external data.
        data_copies: Those that are copied, each with the path to copy it to.
        data_paths: Where all of them will be beside the result; none if it stays beside them.
        needs_write: Whether the output file is missing or differs from the result.
    """

    job: RenameJob
    report: ModelReport
    model: KvModel | None = None
    splice_plan: SplicePlan | None = None
    data_files: tuple[DataFile, ...] = ()
    data_copies: tuple[tuple[DataFile, Path], ...] = ()
    data_paths: tuple[Path, ...] = ()
    needs_write: bool = True

    @property
    def replaces_model(self) -> bool:
        """Whether the result has new names, and replaces a file."""
        is_written = self.report.status == "would-rename" and bool(self.report.name_map)
        return is_written and (self.job.in_place or is_occupied(self.job.target))


def prepare_model(job: RenameJob, request: Request, rules: Rules) -> PreparedModel:
    """Read, plan and check a model without writing anything.

    An error of this model is in its report.

    Raises:
        RulesError: A rule makes a name that cannot be turned back.
    """
    try:
        with open_model(job.model) as opened:
            return _prepare_open_model(opened, job, request, rules)
    except RulesError:
        raise
    except KvRenameError as error:
        report = ModelReport(str(job.model), str(job.output), "failed", error=name_worker(error))
        return PreparedModel(job, report)


def _prepare_open_model(
    opened: OpenModel, job: RenameJob, request: Request, rules: Rules
) -> PreparedModel:
    change = request.change
    scanned = scan_model(
        opened.source, opened.signature, job.model, rules, change, data_beside=opened.file
    )
    model = scanned.model
    if model.possible_needs:
        from onnxkvrename.verification import trace_needs  # onnx, for a few vision models

        model = trace_needs(opened.source, model)
    if has_lone_sides(model):
        from onnxkvrename.verification.pairs.other_sides import explain_lone_sides  # onnx, for few

        typed = request._replace(models=(job.model,))
        command = "" if change.strip else format_rename(typed, RULES_FILE)
        explained = explain_lone_sides(opened.source, model, model.findings, command)
        model = model._replace(findings=explained)
    pieces, expected = splice_model(opened.source, scanned)
    size = sum_piece_sizes(pieces)
    splice_plan = SplicePlan(job.model, opened.file.identity, pieces, expected, size)
    findings = list(model.findings)
    is_proved = request.verify or request.target is not None  # by the graph itself
    if not is_proved and change.final_token:
        findings += _check_declared_growth(scanned, rules)
    proved: int | None = None
    if request.verify:
        result = build_spliced_source(opened.source, splice_plan.pieces)
        proved, faults = _verify_result(result, splice_plan.expected_signature, change, rules)
        findings += faults
    report = report_model(model)._replace(
        output=str(job.output),
        status="would-rename" if model.plan.name_map else "unchanged",
        findings=tuple(findings),
        feed_back_call=_build_feed_back_call(rules, model, job, request),
        value_names=model.value_names,
        proved=proved,
    )
    prepared = PreparedModel(job, report, model, splice_plan, model.data_files)
    return _check_output(prepared, opened, request, rules)


def _verify_result(
    result: ByteSource, signature: Signature, change: TokenChange, rules: Rules
) -> tuple[int, tuple[Finding, ...]]:
    """Return how many buffers the unwritten result retains, and what cannot be proved of it."""
    from onnxkvrename.verification.verify import count_proved_flows, prove_retention

    plan = build_rename_plan(signature, rules, change)
    flows, faults = prove_retention(result, plan.pairs, plan.updates_by_kind, rules.name)
    return count_proved_flows(flows, plan.updates_by_kind), faults


def _check_declared_growth(scanned: ScannedModel, rules: Rules) -> Iterator[Finding]:
    """Yield KV120, once for all buffers that the rules mean to stay in place, but that grow."""
    plan = scanned.model.plan
    different = {finding.name for finding in scanned.model.findings if finding.code == "KV104"}
    suspects = [
        pair
        for pair in plan.pairs
        if pair.input is not None
        and pair.output is not None
        and pair.input.value.shape != pair.output.value.shape
        and pair.output.old_name not in different
        and plan.updates_by_kind.get(pair.kind) == "inplace"
    ]
    if not suspects:
        return
    from onnxkvrename.layout.updates import (  # most models declare one shape for both sides
        build_update_finding,
        find_declared_growth,
    )

    producers = scanned.occurrences.build_name_uses({}).producer_op_types
    grown = [
        (pair, update)
        for pair in suspects
        if (update := find_declared_growth(pair, producers.get(pair.sides[-1].old_name, "")))
    ]
    if grown:
        pair, update = grown[0]
        into, out = (side.value for side in pair.sides)
        finding = build_update_finding(
            into.name,
            out.name,
            update,
            (into.shape, out.shape),
            needed_by=f"profile {rules.name}",
            more=len(grown) - 1,
        )
        yield finding._replace(severity="warning")


def _check_output(
    prepared: PreparedModel, opened: OpenModel, request: Request, rules: Rules | None = None
) -> PreparedModel:
    """Add problems of the output path to the report, and plan the copies of external data.

    Where only checks are asked for, it only matters whether the result is there already.
    """
    job, report, plan = prepared.job, prepared.report, prepared.splice_plan
    assert plan is not None
    own_data = () if job.same_directory else prepared.data_files
    places = tuple(job.output.parent / file.location for file in own_data)
    try:
        check_result_size(plan.size, str(job.model))
        if request.check:
            state = _judge_result(prepared, opened)
            is_done = not (state or job.in_place)
            report = report._replace(status="unchanged") if is_done else report
            return prepared._replace(report=report._replace(result_state=state))
        is_there, blocking = check_output(
            job,
            opened.file.status,
            plan.size,
            read_pieces(opened.file, plan.pieces),
            places,
            changes=report.has_changes,
            force=request.force,
        )
        if request.seed_cache and rules is not None:
            blocking = tuple(_describe_export(finding, job.output, rules) for finding in blocking)
    except KvRenameError as error:
        return prepared._replace(report=report._replace(error=name_worker(error)))
    copies = tuple(plan_data_copies(own_data, job.output.parent, force=request.force))
    if is_there and not copies:
        report = report._replace(status="unchanged")
    clashes = (finding for _, _, finding in copies if finding is not None)
    return prepared._replace(
        report=report._replace(findings=(*report.findings, *clashes, *blocking)),
        data_copies=tuple((file, target) for file, target, _ in copies),
        data_paths=places,
        needs_write=not is_there,
    )


def _describe_export(finding: Finding, path: Path, rules: Rules) -> Finding:
    """Return KV504 with what is broken in the export at a path, and a compile of it."""
    message, hint = finding.message, finding.hint
    try:
        for compiled, _ in find_files_beside([path.parent], "hashed_compile_params.json".__eq__):
            hint = f"{finding.hint}; then delete {compiled.parent}, made from it, and its like"
        faults = [each for each in read_kv_model(path, rules).findings if each.severity == "error"]
        reasons = [f"{each.code}: {each.subject} {each.message}" for each in faults[:1]]
    except ModelError as error:
        reasons = [error.message]
    message += "".join(f", and is broken ({reason})" for reason in reasons)
    return finding._replace(message=message, hint=hint)


def _judge_result(prepared: PreparedModel, opened: OpenModel) -> ResultState:
    """Return whether the result and its data are there, as after a run that is not in place.

    What cannot be read there is different, and not an error: nothing is to be written.
    """
    job, plan = prepared.job, prepared.splice_plan
    assert plan is not None
    if job.in_place:
        return ""
    try:
        if not has_result(job, plan.size, read_pieces(opened.file, plan.pieces), force=False):
            return "different" if is_occupied(job.output) else "missing"
        if job.same_directory:
            return ""
        copies = [*plan_data_copies(prepared.data_files, job.output.parent, force=False)]
    except KvRenameError:
        return "different"
    if any(is_occupied(target) for _, target, _ in copies):
        return "different"
    return "missing" if copies else ""


def _build_feed_back_call(
    rules: Rules, model: KvModel, job: RenameJob, request: Request
) -> str | None:
    """Return the call that hands the result back to its exporter, if the profile knows one."""
    token = model.plan.token_change.final_token
    if not (rules.is_qefficient and model.pairs and token):
        return None
    if model.is_window:  # what is compiled is the file merged from all windows
        return None
    names = [value.name for value in model.signature.inputs]
    path = None if request.seed_cache else str(job.output)
    return format_compile_call(names, path, token)
