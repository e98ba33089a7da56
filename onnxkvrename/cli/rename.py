"""The command that renames."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from onnxkvrename import __version__
from onnxkvrename.cli import options as arguments
from onnxkvrename.cli import output as console
from onnxkvrename.cli.options import AnyPath
from onnxkvrename.errors import KvRenameError
from onnxkvrename.qefficient.find_export import check_cache_reuse
from onnxkvrename.renaming import parallel as spreading
from onnxkvrename.renaming import run as running
from onnxkvrename.renaming.extra_files import Companion
from onnxkvrename.report import rename_text as reporting
from onnxkvrename.rules import find_models as discovery
from onnxkvrename.rules import load as rulesfile
from onnxkvrename.rules.plan import Wish
from onnxkvrename.rules.results import Job, Options, Report

if TYPE_CHECKING:
    from concurrent.futures import Executor


class Asked(NamedTuple):
    """How to answer, and how much; ``look`` writes nothing, and ``judge`` minds a change."""

    form: str
    quiet: bool
    verbose: bool
    diff: bool
    look: bool
    judge: bool


@click.command(
    "onnxkvrename",
    context_settings=arguments.CONTEXT,
    epilog="Other commands: onnxkvrename verify, inspect, custom-io, manifest, check-consumer, "
    "compare. Exit codes: 0 done or nothing to do; 1 a finding of severity error, or --check found "
    "a name to change; 2 the job could not be done; 130 interrupted.",
)
@arguments.models()
@click.option("--prefix", metavar="TOKEN", help="The token to give to every KV buffer, e.g. VLLM.")
@click.option(
    "--target",
    metavar="NAME",
    help="Give the token that this consumer looks for, e.g. vllm-qaic, and check that it can take "
    "the results, as `onnxkvrename check-consumer` does.",
)
@arguments.full_transfer("With --target: it")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=AnyPath(path_type=Path),
    help="Write the result here instead of in place.",
)
@click.option(
    "-d",
    "--directory",
    metavar="DIR",
    type=AnyPath(path_type=Path),
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
    type=AnyPath(path_type=Path),
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
@arguments.no_set()
@click.option(
    "--verify",
    is_flag=True,
    help="Prove each result as `onnxkvrename verify` does, before it is written.",
)
@arguments.strict()
@click.option(
    "--force",
    is_flag=True,
    help="Write where a symbolic link leads, to read-only files and files with several hard "
    "links, and over files in the way.",
)
@arguments.profile()
@arguments.rules()
@arguments.jobs()
@click.option("--dask", metavar="ADDRESS", help="Work on this Dask cluster, which sees the files.")
@arguments.form()
@arguments.quiet()
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
    asked = Asked(
        form=given["form"],
        quiet=given["quiet"],
        verbose=given["verbose"],
        diff=given["diff"],
        look=judge or given["dry_run"],
        judge=judge,
    )
    report = _rename(given, asked)
    code = report.exit_code(look=judge)
    _answer(report, asked, code)
    return code


def failed(code: int, fault: KvRenameError) -> str:
    """The JSON document of a job that could not be done."""
    return reporting.as_json(Report(()), "rename", code, fault)


def _rename(given: dict[str, Any], asked: Asked) -> Report:
    if not given["models"]:
        raise click.UsageError("no MODEL given: onnxkvrename MODEL... --prefix TOKEN")
    if given["target"] is not None:
        given["prefix"] = _token(given)
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
    wish = Wish(
        given["prefix"],
        strip=given["strip"],
        replace=given["replace"],
        normalize=given["normalize"],
    )
    options = _options(given, asked)
    rules = rulesfile.load(given["profile"], given["rules"])
    running.check_wish(wish)
    if wish.strip and wish.replace:
        raise click.UsageError("--strip and --replace cannot both be")
    if given["dask"] is not None and given["jobs"] is not None:
        raise click.UsageError("--jobs and --dask cannot both be")
    jobs = discovery.find(given["models"], given["output"], given["directory"])
    texts: tuple[Companion, ...] = ()
    moves: dict[Path, Path] = {}
    if given["seed_cache"]:
        from onnxkvrename.qefficient import seed_cache as seeding

        models = [job.model for job in jobs]
        seeds = seeding.seeds(models, rules, wish, in_place=given["in_place"])
        jobs = seeding.jobs(jobs, seeds, in_place=given["in_place"])
        if options.write:
            seeding.tidy(seeds)
        moves = seeding.moves(seeds) if given["in_place"] else {}
        texts = seeding.companions(seeds, in_place=given["in_place"])
    if given["dask"] is not None:  # a worker has a working directory of its own
        jobs = tuple(Job(job.model.absolute(), job.output.absolute()) for job in jobs)
        given["sidecar"] = tuple(path.absolute() for path in given["sidecar"])
    if given["sidecar"] or given["sidecars"]:
        from onnxkvrename.renaming import sidecars as following

        found = following.beside(jobs) if given["sidecars"] else ()
        texts += following.companions((*given["sidecar"], *found), jobs, wish, rules)
    watched = asked.form == "text" and not asked.quiet and console.terminal(sys.stderr)
    with _workers(given, len(jobs)) as executor, _bars(watched) as watch:
        report = running.rename_set(jobs, wish, rules, options, watch, executor, texts, moves)
    if not moves:
        return report
    done = options.write and not any(model.failed for model in report.models)
    return seeding.moved(report, moves, done=done)


def _options(given: dict[str, Any], asked: Asked) -> Options:
    return Options(
        write=not asked.look,
        place=not asked.judge,
        strict=given["strict"],
        force=given["force"],
        sets=not given["no_set"],
        verify=given["verify"],
        checks=() if given["seed_cache"] else (check_cache_reuse,),
        target=given["target"],
        whole=given["full_transfer"],
    )


def _token(given: dict[str, Any]) -> str:
    """The token of the consumer that was asked for."""
    from onnxkvrename.handoff import consumer as targets

    if given["strip"]:
        raise click.UsageError("--strip and --target cannot both be: a consumer wants its token")
    token = targets.load(given["target"]).token
    if given["prefix"] not in (None, token):
        raise click.UsageError(
            f"--prefix {given['prefix']}: {given['target']} looks for {token}; leave out --prefix"
        )
    return token


def _workers(given: dict[str, Any], models: int) -> AbstractContextManager[Executor | None]:
    if given["dask"] is not None:
        return spreading.dask(given["dask"])
    return spreading.processes(given["jobs"] or spreading.worth(models))


def _bars(watched: bool) -> AbstractContextManager[running.Watch | None]:
    if not watched:
        return nullcontext()
    from onnxkvrename.report import rename_rich as terminal

    return terminal.Bars()


def _answer(report: Report, asked: Asked, code: int) -> None:
    with console.answering():
        if asked.form == "json":
            console.say([reporting.as_json(report, "rename", code)])
        elif asked.form == "github":
            look, judge = asked.look, asked.judge
            console.say(reporting.github(report, look=look, judge=judge, quiet=asked.quiet))
        else:
            _answer_in_text(report, asked)


def _answer_in_text(report: Report, asked: Asked) -> None:
    color = console.color(sys.stderr)
    for model in report.models:
        found = reporting.findings(model, color=color, verbose=asked.verbose)
        console.say(found, err=True)
    if asked.quiet:
        return
    if console.terminal(sys.stdout) and not asked.diff:
        from rich.console import Console

        from onnxkvrename.report import rename_rich as terminal

        Console(highlight=False).print(
            terminal.summary(report, look=asked.look, verbose=asked.verbose), crop=False
        )
        return
    if asked.diff:
        console.say(reporting.diff(report, color=console.color(sys.stdout)))
    elif not asked.judge:
        console.say(reporting.lines(report, look=asked.look))
    console.say(reporting.states(report, look=asked.look), err=True)
