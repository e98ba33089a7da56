"""The commands that hints suggest."""

from __future__ import annotations

import os
import re
import shlex

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
