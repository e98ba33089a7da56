"""The JSON documents of ``onnxkvrename pairs``: its own, and those that other programs read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import render_json_document, serialize_error
from onnxkvrename.layout.updates import compare_dims
from onnxkvrename.verification.pairs.hidden_states import StatePair
from onnxkvrename.verification.pairs.infer_rules import TracedModel

SCHEMA = "onnxkvrename.pairs/1"


def pairs_to_json(
    models: Iterable[TracedModel | ModelError],
    code: int,
    error: KvRenameError | None = None,
) -> str:
    """Return one JSON document; its schema is ``schemas/pairs-1.json``.

    Args:
        models: The models with their pairs; of one that cannot be read the error.
        code: The exit code of the command.
        error: What kept the command as a whole from its work.
    """
    entries: list[dict[str, Any]] = []
    for model in models:
        if isinstance(model, ModelError):
            entries.append({"path": model.path, "pairs": [], "error": serialize_error(model)})
        else:
            pairs = [_serialize_pair(pair) for pair in model.pairs]
            entries.append({"path": str(model.path), "pairs": pairs, "error": None})
    return render_json_document(SCHEMA, "pairs", code, error, models=entries)


def _serialize_pair(pair: StatePair) -> dict[str, Any]:
    return {
        "input": pair.input.name,
        "output": pair.output.name,
        "dtype": pair.input.dtype,
        "input_shape": _serialize_shape(pair.input.shape),
        "output_shape": _serialize_shape(pair.output.shape),
        "update": pair.update.kind,
        "update_axis": pair.update.axis,
        "feeds_back": pair.feeds_back,
    }


def _serialize_shape(shape: tuple[Any, ...] | None) -> list[Any] | None:
    return None if shape is None else list(shape)


def build_stateful_map(pairs: Iterable[StatePair]) -> Mapping[str, str]:
    """Return the map for OpenVINO's MakeStateful: the outputs that go back as they are."""
    return {pair.input.name: pair.output.name for pair in pairs if pair.feeds_back}


def build_io_bindings(pairs: Iterable[StatePair]) -> list[dict[str, Any]]:
    """Return what an IO binding of onnxruntime needs to know of each pair.

    ``next_input`` says what the input is in the next step: the ``output``; the ``join`` of both
    along ``axis``; or what was the ``first_output``, in each later step.
    """
    return [
        {
            "input": pair.input.name,
            "output": pair.output.name,
            "dtype": pair.input.dtype,
            "input_shape": _serialize_shape(pair.input.shape),
            "output_shape": _serialize_shape(pair.output.shape),
            "next_input": _name_next_input(pair),
            "axis": pair.update.axis,
            "same_size": _has_same_size(pair),
        }
        for pair in pairs
    ]


def _name_next_input(pair: StatePair) -> str:
    if pair.feeds_back:
        return "output"
    return "join" if pair.update.kind == "delta" else "first_output"


def _has_same_size(pair: StatePair) -> bool:
    """Return whether input and output are shown to have one size, so that buffers can be reused."""
    changes = compare_dims(pair.input.shape, pair.output.shape)
    return (
        pair.update.kind in ("inplace", "shift", "once")
        and changes is not None
        and all(change == "same" for change in changes)
    )


def render_value(value: Any) -> str:
    """Return a value as indented JSON."""
    return json.dumps(value, indent=2)
