"""Arguments of the public functions: paths, rules, tokens; errors name the accepted types."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.storage.read import read_status

PathLike = str | os.PathLike[str]
RulesLike = Rules | str | os.PathLike[str] | None
"""Rules, the name of a profile, or the path of a rules file; ``"auto"`` for the profile that knows
the models' names, ``None`` for the profile qeff, or the one that knows the names if qeff does not.
"""


def load_rules(rules: RulesLike = None) -> Rules:
    """Return the rules of a profile or of a rules file.

    Args:
        rules: The name of a profile, the path of a rules file, or rules, which are returned
            as they are. ``None`` for the profile ``qeff``.

    Returns:
        The rules, for the argument ``rules`` of the other functions.

    Raises:
        RulesError: There is no such profile or file, or it cannot be used.
        ModelError: It cannot be told if there is such a file.
        TypeError: The argument has the wrong type.

    Examples:
        >>> rules = onnxkvrename.load_rules("huggingface")
        >>> onnxkvrename.inspect("model.onnx", rules=rules).buffers
        ()
    """
    from onnxkvrename.rules.load import load_rules as load

    if isinstance(rules, Rules):
        return rules
    for path in list_rules_files(rules):
        return load(path=path)
    return load() if rules is None else load(str(rules))


def load_rules_for(rules: RulesLike, paths: Iterable[Path], to: str | None = None) -> Rules:
    """Return the rules for some models: those that were given, or those that know the names.

    Args:
        rules: As for :func:`load_rules`, or ``"auto"``.
        paths: The models.
        to: The profile whose names the buffers get; ``None`` for their own.

    Raises:
        RulesError: They cannot be used, or several profiles know the names equally well.
        ModelError: A path does not exist or cannot be listed.
        TypeError: The argument has the wrong type.
    """
    from onnxkvrename.rules.pick import pick_rules

    if rules is None or rules == "auto":
        loaded = pick_rules(list(paths), None if rules is None else "auto", None)
    else:
        loaded = load_rules(rules)
    return loaded if to is None else loaded._replace(target=load_rules(as_text(to, "to")))


def list_rules_files(rules: RulesLike) -> tuple[Path, ...]:
    """Return the file that :func:`load_rules` reads; none for built-in rules.

    Raises:
        ModelError: It cannot be told if there is such a file.
        TypeError: The argument has the wrong type.
    """
    from onnxkvrename.rules.load import has_profile

    if rules is None or isinstance(rules, Rules) or (isinstance(rules, str) and has_profile(rules)):
        return ()
    if not isinstance(rules, (str, os.PathLike)):
        raise TypeError(
            "rules must be Rules, the name of a profile or the path of a rules file, "
            f"not {type(rules).__name__}"
        )
    path = Path(rules)
    is_name = isinstance(rules, str) and not path.suffix and read_status(path) is None
    return () if is_name else (path,)  # the error for an unknown name lists the profiles


def as_path(value: PathLike, name: str) -> Path:
    """Return the argument ``name`` as a path, or raise TypeError; ValueError if it is empty."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(
            f"{name} must be a path (str or os.PathLike), not {type(value).__name__}"
            f"{suggest_function(value)}"
        )
    if not os.fspath(value):  # it would mean the working directory
        raise ValueError(f"{name} must not be an empty path")
    return Path(value)


def as_optional_path(value: PathLike | None, name: str) -> Path | None:
    """Return the argument ``name`` as a path, or ``None`` if it was left out."""
    return None if value is None else as_path(value, name)


def as_paths(values: PathLike | Iterable[PathLike]) -> list[Path]:
    """Return one path or several as a list, or raise :class:`TypeError`."""
    if isinstance(values, (str, os.PathLike)):
        return [as_path(values, "models")]
    if isinstance(values, (bytes, bytearray)) or not isinstance(values, Iterable):
        raise TypeError(
            "models must be a path or several (str or os.PathLike), "
            f"not {type(values).__name__}{suggest_function(values)}"
        )
    paths = [as_path(value, "each model") for value in values]
    if not paths:
        raise ValueError("models must not be empty")
    return paths


def as_change(
    token: str | None, *, strip: bool, replace: bool, normalize: bool, to: str | None = None
) -> TokenChange:
    """Return the change that the arguments ask for, or raise :class:`TypeError`."""
    if token is not None and not isinstance(token, str):
        raise TypeError(f"token must be a str or None, not {type(token).__name__}")
    keeps_tokens = to is not None and token is None and not strip
    return TokenChange(token, strip, replace, normalize, keeps_tokens)


def as_text(value: str, name: str) -> str:
    """Return the argument ``name``, or raise :class:`TypeError` unless it is text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    return value


def as_optional_text(value: str | None, name: str) -> str | None:
    """Return the argument ``name`` as text, or ``None`` if it was left out."""
    return None if value is None else as_text(value, name)


def as_sizes(sizes: Mapping[str, int] | None, name: str) -> Mapping[str, int]:
    """Return sizes of symbols, or raise :class:`TypeError` or :class:`ValueError`."""
    if sizes is None:
        return MappingProxyType({})
    if not isinstance(sizes, Mapping):
        raise TypeError(f"{name} must map symbols to sizes, not be {type(sizes).__name__}")
    for symbol, size in sizes.items():
        _check_positive(size, f"{name}[{as_text(symbol, f'each key of {name}')!r}]")
    return MappingProxyType(dict(sizes))


def as_limit(limit: int | None, name: str, maximum: int) -> int | None:
    """Return a limit of at most ``maximum``; raise TypeError or ValueError unless it is one."""
    if limit is not None:
        _check_positive(limit, name)
        if limit > maximum:
            raise ValueError(f"{name} must be at most {maximum:,}, not {limit:,}")
    return limit


def as_lengths(lengths: Sequence[int], name: str) -> tuple[int, ...]:
    """Return lengths of prompts, or raise :class:`TypeError` or :class:`ValueError`."""
    if isinstance(lengths, (str, bytes)) or not isinstance(lengths, Iterable):
        raise TypeError(f"{name} must be several int, not {type(lengths).__name__}")
    values = tuple(lengths)
    for value in values:
        _check_positive(value, f"each of {name}")
    return values


def _check_positive(value: object, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more, not {value}")


def suggest_function(value: object) -> str:
    """Return a hint for a model in memory that was given to a function for files."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "; rename_bytes renames a model in memory"
    if hasattr(value, "SerializeToString"):
        return "; rename_model renames a ModelProto"
    return ""
