"""Systems that lack something, and calls that fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import NoReturn

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
