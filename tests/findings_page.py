"""The passages of docs/findings.md; run as a script, this file writes what is made in them.

A passage has the heading, severity and meaning of a code, what follows from it, the finding as
the example in `finding_examples.py` prints it, without the hint, and a *Fix*.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from finding_examples import EXAMPLES, run_example

from onnxkvrename.findings import CODES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "findings.md"
WIDTH = 78
"""Characters in a line of output, so that `onnxkvrename explain` can indent it by two."""

_PASSAGE = re.compile(r"^### (KV\d{3})\n\n.*?(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_HEAD = re.compile(r"\*\*\w+: .+\*\*")
_HINT = re.compile(r" \((?:[^()]|\([^()]*\))*\)$")
_OUTPUT = re.compile(r"(?<=```text\n).*?(?=```)", re.DOTALL)


def find_passages(page: str) -> dict[str, str]:
    """Return what the page says about each code, from its heading to the next one."""
    return {match[1]: match[0] for match in _PASSAGE.finditer(page)}


def render_page(page: str) -> str:
    """Return the page with the severity, the meaning and the output of each code as they are."""
    return _PASSAGE.sub(lambda match: _render_passage(match[1], match[0]), page)


def render_head(code: str) -> str:
    """Return the line that says the severity and the meaning of a code."""
    return "**{}: {}**".format(*CODES[code])


def render_finding(code: str, printed: str) -> str:
    """Return the first finding with a code in what commands print, without its hint, wrapped."""
    line = next(line for line in printed.splitlines() if re.search(rf": \w+ {code}: ", line))
    line = _HINT.sub("", line)
    lines = textwrap.wrap(
        line, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "".join(f"{each}\n" for each in lines)


def _render_passage(code: str, passage: str) -> str:
    (printed, _), _ = run_example(code)
    passage = _HEAD.sub(lambda match: render_head(code), passage, count=1)
    return _OUTPUT.sub(lambda match: render_finding(code, printed), passage)


if __name__ == "__main__":
    assert EXAMPLES.keys() == CODES.keys()
    PAGE.write_text(render_page(PAGE.read_text("utf-8")), "utf-8")
