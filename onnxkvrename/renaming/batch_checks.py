"""All models of a command as one: what none of them shows alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from onnxkvrename.errors import KvRenameError, WriteError
from onnxkvrename.findings import Finding, as_errors
from onnxkvrename.model import external_data as externaldata
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.renaming import output_path as destination
from onnxkvrename.renaming.extra_files import Read
from onnxkvrename.renaming.prepare import Examined
from onnxkvrename.rules import plan as planning
from onnxkvrename.rules import windows
from onnxkvrename.rules.plan import Wish
from onnxkvrename.rules.profile import MERGED, Rules
from onnxkvrename.rules.results import Options
from onnxkvrename.rules.windows import Seen
from onnxkvrename.storage import temp_file as drafts


def judge(
    examined: Sequence[Examined], wish: Wish, rules: Rules, options: Options
) -> tuple[Examined, ...]:
    """The same models, with the findings and errors of all of them together.

    There must be a buffer somewhere, windows must fit, no two results may stand
    in one place, and the disks must hold all results at once. Raises
    :class:`ModelError` where a consumer would meet one buffer twice.
    """
    further = _together(examined, wish, rules, options)
    consumed = _consumed(examined, rules, options)
    models = {os.path.realpath(item.job.model): item.job for item in examined}
    outputs = Counter(os.path.realpath(item.job.output) for item in examined)
    placed: dict[str, DataFile] = {}
    claimed: Counter[int] = Counter()
    judged = []
    for item, found, stumbled in zip(examined, further, consumed, strict=True):
        report, output = item.report, os.path.realpath(item.job.output)
        report = report._replace(findings=(*report.findings, *found, *stumbled))
        fault = report.error or _data_clash(item, placed)
        if options.place and fault is None:
            fault = _short_of_space(item, claimed)
        if outputs[output] > 1 or models.get(output, item.job) is not item.job:
            taken = WriteError("is another model of this run, or its result", path=report.output)
            fault = fault or taken
        report = report._replace(error=fault)
        if options.strict:
            report = report._replace(findings=as_errors(report.findings))
        report = report._replace(status="failed" if report.failed else report.status)
        judged.append(item._replace(report=report, part=None))
    return tuple(judged)


def with_texts(
    judged: Sequence[Examined], texts: Sequence[Read], options: Options
) -> tuple[Examined, ...]:
    """The same models, each with what is wrong with texts that go with it."""
    reports = [item.report for item in judged]
    for text in texts:
        report = reports[text.owner]
        findings = as_errors(text.findings) if options.strict else text.findings
        report = report._replace(
            findings=(*report.findings, *findings), error=report.error or text.error
        )
        reports[text.owner] = report._replace(status="failed" if report.failed else report.status)
    return tuple(item._replace(report=new) for item, new in zip(judged, reports, strict=True))


def _together(
    examined: Sequence[Examined], wish: Wish, rules: Rules, options: Options
) -> list[list[Finding]]:
    """Further findings for each model: of buffers that are nowhere, and of sets.

    Only where all could be read: one that could not may be the window that is missing.
    """
    if any(item.recipe is None for item in examined):
        return [[] for _ in examined]
    seen = [Seen(item.outputs, item.report.pairs, item.part) for item in examined]
    return windows.together(seen, rules, wish, judge=not options.place)


def _consumed(examined: Sequence[Examined], rules: Rules, options: Options) -> list[list[Finding]]:
    """What a consumer would stumble on, for each model as it would be."""
    if options.target is None or any(item.recipe is None for item in examined):
        return [[] for _ in examined]
    from onnxkvrename.handoff import consumer as targets
    from onnxkvrename.handoff import consumer_checks as consuming
    from onnxkvrename.layout.layout import Source

    sources = []
    for item in examined:
        assert item.recipe is not None
        signature = item.recipe.expected
        plan = planning.as_it_stands(signature, rules)
        sources.append(Source(item.report.path, signature, plan))
    target, sets = targets.load(options.target), _sets(examined, rules)
    return consuming.foreseen(sources, sets, target, whole=options.whole)


def _sets(examined: Sequence[Examined], rules: Rules) -> list[tuple[int, ...]]:
    """Which models a consumer meets as one: windows together, every other alone.

    A merge that another one goes beyond is on its way to it, and meets nobody.
    """
    numbers = [number for number, item in enumerate(examined) if item.part is not None]
    parts = [item.part for item in examined if item.part is not None]
    alone = (number for number, item in enumerate(examined) if item.part is None)
    sets: list[tuple[int, ...]] = [(number,) for number in alone]
    for group in windows.group(parts, rules):
        if group.stage != MERGED:
            sets.append(tuple(numbers[at] for at in group.parts))
            continue
        layers = {at: {pair.layer for pair in parts[at].pairs} for at in group.parts}
        ends = [at for at in layers if not any(layers[at] < other for other in layers.values())]
        sets += [(numbers[at],) for at in ends]
    return sets


def _data_clash(item: Examined, placed: dict[str, DataFile]) -> KvRenameError | None:
    for data, target in item.copies:
        first = placed.setdefault(os.path.realpath(target), data)
        if first.path != data.path and not externaldata.equal(data, first.path):
            return WriteError("is the place of two different data files", path=str(target))
    return None


def _short_of_space(item: Examined, claimed: Counter[int]) -> KvRenameError | None:
    """What is wrong if a disk cannot hold this result beside all those before it."""
    if (item.done and not item.copies) or item.recipe is None:
        return None
    try:
        directory = destination.base(item.job)
        device = os.stat(directory).st_dev
        needed = sum(data.size for data, _ in item.copies) + (not item.done) * item.recipe.size
        drafts.require_space(directory, claimed[device] + needed, item.job.output)
    except KvRenameError as error:
        return error
    claimed[device] += needed
    return None
