"""What docs/findings.md says about each finding, as text for a terminal."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import CODES
from onnxkvrename.storage.read import is_occupied, read_text_file

_PAGE = "findings.md"
_PLACES = (
    Path(__file__).parent / _PAGE,  # in a wheel
    Path(__file__).parent.parent.parent / "docs" / _PAGE,  # in a clone
)
_FIX = "*Fix:* "
_INDENT = " " * 16  # of a meaning that continues: below its first word
_BLOCKS = re.compile(r"^```.*?^```$|^[^\n]+(?:\n[^\n]+)*", re.MULTILINE | re.DOTALL)


def list_findings(width: int | None = None) -> list[str]:
    """Return a row for each code, with its severity and meaning.

    Args:
        width: Characters in a line; ``None`` for one line for each code.
    """
    rows = [f"{code}  {severity:7}  {meaning}" for code, (severity, meaning) in CODES.items()]
    if width is None:
        return rows
    return [line for row in rows for line in _wrap(row, max(width, 40), indent=_INDENT)]


def describe_finding(code: str, width: int = 80) -> list[str]:
    """Return the passage about a code as lines.

    Args:
        code: A code such as ``KV402``, in any case.
        width: Characters in a line.

    Raises:
        KvRenameError: There is no such code.
        ModelError: The page cannot be read.
    """
    name = code.upper()
    if name not in CODES:
        hint = "`onnxkvrename explain` lists all codes"
        raise KvRenameError(f"no finding has the code {code}", hint=hint)
    lines = [name]
    for block in _read_passage(name):
        lines += ["", *_render_block(block, width)]
    return lines


def read_fix(code: str) -> str:
    """Return what the page says about how to fix a finding, as plain text.

    Args:
        code: One of `CODES`.

    Raises:
        ModelError: The page cannot be read.
    """
    fix = next(block for block in _read_passage(code) if block.startswith(_FIX))
    return _strip_markup(fix.removeprefix(_FIX))


def _read_passage(code: str) -> list[str]:
    """Return the blocks of text below the heading of a code."""
    text = _read_page().partition(f"### {code}\n")[2]
    passage = re.split(r"^##", text, maxsplit=1, flags=re.MULTILINE)[0]
    return _BLOCKS.findall(passage)


def _read_page() -> str:
    return read_text_file(next((path for path in _PLACES if is_occupied(path)), _PLACES[0]))


def _render_block(block: str, width: int) -> list[str]:
    if block.startswith("```"):
        return [f"  {line}".rstrip() for line in block.splitlines()[1:-1]]
    return _wrap(_strip_markup(block), width)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _strip_markup(text: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|(?<!\w)\*(?=\w)|(?<=[\w:])\*(?!\w)", "", text)
