"""Check that buffers fit the profile whose names they get: how they are updated, their axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.findings import Finding, build_names_finding
from onnxkvrename.layout.updates import UNKNOWN_UPDATE, BufferUpdate
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import format_shape
from onnxkvrename.rules.kinds import find_traits
from onnxkvrename.rules.load import list_profiles, load_rules
from onnxkvrename.rules.plan import KvPair, RenamePlan
from onnxkvrename.rules.profile import NameMatch, Rules
from onnxkvrename.rules.rewrite import find_counterpart
from onnxkvrename.verification import trace_buffer_updates

_KEEPING_UPDATES = ("inplace", "shift", "once")
"""The ways to update a buffer that leave it where it is."""
_TOKEN_AXES = {"sequence", "window", "encoder"}
_UPDATE_CLAUSES: Mapping[str, tuple[str, str]] = {
    "inplace": ("is written in place", "are written in place"),
    "shift": ("is shifted in place", "are shifted in place"),
    "append": ("grows", "grow"),
    "delta": ("returns the new positions only", "return the new positions only"),
    "once": ("is written once", "are written once"),
}
"""How a buffer is updated, and how several are."""
_UNKNOWN_UPDATE_CLAUSES = (
    "is updated in a way that the graph does not show",
    "are updated in a way that the graph does not show",
)


class _Reason(NamedTuple):
    """Why a buffer does not fit a profile.

    Attributes:
        of_one: What one buffer does or has, as what follows "a buffer".
        of_many: What several do or have.
        expected: What buffers of the profile do or have instead.
    """

    of_one: str
    of_many: str
    expected: str


def check_conversion(source: ByteSource, plan: RenamePlan, rules: Rules) -> Iterator[Finding]:
    """Yield KV203 for buffers that do not fit the names of another profile, the rules' target.

    Raises:
        ReadError: The file of the model cannot be read.
    """
    updates = trace_buffer_updates(source, plan.pairs)
    reasons: dict[_Reason, list[str]] = {}
    for pair in plan.pairs:
        side = "input" if pair.input is not None else "output"
        match = rules.match(side, pair.sides[0].old_name)
        if match is None or rules.target is None:
            continue
        name = pair.sides[-1].old_name
        update = updates.get(name, UNKNOWN_UPDATE)
        meant = plan.updates_by_kind.get(pair.kind, "")
        for reason in _list_reasons(pair, match, update, meant, rules.target):
            reasons.setdefault(reason, []).append(name)
    hint = ""
    target = "" if rules.target is None else rules.target.name
    for reason, names in reasons.items():
        hint = hint or _suggest_profiles(plan, rules, updates)
        yield build_names_finding(
            "KV203",
            names,
            (
                f"belongs to a buffer {reason.of_one}, but {target}'s {reason.expected}; "
                f"programs for {target} would misuse it",
                f"belong to buffers {reason.of_many}, but {target}'s {reason.expected}; "
                f"programs for {target} would misuse them",
            ),
            hint,
        )


def _suggest_profiles(plan: RenamePlan, rules: Rules, updates: Mapping[str, BufferUpdate]) -> str:
    """Return what to do where a profile does not fit: to name those that do, if there are any.

    A profile whose caches are updated in another way than those of the one that was asked for is
    of other consumers: no names of it help.
    """
    assert rules.target is not None
    fitting = [
        name
        for name in list_profiles()
        if name != rules.name and _fits(plan, rules, updates, load_rules(name))
    ]
    export = f"a rename cannot change that: export the model as {rules.target.name} requires"
    choices = " or ".join(f"`--to {name}`" for name in fitting[:2])
    return f"{export}, or use a profile that fits: {choices}" if choices else export


def _fits(
    plan: RenamePlan, rules: Rules, updates: Mapping[str, BufferUpdate], target: Rules
) -> bool:
    """Return whether a profile has names for all buffers, and each is what they say."""
    for pair in plan.pairs:
        side = "input" if pair.input is not None else "output"
        match = rules.match(side, pair.sides[0].old_name)
        if match is None or find_counterpart(match, target) is None:
            return False
        if _find_update(match, target) != _find_update(match, rules.target):
            return False
        update = updates.get(pair.sides[-1].old_name, UNKNOWN_UPDATE)
        meant = plan.updates_by_kind.get(pair.kind, "")
        if any(_list_reasons(pair, match, update, meant, target)):
            return False
    return True


def _find_update(match: NameMatch, target: Rules | None) -> str:
    """Return how a profile says that a buffer is updated; empty if it does not say."""
    counterpart = None if target is None else find_counterpart(match, target)
    if counterpart is None:
        return ""
    return counterpart.kind.update


def _list_reasons(
    pair: KvPair, match: NameMatch, update: BufferUpdate, meant: str, target: Rules
) -> Iterator[_Reason]:
    counterpart = find_counterpart(match, target)
    if counterpart is None:
        return
    kind, expected = counterpart.kind, counterpart.kind.update
    if len(pair.sides) == 2 and not _is_update(update, meant, expected):
        of_one, of_many = _UPDATE_CLAUSES.get(update.kind, _UNKNOWN_UPDATE_CLAUSES)
        axis = "" if update.axis is None else f" along axis {update.axis}"
        needed = _UPDATE_CLAUSES[expected][1]
        yield _Reason(f"that {of_one}{axis}", f"that {of_many}{axis}", needed)
    if len(pair.sides) == 1 and not {"input" if pair.input else "output"} <= {*kind.alone}:
        missing = "input" if pair.input is None else "output"
        clause = f"without an {missing}"
        yield _Reason(clause, clause, "have both sides")
    traits = find_traits(kind.cache)
    axes = kind.axes.get(counterpart.part, () if traits is None else traits.axes)
    shape = next((side.value.shape for side in pair.sides if side.value.shape), ())
    if axes and shape and not _are_axes(pair.axes or ("",) * len(shape), axes):
        words = ", ".join(word or "?" for word in pair.axes)
        known = f" ({words})" if words else ""
        clause = f"with axes {format_shape(shape)}{known}"
        yield _Reason(clause, clause, f"have {', '.join(axes)}")


def _is_update(update: BufferUpdate, meant: str, expected: str) -> bool:
    """Return whether a buffer is updated as expected; where the graph is not clear, as meant.

    A buffer that stays in place can be fed back like one that grows, but not the reverse.
    """
    if not expected or update.kind == expected:
        return True
    if update.kind == "unknown":
        return meant == expected
    return update.kind in _KEEPING_UPDATES and expected in (*_KEEPING_UPDATES, "append")


def _are_axes(axes: Sequence[str], expected: Sequence[str]) -> bool:
    if len(axes) != len(expected):
        return False
    return all(
        not word or word == other or {word, other} <= _TOKEN_AXES
        for word, other in zip(axes, expected, strict=True)
    )
