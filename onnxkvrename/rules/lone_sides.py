"""Find the buffers with one side whose other side may have a name that no rule matches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxkvrename.model.signature import Value, is_dtype_compatible
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import KvPair, RenamePlan


def has_lone_sides(model: KvModel) -> bool:
    """Return whether a buffer of a model may have its other side under another name."""
    return any(True for _ in list_lone_sides(model))


def list_lone_sides(model: KvModel) -> Iterator[KvPair]:
    """Yield the buffers with one side, if a value without a rule may be the other side.

    That value has the same dtype and as many axes. Where a token is removed, a side that may be
    alone is not in question: an earlier rename gave it the token.
    """
    plan = model.plan
    for pair in plan.pairs:
        if len(pair.sides) == 2 or (pair.may_be_alone and plan.token_change.strip):
            continue
        others = model.signature.inputs if pair.input is None else model.signature.outputs
        if any(_may_be_other_side(pair.sides[0].value, value) for value in _skip(others, plan)):
            yield pair


def _skip(values: Sequence[Value], plan: RenamePlan) -> Iterator[Value]:
    """Yield the values that no rule matches."""
    return (value for value in values if value.name not in plan.old_names)


def _may_be_other_side(own: Value, other: Value) -> bool:
    """Return whether two values have the same dtype, and as many axes as far as they say."""
    if own.name == other.name or not is_dtype_compatible(own, other):
        return False
    return own.shape is None or other.shape is None or len(own.shape) == len(other.shape)
