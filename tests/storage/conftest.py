"""Runs that stopped half way, and calls of the system that fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest

from onnxkvrename.storage.record import Record, build_record, write_record
from onnxkvrename.storage.temp_file import ReadyFile, TempFile, build_key, build_temp_name

StopRun = Callable[..., Record]
FindKept = Callable[[Record, int, Literal["new", "old"]], Path]


@pytest.fixture(autouse=True)
def _no_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long, and here only the order of calls matters."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def make_ready_file(target: Path, key: str, *, replace: bool = True) -> ReadyFile:
    """Return a file that a run with a key has written: ``new NAME``."""
    with TempFile(target, key=key) as temp_file:
        temp_file.write(b"new " + os.fsencode(target.name))
        return temp_file.finish(replace=replace)


@pytest.fixture
def find_kept() -> FindKept:
    """Return what a run keeps of its Nth file: ``new`` or ``old``."""

    def find(record: Record, number: int, kind: Literal["new", "old"]) -> Path:
        change = record.files[number]
        return change.target.with_name(build_temp_name(record.key, change.key, kind))

    return find


@pytest.fixture
def stop_run() -> StopRun:
    """Leave what a run leaves that was killed after some of its changes."""

    def stop(targets: Sequence[Path], done: int = 1, made: Sequence[Path] = ()) -> Record:
        key = build_key()
        files = [
            make_ready_file(target, key, replace=os.path.lexists(target)) for target in targets
        ]
        record = build_record(key, files, made)
        write_record(record)
        for file in files[:done]:
            file.move_into_place(keeps_name=True)
        return record

    return stop
