"""The words of the library: where a text says an option to add, a caller reads an argument.

The rest of the program words its hints for the command line. Which option is which argument follows
from the records that declare options, so no hint is written twice.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import onnxkvrename
from onnxkvrename.display import render_with
from onnxkvrename.errors import KvRenameError
from onnxkvrename.files.read import is_directory, is_in_memory
from onnxkvrename.findings import Finding
from onnxkvrename.options import Option, list_options
from onnxkvrename.rules.request import Request

_OTHER_NAMES = {"--dim": ("sizes",), "--profile": ("rules",)}
"""Arguments that are not called like the field or the flag of their option."""
_OPTION = re.compile(r"(?<![^\s(])(--[a-z-]+)(?: (\S+=\w+))?")
_OWNERS = {"sizes": "load_layout", "directory": "rename_all"}
"""The functions that have an argument which others are answered with."""
_FUNCTIONS = {
    **{name: name for name in ("rename", "verify", "compare", "inspect")},
    "pairs": "find_pairs",
    **dict.fromkeys(("explain", "profiles"), ""),
}
"""The functions that do what the commands do, if one does."""


def reword_result(value: Any, function: Any) -> Any:
    """Return a result or an error with its texts in other words; what has none as it is.

    Args:
        value: The result, whose findings are reworded, or the error, which is changed.
        function: The function that says it.
    """
    if isinstance(value, KvRenameError):
        value.message = reword_text(value.message, function)
        value.hint = None if value.hint is None else reword_text(value.hint, function)
        if hasattr(value, "findings"):
            value.findings = reword_result(value.findings, function)
        return value
    if isinstance(value, Finding):
        message, hint = (reword_text(text, function) for text in (value.message, value.hint))
        return value._replace(message=message, hint=hint)
    if not isinstance(value, tuple):
        return value
    items = [reword_result(item, function) for item in value]
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
    parts = text.split("`")
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = _reword_code(part, function) or part
        elif "--" in part:
            parts[index] = _OPTION.sub(lambda found: _reword_option(found, function), part)
    return "`".join(parts)


def _reword_option(found: re.Match[str], function: Any) -> str:
    """Return the argument of an option within a sentence, where its value may be any word."""
    flag, item = found.groups()
    argument = _find_argument(flag, function)
    if argument is None:
        return found[0]
    if item is not None and argument.is_size:
        return argument.format(item)
    shown = argument.format(None) if argument.is_bool else argument.name
    return shown if item is None else f"{shown} {item}"


def _reword_code(text: str, function: Any) -> str | None:
    """Return options as arguments, or a command as calls; ``None`` for other code."""
    if not text.startswith(("-", "onnxkvrename ")) or "$'" in text:  # a name for some shells only
        return None
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    if text.startswith("-"):
        return _format_arguments(words, function)
    name, words = _FUNCTIONS.get(words[1], "rename"), words[1 + (words[1] in _FUNCTIONS) :]
    if words[-2:] == ["--as", "rules"]:
        name, words = "suggest_rules", words[:-2]
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    models, options = words[:count], words[count:]
    if not name or not models:
        return None
    calls = []
    if name == "rename" and _takes_several(models, options):
        shown = models if len(models) > 1 else models[0]
        calls.append(_format_call("rename_all", repr(shown), options))
    for model in () if calls else models:
        is_object = is_in_memory(model)
        called = _find_renaming(function) if is_object and name == "rename" else name
        calls.append(_format_call(called, Path(model).name if is_object else repr(model), options))
    return None if None in calls else " and ".join(filter(None, calls))


def _takes_several(models: Sequence[str], options: Sequence[str]) -> bool:
    """Return whether a command renames what only `rename_all` takes."""
    if any(map(is_in_memory, models)):
        return False
    is_several = len(models) > 1 or not {"-d", "--directory"}.isdisjoint(options)
    return is_several or any(is_directory(Path(model)) for model in models)


def _find_renaming(function: Any) -> str:
    """Return the function that renames what another one was given in memory."""
    name: str = function.__name__
    return name if name in ("rename_bytes", "rename_graph") else "rename_model"


def _format_call(name: str, model: str, options: Sequence[str]) -> str | None:
    """Return a call; ``None`` if an option is not an argument of the function."""
    function = getattr(onnxkvrename, name)
    arguments = _format_arguments(options, function, own_only=True)
    start = f"onnxkvrename.{name}({model}"
    return None if arguments is None else f"{start}, {arguments})" if options else f"{start})"


def _format_arguments(words: Sequence[str], function: Any, *, own_only: bool = False) -> str | None:
    """Return options as arguments; ``None`` if one of them is not an argument."""
    arguments, pending = list[str](), list(words)
    while pending:
        flag = pending.pop(0)
        argument = _find_argument(flag, function, own_only=own_only)
        value = None if (argument and argument.is_bool) or not pending else pending.pop(0)
        if argument is None and flag == "--target" and value is not None:
            argument, value = _Argument("token"), _find_token(value)
        if argument is None or (value is None and not argument.is_bool):
            return None
        arguments.append(argument.format(value))
    return ", ".join(arguments)


def _find_token(target: str) -> str | None:
    from onnxkvrename.handoff.find_consumers import load_consumer  # only for a target

    return load_consumer(target).token or None


class _Argument(NamedTuple):
    """An argument of a function, by the option that it is.

    Attributes:
        name: Its name.
        is_bool: Whether it is true or false.
        option: The option of a rename that it is, if it is one.
        owner: The function to call with it, if not the one that speaks.
    """

    name: str
    is_bool: bool = False
    option: Option = Option("")
    owner: str = ""

    @property
    def is_size(self) -> bool:
        """Whether its values are the sizes of symbols."""
        return self.name in _OTHER_NAMES["--dim"]

    def format(self, value: str | None) -> str:
        """Return it with a value of the option; a flag has none."""
        shown = repr(value)
        if value is None:
            shown = "True"
        elif self.is_size:
            symbol, _, size = value.partition("=")
            shown = f"{{{symbol!r}: {size}}}"
        elif value == self.option.metavar:
            shown = value
        text = f"{self.name}={shown}"
        return f"{self.owner}(..., {text})" if self.owner else text


def _find_argument(flag: str, function: Any, *, own_only: bool = False) -> _Argument | None:
    """Return the argument that an option is: of a function, or else of any."""
    field, option = _list_fields().get(flag, ("", Option("")))
    names = (field, flag.strip("-").replace("-", "_"), *_OTHER_NAMES.get(flag, ()))
    own = function.__annotations__
    for known in (own,) if own_only else (own, _list_parameters()):
        for name in names:
            if name in known:
                owner = "" if name in own else _OWNERS.get(name, "")
                return _Argument(name, known[name] == "bool", option, owner)
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

    is_handoff = isinstance(record, onnxkvrename.Handoff)
    function = onnxkvrename.compare if is_handoff else onnxkvrename.load_layout
    return reword_text(render_record(record), function)


render_with(_render_record)
