"""A consumer check as JSON: each slot with what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from onnxkvrename.findings import Finding
from onnxkvrename.handoff.selection import find_distinct_types
from onnxkvrename.model.signature import Dim
from onnxkvrename.records import Document, fill_record
from onnxkvrename.report.check_consumer_text import ConsumerCheck
from onnxkvrename.rules.profile import ProfileChoice


class Model(NamedTuple):
    """One model.

    Attributes:
        path: The path of the model.
        findings: What is wrong with the model itself.
    """

    path: str
    findings: tuple[Finding, ...]


class Slot(NamedTuple):
    """An input and an output that the consumer selects as one buffer.

    Attributes:
        slot: The position in the consumer's order, from 0.
        input: The input that the consumer selects; `None` if there is none.
        output: The output that the consumer selects; `None` if there is none.
        layer: The layer; `None` for a value that is not a KV buffer.
        part: What is in the buffer, such as key or value; `None` likewise.
        kind: The kind of the buffer, in vLLM's words; `None` likewise.
        dtype: The element type, in ONNX's words.
        shape: With the sizes that are known; `None` where the rank is not.
    """

    slot: int
    input: str | None
    output: str | None
    layer: int | None
    part: str | None
    kind: str | None
    dtype: str
    shape: tuple[Dim, ...] | None


class CheckContent(NamedTuple):
    """Whether a consumer can use the KV buffers of models.

    Attributes:
        profile: The rules that identify KV names; `None` if the job could not be done.
        target: The consumer; `None` if the job could not be done.
        models: All models of the command, also those without buffers.
        ordered: Whether the consumer can read an order in the names; if not, slots are as in the
            graph.
        hybrid: Whether what is selected has more than one shape or dtype.
        slots: What the consumer selects, in its order; inputs and outputs as it pairs them, by
            position or by name.
    """

    profile: ProfileChoice | None
    target: str | None
    models: tuple[Model, ...]
    ordered: bool
    hybrid: bool
    slots: tuple[Slot, ...]


DOCUMENT = Document(
    "onnxkvrename.check-consumer/1",
    "check-consumer",
    CheckContent(None, None, (), ordered=False, hybrid=False, slots=()),
)


def describe_check(check: ConsumerCheck) -> CheckContent:
    """Return whether a consumer can use buffers, with each slot."""
    return CheckContent(
        check.profile,
        check.consumer.name,
        tuple(fill_record(Model, report) for report in check.reports),
        check.selection.is_ordered,
        len(find_distinct_types(check.layout, check.selection.inputs)) > 1,
        tuple(_list_slots(check)),
    )


def _list_slots(check: ConsumerCheck) -> Iterator[Slot]:
    buffers = {name: buffer for buffer in check.layout.buffers for name in buffer.names}
    for number, (source, result) in enumerate(check.selection.value_pairs):
        value = source or result
        assert value is not None
        buffer = buffers.get(value.name)
        yield Slot(
            number,
            source.name if source else None,
            result.name if result else None,
            buffer.layer if buffer else None,
            buffer.part if buffer else None,
            buffer.kind if buffer else None,
            value.dtype,
            None if value.shape is None else check.layout.resolve_shape(value.shape),
        )
