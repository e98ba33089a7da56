"""The command ``rename``, which is the default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    NonEmptyPath,
    OutputDirectory,
    OutputFile,
    SectionedCommand,
    add_conversion_option,
    add_format_option,
    add_full_transfer_option,
    add_jobs_option,
    add_models_argument,
    add_names_option,
    add_no_set_option,
    add_pairs_option,
    add_profile_option,
    add_quiet_option,
    add_rules_option,
    add_single_option,
    add_strict_option,
    add_target,
    add_verbose_option,
    check_exclusive,
    complete_consumer,
)
from onnxkvrename.cli.output import print_answer, show_progress
from onnxkvrename.errors import KvRenameError
from onnxkvrename.qefficient.find_export import (
    check_cache_reuse,
    check_cache_state,
    restate_cache_reuse,
)
from onnxkvrename.renaming.parallel import open_executor
from onnxkvrename.renaming.run import check_token_change, find_sidecars, rename_batch
from onnxkvrename.report.rename_text import RenameView, build_rename_answer
from onnxkvrename.rules.find_models import build_job, find_jobs
from onnxkvrename.rules.load import AUTO_PROFILE, load_rules
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import (
    Options,
    RenameJob,
    Report,
    SidecarPolicy,
    SidecarSearch,
    report_placed,
)
from onnxkvrename.storage.read import is_directory

if TYPE_CHECKING:
    from onnxkvrename.renaming.prepare_sidecars import Sidecar

_SECTIONS = {
    "Names": ("prefix", "target", "full_transfer", "strip", "replace", "normalize", "to"),
    "Result": ("output", "directory", "force", "check", "diff", "dry_run"),
    "Files that repeat the names": ("sidecar", "sidecars", "no_sidecars"),
    "QEfficient's export cache": ("seed_cache", "in_place"),
    "Checks and rules": ("verify", "strict", "no_set", "profile", "rules", "pairs"),
    "Workers": ("jobs", "dask"),
    "Output": ("output_format", "quiet", "verbose"),
}


class _Arguments(NamedTuple):
    """The arguments and options of the command line, one field for each."""

    models: tuple[Path, ...]
    prefix: str | None
    target: str | None
    full_transfer: bool
    output: Path | None
    directory: Path | None
    seed_cache: bool
    in_place: bool
    sidecar: tuple[Path, ...]
    sidecars: bool
    no_sidecars: bool
    check: bool
    diff: bool
    dry_run: bool
    strip: bool
    replace: bool
    normalize: bool
    no_set: bool
    verify: bool
    strict: bool
    force: bool
    profile: str | None
    to: str | None
    rules: Path | None
    pairs: str | None
    jobs: int | None
    dask: str | None
    output_format: str
    quiet: bool
    verbose: bool


@click.command(
    "rename",
    cls=SectionedCommand,
    sections=_SECTIONS,
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 done or nothing to do; 1 a finding of severity error, or --check found "
    "a name that would change; 2 the job could not be done; 130 interrupted.",
)
@add_models_argument()
@add_single_option(
    "--prefix", "--token", metavar="TOKEN", help="The token for every KV buffer, e.g. VLLM."
)
@add_names_option(
    "--target",
    shell_complete=complete_consumer,
    help="Use the token that this consumer requires, and check that it can use the results, as "
    "`onnxkvrename check-consumer` does. One of: {names}.",
)
@add_full_transfer_option("With --target: it")
@add_single_option(
    "-o",
    "--output",
    metavar="FILE",
    type=OutputFile("-d"),
    help="Write the result to this file, not in place; creates its directory if missing.",
)
@add_single_option(
    "-d",
    "--directory",
    metavar="DIR",
    type=OutputDirectory(path_type=Path),
    help="Write the results below this directory, in the same layout; a folder with "
    "a genai_config.json goes along whole.",
)
@click.option(
    "--seed-cache",
    is_flag=True,
    help="Put the renamed export where QEfficient's cache will look for it.",
)
@click.option(
    "--in-place",
    is_flag=True,
    help="With --seed-cache: rename the export itself and its directory.",
)
@click.option(
    "--sidecar",
    metavar="FILE",
    multiple=True,
    type=NonEmptyPath(path_type=Path),
    help="Also rename in this text file, which must belong to the model: custom_io.yaml, "
    "genai_config.json, compile parameters, node precisions. May be repeated.",
)
@click.option(
    "--sidecars",
    is_flag=True,
    help="Require that all such files beside the models, and in qpc-HASH directories below, "
    "belong to them. By default those that do are updated.",
)
@click.option(
    "--no-sidecars",
    is_flag=True,
    help="Do not update them; warn about those that are then out of date.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a name would change.")
@click.option("--diff", is_flag=True, help="Like --check, and show the names.")
@click.option("-n", "--dry-run", is_flag=True, help="Plan and check everything, write nothing.")
@click.option("--strip", is_flag=True, help="Remove the token; with --prefix only this one.")
@click.option("--replace", is_flag=True, help="Replace a different token.")
@click.option(
    "--normalize",
    is_flag=True,
    help="Rename _InternalRetainedState outputs to _RetainedState, which consumers pair.",
)
@add_no_set_option()
@click.option(
    "--verify",
    is_flag=True,
    help="Check each result as `onnxkvrename verify` does before it is put in place.",
)
@add_strict_option()
@click.option(
    "--force",
    is_flag=True,
    help="Overwrite existing and read-only files; write through symbolic and hard links.",
)
@add_profile_option()
@add_conversion_option()
@add_rules_option()
@add_pairs_option()
@add_jobs_option()
@add_single_option(
    "--dask",
    metavar="ADDRESS",
    help="Use the workers of this Dask cluster, which must see the files.",
)
@add_format_option()
@add_quiet_option()
@add_verbose_option("Show every layer.")
def command(**values: Any) -> int:
    """Rename the KV-cache buffers of exported ONNX models so that vLLM can select them.

    MODEL is an .onnx file, or a directory: then every .onnx file below it. Each
    output past_key.0_RetainedState and its input past_key.0 become
    past_key.0_TOKEN_RetainedState and past_key.0_TOKEN everywhere in the graph;
    vision and all other buffers stay. Nothing is written unless every model
    passes every check.
    """
    view = _build_view(arguments := _Arguments(**values))
    report = _rename_models(arguments, view)
    with report_placed([report]):
        answer = build_rename_answer(report, view)
        if view.dry_run:
            from onnxkvrename.cli.recover import mention_unfinished_runs  # nothing is written

            answer = mention_unfinished_runs(answer)
        return print_answer(answer, arguments.output_format)


def render_failure(code: int, error: KvRenameError) -> str:
    """Return the JSON document of a job that could not be done."""
    from onnxkvrename.report.documents.rename_json import report_to_json  # only for JSON

    return report_to_json(Report(()), "rename", code, error)


def _build_view(arguments: _Arguments) -> RenameView:
    check_only = arguments.check or arguments.diff
    return RenameView(
        quiet=arguments.quiet,
        verbose=arguments.verbose,
        show_diff=arguments.diff,
        dry_run=check_only or arguments.dry_run,
        check_only=check_only,
    )


def _rename_models(arguments: _Arguments, view: RenameView) -> Report:
    """Rename by the arguments; raises :class:`click.UsageError` for those that do not fit."""
    token = _resolve_token(arguments)
    _check_destination_options(arguments)
    change = TokenChange(
        token,
        strip=arguments.strip,
        replace=arguments.replace,
        normalize=arguments.normalize,
        keeps_tokens=arguments.to is not None and token is None and not arguments.strip,
    )
    options = _build_options(arguments, view)
    rules = add_target(_load_rules(arguments), arguments.to)
    check_token_change(change)
    check_exclusive("--strip", change.strip, "--replace", change.replace)
    check_exclusive("--jobs", arguments.jobs, "--dask", arguments.dask is not None)
    models = arguments.models
    if arguments.in_place:
        from onnxkvrename.qefficient.seed_cache import find_moved_paths  # only for --seed-cache

        models = find_moved_paths(models, rules, change)
    jobs = find_jobs(models, arguments.output, arguments.directory)
    if arguments.seed_cache:
        return _rename_in_cache(jobs, change, rules, options, arguments)
    report = _run_jobs(jobs, change, rules, options, arguments)
    if report.has_no_buffers and (arguments.profile or arguments.rules or arguments.pairs) is None:
        rules = _pick_rules([job.model for job in jobs], arguments)
        if rules.choice is not None:
            rules = add_target(rules, arguments.to)
            report = _run_jobs(jobs, change, rules, options, arguments)
    return report._replace(profile=rules.profile_choice)


def _load_rules(arguments: _Arguments) -> Rules:
    """Return the rules that were asked for; by default those of the default profile."""
    if arguments.pairs is not None:
        return _find_rules(arguments)
    if arguments.profile == AUTO_PROFILE and arguments.rules is None:
        return _pick_rules(arguments.models, arguments)
    return load_rules(arguments.profile, arguments.rules)


def _find_rules(arguments: _Arguments) -> Rules:
    """Return rules for the pairs of the dataflow."""
    if arguments.seed_cache:
        raise click.UsageError(
            "--pairs and --seed-cache cannot be used together: that needs rules for names"
        )
    token = _resolve_token(arguments)
    if token is None:
        raise KvRenameError(
            "--pairs needs --prefix or --target: no rule tells a token from a name",
            hint="for example `--prefix VLLM`",
        )
    check_token_change(TokenChange(token))
    return _pick_rules(arguments.models, arguments, token)


def _pick_rules(models: Sequence[Path], arguments: _Arguments, token: str | None = None) -> Rules:
    """Return the rules that fit the models, by their names or with ``--pairs``."""
    from onnxkvrename.cli.requested_rules import pick_requested_rules  # not where qeff fits

    return pick_requested_rules(models, arguments, token)


def _rename_in_cache(
    jobs: tuple[RenameJob, ...],
    change: TokenChange,
    rules: Rules,
    options: Options,
    arguments: _Arguments,
) -> Report:
    """Rename exports of QEfficient's cache, with their parameters and directories."""
    from onnxkvrename.qefficient.seed_cache import plan_seeds  # only for --seed-cache

    how = {"in_place": arguments.in_place, "strict": options.strict}
    seed_plan = plan_seeds([job.model for job in jobs], rules, change, **how)
    if any(model.failed for model in seed_plan.left_out):
        options = options._replace(write=False)
    jobs = seed_plan.redirect_jobs(jobs)
    params = seed_plan.build_sidecars()
    if options.write:
        seed_plan.clear_finished_intents()
    report = _run_jobs(jobs, change, rules, options, arguments, params, seed_plan.directory_map)
    return seed_plan.update_report(report, dry_run=not options.write)


def _run_jobs(
    jobs: tuple[RenameJob, ...],
    change: TokenChange,
    rules: Rules,
    options: Options,
    arguments: _Arguments,
    sidecars: tuple[Sidecar, ...] = (),
    directory_map: Mapping[Path, Path] = MappingProxyType({}),
) -> Report:
    """Rename with the sidecars, the processes and the progress bars that were asked for."""
    paths = arguments.sidecar
    if arguments.dask is not None:  # a worker has a working directory of its own
        jobs = tuple(build_job(j.model.absolute(), j.output.absolute(), j.root) for j in jobs)
        paths = tuple(path.absolute() for path in paths)
    policy, directories = _choose_policy(arguments), _list_directories(arguments)
    takes_folders = arguments.directory is not None
    search = SidecarSearch(paths, policy, directories, takes_folders=takes_folders)
    sidecars += find_sidecars(jobs, change, rules, search)
    bars = show_progress(is_wanted=arguments.output_format == "text" and not arguments.quiet)
    workers = open_executor(arguments.dask, arguments.jobs, len(jobs))
    reports = list[Report]()
    with report_placed(reports), workers as executor, bars as progress:
        how = (options, progress, executor, sidecars, directory_map)
        reports.append(rename_batch(jobs, change, rules, *how))
    return reports[0]


def _choose_policy(arguments: _Arguments) -> SidecarPolicy:
    check_exclusive("--sidecars", arguments.sidecars, "--no-sidecars", arguments.no_sidecars)
    if arguments.sidecars:
        return "require"
    return "leave" if arguments.no_sidecars else "follow"


def _list_directories(arguments: _Arguments) -> tuple[Path, ...]:
    """Return the directories among the models whose own layout the results keep."""
    if arguments.output is not None:
        return ()
    return tuple(path for path in arguments.models if path.suffix != ".onnx" and is_directory(path))


def _check_destination_options(arguments: _Arguments) -> None:
    """Raise :class:`click.UsageError` for options that name two places for a result."""
    if arguments.output is not None and arguments.directory is not None:
        raise click.UsageError("-o and -d cannot be used together: -o names a file, -d a directory")
    if arguments.in_place and not arguments.seed_cache:
        raise click.UsageError("--in-place is for --seed-cache: a plain rename is in place anyway")
    if arguments.seed_cache and (arguments.output or arguments.directory):
        raise click.UsageError("--seed-cache says where results go: leave out -o and -d")
    if arguments.to and (arguments.seed_cache or arguments.target):
        raise click.UsageError("--to cannot be used with --seed-cache or --target: convert first")


def _build_options(arguments: _Arguments, view: RenameView) -> Options:
    in_cache = () if arguments.in_place else (check_cache_state,)  # a move leaves nothing wrong
    return Options(
        write=not view.dry_run,
        check_destination=not view.check_only,
        strict=arguments.strict,
        force=arguments.force,
        group_windows=not arguments.no_set,
        verify=arguments.verify,
        checks=in_cache if arguments.seed_cache else (check_cache_reuse,),
        restate=restate_cache_reuse,
        consumer=arguments.target,
        full_transfer=arguments.full_transfer,
        read_files=() if arguments.rules is None else (arguments.rules,),
    )


def _resolve_token(arguments: _Arguments) -> str | None:
    """Return the token of ``--prefix``, or of the consumer that ``--target`` names."""
    if arguments.target is not None:
        from onnxkvrename.handoff.find_consumers import choose_token  # only for --target

        return choose_token(arguments.target, arguments.prefix, strip=arguments.strip)
    if arguments.full_transfer:
        raise click.UsageError("--full-transfer is for --target")
    if arguments.prefix is None and not (arguments.strip or arguments.to):
        find_jobs(arguments.models)  # a missing model is the first mistake to name
        raise KvRenameError(
            "no token given: pass --target or --prefix", hint="for example `--target vllm-qaic`"
        )
    return arguments.prefix
