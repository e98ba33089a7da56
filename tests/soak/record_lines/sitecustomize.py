"""Write down which lines of the package run, once a process.

Python imports this module at its start if its directory is on ``PYTHONPATH``, so lines that run in
processes which a test starts are recorded, too. ``RECORDED_PACKAGE`` is the package's directory,
``RECORDED_LINES`` the file to append to; a line of it is a module and a line of that, from 1.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

_write = os.write  # tests replace it


def start(package: str, log: str) -> None:
    """Record the lines of all modules of a package in this process and those it forks."""
    import fcntl

    opened = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 200)  # out of the way of 0 to 2
    os.close(opened)
    prefix = package + os.sep
    seen: set[tuple[str, int]] = set()

    def trace_line(frame: FrameType, event: str, _: Any) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in seen:
            seen.add(place)
            inside = "" if frame.f_code.co_name == "<module>" else "in a function"
            _write(descriptor, f"{place[0][len(prefix) :]}:{place[1]}:{inside}\n".encode())
        return trace_line

    def trace_call(frame: FrameType, _event: str, _: Any) -> Any:
        return trace_line if frame.f_code.co_filename.startswith(prefix) else None

    threading.settrace(trace_call)
    sys.settrace(trace_call)


if "RECORDED_LINES" in os.environ:
    start(os.environ["RECORDED_PACKAGE"], os.environ["RECORDED_LINES"])
