"""docs/findings.md, made from the table of findings; run as a script, this file writes it.

The output in a passage is the finding as the example in `finding_examples.py` prints it, without
the hint.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from finding_examples import run_example

from onnxkvrename.findings import CODES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "findings.md"

_HEAD = """\
# Findings

<!-- Made by `python tests/findings_page.py`; the texts are in onnxkvrename/findings.py. -->

A finding is something that is, or may be, wrong with a model. A code never changes its meaning. \
If one model has an error, no model of the command is written, and the exit code is 1. \
`--strict` turns warnings into errors. KV113 to KV124 come from [`verify`](verify.md) and \
`--verify`.

Each passage shows one line of output; a run adds the command that helps. \
`onnxkvrename explain KV402`, or `onnxkvrename explain renamed-in-cache`, prints the rest of one.

<!-- codes -->

"""
_SECTIONS = {
    "KV001": "No buffers",
    "KV101": "Pairs and proofs",
    "KV201": "New names",
    "KV301": "Sets of models",
    "KV401": "QEfficient's cache, and files that repeat names",
    "KV501": "Files",
    "KV601": "The consumer",
    "KV611": "Prefill and decode",
}
"""The heading before the passage of a code."""
_HINT = re.compile(r" \((?:[^()]|\([^()]*\))*\)$")


def render_page(outputs: Mapping[str, str]) -> str:
    """Return the page, with what the example of each code prints."""
    return _HEAD + "\n".join(render_passage(code, outputs[code]) for code in CODES)


def render_passage(code: str, output: str) -> str:
    """Return what the page says about a code, with the heading of a section that it begins."""
    row = CODES[code]
    section = f"## {_SECTIONS[code]}\n\n" if code in _SECTIONS else ""
    return f"""\
{section}### {code}

`{row.name}`, **{row.severity}: {row.title}**

{row.why}

```text
{output}```

*Fix:* {row.fix}
"""


def render_finding(code: str, printed: str) -> str:
    """Return the first finding with a code in what commands print, without its hint, wrapped."""
    line = next(line for line in printed.splitlines() if re.search(rf": \w+ {code}: ", line))
    lines = textwrap.wrap(
        _HINT.sub("", line),
        width=78,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "".join(f"{each}\n" for each in lines)


if __name__ == "__main__":
    outputs = {code: render_finding(code, run_example(code)[0][0]) for code in CODES}
    PAGE.write_text(render_page(outputs), "utf-8")
