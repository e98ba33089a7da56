"""Find sidecars in the directories of models, and tell whose they are."""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.files.find import list_folder
from onnxkvrename.files.read import open_file, read_status, resolve_path
from onnxkvrename.limits import MAX_FILES, MAX_TEXT_BYTES
from onnxkvrename.model.file import open_model
from onnxkvrename.sidecars.decisions import LEAVE_HINT
from onnxkvrename.sidecars.formats import SidecarFormat, detect_format

_YAML_COST = 8
"""How many bytes of other sidecars a byte of YAML counts as, which takes far longer to parse."""
_MAX_YAML_BYTES = MAX_TEXT_BYTES // _YAML_COST


class FoundSidecar(NamedTuple):
    """A sidecar that was found in a directory of models: that of the file, or the one above.

    It has a known name if that alone shows the format.
    """

    path: Path
    directory: Path
    format: SidecarFormat
    has_known_name: bool


def detect_sidecars(
    candidates: Iterable[tuple[Path, Path]], formats: Sequence[SidecarFormat]
) -> Iterator[FoundSidecar]:
    """Yield the candidates that are sidecars with names.

    A file whose name does not show its format is left alone if it is too large, or cannot be
    read. One whose name does is a sidecar whatever is in it.

    Each candidate has the directory of its models.

    Raises:
        ModelError: All together have more bytes than one sidecar may have, or an eighth of that
            in YAML.
    """
    total_size = 0
    for path, directory in candidates:
        detected = detect_format(formats, path.name)
        has_known_name = detected is not None
        if detected is None:
            with suppress(ModelError):
                detected = detect_format(formats, path.name, _read_candidate(path))
        if detected is not None:
            status = read_status(path)
            cost = _YAML_COST if path.suffix in (".yaml", ".yml") else 1
            total_size += cost * status.st_size if status is not None else 0
            if total_size > MAX_TEXT_BYTES:
                raise ModelError(
                    f"was not checked: all sidecars here together have more than "
                    f"{MAX_TEXT_BYTES:,} bytes, or {_MAX_YAML_BYTES:,} of YAML",
                    path=str(path),
                    hint=LEAVE_HINT,
                )
            yield FoundSidecar(path, directory, detected, has_known_name)


def _read_candidate(path: Path) -> bytes:
    """Return the content of a regular file, nothing for one that is too large or is none."""
    status = read_status(path)
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_YAML_BYTES:
        return b""
    return read_sidecar_head(path)


def read_sidecar_head(path: Path) -> bytes:
    """Return the content of a file, as far as a sidecar may be long.

    Raises:
        ModelError: The file does not exist, is not regular, or cannot be read.
    """
    with open_file(path) as file:
        return file.read(0, min(file.size, MAX_TEXT_BYTES))


class Neighbours(NamedTuple):
    """The other models in the directory of a sidecar, which may be theirs.

    The inputs and outputs are known of those that can be read; the unread ones may have any names.
    """

    values: Mapping[Path, frozenset[str]]
    unread: tuple[Path, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The names of all inputs and outputs."""
        return frozenset[str]().union(*self.values.values())

    def find_holders(self, names: Set[str]) -> list[Path]:
        """Return the models that have at least one of some names."""
        return [model for model, values in self.values.items() if not values.isdisjoint(names)]


def read_neighbours(directory: Path, models: Collection[Path]) -> Neighbours:
    """Return the other models of a directory; those after the first 1,024 are left out.

    Directories below are not searched. The `models` are known already.

    Raises:
        ModelError: The directory cannot be listed.
    """
    known = {resolve_path(model) for model in models}
    models_there, _ = list_folder(directory)
    others = [path for path in sorted(models_there) if resolve_path(path) not in known]
    read = {path: read_value_names(path) for path in others[:MAX_FILES]}
    return Neighbours(
        {path: values for path, values in read.items() if values is not None},
        tuple(path for path, values in read.items() if values is None),
    )


def read_value_names(model: Path) -> frozenset[str] | None:
    """Return the names of a model's inputs and outputs; ``None`` if it cannot be read."""
    try:
        with open_model(model) as opened:
            signature = opened.signature
    except ModelError:
        return None
    return frozenset(value.name for value in (*signature.inputs, *signature.outputs))
