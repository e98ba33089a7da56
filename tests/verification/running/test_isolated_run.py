"""A graph that loops, fills the memory or crashes onnxruntime ends its own process, and no more."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import models
import onnx.helper
import pytest
from conftest import Run
from models import info, node
from onnx import ModelProto, TensorProto
from tiers import thin

from onnxkvrename import KvRenameError, ModelError, load_rules
from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.records import serialize
from onnxkvrename.rules.kv_model import read_kv_model
from onnxkvrename.verification.running import isolated_run
from onnxkvrename.verification.running.isolated_run import (
    MEMORY_VARIABLE,
    TIME_VARIABLE,
    RunLimitError,
    RunLimits,
    check_retention,
    choose_limits,
    run_isolated,
)
from onnxkvrename.verification.running.retention_loop import (
    RetentionRun,
    RunnableModel,
    run_retention_loop,
)
from onnxkvrename.verification.verify import build_runnable_model

FIXTURES = Path(__file__).resolve().parents[3] / "fixtures"
DECODER = FIXTURES / "plain" / "decoder.onnx"
RULES = load_rules()
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the process so")


def load_model(path: Path) -> RunnableModel:
    return build_runnable_model(read_kv_model(path, RULES), path.stat().st_size)


def run_model(path: Path) -> RetentionRun:
    """Run a model for three steps."""
    return run_isolated(load_model(path), dims={}, steps=3, seed=0)


def build_endless_loop() -> ModelProto:
    """A model whose Loop has no end: its condition is true, and it counts nothing."""
    scalar, flag = ("i", TensorProto.INT64), TensorProto.BOOL
    make_value = onnx.helper.make_tensor_value_info
    body = onnx.helper.make_graph(
        [node("Identity", ["go"], ["go_on"]), node("Identity", ["a"], ["b"])],
        "body",
        [make_value(*scalar, []), make_value("go", flag, []), info("a", 1)],
        [make_value("go_on", flag, []), info("b", 1)],
    )
    model = models.decoder(node("Loop", ["", "yes", "one"], ["looped"], body=body))
    model.graph.initializer.append(onnx.helper.make_tensor("yes", flag, [], [1]))
    model.graph.initializer.append(models.tensor("one", 1.0))
    model.graph.output.append(info("looped", 1))
    return model


def build_large_tensor(elements: int) -> ModelProto:
    """A small model that makes a tensor of so many floats."""
    model = models.decoder(
        node("ConstantOfShape", ["shape"], ["large"]), node("ReduceSum", ["large"], ["sum"])
    )
    shape = onnx.helper.make_tensor("shape", TensorProto.INT64, [1], [elements])
    model.graph.initializer.append(shape)
    model.graph.output.append(info("sum", 1))
    return model


@pytest.fixture(autouse=True)
def run_here() -> None:
    """Leave each run in its own process: that is what is tested here."""


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    return models.saved(build_endless_loop(), tmp_path / "endless.onnx")


def test_a_run_in_its_own_process_gives_what_one_here_gives() -> None:
    pytest.importorskip("onnxruntime")
    model = load_model(DECODER)
    expected = run_retention_loop(model, dims={"ctx_len": 8}, steps=2, seed=7)
    run = run_isolated(model, dims={"ctx_len": 8}, steps=2, seed=7)
    assert run == expected


def test_an_endless_loop_ends_with_the_time(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv(TIME_VARIABLE, "1")
    with pytest.raises(RunLimitError, match="took more than 1 s") as caught:
        run_model(endless)
    assert f"{TIME_VARIABLE}=2 " in str(caught.value.hint)


@only_linux
@pytest.mark.parametrize(
    ("elements", "memory", "limit"),
    thin([(1 << 28, "64", " 64 MiB"), (1 << 40, "", ""), (1 << 29, "1024", " 1,024 MiB")], 1),
)
def test_a_model_that_wants_too_much_memory_is_told_the_limit(
    elements: int, memory: str, limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv(MEMORY_VARIABLE, memory)
    path = models.saved(build_large_tensor(elements), tmp_path / "m.onnx")
    with pytest.raises(RunLimitError, match=f"needs more than{limit}.* of memory") as caught:
        run_model(path)
    assert f"{MEMORY_VARIABLE}=" in str(caught.value.hint)


@only_linux
def test_the_limit_is_for_the_model_not_for_onnxruntime_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.setenv(MEMORY_VARIABLE, "32")
    path = models.saved(build_large_tensor(4), tmp_path / "m.onnx")
    run = run_model(path)
    assert len(run.step_results) == 3


def test_the_limits_grow_with_the_model_and_memory_up_to_what_the_machine_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolated_run, "_read_machine_mebibytes", lambda: 64 << 10)
    assert choose_limits(0) == RunLimits(600, 4 << 10)
    assert choose_limits(10 << 30) == RunLimits(1200, 44 << 10)
    assert choose_limits(20 << 30) == RunLimits(1800, 64 << 10)
    monkeypatch.setattr(isolated_run, "_read_machine_mebibytes", lambda: None)
    assert choose_limits(20 << 30) == RunLimits(1800, 84 << 10)
    monkeypatch.setenv(MEMORY_VARIABLE, "5")
    monkeypatch.setenv(TIME_VARIABLE, "7")
    assert choose_limits(20 << 30) == RunLimits(7, 5)


@pytest.mark.parametrize("variable", [TIME_VARIABLE, MEMORY_VARIABLE])
@pytest.mark.parametrize("text", ["0", "-1", "nan", "8G", "9" * 9, "9" * 5000])
def test_a_limit_that_makes_no_sense_is_refused(
    variable: str, text: str, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    monkeypatch.setenv(variable, text)
    outcome = run("verify", DECODER, "--run")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert variable in outcome.err


def test_a_limit_is_no_difference_from_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not run to its end proves nothing, so it must not be reported as KV118."""

    def run_only_reference(model: RunnableModel, **_: object) -> RetentionRun:
        if model.path != DECODER:
            raise RunLimitError("onnxruntime took more than 1 s")
        return RetentionRun({}, {}, (), (), (), (), (), ())

    monkeypatch.setattr(isolated_run, "run_isolated", run_only_reference)
    reference = load_model(DECODER)
    with pytest.raises(RunLimitError):
        check_retention(reference._replace(path=Path("other.onnx")), reference)


def run_code(code: str, monkeypatch: pytest.MonkeyPatch) -> RetentionRun:
    """Ask a process that runs this code in the place of onnxruntime."""
    monkeypatch.setattr(isolated_run, "_BOOTSTRAP", f"import os, sys\n{code}")
    return run_model(DECODER)


@pytest.mark.skipif(os.name == "nt", reason="no signals")
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"])
def test_a_crash_is_onnxruntime_s_and_not_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = int(getattr(signal, name))
    with pytest.raises(ModelError, match=rf"decoder\.onnx: onnxruntime crashed \({name}\) \("):
        run_code(f"os.kill(os.getpid(), {number})", monkeypatch)


@pytest.mark.skipif(os.name == "nt", reason="no signals")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os.write(2, b'what():  std::bad_alloc'); os.abort()", "more than .* memory"),
        ("raise MemoryError", "more than .* memory"),
        ("os.kill(os.getpid(), 9)", r"killed \(SIGKILL\)"),
    ],
)
def test_a_process_that_was_ended_by_a_limit_says_so(
    code: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RunLimitError, match=message):
        run_code(code, monkeypatch)


RUN: dict[str, Any] = {
    "dims": {"ctx_len": 4},
    "retained_inputs": {"out": "in"},
    "keys": [["", "past_key", "0"]],
    "names": ["out"],
    "steps": [[{"dtype": "tensor(float)", "shape": [1, 2], "digest": "ab"}]],
    "unchanged_outputs": ["out"],
    "sized_outputs": ["out"],
    "faults": [["out", "does not fit"]],
}


@pytest.mark.parametrize(
    "change",
    [
        {"dims": {"ctx_len": "4"}},
        {"dims": []},
        {"retained_inputs": {"out": 1}},
        {"keys": []},
        {"keys": [["", 5]]},
        {"names": []},
        {"names": [None]},
        {"steps": [[]]},
        {"steps": [[{**RUN["steps"][0][0], "digest": 5}]]},
        {"steps": [[{**RUN["steps"][0][0], "shape": [True]}]]},
        {"steps": [[{}]]},
        {"steps": [{}]},
        {"unchanged_outputs": [None]},
        {"sized_outputs": [None]},
        {"faults": [["out"]]},
        {"faults": [["out", ["x"]]]},
        {"faults": None},
    ],
    ids=json.dumps,
)
def test_a_reply_is_read_as_what_it_must_be(change: dict[str, Any]) -> None:
    """The process may be in the hands of the graph by then."""

    def read_reply(run: dict[str, Any]) -> RetentionRun:
        text = json.dumps({"run": run, "error": None}).encode()
        return isolated_run._read_reply(text, load_model(DECODER), RunLimits(1, 1))

    assert serialize(read_reply(RUN)) == RUN
    with pytest.raises(UnreadableTextError):
        read_reply({**RUN, **change})


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ("", "is not JSON"),
        ("null", "expected object"),
        ("{}", "neither run nor error"),
        ('{"run": {}}', "run: .* dims"),
        ('{"error": {"kind": "x"}}', "error.kind: "),
        ("\u00e9", "'ascii' codec"),
        ('{"error": {"kind": "model", "message": "no", "hint": null}}', "^.*decoder.onnx: no$"),
        ('{"error": {"kind": "other", "message": "no", "hint": "x"}}', r"^no \(x\)$"),
    ],
)
def test_a_reply_that_cannot_be_read_is_an_error_on_one_line(
    reply: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KvRenameError, match=message) as caught:
        run_code(f"sys.stdout.buffer.write('{reply}'.encode())", monkeypatch)
    assert "\n" not in str(caught.value)


def test_a_process_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(FIXTURES / "no_such_python"))
    with pytest.raises(KvRenameError, match="no process can be started to run onnxruntime in: "):
        run_model(DECODER)


def test_the_process_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "secret")
    with pytest.raises(KvRenameError, match="secret is None"):
        run_code("sys.exit('secret is %s' % os.environ.get('API_TOKEN'))", monkeypatch)


PROBE = """
import pickle, resource, sys
sys.path[:] = sys.argv[1:]
from onnxkvrename.verification.running import isolated_run
isolated_run.MAX_TEXT_BYTES = 1 << 10
pickle.load(sys.stdin.buffer)
isolated_run._limit_process(isolated_run.RunLimits(5, 64))
failures = []
for size in (1 << 28, 1 << 31):
    try:
        bytearray(size)
    except MemoryError:
        failures.append(f"memory {size >> 20}")
try:
    sys.stdout.write("x" * (1 << 20))
    sys.stdout.flush()
except OSError:
    failures.append("print")
sys.stdout = None
if resource.getrlimit(resource.RLIMIT_CORE) == (0, 0):
    failures.append("core")
sys.exit(", ".join(failures))
"""


@only_linux
def test_the_process_cannot_do_what_a_run_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints no more than what is read; a write to any other file ends where that does."""
    with pytest.raises(KvRenameError, match=r"failed: memory 2048, print, core$"):
        run_code(PROBE, monkeypatch)


# From the command line.


def start(*args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "onnxkvrename", "verify", *map(str, args), "--run"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def list_descendants(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children").read_text("utf-8").split()
    return [pid for child in map(int, children) for pid in (child, *list_descendants(child))]


def wait_for_run(process: subprocess.Popen[str]) -> int:
    """Return the process that runs onnxruntime, once it has used a while of CPU in its graph."""
    ticks = os.sysconf("SC_CLK_TCK")
    while process.poll() is None:
        for pid in list_descendants(process.pid):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_text("utf-8")
                fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
            except OSError:  # gone by now
                continue
            if "serve_request" in command and int(fields[11]) > 0.8 * ticks:
                return pid
        time.sleep(0.05)
    raise AssertionError(process.communicate())


def wait_until_gone(process: int) -> None:
    while Path(f"/proc/{process}").exists():
        state = Path(f"/proc/{process}/stat")
        if not state.exists() or ") Z " in state.read_text("utf-8"):
            return
        time.sleep(0.02)


@only_linux
@pytest.mark.parametrize(
    ("name", "jobs"), thin([("SIGINT", 1), ("SIGINT", 2), ("SIGTERM", 1), ("SIGTERM", 2)], 1)
)
def test_ctrl_c_ends_an_endless_loop_at_once(name: str, jobs: int, endless: Path) -> None:
    pytest.importorskip("onnxruntime")
    other = models.saved(build_endless_loop(), endless.with_name("other.onnx"))
    process = start(endless, other, "--jobs", jobs)
    runner = wait_for_run(process)
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1].startswith("error: interrupted: ")
    wait_until_gone(runner)


@only_linux
def test_a_run_does_not_outlive_a_killed_command(endless: Path) -> None:
    pytest.importorskip("onnxruntime")
    process = start(endless)
    runner = wait_for_run(process)
    process.kill()
    process.communicate()
    wait_until_gone(runner)


def test_the_command_reports_a_limit_in_one_line(
    endless: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = isolated_run._EndedProcess(-9, b"", b"", was_stopped=True)
    monkeypatch.setattr(isolated_run, "_run_process", lambda *_: ended)
    monkeypatch.setenv(TIME_VARIABLE, "1")
    outcome = run("verify", endless, "--run")
    assert outcome.code == 0
    line, _ = outcome.err.splitlines()
    assert (
        "warning KV119: the retention loop could not be run: onnxruntime took more than 1 s" in line
    )
    assert run("verify", endless, "--run", "--strict").code == 1


def test_a_model_with_unusable_external_data_is_not_run(tmp_path: Path, run) -> None:
    """onnxruntime would open whatever the model names."""
    model = models.decoder()
    weight = models.tensor("w", 1.0)
    weight.ClearField("float_data")
    weight.data_location = TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", "../outside.bin"
    model.graph.initializer.append(weight)
    (tmp_path / "in").mkdir()
    (tmp_path / "outside.bin").write_bytes(bytes(4))
    path = models.saved(model, tmp_path / "in" / "m.onnx")
    outcome = run("verify", path, "--run")
    assert outcome.code == 1
    assert "(KV501)" in outcome.err
    outcome = run("verify", DECODER, "--run", "--reference", path)
    assert f"could not be run ({path}): its external data cannot be used (KV501)" in outcome.err
