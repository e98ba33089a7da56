"""The command that proves."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    NonEmptyPath,
    add_dim_option,
    add_format_option,
    add_jobs_option,
    add_models_argument,
    add_no_set_option,
    add_profile_option,
    add_quiet_option,
    add_rules_option,
    add_strict_option,
    parse_dim_sizes,
)
from onnxkvrename.cli.output import is_color_enabled, print_lines, stdout_guard
from onnxkvrename.errors import KvRenameError
from onnxkvrename.renaming.parallel import count_useful_processes, map_ordered, open_process_pool
from onnxkvrename.renaming.run import check_token_change
from onnxkvrename.report.rename_text import render_findings
from onnxkvrename.report.verify_text import (
    format_buffer_flows,
    format_verdict_line,
    render_verify_github,
    verified_to_json,
)
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.patterns import Pattern, compile_pattern
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.results import Report
from onnxkvrename.verification.verify import (
    VerifiedModel,
    VerifyRequest,
    verify_model,
    verify_window_sets,
)


@click.command(
    "onnxkvrename verify",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 all holds; 1 a finding of severity error; 2 the job could not be done; "
    "130 interrupted.",
)
@add_models_argument()
@click.option(
    "--prefix", metavar="TOKEN", help="Also: this token is on every pair, and nowhere else."
)
@click.option(
    "--select",
    metavar="REGEX",
    help="Also: this expression matches the names of all KV buffers, and no others.",
)
@click.option(
    "--run", is_flag=True, help="Also: run the retention loop in onnxruntime (extra [run])."
)
@click.option(
    "--reference",
    metavar="FILE",
    type=NonEmptyPath(path_type=Path),
    help="With --run: this model must give the very same results, as the one before a rename does.",
)
@add_dim_option(
    "With --run: the size of a symbolic dimension, e.g. ctx_len=32; others are guessed."
)
@add_no_set_option()
@add_strict_option()
@add_profile_option()
@add_rules_option()
@add_jobs_option()
@add_format_option()
@add_quiet_option()
@click.option("-v", "--verbose", is_flag=True, help="Show each buffer, and where it is updated.")
def command(**given: Any) -> int:
    """Prove that every KV buffer is retained, as the models stand; write nothing.

    Beside all checks of a rename: each retained output is computed from its own
    input, through subgraphs and local functions; onnx's checker accepts the
    model; external data are there. Weights are not read.
    """
    if not given["models"]:
        raise click.UsageError("no MODEL given: onnxkvrename verify MODEL...")
    # Else onnxruntime leaves a file in the temporary directory, and reports its use.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    profile = load_rules(given["profile"], given["rules"])
    aim = _build_request(given)
    paths = [job.model for job in find_jobs(given["models"])]
    if aim.reference is not None and len(paths) > 1:
        raise click.UsageError(f"--reference is for one model, not {len(paths)}")
    look = partial(verify_model, rules=profile, aim=aim)
    with open_process_pool(given["jobs"] or count_useful_processes(len(paths))) as executor:
        found = tuple(map_ordered(look, paths, executor))
    _check_dims(found, aim)
    items = verify_window_sets(found, profile, aim)
    code = Report(tuple(item.report for item in items)).compute_exit_code()
    _print_results(items, given, code)
    return code


def render_failure(code: int, fault: KvRenameError) -> str:
    """The JSON document of a job that could not be done."""
    return verified_to_json((), code, fault)


def _build_request(given: dict[str, Any]) -> VerifyRequest:
    if given["prefix"] is not None:
        check_token_change(TokenChange(given["prefix"]))
    if (given["reference"] or given["dims"]) and not given["run"]:
        raise click.UsageError("--reference and --dim are for --run")
    return VerifyRequest(
        token=given["prefix"],
        select_pattern=None if given["select"] is None else _parse_select(given["select"]),
        run_in_onnxruntime=given["run"],
        reference=given["reference"],
        dims=parse_dim_sizes(given["dims"]),
        strict=given["strict"],
        group_windows=not given["no_set"],
    )


def _parse_select(text: str) -> Pattern:
    try:
        return compile_pattern(text)
    except ValueError as error:
        raise click.UsageError(f"--select {text!r} {error}") from None


def _check_dims(found: tuple[VerifiedModel, ...], aim: VerifyRequest) -> None:
    """A size that was given in vain is one that the run did not have."""
    known = {symbol for item in found if item.run is not None for symbol in item.run.dims}
    unknown = [symbol for symbol in aim.dims if symbol not in known]
    if known and unknown:
        raise click.UsageError(
            f"--dim {unknown[0]}: no model has that dimension, but {', '.join(sorted(known))}"
        )


def _print_results(items: tuple[VerifiedModel, ...], given: dict[str, Any], code: int) -> None:
    with stdout_guard():
        if given["form"] == "json":
            print_lines([verified_to_json(items, code)])
            return
        if given["form"] == "github":
            print_lines(render_verify_github(items, quiet=given["quiet"]))
            return
        for item in items:
            color = is_color_enabled(sys.stderr)
            found = render_findings(item.report, color=color, verbose=given["verbose"])
            print_lines(found, err=True)
            if item.report.error is not None or given["quiet"]:
                continue
            print_lines([format_verdict_line(item, color=is_color_enabled(sys.stdout))])
            if given["verbose"]:
                print_lines(f"  {text}" for text in format_buffer_flows(item))
