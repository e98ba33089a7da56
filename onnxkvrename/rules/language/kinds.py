"""Kinds that a profile describes by a table: roles, update, axes, parts beside others, sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from onnxkvrename.documents import ObjectReader
from onnxkvrename.rules.profile import (
    AXES,
    CACHE_KINDS,
    ROLES,
    SIDES,
    UPDATES,
    BranchRule,
    KindRule,
)


class KindTable(NamedTuple):
    """The table of a kind.

    Attributes:
        parts: The parts of a layer, without those beside others.
        rule: The other properties of the kind.
        update: How its buffers should be updated, empty if the table does not say.
    """

    parts: tuple[str, ...]
    rule: KindRule
    update: str


def parse_kind(table: ObjectReader) -> KindTable:
    """Parse the table of a kind, ``[kv.kinds.NAME]``.

    Its other keys name parts as its ``roles`` do, or as its ``parts`` if it has no roles.

    Raises:
        UnreadableTextError: A value cannot be used; the message names the key and valid values.
    """
    parts_by_name = _read_parts(table)
    names = parts_by_name.keys()
    beside = _read_beside(table, names)
    optional = table.read_strings("optional", default=[])
    _check_names(table, "optional", optional, names)
    rule = KindRule(
        cache=_read_choice(table, "kind", CACHE_KINDS),
        roles={part: name for name, part in parts_by_name.items() if "roles" in table.values},
        axes={parts_by_name[name]: axes for name, axes in _read_axes(table, names).items()},
        optional=frozenset(parts_by_name[name] for name in optional),
        beside={parts_by_name[name]: parts_by_name[main] for name, main in beside.items()},
        alone=tuple(_read_choices(table, "alone", SIDES)),
    )
    update = _read_choice(table, "update", UPDATES)
    table.reject_unread_keys()
    return KindTable(
        tuple(part for name, part in parts_by_name.items() if name not in beside), rule, update
    )


def parse_branch(table: ObjectReader) -> BranchRule:
    """Parse a table ``[[branch]]``.

    Raises:
        UnreadableTextError: A value is missing or cannot be used.
    """
    name = table.read_string("input")
    if "first" not in table.values:
        raise table.build_error(
            "first", "is missing: true or false, the value of the input in the step without a cache"
        )
    rule = BranchRule(name, table.read_boolean("first", default=False))
    table.reject_unread_keys()
    return rule


def _read_parts(table: ObjectReader) -> dict[str, str]:
    """Return the parts of a kind by the names that the table uses for them."""
    if ("roles" in table.values) == ("parts" in table.values):
        problem = 'needs either roles, such as { key = "past_key" }, or parts, such as ["a"]'
        raise table.build_error("roles", problem)
    if "parts" in table.values:
        parts_by_name = {part: part for part in table.read_strings("parts")}
    else:
        roles = table.read_object("roles", "a table of the parts with each role")
        parts_by_name = {role: roles.read_string(role) for role in roles.values}
        for role in parts_by_name:
            if role not in ROLES:
                raise roles.build_error(role, f"is not a role; the roles are {', '.join(ROLES)}")
        if len(set(parts_by_name.values())) < len(parts_by_name):
            raise table.build_error("roles", "gives one part two roles; remove one of them")
    if not parts_by_name:
        raise table.build_error(
            "parts" if "parts" in table.values else "roles", "does not list any part"
        )
    return parts_by_name


def _read_beside(table: ObjectReader, names: Iterable[str]) -> dict[str, str]:
    beside = table.read_object(
        "beside", "a table of parts, each with the part that it moves with", {}
    )
    pairs = {name: beside.read_string(name) for name in beside.values}
    _check_names(table, "beside", [*pairs, *pairs.values()], names)
    for name, main in pairs.items():
        if main in pairs:
            raise beside.build_error(
                name, f"moves with {main}, which moves with another part itself"
            )
    return pairs


def _read_axes(table: ObjectReader, names: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
    """Return words for the axes of each part: one list for all, or a table by part."""
    if isinstance(table.values.get("axes"), list):
        return dict.fromkeys(names, _read_axis_list(table, "axes"))
    by_part = table.read_object("axes", "a list of axes, or a table of them by part", default={})
    _check_names(table, "axes", by_part.values, names)
    return {name: _read_axis_list(by_part, name) for name in by_part.values}


def _read_axis_list(table: ObjectReader, key: str) -> tuple[str, ...]:
    axes = _read_choices(table, key, AXES)
    for axis in axes:
        if axes.count(axis) > 1:
            raise table.build_error(key, f"has {axis} twice; each axis needs its own word")
    return tuple(axes)


def _read_choices(table: ObjectReader, key: str, choices: Iterable[str]) -> list[str]:
    values = table.read_strings(key, default=[])
    for value in values:
        if value not in choices:
            raise table.build_error(key, f"{value} is not one of {', '.join(choices)}")
    return values


def _read_choice(table: ObjectReader, key: str, choices: Iterable[str]) -> str:
    """Return one of some words, empty if the key is not there."""
    value = table.read_string(key, "")
    if key in table.values and value not in choices:
        raise table.build_error(key, f"must be one of {', '.join(choices)}")
    return value


def _check_names(table: ObjectReader, key: str, used: Iterable[str], names: Iterable[str]) -> None:
    for name in used:
        if name not in names:
            raise table.build_error(key, f"{name} is not one of {', '.join(names)}")
