"""Hostile files through every command that reads models: refused in one line, or handled.

Whatever a file is, no command changes anything but a rename that is taken, prints a
traceback or characters that a terminal acts on, or reads what lies outside.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Sample
from faults.hostile_files import Case, list_cases
from faults.judging import MAX_LINE_LENGTH
from tiers import thin

READERS = (
    ["{model}", "--prefix", "VLLM", "--check"],
    ["{model}", "--prefix", "VLLM", "--dry-run"],
    ["verify", "{model}"],
    ["inspect", "{model}"],
    ["inspect", "{model}", "--vllm", "--format", "json"],
)
"""Command lines that read a model."""
WRITERS = (
    ["{model}", "--prefix", "VLLM", "-o", "{model}.out"],
    ["{model}", "--prefix", "VLLM"],
)
"""Command lines that write, where the model is taken."""
TIMEOUT = 60


@pytest.fixture
def limited() -> Iterator[None]:
    """End a test that hangs."""
    if not hasattr(signal, "alarm"):
        yield
        return
    signal.alarm(TIMEOUT)
    yield
    signal.alarm(0)


def describe(directory: Path) -> dict[str, object]:
    """Return what lies below a directory, without opening what is no plain file."""
    tree: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        plain = path.is_file() and not path.is_symlink() and status.st_size < 1 << 20
        tree[str(path.relative_to(directory))] = path.read_bytes() if plain else status
    return {
        name: value if isinstance(value, bytes) else (value.st_mode, value.st_ino, value.st_size)  # type: ignore[attr-defined]
        for name, value in tree.items()
    }


def check_output(text: str) -> None:
    """Check that a terminal and a CI log print this and do nothing else."""
    for line in text.split("\n"):
        assert not [c for c in line if not c.isprintable() and c != "\t"], ascii(line[:200])
        assert not line.lstrip().startswith("::"), ascii(line[:200])
        assert "##[" not in line, ascii(line[:200])


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("case", thin(list_cases(), 54), ids=str)
def test_a_hostile_file_is_refused_in_one_line_or_handled(
    case: Case, tmp_path: Path, run, sample: Sample
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (tmp_path / "x").write_bytes(b"another's")
    case.write(here)
    before = describe(tmp_path)
    for args in (*sample(READERS, 1), *WRITERS):
        outcome = run(*(arg.format(model=here / "m.onnx") for arg in args))
        where = (args, outcome.code, outcome.err[:500])
        assert outcome.code in (0, 1, 2), where
        assert "Traceback" not in outcome.err, where
        assert "a bug in onnxkvrename" not in outcome.err, where
        check_output(outcome.err)
        if args[-1] != "json":  # which escapes all but what it may hold
            check_output(outcome.out)
        assert all(len(line) <= MAX_LINE_LENGTH for line in outcome.err.split("\n")), where
        if args[-1] == "VLLM" or "-o" in args:
            refused = case.refused and not (case.in_place and "-o" in args)
            assert (outcome.code != 0) == refused, where
            if refused:
                assert outcome.err.count("\n") <= MAX_LINES, where
                assert case.says in outcome.err, where
        is_reader = "--prefix" not in args or args[-1].startswith("--")
        if is_reader or (case.refused and not case.in_place):
            assert describe(tmp_path) == before, where
    if not case.refused:
        assert os.path.exists(here / "m.onnx.out")


MAX_LINES = 5
"""Lines that a refusal has: two findings, the fix of each, and what became of the model."""
