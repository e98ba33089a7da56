"""Parse rules: a profile or a file in TOML, with an explanation of each mistake."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from onnxkvrename.documents import ObjectReader, parse_toml
from onnxkvrename.errors import RulesError
from onnxkvrename.findings import find_similar
from onnxkvrename.rules.kinds import list_kind_words
from onnxkvrename.rules.patterns import ListedName, NameTable, Pattern, compile_pattern
from onnxkvrename.rules.profile import (
    AXES,
    DIM_WORDS,
    OPTIONAL_PART,
    PLACEHOLDER,
    ROLES,
    SIDES,
    UPDATES,
    KeepRule,
    KindRule,
    KvRule,
    Rules,
    SidecarRule,
    split_sum,
)

_TOP_KEYS = (
    *("description", "retained", "update", "kv", "keep", "suffixes", "sidecar", "dims"),
    "functions",
)
_PATTERN_KEYS = ("input", "output", "input_name", "output_name", "kinds", "runner")
_KIND_KEYS = ("roles", "parts", "kind", "update", "by_shape", "axes", "beside", "alone")
_NAME_KEYS = ("layer", "buffer", "input", "output", "suffix")
_PAGE = "docs/rules.md explains each key"
_KV_EXAMPLES = {
    "input": r"input = 'past\.(?P<layer>[0-9]+)\.(?P<buffer>k|v)"
    r"(?:_(?P<token>[A-Za-z0-9]+))?'",
    "output": r"output = 'present\.(?P<layer>[0-9]+)\.(?P<buffer>k|v)"
    r"(?:_(?P<token>[A-Za-z0-9]+))?'",
    "input_name": 'input_name = "past.{layer}.{buffer}[_{token}]"',
    "output_name": 'output_name = "present.{layer}.{buffer}[_{token}]"',
    "kinds": '[kv.kinds.attention] with roles = { key = "k", value = "v" }',
    "update": 'update = "append" at the top, or in the table of a kind',
    "by_shape": "by_shape = true in the table of a kind",
}
"""What is expected for each key of [[kv]] that has a form of its own, or is in another table."""


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
        raise RulesError(str(error), path=name, hint=_choose_hint(str(error))) from None


def _parse_rules(document: ObjectReader, name: str) -> Rules:
    _check_keys(document, _TOP_KEYS)
    document.read_string("description", default="")
    update = _read_choice(document, "update", UPDATES)
    kv_rules = tuple(_parse_kv_rule(table, update) for table in _read_tables(document, "kv"))
    if not kv_rules:
        raise document.build_error("kv", "is missing: a file of rules needs at least one [[kv]]")
    has_retained = "retained" in document.values
    in_functions = document.read_boolean("functions", default=False)
    if in_functions and not all(
        "{buffer}" in rule.templates[s] for rule in kv_rules for s in SIDES
    ):
        raise document.build_error("functions", "needs {buffer} in all templates of names")
    return Rules(
        name,
        kv_rules,
        _add_up_kinds(document, kv_rules),
        keep_rules=tuple(map(_parse_keep_rule, _read_tables(document, "keep"))),
        retained_pattern=_read_pattern(document, "retained") if has_retained else None,
        normal_suffixes=_read_texts(document, "suffixes"),
        dims=_parse_dims(_read_table(document, "dims")),
        sidecar_rules=tuple(map(_parse_sidecar_rule, _read_tables(document, "sidecar"))),
        renames_in_functions=in_functions,
    )


def _add_up_kinds(document: ObjectReader, rules: Iterable[KvRule]) -> dict[str, KindRule]:
    """Return all kinds by their names, each with its parts of all rules."""
    kinds: dict[str, KindRule] = {}
    for index, rule in enumerate(rules):
        for kind in rule.kinds:
            first = kinds.get(kind.name, kind)
            if first._replace(roles=kind.roles, axes=kind.axes, beside=kind.beside) != kind:
                problem = "differs from the same kind in another [[kv]]; rename one of the two"
                raise document.build_error(f"kv[{index}].kinds.{kind.name}", problem)
            kinds[kind.name] = first._replace(
                roles={**first.roles, **kind.roles},
                axes={**first.axes, **kind.axes},
                beside={**first.beside, **kind.beside},
            )
    return kinds


def _parse_keep_rule(table: ObjectReader) -> KeepRule:
    _check_keys(table, ("reason", "pattern"))
    return KeepRule(table.read_string("reason"), _read_pattern(table, "pattern"))


def _parse_sidecar_rule(table: ObjectReader) -> SidecarRule:
    _check_keys(table, ("file", "reader"))
    return SidecarRule(_read_pattern(table, "file"), table.read_string("reader", "its reader"))


def _parse_kv_rule(table: ObjectReader, update: str) -> KvRule:
    """Parse a table ``[[kv]]``; `update` is for kinds that do not say how they are updated."""
    has_names = "names" in table.values
    _check_keys(table, ("names", "kinds", "runner") if has_names else _PATTERN_KEYS)
    patterns, templates = _parse_names(table) if has_names else _parse_patterns(table)
    groups = {group for pattern in patterns.values() for group in pattern.groups}
    description = "a table of roles or parts: write [kv.kinds.NAME] above them"
    tables = table.read_object("kinds", description)
    kinds = []
    for name in tables.values:
        prefix = f"{name}." if "kind" in groups else ""
        kinds.append(_parse_kind(tables.read_object(name, description), name, update, prefix))
    if not kinds:
        raise table.build_error("kinds", f"must be {description}")
    for side in SIDES:
        if "buffer" not in patterns[side].groups and sum(len(kind.roles) for kind in kinds) > 1:
            raise table.build_error(side, "has no group (?P<buffer>…)")
    runner = table.read_string("runner", default="")
    return KvRule(patterns, templates, tuple(kinds), runner)


def _parse_patterns(table: ObjectReader) -> tuple[dict[str, Pattern], dict[str, str]]:
    """Return the pattern and the template of each side."""
    patterns: dict[str, Pattern] = {}
    templates: dict[str, str] = {}
    for side in SIDES:
        patterns[side] = pattern = _read_pattern(table, side)
        for group in ("layer", "token"):
            if group not in pattern.groups:
                raise table.build_error(side, f"has no group (?P<{group}>…)")
        key = f"{side}_name"
        templates[side] = template = _read_template(table, key, pattern.groups)
        optional_parts = "".join(OPTIONAL_PART.findall(template))
        if template.count("{token}") != 1 or "{token}" not in optional_parts:
            raise table.build_error(key, "must contain {token} once, inside [...]")
    return patterns, templates


def _parse_kind(table: ObjectReader, name: str, update: str, prefix: str) -> KindRule:
    """Parse a table ``[kv.kinds.NAME]``; the `prefix` is for the names of its parts.

    Its other keys name parts as its ``roles`` do, or as its ``parts`` if it has no roles.
    """
    _check_keys(table, _KIND_KEYS)
    if bool(table.values.get("roles")) == bool(table.values.get("parts")):
        problem = 'needs either roles, such as { key = "past_key" }, or parts, such as ["a"]'
        raise table.build_error("roles", problem)
    has_roles = "roles" in table.values
    own_parts = _read_texts(table, "roles") or {part: part for part in table.read_strings("parts")}
    if has_roles:
        _check_words(table, "roles", own_parts, ROLES)
    parts = {own: f"{prefix}{part}" for own, part in own_parts.items()}
    beside = _read_texts(table, "beside")
    _check_words(table, "beside", [*beside, *beside.values()], parts)
    alone = table.read_strings("alone", default=[])
    _check_words(table, "alone", alone, SIDES)
    return KindRule(
        name,
        cache=_read_choice(table, "kind", list_kind_words()) or name,
        roles={part: own if has_roles else "" for own, part in parts.items()},
        update=_read_choice(table, "update", UPDATES) or update,
        axes={parts[own]: axes for own, axes in _read_axes(table, parts).items()},
        beside={parts[own]: parts[main] for own, main in beside.items()},
        alone=tuple(alone),
        is_open=table.read_boolean("by_shape", default=False),
    )


def _read_axes(table: ObjectReader, parts: Collection[str]) -> Mapping[str, tuple[str, ...]]:
    """Return words for the axes of each part: one list for all, or a table by part."""
    if "axes" not in table.values:
        return {}
    if isinstance(table.values["axes"], list):
        lists = dict.fromkeys(parts, table.read_strings("axes"))
    else:
        by_part = table.read_object("axes", "a list of axes, or a table of them by part")
        lists = {part: by_part.read_strings(part) for part in by_part.values}
    _check_words(table, "axes", lists, parts)
    _check_words(table, "axes", (axis for axes in lists.values() for axis in axes), AXES)
    return {part: tuple(axes) for part, axes in lists.items()}


def _parse_names(table: ObjectReader) -> tuple[dict[str, Pattern], dict[str, str]]:
    """Return the names of each side, and the templates that write them with a token.

    The name of an output is without what follows a token in it, which is the row's ``suffix``.
    """
    entries: dict[str, dict[str, ListedName]] = {side: {} for side in SIDES}
    parts: set[tuple[str, int]] = set()
    for row in table.read_objects("names", "a list of { layer, buffer, input, output, suffix }"):
        _check_keys(row, _NAME_KEYS)
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
    tables: dict[str, Pattern] = {
        side: NameTable(names, tuple({entry.suffix for entry in names.values()}))
        for side, names in entries.items()
    }
    return tables, {"input": "{name}[_{token}]", "output": "{name}[_{token}]{suffix}"}


def _parse_dims(table: ObjectReader) -> dict[str, str]:
    """Return the meaning of symbols in ``[dims]``: a word, or the sum of other symbols."""
    dims = {symbol: table.read_string(symbol) for symbol in table.values}
    for symbol, meaning in dims.items():
        terms = split_sum(meaning)
        is_sum = len(terms) > 1 and all(dims.get(term) in DIM_WORDS for term in terms)
        if meaning not in DIM_WORDS and not is_sum:
            words = f"must be one of {', '.join(DIM_WORDS)}"
            problem = f"{words}, or a sum of symbols that are, such as 'past + new'"
            raise table.build_error(symbol, problem)
    return dims


def _read_table(table: ObjectReader, key: str) -> ObjectReader:
    return table.read_object(key, f"a table: write [{key}] above its keys", default={})


def _read_tables(table: ObjectReader, key: str) -> list[ObjectReader]:
    if isinstance(table.values.get(key), dict):
        raise table.build_error(key, f"needs two brackets: write [[{key}]], not [{key}]")
    return table.read_objects(key, f"a list of tables: write [[{key}]] above each", default=[])


def _read_texts(table: ObjectReader, key: str) -> dict[str, str]:
    """Return a table in which all values are text; empty if the key is not there."""
    if key not in table.values:
        return {}
    texts = table.read_object(key, "a table of texts")
    return {name: texts.read_string(name) for name in texts.values}


def _read_choice(table: ObjectReader, key: str, choices: Collection[str]) -> str:
    """Return one of some words, empty if the key is not there."""
    if key not in table.values:
        return ""
    value = table.read_string(key)
    _check_words(table, key, [value], choices)
    return value


def _check_words(
    table: ObjectReader, key: str, words: Iterable[str], known: Collection[str]
) -> None:
    for word in words:
        if word not in known:
            raise table.build_error(key, f"{word} is not one of {', '.join(known)}")


def _check_keys(table: ObjectReader, known_keys: Collection[str]) -> None:
    for key in table.values:
        if key not in known_keys:
            missing = [known for known in known_keys if known not in table.values]
            similar = find_similar(key, missing, cutoff=0.8)
            question = "" if similar is None else f"; did you mean {similar}?"
            raise table.build_error(key, f"is not a known key{question}")


def _read_pattern(table: ObjectReader, key: str) -> Pattern:
    text = table.read_string(key)
    try:
        return compile_pattern(text)
    except ValueError as error:
        raise table.build_error(key, str(error)) from None


def _read_template(table: ObjectReader, key: str, groups: Collection[str]) -> str:
    template = table.read_string(key)
    for group, bracket in PLACEHOLDER.findall(OPTIONAL_PART.sub(r"\1", template)):
        if bracket:
            raise table.build_error(
                key, f"has a {bracket} without its counterpart; write {{group}} or [part]"
            )
        if group not in groups:
            known = ", ".join(f"{{{name}}}" for name in sorted(groups))
            raise table.build_error(key, f"{{{group}}} is not a group of the pattern, only {known}")
    return template


def _choose_hint(message: str) -> str:
    """Return how to fix a mistake: an example of the key, or the page."""
    if message.startswith("not TOML"):
        return f"write patterns in single quotes and templates in double quotes; {_PAGE}"
    key = re.match(r"kv\[[0-9]+\]\.([a-z_]+)", message)
    example = _KV_EXAMPLES.get(key[1]) if key else None
    return f"as in {example}; {_PAGE}" if example else _PAGE
