"""The command that asks whether a consumer can take the KV buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from onnxkvrename.cli import options as arguments
from onnxkvrename.cli import output as console
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, as_errors, document, finding_values
from onnxkvrename.handoff import consumer as targets
from onnxkvrename.handoff import consumer_checks as consuming
from onnxkvrename.handoff.consumer import Target
from onnxkvrename.handoff.consumer_checks import Selection
from onnxkvrename.layout import load as gathering
from onnxkvrename.layout import selectors
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.layout.load import Known
from onnxkvrename.layout.selectors import Selector
from onnxkvrename.model.signature import Value
from onnxkvrename.report import manifest_text as ledger
from onnxkvrename.report import rename_text as reporting
from onnxkvrename.rules import load as rulesfile
from onnxkvrename.rules.results import ModelReport

SCHEMA = "onnxkvrename.check-consumer/1"
EMITTED = ("selectors",)


class Checked(NamedTuple):
    """A layout as a consumer meets it, and what is wrong with each of its models."""

    target: Target
    layout: Layout
    reports: tuple[ModelReport, ...]
    selectors: tuple[Selector, ...] | None = None

    @property
    def selection(self) -> Selection:
        """What the consumer selects."""
        return consuming.selection(self.layout, self.target)

    @property
    def failed(self) -> bool:
        """Whether something is wrong with any model."""
        return any(report.failed for report in self.reports)


def _named() -> str:
    """Which consumers there are, for the help."""
    known = targets.names()
    said = f"The consumer, one of: {', '.join(known)}."
    return f"{said}  [default: {known[0]}]" if len(known) == 1 else f"{said}  [required]"


@click.command(
    "onnxkvrename check-consumer",
    context_settings=arguments.CONTEXT,
    epilog="Exit codes: 0 it can; 1 a finding of severity error; 2 the job could not be done; "
    "130 interrupted.",
)
@arguments.models()
@click.option("--target", metavar="NAME", help=_named())
@arguments.full_transfer()
@click.option(
    "--emit",
    type=click.Choice(EMITTED),
    help="In place of a verdict: expressions that select exactly the KV buffers, by kind, "
    "proved against the model; for models without the token, too.",
)
@arguments.compiled()
@arguments.no_set()
@arguments.strict()
@arguments.profile()
@arguments.rules()
@arguments.form()
@arguments.quiet()
@click.option("-v", "--verbose", is_flag=True, help="Show what is selected, in its order.")
def command(**given: Any) -> int:
    """Can this consumer take the KV buffers of MODEL? Say what would go wrong on the device.

    MODEL is one model, or the windows of one. A consumer selects buffers by their
    names, orders them by what it reads there, and moves what it takes for their
    contents. Nothing is written.
    """
    if not given["models"]:
        raise click.UsageError("no MODEL given: onnxkvrename check-consumer MODEL...")
    checked = _checked(given)
    code = int(checked.failed)
    _answer(checked, given, code)
    return code


def failed(code: int, fault: KvRenameError) -> str:
    """The JSON document of a job that could not be done."""
    return _as_json(None, code, fault)


def _checked(given: dict[str, Any]) -> Checked:
    known = targets.names()
    if given["target"] is None and len(known) > 1:
        raise click.UsageError(f"no --target given, one of: {', '.join(known)}")
    target = targets.load(given["target"] or known[0])
    rules = rulesfile.load(given["profile"], given["rules"])
    sizes, sets = arguments.sizes(given["dims"]), not given["no_set"]
    compiled = Known(sizes, given["specializations"], given["custom_io"], sets)
    strict = given["strict"]
    layout, reports, _ = gathering.gather(given["models"], rules, compiled, strict=strict)
    if given["emit"] == "selectors":
        return Checked(target, layout, reports, selectors.selectors(layout))
    found = tuple(consuming.check(layout, target, whole=given["full_transfer"]))
    found = as_errors(found) if strict else found
    return Checked(target, layout, tuple(_with(report, layout, found) for report in reports))


def _with(report: ModelReport, layout: Layout, found: tuple[Finding, ...]) -> ModelReport:
    """A report with those findings that are about its model."""
    own = (one for one in found if consuming.owner(layout, one.name) == report.path)
    report = report._replace(findings=(*report.findings, *own))
    return report._replace(status="failed" if report.failed else report.status)


def _answer(checked: Checked, given: dict[str, Any], code: int) -> None:
    with console.answering():
        if given["form"] == "json":
            console.say([_as_json(checked, code)])
            return
        if given["form"] == "github":
            console.say(_github(checked, quiet=given["quiet"]))
            return
        color = console.color(sys.stderr)
        for report in checked.reports:
            said = reporting.findings(report, color=color, verbose=given["verbose"])
            console.say(said, err=True)
        if checked.selectors is not None:
            console.say(f"{s.kind} {s.side} {s.expression}" for s in checked.selectors)
        elif not given["quiet"]:
            console.say([f"{ledger.called(_models(checked))}: {_verdict(checked)}"])
            if given["verbose"]:
                console.say(_slots(checked))


def _models(checked: Checked) -> tuple[str, ...]:
    """What the verdict is about: the models of the layout, or all, where none has a buffer."""
    return checked.layout.models or tuple(report.path for report in checked.reports)


def _verdict(checked: Checked) -> str:
    """What becomes of the buffers, in a few words."""
    target, layout, chosen = checked.target, checked.layout, checked.selection
    if not layout.buffers:
        return "no KV buffer in it"
    if checked.failed:
        return f"{target.name} cannot take it"
    count = len(consuming.families(layout, chosen.inputs))
    alike = f"hybrid: {count} shapes or dtypes" if count > 1 else "all alike"
    layers = reporting.ranges(layout.layers)
    return f"{target.name} takes {len(chosen.inputs)} buffers, {layers}, {alike}"


def _slots(checked: Checked) -> Iterator[str]:
    for number, (into, out) in enumerate(checked.selection.slots):
        given, made = (reporting.show(end.name) if end else "nothing" for end in (into, out))
        yield f"  {number}: {given} <- {made}"


def _github(checked: Checked, *, quiet: bool) -> Iterator[str]:
    for report in checked.reports:
        yield from reporting.workflow_commands(report)
    if checked.selectors is not None:
        for one in checked.selectors:
            said = f"{one.kind} {one.side} {one.expression}"
            yield reporting.command("notice", {"title": "selectors"}, said)
    elif not quiet:
        title = {"file": _models(checked)[0], "title": "check-consumer"}
        yield reporting.command("notice", title, _verdict(checked))


def _as_json(checked: Checked | None, code: int, fault: KvRenameError | None = None) -> str:
    """One document, held against ``schemas/check-consumer-1.json`` by the tests."""
    if checked is None:
        return document(SCHEMA, "check-consumer", code, fault, **_NOTHING)
    layout = checked.layout
    content = {
        "target": checked.target.name,
        "models": [
            {"path": report.path, "findings": list(map(finding_values, report.findings))}
            for report in checked.reports
        ],
        "ordered": checked.selection.ordered,
        "hybrid": len(consuming.families(layout, checked.selection.inputs)) > 1,
        "slots": list(_slot_values(checked)),
        "selectors": None
        if checked.selectors is None
        else [one._asdict() for one in checked.selectors],
    }
    return document(SCHEMA, "check-consumer", code, fault, **content)


_NOTHING: dict[str, Any] = {
    "target": None,
    "models": [],
    "ordered": False,
    "hybrid": False,
    "slots": [],
    "selectors": None,
}


def _slot_values(checked: Checked) -> Iterator[dict[str, Any]]:
    buffers = {name: buffer for buffer in checked.layout.buffers for name in buffer.names}
    for number, (into, out) in enumerate(checked.selection.slots):
        value = into or out
        assert value is not None
        yield {
            "slot": number,
            "input": into.name if into else None,
            "output": out.name if out else None,
            **_meaning(buffers.get(value.name)),
            **_form(value, checked.layout),
        }


def _meaning(buffer: Buffer | None) -> dict[str, Any]:
    """What a slot holds; a stranger holds nothing that is known."""
    if buffer is None:
        return {"layer": None, "part": None, "kind": None}
    return {"layer": buffer.layer, "part": buffer.part, "kind": buffer.kind}


def _form(value: Value, layout: Layout) -> dict[str, Any]:
    shape = None if value.shape is None else list(layout.sized(value.shape))
    return {"dtype": value.dtype, "shape": shape}
