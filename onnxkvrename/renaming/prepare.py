"""One model: read, plan, check; what it would become, and how."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, RulesError
from onnxkvrename.findings import Finding
from onnxkvrename.model import external_data as externaldata
from onnxkvrename.model import file as onnxfile
from onnxkvrename.model import metadata as stamps
from onnxkvrename.model import occurrences as places
from onnxkvrename.model import proto_reader as messages
from onnxkvrename.model import protobuf as wire
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.model.file import Model
from onnxkvrename.model.protobuf import Piece, Source, Span
from onnxkvrename.model.signature import Signature
from onnxkvrename.renaming import output_path as destination
from onnxkvrename.rules import checks as checking
from onnxkvrename.rules import plan as planning
from onnxkvrename.rules import windows
from onnxkvrename.rules.plan import Plan, Wish
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import Job, ModelReport, Options
from onnxkvrename.rules.windows import Part
from onnxkvrename.storage.read import Identity


class Recipe(NamedTuple):
    """How a result is made of a model in the state it was found in, and how it must read back."""

    model: Path
    identity: Identity
    pieces: tuple[Piece, ...]
    expected: Signature

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return wire.total(self.pieces)


class Examined(NamedTuple):
    """A model that has been read, planned and checked; it travels between processes.

    ``copies`` are data files that have to go somewhere, ``beside`` the places of
    all that go with the result; ``there`` says that the result stands in its
    place already. ``part`` is the model as windows and merges of it are held
    against.
    """

    job: Job
    report: ModelReport
    recipe: Recipe | None = None
    outputs: tuple[str, ...] = ()
    copies: tuple[tuple[DataFile, Path], ...] = ()
    beside: tuple[Path, ...] = ()
    there: bool = False
    part: Part | None = None

    @property
    def done(self) -> bool:
        """Whether the model itself need not be written."""
        return self.there or (self.job.in_place and not self.report.changed)


def examine(job: Job, wish: Wish, rules: Rules, options: Options) -> Examined:
    """Read, plan and check a model. What is wrong with it becomes part of its report.

    Raises :class:`RulesError` where the rules make names that could not be undone.
    """
    item = Examined(job, ModelReport(str(job.model), str(job.output), "failed"))
    try:
        with onnxfile.opened(job.model) as model:
            return _examined(model, item, wish, rules, options)
    except RulesError:
        raise
    except KvRenameError as error:
        return item._replace(report=item.report._replace(error=error))


def _examined(model: Model, item: Examined, wish: Wish, rules: Rules, options: Options) -> Examined:
    plan = planning.plan(model.signature, rules, wish)
    names = plan.names
    ends = {end.old for pair in plan.pairs for end in pair.ends}
    survey = places.survey(model.source, ends | set(names.values()))
    uses = survey.uses(names)
    symbols = planning.follow(uses.symbols, uses.producers, plan)
    pieces = wire.splice(model.source, survey.edits(names, symbols))
    stamp = "" if (names or wish.strip) and stamps.read(model.source) is not None else None
    if stamp is not None:
        pieces = stamps.written(model.source, None, pieces)
    found = list(externaldata.locate(survey.references, item.job.model))
    data = [one for one in found if isinstance(one, DataFile)]
    findings = [
        *checking.check(model.signature, plan, uses),
        *(one for one in found if isinstance(one, Finding)),
        *(f for check in options.checks if names for f in check(item.job, rules, wish)),
    ]
    report = item.report._replace(
        status="would-rename" if names or stamp is not None else "unchanged",
        pairs=plan.pairs,
        kept=plan.kept,
        findings=tuple(findings),
        feed_back=_feed_back(rules, model.signature, item.job, plan),
        values=tuple(v.name for v in (*model.signature.inputs, *model.signature.outputs)),
        stamp=stamp,
    )
    expected = model.signature.renamed(names, symbols)
    if options.verify:
        proofs = _proofs(onnxfile.spliced(model.file, pieces), expected, wish, rules)
        report = report._replace(findings=(*report.findings, *proofs))
    part = None
    if options.sets:
        path, export = Path(report.path).as_posix(), partial(messages.export, model.source)
        part = windows.part(path, model.signature, plan.pairs, rules, export)
    item = item._replace(
        report=report,
        recipe=Recipe(item.job.model, model.file.identity, pieces, expected),
        outputs=tuple(value.name for value in model.signature.outputs),
        part=part,
    )
    return _placed(item, model, data, options) if options.place else item


def stamped(job: Job, report: ModelReport, digest: str, options: Options) -> Examined:
    """A model that is to get a layout's digest into its metadata, and no other change.

    ``report`` is what was found of it. What is wrong with the file becomes part of it.
    """
    item = Examined(job, report)
    try:
        with onnxfile.opened(job.model) as model:
            pieces = stamps.written(model.source, digest, (Span(0, model.file.size),))
            if stamps.read(model.source) != digest:
                report = report._replace(stamp=digest, status="would-rename")
            recipe = Recipe(job.model, model.file.identity, pieces, model.signature)
            item = item._replace(report=report, recipe=recipe)
            return _placed(item, model, (), options)
    except KvRenameError as error:
        return item._replace(report=report._replace(error=error))


def _proofs(result: Source, signature: Signature, wish: Wish, rules: Rules) -> tuple[Finding, ...]:
    """What cannot be proved of the result, read before it is written anywhere."""
    from onnxkvrename.verification import verify as verifying

    pairs = planning.plan(signature, rules, wish).pairs
    return verifying.prove(result, pairs)[1]


def _placed(item: Examined, model: Model, data: Sequence[DataFile], options: Options) -> Examined:
    """With what the place of the result has to say."""
    job, report = item.job, item.report
    assert item.recipe is not None
    try:
        forced = options.force or not report.changed
        pieces = item.recipe.pieces
        fixed = bool(report.stamp)
        there = destination.stands_already(
            model.file, job, pieces, data, forced=forced, fixed=fixed
        )
    except KvRenameError as error:
        return item._replace(report=report._replace(error=error))
    copies, clashes = _copies(job, data, options)
    clashes += destination.in_the_way(job, there, options)
    report = report._replace(findings=(*report.findings, *clashes))
    beside = () if job.same_directory else tuple(job.output.parent / d.location for d in data)
    return item._replace(report=report, copies=copies, beside=beside, there=there)


def _feed_back(rules: Rules, signature: Signature, job: Job, plan: Plan) -> str | None:
    if not plan.pairs or not plan.wish.target:
        return None
    inputs = [value.name for value in signature.inputs]
    return rules.call(inputs, str(job.output), plan.wish.target)


def _copies(
    job: Job, data: Sequence[DataFile], options: Options
) -> tuple[tuple[tuple[DataFile, Path], ...], list[Finding]]:
    """Which data files have to go where; none within one directory."""
    if job.same_directory:
        return (), []
    standing = list(externaldata.standing(data, job.output.parent, force=options.force))
    clashes = [clash for _, _, clash in standing if clash is not None]
    return tuple((item, target) for item, target, _ in standing), clashes
