"""Render a consumer check as JSON: each slot with what is in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import render_json_document, serialize_finding
from onnxkvrename.handoff.selection import find_distinct_types
from onnxkvrename.layout.layout import KvBuffer, Layout
from onnxkvrename.model.signature import Value
from onnxkvrename.report.check_consumer_text import ConsumerCheck
from onnxkvrename.rules.profile import serialize_choice

SCHEMA = "onnxkvrename.check-consumer/1"
_EMPTY_CONTENT: dict[str, Any] = {
    "profile": None,
    "target": None,
    "models": [],
    "ordered": False,
    "hybrid": False,
    "slots": [],
}


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
        "profile": serialize_choice(check.profile),
        "target": check.consumer.name,
        "models": [
            {"path": report.path, "findings": list(map(serialize_finding, report.findings))}
            for report in check.reports
        ],
        "ordered": selection.is_ordered,
        "hybrid": len(find_distinct_types(check.layout, selection.inputs)) > 1,
        "slots": list(_list_slots(check)),
    }


def _list_slots(check: ConsumerCheck) -> Iterator[dict[str, Any]]:
    buffers = {name: buffer for buffer in check.layout.buffers for name in buffer.names}
    for number, (source, result) in enumerate(check.selection.value_pairs):
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
