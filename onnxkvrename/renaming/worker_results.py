"""Check what workers send back before anything is done with it.

A worker may be another machine, of another user. So results are values of exactly the
types that they should have, and every path that this process will write to, link, move or
remove is the one that it would have computed itself.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path, PureWindowsPath
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from onnxkvrename.errors import KvRenameError, ModelError, ReadError, RulesError, WriteError
from onnxkvrename.findings import CODES
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.renaming.parallel import SAME_FILES_HINT, TRUST_HINT
from onnxkvrename.renaming.prepare import PreparedModel
from onnxkvrename.renaming.write import SidecarPlan, WriteTask
from onnxkvrename.rules.checks import load_codes
from onnxkvrename.rules.results import RenameJob
from onnxkvrename.storage.temp_file import ReadyFile, is_temp_path_for

T = TypeVar("T")

_ERROR_TYPES = (KvRenameError, RulesError, ModelError, ReadError, WriteError)
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
        and all(_is_known_code(finding.code) for finding in report.findings)
        and (model is None or model.path == str(job.model))
        and (plan is None or plan.model_path == job.model)
        and all(map(_is_inside_directory, data_files))
        and all(target == directory / file.location for file, target in prepared.data_copies)
        and set(prepared.data_paths) <= {directory / file.location for file in data_files}
    )
    if not is_expected:
        raise _build_error(f"a result whose paths do not belong to {job.model}")
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
        file.temp_path, task.target, task.in_place or task.force, task.display_path, task.root
    )
    if file != expected or not is_temp_path_for(file.temp_path, task.target):
        raise _build_error(f"a file that does not belong to {task.display_path}")
    try:
        status = os.lstat(file.temp_path)
    except OSError as error:
        problem = f"a file that cannot be found here: {error.strerror}"
        raise _build_error(problem, f"nothing was changed; {SAME_FILES_HINT}") from None
    is_expected = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    source = task.source
    size = len(source.content) if isinstance(source, SidecarPlan) else source.size
    if not is_expected or status.st_size != size:
        raise _build_error(f"a file whose type or size does not fit {task.display_path}")
    return file


def _is_known_code(code: str) -> bool:
    """Return whether a code is built in, or of a check that only the workers have loaded."""
    return code in CODES or code in load_codes()


def _is_inside_directory(file: DataFile) -> bool:
    """Return whether the location of a file is inside the directory that it is joined to."""
    path = PureWindowsPath(file.location)
    return not ("\0" in file.location or path.drive or path.root or ".." in path.parts)


def _check_type(value: object, expected: type[T]) -> T:
    if not _find_type_check(expected)(value):  # type: ignore[arg-type]
        raise _build_error(f"a value of another type than {expected.__name__}")
    return value  # type: ignore[return-value]


def _build_error(problem: str, hint: str = TRUST_HINT) -> KvRenameError:
    return KvRenameError(f"a worker returned {problem}", hint=hint)


def _build_type_check(expected: Any) -> Callable[[Any], bool]:
    """Return a check that a value, and all values in it, have exactly their annotated types."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin is Literal:
        return lambda value: type(value) is str and value in arguments
    if origin is tuple and arguments[-1] is Ellipsis:
        check_item = _find_type_check(arguments[0])
        return lambda value: type(value) is tuple and all(map(check_item, value))
    checks = tuple(map(_find_type_check, arguments))
    if origin in (Union, UnionType):
        return lambda value: any(check(value) for check in checks)
    if origin is tuple:
        return lambda value: type(value) is tuple and _have_types(value, checks)
    if origin is frozenset:
        return lambda value: type(value) is frozenset and all(map(checks[0], value))
    if origin is Mapping:
        return lambda value: (
            type(value) is dict
            and all(map(checks[0], value))
            and all(map(checks[1], value.values()))
        )
    if expected is KvRenameError:
        return lambda value: type(value) in _ERROR_TYPES and _has_error_fields(value)
    if expected is Path:
        expected = type(Path())
    if issubclass(expected, tuple):
        hints = get_type_hints(expected)
        fields = tuple(_find_type_check(hints[field]) for field in hints)
        return lambda value: type(value) is expected and _have_types(value, fields)
    return lambda value: type(value) is expected


_find_type_check = lru_cache(_build_type_check)


def _have_types(values: tuple[Any, ...], checks: tuple[Callable[[Any], bool], ...]) -> bool:
    return len(values) == len(checks) and all(
        check(value) for check, value in zip(checks, values, strict=True)
    )


def _has_error_fields(error: KvRenameError) -> bool:
    fields = vars(error)
    return fields.keys() <= _ERROR_FIELDS and all(
        type(text) is str or (text is None and name != "message") for name, text in fields.items()
    )
