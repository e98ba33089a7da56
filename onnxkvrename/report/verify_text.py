"""What was verified, as lines or JSON; strings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from click import style

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import document, error_values, finding_values
from onnxkvrename.report.rename_text import command, ranges, show, workflow_commands
from onnxkvrename.rules.plan import Pair
from onnxkvrename.verification.dataflow import Flow
from onnxkvrename.verification.retention_loop import Run
from onnxkvrename.verification.verify import Verified

SCHEMA = "onnxkvrename.verify/1"


def line(item: Verified, *, color: bool) -> str:
    """What became of a model, in one line."""
    said = state(item)
    if color:
        said = style(said, fg="red" if item.report.failed else "green")
    return f"{show(item.report.path)}: {said}"


def state(item: Verified) -> str:
    """The verdict on a model that could be read, in a few words."""
    if item.report.failed:
        return "does not verify"
    if not item.report.pairs:
        return "no KV buffer in it"
    verdicts = Counter(flow.verdict for flow in item.flows)
    proved = verdicts["updated"]
    layers = ranges(sorted({pair.layer for pair in item.report.pairs}))
    said = f"{proved} of {len(item.report.pairs)} buffers retained, {layers}"
    ops = Counter(
        flow.where.op_type for flow in item.flows if flow.where and flow.verdict == "updated"
    )
    if ops:
        said += ", updated by " + ", ".join(show(op) for op, _ in ops.most_common())
    if item.run is not None:
        said += f"; {_ran(item.run)}"
    if item.reference is not None:
        said += f", to the bit like {show(str(item.reference))}"
    return said


def _ran(run: Run) -> str:
    dims = ", ".join(f"{show(dim)}={size}" for dim, size in run.dims.items())
    return f"ran {len(run.steps)} steps" + (f" with {dims}" if dims else "")


def flows(item: Verified) -> Iterator[str]:
    """Each buffer, and where it is updated."""
    for flow in item.flows:
        given, made = (show(end.old) for end in flow.pair.ends)
        yield f"{given} -> {made}: {_where(flow)}"


def _where(flow: Flow) -> str:
    if flow.where is None:
        return flow.verdict
    node = f" ({show(flow.where.node)})" if flow.where.node else ""
    by = " by " if flow.verdict == "updated" else ": "
    return f"{flow.verdict}{by}{show(flow.where.op_type)}{node}"


def github(items: Iterable[Verified], *, quiet: bool) -> Iterator[str]:
    """Workflow commands that GitHub shows beside the files."""
    for item in items:
        yield from workflow_commands(item.report)
        if not quiet and item.report.error is None:
            yield command("notice", {"file": item.report.path, "title": "verify"}, state(item))


def as_json(items: Iterable[Verified], code: int, fault: KvRenameError | None = None) -> str:
    """One document, held against ``schemas/verify-1.json`` by the tests."""
    return document(SCHEMA, "verify", code, fault, models=[_model(item) for item in items])


def _model(item: Verified) -> dict[str, Any]:
    report = item.report
    traced = {flow.pair: flow for flow in item.flows}
    return {
        "path": report.path,
        "verified": not report.failed,
        "pairs": [_pair(pair, traced.get(pair)) for pair in report.pairs],
        "kept": [kept._asdict() for kept in report.kept],
        "findings": [finding_values(found) for found in report.findings],
        "run": None
        if item.run is None
        else {
            "dims": dict(item.run.dims),
            "steps": len(item.run.steps),
            "same_as": None if item.reference is None else str(item.reference),
        },
        "error": error_values(report.error),
    }


def _pair(pair: Pair, flow: Flow | None) -> dict[str, Any]:
    where = flow.where if flow is not None else None
    return {
        "layer": pair.layer,
        "buffer": pair.buffer,
        "kind": pair.kind,
        "scope": pair.scope,
        "input": None if pair.input is None else pair.input.old,
        "output": None if pair.output is None else pair.output.old,
        "verdict": None if flow is None else flow.verdict,
        "updated_by": None if where is None else {"op_type": where.op_type, "node": where.node},
    }
