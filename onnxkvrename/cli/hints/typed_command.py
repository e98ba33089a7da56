"""The command line as it was typed, in parts that another command can be made of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import click

from onnxkvrename.findings import quote_as_bytes
from onnxkvrename.report.inert import escape_text

_UNSHOWN = frozenset(("--format", "--quiet", "--verbose", "--help"))
"""Options that only say how to answer: a suggested command is for a person."""


class TypedOption(NamedTuple):
    """An option with its value.

    Attributes:
        name: Its longest spelling, such as ``--output``.
        words: The words of the command line, such as ``("-o", "m.onnx")``.
    """

    name: str
    words: tuple[str, ...]


class TypedCommand(NamedTuple):
    """A command line that was understood.

    Attributes:
        name: The command.
        paths: Its models, character by character as they were typed.
        options: Its options, in their order.
    """

    name: str
    paths: tuple[str, ...]
    options: tuple[TypedOption, ...]


def read_typed_command(
    name: str, command: click.Command, args: Sequence[str]
) -> TypedCommand | None:
    """Return the parts of a command line.

    Args:
        name: The name of the command.
        command: What reads its options.
        args: All arguments; the name of the command may be the first.

    Returns:
        The parts, or ``None`` if an option is unknown or lacks its value.
    """
    rest = args[1:] if args and args[0] == name else args
    context = click.Context(command, info_name=name, resilient_parsing=True)
    try:
        values, _, order = command.make_parser(context).parse_args(list(rest))
    except click.UsageError:
        return None
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    paths = [path for param in arguments for path in _list_texts(values.get(param.name))]
    options = (param for param in order if isinstance(param, click.Option))
    return TypedCommand(name, tuple(paths), tuple(_list_options(options, values)))


def _list_texts(value: Any) -> list[str]:
    """Return the texts of a value: one, several, or none if it was not typed."""
    if isinstance(value, str):
        return [value]
    return [text for text in value if text] if isinstance(value, list | tuple) else []


def _list_options(params: Iterable[click.Option], values: dict[str, Any]) -> Iterator[TypedOption]:
    """Yield each option once, and one that may be repeated as often as it was typed."""
    seen: Counter[str] = Counter()
    for param in params:
        name = max(param.opts, key=len)
        texts = _list_texts(values[param.name or ""])
        seen[name] += 1
        if name in _UNSHOWN or seen[name] > (len(texts) if param.multiple else 1):
            continue
        spelling = param.opts[0]
        if param.is_flag:
            yield TypedOption(name, (spelling,))
        elif texts:
            yield build_option(name, spelling, texts[seen[name] - 1])


def build_option(name: str, spelling: str, text: str) -> TypedOption:
    """Return an option with a value, also for one that begins with a dash.

    People and shells would mistake such a value for an option.

    Args:
        name: Its longest spelling.
        spelling: The one to show.
        text: Its value.
    """
    return TypedOption(name, (f"{name}={text}",) if text.startswith("-") else (spelling, text))


def quote_unsafe(command: str) -> str:
    r"""Return a command that is inert where it is printed, and names the same files when pasted.

    What a terminal or a CI runner acts on, and bytes that are not UTF-8, are printed as escapes,
    which between ``'`` are other names; a backtick would end the command. So they are written as
    ``$'\012'`` (:func:`~onnxkvrename.findings.quote_as_bytes`).

    Args:
        command: The command, as :mod:`shlex` or :func:`~onnxkvrename.findings.quote_word` quotes.
    """
    return re.sub(r"\$'[^']*'|'([^']*)'|\"[^\"]*\"", _quote_unsafe_part, command)


def _quote_unsafe_part(match: re.Match[str]) -> str:
    text = match[1]
    if text is None or ("`" not in text and escape_text(text) == text):
        return match[0]
    return quote_as_bytes(text)
