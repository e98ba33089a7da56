from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import models
import numpy as np
import onnx
import pytest
from conftest import FIXTURES
from models import KEY, KEY_OUT, VALUE, VALUE_OUT, info, node
from onnx import ModelProto, NodeProto, TensorProto
from onnx.helper import make_tensor
from tiers import full, thin

from onnxkvrename import Finding, ModelError, load_rules
from onnxkvrename.rules.kv_model import read_kv_model
from onnxkvrename.verification.running.isolated_run import check_retention
from onnxkvrename.verification.running.ort_session import (
    OutputResult,
    ValueKey,
    build_feed,
    load_session,
)
from onnxkvrename.verification.running.retention_loop import (
    DEFAULT_STEPS,
    RetentionRun,
    RunnableModel,
    compare_runs,
    run_retention_loop,
)
from onnxkvrename.verification.verify import build_runnable_model

pytest.importorskip("onnxruntime")
EXPORTS = Path(__file__).resolve().parents[4] / "shared" / "exports"
RULES = load_rules()


def load_model(path: Path) -> RunnableModel:
    """A model with the pairs that the built-in rules find in it."""
    return build_runnable_model(read_kv_model(path, RULES), path.stat().st_size)


def save_model(model: ModelProto, path: Path) -> RunnableModel:
    return load_model(models.saved(model, path))


def format_findings(findings: tuple[Finding, ...]) -> list[str]:
    return [f"{f.code} {f.name} {f.message}" for f in findings]


# The loop.


def build_counter(*nodes: NodeProto) -> ModelProto:
    """A buffer that counts the steps, and one that never changes."""
    inputs = [info(name, 1, 2, dtype=TensorProto.INT64) for name in (KEY, VALUE)]
    outputs = [info(name, 1, 2, dtype=TensorProto.INT64) for name in (KEY_OUT, VALUE_OUT)]
    count = nodes or (node("Add", [KEY, "one"], [KEY_OUT]),)
    keep = node("Identity", [VALUE], [VALUE_OUT])
    one = make_tensor("one", TensorProto.INT64, [1], [1])
    graph = onnx.helper.make_graph([*count, keep], "main", inputs, outputs, [one])
    opsets = [onnx.helper.make_opsetid("", 18)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_what_a_step_retains_is_fed_to_the_next(tmp_path: Path) -> None:
    model = save_model(build_counter(), tmp_path / "m.onnx")
    key: ValueKey = ("", "past_key", "0")
    session = load_session(model.path, {KEY: key}, {})
    first = build_feed(session, session.inputs[0], 0, seed=5, cache_length=1)
    run = run_retention_loop(model, steps=4, seed=5)
    assert [step[key] for step in run.step_results] == [
        OutputResult(
            "tensor(int64)", (1, 2), hashlib.sha256((first.numpy() + n).tobytes()).hexdigest()
        )
        for n in (1, 2, 3, 4)
    ]


def test_a_buffer_that_never_changes_is_told(tmp_path: Path) -> None:
    run = run_retention_loop(save_model(build_counter(), tmp_path / "m.onnx"))
    assert run.retained_inputs == {KEY_OUT: KEY, VALUE_OUT: VALUE}
    assert run.unchanged_outputs == (VALUE_OUT,)
    assert run.findings == ()


def test_vision_state_is_fed_back_too() -> None:
    run = run_retention_loop(load_model(FIXTURES / "plain" / "vlm_dual" / "decoder.onnx"))
    others = {
        name: into for name, into in run.retained_inputs.items() if not into.startswith("past_")
    }
    assert others == {
        "vision_embeds_RetainedState": "vision_embeds",
        "deepstack_features_RetainedState": "deepstack_features",
        "image_idx_output": "image_idx",
    }


def test_an_output_that_only_sounds_retained_is_not_fed_back(tmp_path: Path) -> None:
    model = models.decoder(
        node("Not", ["flag"], ["x_output"]), node("Not", ["flag"], ["flag_output"])
    )
    for name in ("x_output", "flag_output"):
        model.graph.output.append(info(name, 1, dtype=TensorProto.BOOL))
    run = run_retention_loop(save_model(model, tmp_path / "m.onnx"))
    assert run.retained_inputs == {KEY_OUT: KEY, VALUE_OUT: VALUE, "flag_output": "flag"}
    assert run.findings == ()


def test_the_sizes_asked_for_are_those_it_ran_with() -> None:
    run = run_retention_loop(load_model(FIXTURES / "plain" / "hybrid.onnx"), dims={"ctx_len": 8})
    assert run.dims == {"batch_size": 1, "ctx_len": 8, "seq_len": 2, "sliding_window": 8}
    shapes = {key: result.shape for key, result in run.step_results[0].items()}
    assert shapes["", "past_key", "0"] == shapes["", "past_key", "2"] == (1, 2, 8, 4)
    assert shapes["", "conv_state", "1"] == (1, 8, 3)
    assert len(run.step_results) == DEFAULT_STEPS


@pytest.mark.parametrize(
    ("key", "value", "last"),
    [
        ((1, 2, 8, 4), (1, 2, 16, 4), 15),
        ((1, 2, "ctx_len", 4), (1, 2, 99, 4), 31),
        ((1, 2, "ctx_len", 4), (1, 2, "sliding_window", 4), 31),
    ],
)
def test_the_last_token_of_a_step_fills_the_cache(
    key: tuple[int | str, ...], value: tuple[int | str, ...], last: int, tmp_path: Path
) -> None:
    names = {KEY: KEY_OUT, VALUE: VALUE_OUT, "position_ids": "positions"}
    nodes = [node("Identity", [into], [out]) for into, out in names.items()]
    sides = [
        [info(side[0], *key), info(side[1], *value), info(side[2], 1, 2, dtype=TensorProto.INT64)]
        for side in (list(names), list(names.values()))
    ]
    opsets = [onnx.helper.make_opsetid("", 18)]
    graph = onnx.helper.make_graph(nodes, "main", *sides)
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    run = run_retention_loop(save_model(model, tmp_path / "m.onnx"))
    assert [step["positions",].digest for step in run.step_results] == [
        hashlib.sha256(np.array([n, last]).tobytes()).hexdigest() for n in range(3)
    ]


@pytest.mark.parametrize(
    ("write", "shape", "comes"),
    [
        (node("Concat", [KEY, KEY], [KEY_OUT], axis=1), (1, 4), r"tensor\(int64\) \[1, 4\]"),
        (node("Cast", [KEY], [KEY_OUT], to=TensorProto.INT32), (1, 2), r"tensor\(int32\) \[1, 2\]"),
    ],
)
def test_a_buffer_that_cannot_go_back_ends_the_loop(
    write: NodeProto, shape: tuple[int, ...], comes: str, tmp_path: Path
) -> None:
    model = build_counter(write)
    dtype = TensorProto.INT32 if write.op_type == "Cast" else TensorProto.INT64
    model.graph.output[0].CopyFrom(info(KEY_OUT, *shape, dtype=dtype))
    run, findings = check_retention(save_model(model, tmp_path / "m.onnx"))
    assert run is not None
    assert len(run.step_results) == 1
    (finding,) = findings
    assert (finding.code, finding.severity, finding.name) == ("KV118", "error", KEY_OUT)
    pattern = rf"^comes out as {comes}, which does not fit into {KEY}, tensor\(int64\) \[1, 2\]$"
    assert re.search(pattern, finding.message)


# Against a reference.

FIXED = sorted(
    path.relative_to(FIXTURES / "plain").as_posix() for path in FIXTURES.glob("plain/**/*.onnx")
)


@pytest.mark.parametrize("name", thin(FIXED, 7))
def test_a_renamed_fixture_gives_what_it_gave_before(name: str) -> None:
    plain, renamed = load_model(FIXTURES / "plain" / name), load_model(FIXTURES / "VLLM" / name)
    run, findings = check_retention(renamed, plain)
    assert findings == ()
    assert run is not None
    assert len(run.step_results) == 3
    kept = {pair.output for pair in renamed.pairs if pair.output}
    assert kept <= run.retained_inputs.keys()
    assert not kept & set(run.unchanged_outputs)


def save_edited(tmp_path: Path, edit: Callable[[ModelProto], None]) -> RunnableModel:
    """The decoder of two layers with the token, and something done to it."""
    model = onnx.load(FIXTURES / "VLLM" / "decoder.onnx")
    edit(model)
    return save_model(model, tmp_path / "edited.onnx")


def swap(model: ModelProto) -> None:
    """Layer 0's key goes by layer 1's name, wherever it is produced and read."""
    one, other = (f"past_key.{n}_VLLM_RetainedState" for n in (0, 1))
    for item in model.graph.node:
        for names in (item.input, item.output):
            names[:] = [{one: other, other: one}.get(name, name) for name in names]


def disconnect(model: ModelProto) -> None:
    """Layer 1 reads layer 0's value in the place of its own."""
    for item in model.graph.node:
        replaced = {"past_value.1_VLLM": "past_value.0_VLLM"}
        item.input[:] = [replaced.get(name, name) for name in item.input]


@pytest.mark.parametrize(
    ("edit", "name"),
    [(swap, "past_key.0_VLLM_RetainedState"), (disconnect, "past_value.1_VLLM_RetainedState")],
)
def test_a_fault_behind_right_names_is_found(
    edit: Callable[[ModelProto], None], name: str, tmp_path: Path
) -> None:
    reference = load_model(FIXTURES / "plain" / "decoder.onnx")
    _, findings = check_retention(save_edited(tmp_path, edit), reference)
    (finding,) = findings
    assert (finding.code, finding.severity, finding.name) == ("KV118", "error", name)
    assert "in step 1" in finding.message
    _, alone = check_retention(save_edited(tmp_path, edit))
    assert alone == ()


def test_what_is_no_number_on_both_sides_is_equal(tmp_path: Path) -> None:
    built = models.decoder(
        node("Sub", ["x", "x"], ["nought"]), node("Div", ["nought"] * 2, ["nan"])
    )
    built.graph.output.append(info("nan"))
    model = save_model(built, tmp_path / "m.onnx")
    assert check_retention(model, model)[1] == ()


def unbounded(index: int) -> ModelProto:
    model = models.decoder(node("GatherND", ["x", "index"], ["gathered"], name="/CtxGather"))
    model.graph.initializer.append(make_tensor("index", TensorProto.INT64, [1], [index]))
    return model


def test_a_model_that_fails_where_the_reference_runs_is_found(tmp_path: Path) -> None:
    sound, broken = (
        save_model(unbounded(index), tmp_path / f"{index}.onnx") for index in (0, (1 << 31) - 1)
    )
    run, findings = check_retention(broken, sound)
    assert run is None
    (text,) = format_findings(findings)
    assert "KV118" in text
    assert "the reference runs" in text
    assert "/CtxGather" in text
    assert "INT32_MAX" in text
    with pytest.raises(ModelError, match=r"2147483647\.onnx: onnxruntime cannot"):
        check_retention(sound, broken)


def build_run(*steps: dict[str, OutputResult]) -> RetentionRun:
    """A run with these outputs, each key its own name."""
    names = tuple(steps[0])
    results = tuple(tuple(step[name] for name in names) for step in steps)
    return RetentionRun({}, {}, tuple((name,) for name in names), names, results, (), (), ())


ONE, OTHER = OutputResult("tensor(float)", (1, 2), "a"), OutputResult("tensor(float)", (1, 2), "b")
WIDE, HALF = ONE._replace(shape=(1, 4)), ONE._replace(dtype="tensor(float16)")


@pytest.mark.parametrize(
    ("steps", "expected_steps", "messages"),
    [
        ([{"x": ONE}, {"x": OTHER}], [{"x": ONE}, {"x": OTHER}], []),
        ([{"x": ONE}, {"x": OTHER}], [{"x": ONE}, {"x": ONE}],
         ["x in step 2 has different values from the reference"]),
        ([{"x": ONE, "y": OTHER, "z": OTHER}], [{"z": ONE, "y": ONE, "x": ONE}],
         ["z in step 1 has different values from the reference (one of 2 outputs that differ)"]),
        ([{"x": WIDE}], [{"x": ONE}],
         ["x in step 1 is tensor(float) [1, 4], "
          "but tensor(float) [1, 2] in the reference"]),
        ([{"x": HALF}], [{"x": ONE}],
         ["x in step 1 is tensor(float16) [1, 2], "
          "but tensor(float) [1, 2] in the reference"]),
        ([{"x": ONE}], [{"y": ONE}],
         ["y is an output of the reference, but not of this model",
          "x is an output of this model, but not of the reference"]),
        ([{"x": ONE}], [{"x": ONE}, {"x": OTHER}], []),
    ],
)  # fmt: skip
def test_the_first_difference_is_named(
    steps: list[dict[str, OutputResult]],
    expected_steps: list[dict[str, OutputResult]],
    messages: list[str],
) -> None:
    findings = compare_runs(build_run(*steps), build_run(*expected_steps))
    assert [f"{finding.name} {finding.message}" for finding in findings] == messages


def test_two_runs_of_one_seed_are_equal_and_of_two_are_not() -> None:
    model = load_model(FIXTURES / "plain" / "decoder.onnx")
    assert run_retention_loop(model, seed=1) == run_retention_loop(model, seed=1)
    assert (
        run_retention_loop(model, seed=1).step_results
        != run_retention_loop(model, seed=2).step_results
    )


def test_a_plain_rename_does_not_load_it_beforehand() -> None:
    script = "import sys, onnxkvrename.cli.rename; print(*sys.modules)"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    modules = set(process.stdout.split())
    assert "onnxkvrename.renaming.run" in modules
    assert not modules & {
        "onnxkvrename.verification.running.retention_loop",
        "onnxkvrename.verification.running.ort_session",
        "onnxruntime",
    }


# Real exports.

ENCODER, SAMPLER = "gemma3vlm_dual/Gemma3EncoderWrapper", "llama2l_sampler/LlamaForCausalLM"
GROWING, BROKEN = "gemma3text/Gemma3ForCausalLMModel", "llama2l_dynamo_subfn/LlamaForCausalLM"


def list_exports(kind: str) -> dict[str, Path]:
    return {
        f"{path.relative_to(EXPORTS).parts[0]}/{path.stem}": path
        for path in sorted(EXPORTS.glob(f"*/{kind}-*/**/*.onnx"))
    }


ODD = {ENCODER, SAMPLER, GROWING, BROKEN}
PLAIN, TWIN = list_exports("plain"), list_exports("VLLM")
real = pytest.mark.skipif(not PLAIN, reason=f"no real exports: {EXPORTS} is not there")


@real
@pytest.mark.parametrize(
    "case", thin(sorted(PLAIN.keys() - {ENCODER, SAMPLER, GROWING, BROKEN}), 1)
)
def test_an_export_with_the_token_gives_what_the_plain_one_gives(case: str) -> None:
    plain, twin = load_model(PLAIN[case]), load_model(TWIN[case])
    run, findings = check_retention(twin, plain)
    assert findings == ()
    assert run is not None
    assert len(run.step_results) == 3
    kept = {pair.output for pair in twin.pairs if pair.output}
    assert kept
    assert kept <= run.retained_inputs.keys()
    assert not kept & set(run.unchanged_outputs)


@full
@real
def test_a_cache_that_grows_with_every_step_is_not_retained() -> None:
    run, findings = check_retention(load_model(TWIN[GROWING]), load_model(PLAIN[GROWING]))
    assert run is not None
    assert {f.name for f in findings} == {name for name in run.retained_inputs if "_VLLM_" in name}
    assert "[1, 2, 34, 16]" in findings[0].message


@full
@real
def test_the_broken_export_with_the_token_is_found() -> None:
    _, findings = check_retention(load_model(TWIN[BROKEN]), load_model(PLAIN[BROKEN]))
    (text,) = format_findings(findings)
    assert "KV118 past_key.0_VLLM_RetainedState" in text
    assert "in step 1" in text
    assert check_retention(load_model(PLAIN[BROKEN]))[1] == ()


@full
@real
def test_what_onnxruntime_cannot_run_is_said_with_the_reason() -> None:
    with pytest.raises(ModelError, match=r"Where .* at node /Where_2$"):
        run_retention_loop(load_model(PLAIN[SAMPLER]))
    with pytest.raises(ModelError, match=r"Conv node .* fails: .*img_size=4"):
        run_retention_loop(load_model(PLAIN[ENCODER]))
    run = run_retention_loop(load_model(PLAIN[ENCODER]), dims={"img_size": 896})
    assert run.retained_inputs == {}


@real
@full
@pytest.mark.parametrize("dims", [{"seq_len": 1}, {"seq_len": 4, "ctx_len": 4}, {"batch_size": 2}])
def test_an_export_runs_with_other_sizes(dims: dict[str, int]) -> None:
    case = "gemma3vlm_dual/Gemma3DecoderWrapper"
    run = run_retention_loop(load_model(PLAIN[case]), dims=dims)
    assert run.findings == ()
    assert run.dims.items() >= dims.items()
