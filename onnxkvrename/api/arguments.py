"""Arguments of the public functions: paths, rules, tokens; errors name the accepted types."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from onnxkvrename.rules.find_models import check_is_local, find_jobs
from onnxkvrename.rules.load import AUTO_PROFILE, has_profile
from onnxkvrename.rules.load import load_rules as load
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
        RulesError: The profile or file does not exist or cannot be used.
        ModelError: It cannot be determined if there is such a file.
        TypeError: The argument has the wrong type.

    Examples:
        >>> rules = onnxkvrename.load_rules("huggingface")
        >>> onnxkvrename.inspect("model.onnx", rules=rules).buffers
        ()
    """
    return find_rules(*split_rules(rules))


def load_rules_for(rules: RulesLike, paths: Sequence[Path]) -> Rules:
    """Return the rules for some models: the requested ones, or those that match the names.

    Args:
        rules: As for :func:`load_rules`, or ``"auto"``.
        paths: The models.

    Raises:
        RulesError: They cannot be used, or several profiles know the names equally well.
        ModelError: A path does not exist or cannot be listed.
        TypeError: The argument has the wrong type.
    """
    return find_rules(*split_rules(rules), paths)


def find_rules(
    profile: str | None,
    rules: Path | Rules | None,
    paths: Sequence[Path] = (),
    pairs: str | None = None,
    token: str | None = None,
) -> Rules:
    """Return the rules that a request asks for, or that know the names of the models.

    Args:
        profile: A profile; ``None`` for the default one, or another one that knows the names.
        rules: Rules to use instead, or a file of them.
        paths: The models, and directories of models; without any, the names do not count.
        pairs: Whether the pairs that the graphs show are the rules.
        token: With `pairs`: the token that names may carry already.

    Raises:
        RulesError: They cannot be used, several profiles know the names equally well, or the
            graphs show no pairs.
        ModelError: A path does not exist, or a model cannot be read.
    """
    if isinstance(rules, Rules):
        return rules
    if pairs is not None:
        return _find_rules_by_dataflow(paths, token or "")
    if not paths:
        return load(profile, rules)
    from onnxkvrename.rules.pick import pick_rules  # a rename needs it only where qeff fails

    return pick_rules(paths, profile, rules)


def _find_rules_by_dataflow(paths: Sequence[Path], token: str) -> Rules:
    """Return rules for exactly the pairs that the graphs of some models show."""
    from onnxkvrename.verification.pairs.infer_rules import (  # loads onnx
        find_carried_tokens,
        infer_rules,
        trace_model,
    )

    models = [job.model for job in find_jobs(paths) if job.model.suffix != ".json"]
    traced = [trace_model(model) for model in models]
    return infer_rules(traced, find_carried_tokens(traced, token)).rules


def split_rules(rules: RulesLike) -> tuple[str | None, Path | Rules | None]:
    """Return the profile, or the rules or their file, that the argument ``rules`` means.

    Raises:
        ModelError: It cannot be determined if there is such a file, or it is a URL.
        TypeError: The argument has the wrong type.
        ValueError: It is empty.
    """
    if rules is None or isinstance(rules, Rules):
        return None, rules
    if isinstance(rules, str) and (rules == AUTO_PROFILE or has_profile(rules)):
        return rules, None
    text = _read_path(rules)
    if text is None:
        raise TypeError(
            "rules must be Rules, the name of a profile or the path of a rules file, "
            f"not {describe_type(rules)}"
        )
    if not text:
        raise ValueError("rules must not be an empty path")
    check_is_local(text)
    path = Path(text)
    is_name = isinstance(rules, str) and not path.suffix and read_status(path) is None
    return (text, None) if is_name else (None, path)  # the error for a name lists the profiles


def as_path(
    value: PathLike,
    name: str,
    *,
    expected: str = "a path (str or os.PathLike)",
    is_output: bool = False,
    renames: bool = False,
) -> Path:
    """Return the argument ``name`` as a path.

    Args:
        value: The argument.
        name: Its name, for messages.
        expected: The types that are accepted, for messages.
        is_output: Whether it is to be written.
        renames: Whether the function renames: others that do are suggested for a model in memory.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty.
        ModelError: It is a URL and would be read.
        WriteError: It is a URL and would be written.
    """
    text = _read_path(value)
    if text is None:
        raise TypeError(
            f"{name} must be {expected}, not {describe_type(value)}"
            f"{_suggest_for_memory(value, renames=renames)}"
        )
    if not text:  # it would mean the working directory
        raise ValueError(f"{name} must not be an empty path")
    check_is_local(text, is_output=is_output)
    return Path(text)


def as_optional_path(value: PathLike | None, name: str, *, is_output: bool = False) -> Path | None:
    """Return the argument ``name`` as a path, or ``None`` if it was left out."""
    return None if value is None else as_path(value, name, is_output=is_output)


def as_output_file(value: PathLike | None, name: str) -> Path | None:
    """Return the argument ``name`` as the path of a file, or ``None`` if it was left out.

    Raises:
        TypeError, ValueError, WriteError: As for :func:`as_path`.
        ValueError: It ends as the path of a directory does.
    """
    path = as_optional_path(value, name, is_output=True)
    if path is None or value is None:
        return None
    if os.path.basename(os.fspath(value)) in ("", ".", ".."):
        raise ValueError(
            f"{name} must be the path of a file, not of a directory such as {os.fspath(value)!r}; "
            "rename_all writes into a directory"
        )
    return path


def as_paths(
    values: PathLike | Iterable[PathLike], name: str = "models", *, renames: bool = False
) -> list[Path]:
    """Return the argument ``name``, one path or several, as a list.

    Args:
        values: The argument.
        name: Its name, for messages.
        renames: As for :func:`as_path`.

    Raises:
        TypeError: It is neither, or one of them is not a path.
        ValueError: There is none, or one of them is empty.
        ModelError: One of them is a URL.
    """
    if isinstance(values, (str, os.PathLike)):
        return [as_path(values, name, renames=renames)]
    is_data = isinstance(values, (bytes, bytearray, memoryview)) or hasattr(values, "read")
    if is_data or not isinstance(values, Iterable):
        raise TypeError(
            f"{name} must be a path or several (str or os.PathLike), not {describe_type(values)}"
            f"{_suggest_for_memory(values, renames=renames)}"
        )
    paths = [as_path(value, f"each of {name}", renames=renames) for value in values]
    if not paths:
        raise ValueError(f"{name} must not be empty")
    return paths


def check_flags(**flags: object) -> None:
    """Raise :class:`TypeError` for an argument that must be true or false, and is neither."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {describe_type(value)}")


def check_executor(executor: object) -> None:
    """Raise :class:`TypeError` unless the argument is an executor or ``None``."""
    if executor is not None and (isinstance(executor, type) or not hasattr(executor, "submit")):
        raise TypeError(
            f"executor must be a concurrent.futures.Executor or None, not {describe_type(executor)}"
        )


def as_text(value: str, name: str) -> str:
    """Return the argument ``name``, or raise :class:`TypeError` unless it is text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {describe_type(value)}")
    return value


def check_choice(value: str, name: str, choices: Sequence[str]) -> None:
    """Raise :class:`TypeError` or :class:`ValueError` unless an argument is one of some texts."""
    if as_text(value, name) not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def as_optional_text(value: str | None, name: str) -> str | None:
    """Return the argument ``name`` as text, or ``None`` if it was left out."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} must be a str or None, not {describe_type(value)}")
    return value


def as_sizes(sizes: Mapping[str, int] | None, name: str) -> Mapping[str, int]:
    """Return sizes of symbols, or raise :class:`TypeError` or :class:`ValueError`."""
    if sizes is None:
        return MappingProxyType({})
    if not isinstance(sizes, Mapping):
        raise TypeError(f"{name} must map symbols to sizes, not be {describe_type(sizes)}")
    for symbol, size in sizes.items():
        _check_positive(size, f"{name}[{as_text(symbol, f'each key of {name}')!r}]")
    return MappingProxyType(dict(sizes))


def as_lengths(lengths: Sequence[int], name: str) -> tuple[int, ...]:
    """Return lengths of prompts, or raise :class:`TypeError` or :class:`ValueError`."""
    if isinstance(lengths, (str, bytes)) or not isinstance(lengths, Iterable):
        raise TypeError(f"{name} must be several integers, not {describe_type(lengths)}")
    values = tuple(lengths)
    for value in values:
        _check_positive(value, f"each of {name}")
    return values


def _check_positive(value: object, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {describe_type(value)}")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more, not {value}")


def suggest_for_file(value: object) -> str:
    """Return a hint for the path of a model that was passed to a function for models in memory."""
    return "; rename renames a model in a file" if isinstance(value, (str, os.PathLike)) else ""


def suggest_other_form(value: object) -> str:
    """Return a hint for a model in another form in memory than the function takes."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "; rename_bytes renames a serialized model"
    return "; rename_model renames a ModelProto" if _is_message(value) else ""


def _suggest_for_memory(value: object, *, renames: bool) -> str:
    """Return a hint for a model in memory that was passed to a function for files."""
    if renames:
        return suggest_other_form(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "; write the bytes to a file first"
    return "; save it to a file first, with onnx.save" if _is_message(value) else ""


def _is_message(value: object) -> bool:
    return hasattr(value, "SerializeToString")


def describe_type(value: object) -> str:
    """Return the type of a value, or which class it is."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _read_path(value: object) -> str | None:
    """Return a path as text, or ``None`` if it is not one; a path of bytes is not."""
    if isinstance(value, type) or not isinstance(value, (str, os.PathLike)):
        return None
    try:
        text = os.fspath(value)
    except TypeError:
        return None
    return text if isinstance(text, str) else None
