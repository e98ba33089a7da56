"""Run a command on a terminal, and read what the terminal gets."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run_on_terminal(
    command: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path | None = None,
    *,
    stdout_too: bool = True,
) -> tuple[int, str]:
    """Return the exit code of a command, and all that its terminal of 100 columns gets.

    Its stderr is the terminal, and with `stdout_too` its stdout is, too.
    """
    import pty  # not on Windows

    master, slave = pty.openpty()
    process = subprocess.Popen(
        command,
        stdout=slave if stdout_too else subprocess.DEVNULL,
        stderr=slave,
        cwd=cwd,
        env={"TERM": "xterm", "COLUMNS": "100", **environment},
    )
    os.close(slave)
    received = b""
    try:
        while part := os.read(master, 1 << 16):
            received += part
    except OSError:  # how the end of a terminal looks on Linux
        pass
    finally:
        os.close(master)
    return process.wait(), received.decode().replace("\r\n", "\n")
