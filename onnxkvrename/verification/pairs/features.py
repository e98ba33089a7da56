"""Distinguish caches from features that are kept for later steps, such as those of a picture.

Both are passed on as they are. But attention multiplies a cache by something that is new in each
step, the query or the scores. Features go through weights first, mostly as a part of the
embeddings: only what is computed from them is in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onnxkvrename.verification.constants import SmallConstants
from onnxkvrename.verification.graph_bodies import ModelGraph, Operation
from onnxkvrename.verification.operators import find_operand_flows, is_shape_only
from onnxkvrename.verification.pairs.hidden_states import StatePair
from onnxkvrename.verification.provenance import NodeLocation
from onnxkvrename.verification.tracing import Transfer, trace

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
_READING_OPS = frozenset(
    ("LSTM", "GRU", "RNN", "LinearAttention", "CausalConvWithState", "SequenceMap")
)


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


def find_features(graph: ModelGraph, pairs: Sequence[StatePair]) -> frozenset[str]:
    """Return the inputs that are passed on, and that weights are applied to before attention.

    What is not read, or goes into an operator that is not known, counts as a cache; so does
    everything if no other state is left.

    """
    sources = [pair.input.name for pair in pairs if pair.update.kind == "once" and pair.feeds_back]
    if not sources or len(sources) == len(pairs):
        return frozenset()
    others = (name for name in graph.main.inputs if name not in graph.main.constants)
    transfer = _FeatureTransfer(len(sources))
    trace(graph, transfer, [*dict.fromkeys([*sources, *others])], [*graph.main.producers])
    features = transfer.weighted & ~transfer.attended
    return frozenset(name for number, name in enumerate(sources) if features >> number & 1)


class _FeatureTransfer(Transfer[_Trace]):
    """What a value is made of; each body is walked with what it is given, new or constant.

    Attributes:
        weighted: A bit for each source that a product with a constant is computed of.
        attended: A bit for each source that may be a cache: attention reads it, or what reads it
            is not known.
    """

    nothing = _Trace(0, 0, is_new=False)
    has_summaries = False

    def __init__(self, source_count: int) -> None:
        self.weighted = 0
        self.attended = 0
        self._source_count = source_count

    def build_source(self, number: int) -> _Trace:
        bits = 1 << number if number < self._source_count else 0
        return _Trace(bits, bits, is_new=True)

    def apply_operator(
        self, operation: Operation, operands: Sequence[_Trace], constants: SmallConstants
    ) -> Sequence[_Trace]:
        """Return what the outputs of a node are made of."""
        merged = self.merge(operands)
        domain, op_type, _ = operation.function_key
        count = len(operation.outputs)
        if is_shape_only(domain, op_type):
            return [self.nothing] * count
        if op_type in _READING_OPS or "Attention" in op_type:
            self.attended |= merged.sources
        elif op_type in _SCALING_OPS and not domain:
            self._scale(operands)
        elif op_type in _PRODUCT_OPS:
            self._multiply(operands)
            return [_Trace(0, 0, merged.is_new)] * count
        elif find_operand_flows(domain, op_type, 0, len(operands)) is None:
            self.attended |= merged.sources
        if op_type in _COMBINING_OPS:
            merged = merged._replace(alone=merged.alone & ~_list_combined(operands))
        return [merged] * count

    def merge(self, values: Sequence[_Trace], /) -> _Trace:
        sources, alone, is_new = 0, 0, False
        for value in values:
            sources |= value.sources
            alone |= value.alone
            is_new = is_new or value.is_new
        return _Trace(sources, alone, is_new)

    def doubt(
        self, values: Sequence[_Trace], reason: str, location: NodeLocation | None, /
    ) -> _Trace:
        merged = self.merge(values)
        self.attended |= merged.sources
        return merged

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


def _list_combined(operands: Sequence[_Trace]) -> int:
    """Return the sources of operands that meet something new that is not made of them."""
    sources, in_all = 0, -1
    for operand in operands:
        sources |= operand.sources
        if operand.is_new:
            in_all &= operand.sources
    return sources & ~in_all
