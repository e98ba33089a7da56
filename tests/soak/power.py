"""Cut the power of a real ext4, at any call and after the end, and look at what the disk has.

A file system on a loop device is shut down by an ioctl, so that what was not flushed is lost;
then it is mounted again, which replays its journal. Needs root.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from faults.commands import COMMANDS, Command
from faults.injection import Fault, Result, walk_tree
from faults.judging import Trial, in_memory, list_leftovers
from soak.parts import Part, find_missing

SHUTDOWN = 0x8004587D
FLUSH_JOURNAL, DROP_JOURNAL = 1, 2
"""Whether names that were changed reach the disk before the cut. In both cases, content that
was not flushed does not."""
DISK_SIZE = 64 << 20


class Disk:
    """An ext4 in a file, mounted at a directory."""

    def __init__(self, directory: Path) -> None:
        self.image, self.mount_point = directory / "image", directory / "disk"
        self.mount_point.mkdir()
        with open(self.image, "wb") as file:
            file.truncate(DISK_SIZE)
        subprocess.run(["mkfs.ext4", "-q", "-F", self.image], check=True, capture_output=True)
        self.mount()

    def mount(self) -> None:
        """Mount it. Names do not wait for content, as on most other file systems."""
        options = "loop,noauto_da_alloc,commit=600"
        command = ["mount", "-o", options, str(self.image), str(self.mount_point)]
        subprocess.run(command, check=True, capture_output=True)

    def unmount(self) -> None:
        """Unmount it."""
        subprocess.run(["umount", str(self.mount_point)], check=True, capture_output=True)

    def sync(self) -> None:
        """Flush all of it."""
        descriptor = os.open(self.mount_point, os.O_RDONLY)
        ctypes.CDLL(None).syncfs(descriptor)
        os.close(descriptor)

    def cut(self, flag: int) -> None:
        """Cut its power."""
        descriptor = os.open(self.mount_point, os.O_RDONLY)
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", flag))
        os.close(descriptor)


@contextmanager
def mounted_disk() -> Iterator[Disk]:
    """Make a disk, and remove it when the context ends."""
    with tempfile.TemporaryDirectory(prefix="power-") as directory:
        disk = Disk(Path(directory))
        try:
            yield disk
        finally:
            disk.unmount()


class PowerTrial(Trial):
    """A trial in which killing is a power cut."""

    def __init__(self, command: Command, root: Path, disk: Disk, **how: Any) -> None:
        self.disk, self.flag, self.break_program = disk, DROP_JOURNAL, how.pop("broken", None)
        super().__init__(command, root, place=disk.mount_point)
        self.prepare = self.arm

    def arm(self) -> None:
        """Replace the kill of the injection by a power cut and a kill; runs in the child."""
        if self.break_program is not None:
            self.break_program()
        real, disk, flag = os.kill, self.disk, self.flag

        def kill(pid: int, number: int) -> None:
            if number == signal.SIGKILL:
                disk.cut(flag)
            real(pid, number)

        os.kill = kill

    def reset(self) -> None:
        super().reset()
        self.disk.sync()

    def run(self, fault: Fault | None = None) -> Result:
        result = super().run(fault)
        if fault is not None and fault.number == -signal.SIGKILL:
            if result.code == 0:
                self.disk.cut(self.flag)  # right after it has said that it is done
            self.disk.unmount()
            self.disk.mount()
            if result.code == 0:
                left = walk_tree(self.root)
                for path in list_leftovers(left):  # that they were removed was not flushed
                    del left[path]
                assert left == self.new, f"{self.command}: done, and lost"
        return result


def do_nothing(*args: object) -> None:
    """Take the place of a function."""


def forget_to_sync() -> None:
    """The control: a program that flushes nothing."""
    os.fsync = do_nothing


def run(part: Part) -> None:
    """Cut the power of random commands at random calls."""
    part.skipped = find_missing("mkfs.ext4", "mount", "umount")
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        part.skipped = "needs root"
    if part.skipped is not None:
        return
    try:
        with mounted_disk() as disk:
            _cut_again_and_again(part, disk)
    except subprocess.CalledProcessError as error:
        part.skipped = f"cannot mount: {error.stderr!r}"


def _cut_again_and_again(part: Part, disk: Disk) -> None:
    random = Random(part.seed)
    with in_memory() as root:
        trial = PowerTrial(COMMANDS[0], root, disk, broken=forget_to_sync)
        count = len(trial.count())
        cases = [_cut(trial, nth, FLUSH_JOURNAL) for nth in range(count + 1, 1, -1)]
        part.check_control("a writer that does not flush", cases)
    while not part.is_over:
        for command in part.take(random.sample(COMMANDS, len(COMMANDS))):
            with in_memory() as root:
                trial = PowerTrial(command, root, disk)
                numbers = range(1, len(trial.count()) + 2)
                for nth in part.take(random.sample(numbers, min(len(numbers), 20))):
                    flag = random.choice([FLUSH_JOURNAL, DROP_JOURNAL])
                    kind = "names flushed" if flag == FLUSH_JOURNAL else "names dropped"
                    part.try_case(kind, _cut(trial, nth, flag))
                shutil.rmtree(trial.root, ignore_errors=True)


def _cut(trial: PowerTrial, nth: int, flag: int) -> Callable[[], object]:
    def case() -> None:
        trial.flag = flag
        trial.try_fault(Fault(nth, -signal.SIGKILL))

    return case
