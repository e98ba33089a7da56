"""Render a consumer check as text for people, and build its answer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from onnxkvrename.findings import UNKNOWN_TRANSFER, format_count, format_layers
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.selection import Selection, find_distinct_types, select_values
from onnxkvrename.layout.layout import Layout
from onnxkvrename.report.formats import Answer, Line, Note, build_file_result
from onnxkvrename.report.formats.text import GREEN, RED, build_verdict_line
from onnxkvrename.report.manifest_text import format_model_paths
from onnxkvrename.report.tables import wrap_line
from onnxkvrename.rules.profile import ProfileChoice
from onnxkvrename.rules.results import ModelReport


class ConsumerCheck(NamedTuple):
    """A layout, the values that a consumer selects, and the problems of each model.

    Attributes:
        consumer: The consumer.
        layout: The KV buffers of the models.
        reports: The models with their findings.
        profile: The profile that says which names are KV buffers.
        alternative: The same program with another setting, which can use the buffers that the
            consumer cannot; ``None`` if there is none.
    """

    consumer: Consumer
    layout: Layout
    reports: tuple[ModelReport, ...]
    profile: ProfileChoice | None = None
    alternative: Consumer | None = None

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
        """The files that the verdict is about: models with buffers; if there are none, all.

        Of a manifest it is the manifest, as its models were not read.
        """
        read = tuple(report.path for report in self.reports)
        return tuple(path for path in self.layout.models if path in read) or read


def build_consumer_answer(check: ConsumerCheck, code: int, *, quiet: bool, verbose: bool) -> Answer:
    """Return the answer of a consumer check.

    Args:
        check: The check.
        code: The exit code.
        quiet: Show findings only.
        verbose: Show every finding and the selected names.
    """
    return Answer(
        "check-consumer",
        code,
        build_content=partial(_describe, check),
        render_text=partial(_render_text, check, quiet, verbose),
        files=tuple(map(build_file_result, check.reports)),
        notes=() if quiet else (Note("check-consumer", _format_verdict(check), check.paths[0]),),
        is_verbose=verbose,
    )


def _describe(check: ConsumerCheck) -> tuple[Any, ...]:
    from onnxkvrename.report.documents.check_consumer_json import describe_check  # not for text

    return describe_check(check)


def _render_text(
    check: ConsumerCheck, quiet: bool, verbose: bool, width: int | None
) -> Iterator[Line]:
    if not quiet:
        style = RED if check.failed else GREEN
        where = format_model_paths(check.paths)
        yield from wrap_line(build_verdict_line(where, _format_verdict(check), style), width)
        yield from map(Line, _format_slots(check) if verbose else ())


def _format_verdict(check: ConsumerCheck) -> str:
    """Return in a few words whether the consumer can use the buffers."""
    layout, selection = check.layout, check.selection
    if not layout.buffers:
        return "no KV buffer"
    it = "it" if len(check.paths) == 1 else "them"
    errors = {f.code for report in check.reports for f in report.findings if f.severity == "error"}
    if errors == {UNKNOWN_TRANSFER}:
        return f"not known whether {check.consumer.name} can use {it}"
    if check.failed:
        alternative = _format_alternative(check.alternative)
        return f"{check.consumer.name} cannot use {it}{alternative}"
    types = len(find_distinct_types(layout, selection.inputs))
    buffers = format_count(len(selection.inputs), "buffer")
    details = [buffers, format_layers(layout.layers)]
    if types > 1:
        details.append(f"hybrid: {types} different shapes or dtypes")
    elif len(selection.inputs) > 1:
        details.append("all with the same shape and dtype")
    basis = "based on names, shapes, dtypes and dataflow"
    if check.consumer.source:
        basis += f", and on the code of {check.consumer.source}"
    return f"{check.consumer.name} can use {it}: {', '.join(details)}; {basis}"


def _format_alternative(consumer: Consumer | None) -> str:
    """Return which setting helps; nothing if none does."""
    if consumer is None:
        return ""
    setting = f"with {consumer.setting}" if consumer.setting else "without its setting"
    return f"; {setting} it can (--target {consumer.name})"


def _format_slots(check: ConsumerCheck) -> Iterator[str]:
    for number, pair in enumerate(check.selection.value_pairs):
        source, result = (side.name if side else "nothing" for side in pair)
        yield f"  {number}: {source} <- {result}"
