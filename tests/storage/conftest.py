"""Runs that stopped half way, and calls of the system that fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from onnxkvrename.storage.record import Record, build_record, rename_directory, write_record
from onnxkvrename.storage.temp_file import ReadyFile, TempFile, build_key, build_temp_name

StopRun = Callable[..., Record]


@pytest.fixture(autouse=True)
def _no_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long, and here only the order of calls matters."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def make_ready_file(target: Path, key: str, index: int = 0, *, replace: bool = True) -> ReadyFile:
    """Return a file that a run with a key has written: ``new NAME``."""
    with TempFile(target, temp_name=build_temp_name(key, index, "new")) as temp_file:
        temp_file.write(b"new " + os.fsencode(target.name))
        return temp_file.finish(replace=replace)


@pytest.fixture
def stop_run() -> StopRun:
    """Leave what a run leaves that was killed after some of its changes."""

    def stop(
        targets: Sequence[Path],
        done: int = 1,
        moves: Mapping[Path, Path] | None = None,
        made: Sequence[Path] = (),
    ) -> Record:
        key = build_key()
        files = [
            make_ready_file(target, key, index, replace=os.path.lexists(target))
            for index, target in enumerate(targets)
        ]
        record = build_record(key, files, moves or {}, made)
        write_record(record)
        for file in files[:done]:
            file.move_into_place(keeps_name=True)
        for move in record.moves[: max(0, done - len(files))]:
            rename_directory(move.source, move.target)
        return record

    return stop
