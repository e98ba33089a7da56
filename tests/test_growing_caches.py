"""A cache that grows cannot be retained in place: every command says so, from the graph alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import FIXTURES
from exporter_models import build_merged_decoder
from models import info, node, saved
from onnx import ModelProto, helper
from real_exports import EXPORTS

import onnxkvrename
from onnxkvrename.layout.updates import BufferUpdate, find_declared_growth
from onnxkvrename.model.file import open_model
from onnxkvrename.model.signature import Value
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.plan import KvPair, PairSide
from onnxkvrename.verification import trace_buffer_updates

TOKEN = "vllmKvCache"
RULES = """
retained = 'present[.].*'
{update}
[[kv]]
kind = "attention"
input = 'past_key_values[.]{{layer}}[.]{{part}}{{token}}'
output = 'present[.]{{layer}}[.]{{part}}{{token}}'
{more}
"""


def build_growing_model(
    into: str = "past_{part}.{layer}", out: str = "past_{part}.{layer}_RetainedState"
) -> ModelProto:
    """Two layers whose keys and values are joined to what came before."""
    past, grown = (
        ("batch_size", 2, dim, 4) for dim in ("past_length", "past_length + sequence_length")
    )
    inputs, nodes, outputs = [info("x", "batch_size", 2, "sequence_length", 4)], [], []
    for layer, part in ((layer, part) for layer in (0, 1) for part in ("key", "value")):
        names = [name.format(layer=layer, part=part) for name in (into, out)]
        inputs.append(info(names[0], *past))
        outputs.append(info(names[1], *grown))
        nodes.append(node("Concat", [names[0], "x"], [names[1]], axis=-2))
    nodes.append(node("Neg", ["x"], ["logits"]))
    outputs.append(info("logits", "batch_size", 2, "sequence_length", 4))
    graph = helper.make_graph(nodes, "growing", inputs, outputs)
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.fixture
def growing(tmp_path: Path) -> Path:
    """A model with QEfficient's names, whose profile says that buffers stay in place."""
    return saved(build_growing_model(), tmp_path / "growing.onnx")


def list_codes(findings: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(found["severity"], found["code"]) for found in findings}


def test_verify_refuses_it(growing: Path, run) -> None:
    outcome = run("verify", growing)
    assert outcome.code == 1
    assert outcome.err.count("error KV120") == 1
    assert "longer than past_key.0 along axis 2 (past_length -> past_length + seq" in outcome.err
    assert "profile qeff retains buffers in place" in outcome.err
    assert "does not verify" in outcome.out
    (model,) = json.loads(run("verify", growing, "--format", "json").out)["models"]
    assert {(pair["update"], pair["update_axis"]) for pair in model["pairs"]} == {("append", 2)}


def test_a_rename_that_verifies_writes_nothing(growing: Path, run) -> None:
    before = growing.read_bytes()
    outcome = run(growing, "--prefix", "VLLM", "--verify")
    assert (outcome.code, growing.read_bytes()) == (1, before)
    assert "error KV120" in outcome.err


def test_a_plain_rename_warns_by_the_declared_shapes(growing: Path, tmp_path: Path, run) -> None:
    outcome = run(growing, "--prefix", "VLLM", "-o", tmp_path / "new.onnx")
    assert outcome.code == 0
    assert outcome.err.count("warning KV120") == 1
    assert ", like 3 more, so it does not fit" in outcome.err
    assert run(growing, "--prefix", "V", "-o", tmp_path / "other.onnx", "--strict").code == 1
    target = run(growing, "--target", "vllm-qaic", "--dry-run").err
    assert ("error KV120" in target, "warning KV120" in target) == (True, False)


@pytest.mark.parametrize(
    ("into", "out", "op_type", "expected"),
    [
        ("ctx_len", "Concat{}_dim_2", "Concat", True),  # as torch.onnx calls what it cannot tell
        ("past", "past + 1", "Attention", True),
        ("ctx_len", "Slice{}_dim_2", "Slice", False),  # a window that is moved on
        ("ctx_len", "ctx_len", "Concat", False),
        (8, "Concat{}_dim_2", "Concat", False),
        ("ctx_len", None, "Concat", False),
    ],
)
def test_another_symbol_is_a_longer_axis_where_something_was_joined(
    into: str | int, out: str | None, op_type: str, expected: bool
) -> None:
    shapes = ("batch", 2, into, 4), ("other_batch", 2, out, 4)
    key = Value("k", "FLOAT", shapes[0]), Value("k_RetainedState", "FLOAT", shapes[1])
    sides = [PairSide(value, "", value.name) for value in key]
    found = find_declared_growth(KvPair("attention", "", "k", 0, *sides), op_type)
    assert found == (BufferUpdate("append", 2) if expected else None)


def test_the_consumer_cannot_take_it(growing: Path, run) -> None:
    run(growing, "--prefix", TOKEN)
    found = json.loads(run("verify", growing, "--target", "vllm-qaic", "--format", "json").out)
    assert found["exit_code"] == 1
    outcome = run("verify", growing, "--target", "vllm-qaic")
    assert "error KV120: past_key.0_vllmKvCache_RetainedState is longer" in outcome.err
    assert ", like 3 more, so it does not fit: vllm-qaic retains" in outcome.err
    assert outcome.out.endswith("vllm-qaic cannot use it\n")


def test_no_rename_is_suggested_that_would_be_refused(growing: Path, run) -> None:
    """Whatever names a cache that grows has, vllm-qaic cannot retain it."""
    for command in (
        ("verify", growing, "--target", "vllm-qaic"),
        ("verify", growing, "--target", "vllm-qaic-legacy"),
        ("compare", growing, growing),
    ):
        error = run(*command).err
        assert "KV120" in error
        assert "--target" not in error
    assert "KV601" not in run("verify", growing, "--target", "vllm-qaic").err


def test_a_hand_off_does_not_work_whatever_the_context(growing: Path, tmp_path: Path, run) -> None:
    run(growing, "--prefix", TOKEN)
    layout = tmp_path / "kv.json"
    layout.write_text(run("inspect", growing, "--format", "json").out, "utf-8")
    for decode in (growing, layout):
        outcome = run("compare", growing, decode)
        assert outcome.code == 1
        assert outcome.out.startswith("hand-off would fail at start-up: a cache that grows")
        assert "whatever past_length may be" not in outcome.out
        assert "wrong (KV120)" in outcome.out
    found = json.loads(run("compare", layout, layout, "--format", "json").out)
    assert found["verdict"]["outcome"] == "fails"
    assert {pair["decode"]["update"] for pair in found["pairs"]} == {"append"}
    assert onnxkvrename.compare(growing, growing).verdict.outcome == "fails"


def test_inspect_shows_it_folded(growing: Path, run) -> None:
    assert run("inspect", growing).out.count(", grows along axis 2") == 1
    document = json.loads(run("inspect", growing, "--format", "json").out)
    for described in (document["models"][0], document["layouts"][0]):
        assert {(b["update"], b["update_axis"]) for b in described["buffers"]} == {("append", 2)}


@pytest.mark.parametrize(
    ("update", "more", "expected"),
    [
        ("", "", {("warning", "KV120")}),
        ('update = "append"', "", set()),
        ('update = "inplace"', "", {("error", "KV120")}),
        ('update = "inplace"', 'update = "append"', set()),
        ("", 'update = "inplace"', {("error", "KV120")}),
    ],
)
def test_rules_say_what_is_meant(
    update: str, more: str, expected: set[tuple[str, str]], tmp_path: Path, run
) -> None:
    names = ("past_key_values.{layer}.{part}", "present.{layer}.{part}")
    model = saved(build_growing_model(*names), tmp_path / "m.onnx")
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES.format(update=update, more=more))
    outcome = run("verify", model, "--rules", rules, "--format", "json")
    (found,) = json.loads(outcome.out)["models"]
    assert list_codes(found["findings"]) == expected
    assert outcome.code == int(("error", "KV120") in expected)
    text = run("verify", model, "--rules", rules).out
    if not outcome.code:
        lost = "0 of 4 buffers retained by dataflow, 4 cannot go back into their inputs"
        meant = "all 4 buffers are as the rules say, by dataflow (4 grow along axis 2)"
        assert (lost if expected else meant) in text


def test_sizes_that_rules_mean_are_no_fault_either(tmp_path: Path, run) -> None:
    """Return an output of the new positions only, whose size is another number."""
    model = build_growing_model("past_key_values.{layer}.{part}", "present.{layer}.{part}")
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past", "present")):
            length = 16 if value.name.startswith("past") else 4
            value.type.tensor_type.shape.dim[2].Clear()
            value.type.tensor_type.shape.dim[2].dim_value = length
    for each in model.graph.node:
        if each.op_type == "Concat":
            each.op_type = "Identity"
            each.input[:] = ["x"]
            del each.attribute[:]
    path, rules = saved(model, tmp_path / "m.onnx"), tmp_path / "rules.toml"
    for update, codes in (("inplace", {"KV104", "KV107", "KV120"}), ("delta", {"KV107"})):
        rules.write_text(RULES.format(update=f'update = "{update}"', more=""))
        outcome = run("verify", path, "--rules", rules, "--format", "json")
        (found,) = json.loads(outcome.out)["models"]
        assert {finding["code"] for finding in found["findings"]} - {"KV115"} == codes


def test_no_fixture_raises_a_false_alarm() -> None:
    rules = load_rules()
    paths = sorted(FIXTURES.rglob("*.onnx"))
    assert paths
    for path in paths:
        layout = onnxkvrename.load_layout(path, rules=rules).layout
        assert not [buffer for buffer in layout.buffers if buffer.update.is_resized], path


# Real exports.

OTHERS = EXPORTS.with_name("exports-other")
QEFF_EXPORTS = [
    path
    for path in sorted(EXPORTS.rglob("*.onnx"))
    if "EncoderWrapper" not in path.name and "llama2l_dynamo_subfn/VLLM" not in path.as_posix()
]
GROWING_EXPORTS = [
    path
    for folder in ("optimum", "genai/llama-fp32", "genai/llama-int4", "mobius/llama-ort-genai")
    for path in sorted((OTHERS / folder).rglob("*model.onnx"))
    if path.name in ("model.onnx", "decoder_with_past_model.onnx")
]


@pytest.mark.skipif(not QEFF_EXPORTS, reason=f"no real exports: {EXPORTS} is not there")
def test_of_qefficients_exports_only_one_grows() -> None:
    growing = set()
    for path in QEFF_EXPORTS:
        buffers = onnxkvrename.load_layout(path).layout.buffers
        kinds = {str(buffer.update) for buffer in buffers}
        if kinds != {"inplace"}:
            growing.add((path.relative_to(EXPORTS).parts[0], *kinds))
    assert growing == {("gemma3text", "append along axis 2")}


@pytest.mark.skipif(not GROWING_EXPORTS, reason=f"no other exporters' models: no {OTHERS}")
def test_what_other_exporters_append_to_is_found() -> None:
    for path in GROWING_EXPORTS:
        with open_model(path) as opened:
            values = {value.name: value for value in opened.signature.inputs}
            pairs = [
                KvPair("attention", "", name, 0, *(PairSide(v, "", v.name) for v in (into, out)))
                for out in opened.signature.outputs
                for name in [out.name.replace("present", "past_key_values", 1)]
                if (into := values.get(name)) is not None
            ]
            updates = trace_buffer_updates(opened.source, pairs)
        assert {str(update) for update in updates.values()} == {"append along axis 2"}, path


def test_a_rename_for_a_consumer_refuses_what_the_consumer_would(growing: Path, run) -> None:
    before = growing.read_bytes()
    outcome = run(growing, "--target", "vllm-qaic")
    assert outcome.code == 1
    assert f"error KV120: past_key.0_{TOKEN}_RetainedState is longer than" in outcome.err
    assert "vllm-qaic retains buffers in place" in outcome.err
    assert growing.read_bytes() == before


def test_a_verdict_counts_all_buffers_that_are_as_the_rules_say(tmp_path: Path, run) -> None:
    """What grows or is written once is no failure where the rules expect it."""
    merged = saved(build_merged_decoder(), tmp_path / "merged.onnx")
    assert (
        run("verify", merged)
        .out.partition(": ")[2]
        .startswith(
            "all 4 buffers are as the rules say, by dataflow (2 grow along axis 2, 2 written once)"
        )
    )
