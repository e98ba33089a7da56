"""Reach files below a directory; no link or directory that changes meanwhile leads out.

Each part of a path is opened relative to the directory before it, and links are not followed
by the system but read and walked in the same way. That is what openat2(2) does with
RESOLVE_BENEATH, which Python does not offer. What is written goes through no link at all.

One kind of link leads out: a file in a snapshot of a Hugging Face cache,
``models--NAME/snapshots/REVISION/...``, is a link to ``models--NAME/blobs/HASH``.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import WriteError
from onnxkvrename.storage.read import (
    OPEN_FLAGS,
    OpenFile,
    OutsideError,
    build_changed_error,
    close_quietly,
    find_repository,
    is_link,
    open_descriptor,
    open_file,
    resolve_path,
    translate_read_errors,
)

_MAX_LINKS = 40
"""The symbolic links that Linux follows in one path."""
_MAX_STEPS = 256
_LINK_ERRNOS = (errno.ELOOP, errno.EMLINK, errno.ENOTDIR)
"""Errors of opening a symbolic link without following it, on Linux, BSD and macOS."""
_BLOB = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""The name of a blob: the SHA-1 of git, or the SHA-256 of a large file."""
_CAN_WALK = {os.open, os.readlink, os.stat} <= os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")


class OpenDirectory:
    """A directory in which files are opened.

    Attributes:
        path: Its path, links resolved.
        descriptor: Its descriptor; `None` where the system opens no files relative to one.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path = path
        self.descriptor = descriptor

    def has_file(self, name: str, file: OpenFile) -> bool:
        """Return whether a name in the directory, or the link there, is that of an open file.

        Raises:
            ModelError: This cannot be determined.
        """
        with translate_read_errors(self.path / name):
            if self.descriptor is None:
                status = os.stat(self.path / name)
            else:
                status = os.stat(name, dir_fd=self.descriptor)
        return os.path.samestat(status, file.status)

    @contextmanager
    def open_file(self, location: str) -> Iterator[OpenFile]:
        """Open a regular file for reading, until the context ends. Never waits, as for a pipe.

        Args:
            location: Its path, relative to the directory. Symbolic links are followed if they
                stay in the directory.

        Yields:
            The file; its path is the one without links.

        Raises:
            OutsideError: The path leads out of the directory.
            ModelError: The file does not exist, is not regular, or cannot be read.
        """
        if self.descriptor is None:
            with self._open_by_path(location) as file:
                yield file
            return
        with translate_read_errors(self.path / location):
            walk = _Walk(self.path, self.descriptor, location)
            descriptor = walk.open()
        path = walk.blob.path if walk.blob is not None else self.path.joinpath(*walk.done)
        with open_descriptor(path, descriptor) as file:
            yield file

    @contextmanager
    def _open_by_path(self, location: str) -> Iterator[OpenFile]:
        """Open a file by its path, and check afterwards that the path is still the same."""
        link = self.path / location
        path = resolve_path(link)
        if _find_path_below(path, self.path) is None and not _is_blob_of(Path(path), self.path):
            raise _build_outside_error(self.path, path)
        with open_file(Path(path)) as file:
            with translate_read_errors(link):
                is_same = os.path.samestat(os.stat(path), file.status)
            if not is_same or resolve_path(link) != path:
                raise build_changed_error(link)
            yield file


@contextmanager
def open_directory(path: Path) -> Iterator[OpenDirectory]:
    """Open a directory, until the context ends.

    Raises:
        ModelError: There is none, or it cannot be searched.
    """
    with translate_read_errors(path):
        real_path = resolve_path(path)
        descriptor = None
        if _CAN_WALK:
            descriptor = os.open(real_path, _DIRECTORY_FLAGS)
    try:
        yield OpenDirectory(Path(real_path), descriptor)
    finally:
        if descriptor is not None:
            close_quietly(descriptor)


_DIRECTORY_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_PATH", 0)  # needs no right to list the directory
    | getattr(os, "O_DIRECTORY", 0)
    | getattr(os, "O_CLOEXEC", 0)
)


class _Blob(NamedTuple):
    """The target of a link of a Hugging Face cache.

    Attributes:
        repository: The directory ``models--NAME``.
        below: The way from there to the directory in the snapshot that files are opened in.
        name: The name in ``blobs``.
    """

    repository: Path
    below: tuple[str, ...]
    name: str

    @property
    def path(self) -> Path:
        """The path of the blob."""
        return self.repository / "blobs" / self.name

    @classmethod
    def from_link(cls, root: Path, done: Sequence[str], text: str) -> _Blob | None:
        """Return the blob that a link leads to; ``None`` if the link is not one of a cache.

        Args:
            root: The directory that files are opened in.
            done: The directories below it that lead to the link.
            text: The text of the link.
        """
        steps, _, name = text.rpartition("blobs/")
        repository = find_repository(root)
        if repository is None or not _BLOB.fullmatch(name):
            return None
        below = root.relative_to(repository).parts
        if steps != "../" * (len(below) + len(done)):
            return None
        return cls(repository, below, name)

    def open(self, root: int) -> int:
        """Return a descriptor of the blob, reached without links.

        Args:
            root: The descriptor of the directory in the snapshot, which must be where the
                repository says that it is.

        Raises:
            OutsideError: Something on the way is a link, or the directory is another one.
            OSError: The blob is missing or cannot be opened.
        """
        with ExitStack() as stack:

            def step(name: str | Path, directory: int | None, flags: int) -> int:
                try:
                    return os.open(name, flags | os.O_NOFOLLOW, dir_fd=directory)
                except OSError as error:
                    if error.errno in _LINK_ERRNOS:
                        raise _build_outside_error(self.repository, str(self.path)) from None
                    raise

            repository = directory = step(self.repository, None, _DIRECTORY_FLAGS)
            stack.callback(close_quietly, repository)
            for name in self.below:
                directory = step(name, directory, _DIRECTORY_FLAGS)
                stack.callback(close_quietly, directory)
            if not os.path.samestat(os.fstat(directory), os.fstat(root)):
                raise _build_outside_error(self.repository, str(self.path))
            blobs = step("blobs", repository, _DIRECTORY_FLAGS)
            stack.callback(close_quietly, blobs)
            return step(self.name, blobs, OPEN_FLAGS)


def _is_blob_of(path: Path, directory: Path) -> bool:
    """Return whether a path is that of a blob of the repository that a directory is in."""
    repository = find_repository(directory)
    return (
        repository is not None
        and path.parent == repository / "blobs"
        and _BLOB.fullmatch(path.name) is not None
    )


def check_no_link(path: Path, root: Path) -> None:
    """Check that no directory between another one and a path is a symbolic link.

    Args:
        path: The path of a result; what is there itself does not count.
        root: The directory that the user gave. It may be a link, or be reached through some.

    Raises:
        WriteError: One is.
        ModelError: This cannot be determined.
    """
    for directory in reversed(path.parents):
        if root in directory.parents and is_link(directory):
            raise _build_link_error(directory, root)


@contextmanager
def open_parent(path: Path, root: Path) -> Iterator[tuple[Path, int | None]]:
    """Open the directory of a path to write in it, reached without symbolic links.

    Args:
        path: The path of a result, below `root`.
        root: The directory that the user gave; it exists.

    Yields:
        A path and the descriptor of the directory that it is relative to. Where the system
        cannot open relative to a directory, as on Windows, that is `path` and ``None``.

    Raises:
        WriteError: A directory between `root` and `path` is a link.
        OSError: One is missing or cannot be opened.
    """
    if not _CAN_WALK:
        check_no_link(path, root)
        yield path, None
        return
    *names, name = path.relative_to(root).parts
    directory, descriptor = root, os.open(root, _DIRECTORY_FLAGS)
    try:
        for part in names:
            directory /= part
            outer = descriptor
            try:
                descriptor = os.open(part, _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=outer)
            except OSError as error:
                if error.errno in _LINK_ERRNOS and _is_link_at(part, outer):
                    raise _build_link_error(directory, root) from None
                raise
            close_quietly(outer)
        yield Path(name), descriptor
    finally:
        close_quietly(descriptor)


def _is_link_at(name: str, descriptor: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)


def _build_link_error(directory: Path, root: Path) -> WriteError:
    return WriteError(
        f"is a symbolic link, through which the result would leave {root}",
        path=str(directory),
        hint="remove the link, or write elsewhere with -o or -d",
    )


class _Walk:
    """The way from a directory to a file.

    Args:
        root: The path of the directory.
        descriptor: Its descriptor.
        location: The path of the file.
    """

    def __init__(self, root: Path, descriptor: int, location: str) -> None:
        self.root = root
        self.root_descriptor = self.descriptor = descriptor
        self.done: list[str] = []
        """The parts of the way that were walked, none of them a link."""
        self.pending = _split(location)
        """The parts that come next, the last of them first."""
        self.links = 0
        self.blob: _Blob | None = None
        """Where the way leaves the directory, if it may."""

    def open(self) -> int:
        """Return a descriptor of the entry at the end of the path.

        Raises:
            OutsideError: It leads out of the directory.
            OSError: A part is missing or cannot be opened, or there are too many.
        """
        try:
            for _ in range(_MAX_STEPS):
                if not self.pending:  # as for ".": the directory itself
                    return os.dup(self.descriptor)
                name = self.pending.pop()
                if name == "..":
                    self._go_up()
                    continue
                flags = _DIRECTORY_FLAGS if self.pending else OPEN_FLAGS
                try:
                    descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=self.descriptor)
                except OSError as error:
                    if error.errno not in _LINK_ERRNOS:
                        raise
                    self._follow_link(name, error)
                    if self.blob is not None:
                        return self.blob.open(self.root_descriptor)
                    continue
                self.done.append(name)
                if not self.pending:
                    return descriptor
                self._move_to(descriptor)
            raise OSError(errno.ELOOP, f"has more than {_MAX_STEPS} parts")
        finally:
            self._move_to(self.root_descriptor)

    def _move_to(self, descriptor: int) -> None:
        if self.descriptor != self.root_descriptor:
            close_quietly(self.descriptor)
        self.descriptor = descriptor

    def _go_up(self) -> None:
        """Walk the path to the directory above again.

        By opening `..`, a directory that was moved away meanwhile would be left to anywhere.
        """
        if not self.done:
            self._go_to_absolute(os.path.join(self.root, os.pardir, *reversed(self.pending)))
            return
        self.done.pop()
        self.pending += reversed(self.done)
        self._start_over()

    def _start_over(self) -> None:
        self.done = []
        self._move_to(self.root_descriptor)

    def _follow_link(self, name: str, error: OSError) -> None:
        """Replace a link by its text, or raise the error for what is not a link."""
        try:
            text = os.readlink(name, dir_fd=self.descriptor)
        except OSError as link_error:
            if link_error.errno == errno.EINVAL:
                raise error from None
            raise
        self.links += 1
        if self.links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if not self.pending:
            self.blob = _Blob.from_link(self.root, self.done, text)
        if self.blob is not None:
            return
        if text.startswith(os.sep):
            self._go_to_absolute(os.path.join(text, *reversed(self.pending)))
        else:
            self.pending += _split(text)

    def _go_to_absolute(self, path: str) -> None:
        """Continue from the directory by the part of an absolute path that is below it.

        Whatever its links lead to by now: nothing outside is opened on the way.
        """
        real_path = resolve_path(path)
        below = _find_path_below(real_path, self.root)
        if below is None:
            raise _build_outside_error(self.root, real_path)
        self.pending = _split(below)
        self._start_over()
        self.links += 1


def _split(path: str) -> list[str]:
    """Return the parts of a path, the last one first."""
    return [part for part in reversed(path.split(os.sep)) if part not in ("", os.curdir)]


def _find_path_below(path: str, directory: Path) -> str | None:
    """Return a path without links relative to such a directory; `None` if it is not below."""
    try:
        common = os.path.commonpath([path, directory])
    except ValueError:  # on another drive
        return None
    return os.path.relpath(path, directory) if common == str(directory) else None


def _build_outside_error(directory: Path, path: str) -> OutsideError:
    return OutsideError(f"leads out of the model's directory, to {path}", path=str(directory))
