"""Check what workers send back before anything is done with it.

A worker may be another machine, of another user. So results are values of exactly the
types that they should have, and every path that this process will write to, link, move or
remove is the one that it would have computed itself.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path, PureWindowsPath
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from onnxkvrename.errors import KvRenameError, ModelError, RulesError, WriteError
from onnxkvrename.findings import CODES
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.renaming.prepare import PreparedModel
from onnxkvrename.renaming.write import SidecarPlan, WriteTask
from onnxkvrename.rules.results import RenameJob
from onnxkvrename.storage.temp_file import ReadyFile, is_temp_path_for

T = TypeVar("T")

_ERROR_TYPES = (KvRenameError, RulesError, ModelError, WriteError)
_ERROR_FIELDS = {"message", "path", "hint", "in_place_hint"}


def check_prepared_model(job: RenameJob, result: object) -> PreparedModel:
    """Return what a worker has prepared, if it is that, and of this job.

    Args:
        job: The job that was given to the worker.
        result: What it sent back.

    Raises:
        KvRenameError: The result is of another type, or has paths that do not follow from
            the job.
    """
    prepared = _check_type(result, PreparedModel)
    report, model, plan = prepared.report, prepared.model, prepared.splice_plan
    data_files = (*(model.data_files if model else ()), *(file for file, _ in prepared.data_copies))
    directory = job.output.parent
    is_expected = (
        prepared.job == job
        and (report.path, report.output) == (str(job.model), str(job.output))
        and report.status in ("unchanged", "would-rename", "failed")
        and all(finding.code in CODES for finding in report.findings)
        and (model is None or model.path == str(job.model))
        and (plan is None or plan.model_path == job.model)
        and all(map(_is_inside_directory, data_files))
        and all(target == directory / file.location for file, target in prepared.data_copies)
        and set(prepared.data_paths) <= {directory / file.location for file in data_files}
    )
    if not is_expected:
        raise _build_error(f"other paths than for {job.model}")
    return prepared


def check_ready_file(task: WriteTask, result: object) -> ReadyFile | KvRenameError:
    """Return the file that a worker has written, if it is where this task's file must be.

    Args:
        task: The task that was given to the worker.
        result: What it sent back: a file, or its error.

    Raises:
        KvRenameError: The result is of another type, or names another file.
    """
    if type(result) in _ERROR_TYPES:
        return _check_type(result, KvRenameError)
    file = _check_type(result, ReadyFile)
    expected = ReadyFile(
        file.temp_path, task.target, task.in_place or task.force, task.display_path
    )
    if file != expected or not is_temp_path_for(file.temp_path, task.target):
        raise _build_error(f"another file than for {task.display_path}")
    try:
        status = os.lstat(file.temp_path)
    except OSError as error:
        raise _build_error(f"a file that is not there: {error.strerror}") from None
    is_expected = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    source = task.source
    size = len(source.content) if isinstance(source, SidecarPlan) else source.size
    if not is_expected or status.st_size != size:
        raise _build_error(f"a file of another kind or size than for {task.display_path}")
    return file


def _is_inside_directory(file: DataFile) -> bool:
    """Tell if the location of a file leads to no place outside of the directory it is joined to."""
    path = PureWindowsPath(file.location)
    return not ("\0" in file.location or path.drive or path.root or ".." in path.parts)


def _check_type(value: object, expected: type[T]) -> T:
    if not _has_type(value, expected):
        raise _build_error(f"a value that is no {expected.__name__}")
    return value  # type: ignore[return-value]


def _build_error(problem: str) -> KvRenameError:
    return KvRenameError(
        f"a worker sent back {problem}",
        hint="nothing was changed; are all workers yours, and of this version?",
    )


def _has_type(value: Any, expected: Any) -> bool:
    """Tell if a value has exactly the annotated type, and so have all values in it."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        return any(_has_type(value, argument) for argument in arguments)
    if origin is Literal:
        return type(value) is str and value in arguments
    if origin is tuple:
        return type(value) is tuple and _have_types(value, arguments)
    if origin is frozenset:
        return type(value) is frozenset and all(_has_type(item, arguments[0]) for item in value)
    if origin is Mapping:
        key_type, value_type = arguments
        return type(value) is dict and all(
            _has_type(key, key_type) and _has_type(item, value_type) for key, item in value.items()
        )
    if expected is None or expected is type(None):
        return value is None
    if expected is Path:
        return type(value) is type(Path())
    if expected is KvRenameError:
        return type(value) in _ERROR_TYPES and _has_error_fields(value)
    if type(value) is not expected:
        return False
    return not issubclass(expected, tuple) or _have_types(value, _list_field_types(expected))


def _have_types(values: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    if len(expected) == 2 and expected[1] is Ellipsis:
        return all(_has_type(value, expected[0]) for value in values)
    return len(values) == len(expected) and all(map(_has_type, values, expected))


def _has_error_fields(error: KvRenameError) -> bool:
    fields = vars(error)
    return fields.keys() <= _ERROR_FIELDS and all(
        type(text) is str or (text is None and name != "message") for name, text in fields.items()
    )


@lru_cache
def _list_field_types(named_tuple: type) -> tuple[Any, ...]:
    hints = get_type_hints(named_tuple)
    return tuple(hints[field] for field in named_tuple._fields)  # type: ignore[attr-defined]
