"""The process that runs the retention loop: takes a request, limits itself, sends a reply.

:mod:`onnxkvrename.verification.running.isolated_run` starts it and explains what is sent. A graph
is a program of someone else, and onnxruntime is a million lines of C++: nothing that
happens here may last, fill the memory, write a file or speak to another machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.records import fill_record, serialize
from onnxkvrename.verification.running.ort_session import (
    MemoryLimitError,
    OutputResult,
    ValueKey,
    load_onnxruntime,
)
from onnxkvrename.verification.running.retention_loop import (
    RetentionRun,
    RunnableModel,
    RunnablePair,
    run_retention_loop,
)

_OPEN_FILES = 512
_CPU_SECONDS_PER_SECOND = 4
"""More than the threads that a run has: the limit of CPU time is for an orphan."""
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


ErrorKind = Literal["model", "memory", "other"]


class SentRun(NamedTuple):
    """A `RetentionRun` for JSON: what belongs to outputs is in the order of their keys."""

    dims: Mapping[str, int]
    retained_inputs: Mapping[str, str]
    keys: tuple[ValueKey, ...]
    names: tuple[str, ...]
    steps: tuple[tuple[OutputResult, ...], ...]
    unchanged_outputs: tuple[str, ...]
    findings: tuple[tuple[str, str], ...]


class SentError(NamedTuple):
    """Why there is no run."""

    kind: ErrorKind
    message: str = ""
    hint: str | None = None


class Reply(NamedTuple):
    """What the process answers: a run, or an error."""

    run: SentRun | None = None
    error: SentError | None = None


def serve_request(request: Mapping[str, Any]) -> None:
    """Run what a request asks for, and print the reply: one line of JSON, the last one.

    The request is the document that `isolated_run` sends; its own, and so not checked.
    """
    stream, sys.stdout = sys.stdout.buffer, None  # onnxruntime prints, some of it at the end
    limit_process(request["parent"], request["seconds"])
    try:
        load_onnxruntime()
        limit_memory(request["memory_bytes"])
        reply = Reply(encode_run(_run_loop(request)))
    except (MemoryError, MemoryLimitError):
        reply = Reply(error=SentError("memory"))
    except KvRenameError as error:
        kind: ErrorKind = "model" if isinstance(error, ModelError) else "other"
        reply = Reply(error=SentError(kind, error.message, error.hint))
    stream.write(b"\n%s\n" % json.dumps(serialize(reply)).encode())
    stream.flush()


def _run_loop(request: Mapping[str, Any]) -> RetentionRun:
    pairs = [RunnablePair(tuple(key), *names) for key, *names in request["pairs"]]
    meanings, branches = request["meanings"], request["branches"]
    model = RunnableModel(Path(request["path"]), pairs, 0, meanings, branches)
    return run_retention_loop(
        model,
        dims=request["dims"],
        likely_dims=request["likely_dims"],
        steps=request["steps"],
        seed=request["seed"],
    )


def encode_run(run: RetentionRun) -> SentRun:
    """Return a run as `isolated_run.decode_run` takes it."""
    keys = tuple(run.output_names)
    return fill_record(
        SentRun,
        run,
        keys=keys,
        names=tuple(run.output_names.values()),
        steps=tuple(tuple(step[key] for key in keys) for step in run.step_results),
        findings=tuple((finding.name, finding.message) for finding in run.findings),
    )


def limit_process(parent: int, seconds: int) -> None:
    """Give up what a run does not need, as far as the system lets a process do so.

    The process dies with its parent, which watches over the time that the run may take.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if sys.platform == "linux":
        _leave_network()
        _set_process_options(parent)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with suppress(ImportError):  # not on Windows
        import resource

        limits = {
            "RLIMIT_CPU": seconds * _CPU_SECONDS_PER_SECOND,
            "RLIMIT_NOFILE": _OPEN_FILES,
            "RLIMIT_FSIZE": 0,
            "RLIMIT_CORE": 0,
        }
        for name, limit in limits.items():
            with suppress(AttributeError, ValueError, OSError):  # each system has its own
                _lower_limit(getattr(resource, name), limit)


def limit_memory(memory_bytes: int) -> None:
    """Limit the memory that is taken from now on.

    What onnxruntime needs to be loaded is not the model's: were it counted, a small limit would
    end the process anywhere, with whatever message fits there.
    """
    with suppress(ImportError):  # not on Windows
        import resource

        # Not RLIMIT_AS: address space is reserved by the gigabyte and never used.
        with suppress(ValueError, OSError):
            _lower_limit(resource.RLIMIT_DATA, _read_data_bytes() + memory_bytes)


def _read_data_bytes() -> int:
    """Return the bytes that count for RLIMIT_DATA, if the system tells."""
    with suppress(OSError):
        with open("/proc/self/status", "rb") as status:
            found = re.search(rb"^VmData:\s*([0-9]+) kB$", status.read(), re.MULTILINE)
        return int(found[1]) << 10 if found else 0
    return 0


def _lower_limit(kind: int, limit: int) -> None:
    import resource

    hard = resource.getrlimit(kind)[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def _leave_network() -> None:
    """Move to a network of its own, without any device, where the system allows that.

    Root needs no user namespace for it, and would lose its access to files of others in one.
    """
    import ctypes

    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        if libc.unshare(_CLONE_NEWNET) != 0:
            libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


def _set_process_options(parent: int) -> None:
    """Take no privileges from a file, and die with the parent."""
    import ctypes

    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # forgotten when credentials change
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with_parent() -> None:
    """Wait until the pipe from the parent is closed, which also its death does, and end."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
