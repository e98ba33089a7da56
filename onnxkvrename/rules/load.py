"""Load rules: a built-in profile, one that another distribution adds, or a file.

Another distribution adds a profile by an entry point in the group
``onnxkvrename.profiles``. Its name is the profile's, and its value leads to the
TOML text, or to the path of the file with it (an :class:`os.PathLike` object or a
resource of :mod:`importlib.resources`)::

    [project.entry-points."onnxkvrename.profiles"]
    mine = "my_package:PROFILE"
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxkvrename.errors import ModelError, RulesError
from onnxkvrename.rules.profile import Rules, parse_rules
from onnxkvrename.storage.read import read_text_file

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PROFILES_DIRECTORY = Path(__file__).parent / "profiles"
PLUGIN_GROUP = "onnxkvrename.profiles"


def load_rules(profile: str = "qeff", path: Path | None = None) -> Rules:
    """Load a profile, or the rules in a file.

    Args:
        profile: The name of a profile. A built-in one always goes before one with the
            same name in another distribution.
        path: A TOML file with rules, to be used instead of a profile.

    Raises:
        RulesError: The profile or the file does not exist or cannot be used. For a
            profile of another distribution the message names that distribution.
    """
    if path is not None:
        return parse_rules(_read_rules_file(path), str(path))
    if profile in _list_builtin_profiles():
        return parse_rules(_read_rules_file(PROFILES_DIRECTORY / f"{profile}.toml"), profile)
    entry_points = [point for point in _list_entry_points() if point.name == profile]
    if not entry_points:
        raise RulesError(
            f"no profile is called {profile}", hint=f"there are: {', '.join(list_profiles())}"
        )
    if len(entry_points) > 1:
        owners = " and ".join(sorted(map(_get_distribution_name, entry_points)))
        raise RulesError(f"more than one distribution has a profile {profile}: {owners}")
    return _load_plugin(entry_points[0])


def list_profiles() -> tuple[str, ...]:
    """Return the names of all profiles, built-in and of other distributions, sorted.

    Raises:
        RulesError: The installed distributions cannot be listed.
    """
    names = {point.name for point in _list_entry_points()}
    return tuple(sorted(names.union(_list_builtin_profiles())))


def _list_builtin_profiles() -> set[str]:
    return {path.stem for path in PROFILES_DIRECTORY.glob("*.toml")}


def _list_entry_points() -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # slow to load, and not needed for built-in ones

    try:
        return tuple(entry_points(group=PLUGIN_GROUP))
    except Exception as error:  # whatever the metadata of any distribution holds
        raise RulesError(
            f"the profiles of other distributions cannot be listed: {_format_exception(error)}"
        ) from None


def _load_plugin(entry_point: EntryPoint) -> Rules:
    source = f"profile {entry_point.name} of the distribution {_get_distribution_name(entry_point)}"
    try:
        value = entry_point.load()
        text = value if isinstance(value, str) else _read_resource(value)
    except ModelError as error:
        raise RulesError(f"cannot be loaded: {error}", path=source) from None
    except Exception as error:  # whatever the code of the distribution raises
        raise RulesError(f"cannot be loaded: {_format_exception(error)}", path=source) from None
    try:
        return parse_rules(text, entry_point.name)
    except RulesError as error:
        raise RulesError(error.message, path=source, hint=error.hint) from None


def _read_resource(value: Any) -> str:
    """Read the text of a path or a package's resource, wherever that is kept."""
    if isinstance(value, os.PathLike):
        return read_text_file(Path(value))
    if not hasattr(value, "iterdir"):  # as resources have, but modules do not
        raise TypeError(f"its value must be TOML text or a path to it, not {type(value).__name__}")
    from importlib.resources import as_file

    with as_file(value) as path:
        return read_text_file(path)


def _read_rules_file(path: Path) -> str:
    try:
        return read_text_file(path)
    except ModelError as error:
        raise RulesError(error.message, path=error.path) from None


def _get_distribution_name(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else "unknown"


def _format_exception(error: Exception) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {error}".rstrip(": ").partition("\n")[0]
