"""Output streams: what is printed where, and in which colour."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from onnxkvrename.errors import KvRenameError
from onnxkvrename.report.formats import Answer, Screen, load_format


def print_answer(answer: Answer, output_format: str) -> int:
    """Print an answer in one of the formats and return its exit code.

    Raises:
        KvRenameError: The answer could not be written.
    """
    with stdout_guard():
        for line in load_format(output_format).render(answer, detect_screen()):
            print_lines([line.text], err=line.err)
    return answer.exit_code


def print_lines(lines: Iterable[str], *, err: bool = False) -> None:
    """Print lines on stdout, or stderr; characters that its encoding lacks are escaped."""
    for line in lines:
        try:
            click.echo(line, err=err, color=True)
        except UnicodeEncodeError as error:
            escaped = line.encode(error.encoding, "backslashreplace").decode(error.encoding)
            click.echo(escaped, err=err, color=True)


def detect_screen() -> Screen:
    """Return what stdout and stderr can show."""
    return Screen(
        is_terminal=is_terminal(sys.stdout),
        color=is_color_enabled(sys.stdout),
        error_color=is_color_enabled(sys.stderr),
    )


def is_color_enabled(stream: Any) -> bool:
    """Decide on colour by https://no-color.org and https://force-color.org."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; one that the caller closed is ``None``."""
    return stream is not None and bool(stream.isatty())


@contextmanager
def stdout_guard() -> Iterator[None]:
    """Flush stdout at the end of the context, and ignore a reader that is gone (``| head``).

    Raises:
        KvRenameError: Stdout cannot be written for another reason.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()
    except OSError as error:
        drop_stdout()
        raise KvRenameError(
            f"the work is done, but the answer could not be given: {error.strerror}"
        ) from None


def drop_stdout() -> None:
    """Redirect stdout to nowhere, so that the interpreter does not fail on it again at exit."""
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 1)
