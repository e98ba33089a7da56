r"""Make text inert: nothing in it moves a cursor, hides, reorders, or commands a CI runner.

Names come from models and file systems, and are printed to terminals and CI logs. What these
act on is shown as an escape (``\x1b``, ``\u202e``), in every line that is printed:

- controls, and all characters that are not seen or change the order of others;
- ``##name[`` anywhere: GitHub's older commands, Azure's ``##vso[``, ``##teamcity[``;
- ``::`` at the start of a line, after spaces: GitHub's commands. Runners trim the spaces.

GitLab's and Jenkins' commands need controls. The rules of GitHub's runner:
https://github.com/actions/runner/blob/main/src/Runner.Common/ActionCommand.cs
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

MAX_LINE_LENGTH = 400
"""Characters of a line of a finding or an error; our own sentences may make it longer."""
_FIXED_LENGTH = 24
"""Characters of such a line that are always there: a severity, a code, punctuation."""
_MIN_PART_LENGTH = 60
MAX_WHOLE_SENTENCE = 400
"""Characters of the longest message or hint that stays whole: its middle may be the reason."""
_MAX_WHOLE_WORD = 200
"""Characters of the longest path or name that stays whole: a part of it is that of another one."""
_MAX_COMMAND_HINT = 500
"""Characters of the longest hint with a command that stays whole, as without its middle it would
be another one."""

# Patterns are compiled where they are first needed: few names need them, but every rename would
# wait for it.

# Python counts these as printable, but nothing is seen of them: characters that Unicode lets
# programs ignore (DerivedCoreProperties, Default_Ignorable_Code_Point).
_INVISIBLE = (
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
_COMMAND = r"#(#)(?=\w*\[)"


def is_inert(text: str) -> bool:
    """Return whether a text needs no escape, wherever lines in it begin and end.

    It is quick, and so says no to some texts that would need none. A text is inert if it is
    cut out of an inert one, so lines can be asked together.
    """
    return text.isascii() and text.isprintable() and "##" not in text and "::" not in text


def escape_text(text: str) -> str:
    """Return text with all escaped that a terminal or a CI runner acts on.

    A ``::`` at its start is left to :func:`escape_line`, which knows where the line starts.
    Escaped text stays the same when it is escaped again.
    """
    return _replace(text, dict(_find_unsafe(text)))


def escape_line(text: str, cuts: Sequence[int] = (), *, is_command: bool = False) -> list[str]:
    """Return a whole line, escaped, in pieces.

    Args:
        text: The line, without its end.
        cuts: Ascending offsets in `text` to cut at.
        is_command: Whether it begins with a command on purpose.

    Returns:
        One piece more than there are cuts.
    """
    escapes = {} if is_inert(text) else dict(_find_unsafe(text))
    start = len(text) - len(text.lstrip(" "))
    if not is_command and text.startswith("::", start):
        escapes[start] = _escape_char(":")
    bounds = (0, *cuts, len(text))
    return [_replace(text[start:end], escapes, start) for start, end in pairwise(bounds)]


def escape_json(text: str) -> str:
    r"""Return a JSON text of ASCII characters that is inert, and has the same value.

    ``##`` and DEL, the only such characters that JSON's writers leave as they are, are in
    strings only, where JSON has escapes for them.
    """
    return text.replace("##", "#\\u0023").replace("\x7f", "\\u007f")


def shorten_parts(parts: Sequence[str], limit: int = MAX_LINE_LENGTH) -> list[str]:
    """Return the parts of a line, escaped, and shortened where it is too long.

    Names that are too long lose their middle. Sentences stay whole, unless names with spaces
    make one too long.

    Args:
        parts: A path or two, a name, and at the end the message and the hint, which may have
            commands between backticks.
        limit: Characters of the whole line. Our own sentences may make it longer.
    """
    shown = [escape_text(part) for part in parts]
    room = limit - _FIXED_LENGTH
    if sum(map(len, shown)) <= room:
        return shown
    sentences = len(shown)
    most = max(limit, MAX_WHOLE_SENTENCE)
    if "`" in shown[-1]:
        sentences -= 1
        shown[-1] = shorten_text(shown[-1], max(most, _MAX_COMMAND_HINT))
    lengths = [len(word) for part in shown[:sentences] for word in _find_long_words(part)]
    if lengths and sum(map(len, shown)) > room:
        share = (room - sum(map(len, shown)) + sum(lengths)) // len(lengths)
        share = max(share, _MIN_PART_LENGTH)
        shown[:sentences] = (_shorten_words(part, share) for part in shown[:sentences])
    shown[:sentences] = (shorten_text(part, most) for part in shown[:sentences])
    return shown


def _find_long_words(text: str) -> list[str]:
    return [word for word in text.split() if len(word) > _MAX_WHOLE_WORD]


def _shorten_words(text: str, limit: int) -> str:
    """Return a text without the middle of each word that is too long."""
    for word in _find_long_words(text):
        text = text.replace(word, shorten_text(word, limit))
    return text


def shorten_text(text: str, limit: int) -> str:
    """Return an escaped text, without its middle where it is longer than `limit`.

    It is cut between words, and never inside a command between backticks. A word is cut only
    where it is too long to be shown and there is no other.
    """
    if len(text) <= limit:
        return text
    room = max(limit - len(_format_gap(len(text))), 0)
    commands = [match.span() for match in re.finditer("`[^`]*(?:`|$)", text)]
    spaces = [
        match.start()
        for match in re.finditer(" ", text)
        if not any(start < match.start() < end for start, end in commands)
    ]
    head = max((at + 1 for at in spaces if at < room // 2), default=0)
    tail = min((at for at in spaces if at >= len(text) - room + head), default=len(text))
    if (head, tail) == (0, len(text)) and not commands:
        head, tail = room // 2, len(text) - room + room // 2
    return f"{text[:head]}{_format_gap(tail - head)}{text[tail:]}"


def _format_gap(count: int) -> str:
    return f"[... {count:,} characters ...]"


def _find_unsafe(text: str) -> Iterator[tuple[int, str]]:
    """Yield the offset and the escape of each character to escape."""
    if not text.isprintable():
        for offset, char in enumerate(text):
            if not char.isprintable():
                yield offset, _escape_char(char)
    if not text.isascii():
        for match in re.finditer(_INVISIBLE, text):
            yield match.start(), _escape_char(match[0])
    if "##" in text:
        for match in re.finditer(_COMMAND, text):
            yield match.start(1), _escape_char("#")


def _replace(text: str, escapes: dict[int, str], start: int = 0) -> str:
    """Return `text`, which begins at `start`, with the characters at some offsets replaced."""
    if not escapes:
        return text
    return "".join(escapes.get(offset, char) for offset, char in enumerate(text, start))


def _escape_char(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a path that is not UTF-8
        code -= 0xDC00
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
