"""The help pages in docs/commands.md; run as a script, this file writes them again."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from onnxkvrename.cli.main import COMMANDS, program

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"


def find_help(text: str, name: str) -> re.Match[str] | None:
    """Return the match of a command's help page; its first group is the page."""
    block = rf"<!-- help {name} -->\n```text\n(.*?)```\n<!-- /help {name} -->"
    return re.search(block, text, re.DOTALL)


def render_help(name: str) -> str:
    """Return the help page of a command, or of the program for "", 80 columns wide."""
    args = [name, "--help"] if name else ["--help"]
    options = {"prog_name": "onnxkvrename", "terminal_width": 80}
    return CliRunner().invoke(program, args, **options).output


def replace_help(text: str) -> str:
    """Return the page with the help of every command as it is now."""
    for name in COMMANDS:
        shown = find_help(text, name)
        assert shown is not None, f"no block for the help of onnxkvrename {name}"
        text = text[: shown.start(1)] + render_help(name) + text[shown.end(1) :]
    return text


if __name__ == "__main__":
    PAGE.write_text(replace_help(PAGE.read_text("utf-8")), "utf-8")
