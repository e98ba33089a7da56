"""One result on its way: a draft, proved against its plan, beside its place."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError, WriteError
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.model.file import check_written_model, write_pieces
from onnxkvrename.renaming.prepare import SplicePlan
from onnxkvrename.storage.read import FileIdentity, is_file_unchanged, open_file
from onnxkvrename.storage.temp_file import ProgressCallback, ReadyFile, TempFile


class WriteTask(NamedTuple):
    """A file to be made: of a model by its recipe, of data by copying, of a text; it travels.

    ``owner`` counts the models of the command. ``target`` is the place to make
    it for, and ``called`` what that is called to the user.
    """

    model_index: int
    source: SplicePlan | DataFile | SidecarPlan
    target: Path
    display_path: Path
    in_place: bool
    force: bool

    @property
    def source_unchanged(self) -> bool:
        """Whether the source is still as it was found."""
        return is_file_unchanged(self.source_path, self.source.identity)

    @property
    def source_path(self) -> Path:
        """The source."""
        return self.source.model_path if isinstance(self.source, SplicePlan) else self.source.path


def write_temp_file(
    task: WriteTask, heard: ProgressCallback | None = None
) -> ReadyFile | KvRenameError:
    """Make the file whole under a temporary name beside its place, or say why it cannot be.

    ``heard`` is told of copied data. Nothing is left behind on failure.
    """
    try:
        with (
            open_file(task.source_path) as source,
            TempFile(task.target, task.display_path) as made,
        ):
            if source.identity != task.source.identity:
                raise build_source_changed_error(task)
            if isinstance(task.source, SplicePlan):
                write_pieces(source, task.source.pieces, made)
                check_written_model(made, task.source.size, task.source.expected_signature)
            elif isinstance(task.source, SidecarPlan):
                made.write(task.source.content)
            else:
                made.copy_from(source, 0, source.size, heard)
            made.copy_attributes(source, owner=task.in_place, force=task.force)
            return made.finish(replace=task.in_place or task.force)
    except KvRenameError as error:
        return error


def build_source_changed_error(task: WriteTask) -> KvRenameError:
    """The error of a source that is no longer what was read."""
    kind = ModelError if isinstance(task.source, SplicePlan) else WriteError
    return kind("was changed by someone else just now", path=str(task.source_path))


class SidecarPlan(NamedTuple):
    """What is to be written in the place of a text, or beside it."""

    path: Path
    identity: FileIdentity
    content: bytes
