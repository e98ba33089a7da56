"""Describe what operators do with the values of their operands.

An operator can use an operand in three ways. Its values may be *carried* into the
output, unchanged or changed one by one. They may be *mixed* into every value of the
output, as by MatMul, Softmax and the reductions: then the output depends on the
operand, but is not a later state of it. Or only the operand's shape is used.

Sources: ONNX's operator specifications (opset 28,
https://onnx.ai/onnx/operators/); for `com.microsoft` onnxruntime's
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md; for
`com.qualcomm.cloud` the local functions that QEfficient exports with its scatters
and gathers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple


class OperandFlow(NamedTuple):
    """The way in which one operand is carried into an output.

    Attributes:
        operand: The position of the operand, -1 for the last.
        overwrites: Its values are written over the values of another operand.
        is_computed: Its values are computed with.
        makes_new_state: The output is a new state, rather than the operand moved.
    """

    operand: int
    overwrites: bool = False
    is_computed: bool = False
    makes_new_state: bool = True


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PLAIN_MOVE = OperandFlow(0, makes_new_state=False)
_MOVE_OPS = _split_words("""
    Identity Cast CastLike BitCast Reshape Flatten Squeeze Unsqueeze Transpose Slice Split Expand
    Tile Pad Gather GatherElements GatherND DepthToSpace SpaceToDepth Compress ReverseSequence
    Trilu Dropout CenterCropPad QuantizeLinear DequantizeLinear Optional OptionalGetElement
    SequenceAt SequenceErase SplitToSequence
""")
_ELEMENTWISE_OPS = _split_words("""
    Add Sub Mul Div Pow Mod Min Max Mean Sum And Or Xor Not BitShift BitwiseAnd BitwiseNot
    BitwiseOr BitwiseXor Abs Neg Sign Ceil Floor Round Reciprocal Sqrt Exp Log Erf Clip
    Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh Atanh Sigmoid HardSigmoid HardSwish
    Swish Relu LeakyRelu ThresholdedRelu PRelu Elu Selu Celu Gelu Mish Shrink Softplus Softsign
""")
_SHAPE_ONLY_OPS = _split_words("""
    Shape Size EyeLike RandomNormalLike RandomUniformLike SequenceLength OptionalHasElement
""")
_SCATTER_FLOWS = (OperandFlow(0), OperandFlow(2, overwrites=True))
_JOIN_OPS: Mapping[str, tuple[OperandFlow, ...]] = {
    "Where": (OperandFlow(1), OperandFlow(2)),
    "Scatter": _SCATTER_FLOWS,
    "ScatterElements": _SCATTER_FLOWS,
    "ScatterND": _SCATTER_FLOWS,
    "TensorScatter": (OperandFlow(0), OperandFlow(1, overwrites=True)),
    "ConcatFromSequence": (OperandFlow(0),),
    "SequenceInsert": (OperandFlow(0), OperandFlow(1, overwrites=True)),
}

_LINEAR_STATE = OperandFlow(3, is_computed=True)
_STATEFUL_OPS: Mapping[tuple[str, str], Mapping[int, tuple[OperandFlow, ...]]] = {
    ("", "Attention"): {
        1: (OperandFlow(4), OperandFlow(1, overwrites=True)),
        2: (OperandFlow(5), OperandFlow(2, overwrites=True)),
    },
    ("", "LinearAttention"): {1: (_LINEAR_STATE,)},
    ("", "CausalConvWithState"): {1: (OperandFlow(3), OperandFlow(0, overwrites=True))},
    ("", "GRU"): {1: (OperandFlow(5, is_computed=True),)},
    ("", "RNN"): {1: (OperandFlow(5, is_computed=True),)},
    ("", "LSTM"): {1: (OperandFlow(5, is_computed=True),), 2: (OperandFlow(6, is_computed=True),)},
    ("com.microsoft", "Attention"): {1: (OperandFlow(4),)},
    ("com.microsoft", "CausalConvWithState"): {
        1: (OperandFlow(3), OperandFlow(0, overwrites=True))
    },
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): {
        1: (OperandFlow(5),),
        2: (OperandFlow(6),),
    },
    ("com.microsoft", "GroupQueryAttention"): {1: (OperandFlow(3),), 2: (OperandFlow(4),)},
    ("com.microsoft", "LinearAttention"): {1: (_LINEAR_STATE,)},
    ("com.microsoft", "MultiHeadAttention"): {1: (OperandFlow(6),), 2: (OperandFlow(7),)},
    ("com.microsoft", "PagedAttention"): {1: (OperandFlow(3),), 2: (OperandFlow(4),)},
    ("com.microsoft", "SparseAttention"): {1: (OperandFlow(3),), 2: (OperandFlow(4),)},
}
"""Operators with a state of their own: the flows into each output that carries a state."""

_QUALCOMM_DOMAIN = "com.qualcomm.cloud"
_CTX_SCATTERS = _split_words("CtxScatter CtxScatter3D CtxScatterCB CtxScatterCB3D CtxScatterPaged")
_CTX_GATHERS = _split_words(
    "CtxGather CtxGather3D CtxGatherCB CtxGatherCB3D CtxGatherBlockedKV CtxGatherPaged"
)


def is_shape_only(domain: str, op_type: str) -> bool:
    """Tell if the output depends on the shapes of the operands, but not on their values."""
    return domain == "" and op_type in _SHAPE_ONLY_OPS


def is_ctx_scatter(domain: str, op_type: str) -> bool:
    """Tell if this is one of QEfficient's scatters, which go by name even if they have a body."""
    return domain == _QUALCOMM_DOMAIN and op_type in _CTX_SCATTERS


@lru_cache(maxsize=1024)
def find_operand_flows(
    domain: str, op_type: str, output: int, operand_count: int
) -> tuple[OperandFlow, ...] | None:
    """Return which operands an operator carries into one of its outputs.

    Args:
        domain: The domain of the operator, empty for ONNX's own.
        op_type: The operator type.
        output: The position of the output.
        operand_count: The number of operands of the node.

    Returns:
        Empty if the operator mixes or creates and carries nothing; `None` if the
        operator is not known.
    """
    flows_by_output = _STATEFUL_OPS.get((domain, op_type))
    if flows_by_output is not None:
        return flows_by_output.get(output, ())
    if domain == _QUALCOMM_DOMAIN and op_type in _CTX_SCATTERS:
        return OperandFlow(0), OperandFlow(-1, overwrites=True)
    if domain == _QUALCOMM_DOMAIN and op_type in _CTX_GATHERS:
        return (_PLAIN_MOVE,)
    if domain != "":
        return None
    if op_type in _MOVE_OPS:
        return (_PLAIN_MOVE,)
    if op_type in _ELEMENTWISE_OPS:
        return tuple(OperandFlow(operand, is_computed=True) for operand in range(operand_count))
    if op_type == "Concat":
        return tuple(OperandFlow(operand) for operand in range(operand_count))
    if op_type == "SequenceConstruct":
        return tuple(
            OperandFlow(operand, makes_new_state=False) for operand in range(operand_count)
        )
    return _JOIN_OPS.get(op_type, ())


@lru_cache(maxsize=1024)
def find_carried_operands(domain: str, op_type: str, operand_count: int) -> frozenset[int]:
    """Return the positions of the operands that may be carried into any output.

    Takes the same arguments as `find_operand_flows`; all positions if the operator
    is not known.
    """
    output_count = 1 + max(_STATEFUL_OPS.get((domain, op_type), {0: ()}))
    operands: set[int] = set()
    for output in range(output_count):
        flows = find_operand_flows(domain, op_type, output, operand_count)
        if flows is None:
            return frozenset(range(operand_count))
        operands.update(flow.operand % operand_count for flow in flows if operand_count)
    return frozenset(operands)
