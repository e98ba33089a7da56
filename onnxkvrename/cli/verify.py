"""The command that proves."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from onnxkvrename.cli import options as arguments
from onnxkvrename.cli import output as console
from onnxkvrename.cli.options import AnyPath
from onnxkvrename.errors import KvRenameError
from onnxkvrename.renaming import parallel as spreading
from onnxkvrename.renaming import run as running
from onnxkvrename.report import rename_text as reporting
from onnxkvrename.report import verify_text as verdicts
from onnxkvrename.rules import find_models as discovery
from onnxkvrename.rules import load as rulesfile
from onnxkvrename.rules.patterns import Pattern, expression
from onnxkvrename.rules.plan import Wish
from onnxkvrename.rules.results import Report
from onnxkvrename.verification import verify as verifying
from onnxkvrename.verification.verify import Aim, Verified


@click.command(
    "onnxkvrename verify",
    context_settings=arguments.CONTEXT,
    epilog="Exit codes: 0 all holds; 1 a finding of severity error; 2 the job could not be done; "
    "130 interrupted.",
)
@arguments.models()
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
    type=AnyPath(path_type=Path),
    help="With --run: this model must give the very same results, as the one before a rename does.",
)
@arguments.dims(
    "With --run: the size of a symbolic dimension, e.g. ctx_len=32; others are guessed."
)
@arguments.no_set()
@arguments.strict()
@arguments.profile()
@arguments.rules()
@arguments.jobs()
@arguments.form()
@arguments.quiet()
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
    profile = rulesfile.load(given["profile"], given["rules"])
    aim = _aim(given)
    paths = [job.model for job in discovery.find(given["models"])]
    if aim.reference is not None and len(paths) > 1:
        raise click.UsageError(f"--reference is for one model, not {len(paths)}")
    look = partial(verifying.verify, rules=profile, aim=aim)
    with spreading.processes(given["jobs"] or spreading.worth(len(paths))) as executor:
        found = tuple(spreading.spread(look, paths, executor))
    _check_dims(found, aim)
    items = verifying.together(found, profile, aim)
    code = Report(tuple(item.report for item in items)).exit_code()
    _answer(items, given, code)
    return code


def failed(code: int, fault: KvRenameError) -> str:
    """The JSON document of a job that could not be done."""
    return verdicts.as_json((), code, fault)


def _aim(given: dict[str, Any]) -> Aim:
    if given["prefix"] is not None:
        running.check_wish(Wish(given["prefix"]))
    if (given["reference"] or given["dims"]) and not given["run"]:
        raise click.UsageError("--reference and --dim are for --run")
    return Aim(
        token=given["prefix"],
        select=None if given["select"] is None else _expression(given["select"]),
        run=given["run"],
        reference=given["reference"],
        dims=arguments.sizes(given["dims"]),
        strict=given["strict"],
        sets=not given["no_set"],
    )


def _expression(text: str) -> Pattern:
    try:
        return expression(text)
    except ValueError as error:
        raise click.UsageError(f"--select {text!r} {error}") from None


def _check_dims(found: tuple[Verified, ...], aim: Aim) -> None:
    """A size that was given in vain is one that the run did not have."""
    known = {symbol for item in found if item.run is not None for symbol in item.run.dims}
    unknown = [symbol for symbol in aim.dims if symbol not in known]
    if known and unknown:
        raise click.UsageError(
            f"--dim {unknown[0]}: no model has that dimension, but {', '.join(sorted(known))}"
        )


def _answer(items: tuple[Verified, ...], given: dict[str, Any], code: int) -> None:
    with console.answering():
        if given["form"] == "json":
            console.say([verdicts.as_json(items, code)])
            return
        if given["form"] == "github":
            console.say(verdicts.github(items, quiet=given["quiet"]))
            return
        for item in items:
            color = console.color(sys.stderr)
            found = reporting.findings(item.report, color=color, verbose=given["verbose"])
            console.say(found, err=True)
            if item.report.error is not None or given["quiet"]:
                continue
            console.say([verdicts.line(item, color=console.color(sys.stdout))])
            if given["verbose"]:
                console.say(f"  {text}" for text in verdicts.flows(item))
