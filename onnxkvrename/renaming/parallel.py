"""Apply a function to items: one after the other, in several processes, or on a Dask cluster."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from onnxkvrename import __version__
from onnxkvrename.errors import KvRenameError, MissingFileError, ReadError, WriteError
from onnxkvrename.files.staged import SAME_FILES_HINT
from onnxkvrename.files.temp_file import ProgressCallback

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

T = TypeVar("T")
R = TypeVar("R")

_CHUNK_SIZE = 16
"""On Dask, 300 windows take three times as long with a task for each."""
_MIN_ITEMS_PER_PROCESS = 8
"""Fewer items than this for each process, and starting it takes longer than it saves."""


def map_ordered(
    work: Callable[[T], R],
    items: Sequence[T],
    executor: Executor | None,
    on_progress: ProgressCallback | None = None,
    *,
    is_read_only: bool = False,
) -> Generator[R, None, None]:
    """Yield ``work(item)`` for each item, in the order of the items.

    When the generator ends, for any reason, no work is running.

    Args:
        work: The function to apply. With an executor it must be picklable.
        items: Its arguments. With an executor they must be picklable.
        executor: Where the work runs, several items at once, by workers that are trusted;
            ``None`` for here, one item at a time, and only when its result is requested.
        on_progress: Called with the number of items that have just been done.
        is_read_only: Whether the work changes no file. Then an interrupt ends the processes
            of a pool at once; else it waits until they have removed what they were writing.

    Raises:
        KvRenameError: If the executor fails, or ``work`` raises in one of its workers.
        Exception: Without an executor, any exception of ``work``.
    """
    if executor is None:
        for item in items:
            yield work(item)
            if on_progress is not None:
                on_progress(1)
        return
    from concurrent.futures import wait

    futures: list[Future[list[R]]] = []
    try:
        with _wrap_worker_errors():
            for start in range(0, len(items), _CHUNK_SIZE):
                chunk = items[start : start + _CHUNK_SIZE]
                futures.append(executor.submit(_map_chunk, work, chunk))
        for future in futures:
            with _wrap_worker_errors():
                results = future.result()
            if on_progress is not None:
                on_progress(len(results))
            yield from results
    except KeyboardInterrupt:
        if is_read_only:
            from multiprocessing import active_children

            for process in active_children():
                process.kill()
        raise
    finally:
        wait([future for future in futures if not future.cancel()], timeout=60)


def _map_chunk(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    return [work(item) for item in items]


@contextmanager
def _wrap_worker_errors() -> Iterator[None]:
    """Turn the failure of an executor or of its work into a :class:`KvRenameError`."""
    try:
        yield
    except KvRenameError:
        raise
    except Exception as error:
        reason = _describe_error(error)
        if type(error).__name__ in ("CancelledError", "FutureCancelledError", "CommClosedError"):
            reason = "the scheduler or the pool of processes has ended"
        raise KvRenameError(
            f"a worker failed: {reason}", hint="nothing was changed; try again, or `--jobs 1`"
        ) from error


def _describe_error(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def open_executor(
    address: str | None, processes: int | None, items: int
) -> AbstractContextManager[Executor | None]:
    """Open the workers of a Dask cluster, or processes for a number of items.

    Args:
        address: The scheduler's address, ``None`` for processes.
        processes: How many; ``None`` for as many as are useful.
        items: The number of items to work on.
    """
    if address is not None:
        return connect_dask(address)
    return open_process_pool(processes or count_useful_processes(items))


def count_useful_processes(items: int) -> int:
    """Return the number of processes that pays for ``items`` items; 1 means no extra ones."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min(cores, items // _MIN_ITEMS_PER_PROCESS))


@contextmanager
def open_process_pool(count: int) -> Iterator[Executor | None]:
    """Open an executor with ``count`` processes, and end them when the context ends.

    All processes are started before the context is entered. On Linux they are forks: a
    thread that the caller starts later, as progress bars do, is not running at the fork,
    and so cannot leave a lock that a child would wait for.

    Yields:
        The executor, or ``None`` for a ``count`` of 1.

    Raises:
        KvRenameError: If the processes cannot be started. None is left running.
    """
    if count == 1:
        yield None
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # A fork has all modules loaded, which makes it the faster start.
    method = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(count, context, _initialize_worker, (os.getpid(),))
    try:
        with _wrap_worker_errors(), _hold_interrupts():
            pool.submit(int)  # the first task of a pool forks all of its processes
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _hold_interrupts() -> Iterator[None]:
    """Let signals wait: Python drops the exception of one that comes during a fork."""
    if sys.platform != "linux":
        yield
        return
    stopping = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _initialize_worker(parent: int) -> None:
    """In a new process: ignore Ctrl-C, which the parent handles, and die with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    if sys.platform == "linux":
        import ctypes

        os.setpgrp()  # a signal to the whole group, as timeout(1) sends it, is for the parent
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # held while this process was forked
        with suppress(OSError):
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def connect_dask(address: str) -> Iterator[Executor]:
    """Open an executor on a running Dask cluster whose workers see the same files.

    Dask repeats the work of a worker that dies on another one. Who answers at the address can
    run code in this process: Dask sends pickles. With ``tls://`` both sides prove who they are,
    by the certificates in Dask's own configuration (``distributed.comm.tls``).

    Args:
        address: The scheduler's, for example ``tls://10.0.0.1:8786``.

    Raises:
        KvRenameError: If ``distributed`` is not installed, no scheduler answers at the
            address, it has no workers, or one of them has another version of this package.
    """
    try:
        import asyncio
        import logging

        import dask.config
        import distributed
    except ImportError:
        raise KvRenameError(
            "Dask is not installed", hint="`python -m pip install distributed`"
        ) from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors are reported on one line

    async def check_connection() -> None:
        comm: Any = distributed.comm
        how = distributed.Security().get_connection_args("client")
        await (await comm.connect(address, timeout=10, **how)).close()

    try:
        # A client that cannot connect hangs when this process ends: no client before this check.
        if not dask.config.get("distributed.client.security-loader", None):
            asyncio.run(check_connection())
        client = distributed.Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        hint = "start one with `dask scheduler`, and use the address that it prints"
        if address.startswith("tls:"):
            hint += "; certificates come from distributed.comm.tls in Dask's configuration"
        message = f"no Dask scheduler at {address}: {_describe_error(error)}"
        raise KvRenameError(message, hint=hint) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=10)
        except distributed.TimeoutError:
            raise KvRenameError(
                f"the Dask scheduler at {address} has no workers",
                hint=f"start one with `dask worker {address}`",
            ) from None
        _check_worker_versions(client)
        with client.get_executor(pure=False, retries=3) as executor:
            yield executor


def _check_worker_versions(client: Any) -> None:
    """Refuse workers without this package, or of another version, which could not read its data."""
    with _wrap_worker_errors():
        # A builtin, as a worker without the package could not load a function of ours.
        found = client.run(eval, "__import__('onnxkvrename').__version__", on_error="return")
    for address, version in found.items():
        if version != __version__:
            what = f"cannot load onnxkvrename: {version}"
            if isinstance(version, str):
                what = f"has onnxkvrename {version}, but this is {__version__}"
            hint = f"install onnxkvrename {__version__} on every worker"
            raise KvRenameError(f"worker {address} {what}", hint=hint)


def name_worker(error: KvRenameError) -> KvRenameError:
    """Return an error of the file system, with the Dask worker that it is from in its hint.

    On another machine a file may be missing that the user sees here. Outside of a Dask worker,
    and for all other errors, nothing is added.
    """
    distributed = sys.modules.get("distributed")
    if distributed is None or not isinstance(error, (MissingFileError, ReadError, WriteError)):
        return error
    with suppress(ValueError):  # not a worker
        hint = f"worker {distributed.get_worker().address}: {SAME_FILES_HINT}"
        error.hint = f"{error.hint}; {hint}" if error.hint else hint
    return error
