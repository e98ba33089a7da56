"""A buffer of which the rules match one side alone, although the graph has the other one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import pytest
from conftest import Run
from exporter_models import HUGGING_FACE, Cache, build_model, list_caches
from hints import find_commands, run_commands
from models import saved

import onnxkvrename

PAST, PRESENT = HUGGING_FACE
NAMES = {
    "outputs of huggingface": ("past_key_values_{layer}_{part}", PRESENT, "KV101"),
    "outputs of ort-decoder": ("mem_{part}_{layer}", "present_{part}_{layer}", "KV101"),
    "outputs of transformers": (
        "cache_{layer}_{part}",
        "output.past_key_values.layers.{layer}.{part}s",
        "KV101",
    ),
    "outputs of qeff": ("cache_{layer}_{part}", "past_{part}.{layer}_RetainedState", "KV101"),
    "inputs of huggingface": (PAST, "present_key_values.{layer}.{part}", "KV102"),
    "inputs of ort-decoder": ("past_{part}_{layer}", "new_{part}_{layer}", "KV102"),
    "inputs of qeff": ("past_{part}.{layer}", "new_{part}_{layer}", "KV102"),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize(
    "command",
    ["my.onnx --prefix KV", "my.onnx --target vllm-qaic -n", "verify my.onnx",
     "verify my.onnx --target vllm-qaic", "inspect my.onnx"],
)  # fmt: skip
def test_a_side_that_the_graph_shows_is_an_error_with_the_commands_that_match_both(
    names: str, command: str, tmp_path: Path, run: Run
) -> None:
    past, present, code = NAMES[names]
    caches = list_caches((past, present))
    model = saved(build_model(caches), tmp_path / "my.onnx")
    before = model.read_bytes()
    outcome = run(*command.split(), "-v")
    own, other = caches[0].output, caches[0].input
    if code == "KV102":
        own, other = other, own
    assert (outcome.code, model.read_bytes()) == (1, before)
    assert re.search(f"error {code}: {own} .* {other}, which no rule matches", outcome.err)
    assert find_commands(outcome.err)[0] == "onnxkvrename pairs my.onnx --as rules > rules.toml"
    assert "KV111" not in outcome.err
    commands = "\n".join(f"`{each}`" for each in find_commands(outcome.err)[:2])
    assert code not in run_commands(commands, run).err
    assert Path("rules.toml").is_file()


@pytest.mark.parametrize("token", ["", "_KV"])
def test_a_first_step_has_outputs_alone(token: str, tmp_path: Path, run: Run) -> None:
    output = f"present.{{layer}}.{{part}}{token}"
    caches = [each._replace(input=None) for each in list_caches(("unused", output))]
    saved(build_model(caches), tmp_path / "first.onnx")
    assert run("verify", "first.onnx").code == 0
    assert run("first.onnx", "--prefix", "KV").code == 0


def test_another_float_input_is_not_the_other_side(tmp_path: Path, run: Run) -> None:
    """A mask of the same rank, which is read and is in no output."""
    shape = ("batch_size", 2, "past_sequence_length", 4)
    caches = [each._replace(input=None) for each in list_caches(("unused", PRESENT))]
    mask = Cache("mask", None, shape)
    saved(build_model([*caches, mask]), tmp_path / "first.onnx")
    assert run("first.onnx", "--prefix", "KV").code == 0


def test_a_token_on_one_side_can_be_removed(tmp_path: Path, run: Run) -> None:
    names = ("past_key_values_{layer}_{part}", f"{PRESENT}_KV")
    model = saved(build_model(list_caches(names)), tmp_path / "half.onnx")
    outcome = run("verify", model)
    assert (outcome.code, "first a rename with `--strip`, then" in outcome.err) == (1, True)
    assert run("half.onnx", "--strip").code == 0
    outputs = [value.name for value in onnx.load("half.onnx").graph.output]
    assert outputs == ["logits", *(each.removesuffix("_KV") for each in outputs[1:])]
    assert run_commands(outcome.err, run).code == 0


def test_the_library_and_json_say_it_too(tmp_path: Path, run: Run) -> None:
    names = ("past_key_values_{layer}_{part}", PRESENT)
    model = saved(build_model(list_caches(names)), tmp_path / "my.onnx")
    codes = {finding.code for finding in onnxkvrename.rename(model, "KV").findings}
    assert codes == {"KV101"}
    assert {f.code for f in onnxkvrename.inspect(model).findings} == {"KV101"}
    answer = json.loads(run("inspect", model, "--format", "json").out)
    assert {f["code"] for f in answer["models"][0]["findings"]} == {"KV101"}
    with pytest.raises(onnxkvrename.CheckError, match="which no rule matches") as error:
        onnxkvrename.rename_bytes(model.read_bytes(), "KV")
    assert str(error.value.hint).endswith("suggest_rules(PATH)")
    graph = pytest.importorskip("onnx_graphsurgeon").import_onnx(onnx.load(model))
    hints = {finding.hint for finding in onnxkvrename.rename_graph(graph, "KV").findings}
    assert [hint.endswith("suggest_rules(PATH)") for hint in hints] == [True]
