"""Find models in QEfficient's export cache that it would reuse for another export."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.files.find import find_jobs
from onnxkvrename.files.read import resolve_path
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.qefficient.export_cache import (
    ExportParams,
    collect_tokens,
    read_export_params,
    rename_export_params,
)
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import find_cached_export
from onnxkvrename.rules.request import Request, format_rename
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.text import format_list

REUSE_CODE = "KV402"
_SPLIT_CODE = "KV303"


class Export(NamedTuple):
    """An export of the cache, and the tokens in the names that it was made with."""

    directory: Path
    params: ExportParams
    tokens: frozenset[str]

    def describe(self) -> str:
        """Return in a few words which exports are of its kind."""
        return _describe_tokens(self.tokens)

    def format_undo(self, rules: Rules) -> str:
        """Return the command that gives its models the names it was made with."""
        token = min(self.tokens - {""}, default=None)
        is_plain = token is None
        undo = Request((self.directory,), token, strip=is_plain, replace=not is_plain)
        return format_rename(undo, rules)


def check_exports(
    reports: Sequence[ModelReport], rules: Rules, request: Request | None = None
) -> tuple[ModelReport, ...]:
    """Return reports with KV402 for models of the cache that have other tokens than their export.

    That is an error where the run would rename such a model in place, unless it is forced. Where
    models of one export have different tokens, one finding says so, with the command that restores
    the export: KV303 if the models are compared as they are, else KV402.

    Args:
        reports: All models of the command.
        rules: The rules that recognize KV names.
        request: The rename that is asked for; ``None`` if none is.
    """
    by_directory: dict[Path, list[int]] = {}
    for index, report in enumerate(reports):
        directory = _find_directory(report)
        if directory is not None:
            by_directory.setdefault(directory, []).append(index)
    checked = list(reports)
    for directory, indexes in by_directory.items():
        export = _read_export(directory, rules)
        if export is not None:
            own = [reports[index] for index in indexes]
            found = _check_export(export, own, rules, request)
            for index, report in zip(indexes, found, strict=True):
                checked[index] = report
    return tuple(checked)


def restate_reuse(report: ModelReport, rules: Rules) -> ModelReport:
    """Return the report on a model with KV402 that was renamed: it says what its names are now."""
    path = Path(report.path)
    directory = _find_directory(report)
    is_warned = any(finding.code == REUSE_CODE for finding in report.findings)
    export = _read_export(directory, rules) if is_warned and directory else None
    if export is None:
        return report
    outputs = [pair.output.new_name for pair in report.pairs if pair.output is not None]
    now = _build_state_finding(path, export, rules, collect_tokens(outputs, rules))
    findings = (now if each.code == REUSE_CODE else each for each in report.findings)
    return report._replace(findings=tuple(findings))


def _find_directory(report: ModelReport) -> Path | None:
    """Return the directory of the export that a model with buffers belongs to, if it is one."""
    return find_cached_export(Path(report.path)) if report.pairs or report.name_map else None


def _read_export(directory: Path, rules: Rules) -> Export | None:
    """Return an export; ``None`` if QEfficient cannot read its parameters: it reuses nothing."""
    try:
        params = read_export_params(directory)
    except KvRenameError:
        return None
    tokens = collect_tokens(params["export_params"]["output_names"], rules)
    return Export(directory, params, frozenset(tokens))


def _check_export(
    export: Export, reports: Sequence[ModelReport], rules: Rules, request: Request | None
) -> list[ModelReport]:
    """Return the reports on the models of one export, with one finding about its tokens each."""
    changed = [report for report in reports if request is not None and _changes_in_place(report)]
    kept = [report for report in reports if report not in changed]
    renamed = [] if request is not None and request.seed_cache else changed
    refusal = _build_refusal(export, rules, request) if renamed and request is not None else None
    states: dict[str, Finding] = {}
    for report in kept:
        outputs = (pair.output for pair in report.pairs if pair.output is not None)
        tokens = {output.token for output in outputs}
        if export.tokens and not export.tokens.issuperset(tokens):
            states[report.path] = _build_state_finding(Path(report.path), export, rules, tokens)
    splits = [
        report.path
        for report in reports
        for finding in report.findings
        if (finding.code, finding.severity) == (_SPLIT_CODE, "error")
    ]
    if states and splits:
        return [_point_to_undo(report, export, rules) for report in reports]
    found = dict(states)
    if refusal is not None and not (states and refusal.severity == "error"):
        found |= {each.path: refusal._replace(name=Path(each.path).name) for each in renamed}
    elif refusal is not None:
        found = {path: state._replace(severity="error") for path, state in states.items()}
    return [
        report._replace(findings=(*_drop_splits(report), found[report.path]))
        if report.path in found
        else report
        for report in reports
    ]


def _drop_splits(report: ModelReport) -> tuple[Finding, ...]:
    """Return the findings without the warning about a lone window, which has the same cause."""
    return tuple(
        each for each in report.findings if (each.code, each.severity) != (_SPLIT_CODE, "warning")
    )


def _point_to_undo(report: ModelReport, export: Export, rules: Rules) -> ModelReport:
    """Return a report whose KV303 has the command that restores the export."""
    hint = f"`{export.format_undo(rules)}` restores the export"
    findings = (
        each._replace(hint=hint) if each.code == _SPLIT_CODE else each for each in report.findings
    )
    return report._replace(findings=tuple(findings))


def _changes_in_place(report: ModelReport) -> bool:
    is_in_place = resolve_path(report.output) == resolve_path(report.path)
    return is_in_place and bool(report.name_map)


def _build_refusal(export: Export, rules: Rules, request: Request) -> Finding | None:
    """Return KV402 about a rename in place; ``None`` if it gives the export its own names."""
    if rename_export_params(export.params, rules, request.change) == export.params:
        return None
    unforced = request._replace(output=None, force=False, seed_cache=False)
    seeding = unforced._replace(models=(export.directory,), seed_cache=True)
    elsewhere = unforced._replace(directory=Path("renamed"))
    ways = [f"`{format_rename(elsewhere, rules)}` writes elsewhere"]
    if _can_seed(seeding, rules):
        seed = format_rename(seeding, rules)
        ways.insert(0, f"`{seed}` makes a renamed copy where QEfficient looks for it")
    if not request.force:
        ways.append(f"`{format_rename(unforced._replace(force=True), rules)}` renames it here")
    finding = build_finding(
        REUSE_CODE,
        "",
        "is in QEfficient's export cache; if you rename it here, the next export "
        f"{export.describe()} silently reuses it",
        ", ".join(ways),
    )
    return finding if request.force else finding._replace(severity="error")


def _can_seed(request: Request, rules: Rules) -> bool:
    """Return whether ``--seed-cache`` takes an export."""
    from onnxkvrename.qefficient.seed_cache import plan_seeds  # only for a rename in the cache

    try:
        plan = plan_seeds([job.model for job in find_jobs(request.models)], rules, request)
    except KvRenameError:
        return False
    return not plan.refused and all(seed.finding is None for seed in plan.seeds)


def _build_state_finding(
    model: Path, export: Export, rules: Rules, tokens: Collection[str]
) -> Finding:
    """Return KV402 for a model with other tokens than its export was made with."""
    return build_finding(
        REUSE_CODE,
        model.name,
        f"has names {_describe_tokens(tokens)}, but is in QEfficient's export cache as an export "
        f"{export.describe()}; the next export of that kind silently reuses it",
        f"`{export.format_undo(rules)}` restores that export",
    )


def _describe_tokens(tokens: Collection[str]) -> str:
    named = sorted(set(tokens) - {""})
    return f"with the token {format_list(named)}" if named else "without a token"
