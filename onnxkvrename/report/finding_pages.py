"""What docs/findings.md says about each finding, as text for a terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import CODES, format_list
from onnxkvrename.report.formats import Line
from onnxkvrename.report.tables import fold_text, render_table
from onnxkvrename.storage.read import is_occupied, read_text_file
from onnxkvrename.vllm.messages import load_messages

_MAX_QUOTES = 3
_QUOTED_CHARS = 70
"""Characters of a message that are quoted: people search for its beginning."""
_PAGE = "findings.md"
_PLACES = (
    Path(__file__).parent / _PAGE,  # in a wheel
    Path(__file__).parent.parent.parent / "docs" / _PAGE,  # in a clone
)
_FIX = "*Fix:* "
_BLOCKS = re.compile(r"^```.*?^```$|^[^\n]+(?:\n[^\n]+)*", re.MULTILINE | re.DOTALL)


def render_finding_list(width: int | None) -> Iterator[Line]:
    """Yield a row for each code, with its severity and meaning.

    Args:
        width: The columns of the terminal; `None` for a pipe.
    """
    return render_table([(code, *meaning) for code, meaning in CODES.items()], width)


def describe_finding(code: str, width: int = 80) -> list[str]:
    """Return the passage about a code as lines, with the first of many messages in a log.

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
    quotes = quote_messages(name)
    if quotes:
        listed = format_list(quotes, " · ", limit=_MAX_QUOTES)
        lines += ["", *fold_text(f"In a log: {listed}", width)]
    return lines


def quote_messages(code: str) -> list[str]:
    """Return the beginnings of the messages of vLLM and vllm-qaic that mean a finding."""
    quotes = (
        textwrap.shorten(message.text, _QUOTED_CHARS, placeholder=" …", break_on_hyphens=False)
        for message in load_messages()
        if message.code == code
    )
    return [f"`{re.sub(r'{[^}]*}?', '…', quote)}`" for quote in quotes]


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
    return fold_text(" ".join(_strip_markup(block).split()), width)


def _strip_markup(text: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|(?<!\w)\*(?=\w)|(?<=[\w:])\*(?!\w)", "", text)
