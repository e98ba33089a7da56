"""Load and parse rules: a built-in profile, one of another distribution, or a file.

Another distribution adds a profile by an entry point in the group
``onnxkvrename.profiles`` (:mod:`onnxkvrename.rules.plugins`). Its value leads to the TOML
text, or to the path of its file (an :class:`os.PathLike` object).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onnxkvrename.errors import ModelError, RulesError
from onnxkvrename.findings import quote_path, quote_word, suggest_similar
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import PROFILE as DEFAULT_PROFILE
from onnxkvrename.storage.read import is_occupied, read_text_file

if TYPE_CHECKING:
    from onnxkvrename.rules.plugins import Plugin

PROFILES_DIRECTORY = Path(__file__).parent / "profiles"
DATAFLOW_RULES = "dataflow"
"""What messages call rules that were made from the dataflow, and the value of ``--pairs``."""
AUTO_PROFILE = "auto"
"""The word for the profile that knows the names of the models; see `rules.pick`."""
PLUGIN_GROUP = "onnxkvrename.profiles"


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
        text = _read_rules_file(PROFILES_DIRECTORY / f"{profile}.toml")
        return parse_rules(text, profile)._replace(is_built_in=True)
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
        text = plugin.call(lambda: _read_value(value), (RulesError, ModelError))
        return parse_rules(text, plugin.name)
    except RulesError as error:
        raise plugin.build_error(error.message) from None
    except ModelError as error:
        raise plugin.build_error(str(error)) from None


def _read_value(value: object) -> str:
    """Return the TOML text of a plug-in, whose value may raise any error when it is used."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, os.PathLike):
        return read_text_file(Path(value))
    value_type = type(value).__name__
    raise RulesError(f"its value must be TOML text or a path to it, not {value_type}")


def _read_rules_file(path: Path) -> str:
    try:
        return read_text_file(path)
    except ModelError as error:
        raise RulesError(error.message, path=error.path) from None
