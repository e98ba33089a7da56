"""The command ``check-consumer``: check whether a consumer can use the KV buffers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

from onnxkvrename.api.arguments import find_rules
from onnxkvrename.api.layouts import load_traced
from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import print_answer, print_choice
from onnxkvrename.findings import Finding, decide_exit_code, promote_to_errors
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.consumer_checks import check_consumer, find_owning_model
from onnxkvrename.handoff.find_consumers import DEFAULT_CONSUMER, load_consumer
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import (
    CompileInfo,
    LoadedLayout,
    replace_findings,
)
from onnxkvrename.options import (
    CUSTOM_IO,
    DIM,
    FULL_TRANSFER,
    SPECIALIZATIONS,
    TARGET,
    VERBOSE,
    Example,
    Format,
    Models,
    Profile,
    Quiet,
    RulesFile,
    Strict,
)
from onnxkvrename.records import fill_record
from onnxkvrename.report.check_consumer_text import ConsumerCheck, build_consumer_answer
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.sidecars.stale import find_stale_sidecars


class CheckConsumerArguments(NamedTuple):
    """What a user asks for with ``check-consumer``."""

    models: Models = ()
    target: Annotated[str, TARGET] = DEFAULT_CONSUMER
    full_transfer: Annotated[bool, FULL_TRANSFER] = False
    sizes: Annotated[Mapping[str, int], DIM] = MappingProxyType({})
    specializations: Annotated[Path | None, SPECIALIZATIONS] = None
    custom_io: Annotated[Path | None, CUSTOM_IO] = None
    strict: Strict = False
    profile: Profile = None
    rules: RulesFile = None
    output_format: Format = "text"
    quiet: Quiet = False
    verbose: Annotated[
        bool, VERBOSE._replace(help="Also list the selected names in the consumer's order.")
    ] = False


@declare_command(
    "check-consumer",
    CheckConsumerArguments,
    "Exit codes: 0 it can use them; 1 a finding of severity error; 2 the job could not be done; "
    "130 interrupted.",
    Example("onnxkvrename check-consumer renamed.onnx", "Check for vllm-qaic."),
    Example("onnxkvrename check-consumer renamed.onnx -v", "Also list the names that it selects."),
)
def command(arguments: CheckConsumerArguments) -> int:
    """Check whether a consumer can use the KV buffers of MODEL, and what would fail.

    MODEL is one model, the windows of one, or a manifest. A consumer selects buffers by
    name, sorts them by the layer in the name, and moves the part that it takes for the
    prompt's. Nothing is written.
    """
    check = _check_models(arguments)
    code = decide_exit_code(failed=check.failed)
    answer = build_consumer_answer(check, code, quiet=arguments.quiet, verbose=arguments.verbose)
    return print_answer(answer, arguments.output_format)


def _check_models(arguments: CheckConsumerArguments) -> ConsumerCheck:
    consumer = load_consumer(arguments.target)
    rules = find_rules(arguments.profile, arguments.rules, arguments.models)
    print_choice(rules.choice, arguments.output_format, arguments.quiet)
    compile_info = fill_record(CompileInfo, arguments)
    loaded = load_traced(arguments.models, rules, compile_info, strict=arguments.strict)
    layout = loaded.layout
    reports = tuple(_check_sidecars(report, rules, arguments) for report in loaded.reports)
    findings = tuple(check_consumer(layout, consumer, full_transfer=arguments.full_transfer))
    if arguments.strict:
        findings = promote_to_errors(findings)
    is_sound = not any(report.failed for report in reports)  # else no consumer can use it
    alternative = None
    if findings and is_sound:
        alternative = _find_alternative(consumer, layout, arguments)
    reports = tuple(_add_findings(report, loaded, findings) for report in reports)
    return ConsumerCheck(consumer, layout, reports, rules.profile_choice, alternative)


def _find_alternative(
    consumer: Consumer,
    layout: Layout,
    arguments: CheckConsumerArguments,
) -> Consumer | None:
    """Return the same program with another setting, if that one can use the buffers."""
    if not consumer.alternative:
        return None
    alternative = load_consumer(consumer.alternative)
    findings = tuple(check_consumer(layout, alternative, full_transfer=arguments.full_transfer))
    if arguments.strict:
        findings = promote_to_errors(findings)
    return None if any(finding.severity == "error" for finding in findings) else alternative


def _check_sidecars(
    report: ModelReport, rules: Rules, arguments: CheckConsumerArguments
) -> ModelReport:
    """Return a report with the stale sidecars beside its model."""
    stale = find_stale_sidecars(Path(report.path), report.pairs, rules)
    return replace_findings(report, (*report.findings, *stale), strict=arguments.strict)


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
    return replace_findings(report, (*report.findings, *own))
