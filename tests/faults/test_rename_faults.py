"""Faults in the middle of the work: they leave the source and nothing half done."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import models
import onnx
import pytest
from faults.controls import copy_into
from faults.judging import TEMP_PREFIX
from models import saved
from tiers import thin

from onnxkvrename import WriteError, rename
from onnxkvrename.cli.main import main
from onnxkvrename.model.file import splice_payloads
from onnxkvrename.model.protobuf import Piece, Span

WEIGHTS = bytes(range(256)) * 1024
FLOCK = importlib.util.find_spec("fcntl") is not None
UNNAMED = getattr(os, "O_TMPFILE", 0)
Fault = Callable[[Callable[[], Any]], Any]


def model(*, external: bool = False) -> bytes:
    """A decoder with a quarter of a megabyte of weights, in the model or beside it."""
    proto = models.decoder()
    weight = proto.graph.initializer.add(name="w", dims=[len(WEIGHTS)], data_type=2)
    if external:
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value="w.bin")
    else:
        weight.raw_data = WEIGHTS
    return bytes(proto.SerializeToString())


@pytest.fixture
def big(tmp_path: Path) -> Path:
    (tmp_path / "big").mkdir()
    return saved(model(), tmp_path / "big" / "m.onnx")


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, and every directory that is empty."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b""
        for path in directory.rglob("*")
        if path.is_file() or not os.listdir(path)
    }


# One call of the operating system after the other fails, until a run meets no fault.


def refuse(number: int) -> Fault:
    """The call does nothing and gives an error."""

    def fault(call: Callable[[], Any]) -> Any:
        raise OSError(number, os.strerror(number))

    return fault


def fail_after(call: Callable[[], Any]) -> Any:
    """The call does its work and gives an error, as closing does, and much else on NFS."""
    call()
    raise OSError(errno.EIO, os.strerror(errno.EIO))


class Situation(NamedTuple):
    """A rename to interrupt: its models, its outputs, and whether temporary files are unnamed.

    One model or a set of three: in place, into a new directory, into one that is
    there (``old``), or with force ``over`` what stands in it.
    """

    models: int
    place: str
    unnamed: bool

    def __str__(self) -> str:
        return f"{self.models} {self.place} {'unnamed' if self.unnamed else 'named'}"

    @property
    def source(self) -> dict[str, bytes]:
        """The files there are, by name. Data lie beside one model, if it is to go elsewhere."""
        files = dict.fromkeys(["in/m.onnx", "in/n.onnx", "in/sub/o.onnx"][: self.models], SMALL)
        if self.place == "in place":
            return {**files, "in/m.onnx": LARGE} if self.models == 1 else files
        files |= {"in/m.onnx": SPREAD, "in/w.bin": WEIGHTS}
        there = {"old": ["note"], "over": ["note", "m.onnx", "w.bin"]}.get(self.place, [])
        return files | {f"out/{name}": b"old" for name in there}

    def prepare(self, directory: Path) -> None:
        """Write the files there are."""
        for name, content in self.source.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)

    def rename(self, directory: Path) -> int:
        """Rename them by the command line, and give the exit code."""
        out = directory / ("new/dir" if self.place == "new" else "out")
        where = [] if self.place == "in place" else ["-d", str(out)]
        force = ["--force"] if self.place == "over" else []
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return main([str(directory / "in"), "--prefix", "VLLM", *where, *force])


SMALL, LARGE, SPREAD = bytes(models.decoder().SerializeToString()), model(), model(external=True)
SITUATIONS = [
    Situation(1, "in place", False),
    Situation(1, "in place", True),
    Situation(1, "new", False),
    Situation(3, "in place", False),
    Situation(3, "new", True),
    Situation(3, "old", False),
    Situation(3, "over", True),
]


@cache
def outcome(situation: Situation) -> dict[str, bytes]:
    """Return the result of a run without a fault."""
    with in_memory() as directory:
        situation.prepare(directory)
        assert situation.rename(directory) == 0
        return contents(directory)


@contextmanager
def in_memory() -> Iterator[Path]:
    """A directory where files come and go fast, if the system has one."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)


class Harness:
    """Runs the work with a fault in the Nth call of a kind, and judges what is left."""

    def __init__(self, situation: Situation, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.situation, self.monkeypatch = situation, monkeypatch
        self.source, self.result = situation.source, outcome(situation)
        self.directory = place / "trial"

    def trial(self, name: str, nth: int, fault: Fault, *, lasting: bool = False) -> int:
        """Run with the fault; gives the number of calls there were."""
        calls = 0
        module = importlib.import_module("fcntl" if name == "flock" else "os")
        real = getattr(module, name)

        def stand_in(*args: Any, **how: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth or (lasting and calls > nth):
                return fault(lambda: real(*args, **how))
            return real(*args, **how)

        self.situation.prepare(self.directory)
        with self.monkeypatch.context() as patch:
            if not self.situation.unnamed:
                patch.setattr(os, "O_TMPFILE", 0, raising=False)
            patch.setattr(module, name, stand_in)
            code = self.situation.rename(self.directory)
        where = f"{name} {nth}{'+' if lasting else ''}: exit code {code}"
        if name in REMOVING or (lasting and name in NEEDED):
            self.judge_what_could_not_be_undone(where)
        else:
            self.judge(code, fault, where)
        shutil.rmtree(self.directory)
        return calls

    def judge(self, code: int, fault: Fault, where: str) -> None:
        """All files are as they were, or all as they are to be, and there are no others."""
        left = contents(self.directory)
        said = f"{where} {sorted(left)}"
        # After the last change, a directory that cannot be synced is told, and nothing is undone.
        if fault is fail_after or where.startswith(("fsync", "open")):
            assert code in (0, 1, 2, 130), said
            assert left in (self.source, self.result), said
            assert code or left == self.result, said
        else:
            assert code in (0, 1, 2), said  # 1: data that cannot be read are a finding
            assert left == (self.source if code else self.result), said

    def judge_what_could_not_be_undone(self, where: str) -> None:
        """Each file is whole, as it was or as it is to be; the same run again ends the work."""
        for name, content in contents(self.directory).items():
            # A new directory that an undo could not end is kept whole, under its temporary name.
            kept = TEMP_PREFIX in os.path.dirname(name)
            ours = kept or (TEMP_PREFIX in name and not name.endswith(".onnx"))
            assert ours or content in (self.source.get(name), self.result.get(name)), where
        assert self.situation.rename(self.directory) == 0, where
        assert contents(self.directory) == self.result, where


REMOVING = ("unlink", "rmdir")
"""Functions that remove temporary files."""
NEEDED = ("replace", "link", "fstat", "flock", "open", "scandir")
"""Functions that undoing needs too: if they keep failing, something may be left behind."""


@pytest.fixture(params=SITUATIONS, ids=Situation.__str__)
def harness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    if request.param.unnamed and not UNNAMED:
        pytest.skip("this system knows no unnamed files")
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what is tried is the order of calls
    with in_memory() as directory:
        yield Harness(request.param, directory, monkeypatch)


def exhaust(harness: Harness, name: str, fault: Fault, *, lasting: bool = False) -> None:
    """Fail the first call, the second and so on, until there are not so many."""
    next(nth for nth in count(1) if harness.trial(name, nth, fault, lasting=lasting) < nth)


ERRORS = {
    "open": [errno.EACCES, errno.EMFILE],
    "fstat": [errno.EIO],
    "pread": [errno.EIO],
    "write": [errno.ENOSPC, errno.EIO],
    "copy_file_range": [errno.EXDEV, errno.ENOSPC, errno.EINVAL, errno.EIO],
    "sendfile": [errno.EINVAL],
    "pipe": [errno.EMFILE],
    "splice": [errno.EINVAL, errno.ENOSPC, errno.EIO],
    "fchmod": [errno.EPERM],
    "listxattr": [errno.EOPNOTSUPP],
    "statvfs": [errno.ENOSYS],
    "fsync": [errno.EIO, errno.ENOSPC],
    "flock": [errno.EWOULDBLOCK, errno.EIO, errno.ENOLCK],
    "link": [errno.EDQUOT, errno.EXDEV, errno.EPERM],
    "replace": [errno.EROFS, errno.EIO],
    "rename": [errno.EROFS],
    "mkdir": [errno.EACCES, errno.EDQUOT],
    "unlink": [errno.EACCES],
    "rmdir": [errno.EACCES],
    "scandir": [errno.EACCES],
}
CALLS = [name for name in ERRORS if hasattr(os, name) or (name == "flock" and FLOCK)]


READING = ("fstat", "pread", "listxattr", "statvfs", "scandir")
"""Calls that change nothing: each is tried once, which takes long enough."""


@pytest.mark.parametrize(
    ("name", "harness"), thin(itertools.product(CALLS, SITUATIONS), 24), indirect=["harness"]
)
def test_a_call_that_fails_leaves_the_source_or_the_result(name: str, harness: Harness) -> None:
    alone = harness.situation.models == 1
    for number in ERRORS[name] if alone else ERRORS[name][:1]:
        exhaust(harness, name, refuse(number))
        if name not in READING:
            exhaust(harness, name, refuse(number), lasting=True)


@pytest.mark.parametrize(
    ("name", "harness"),
    thin(
        itertools.product(
            ["close", "link", "replace", "rename", "unlink", "mkdir", "rmdir"], SITUATIONS
        ),
        7,
    ),
    indirect=["harness"],
)
def test_a_call_that_fails_after_its_work_leaves_the_source_or_the_result(
    name: str, harness: Harness
) -> None:
    exhaust(harness, name, fail_after)


def test_the_harness_meets_the_calls_it_fails(harness: Harness) -> None:
    met = {name for name in CALLS if harness.trial(name, 0, fail_after) > 0}
    assert {"open", "fstat", "pread", "write", "fchmod", "fsync", "flock"} <= met
    assert met & {"link", "replace"}
    # New directories, among them those within one that is there, are made in place.
    assert ("mkdir" in met) == (harness.situation.place != "in place")


@pytest.mark.parametrize("harness", [Situation(1, "in place", False)], indirect=True)
def test_the_harness_catches_a_writer_that_is_careless(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "replace", copy_into)
    with pytest.raises(AssertionError):
        exhaust(harness, "write", refuse(errno.ENOSPC))


def refusing(*args: object, **how: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("place", ["in place", "new", "old", "over"])
def test_a_file_system_without_links_takes_sets_all_the_same(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    situation = Situation(3, place, False)
    expected = outcome(situation)
    monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    monkeypatch.setattr(os, "link", refusing)
    situation.prepare(tmp_path)
    assert situation.rename(tmp_path) == 0
    assert contents(tmp_path) == expected


# A splice that went wrong must not get past the last look.


@pytest.mark.parametrize(
    "harm",
    [
        lambda pieces: [b"".join(p for p in pieces if isinstance(p, bytes)), *pieces],
        lambda pieces: pieces[:-1],
        lambda pieces: [p if isinstance(p, Span) else p[::-1] for p in pieces],
        lambda pieces: [p if isinstance(p, Span) else p.replace(b"V", b"W") for p in pieces],
    ],
    ids=["longer", "shorter", "garbled", "misnamed"],
)
def test_a_result_that_is_wrong_is_a_bug_and_changes_nothing(
    harm: Callable[[tuple[Piece, ...]], list[Piece]],
    big: Path,
    run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, before = splice_payloads, big.read_bytes()
    monkeypatch.setattr(
        "onnxkvrename.rules.kv_model.splice_payloads", lambda *args: tuple(harm(real(*args)))
    )
    outcome = run(big, "--prefix", "VLLM")
    assert outcome.code == 2
    assert "did not read back as planned" in outcome.err
    assert "nothing was changed (this is a bug in onnxkvrename: please report it)" in outcome.err
    assert contents(big.parent) == {"m.onnx": before}


# Faults of the real world.


HEED_SIGNALS = """
import signal
for name in ("SIGTERM", "SIGINT", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
"""
"""Tests may run where a signal is ignored, as nohup ignores SIGHUP."""

STOPPED_HALF_WAY = """
import os, signal, sys, time
from onnxkvrename.cli import main as cli
number, unnamed, *args = sys.argv[1:]
if unnamed == "False":
    os.O_TMPFILE = 0
def stop(*args):
    os.kill(os.getpid(), int(number))
    time.sleep(60)
os.fsync = stop  # the file is written, and not yet in place
sys.exit(cli.main(args))
"""


@pytest.mark.parametrize(
    ("name", "unnamed"),
    thin(itertools.product(["SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"], [True, False]), 3),
)
def test_a_signal_during_the_writing_costs_nobody_a_file(
    name: str, unnamed: bool, big: Path
) -> None:
    before, number = big.read_bytes(), signal.Signals[name]
    args = [str(int(number)), str(unnamed and bool(UNNAMED)), str(big), "--prefix", "VLLM"]
    command = [sys.executable, "-c", HEED_SIGNALS + STOPPED_HALF_WAY, *args]
    process = subprocess.run(command, cwd=big.parent, capture_output=True)
    left = contents(big.parent)
    assert left.pop("m.onnx") == before
    if number == signal.SIGKILL:
        assert process.returncode == -number
        assert len(left) == (0 if unnamed and UNNAMED else 1)  # a draft that has a name
        assert all(name.startswith(TEMP_PREFIX) and not name.endswith(".onnx") for name in left)
        assert rename(big, "VLLM").status == "renamed"
        assert os.listdir(big.parent) == ["m.onnx"]
    else:
        assert (process.returncode, left) == (130, {})
        assert b"interrupted" in process.stderr


STOPPED_BETWEEN_TWO = """
import os, signal, sys
from onnxkvrename.cli import main as cli
number, call, nth, *args = sys.argv[1:]
os.O_TMPFILE = 0
real, done = getattr(os, call), []
def stop(*args, **how):
    real(*args, **how)
    done.append(args)
    if len(done) == int(nth):
        os.kill(os.getpid(), int(number))
setattr(os, call, stop)
sys.exit(cli.main(args))
"""


@pytest.mark.parametrize(
    ("place", "call", "nth"),
    [("in place", "replace", 2), ("old", "link", 1), ("old", "replace", 1)],
    ids=["the second model", "data", "a new directory"],
)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_signal_between_two_replacements_leaves_all_as_they_were_or_the_rest_to_do(
    name: str, place: str, call: str, nth: int, tmp_path: Path
) -> None:
    number, situation = signal.Signals[name], Situation(3, place, False)
    situation.prepare(tmp_path)
    where = [] if place == "in place" else ["-d", str(tmp_path / "out")]
    args = [str(int(number)), call, str(nth), str(tmp_path / "in"), "--prefix", "VLLM", *where]
    process = subprocess.run([sys.executable, "-c", HEED_SIGNALS + STOPPED_BETWEEN_TWO, *args])
    left = contents(tmp_path)
    if number == signal.SIGTERM:
        assert process.returncode == 130
        assert left == situation.source
    else:
        assert process.returncode == -number
        assert left != situation.source
    assert situation.rename(tmp_path) == 0
    assert contents(tmp_path) == outcome(situation)


def test_a_signal_that_is_ignored_stays_ignored(big: Path) -> None:
    script = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + STOPPED_HALF_WAY
    script = script.replace("time.sleep(60)", "")
    args = [str(int(signal.SIGHUP)), "True", str(big), "--prefix", "VLLM"]
    command = [sys.executable, "-c", script, *args]
    assert subprocess.run(command, cwd=big.parent, capture_output=True).returncode == 0


@pytest.mark.parametrize("output", [[], ["-o", "new/m.onnx"]])
def test_a_limit_on_the_size_of_files_is_an_error(output: list[str], big: Path) -> None:
    before = contents(big.parent)
    command = [sys.executable, "-m", "onnxkvrename", "m.onnx", "--prefix", "VLLM"]
    process = subprocess.run(
        ["bash", "-c", 'ulimit -f 100 && "$@"', "-", *command, *output],
        cwd=big.parent,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2
    assert "File too large (raise the file size limit (ulimit -f)" in process.stderr
    assert contents(big.parent) == before


@pytest.fixture
def little_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 400 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("a disk to fill can be mounted by root only")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_full_disk_is_an_error(
    foreseen: bool, little_disk: Path, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"m.onnx": big.read_bytes()}
    shutil.copyfile(big, little_disk / "m.onnx")
    if not foreseen:
        monkeypatch.setattr(
            "onnxkvrename.renaming.batch_checks.check_free_space", lambda *args, **how: None
        )
    said = "but the disk has .* left" if foreseen else "No space left on device"
    with pytest.raises(WriteError, match=rf"{said} \(free some space"):
        rename(little_disk / "m.onnx", "VLLM")
    assert contents(little_disk) == before
    with pytest.raises(WriteError, match=said):
        rename(big, "VLLM", output=little_disk / "new" / "m.onnx")
    assert contents(little_disk) == before


def test_a_directory_that_is_removed_meanwhile_is_an_error(
    big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, new = os.fsync, tmp_path / "new"
    new.mkdir()

    def remove(descriptor: int) -> None:
        real(descriptor)
        shutil.rmtree(new, ignore_errors=True)

    monkeypatch.setattr(os, "fsync", remove)
    with pytest.raises(WriteError, match="No such file or directory"):
        rename(big, "VLLM", output=new / "m.onnx")
    assert os.listdir(tmp_path) == ["big"]
    assert WEIGHTS in big.read_bytes()
