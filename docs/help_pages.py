"""Hook for mkdocs: the help of all commands, and a table of all findings.

They are written where a page has the mark `<!-- commands -->` or `<!-- codes -->`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

from onnxkvrename.cli.main import COMMANDS, load_command
from onnxkvrename.findings import CODES


class MarkdownFormatter(click.HelpFormatter):
    """Writes help as Markdown, which wraps on a screen of any width."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write the command line as code."""
        self.write(f"`{prog} {args}`\n")

    def write_heading(self, heading: str) -> None:
        """Write the heading of a group of options."""
        self.write(f"**{heading}**\n\n")

    def write_text(self, text: str) -> None:
        """Write paragraphs as they are."""
        self.write(f"{escape_markdown(text)}\n")

    def write_dl(
        self, rows: Sequence[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        """Write options with what they mean as a definition list."""
        for option, meaning in rows:
            self.write(f"`{option}`\n:   {escape_markdown(meaning)}\n\n")


def escape_markdown(text: str) -> str:
    """Return text in which only what is between backticks is markup."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([\\*_<>\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Replace the marks of a page."""
    for mark, render in (("commands", render_commands), ("codes", render_codes)):
        if f"<!-- {mark} -->" in markdown:
            markdown = markdown.replace(f"<!-- {mark} -->", render())
    return markdown


def render_commands() -> str:
    """Return the help of each command below a heading."""
    return "\n".join(f"## {name}\n\n{render_help(name)}" for name in COMMANDS)


def render_help(name: str) -> str:
    """Return the help of a command."""
    command = load_command(name).command
    formatter = MarkdownFormatter()
    settings = command.context_settings
    command.format_help(
        click.Context(command, info_name=f"onnxkvrename {name}", **settings), formatter
    )
    return formatter.getvalue()


def render_codes() -> str:
    """Return the table that leads to the passage of each code."""
    rows = [
        f"| [{row.code}](#{row.code.lower()}) | {row.name} | {row.severity} "
        f"| {escape_markdown(row.title)} |"
        for row in CODES.values()
    ]
    return "\n".join(["| code | name | severity | title |", "|---|---|---|---|", *rows])
