"""Parse rules: a profile or a file in TOML, with an explanation of each mistake."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from onnxkvrename.documents import ObjectReader, parse_toml
from onnxkvrename.errors import RulesError
from onnxkvrename.rules.kinds import list_kind_words
from onnxkvrename.rules.pattern import (
    SHORTHAND,
    compile_pattern,
    read_literal,
    write_alternatives,
    write_expression,
)
from onnxkvrename.rules.profile import (
    AXES,
    DIM_WORDS,
    ROLES,
    SIDES,
    UPDATES,
    KvRule,
    Rules,
    split_sum,
)
from onnxkvrename.text import find_similar

_SHARED_KEYS = ("input", "output", "update", "runner")
"""The keys that a file may have at its top, for each [[kv]] without its own."""
_TOP_KEYS = (
    *("description", *_SHARED_KEYS, "retained", "functions"),
    *("kv", "keep", "suffixes", "dims", "sidecar"),
)
_KV_KEYS = (
    *(*_SHARED_KEYS, "kind", "name", "roles", "parts", "part", "layer"),
    *("axes", "beside", "alone", "by_shape"),
)
_PAGE = "docs/rules.md explains each key"


def parse_rules(text: str, name: str, *, is_built_in: bool = False) -> Rules:
    """Parse a profile.

    Args:
        text: The profile, in TOML.
        name: Its name in messages: that of the profile, or the path of the file.
        is_built_in: Whether it is a profile of this program, whose patterns are compiled only
            where a name may fit.

    Raises:
        RulesError: The text is not a profile; the message names the table and the key, or the
            line where it is not TOML.
    """
    try:
        document = ObjectReader(parse_toml(text), separator=": ")
        return _parse_rules(document, name, is_built_in=is_built_in)
    except ValueError as error:
        is_toml = not str(error).startswith("not TOML")
        hint = _PAGE if is_toml else f"write patterns in single quotes; {_PAGE}"
        raise RulesError(str(error), path=name, hint=hint) from None


def _parse_rules(document: ObjectReader, name: str, *, is_built_in: bool) -> Rules:
    _check_keys(document, _TOP_KEYS)
    document.read_string("description", default="")
    suffixes = _read_texts(document, "suffixes")
    shorthand = dict(SHORTHAND)
    if suffixes:
        shorthand["suffix"] = write_alternatives("suffix", {*suffixes, *suffixes.values()})
    shared = {key: document.values[key] for key in _SHARED_KEYS if key in document.values}
    rules: list[KvRule] = []
    kinds: dict[str, KvRule] = {}
    for number, table in enumerate(_read_tables(document, "kv", _KV_KEYS)):
        table.values = {**shared, **table.values}
        rule = _parse_kv_rule(table, name, number, shorthand)
        rules.append(rule)
        if kinds.setdefault(rule.kind, rule).traits != rule.traits:
            problem = f"differs from the {rule.kind} of another [[kv]]: give one of the two a name"
            raise table.build_error("kind", problem)
        for side in () if is_built_in else SIDES:
            _check_groups(table, side, rule)
    if not rules:
        raise document.build_error("kv", "is missing: a file of rules needs at least one [[kv]]")
    parts = {part: rule for rule in rules for part in rule.roles}
    _check_words(document, "kv", (part for rule in rules for part in rule.beside.values()), parts)
    return Rules(
        name,
        tuple(rules),
        {side: tuple(_list_words(rules, side)) for side in SIDES},
        _read_reasons(document, "keep", "pattern", "reason"),
        _read_pattern(document, "retained") if "retained" in document.values else None,
        suffixes,
        _read_dims(document),
        _read_reasons(document, "sidecar", "file", "reader", default="its reader"),
        document.read_boolean("functions", default=False),
        is_built_in,
    )


def _list_words(rules: Iterable[KvRule], side: str) -> Iterator[tuple[str, KvRule]]:
    """Yield texts of which one is in each name of a rule: its parts, or all that is fixed."""
    for rule in rules:
        if rule.says_part(side):
            yield from ((part.removeprefix(rule.prefix), rule) for part in rule.roles)
        else:
            before, _, after = rule.expressions[side].partition(SHORTHAND["token"])
            is_one_name = read_literal(after) is not None
            yield (is_one_name and read_literal(before)) or "", rule


def _parse_kv_rule(
    table: ObjectReader, file: str, number: int, shorthand: Mapping[str, str]
) -> KvRule:
    """Parse a table ``[[kv]]``: names, and the kind that they are of.

    Its keys name parts by their roles; those without one as names do.
    """
    texts = {side: table.read_string(side) for side in SIDES}
    texts["output"] = texts["output"].replace("{input}", texts["input"])
    roles = _read_roles(table, texts["input"])
    shorthand = {**shorthand, "part": write_alternatives("part", roles)}
    expressions = {}
    for side, text in texts.items():
        with _name_key(table, side):
            expressions[side] = write_expression(text, shorthand)
    word = _read_choice(table, "kind", list_kind_words())
    kind = table.read_string("name", default=word)
    if not kind:
        raise table.build_error("kind", "is missing: write one, such as kind = 'attention'")
    prefix = f"{kind}." if "(?P<kind>" in texts["input"] else ""
    parts = {role or part: f"{prefix}{part}" for part, role in roles.items()}
    beside = _read_texts(table, "beside")
    _check_words(table, "beside", beside, parts)
    alone = table.read_strings("alone", default=[])
    _check_words(table, "alone", alone, SIDES)
    return KvRule(
        file,
        number,
        kind,
        word or kind,
        expressions,
        prefix,
        table.read_integer("layer", 0) if "layer" in table.values else 0,
        {f"{prefix}{part}": role for part, role in roles.items()},
        _read_choice(table, "update", UPDATES),
        {parts[own]: axes for own, axes in _read_axes(table, parts).items()},
        {parts[own]: parts.get(main, main) for own, main in beside.items()},
        tuple(alone),
        table.read_boolean("by_shape", default=False),
        table.read_string("runner", default=""),
    )


def _read_roles(table: ObjectReader, pattern: str) -> dict[str, str]:
    """Return the parts of a rule, each with its role: those that a pattern lists, or its keys."""
    roles = _read_texts(table, "roles")
    _check_words(table, "roles", roles, ROLES)
    named = [*roles.values(), *table.read_strings("parts", default=[])]
    named += [table.read_string("part")] if "part" in table.values else []
    parts: Sequence[str] = named or ("key", "value")
    own = re.search(r"\(\?P<part>(.*?)\)", pattern)
    if own is not None:
        parts = [part for text in own[1].split("|") if (part := read_literal(text))]
        if len(parts) <= own[1].count("|"):
            raise table.build_error("input", "must list its parts, as in (?P<part>key|value)")
        _check_words(table, "roles", named, parts)
    own_roles = {part: part for part in parts if part in ROLES and part not in roles}
    by_part = own_roles | {part: role for role, part in roles.items()}
    return {part: by_part.get(part, "") for part in parts}


def _check_groups(table: ObjectReader, side: str, rule: KvRule) -> None:
    """Check that a pattern of the user's own has each group once, as the other side."""
    with _name_key(table, side):
        groups = compile_pattern(rule.expressions[side]).groupindex
    if "token" not in groups:
        raise table.build_error(side, "has no {token}: write it where a token goes")
    if ("layer" in groups) == ("layer" in table.values):
        raise table.build_error(side, "needs {layer}, or layer = 0 where names do not say it")
    if "part" not in groups and (len(rule.roles) > 1 or rule.says_part("input")):
        raise table.build_error(side, "needs {part}, or part = 'key' where names do not say it")


@contextmanager
def _name_key(table: ObjectReader, key: str) -> Iterator[None]:
    """Context manager that puts a key in front of what is wrong with its value."""
    try:
        yield
    except ValueError as error:
        raise table.build_error(key, str(error)) from None


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


def _read_dims(document: ObjectReader) -> dict[str, str]:
    """Return the meaning of symbols in ``[dims]``: a word, or the sum of other symbols."""
    table = document.read_object("dims", "a table: write [dims] above its keys", default={})
    dims = {symbol: table.read_string(symbol) for symbol in table.values}
    for symbol, meaning in dims.items():
        terms = split_sum(meaning)
        is_sum = len(terms) > 1 and all(dims.get(term) in DIM_WORDS for term in terms)
        if meaning not in DIM_WORDS and not is_sum:
            words = f"must be one of {', '.join(DIM_WORDS)}"
            problem = f"{words}, or a sum of symbols that are, such as 'past + new'"
            raise table.build_error(symbol, problem)
    return dims


def _read_tables(document: ObjectReader, key: str, known: Collection[str]) -> list[ObjectReader]:
    """Return the tables of a list, which have no keys but some `known` ones."""
    if isinstance(document.values.get(key), dict):
        raise document.build_error(key, f"needs two brackets: write [[{key}]], not [{key}]")
    kind = f"a list of tables: write [[{key}]] above each"
    tables = document.read_objects(key, kind, default=[])
    for table in tables:
        _check_keys(table, known)
    return tables


def _read_reasons(
    document: ObjectReader, key: str, pattern: str, reason: str, default: str | None = None
) -> dict[str, str]:
    """Return the patterns in a list of tables, each with what else its table says."""
    return {
        _read_pattern(table, pattern): table.read_string(reason, default)
        for table in _read_tables(document, key, (pattern, reason))
    }


def _read_texts(table: ObjectReader, key: str) -> dict[str, str]:
    """Return a table in which all values are text; empty if the key is not there."""
    texts = table.read_object(key, "a table of texts", default={})
    return {name: texts.read_string(name) for name in texts.values}


def _read_choice(table: ObjectReader, key: str, choices: Collection[str]) -> str:
    """Return one of some words, empty if the key is not there."""
    value = table.read_string(key, default="")
    _check_words(table, key, [value] if key in table.values else [], choices)
    return value


def _read_pattern(table: ObjectReader, key: str) -> str:
    text = table.read_string(key)
    with _name_key(table, key):
        compile_pattern(text)
    return text


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
