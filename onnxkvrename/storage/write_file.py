"""Write files that a command was asked for: each completely, all or none of them."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.findings import quote_word
from onnxkvrename.storage.lock import hold_locks
from onnxkvrename.storage.read import (
    CACHE_FAULT,
    find_cache,
    has_content,
    is_directory,
    open_file,
    read_status,
    resolve_path,
)
from onnxkvrename.storage.recover import settle_stopped_runs
from onnxkvrename.storage.temp_file import TempFile, remove_temp_files
from onnxkvrename.storage.transaction import Transaction


def write_files(contents: Mapping[Path, bytes], *, inputs: Collection[Path] = ()) -> None:
    """Write files, all of them or none, and remove what killed runs left beside them.

    A file that has its content already stays as it is, so a run that was killed can be repeated. A
    new one has the permissions, the owner and the attributes of the one that it replaces.

    Args:
        contents: The content of each file, by its path.
        inputs: All files that the command reads: no clean-up removes one.

    Raises:
        WriteError: One is a directory or a device, is in a Hugging Face cache, is written by
            another run, or cannot be written. All existing files are then unchanged.
        ModelError: It cannot be determined what is at one of the paths.
    """
    outputs = [path for path in contents if _needs_write(path, contents[path])]
    targets = {path: Path(os.path.abspath(path)) for path in contents}
    directories = {target.parent for target in targets.values()}
    settle_stopped_runs(directories, inputs)
    if not outputs:
        return
    with hold_locks(directories):
        for directory in directories:
            remove_temp_files(directory, kept=[path.name for path in inputs])
        statuses = {path: read_status(path, follow_links=False) for path in targets.values()}
        overwritten = {path: status for path, status in statuses.items() if status is not None}
        with Transaction(directories, overwritten) as transaction:
            files = []
            for output in outputs:
                target = targets[output]
                with TempFile(target, output, key=transaction.key) as temp_file:
                    temp_file.write(contents[output])
                    _set_attributes(temp_file, target)
                    files.append(temp_file.finish(replace=target in overwritten))
            transaction.place(files)


def _set_attributes(temp_file: TempFile, target: Path) -> None:
    """Give a file the permissions, the owner and the attributes of the one that it replaces."""
    status = read_status(target, follow_links=False)
    if status is None or not stat.S_ISREG(status.st_mode):
        temp_file.set_default_mode()
        return
    if not os.access(target, os.R_OK):
        return  # it is not known who may read it: then only the owner
    with open_file(target) as replaced:
        temp_file.copy_attributes(replaced, owner=True, force=True)


def check_not_cached(output: Path) -> None:
    """Raise :class:`WriteError` for a file that would be in a Hugging Face cache."""
    if find_cache(output) is not None:
        elsewhere = "./" if find_cache(Path(output.name)) is None else "~/"
        target = elsewhere + quote_word(output.name)
        hint = f"run the same command with {target} instead"
        raise WriteError(CACHE_FAULT, path=str(output), hint=hint)


def check_replaceable(output: Path, kind: str, start: str) -> None:
    """Raise unless nothing is at a path, or a file that an earlier run of the command made.

    Args:
        output: The file to write, without ``--force``.
        kind: What such a file is, with its article: ``a page made by COMMAND``.
        start: A regular expression for its beginning, of at most 512 bytes. A file that only
            mentions the command is another one.

    Raises:
        WriteError: Another file is there.
        ModelError: It cannot be determined what is there.
    """
    status = read_status(output, follow_links=False)
    if status is None or is_directory(output):  # this has an error of its own
        return
    if stat.S_ISREG(status.st_mode):
        with open_file(output) as file:
            if re.match(start.encode("utf-8"), file.read(0, 512)):
                return
    raise WriteError(
        f"already exists and is not {kind}",
        path=str(output),
        hint=_suggest_force(output, "choose another name, or `--force` replaces it"),
    )


def _suggest_force(output: Path, hint: str) -> str:
    """Return a hint that names ``--force``; another one where a model would be lost."""
    if any(str(path).lower().endswith(".onnx") for path in (output, resolve_path(output))):
        return "choose another name: a file that ends in .onnx is a model"
    return hint


def _needs_write(output: Path, content: bytes) -> bool:
    """Check that a file can be written, and return whether it must be.

    Args:
        output: The file.
        content: What it is to have.

    Returns:
        False if the file has that content already.

    Raises:
        WriteError: The path is a directory, a device or in a Hugging Face cache, or the directory
            of the file is missing or cannot be written to.
        ModelError: It cannot be determined what is there.
    """
    check_not_cached(output)
    status = read_status(output)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise WriteError("is a directory", path=str(output), hint="pass a file path")
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise WriteError("already exists and is not a regular file", path=str(output))
    with suppress(ModelError):  # one that cannot be read is replaced
        if status is not None and has_content(output, len(content), [content]):
            return False
    with TempFile(Path(os.path.abspath(output)), output):
        pass  # it could be created
    return True
