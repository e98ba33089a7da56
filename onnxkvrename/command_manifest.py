"""The command that writes down what the KV buffers are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from onnxkvrename import (
    arguments,
    changeset,
    console,
    discovery,
    forecast,
    gathering,
    layouts,
    ledger,
    manifest,
    projecting,
    reporting,
    rulesfile,
    running,
)
from onnxkvrename.arguments import AnyPath
from onnxkvrename.errors import KvRenameError, WriteError
from onnxkvrename.gathering import Gathered, Known
from onnxkvrename.layouts import Layout
from onnxkvrename.pages import ERAS, Asked
from onnxkvrename.projecting import Projection
from onnxkvrename.results import Job, Options
from onnxkvrename.rules import Rules


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
@arguments.strict()
@arguments.profile()
@arguments.rules()
@arguments.form("json", "text", default="json")
def command(**given: Any) -> int:
    """Write down what the KV buffers of a model are: layers, kinds, dtypes, shapes, bytes.

    MODEL is one model, or the windows of one. The manifest can stand for it where
    the model itself is not at hand. Its kv_layout_sha256 is equal for workers whose
    buffers are alike.
    """
    if not given["models"]:
        raise click.UsageError("no MODEL given: onnxkvrename manifest MODEL...")
    _check_projection(given)
    known = Known(arguments.sizes(given["dims"]), given["specializations"], given["custom_io"])
    if given["stamp"] and known != Known():
        raise click.UsageError(
            "--stamp is of the graph alone: leave out what a compile makes of it"
        )
    rules = rulesfile.load(given["profile"], given["rules"])
    found = gathering.gather(given["models"], rules, known, strict=given["strict"])
    if given["stamp"]:
        found = _stamped(found, rules, force=given["force"])
    vllm = _projection(found.layout, given)
    if vllm is not None:
        found = found.with_findings(projecting.findings(vllm))
    made = _Made(found, vllm, int(found.failed))
    text = _text(made, given["form"])
    output = None if str(given["output"]) == "-" else given["output"]
    if output is not None:
        _write(output, text, given)
    _answer(made, text, output, drawn=given["form"] == "text" and console.terminal(sys.stdout))
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


def _stamped(found: Gathered, rules: Rules, *, force: bool) -> Gathered:
    """The same with the digest in its models, unless something else is wrong with them.

    Raises the first :class:`KvRenameError` of a model that cannot be written; then none is.
    """
    found = found.without("KV621")
    if found.failed:
        return found
    digest = layouts.digest(found.layout)
    reports = [report for report in found.reports if report.path in found.layout.models]
    jobs = [Job(Path(report.path), Path(report.path)) for report in reports]
    done = running.stamp_set(jobs, reports, digest, rules, Options(force=force))
    for report in done.models:
        if report.error is not None:
            raise report.error
    with console.answering():
        console.say(reporting.states(done, look=False), err=True)
    return found._replace(stamp=digest)


def _text(made: _Made, form: str) -> str:
    found = made.found
    if form == "json":
        vllm = None if made.vllm is None else projecting.as_dict(made.vllm)
        return manifest.as_json(
            found.layout, found.reports, made.code, stamp=found.stamp, vllm=vllm
        )
    return "\n".join((*ledger.lines(made.found.layout), *forecast.lines(made.vllm)))


def _answer(made: _Made, text: str, output: Path | None, *, drawn: bool) -> None:
    with console.answering():
        color = console.color(sys.stderr)
        for report in made.found.reports:
            console.say(reporting.findings(report, color=color, verbose=False), err=True)
        if output is not None:
            said = f"{reporting.show(str(output))}: {ledger.summary(made.found.layout)}"
            console.say([said], err=True)
        elif drawn:
            console.say(_drawn(made.found.layout))
            console.say(forecast.lines(made.vllm))
        else:
            console.say([text])


def _drawn(layout: Layout) -> Iterator[str]:
    """The table for a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    paper = Console(highlight=False, color_system="auto" if console.color(sys.stdout) else None)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ledger.HEADS:
        table.add_column(head.lower(), overflow="fold")
    for row in ledger.rows(layout):
        table.add_row(*(Text(text) for text in row))
    facts = list(ledger.facts(layout))
    width = max((len(label) for label, _ in facts), default=0) + 2
    with paper.capture() as drawn:  # to a reader who has gone, rich would end the process
        paper.print(Text(ledger.title(layout), style="bold"), soft_wrap=True)
        if layout.buffers:
            paper.print(table, "", sep="\n")
        for label, text in facts:  # not folded, so that it can be copied
            line = Text.assemble((label.ljust(width), "dim"), text)
            paper.print(line, soft_wrap=True)
    yield from (line.rstrip(" ") for line in drawn.get().splitlines())


def _write(output: Path, text: str, given: Mapping[str, Any]) -> None:
    read = [job.model for job in discovery.find(given["models"])]
    read += [given[name] for name in ("specializations", "custom_io", "rules") if given[name]]
    if os.path.realpath(output) in {os.path.realpath(path) for path in read}:
        raise WriteError("is what the manifest is made from", path=str(output))
    changeset.write_file(output, f"{text}\n".encode(), force=given["force"])
