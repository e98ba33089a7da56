"""Run the retention loop in a process of its own, with limits for time and memory.

A graph is a program of someone else: it can loop forever, ask for any amount of memory, or
crash onnxruntime. The process is started, not forked; it gets its request through its standard
input, which stays open as long as the reply is wanted, and writes the reply into a temporary
file. Everything in a reply is read as what it should be, and nothing of it is ever run, opened
or written.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import IO, Literal, NamedTuple

from onnxkvrename.documents import UnreadableTextError, parse_json
from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import Finding
from onnxkvrename.limits import MAX_MATCHED_CHARS, MAX_REASON_CHARS, MAX_TEXT_BYTES
from onnxkvrename.records import read_record, serialize
from onnxkvrename.verification.running.dim_sizes import read_specialized_sizes
from onnxkvrename.verification.running.ort_session import MemoryLimitError
from onnxkvrename.verification.running.retention_loop import (
    DEFAULT_STEPS,
    RetentionRun,
    RunnableModel,
    build_difference_finding,
    compare_runs,
    run_retention_loop,
)

TIME_VARIABLE, MEMORY_VARIABLE = "ONNXKVRENAME_RUN_TIMEOUT", "ONNXKVRENAME_RUN_MEMORY"
"""What the environment may say instead: seconds, and MiB."""
_LEAST_SECONDS, _SECONDS_PER_GIB = 600, 60
_LEAST_MEBIBYTES, _MEMORY_PER_MODEL_BYTE = 4096, 4
"""onnxruntime parses the weights, copies them, and packs some of them again."""
_OWN_MEBIBYTES = 512
"""Address space that Python, numpy and onnxruntime take before there is a model."""
_MEMORY_PATTERN = (
    rb"MemoryError|bad_alloc|annot allocate memory|emory allocation|can't start new thread"
)
"""How Python, C++, the system and OpenBLAS say that there is no more memory."""

_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from onnxkvrename.verification.running.isolated_run import serve_request; serve_request()"
)
_KEPT_VARIABLES = (
    *("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR", "TEMP", "TMP"),
    *("LANG", "LC_ALL", "LC_CTYPE", "OMP_NUM_THREADS"),
)
"""What Python and onnxruntime need of the environment; the rest may be secrets."""
_SET_VARIABLES = {
    # Else onnxruntime leaves a file in the temporary directory, and reports its use.
    "ORT_DISABLE_TELEMETRY": "1",
    # The loop computes nothing in numpy, and each thread reserves memory.
    "OPENBLAS_NUM_THREADS": "1",
}


class RunError(NamedTuple):
    """Why there is no run."""

    kind: Literal["model", "memory", "other"]
    message: str = ""
    hint: str | None = None


class Reply(NamedTuple):
    """What the process answers: a run, or an error."""

    run: RetentionRun | None = None
    error: RunError | None = None


class RunLimits(NamedTuple):
    """What one run in onnxruntime may take.

    The memory does not include what onnxruntime takes to be loaded.
    """

    seconds: int
    mebibytes: int


class RunLimitError(ModelError):
    """A run took more than its limits: it proves nothing, neither good nor bad."""


def check_retention(
    model: RunnableModel,
    reference: RunnableModel | None = None,
    *,
    dims: Mapping[str, int] = MappingProxyType({}),
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
) -> tuple[RetentionRun | None, tuple[Finding, ...]]:
    """Run a model, and compare it with one that should differ in nothing but names.

    Args:
        model: The model to run.
        reference: The model that must give the same results, if there is one.
        dims: Sizes for symbolic dimensions; others are those of a ``specializations.json`` with
            the model, or guessed.
        steps: The number of steps.
        seed: Varies what is fed.

    Returns:
        The run of the model, or ``None`` if only the reference could be run, and findings KV118.

    Raises:
        ModelError: onnxruntime cannot run the reference, or the model if there is no
            reference, or one of them crashes it or reaches a limit.
        KvRenameError: onnxruntime is not installed.
    """
    likely_dims = read_specialized_sizes(model.path)
    if reference is not None and not likely_dims:
        likely_dims = read_specialized_sizes(reference.path)
    run_first = partial(run_isolated, likely_dims=likely_dims, steps=steps, seed=seed)
    if reference is None:
        run = run_first(model, dims=dims)
        return run, run.findings
    expected = run_first(reference, dims=dims)
    try:
        dims = {**dims, **expected.dims}  # what the reference ran with, and no others
        run = run_isolated(model, dims=dims, steps=steps, seed=seed)
    except RunLimitError:
        raise
    except ModelError as error:
        message = f"the reference runs, but this model does not: {error.message}"
        return None, (build_difference_finding("", message),)
    return run, (*run.findings, *compare_runs(run, expected))


def run_isolated(
    model: RunnableModel,
    *,
    dims: Mapping[str, int],
    likely_dims: Mapping[str, int] = MappingProxyType({}),
    steps: int,
    seed: int,
) -> RetentionRun:
    """Run the loop on one model in a process that does not outlive the call.

    The `dims` are kept, the `likely_dims` are tried first; other sizes are guessed. The seed varies
    what is fed.

    Raises:
        RunLimitError: The run reached a limit.
        ModelError: onnxruntime cannot run the model as it is, or crashed.
        KvRenameError: onnxruntime is not installed, or the process cannot be started.
    """
    limits = choose_limits(model.byte_size)
    plain = model._replace(meanings=dict(model.meanings), branches=dict(model.branches))
    sizes = {"dims": dict(dims), "likely_dims": dict(likely_dims)}
    loop = partial(run_retention_loop, plain, **sizes, steps=steps, seed=seed)
    try:
        with TemporaryFile() as reply, TemporaryFile() as printed:
            ended = _run_process(pickle.dumps((loop, limits)), limits.seconds, reply, printed)
    except (OSError, ValueError) as error:
        message = f"no process can be started to run onnxruntime in: {error}"
        raise KvRenameError(message) from None
    if ended.exit_code != 0 or ended.was_stopped:
        raise _build_end_error(ended, model, limits)
    try:
        return _read_reply(ended.reply, model, limits)
    except (UnreadableTextError, UnicodeDecodeError) as error:
        message = f"the process that runs onnxruntime gave no answer that can be read: {error}"
        raise ModelError(message, path=str(model.path)) from None


def _read_reply(text: bytes, model: RunnableModel, limits: RunLimits) -> RetentionRun:
    """Return the run of a reply, or raise its error."""
    run, error = read_record(Reply, parse_json(text.decode("ascii")))
    if run is not None:
        if {len(run.names), *map(len, run.steps)} != {len(run.keys)}:
            raise UnreadableTextError("run.steps must have a result of each output")
        return run
    if error is None:
        raise UnreadableTextError("has neither run nor error")
    if error.kind == "memory":
        raise _build_memory_error(model, limits)
    if error.kind == "model":
        raise ModelError(error.message, path=str(model.path), hint=error.hint)
    raise KvRenameError(error.message, hint=error.hint)


class _EndedProcess(NamedTuple):
    """A process that has ended, with its reply, and all else that it printed.

    The exit code is negative for a signal; it was stopped if it ran for too long.
    """

    exit_code: int
    reply: bytes
    printed: bytes
    was_stopped: bool = False


def _run_process(
    request: bytes, seconds: int, reply: IO[bytes], printed: IO[bytes]
) -> _EndedProcess:
    """Start the process, and wait until it has ended; whatever happens, it then has.

    Raises:
        OSError: It cannot be started.
        ValueError: The same, as for a path with a zero in it.
    """
    kept = {name: text for name, text in os.environ.items() if name.upper() in _KEPT_VARIABLES}
    command = [sys.executable, "-I", "-B", "-X", f"utf8={sys.flags.utf8_mode}", "-c", _BOOTSTRAP]
    process = subprocess.Popen(
        [*command, *(path or os.getcwd() for path in sys.path)],
        stdin=subprocess.PIPE,
        stdout=reply,
        stderr=printed,
        env=kept | _SET_VARIABLES,
    )
    was_stopped = False
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already; its exit code says why
            process.stdin.write(request)
            process.stdin.flush()
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        was_stopped = True
    finally:
        process.kill()
        with suppress(BrokenPipeError):
            process.communicate()
    reply.seek(0)
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - MAX_MATCHED_CHARS))
    return _EndedProcess(
        process.returncode, reply.read(MAX_TEXT_BYTES), printed.read(), was_stopped
    )


def serve_request() -> None:
    """Limit this process, run the loop that standard input asks for, and write the reply."""
    loop, limits = pickle.load(sys.stdin.buffer)
    _limit_process(limits)
    with os.fdopen(os.dup(1), "wb") as reply:
        os.dup2(2, 1)  # onnxruntime prints
        reply.write(json.dumps(serialize(_run_loop(loop))).encode())


def _run_loop(loop: Callable[[], RetentionRun]) -> Reply:
    try:
        return Reply(loop())
    except (MemoryError, MemoryLimitError):
        return Reply(error=RunError("memory"))
    except KvRenameError as error:
        kind: Literal["model", "other"] = "model" if isinstance(error, ModelError) else "other"
        return Reply(error=RunError(kind, error.message, error.hint))


def _limit_process(limits: RunLimits) -> None:
    """Limit what this process takes and writes, as far as the system lets a process do so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with suppress(ImportError):  # not on Windows
        import resource

        for name, limit in (
            ("RLIMIT_AS", limits.mebibytes + _OWN_MEBIBYTES << 20),
            ("RLIMIT_FSIZE", MAX_TEXT_BYTES),
            ("RLIMIT_CORE", 0),
        ):
            with suppress(AttributeError, ValueError, OSError):  # each system has its own
                resource.setrlimit(getattr(resource, name), (limit, limit))


def _die_with_parent() -> None:
    """Wait until the pipe from the parent is closed, which also its death does, and end."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _build_end_error(
    ended: _EndedProcess, model: RunnableModel, limits: RunLimits
) -> KvRenameError:
    """Return the error for a process that ended without a reply."""
    path = str(model.path)
    signal_name = _get_signal_name(-ended.exit_code)
    if ended.was_stopped:
        return RunLimitError(
            f"onnxruntime took more than {limits.seconds:,} s",
            path=path,
            hint=f"with {TIME_VARIABLE}={2 * limits.seconds} in the environment it may take more",
        )
    if re.search(_MEMORY_PATTERN, ended.printed):
        return _build_memory_error(model, limits)
    if signal_name == "SIGKILL":
        return RunLimitError(
            "onnxruntime was killed (SIGKILL), as by a system that is out of memory", path=path
        )
    if ended.exit_code < 0 or os.name == "nt":
        return ModelError(
            f"onnxruntime crashed ({signal_name})",
            path=path,
            hint="try another version of onnxruntime; this process was not affected",
        )
    last_line = ended.printed.rstrip().rpartition(b"\n")[2]
    reason = last_line[:MAX_REASON_CHARS].decode("utf-8", "backslashreplace")
    return KvRenameError(f"the process that runs onnxruntime failed: {reason}", path=path)


def _get_signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"exit code {-number}"


def _build_memory_error(model: RunnableModel, limits: RunLimits) -> RunLimitError:
    return RunLimitError(
        f"onnxruntime needs more than {limits.mebibytes:,} MiB of memory",
        path=str(model.path),
        hint=f"with {MEMORY_VARIABLE}={2 * limits.mebibytes} in the environment it may take more; "
        "--dim NAME=SIZE makes the buffers smaller",
    )


def choose_limits(model_size: int) -> RunLimits:
    """Return what a run of a model of so many bytes, with its external data, may take.

    Raises:
        KvRenameError: The environment has something else than a number.
    """
    seconds = _read_limit(TIME_VARIABLE)
    mebibytes = _read_limit(MEMORY_VARIABLE)
    if seconds is None:
        seconds = _LEAST_SECONDS + _SECONDS_PER_GIB * (model_size >> 30)
    if mebibytes is None:
        wanted = _LEAST_MEBIBYTES + (_MEMORY_PER_MODEL_BYTE * model_size >> 20)
        mebibytes = min(wanted, _read_machine_mebibytes() or wanted)
    return RunLimits(seconds, mebibytes)


def _read_limit(variable: str) -> int | None:
    """Return the limit that the environment sets; ``None`` if it sets none."""
    text = os.environ.get(variable, "")
    if not text:
        return None
    if not re.fullmatch("0*[1-9][0-9]{0,7}", text, re.ASCII):
        raise KvRenameError(
            f"{variable}={text!r} is not a number of up to 8 digits", hint="unset it"
        )
    return int(text)


def _read_machine_mebibytes() -> int | None:
    """Return the MiB of memory that the machine has, if the system tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    except (AttributeError, ValueError, OSError):
        return None
