"""The hand-off of examples/disaggregated, and docs/disaggregated.md with all its blocks."""

from __future__ import annotations

import ast
import itertools
import json
import multiprocessing
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import NamedTuple

import ci_machine
import failing_workers
import numpy as np
import onnx
import pytest
from ci_machine import ROOT
from disaggregated_example import (
    EXAMPLE,
    EXAMPLES,
    SERVING,
    Device,
    Prompt,
    decode,
    device,
    kvbuffers,
    prefill,
    prompt,
    prompts,
    serving,
    undivided,
    workers,
)
from tiers import full, thin

from onnxkvrename import rename

PAGE = (ROOT / "docs" / "disaggregated.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"<!-- (\w+) -->\n```sh\n(.*?)```\n<!-- /\1 -->", PAGE, re.DOTALL))
TOLD = re.findall(
    r"<!-- told (\w+): (.*?) -->\n```console\n(.*?)```\n<!-- /told -->", PAGE, re.DOTALL
)
LENGTHS = (1, 3, 8, 9, 12)
MODELS = [("decoder", False), ("hybrid", True), ("vlm", False)]
Meddle = Callable[[memoryview, list[kvbuffers.Slot]], None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that serve, with the consumer's token."""
    there = tmp_path_factory.mktemp("models")
    for path in SERVING.iterdir():
        rename(path, kvbuffers.PATTERN, output=there / path.name)
    return there


def handed(
    first: Path, second: Path, length: int, whole: bool = False, meddle: Meddle | None = None
) -> list[int]:
    """The tokens of a hand-off without processes, perhaps with somebody at the memory."""
    name = f"kv_{secrets.token_hex(8)}"
    tokens, features = prompt(first, length)
    try:
        asked = Prompt(tokens, features, name)
        sent = prefill.prefill(device(first, "prefill"), asked, whole)
        if meddle:
            memory = SharedMemory(name)
            meddle(memory.buf, sent.slots)
            memory.close()
        decode.take(device(second, "decode"), sent.result, whole)
    finally:
        serving.release(name)
    return device(second, "decode").generate(sent.result.first_token, length, prompts.COUNT)


def gone(name: str) -> bool:
    """Return whether no shared memory has this name."""
    try:
        SharedMemory(name).close()
    except FileNotFoundError:
        return True
    return False


# The rules of the consumer.


def test_the_pattern_selects_and_layers_are_counted_not_spelt() -> None:
    names = [
        "past_value.2_vllmKvCache",
        "past_key.10_vllmKvCache",
        "vision_embeds",
        "past_key.2_vllmKvCache",
        "past_key.3_VLLMKVCACHE",
    ]
    assert kvbuffers.selected(names) == [
        "past_key.2_vllmKvCache",
        "past_value.2_vllmKvCache",
        "past_key.10_vllmKvCache",
    ]


@pytest.mark.parametrize(
    ("tokens", "whole", "places"),
    [
        (3, False, [(0, 96), (96, 48), (144, 96)]),
        (9, False, [(0, 96), (96, 144), (240, 128)]),
        (3, True, [(0, 96), (96, 512), (608, 128)]),
    ],
)
def test_a_buffer_lies_behind_those_before_it(
    tokens: int, whole: bool, places: list[tuple[int, int]]
) -> None:
    inputs = {
        "recurrent_state.1_vllmKvCache": np.zeros((2, 2, 4, 4), np.float32),
        "past_key.0_vllmKvCache": np.zeros((2, 2, 32, 4), np.float16),
        "conv_state.0_vllmKvCache": np.zeros((2, 8, 3), np.float32),
    }
    found = kvbuffers.slots(inputs, tokens, whole)
    assert [(slot.offset, slot.size) for slot in found] == places
    assert [slot.name[:4] for slot in found] == ["conv", "past", "recu"]


# Tokens.


@pytest.mark.parametrize(("model", "whole"), thin(MODELS, 1))
def test_two_workers_give_the_tokens_of_the_undivided_model(
    models: Path, model: str, whole: bool
) -> None:
    path = models / f"{model}.onnx"
    for served in serving.serve(serving.Setting(path, path, prompts.SIZES, whole), LENGTHS):
        assert served.tokens == undivided(SERVING / path.name, len(served.prompt))
        assert len(set(served.tokens)) > 1
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("model", "whole"), thin(MODELS, 1))
def test_a_wrong_bit_in_any_buffer_changes_the_tokens(
    models: Path, model: str, whole: bool
) -> None:
    path = models / f"{model}.onnx"
    tokens = undivided(path, 8)
    assert handed(path, path, 8, whole) == tokens
    for at, slot in enumerate(kvbuffers.slots(Device(str(path), prompts.SIZES).buffers, 8, whole)):
        elements = [slot.offset + 4 * n for n in np.flatnonzero(_written(slot, 8))]
        changed = [handed(path, path, 8, whole, _flip(e)) != tokens for e in elements[::5]]
        assert sum(changed) > len(changed) / 4, (at, slot.name)


def _written(slot: kvbuffers.Slot, tokens: int) -> np.ndarray:
    """Return a mask of the positions that a prompt fills; a cache moved in full is not full."""
    there = np.ones(slot.shape, bool)
    if slot.name.startswith("past_"):
        there[:, :, tokens:] = False
    return there


def _flip(offset: int) -> Meddle:
    """Turn the highest bit of a float's exponent."""

    def meddle(memory: memoryview, slots: list[kvbuffers.Slot]) -> None:
        memory[offset + 3 if sys.byteorder == "little" else offset] ^= 0x40

    return meddle


@pytest.mark.parametrize("swapped", [(0, 1), (0, 2), (1, 3)])
def test_buffers_in_another_order_change_the_tokens(models: Path, swapped: tuple[int, int]) -> None:
    def meddle(memory: memoryview, slots: list[kvbuffers.Slot]) -> None:
        one, other = (slots[at].view(memory) for at in swapped)
        one[:], other[:] = other.copy(), one.copy()

    path = models / "decoder.onnx"
    assert handed(path, path, 9, meddle=meddle) != undivided(path, 9)


@full
def test_vision_stays_with_prefill(models: Path) -> None:
    path = models / "vlm.onnx"
    (served,) = serving.serve(serving.Setting(path, path, prompts.SIZES), [9])
    assert prompts.IMAGE_TOKEN in served.prompt
    named = [slot.name for slot in (*served.sent.slots, *served.taken.slots)]
    assert len(named) == 8
    assert all(kvbuffers.PATTERN in name for name in named)
    assert {"vision_embeds", "deepstack_features", "image_idx"} <= set(served.sent.buffers)


def test_the_image_is_in_what_the_kv_buffers_hold(models: Path) -> None:
    path = models / "vlm.onnx"
    tokens, _ = prompt(path, 9)
    unseeing = Device(str(path), prompts.SIZES)
    blind = unseeing.generate(unseeing.run(tokens, 0), 9, prompts.COUNT)
    assert handed(path, path, 9) == undivided(path, 9) != blind


@pytest.mark.parametrize("model", ["decoder", "hybrid", "vlm"])
def test_without_the_token_nothing_is_selected_and_decode_starts_empty(model: str) -> None:
    path = SERVING / f"{model}.onnx"
    assert kvbuffers.slots(device(path, "decode").buffers, 9, whole=True) == []
    tokens = handed(path, path, 9)
    assert tokens == Device(str(path), prompts.SIZES).generate(tokens[0], 9, prompts.COUNT)
    assert tokens != undivided(path, 9)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_state_is_cut_by_a_prompt_shorter_than_it(models: Path, length: int) -> None:
    path = models / "hybrid.onnx"
    assert (handed(path, path, length) == undivided(path, length)) == (length >= 4)
    assert handed(path, path, length, whole=True) == undivided(path, length)


# What compare foretells.


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("window_whole", "window"),
        ("window", "window_whole"),
        ("window", "window"),
        ("window_whole", "window_whole"),
    ],
)
@pytest.mark.parametrize("whole", thin([False, True], 1))
def test_what_compare_foretells_is_what_happens(
    models: Path, first: str, second: str, whole: bool, run
) -> None:
    paths = [models / f"{name}.onnx" for name in (first, second)]
    dims = [f"--dim={symbol}={prompts.SIZES[symbol]}" for symbol in ("ctx_len", "sliding_window")]
    if first == second:
        dims = dims[: 1 + ("whole" not in first)]
    full = ["--full-transfer"] if whole else []
    verdict = json.loads(run("compare", *paths, *dims, *full, "--format", "json").out)["verdict"]
    for length in range(1, 13):
        assert undivided(paths[0], length) == undivided(paths[1], length)
        if _within(verdict["refused"], length):
            if sys.platform == "linux":  # elsewhere memory comes in whole pages
                with pytest.raises(ValueError, match="the memory has"):
                    handed(*paths, length, whole)
        else:
            right = handed(*paths, length, whole) == undivided(paths[1], length)
            assert right != _within(verdict["corrupt"], length), length


def _within(ranges: list[dict[str, int]], length: int) -> bool:
    return any(found["first"] <= length <= found["last"] for found in ranges)


# Nothing is left behind.


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the shared memory, known beforehand."""
    token = secrets.token_hex(8)
    monkeypatch.setattr(serving.secrets, "token_hex", lambda size: token)
    return f"kv_{token}"


@full
def test_shared_memory_is_given_back(models: Path, name: str) -> None:
    path = models / "decoder.onnx"
    serving.serve(serving.Setting(path, path, prompts.SIZES), [9, 3])
    assert gone(name)


def test_a_worker_that_dies_is_told_and_leaves_nothing_behind(
    models: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "work", failing_workers.die_after_taking_memory)
    path = models / "decoder.onnx"
    with pytest.raises(workers.WorkerError, match=r"prefill died \(exit code 3\)"):
        serving.serve(serving.Setting(path, path, prompts.SIZES), [9])
    assert gone(name)
    assert multiprocessing.active_children() == []


def test_a_worker_that_does_not_answer_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_PATIENCE", 0)
    with workers.Worker("prefill", failing_workers.take_memory_and_wait) as worker:
        with pytest.raises(workers.WorkerError, match="prefill did not answer"):
            worker.ask(f"kv_{secrets.token_hex(8)}")
        assert worker.process.exitcode is not None


@pytest.mark.skipif(sys.platform != "linux", reason="memory comes in whole pages")
@full
def test_decode_that_finds_too_little_refuses_and_leaves_nothing_behind(
    models: Path, name: str
) -> None:
    setting = serving.Setting(models / "window.onnx", models / "window_whole.onnx", prompts.SIZES)
    with pytest.raises(workers.WorkerError, match="decode refuses: the memory has 1664 bytes"):
        serving.serve(setting, [9])
    assert gone(name)
    assert multiprocessing.active_children() == []


@full
def test_workers_end_with_the_process_that_asks_them() -> None:
    name = f"kv_{secrets.token_hex(8)}"
    script = (
        "import os, signal, sys; sys.path[:0] = sys.argv[1:3]\n"
        "from disaggregated_example import workers\n"
        "from failing_workers import take_memory_and_wait\n"
        "worker = workers.Worker('prefill', take_memory_and_wait)\n"
        "worker.ask(sys.argv[3])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    tests = str(Path(__file__).parent)
    # Whoever lives on holds stdout open, and this would not come back.
    done = subprocess.run(
        [sys.executable, "-c", script, tests, str(EXAMPLE), name],
        stdout=subprocess.PIPE,
        timeout=60,
    )
    assert done.returncode == -9
    assert gone(name)


@full
def test_memory_that_is_made_too_late_is_given_back(
    models: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "work", failing_workers.take_memory_too_late)
    path = models / "decoder.onnx"
    with pytest.raises(workers.WorkerError, match="prefill refuses: not now"):
        serving.serve(serving.Setting(path, path, prompts.SIZES), [9])
    assert gone(name)


@full
def test_a_worker_that_has_ended_is_heard() -> None:
    with workers.Worker("prefill", failing_workers.refuse_at_once) as worker:
        worker.process.join()
        with pytest.raises(workers.WorkerError, match="prefill refuses: not at all"):
            worker.ask("anything")


@full
def test_a_worker_does_not_hear_an_interrupt_even_while_it_starts() -> None:
    name = f"kv_{secrets.token_hex(8)}"
    try:
        with workers.Worker("prefill", failing_workers.take_memory_and_wait) as worker:
            os.kill(worker.process.pid, signal.SIGINT)
            assert worker.ask(name) == "made"
        assert worker.process.exitcode == 0
    finally:
        serving.release(name)


class Ended(NamedTuple):
    """The result of a run of serve.py: the exit code and stderr."""

    code: int
    said: str


def served(*words: object) -> Ended:
    """Run serve.py to its end."""
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE / "serve.py", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Ended(done.returncode, done.stderr)


@pytest.fixture
def shared() -> Iterator[None]:
    """No shared memory of the example's is left that was not there."""

    def listed() -> set[Path]:
        return set(Path("/dev/shm").glob("kv_*")) if sys.platform == "linux" else set()

    there = listed()
    yield
    assert listed() <= there


def begun() -> subprocess.Popen[str]:
    """The story, at its first words, in a group of processes of its own."""
    story = subprocess.Popen(
        [sys.executable, str(EXAMPLE / "serve.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={name: said for name, said in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )
    assert story.stdout is not None
    assert story.stdout.readline()
    return story


@pytest.mark.parametrize(
    ("call", "number"),
    thin(itertools.product(["kill", "killpg"], [signal.SIGINT, signal.SIGTERM]), 1),
)
def test_a_story_that_is_stopped_ends_without_a_word(
    call: str, number: signal.Signals, shared: None
) -> None:
    send = getattr(os, call)
    story = begun()
    send(story.pid, number)
    # Whoever lives on holds stderr open, and this would not come back.
    _, said = story.communicate(timeout=60)
    assert (story.returncode, said) == (128 + number, "")


@full
def test_a_story_that_nobody_hears_out_ends_with_one_line(shared: None) -> None:
    story = begun()
    assert story.stdout is not None
    assert story.stderr is not None
    story.stdout.close()
    with story.stderr:
        assert story.stderr.read() == "serve.py: stopped: Broken pipe\n"
    assert story.wait(60) == 2


@pytest.mark.parametrize(
    ("library", "model"),
    thin(itertools.product(["onnxruntime", "numpy"], [[], [SERVING / "decoder.onnx"]]), 2),
)
def test_without_the_extra_one_line_says_what_to_install(
    library: str, model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"No module named {library!r}"
    (tmp_path / f"{library}.py").write_text(
        f'raise ModuleNotFoundError("{said}", name={library!r})', "utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert served(*model) == (2, f"serve.py: {said}: pip install . onnxruntime\n")


@pytest.mark.parametrize("other", thin(["prefill", "decode", "both"], 1))
def test_a_file_that_is_no_model_is_refused_in_one_line(
    models: Path, other: str, tmp_path: Path, shared: None
) -> None:
    text = tmp_path / "text.onnx"
    text.write_text("no model\n", "utf-8")
    good = models / "decoder.onnx"
    pair = {"prefill": (text, good), "decode": (good, text), "both": (text,)}[other]
    code, said = served(*pair)
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"serve.py: {text} cannot be served: ")


@full
def test_an_export_that_gathers_beyond_its_cache_is_refused_in_one_line(
    models: Path, tmp_path: Path
) -> None:
    """As QEfficient's exports do for positions that are not there; a device gives zeros."""
    model = onnx.load(models / "decoder.onnx")
    beyond = onnx.numpy_helper.from_array(np.array([[2**31 - 1]]), "beyond")
    cache = onnx.numpy_helper.from_array(np.zeros(2, np.float32), "cache")
    model.graph.initializer.extend([beyond, cache])
    model.graph.node.append(onnx.helper.make_node("GatherND", ["cache", "beyond"], ["gathered"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("gathered", 1, [1]))
    path = tmp_path / "qefficient.onnx"
    onnx.save(model, path)
    code, said = served(path)
    assert (code, said.count("\n")) == (2, 1)
    assert "onnxruntime cannot run this export: its CtxGather reads index 2147483647" in said


def test_a_model_with_a_dimension_of_unknown_size_is_refused(models: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^no size for batch_size, ctx_len: pass --dim SYMBOL=SIZE$"
    ):
        Device(str(models / "decoder.onnx"), {"sliding_window": 8})


@pytest.mark.parametrize(
    ("words", "reason"),
    thin(
        [
            (["--prompt-length=0"], "'0' is not a number of at least 1"),
            (["--prompt-length=many"], "'many' is not a number of at least 1"),
            (["--dim=ctx_len"], "'ctx_len' is not a number of at least 1"),
            (["--dim=ctx_len=0"], "'0' is not a number of at least 1"),
            (
                ["--dim=foo=1"],
                "--dim foo: no buffer has this dimension; they have batch_size, ctx_len",
            ),
            (["--dim=sliding_window=8"], "--dim sliding_window: no buffer has this dimension"),
            (
                ["--prompt-length=40", "--dim=ctx_len=28"],
                "do not fit into the context (ctx_len=28)",
            ),
            (
                ["--prompt-length=17", "--dim=ctx_len=28"],
                "do not fit into the context (ctx_len=28)",
            ),
        ],
        4,
    ),
)
def test_what_makes_no_sense_is_refused(models: Path, words: list[str], reason: str) -> None:
    code, said = served(models / "decoder.onnx", *words)
    assert code == 2
    assert reason in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        (["decoder"], ["--prompt-length=16", "--dim=ctx_len=28"]),
        (["window_whole", "window"], ["--prompt-length=1", "--dim=sliding_window=4"]),
    ],
)
@full
def test_what_just_makes_sense_is_done(models: Path, pair: list[str], words: list[str]) -> None:
    assert served(*(models / f"{name}.onnx" for name in pair), *words) == (0, "")


def test_options_without_a_model_are_refused() -> None:
    code, said = served("--prompt-length", "8")
    assert code == 2
    assert said.endswith("error: options require a model: serve.py PREFILL [DECODE]\n")


# The example is a witness of its own, and the page tells what it does.


def test_the_examples_import_nothing_from_onnxkvrename() -> None:
    for path in EXAMPLES.glob("disaggregated/*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(name.startswith(("onnx.", "onnxkvrename")) for name in names)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> ci_machine.Machine:
    """A machine whose working directory has the repository's folders."""
    made = ci_machine.build_machine(tmp_path_factory.mktemp("machine"))
    for folder in ("examples", "fixtures"):
        (made.workspace / folder).symlink_to(ROOT / folder)
    (made.temp / "scratch").mkdir()
    return made


def says(machine: ci_machine.Machine, name: str) -> str:
    """Return the output of a block; it must succeed, be silent on stderr and leave no file."""
    scratch = machine.temp / "scratch"
    done = machine.run_script(BLOCKS[name], TMPDIR=str(scratch))
    assert (done.returncode, list(scratch.iterdir())) == (0, []), done.stderr
    assert "serve.py" not in done.stderr
    assert "leaked" not in done.stderr
    return done.stdout


def check_story(said: str, example: str) -> None:
    """The parts of a story that the page shows must be as it shows them, and in its order."""
    parts = re.split(
        r"^== (.*)\n\n", said.removesuffix("\nAll parts end as predicted.\n"), flags=re.M
    )
    assert parts.pop(0) == "\n"
    titles, texts = parts[::2], [text.rstrip("\n") + "\n" for text in parts[1::2]]
    told = [(title, text) for name, title, text in TOLD if name == example]
    assert told
    assert [part for part in zip(titles, texts, strict=True) if part[0] in dict(told)] == told


@full
def test_the_story_is_as_the_page_tells_it(machine: ci_machine.Machine) -> None:
    check_story(says(machine, "run"), "disaggregated")


def test_models_of_ones_own(machine: ci_machine.Machine) -> None:
    said = says(machine, "own")
    assert "1x2x28x4  past_key.0_vllmKvCache" in said
    assert said.endswith("  the same\n")


@pytest.mark.parametrize(("model", "code"), thin([("hybrid", 1), ("nowhere", 2)], 1))
def test_the_exit_code_tells(models: Path, model: str, code: int) -> None:
    command = [sys.executable, EXAMPLE / "serve.py", models / f"{model}.onnx"]
    done = subprocess.run([*command, "--prompt-length", "3"], capture_output=True, text=True)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_every_block_is_run_here() -> None:
    own = Path(__file__).read_text("utf-8")
    run_here = set(re.findall(r'says\(\w+, "(\w+)"', own))
    assert run_here == BLOCKS.keys()
    assert PAGE.count("```") == 2 * (len(BLOCKS) + len(TOLD))


def test_the_picture_is_what_its_script_draws() -> None:
    command = [sys.executable, EXAMPLE / "picture.py", "--check"]
    assert subprocess.run(command).returncode == 0


@pytest.mark.parametrize("path", [ROOT / "docs" / "disaggregated.md", EXAMPLES / "README.md"])
def test_every_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https:)([^)#]+)(?:#[\w-]+)?\)", path.read_text("utf-8"))
    assert links
    assert [link for link in links if not os.path.exists(path.parent / link)] == []


def test_the_readme_of_the_examples_knows_every_file() -> None:
    listed = re.findall(
        r"^\| `(\w+/\w+\.py)` \|", (EXAMPLES / "README.md").read_text("utf-8"), re.M
    )
    assert sorted(listed) == sorted(
        path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("*/*.py")
    )
