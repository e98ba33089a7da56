"""A rename as JSON for programs, by ``schemas/report-1.json``."""

from __future__ import annotations

from typing import Any

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import render_json_document, serialize_error, serialize_finding
from onnxkvrename.rules.plan import KvPair, PairSide
from onnxkvrename.rules.profile import serialize_choice
from onnxkvrename.rules.results import ModelReport, Report

SCHEMA = "onnxkvrename.report/1"


def report_to_json(
    report: Report, command: str, code: int, error: KvRenameError | None = None
) -> str:
    """Return the JSON document of a rename.

    Args:
        report: What became of the models and sidecars.
        command: The name of the command.
        code: Its exit code.
        error: What kept the whole job from being done.
    """
    counts = {"renamed": 0, "unchanged": 0, "would-rename": 0, "failed": 0}
    for model in report.models:
        counts[model.status] += 1
    models = [_model_to_json(model) for model in report.models]
    sidecars = [sidecar._asdict() for sidecar in report.sidecars]
    return render_json_document(
        SCHEMA,
        command,
        code,
        error,
        profile=serialize_choice(report.profile),
        models=models,
        texts=sidecars,
        summary=counts,
    )


def _model_to_json(model: ModelReport) -> dict[str, Any]:
    return {
        "path": model.path,
        "output": model.output,
        "status": model.status,
        "pairs": [pair_to_json(pair) for pair in model.pairs],
        "kept": [
            {"name": unchanged.name, "reason": unchanged.reason}
            for unchanged in model.unchanged_names
        ],
        "unstamped": model.stamp == "",
        "checked_for": model.consumer or None,
        "proved": model.proved,
        "findings": [serialize_finding(finding) for finding in model.findings],
        "error": serialize_error(model.error),
    }


def pair_to_json(pair: KvPair) -> dict[str, Any]:
    """Return a pair with the old and the new name of each side."""
    return {
        "layer": pair.layer,
        "buffer": pair.buffer,
        "kind": pair.kind,
        "scope": pair.scope,
        "input": _side_to_json(pair.input),
        "output": _side_to_json(pair.output),
    }


def _side_to_json(side: PairSide | None) -> dict[str, str] | None:
    return None if side is None else {"old": side.old_name, "new": side.new_name}
