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


class Step(NamedTuple):
    """How one operand is carried into an output.

    ``operand`` is its position, -1 the last. ``written``: its values are written
    over the values of another operand. ``changed``: they are computed with.
    ``updates``: the operator makes a new state of what it is given, rather than
    hand it on.
    """

    operand: int
    written: bool = False
    changed: bool = False
    updates: bool = True


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MOVED = Step(0, updates=False)
_MOVING = _words("""
    Identity Cast CastLike BitCast Reshape Flatten Squeeze Unsqueeze Transpose Slice Split Expand
    Tile Pad Gather GatherElements GatherND DepthToSpace SpaceToDepth Compress ReverseSequence
    Trilu Dropout CenterCropPad QuantizeLinear DequantizeLinear Optional OptionalGetElement
    SequenceAt SequenceErase SplitToSequence
""")
_ELEMENTWISE = _words("""
    Add Sub Mul Div Pow Mod Min Max Mean Sum And Or Xor Not BitShift BitwiseAnd BitwiseNot
    BitwiseOr BitwiseXor Abs Neg Sign Ceil Floor Round Reciprocal Sqrt Exp Log Erf Clip
    Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh Atanh Sigmoid HardSigmoid HardSwish
    Swish Relu LeakyRelu ThresholdedRelu PRelu Elu Selu Celu Gelu Mish Shrink Softplus Softsign
""")
_SHAPE_ONLY = _words("""
    Shape Size EyeLike RandomNormalLike RandomUniformLike SequenceLength OptionalHasElement
""")
_SCATTERED = (Step(0), Step(2, written=True))
_JOINED: Mapping[str, tuple[Step, ...]] = {
    "Where": (Step(1), Step(2)),
    "Scatter": _SCATTERED,
    "ScatterElements": _SCATTERED,
    "ScatterND": _SCATTERED,
    "TensorScatter": (Step(0), Step(1, written=True)),
    "ConcatFromSequence": (Step(0),),
    "SequenceInsert": (Step(0), Step(1, written=True)),
}

_STATE = Step(3, changed=True)
_STATES: Mapping[tuple[str, str], Mapping[int, tuple[Step, ...]]] = {
    ("", "Attention"): {1: (Step(4), Step(1, written=True)), 2: (Step(5), Step(2, written=True))},
    ("", "LinearAttention"): {1: (_STATE,)},
    ("", "CausalConvWithState"): {1: (Step(3), Step(0, written=True))},
    ("", "GRU"): {1: (Step(5, changed=True),)},
    ("", "RNN"): {1: (Step(5, changed=True),)},
    ("", "LSTM"): {1: (Step(5, changed=True),), 2: (Step(6, changed=True),)},
    ("com.microsoft", "Attention"): {1: (Step(4),)},
    ("com.microsoft", "CausalConvWithState"): {1: (Step(3), Step(0, written=True))},
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): {1: (Step(5),), 2: (Step(6),)},
    ("com.microsoft", "GroupQueryAttention"): {1: (Step(3),), 2: (Step(4),)},
    ("com.microsoft", "LinearAttention"): {1: (_STATE,)},
    ("com.microsoft", "MultiHeadAttention"): {1: (Step(6),), 2: (Step(7),)},
    ("com.microsoft", "PagedAttention"): {1: (Step(3),), 2: (Step(4),)},
    ("com.microsoft", "SparseAttention"): {1: (Step(3),), 2: (Step(4),)},
}
"""Operators with state of their own: for each output that hands a state on, what it is made of."""

_QUALCOMM = "com.qualcomm.cloud"
_CTX_SCATTERS = _words("CtxScatter CtxScatter3D CtxScatterCB CtxScatterCB3D CtxScatterPaged")
_CTX_GATHERS = _words(
    "CtxGather CtxGather3D CtxGatherCB CtxGatherCB3D CtxGatherBlockedKV CtxGatherPaged"
)


def looks_at_shape(domain: str, op_type: str) -> bool:
    """Whether the values of the operands do not matter."""
    return domain == "" and op_type in _SHAPE_ONLY


def is_scatter(domain: str, op_type: str) -> bool:
    """Whether this is one of QEfficient's scatters, known by name also where it has a body."""
    return domain == _QUALCOMM and op_type in _CTX_SCATTERS


@lru_cache(maxsize=1024)
def carried(domain: str, op_type: str, output: int, operands: int) -> tuple[Step, ...] | None:
    """How an operator with so many operands makes one of its outputs.

    Empty where it carries nothing, but mixes or creates; ``None`` where nothing
    is known of the operator. The default domain is the empty string.
    """
    states = _STATES.get((domain, op_type))
    if states is not None:
        return states.get(output, ())
    if domain == _QUALCOMM and op_type in _CTX_SCATTERS:
        return Step(0), Step(-1, written=True)
    if domain == _QUALCOMM and op_type in _CTX_GATHERS:
        return (_MOVED,)
    if domain != "":
        return None
    if op_type in _MOVING:
        return (_MOVED,)
    if op_type in _ELEMENTWISE:
        return tuple(Step(operand, changed=True) for operand in range(operands))
    if op_type == "Concat":
        return tuple(Step(operand) for operand in range(operands))
    if op_type == "SequenceConstruct":
        return tuple(Step(operand, updates=False) for operand in range(operands))
    return _JOINED.get(op_type, ())


@lru_cache(maxsize=1024)
def leads(domain: str, op_type: str, operands: int) -> frozenset[int]:
    """The operands that may be carried into any output of an operator."""
    outputs = 1 + max(_STATES.get((domain, op_type), {0: ()}))
    steps = [carried(domain, op_type, output, operands) for output in range(outputs)]
    if None in steps:
        return frozenset(range(operands))
    positions = {step.operand % operands for each in steps for step in each or () if operands}
    return frozenset(at for at in positions if at < operands)
