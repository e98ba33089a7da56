"""The command ``check-consumer``: check whether a consumer can use the KV buffers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    add_compile_options,
    add_consumer_option,
    add_format_option,
    add_full_transfer_option,
    add_models_argument,
    add_no_set_option,
    add_pairs_option,
    add_profile_option,
    add_quiet_option,
    add_rules_option,
    add_strict_option,
    add_verbose_option,
)
from onnxkvrename.cli.options.sizes import parse_dim_sizes
from onnxkvrename.cli.output import print_answer
from onnxkvrename.cli.requested_rules import pick_requested_rules
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, decide_exit_code, promote_to_errors
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.consumer_checks import check_consumer, find_owning_model
from onnxkvrename.handoff.find_consumers import configure_consumer, load_consumer
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import (
    CompileInfo,
    LoadedLayout,
    load_layout,
    load_model_or_manifest,
)
from onnxkvrename.report.check_consumer_text import ConsumerCheck, build_consumer_answer
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.sidecars.stale import find_stale_sidecars
from onnxkvrename.verification import trace_buffer_updates


class _Arguments(NamedTuple):
    """The arguments and options of the command line, one field for each."""

    models: tuple[Path, ...]
    target: str
    full_transfer: bool
    dims: tuple[str, ...]
    specializations: Path | None
    custom_io: Path | None
    no_set: bool
    strict: bool
    profile: str | None
    rules: Path | None
    pairs: str | None
    output_format: str
    quiet: bool
    verbose: bool


@click.command(
    "check-consumer",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 it can use them; 1 a finding of severity error; 2 the job could not be "
    "done; 130 interrupted.",
)
@add_models_argument()
@add_consumer_option()
@add_full_transfer_option()
@add_compile_options()
@add_no_set_option()
@add_strict_option()
@add_profile_option()
@add_rules_option()
@add_pairs_option()
@add_format_option()
@add_quiet_option()
@add_verbose_option("Also list the selected names in the consumer's order.")
def command(**values: Any) -> int:
    """Check whether a consumer can use the KV buffers of MODEL, and what would fail.

    MODEL is one model, the windows of one, or a manifest. A consumer selects buffers by
    name, sorts them by the layer in the name, and moves the part that it takes for the
    prompt's. Nothing is written.
    """
    arguments = _Arguments(**values)
    check = _check_models(arguments)
    code = decide_exit_code(failed=check.failed)
    answer = build_consumer_answer(check, code, quiet=arguments.quiet, verbose=arguments.verbose)
    return print_answer(answer, arguments.output_format)


def render_failure(code: int, error: KvRenameError) -> str:
    """Return the JSON document of a job that could not be done."""
    from onnxkvrename.report.documents.check_consumer_json import (
        consumer_check_to_json,
    )  # only here

    return consumer_check_to_json(None, code, error)


def _check_models(arguments: _Arguments) -> ConsumerCheck:
    consumer = load_consumer(arguments.target)
    rules = pick_requested_rules(arguments.models, arguments, consumer.token or None)
    loaded = _load_layout(arguments, rules)
    layout = loaded.layout
    reports = tuple(_check_sidecars(report, rules, arguments) for report in loaded.reports)
    consumer = configure_consumer(consumer, layout)
    findings = tuple(check_consumer(layout, consumer, full_transfer=arguments.full_transfer))
    if arguments.strict:
        findings = promote_to_errors(findings)
    is_sound = not any(report.failed for report in reports)  # else no consumer can use it
    alternative = _find_alternative(consumer, layout, arguments) if findings and is_sound else None
    reports = tuple(_add_findings(report, loaded, findings) for report in reports)
    return ConsumerCheck(consumer, layout, reports, rules.profile_choice, alternative)


def _load_layout(arguments: _Arguments, rules: Rules) -> LoadedLayout:
    """Load one model, the windows of one, or a manifest."""
    compile_info = CompileInfo(
        parse_dim_sizes(arguments.dims),
        arguments.specializations,
        arguments.custom_io,
        group_windows=not arguments.no_set,
    )
    first, *others = arguments.models
    load = (
        partial(load_layout, arguments.models) if others else partial(load_model_or_manifest, first)
    )
    return load(rules, compile_info, strict=arguments.strict, trace_updates=trace_buffer_updates)


def _find_alternative(consumer: Consumer, layout: Layout, arguments: _Arguments) -> Consumer | None:
    """Return the same program with another setting, if that one can use the buffers."""
    if not consumer.alternative:
        return None
    alternative = load_consumer(consumer.alternative)
    findings = tuple(check_consumer(layout, alternative, full_transfer=arguments.full_transfer))
    if arguments.strict:
        findings = promote_to_errors(findings)
    return None if any(finding.severity == "error" for finding in findings) else alternative


def _check_sidecars(report: ModelReport, rules: Rules, arguments: _Arguments) -> ModelReport:
    """Return a report with the stale sidecars beside its model."""
    findings = tuple(find_stale_sidecars(Path(report.path), report.pairs, rules))
    if arguments.strict:
        findings = promote_to_errors(findings)
    report = report._replace(findings=(*report.findings, *findings))
    return report._replace(status="failed" if report.failed else report.status)


def _add_findings(
    report: ModelReport, loaded: LoadedLayout, findings: tuple[Finding, ...]
) -> ModelReport:
    """Return a report with those findings that are about its model: all, if it is the only one."""
    is_single = len(loaded.reports) == 1
    own = (
        finding
        for finding in findings
        if is_single or find_owning_model(loaded.layout, finding.name) == report.path
    )
    report = report._replace(findings=(*report.findings, *own))
    return report._replace(status="failed" if report.failed else report.status)
