"""Does retention hold: everything that can be proved of a model, without changing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, as_errors, finding, listed
from onnxkvrename.layout import layout as layouts
from onnxkvrename.model import external_data as externaldata
from onnxkvrename.model import file as onnxfile
from onnxkvrename.model import metadata as stamps
from onnxkvrename.model import occurrences as places
from onnxkvrename.model import proto_reader as messages
from onnxkvrename.model.file import Model
from onnxkvrename.model.protobuf import Source
from onnxkvrename.model.signature import Signature
from onnxkvrename.rules import checks as checking
from onnxkvrename.rules import plan as planning
from onnxkvrename.rules import windows
from onnxkvrename.rules.patterns import Pattern
from onnxkvrename.rules.plan import Pair, Plan, Wish
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.rules.windows import Part, Seen
from onnxkvrename.verification import dataflow
from onnxkvrename.verification import onnx_checker as soundness
from onnxkvrename.verification import retention_loop as retention
from onnxkvrename.verification import strip_weights as weightless
from onnxkvrename.verification.dataflow import Flow
from onnxkvrename.verification.retention_loop import Run, Subject


class Aim(NamedTuple):
    """What is to be proved beside the pairs themselves.

    ``token`` is on every pair and on nothing else; ``select`` fits the names of
    KV buffers and no others. To ``run`` is to try the retention loop in
    onnxruntime, with sizes for symbols (``dims``), against a ``reference``.
    """

    token: str | None = None
    select: Pattern | None = None
    run: bool = False
    reference: Path | None = None
    dims: Mapping[str, int] = MappingProxyType({})
    strict: bool = False
    sets: bool = True


class Verified(NamedTuple):
    """What was found; ``flows`` and ``run`` say how, and ``part`` what sets are judged by.

    ``reference`` is the model that gave the same results.
    """

    report: ModelReport
    flows: tuple[Flow, ...] = ()
    run: Run | None = None
    reference: Path | None = None
    outputs: tuple[str, ...] = ()
    part: Part | None = None


def verify(path: Path, rules: Rules, aim: Aim) -> Verified:
    """Look at one model as it stands. What keeps it from being read is its report's error.

    Raises :class:`RulesError` where the rules make names that could not be
    undone, and :class:`KvRenameError` to ``run`` without onnxruntime, or against
    a reference that cannot be read.
    """
    report = ModelReport(str(path), str(path), "failed")
    try:
        with onnxfile.opened(path) as model:
            verified = _verified(model, report, rules, aim)
    except ModelError as error:
        return Verified(report._replace(error=error))
    if not aim.run:
        return verified
    run, findings = _run(path, verified.report.pairs, rules, aim)
    found = (*verified.report.findings, *findings)
    reference = aim.reference if run is not None and not findings else None
    report = verified.report._replace(findings=found)
    return verified._replace(run=run, reference=reference, report=report)


def together(verified: Sequence[Verified], rules: Rules, aim: Aim) -> tuple[Verified, ...]:
    """The same models, with what they show together; then all is judged."""
    findings: list[list[Finding]] = [[] for _ in verified]
    if all(item.report.error is None for item in verified):
        seen = [Seen(item.outputs, item.report.pairs, item.part) for item in verified]
        findings = windows.together(seen, rules, Wish(aim.token), judge=True)
    return tuple(_judged(item, found, aim) for item, found in zip(verified, findings, strict=True))


def _judged(item: Verified, further: Iterable[Finding], aim: Aim) -> Verified:
    findings = (*item.report.findings, *further)
    if aim.strict:
        findings = as_errors(findings)
    report = item.report._replace(findings=findings)
    report = report._replace(status="failed" if report.failed else "unchanged")
    return item._replace(report=report, part=None)


def _verified(model: Model, report: ModelReport, rules: Rules, aim: Aim) -> Verified:
    plan = planning.as_it_stands(model.signature, rules)
    survey = places.survey(
        model.source, {*(end.old for p in plan.pairs for end in p.ends), *plan.names.values()}
    )
    outside = externaldata.locate(survey.references, Path(report.path))
    flows, proofs = prove(model.source, plan.pairs)
    findings = (
        *checking.check(model.signature, plan, survey.uses(plan.names)),
        *(found for found in outside if isinstance(found, Finding)),
        *proofs,
        *_tokens(model.signature, plan, aim.token),
        *(_selected(model.signature, plan, aim.select) if aim.select is not None else ()),
        *_stamped(model, plan, rules),
    )
    report = report._replace(
        status="unchanged", pairs=plan.pairs, kept=plan.kept, findings=findings
    )
    outputs = tuple(value.name for value in model.signature.outputs)
    part = None
    if aim.sets:
        name, export = Path(report.path).as_posix(), partial(messages.export, model.source)
        part = windows.part(name, model.signature, plan.pairs, rules, export)
    return Verified(report, flows, outputs=outputs, part=part)


def prove(source: Source, pairs: Sequence[Pair]) -> tuple[tuple[Flow, ...], tuple[Finding, ...]]:
    """What can be proved of the bytes of a model: KV110, KV113, KV114 and KV115.

    Raises :class:`ModelError` where they are no model to protobuf.
    """
    model = weightless.read(source)
    flows = dataflow.trace(model, pairs)
    return flows, (*dataflow.check(flows), *soundness.check(model))


def _stamped(model: Model, plan: Plan, rules: Rules) -> Iterator[Finding]:
    """KV621, but for a window: what its set is stamped with, it does not know alone."""
    path = str(model.file.path)
    if not windows.is_window(Path(path).as_posix(), rules):
        source = layouts.Source(path, model.signature, plan)
        found = layouts.void_stamp(source, stamps.read(model.source))
        yield from () if found is None else (found,)


def _tokens(signature: Signature, plan: Plan, token: str | None) -> Iterator[Finding]:
    """KV116: consumers take every name that holds the token, and none without it."""
    carried = {end.old: end.token for pair in plan.pairs for end in pair.ends}
    wanted = plan.wish.target if token is None else token
    without = [name for name, found in carried.items() if found != wanted]
    if wanted and without:
        yield finding(
            "KV116",
            without[0],
            f"does not carry {wanted}, one of {len(without)} such names of {len(carried)}",
            f"onnxkvrename MODEL --prefix {wanted}",
        )
    names = {value.name for value in (*signature.inputs, *signature.outputs)}
    others = sorted(name for name in names - carried.keys() if wanted and wanted in name)
    if others:
        yield finding(
            "KV116",
            others[0],
            f"holds {wanted}, but is no KV buffer; a consumer would take {listed(others)}",
            "choose another token",
        )


def _selected(signature: Signature, plan: Plan, select: Pattern) -> Iterator[Finding]:
    """KV117: an expression must take all KV names and no others."""
    buffers = {end.old for pair in plan.pairs for end in pair.ends}
    names = dict.fromkeys(value.name for value in (*signature.inputs, *signature.outputs))
    taken = {name for name in names if select.fits(name)}
    for wrong, what in (
        ([name for name in names if name in buffers - taken], "is missed by the expression"),
        ([name for name in names if name in taken - buffers], "is taken, but is no KV buffer"),
    ):
        if wrong:
            yield finding(
                "KV117",
                wrong[0],
                f"{what}; all such names: {listed(wrong)}",
                "an expression must match whole names, as in .*vllmKvCache.*",
            )


def _run(
    path: Path, pairs: Sequence[Pair], rules: Rules, aim: Aim
) -> tuple[Run | None, tuple[Finding, ...]]:
    """The retention loop; KV119 where it could not be tried."""
    reference = None
    if aim.reference is not None:
        with onnxfile.opened(aim.reference) as other:
            reference = Subject(aim.reference, planning.as_it_stands(other.signature, rules).pairs)
    try:
        return retention.check(Subject(path, pairs), reference, dims=aim.dims)
    except ModelError as error:
        where = f" ({error.path})" if error.path not in (None, str(path)) else ""
        hint = error.hint or "what can be proved without running is proved above"
        message = f"the retention loop could not be run{where}: {error.message}"
        return None, (finding("KV119", "", message, hint),)
