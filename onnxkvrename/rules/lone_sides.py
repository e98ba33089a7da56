"""Find where the graph may have sides of buffers under names that no rule matches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxkvrename.model.signature import Value, is_dtype_compatible
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.load import find_profiles
from onnxkvrename.rules.plan import KvPair, RenamePlan
from onnxkvrename.rules.profile import Rules

_NEVER_CACHES = frozenset(("INT64", "INT32", "BOOL", "STRING"))
"""Dtypes that no cache has."""


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


def list_unmatched(models: Sequence[KvModel], rules: Rules) -> list[int]:
    """Return the models without buffers, beside others, of which the graph may have caches.

    Such a model has an input and an output of the same dtype, with as many axes. It fills no
    buffer of another one, and no other profile knows its names: those are said in any case. Rules
    of the user's own leave out what they leave out.
    """
    if not rules.is_built_in or not any(model.pairs for model in models):
        return []
    return [
        index
        for index, model in enumerate(models)
        if not (model.pairs or model.plan.feeds or model.plan.name_map)
        and any(
            _may_be_other_side(value, output)
            for value in model.signature.inputs
            if value.dtype not in _NEVER_CACHES
            for output in model.signature.outputs
        )
        and not any(find_profiles(model.output_names))
    ]
