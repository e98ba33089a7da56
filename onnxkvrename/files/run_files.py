"""The files that one run reads and writes: none of them may be lost to a result."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from onnxkvrename.errors import WriteError
from onnxkvrename.files.read import is_directory, read_status, resolve_path

_Key = str | tuple[int, int] | tuple[int, int, str]
"""The identity of a file: its path without links; its device and inode; those of its directory, and
its name."""


class RunFile:
    """A file that a run reads or writes.

    Attributes:
        path: The file as the user calls it.
        role: What it is to the run, such as ``the model m.onnx``; messages say "is" before it.
        replaces: The file that is read and that this one replaces, for a result in place.
        keys: The identity of the file, its real path first.
    """

    def __init__(
        self, path: Path, role: str, replaces: RunFile | None, keys: tuple[_Key, ...]
    ) -> None:
        self.path = path
        self.role = role
        self.replaces = replaces
        self.keys = keys

    @property
    def parents(self) -> Iterator[str]:
        """The real paths of all directories above the file, the innermost first."""
        directory = os.path.dirname(str(self.keys[0]))
        yield directory
        while directory != os.path.dirname(directory):
            directory = os.path.dirname(directory)
            yield directory


class RunFiles:
    """All files that a run reads and writes, to find those that a result would destroy.

    Two paths are one file if links lead to the same place, or if device and inode are the same:
    so are hard links, and two spellings of a name where case does not count.
    """

    def __init__(self) -> None:
        self._inputs: dict[_Key, list[RunFile]] = {}
        self._outputs: dict[_Key, list[RunFile]] = {}
        self._outputs_below: dict[str, RunFile] = {}
        self._directories: dict[Path, tuple[str, tuple[int, int] | None]] = {}

    def add_input(self, path: Path, role: str) -> RunFile:
        """Add a file that the run reads, or that what it reads needs; it need not exist.

        Args:
            path: The file.
            role: What it is, after the word "is".

        Raises:
            ModelError: It cannot be determined what is at the path.
        """
        file = RunFile(path, role, None, self._find_keys(path))
        for key in file.keys:
            self._inputs.setdefault(key, []).append(file)
        return file

    def list_inputs(self) -> list[Path]:
        """Return the files that the run reads, as the user calls them."""
        return list(dict.fromkeys(file.path for files in self._inputs.values() for file in files))

    def add_output(self, path: Path, role: str, *, replaces: RunFile | None = None) -> RunFile:
        """Add a file that the run may write; :meth:`check_output` says if it can be.

        Args:
            path: The file.
            role: What it is, after the word "is".
            replaces: For a result in place, the file that it is made from.

        Raises:
            ModelError: It cannot be determined what is at the path.
        """
        file = RunFile(path, role, replaces, self._find_keys(path))
        for key in file.keys:
            self._outputs.setdefault(key, []).append(file)
        for directory in file.parents:
            self._outputs_below.setdefault(directory, file)
        return file

    def check_output(self, file: RunFile) -> None:
        """Check that writing a file harms no other file of the run, forced or not.

        Args:
            file: What :meth:`add_output` returned, after all files were added.

        Raises:
            WriteError: It is a file that is read, the place of another result, or a directory
                that another result needs, or it goes below another result.
        """
        other = self._find_other(file)
        if other is not None:
            in_place = file.replaces is not None
            hint = "leave one of the two out" if in_place else "choose another name"
            raise WriteError(f"is {other.role}", path=str(file.path), hint=hint)
        fault = None
        if (below := self._outputs_below.get(str(file.keys[0]))) is not None:
            fault = f"must be a directory that holds {below.path}"
        for directory in file.parents:
            for above in self._outputs.get(directory, ()):
                fault = f"is below {above.path}"
        if fault is not None:
            if is_directory(file.path):
                raise WriteError("is a directory", path=str(file.path), hint="pass a file path")
            message = f"{fault}, which this run also writes"
            raise WriteError(message, path=str(file.path), hint="choose another name")

    def _find_other(self, file: RunFile) -> RunFile | None:
        """Return another file of the run that is the same file."""
        for key in file.keys:
            for other in self._inputs.get(key, ()):
                if other is not file.replaces:
                    return other
            for other in self._outputs[key]:
                if other is not file:
                    return other
        return None

    def _find_keys(self, path: Path) -> tuple[_Key, ...]:
        """Return the keys of a file, its real path first."""
        directory, directory_key = self._find_directory(path.parent)
        real_path = os.path.join(directory, path.name)
        status = read_status(real_path, follow_links=False)
        if path.name in ("", "..") or (status is not None and stat.S_ISLNK(status.st_mode)):
            real_path = resolve_path(path)
            status = read_status(real_path)
            directory_key = self._find_directory(Path(real_path).parent)[1]
        keys: list[_Key] = [real_path]
        if directory_key is not None:
            keys.append((*directory_key, os.path.basename(real_path)))
        if status is not None and status.st_ino:  # some Windows file systems have no inodes
            keys.append((status.st_dev, status.st_ino))
        return tuple(keys)

    def _find_directory(self, directory: Path) -> tuple[str, tuple[int, int] | None]:
        """Return the real path and the inode of a directory, found once for all files in it."""
        if directory not in self._directories:
            real_path = resolve_path(directory)
            status = read_status(real_path)
            key = None if status is None or not status.st_ino else (status.st_dev, status.st_ino)
            self._directories[directory] = real_path, key
        return self._directories[directory]
