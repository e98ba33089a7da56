"""Files that commands write at the user's wish: over nothing that they read, whole, repeatable."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import models
import pytest
from kill_commands import (
    count_until_false,
    needs_fork,
    read_directory,
    run_and_kill,
    run_quietly,
)
from models import saved
from tiers import thin

from onnxkvrename.files.temp_file import TEMP_PREFIX
from onnxkvrename.rules.load import PROFILES_DIRECTORY

MODEL, DATA = "decoder.onnx", "weights.data"
COMMANDS: dict[str, Callable[[str], tuple[str, ...]]] = {
    "html": lambda output: ("inspect", MODEL, "--html", output),
    "page": lambda output: ("compare", MODEL, MODEL, "--target", "qefficient", "--html", output),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, its data, and its rules."""
    model = models.decoder()
    for location in (DATA, "deep/data.data"):
        weight = model.graph.initializer.add(name=location, dims=[4], data_type=2, data_location=1)
        weight.external_data.add(key="location", value=location)
    saved(model, tmp_path / MODEL)
    (tmp_path / "deep").mkdir()
    for location in (DATA, "deep/data.data"):
        (tmp_path / location).write_text("<html>")
    rules = (PROFILES_DIRECTORY / "qeff.toml").read_text("utf-8")
    (tmp_path / "rules.toml").write_text(rules)
    (tmp_path / "alias").symlink_to(".")
    (tmp_path / "link.data").symlink_to(DATA)
    os.link(tmp_path / DATA, tmp_path / "twin.data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "output",
    [
        *(MODEL, f"alias/{MODEL}", DATA, f"alias/{DATA}", "link.data", "twin.data"),
        *("deep/data.data", "deep/../rules.toml", "missing.bin"),
    ],
)
@pytest.mark.parametrize("name", COMMANDS)
def test_no_file_that_is_read_is_written_over(
    name: str, output: str, force: bool, here: Path, run, snapshot
) -> None:
    if output == "missing.bin":
        os.rename(DATA, "elsewhere")
        output = DATA  # what a model needs may be missing, too
    before = snapshot(here)
    options = ("--force",) if force else ()
    outcome = run(*COMMANDS[name](output), "--rules", "rules.toml", *options)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert f"{Path(output)}: is " in outcome.err
    assert snapshot(here) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_an_output_is_a_file_in_a_directory_that_is_there(
    name: str, here: Path, run, snapshot
) -> None:
    before = snapshot(here)
    for output, reason in {
        "deep": "is a directory",
        "alias": "is a directory",
        "new/": "new/ names a directory, not a file",
        "deep/": "deep/ names a directory, not a file",
        "none/new": "No such file or directory",
        "rules.toml/new": "Not a directory",
    }.items():
        outcome = run(*COMMANDS[name](output))
        assert (outcome.code, outcome.out) == (2, "")
        assert reason in outcome.err
    assert snapshot(here) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_command_again_finds_its_work_done(name: str, here: Path, run) -> None:
    (here / "twin.data").unlink()
    command = COMMANDS[name]("result.data")
    assert run(*command).code == 0
    for path in here.iterdir():
        if path.is_file() and not path.is_symlink():
            os.utime(path, ns=(0, 0))
    assert run(*command).code == 0
    assert [
        path.name for path in here.iterdir() if path.is_file() and path.stat().st_mtime_ns
    ] == []


class FailingQuery:
    """A query of the disk that fails the Nth time it is for a path."""

    def __init__(self, name: str, path: str, nth: int) -> None:
        self.real, self.path, self.nth = getattr(os, name), path, nth
        self.count = 0

    def __call__(self, path: object, *args: object, **how: object) -> os.stat_result:
        if str(path).endswith(self.path):
            self.count += 1
            if self.count == self.nth:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return self.real(path, *args, **how)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["stat", "lstat"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_query_that_fails_is_an_error_with_its_reason(
    command: str, name: str, here: Path, run, snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query of an output fails in its turn: no file is written over, or taken for absent."""
    if command in ("html", "page"):
        assert run(*COMMANDS[command]("result.data")).code < 2  # an earlier one would be replaced
    else:
        (here / "result.data").write_text("another")
    before = snapshot(here)
    # The first stat is click's own, on which nothing depends.
    for nth in count(2 if name == "stat" else 1):
        query = FailingQuery(name, "result.data", nth)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, query)
            outcome = run(*COMMANDS[command]("result.data"))
        if query.count < nth:
            break
        assert outcome.code == 2
        assert os.strerror(errno.ESTALE) in outcome.err
        assert snapshot(here) == before
    assert nth > 2 or name == "lstat"


# Killed at any call.

CALLS = ("open", "write", "fsync", "link", "replace", "unlink")
AFTER = ("link", "replace", "unlink")
"""Calls that the process is also killed after."""


def prepare(directory: Path, *, replaces: bool) -> None:
    """Write the files that there are before a command, and nothing else."""
    for path in directory.iterdir():
        path.unlink()
    saved(models.decoder(), directory / MODEL)
    if replaces:
        (directory / "result.data").write_text("<html>old")


@needs_fork
@pytest.mark.parametrize(
    ("name", "replaces", "unnamed"),
    thin(
        [
            ("html", False, True),
            ("html", True, False),
            ("html", True, True),
            ("html", False, False),
        ],
        2,
    ),
)
def test_a_run_killed_at_any_call_is_completed_by_the_next(
    name: str, replaces: bool, unnamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if not unnamed:
        monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    elif not hasattr(os, "O_TMPFILE"):
        pytest.skip("this system knows no unnamed files")
    forced = ("--force",) if replaces else ()
    command = (*COMMANDS[name]("result.data"), *forced)
    prepare(tmp_path, replaces=replaces)
    before = read_directory(tmp_path)
    assert run_quietly(*command) == 0
    expected = read_directory(tmp_path)
    assert expected != before

    def is_killed(call: str, after: bool, nth: int) -> bool:
        prepare(tmp_path, replaces=replaces)
        killed = run_and_kill(call, nth, *command, after=after)
        where = f"{call} {nth} {after}"
        for path, content in read_directory(tmp_path).items():
            ours = path.startswith(TEMP_PREFIX)
            assert ours or content in (before.get(path), expected.get(path)), where
        assert run_quietly(*command) == 0, where
        assert read_directory(tmp_path) == expected, where
        return killed

    kills = {
        (call, after): count_until_false(partial(is_killed, call, after))
        for call in CALLS
        for after in ([False, True] if call in AFTER else [False])
    }
    assert all(kills[call, False] for call in ("open", "write", "fsync", "unlink")), kills
    assert kills["link", True] or kills["replace", True]


def test_what_is_written_has_the_mode_of_any_new_file(here: Path, run) -> None:
    mask = os.umask(0o027)
    try:
        for name in COMMANDS:
            assert run(*COMMANDS[name](f"{name}.new")).code == 0
    finally:
        os.umask(mask)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in here.glob("*.new")}
    assert modes == {0o640}
