"""Load and parse rules: a built-in profile, one of another distribution, or a file.

Another distribution adds a profile by an entry point in the group
``onnxkvrename.profiles`` (:mod:`onnxkvrename.rules.plugins`). Its value leads to the TOML
text, or to the path of its file (an :class:`os.PathLike` object or a resource of
:mod:`importlib.resources`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxkvrename.documents import ObjectReader, parse_toml
from onnxkvrename.errors import ModelError, RulesError
from onnxkvrename.findings import quote_path, quote_word, suggest_similar
from onnxkvrename.rules.patterns import Pattern, compile_pattern
from onnxkvrename.rules.profile import (
    OPTIONAL_PART,
    PLACEHOLDER,
    PREFIXED,
    SIDES,
    STAGES,
    UPDATES,
    FeedBackRule,
    KeepRule,
    KvRule,
    PartRule,
    Rules,
    SetRule,
    SidecarRule,
)
from onnxkvrename.storage.read import is_occupied, read_text_file

if TYPE_CHECKING:
    from onnxkvrename.rules.language.kinds import KindTable
    from onnxkvrename.rules.plugins import Plugin

PROFILES_DIRECTORY = Path(__file__).parent / "profiles"
DEFAULT_PROFILE = "qeff"
"""The profile of exports by QEfficient."""
DATAFLOW_RULES = "dataflow"
"""What messages call rules that were made from the dataflow, and the value of ``--pairs``."""
AUTO_PROFILE = "auto"
"""The word for the profile that knows the names of the models; see `rules.pick`."""
PLUGIN_GROUP = "onnxkvrename.profiles"
_TOP_KEYS = (
    *("description", "retained", "update", "kv", "keep", "suffixes", "feed_back", "set"),
    *("sidecar", "dims", "branch"),
)
_KV_KEYS = (
    *("input", "output", "input_name", "output_name", "kinds", "update", "by_shape", "defaults"),
    "names",
)


def load_rules(profile: str | None = None, path: Path | None = None) -> Rules:
    """Load a profile, or the rules in a file.

    Args:
        profile: The name of a profile, by default that of exports by QEfficient. A built-in one
            takes precedence over one with the same name in another distribution.
        path: A TOML file with rules, used instead of a profile.

    Raises:
        RulesError: The profile or the file does not exist or cannot be used. For a
            profile of another distribution the message names that distribution.
    """
    if path is not None:
        return parse_rules(_read_rules_file(path), str(path))
    profile = profile or DEFAULT_PROFILE
    if profile in _list_builtin_profiles():
        return parse_rules(_read_rules_file(PROFILES_DIRECTORY / f"{profile}.toml"), profile)
    plugin = _find_plugins().get(profile)
    if plugin is None:
        names = list_profiles()
        hint = suggest_similar(profile, names) or f"profiles: {', '.join(names)}"
        hint = "--rules reads a file" if profile.endswith(".toml") else hint
        raise RulesError(f"no such profile: {profile}", hint=hint)
    return _load_plugin(plugin)


def read_profile(name: str) -> str:
    """Return the TOML text of a profile.

    Raises:
        RulesError: There is no such profile, or it cannot be read.
    """
    load_rules(name)  # raises the same errors as for a rename
    if name in _list_builtin_profiles():
        return _read_rules_file(PROFILES_DIRECTORY / f"{name}.toml")
    return _read_value(_find_plugins()[name].load(object))


def list_profiles() -> tuple[str, ...]:
    """Return the names of all profiles, built-in and of other distributions, sorted.

    Raises:
        RulesError: The installed distributions cannot be listed.
    """
    return tuple(sorted({*_list_builtin_profiles(), *_find_plugins()}))


def find_profiles(outputs: Sequence[str]) -> Iterator[str]:
    """Yield the built-in profiles for which one of a model's outputs is a KV buffer."""
    for profile in sorted(_list_builtin_profiles()):
        rules = load_rules(profile)
        if any(rules.match("output", name) is not None for name in outputs):
            yield profile


def is_built_in(name: str) -> bool:
    """Return whether a built-in profile has this name."""
    return name in _list_builtin_profiles()


def has_profile(name: str) -> bool:
    """Return whether a profile has this name; see :func:`list_profiles`."""
    return name in _list_builtin_profiles() or name in _find_plugins()


def format_rules_option(rules: Rules) -> str:
    """Return the option by which a command uses these rules, after a space; none by default."""
    if rules.name == DEFAULT_PROFILE:
        return ""
    if rules.name == DATAFLOW_RULES:
        return f" --pairs {rules.name}"
    if has_profile(rules.name):
        return f" --profile {quote_word(rules.name)}"
    return f" --rules {quote_path(rules.name)}" if is_occupied(rules.name) else ""


def _list_builtin_profiles() -> set[str]:
    try:
        names = os.listdir(PROFILES_DIRECTORY)
    except OSError as error:
        reason = f"cannot be listed: {error.strerror}"
        raise RulesError(reason, path=str(PROFILES_DIRECTORY)) from None
    return {name.removesuffix(".toml") for name in names if name.endswith(".toml")}


def _find_plugins() -> dict[str, Plugin]:
    from onnxkvrename.rules.plugins import find_plugins  # slow, not needed for built-in profiles

    return find_plugins(PLUGIN_GROUP, _list_builtin_profiles(), RulesError)


def _load_plugin(plugin: Plugin) -> Rules:
    value = plugin.load(object)
    try:
        text = plugin.call(lambda: _read_value(value), (_WrongValueError, ModelError))
        return parse_rules(text, plugin.name)
    except _WrongValueError:
        value_type = type(value).__name__
        problem = f"its value must be TOML text or a path to it, not {value_type}"
        raise plugin.build_error(problem) from None
    except RulesError as error:
        raise plugin.build_error(error.message) from None
    except ModelError as error:
        raise plugin.build_error(str(error)) from None


class _WrongValueError(Exception):
    """The value of a plug-in is neither text nor a path."""


def _read_value(value: Any) -> str:
    """Return the TOML text of a plug-in, whose value may raise any error when it is used."""
    if isinstance(value, str):
        return str(value)
    if not (isinstance(value, os.PathLike) or hasattr(value, "iterdir")):  # a resource has it
        raise _WrongValueError
    return _read_resource(value)


def _read_resource(value: Any) -> str:
    """Read the text of a path or a package's resource, wherever that is kept."""
    if isinstance(value, os.PathLike):
        return read_text_file(Path(value))
    from importlib.resources import as_file

    with as_file(value) as path:
        return read_text_file(path)


def _read_rules_file(path: Path) -> str:
    try:
        return read_text_file(path)
    except ModelError as error:
        raise RulesError(error.message, path=error.path) from None


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
        from onnxkvrename.rules.language.mistakes import choose_hint

        raise RulesError(str(error), path=name, hint=choose_hint(error)) from None


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
    from onnxkvrename.rules.language.dims import parse_dims  # many profiles have neither
    from onnxkvrename.rules.language.kinds import parse_branch

    return rules._replace(
        dims=parse_dims(_read_table(document, "dims")),
        branches=tuple(map(parse_branch, _read_tables(document, "branch"))),
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
        from onnxkvrename.rules.language.name_lists import parse_names  # most rules have patterns

        patterns, templates = parse_names(table)
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
            from onnxkvrename.rules.language.mistakes import build_token_error

            raise build_token_error(table, f"{side}_name")
    return patterns, templates


def _parse_kind_tables(kinds: ObjectReader) -> dict[str, KindTable]:
    """Return the kinds that are tables rather than lists of parts."""
    names = [name for name, value in kinds.values.items() if isinstance(value, dict)]
    if not names:
        return {}
    from onnxkvrename.rules.language.kinds import parse_kind  # in many profiles kinds are lists

    return {
        name: parse_kind(kinds.read_object(name, "a list of parts or a table")) for name in names
    }


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
        from onnxkvrename.rules.language.mistakes import reject_misspelled_key

        reject_misspelled_key(table, known_keys)


def _read_pattern(
    table: ObjectReader, key: str, groups: frozenset[str] | set[str] = frozenset()
) -> Pattern:
    text = table.read_string(key)
    try:
        pattern = compile_pattern(text)
    except ValueError as error:
        raise table.build_error(key, str(error)) from None
    for group in sorted(groups - set(pattern.groups)):
        from onnxkvrename.rules.language.mistakes import build_group_error

        raise build_group_error(table, key, group)
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
