"""Options in, exit codes out."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import click

from onnxkvrename import __version__, discovery, drafts, reporting, rulesfile, running
from onnxkvrename.errors import KvRenameError
from onnxkvrename.planning import Wish
from onnxkvrename.results import Options, Report

INTERRUPTED = 130
_FORMATS = ("text", "json", "github")


class Asked(NamedTuple):
    """How to answer, and how much; ``look`` writes nothing, and ``judge`` minds a change."""

    form: str
    quiet: bool
    verbose: bool
    diff: bool
    look: bool
    judge: bool


class _Path(click.Path):
    """A path; not an empty one, as from a variable that is not set: it would mean ``.``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path: is a variable not set?", param, ctx)
        return super().convert(value, param, ctx)


@click.command(
    "onnxkvrename",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done or nothing to do; 1 a finding of severity error, or --check found "
    "a name to change; 2 the job could not be done; 130 interrupted.",
)
@click.argument("models", nargs=-1, metavar="MODEL...", type=_Path(path_type=Path))
@click.option("--prefix", metavar="TOKEN", help="The token to give to every KV buffer, e.g. VLLM.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=_Path(path_type=Path),
    help="Write the result here instead of in place.",
)
@click.option(
    "-d",
    "--directory",
    metavar="DIR",
    type=_Path(path_type=Path),
    help="Write results below this directory, laid out like the models.",
)
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
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
@click.option(
    "--force",
    is_flag=True,
    help="Write where a symbolic link leads, to read-only files and files with several hard "
    "links, and over files in the way.",
)
@click.option(
    "--profile",
    metavar="NAME",
    default="qeff",
    show_default=True,
    help="Built-in rules for how buffers are called.",
)
@click.option(
    "--rules",
    metavar="FILE",
    type=_Path(path_type=Path),
    help="Rules of your own, in TOML like a profile's.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    default="text",
    show_default=True,
    help="How to answer.",
)
@click.option("-q", "--quiet", is_flag=True, help="Say only what is, or may be, wrong.")
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


COMMANDS = {"rename": command}
"""The first is what is meant when none is named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (by default the process's own) and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    name = args.pop(0) if args[:1] and args[0] in COMMANDS else next(iter(COMMANDS))
    fault = None
    try:
        with _told_to_stop():
            code = COMMANDS[name].main(args, prog_name="onnxkvrename", standalone_mode=False)
        return int(code or 0)
    except click.ClickException as error:
        message = error.format_message().rstrip(".")
        hint = None if message.endswith(")") else "--help lists all options"
        fault = KvRenameError(message, hint=hint)
    except KvRenameError as error:
        fault = error
    except (KeyboardInterrupt, click.Abort):
        fault = KvRenameError("interrupted: no file was left half written")
        return _failed(name, args, fault, INTERRUPTED)
    except Exception as error:
        if {"-v", "--verbose"} & set(args):
            raise
        fault = KvRenameError(
            f"a bug in onnxkvrename: {type(error).__name__}: {error}",
            hint="-v shows where; please report it",
        )
    return _failed(name, args, fault)


def _rename(given: dict[str, Any], asked: Asked) -> Report:
    if not given["models"]:
        raise click.UsageError("no MODEL given: onnxkvrename MODEL... --prefix TOKEN")
    if given["prefix"] is None and not given["strip"]:
        raise click.UsageError("no --prefix given: the token to put in, for example --prefix VLLM")
    if given["output"] is not None and given["directory"] is not None:
        raise click.UsageError("-o and -d cannot both be: -o names a file, -d a directory")
    wish = Wish(
        given["prefix"],
        strip=given["strip"],
        replace=given["replace"],
        normalize=given["normalize"],
    )
    options = Options(
        write=not asked.look,
        place=not asked.judge,
        strict=given["strict"],
        force=given["force"],
    )
    rules = rulesfile.load(given["profile"], given["rules"])
    running.check_wish(wish)
    if wish.strip and wish.replace:
        raise click.UsageError("--strip and --replace cannot both be")
    jobs = discovery.find(given["models"], given["output"], given["directory"])
    with ExitStack() as bars:

        def bar(name: str, size: int) -> drafts.Progress | None:
            from onnxkvrename import terminal

            return bars.enter_context(terminal.copy_bar(name, size))

        watched = asked.form == "text" and not asked.quiet and _terminal(sys.stderr)
        return running.rename_set(jobs, wish, rules, options, bar if watched else None)


def _answer(report: Report, asked: Asked, code: int) -> None:
    try:
        if asked.form == "json":
            click.echo(reporting.as_json(report, "rename", code))
        elif asked.form == "github":
            _say(reporting.github(report, look=asked.look, judge=asked.judge, quiet=asked.quiet))
        else:
            _answer_in_text(report, asked)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()  # whoever listened has heard enough
    except OSError as error:
        _drop_stdout()
        raise KvRenameError(
            f"the work is done, but the answer could not be given: {error.strerror}"
        ) from None


def _answer_in_text(report: Report, asked: Asked) -> None:
    color = _color(sys.stderr)
    for model in report.models:
        found = reporting.findings(model, color=color, verbose=asked.verbose)
        _say(found, err=True)
    if asked.quiet:
        return
    if _terminal(sys.stdout) and not asked.diff:
        from rich.console import Console

        from onnxkvrename import terminal

        Console(highlight=False).print(
            terminal.summary(report, look=asked.look, verbose=asked.verbose), crop=False
        )
        return
    if asked.diff:
        _say(reporting.diff(report, color=_color(sys.stdout)))
    elif not asked.judge:
        _say(reporting.lines(report, look=asked.look))
    _say(reporting.states(report, look=asked.look), err=True)


def _failed(name: str, args: Sequence[str], fault: KvRenameError, code: int = 2) -> int:
    said = [arg.removeprefix("--format=") for arg in args]
    try:
        if "json" in said and ("--format" in args or "--format=json" in args):
            click.echo(reporting.as_json(Report(()), name, code, fault))
    except OSError:
        _drop_stdout()
    with suppress(OSError):
        click.echo(reporting.error(fault, color=_color(sys.stderr)), err=True)
    return code


def _say(lines: Iterable[str], *, err: bool = False) -> None:
    for line in lines:
        click.echo(line, err=err, color=True)


def _color(stream: Any) -> bool:
    """Whether to paint: https://no-color.org and https://force-color.org."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return _terminal(stream) and os.environ.get("TERM") != "dumb"


def _terminal(stream: Any) -> bool:
    """Whether someone looks on; a stream that was closed by who started us is ``None``."""
    return stream is not None and bool(stream.isatty())


def _drop_stdout() -> None:
    """Keep the interpreter from failing once more on what cannot be written."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """Let a polite signal clean up as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        for other in numbers:  # one is enough, and what it starts is not to be disturbed
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # A signal that whoever started us ignores (nohup) stays ignored.
    before = {
        number: signal.signal(number, stop)
        for number in numbers
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
