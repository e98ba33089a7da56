"""Sets of windows, all or none: killed anywhere, run by two at once, at any size."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
import window_sets
from conftest import Sample
from hints import split_words
from kill_commands import count_until_false, needs_fork, read_directory, run_and_kill, run_quietly
from onnx import compose
from tiers import full

from onnxkvrename import rename
from onnxkvrename.files import lock
from onnxkvrename.files.find import find_jobs
from onnxkvrename.files.temp_file import TEMP_PREFIX

EXPORTS = Path(__file__).resolve().parents[2] / "shared" / "exports"
CUT = 1 << 17
"""Bytes of weights, enough to be copied by the kernel."""


@pytest.fixture(autouse=True)
def _no_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that it has written, on the disk or not."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Trial:
    """A set and what it must become, killed and run again until nothing is left to try."""

    def __init__(self, root: Path, windows: int, weights: int = CUT, place: str = "") -> None:
        self.pattern = window_sets.write_windows(root / "pattern", windows, weights=weights)
        self.plain = read_directory(self.pattern)
        self.windows, self.place = root / "windows", place
        shutil.copytree(self.pattern, root / "renamed")
        assert run_quietly(root / "renamed", "--prefix", "VLLM") == 0
        self.renamed = read_directory(root / "renamed")
        assert self.renamed != self.plain

    @property
    def args(self) -> tuple[object, ...]:
        goal = ["-d", self.windows / self.place] if self.place else []
        return (self.windows / "in" if self.place else self.windows, "--prefix", "VLLM", *goal)

    def prepare(self) -> None:
        """The set as it was exported, and nothing else."""
        shutil.rmtree(self.windows, ignore_errors=True)
        shutil.copytree(self.pattern, self.windows / "in" if self.place else self.windows)
        if self.place == "there":
            (self.windows / "there").mkdir()

    def judge(self, where: str) -> None:
        """Whole files only, whatever happened; and the same command ends it."""
        result = self.windows / self.place if self.place else self.windows
        left = read_directory(result) if result.exists() else {}
        own = {name for name in left if name.startswith(TEMP_PREFIX) or f"/{TEMP_PREFIX}" in name}
        assert not any(Path(name).match(f"{TEMP_PREFIX}*.onnx") for name in own), where
        for name in left.keys() - own:
            assert left[name] in (self.plain[name], self.renamed[name]), where
        assert run_quietly(*self.args) == 0, where
        assert read_directory(result) == self.renamed, where
        assert not list(self.windows.rglob(f"{TEMP_PREFIX}*")), where
        assert run_quietly(result, "--strip") == 0, where
        assert read_directory(result) == self.plain, where

    def kill(self, name: str, nth: int, *args: object, after: bool) -> bool:
        """Kill it there; says whether it came to that."""
        self.prepare()
        reached = run_and_kill(name, nth, *self.args, *args, after=after)
        self.judge(f"{'after' if after else 'before'} {name} {nth}")
        return reached


@needs_fork
@pytest.mark.parametrize("place", ["", "there", "new"])
def test_two_windows_killed_anywhere_end_whole(place: str, tmp_path: Path, sample: Sample) -> None:
    trial = Trial(tmp_path, 2, place=place)
    calls = ["replace", "link", "unlink", "fsync", "write", "splice", "copy_file_range", "mkdir"]
    reached = {
        name: count_until_false(lambda nth, name=name: trial.kill(name, nth, after=nth % 2 == 0))
        for name in sample(calls, 1)
        if hasattr(os, name)
    }
    assert reached.get("fsync", 3) > 2
    # In place, each model is replaced. Else each gets its name in a new directory, which then gets
    # its own: one directory for each window, or one above both.
    replaced = {"": 2, "there": 2 + 2, "new": 2 + 1}[place]
    assert reached.get("replace", replaced) == replaced


@needs_fork
def test_twelve_windows_killed_between_any_two_replacements_end_whole(
    tmp_path: Path, sample: Sample
) -> None:
    trial = Trial(tmp_path, 12, weights=0)
    for nth in sample(range(1, 13), 1):
        assert trial.kill("replace", nth, after=True)
    assert not trial.kill("replace", 13, after=True)


@needs_fork
@pytest.mark.parametrize(("windows", "points"), [(94, (1, 93)), (500, (250,))])
@full
def test_large_sets_killed_between_two_replacements_end_whole(
    windows: int, points: tuple[int, ...], tmp_path: Path
) -> None:
    trial = Trial(tmp_path, windows, weights=0)
    for nth in points:
        assert trial.kill("replace", nth, after=True)


@needs_fork
def test_killed_with_its_processes_at_work_it_ends_whole(tmp_path: Path, sample: Sample) -> None:
    trial = Trial(tmp_path, 24)
    for name, nth in sample((("replace", 1), ("replace", 12), ("replace", 24)), 1):
        assert trial.kill(name, nth, "--jobs", "2", after=True)
    assert not trial.kill("replace", 25, "--jobs", "2", after=True)


# Two at once.

HALF_WAY = """
import os
import sys
from onnxkvrename.cli import main as cli
real = os.replace
def wait(*args, **how):
    os.replace = real
    print("ready", flush=True)
    sys.stdin.readline()
    real(*args, **how)
os.replace = wait
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture
def half_way() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A run that waits for a line when all is written and nothing replaced."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HALF_WAY, *map(str, args), "-q"]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.communicate()


@pytest.mark.parametrize("part", ["", "layer_1_2/Tiny_layer_tmp_1_2.onnx"])
def test_a_second_run_waits_a_while_and_then_changes_nothing(
    part: str,
    tmp_path: Path,
    half_way,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lock, "_MAX_WAIT", 0)
    root = window_sets.write_windows(tmp_path / "windows", 3)
    before = read_directory(root)
    first = half_way(root, "--prefix", "VLLM")
    assert run_quietly(root / part, "--prefix", "OTHER") == 2
    said = capsys.readouterr().err
    assert "is being processed by another run" in said
    assert "wait for it to end" in said
    now = read_directory(root)
    assert {name: now[name] for name in before} == before
    first.communicate("\n")
    assert first.returncode == 0
    assert run_quietly(root, "--prefix", "VLLM", "--check") == 0
    assert read_directory(root).keys() == before.keys()


def test_runs_on_different_models_of_one_directory_wait_for_each_other(
    tmp_path: Path, half_way
) -> None:
    one, other = (tmp_path / f"{name}.onnx" for name in ("one", "other"))
    for path in (one, other):
        path.write_bytes(window_sets.build_window(0, 2).SerializeToString())
    first = half_way(one, "--prefix", "VLLM")
    command = [sys.executable, "-m", "onnxkvrename", str(other), "--prefix", "VLLM", "-q"]
    with subprocess.Popen(command) as second:
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(1)
        first.communicate("\n")
        assert (first.returncode, second.wait()) == (0, 0)
    assert one.read_bytes() == other.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["one.onnx", "other.onnx"]


# All or none.


def test_a_finding_in_one_window_leaves_every_file_as_it_was(tmp_path: Path, snapshot, run) -> None:
    root = window_sets.write_windows(tmp_path, 40)
    bad = root / "layer_31_32" / "Tiny_layer_tmp_31_32.onnx"
    bad.write_bytes(bad.read_bytes().replace(b"past_key.31_Ret", b"past_key.32_Ret"))
    before = snapshot(root)
    outcome = run(root, "--prefix", "VLLM", "--jobs", 2)
    assert outcome.code == 1
    assert f"{bad}: error KV101" in outcome.err
    assert snapshot(root) == before


def test_windows_that_lack_inputs_are_not_to_be_exported_again_in_the_same_way(
    tmp_path: Path, run
) -> None:
    """QEfficient gives windows of several layers the inputs of the first, every time."""
    path = tmp_path / "layer_5_8" / "Tiny_layer_tmp_5_8.onnx"
    window = window_sets.build_window(5, 8)
    kept = [value for value in window.graph.input if not value.name.endswith((".6", ".7"))]
    del window.graph.input[:]
    window.graph.input.extend(kept)
    path.parent.mkdir()
    path.write_bytes(window.SerializeToString())
    outcome = run(path, "--prefix", "VLLM", "--check", "-v")
    findings, fixes = outcome.err.splitlines()[:-1:2], outcome.err.splitlines()[1:-1:2]
    assert [line.split("error ")[1][:5] for line in findings] == [*["KV101"] * 4, "KV304"]
    assert all("layerwise_window_size=1" in fix for fix in fixes)


def test_results_stand_in_natural_order_whatever_finishes_first(tmp_path: Path, run) -> None:
    root = window_sets.write_windows(tmp_path, 40)
    outcome = run(root, "--prefix", "VLLM", "--jobs", 3, "-v")
    *states, _ = outcome.err.splitlines()
    layers = [int(line.split("layer_")[1].split("_")[0]) for line in states]
    assert (outcome.code, layers) == (0, list(range(40)))


def test_a_lost_layer_is_found(tmp_path: Path, run) -> None:
    root = window_sets.write_windows(tmp_path, 4)
    shutil.rmtree(root / "layer_2_3")
    outcome = run(root, "--prefix", "VLLM")
    assert outcome.code == 1
    assert "KV302: comes after layer 2, which no file has" in outcome.err


def test_a_window_that_is_renamed_alone_is_a_warning(tmp_path: Path, run) -> None:
    root = window_sets.write_windows(tmp_path, 2)
    alone = sorted(root.rglob("*.onnx"))[0]
    cases = {
        "-n": ("KV303", 0),
        "-n --strict": ("KV303", 1),
        "-o new.onnx -n": (None, 0),
        "--check": (None, 1),
    }
    found = {}
    for options in cases:
        outcome = run(alone, "--prefix", "VLLM", *options.split())
        found[options] = ("KV303" if "KV303" in outcome.err else None, outcome.code)
    assert found == cases


def test_a_half_renamed_set_fails_a_check_and_is_mended_by_a_rename(tmp_path: Path, run) -> None:
    root = window_sets.write_windows(tmp_path, 4)
    rename(root / "layer_1_2" / "Tiny_layer_tmp_1_2.onnx", "vllmKvCache")
    first = root / "layer_0_1" / "Tiny_layer_tmp_0_1.onnx"
    check = (root, "--target", "vllm-qaic", "--check")
    command = f"onnxkvrename {root} --target vllm-qaic"
    outcome = run(*check)
    assert (outcome.code, outcome.err.count("KV303"), outcome.err.count(command)) == (1, 1, 1)
    assert f"{first}: error KV303: the files of this set carry different tokens" in outcome.err
    outcome = run(*check, "--format", "github")
    annotations = [line for line in outcome.out.splitlines() if line.startswith("::error")]
    assert f"{first},title=KV303::the files of this set carry different" in annotations[0]
    assert [f"`{command}`" in line for line in annotations] == [True] * len(annotations)
    assert json.loads(run(*check, "--format", "json").out)["fix"] == command
    assert run(*split_words(command)[1:]).code == 0
    assert run(*check).code == 0


def test_a_set_with_another_token_has_one_finding_for_it(tmp_path: Path, run) -> None:
    root = window_sets.write_windows(tmp_path, 3)
    rename(root / "layer_1_2" / "Tiny_layer_tmp_1_2.onnx", "OLD")
    for options in ((), ("--check",)):
        outcome = run(root, "--prefix", "VLLM", *options)
        assert (outcome.code, re.findall("error (KV[0-9]+)", outcome.err)) == (1, ["KV202"])
    assert run(root, "--prefix", "VLLM", "--replace").code == 0


# A real export.


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """The windows of a real export, and their merge."""
    found = next(EXPORTS.glob("lw_qwen3moe/plain-*"), None)
    if found is None:
        pytest.skip(f"no real windows to rename: {EXPORTS} is not there")
    shutil.copytree(found, tmp_path / "export", copy_function=shutil.copyfile)
    return tmp_path / "export"


def merged(windows: Path) -> list[str]:
    """The graph inputs and outputs of windows merged as their exporter does, scopes taken off."""
    graphs = []
    for layer, job in enumerate(find_jobs([windows])):
        graph = onnx.load(job.model, load_external_data=False).graph
        graphs.append(compose.add_prefix_graph(graph, f"layer_{layer}/"))
    whole = graphs[0]
    for layer, graph in enumerate(graphs[1:]):
        seam = (f"layer_{layer}/logits", f"layer_{layer + 1}/inputs_embeds")
        whole = compose.merge_graphs(whole, graph, io_map=[seam])
    return [value.name.partition("/")[2] for value in (*whole.input, *whole.output)]


def test_renamed_and_merged_is_merged_and_renamed(exported: Path) -> None:
    windows, whole = exported / "onnx_layerwise_tmp", exported / "merged_0-2.onnx"
    before = merged(windows)
    assert run_quietly(exported, "--prefix", "VLLM") == 0
    graph = onnx.load(whole, load_external_data=False).graph
    ends = {value.name for value in (*graph.input, *graph.output)}
    after = merged(windows)
    assert set(after) == ends
    assert sum("_VLLM" in name for name in after) == 8
    assert [name.replace("_VLLM", "") for name in after] == before
