"""The examples in docs/findings.md; run as a script, this file writes what they print again.

A passage has the heading, severity and meaning of a code, what it means, an *Example* and a
*Fix*. The example is a Python block that makes the files, if it needs any, and a console block;
the fix may have a console block as well, which runs after that of the example.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.cli.main import main
from onnxkvrename.findings import CODES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "findings.md"
WIDTH = 78
"""Characters in a line of output, so that `onnxkvrename explain` can indent it by two."""

_PASSAGE = re.compile(r"^### (KV\d{3})\n\n.*?(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_HEAD = re.compile(r"\*\*\w+: .+\*\*")
_PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
_CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
_TABLE = re.compile(r"(?<=<!-- codes -->\n).*?(?=<!-- /codes -->)", re.DOTALL)


class Passage(NamedTuple):
    """What the page says about a code, from its heading to the next one."""

    code: str
    text: str

    @property
    def example(self) -> str:
        """The part that produces the finding."""
        return self.text.partition("\n*Example:* ")[2].partition("\n*Fix:* ")[0]

    @property
    def fix(self) -> str:
        """The part that says how to get rid of it."""
        return self.text.partition("\n*Fix:* ")[2]


class Result(NamedTuple):
    """What the commands of one part print, as the page shows it, and the last exit code."""

    shown: str
    code: int


def list_passages(page: str) -> list[Passage]:
    """Return the passages of all codes."""
    return [Passage(match[1], match[0]) for match in _PASSAGE.finditer(page)]


def run_passage(passage: Passage) -> tuple[Result, Result | None]:
    """Run the example and its fix in an empty directory; the fix is ``None`` without commands."""
    with _scratch_directory():
        for block in _PYTHON.findall(passage.example):
            exec(block, {"__name__": "example"})
        example = _run_commands(passage.example)
        fix = _run_commands(passage.fix) if _CONSOLE.search(passage.fix) else None
    return example, fix


def render_page(page: str) -> str:
    """Return the page with the table of codes, and the output of all examples, as they are now."""
    page = _TABLE.sub(lambda match: render_table(), page)
    return _PASSAGE.sub(lambda match: _render_passage(Passage(match[1], match[0])), page)


def render_table() -> str:
    """Return the table that leads to each code."""
    rows = [
        f"| [{code}](#{code.lower()}) | {severity} | {meaning} |\n"
        for code, (severity, meaning) in CODES.items()
    ]
    return "| code | severity | meaning |\n|---|---|---|\n" + "".join(rows)


def render_head(code: str) -> str:
    """Return the line that says the severity and the meaning of a code."""
    return "**{}: {}**".format(*CODES[code])


def _render_passage(passage: Passage) -> str:
    results = [result for result in run_passage(passage) if result is not None]
    blocks = iter(f"```console\n{result.shown}```" for result in results)
    text = _CONSOLE.sub(lambda match: next(blocks), passage.text)
    return _HEAD.sub(lambda match: render_head(passage.code), text, count=1)


@contextlib.contextmanager
def _scratch_directory() -> Iterator[None]:
    """Work in a new directory with a copy of the fixtures."""
    before = Path.cwd()
    directory = Path(tempfile.mkdtemp()).resolve()
    try:
        shutil.copytree(ROOT / "fixtures", directory / "fixtures")
        os.chdir(directory)
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(directory)


def _run_commands(part: str) -> Result:
    lines, code = [], 0
    for command in re.findall(r"^\$ onnxkvrename (.*)$", part, re.MULTILINE):
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
            code = main(shlex.split(command))
        lines.append(f"$ onnxkvrename {command}")
        for line in stream.getvalue().replace(f"{Path.cwd()}", "/home/me").splitlines():
            lines += textwrap.wrap(
                line,
                WIDTH,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            ) or [""]
    return Result("".join(f"{line}\n" for line in lines), code)


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text("utf-8")), "utf-8")
