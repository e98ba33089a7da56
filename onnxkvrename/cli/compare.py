"""The command that says whether a hand-off from prefill to decode will work."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from onnxkvrename.cli import options as arguments
from onnxkvrename.cli import output as console
from onnxkvrename.cli.options import AnyPath
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.handoff import compare as handoff
from onnxkvrename.handoff import consumer as targets
from onnxkvrename.handoff import worker as sides
from onnxkvrename.handoff.compare import HandOff
from onnxkvrename.handoff.tensor_parallel import Parallel
from onnxkvrename.layout import load as gathering
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import Gathered, Known
from onnxkvrename.report import compare_json as accounts
from onnxkvrename.report import compare_text as outlook
from onnxkvrename.report import rename_text as reporting
from onnxkvrename.rules import load as rulesfile
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport


@click.command(
    "onnxkvrename compare",
    context_settings=arguments.CONTEXT,
    epilog="Exit codes: 0 the hand-off works; 1 it would corrupt, lose or fail; 2 the job could "
    "not be done; 130 interrupted.",
)
@click.argument("prefill", metavar="PREFILL", type=AnyPath(path_type=Path))
@click.argument("decode", metavar="DECODE", type=AnyPath(path_type=Path))
@click.option(
    "--target",
    metavar="NAME",
    default="vllm-qaic",
    show_default=True,
    help=f"The consumer, one of: {', '.join(targets.names())}.",
)
@arguments.compiled()
@click.option(
    "--prefill-dim", metavar="SYMBOL=SIZE", multiple=True, help="Like --dim, for PREFILL."
)
@click.option("--decode-dim", metavar="SYMBOL=SIZE", multiple=True, help="Like --dim, for DECODE.")
@arguments.full_transfer()
@click.option(
    "--tp", metavar="P:D", help="Also: heads divide among P ranks of prefill and D of decode."
)
@click.option(
    "--tokens",
    metavar="N",
    type=click.IntRange(1),
    multiple=True,
    help="Also simulate a prompt of N tokens. May be repeated.",
)
@arguments.no_set()
@arguments.profile()
@arguments.rules()
@arguments.form()
@arguments.quiet()
@click.option("-v", "--verbose", is_flag=True, help="Show every finding.")
def command(**given: Any) -> int:
    """Say whether decode will find prefill's KV buffers where it looks for them.

    PREFILL and DECODE are each a model, a directory with the windows of one, or a
    manifest. Buffers are paired by layer and part, and, as the consumer does it, by
    position and byte offset: for every length of a prompt.
    """
    target = targets.load(given["target"])
    rules = rulesfile.load(given["profile"], given["rules"])
    ranks = _ranks(given["tp"])
    prefill, decode = _both(given, rules)
    mine, theirs = (
        sides.side(label, one.layout, target, rules)._replace(
            path=str(given[label]), broken=_broken(one)
        )
        for label, one in (("prefill", prefill), ("decode", decode))
    )
    found = handoff.compare(
        mine,
        theirs,
        target,
        ranks=ranks,
        whole=given["full_transfer"],
        tokens=given["tokens"],
    )
    code = int(found.failed or prefill.failed or decode.failed)
    _answer(found, (prefill, decode), given, code)
    return code


def failed(code: int, fault: KvRenameError) -> str:
    """The JSON document of a job that could not be done."""
    return accounts.as_json(None, code, fault)


def _broken(side: Gathered) -> Finding | None:
    """What is wrong with the models of a side themselves: what is missing is told otherwise."""
    found = (one for report in side.reports for one in report.findings)
    return next(
        (one for one in found if one.severity == "error" and "KV001" < one.code < "KV600"), None
    )


def _ranks(text: str | None) -> Parallel | None:
    if text is None:
        return None
    numbers = re.fullmatch("([1-9][0-9]{0,4}):([1-9][0-9]{0,4})", text)
    if numbers is None:
        raise click.UsageError(f"--tp {text!r}: say P:D, for example 2:4")
    return Parallel(int(numbers[1]), int(numbers[2]))


def _both(given: Mapping[str, Any], rules: Rules) -> tuple[Gathered, Gathered]:
    """Both sides with what is known of them; a size that neither has was given in vain."""
    known = Known(sets=not given["no_set"])
    found = [gathering.side(given[label], rules, known) for label in ("prefill", "decode")]
    shared = arguments.sizes(given["dims"])
    symbols = {symbol for one in found for symbol in one.layout.symbols}
    gathering.check_sizes(shared, sorted(symbols))
    sized = []
    for label, one in zip(("prefill", "decode"), found, strict=True):
        own = arguments.sizes(given[f"{label}_dim"])
        layout = _known(one.layout, {**shared, **own}, own, given, label)
        sized.append(one._replace(layout=layout))
    return sized[0], sized[1]


def _known(
    layout: Layout,
    sizes: Mapping[str, int],
    own: Mapping[str, int],
    given: Mapping[str, Any],
    label: str,
) -> Layout:
    gathering.check_sizes(own, layout.symbols, f"--{label}-dim")
    there = {symbol: size for symbol, size in sizes.items() if symbol in layout.symbols}
    return gathering.with_known(layout, Known(there, given["specializations"], given["custom_io"]))


def _answer(
    found: HandOff, both: tuple[Gathered, Gathered], given: Mapping[str, Any], code: int
) -> None:
    with console.answering():
        if given["form"] == "json":
            reports = (both[0].reports, both[1].reports)
            console.say([accounts.as_json(found, code, reports=reports)])
            return
        models = _failed_models(both)
        if given["form"] == "github":
            decode = outlook.report(found, both=False)
            for one in (*models, decode):
                console.say(reporting.workflow_commands(one))
            if not given["quiet"]:
                title = {"file": decode.path, "title": "compare"}
                console.say([reporting.command("notice", title, outlook.sentence(found))])
            return
        if not given["quiet"]:
            console.say([_verdict(found)])
            if all(side.layout.buffers for side in both):
                console.say(_table(found))
                console.say(outlook.prompts(found))
            console.say(outlook.notes(found))
        color = console.color(sys.stderr)
        for one in (*models, outlook.report(found, both=True)):
            console.say(reporting.findings(one, color=color, verbose=given["verbose"]), err=True)


def _failed_models(both: tuple[Gathered, Gathered]) -> list[ModelReport]:
    """Each model that is broken, once; a side without buffers is told as such."""
    told = (side if side.layout.buffers else side.without("KV001") for side in both)
    return [*dict.fromkeys(one for side in told for one in side.reports if one.failed)]


def _verdict(found: HandOff) -> str:
    text = outlook.sentence(found)
    if not console.color(sys.stdout):
        return text
    return click.style(text, fg="red" if found.failed else "green", bold=True)


def _table(found: HandOff) -> Iterator[str]:
    """The table: plain lines where it is piped, drawn on a terminal."""
    if not console.terminal(sys.stdout):
        yield from outlook.lines(found, color=console.color(sys.stdout))
        return
    from rich.text import Text

    from onnxkvrename.report import rename_rich as terminal

    rows = (
        (*cells, Text(state, style=outlook.state_color(state)))
        for *cells, state in outlook.rows(found)
    )
    drawn = terminal.table(outlook.heads(found), rows)
    yield from terminal.printed([drawn], color=console.color(sys.stdout))
