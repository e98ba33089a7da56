"""Findings: what is wrong with a model, each with a code of `finding_table`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.errors import KvRenameError
from onnxkvrename.finding_table import CODES, Severity
from onnxkvrename.limits import MAX_LISTED

UNKNOWN_TRANSFER = "KV630"
"""The finding of a value of which it is not known whether decode gets it."""
_BYTE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


@show_briefly
class Finding(NamedTuple):
    """Something that is, or may be, wrong with a model.

    Attributes:
        code: The code, one of `CODES`, such as KV101.
        severity: That of the code, or ``error`` under ``--strict``. An error makes the exit
            code 1.
        name: The value or the file that it is about, the first of several; empty for the model
            itself.
        message: A sentence without its subject, which is `name`. About several names it is a
            whole sentence, which counts them.
        hint: How to fix it.
    """

    code: str
    severity: Severity
    name: str
    message: str
    hint: str

    @property
    def subject(self) -> str:
        """The name to show before the message; empty if the message says it: ``(first: NAME)``."""
        return "" if f"(first: {self.name})" in self.message else self.name


class CheckError(KvRenameError):
    """Report that checks reject a model in memory.

    Attributes:
        findings: All problems, as :class:`Finding` values.
    """

    def __init__(
        self, message: str, findings: tuple[Finding, ...] = (), **where: str | None
    ) -> None:
        super().__init__(message, **where)
        self.findings = findings


def build_finding(code: str, name: str, message: str, hint: str) -> Finding:
    """Return a finding with the severity of its code."""
    return Finding(code, CODES[code].severity, name, message, hint)


def build_names_finding(
    code: str, names: Sequence[str], messages: tuple[str, str], hint: str, *, shown: int = 1
) -> Finding:
    """Return a finding about one name, or about several, which its message counts.

    Args:
        code: One of `CODES`.
        names: The names, at least one.
        messages: What is wrong with one name (``carries``), and with several (``carry``).
        hint: How to fix it.
        shown: How many of several names the message shows.
    """
    if shown == 1 or len(names) == 1:
        return build_finding(code, names[0], begin_message(names, *messages), hint)
    listed = format_list(names, limit=shown)
    return build_finding(code, "", f"{len(names):,} names ({listed}) {messages[1]}", hint)


def begin_message(names: Sequence[str], singular: str, plural: str, noun: str = "names") -> str:
    """Return the beginning of a message about one name, the finding's own, or about several.

    ``carries`` for one name, which goes before the message; ``8 names (first: past_key.0) carry``
    for eight.

    Args:
        names: The names, that of the finding first.
        singular: The verb for one name.
        plural: The verb for several.
        noun: What the names are, in the plural.
    """
    return singular if len(names) == 1 else f"{len(names):,} {noun} (first: {names[0]}) {plural}"


def report_names(
    code: str,
    names: Sequence[str],
    verbs: tuple[str, str],
    text: str,
    hint: str,
    noun: str = "names",
) -> Iterator[Finding]:
    """Yield one finding about all of some names, on the first of them; none without names.

    Args:
        code: The code.
        names: The names.
        verbs: The verb for one name and the verb for several.
        text: What follows the verb.
        hint: What helps.
        noun: What the names are, in the plural.
    """
    if names:
        yield build_finding(code, names[0], f"{begin_message(names, *verbs, noun)} {text}", hint)


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: ``1 buffer``, ``8 buffers``, ``1 axis``, ``2 axes``."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def format_bytes(size: int | None, *, is_exact: bool = True) -> str:
    """Return bytes in the largest unit that fits: ``2.25 MiB (2,359,296 bytes)``, ``2.2 MiB``.

    Args:
        size: The number of bytes; `None` is ``unknown``.
        is_exact: Whether all of its digits matter.
    """
    if size is None:
        return "unknown"
    exact = format_count(size, "byte")
    power = min((size.bit_length() - 1) // 10, len(_BYTE_UNITS) - 1) if size else 0
    if not power:
        return exact
    value = size / (1 << 10 * power)
    return (
        f"{value:.4g} {_BYTE_UNITS[power]} ({exact})"
        if is_exact
        else f"{value:.1f} {_BYTE_UNITS[power]}"
    )


def promote_to_errors(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings with severity ``error``, for ``--strict``."""
    return tuple(finding._replace(severity="error") for finding in findings)


def decide_exit_code(
    *, failed: bool = False, not_done: bool = False, interrupted: bool = False
) -> int:
    """Return the exit code of a command; the later argument wins.

    Args:
        failed: Whether there is a finding of severity error, or something else that the command
            should detect (a name that would change, a hand-off that breaks).
        not_done: Whether the job, or any part of it, could not be done.
        interrupted: Whether a signal ended the job.

    Returns:
        130 if `interrupted`, 2 if `not_done`, 1 if `failed`, else 0.
    """
    if interrupted:
        return 130
    return 2 if not_done else int(failed)


def format_list(names: Sequence[str], separator: str = ", ", limit: int = MAX_LISTED) -> str:
    """Join the first `limit` names, and count the rest."""
    suffix = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + suffix


def format_layers(layers: Iterable[int]) -> str:
    """Format sorted layers, as `layer 3` or `layers 0-2, 5`, the first five runs of them."""
    return format_layer_runs(group_layer_runs(layers))


def group_layer_runs(layers: Iterable[int]) -> tuple[range, ...]:
    """Return sorted layers as runs without a gap."""
    ends: list[list[int]] = []
    for layer in layers:
        if ends and ends[-1][1] == layer - 1:
            ends[-1][1] = layer
        else:
            ends.append([layer, layer])
    return tuple(range(first, last + 1) for first, last in ends)


def format_layer_numbers(layers: Iterable[int]) -> str:
    """Format all of some sorted layers, as `0-2, 5`: for the column of a table."""
    return ", ".join(map(_format_layer_run, group_layer_runs(layers)))


def _format_layer_run(run: range) -> str:
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def format_layer_runs(runs: Sequence[range]) -> str:
    """Format runs of layers as :func:`format_layers` does, without listing the layers."""
    texts = [_format_layer_run(run) for run in runs if run]
    if not texts:
        return "no layer"
    is_single = len(texts) == 1 and texts[0].isdigit()
    return f"layer {texts[0]}" if is_single else f"layers {format_list(texts)}"


def quote_word(text: str) -> str:
    r"""Return a name as one word of a shell, and without a backtick.

    Names come from models and file systems and may contain anything. In a hint, backticks mark
    commands that are pasted, so every name in a hint is quoted by this function or by
    :func:`quote_path`. A POSIX shell reads the word as the name; one with a backtick or with
    what cannot be printed is written as ``$'\140'``, which bash, zsh and ksh read as the bytes.
    """
    if "`" in text or "##" in text or not text.isprintable():
        return quote_as_bytes(text)
    return shlex.quote(text)


def quote_path(path: str) -> str:
    """Return a path as :func:`quote_word` does, so that it cannot be mistaken for an option."""
    return quote_word(f"./{path}" if path.startswith("-") else path)


def quote_as_bytes(text: str) -> str:
    r"""Return a text as ``$'\012'``: what is not plain ASCII is written as octal bytes."""
    return f"$'{''.join(map(_escape_char, text))}'"


def _escape_char(char: str) -> str:
    if " " <= char <= "~" and char not in "'`#\\":
        return char
    errors = "surrogateescape" if "\udc80" <= char <= "\udcff" else "surrogatepass"
    return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", errors))


def find_similar(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate that is most similar to `name`, whatever their capitals.

    Args:
        name: An unknown name, such as a typing error.
        candidates: The names to choose from.
        cutoff: How similar the two must be, from 0 (not at all) to 1 (equal).
    """
    from difflib import get_close_matches  # only needed after a mistake

    names = {candidate.casefold(): candidate for candidate in reversed(list(candidates))}
    similar = get_close_matches(name.casefold(), list(names), n=1, cutoff=cutoff)
    return names[similar[0]] if similar else None


def suggest_similar(name: str, candidates: Iterable[str]) -> str | None:
    """Return the hint "did you mean X?" if a candidate is similar to `name`."""
    similar = find_similar(name, candidates)
    return f"did you mean {quote_word(similar)}?" if similar else None
