"""Weights beside the model: where they lie, whether they hold, how they move."""

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
    """A file of weights: where the model says, and where that is; ``size`` in bytes."""

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
    """Each data file that a model names, or what is wrong with it.

    A file is opened as it would be to copy it, and judged by what was opened:
    of a path alone nothing is believed.
    """
    directory = Path(os.path.realpath(model.parent))
    seen: set[str] = set()
    for reference in references:
        location, path = reference.location, directory / reference.location.replace("\0", "")
        fault = _check_location(reference, directory)
        if fault is not None:
            yield fault
            continue
        try:
            with open_file(Path(os.path.realpath(path))) as file:
                found = DataFile(location, file.path, file.identity)
                itself = os.path.samestat(file.status, os.stat(model))
        except KvRenameError as error:
            yield build_finding(
                "KV502",
                location,
                f"holds {reference.tensor_name}, but {_describe_error(error)}",
                f"put it beside the model, in {directory}",
            )
            continue
        if itself:
            yield build_finding("KV501", location, "is the model itself", "export the model again")
        elif found.size < reference.end_offset:
            yield build_finding(
                "KV503",
                location,
                f"has {found.size:,} bytes, but {reference.tensor_name} ends at {reference.end_offset:,}",
                "the file was cut off, or is of another model: copy it again",
            )
        elif location not in seen:
            seen.add(location)
            yield found


def plan_data_copies(
    data: Iterable[DataFile], directory: Path, *, force: bool
) -> Iterator[tuple[DataFile, Path, Finding | None]]:
    """Where each data file has to go; with a finding where another one stands there.

    What is there already, byte for byte, is left out.
    """
    for item in data:
        target = directory / item.location
        clash = None
        if os.path.lexists(target):
            if has_same_data(item, target):
                continue
            if not force:
                clash = build_finding(
                    "KV504",
                    str(target),
                    f"is there already, and differs from {item.location} beside the source",
                    "choose an empty directory, or --force to replace it",
                )
        yield item, target, clash


def _check_location(reference: ExternalReference, directory: Path) -> Finding | None:
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


def has_same_data(item: DataFile, target: Path) -> bool:
    """Whether a data file stands at ``target`` already, byte for byte."""
    try:
        with open_file(item.path) as file:
            return has_content(target, item.size, read_chunks(file, 0, item.size))
    except KvRenameError:
        return False
