"""Models to work on, and ways to run the command."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple
from zlib import crc32

import posix_only
import pytest

import onnxkvrename
from onnxkvrename.cli.main import main

PACKAGE = Path(onnxkvrename.__file__).parent
FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
COMMAND = Path(sys.executable).with_name("onnxkvrename")

Run = Callable[..., "Outcome"]
Spawn = Callable[..., "subprocess.CompletedProcess[str]"]
Piped = Callable[[str, Path], "subprocess.CompletedProcess[str]"]
Sample = Callable[[Iterable[Any], int], list[Any]]
Snapshot = Callable[[Path], dict[str, tuple[int, bytes]]]


class Outcome(NamedTuple):
    """Exit code and output of a command line."""

    code: int
    out: str
    err: str


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that chooses the tier."""
    parser.addoption(
        "--full",
        action="store_true",
        help="also run the cases marked full: kill points, browsers, real exports",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis draw as many examples as the tier asks for, and signals through."""
    if hasattr(config, "cache") and "PYTHONDONTWRITEBYTECODE" in os.environ:
        _cache_bytecode(config.cache.mkdir("bytecode"))
    from hypothesis import settings  # here, as it is large: with its bytecode in that cache

    # A busy machine is no failure, so no test has a deadline.
    examples = 500 if config.getoption("--full") else 25
    settings.register_profile("tier", deadline=None, max_examples=examples)
    settings.load_profile("tier")
    _let_signals_through()
    _forget_surroundings()


def pytest_collection() -> None:
    """Look for no garbage while cases are collected: they are many, and none of them is any."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Look for it among what the tests make, and not among the cases."""
    gc.freeze()
    gc.enable()


def _cache_bytecode(directory: Path) -> None:
    """Let all processes share compiled modules, away from the sources.

    Else each child compiles all of our modules again, which takes a third of its time.
    """
    del os.environ["PYTHONDONTWRITEBYTECODE"]
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(directory)
    sys.dont_write_bytecode = False


def _forget_surroundings() -> None:
    """Give each test the same terminal and the same umask, wherever it is started."""
    for name in ("COLUMNS", "LINES", "TERM", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        os.environ.pop(name, None)
    for name in ("TARGET", "PREFIX", "PROFILE", "RULES", "FORMAT", "STRICT", "JOBS"):
        os.environ.pop(f"ONNXKVRENAME_{name}", None)
    os.umask(0o022)


def _let_signals_through() -> None:
    """Handle signals as at a terminal: nohup and background jobs ignore some, children as well."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        ended_by = {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}
        for number in ended_by - {signal.SIGINT}:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ended_by)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the full tier unless it is asked for, and refuse a test without cases."""
    _refuse_empty_parametrizations(items)
    if config.getoption("--full"):
        return
    full = [item for item in items if item.get_closest_marker("full")]
    items[:] = [item for item in items if not item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=full)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say which tier ran, and how to run the other."""
    if config.getoption("--full"):
        terminalreporter.write_line("full tier; without --full: the default tier, 2 minutes")
    else:
        terminalreporter.write_line("default tier; all cases: pytest --full")


def _refuse_empty_parametrizations(items: list[pytest.Item]) -> None:
    """Refuse a parametrization without cases: pytest would skip it, and nobody would notice.

    Where the cases come from files that may be absent, a ``skipif`` has to say so.
    """
    for item in items:
        empty = any(
            str(mark.kwargs.get("reason", "")).startswith("got empty parameter set")
            for mark in item.iter_markers("skip")
        )
        if empty and not any(any(mark.args) for mark in item.iter_markers("skipif")):
            raise pytest.UsageError(f"{item.nodeid}: no cases were found for this test")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Skip a test whose fixtures use what only POSIX systems have, elsewhere."""
    with _skip_without_posix():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test that uses what only POSIX systems have, elsewhere."""
    with _skip_without_posix():
        return (yield)


@contextmanager
def _skip_without_posix() -> Iterator[None]:
    """Skip on an error that says that a name of :mod:`posix_only` is missing.

    In the package it stays an error: there such a name may be used only where it exists.
    """
    try:
        yield
    except (AttributeError, ImportError) as error:
        tracebacks = list(walk_tb(error.__traceback__))
        if str(PACKAGE) in tracebacks[-1][0].f_code.co_filename:
            raise
        known = {"os": posix_only.OS_NAMES, "signal": posix_only.SIGNAL_NAMES}
        missing = re.search(r"module '(os|signal)'.* has no attribute '(\w+)'", str(error))
        if missing and missing[2] in known[missing[1]]:
            pytest.skip(f"this system has no {missing[1]}.{missing[2]}")
        if isinstance(error, ImportError) and error.name in posix_only.MODULES:
            pytest.skip(f"this system has no module {error.name}")
        raise


@pytest.fixture
def sample(request: pytest.FixtureRequest) -> Sample:
    """Return all values in the full tier; in the default one some, other ones in each case."""

    def choose(values: Iterable[Any], default: int) -> list[Any]:
        listed = list(values)
        if request.config.getoption("--full") or len(listed) <= default:
            return listed
        start = crc32(request.node.nodeid.encode())
        return [
            listed[(start + index * len(listed) // default) % len(listed)]
            for index in range(default)
        ]

    return choose


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """A decoder of two layers, alone in a directory."""
    path = tmp_path / "model" / "decoder.onnx"
    path.parent.mkdir()
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", path)
    return path


@pytest.fixture
def renamed() -> bytes:
    """Return the expected result for that decoder."""
    return (FIXTURES / "VLLM" / "decoder.onnx").read_bytes()


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A decoder with its weights in ``decoder.onnx.data`` beside it."""
    shutil.copytree(FIXTURES / "plain" / "external", tmp_path / "external")
    return tmp_path / "external" / "decoder.onnx"


@pytest.fixture
def snapshot() -> Snapshot:
    """Return the files below a directory, with the times of their last changes."""

    def take(directory: Path) -> dict[str, tuple[int, bytes]]:
        paths = [path for path in directory.rglob("*") if path.is_file()]
        return {
            str(path.relative_to(directory)): (path.stat().st_mtime_ns, path.read_bytes())
            for path in paths
        }

    return take


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """No more than 40 files can be open beside those that are."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/dev/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 40, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line, in this process."""

    def call(*args: object) -> Outcome:
        capsys.readouterr()
        return Outcome(main([str(arg) for arg in args]), *capsys.readouterr())

    return call


@pytest.fixture
def spawn() -> Spawn:
    """The console script, as a process of its own; root has to mind modes there, too."""

    def call(*args: object, **how: Any) -> subprocess.CompletedProcess[str]:
        command = [COMMAND] if COMMAND.exists() else [sys.executable, "-m", "onnxkvrename"]
        environment = {**os.environ, **how.pop("env", {})}
        how = {"capture_output": True, "text": True, "env": environment, **how}
        if sys.platform == "linux":
            how["preexec_fn"] = _mind_modes
        return subprocess.run([*command, *map(str, args)], **how)

    return call


@pytest.fixture
def piped() -> Piped:
    """A line of shell, in which $K is the command, run in some directory."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")

    def call(line: str, where: Path) -> subprocess.CompletedProcess[str]:
        python = Path(sys.executable)  # found by PATH, as its own path may have a space in it
        search = f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        environment = {**os.environ, "PATH": search, "K": f"{python.name} -m onnxkvrename"}
        shell = ["bash", "-o", "pipefail", "-c", line]
        return subprocess.run(shell, cwd=where, env=environment, capture_output=True, text=True)

    return call


def _mind_modes() -> None:
    """Give up root's right to ignore the modes of files; anyone else has nothing to give up."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP
