"""The words of the library: where a text says an option to add, a caller reads an argument.

The rest of the program words its hints for the command line. Which option is which argument follows
from the records that declare options, so no hint is written twice.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import onnxkvrename
from onnxkvrename.display import render_with
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.options import Option, list_options
from onnxkvrename.renaming.request import Request
from onnxkvrename.storage.read import is_in_memory

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_OTHER_NAMES = {"--dim": ("sizes", "dims"), "--profile": ("rules",), "--tokens": ("prompts",)}
"""Arguments that are not called like the field or the flag of their option."""


def speak_python(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make a public function name arguments where its findings and errors name options."""

    @wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            result: _Result = _reword(function(*args, **kwargs), call)
            return result
        except KvRenameError as error:
            _reword(error, call)
            raise

    return call


def _reword(value: Any, function: Any) -> Any:
    """Return a result with its findings in other words; what has none is returned as it is."""
    if isinstance(value, KvRenameError):
        value.message = reword_text(value.message, function)
        value.hint = None if value.hint is None else reword_text(value.hint, function)
        if hasattr(value, "findings"):
            value.findings = _reword(value.findings, function)
        return value
    if isinstance(value, Finding):
        message, hint = (reword_text(text, function) for text in (value.message, value.hint))
        return value._replace(message=message, hint=hint)
    if not isinstance(value, tuple):
        return value
    items = [_reword(item, function) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return value._make(items) if hasattr(value, "_make") else tuple(items)


def reword_text(text: str, function: Any) -> str:
    """Return a text with arguments instead of options, and calls instead of commands.

    What the library cannot do stays a command.

    Args:
        text: A message or a hint; options to add and commands are between backticks.
        function: The function that says it.
    """
    if "--" not in text and "`" not in text:
        return text
    reword = partial(_reword_flag, function=function)
    parts = text.split("`")
    for index, part in enumerate(parts):
        if index % 2 == 0:
            parts[index] = re.sub(r"(?<!\S)(--[a-z-]+)(?: (\S+=\S+))?", reword, part)
        elif part.startswith("-"):
            parts[index] = _reword_options(part, function) or part
        elif part.startswith("onnxkvrename "):
            parts[index] = _reword_command(part, function) or part
    return "`".join(parts)


def _reword_flag(match: re.Match[str], function: Any) -> str:
    """Return the argument of an option within a sentence, where its value may be any word."""
    flag, item = match.groups()
    found = _find_argument(flag, function)
    if found is None:
        return match[0]
    name, is_bool = found
    if item is not None and flag == "--dim":
        return _format_argument(flag, name, item)
    shown = _format_argument(flag, name, None) if is_bool else name
    return shown if item is None else f"{shown} {item}"


def _reword_options(text: str, function: Any) -> str | None:
    words = _split_words(text)
    arguments = None if words is None else _list_arguments(words, function)
    return None if arguments is None else ", ".join(arguments)


def _reword_command(text: str, function: Any) -> str | None:
    """Return the call that does what a command does; ``None`` if no function does."""
    words = _split_words(text)
    if words is None:
        return None
    command, rest = "rename", words[1:]
    if rest and rest[0].replace("-", "_") in onnxkvrename.__all__:
        command, rest = rest[0].replace("-", "_"), rest[1:]
    count = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    paths, options = rest[:count], rest[count:]
    if command == "rename" and len(paths) > 1 and not any(map(is_in_memory, paths)):
        calls = [_format_call("rename_all", paths, options)]
    else:
        in_memory = {"rename": _find_renaming(function)}.get(command, command)
        calls = [
            _format_call(in_memory if is_in_memory(path) else command, path, options)
            for path in paths
        ]
    known = [call for call in calls if call is not None]
    return " and ".join(known) if known and len(known) == len(calls) else None


def _find_renaming(function: Any) -> str:
    """Return the function that renames what another one was given in memory."""
    name: str = function.__name__
    return name if name in ("rename_bytes", "rename_graph") else "rename_model"


def _format_call(command: str, model: str | list[str], options: Sequence[str]) -> str | None:
    arguments = _list_arguments(options, getattr(onnxkvrename, command), is_call=True)
    is_object = isinstance(model, str) and is_in_memory(model)
    shown = Path(str(model)).name if is_object else repr(model)
    return (
        None if arguments is None else f"onnxkvrename.{command}({', '.join((shown, *arguments))})"
    )


def _split_words(text: str) -> list[str] | None:
    if "$'" in text:  # a name that only some shells can read
        return None
    try:
        return shlex.split(text)
    except ValueError:
        return None


def _list_arguments(
    words: Sequence[str], function: Any, *, is_call: bool = False
) -> list[str] | None:
    """Return options as arguments; ``None`` if one of them is not an argument.

    Args:
        words: The options with their values.
        function: The function that is called.
        is_call: Whether only its own arguments will do, not those of other functions.
    """
    arguments, pending = list[str](), list(words)
    while pending:
        flag = pending.pop(0)
        name, is_bool = _find_argument(flag, function, is_call=is_call) or ("", False)
        value = None if is_bool or not pending else pending.pop(0)
        if not name and flag == "--target" and value is not None:
            name, value = "token", _find_token(value)
        if not name or (value is None and not is_bool):
            return None
        arguments.append(_format_argument(flag, name, value))
    return arguments


def _find_token(target: str) -> str | None:
    from onnxkvrename.handoff.find_consumers import load_consumer  # only for a target

    return load_consumer(target).token or None


def _format_argument(flag: str, name: str, value: str | None) -> str:
    option = _list_fields().get(flag, ("", None))[1]
    if value is None:
        return f"{name}={not (option and option.negates)}"
    if flag == "--dim":
        symbol, _, size = value.partition("=")
        return f"{name}={{{symbol!r}: {size}}}"
    return f"{name}={value}" if option and value == option.metavar else f"{name}={value!r}"


def _find_argument(flag: str, function: Any, *, is_call: bool = False) -> tuple[str, bool] | None:
    """Return the argument that an option is, of a function or else of any, and if it is a bool."""
    field = _list_fields().get(flag, ("", None))[0]
    names = (field, flag.strip("-").replace("-", "_"), *_OTHER_NAMES.get(flag, ()))
    own = function.__annotations__
    for known in (own,) if is_call else (own, _list_parameters()):
        for name in names:
            if name in known:
                return name, known[name] == "bool"
    return None


@cache
def _list_fields() -> dict[str, tuple[str, Option]]:
    """Return the fields of a rename and their options, by the spellings of the options."""
    return {
        flag: (field, option)
        for field, option in list_options(Request).items()
        for flag in option.flags.split()
    }


@cache
def _list_parameters() -> dict[str, str]:
    """Return the arguments of all public functions, with their annotations."""
    public = (getattr(onnxkvrename, name) for name in onnxkvrename.__all__)
    functions = (each for each in public if isinstance(each, FunctionType))
    return {name: kind for each in functions for name, kind in each.__annotations__.items()}


def _render_record(record: Any) -> str:
    from onnxkvrename.report.record_text import render_record  # loads all texts

    return render_record(record)


render_with(_render_record)
