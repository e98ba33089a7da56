"""Work on one item after the other, in processes side by side, or on a cluster."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from onnxkvrename import __version__
from onnxkvrename.errors import KvRenameError
from onnxkvrename.storage.temp_file import ProgressCallback

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

T = TypeVar("T")
R = TypeVar("R")

_CHUNK_SIZE = 16
_MIN_ITEMS_PER_PROCESS = 8
"""Items for each process below which starting it takes longer than their work."""


def map_ordered(
    work: Callable[[T], R],
    items: Sequence[T],
    executor: Executor | None,
    heard: ProgressCallback | None = None,
) -> Generator[R, None, None]:
    """What ``work`` makes of each item, in the order of the items.

    Without an executor one after the other, as results are asked for. With one,
    ``work`` and items travel to its workers, some items at once. When the
    iterator ends, however it does, no work is under way any more.

    Raises what ``work`` raises, and :class:`KvRenameError` for an executor that
    fails.
    """
    if executor is None:
        for item in items:
            yield work(item)
            if heard is not None:
                heard(1)
        return
    futures: list[Future[list[R]]] = []
    try:
        with _wrap_worker_errors():
            for start in range(0, len(items), _CHUNK_SIZE):
                futures.append(
                    executor.submit(_map_chunk, work, items[start : start + _CHUNK_SIZE])
                )
        for future in futures:
            with _wrap_worker_errors():
                results = future.result()
            if heard is not None:
                heard(len(results))
            yield from results
    finally:
        _stop_futures(futures)


def _map_chunk(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    return [work(item) for item in items]


def _stop_futures(futures: Sequence[Future[list[R]]]) -> None:
    if all(future.done() for future in futures):
        return
    from concurrent.futures import wait

    wait([future for future in futures if not future.cancel()], timeout=60)


@contextmanager
def _wrap_worker_errors() -> Iterator[None]:
    """Say in words that an executor could not do its part."""
    try:
        yield
    except KvRenameError:
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        if type(error).__name__ in ("CancelledError", "FutureCancelledError", "CommClosedError"):
            said = "its scheduler or its pool has ended"
        raise KvRenameError(
            f"a worker failed: {said[:300]}", hint="nothing was changed; try again, or --jobs 1"
        ) from error


def count_useful_processes(items: int) -> int:
    """How many processes are worth starting for so many items, 1 for none."""
    return max(1, min(_count_cores(), items // _MIN_ITEMS_PER_PROCESS))


def _count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def open_process_pool(count: int) -> Iterator[Executor | None]:
    """An executor with so many processes; none for one."""
    if count == 1:
        yield None
        return
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    # A fork has all modules loaded, and one thread is all there is here.
    how = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(how)
    pool = ProcessPoolExecutor(count, context, _initialize_worker, (os.getpid(),))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _initialize_worker(parent: int) -> None:
    """In a new process: leave Ctrl-C to the parent, and do not outlive it."""
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
    """An executor on a running Dask cluster, which sees the same files.

    Dask gives the work of a worker that dies to another one. Raises
    :class:`KvRenameError` where there is no cluster, or no ``distributed``.
    """
    try:
        import logging

        import distributed
    except ImportError:
        raise KvRenameError(
            "Dask is not installed", hint="pip install 'onnxkvrename[dask]'"
        ) from None
    if not re.fullmatch(r"(?:[a-z]+://)?.+:[0-9]{1,5}|[a-z]+://.+", address):
        raise KvRenameError(
            f"{address!r} is no address of a Dask scheduler", hint="for example tcp://10.0.0.1:8786"
        )
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what fails is told in one line
    try:
        client = distributed.Client(address, timeout="10s", set_as_default=False)
    except (OSError, ValueError, distributed.TimeoutError) as error:
        said = " ".join(str(error).split())
        raise KvRenameError(
            f"no Dask scheduler at {address}: {said[:200]}",
            hint="start one with `dask scheduler`, and give the address that it says",
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


def _check_worker_versions(client: Any) -> None:
    """What travels is read by this very version only."""
    with _wrap_worker_errors():
        versions = set(client.run(_report_version).values())
    if versions != {__version__}:
        other = ", ".join(sorted(versions - {__version__}))
        raise KvRenameError(
            f"a worker has onnxkvrename {other}, and this is {__version__}",
            hint="install the same version on every worker",
        )


def _report_version() -> str:
    return __version__
