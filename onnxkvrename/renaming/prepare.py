"""One model: read, plan, check; what it would become, and how."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, RulesError
from onnxkvrename.findings import Finding
from onnxkvrename.model.external_data import DataFile, find_data_files, plan_data_copies
from onnxkvrename.model.file import OpenModel, build_spliced_source, open_model
from onnxkvrename.model.metadata import read_stamp, write_stamp
from onnxkvrename.model.occurrences import find_occurrences
from onnxkvrename.model.proto_reader import read_export_info
from onnxkvrename.model.protobuf import ByteSource, Piece, Span, splice_payloads, sum_piece_sizes
from onnxkvrename.model.signature import Signature
from onnxkvrename.renaming.output_path import find_blocking_file, is_up_to_date
from onnxkvrename.rules.checks import check_pairs
from onnxkvrename.rules.plan import RenamePlan, TokenChange, build_rename_plan, rename_symbols
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport, Options, RenameJob
from onnxkvrename.rules.windows import SetPart, build_part
from onnxkvrename.storage.read import FileIdentity


class SplicePlan(NamedTuple):
    """How a result is made of a model in the state it was found in, and how it must read back."""

    model_path: Path
    identity: FileIdentity
    pieces: tuple[Piece, ...]
    expected_signature: Signature

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return sum_piece_sizes(self.pieces)


class PreparedModel(NamedTuple):
    """A model that has been read, planned and checked; it travels between processes.

    ``copies`` are data files that have to go somewhere, ``beside`` the places of
    all that go with the result; ``there`` says that the result stands in its
    place already. ``part`` is the model as windows and merges of it are held
    against.
    """

    job: RenameJob
    report: ModelReport
    splice_plan: SplicePlan | None = None
    output_names: tuple[str, ...] = ()
    data_copies: tuple[tuple[DataFile, Path], ...] = ()
    data_paths: tuple[Path, ...] = ()
    is_up_to_date: bool = False
    part: SetPart | None = None

    @property
    def needs_no_write(self) -> bool:
        """Whether the model itself need not be written."""
        return self.is_up_to_date or (self.job.in_place and not self.report.has_changes)


def prepare_model(
    job: RenameJob, wish: TokenChange, rules: Rules, options: Options
) -> PreparedModel:
    """Read, plan and check a model. What is wrong with it becomes part of its report.

    Raises :class:`RulesError` where the rules make names that could not be undone.
    """
    item = PreparedModel(job, ModelReport(str(job.model), str(job.output), "failed"))
    try:
        with open_model(job.model) as model:
            return _prepare_open_model(model, item, wish, rules, options)
    except RulesError:
        raise
    except KvRenameError as error:
        return item._replace(report=item.report._replace(error=error))


def _prepare_open_model(
    model: OpenModel, item: PreparedModel, wish: TokenChange, rules: Rules, options: Options
) -> PreparedModel:
    plan = build_rename_plan(model.signature, rules, wish)
    names = plan.name_map
    ends = {end.old_name for pair in plan.pairs for end in pair.sides}
    survey = find_occurrences(model.source, ends | set(names.values()))
    uses = survey.build_name_uses(names)
    symbols = rename_symbols(uses.symbols, uses.producer_op_types, plan)
    pieces = splice_payloads(model.source, survey.build_edits(names, symbols))
    stamp = "" if (names or wish.strip) and read_stamp(model.source) is not None else None
    if stamp is not None:
        pieces = write_stamp(model.source, None, pieces)
    found = list(find_data_files(survey.references, item.job.model))
    data = [one for one in found if isinstance(one, DataFile)]
    findings = [
        *check_pairs(model.signature, plan, uses),
        *(one for one in found if isinstance(one, Finding)),
        *(f for check in options.checks if names for f in check(item.job, rules, wish)),
    ]
    report = item.report._replace(
        status="would-rename" if names or stamp is not None else "unchanged",
        pairs=plan.pairs,
        unchanged_names=plan.unchanged_names,
        findings=tuple(findings),
        feed_back_call=_build_feed_back_call(rules, model.signature, item.job, plan),
        value_names=tuple(v.name for v in (*model.signature.inputs, *model.signature.outputs)),
        stamp=stamp,
    )
    expected = model.signature.apply_name_map(names, symbols)
    if options.verify:
        proofs = _verify_result(build_spliced_source(model.file, pieces), expected, wish, rules)
        report = report._replace(findings=(*report.findings, *proofs))
    part = None
    if options.group_windows:
        path, export = (
            Path(report.path).as_posix(),
            partial(read_export_info, model.source),
        )
        part = build_part(path, model.signature, plan.pairs, rules, export)
    item = item._replace(
        report=report,
        splice_plan=SplicePlan(item.job.model, model.file.identity, pieces, expected),
        output_names=tuple(value.name for value in model.signature.outputs),
        part=part,
    )
    return _resolve_output(item, model, data, options) if options.check_destination else item


def prepare_stamp(
    job: RenameJob, report: ModelReport, digest: str, options: Options
) -> PreparedModel:
    """A model that is to get a layout's digest into its metadata, and no other change.

    ``report`` is what was found of it. What is wrong with the file becomes part of it.
    """
    item = PreparedModel(job, report)
    try:
        with open_model(job.model) as model:
            pieces = write_stamp(model.source, digest, (Span(0, model.file.size),))
            if read_stamp(model.source) != digest:
                report = report._replace(stamp=digest, status="would-rename")
            recipe = SplicePlan(job.model, model.file.identity, pieces, model.signature)
            item = item._replace(report=report, splice_plan=recipe)
            return _resolve_output(item, model, (), options)
    except KvRenameError as error:
        return item._replace(report=report._replace(error=error))


def _verify_result(
    result: ByteSource, signature: Signature, wish: TokenChange, rules: Rules
) -> tuple[Finding, ...]:
    """What cannot be proved of the result, read before it is written anywhere."""
    from onnxkvrename.verification.verify import prove_retention

    pairs = build_rename_plan(signature, rules, wish).pairs
    return prove_retention(result, pairs)[1]


def _resolve_output(
    item: PreparedModel, model: OpenModel, data: Sequence[DataFile], options: Options
) -> PreparedModel:
    """With what the place of the result has to say."""
    job, report = item.job, item.report
    assert item.splice_plan is not None
    try:
        forced = options.force or not report.has_changes
        pieces = item.splice_plan.pieces
        fixed = bool(report.stamp)
        there = is_up_to_date(model.file, job, pieces, data, forced=forced, fixed=fixed)
    except KvRenameError as error:
        return item._replace(report=report._replace(error=error))
    copies, clashes = _plan_data_copies(job, data, options)
    clashes += find_blocking_file(job, there, options)
    report = report._replace(findings=(*report.findings, *clashes))
    beside = () if job.same_directory else tuple(job.output.parent / d.location for d in data)
    return item._replace(report=report, data_copies=copies, data_paths=beside, is_up_to_date=there)


def _build_feed_back_call(
    rules: Rules, signature: Signature, job: RenameJob, plan: RenamePlan
) -> str | None:
    if not plan.pairs or not plan.token_change.final_token:
        return None
    inputs = [value.name for value in signature.inputs]
    return rules.format_feed_back_call(inputs, str(job.output), plan.token_change.final_token)


def _plan_data_copies(
    job: RenameJob, data: Sequence[DataFile], options: Options
) -> tuple[tuple[tuple[DataFile, Path], ...], list[Finding]]:
    """Which data files have to go where; none within one directory."""
    if job.same_directory:
        return (), []
    standing = list(plan_data_copies(data, job.output.parent, force=options.force))
    clashes = [clash for _, _, clash in standing if clash is not None]
    return tuple((item, target) for item, target, _ in standing), clashes
