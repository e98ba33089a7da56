"""One cause has one finding, with a hint that works."""

from __future__ import annotations

import json
import re
from pathlib import Path

import models
import onnx
import pytest
from conftest import Run
from exporter_models import HUGGING_FACE, build_model, list_caches
from hints import find_commands, run_commands
from models import node, saved, tensor

import onnxkvrename


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def find_codes(text: str) -> list[str]:
    """Return the codes of the findings in the text of a command."""
    return re.findall(r"(?:error|warning) (KV\d+):", text)


def save_delta() -> str:
    """A decoder that joins its new positions to the cache, and returns those alone."""
    model = build_model(list_caches(HUGGING_FACE))
    nodes = list(model.graph.node)
    for number, value in enumerate(model.graph.output[1:]):
        value.type.tensor_type.shape.dim[2].dim_param = "sequence_length"
        (joins,) = (each for each in nodes if value.name in each.output)
        joins.input[1], joins.output[0] = value.name, f"joined_{number}"
        (reads,) = (each for each in nodes if f"read_{number}" in each.output)
        reads.input[0] = f"joined_{number}"
        nodes.remove(reads)
        nodes[nodes.index(joins) :] = [
            node("Mul", ["x", f"scale_{number}"], [value.name]),
            *nodes[nodes.index(joins) :],
        ]
        nodes.insert(nodes.index(joins) + 1, reads)
        model.graph.initializer.append(tensor(f"scale_{number}", number + 2.0))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return str(saved(model, Path("m.onnx")))


def test_an_output_of_new_positions_has_no_second_finding(run: Run) -> None:
    outcome = run("verify", save_delta())
    assert (outcome.code, find_codes(outcome.err)) == (1, ["KV120"])
    assert "present.0.key has only the new positions of past_key_values.0.key" in outcome.err
    assert run_commands(outcome.err, run).code == 0
    assert 'update = "delta"' in Path("rules.toml").read_text("utf-8")
    on_target = run("verify", "m.onnx", "--target", "vllm-qaic")
    assert find_codes(on_target.err) == ["KV120"]
    assert on_target.out.startswith("m.onnx: does not verify\n")


@pytest.mark.parametrize("part", ["key", "value"])
def test_a_word_on_one_side_is_removed_and_not_spread(part: str, run: Run) -> None:
    model = build_model(list_caches(HUGGING_FACE))
    for value in model.graph.output:
        if value.name.endswith(part):
            (write,) = (each for each in model.graph.node if value.name in each.output)
            value.name = write.output[0] = f"{value.name}_Q4"
    saved(model, Path("m.onnx"))
    past, present = (
        {f"past_{p}_names": f"past_key_values.%d.{p}" for p in ("key", "value")},
        {f"present_{p}_names": f"present.%d.{p}" for p in ("key", "value")},
    )
    decoder = {"filename": "m.onnx", "inputs": past, "outputs": present}
    Path("genai_config.json").write_text(json.dumps({"model": {"decoder": decoder}}), "utf-8")
    for options, codes in (("", ["KV116"]), ("--target qefficient", ["KV116", "KV120"])):
        outcome = run("verify", "m.onnx", *options.split())
        assert (outcome.code, find_codes(outcome.err)) == (1, codes)
        (command,) = find_commands(outcome.err)
        assert command == "onnxkvrename m.onnx --strip --profile huggingface"
    assert find_codes(run("inspect", "m.onnx").err) == []
    assert run_commands(outcome.err, run).code == 0
    assert run("verify", "m.onnx").code == 0


def test_two_tokens_have_the_finding_with_the_command(run: Run) -> None:
    data = onnxkvrename.rename_model(models.decoder(), "A").SerializeToString()
    saved(data.replace(b"past_value.0_A", b"past_value.0_B"), Path("m.onnx"))
    outcome = run("verify", "m.onnx")
    assert (outcome.code, find_codes(outcome.err)) == (1, ["KV116"])
    assert run_commands(outcome.err, run).code == 0
    assert run("verify", "m.onnx").code == 0


def test_windows_are_named_for_names_of_qefficient_only(run: Run) -> None:
    first, second = (
        list_caches(HUGGING_FACE, layers=[layer], parts=["key", "value"]) for layer in (0, 1)
    )
    lone = [each._replace(input=None) for each in second]
    saved(build_model([*first, *lone]), Path("m.onnx"))
    outcome = run("verify", "m.onnx")
    assert "error KV101: present.1.key has no input" in outcome.err
    assert "layerwise" not in outcome.err


def test_no_token_is_replaced_where_there_is_none(run: Run) -> None:
    saved(models.decoder(), Path("m.onnx"))
    outcome = run("m.onnx", "--prefix", "vllmkvcache", "--strict")
    assert "rename with `--prefix vllmKvCache`" in outcome.err
    assert run("m.onnx", "--prefix", "vllmKvCache").code == 0


def test_values_with_the_names_of_caches_have_one_finding(run: Run) -> None:
    text = """
        <ir_version: 8, opset_import: ["": 17]>
        tables (float[1,1] past_keys_0, float[1,2] past_values_2, float[1,2] key_cache_0)
        => (float[1,1] present_keys_0, float[1,2] present_values_2) {
            present_keys_0 = Neg(past_keys_0)
            present_values_2 = Add(past_values_2, key_cache_0)
        }
    """
    saved(onnx.parser.parse_model(text), Path("m.onnx"))
    for typed in ("verify m.onnx", "inspect m.onnx", "m.onnx --strip"):
        outcome = run(*typed.split())
        assert (outcome.code, find_codes(outcome.err)) == (1, ["KV125"])
        assert "2 names (first: past_keys_0) have fewer than 3 axes ([1, 1])" in outcome.err


def test_a_lost_side_has_one_finding_for_a_consumer_too(run: Run) -> None:
    model = build_model(list_caches(HUGGING_FACE))
    for value in model.graph.output[1:]:
        (write,) = (each for each in model.graph.node if value.name in each.output)
        value.name = write.output[0] = value.name.replace("present", "later")
    saved(model, Path("m.onnx"))
    for typed in ("m.onnx --target vllm-qaic -n", "verify m.onnx --target vllm-qaic"):
        outcome = run(*typed.split())
        assert (outcome.code, set(find_codes(outcome.err))) == (1, {"KV102"})
        pairs, again = find_commands(outcome.err)
        assert pairs == "onnxkvrename pairs m.onnx --as rules > rules.toml"
        assert again == f"onnxkvrename {typed.removesuffix(' -n')} --rules rules.toml"
        assert "KV102" not in run_commands(outcome.err, run).err
