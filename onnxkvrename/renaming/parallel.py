"""Apply a function to items: one after the other, in several processes, or on a Dask cluster."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from onnxkvrename import __version__
from onnxkvrename.errors import KvRenameError, ReadError, WriteError
from onnxkvrename.storage.temp_file import ProgressCallback

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

T = TypeVar("T")
R = TypeVar("R")

TRUST_HINT = (
    f"nothing was changed; check that all workers are yours and run onnxkvrename {__version__}"
)
SAME_FILES_HINT = "all workers must see the same files, under the same paths"
_CHUNK_SIZE = 16
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
        executor: Where the work runs, several items at once; ``None`` for here, one
            item at a time, and only when its result is requested.
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
    futures: list[Future[list[R]]] = []
    try:
        with _wrap_worker_errors():
            for start in range(0, len(items), _CHUNK_SIZE):
                chunk = items[start : start + _CHUNK_SIZE]
                futures.append(executor.submit(_map_chunk, work, chunk))
        for number, future in enumerate(futures):
            with _wrap_worker_errors():
                results = future.result()
                expected = min(_CHUNK_SIZE, len(items) - number * _CHUNK_SIZE)
                if type(results) is not list or len(results) != expected:
                    raise KvRenameError(
                        f"a worker returned the wrong number of results for {expected} items",
                        hint=TRUST_HINT,
                    )
            if on_progress is not None:
                on_progress(len(results))
            yield from results
    except KeyboardInterrupt:
        if is_read_only:
            _kill_processes()
        raise
    finally:
        _stop_futures(futures)


def _map_chunk(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    return [work(item) for item in items]


def _stop_futures(futures: Sequence[Future[list[R]]]) -> None:
    if all(future.done() for future in futures):
        return
    from concurrent.futures import wait

    wait([future for future in futures if not future.cancel()], timeout=60)


def _kill_processes() -> None:
    """Kill the processes of all pools."""
    from multiprocessing import active_children

    for process in active_children():
        process.kill()


@contextmanager
def _wrap_worker_errors() -> Iterator[None]:
    """Turn the failure of an executor or of its work into a :class:`KvRenameError`."""
    try:
        yield
    except KvRenameError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if type(error).__name__ in ("CancelledError", "FutureCancelledError", "CommClosedError"):
            reason = "the scheduler or the pool of processes has ended"
        raise KvRenameError(
            f"a worker failed: {reason[:300]}", hint="nothing was changed; try again, or `--jobs 1`"
        ) from error


def count_useful_processes(items: int) -> int:
    """Return the number of processes that pays for ``items`` items; 1 means no extra ones."""
    return max(1, min(_count_cores(), items // _MIN_ITEMS_PER_PROCESS))


def _count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
        with _wrap_worker_errors():
            pool.submit(int)  # the first task of a pool forks all of its processes
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _initialize_worker(parent: int) -> None:
    """In a new process: ignore Ctrl-C, which the parent handles, and die with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    if sys.platform == "linux":
        import ctypes

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
        import logging

        import distributed
    except ImportError:
        raise KvRenameError(
            "Dask is not installed", hint="`python -m pip install distributed`"
        ) from None
    if not re.fullmatch(r"(?:[a-z]+://)?.+:[0-9]{1,5}|[a-z]+://.+", address):
        raise KvRenameError(
            f"{address!r} is not an address of a Dask scheduler",
            hint="for example tcp://10.0.0.1:8786",
        )
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # errors are reported on one line
    _check_encryption(address)
    try:
        client = distributed.Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError, TypeError, RuntimeError, distributed.TimeoutError) as error:
        reason = " ".join(str(error).split())
        raise KvRenameError(
            f"no Dask scheduler at {address}: {reason[:200]}",
            hint="start one with `dask scheduler`, and use the address that it prints",
        ) from None
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


def _check_encryption(address: str) -> None:
    """Refuse an address that does not go with Dask's configuration of TLS.

    Dask also checks this, but only after it has made half a client, which it then cannot close.
    """
    import dask.config
    import distributed

    if dask.config.get("distributed.client.security-loader", None):
        return  # only the client itself can say what it will use
    try:
        settings = distributed.Security().get_connection_args("client")
    except (OSError, ValueError, TypeError) as error:
        raise KvRenameError(
            f"the TLS settings of Dask do not work: {' '.join(str(error).split())[:200]}",
            hint="check distributed.comm.tls in Dask's configuration",
        ) from None
    is_tls = address.startswith("tls:")
    if is_tls and settings.get("ssl_context") is None:
        raise KvRenameError(
            f"{address} requires certificates, but Dask's configuration names none",
            hint="set distributed.comm.tls.ca-file, .client.cert and .client.key",
        )
    if settings.get("require_encryption") and "://" in address and not is_tls:
        raise KvRenameError(
            f"Dask's configuration requires encryption, but {address} is not encrypted",
            hint="use the scheduler's tls:// address",
        )


def _check_worker_versions(client: Any) -> None:
    """Refuse workers without this package, or of another version, which could not read its data."""
    install = f"install onnxkvrename {__version__} on every worker"
    with _wrap_worker_errors():
        # A builtin, as a worker without the package could not load a function of ours.
        found = client.run(eval, "__import__('onnxkvrename').__version__", on_error="return")
    for address, version in found.items():
        if isinstance(version, ModuleNotFoundError):
            message = f"worker {address} does not have onnxkvrename installed"
            raise KvRenameError(message, hint=install)
        if isinstance(version, Exception):
            reason = " ".join(str(version).split())[:200]
            raise KvRenameError(
                f"worker {address} cannot load onnxkvrename: {reason}", hint=install
            )
        if version != __version__:
            raise KvRenameError(
                f"worker {address} has onnxkvrename {str(version)[:20]}, but this is {__version__}",
                hint=install,
            )


def name_worker(error: KvRenameError) -> KvRenameError:
    """Return an error of the file system, with the Dask worker that it is from in its hint.

    On another machine a file may be missing that the user sees here. Outside of a Dask worker,
    and for all other errors, nothing is added.
    """
    distributed = sys.modules.get("distributed")
    is_missing = error.message == "no such file"
    if distributed is None or not (is_missing or isinstance(error, (ReadError, WriteError))):
        return error
    with suppress(ValueError):  # not a worker
        hint = f"worker {distributed.get_worker().address} says so; {SAME_FILES_HINT}"
        error.hint = f"{error.hint}; {hint}" if error.hint else hint
    return error
