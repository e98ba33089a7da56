"""What is said, to whom, and in what colour."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from onnxkvrename.errors import KvRenameError


def print_lines(lines: Iterable[str], *, err: bool = False) -> None:
    """Lines on stdout, or stderr; what its encoding does not have is escaped."""
    for line in lines:
        try:
            click.echo(line, err=err, color=True)
        except UnicodeEncodeError as error:
            escaped = line.encode(error.encoding, "backslashreplace").decode(error.encoding)
            click.echo(escaped, err=err, color=True)


def is_color_enabled(stream: Any) -> bool:
    """Whether to paint: https://no-color.org and https://force-color.org."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def is_terminal(stream: Any) -> bool:
    """Whether someone looks on; a stream that was closed by who started us is ``None``."""
    return stream is not None and bool(stream.isatty())


@contextmanager
def stdout_guard() -> Iterator[None]:
    """Give an answer on stdout, which may not be taken.

    Who has heard enough (``| head``) is left in peace; raises
    :class:`KvRenameError` for what cannot be written for another reason.
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
    """Keep the interpreter from failing once more on what cannot be written."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
