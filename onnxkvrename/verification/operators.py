"""What operators do with their operands, as far as a buffer's way through them goes.

Three things can become of the values of an operand. They may be *carried* into
the output: as they are, or changed one by one. They may be *mixed* into every
value of it, as MatMul, Softmax and the reductions do: then the output depends on
the operand, but is no later state of it. Or only its shape is looked at.

Sources: ONNX's operator specifications (opset 28); for ``com.microsoft``
onnxruntime's ContribOperators.md; for ``com.qualcomm.cloud`` the functions that
QEfficient itself exports beside its scatters and gathers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple


class OperandFlow(NamedTuple):
    """How one operand is carried into an output.

    ``operand`` is its position, -1 the last. ``written``: its values are written
    over the values of another operand. ``changed``: they are computed with.
    ``updates``: the operator makes a new state of what it is given, rather than
    hand it on.
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
"""Operators with state of their own: for each output that hands a state on, what it is made of."""

_QUALCOMM_DOMAIN = "com.qualcomm.cloud"
_CTX_SCATTERS = _split_words("CtxScatter CtxScatter3D CtxScatterCB CtxScatterCB3D CtxScatterPaged")
_CTX_GATHERS = _split_words(
    "CtxGather CtxGather3D CtxGatherCB CtxGatherCB3D CtxGatherBlockedKV CtxGatherPaged"
)


def is_shape_only(domain: str, op_type: str) -> bool:
    """Whether the values of the operands do not matter."""
    return domain == "" and op_type in _SHAPE_ONLY_OPS


def is_ctx_scatter(domain: str, op_type: str) -> bool:
    """Whether this is one of QEfficient's scatters, known by name also where it has a body."""
    return domain == _QUALCOMM_DOMAIN and op_type in _CTX_SCATTERS


@lru_cache(maxsize=1024)
def find_operand_flows(
    domain: str, op_type: str, output: int, operands: int
) -> tuple[OperandFlow, ...] | None:
    """How an operator with so many operands makes one of its outputs.

    Empty where it carries nothing, but mixes or creates; ``None`` where nothing
    is known of the operator. The default domain is the empty string.
    """
    states = _STATEFUL_OPS.get((domain, op_type))
    if states is not None:
        return states.get(output, ())
    if domain == _QUALCOMM_DOMAIN and op_type in _CTX_SCATTERS:
        return OperandFlow(0), OperandFlow(-1, overwrites=True)
    if domain == _QUALCOMM_DOMAIN and op_type in _CTX_GATHERS:
        return (_PLAIN_MOVE,)
    if domain != "":
        return None
    if op_type in _MOVE_OPS:
        return (_PLAIN_MOVE,)
    if op_type in _ELEMENTWISE_OPS:
        return tuple(OperandFlow(operand, is_computed=True) for operand in range(operands))
    if op_type == "Concat":
        return tuple(OperandFlow(operand) for operand in range(operands))
    if op_type == "SequenceConstruct":
        return tuple(OperandFlow(operand, makes_new_state=False) for operand in range(operands))
    return _JOIN_OPS.get(op_type, ())


@lru_cache(maxsize=1024)
def find_carried_operands(domain: str, op_type: str, operands: int) -> frozenset[int]:
    """The operands that may be carried into any output of an operator."""
    outputs = 1 + max(_STATEFUL_OPS.get((domain, op_type), {0: ()}))
    steps = [find_operand_flows(domain, op_type, output, operands) for output in range(outputs)]
    if None in steps:
        return frozenset(range(operands))
    positions = {step.operand % operands for each in steps for step in each or () if operands}
    return frozenset(at for at in positions if at < operands)
