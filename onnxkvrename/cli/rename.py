"""The command that renames."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from onnxkvrename import __version__
from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    NonEmptyPath,
    add_format_option,
    add_full_transfer_option,
    add_jobs_option,
    add_models_argument,
    add_no_set_option,
    add_profile_option,
    add_quiet_option,
    add_rules_option,
    add_strict_option,
)
from onnxkvrename.cli.output import is_color_enabled, is_terminal, print_lines, stdout_guard
from onnxkvrename.errors import KvRenameError
from onnxkvrename.qefficient.find_export import check_cache_reuse
from onnxkvrename.renaming.parallel import connect_dask, count_useful_processes, open_process_pool
from onnxkvrename.renaming.place import Progress
from onnxkvrename.renaming.run import check_token_change, rename_batch
from onnxkvrename.report.rename_text import (
    render_changes,
    render_diff,
    render_findings,
    render_github_report,
    render_states,
    report_to_json,
)
from onnxkvrename.rules.find_models import build_job, find_jobs
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.results import Options, Report

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from onnxkvrename.renaming.sidecars import Sidecar


class OutputOptions(NamedTuple):
    """How to answer, and how much; ``look`` writes nothing, and ``judge`` minds a change."""

    output_format: str
    quiet: bool
    verbose: bool
    show_diff: bool
    dry_run: bool
    check_only: bool


@click.command(
    "onnxkvrename",
    context_settings=CONTEXT_SETTINGS,
    epilog="Other commands: onnxkvrename verify, inspect, custom-io, manifest, check-consumer, "
    "compare. Exit codes: 0 done or nothing to do; 1 a finding of severity error, or --check found "
    "a name to change; 2 the job could not be done; 130 interrupted.",
)
@add_models_argument()
@click.option("--prefix", metavar="TOKEN", help="The token to give to every KV buffer, e.g. VLLM.")
@click.option(
    "--target",
    metavar="NAME",
    help="Give the token that this consumer looks for, e.g. vllm-qaic, and check that it can take "
    "the results, as `onnxkvrename check-consumer` does.",
)
@add_full_transfer_option("With --target: it")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=NonEmptyPath(path_type=Path),
    help="Write the result here instead of in place.",
)
@click.option(
    "-d",
    "--directory",
    metavar="DIR",
    type=NonEmptyPath(path_type=Path),
    help="Write results below this directory, laid out like the models.",
)
@click.option(
    "--seed-cache",
    is_flag=True,
    help="Write exports of QEfficient's cache where it looks for them under their new names.",
)
@click.option(
    "--in-place",
    is_flag=True,
    help="With --seed-cache: rename the export itself, and its directory.",
)
@click.option(
    "--sidecar",
    "sidecar",
    metavar="FILE",
    multiple=True,
    type=NonEmptyPath(path_type=Path),
    help="Rename in this text file as well: custom_io.yaml, compile parameters, node precisions. "
    "May be repeated.",
)
@click.option("--sidecars", is_flag=True, help="Do so in all that are found beside the models.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a name would change.")
@click.option("--diff", is_flag=True, help="Like --check, and show the names.")
@click.option("-n", "--dry-run", is_flag=True, help="Plan and check everything, write nothing.")
@click.option(
    "--strip", is_flag=True, help="Take the token out again; with --prefix only this one."
)
@click.option("--replace", is_flag=True, help="Put the token in the place of another one.")
@click.option(
    "--normalize",
    is_flag=True,
    help="Make _InternalRetainedState outputs _RetainedState, which consumers pair.",
)
@add_no_set_option()
@click.option(
    "--verify",
    is_flag=True,
    help="Prove each result as `onnxkvrename verify` does, before it is written.",
)
@add_strict_option()
@click.option(
    "--force",
    is_flag=True,
    help="Write where a symbolic link leads, to read-only files and files with several hard "
    "links, and over files in the way.",
)
@add_profile_option()
@add_rules_option()
@add_jobs_option()
@click.option("--dask", metavar="ADDRESS", help="Work on this Dask cluster, which sees the files.")
@add_format_option()
@add_quiet_option()
@click.option("-v", "--verbose", is_flag=True, help="Show every layer.")
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
def command(**given: Any) -> int:
    """Give the KV-cache buffers of exported ONNX models a token in their names.

    MODEL is an .onnx file, or a directory: then every .onnx file below it. Each
    output past_key.0_RetainedState and its input past_key.0 become
    past_key.0_TOKEN_RetainedState and past_key.0_TOKEN wherever the graph sees
    them; vision and all other buffers stay. Nothing is written unless every
    model passes every check.
    """
    judge = given["check"] or given["diff"]
    asked = OutputOptions(
        output_format=given["form"],
        quiet=given["quiet"],
        verbose=given["verbose"],
        show_diff=given["diff"],
        dry_run=judge or given["dry_run"],
        check_only=judge,
    )
    report = _rename_models(given, asked)
    code = report.compute_exit_code(look=judge)
    _print_report(report, asked, code)
    return code


def render_failure(code: int, fault: KvRenameError) -> str:
    """The JSON document of a job that could not be done."""
    return report_to_json(Report(()), "rename", code, fault)


def _rename_models(given: dict[str, Any], asked: OutputOptions) -> Report:
    if not given["models"]:
        raise click.UsageError("no MODEL given: onnxkvrename MODEL... --prefix TOKEN")
    if given["target"] is not None:
        given["prefix"] = _resolve_token(given)
    elif given["full_transfer"]:
        raise click.UsageError("--full-transfer is for --target")
    if given["prefix"] is None and not given["strip"]:
        raise click.UsageError("no --prefix given: the token to put in, for example --prefix VLLM")
    if given["output"] is not None and given["directory"] is not None:
        raise click.UsageError("-o and -d cannot both be: -o names a file, -d a directory")
    if given["in_place"] and not given["seed_cache"]:
        raise click.UsageError("--in-place is for --seed-cache: else it is the default")
    if given["seed_cache"] and (given["output"] or given["directory"]):
        raise click.UsageError("--seed-cache says where results go: leave out -o and -d")
    wish = TokenChange(
        given["prefix"],
        strip=given["strip"],
        replace=given["replace"],
        normalize=given["normalize"],
    )
    options = _build_options(given, asked)
    rules = load_rules(given["profile"], given["rules"])
    check_token_change(wish)
    if wish.strip and wish.replace:
        raise click.UsageError("--strip and --replace cannot both be")
    if given["dask"] is not None and given["jobs"] is not None:
        raise click.UsageError("--jobs and --dask cannot both be")
    jobs = find_jobs(given["models"], given["output"], given["directory"])
    texts: tuple[Sidecar, ...] = ()
    seed_plan = None
    if given["seed_cache"]:
        from onnxkvrename.qefficient.seed_cache import plan_seeds

        models = [job.model for job in jobs]
        seed_plan = plan_seeds(models, rules, wish, in_place=given["in_place"])
        jobs = seed_plan.redirect_jobs(jobs)
        texts = seed_plan.build_sidecars()
        if options.write:
            seed_plan.clear_finished_intents()
    if given["dask"] is not None:  # a worker has a working directory of its own
        jobs = tuple(build_job(job.model.absolute(), job.output.absolute()) for job in jobs)
        given["sidecar"] = tuple(path.absolute() for path in given["sidecar"])
    if given["sidecar"] or given["sidecars"]:
        from onnxkvrename.renaming.load_sidecars import load_sidecars

        search = given["sidecars"]
        texts += load_sidecars(given["sidecar"], jobs, wish, rules, search_directories=search)
    watched = asked.output_format == "text" and not asked.quiet and is_terminal(sys.stderr)
    with _open_executor(given, len(jobs)) as executor, _show_progress(watched) as watch:
        moves = seed_plan.directory_map if seed_plan is not None else {}
        report = rename_batch(jobs, wish, rules, options, watch, executor, texts, moves)
    if seed_plan is None:
        return report
    return seed_plan.update_report(report, dry_run=not options.write)


def _build_options(given: dict[str, Any], asked: OutputOptions) -> Options:
    return Options(
        write=not asked.dry_run,
        check_destination=not asked.check_only,
        strict=given["strict"],
        force=given["force"],
        group_windows=not given["no_set"],
        verify=given["verify"],
        checks=() if given["seed_cache"] else (check_cache_reuse,),
        consumer=given["target"],
        full_transfer=given["full_transfer"],
    )


def _resolve_token(given: dict[str, Any]) -> str:
    """The token of the consumer that was asked for."""
    from onnxkvrename.handoff.find_consumers import load_consumer

    if given["strip"]:
        raise click.UsageError("--strip and --target cannot both be: a consumer wants its token")
    token = load_consumer(given["target"]).token
    if given["prefix"] not in (None, token):
        raise click.UsageError(
            f"--prefix {given['prefix']}: {given['target']} looks for {token}; leave out --prefix"
        )
    return token


def _open_executor(given: dict[str, Any], models: int) -> AbstractContextManager[Executor | None]:
    if given["dask"] is not None:
        return connect_dask(given["dask"])
    return open_process_pool(given["jobs"] or count_useful_processes(models))


def _show_progress(watched: bool) -> AbstractContextManager[Progress | None]:
    if not watched:
        return nullcontext()
    from onnxkvrename.report.rename_rich import ProgressBars

    return ProgressBars()


def _print_report(report: Report, asked: OutputOptions, code: int) -> None:
    with stdout_guard():
        if asked.output_format == "json":
            print_lines([report_to_json(report, "rename", code)])
        elif asked.output_format == "github":
            look, judge = asked.dry_run, asked.check_only
            print_lines(render_github_report(report, look=look, judge=judge, quiet=asked.quiet))
        else:
            _print_text_report(report, asked)


def _print_text_report(report: Report, asked: OutputOptions) -> None:
    color = is_color_enabled(sys.stderr)
    for model in report.models:
        found = render_findings(model, color=color, verbose=asked.verbose)
        print_lines(found, err=True)
    if asked.quiet:
        return
    if is_terminal(sys.stdout) and not asked.show_diff:
        from rich.console import Console

        from onnxkvrename.report.rename_rich import render_report

        Console(highlight=False).print(
            render_report(report, look=asked.dry_run, verbose=asked.verbose), crop=False
        )
        return
    if asked.show_diff:
        print_lines(render_diff(report, color=is_color_enabled(sys.stdout)))
    elif not asked.check_only:
        print_lines(render_changes(report, look=asked.dry_run))
    print_lines(render_states(report, look=asked.dry_run), err=True)
