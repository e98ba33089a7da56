"""What was verified, as lines or JSON; strings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from click import style

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import render_json_document, serialize_error, serialize_finding
from onnxkvrename.report.rename_text import (
    escape_unprintable,
    format_layer_ranges,
    format_workflow_command,
    render_workflow_commands,
)
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.verification.dataflow import BufferFlow
from onnxkvrename.verification.retention_loop import RetentionRun
from onnxkvrename.verification.verify import VerifiedModel

SCHEMA = "onnxkvrename.verify/1"


def format_verdict_line(item: VerifiedModel, *, color: bool) -> str:
    """What became of a model, in one line."""
    said = summarize_verdict(item)
    if color:
        said = style(said, fg="red" if item.report.failed else "green")
    return f"{escape_unprintable(item.report.path)}: {said}"


def summarize_verdict(item: VerifiedModel) -> str:
    """The verdict on a model that could be read, in a few words."""
    if item.report.failed:
        return "does not verify"
    if not item.report.pairs:
        return "no KV buffer in it"
    verdicts = Counter(flow.verdict for flow in item.flows)
    proved = verdicts["updated"]
    layers = format_layer_ranges(sorted({pair.layer for pair in item.report.pairs}))
    said = f"{proved} of {len(item.report.pairs)} buffers retained, {layers}"
    ops = Counter(
        flow.updated_by.op_type
        for flow in item.flows
        if flow.updated_by and flow.verdict == "updated"
    )
    if ops:
        said += ", updated by " + ", ".join(escape_unprintable(op) for op, _ in ops.most_common())
    if item.run is not None:
        said += f"; {_format_run(item.run)}"
    if item.reference is not None:
        said += f", to the bit like {escape_unprintable(str(item.reference))}"
    return said


def _format_run(run: RetentionRun) -> str:
    dims = ", ".join(f"{escape_unprintable(dim)}={size}" for dim, size in run.dims.items())
    return f"ran {len(run.step_results)} steps" + (f" with {dims}" if dims else "")


def format_buffer_flows(item: VerifiedModel) -> Iterator[str]:
    """Each buffer, and where it is updated."""
    for flow in item.flows:
        given, made = (escape_unprintable(end.old_name) for end in flow.pair.sides)
        yield f"{given} -> {made}: {_format_flow_verdict(flow)}"


def _format_flow_verdict(flow: BufferFlow) -> str:
    if flow.updated_by is None:
        return flow.verdict
    node = (
        f" ({escape_unprintable(flow.updated_by.node_name)})" if flow.updated_by.node_name else ""
    )
    by = " by " if flow.verdict == "updated" else ": "
    return f"{flow.verdict}{by}{escape_unprintable(flow.updated_by.op_type)}{node}"


def render_verify_github(items: Iterable[VerifiedModel], *, quiet: bool) -> Iterator[str]:
    """Workflow commands that GitHub shows beside the files."""
    for item in items:
        yield from render_workflow_commands(item.report)
        if not quiet and item.report.error is None:
            yield format_workflow_command(
                "notice", {"file": item.report.path, "title": "verify"}, summarize_verdict(item)
            )


def verified_to_json(
    items: Iterable[VerifiedModel], code: int, fault: KvRenameError | None = None
) -> str:
    """One document, held against ``schemas/verify-1.json`` by the tests."""
    return render_json_document(
        SCHEMA, "verify", code, fault, models=[_model_to_json(item) for item in items]
    )


def _model_to_json(item: VerifiedModel) -> dict[str, Any]:
    report = item.report
    traced = {flow.pair: flow for flow in item.flows}
    return {
        "path": report.path,
        "verified": not report.failed,
        "pairs": [_pair_to_json(pair, traced.get(pair)) for pair in report.pairs],
        "kept": [kept._asdict() for kept in report.unchanged_names],
        "findings": [serialize_finding(found) for found in report.findings],
        "run": None
        if item.run is None
        else {
            "dims": dict(item.run.dims),
            "steps": len(item.run.step_results),
            "same_as": None if item.reference is None else str(item.reference),
        },
        "error": serialize_error(report.error),
    }


def _pair_to_json(pair: KvPair, flow: BufferFlow | None) -> dict[str, Any]:
    where = flow.updated_by if flow is not None else None
    return {
        "layer": pair.layer,
        "buffer": pair.buffer,
        "kind": pair.kind,
        "scope": pair.scope,
        "input": None if pair.input is None else pair.input.old_name,
        "output": None if pair.output is None else pair.output.old_name,
        "verdict": None if flow is None else flow.verdict,
        "updated_by": None
        if where is None
        else {"op_type": where.op_type, "node": where.node_name},
    }
