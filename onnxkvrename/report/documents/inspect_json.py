"""The JSON document of ``onnxkvrename inspect``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import render_json_document, serialize_error
from onnxkvrename.layout.inspect import InspectedBuffer, ModelSummary
from onnxkvrename.model.signature import ExportInfo
from onnxkvrename.rules.profile import ProfileChoice, serialize_choice

SCHEMA = "onnxkvrename.inspect/1"


def summaries_to_json(
    summaries: Iterable[ModelSummary],
    code: int,
    error: KvRenameError | None = None,
    profile: ProfileChoice | None = None,
) -> str:
    """Return one JSON document; its schema is ``schemas/inspect-1.json``.

    Args:
        summaries: The models, in the order given.
        code: The exit code of the command.
        error: What kept the command as a whole from its work.
        profile: The profile that recognizes KV names.
    """
    models = [serialize_summary(summary) for summary in summaries]
    choice = serialize_choice(profile)
    return render_json_document(SCHEMA, "inspect", code, error, profile=choice, models=models)


def serialize_summary(summary: ModelSummary) -> dict[str, Any]:
    """Return one model as JSON values: every key is always there, sizes are in bytes."""
    weights, stamp = summary.weight, summary.stamp
    return {
        "path": summary.path,
        "size": summary.size,
        "export": None if summary.export is None else _serialize_export(summary.export),
        "nodes": weights.node_count,
        "functions": list(weights.function_names),
        "weights": {
            "inline_tensors": weights.inline_tensor_count,
            "inline_bytes": weights.inline_bytes,
            "external_tensors": weights.external_tensor_count,
            "external_bytes": summary.external_bytes,
            "files": [{"location": file.location, "bytes": file.size} for file in summary.files],
        },
        "layers": list(summary.layers),
        "tokens": [{"token": token, "names": count} for token, count in summary.token_counts],
        "names": summary.name_count,
        "stamp": None
        if stamp is None
        else {"kv_layout_sha256": stamp.digest, "holds": stamp.matches_graph},
        "buffers": [_serialize_buffer(buffer) for buffer in summary.buffers],
        "kept": [name._asdict() for name in summary.kept],
        "findings": [finding._asdict() for finding in summary.findings],
        "error": serialize_error(summary.error),
    }


def _serialize_buffer(buffer: InspectedBuffer) -> dict[str, Any]:
    values = buffer._asdict()
    values["kind_guessed"] = values.pop("is_kind_guessed")
    return {**values, "update": buffer.update.kind, "update_axis": buffer.update.axis}


def _serialize_export(export: ExportInfo) -> dict[str, Any]:
    return {
        "ir_version": export.ir_version,
        "producer": export.producer_name,
        "producer_version": export.producer_version,
        "opsets": [{"domain": domain, "version": version} for domain, version in export.opsets],
    }
