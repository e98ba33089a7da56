"""Proofs of what names alone cannot tell: retention, validity, and how buffers are updated."""

from __future__ import annotations

from collections.abc import Sequence

from onnxkvrename.errors import ModelError, ReadError
from onnxkvrename.layout.updates import BufferUpdate
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.rules.plan import KvPair


def trace_buffer_updates(source: ByteSource, pairs: Sequence[KvPair]) -> dict[str, BufferUpdate]:
    """Return how each retained output is made from its input, by its name.

    Args:
        source: The bytes of a model.
        pairs: Its buffers.

    Returns:
        Nothing for a model that protobuf refuses; that is for other checks to say.

    Raises:
        ReadError: The file of the model cannot be read.
    """
    from onnxkvrename.verification.dataflow import trace_buffer_flows  # onnx, only for models
    from onnxkvrename.verification.strip_weights import read_model_without_weights

    try:
        flows = trace_buffer_flows(read_model_without_weights(source), pairs)
    except ReadError:
        raise
    except ModelError:
        return {}
    return {flow.pair.output.old_name: flow.update for flow in flows if flow.pair.output}
