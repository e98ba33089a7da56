"""The command that writes down what the KV buffers are."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from onnxkvrename.cli import options as arguments
from onnxkvrename.cli import output as console
from onnxkvrename.cli.options import AnyPath
from onnxkvrename.errors import KvRenameError, ModelError, WriteError
from onnxkvrename.findings import listed
from onnxkvrename.layout import layout as layouts
from onnxkvrename.layout import load as gathering
from onnxkvrename.layout import manifest
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import Gathered, Known
from onnxkvrename.renaming import run as running
from onnxkvrename.report import manifest_text as ledger
from onnxkvrename.report import rename_text as reporting
from onnxkvrename.report import vllm_text as forecast
from onnxkvrename.rules import find_models as discovery
from onnxkvrename.rules import load as rulesfile
from onnxkvrename.rules import windows
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import Job, ModelReport, Options
from onnxkvrename.storage import transaction as changeset
from onnxkvrename.vllm import projection as projecting
from onnxkvrename.vllm.projection import Projection
from onnxkvrename.vllm.specs import ERAS, Asked

_COMPILED = {"--dim": "dims", "--specializations": "specializations", "--custom-io": "custom_io"}


if TYPE_CHECKING:
    from rich.console import RenderableType


class _Made(NamedTuple):
    """What was gathered, what vLLM makes of it, and the exit code."""

    found: Gathered
    vllm: Projection | None
    code: int


@click.command(
    "onnxkvrename manifest",
    context_settings=arguments.CONTEXT,
    epilog="Exit codes: 0 nothing wrong; 1 a finding of severity error, with the manifest all the "
    "same; 2 the job could not be done; 130 interrupted.",
)
@arguments.models()
@arguments.compiled()
@click.option(
    "--block-size",
    metavar="N",
    type=click.IntRange(1),
    help="Also: what vLLM makes of it, with blocks of N tokens.",
)
@click.option(
    "--tp",
    metavar="N",
    type=click.IntRange(1),
    help="With --block-size: over how many ranks the heads are divided.  [default: 1]",
)
@click.option(
    "--vllm",
    "era",
    type=click.Choice(ERAS),
    help=f"With --block-size: the vLLM that is meant, by default the newest known, {ERAS[-1]}.",
)
@click.option(
    "--tokens",
    metavar="N",
    type=click.IntRange(1),
    multiple=True,
    help="With --block-size: the length of a prompt that is handed over. May be repeated.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=AnyPath(path_type=Path),
    help="Write it here, whole or not at all; - is stdout.",
)
@click.option(
    "--stamp",
    is_flag=True,
    help="Also write kv_layout_sha256 into the metadata of the models, in place; "
    "onnxkvrename --strip takes it out.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Replace a file that is there; stamp through symbolic links and the like.",
)
@arguments.no_set()
@arguments.strict()
@arguments.profile()
@arguments.rules()
@arguments.form("json", "text", default="json")
@arguments.quiet()
@click.option("-v", "--verbose", is_flag=True, help="Show every finding.")
def command(**given: Any) -> int:
    """Write down what the KV buffers of a model are: layers, kinds, dtypes, shapes, bytes.

    MODEL is one model, or the windows of one. The manifest can stand for it where
    the model itself is not at hand. Its kv_layout_sha256 is equal for workers whose
    buffers are alike.
    """
    if not given["models"]:
        raise click.UsageError("no MODEL given: onnxkvrename manifest MODEL...")
    _check_projection(given)
    sizes, sets = arguments.sizes(given["dims"]), not given["no_set"]
    known = Known(sizes, given["specializations"], given["custom_io"], sets)
    if given["stamp"] and known != Known(sets=sets):
        told = listed([option for option, name in _COMPILED.items() if given[name]])
        raise click.UsageError(f"--stamp is of the graph alone: leave out {told}")
    rules = rulesfile.load(given["profile"], given["rules"])
    found = gathering.gather(given["models"], rules, known, strict=given["strict"])
    output = None if str(given["output"]) == "-" else given["output"]
    if output is not None:
        _check_output(output, given)
    if given["stamp"]:
        found = _stamped(found, rules, force=given["force"], quiet=given["quiet"])
    vllm = _projection(found.layout, given)
    if vllm is not None:
        found = found.with_findings(projecting.findings(vllm))
    made = _Made(found, vllm, int(found.failed))
    text = _text(made, given["form"])
    if output is not None:
        changeset.write_file(output, f"{text}\n".encode(), force=given["force"])
    _answer(made, text, output, given)
    return made.code


def failed(code: int, fault: KvRenameError) -> str:
    """The JSON document of a job that could not be done."""
    return manifest.as_json(Layout((), (), (), (), ()), (), code, fault)


def _check_projection(given: Mapping[str, Any]) -> None:
    for name, option in (("tp", "--tp"), ("era", "--vllm"), ("tokens", "--tokens")):
        if given[name] and given["block_size"] is None:
            raise click.UsageError(f"{option} is for a projection: say --block-size N, too")


def _projection(layout: Layout, given: Mapping[str, Any]) -> Projection | None:
    """What vLLM makes of the layout, if that is asked for."""
    if given["block_size"] is None:
        return None
    era, tp = given["era"] or ERAS[-1], given["tp"] or 1
    return projecting.project(layout, Asked(given["block_size"], tp, era, given["tokens"]))


def _stamped(found: Gathered, rules: Rules, *, force: bool, quiet: bool) -> Gathered:
    """The same with the digest in its models, unless something else is wrong with them.

    Raises the first :class:`KvRenameError` of a model that cannot be written; then none is.
    """
    found = found.without("KV621")
    if found.failed:
        return found
    digest = layouts.digest(found.layout)
    _check_set(found, digest, rules)
    reports = [report for report in found.reports if report.path in found.layout.models]
    jobs = [Job(Path(report.path), Path(report.path)) for report in reports]
    try:
        done = running.stamp_set(jobs, reports, digest, rules, Options(force=force))
    except KvRenameError as error:
        raise _here(error) from None
    for report in done.models:
        if report.error is not None:
            raise _here(report.error)
    if not quiet:
        with console.answering():
            console.say(map(_stamp_line, done.models), err=True)
    return found._replace(stamp=digest)


def _check_set(found: Gathered, digest: str, rules: Rules) -> None:
    """Raise :class:`ModelError` for a window alone that carries the stamp of its set."""
    (path, *others) = found.layout.models
    if not others and found.stamp not in (None, digest) and windows.is_window(path, rules):
        raise ModelError(
            "carries another stamp, that of its set",
            path=path,
            hint="give all windows of it, or take the stamp out first: --strip",
        )


def _here(error: KvRenameError) -> KvRenameError:
    """The error, without the hint to write elsewhere: a stamp is for the file as it stands."""
    hint = error.hint or ""
    if "elsewhere" not in hint:
        return error
    parts = (part.removeprefix("or ") for part in re.split("; |, ", hint))
    kept = [part for part in parts if "elsewhere" not in part]
    return WriteError(error.message, path=error.path, hint="; ".join(kept) or None)


def _stamp_line(report: ModelReport) -> str:
    said = "stamped" if report.status == "renamed" else "stamped already"
    return f"{reporting.show(report.path)}: {said}"


def _text(made: _Made, form: str) -> str:
    found = made.found
    if form == "json":
        vllm = None if made.vllm is None else projecting.as_dict(made.vllm)
        return manifest.as_json(
            found.layout, found.reports, made.code, stamp=found.stamp, vllm=vllm
        )
    return "\n".join((*ledger.lines(made.found.layout), *forecast.lines(made.vllm)))


def _answer(made: _Made, text: str, output: Path | None, given: Mapping[str, Any]) -> None:
    plain = given["form"] == "text"
    with console.answering():
        color = console.color(sys.stderr)
        for report in made.found.reports:
            said = reporting.findings(report, color=color, verbose=given["verbose"])
            console.say(said, err=True)
        if given["quiet"] and (plain or output is not None):
            return
        if output is not None:
            line = f"{reporting.show(str(output))}: {ledger.summary(made.found.layout)}"
            console.say([line], err=True)
        elif plain and console.terminal(sys.stdout):
            console.say(_drawn(made.found.layout))
            console.say(forecast.lines(made.vllm))
        else:
            console.say([text])


def _drawn(layout: Layout) -> Iterator[str]:
    """The table for a terminal."""
    from rich.text import Text

    from onnxkvrename.report import rename_rich as terminal

    facts = list(ledger.facts(layout))
    width = max((len(label) for label, _ in facts), default=0) + 2
    parts: list[RenderableType] = [Text(ledger.title(layout), style="bold")]
    if layout.buffers:
        parts += (terminal.table(ledger.HEADS, ledger.rows(layout)), Text())
    parts += (Text.assemble((label.ljust(width), "dim"), text) for label, text in facts)
    yield from terminal.printed(parts, color=console.color(sys.stdout))


def _check_output(output: Path, given: Mapping[str, Any]) -> None:
    """Raise :class:`WriteError` for a bad place, before any model gets its stamp."""
    read = [job.model for job in discovery.find(given["models"])]
    read += [given[name] for name in ("specializations", "custom_io", "rules") if given[name]]
    if os.path.realpath(output) in {os.path.realpath(path) for path in read}:
        raise WriteError("is what the manifest is made from", path=str(output))
    changeset.check_place(output, force=given["force"])
