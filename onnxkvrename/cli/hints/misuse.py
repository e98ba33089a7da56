"""Answers to a command line that cannot be understood: what is wrong, and what was meant."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from onnxkvrename.cli.hints.typed_command import quote_unsafe, read_typed_command
from onnxkvrename.cli.main import COMMANDS, load_command
from onnxkvrename.errors import KvRenameError, ReadError
from onnxkvrename.findings import find_similar, format_list, quote_path, suggest_similar
from onnxkvrename.handoff.find_consumers import list_consumers
from onnxkvrename.rules.load import list_profiles
from onnxkvrename.storage.read import is_directory, is_occupied

_PROGRAM = "onnxkvrename"
_DEFAULT_COMMAND = next(iter(COMMANDS))
_OPTION_WORDS = {"strip": "--strip", "undo": "--strip", "help": "--help"}
"""Words that are meant as a command, each with the option for it."""
_OTHER_WORDS = {
    "convert": "rename",
    "diff": "compare",
    "info": "inspect",
    "show": "inspect",
    "list": "inspect",
    "validate": "verify",
}
"""Words for what a command does, which are not similar to its name."""
_READERS = ("verify", "inspect", "check-consumer", "compare", "pairs")
"""Commands that write nothing, and so may be suggested in the place of another one."""
_EAGER_OPTIONS = frozenset(("-h", "--help"))
_VERSION = "--version"
"""An option of the program, and of no command."""
_MODEL_COMMANDS = ("rename", "manifest", "custom-io", *_READERS)
"""Commands of which the arguments are models."""
_MAX_OWNERS = 3
"""Commands that have an option by which one of them can be told."""
_MAX_LETTERS = 4
"""Options that are suggested for one letter."""


def check_command_name(args: Sequence[str]) -> None:
    """Check that the first word is not a misspelled command, or one that is an option here.

    Args:
        args: All arguments, of which the first is neither a command nor a path that exists.

    Raises:
        KvRenameError: It looks like one.
    """
    word = args[0]
    message = f"no such file or command: {word}"
    if word in _OPTION_WORDS:
        option = _OPTION_WORDS[word] if len(args) > 1 else "--help"
        command = shlex.join([*(args[1:] if option != "--help" else ()), option])
        if word == "help" and args[1:2] and args[1] in COMMANDS:
            command = f"{args[1]} --help"
        raise KvRenameError(message, hint=f"{_PROGRAM} {command}")
    similar = _find_meant_command(word) or find_similar(word, [*COMMANDS, *list_models_here()])
    if similar is not None:
        raise KvRenameError(message, hint=f"did you mean {quote_path(similar)}?")


def _find_meant_command(word: str) -> str | None:
    """Return the command that a word means, or is the beginning of."""
    longer = (name for name in COMMANDS if name.startswith(word) and len(word) > 3)
    return _OTHER_WORDS.get(word) or next(longer, None)


def list_models_here() -> list[str]:
    """Return the directories and models in the working directory."""
    try:
        names = os.listdir()
        return [name for name in names if name.endswith(".onnx") or is_directory(Path(name))]
    except (OSError, ReadError):
        return []


def explain_missing_model(name: str, args: Sequence[str], error: KvRenameError) -> None:
    """Say in the error of a missing file what was probably meant by its name.

    Args:
        name: The command that ran.
        args: All arguments.
        error: The error, of which the path is one of them; its hint is replaced or added.
    """
    word = error.path or ""
    command: click.Command = load_command(name).command
    typed = read_typed_command(name, command, args)
    if typed is None or not re.fullmatch(r"[A-Za-z][\w-]*", word):
        return
    if word not in typed.paths:
        if ("--rules", word) in {option.words for option in typed.options}:
            is_profile = word in list_profiles()
            error.hint = f"`--profile {word}`" if is_profile else error.hint
        return
    has_name = args[:1] == [name]
    rest = [arg for arg in args[has_name:] if arg != word]
    if word in COMMANDS:
        is_understood = word in _MODEL_COMMANDS and _is_understood(word, rest)
        line = shlex.join([word, *rest]) if is_understood else f"{word} --help"
        error.hint = quote_unsafe(f"`{_PROGRAM} {line}`: the command comes first")
    elif word == "help":
        error.hint = f"{_PROGRAM} {name} --help"
    elif error.hint is not None:
        return
    elif word in list_consumers():
        error.hint = _suggest_option(name, rest, "--target", word)
    else:
        meant = _find_meant_command(word) or find_similar(word, COMMANDS)
        near = find_similar(word, list_models_here())
        if meant is not None and not has_name:
            error.message = "no such file or command"
            error.hint = f"did you mean {meant}? the command comes first"
        elif near is not None:
            error.hint = f"did you mean {quote_path(near)}?"
        elif not has_name and args[0] == word:
            error.message = "no such file or command"
            error.hint = f"`{_PROGRAM} --help` lists all commands"
        elif not has_name and word.isalnum():
            error.hint = _suggest_option(name, rest, "--prefix", word)


def _suggest_option(name: str, rest: Sequence[str], option: str, word: str) -> str | None:
    """Return the hint that a word belongs after an option, which does not have a value yet."""
    if option in rest or "--target" in rest:
        return None
    named = [name] if name != _DEFAULT_COMMAND else []
    readers = (named, ["check-consumer"]) if option == "--target" else (named,)
    for words in readers:
        if _is_understood(words[0] if words else name, [*rest, option, word]):
            return quote_unsafe(shlex.join([_PROGRAM, *words, *rest, option, word]))
    return None


def build_usage_failure(
    name: str, args: Sequence[str], error: click.ClickException
) -> KvRenameError:
    """Return the error for wrong arguments, with the choice that was probably meant.

    Args:
        name: The command.
        args: All arguments.
        error: What click says.
    """
    command: click.Command = load_command(name).command
    message, hint = error.format_message().rstrip("."), None
    parameter = error.param if isinstance(error, click.BadParameter) else None
    if isinstance(error, click.NoSuchOption):
        message, hint = _explain_unknown_option(name, args, error.option_name, command)
    elif isinstance(error, click.MissingParameter) and parameter is not None:
        message, hint = _explain_missing_parameter(name, parameter, command)
    elif isinstance(error, click.BadOptionUsage):
        parameter = _find_option(command, error.option_name)
        if parameter is not None and parameter.is_flag:
            message = f"{error.option_name} cannot take a value"
        elif parameter is not None:
            message = f"{error.option_name} requires a value"
            hint = _list_choices(parameter, command)
    elif isinstance(parameter, click.Option):
        message = f"{parameter.opts[-1]}: {error.message.rstrip('.')}"
        message = _explain_range(message)
        if isinstance(parameter.type, click.Choice):
            hint = _suggest_choice(error.message, map(str, parameter.type.choices))
    elif isinstance(parameter, click.Argument):
        message = f"{parameter.human_readable_name.strip('[.]')}: {error.message.rstrip('.')}"
    elif match := re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", message, re.DOTALL):
        message = f"too many arguments: {match[1]}; {name} takes {_list_arguments(command)}"
    if hint is None and not message.endswith(")"):  # else it says itself what to do
        hint = f"`{_PROGRAM} {name} --help` lists all options"
    return KvRenameError(message, hint=hint)


def _explain_range(message: str) -> str:
    """Return what click says of a wrong number in words."""
    message = message.replace("not a valid integer range", "not a whole number")
    message = re.sub(r"is not in the range x>=(\d+)", r"is less than \1", message)
    return re.sub(r"in the range (\d+)<=x<=(\d+)", r"a number from \1 to \2", message)


def _suggest_choice(message: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is similar to the wrong one; no number is a mistake for another."""
    wrong = message.partition("'")[2].partition("' is not ")[0]
    return suggest_similar(wrong, choices) if any(map(str.isalpha, wrong)) else None


def _explain_missing_parameter(
    name: str, parameter: click.Parameter, command: click.Command
) -> tuple[str, str | None]:
    """Return what is missing, and what may be passed."""
    if isinstance(parameter, click.Argument):
        argument = parameter.human_readable_name.removesuffix("...")
        required = _list_arguments(command)
        is_model = argument == "MODEL"
        needs = "pass an .onnx file" if is_model else f"{name} requires {required}"
        return f"no {argument} given: {needs}", None
    assert isinstance(parameter, click.Option)
    option, metavar = max(parameter.opts, key=len), parameter.metavar or ""
    message = f"{name} requires {option} {metavar}".rstrip()
    return message, (parameter.help or "").rstrip(".") or None


def _list_arguments(command: click.Command) -> str:
    """Return the arguments of a command, as its help names them."""
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    names = [param.human_readable_name.strip("[.]") for param in arguments]
    return " and ".join(names) if len(names) > 1 else f"one {names[0]}"


def _find_option(command: click.Command, spelling: str) -> click.Option | None:
    """Return the option of a command with one of its spellings."""
    options = (param for param in command.params if isinstance(param, click.Option))
    return next((option for option in options if spelling in option.opts), None)


def _list_choices(option: click.Option, command: click.Command) -> str | None:
    """Return the values that a shell would complete for an option, if they are known."""
    items = option.shell_complete(click.Context(command), "")
    values = [item.value for item in items if item.type == "plain"]
    return f"one of: {', '.join(values)}" if values else None


def _explain_unknown_option(
    name: str, args: Sequence[str], option: str, command: click.Command
) -> tuple[str, str | None]:
    """Return what is wrong with an option that a command does not have, and which it may be."""
    word = _find_typed_word(args, option)
    paths = [arg for arg in args if arg.startswith(option) and is_occupied(arg)]
    if paths:
        return f"no such option: {option}", f"for the file, pass {quote_path(paths[0])}"
    own = _list_spellings(command)
    others: dict[str, list[str]] = {}
    for other in COMMANDS:
        for spelling in _list_spellings(load_command(other).command):
            if spelling not in own:
                others.setdefault(spelling, []).append(other)
    long = f"--{word.lstrip('-').replace('_', '-')}"
    known = [*own, *others, _VERSION]
    similar = find_similar(long, known, cutoff=0.75) if len(word) > 2 else None
    if similar == _VERSION or option == "-V":
        return f"no such option: {word}", f"`{_PROGRAM} {_VERSION}` shows the version"
    if similar is None:
        letters = sorted(each for each in own if each.startswith(f"--{option[1]}"))
        word = word if word.startswith("--") else option
        has_few = 0 < len(letters) <= _MAX_LETTERS and len(option) == 2
        hint = f"did you mean {' or '.join(letters)}?" if has_few else None
        return f"no such option: {word}", hint
    if similar in own:
        return f"no such option: {word}", f"did you mean {similar}?"
    owners = others[similar]
    listed = f"{format_list(owners)} {'has' if len(owners) == 1 else 'have'}"
    if similar != word:
        return f"no such option: {word}", f"did you mean {similar}, which {listed}?"
    rest = list(args[args[:1] == [name] :])
    is_own = name in _READERS and len(owners) <= _MAX_OWNERS and not _EAGER_OPTIONS & {*rest}
    readers = (owner for owner in owners if owner in _READERS and is_own)
    reader = next((owner for owner in readers if _is_understood(owner, rest)), None)
    hint = quote_unsafe(shlex.join([_PROGRAM, reader, *rest])) if reader else None
    return f"{name} has no option {word}; {listed} it", hint


def _find_typed_word(args: Sequence[str], option: str) -> str:
    """Return the word with an unknown option: ``-version``, of which click names ``-e`` only."""
    if option.startswith("--"):
        return option
    words = (arg for arg in args if re.match(r"-[^-]", arg) and option[1:] in arg[1:])
    return next(words, option).partition("=")[0]


def _list_spellings(command: click.Command) -> list[str]:
    """Return the long options of a command."""
    spellings = [spelling for param in command.params for spelling in param.opts]
    return [spelling for spelling in (*spellings, "--help") if spelling.startswith("--")]


def _is_understood(name: str, args: Sequence[str]) -> bool:
    """Return whether a command would understand some arguments."""
    command: click.Command = load_command(name).command
    try:
        with command.make_context(name, list(args)) as context:
            models = [param for param in command.params if isinstance(param, click.Argument)]
            return all(context.params.get(param.name or "") for param in models)
    except (click.ClickException, click.exceptions.Exit, KvRenameError):
        return False
