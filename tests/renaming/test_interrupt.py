"""What a run says that is interrupted when its results are in place already."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import qefficient_exports
from kill_commands import needs_fork, read_directory, run_and_kill
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
    real = os.unlink

    def interrupt(path: Path, **how: int | None) -> None:
        if read_tokens(Path("new" if "-d" in args else "d")) == {True}:
            monkeypatch.setattr(os, "unlink", real)
            raise KeyboardInterrupt
        real(path, **how)

    monkeypatch.setattr(os, "unlink", interrupt)
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


def test_an_interrupt_after_a_stopped_run_was_undone_says_that(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are not what they were when the command began."""
    place = "onnxkvrename.renaming.run"
    monkeypatch.setattr(f"{place}.settle_stopped_runs", restore)
    monkeypatch.setattr(f"{place}.check_batch", interrupt)
    outcome = run("a", "--prefix", "VLLM")
    line = "interrupted: a rename that had stopped halfway was undone; run the same command again"
    assert (outcome.code, outcome.err.lstrip()) == (130, f"error: {line}\n")


@needs_fork
def test_an_interrupt_after_a_stopped_seeding_was_undone_says_that(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for source in ("external", "mla.onnx"):
        qefficient_exports.write_export(Path("cache"), source)
    seed = ("cache", "--prefix", "VLLM", "--seed-cache")
    plain = read_directory(Path("cache"))
    for nth in count(1):
        assert run_and_kill("link", nth, *seed, after=True)
        seeded = [name for name in read_directory(Path("cache")) if ".onnxkvrename-" not in name]
        if len(seeded) > len(plain):
            break
    monkeypatch.setattr("onnxkvrename.qefficient.seed_cache.plan_seeds", interrupt)
    outcome = run(*seed)
    line = "interrupted: a rename that had stopped halfway was undone; run the same command again"
    assert (outcome.code, outcome.err.lstrip()) == (130, f"error: {line}\n")
    assert read_directory(Path("cache")) == plain
    outcome = run(*seed)
    assert (
        outcome.err.lstrip()
        == "error: interrupted: no model was changed; run the same command again\n"
    )


def restore(
    directories: object, inputs: object, report: Callable[[list[Path]], None], **how: object
) -> bool:
    report([Path("a/layer_0_1/model.onnx")])
    return False


def test_an_interrupt_while_a_finished_run_is_cleared_says_what_is_in_place(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def settle(*args: object, **how: object) -> bool:
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return True

    monkeypatch.setattr("onnxkvrename.renaming.run.settle_stopped_runs", settle)
    outcome = run("a", "--prefix", "VLLM")
    line = "error: interrupted: all results are in place; run the same command again\n"
    assert (outcome.code, outcome.err.lstrip(), read_tokens(Path("a"))) == (130, line, {True})
