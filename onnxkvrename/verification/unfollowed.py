"""Find inputs that may be carried into an output in a way that is not followed.

Where a packed cache goes through a custom operator before the new positions are joined to it,
only these can be followed to the output. So what is followed proves nothing there: the cache may
be another input. An input may be carried on unseen

- by an operator that is not known, and that is given nothing else but constants: it may unpack
  the input, or change its precision;
- by one that is given more, as attention is. Then it matters only of an input that is not known
  to be a state of another output;
- in another form: a sequence, an optional value, or a packed integer.

What is mixed by a known operator, as a projection does, is new.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.model.signature import UNDECLARED, Dim, Value
from onnxkvrename.verification.constants import SmallConstants
from onnxkvrename.verification.graph_bodies import FunctionKey, ModelGraph, Operation
from onnxkvrename.verification.node_effects import find_flows, find_lost_operands
from onnxkvrename.verification.operators import (
    find_carried_operands,
    is_constant_maker,
    is_followed,
)
from onnxkvrename.verification.provenance import NodeLocation
from onnxkvrename.verification.tracing import Transfer, list_positions, trace

_SMALL_DTYPES = frozenset({"UINT8", "INT8", "UINT4", "INT4", "UINT2", "INT2"})
_PACKED_DTYPES = frozenset({"INT16", "UINT16", "INT32", "UINT32", "UINT64"})
"""Integers that may hold several small ones; those of 64 bits with a sign are positions."""
_OTHER_DTYPES = ("BOOL", "STRING", "COMPLEX64", "COMPLEX128")
_CASTING_OPS = frozenset(
    (
        *("Cast", "CastLike", "BitCast"),
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
    )
)
_CONTAINERS = ("optional(", "sequence(", "sparse_tensor(", "map(", "opaque(")
_MIN_RANK = 3
"""The axes of the smallest cache: batch, context and size."""


class StateClaim(NamedTuple):
    """An input that an output seems to be a later state of."""

    input: Value
    output: Value


class UnfollowedInput(NamedTuple):
    """An input that an output may be a later state of, though nothing shows it.

    Attributes:
        name: The input.
        reason: Why it is not followed.
    """

    name: str
    reason: str


def find_unfollowed_inputs(
    graph: ModelGraph,
    claims: Sequence[StateClaim],
    *,
    follows_all: bool,
    are_types_guessed: bool = False,
) -> dict[str, UnfollowedInput]:
    """Return outputs of which another input may be the state, each with that input.

    Args:
        graph: The graph of a model.
        claims: All outputs that seem to be later states of inputs.
        follows_all: Whether a walk from these outputs met only what it follows: then only inputs
            of some types are in question, and without one there is no walk.
        are_types_guessed: Whether only the graph says what an output without a declared type
            belongs to: then it is in doubt if it may have another type than its input.
    """
    weights = graph.main.constants
    values = {value.name: value for value in graph.main.types if value.name not in weights}
    numbers = {name: number for number, name in enumerate(values)}
    claims = [claim for claim in claims if claim.input.name in numbers]
    if not claims:
        return {}
    outputs = [claim.output.name for claim in claims]
    states = {claim.input.name for claim in claims}
    tokens = set(list_token_dims(values.values()))
    is_any_untyped = are_types_guessed and any(c.output.dtype == UNDECLARED for c in claims)
    others = [value for name, value in values.items() if name not in states]
    if follows_all and not (
        is_any_untyped
        or any(
            _is_packed(value, claim) and _may_be_state(value, claim, tokens, is_alone=False)
            for value in others
            for claim in claims
        )
    ):
        return {}
    found = {}
    reaches = trace(graph, _ReachTransfer(), [*values], outputs)
    for claim, reach in zip(claims, reaches, strict=True):
        own = claim.input.name
        is_untyped = are_types_guessed and claim.output.dtype == UNDECLARED
        if is_untyped and reach.retyped >> numbers[own] & 1:
            reason = "it is declared without a type, and values are cast on the way"
            found[claim.output.name] = UnfollowedInput(own, reason)
        for name, value in values.items():
            bit = 1 << numbers[name]
            if name == own or not reach.bits & bit:
                continue
            is_unfollowed = reach.alone & bit or (reach.mixed & bit and name not in states)
            is_carried = reach.carried & bit and name not in states and _is_packed(value, claim)
            is_alone = bool(reach.alone & bit)
            if (is_unfollowed or is_carried) and _may_be_state(
                value, claim, tokens, is_alone=is_alone
            ):
                reason = reach.reason if is_unfollowed else f"{value.dtype} is not followed"
                found[claim.output.name] = UnfollowedInput(name, reason)
                break
    return found


def _is_packed(value: Value, claim: StateClaim) -> bool:
    """Return whether an input may have the values of a state in another form."""
    is_small = value.dtype in _SMALL_DTYPES and value.dtype != claim.input.dtype
    return is_small or has_packed_dtype(value)


def has_packed_dtype(value: Value) -> bool:
    """Return whether a value may have those of states in a form that is not followed."""
    return value.dtype in _PACKED_DTYPES or value.dtype.startswith(_CONTAINERS)


def list_token_dims(values: Iterable[Value]) -> Iterator[Dim]:
    """Yield the sizes of the axis of tokens, as far as inputs of token ids and positions say."""
    for value in values:
        if value.dtype in ("INT32", "INT64") and value.shape and len(value.shape) <= _MIN_RANK:
            size = value.shape[-1]
            if isinstance(size, str) or (size or 0) > 1:
                yield size


def _may_be_state(
    value: Value, claim: StateClaim, tokens: Container[Dim], *, is_alone: bool
) -> bool:
    """Return whether an input may be the state instead, by its dtype and its shape.

    What has an axis for each new token is new in each step, unless the input of the claim has one
    as well. What alone goes into an unknown operator may have all of its content in one axis.
    """
    if value.dtype in _OTHER_DTYPES:
        return False
    shape, output_shape = value.shape, claim.output.shape
    if shape is None:
        return value.dtype not in ("INT64", "INT32")
    is_new = any(dim in tokens for dim in shape[1:] or shape)
    if is_new and not any(dim in tokens for dim in (claim.input.shape or ())[1:]):
        return False
    if output_shape is not None and len(shape) == len(output_shape):
        return len(shape) > 1
    if value.dtype in _SMALL_DTYPES:
        return bool(shape)
    if is_alone and value.dtype != "INT64" and any(isinstance(dim, str) for dim in shape[-1:]):
        return True  # all in one axis
    return value.dtype != "INT64" and len(shape) >= _MIN_RANK


class _Reach(NamedTuple):
    """What may be carried into a value; each a set of sources, as bits.

    Attributes:
        carried: Those that known operators carry.
        alone: Those that an unknown operator may carry, which is given no other one.
        mixed: Those that an unknown operator may carry, which is given more.
        is_new: Whether something new in each step is in it.
        retyped: Those that a known operator may have given another dtype.
        reason: Why the latter are not followed.
    """

    carried: int = 0
    alone: int = 0
    mixed: int = 0
    retyped: int = 0
    is_new: bool = False
    reason: str = ""

    @property
    def bits(self) -> int:
        """All of the sources."""
        return self.carried | self.alone | self.mixed


_NEW = _Reach(is_new=True)


class _ReachTransfer(Transfer[_Reach]):
    """What may be carried into a value, by operators that are known and others."""

    nothing = _Reach()

    def build_source(self, number: int) -> _Reach:
        return _Reach(1 << number)

    def select_operands(self, function: FunctionKey, operand_count: int) -> Container[int]:
        domain, op_type, _ = function
        if not is_followed(domain, op_type):
            return range(operand_count)
        return find_carried_operands(domain, op_type, operand_count)

    def apply_operator(
        self, operation: Operation, operands: Sequence[_Reach], constants: SmallConstants
    ) -> Sequence[_Reach]:
        """Return what a node may carry into each of its outputs."""
        lost = find_lost_operands(operation, constants)
        operands = [self.nothing if at in lost else operand for at, operand in enumerate(operands)]
        return [
            self._apply(operation, position, operands) for position in range(len(operation.outputs))
        ]

    def _apply(self, operation: Operation, position: int, operands: Sequence[_Reach]) -> _Reach:
        domain, op_type, _ = operation.function_key
        flows = find_flows(operation, position)
        if flows is None:
            return self.doubt(operands, f"{op_type} of {domain} has no body in the model", None)
        if not is_followed(domain, op_type):
            return self.doubt(operands, f"{op_type} is not followed", None)
        if not flows:
            return self.nothing if is_constant_maker(domain, op_type) else _NEW
        kept, written = (
            self.merge(
                [
                    operands[flow.operand]
                    for flow in flows
                    if flow.overwrites == overwrites and flow.operand < len(operands)
                ]
            )
            for overwrites in (False, True)
        )
        reach = kept if kept.bits else self.merge([kept, written])
        if any(flow.is_new for flow in flows):
            reach = reach._replace(carried=0, is_new=True)
        if op_type in _CASTING_OPS:
            return reach._replace(retyped=reach.bits)
        if not reach.bits and op_type.startswith("Gather"):
            return _NEW  # a row of weights for each token
        return reach

    def apply_summary(
        self, summary: _Reach, arguments: Sequence[_Reach], call: NodeLocation
    ) -> _Reach:
        """Return what a body may carry of its arguments."""
        carried, alone, mixed = (
            self.merge([arguments[at] for at in list_positions(bits)])
            for bits in (summary.carried, summary.alone, summary.mixed)
        )
        return self.merge(
            [
                carried,
                self.doubt([alone], summary.reason, None),
                self.doubt([mixed, _NEW], summary.reason, None) if mixed.bits else self.nothing,
                _NEW if summary.is_new else self.nothing,
            ]
        )._replace(retyped=carried.retyped | self._select(summary.retyped, arguments))

    def _select(self, positions: int, arguments: Sequence[_Reach]) -> int:
        """Return the sources of some arguments."""
        merged = self.merge([arguments[at] for at in list_positions(positions)])
        return merged.bits

    def merge(self, values: Sequence[_Reach], /) -> _Reach:
        carried = alone = mixed = retyped = 0
        is_new, reason = False, ""
        for value in values:
            carried |= value.carried
            alone |= value.alone
            mixed |= value.mixed
            retyped |= value.retyped
            is_new = is_new or value.is_new
            reason = reason or value.reason
        return _Reach(carried, alone, mixed, retyped, is_new, reason)

    def doubt(
        self, values: Sequence[_Reach], reason: str, location: NodeLocation | None, /
    ) -> _Reach:
        merged = self.merge(values)
        bits = merged.bits
        is_alone = not (merged.is_new or bits & (bits - 1))
        return _Reach(
            0,
            bits if is_alone else 0,
            0 if is_alone else bits,
            merged.retyped,
            merged.is_new,
            (merged.reason or reason) if bits else "",
        )
