"""The command that asks whether a consumer can take the KV buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    add_compile_options,
    add_format_option,
    add_full_transfer_option,
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
from onnxkvrename.findings import (
    Finding,
    promote_to_errors,
    render_json_document,
    serialize_finding,
)
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.consumer_checks import check_consumer, find_owning_model
from onnxkvrename.handoff.find_consumers import DEFAULT_CONSUMER, list_consumers, load_consumer
from onnxkvrename.handoff.selection import Selection, find_distinct_types, select_values
from onnxkvrename.layout.layout import KvBuffer, Layout
from onnxkvrename.layout.load import CompileInfo, load_layout
from onnxkvrename.layout.selectors import Selector, build_selectors
from onnxkvrename.model.signature import Value
from onnxkvrename.report.manifest_text import format_model_paths
from onnxkvrename.report.rename_text import (
    escape_unprintable,
    format_layer_ranges,
    format_workflow_command,
    render_findings,
    render_workflow_commands,
)
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.results import ModelReport

SCHEMA = "onnxkvrename.check-consumer/1"
EMIT_CHOICES = ("selectors",)


class ConsumerCheck(NamedTuple):
    """A layout as a consumer meets it, and what is wrong with each of its models."""

    consumer: Consumer
    layout: Layout
    reports: tuple[ModelReport, ...]
    selectors: tuple[Selector, ...] | None = None

    @property
    def selection(self) -> Selection:
        """What the consumer selects."""
        return select_values(self.layout, self.consumer)

    @property
    def failed(self) -> bool:
        """Whether something is wrong with any model."""
        return any(report.failed for report in self.reports)


@click.command(
    "onnxkvrename check-consumer",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 it can; 1 a finding of severity error; 2 the job could not be done; "
    "130 interrupted.",
)
@add_models_argument()
@click.option(
    "--target",
    metavar="NAME",
    default=DEFAULT_CONSUMER,
    show_default=True,
    help=f"The consumer, one of: {', '.join(list_consumers())}.",
)
@add_full_transfer_option()
@click.option(
    "--emit",
    type=click.Choice(EMIT_CHOICES),
    help="In place of a verdict: expressions that select exactly the KV buffers, by kind, "
    "proved against the model; for models without the token, too.",
)
@add_compile_options()
@add_no_set_option()
@add_strict_option()
@add_profile_option()
@add_rules_option()
@add_format_option()
@add_quiet_option()
@click.option("-v", "--verbose", is_flag=True, help="Show what is selected, in its order.")
def command(**given: Any) -> int:
    """Can this consumer take the KV buffers of MODEL? Say what would go wrong on the device.

    MODEL is one model, or the windows of one. A consumer selects buffers by their
    names, orders them by what it reads there, and moves what it takes for their
    contents. Nothing is written.
    """
    if not given["models"]:
        raise click.UsageError("no MODEL given: onnxkvrename check-consumer MODEL...")
    checked = _check_models(given)
    code = int(checked.failed)
    _print_check(checked, given, code)
    return code


def render_failure(code: int, fault: KvRenameError) -> str:
    """The JSON document of a job that could not be done."""
    return _consumer_check_to_json(None, code, fault)


def _check_models(given: dict[str, Any]) -> ConsumerCheck:
    target = load_consumer(given["target"])
    rules = load_rules(given["profile"], given["rules"])
    sizes, sets = parse_dim_sizes(given["dims"]), not given["no_set"]
    compiled = CompileInfo(sizes, given["specializations"], given["custom_io"], sets)
    strict = given["strict"]
    layout, reports, _ = load_layout(given["models"], rules, compiled, strict=strict)
    if given["emit"] == "selectors":
        return ConsumerCheck(target, layout, reports, build_selectors(layout))
    found = tuple(check_consumer(layout, target, full_transfer=given["full_transfer"]))
    found = promote_to_errors(found) if strict else found
    return ConsumerCheck(
        target, layout, tuple(_add_findings(report, layout, found) for report in reports)
    )


def _add_findings(report: ModelReport, layout: Layout, found: tuple[Finding, ...]) -> ModelReport:
    """A report with those findings that are about its model."""
    own = (one for one in found if find_owning_model(layout, one.name) == report.path)
    report = report._replace(findings=(*report.findings, *own))
    return report._replace(status="failed" if report.failed else report.status)


def _print_check(checked: ConsumerCheck, given: dict[str, Any], code: int) -> None:
    with stdout_guard():
        if given["form"] == "json":
            print_lines([_consumer_check_to_json(checked, code)])
            return
        if given["form"] == "github":
            print_lines(_render_github(checked, quiet=given["quiet"]))
            return
        color = is_color_enabled(sys.stderr)
        for report in checked.reports:
            said = render_findings(report, color=color, verbose=given["verbose"])
            print_lines(said, err=True)
        if checked.selectors is not None:
            print_lines(f"{s.kind} {s.side} {s.expression}" for s in checked.selectors)
        elif not given["quiet"]:
            print_lines(
                [f"{format_model_paths(_list_model_paths(checked))}: {_format_verdict(checked)}"]
            )
            if given["verbose"]:
                print_lines(_format_slots(checked))


def _list_model_paths(checked: ConsumerCheck) -> tuple[str, ...]:
    """What the verdict is about: the models of the layout, or all, where none has a buffer."""
    return checked.layout.models or tuple(report.path for report in checked.reports)


def _format_verdict(checked: ConsumerCheck) -> str:
    """What becomes of the buffers, in a few words."""
    target, layout, chosen = checked.consumer, checked.layout, checked.selection
    if not layout.buffers:
        return "no KV buffer in it"
    if checked.failed:
        return f"{target.name} cannot take it"
    count = len(find_distinct_types(layout, chosen.inputs))
    alike = f"hybrid: {count} shapes or dtypes" if count > 1 else "all alike"
    layers = format_layer_ranges(layout.layers)
    return f"{target.name} takes {len(chosen.inputs)} buffers, {layers}, {alike}"


def _format_slots(checked: ConsumerCheck) -> Iterator[str]:
    for number, (into, out) in enumerate(checked.selection.positional_pairs):
        given, made = (escape_unprintable(end.name) if end else "nothing" for end in (into, out))
        yield f"  {number}: {given} <- {made}"


def _render_github(checked: ConsumerCheck, *, quiet: bool) -> Iterator[str]:
    for report in checked.reports:
        yield from render_workflow_commands(report)
    if checked.selectors is not None:
        for one in checked.selectors:
            said = f"{one.kind} {one.side} {one.expression}"
            yield format_workflow_command("notice", {"title": "selectors"}, said)
    elif not quiet:
        title = {"file": _list_model_paths(checked)[0], "title": "check-consumer"}
        yield format_workflow_command("notice", title, _format_verdict(checked))


def _consumer_check_to_json(
    checked: ConsumerCheck | None, code: int, fault: KvRenameError | None = None
) -> str:
    """One document, held against ``schemas/check-consumer-1.json`` by the tests."""
    if checked is None:
        return render_json_document(SCHEMA, "check-consumer", code, fault, **_EMPTY_CONTENT)
    layout = checked.layout
    content = {
        "target": checked.consumer.name,
        "models": [
            {"path": report.path, "findings": list(map(serialize_finding, report.findings))}
            for report in checked.reports
        ],
        "ordered": checked.selection.is_ordered,
        "hybrid": len(find_distinct_types(layout, checked.selection.inputs)) > 1,
        "slots": list(_list_slot_values(checked)),
        "selectors": None
        if checked.selectors is None
        else [one._asdict() for one in checked.selectors],
    }
    return render_json_document(SCHEMA, "check-consumer", code, fault, **content)


_EMPTY_CONTENT: dict[str, Any] = {
    "target": None,
    "models": [],
    "ordered": False,
    "hybrid": False,
    "slots": [],
    "selectors": None,
}


def _list_slot_values(checked: ConsumerCheck) -> Iterator[dict[str, Any]]:
    buffers = {name: buffer for buffer in checked.layout.buffers for name in buffer.names}
    for number, (into, out) in enumerate(checked.selection.positional_pairs):
        value = into or out
        assert value is not None
        yield {
            "slot": number,
            "input": into.name if into else None,
            "output": out.name if out else None,
            **_describe_buffer(buffers.get(value.name)),
            **_describe_value(value, checked.layout),
        }


def _describe_buffer(buffer: KvBuffer | None) -> dict[str, Any]:
    """What a slot holds; a stranger holds nothing that is known."""
    if buffer is None:
        return {"layer": None, "part": None, "kind": None}
    return {"layer": buffer.layer, "part": buffer.part, "kind": buffer.kind}


def _describe_value(value: Value, layout: Layout) -> dict[str, Any]:
    shape = None if value.shape is None else list(layout.resolve_shape(value.shape))
    return {"dtype": value.dtype, "shape": shape}
