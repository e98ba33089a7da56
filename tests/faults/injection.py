"""Run the command line in a child process, in which one call of the operating system goes wrong.

Only calls that change something are counted: those that create, write, rename, remove, lock or
close. The child is a fork, so a case takes a few milliseconds. It runs what the console script
runs, with the handling of signals around it.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import onnxkvrename
from onnxkvrename.__main__ import run
from onnxkvrename.cli.main import main

CHILD_TIMEOUT = 60
"""Seconds until a child that hangs is ended, which fails the case."""

CHANGING = (
    *("open", "close", "write", "pwrite", "ftruncate", "truncate", "fsync", "fdatasync"),
    *("copy_file_range", "sendfile", "splice", "pipe", "posix_fallocate"),
    *("fchmod", "chmod", "fchown", "chown", "setxattr", "removexattr", "utime"),
    *("link", "symlink", "rename", "replace", "unlink", "remove", "mkdir", "rmdir"),
    *("flock", "lockf"),
)
"""Functions that change something. Opening for reading is not counted, closing always is."""
COPYING = ("write", "pwrite", "copy_file_range", "sendfile", "splice")
"""Of these, those that do not both move bytes and give an error."""
READING = ("open", "stat", "lstat", "fstat", "scandir", "listdir", "pread", "readlink", "statvfs")
"""Functions that look at files."""
CHANGES_BY_NAME = ("open", "os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.rename")
CHANGES_BY_NAME += ("os.rmdir", "os.symlink", "os.truncate", "os.utime", "subprocess.Popen")
"""Events of Python's audit hook for what changes files, whoever asks for it."""

ERRNOS = (
    *(errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EACCES),
    *(errno.EMFILE, errno.EINTR, errno.EXDEV, errno.EOPNOTSUPP),
)
READING_ERRNOS = (errno.EIO, errno.ESTALE)
"""Errors of calls that look at files: none of them says that there is no file."""

_PROGRAM = (sys.prefix, sys.base_prefix, str(Path(onnxkvrename.__file__).parent), "/proc")


class Fault(NamedTuple):
    """What goes wrong, and when.

    Attributes:
        nth: The number of the call, from 1.
        number: The error it gives, or minus the signal that the process gets; 0 for neither.
        lasting: Whether all later calls fail, too.
        after: Whether the call does its work and then fails, as closing does on NFS, or the
            signal comes when it has returned.
        reading: Whether calls that look at files are counted instead.
    """

    nth: int
    number: int
    lasting: bool = False
    after: bool = False
    reading: bool = False

    def __str__(self) -> str:
        signals = {-number: number.name for number in signal.Signals}
        what = signals.get(self.number) or errno.errorcode.get(self.number, "nothing")
        when = f"{'reading ' if self.reading else ''}call {self.nth}{'+' if self.lasting else ''}"
        return f"{what} {'after' if self.after else 'at'} {when}"


class Result(NamedTuple):
    """What came of a run.

    Attributes:
        code: The exit code, or minus the signal that ended the process.
        out: What it printed on stdout.
        err: What it printed on stderr.
        calls: The calls that were counted, in order; none of a process that was killed.
    """

    code: int
    out: str
    err: str
    calls: tuple[str, ...]


class System(NamedTuple):
    """A system to run on: one without unnamed files, without hard links, or without locks."""

    unnamed: bool = True
    links: bool = True
    locks: bool = True

    def __str__(self) -> str:
        missing = [name for name, value in self._asdict().items() if not value]
        return f"without {' and '.join(missing)}" if missing else "with everything"

    def install(self) -> None:
        """Take away what this system lacks, for the rest of the process."""
        if not self.unnamed:
            os.O_TMPFILE = 0  # type: ignore[misc]
        if not self.links:
            os.link = _refuse(errno.EPERM)
        if not self.locks:
            importlib.import_module("fcntl").flock = _refuse(errno.ENOLCK)


SYSTEMS = (System(), System(unnamed=False), System(links=False, unnamed=False), System(locks=False))


def _refuse(number: int) -> Callable[..., Any]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return refuse


class Child:
    """A command line that runs in a child process.

    Args:
        args: Its arguments.
        directory: The working directory.
        fault: What goes wrong; by default nothing does.
        system: What the system can do.
        prepare: Called in the child before the command, to break the program for a control.
        meet: Called in the child at the call of a fault that is neither an error nor a signal.
    """

    def __init__(
        self,
        args: Sequence[str],
        directory: Path,
        fault: Fault | None = None,
        *,
        system: System = SYSTEMS[0],
        prepare: Callable[[], None] | None = None,
        meet: Callable[[], None] | None = None,
    ) -> None:
        self._streams = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
        self._reader, writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._reader)
            _run_in_child(args, directory, fault, system, (prepare, meet), self._streams, writer)
        os.close(writer)

    def wait(self) -> Result:
        """Wait until it has ended, and return what came of it."""
        with open(self._reader, "rb") as calls:
            counted = calls.read()
        status = os.waitpid(self._pid, 0)[1]
        texts = [_read_text(file) for file in self._streams]
        for file in self._streams:
            file.close()
        code = os.waitstatus_to_exitcode(status)
        return Result(code, *texts, tuple(json.loads(counted)) if counted else ())


def run_command(args: Sequence[str], directory: Path, *fault: Fault | None, **how: Any) -> Result:
    """Run the command line in a child process; the arguments are those of :class:`Child`."""
    return Child(args, directory, *fault, **how).wait()


def _read_text(file: Any) -> str:
    file.seek(0)
    text: str = file.read().decode("utf-8", "surrogateescape")
    return text


def _run_in_child(
    args: Sequence[str],
    directory: Path,
    fault: Fault | None,
    system: System,
    hooks: tuple[Callable[[], None] | None, Callable[[], None] | None],
    streams: Sequence[Any],
    writer: int,
) -> NoReturn:
    """Run the command line with the fault and end the process."""
    code, calls, write = 99, [], os.write
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_TIMEOUT)
        os.chdir(directory)
        for descriptor, stream in enumerate(streams, 1):
            os.dup2(stream.fileno(), descriptor)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.unraisablehook = sys.__unraisablehook__  # pytest has its own
        os.umask(0o022)
        system.install()
        prepare, meet = hooks
        if prepare is not None:
            prepare()
        _install(fault or Fault(0, 0), calls, meet)
        code = _run_console_script(args)
        sys.stdout.flush()
        sys.stderr.flush()
        write(writer, json.dumps(calls).encode())
    finally:
        os._exit(code)


def _run_console_script(args: Sequence[str]) -> int:
    """Run what the console script runs, and return its exit code."""
    sys.argv = ["onnxkvrename", *args]
    try:
        run()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _install(fault: Fault, calls: list[str], meet: Callable[[], None] | None) -> None:
    """Count the calls, and let the right one fail."""
    inside: list[str] = []
    for name in READING if fault.reading else CHANGING:
        module = importlib.import_module("fcntl" if name in ("flock", "lockf") else "os")
        if hasattr(module, name):
            stand_in = _wrap(name, getattr(module, name), fault, calls, inside, meet)
            setattr(module, name, stand_in)
    if fault.nth == 0 and not fault.reading:
        sys.addaudithook(lambda event, args: _find_uncounted(event, args, calls, inside))


def _find_uncounted(event: str, args: Any, calls: list[str], inside: list[str]) -> None:
    """Note a change of a file that none of the counted functions makes."""
    if event not in CHANGES_BY_NAME or inside:
        return
    if event != "open" or not _is_for_reading(args[0], args[2]):
        calls.append(f"uncounted {event}")


def _wrap(
    name: str,
    real: Callable[..., Any],
    fault: Fault,
    calls: list[str],
    inside: list[str],
    meet: Callable[[], None] | None,
) -> Callable[..., Any]:
    def do(*args: Any, **kwargs: Any) -> Any:
        inside.append(name)
        try:
            return real(*args, **kwargs)
        finally:
            inside.pop()

    def call(*args: Any, **kwargs: Any) -> Any:
        if name == "open" and _is_for_reading(*args, **kwargs) != fault.reading:
            return do(*args, **kwargs)
        if fault.reading and args and _is_of_python(args[0]):
            return do(*args, **kwargs)
        calls.append(name)
        hit = len(calls) == fault.nth or (fault.lasting and len(calls) > fault.nth > 0)
        if not hit:
            return do(*args, **kwargs)
        if fault.number < 0:
            return _meet_signal(-fault.number, lambda: do(*args, **kwargs), after=fault.after)
        if fault.number == 0:
            if meet is not None:
                meet()
            return do(*args, **kwargs)
        if name == "close" or (fault.after and name not in COPYING):
            do(*args, **kwargs)  # a descriptor is closed even if that gives an error
        raise OSError(fault.number, os.strerror(fault.number))

    return call


def _meet_signal(number: int, call: Callable[[], Any], *, after: bool) -> Any:
    """Send this process a signal before or after a call; Python handles it on the spot.

    What the handler raises comes out of the call, as if the signal had come just then.
    """
    if not after:
        os.kill(os.getpid(), number)
    try:
        return call()
    finally:
        if after:
            os.kill(os.getpid(), number)


def _is_of_python(path: object) -> bool:
    """Return whether a path leads to the interpreter's or the program's own files."""
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    return os.path.abspath(os.fsdecode(path)).startswith(_PROGRAM)


def _is_for_reading(path: object, flags: int = 0, *args: object, **kwargs: object) -> bool:
    changing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    return not flags & changing


def load_modules(args: Sequence[str], directory: Path) -> None:
    """Run the command line here, so that no child has to import what it needs."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            main(list(args))
    finally:
        os.chdir(before)


def walk_tree(root: Path) -> dict[str, tuple[str, bytes]]:
    """Return all that is below a directory: by relative path the kind and mode, and the content."""
    return {str(path.relative_to(root)): _describe(path) for path in _walk(root)}


def _walk(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)


def _describe(path: Path) -> tuple[str, bytes]:
    status = path.lstat()
    if path.is_symlink():
        return "link", os.fsencode(os.readlink(path))
    if path.is_dir():
        return f"directory {status.st_mode & 0o7777:o}", b""
    return f"file {status.st_mode & 0o7777:o}", path.read_bytes()
