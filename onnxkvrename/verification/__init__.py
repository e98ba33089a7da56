"""Proofs of what names alone cannot tell: retention, validity, and how buffers are updated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnxkvrename.errors import ModelError, ReadError
from onnxkvrename.layout.kinds import find_pair_dtype
from onnxkvrename.layout.scales import BufferScales, is_quantized
from onnxkvrename.layout.updates import BufferUpdate
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.verification.dataflow import trace_buffer_flows
from onnxkvrename.verification.graph_bodies import read_graph


def trace_needs(source: ByteSource, model: KvModel) -> KvModel:
    """Return a model with all inputs that nothing in its graph writes among its needs.

    Only its possible needs are traced. A model that cannot be read stays as it is; that is for
    other checks to say.

    Raises:
        ReadError: The file of the model cannot be read.
    """
    if not model.possible_needs:
        return model
    try:
        flows = trace_buffer_flows(read_graph(source), model.pairs)
    except ReadError:
        raise
    except ModelError:
        return model
    passed = {
        flow.pair.input.old_name
        for flow in flows
        if flow.verdict == "passed through" and flow.pair.input is not None
    }
    more = (name for name in model.possible_needs if name in passed)
    return model._replace(needs=(*model.needs, *more), possible_needs=())


def trace_buffer_updates(source: ByteSource, pairs: Sequence[KvPair]) -> dict[str, BufferUpdate]:
    """Return how each retained output is made from its input, by its name.

    Nothing for a model that cannot be read; that is for other checks to say.

    Raises:
        ReadError: The file of the model cannot be read.
    """
    try:
        flows = trace_buffer_flows(read_graph(source), pairs)
    except ReadError:
        raise
    except ModelError:
        return {}
    updates = {}
    for flow in flows:
        update = flow.update
        if flow.verdict == "not from its input" and not update.is_known:
            update = update._replace(other_inputs=flow.other_inputs)
        if flow.pair.output:
            updates[flow.pair.output.old_name] = update
    return updates


def trace_buffer_scales(
    source: ByteSource, pairs: Sequence[KvPair], directory: Path
) -> dict[str, BufferScales]:
    """Return the scales of quantized buffers, by their inputs, or their outputs without one.

    The directory has the external data. Nothing for a model that cannot be read; that is for
    other checks to say.

    Raises:
        ReadError: The file of the model cannot be read.
    """
    if not any(is_quantized(find_pair_dtype(pair)) for pair in pairs):
        return {}
    from onnxkvrename.verification.buffer_scales import (  # onnx, only for quantized buffers
        find_buffer_scales,
    )

    try:
        return find_buffer_scales(source, pairs, directory)
    except ReadError:
        raise
    except ModelError:
        return {}
