"""Judge what a command left behind after a fault.

The promise: every file is whole, as it was or as it is to be; all files of a command are one or
the other, unless the process was killed; nothing outside changes; and the same command, run
again, ends the work.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.commands import Command
from faults.injection import (
    COPYING,
    SYSTEMS,
    Fault,
    Result,
    System,
    load_modules,
    run_command,
    walk_tree,
)

Tree = dict[str, tuple[str, bytes]]
TEMP_PREFIX = ".onnxkvrename-"
"""What the name of each temporary file begins with, as the docs say."""
BYSTANDERS = {"other/m.onnx": b"another's", "other/w.bin": b"another's", "note": b"note"}
REMOVING = ("unlink", "remove", "rmdir")
MAX_LINE_LENGTH = 600


class BrokenPromise(AssertionError):
    """A fault left what it may not leave.

    Attributes:
        promise: What is broken, one of the constants of this module.
    """

    def __init__(self, promise: str, where: str) -> None:
        super().__init__(f"not {promise}: {where}")
        self.promise = promise


WHOLE = "every file whole, as it was or as it is to be"
ALL_OR_NONE = "all files old or all new, or the new ones named"
CLEAN = "free of temporary files"
ANSWERED = "an exit code and one line that fit what was done"
COMPLETED = "completed by the same command"


def require(kept: bool, promise: str, where: str) -> None:
    """Raise :class:`BrokenPromise` unless a promise is kept."""
    if not kept:
        raise BrokenPromise(promise, where)


@contextmanager
def in_memory() -> Iterator[Path]:
    """A directory where files come and go fast, if the system has one."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory) as directory:
        yield Path(directory)


class Trial:
    """A command on a system, run with one fault after the other.

    Args:
        command: The command.
        root: An empty directory for it.
        system: What the system can do.
        prepare: Called in the child before the command, to break the program for a control.
        place: Where the command works, if that is not below the directory.
    """

    def __init__(
        self,
        command: Command,
        root: Path,
        system: System = SYSTEMS[0],
        prepare: Callable[[], None] | None = None,
        place: Path | None = None,
    ) -> None:
        self.command, self.system, self.prepare = command, system, prepare
        self.root, self.template = (place or root) / "tree", root / "source"
        self.here = self.root / "here"
        (self.template / "here").mkdir(parents=True)
        for name, content in BYSTANDERS.items():
            (self.template / name).parent.mkdir(exist_ok=True)
            (self.template / name).write_bytes(content)
        command.prepare(self.template / "here")
        self.args = command.args.split()
        self.calls: dict[bool, tuple[str, ...]] = {}
        self._completed: list[Tree] = []  # what the same command is known to complete
        self.reset()
        load_modules(self.args, self.here)
        self.reset()
        self.old = walk_tree(self.root)
        self.first = self.run()
        assert self.first.code == 0, (str(command), self.first)
        self.new = walk_tree(self.root)
        assert self.new != self.old, "a command that writes nothing"
        assert list_leftovers(self.new) == []
        self.allowed: dict[str, list[tuple[str, bytes]]] = defaultdict(list)
        for path, description in (*self.old.items(), *self.new.items()):
            self.allowed[Path(path).name].append(description)  # its directory may move

    def reset(self) -> None:
        """Put the files back that the command works on."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.template, self.root, symlinks=True)

    def run(self, fault: Fault | None = None) -> Result:
        """Run the command."""
        prepare = self.prepare if fault is not None else None
        return run_command(self.args, self.here, fault, system=self.system, prepare=prepare)

    def try_fault(self, fault: Fault) -> Result:
        """Run the command with a fault, and judge what it said and left."""
        name = self.name_call(fault)
        self.reset()
        result = self.run(fault)
        left = walk_tree(self.root)
        where = f"{self.command} {self.system}: {fault}: {result.code} {result.err!r} {name}"
        require(result.code != -signal.SIGALRM, ANSWERED, f"hangs: {where}")
        self.check_files(left, where)
        if left not in self._completed:
            self.check_second_run(left, where)
            if not list_leftovers(left):
                self._completed.append(left)
        if result.code == -signal.SIGKILL:
            assert fault.number == -signal.SIGKILL, where
        else:
            check_text(result, where)
            if fault.number < 0:
                self.check_interrupted(left, result, fault, where)
            else:
                self.check_end(left, result, fault, name, where)
        return result

    def name_call(self, fault: Fault) -> str:
        """Return the function whose call fails, as counted without a fault."""
        calls = self.count(reading=fault.reading)
        return calls[fault.nth - 1] if fault.nth <= len(calls) else "none"

    def count(self, *, reading: bool = False) -> tuple[str, ...]:
        """Return the calls that there are without a fault."""
        if reading not in self.calls:
            self.reset()
            self.calls[reading] = self.run(Fault(0, 0, reading=reading)).calls
        return self.calls[reading]

    def check_files(self, left: Tree, where: str) -> None:
        """Check that each file is whole: as it was, as it is to be, or ours and temporary."""
        for path, description in left.items():
            if TEMP_PREFIX in path:
                is_no_model = not path.endswith(".onnx") or "/" in path.partition(TEMP_PREFIX)[2]
                require(is_no_model, CLEAN, f"{where}: {path}")
                continue
            require(description in self.allowed[Path(path).name], WHOLE, f"{where}: {path}")
        for path in BYSTANDERS:
            require(left.get(path) == self.old[path], WHOLE, f"{where}: {path}")
        lost = [path for path in self.old.keys() & self.new.keys() if path not in left]
        require(not lost, WHOLE, f"{where}: lost {lost}")

    def check_interrupted(self, left: Tree, result: Result, fault: Fault, where: str) -> None:
        """Check that a signal left all files old or all new, and nothing else.

        Where the undo was not possible, each new file is named, with exit code 2.
        """
        leftovers = list_leftovers(left)
        files = {path: value for path, value in left.items() if path not in leftovers}
        kept = drop_new_empty_directories(files, self.old)
        is_done = kept == self.new
        if not (is_done or kept == self.old):
            changed = [path for path, value in kept.items() if value != self.old.get(path)]
            said = result.out + result.err
            is_told = result.code == 2 and all(Path(path).name in said for path in changed)
            require(is_told, ALL_OR_NONE, f"{where}: changed {changed}")
            return
        extra = sorted(left.keys() - kept.keys())
        require(not extra, CLEAN, f"{where}: left {extra}")
        is_too_late = is_done and not set(result.calls[fault.nth :]) & {*COPYING}
        require(result.code == 130 or (result.code == 0 and is_too_late), ANSWERED, where)

    def check_end(self, left: Tree, result: Result, fault: Fault, name: str, where: str) -> None:
        """Check that all files are old or all new, and that the exit code tells which."""
        code, leftovers = result.code, list_leftovers(left)
        kept = {path: value for path, value in left.items() if path not in leftovers}
        if fault.lasting or name in REMOVING:
            kept = drop_new_empty_directories(kept, self.old)
        reason = os.strerror(fault.number)
        require(code in (0, 1, 2), ANSWERED, where)
        is_reason_told = code != 2 or fault.lasting or reason in result.err
        require(is_reason_told, ANSWERED, f"not the reason: {where}")
        if leftovers:
            is_needed = fault.lasting or name in REMOVING
            require(is_needed, CLEAN, f"{where}: left {leftovers}")
        if code == 0:
            require(kept == self.new, ANSWERED, where)
        elif kept == self.new:
            is_told = fault.after or is_told_to_be_in_place(result)
            require(is_told, ANSWERED, f"{where}: done, but not said")
        elif kept != self.old:
            require(is_told_to_be_mixed(result), ALL_OR_NONE, f"{where}: mixed, but not said")
            require(fault.lasting, ALL_OR_NONE, f"{where}: mixed")

    def check_second_run(self, left: Tree, where: str) -> None:
        """Check that the same command ends the work, whatever the first run left.

        Where directories cannot be locked, what a killed run left stays.
        """
        again = self.run()
        after = walk_tree(self.root)
        leftovers = list_leftovers(left)
        require(again.code == 0, COMPLETED, f"{where}: then {again}")
        for path in () if self.system.locks else leftovers:
            after.pop(path, None)
        require(after == self.new, COMPLETED, f"{where}: then {sorted(after)} after {leftovers}")


def drop_new_empty_directories(tree: Tree, old: Tree) -> Tree:
    """Return a tree without directories that were made and could not be removed again."""
    files = [path for path, (kind, _) in tree.items() if not kind.startswith("directory")]
    return {
        path: value
        for path, value in tree.items()
        if path in old or path in files or any(file.startswith(f"{path}/") for file in files)
    }


def list_leftovers(tree: Tree) -> list[str]:
    """Return the temporary files of ours."""
    return [path for path in tree if TEMP_PREFIX in path]


def check_text(result: Result, where: str) -> None:
    """Check that a run ended with a message for people, and none about a bug."""
    lines = result.err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    require("Traceback" not in result.err, ANSWERED, where)
    require("a bug in onnxkvrename" not in result.err, ANSWERED, where)
    require(all(len(line) <= MAX_LINE_LENGTH for line in lines), ANSWERED, where)
    require(result.code != 2 or bool(errors), ANSWERED, where)
    is_told = result.code != 130 or lines[-1].startswith("error: interrupted")
    require(is_told, ANSWERED, where)


def is_told_to_be_in_place(result: Result) -> bool:
    """Return whether a failed run says that its results are there all the same."""
    return any(text in result.err for text in ("in place", "the work is done"))


def is_told_to_be_mixed(result: Result) -> bool:
    """Return whether a failed run says that it could not undo all it had done, and the way out."""
    return "the undo failed as well" in result.err and "to finish the work" in result.err
