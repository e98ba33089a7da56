"""Weights beside the model: where they lie, whether they hold, how they move."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, finding
from onnxkvrename.model.proto_reader import Reference
from onnxkvrename.storage import read as files
from onnxkvrename.storage.read import Identity


class DataFile(NamedTuple):
    """A file of weights: where the model says, and where that is; ``size`` in bytes."""

    location: str
    path: Path
    identity: Identity

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.identity.size


def locate(references: Iterable[Reference], model: Path) -> Iterator[DataFile | Finding]:
    """Each data file that a model names, or what is wrong with it.

    A file is opened as it would be to copy it, and judged by what was opened:
    of a path alone nothing is believed.
    """
    directory = Path(os.path.realpath(model.parent))
    seen: set[str] = set()
    for reference in references:
        location, path = reference.location, directory / reference.location.replace("\0", "")
        fault = _fault(reference, directory)
        if fault is not None:
            yield fault
            continue
        try:
            with files.opened(Path(os.path.realpath(path))) as file:
                found = DataFile(location, file.path, file.identity)
                itself = os.path.samestat(file.status, os.stat(model))
        except KvRenameError as error:
            yield finding(
                "KV502",
                location,
                f"holds {reference.tensor}, but {_said(error)}",
                f"put it beside the model, in {directory}",
            )
            continue
        if itself:
            yield finding("KV501", location, "is the model itself", "export the model again")
        elif found.size < reference.end:
            yield finding(
                "KV503",
                location,
                f"has {found.size:,} bytes, but {reference.tensor} ends at {reference.end:,}",
                "the file was cut off, or is of another model: copy it again",
            )
        elif location not in seen:
            seen.add(location)
            yield found


def standing(
    data: Iterable[DataFile], directory: Path, *, force: bool
) -> Iterator[tuple[DataFile, Path, Finding | None]]:
    """Where each data file has to go; with a finding where another one stands there.

    What is there already, byte for byte, is left out.
    """
    for item in data:
        target = directory / item.location
        clash = None
        if os.path.lexists(target):
            if equal(item, target):
                continue
            if not force:
                clash = finding(
                    "KV504",
                    str(target),
                    f"is there already, and differs from {item.location} beside the source",
                    "choose an empty directory, or --force to replace it",
                )
        yield item, target, clash


def _fault(reference: Reference, directory: Path) -> Finding | None:
    location = reference.location
    if reference.fault:
        return finding(
            "KV503",
            location or reference.tensor,
            f"external data of {reference.tensor} {reference.fault}",
            "export the model again",
        )
    windows = PureWindowsPath(location)
    if "\0" in location or windows.drive or windows.root or ".." in windows.parts:
        return finding(
            "KV501",
            location,
            f"is where {reference.tensor} is said to lie: not in the model's directory",
            "put the data beside the model, and only its file name into the location",
        )
    path = os.path.realpath(directory / location)
    if os.path.commonpath([path, directory]) != str(directory):
        return finding(
            "KV501",
            location,
            f"leads out of the model's directory, to {path}",
            "put a copy in the place of the link",
        )
    return None


def _said(error: KvRenameError) -> str:
    return {"no such file": "is missing"}.get(error.message, error.message)


def equal(item: DataFile, target: Path) -> bool:
    """Whether a data file stands at ``target`` already, byte for byte."""
    try:
        with files.opened(item.path) as file:
            return files.same_content(target, item.size, files.chunks(file, 0, item.size))
    except KvRenameError:
        return False
