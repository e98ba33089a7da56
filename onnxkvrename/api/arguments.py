"""What the functions take: paths, rules and tokens, with errors that name the accepted types."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules

PathLike = str | os.PathLike[str]
RulesLike = Rules | str | os.PathLike[str] | None
"""Rules, the name of a profile, or the path of a rules file; ``None`` for the profile qeff."""


def load_rules(rules: RulesLike = None) -> Rules:
    """Return the rules of a profile or of a rules file.

    Args:
        rules: The name of a profile, the path of a rules file, or rules, which are returned
            as they are. ``None`` for the profile ``qeff``.

    Raises:
        RulesError: There is no such profile or file, or it cannot be used.
        TypeError: The argument has the wrong type.
    """
    from onnxkvrename.rules.load import has_profile
    from onnxkvrename.rules.load import load_rules as load

    if isinstance(rules, Rules):
        return rules
    if rules is None:
        return load()
    if isinstance(rules, str) and has_profile(rules):
        return load(rules)
    if not isinstance(rules, (str, os.PathLike)):
        raise TypeError(
            "rules must be Rules, the name of a profile or the path of a rules file, "
            f"not {type(rules).__name__}"
        )
    path = Path(rules)
    if isinstance(rules, str) and not path.suffix and not os.path.exists(path):
        return load(rules)  # its error lists the profiles
    return load(path=path)


def as_path(value: PathLike, name: str) -> Path:
    """Return the argument ``name`` as a path, or raise :class:`TypeError`."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(
            f"{name} must be a path (str or os.PathLike), not {type(value).__name__}"
            f"{suggest_function(value)}"
        )
    return Path(value)


def as_optional_path(value: PathLike | None, name: str) -> Path | None:
    """Return the argument ``name`` as a path, or ``None`` if it was left out."""
    return None if value is None else as_path(value, name)


def as_paths(values: PathLike | Iterable[PathLike]) -> list[Path]:
    """Return one path or several as a list, or raise :class:`TypeError`."""
    if isinstance(values, (str, os.PathLike)):
        return [Path(values)]
    if isinstance(values, (bytes, bytearray)) or not isinstance(values, Iterable):
        raise TypeError(
            "models must be a path or several (str or os.PathLike), "
            f"not {type(values).__name__}{suggest_function(values)}"
        )
    return [as_path(value, "each model") for value in values]


def as_change(token: str | None, *, strip: bool, replace: bool, normalize: bool) -> TokenChange:
    """Return the change that the arguments ask for, or raise :class:`TypeError`."""
    if token is not None and not isinstance(token, str):
        raise TypeError(f"token must be a str or None, not {type(token).__name__}")
    return TokenChange(token, strip=strip, replace=replace, normalize=normalize)


def suggest_function(value: object) -> str:
    """Return a hint for a model in memory that was given to a function for files."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "; rename_bytes renames a model in memory"
    if hasattr(value, "SerializeToString"):
        return "; rename_model renames a ModelProto"
    return ""
