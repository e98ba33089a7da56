"""Distinguish caches from features that are kept for later steps, such as those of a picture.

Both are passed on as they are. But attention multiplies a cache by something that is new in each
step, the query or the scores. Features go through weights first, mostly as a part of the
embeddings: only what is computed from them is in a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.limits import MAX_DEPTH, STEPS_PER_NODE
from onnxkvrename.verification.graph_bodies import (
    Body,
    FunctionKey,
    ModelGraph,
    Operation,
    UntraceableError,
    sort_operations,
)
from onnxkvrename.verification.operators import find_operand_flows, is_shape_only
from onnxkvrename.verification.pairs.hidden_states import StatePair

_PRODUCT_OPS = frozenset(
    (
        *("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "FusedMatMul"),
        *("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "ConvInteger"),
        *("QLinearMatMul", "QLinearConv", "MatMulNBits", "MatMulBnb4"),
    )
)
_SCALING_OPS = frozenset(("Mul", "Div"))
"""Attention to one position may also scale the values, and add them up."""
_COMBINING_OPS = frozenset(
    (
        *("Add", "Sub", "Sum", "Mean", "Max", "Min", "Where", "Concat"),
        *("ScatterND", "ScatterElements", "TensorScatter"),
    )
)
_RECURRENT_OPS = frozenset(("LSTM", "GRU", "RNN", "LinearAttention", "CausalConvWithState"))


class _Trace(NamedTuple):
    """What a value is made of.

    Attributes:
        sources: A bit for each source that no product was computed of on the way.
        alone: Those that were not combined with anything else that is new.
        is_new: Whether it is not a constant.
    """

    sources: int
    alone: int
    is_new: bool


_CONSTANT = _Trace(0, 0, is_new=False)
_NEW = _Trace(0, 0, is_new=True)


def find_features(graph: ModelGraph, pairs: Sequence[StatePair]) -> frozenset[str]:
    """Return the inputs that are passed on, and that weights are applied to before attention.

    What is not read, or goes into an operator that is not known, counts as a cache; so does
    everything if no other state is left.

    """
    sources = [pair.input.name for pair in pairs if pair.update.kind == "once" and pair.feeds_back]
    if not sources or len(sources) == len(pairs):
        return frozenset()
    walk = _Walk(graph.functions, STEPS_PER_NODE * (graph.main.size + 64))
    body = graph.main
    traces = {name: _NEW for name in body.inputs if name not in body.constants}
    for number, name in enumerate(sources):
        traces[name] = _Trace(1 << number, 1 << number, is_new=True)
    try:
        walk.follow(body, traces, frozenset())
    except UntraceableError:
        return frozenset()
    features = walk.weighted & ~walk.attended
    return frozenset(name for number, name in enumerate(sources) if features >> number & 1)


class _Walk:
    """A walk along all values that are made of some sources.

    Attributes:
        weighted: A bit for each source that a product with a constant is computed of.
        attended: A bit for each source that may be a cache: attention reads it, or what reads it
            is not known.
    """

    def __init__(self, functions: Mapping[FunctionKey, Body], most_steps: int) -> None:
        self.weighted = 0
        self.attended = 0
        self._functions = functions
        self._steps_left = most_steps

    def follow(
        self, body: Body, traces: Mapping[str, _Trace], callers: frozenset[FunctionKey]
    ) -> list[_Trace]:
        """Return what the outputs of a body are made of.

        The traces are those of the values that it gets, by their names in it. The callers are the
        functions that are being walked.

        Raises:
            UntraceableError: The nodes have no order, or too many steps would be taken.
        """
        known = dict(traces)
        made = (name for operation in body.list_operations() for name in operation.outputs)
        for operation in sort_operations(body, made, lambda _, count: range(count)):
            self._steps_left -= 1
            if self._steps_left < 0:
                raise UntraceableError("takes too many steps")
            captured = body.list_captured_at(operation.number)
            reads = [known.get(name, _CONSTANT) for name in (*operation.inputs, *captured)]
            results = self._apply(operation, body, reads, known, callers)
            known.update(zip(operation.outputs, results, strict=False))
            known.pop("", None)
        return [known.get(name, _CONSTANT) for name in body.outputs]

    def _apply(
        self,
        operation: Operation,
        body: Body,
        reads: Sequence[_Trace],
        known: Mapping[str, _Trace],
        callers: frozenset[FunctionKey],
    ) -> Iterable[_Trace]:
        """Return what the outputs of a node are made of."""
        merged = _merge(reads)
        count = len(operation.outputs)
        key = operation.function_key
        if not merged.sources or is_shape_only(operation.domain, operation.op_type):
            is_known = is_shape_only(operation.domain, operation.op_type)
            return [_NEW if merged.is_new and not is_known else _CONSTANT] * count
        if key in self._functions and key not in callers and len(callers) < MAX_DEPTH:
            function = self._functions[key]
            arguments = dict(zip(function.inputs, reads, strict=False))
            return self.follow(function, arguments, callers | {key})
        branches = body.get_subgraphs(operation.number)
        if operation.op_type == "If" and not operation.domain:
            ends = [
                self.follow(branch, _select(known, branch.captured_names), callers)
                for branch in branches.values()
            ]
            return [_merge(same) for same in zip(*ends, strict=False)]
        if branches or operation.op_type in _RECURRENT_OPS or "Attention" in operation.op_type:
            self.attended |= merged.sources
        elif operation.op_type in _SCALING_OPS and not operation.domain:
            self._scale(reads)
        elif operation.op_type in _PRODUCT_OPS:
            self._multiply(reads)
            return [_NEW] * count
        elif find_operand_flows(operation.domain, operation.op_type, 0, len(reads)) is None:
            self.attended |= merged.sources
        if operation.op_type in _COMBINING_OPS:
            merged = merged._replace(alone=merged.alone & ~_list_combined(reads))
        return [merged] * count

    def _scale(self, factors: Sequence[_Trace]) -> None:
        """Note which sources are scaled by something new, before they are a part of anything."""
        for factor in factors:
            self.attended |= factor.alone & _list_combined(factors)

    def _multiply(self, factors: Sequence[_Trace]) -> None:
        """Note which sources are multiplied by a constant, and which by something new."""
        is_by_new = sum(factor.is_new for factor in factors) > 1
        for factor in factors:
            if is_by_new:
                self.attended |= factor.sources
            else:
                self.weighted |= factor.sources


def _select(traces: Mapping[str, _Trace], names: Iterable[str]) -> dict[str, _Trace]:
    return {name: traces[name] for name in names if name in traces}


def _list_combined(operands: Sequence[_Trace]) -> int:
    """Return the sources of operands that meet something new that is not made of them."""
    sources, in_all = 0, -1
    for operand in operands:
        sources |= operand.sources
        if operand.is_new:
            in_all &= operand.sources
    return sources & ~in_all


def _merge(traces: Iterable[_Trace]) -> _Trace:
    """Return what something is made of that is made of several values."""
    sources, alone, is_new = 0, 0, False
    for trace in traces:
        sources |= trace.sources
        alone |= trace.alone
        is_new = is_new or trace.is_new
    return _Trace(sources, alone, is_new)
