"""Systems that lack something, and calls that fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn

import pytest


@pytest.fixture(autouse=True)
def _no_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long, and here only the order of calls matters."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def refuse(number: int) -> Callable[..., NoReturn]:
    """Return a function that fails with an error of the system."""

    def call(*args: object, **how: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture(params=["unnamed", "named", "no links"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A system with O_TMPFILE, one without it, and one without hard links, as a memory card is."""
    if request.param == "unnamed" and not hasattr(os, "O_TMPFILE"):
        pytest.skip("this system has no unnamed files")
    if request.param != "unnamed":
        monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    if request.param == "no links":
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    return str(request.param)


def watch_calls(
    patch: pytest.MonkeyPatch,
    names: Sequence[str],
    meet: Callable[[int, str, Callable[..., Any]], Any],
) -> None:
    """Let each call of these functions of `os` be made by another one.

    That gets the number of the call, from 1, the name of the function, and what makes the call.
    """
    numbers = count(1)

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **how: meet(next(numbers), name, lambda: real(*args, **how))

    for name in names:
        patch.setattr(os, name, wrap(name, getattr(os, name)))
