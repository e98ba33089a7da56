"""Weights in files beside the model: find them, check them, plan their copies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.model.proto_reader import ExternalReference
from onnxkvrename.storage.read import FileIdentity, has_content, open_file, read_chunks


class DataFile(NamedTuple):
    """A file of weights.

    Attributes:
        location: The file as the model names it, relative to its directory.
        path: The file itself, links resolved.
        identity: Its state when it was checked.
    """

    location: str
    path: Path
    identity: FileIdentity

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.identity.size


def find_data_files(
    references: Iterable[ExternalReference], model: Path
) -> Iterator[DataFile | Finding]:
    """Find the data files of a model.

    Each is opened as it would be to copy it, and checked by what was opened, as a path may
    lead elsewhere a moment later.

    Args:
        references: The external data that the model refers to.
        model: Its path.

    Yields:
        Each file once; or a finding on a reference: KV501 (outside of the model's
        directory), KV502 (cannot be read) or KV503 (too short).
    """
    directory = Path(os.path.realpath(model.parent))
    seen: set[str] = set()
    for reference in references:
        location = reference.location
        result = _check_location(reference, directory) or _open_data_file(
            reference, directory, model
        )
        if isinstance(result, Finding):
            yield result
        elif location not in seen:
            seen.add(location)
            yield result


def _open_data_file(
    reference: ExternalReference, directory: Path, model: Path
) -> DataFile | Finding:
    """Return the data file of a reference, or a finding on it."""
    location = reference.location
    path = directory / location.replace("\0", "")
    try:
        with open_file(Path(os.path.realpath(path))) as file:
            data_file = DataFile(location, file.path, file.identity)
            is_model = os.path.samestat(file.status, os.stat(model))
    except KvRenameError as error:
        return build_finding(
            "KV502",
            location,
            f"holds {reference.tensor_name}, but {_describe_error(error)}",
            f"put it beside the model, in {directory}",
        )
    if is_model:
        return build_finding("KV501", location, "is the model itself", "export the model again")
    if data_file.size < reference.end_offset:
        return build_finding(
            "KV503",
            location,
            f"has {data_file.size:,} bytes, "
            f"but {reference.tensor_name} ends at {reference.end_offset:,}",
            "the file was cut off, or is of another model: copy it again",
        )
    return data_file


def plan_data_copies(
    data: Iterable[DataFile], directory: Path, *, force: bool
) -> Iterator[tuple[DataFile, Path, Finding | None]]:
    """Plan where each data file is copied. A file with the same bytes there is left out.

    Args:
        data: The data files of a model.
        directory: Where the model is written.
        force: Replace another file that is there.

    Yields:
        The file, its new path, and KV504 if another file is there and must not be replaced.
    """
    for data_file in data:
        target = directory / data_file.location
        conflict = None
        if os.path.lexists(target):
            if has_same_data(data_file, target):
                continue
            if not force:
                conflict = build_finding(
                    "KV504",
                    str(target),
                    f"is there already, and differs from {data_file.location} beside the source",
                    "choose an empty directory, or --force to replace it",
                )
        yield data_file, target, conflict


def _check_location(reference: ExternalReference, directory: Path) -> Finding | None:
    """Return the problem with the location of a reference; it must be below `directory`."""
    location = reference.location
    if reference.problem:
        return build_finding(
            "KV503",
            location or reference.tensor_name,
            f"external data of {reference.tensor_name} {reference.problem}",
            "export the model again",
        )
    windows = PureWindowsPath(location)
    if "\0" in location or windows.drive or windows.root or ".." in windows.parts:
        return build_finding(
            "KV501",
            location,
            f"is where {reference.tensor_name} is said to lie: not in the model's directory",
            "put the data beside the model, and only its file name into the location",
        )
    path = os.path.realpath(directory / location)
    if os.path.commonpath([path, directory]) != str(directory):
        return build_finding(
            "KV501",
            location,
            f"leads out of the model's directory, to {path}",
            "put a copy in the place of the link",
        )
    return None


def _describe_error(error: KvRenameError) -> str:
    return {"no such file": "is missing"}.get(error.message, error.message)


def has_same_data(data_file: DataFile, target: Path) -> bool:
    """Return whether the file at `target` has the same bytes as a data file."""
    try:
        with open_file(data_file.path) as file:
            return has_content(target, data_file.size, read_chunks(file, 0, data_file.size))
    except KvRenameError:
        return False
