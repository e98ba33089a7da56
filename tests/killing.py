"""Kill a command at each call of a function of `os`, and see what it leaves behind."""

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
    """Return the content of every file below a directory, by relative path."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


STUCK = 60
"""Seconds until a child is killed: if another thread held a lock at the fork, it waits for ever.

That counts as killed like any other: the same command must be able to finish the work.
"""


def run(*args: object) -> int:
    """Run the command line in this process and return its exit code."""
    return main([*map(str, args), "-q"])


def killed(name: str, nth: int, *args: object, after: bool) -> bool:
    """Run the command in a process that is killed at its ``nth`` call of ``os.name``, or after it.

    Returns whether the command made so many calls, and so was killed.
    """
    child = os.fork()
    if child == 0:
        signal.alarm(STUCK)
        calls, real = count(1), getattr(os, name)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            last = next(calls) == nth
            if last and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return real(*args, **kwargs)
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
    """Call `reached` with 1, 2, … until it is false; return how often it was true."""
    return next(nth for nth in count(1) if not reached(nth)) - 1
