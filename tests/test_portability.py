"""Behaviour on systems without POSIX, tested on Linux without the POSIX parts of Python."""

from __future__ import annotations

import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import posix_only
from tiers import full

import onnxkvrename

TESTS = Path(__file__).resolve().parent


def run_without_posix(*args: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python without what :mod:`posix_only` lists."""
    paths = [TESTS / "without_posix", TESTS.parent, os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
    )


def test_the_names_are_gone_there(tmp_path: Path) -> None:
    script = (
        "import os, signal, posix_only\n"
        "print(*(n for n in posix_only.OS_NAMES if hasattr(os, n)))\n"
        "print(*(n for n in posix_only.SIGNAL_NAMES if hasattr(signal, n)))\n"
        f"import {posix_only.MODULES[0]}\n"
    )
    done = run_without_posix("-c", script, cwd=tmp_path)
    assert done.stdout == "\n\n"
    assert f"import of {posix_only.MODULES[0]} halted" in done.stderr


def test_every_module_can_be_imported(tmp_path: Path) -> None:
    found = pkgutil.walk_packages(onnxkvrename.__path__, "onnxkvrename.")
    modules = [module.name for module in found if not module.name.endswith("__main__")]
    assert "onnxkvrename.cli.main" in modules
    done = run_without_posix("-c", f"import {', '.join(modules)}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_models_are_renamed_and_renamed_back(decoder: Path, renamed: bytes) -> None:
    before = decoder.read_bytes()
    command = ("-m", "onnxkvrename", decoder.name, "-q")
    done = run_without_posix(*command, "--prefix", "VLLM", cwd=decoder.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert decoder.read_bytes() == renamed
    done = run_without_posix(*command, "--strip", "-o", "new/plain.onnx", cwd=decoder.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert (decoder.parent / "new" / "plain.onnx").read_bytes() == before
    assert sorted(os.listdir(decoder.parent)) == [decoder.name, "new"]


@full
def test_every_test_can_be_collected() -> None:
    options = ("--collect-only", "-p", "no:cacheprovider")
    done = run_without_posix("-m", "pytest", *options, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout


def test_a_test_that_needs_posix_is_skipped_and_the_package_may_not_need_it(tmp_path: Path) -> None:
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import os, signal\n"
        "from pathlib import Path\n"
        "import pytest\n"
        "from onnxkvrename.files import read\n"
        "def test_function(): os.fork()\n"
        "def test_signal(): signal.SIGKILL\n"
        "def test_module(): import fcntl\n"
        "def test_patched(monkeypatch): monkeypatch.setattr(os, 'fchown', None)\n"
        "def test_fixture(few_descriptors): pass\n"
        "def test_typing_error(): os.frok()\n"
        "def test_in_the_package(monkeypatch):\n"
        "    exec(compile('os.fork()', read.__file__, 'exec'))\n"
    )
    options = ("-p", "no:cacheprovider", "-rA", "--tb=no")
    done = run_without_posix("-m", "pytest", *options, "test_it.py", cwd=tmp_path)
    assert "5 skipped" in done.stdout
    for reason in ("os.fork", "signal.SIGKILL", "module fcntl", "os.fchown", "module resource"):
        assert f"this system has no {reason}\n" in done.stdout
    failed = [line.split("::")[1] for line in done.stdout.splitlines() if line[:6] == "FAILED"]
    assert [name.split()[0] for name in failed] == ["test_typing_error", "test_in_the_package"]
