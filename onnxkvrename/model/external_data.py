"""Weights in files beside the model: find them, check them, plan their copies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, MissingFileError, ModelError
from onnxkvrename.files.copy import has_same_bytes
from onnxkvrename.files.inside import Folder
from onnxkvrename.files.read import (
    FileIdentity,
    OpenFile,
    OutsideError,
    build_changed_error,
    is_occupied,
    open_file,
)
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.limits import MAX_FILES, build_limit_error, shorten_text
from onnxkvrename.model.proto_reader import ExternalReference
from onnxkvrename.text import quote_word


class DataFile(NamedTuple):
    """A file of weights.

    Attributes:
        location: The file as the model names it, relative to its directory.
        path: The file itself, links resolved.
        identity: Its state when it was checked.
        directory: The directory that it must be found in, links resolved.
    """

    location: str
    path: Path
    identity: FileIdentity
    directory: Path

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.identity.size


def find_data_files(
    references: Iterable[ExternalReference], model_file: OpenFile
) -> Iterator[DataFile | Finding]:
    """Find the data files of a model, each opened once, and checked by what was opened.

    A path may lead elsewhere a moment later. So a copy is made of a file that is opened in the
    same way and has the same identity (:func:`open_data_file`).

    Args:
        references: The external data that the model refers to.
        model_file: The open model.

    Yields:
        Each file once; or a finding on a reference: KV501 (outside of the model's
        directory), KV502 (cannot be read) or KV503 (too short).

    Raises:
        ModelError: The model is no longer where it was opened, or more than
            `MAX_FILES` lead to no file of their own.
    """
    folder = Folder(model_file.path.parent)
    if not folder.has_file(model_file):
        raise build_changed_error(model_file.path)
    checked: dict[str, DataFile | KvRenameError] = {}
    found: set[str] = set()
    paths: set[Path] = set()
    for reference in references:
        location = reference.location
        if reference.problem:
            yield _build_entry_finding(reference)
            continue
        if location not in checked:
            checked[location] = file = _check_data_file(location, folder, model_file)
            if isinstance(file, DataFile):
                paths.add(file.path)
            # Not those that lead to files of their own, as weights of experts may.
            if len(checked) - len(paths) > MAX_FILES:
                last = shorten_text(location)
                raise build_limit_error(
                    MAX_FILES,
                    "data files that are missing, cannot be used or are named in several ways "
                    f"(the last is {last!r})",
                    path=str(model_file.path),
                    hint="put all data files beside the model, or export the model again",
                )
        result = _judge_reference(reference, checked[location], folder.path)
        if isinstance(result, Finding):
            yield result
        elif location not in found:
            found.add(location)
            yield result


def _build_entry_finding(reference: ExternalReference) -> Finding:
    return build_finding(
        "KV503",
        reference.location or reference.tensor_name,
        f"external data of {reference.tensor_name} {reference.problem}",
        "export the model again",
    )


def _check_data_file(
    location: str, directory: Folder, model_file: OpenFile
) -> DataFile | KvRenameError:
    """Return the data file at a location, or why there is none that can be used."""
    windows = PureWindowsPath(location)
    if "\0" in location or windows.drive or windows.root or ".." in windows.parts:
        return OutsideError(
            "is not in the model's directory",
            hint="put the data beside the model, and write only its file name in the location",
        )
    try:
        with directory.open_file(location) as file:
            if os.path.samestat(file.status, model_file.status):
                return OutsideError("is the model itself", hint="export the model again")
            return DataFile(location, file.path, file.identity, directory.path)
    except KvRenameError as error:
        return error


def _judge_reference(
    reference: ExternalReference, file: DataFile | KvRenameError, directory: Path
) -> DataFile | Finding:
    """Return the data file of a reference, or a finding on it."""
    location = reference.location
    if isinstance(file, OutsideError):
        hint = file.hint or "replace the link with a copy"
        return build_finding("KV501", location, file.message, hint)
    if isinstance(file, KvRenameError):
        is_missing = isinstance(file, MissingFileError)
        return build_finding(
            "KV502",
            location,
            f"holds {reference.tensor_name}, but {'is missing' if is_missing else file.message}",
            f"put it beside the model, in {quote_word(str(directory))}"
            if is_missing
            else "replace it with a regular file that you can read",
        )
    if file.size < reference.end_offset:
        return build_finding(
            "KV503",
            location,
            f"has {file.size:,} bytes, "
            f"but {reference.tensor_name} ends at {reference.end_offset:,}",
            "the file was truncated or belongs to another model: copy it again",
        )
    return file


@contextmanager
def open_data_file(data_file: DataFile) -> Iterator[OpenFile]:
    """Open a data file again, as it was opened to be checked.

    Raises:
        ModelError: It has changed since then, leads out of the model's directory by now, or
            cannot be read.
    """
    with Folder(data_file.directory).open_file(data_file.location) as file:
        if not file.identity.matches(data_file.identity):
            raise build_changed_error(data_file.path)
        yield file


def plan_data_copies(
    data: Iterable[DataFile], directory: Path, *, force: bool
) -> Iterator[tuple[DataFile, Path, Finding | None]]:
    """Plan where each data file is copied. A file with the same bytes there is left out.

    With `force`, another file that is there is replaced.

    Yields:
        The file, its new path, and KV504 if another file is there and must not be replaced; or
        KV501 if it would have a hidden name there, forced or not.

    Raises:
        ModelError: A data file cannot be read or has changed, or it cannot be determined what is at
            its new path.
    """
    for data_file in data:
        target = directory / data_file.location
        conflict = _find_hidden_part(data_file, directory)
        if is_occupied(target):
            difference = _describe_difference(data_file, target)
            if difference is None:
                continue
            if conflict is None and not force:
                conflict = build_finding(
                    "KV504",
                    str(target),
                    f"already exists, and {difference}",
                    "choose an empty directory, or --force to replace it",
                )
        yield data_file, target, conflict


def _find_hidden_part(data_file: DataFile, directory: Path) -> Finding | None:
    """Return a finding on data that would be hidden elsewhere.

    The model chose the name. A hidden one may be that of a file that programs read or run
    unasked, such as `.bashrc` or `.git/hooks/post-checkout`.
    """
    if not any(part.startswith(".") for part in PureWindowsPath(data_file.location).parts):
        return None
    return build_finding(
        "KV501",
        data_file.location,
        f"has a hidden name, and would be written below {directory}",
        "rename the model in place, or export it again with data of another name",
    )


def has_same_data(data_file: DataFile, path: Path) -> bool:
    """Return whether the file at a path has the same bytes as a data file.

    Raises:
        ModelError: One of them cannot be read, or the data file has changed since it was
            checked. The error names the one that it is about.
    """
    with open_data_file(data_file) as file, open_file(path) as other:
        return has_same_bytes(file, other)


def _describe_difference(data_file: DataFile, target: Path) -> str | None:
    """Return how the file at the target differs from a data file; `None` if it does not."""
    try:
        if has_same_data(data_file, target):
            return None
    except ModelError as error:
        if error.path != str(target):
            raise
        return "is a broken link" if isinstance(error, MissingFileError) else error.message
    return f"differs from {data_file.location} beside the source"
