"""All models of a command as one: what none of them shows alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from onnxkvrename.errors import KvRenameError, WriteError
from onnxkvrename.findings import Finding, promote_to_errors
from onnxkvrename.model.external_data import DataFile, has_same_data
from onnxkvrename.renaming.extra_files import PreparedSidecar
from onnxkvrename.renaming.output_path import find_writable_directory
from onnxkvrename.renaming.prepare import PreparedModel
from onnxkvrename.rules.plan import TokenChange, build_minimal_plan
from onnxkvrename.rules.profile import MERGED, Rules
from onnxkvrename.rules.results import Options
from onnxkvrename.rules.windows import SetCandidate, check_models_together, group_parts
from onnxkvrename.storage.temp_file import check_free_space


def check_batch(
    examined: Sequence[PreparedModel], wish: TokenChange, rules: Rules, options: Options
) -> tuple[PreparedModel, ...]:
    """The same models, with the findings and errors of all of them together.

    There must be a buffer somewhere, windows must fit, no two results may stand
    in one place, and the disks must hold all results at once. Raises
    :class:`ModelError` where a consumer would meet one buffer twice.
    """
    further = _check_across_models(examined, wish, rules, options)
    consumed = _check_consumer(examined, rules, options)
    models = {os.path.realpath(item.job.model): item.job for item in examined}
    outputs = Counter(os.path.realpath(item.job.output) for item in examined)
    placed: dict[str, DataFile] = {}
    claimed: Counter[int] = Counter()
    judged = []
    for item, found, stumbled in zip(examined, further, consumed, strict=True):
        report, output = item.report, os.path.realpath(item.job.output)
        report = report._replace(findings=(*report.findings, *found, *stumbled))
        fault = report.error or _find_data_clash(item, placed)
        if options.check_destination and fault is None:
            fault = _find_space_error(item, claimed)
        if outputs[output] > 1 or models.get(output, item.job) is not item.job:
            taken = WriteError("is another model of this run, or its result", path=report.output)
            fault = fault or taken
        report = report._replace(error=fault)
        if options.strict:
            report = report._replace(findings=promote_to_errors(report.findings))
        report = report._replace(status="failed" if report.failed else report.status)
        judged.append(item._replace(report=report, part=None))
    return tuple(judged)


def add_sidecar_findings(
    judged: Sequence[PreparedModel], texts: Sequence[PreparedSidecar], options: Options
) -> tuple[PreparedModel, ...]:
    """The same models, each with what is wrong with texts that go with it."""
    reports = [item.report for item in judged]
    for text in texts:
        report = reports[text.model_index]
        findings = promote_to_errors(text.findings) if options.strict else text.findings
        report = report._replace(
            findings=(*report.findings, *findings), error=report.error or text.error
        )
        reports[text.model_index] = report._replace(
            status="failed" if report.failed else report.status
        )
    return tuple(item._replace(report=new) for item, new in zip(judged, reports, strict=True))


def _check_across_models(
    examined: Sequence[PreparedModel], wish: TokenChange, rules: Rules, options: Options
) -> list[list[Finding]]:
    """Further findings for each model: of buffers that are nowhere, and of sets.

    Only where all could be read: one that could not may be the window that is missing.
    """
    if any(item.splice_plan is None for item in examined):
        return [[] for _ in examined]
    seen = [SetCandidate(item.output_names, item.report.pairs, item.part) for item in examined]
    return check_models_together(seen, rules, wish, judge=not options.check_destination)


def _check_consumer(
    examined: Sequence[PreparedModel], rules: Rules, options: Options
) -> list[list[Finding]]:
    """What a consumer would stumble on, for each model as it would be."""
    if options.consumer is None or any(item.splice_plan is None for item in examined):
        return [[] for _ in examined]
    from onnxkvrename.handoff.consumer import load_consumer
    from onnxkvrename.handoff.consumer_checks import check_sets
    from onnxkvrename.layout.layout import LayoutSource

    sources = []
    for item in examined:
        assert item.splice_plan is not None
        signature = item.splice_plan.expected_signature
        plan = build_minimal_plan(signature, rules)
        sources.append(LayoutSource(item.report.path, signature, plan))
    target, sets = load_consumer(options.consumer), _group_sets(examined, rules)
    return check_sets(sources, sets, target, whole=options.full_transfer)


def _group_sets(examined: Sequence[PreparedModel], rules: Rules) -> list[tuple[int, ...]]:
    """Which models a consumer meets as one: windows together, every other alone.

    A merge that another one goes beyond is on its way to it, and meets nobody.
    """
    numbers = [number for number, item in enumerate(examined) if item.part is not None]
    parts = [item.part for item in examined if item.part is not None]
    alone = (number for number, item in enumerate(examined) if item.part is None)
    sets: list[tuple[int, ...]] = [(number,) for number in alone]
    for group in group_parts(parts, rules):
        if group.stage != MERGED:
            sets.append(tuple(numbers[at] for at in group.part_indexes))
            continue
        layers = {at: {pair.layer for pair in parts[at].pairs} for at in group.part_indexes}
        ends = [at for at in layers if not any(layers[at] < other for other in layers.values())]
        sets += [(numbers[at],) for at in ends]
    return sets


def _find_data_clash(item: PreparedModel, placed: dict[str, DataFile]) -> KvRenameError | None:
    for data, target in item.data_copies:
        first = placed.setdefault(os.path.realpath(target), data)
        if first.path != data.path and not has_same_data(data, first.path):
            return WriteError("is the place of two different data files", path=str(target))
    return None


def _find_space_error(item: PreparedModel, claimed: Counter[int]) -> KvRenameError | None:
    """What is wrong if a disk cannot hold this result beside all those before it."""
    if (item.needs_no_write and not item.data_copies) or item.splice_plan is None:
        return None
    try:
        directory = find_writable_directory(item.job)
        device = os.stat(directory).st_dev
        needed = (
            sum(data.size for data, _ in item.data_copies)
            + (not item.needs_no_write) * item.splice_plan.size
        )
        check_free_space(directory, claimed[device] + needed, item.job.output)
    except KvRenameError as error:
        return error
    claimed[device] += needed
    return None
