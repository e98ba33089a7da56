"""Checks on all models of a rename together: what none of them shows alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.files.read import read_status
from onnxkvrename.files.targets import check_free_space, find_writable_directory
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.model.file import open_model
from onnxkvrename.renaming.prepare import PreparedModel
from onnxkvrename.rules.check_together import check_models_together
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.lone_sides import list_unmatched
from onnxkvrename.rules.plan import build_minimal_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import RULES_FILE, Request, format_rename
from onnxkvrename.rules.results import ReportCheck

if TYPE_CHECKING:
    from onnxkvrename.layout.updates import BufferUpdate


def check_batch(
    items: Sequence[PreparedModel], request: Request, rules: Rules, check_reports: ReportCheck
) -> tuple[PreparedModel, ...]:
    """Return the models with the findings and errors that all of them together show.

    There must be a buffer somewhere, and windows must fit. If a model cannot be read, nothing is
    checked that may depend on it: sets, models that fill others, the consumer. Its error then says
    so.

    Args:
        items: All models of the command, each prepared.
        request: What is asked for.
        rules: The rules that recognize KV names and the parts of sets.
        check_reports: A further check of all models.
    """
    readable = [index for index, item in enumerate(items) if item.model is not None]
    models = [model for model in (items[index].model for index in readable) if model is not None]
    is_complete = len(models) == len(items)
    set_findings: list[list[Finding]] = [[] for _ in items]
    across = check_models_together(models, rules, request, is_complete=is_complete)
    is_refused = any(finding.code == "KV202" for model in models for finding in model.findings)
    for index, of_set in zip(readable, across, strict=True):
        set_findings[index] += (f for f in of_set if not (is_refused and f.code == "KV303"))
    for index, finding in _check_unmatched(models, request, rules):
        set_findings[readable[index]].append(finding)
    for index, finding in _check_lone_window(items, request) if is_complete else ():
        set_findings[index].append(finding)
    checked_for: frozenset[int] = frozenset()
    refused: Mapping[int, ModelError] = {}
    if not is_complete:
        _say_unchecked(items, models, request)
    elif request.target is not None:
        refused = _find_refused(items, models, rules)
        taken, checked_for = _check_consumer(items, models, request, rules, refused)
        for of_model, of_consumer in zip(set_findings, taken, strict=True):
            of_model += of_consumer
    if request.verify and any(model.plan.feeds for model in models):
        items = _drop_filled(items, readable, models)
    reports = []
    for index, (item, across_models) in enumerate(zip(items, set_findings, strict=True)):
        findings = (*item.report.findings, *across_models)
        consumer = request.target if index in checked_for else None
        report = item.report._replace(findings=findings, consumer=consumer or "")
        if index in refused and not report.failed:
            report = report._replace(error=refused[index])
        reports.append(report)
    return tuple(
        item._replace(report=report, model=None)
        for item, report in zip(items, check_reports(reports), strict=True)
    )


def check_space(items: Sequence[PreparedModel]) -> tuple[PreparedModel, ...]:
    """Return the models, with an error for each whose disk cannot hold the files of all."""
    places: dict[int, tuple[Path, int | None, int]] = {}  # of each model that writes
    checked = list(items)
    for index, item in enumerate(items):
        if item.report.error is None and (needed := _count_needed_bytes(item)):
            try:
                directory = find_writable_directory(item.job)
                status = read_status(directory)
            except KvRenameError as error:
                checked[index] = item._replace(report=item.report._replace(error=error))
                continue
            places[index] = directory, None if status is None else status.st_dev, needed
    totals: Counter[int | None] = Counter()
    for _, device, needed in places.values():
        totals[device] += needed
    for index, (directory, device, needed) in places.items():
        item = items[index]
        try:
            check_free_space(directory, totals[device], item.job.output, own=needed)
        except KvRenameError as error:
            checked[index] = item._replace(report=item.report._replace(error=error))
    return tuple(checked)


def _count_needed_bytes(item: PreparedModel) -> int:
    """Return the bytes of the files that are written for a model."""
    if item.splice_plan is None:
        return 0
    copied = sum(file.size for file, _ in item.data_copies)
    return copied + (item.splice_plan.size if item.needs_write else 0)


def _drop_filled(
    items: Sequence[PreparedModel], readable: Sequence[int], models: Sequence[KvModel]
) -> Sequence[PreparedModel]:
    """Return the models without KV114 on buffers that another of them fills."""
    from onnxkvrename.rules.feeds import find_filled_outputs, is_filled  # few models fill others

    changed = list(items)
    for index, filled in zip(readable, find_filled_outputs(models), strict=True):
        report = items[index].report
        kept = tuple(finding for finding in report.findings if not is_filled(finding, filled))
        if report.proved is not None:
            proved = report.proved + len(report.findings) - len(kept)
            report = report._replace(findings=kept, proved=proved)
        changed[index] = items[index]._replace(report=report)
    return changed


def _say_unchecked(
    items: Sequence[PreparedModel], models: Sequence[KvModel], request: Request
) -> None:
    """Add to the errors of models that cannot be read what is not checked because of them."""
    unchecked = [f"for {request.target}"] if request.target else []
    if any(model.part or model.plan.feeds or model.needs for model in models):
        unchecked.insert(0, "with each other")
    for item in items if models and unchecked else ():
        error = item.report.error if item.model is None else None
        if error is not None:
            sentence = f"the other models were not checked {' and '.join(unchecked)}"
            error.hint = f"{error.hint}; {sentence}" if error.hint else sentence


def _check_unmatched(
    models: Sequence[KvModel], request: Request, rules: Rules
) -> Iterator[tuple[int, Finding]]:
    """Yield KV001 for models without buffers whose caches only their graphs show."""
    unmatched = list_unmatched(models, rules)
    if not unmatched:
        return
    from onnxkvrename.verification.pairs.unnamed_caches import find_unnamed_caches  # onnx, for few

    def format_command(path: Path) -> str:
        return format_rename(request._replace(models=(path,)), RULES_FILE)

    formatter = None if request.strip else format_command
    yield from find_unnamed_caches(models, unmatched, request.token, formatter)


def _check_lone_window(
    items: Sequence[PreparedModel], request: Request
) -> Iterator[tuple[int, Finding]]:
    """Warn of a rename in place of one window, which leaves the others of its model as they are."""
    windows = [
        index for index, item in enumerate(items) if item.model is not None and item.model.is_window
    ]
    for index in windows if len(windows) == 1 and not request.check else ():
        model = items[index].model
        if model and model.part and items[index].job.in_place and items[index].report.name_map:
            whole = request._replace(models=(Path(model.part.root or "."),))
            finding = build_finding(
                "KV303",
                "",
                "is one window of a model and is renamed without the others: windows with "
                "different tokens merge, compile and serve, but the output is wrong",
                f"`{format_rename(whole)}` renames all windows",
            )
            yield index, finding._replace(severity="warning")


def _find_refused(
    items: Sequence[PreparedModel], models: Sequence[KvModel], rules: Rules
) -> dict[int, ModelError]:
    """Return why models have no layout, now or as they will be, by their indexes."""
    from onnxkvrename.handoff.target import find_refused

    results = [_describe_result(item, rules) for item in items]
    return {**find_refused(results), **find_refused(models)}


def _describe_result(item: PreparedModel, rules: Rules) -> KvModel:
    """Return a model as it will be."""
    assert item.splice_plan is not None
    signature = item.splice_plan.expected_signature
    plan = build_minimal_plan(signature, rules)
    return KvModel(item.report.path, signature, plan)


def _check_consumer(
    items: Sequence[PreparedModel],
    models: Sequence[KvModel],
    request: Request,
    rules: Rules,
    refused: Container[int],
) -> tuple[list[list[Finding]], frozenset[int]]:
    """Check whether a consumer can use the models as they will be, except the refused ones.

    Returns:
        The findings of each model, and the models that were checked, by their indexes.
    """
    from onnxkvrename.handoff.target import check_sets, group_for_consumer
    from onnxkvrename.layout.updates import find_faults

    renamed, updates, faults = [], {}, []
    for item, model in zip(items, models, strict=True):
        renamed.append(_describe_result(item, rules))
        traced = _trace_updates(model)
        new_names = model.plan.name_map
        updates[item.report.path] = {new_names.get(name, name): traced[name] for name in traced}
        faults.append(list(find_faults(model.plan, traced)))
    groups = group_for_consumer(models)
    kept = (tuple(index for index in group if index not in refused) for group in groups)
    sets = [group for group in kept if group]
    checked: list[list[Finding]] = [[] for _ in models]
    for each in check_sets(renamed, sets, updates, rules, request):
        for index, finding in each.list_own_findings():
            checked[index].append(finding)
    findings = [
        [*first, *_drop_reported(others, model)]
        for first, others, model in zip(faults, checked, models, strict=True)
    ]
    return findings, frozenset(index for indexes in sets for index in indexes)


def _drop_reported(findings: Sequence[Finding], model: KvModel) -> Iterator[Finding]:
    """Yield findings of a consumer, except what KV101, KV102 and KV202 report already."""
    can_replace = model.plan.token_change.can_replace
    sides = [side for pair in model.pairs for side in pair.sides]
    reported = {side.old_name for side in sides if not can_replace(side.token)}
    unpaired = {each.name for each in model.findings if each.code in ("KV101", "KV102")}
    reported |= {model.plan.name_map.get(name, name) for name in unpaired}
    for finding in findings:
        is_reported = finding.code == "KV601" and finding.name in reported
        if not (is_reported or (unpaired and finding.code == "KV609")):
            yield finding


def _trace_updates(model: KvModel) -> dict[str, BufferUpdate]:
    """Return how buffers are updated, by the old names of their outputs."""
    from onnxkvrename.verification import trace_buffer_updates

    with open_model(Path(model.path)) as opened:
        return trace_buffer_updates(opened.source, model.pairs)
