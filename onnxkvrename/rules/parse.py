"""Parse rules: a profile or a file in TOML, with an explanation of each mistake."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.documents import ObjectReader, UnreadableTextError, parse_toml
from onnxkvrename.errors import RulesError
from onnxkvrename.findings import find_similar
from onnxkvrename.rules.patterns import ListedName, NameTable, Pattern, compile_pattern
from onnxkvrename.rules.profile import (
    AXES,
    CACHE_KINDS,
    DIM_WORDS,
    OPTIONAL_PART,
    PLACEHOLDER,
    PREFIXED,
    ROLES,
    SIDES,
    STAGES,
    UPDATES,
    BranchRule,
    FeedBackRule,
    KeepRule,
    KindRule,
    KvRule,
    PartRule,
    Rules,
    SetRule,
    SidecarRule,
    split_sum,
)

_TOP_KEYS = (
    *("description", "retained", "update", "kv", "keep", "suffixes", "feed_back", "set"),
    *("sidecar", "dims", "branch"),
)
_KV_KEYS = (
    *("input", "output", "input_name", "output_name", "kinds", "update", "by_shape", "defaults"),
    "names",
)
_PAGE = "docs/rules.md explains each key"
_KV_EXAMPLES = {
    "input": r"input = 'past\.(?P<layer>[0-9]+)\.(?P<buffer>key|value)"
    r"(?:_(?P<token>[A-Za-z0-9]+))?'",
    "output": r"output = 'present\.(?P<layer>[0-9]+)\.(?P<buffer>key|value)"
    r"(?:_(?P<token>[A-Za-z0-9]+))?'",
    "input_name": 'input_name = "past.{layer}.{buffer}[_{token}]"',
    "output_name": 'output_name = "present.{layer}.{buffer}[_{token}]"',
    "kinds": 'kinds = { attention = ["key", "value"] }',
    "update": 'update = { attention = "append" }',
    "defaults": 'defaults = { suffix = "_RetainedState" }',
}
"""A line for each key of [[kv]] that has a form of its own."""
_GROUPS = {
    "token": ("token", "(?:_(?P<token>[A-Za-z0-9]+))?"),
    "layer": ("number of the layer", "(?P<layer>[0-9]+)"),
    "buffer": ("part of the layer", "(?P<buffer>key|value)"),
    "first": ("first layer", "(?P<first>[0-9]+)"),
    "end": ("layer after the last", "(?P<end>[0-9]+)"),
}
"""For each group that a pattern needs, what it matches, and how it is mostly written."""


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


def parse_rules(text: str, name: str) -> Rules:
    """Parse a profile.

    Args:
        text: The profile, in TOML.
        name: Its name in messages: that of the profile, or the path of the file.

    Raises:
        RulesError: The text is not a profile; the message names the table and the key, or the
            line where it is not TOML.
    """
    try:
        return _parse_rules(ObjectReader(parse_toml(text), separator=": "), name)
    except ValueError as error:
        raise RulesError(str(error), path=name, hint=_choose_hint(error)) from None


def _parse_rules(document: ObjectReader, name: str) -> Rules:
    _check_keys(document, _TOP_KEYS)
    kv_rules = tuple(map(_parse_kv_rule, _read_tables(document, "kv")))
    if not kv_rules:
        raise document.build_error("kv", "is missing: a file of rules needs at least one [[kv]]")
    kinds = {kind for rule in kv_rules for kind in rule.buffers_by_kind}
    document.read_string("description", default="")
    has_retained = "retained" in document.values
    suffixes = _read_table(document, "suffixes")
    rules = Rules(
        name=name,
        kv_rules=kv_rules,
        keep_rules=tuple(map(_parse_keep_rule, _read_tables(document, "keep"))),
        retained_pattern=_read_pattern(document, "retained") if has_retained else None,
        normal_suffixes={suffix: suffixes.read_string(suffix) for suffix in suffixes.values},
        feed_back_rules=tuple(map(_parse_feed_back_rule, _read_tables(document, "feed_back"))),
        set_rule=_parse_set_rule(_read_table(document, "set"), kinds),
        update=_read_update(document, "update"),
        sidecar_rules=tuple(map(_parse_sidecar_rule, _read_tables(document, "sidecar"))),
    )
    if {"dims", "branch"} & document.values.keys():
        rules = _parse_dims_and_branches(document, rules)
    _check_updates(document, rules)
    document.reject_unread_keys()
    return rules


def _parse_dims_and_branches(document: ObjectReader, rules: Rules) -> Rules:

    return rules._replace(
        dims=_parse_dims(_read_table(document, "dims")),
        branches=tuple(map(_parse_branch, _read_tables(document, "branch"))),
    )


def _check_updates(document: ObjectReader, rules: Rules) -> None:
    """Raise if two rules say different updates for one kind."""
    updates: dict[str, str] = {}
    for index, rule in enumerate(rules.kv_rules):
        own_updates = dict(rule.updates)
        for kind in rule.buffers_by_kind:
            update = own_updates.get(kind, rules.update)
            if updates.setdefault(kind, update) != update:
                problem = f"is {update or 'not set'} here and {updates[kind] or 'not set'} in "
                hint = "another rule; rename one of the two kinds and set kind = in its table"
                raise document.build_error(f"kv[{index}].kinds.{kind}.update", problem + hint)


def _parse_keep_rule(table: ObjectReader) -> KeepRule:
    rule = KeepRule(table.read_string("reason"), _read_pattern(table, "pattern"))
    table.reject_unread_keys()
    return rule


def _parse_sidecar_rule(table: ObjectReader) -> SidecarRule:
    rule = SidecarRule(_read_pattern(table, "file"), table.read_string("reader", "its reader"))
    table.reject_unread_keys()
    return rule


def _parse_feed_back_rule(table: ObjectReader) -> FeedBackRule:
    rule = FeedBackRule(
        _read_pattern(table, "input"), _read_template(table, "call", {"path", "token"})
    )
    table.reject_unread_keys()
    return rule


def _parse_kv_rule(table: ObjectReader) -> KvRule:
    _check_keys(table, _KV_KEYS)
    kinds = table.read_object("kinds", "a table of lists of buffer names")
    tables = _parse_kind_tables(kinds)
    buffers_by_kind = {
        kind: tables[kind].parts if kind in tables else tuple(kinds.read_strings(kind))
        for kind in kinds.values
    }
    beside = {part: kind for kind in tables for part in tables[kind].rule.beside}
    part_count = sum(map(len, buffers_by_kind.values())) + len(beside)
    if not part_count:
        raise table.build_error("kinds", "does not list any buffer")
    if "names" in table.values:
        patterns, templates = _parse_names(table)
    else:
        patterns, templates = _parse_patterns(table, is_one_part=part_count == 1)
    updates = table.read_object("update", "a table of kinds", default={})
    open_kinds = frozenset(table.read_strings("by_shape", default=[]))
    for key, names in (("update", set(updates.values)), ("by_shape", open_kinds)):
        if names - set(buffers_by_kind):
            raise table.build_error(key, f"{min(names - set(buffers_by_kind))} is not in kinds")
    updates_by_kind = {kind: _read_update(updates, kind) for kind in updates.values}
    defaults = table.read_object("defaults", "a table of groups", default={})
    for group in defaults.values:
        if not any(group in pattern.groups for pattern in patterns.values()):
            raise table.build_error("defaults", f"{group} is not a group of the patterns")
    for kind, kind_table in tables.items():
        if kind_table.update and kind in updates_by_kind:
            raise table.build_error(
                "update", f"{kind} also has an update in kinds; remove one of the two"
            )
        updates_by_kind |= {kind: kind_table.update} if kind_table.update else {}
    table.reject_unread_keys()
    kinds_by_buffer = {
        name: kind for kind, names in reversed(buffers_by_kind.items()) for name in names
    }
    return KvRule(
        patterns,
        templates,
        buffers_by_kind,
        kinds_by_buffer | beside,
        tuple(updates_by_kind.items()),
        open_kinds,
        {kind: kind_table.rule for kind, kind_table in tables.items()},
        {group: defaults.read_string(group) for group in defaults.values},
    )


def _parse_patterns(
    table: ObjectReader, *, is_one_part: bool
) -> tuple[dict[str, Pattern], dict[str, str]]:
    """Return the pattern and the template of each side; one part alone needs no group."""
    needed_groups = {"layer", "token"} if is_one_part else {"buffer", "layer", "token"}
    patterns = {side: _read_pattern(table, side, needed_groups) for side in SIDES}
    templates = {
        side: _read_template(table, f"{side}_name", set(patterns[side].groups)) for side in SIDES
    }
    for side, template in templates.items():
        optional_parts = "".join(OPTIONAL_PART.findall(template))
        if template.count("{token}") != 1 or "{token}" not in optional_parts:
            raise _build_token_error(table, f"{side}_name")
    return patterns, templates


def _parse_kind_tables(kinds: ObjectReader) -> dict[str, KindTable]:
    """Return the kinds that are tables rather than lists of parts."""
    names = [name for name, value in kinds.values.items() if isinstance(value, dict)]
    if not names:
        return {}
    return {
        name: _parse_kind(kinds.read_object(name, "a list of parts or a table")) for name in names
    }


def _parse_kind(table: ObjectReader) -> KindTable:
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


def _parse_branch(table: ObjectReader) -> BranchRule:
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


def _parse_names(table: ObjectReader) -> tuple[dict[str, Pattern], dict[str, str]]:
    """Return the names of each side, and the templates that write them with a token.

    Args:
        table: A [[kv]] rule with the key ``names``. The name of an output is without what follows
            a token in it, which is the row's ``suffix``.

    Raises:
        UnreadableTextError: A name or a part is listed twice, or an entry is not such a table.
    """
    entries: dict[str, dict[str, ListedName]] = {side: {} for side in SIDES}
    parts: set[tuple[str, int]] = set()
    for row in table.read_objects("names", "a list of { layer, buffer, input, output, suffix }"):
        part = row.read_string("buffer"), row.read_integer("layer", 0)
        if part in parts:
            raise row.build_error("buffer", "is listed twice for this layer")
        parts.add(part)
        for side in SIDES:
            name = row.read_string(side)
            suffix = row.read_string("suffix", "") if side == "output" else ""
            if not name or name + suffix in entries[side]:
                raise row.build_error(side, "is empty or listed twice")
            entries[side][name + suffix] = ListedName(name, suffix, *part)
        row.reject_unread_keys()
    tables: dict[str, Pattern] = {
        side: NameTable(
            names,
            {(entry.buffer, entry.layer): entry for entry in names.values()},
            tuple({entry.suffix for entry in names.values()}),
        )
        for side, names in entries.items()
    }
    templates = {"input": "{name}[_{token}]", "output": "{name}[_{token}]{suffix}"}
    return tables, templates


def _parse_dims(table: ObjectReader) -> dict[str, str]:
    """Return the meaning of symbols in ``[dims]``: a word, or the sum of other symbols.

    Raises:
        UnreadableTextError: A symbol is neither, or a term of its sum has no word.
    """
    dims = {symbol: table.read_string(symbol) for symbol in table.values}
    words = ", ".join(DIM_WORDS)
    for symbol, meaning in dims.items():
        if meaning in DIM_WORDS:
            continue
        terms = split_sum(meaning)
        if len(terms) < 2:
            problem = f"must be one of {words}, or a sum of other symbols, such as 'past + new'"
            raise table.build_error(symbol, problem)
        for term in terms:
            if dims.get(term) not in DIM_WORDS:
                problem = f"is a sum with {term or 'nothing'}, which needs its own line"
                raise table.build_error(symbol, f"{problem} with one of {words}")
    return dims


def _read_update(table: ObjectReader, key: str) -> str:
    """Return one of `UPDATES`, empty for none."""
    update = table.read_string(key, "")
    if key in table.values and update not in UPDATES:
        raise table.build_error(key, f"must be one of {', '.join(UPDATES)}")
    return update


def _parse_set_rule(table: ObjectReader, kinds: set[str]) -> SetRule:
    parts = tuple(map(_parse_part_rule, _read_tables(table, "parts")))
    seam = table.read_string("seam_output", ""), table.read_string("seam_input", "")
    if any(seam) and not all(seam):
        raise table.build_error("seam_input" if seam[0] else "seam_output", "is missing")
    shared_inputs = tuple(table.read_strings("shared", default=[]))
    exclusive_kinds = table.read_strings("apart", default=[])
    for kind in exclusive_kinds:
        if kind not in kinds:
            raise table.build_error("apart", f"{kind} is not a kind of a [[kv]] rule")
    table.reject_unread_keys()
    return SetRule(parts, seam if all(seam) else None, shared_inputs, frozenset(exclusive_kinds))


def _parse_part_rule(table: ObjectReader) -> PartRule:
    stage = table.read_string("stage")
    if stage not in STAGES:
        raise table.build_error("stage", f"must be one of {', '.join(STAGES)}")
    file = _read_pattern(table, "file", {"first"} if stage == PREFIXED else {"first", "end"})
    folder = _read_pattern(table, "folder") if "folder" in table.values else None
    table.reject_unread_keys()
    return PartRule(stage, file, folder)


def _read_table(table: ObjectReader, key: str) -> ObjectReader:
    return table.read_object(key, f"a table: write [{key}] above its keys", default={})


def _read_tables(table: ObjectReader, key: str) -> list[ObjectReader]:
    if isinstance(table.values.get(key), dict):
        raise table.build_error(key, f"needs two brackets: write [[{key}]], not [{key}]")
    return table.read_objects(key, f"a list of tables: write [[{key}]] above each", default=[])


def _check_keys(table: ObjectReader, known_keys: tuple[str, ...]) -> None:
    if not table.values.keys() <= {*known_keys}:
        _reject_misspelled_key(table, known_keys)


def _read_pattern(
    table: ObjectReader, key: str, groups: frozenset[str] | set[str] = frozenset()
) -> Pattern:
    text = table.read_string(key)
    try:
        pattern = compile_pattern(text)
    except ValueError as error:
        raise table.build_error(key, str(error)) from None
    for group in sorted(groups - set(pattern.groups)):
        raise _build_group_error(table, key, group)
    return pattern


def _read_template(table: ObjectReader, key: str, groups: set[str]) -> str:
    template = table.read_string(key)
    for placeholder in PLACEHOLDER.finditer(OPTIONAL_PART.sub(r"\1", template)):
        group, bracket = placeholder.groups()
        if bracket:
            raise table.build_error(
                key, f"has a {bracket} without its counterpart; write {{group}} or [part]"
            )
        if group not in groups:
            known = ", ".join(f"{{{name}}}" for name in sorted(groups))
            raise table.build_error(key, f"{{{group}}} is not a group of the pattern, only {known}")
    return template


def _choose_hint(error: ValueError) -> str:
    """Return how to fix a mistake: the error's own hint, an example of the key, or the page."""
    hint = getattr(error, "hint", None)
    if hint:
        return str(hint)
    message = str(error)
    if message.startswith("not TOML"):
        return f"write patterns in single quotes and templates in double quotes; {_PAGE}"
    key = re.match(r"kv\[[0-9]+\]\.([a-z_]+)(?:\.[^.:]+)?: ", message)
    example = _KV_EXAMPLES.get(key[1]) if key else None
    return f"as in {example}; {_PAGE}" if example else _PAGE


def _reject_misspelled_key(table: ObjectReader, known_keys: Sequence[str]) -> None:
    """Raise for a key that is not known, but similar to a known one that is not there.

    Without this, a required key would be reported as missing and its misspelling not at all.

    Raises:
        UnreadableTextError: There is such a key.
    """
    missing = [key for key in known_keys if key not in table.values]
    for key in table.values:
        similar = None if key in known_keys else find_similar(key, missing, cutoff=0.8)
        if similar is not None:
            raise table.build_error(key, f"is not a known key; did you mean {similar}?")


def _build_group_error(table: ObjectReader, key: str, group: str) -> UnreadableTextError:
    """Return the error for a pattern without a group that it needs."""
    contents, example = _GROUPS[group]
    error = table.build_error(key, f"has no group (?P<{group}>…)")
    error.hint = f"add {example} where names have the {contents}; {_PAGE}"
    return error


def _build_token_error(table: ObjectReader, key: str) -> UnreadableTextError:
    """Return the error for a template that does not say where a token goes."""
    error = table.build_error(key, "must contain {token} once, inside [...]")
    error.hint = f"what is in [...] is written only with a token: {_KV_EXAMPLES[key]}; {_PAGE}"
    return error
