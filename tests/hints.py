"""The commands that hints suggest."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from conftest import Outcome, Run

COMMAND = re.compile(r"`(onnxkvrename (?:[^`'\"]|'[^']*'|\"[^\"]*\")*)`")


def find_commands(text: str) -> list[str]:
    """Return the whole commands in a text: those between backticks."""
    return COMMAND.findall(text)


def split_words(command: str) -> list[str]:
    r"""Return the words of a command, as bash reads them: also ``$'\012'``."""

    def decode(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        data = re.sub(rb"\\(\d{3})", lambda octal: bytes([int(octal[1], 8)]), os.fsencode(match[1]))
        return shlex.quote(os.fsdecode(data))

    return shlex.split(re.sub(r"\$'([^']*)'|'[^']*'|\"[^\"]*\"", decode, command))


def run_commands(text: str, run: Run) -> Outcome:
    """Run the commands of hints, each once, as a shell does, and return what came of the last."""
    for command in dict.fromkeys(find_commands(text)):
        words = split_words(command.removeprefix("onnxkvrename "))
        redirected = words.index(">") if ">" in words else len(words)
        outcome = run(*words[:redirected])
        if redirected < len(words):
            Path(words[redirected + 1]).write_text(outcome.out, "utf-8")
    return outcome
