"""What docs/findings.md says about each finding, as text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from onnxkvrename.errors import KvRenameError
from onnxkvrename.files.read import is_occupied, read_text_file
from onnxkvrename.findings import CODES
from onnxkvrename.report.formats import Line
from onnxkvrename.report.tables import fold_text, render_table

_PAGE = "findings.md"
_PLACES = (
    Path(__file__).parent / _PAGE,  # in a wheel
    Path(__file__).parent.parent.parent / "docs" / _PAGE,  # in a clone
)
_BLOCKS = re.compile(r"^```.*?^```$|^[^\n]+(?:\n[^\n]+)*", re.MULTILINE | re.DOTALL)


def render_finding_list(width: int | None) -> Iterator[Line]:
    """Yield a row for each code, with its severity and meaning.

    Args:
        width: The columns of the terminal; `None` for a pipe.
    """
    return render_table([(code, *meaning) for code, meaning in CODES.items()], width)


def describe_finding(code: str, width: int = 80) -> list[str]:
    """Return the passage about a code as lines.

    Args:
        code: A code such as ``KV402``, in any case, or its number.
        width: Characters in a line.

    Raises:
        KvRenameError: There is no such code.
        ModelError: The page cannot be read.
    """
    name = f"KV{code:0>3}" if code.isdecimal() else code.upper()
    if name not in CODES:
        hint = "`onnxkvrename explain` lists all codes"
        raise KvRenameError(f"no finding has the code {code}", hint=hint)
    lines = [name]
    for block in _read_passage(name):
        lines += ["", *_render_block(block, width)]
    return lines


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
