"""Kill a command at each call of a function of `os`, to check what it leaves behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename.cli.main import main

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are killed after a fork")


def read_directory(directory: Path) -> dict[str, bytes]:
    """Return the content of every file below a directory, by relative path."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


CHILD_TIMEOUT = 60
"""Seconds until a child is killed that hangs because another thread held a lock at the fork.

It counts as killed like any other: running the same command again must finish the work.
"""


def run_quietly(*args: object) -> int:
    """Run the command line in this process, with ``-q`` if it can, and return its exit code."""
    quiet = () if args[0] == "inspect" else ("-q",)
    return main([*map(str, args), *quiet])


def run_and_kill(name: str, nth: int, *args: object, after: bool, code: int = 0) -> bool:
    """Run the command in a child process, and kill it at its ``nth`` call of ``os.<name>``.

    Args:
        name: The name of the function of :mod:`os`.
        nth: The number of the call, from 1.
        args: The arguments of the command.
        after: Whether to kill the process after the call instead of before it.
        code: The exit code of a command that is not killed.

    Returns:
        True if the process was killed; False if the command made fewer calls.
    """
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_TIMEOUT)
        calls, original = count(1), getattr(os, name)

        def call_and_kill(*args: Any, **kwargs: Any) -> Any:
            last = next(calls) == nth
            if last and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return original(*args, **kwargs)
            finally:
                if last:
                    os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, name, call_and_kill)
        try:
            os._exit(run_quietly(*args))
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGALRM)
        return True
    assert os.WEXITSTATUS(status) == code
    return False


def count_until_false(reached: Callable[[int], bool]) -> int:
    """Call `reached` with 1, 2, … until it is false; return how often it was true."""
    return next(nth for nth in count(1) if not reached(nth)) - 1
