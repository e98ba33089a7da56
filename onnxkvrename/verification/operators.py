"""Describe what operators do with the values of their operands.

An operator can use an operand in three ways. Its values may be *carried* into the
output, unchanged or changed one by one. They may be *mixed* into every value of the
output, as by MatMul, Softmax and the reductions: then the output depends on the
operand, but is not a later state of it. Or only the operand's shape is used.

Where values are carried, the output may have another size than the operand: longer by
what Concat joins to it, or only a part of it.

Sources: ONNX's operator specifications (opset 28,
https://onnx.ai/onnx/operators/); for `com.microsoft` onnxruntime's
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md; for
`com.qualcomm.cloud` the local functions that QEfficient exports with its scatters
and gathers.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag
from functools import lru_cache
from typing import NamedTuple


class SizeChange(IntFlag):
    """How the size of an output differs from that of the operand that it carries on."""

    NONE = 0
    APPENDS = 1
    """It is longer by other values."""
    FITS = 2
    """It is longer, unless the operand has room already, or both share one buffer."""
    CUTS = 4
    """It has some of the operand's values, or has them in another order."""
    SHIFTS = 8
    """It has the operand's size: new values push old ones out."""
    RESIZES = 16
    """It has a size that does not follow from the operand's."""
    MOVES_AXES = 32
    """Its axes are others, so that an axis that grew before is no longer known."""
    SEVERAL = 64
    """These are the changes of many paths together, in no order."""
    IS_FIRST = 128
    """What is appended comes after it, where a cut that keeps the first values drops it."""
    KEEPS_FIRST = 256
    """It is cut so that its first values are left."""
    DROPS_NEW = 512
    """What was appended may be cut off again."""
    DROPS_AXIS = 1024
    """It may have fewer axes, as where one position is chosen."""


NO_CHANGE = SizeChange.NONE
"""A shorter way to it: a trace asks for it at every node."""


class OperandFlow(NamedTuple):
    """The way in which one operand is carried into an output.

    Attributes:
        operand: The position of the operand, -1 for the last.
        overwrites: Its values are written over the values of another operand.
        is_computed: Its values are computed with.
        is_new: Each value that comes out is another one, as that of Sigmoid, or of x * f(x): it
            is neither a copy, nor a multiple, nor a sum.
        makes_new_state: The output is a new state, rather than the operand moved.
        size_change: How the size of the output differs from the operand's.
        axis: The axis along which the output is longer, cut or written to, or the attribute that
            says it; ``None`` if neither is known.
        default_axis: The axis if the node does not have that attribute.
        fixing_attribute: The attribute that, if it is not 0, makes the size change
            `fixed_change` instead, in a buffer of one size; empty if there is none.
        fixed_change: What happens to the size then.
        room_operand: The operand without which nothing has room, so that `SizeChange.FITS` is
            `SizeChange.APPENDS`; ``None`` if no operand decides it.
        is_written: Whether other values are written over some of the operand's, along `axis`.
    """

    operand: int
    overwrites: bool = False
    is_computed: bool = False
    is_new: bool = False
    makes_new_state: bool = True
    size_change: SizeChange = SizeChange.NONE
    axis: int | str | None = None
    default_axis: int | None = None
    fixing_attribute: str = ""
    fixed_change: SizeChange = SizeChange.NONE
    room_operand: int | None = None
    is_written: bool = False


def _split_words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _build_moves(size_change: SizeChange, names: str) -> dict[str, OperandFlow]:
    flow = OperandFlow(0, makes_new_state=False, size_change=size_change)
    return dict.fromkeys(names.split(), flow)


_PLAIN_MOVE = OperandFlow(0, makes_new_state=False)
_CUT = OperandFlow(0, makes_new_state=False, size_change=SizeChange.CUTS)
_MOVE_OPS: Mapping[str, OperandFlow] = {
    **_build_moves(
        SizeChange.NONE,
        "Identity Cast CastLike BitCast ReverseSequence Trilu Dropout QuantizeLinear "
        "DequantizeLinear DynamicQuantizeLinear Optional OptionalGetElement",
    ),
    **_build_moves(SizeChange.MOVES_AXES, "Reshape Flatten Squeeze Unsqueeze Transpose"),
    **_build_moves(SizeChange.CUTS, "Slice GatherElements SequenceErase"),
    **_build_moves(
        SizeChange.CUTS | SizeChange.DROPS_AXIS, "GatherND Compress SequenceAt SplitToSequence"
    ),
    "Split": _CUT._replace(axis="axis", default_axis=0),
    "Gather": _CUT._replace(
        size_change=SizeChange.CUTS | SizeChange.DROPS_AXIS, axis="axis", default_axis=0
    ),
    **_build_moves(
        SizeChange.RESIZES | SizeChange.MOVES_AXES,
        "Expand Tile Pad DepthToSpace SpaceToDepth CenterCropPad",
    ),
}
_ELEMENTWISE_OPS = _split_words("""
    Add Sub Mul Div Pow Mod Min Max Mean Sum And Or Xor Not BitShift BitwiseAnd BitwiseNot
    BitwiseOr BitwiseXor Abs Neg Sign Ceil Floor Round Reciprocal Sqrt Exp Log Erf Clip
    Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh Atanh Sigmoid HardSigmoid HardSwish
    Swish Relu LeakyRelu ThresholdedRelu PRelu Elu Selu Celu Gelu Mish Shrink Softplus Softsign
""")
_COPYING_OPS = _split_words("""
    Add Sub Mul Div Mod Min Max Mean Sum Neg Ceil Floor Round Clip BitShift BitwiseAnd BitwiseOr
""")
"""The elementwise operators whose output may be an operand, a multiple or a part of it, or a sum.
"""
_SHAPE_ONLY_OPS = _split_words("""
    Shape Size EyeLike RandomNormalLike RandomUniformLike SequenceLength OptionalHasElement
""")
_CONSTANT_OPS = frozenset(("Constant", "ConstantOfShape", "Range", "EyeLike", "SequenceEmpty"))
_SCATTER_FLOWS = (
    OperandFlow(0, axis="axis", default_axis=0, is_written=True),
    OperandFlow(2, overwrites=True),
)
_JOIN_OPS: Mapping[str, tuple[OperandFlow, ...]] = {
    "Where": (OperandFlow(1), OperandFlow(2)),
    "Scatter": _SCATTER_FLOWS,
    "ScatterElements": _SCATTER_FLOWS,
    "ScatterND": (OperandFlow(0, is_written=True), OperandFlow(2, overwrites=True)),
    "TensorScatter": (
        OperandFlow(0, axis="axis", default_axis=-2, is_written=True),
        OperandFlow(1, overwrites=True),
    ),
    "ConcatFromSequence": (OperandFlow(0, size_change=SizeChange.RESIZES | SizeChange.MOVES_AXES),),
    "SequenceInsert": (
        OperandFlow(0, size_change=SizeChange.RESIZES),
        OperandFlow(1, overwrites=True),
    ),
}

_LINEAR_STATE = OperandFlow(3, is_computed=True)
_CONV_STATE = (OperandFlow(3, size_change=SizeChange.SHIFTS), OperandFlow(0, overwrites=True))


def _append(operand: int, axis: int = 2, fixing_attribute: str = "") -> tuple[OperandFlow, ...]:
    """Return the flow of a past that is longer by the new positions."""
    return (
        OperandFlow(
            operand,
            size_change=SizeChange.APPENDS,
            axis=axis,
            fixing_attribute=fixing_attribute,
        ),
    )


def _fit(operand: int, room_operand: int | None = None) -> tuple[OperandFlow, ...]:
    """Return the flow of a past that is longer, unless its buffer has room or is a window."""
    return (
        OperandFlow(
            operand,
            size_change=SizeChange.FITS,
            axis=2,
            fixing_attribute="sliding_window_cache",
            fixed_change=SizeChange.SHIFTS,
            room_operand=room_operand,
        ),
    )


_STATEFUL_OPS: Mapping[tuple[str, str], Mapping[int, tuple[OperandFlow, ...]]] = {
    ("", "Attention"): {
        1: (*_append(4), OperandFlow(1, overwrites=True)),
        2: (*_append(5), OperandFlow(2, overwrites=True)),
    },
    ("", "LinearAttention"): {1: (_LINEAR_STATE,)},
    ("", "CausalConvWithState"): {1: _CONV_STATE},
    ("", "GRU"): {1: (OperandFlow(5, is_computed=True),)},
    ("", "RNN"): {1: (OperandFlow(5, is_computed=True),)},
    ("", "LSTM"): {1: (OperandFlow(5, is_computed=True),), 2: (OperandFlow(6, is_computed=True),)},
    ("com.microsoft", "Attention"): {1: _append(4, 3, "past_present_share_buffer")},
    ("com.microsoft", "CausalConvWithState"): {1: _CONV_STATE},
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): {
        1: _append(5, fixing_attribute="past_present_share_buffer"),
        2: _append(6, fixing_attribute="past_present_share_buffer"),
    },
    ("com.microsoft", "GroupQueryAttention"): {1: _fit(3), 2: _fit(4)},
    ("com.microsoft", "LinearAttention"): {1: (_LINEAR_STATE,)},
    ("com.microsoft", "MultiHeadAttention"): {1: _fit(6, 8), 2: _fit(7, 8)},
    ("com.microsoft", "PagedAttention"): {
        1: (OperandFlow(3),),
        2: (OperandFlow(4),),
        3: (OperandFlow(17),),
        4: (OperandFlow(18),),
    },
    ("com.microsoft", "SparseAttention"): {1: (OperandFlow(3),), 2: (OperandFlow(4),)},
}
"""Operators with a state of their own: the flows into each output that carries a state."""

_UNFOLLOWED_OPS = frozenset(("SequenceMap",))
"""ONNX's own operators that carry values in a way that is not followed."""
_QUALCOMM_DOMAIN = "com.qualcomm.cloud"
_CTX_SCATTERS = _split_words("CtxScatter CtxScatter3D CtxScatterCB CtxScatterCB3D CtxScatterPaged")
_CTX_GATHERS = _split_words(
    "CtxGather CtxGather3D CtxGatherCB CtxGatherCB3D CtxGatherBlockedKV CtxGatherPaged"
)


def is_shape_only(domain: str, op_type: str) -> bool:
    """Return whether the output depends on the shapes of the operands, but not on their values."""
    return domain == "" and op_type in _SHAPE_ONLY_OPS


def is_constant_maker(domain: str, op_type: str) -> bool:
    """Return whether an operator makes a constant, or what follows from shapes alone."""
    return is_shape_only(domain, op_type) or (domain == "" and op_type in _CONSTANT_OPS)


@lru_cache(maxsize=1024)
def is_followed(domain: str, op_type: str) -> bool:
    """Return whether it is known what an operator carries from its operands."""
    is_known = find_operand_flows(domain, op_type, 0, 1) is not None
    return is_known and (domain != "" or op_type not in _UNFOLLOWED_OPS)


def is_ctx_scatter(domain: str, op_type: str) -> bool:
    """Return whether this is one of QEfficient's scatters, known by name, with a body or not."""
    return domain == _QUALCOMM_DOMAIN and op_type in _CTX_SCATTERS


@lru_cache(maxsize=1024)
def find_operand_flows(
    domain: str, op_type: str, output: int, operand_count: int
) -> tuple[OperandFlow, ...] | None:
    """Return which operands an operator carries into one of its outputs.

    ONNX's own operators have an empty domain. Empty if the operator mixes or creates and carries
    nothing; `None` if it is not known.
    """
    flows_by_output = _STATEFUL_OPS.get((domain, op_type))
    if flows_by_output is not None:
        return flows_by_output.get(output, ())
    if domain == _QUALCOMM_DOMAIN and op_type in _CTX_SCATTERS:
        return OperandFlow(0), OperandFlow(-1, overwrites=True)
    if domain == _QUALCOMM_DOMAIN and op_type in _CTX_GATHERS:
        return (_CUT,)
    if domain != "":
        return None
    if op_type == "DynamicQuantizeLinear" and output:
        return ()
    if op_type == "Split" and output == 0:
        return (_MOVE_OPS[op_type]._replace(size_change=SizeChange.CUTS | SizeChange.KEEPS_FIRST),)
    if op_type in _MOVE_OPS:
        return (_MOVE_OPS[op_type],)
    if op_type in _ELEMENTWISE_OPS:
        is_new = op_type not in _COPYING_OPS
        return tuple(
            OperandFlow(operand, is_computed=True, is_new=is_new)
            for operand in range(operand_count)
        )
    if op_type == "Concat" and operand_count == 1:
        return (_PLAIN_MOVE,)
    if op_type == "Concat":
        first = SizeChange.APPENDS | SizeChange.IS_FIRST
        changes = (first, *[SizeChange.APPENDS] * (operand_count - 1))
        return tuple(
            OperandFlow(operand, size_change=change, axis="axis")
            for operand, change in enumerate(changes)
        )
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
    if op_type == "Einsum" and not domain and operand_count == 1:
        return frozenset({0})  # it may only reorder axes
    output_count = 1 + max(_STATEFUL_OPS.get((domain, op_type), {0: ()}))
    operands: set[int] = set()
    for output in range(output_count):
        flows = find_operand_flows(domain, op_type, output, operand_count)
        if flows is None:
            return frozenset(range(operand_count))
        operands.update(flow.operand % operand_count for flow in flows if operand_count)
    return frozenset(operands)
