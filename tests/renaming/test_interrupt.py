"""What a run says that is interrupted when its results are in place already."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from window_sets import write_windows


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_windows(Path("a"), 3)
    return tmp_path


def read_tokens(path: Path) -> set[bool]:
    """Return whether models have the token."""
    return {b"_VLLM" in model.read_bytes() for model in Path(path).rglob("*.onnx")}


@pytest.mark.parametrize("args", [("d",), ("d", "-d", "new")])
def test_an_interrupt_after_the_last_file_is_in_place_counts_it(
    args: tuple[str, ...], here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_windows(Path("d"), 2)
    real = os.replace

    def interrupt(*paths: Path, **how: int | None) -> None:
        real(*paths, **how)
        if read_tokens(Path("new" if "-d" in args else "d")) == {True}:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(os, "replace", interrupt)
    outcome = run(*args, "--prefix", "VLLM")
    assert outcome.code == 130
    text = outcome.err.strip()
    assert "interrupted" in text
    assert "all results" in text
    assert not list(Path().rglob(".onnxkvrename-*"))


def test_an_interrupt_while_the_answer_is_printed_says_what_is_in_place(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("onnxkvrename.cli.rename.print_answer", interrupt)
    assert "all results" in run("a", "--prefix", "VLLM").err
    assert (
        "no model was changed; run" in run("a", "--prefix", "VLLM").err
    )  # there was nothing to do
    assert "no model was changed; run" in run("a", "--prefix", "ABC", "--replace", "--dry-run").err


def test_an_interrupt_while_workers_end_says_what_is_in_place(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def open_and_interrupt(*args: object) -> Iterator[None]:
        yield None
        raise KeyboardInterrupt

    monkeypatch.setattr("onnxkvrename.api.files.open_executor", open_and_interrupt)
    assert "all results" in run("a", "--prefix", "VLLM").err


def interrupt(*args: object, **how: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_before_anything_changed_says_so(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxkvrename.renaming.run.check_batch", interrupt)
    outcome = run("a", "--prefix", "VLLM")
    line = "error: interrupted: no model was changed; run the same command again\n"
    assert (outcome.code, outcome.err.lstrip()) == (130, line)
