"""Output streams: all that is printed, where, in which colour, and what if it cannot be."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, groupby, islice
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

import click

from onnxkvrename.errors import KvRenameError
from onnxkvrename.report.formats import Answer, Line, load_format
from onnxkvrename.report.inert import escape_line, is_inert
from onnxkvrename.report.tables import wrap_line
from onnxkvrename.rules.profile import ProfileChoice

if TYPE_CHECKING:
    from onnxkvrename.report.progress_bars import ProgressBars

_MAX_LINES_AT_ONCE = 1000
_MAX_WIDTH = 1000
"""The most columns that are drawn, whatever the terminal or `COLUMNS` says: each costs time."""


def print_answer(answer: Answer, output_format: str) -> int:
    """Print an answer in one of the formats and return its exit code.

    Raises:
        KvRenameError: The answer could not be written.
    """
    print_lines(load_format(output_format).render(answer, find_width(sys.stdout)))
    return answer.exit_code


def print_choice(
    choice: ProfileChoice | None, output_format: str = "text", quiet: bool = False
) -> None:
    """Name a profile that was picked by the names of the models, for people on stderr."""
    if choice is not None and choice.picked and output_format == "text" and not quiet:
        print_lines([Line(choice.describe(), err=True)])


def print_lines(lines: Iterable[Line]) -> None:
    """Print lines on stdout and stderr; nothing else of the package prints.

    Whatever is in a line, it stays one line that neither a terminal nor a CI runner acts on.
    A stderr that cannot be written, and a reader of stdout that is gone (``| head``), keep
    nothing else from being printed.

    Raises:
        KvRenameError: Stdout cannot be written. The lines for stderr are printed.
    """
    failure: KvRenameError | None = None
    for is_error, group in groupby(lines, key=lambda line: line.err):
        while batch := list(islice(group, _MAX_LINES_AT_ONCE)):
            if is_error:
                _print_on_stderr(batch)
                continue
            try:
                _print_on_stdout(batch)
            except KvRenameError as error:
                failure = failure or error
    if failure is not None:
        raise failure


def _print_on_stdout(lines: Sequence[Line]) -> None:
    if sys.stdout is None:
        raise _build_lost_answer_error("stdout is closed")
    with stdout_guard():
        _echo(lines, sys.stdout, is_color_enabled(sys.stdout))


def _print_on_stderr(lines: Sequence[Line]) -> None:
    if sys.stderr is None:
        return
    try:
        _echo(lines, sys.stderr, is_color_enabled(sys.stderr))
    except OSError:  # there is no other place to say so; the exit code tells the outcome
        drop_stream(2)


def _echo(lines: Sequence[Line], stream: Any, color: bool) -> None:
    """Write lines; characters that the encoding of the stream lacks are escaped.

    What goes to stderr is sentences: on a terminal they are wrapped by words.
    """
    if lines[0].err:
        width = find_width(stream)
        lines = [part for line in lines for part in wrap_line(line, width)]
    text = "\n".join(_render_lines(lines, color))
    try:
        click.echo(text, file=stream, color=True)
    except UnicodeEncodeError as error:
        escaped = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
        click.echo(escaped, file=stream, color=True)


def _render_lines(lines: Sequence[Line], color: bool) -> Iterable[str]:
    if not color and is_inert("".join(line.text for line in lines)):  # nearly all of large answers
        return (line.text for line in lines)
    return (_render_line(line, color) for line in lines)


def _render_line(line: Line, color: bool) -> str:
    """Return a line as it is printed: everything in it escaped, then its styles."""
    ends = tuple(accumulate(len(span.text) for span in line.spans)) if color else ()
    text = "".join(span.text for span in line.spans) if ends else line.text
    pieces = escape_line(text, ends[:-1], is_command=line.is_command)
    if not ends:
        return "".join(pieces)
    styled = zip(pieces, (span.style for span in line.spans), strict=True)
    return "".join(f"\x1b[{style}m{text}\x1b[0m" if style else text for text, style in styled)


def find_width(stream: Any) -> int | None:
    """Return the columns that a line on a stream may have; `None` for a pipe."""
    return min(get_terminal_size().columns, _MAX_WIDTH) if is_terminal(stream) else None


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


def show_progress(*, is_wanted: bool) -> AbstractContextManager[ProgressBars | None]:
    """Return progress bars for someone who watches, else nothing."""
    if not is_wanted or not is_terminal(sys.stderr) or os.environ.get("TERM") == "dumb":
        return nullcontext()
    from onnxkvrename.report.progress_bars import ProgressBars  # only for terminals

    return ProgressBars()


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
        drop_stream(1)
    except OSError as error:
        drop_stream(1)
        raise _build_lost_answer_error(error.strerror) from None


def _build_lost_answer_error(reason: str | None) -> KvRenameError:
    return KvRenameError(f"the work is done, but the answer could not be given: {reason}")


def drop_stream(number: int) -> None:
    """Redirect stdout (1) or stderr (2) to nowhere.

    What could not be written is still in its buffer, and the interpreter would fail on it
    again at exit.
    """
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, number)
    os.close(descriptor)


def occupy_closed_streams() -> None:
    """Open the descriptors of stdin, stdout and stderr on nothing where the caller closed them.

    The next file that is opened would get such a number. If that were a result, what a library
    reports on stderr would be written into it. Python itself still treats them as closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
            continue
        except OSError as error:
            if error.errno != errno.EBADF:
                continue  # it is open, whatever is behind it
        if os.open(os.devnull, os.O_RDWR) == number:  # the lowest number that is free
            os.set_inheritable(number, True)
