"""Proofs of what names alone cannot tell: retention, validity, and how buffers are updated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnxkvrename.errors import ModelError, ReadError
from onnxkvrename.layout.updates import BufferFault, BufferUpdate
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.verification.dataflow import BufferFlow, trace_buffer_flows
from onnxkvrename.verification.graph_bodies import read_graph


def trace_needs(source: ByteSource, model: KvModel) -> KvModel:
    """Return a model with all inputs that nothing in its graph writes among its needs.

    Only its possible needs are traced. A model that cannot be read has no more of them; that is
    for other checks to say.

    Raises:
        ReadError: The file of the model cannot be read.
    """
    if not model.possible_needs:
        return model
    passed = {
        flow.pair.input.old_name
        for flow in _trace_flows(source, model.pairs)
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
    return list_buffer_updates(_trace_flows(source, pairs))


def list_buffer_updates(flows: Iterable[BufferFlow]) -> dict[str, BufferUpdate]:
    """Return how each retained output is made from its input, by its name."""
    updates = {}
    for flow in flows:
        fault = flow.fault
        if flow.verdict == "not from its input":
            fault = BufferFault(flow.other_inputs)
        update = flow.update._replace(fault=fault)
        if flow.pair.output:
            updates[flow.pair.output.old_name] = update
    return updates


def _trace_flows(source: ByteSource, pairs: Sequence[KvPair]) -> tuple[BufferFlow, ...]:
    """Return the flows of buffers; none for a model that cannot be read.

    Raises:
        ReadError: The file of the model cannot be read.
    """
    try:
        return trace_buffer_flows(read_graph(source), pairs)
    except ReadError:
        raise
    except ModelError:
        return ()
