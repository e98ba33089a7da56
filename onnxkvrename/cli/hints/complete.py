"""Complete the commands in hints, so that they work when they are pasted.

A hint is made where no command line is known: by a rule, in a worker, in a call from Python. It
has a command between backticks, in one of these forms:

- ```--force```: the same command again, with this option in the place of those that it replaces;
  ```MODEL --force```: with the model that the hint is about alone, whose result has the same
  place as before; ```MODEL```: with that model in the place of the directory that it is in.
- ```onnxkvrename verify MODEL --run```: a command of its own. ``MODEL...`` are all models that were
  typed, and a path may be there instead. Its token gives way to one that was typed, unless it
  says ``rename``.

Here the first two get the whole command line, and the last the options by which the buffers are
found, such as ``--rules``. All is quoted for a POSIX shell (:mod:`shlex`), and what cannot be
printed as it is for bash and zsh. A hint that is nothing but a command needs no backticks any more.

``--check``, ``--diff`` and ``-n`` stay where a command reads or checks in another way, or corrects
what was typed: it tries the same rename again. They are left out of a command that removes what
was found by what it writes: by one of `_EFFECTS`, or by a rename of its own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import click

from onnxkvrename.cli.hints.one_model import give_one_model, leave_to_others
from onnxkvrename.cli.hints.typed_command import (
    TypedCommand,
    TypedOption,
    build_option,
    quote_unsafe,
    read_typed_command,
)
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, quote_path, quote_word
from onnxkvrename.rules.results import ModelReport

_PROGRAM = "onnxkvrename"
_DEFAULT_COMMAND = "rename"
_QUOTED = r"""\$'(?:[^'\\]|\\[0-7]{3})*'|'[^']*'|"'\""""
"""What :mod:`shlex` and :func:`quote_word` write for a name that a shell would act on."""
_COMMAND = re.compile(rf"`(MODEL|(?:-|MODEL |{_PROGRAM} )(?:[^`'\"$\\;&|<>()\n]|{_QUOTED})*)`")
"""A command: a shell runs that one, and no other. No name in a hint has a backtick
(:func:`quote_word`), so none is mistaken for a command."""
_MODEL = re.compile(rf"{_QUOTED}|(?<= )(?P<model>MODEL)(?P<all>\.\.\.)?(?= |$)")
_TOKEN = re.compile(rf"{_QUOTED}|(?P<token> --(?:prefix|target) (?:[^ '\"]|{_QUOTED})+)")
_MAX_CHARS = 300
"""Characters of all models in a hint; if there are more, the reader has to put them in."""

_RULES = ("--profile", "--rules", "--pairs")
_LAYOUT = (*_RULES, "--no-set", "--dim", "--specializations", "--custom-io", "--full-transfer")
CARRIED_OPTIONS = {
    "rename": (*_RULES, "--no-set", "--full-transfer"),
    "verify": (*_RULES, "--no-set"),
    "inspect": _RULES,
    "custom-io": ("--profile", "--rules"),
    "check-consumer": _LAYOUT,
    "compare": _LAYOUT,
    "manifest": _LAYOUT[:-1],
    "pairs": (),
}
"""For each command that may be suggested, the typed options of another one that it needs to see
the same buffers. Those without models are not here."""

_PLACES = ("--output", "--directory", "--seed-cache", "--in-place")
_TRIALS = ("--check", "--diff", "--dry-run")
_EFFECTS = frozenset(
    (
        *("--strip", "--replace", "--normalize", "--seed-cache"),
        *("--output", "--directory", "--force", "--sidecar"),
    )
)
"""Options that decide what is written, and where; `_TRIALS` write nothing."""
REPLACED_OPTIONS = {
    "--strip": (
        *("--prefix", "--target", "--full-transfer", "--replace", "--normalize", "--to"),
        "--pairs",
    ),
    "--replace": ("--strip",),
    "--prefix": ("--target", "--full-transfer", "--strip"),
    "--target": ("--prefix", "--strip", "--to"),
    "--to": ("--target", "--full-transfer", "--seed-cache", "--in-place"),
    "--output": _PLACES,
    "--directory": _PLACES,
    "--seed-cache": ("--output", "--directory", "--to", "--pairs"),
    "--profile": ("--rules", "--pairs"),
    "--rules": ("--profile", "--pairs"),
    "--pairs": ("--profile", "--rules", "--seed-cache", "--in-place"),
    "--no-sidecars": ("--sidecars",),
    "--jobs": ("--dask",),
}
"""For each option that may be suggested, those that it cannot be with."""
_MODEL_OPTIONS = ("--draft",)
"""Options with a model as their value."""
_COMMANDS_WITH_SIDES = ("compare",)
"""Commands of which each argument is another model."""
_SHORT_OPTIONS = {"-o": "--output", "-d": "--directory"}
_TOKEN_OPTIONS = frozenset(("--prefix", "--target", "--strip", "--to"))
_REPEATED_OPTIONS = frozenset(("--dim", "--sidecar"))


def build_writing_command() -> str:
    """Return the command without options that keep it from writing; empty if it is not known."""
    typed = _find_typed_command()
    if typed is None:
        return ""
    return complete_hint(f"`{_PROGRAM} {typed.name} MODEL...`", typed)


def _leave_out_trials(typed: TypedCommand) -> TypedCommand:
    """Return the command line that writes what was only tried."""
    options = tuple(option for option in typed.options if option.name not in _TRIALS)
    return typed._replace(options=options)


def complete_reports(
    reports: Sequence[ModelReport], *, is_written: bool = False
) -> tuple[ModelReport, ...]:
    """Return reports on models whose hints have complete commands.

    Args:
        reports: The reports.
        is_written: Whether the results are in their places, also those of unchanged models.
    """
    typed = _find_typed_command()
    return tuple(
        report._replace(
            findings=complete_findings(
                report.findings,
                report.path,
                report.output,
                None if typed is None else leave_to_others(typed, report, reports, is_written),
            ),
            error=complete_error(report.error),
        )
        for report in reports
    )


def complete_findings(
    findings: Iterable[Finding],
    path: str | None = None,
    output: str | None = None,
    alone: TypedCommand | None = None,
) -> tuple[Finding, ...]:
    """Return findings whose hints have complete commands.

    Args:
        findings: The findings.
        path: The model that they are about, if it is one.
        output: Where the result of that model goes, if it has one.
        alone: The command line to begin with where other rules are for that model (KV001); by
            default one with that model alone.
    """
    typed = _find_typed_command()
    return tuple(
        finding._replace(
            hint=complete_hint(
                finding.hint, typed, path, output, alone if finding.code == "KV001" else None
            )
        )
        if _COMMAND.search(finding.hint)
        else finding
        for finding in findings
    )


def complete_error(error: KvRenameError | None) -> KvRenameError | None:
    """Complete the commands in the hint of an error, and return it."""
    if error is not None and error.hint and _COMMAND.search(error.hint):
        error.hint = complete_hint(error.hint, _find_typed_command(), error.path)
    return error


def _find_typed_command() -> TypedCommand | None:
    """Return what was typed for the command that runs, ``None`` if that is not known."""
    context = click.get_current_context(silent=True)
    if context is None or context.obj is None:
        return None
    return read_typed_command(context.info_name or "", context.command, context.obj)


def complete_hint(
    hint: str,
    typed: TypedCommand | None,
    path: str | None = None,
    output: str | None = None,
    alone: TypedCommand | None = None,
) -> str:
    """Return a hint whose commands work when they are pasted.

    Args:
        hint: The hint, with commands between backticks.
        typed: The command line that the hint is an answer to; without one the hint is complete
            as it is.
        path: The model that the hint is about, if it is about one.
        output: Where the result of that model goes, if it has one.
        alone: What ```MODEL --force``` begins with; by default the command line with that model
            alone.
    """
    if typed is None:
        return hint
    paths = tuple(map(quote_path, typed.paths))
    model = paths[0] if path is None and len(paths) == 1 else quote_path(path or "MODEL")
    if alone is not None:
        model = quote_path(alone.paths[0])
    else:
        alone = typed if path is None else give_one_model(typed, path, output)
    models = " ".join(paths) or model  # one that is the value of an option
    if len(paths) > 1 and len(models) > _MAX_CHARS:
        models = "MODEL..."
    completed = _complete_commands(hint, typed, alone, model, models)
    is_command = _COMMAND.fullmatch(completed)
    return is_command[1] if is_command else completed


def _narrow_to_model(typed: TypedCommand, path: str) -> TypedCommand:
    """Return a command line that names a model, not the directory in which it was found."""

    def narrow(word: str) -> str:
        return path if Path(path).is_relative_to(word) else word

    options = tuple(
        build_option(option.name, option.words[0], narrow(option.words[-1]))
        if option.name in _MODEL_OPTIONS and len(option.words) > 1
        else option
        for option in typed.options
    )
    paths = tuple(map(narrow, typed.paths))
    if typed.name not in _COMMANDS_WITH_SIDES and path in paths:
        paths = (path,)
    return typed._replace(paths=paths, options=options)


def _complete_commands(
    hint: str, typed: TypedCommand, alone: TypedCommand, model: str, models: str
) -> str:
    def complete(match: re.Match[str]) -> str:
        text = match[1]
        if text == "MODEL":
            narrowed = _narrow_to_model(typed, alone.paths[0]) if alone.paths else typed
            named = (_PROGRAM, *_name_command(narrowed), *map(quote_path, narrowed.paths))
            command = f"{' '.join(named)} {_join_options(narrowed.options, ())}"
            return f"`{quote_unsafe(command.rstrip())}`"
        if not text.startswith(_PROGRAM):
            is_alone = text.startswith("MODEL ")
            paths, repeated = (model, alone) if is_alone else (models, typed)
            text = text.removeprefix("MODEL ")
            options = _join_options(repeated.options, _list_option_names(shlex.split(text)))
            words = (_PROGRAM, *_name_command(repeated), paths, options, text)
            return f"`{quote_unsafe(' '.join(filter(None, words)))}`"
        is_alone = any(each["model"] and not each["all"] for each in _MODEL.finditer(text))
        text = _complete_command(text, alone if is_alone else typed, model, models)
        return f"`{quote_unsafe(text)}`"

    return _COMMAND.sub(complete, hint)


def _name_command(typed: TypedCommand) -> tuple[str, ...]:
    """Return the word for a command; none for the default, unless a model is named like one."""
    is_clear = typed.name == _DEFAULT_COMMAND and not _is_command(typed.paths)
    return () if is_clear else (typed.name,)


def _is_command(words: Sequence[str]) -> bool:
    """Return whether the first word is the name of a command."""
    from onnxkvrename.cli.main import COMMANDS  # which imports this module after a failure

    return bool(words) and words[0] in COMMANDS


def _complete_command(text: str, typed: TypedCommand, model: str, models: str) -> str:
    """Return a command with its models, and with the typed options that it needs."""
    words = shlex.split(text)[1:]
    name = words[0] if _is_command(words) else _DEFAULT_COMMAND
    if name not in CARRIED_OPTIONS or "--help" in words:
        return text
    is_same = name == typed.name
    if name == _DEFAULT_COMMAND and _MODEL.search(text):  # of what was found, not of what was typed
        typed = _leave_out_trials(typed)
    if (
        is_same
        and name not in words
        and not _TOKEN_OPTIONS.isdisjoint(option.name for option in typed.options)
    ):
        text = _TOKEN.sub(lambda match: "" if match["token"] else match[0], text)
        words = shlex.split(text)[1:]

    def name_models(match: re.Match[str]) -> str:
        if not match["model"]:
            return match[0]  # part of a name
        return models if match["all"] else model

    text = _MODEL.sub(name_models, text)
    carried = (
        option for option in typed.options if is_same or option.name in CARRIED_OPTIONS[name]
    )
    return f"{text} {_join_options(carried, _list_option_names(words))}".rstrip()


def _list_option_names(words: Iterable[str]) -> list[str]:
    """Return the names of the options among the words of a suggested command."""
    names = (word.partition("=")[0] for word in words if word.startswith("-"))
    return [_SHORT_OPTIONS.get(name, name) for name in names]


def _join_options(typed: Iterable[TypedOption], suggested: Collection[str]) -> str:
    """Return typed options as text, without those that suggested ones replace."""
    replaced = {option for name in suggested for option in REPLACED_OPTIONS.get(name, ())}
    if {"--strip", "--prefix"}.issubset(suggested):
        replaced.discard("--pairs")  # which needs the token
    replaced.update(set(suggested) - _REPEATED_OPTIONS)
    if not _EFFECTS.isdisjoint(suggested):
        replaced.update(_TRIALS)
    kept = (option.words for option in typed if option.name not in replaced)
    return " ".join(quote_word(word) for words in kept for word in words)
