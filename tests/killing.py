"""Commands killed at any point of their work, and what they leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename.cli.main import main

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are killed after a fork")


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


STUCK = 60
"""Seconds until a child is ended: at the fork another thread may hold a lock, for ever then.

That is a death like the others: what it leaves must be ended by the same command.
"""


def run(*args: object) -> int:
    """The command line, in this process; its exit code."""
    return main([*map(str, args), "-q"])


def killed(name: str, nth: int, *args: object, after: bool) -> bool:
    """Run the command in a process that is killed at its ``nth`` call of ``os.name``, or after it.

    Says whether it came to that.
    """
    child = os.fork()
    if child == 0:
        signal.alarm(STUCK)
        calls, real = count(1), getattr(os, name)

        def deadly(*given: Any, **how: Any) -> Any:
            last = next(calls) == nth
            if last and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*given, **how)
            finally:
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, name, deadly)
        try:
            os._exit(run(*args))
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGALRM)
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def exhaust(reached: Callable[[int], bool]) -> int:
    """Try 1, 2, … until nothing is reached any more; how many there were."""
    return next(nth for nth in count(1) if not reached(nth)) - 1
