"""What a fault in the middle of the work leaves behind: the source, and nothing half done."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import models
import onnx
import pytest
from models import saved

from onnxkvrename import WriteError, cli, drafts, onnxfile, rename, running, wire
from onnxkvrename.drafts import TEMPORARY, Draft

WEIGHTS = bytes(range(256)) * 1024
UNNAMED = getattr(os, "O_TMPFILE", 0)
Fault = Callable[[Callable[[], Any]], Any]
Harness = Callable[[str, int, Fault, bool], bool]


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
    """The call does its work and gives an error, as closing does."""
    call()
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def interrupt(call: Callable[[], Any]) -> Any:
    """A signal arrives during the call."""
    call()
    raise KeyboardInterrupt


class Situation(NamedTuple):
    """In place or into another directory; with unnamed drafts or named ones."""

    elsewhere: bool
    unnamed: bool

    def __str__(self) -> str:
        where = "elsewhere" if self.elsewhere else "in place"
        return f"{where}, {'unnamed' if self.unnamed else 'named'}"


SITUATIONS = [Situation(a, b) for a in (False, True) for b in (False, True) if UNNAMED or not b]


@pytest.fixture(params=SITUATIONS, ids=Situation.__str__)
def harness(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Harness:
    """Runs the command with a fault in the Nth call of a kind, and judges what is left.

    Says whether the fault was reached.
    """
    elsewhere, unnamed = request.param
    source = {"m.onnx": model(external=elsewhere), **({"w.bin": WEIGHTS} if elsewhere else {})}

    def prepare(directory: Path) -> list[str]:
        directory.mkdir()
        for name, content in source.items():
            (directory / name).write_bytes(content)
        place = ["-o", str(directory / "new" / "dir" / "m.onnx")] if elsewhere else []
        return [str(directory / "m.onnx"), "--prefix", "VLLM", *place]

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # what is tried is the order of calls
    assert cli.main(prepare(tmp_path / "clean")) == 0
    result = contents(tmp_path / "clean")
    capsys.readouterr()

    def trial(name: str, nth: int, fault: Fault, lasting: bool) -> bool:
        directory, calls = tmp_path / "trial", 0
        args = prepare(directory)

        def stand_in(*args: Any, **how: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth or (lasting and calls > nth):
                return fault(lambda: real(*args, **how))
            return real(*args, **how)

        with monkeypatch.context() as patch:
            if not unnamed:
                patch.setattr(os, "O_TMPFILE", 0, raising=False)
            real = getattr(os, name)
            patch.setattr(os, name, stand_in)
            code = cli.main(args)
        said, left = capsys.readouterr().err, contents(directory)
        shutil.rmtree(directory)
        where = f"{name} {nth}{'+' if lasting else ''}: exit code {code}, {said}"
        assert "a bug in" not in said, where
        if fault is interrupt:
            assert code in (0, 130), where
            assert left in (source, result), f"{where} {sorted(left)}"
        else:
            assert code in (0, 1, 2), where  # 1: data that cannot be read are a finding
            assert left == (source if code else result), f"{where} {sorted(left)}"
        return calls >= nth

    return trial


def exhaust(trial: Harness, name: str, fault: Fault, lasting: bool = False) -> int:
    """Fail the first call, the second and so on; the number of calls that there are."""
    return next(nth for nth in count(1) if not trial(name, nth, fault, lasting)) - 1


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
    "link": [errno.EXDEV, errno.EPERM, errno.EDQUOT],
    "replace": [errno.EROFS, errno.EIO],
    "mkdir": [errno.EACCES, errno.EDQUOT],
}
CALLS = [name for name in ERRORS if hasattr(os, name)]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_leaves_the_source_or_the_result(name: str, harness: Harness) -> None:
    for number in ERRORS[name]:
        for lasting in (False, True):
            exhaust(harness, name, refuse(number), lasting)


def test_a_close_that_fails_leaves_the_source_or_the_result(harness: Harness) -> None:
    for lasting in (False, True):
        assert exhaust(harness, "close", fail_after, lasting) > 0


@pytest.mark.parametrize("name", [*CALLS, "close", "unlink"])
def test_an_interrupt_at_any_call_leaves_the_source_or_the_result(
    name: str, harness: Harness
) -> None:
    exhaust(harness, name, interrupt)


@pytest.mark.parametrize(
    "names", [["open"], ["pread"], ["write"], ["splice", "copy_file_range"], ["fchmod"], ["fsync"]]
)
def test_the_harness_meets_the_calls_it_fails(names: list[str], harness: Harness) -> None:
    assert sum(exhaust(harness, name, lambda call: call()) for name in names if name in CALLS) > 0


class Careless(Draft):
    """A writer that everything here has to catch: it writes to the place itself."""

    def _open(self) -> tuple[int, bool]:
        return os.open(self.target, os.O_RDWR | os.O_CREAT | os.O_TRUNC), True

    def commit(self, *, replace: bool, source: object = None) -> None:
        os.fsync(self.descriptor)


def test_the_harness_catches_a_writer_that_is_careless(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "Draft", Careless)
    with pytest.raises(AssertionError):
        exhaust(harness, "fchmod", refuse(errno.EIO))


# The ways to copy, each standing in for the one before.


def shortly(name: str) -> Callable[..., int]:
    """The real call, for at most 1000 bytes at a time."""
    real = getattr(os, name)

    def call(one: int, other: int, third: int, fourth: int) -> int:
        sizes = (
            (min(third, 1000), fourth) if name == "copy_file_range" else (third, min(fourth, 1000))
        )
        return int(real(one, other, *sizes))

    return call


def refusing(number: int) -> Callable[..., int]:
    def call(*args: object, **how: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def copying_nothing(*args: object, **how: object) -> int:
    return 0


def gone() -> None:
    """Stands for a call that the system does not have."""


@pytest.mark.parametrize("first", ["short", "refused", "nothing", "gone"])
@pytest.mark.parametrize("second", ["short", "refused", "nothing", "gone"])
def test_every_way_to_copy_gives_the_same_bytes(
    first: str, second: str, big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename(big, "VLLM", output=tmp_path / "expected.onnx")
    for name, how in (("splice", first), ("copy_file_range", first), ("sendfile", second)):
        if not hasattr(os, name) or (name, how) == ("splice", "short"):
            continue
        if how == "gone":
            monkeypatch.delattr(os, name)
        else:
            ways = {"refused": refusing(errno.EINVAL), "nothing": copying_nothing}
            monkeypatch.setattr(os, name, ways.get(how) or shortly(name))
    rename(big, "VLLM", output=tmp_path / "found.onnx")
    assert (tmp_path / "found.onnx").read_bytes() == (tmp_path / "expected.onnx").read_bytes()


def test_a_write_that_takes_little_is_continued(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename(big, "VLLM", output=big.with_name("expected.onnx"))
    real = os.write
    for name in ("splice", "copy_file_range", "sendfile"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(os, "write", lambda target, data: real(target, data[:1000]))
    rename(big, "VLLM")
    assert big.read_bytes() == big.with_name("expected.onnx").read_bytes()


@pytest.mark.parametrize(
    "number", [errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EPERM]
)
def test_a_way_to_copy_may_be_refused_in_the_middle(
    number: int, big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def then_refused(source: int, target: int, size: int, offset: int) -> int:
        if copied:
            raise OSError(number, os.strerror(number))
        copied.append(os.sendfile(target, source, offset, min(size, 1000)))
        return copied[0]

    monkeypatch.delattr(os, "splice", raising=False)
    monkeypatch.setattr(os, "copy_file_range", then_refused, raising=False)
    rename(big, "VLLM")
    assert WEIGHTS in big.read_bytes()
    assert copied == [1000]


@pytest.mark.skipif(not hasattr(os, "splice"), reason="no splice on this system")
@pytest.mark.parametrize("passed", [0, 1, 3])
def test_a_pipe_that_bursts_loses_nothing(
    passed: int, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some short moves the pipe is refused, and what was in it is copied otherwise."""
    real, calls = os.splice, count()

    def bursting(source: int, target: int, size: int, **how: int) -> int:
        if "offset_src" in how:
            return real(source, target, size, **how)
        if next(calls) >= passed:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(source, target, min(size, 1000))

    monkeypatch.setattr(os, "splice", bursting)
    rename(big, "VLLM")
    assert WEIGHTS in big.read_bytes()
    assert next(calls) > passed


def test_a_source_that_becomes_shorter_is_refused(
    big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*args: object) -> int:
        os.truncate(big, 1000)
        return 0

    monkeypatch.delattr(os, "splice", raising=False)
    monkeypatch.setattr(os, "copy_file_range", cut, raising=False)
    with pytest.raises(WriteError, match="became shorter"):
        rename(big, "VLLM")
    assert os.listdir(big.parent) == ["m.onnx"]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT])
def test_where_a_file_must_have_a_name_it_has_one_that_no_exporter_takes(
    number: int, big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = os.open, []

    def refuse_unnamed(path: Any, flags: int, *args: Any, **how: Any) -> int:
        if UNNAMED and flags & UNNAMED == UNNAMED:
            raise OSError(number, os.strerror(number))
        if os.fspath(path) != "/proc/self/fd" and flags & os.O_CREAT:
            seen.append(Path(path))
        return real(path, flags, *args, **how)

    monkeypatch.setattr(os, "open", refuse_unnamed)
    assert rename(big, "VLLM").status == "renamed"
    (name,) = seen
    assert name.parent == big.parent
    assert name.name.startswith(TEMPORARY)
    assert not name.name.endswith(".onnx")
    assert os.listdir(big.parent) == ["m.onnx"]


def test_without_proc_a_file_has_a_name(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    draft = Draft(big)
    with draft:
        assert draft.temporary.exists()
    assert not draft.temporary.exists()


def test_where_there_are_no_links_a_result_still_finds_its_place(
    big: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    assert rename(big, "VLLM", output=big.with_name("new.onnx")).status == "renamed"
    with Draft(big) as draft, pytest.raises(WriteError):
        draft.commit(replace=False)
    assert sorted(os.listdir(big.parent)) == ["m.onnx", "new.onnx"]


# A splice that went wrong must not get past the last look.


@pytest.mark.parametrize(
    "harm",
    [
        lambda pieces: [b"".join(p for p in pieces if isinstance(p, bytes)), *pieces],
        lambda pieces: pieces[:-1],
        lambda pieces: [p if isinstance(p, wire.Span) else p[::-1] for p in pieces],
        lambda pieces: [p if isinstance(p, wire.Span) else p.replace(b"V", b"W") for p in pieces],
    ],
    ids=["longer", "shorter", "garbled", "misnamed"],
)
def test_a_result_that_is_wrong_is_a_bug_and_changes_nothing(
    harm: Callable[[tuple[wire.Piece, ...]], list[wire.Piece]],
    big: Path,
    run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, before = wire.splice, big.read_bytes()
    monkeypatch.setattr(wire, "splice", lambda *args: tuple(harm(real(*args))))
    outcome = run(big, "--prefix", "VLLM")
    assert outcome.code == 2
    assert "did not read back as planned" in outcome.err
    assert "this is a bug in onnxkvrename" in outcome.err
    assert contents(big.parent) == {"m.onnx": before}


# Faults of the real world.


STOPPED_HALF_WAY = """
import os, signal, sys, time
from onnxkvrename import cli, onnxfile
number, unnamed, *args = sys.argv[1:]
if unnamed == "False":
    os.O_TMPFILE = 0
def stop(*args):
    os.kill(os.getpid(), int(number))
    time.sleep(60)
onnxfile.prove = stop
sys.exit(cli.main(args))
"""


@pytest.mark.parametrize("unnamed", [True, False])
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"])
def test_a_signal_during_the_writing_costs_nobody_a_file(
    name: str, unnamed: bool, big: Path
) -> None:
    before, number = big.read_bytes(), signal.Signals[name]
    args = [str(int(number)), str(unnamed and bool(UNNAMED)), str(big), "--prefix", "VLLM"]
    command = [sys.executable, "-c", STOPPED_HALF_WAY, *args]
    process = subprocess.run(command, cwd=big.parent, capture_output=True)
    left = contents(big.parent)
    assert left.pop("m.onnx") == before
    if number == signal.SIGKILL:
        assert process.returncode == -number
        assert len(left) == (0 if unnamed and UNNAMED else 1)
        assert all(name.startswith(TEMPORARY) and not name.endswith(".onnx") for name in left)
    else:
        assert (process.returncode, left) == (130, {})
        assert b"interrupted" in process.stderr


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
        monkeypatch.setattr(drafts, "require_space", lambda *args: None)
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
    real = onnxfile.write

    def remove(*args: Any) -> None:
        real(*args)
        shutil.rmtree(tmp_path / "new")

    monkeypatch.setattr(onnxfile, "write", remove)
    with pytest.raises(WriteError, match="No such file or directory"):
        rename(big, "VLLM", output=tmp_path / "new" / "m.onnx")
    assert WEIGHTS in big.read_bytes()
