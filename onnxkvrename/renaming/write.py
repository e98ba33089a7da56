"""One result on its way: a draft, proved against its plan, beside its place."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError, WriteError
from onnxkvrename.model import file as onnxfile
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.renaming.extra_files import Text
from onnxkvrename.renaming.prepare import Recipe
from onnxkvrename.storage import read as files
from onnxkvrename.storage.temp_file import Draft, Heard, Staged


class Task(NamedTuple):
    """A file to be made: of a model by its recipe, of data by copying, of a text; it travels.

    ``owner`` counts the models of the command. ``target`` is the place to make
    it for, and ``called`` what that is called to the user.
    """

    owner: int
    source: Recipe | DataFile | Text
    target: Path
    called: Path
    in_place: bool
    force: bool

    @property
    def unchanged(self) -> bool:
        """Whether the source is still as it was found."""
        return files.is_still(self.path, self.source.identity)

    @property
    def path(self) -> Path:
        """The source."""
        return self.source.model if isinstance(self.source, Recipe) else self.source.path


def draft(task: Task, heard: Heard | None = None) -> Staged | KvRenameError:
    """Make the file whole under a temporary name beside its place, or say why it cannot be.

    ``heard`` is told of copied data. Nothing is left behind on failure.
    """
    try:
        with files.opened(task.path) as source, Draft(task.target, task.called) as made:
            if source.identity != task.source.identity:
                raise changed(task)
            if isinstance(task.source, Recipe):
                onnxfile.write(source, task.source.pieces, made)
                onnxfile.prove(made, task.source.size, task.source.expected)
            elif isinstance(task.source, Text):
                made.write(task.source.content)
            else:
                made.copy(source, 0, source.size, heard)
            made.keep(source, owner=task.in_place, force=task.force)
            return made.finish(replace=task.in_place or task.force)
    except KvRenameError as error:
        return error


def changed(task: Task) -> KvRenameError:
    """The error of a source that is no longer what was read."""
    kind = ModelError if isinstance(task.source, Recipe) else WriteError
    return kind("was changed by someone else just now", path=str(task.path))
