"""Load and parse rules: a built-in profile, or a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from onnxkvrename.errors import ModelError, RulesError
from onnxkvrename.files.read import is_occupied, read_text_file
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import PROFILE as DEFAULT_PROFILE
from onnxkvrename.text import suggest_similar

PROFILES_DIRECTORY = Path(__file__).parent / "profiles"
AUTO_PROFILE = "auto"
"""The word for the profile that knows the names of the models; see `rules.pick`."""


def load_rules(profile: str | None = None, path: Path | None = None) -> Rules:
    """Load a profile, or the rules in a file.

    Args:
        profile: The name of a profile, by default that of exports by QEfficient.
        path: A TOML file with rules, used instead of a profile.

    Raises:
        RulesError: The profile or the file does not exist or cannot be used.
    """
    if path is not None:
        return parse_rules(_read_rules_file(path), str(path))
    profile = profile or DEFAULT_PROFILE
    return parse_rules(read_profile(profile), profile, is_built_in=True)


def read_profile(name: str) -> str:
    """Return the TOML text of a profile.

    Raises:
        RulesError: There is no such profile, or it cannot be read.
    """
    names = list_profiles()
    if name not in names:
        hint = suggest_similar(name, names) or f"profiles: {', '.join(names)}"
        hint = "--rules reads a file" if name.endswith(".toml") else hint
        raise RulesError(f"no such profile: {name}", hint=hint)
    return _read_rules_file(PROFILES_DIRECTORY / f"{name}.toml")


def list_profiles() -> tuple[str, ...]:
    """Return the names of all profiles, sorted.

    Raises:
        RulesError: Their directory cannot be listed.
    """
    try:
        names = os.listdir(PROFILES_DIRECTORY)
    except OSError as error:
        reason = f"cannot be listed: {error.strerror}"
        raise RulesError(reason, path=str(PROFILES_DIRECTORY)) from None
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def find_profiles(outputs: Sequence[str]) -> Iterator[str]:
    """Yield the profiles for which one of a model's outputs is a KV buffer."""
    for profile in list_profiles():
        rules = load_rules(profile)
        if any(rules.match("output", name) is not None for name in outputs):
            yield profile


def name_rules(rules: Rules) -> tuple[str | None, Path | None]:
    """Return the profile or the file by which a command uses some rules; neither by default."""
    if rules.name == DEFAULT_PROFILE:
        return None, None
    if rules.name in list_profiles():
        return rules.name, None
    return None, Path(rules.name) if is_occupied(rules.name) else None


def _read_rules_file(path: Path) -> str:
    try:
        return read_text_file(path)
    except ModelError as error:
        raise RulesError(error.message, path=error.path) from None
