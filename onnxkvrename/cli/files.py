"""The page that a command writes beside its answer: over no file that the run reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from onnxkvrename.files.run_files import RunFiles
from onnxkvrename.files.staged import write_file
from onnxkvrename.files.targets import check_not_cached, check_regular, check_replaceable


def collect_inputs(inputs: Iterable[tuple[Path | None, str]]) -> RunFiles:
    """Return the files that a run reads.

    Args:
        inputs: Each with what it is, after the word "is"; ``None`` for one that is not given.
    """
    files = RunFiles()
    for path, role in inputs:
        if path is not None:
            files.add_input(path, role)
    return files


def check_page(path: Path, command: str, files: RunFiles, *, force: bool) -> None:
    """Check that the page of a command can be written.

    Args:
        path: The page.
        command: The command, whose earlier page may be replaced.
        files: The files that the run reads.
        force: Whether any other file may be replaced, too.

    Raises:
        WriteError: It cannot.
        ModelError: It cannot be determined what is at the path.
    """
    from onnxkvrename.report.pages.page import build_start_pattern  # jinja2, only for a page

    check_not_cached(path)
    check_regular(path)
    files.check_output(files.add_output(path, "the page of --html"))
    if not force:
        kind = f"a page made by onnxkvrename {command}"
        check_replaceable(path, kind, build_start_pattern(command))


def write_page(path: Path, page: str, files: RunFiles) -> None:
    """Write the page of a command, and remove what killed runs have left beside it.

    Args:
        path: The page, which :func:`check_page` has checked.
        page: Its content.
        files: The files that the run reads: none of them is removed.

    Raises:
        KvRenameError: It cannot be written; an existing file is as it was.
    """
    write_file(path, page.encode("utf-8"), files.list_inputs())
