"""The hand-off of examples/nixl. tests/test_disaggregated.py runs the page that tells of it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nixl_workers
import numpy as np
import pytest
from conftest import FIXTURES
from disaggregated_example import SERVING, device, prompt, prompts, undivided, workers
from nixl_example import (
    EXAMPLE,
    INSTALL,
    kvlayout,
    paging,
    ranks,
    records,
    roles,
    transfer,
    with_nixl,
)
from tiers import thin

from onnxkvrename import rename
from onnxkvrename.cli.main import main

LENGTHS = (1, 3, 8, 9, 12)
NOT_SERVED = "states are not served where blocks are outermost"
Manifest = Callable[..., dict[str, Any]]
ALL_LAYOUTS = pytest.mark.parametrize("name", kvlayout.LAYOUTS)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """A model's manifest, by the command, for prompts of 1 to 24 tokens."""
    there = tmp_path_factory.mktemp("manifests")
    sizes = transfer.write_specializations({**prompts.SIZES, "chunk_ctx_len": 8}, there)

    @functools.cache
    def make(model: Path, block_size: int = 4) -> dict[str, Any]:
        file = there / f"{model.stem} {block_size}.json"
        words = [f"--block-size={block_size}", "--specializations", sizes, "--force", "-o", file]
        lengths = [f"--tokens={length}" for length in range(1, 25)]
        assert main(["manifest", str(model), *map(str, words), *lengths]) == 0
        return json.loads(file.read_text("utf-8"))

    return make


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that serve, with the token that ``compare`` asks for."""
    there = tmp_path_factory.mktemp("models")
    for path in SERVING.iterdir():
        rename(path, "vllmKvCache", output=there / path.name)
    return there


class CopyingAgent:
    """An agent that copies descriptors within one process, in the place of NIXL's."""

    def __init__(self, name: str, memory: np.ndarray) -> None:
        memory[:] = sum(name.encode()) % 256  # noise
        self.memory = memory
        self.peer = self
        self.messages: list[str] = []

    def connect(self, peer: CopyingAgent) -> None:
        """Remember whose memory to read."""
        self.owner = peer

    def read(self, remote: list, local: list, message: str) -> records.Moved:
        """Copy, and leave the message."""
        for (far, size), (near, _) in zip(remote, local, strict=True):
            self.memory[near : near + size] = self.owner.memory[far : far + size]
        self.owner.messages.append(message)
        return records.Moved(len(local), 0, sum(size for _, size in local))

    def list_messages(self) -> list[str]:
        """Return the messages, once."""
        heard, self.messages = self.messages, []
        return heard


@functools.cache
def pair(
    first: Path, second: Path, layout: kvlayout.KvLayout
) -> tuple[roles.Prefill, roles.Decode]:
    """Both roles, without NIXL."""
    owner = roles.Prefill(records.Setup(str(first), prompts.SIZES, layout, seed=1), CopyingAgent)
    setup = records.Setup(str(second), prompts.SIZES, layout, seed=2)
    return owner, roles.Decode(setup, CopyingAgent, owner.agent.peer)


def copied(first: Path, second: Path, layout: kvlayout.KvLayout, length: int) -> records.Taken:
    """Hand over without NIXL."""
    owner, reader = pair(first, second, layout)
    return reader.run(owner.run(prompts.Drawn(*prompt(first, length))))


# What the manifest says, and what follows from vLLM's rules.


@ALL_LAYOUTS
@pytest.mark.parametrize("block_size", thin([1, 2, 4, 16], 2))
@pytest.mark.parametrize(
    "model",
    ["decoder", "mla", "mla_window", *(f"serving/{name}" for name in ("hybrid", "vlm", "window"))],
)
def test_the_manifest_counts_what_is_posted(
    manifest: Manifest, model: str, block_size: int, name: str
) -> None:
    if model == "serving/hybrid" and name[0] == "B":
        pytest.skip(NOT_SERVED)
    said = manifest(FIXTURES / "plain" / f"{model}.onnx", block_size)
    layout = kvlayout.read_layout(said, name, 64)
    for length in range(1, 25):
        figure = kvlayout.read_figure(said, name, length)
        held = layout.count_held_tokens(length)
        counts = tuple(group.count_read_blocks(held) for group in layout.groups)
        posted = layout.list_descriptors(tuple(tuple(range(count)) for count in counts))
        assert figure.blocks == counts
        assert len(layout.regions) == figure.regions
        assert len(posted) == figure.descriptors
        assert sum(size for _, size in posted) == figure.size


@pytest.mark.parametrize(
    ("pieces", "runs"),
    [
        ([(0, 8), (8, 8), (16, 8)], 1),
        ([(0, 8), (16, 8), (32, 8)], 3),
        ([(16, 8), (8, 8), (0, 8)], 3),
        ([(0, 8), (8, 8), (16, 4), (20, 4), (24, 2)], 3),
    ],
)
def test_neighbours_of_one_size_are_merged(pieces: list[kvlayout.Descriptor], runs: int) -> None:
    assert kvlayout.count_runs(pieces, pieces) == runs
    apart = [(3 * start, size) for start, size in pieces]
    assert kvlayout.count_runs(pieces, apart) == kvlayout.count_runs(apart, pieces) == len(pieces)


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, 4), (2, 8)), ((2, 4), (1, 4)), ((1, 2), (1, 8)), ((2, 4), (2, 16))],
)
def test_compare_counts_what_each_rank_of_decode_posts(
    first: tuple[int, int], second: tuple[int, int], tmp_path: Path
) -> None:
    sizes = str(transfer.write_specializations(prompts.SIZES, tmp_path))
    remote, local = (
        kvlayout.read_layout(ranks.describe(*side, sizes), "LBHNC", 64) for side in (first, second)
    )
    read, blocks = (
        (tuple(range(1, 1 + layout.groups[0].count_read_blocks(ranks.LENGTH))),)
        for layout in (remote, local)
    )
    for rank, predicted in enumerate(ranks.predict(first, second)):
        sources = ranks.list_sources(rank, local, remote)
        pairs = [
            pair
            for slot in range(len(sources))
            for pair in ranks.pair_descriptors(local, remote, rank, blocks, read, slot)
        ]
        assert all(far[1] == near[1] for far, near in pairs)
        posted = ranks.Reads(len(sources), len(pairs), sum(near[1] for _, near in pairs))
        assert posted == predicted


# Pages.


@ALL_LAYOUTS
@pytest.mark.parametrize("model", thin(["decoder", "window", "window_whole", "vlm", "hybrid"], 1))
def test_blocks_hold_all_that_decode_needs(manifest: Manifest, model: str, name: str) -> None:
    path = SERVING / f"{model}.onnx"
    if model == "hybrid" and name[0] == "B":
        pytest.skip(NOT_SERVED)
    for block_size in (1, 4, 16):
        layout = kvlayout.read_layout(manifest(path, block_size), name, 64)
        for length in LENGTHS:
            assert copied(path, path, layout, length).tokens == undivided(path, length)


def test_blocks_that_are_not_free_are_not_taken(manifest: Manifest) -> None:
    pool = paging.Pool(kvlayout.read_layout(manifest(SERVING / "decoder.onnx"), "LBHNC", 8))
    assert [pool.take([3]), pool.take([1, 2])] == [((1, 2, 3),), ((4,), (5, 6))]
    with pytest.raises(ValueError, match="2 blocks are needed, and 1 are free"):
        pool.take([2])
    pool.give_back(((1, 2, 3),))
    assert pool.take([3]) == ((7, 1, 2),)


# A mismatch.


def test_different_kv_layouts_are_stopped_before_anything_starts(
    models: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "Worker", None)
    paths = [models / "window_whole.onnx", models / "window.onnx"]
    setting = transfer.Setting(*paths, prompts.SIZES)
    digests = [manifest(path)["kv_layout_sha256"][:12] for path in paths]
    with pytest.raises(transfer.Refused, match=f"is {digests[0]} .* and {digests[1]} in the other"):
        transfer.serve(setting, [9], [manifest(path) for path in paths])


@pytest.mark.parametrize("first", thin(["window_whole", "window"], 2))
@pytest.mark.parametrize("second", ["window_whole", "window"])
def test_what_compare_predicts_is_what_happens_when_it_is_forced(
    models: Path, manifest: Manifest, first: str, second: str, run
) -> None:
    paths = [models / f"{name}.onnx" for name in (first, second)]
    symbols = ["ctx_len"] + ["sliding_window"] * ("window" in (first, second))
    dims = [f"--dim={symbol}={prompts.SIZES[symbol]}" for symbol in symbols]
    verdict = json.loads(run("compare", *paths, *dims, "--format", "json").out)["verdict"]
    layout = kvlayout.read_layout(manifest(paths[1]), "LBHNC", 64)
    for length in range(1, 13):
        if _within(verdict["refused"], length):
            with pytest.raises(ValueError, match="it keeps 8 tokens"):
                copied(*paths, layout, length)
        else:
            assert _is_right(*paths, layout, length) != _within(verdict["corrupt"], length), length


def _is_right(first: Path, second: Path, layout: kvlayout.KvLayout, length: int) -> bool:
    """Return whether decode's buffers are right; wrong ones may still give the right tokens."""
    taken = copied(first, second, layout, length)
    tokens = undivided(second, length)
    session = device(second, "undivided")
    buffers = pair(first, second, layout)[1].device.buffers
    right = all(np.allclose(buffers[name], session.buffers[name]) for name in buffers)
    assert taken.tokens == tokens or not right
    return right


def _within(ranges: list[dict[str, int]], length: int) -> bool:
    return any(found["first"] <= length <= found["last"] for found in ranges)


# NIXL.


@with_nixl
@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ("decoder", {"layout": "BLHNC", "block_size": 2}),
        ("hybrid", {"layout": "LBNHC", "scattered": True}),
        ("window", {"scattered": True, "block_size": 2}),
    ],
)
def test_two_processes_give_the_tokens_of_the_undivided_model(
    manifest: Manifest, model: str, setting: dict[str, Any]
) -> None:
    path = SERVING / f"{model}.onnx"
    said = manifest(path, setting.get("block_size", 4))
    setup = transfer.Setting(path, path, prompts.SIZES, **setting)
    # More prompts than the pool has blocks for: those that were read are free again.
    for served in transfer.serve(setup, LENGTHS * 3, [said, said]):
        assert served.taken.tokens == undivided(path, len(served.prompt))
        assert served.is_as_counted
        assert (served.taken.moved.posted, served.taken.moved.size) != (0, 0)


@pytest.fixture(scope="module")
def watched(manifest: Manifest):
    """A process that hands over by NIXL within itself, and the layout."""
    path = SERVING / "window.onnx"
    layout = kvlayout.read_layout(manifest(path, 2), "LBHNC", 64)
    with workers.Worker(
        "watched", nixl_workers.watch, records.Setup(str(path), prompts.SIZES, layout, seed=3)
    ) as worker:
        yield worker, layout


@with_nixl
@pytest.mark.parametrize("length", LENGTHS)
def test_exactly_the_selected_blocks_are_read(watched, length: int) -> None:
    worker, layout = watched
    seen = worker.ask(length)
    expected = seen.before.copy()
    pieces = map(layout.list_descriptors, (seen.remote_blocks, seen.local_blocks))
    for (far, size), (near, _) in zip(*pieces, strict=True):
        expected[near : near + size] = seen.remote[far : far + size]
    assert (seen.after == expected).all()
    assert not (seen.before == expected).all()
    assert seen.tokens == undivided(SERVING / "window.onnx", length)


@with_nixl
def test_nixl_listens_on_loopback_only(watched) -> None:
    worker, _ = watched
    addresses = worker.ask(None)
    loopback = int.from_bytes(bytes([127, 0, 0, 1]), sys.byteorder)
    assert set(addresses) == {f"{loopback:08X}"}


@with_nixl
def test_ranks_that_differ_give_the_tokens_of_the_undivided_model() -> None:
    done = subprocess.run([sys.executable, EXAMPLE / "ranks.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  the same\n") == len(ranks.PAIRS)


@with_nixl
def test_decode_says_that_prefill_is_gone(manifest: Manifest) -> None:
    path = SERVING / "decoder.onnx"
    layout = kvlayout.read_layout(manifest(path), "LBHNC", 64)
    setup = records.Setup(str(path), prompts.SIZES, layout)
    with (
        workers.Worker("prefill", roles.prefill, setup) as first,
        workers.Worker("decode", roles.decode, setup) as second,
    ):
        second.ask(first.ask("who are you?"))
        handed = first.ask(prompts.Drawn(*prompt(path, 9)))
        first.process.kill()
        first.process.join()
        with pytest.raises(workers.WorkerError, match="decode refuses: NIXL_ERR_REMOTE_DISCONN"):
            second.ask(handed)


def test_without_nixl_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "No module named 'nixl'"
    (tmp_path / "nixl.py").write_text(f'raise ModuleNotFoundError("{said}", name="nixl")', "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE / "serve.py"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == f"serve.py: {said}: pip install . onnxruntime and {INSTALL}\n"
