"""Findings: what can be wrong with a model, each with its code."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.errors import KvRenameError
from onnxkvrename.limits import MAX_LISTED

Severity = Literal["error", "warning"]
UNKNOWN_TRANSFER = "KV630"
"""The finding of a value of which it is not known whether decode gets it."""
_BYTE_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


CODES: dict[str, tuple[Severity, str]] = {
    "KV001": ("error", "no KV buffer in any of the models"),
    "KV101": ("error", "retained output without its input"),
    "KV102": ("error", "KV input without its retained output"),
    "KV103": ("error", "dtype differs between input and retained output"),
    "KV104": (
        "error",
        "rank, a size or the order of axes differs between input and retained output",
    ),
    "KV105": ("error", "retained output that no node produces"),
    "KV106": ("error", "one name is both input and retained output, or is declared twice"),
    "KV107": ("warning", "KV input that no node reads"),
    "KV108": ("warning", "a layer with a part missing (a key without its value)"),
    "KV109": ("warning", "layers missing between the first and the last"),
    "KV110": ("error", "retained output that is not a later state of its own input"),
    "KV111": ("warning", "retained buffer that no rule matches: not renamed"),
    "KV112": ("warning", "KV output with a suffix that some consumers do not match with an input"),
    "KV113": ("warning", "retained output that could not be traced to its input: not proved"),
    "KV114": ("warning", "buffer that is read but never written: it passes through unchanged"),
    "KV115": ("error", "onnx's checker rejects the model"),
    "KV116": ("error", "a KV buffer without the token, or another value with it"),
    "KV120": (
        "warning",
        "a cache that grows: its output does not fit into its input (an error where it must)",
    ),
    "KV121": (
        "error",
        "the model differs from its source in more than names of KV buffers (--renamed-from)",
    ),
    "KV123": ("warning", "operators that onnx does not define: their nodes were not checked"),
    "KV124": ("warning", "a local function defined more than once, with the same bytes"),
    "KV125": ("error", "a value with the name of a cache, but with too few axes for one"),
    "KV201": ("error", "a new name is already in use"),
    "KV202": ("error", "buffers already carry a different token"),
    "KV204": ("warning", "the token differs from a known consumer's token only in capitals"),
    "KV205": ("warning", "a program of the exporter looks for the old names"),
    "KV301": ("error", "a layer in two windows"),
    "KV302": ("error", "a layer in no window"),
    "KV303": ("error", "files of one model with different tokens, or only some with a token"),
    "KV304": ("error", "the layers in a file differ from those in its name"),
    "KV305": (
        "error",
        "windows that do not fit together: a value is missing or has a different type",
    ),
    "KV306": ("error", "windows of different models or exports"),
    "KV307": ("error", "a merged file differs from the windows"),
    "KV308": ("error", "an encoder without the decoder whose buffers it fills, or the reverse"),
    "KV401": ("error", "export directory whose hash does not match its JSON"),
    "KV402": (
        "warning",
        "renamed in place in QEfficient's cache: a later export reuses it (an error if not forced)",
    ),
    "KV403": ("error", "the directory of the seeded export already holds something else"),
    "KV404": ("warning", "a name in a sidecar is not in the model (an error if none is)"),
    "KV405": ("warning", "a sidecar names only one side of a pair"),
    "KV406": (
        "warning",
        "a sidecar or a compile has old names (an error for a sidecar that must be updated)",
    ),
    "KV407": ("error", "an export that QEfficient would not look for under its new names"),
    "KV501": ("error", "external data outside the model's directory"),
    "KV502": ("error", "external data missing, or not a regular file"),
    "KV503": ("error", "external data shorter than the model says, or a malformed entry"),
    "KV504": ("error", "another file is already where one would be written"),
    "KV601": (
        "error",
        "a KV buffer that the consumer does not select, for example without its token",
    ),
    "KV602": ("error", "an output that the consumer selects, but does not match with an input"),
    "KV603": ("error", "a name whose layer the consumer cannot read, or reads wrongly"),
    "KV604": ("error", "too few or too many outputs that start with log, which prefill counts"),
    "KV605": ("error", "a buffer that the consumer slices as if it had a context axis"),
    "KV606": (
        "warning",
        "layers with different cache shapes: the consumer's LMCache connector will not start",
    ),
    "KV607": ("warning", "buffers that the consumer declares as full attention, but that are not"),
    "KV608": (
        "error",
        "a value that is not a KV buffer, but is selected as one (a warning if harmless)",
    ),
    "KV609": ("error", "inputs and outputs that the consumer pairs differently from the graph"),
    "KV610": ("error", "a dtype or a shape that the consumer cannot transfer"),
    "KV611": ("error", "a buffer on one side of a hand-off only"),
    "KV612": ("error", "dtype differs between prefill and decode"),
    "KV613": ("error", "rank or a fixed dimension differs between prefill and decode"),
    "KV614": (
        "error",
        "a window on one side, a different window or the whole context on the other",
    ),
    "KV615": ("error", "axes in a different order on the two sides"),
    "KV616": ("error", "tokens differ between prefill and decode, or nothing is selected"),
    "KV617": ("error", "a buffer that decode reads as a different one"),
    "KV618": ("error", "a buffer whose bytes are at different offsets on the two sides"),
    "KV624": (
        "error",
        "the numbers of selected inputs and outputs differ: prefill counts them, and stops",
    ),
    UNKNOWN_TRANSFER: (
        "error",
        "an input that decode requires and the consumer does not move: whether decode gets it is "
        "not known",
    ),
}
"""Severity and meaning of every code; `docs/findings.md` explains each."""


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
    return Finding(code, CODES[code][0], name, message, hint)


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
