"""Models to work on, and ways to run the command."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from onnxkvrename.cli.main import main

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
COMMAND = Path(sys.executable).with_name("onnxkvrename")

Run = Callable[..., "Outcome"]
Spawn = Callable[..., "subprocess.CompletedProcess[str]"]
Piped = Callable[[str, Path], "subprocess.CompletedProcess[str]"]
Snapshot = Callable[[Path], dict[str, tuple[int, bytes]]]


class Outcome(NamedTuple):
    """What a command line came to."""

    code: int
    out: str
    err: str


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """A decoder of two layers, alone in a directory."""
    path = tmp_path / "model" / "decoder.onnx"
    path.parent.mkdir()
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", path)
    return path


@pytest.fixture
def renamed() -> bytes:
    """What that decoder is to become."""
    return (FIXTURES / "VLLM" / "decoder.onnx").read_bytes()


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A decoder with its weights in ``decoder.onnx.data`` beside it."""
    shutil.copytree(FIXTURES / "plain" / "external", tmp_path / "external")
    return tmp_path / "external" / "decoder.onnx"


@pytest.fixture
def snapshot() -> Snapshot:
    """What lies below a directory, and when it was last written."""

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
        return subprocess.run([*command, *map(str, args)], preexec_fn=_mind_modes, **how)

    return call


@pytest.fixture
def piped() -> Piped:
    """A line of shell, in which $K is the command, run in some directory."""

    def call(line: str, where: Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "K": f"{sys.executable} -m onnxkvrename"}
        shell = ["bash", "-o", "pipefail", "-c", line]
        return subprocess.run(shell, cwd=where, env=environment, capture_output=True, text=True)

    return call


def _mind_modes() -> None:
    """Give up root's right to pass over modes; without that right this does nothing."""
    if sys.platform == "linux":
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            ctypes.CDLL(None).prctl(24, capability)  # PR_CAPBSET_DROP
