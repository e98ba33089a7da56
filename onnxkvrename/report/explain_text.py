"""What findings mean, why they matter and how to fix them, as text for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import CODES, FindingCode
from onnxkvrename.report.formats import Line
from onnxkvrename.report.tables import fold_text, render_table
from onnxkvrename.text import suggest_similar

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def render_finding_list(width: int | None) -> Iterator[Line]:
    """Yield a row for each finding: code, name, severity and title.

    Args:
        width: The columns of the terminal; `None` for a pipe.
    """
    rows = [(row.code, row.name, row.severity, row.title) for row in CODES.values()]
    return render_table(rows, width)


def describe_finding(word: str, width: int = 80) -> list[str]:
    """Return what is known of a finding as lines.

    Args:
        word: A code such as ``KV402``, its number, or its name, in any case.
        width: Characters in a line.

    Raises:
        KvRenameError: There is no such finding.
    """
    row = _find_row(word)
    lines = [f"{row.code} {row.name}"]
    for text in (f"{row.severity}: {row.title}", row.why, f"Fix: {row.fix}"):
        lines += ["", *fold_text(_LINK.sub(r"\1", text), width)]
    return lines


def _find_row(word: str) -> FindingCode:
    code = f"KV{word:0>3}" if word.isdecimal() else word.upper()
    by_name = {row.name: row for row in CODES.values()}
    row = CODES.get(code) or by_name.get(word.lower())
    if row is None:
        hint = suggest_similar(word, by_name) or "`onnxkvrename explain` lists all"
        raise KvRenameError(f"no such finding: {word}", hint=hint)
    return row
