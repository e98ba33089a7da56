"""Findings, the problems that a model can have: their codes and their JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from onnxkvrename import __version__
from onnxkvrename.errors import KvRenameError

Severity = Literal["error", "warning"]


CODES: dict[str, tuple[Severity, str]] = {
    "KV001": ("error", "no KV buffer in any model given"),
    "KV101": ("error", "retained output without its input"),
    "KV102": ("error", "KV input without its retained output"),
    "KV103": ("error", "dtype differs between the two"),
    "KV104": ("error", "rank or a static dimension differs between the two"),
    "KV105": ("error", "retained output that no node produces"),
    "KV106": ("error", "one name is both input and retained output, or stands twice"),
    "KV107": ("warning", "KV input that nothing reads"),
    "KV108": ("warning", "a layer with a part missing (a key without its value)"),
    "KV109": ("warning", "layers missing between the first and the last"),
    "KV110": ("error", "retained output not computed from its own input"),
    "KV111": ("warning", "retained buffer that no rule knows: left alone, and named"),
    "KV112": ("warning", "KV output with a suffix that consumers do not pair"),
    "KV113": ("warning", "retained output that could not be traced to its input: not proved"),
    "KV114": ("warning", "buffer passes through unchanged: read, but never written"),
    "KV115": ("error", "refused by onnx's checker"),
    "KV116": ("error", "a KV buffer without the token, or the token on something else"),
    "KV117": ("error", "an expression misses KV buffers, or takes others"),
    "KV118": ("error", "retention loop breaks off, or gives other results than the reference"),
    "KV119": ("warning", "retention loop that could not be run: not tried"),
    "KV120": (
        "warning",
        "a cache that grows: its output cannot go back into its input (an error where it must)",
    ),
    "KV121": ("error", "more than names of KV buffers differs from the source (--renamed-from)"),
    "KV122": ("warning", "same content as the source, written in other bytes (--renamed-from)"),
    "KV123": ("warning", "operators that onnx does not define: their nodes were not checked"),
    "KV124": ("warning", "a local function defined more than once, byte for byte the same"),
    "KV201": ("error", "a new name is already in use"),
    "KV202": ("error", "buffers already carry another token"),
    "KV203": ("error", "a buffer that is not what the names of the profile of --to say"),
    "KV301": ("error", "a layer in two windows"),
    "KV302": ("error", "a layer in no window"),
    "KV303": ("error", "windows with different tokens, or only some with one"),
    "KV304": ("error", "the layers in a file differ from its name's range"),
    "KV305": ("error", "windows that do not fit together at the seam"),
    "KV306": ("error", "windows of different models or exports mixed"),
    "KV307": ("error", "merged file and windows disagree"),
    "KV308": ("error", "an encoder without the decoder whose buffers it fills, or the reverse"),
    "KV401": ("error", "export directory whose hash does not follow from its JSON"),
    "KV402": ("warning", "renamed in place in an export cache: a later export would reuse it"),
    "KV403": ("error", "the directory of the seeded export already holds something else"),
    "KV404": ("warning", "a sidecar's name matches nothing in the model; an error if none does"),
    "KV405": ("warning", "a sidecar names only one half of a pair"),
    "KV406": (
        "warning",
        "a sidecar has names from before a rename (an error where it cannot follow, and in verify)",
    ),
    "KV407": (
        "warning",
        "an export that QEfficient would not look for under its new names: left out",
    ),
    "KV501": ("error", "external data outside the model's directory"),
    "KV502": ("error", "external data missing, or no plain file"),
    "KV503": ("error", "external data shorter than the model says, or a malformed entry"),
    "KV504": ("error", "another file stands where one would be written"),
    "KV601": ("error", "a KV buffer that the consumer does not select, as without its token"),
    "KV602": ("error", "an output that the consumer selects, but never pairs"),
    "KV603": ("error", "a layer that the consumer cannot read in a name, or reads as another"),
    "KV604": ("error", "too few or too many outputs that start with log, which prefill counts"),
    "KV605": ("error", "a buffer that the consumer cuts as if it were a context"),
    "KV606": ("warning", "hybrid buffers, which the consumer's LMCache connector refuses"),
    "KV607": ("warning", "buffers that the consumer declares as full attention, and are not"),
    "KV608": (
        "error",
        "what is no KV buffer, but is selected like one; a warning if it does no harm",
    ),
    "KV609": ("error", "inputs and outputs that the consumer pairs otherwise than the graph"),
    "KV610": ("error", "a dtype or a shape that the consumer cannot move"),
    "KV611": ("error", "a buffer on one side of a hand-off only"),
    "KV612": ("error", "dtype differs between prefill and decode"),
    "KV613": ("error", "rank or a fixed dimension differs between prefill and decode"),
    "KV614": ("error", "a window on one side, another one or the whole context on the other"),
    "KV615": ("error", "axes in another order on the other side"),
    "KV616": ("error", "tokens differ between prefill and decode, or nothing is selected"),
    "KV617": ("error", "a buffer handed over into another one's place"),
    "KV618": ("error", "bytes of a buffer at other offsets on the other side"),
    "KV619": ("error", "heads or states that do not divide by tensor parallelism"),
    "KV620": ("error", "layers of a draft model on one side only"),
    "KV621": ("error", "the layout's stamp in a model is not that of its graph"),
    "KV622": ("error", "a layer or a pair of workers that vLLM would refuse"),
    "KV623": ("error", "prefill and decode are not of one model: their weights differ"),
    "KV624": (
        "error",
        "other numbers of inputs and outputs selected: prefill counts them, and stops",
    ),
    "KV625": ("warning", "the consumer's configuration is not beside the model: defaults assumed"),
}
"""Severity and meaning of every code; `docs/findings.md` explains each."""


_MAX_LISTED = 5


class Finding(NamedTuple):
    """Something that is, or may be, wrong with a model.

    Attributes:
        code: One of `CODES`.
        severity: That of the code, or ``error`` under ``--strict``.
        name: The value or the file that it is about; empty for the model itself.
        message: A sentence without its subject, which is `name`.
        hint: How to fix it.
    """

    code: str
    severity: Severity
    name: str
    message: str
    hint: str


class CheckError(KvRenameError):
    """A model in memory that a check refuses.

    Attributes:
        findings: Everything that was found, as :class:`Finding` values.
    """

    def __init__(self, message: str, findings: tuple[Finding, ...], **where: str | None) -> None:
        super().__init__(message, **where)
        self.findings = findings


def declare_code(code: str, severity: Severity, meaning: str) -> None:
    """Add a code of a further check to `CODES`.

    Args:
        code: ``KV`` and three digits, stable for good.
        severity: ``error`` or ``warning``.
        meaning: What is wrong, in a few words.

    Raises:
        ValueError: The code means something else already.
    """
    if CODES.setdefault(code, (severity, meaning)) != (severity, meaning):
        raise ValueError(f"{code} is taken: {CODES[code][1]}")


def build_finding(code: str, name: str, message: str, hint: str) -> Finding:
    """Return a finding with the severity of its code."""
    return Finding(code, CODES[code][0], name, message, hint)


def promote_to_errors(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings with severity ``error``, as ``--strict`` asks for."""
    return tuple(finding._replace(severity="error") for finding in findings)


def decide_exit_code(
    *, failed: bool = False, not_done: bool = False, interrupted: bool = False
) -> int:
    """Return the exit code of a command; the later argument wins.

    Args:
        failed: Whether there is a finding of severity error, or what else the command
            was asked to detect (a name that would change, a hand-off that breaks).
        not_done: Whether the job, or any part of it, could not be done.
        interrupted: Whether a signal ended the job.

    Returns:
        0, 1, 2 or 130, in the order of no argument, `failed`, `not_done`, `interrupted`.
    """
    if interrupted:
        return 130
    return 2 if not_done else int(failed)


def format_list(names: Sequence[str], separator: str = ", ", limit: int = _MAX_LISTED) -> str:
    """Join the first `limit` names, and say how many more there are."""
    suffix = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + suffix


def find_similar(name: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the candidate that is most like `name`.

    Args:
        name: A name that is not known, such as a typing error.
        candidates: The names to choose from.
        cutoff: How alike the two must be, from 0 (not at all) to 1 (equal).
    """
    from difflib import get_close_matches  # only needed after a mistake

    return next(iter(get_close_matches(name, list(candidates), n=1, cutoff=cutoff)), None)


def suggest_similar(name: str, candidates: Iterable[str]) -> str | None:
    """Return the hint "did you mean X?" if a candidate is like `name`."""
    similar = find_similar(name, candidates)
    return f"did you mean {similar}?" if similar else None


def render_json_document(
    schema: str, command: str, code: int, fault: KvRenameError | None, **content: Any
) -> str:
    """Render the JSON document of a command, with :func:`build_json_document`'s arguments."""
    import json

    return json.dumps(build_json_document(schema, command, code, fault, **content), indent=2)


def build_json_document(
    schema: str, command: str, code: int, fault: KvRenameError | None, **content: Any
) -> dict[str, Any]:
    """Build the document of a command.

    Args:
        schema: Name and version of the document's schema.
        command: The command that answers.
        code: Its exit code.
        fault: Why the job could not be done, if so.
        content: The command's own members, which come between the common ones.
    """
    head = {"schema": schema, "version": __version__, "command": command}
    tail = {"error": serialize_error(fault), "exit_code": code}
    return {**head, **content, **tail}


def serialize_finding(finding: Finding) -> dict[str, str]:
    """Return the JSON form of a finding."""
    return finding._asdict()


def serialize_error(fault: KvRenameError | None) -> dict[str, str | None] | None:
    """Return the JSON form of an error."""
    if fault is None:
        return None
    return {"message": fault.message, "path": fault.path, "hint": fault.hint}
