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
_BLOCKS = re.compile(r"^```.*?^```$|^[^\n]+(?:\n[^\n]+)*", re.MULTILINE | re.DOTALL)


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
    page = next((path for path in _PLACES if is_occupied(path)), _PLACES[0])
    text = read_text_file(page).partition(f"### {name}\n")[2]
    passage = re.split(r"^##", text, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [name]
    for block in _BLOCKS.findall(passage):
        lines += ["", *_render_block(block, width)]
    return lines


def _render_block(block: str, width: int) -> list[str]:
    if block.startswith("```"):
        return [f"  {line}".rstrip() for line in block.splitlines()[1:-1]]
    text = _strip_markup(block)
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _strip_markup(text: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|(?<!\w)\*(?=\w)|(?<=[\w:])\*(?!\w)", "", text)
