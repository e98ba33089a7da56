"""Work in processes, and on a real Dask cluster that loses a worker."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import window_sets
from terminals import run_on_terminal
from tiers import full

from onnxkvrename import KvRenameError, Report, __version__, load_rules
from onnxkvrename.files.find import find_jobs
from onnxkvrename.files.staged import Output
from onnxkvrename.files.temp_file import TEMP_PREFIX, TempFile
from onnxkvrename.renaming import parallel, write
from onnxkvrename.renaming.parallel import count_useful_processes, map_ordered, open_process_pool
from onnxkvrename.renaming.run import rename_batch
from onnxkvrename.rules.request import Request


def square(number: int) -> int:
    return number * number


def die_at(number: int, last: int) -> int:
    if number == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def fail_at(number: int, last: int) -> int:
    if number == last:
        raise ValueError("no\nsuch thing")
    return number


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*.onnx")}


def renamed(root: Path, executor: Executor | None, **options: Any) -> Report:
    rules = load_rules()
    request = Request(token="VLLM", **options)
    return rename_batch(request, find_jobs([root]), rules, executor=executor)


@pytest.mark.parametrize("count", [1, 2])
def test_results_come_in_the_order_of_the_items(count: int) -> None:
    heard: list[int] = []
    with open_process_pool(count) as executor:
        assert list(map_ordered(square, range(100), executor, heard.append)) == [
            n * n for n in range(100)
        ]
    assert sum(heard) == 100


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are killed after a fork")
def test_a_process_that_dies_is_an_error_that_says_what_to_do() -> None:
    with (
        open_process_pool(2) as executor,
        pytest.raises(KvRenameError, match="a worker failed: "),
    ):
        list(map_ordered(partial(die_at, last=40), range(100), executor))


def test_a_worker_that_raises_is_an_error_on_one_line() -> None:
    with (
        open_process_pool(2) as executor,
        pytest.raises(KvRenameError, match="a worker failed: no such"),
    ):
        list(map_ordered(partial(fail_at, last=40), range(100), executor))


RECORD_THREADS_AT_FORKS = """
import os, sys, threading

def record() -> None:
    with open(sys.argv[1], "a") as log:
        log.write(" ".join(thread.name for thread in threading.enumerate()) + chr(10))

os.register_at_fork(before=record)
"""


@full
@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux are workers forks")
def test_on_a_terminal_no_thread_is_alive_when_a_worker_is_forked(tmp_path: Path) -> None:
    """The progress bars have a thread: its locks would be copied into a child that has no thread
    to release them."""
    root, log = window_sets.write_windows(tmp_path / "windows", 64), tmp_path / "threads"
    script = (
        f"{RECORD_THREADS_AT_FORKS}\n"
        "import rich.progress\n"
        "from onnxkvrename.cli.main import main\n"
        "from onnxkvrename.report import progress_bars\n"
        "progress_bars._SECONDS_WITHOUT_BARS = 0\n"
        "code = main(sys.argv[2:])\n"
        "sys.exit(code)"
    )
    command = [sys.executable, "-W", "error", "-c", script, log, root]
    code, shown = run_on_terminal(
        [*map(str, command), "--prefix", "VLLM", "--jobs", "2"],
        {**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        stdout_too=False,
    )
    assert code == 0, shown
    assert "writing" in shown  # there was a bar
    assert log.read_text("utf-8").splitlines() == ["MainThread"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux are workers forks")
def test_workers_are_there_before_whoever_opens_the_pool_can_start_a_thread(tmp_path: Path) -> None:
    log = tmp_path / "threads"
    script = f"""{RECORD_THREADS_AT_FORKS}
from onnxkvrename.renaming.parallel import map_ordered, open_process_pool

with open_process_pool(3) as executor:
    done = threading.Event()
    threading.Thread(target=done.wait, name="bars").start()
    assert list(map_ordered(abs, range(-99, 0), executor)) == list(range(99, 0, -1))
    done.set()
"""
    subprocess.run([sys.executable, "-c", script, str(log)], check=True)
    assert log.read_text("utf-8").splitlines() == ["MainThread"] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="only there workers have a group of their own")
def test_a_signal_to_the_whole_group_reaches_only_the_parent() -> None:
    """As timeout(1) sends it. A pool whose processes end while it is closed prints a traceback."""
    with open_process_pool(2) as executor:
        assert executor is not None
        assert executor.submit(os.getpgrp).result() != os.getpgrp()


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux are workers forks")
def test_an_interrupt_while_workers_start_ends_them() -> None:
    script = """
import os, signal
from onnxkvrename.renaming.parallel import open_process_pool

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started us may ignore it
os.register_at_fork(before=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    with open_process_pool(2):
        print("work")
except KeyboardInterrupt:
    print("interrupted")
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.stdout, result.stderr, result.returncode) == ("interrupted\n", "", 0)


def test_a_pool_that_cannot_start_its_processes_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor.submit", refuse)
    with (
        pytest.raises(KvRenameError, match=r"worker failed: .* unavailable"),
        open_process_pool(2),
    ):
        pass


def test_few_models_are_not_worth_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    useful = {0: 1, 1: 1, 15: 1, 16: 2, 31: 3, 500: 4}
    assert {models: count_useful_processes(models) for models in useful} == useful


class Forgetful(ThreadPoolExecutor):
    """An executor that loses the first answer to each item, as if its worker had died."""

    def submit(self, *args: Any, **how: Any) -> Future[Any]:
        super().submit(*args, **how).result()
        return super().submit(*args, **how)


def test_what_a_lost_worker_wrote_is_removed(tmp_path: Path) -> None:
    root = window_sets.write_windows(tmp_path, 3)
    before = sorted(root.rglob("*"))
    with Forgetful(1) as executor:
        report = renamed(root, executor)
    assert {model.status for model in report.models} == {"renamed"}
    assert sorted(root.rglob("*")) == before


class Broken(Executor):
    """An executor that takes nothing."""

    def submit(self, *args: Any, **how: Any) -> Any:
        raise RuntimeError("closed")


def test_an_executor_that_fails_changes_nothing(tmp_path: Path, snapshot) -> None:
    root = window_sets.write_windows(tmp_path, 3)
    before = snapshot(root)
    with pytest.raises(KvRenameError, match="a worker failed: closed"):
        renamed(root, Broken())
    assert snapshot(root) == before


class InterruptAfter:
    """A progress that is interrupted once the first models are read or written."""

    def __init__(self, step: str) -> None:
        self.step = step

    def track_models(self, doing: str, count: int) -> Any:
        def interrupt(done: int) -> None:
            raise KeyboardInterrupt

        return interrupt if doing == self.step else None

    def track_bytes(self, doing: str, size: int) -> None:
        return None


@pytest.mark.parametrize("step", ["reading", "writing"])
def test_an_interrupt_ends_the_work_and_leaves_nothing(step: str, tmp_path: Path, snapshot) -> None:
    root = window_sets.write_windows(tmp_path, 64)
    before = snapshot(root)
    work = Request(token="VLLM"), find_jobs([root]), load_rules()
    with open_process_pool(2) as executor, pytest.raises(KeyboardInterrupt):
        rename_batch(*work, progress=InterruptAfter(step), executor=executor)
    assert snapshot(root) == before


class Elsewhere(ThreadPoolExecutor):
    """An executor whose files are not to be seen here, as on a machine with other disks."""

    def __init__(self, here: Path) -> None:
        super().__init__(1)
        self._here = here

    def submit(self, *args: Any, **how: Any) -> Future[Any]:
        future = super().submit(*args, **how)
        future.result()
        for path in self._here.rglob(f"{TEMP_PREFIX}*-new"):
            path.unlink()
        return future


@pytest.mark.parametrize("place", [None, "out"])
def test_a_result_that_is_not_to_be_seen_here_is_an_error_and_changes_nothing(
    place: str | None, tmp_path: Path, snapshot
) -> None:
    root = window_sets.write_windows(tmp_path / "in", 3)
    before = snapshot(tmp_path)
    jobs = find_jobs([root], directory=None if place is None else tmp_path / place)
    with Elsewhere(tmp_path) as executor:
        report = rename_batch(Request(token="VLLM"), jobs, load_rules(), executor=executor)
    errors = [model.error for model in report.models if model.error]
    assert [error.hint for error in errors] == [parallel.SAME_FILES_HINT]
    assert snapshot(tmp_path) == before


# Dask


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Any]:
    """Two worker processes and a scheduler, on loopback."""
    distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    how = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "silence_logs": 50}
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, **how) as made,
        distributed.Client(made) as client,
    ):
        yield made, client


@pytest.fixture
def cluster(shared_cluster: Any) -> Any:
    """The cluster with both workers: a test before may have killed one, which starts again."""
    _, client = shared_cluster
    client.wait_for_workers(2)
    return shared_cluster


def doom() -> int:
    """In a worker: leave half a file, and die of the first one that is asked for."""

    def die(output: Output, file: TempFile, **how: object) -> None:
        file.temp_path.write_bytes(b"half")  # as where no file is without a name
        os.kill(os.getpid(), signal.SIGKILL)

    write.write_result = die
    return os.getpid()


def test_a_set_is_renamed_on_a_cluster(cluster: Any, tmp_path: Path, run) -> None:
    made, _ = cluster
    one, other = (
        window_sets.write_windows(tmp_path / "one", 40),
        window_sets.write_windows(tmp_path / "other", 40),
    )
    renamed(one, None)
    outcome = run(other, "--prefix", "VLLM", "--dask", made.scheduler_address)
    assert outcome.code == 0, outcome.err
    assert "40 renamed" in outcome.err
    assert contents(one) == contents(other)


@full
def test_a_cluster_that_loses_a_worker_still_ends_the_whole_set(
    cluster: Any, tmp_path: Path, run
) -> None:
    made, client = cluster
    one, other = (
        window_sets.write_windows(tmp_path / "one", 64),
        window_sets.write_windows(tmp_path / "other", 64),
    )
    renamed(one, None)
    victim = next(iter(client.scheduler_info()["workers"]))
    (process,) = client.run(doom, workers=[victim]).values()
    outcome = run(other, "--prefix", "VLLM", "--dask", made.scheduler_address)
    assert outcome.code == 0, outcome.err
    assert contents(one) == contents(other)
    assert not list(other.rglob(f"{TEMP_PREFIX}*"))
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_finding_on_a_cluster_leaves_all_as_it_was(
    cluster: Any, tmp_path: Path, snapshot, run
) -> None:
    made, _ = cluster
    root = window_sets.write_windows(tmp_path, 4)
    (root / "layer_3_4" / "Tiny_layer_tmp_3_4.onnx").write_bytes(b"text")
    before = snapshot(root)
    outcome = run(root, "--prefix", "VLLM", "--dask", made.scheduler_address)
    assert outcome.code == 2
    assert "text file" in outcome.err
    assert snapshot(root) == before


def test_a_worker_of_another_version_is_refused(
    cluster: Any, tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = cluster
    monkeypatch.setattr(parallel, "__version__", "9.9")
    outcome = run(
        window_sets.write_windows(tmp_path, 2), "--strip", "--dask", made.scheduler_address
    )
    assert outcome.code == 2
    assert re.match(
        r"error: worker tcp://127\.0\.0\.1:[0-9]+ has onnxkvrename 0\.[0-9.]+, .* 9\.9 ",
        outcome.err,
    )


def hide_package() -> None:
    """In a worker: make the package look as if it were not installed."""
    hidden["onnxkvrename"] = sys.modules.get("onnxkvrename")
    sys.modules["onnxkvrename"] = None  # type: ignore[assignment]


def show_package() -> None:
    """In a worker: undo :func:`hide_package`."""
    module = hidden.pop("onnxkvrename")
    del sys.modules["onnxkvrename"]
    if module is not None:
        sys.modules["onnxkvrename"] = module


hidden: dict[str, Any] = {}


def test_a_worker_without_the_package_is_told_to_install_it(
    cluster: Any, tmp_path: Path, run, snapshot
) -> None:
    made, client = cluster
    root = window_sets.write_windows(tmp_path, 2)
    before = snapshot(root)
    victim = next(iter(client.scheduler_info()["workers"]))
    client.run(hide_package, workers=[victim])
    try:
        outcome = run(root, "--prefix", "VLLM", "--dask", made.scheduler_address)
    finally:
        client.run(show_package, workers=[victim])
    assert outcome.code == 2
    assert f"worker {victim} cannot load onnxkvrename" in outcome.err
    assert f"install onnxkvrename {__version__} " in outcome.err
    assert snapshot(root) == before


def hide_files(directory: str) -> None:
    """In a worker: make a directory look as on another machine, where it is not."""
    real_open = os.open

    def open_shown(path: Any, *args: Any, **how: Any) -> int:
        if str(path).startswith(directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real_open(path, *args, **how)

    os.open = open_shown
    hidden["open"] = real_open


def show_files() -> None:
    """In a worker: undo :func:`hide_files`."""
    os.open = hidden.pop("open")


def test_a_worker_that_does_not_see_a_file_is_named(
    cluster: Any, tmp_path: Path, run, snapshot
) -> None:
    made, client = cluster
    root = window_sets.write_windows(tmp_path, 4)
    before = snapshot(root)
    client.run(hide_files, str(root))
    try:
        outcome = run(root, "--prefix", "VLLM", "--dask", made.scheduler_address)
    finally:
        client.run(show_files)
    assert outcome.code == 2
    assert re.search(
        r"layer_0_1/.*\.onnx\): no such file \(worker tcp://127\.0\.0\.1:[0-9]+: ",
        outcome.err,
    )
    assert snapshot(root) == before


def test_a_cluster_without_workers_is_an_error(
    tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")

    def none(*args: object, **how: object) -> None:
        raise distributed.TimeoutError

    monkeypatch.setattr(distributed.Client, "wait_for_workers", none)
    how = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "silence_logs": 50}
    with distributed.LocalCluster(n_workers=0, **how) as made:
        root = window_sets.write_windows(tmp_path, 2)
        outcome = run(root, "--prefix", "VLLM", "--dask", made.scheduler_address)
    assert outcome.code == 2
    assert "no workers" in outcome.err
    assert f"dask worker {made.scheduler_address}" in outcome.err


def test_without_distributed_the_error_says_what_to_install(
    tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    outcome = run(
        window_sets.write_windows(tmp_path, 2), "--prefix", "VLLM", "--dask", "127.0.0.1:1"
    )
    assert outcome.code == 2
    assert "pip install distributed" in outcome.err


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A certificate of its own authority, as settings of Dask for each side."""
    pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    directory = tmp_path_factory.mktemp("tls")
    key, certificate = str(directory / "key.pem"), str(directory / "certificate.pem")
    call = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [*call, "-keyout", key, "-out", certificate, *subject]
    subprocess.run(command, check=True, capture_output=True)
    settings = {"distributed.comm.tls.ca-file": certificate}
    for role in ("client", "scheduler", "worker"):
        settings[f"distributed.comm.tls.{role}.cert"] = certificate
        settings[f"distributed.comm.tls.{role}.key"] = key
    return settings


@full
def test_dask_s_own_configuration_sets_tls_up(
    certificate: dict[str, str], tmp_path: Path, run
) -> None:
    import dask
    import distributed

    root = window_sets.write_windows(tmp_path, 2)
    with dask.config.set({**certificate, "distributed.comm.require-encryption": True}):
        how = {"protocol": "tls", "host": "127.0.0.1", "silence_logs": 50}
        security = distributed.Security()
        with distributed.LocalCluster(
            n_workers=1, processes=False, dashboard_address=None, security=security, **how
        ) as made:
            assert made.scheduler_address.startswith("tls://")
            outcome = run(root, "--prefix", "VLLM", "--dask", made.scheduler_address)
            assert outcome.code == 0, outcome.err
        outcome = run(root, "--strip", "--dask", "tcp://127.0.0.1:1")
    assert outcome.code == 2
    assert "encryption" in outcome.err
    assert "tcp://127.0.0.1:1" in outcome.err


UNREADABLE = {
    f"distributed.comm.tls.{name}": "/nonexistent/file"
    for name in ("ca-file", "client.cert", "client.key")
}


@pytest.mark.parametrize(
    ("address", "settings", "reason"),
    [
        ("nonsense", {}, "missing port"),
        ("nonsense://127.0.0.1:1", {}, "unknown address scheme"),
        ("tls://127.0.0.1:1", {}, "distributed.comm.tls"),
        ("tls://127.0.0.1:1", UNREADABLE, "[Errno 2]"),
        ("tcp://127.0.0.1:1", {"distributed.comm.require-encryption": True}, "encryption required"),
    ],
)
def test_an_address_that_cannot_be_used_is_told_at_once(
    address: str, settings: dict[str, Any], reason: str, tmp_path: Path, run, snapshot
) -> None:
    pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    import dask

    root = window_sets.write_windows(tmp_path, 2)
    before = snapshot(root)
    with dask.config.set(settings):
        outcome = run(root, "--prefix", "VLLM", "--dask", address)
    assert outcome.code == 2
    assert f"no Dask scheduler at {address}: " in outcome.err
    assert reason in outcome.err
    assert len(outcome.err.splitlines()) == 1
    assert snapshot(root) == before
