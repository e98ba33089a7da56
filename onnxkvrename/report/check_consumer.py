"""A consumer check as text and as JSON; strings out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import render_json_document, serialize_finding
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.selection import Selection, find_distinct_types, select_values
from onnxkvrename.layout.layout import KvBuffer, Layout
from onnxkvrename.layout.selectors import Selector
from onnxkvrename.model.signature import Value
from onnxkvrename.report.formats import Answer, Line, Note, Screen, build_file_result
from onnxkvrename.report.formats.text import escape_unprintable, render_finding_lines
from onnxkvrename.report.manifest_text import format_model_paths
from onnxkvrename.rules.layer_ranges import format_layer_ranges
from onnxkvrename.rules.results import ModelReport

SCHEMA = "onnxkvrename.check-consumer/1"
_EMPTY_CONTENT: dict[str, Any] = {
    "target": None,
    "models": [],
    "ordered": False,
    "hybrid": False,
    "slots": [],
    "selectors": None,
}


class ConsumerCheck(NamedTuple):
    """A layout, the values that a consumer selects, and the problems of each model.

    Attributes:
        consumer: The consumer.
        layout: The KV buffers of the models.
        reports: The models with their findings.
        selectors: Proved expressions in place of a verdict; ``None`` for a verdict.
    """

    consumer: Consumer
    layout: Layout
    reports: tuple[ModelReport, ...]
    selectors: tuple[Selector, ...] | None = None

    @property
    def selection(self) -> Selection:
        """The values that the consumer selects."""
        return select_values(self.layout, self.consumer)

    @property
    def failed(self) -> bool:
        """True if there is a finding of severity error."""
        return any(report.failed for report in self.reports)

    @property
    def paths(self) -> tuple[str, ...]:
        """The models that the verdict is about: all, where none has a buffer."""
        return self.layout.models or tuple(report.path for report in self.reports)


def build_consumer_answer(check: ConsumerCheck, code: int, *, quiet: bool, verbose: bool) -> Answer:
    """Return the answer of a consumer check.

    Args:
        check: The check.
        code: The exit code.
        quiet: Show findings only.
        verbose: Show every finding, and what is selected.
    """
    return Answer(
        "check-consumer",
        code,
        render_json=partial(consumer_check_to_json, check, code),
        render_text=partial(_render_text, check, quiet, verbose),
        files=tuple(map(build_file_result, check.reports)),
        notes=tuple(_list_notes(check, quiet=quiet)),
    )


def _render_text(
    check: ConsumerCheck, quiet: bool, verbose: bool, screen: Screen
) -> Iterator[Line]:
    yield from render_finding_lines(check.reports, screen, verbose=verbose)
    if check.selectors is not None:
        yield from (Line(_format_selector(selector)) for selector in check.selectors)
    elif not quiet:
        yield Line(f"{format_model_paths(check.paths)}: {_format_verdict(check)}")
        yield from map(Line, _format_slots(check) if verbose else ())


def _list_notes(check: ConsumerCheck, *, quiet: bool) -> Iterator[Note]:
    if check.selectors is not None:
        yield from (Note("selectors", _format_selector(selector)) for selector in check.selectors)
    elif not quiet:
        yield Note("check-consumer", _format_verdict(check), check.paths[0])


def _format_selector(selector: Selector) -> str:
    return f"{selector.kind} {selector.side} {selector.expression}"


def _format_verdict(check: ConsumerCheck) -> str:
    """Return in a few words whether the consumer can take the buffers."""
    layout, selection = check.layout, check.selection
    if not layout.buffers:
        return "no KV buffer in it"
    if check.failed:
        return f"{check.consumer.name} cannot take it"
    count = len(find_distinct_types(layout, selection.inputs))
    types = f"hybrid: {count} shapes or dtypes" if count > 1 else "all alike"
    layers = format_layer_ranges(layout.layers)
    return f"{check.consumer.name} takes {len(selection.inputs)} buffers, {layers}, {types}"


def _format_slots(check: ConsumerCheck) -> Iterator[str]:
    for number, pair in enumerate(check.selection.positional_pairs):
        source, result = (escape_unprintable(side.name) if side else "nothing" for side in pair)
        yield f"  {number}: {source} <- {result}"


def consumer_check_to_json(
    check: ConsumerCheck | None, code: int, error: KvRenameError | None = None
) -> str:
    """Return the JSON document of a consumer check.

    Args:
        check: The check, or ``None`` for a job that could not be done.
        code: The exit code.
        error: What kept the job from being done.
    """
    content = _EMPTY_CONTENT if check is None else _build_content(check)
    return render_json_document(SCHEMA, "check-consumer", code, error, **content)


def _build_content(check: ConsumerCheck) -> dict[str, Any]:
    selection = check.selection
    return {
        "target": check.consumer.name,
        "models": [
            {"path": report.path, "findings": list(map(serialize_finding, report.findings))}
            for report in check.reports
        ],
        "ordered": selection.is_ordered,
        "hybrid": len(find_distinct_types(check.layout, selection.inputs)) > 1,
        "slots": list(_list_slots(check)),
        "selectors": None
        if check.selectors is None
        else [selector._asdict() for selector in check.selectors],
    }


def _list_slots(check: ConsumerCheck) -> Iterator[dict[str, Any]]:
    buffers = {name: buffer for buffer in check.layout.buffers for name in buffer.names}
    for number, (source, result) in enumerate(check.selection.positional_pairs):
        value = source or result
        assert value is not None
        yield {
            "slot": number,
            "input": source.name if source else None,
            "output": result.name if result else None,
            **_describe_buffer(buffers.get(value.name)),
            **_describe_value(value, check.layout),
        }


def _describe_buffer(buffer: KvBuffer | None) -> dict[str, Any]:
    """Return layer, part and kind; each is ``None`` for a value that is not a KV buffer."""
    if buffer is None:
        return {"layer": None, "part": None, "kind": None}
    return {"layer": buffer.layer, "part": buffer.part, "kind": buffer.kind}


def _describe_value(value: Value, layout: Layout) -> dict[str, Any]:
    shape = None if value.shape is None else list(layout.resolve_shape(value.shape))
    return {"dtype": value.dtype, "shape": shape}
