"""``onnxkvrename check-consumer``: can a consumer take the KV buffers of these models?"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from custom_io_files import write_custom_io
from exporter_models import STATIC_RULES, build_model, list_caches
from hints import find_commands
from models import info, node
from tiers import thin
from window_sets import build_window, write_windows

from onnxkvrename.layout.manifest import compute_document_digest

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
EXPORTS = ROOT.parent / "shared" / "exports"

RESTS = (
    "; based on names, shapes, dtypes and dataflow, and on the code of qualcomm/vllm-qaic at "
    "dc7351f"
)


@pytest.fixture
def taken(tmp_path: Path, run) -> Path:
    """A decoder with the token."""
    path = tmp_path / "taken.onnx"
    assert run(FIXTURES / "plain" / "decoder.onnx", "--target", "vllm-qaic", "-o", path).code == 0
    return path


def document(outcome: Any) -> dict[str, Any]:
    """The JSON document of an outcome, which its schema takes."""
    found: dict[str, Any] = json.loads(outcome.out)
    assert found["exit_code"] == outcome.code
    return found


def codes(found: dict[str, Any]) -> set[str]:
    """Return the codes of all findings in a document."""
    return {one["code"] for model in found["models"] for one in model["findings"]}


def test_what_can_be_taken_is_told_in_one_line(taken: Path, run) -> None:
    outcome = run("check-consumer", taken)
    said = (
        f"{taken}: vllm-qaic can use it: 4 buffers, layers 0-1, all with the same shape and dtype"
        f"{RESTS}\n"
    )
    assert outcome == (0, said, "")
    assert run("check-consumer", taken, "-q") == (0, "", "")


def test_nothing_is_written(taken: Path, run, snapshot) -> None:
    before = snapshot(taken.parent)
    run("check-consumer", taken)
    assert snapshot(taken.parent) == before


def test_verbose_shows_the_slots(taken: Path, run) -> None:
    lines = run("check-consumer", taken, "-v").out.splitlines()
    assert lines[1] == "  0: past_key.0_vllmKvCache <- past_key.0_vllmKvCache_RetainedState"
    assert len(lines) == 5


def test_a_plain_model_cannot_be_taken_and_is_told_how(decoder: Path, run) -> None:
    outcome = run("check-consumer", decoder)
    assert outcome.code == 1
    assert f"{decoder}: vllm-qaic cannot" in outcome.out
    assert f"{decoder}: error KV601: 8 names (first: past_key.0)" in outcome.err
    (command,) = find_commands(outcome.err)
    assert run(*shlex.split(command)[1:], "-q").code == 0
    assert run("check-consumer", decoder).code == 0


def test_a_verdict_has_the_colour_of_its_outcome(
    decoder: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[31mvllm-qaic cannot use it" in run("check-consumer", decoder).out
    run(decoder, "--target", "vllm-qaic", "-q")
    assert "\x1b[32mvllm-qaic can use it" in run("check-consumer", decoder).out


def test_the_hint_is_a_command_whatever_the_model_is_called(decoder: Path, run) -> None:
    path = decoder.rename(decoder.with_name("my model; rm -rf $HOME.onnx"))
    found = document(run("check-consumer", path, "--format", "json"))
    hint = found["models"][0]["findings"][0]["hint"]
    assert shlex.split(hint.strip("`")) == ["onnxkvrename", str(path), "--target", "vllm-qaic"]


def test_all_words_of_a_verdict_are_in_the_document(taken: Path, run) -> None:
    found = document(run("check-consumer", taken, "--format", "json", "--dim", "ctx_len=64"))
    assert found["target"] == "vllm-qaic"
    assert (found["ordered"], found["hybrid"]) == (True, False)
    assert [(s["slot"], s["layer"], s["part"]) for s in found["slots"]] == [
        (0, 0, "key"),
        (1, 0, "value"),
        (2, 1, "key"),
        (3, 1, "value"),
    ]
    assert found["slots"][3] == {
        "slot": 3,
        "input": "past_value.1_vllmKvCache",
        "output": "past_value.1_vllmKvCache_RetainedState",
        "layer": 1,
        "part": "value",
        "kind": "full_attention",
        "dtype": "FLOAT",
        "shape": ["batch_size", 2, 64, 4],
    }


def test_a_stranger_has_a_slot_without_a_meaning(taken: Path, run) -> None:
    model = onnx.load(taken)
    model.graph.node.append(
        onnx.helper.make_node("Identity", ["logits"], ["a_vllmKvCache_RetainedState"])
    )
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("a_vllmKvCache_RetainedState", 1, None)
    )
    onnx.save(model, taken)
    outcome = run("check-consumer", taken, "--format", "json")
    found = document(outcome)
    assert outcome.code == 1
    assert codes(found) >= {"KV608"}
    assert found["slots"][0]["output"] == "a_vllmKvCache_RetainedState"
    assert found["slots"][4]["input"] is None


def test_an_output_that_is_an_input_as_well_stands_alone(taken: Path, run) -> None:
    model = onnx.load(taken)
    model.graph.input.append(next(o for o in model.graph.output if "State" in o.name))
    onnx.save(model, taken)
    outcome = run("check-consumer", taken, "--format", "json")
    assert outcome.code == 1
    assert codes(document(outcome)) >= {"KV106", "KV609"}


def test_a_job_that_cannot_be_done_has_a_document_too(tmp_path: Path, run) -> None:
    outcome = run("check-consumer", tmp_path / "none.onnx", "--format", "json")
    found = document(outcome)
    assert outcome.code == 2
    assert (found["target"], found["models"], found["slots"]) == (None, [], [])
    assert found["error"]["path"] == str(tmp_path / "none.onnx")


def test_findings_are_shown_beside_files(decoder: Path, taken: Path, run) -> None:
    found = run("check-consumer", decoder, "--format", "github")
    assert found.code == 1
    assert f"::error file={decoder},title=KV601::8 names (first: past_key.0)" in found.out
    good = run("check-consumer", taken, "--format", "github")
    assert f"::notice file={taken},title=check-consumer::vllm-qaic can" in good.out
    assert run("check-consumer", taken, "--format", "github", "-q").out == ""


def test_states_need_the_full_transfer(tmp_path: Path, run) -> None:
    path = tmp_path / "hybrid.onnx"
    run(FIXTURES / "plain" / "hybrid.onnx", "--prefix", "vllmKvCache", "-o", path)
    assert "error KV605" in run("check-consumer", path).err
    outcome = run("check-consumer", path, "--full-transfer")
    assert outcome.code == 0
    assert f"{path}: vllm-qaic can use it" in outcome.out
    assert "6 buffers," in outcome.out
    assert "hybrid: 4" in outcome.out
    assert run("check-consumer", path, "--full-transfer", "--strict").code == 1


def test_sizes_and_precisions_of_a_compile_count(tmp_path: Path, taken: Path, run) -> None:
    custom = write_custom_io(tmp_path / "custom_io.yaml", taken, "mxint8")
    found = document(run("check-consumer", taken, "--custom-io", custom, "--format", "json"))
    assert {slot["dtype"] for slot in found["slots"]} == {"MXINT8"}
    assert run("check-consumer", taken, "--dim", "x=1").code == 2


def test_windows_are_one_model(tmp_path: Path, run) -> None:
    run(FIXTURES / "plain" / "windows", "--target", "vllm-qaic", "-d", tmp_path / "set")
    outcome = run("check-consumer", tmp_path / "set")
    said = "vllm-qaic can use them: 6 buffers, layers 0-2, all with the same shape and dtype"
    assert outcome == (0, f"{tmp_path / 'set'} (3 models): {said}{RESTS}\n", "")
    shutil.rmtree(tmp_path / "set" / "layer_1_2")
    assert "error KV302" in run("check-consumer", tmp_path / "set").err


def test_a_finding_is_told_of_the_window_that_it_is_about(tmp_path: Path, run) -> None:
    run(FIXTURES / "plain" / "windows", "--target", "vllm-qaic", "-d", tmp_path / "set")
    custom = tmp_path / "custom_io.yaml"
    entries = [f"past_key.1_vllmKvCache{end}" for end in ("", "_RetainedState")]
    custom.write_text(
        "".join(f" - IOName: {e}\n   Precision: bfloat16\n\n" for e in entries), "utf-8"
    )
    outcome = run("check-consumer", tmp_path / "set", "--custom-io", custom, "--format", "json")
    said = [[f["code"] for f in model["findings"]] for model in document(outcome)["models"]]
    assert said == [["KV606"], ["KV610"], []]


def test_an_encoder_alone_has_nothing_to_take(run) -> None:
    outcome = run("check-consumer", FIXTURES / "plain" / "vlm_dual" / "encoder.onnx")
    assert outcome.code == 1
    assert outcome.out.endswith("encoder.onnx: no KV buffer\n")
    assert "error KV001" in outcome.err


def test_a_manifest_stands_for_its_model(taken: Path, tmp_path: Path, run) -> None:
    manifest = tmp_path / "m.json"
    assert run("manifest", taken, "--dim", "ctx_len=16", "-o", manifest).code == 0
    model = document(run("check-consumer", taken, "--dim", "ctx_len=16", "--format", "json"))
    taken.unlink()
    outcome = run("check-consumer", manifest, "--format", "json")
    assert document(outcome)["slots"] == model["slots"]
    assert f"{manifest}: vllm-qaic can use it" in run("check-consumer", manifest).out


def test_what_is_wrong_is_told_of_the_manifest(tmp_path: Path, run) -> None:
    manifest = tmp_path / "m.json"
    assert run("manifest", FIXTURES / "VLLM" / "sampler.onnx", "-o", manifest).code == 0
    outcome = run("check-consumer", manifest)
    assert outcome.code == 1
    assert f"{manifest}: error KV601: 8 names" in outcome.err
    internal = tmp_path / "internal.json"
    assert run("manifest", FIXTURES / "plain" / "internal_suffix.onnx", "-o", internal).code == 0
    assert "warning KV112" in run("check-consumer", internal).err
    assert "error KV112" in run("check-consumer", internal, "--strict").err


def test_a_manifest_as_text_is_told_from_one(decoder: Path, tmp_path: Path, run) -> None:
    text = tmp_path / "m.txt"
    text.write_text(run("manifest", decoder, "--format", "text").out, "utf-8")
    for command in (("check-consumer", text), ("compare", text, text)):
        outcome = run(*command)
        assert (outcome.code, outcome.out) == (2, "")
        assert f"error: {text}: is a manifest" in outcome.err
        assert "manifest MODEL -o FILE" in outcome.err


def test_an_update_that_the_graph_does_not_show_is_told(tmp_path: Path, run) -> None:
    path = tmp_path / "derived.onnx"
    shutil.copyfile(FIXTURES / "plain" / "derived_symbols.onnx", path)
    found = document(run("check-consumer", path, "--target", "qefficient", "--format", "json"))
    assert codes(found) == {"KV113"}
    (finding,) = found["models"][0]["findings"]
    text = finding["message"]
    assert f"2 outputs (first: {finding['name']})" in text
    assert "qefficient" in text
    assert run("check-consumer", path, "--target", "qefficient", "--strict").code == 1


def test_an_update_that_was_not_traced_is_told_from_that(taken: Path, tmp_path: Path, run) -> None:
    """As of a manifest that was written without the graph."""
    manifest = tmp_path / "m.json"
    assert run("manifest", taken, "-o", manifest).code == 0
    said = json.loads(manifest.read_text("utf-8"))
    for buffer in said["buffers"]:
        buffer |= {"update": "untraced", "update_axis": None}
    del said["sha256"]
    said["sha256"] = compute_document_digest(said)
    manifest.write_text(json.dumps(said), "utf-8")
    outcome = run("check-consumer", manifest)
    assert outcome.code == 0
    assert f"{manifest}: warning KV113: 4 outputs (first: past_key.0_vllmKvCache_Retained" in (
        outcome.err
    )
    assert "not traced" in outcome.err
    compared = run("compare", manifest, taken)
    assert compared.code == 0
    assert "note: prefill: 4 outputs" in compared.out
    assert "note: decode" not in compared.out


def test_no_model_is_a_usage_error(run) -> None:
    assert "no MODEL given" in run("check-consumer").err


# Real exports

real = pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"{EXPORTS} is not there")
WHOLE = sorted(EXPORTS.glob("*/plain-*")) if EXPORTS.is_dir() else []
REFUSED = {"llama2l_sampler": {"KV604"}, "gemma3text": {"KV120"}}
"""On-device sampling leaves no logits: the consumer would take off the last buffer. A cache that
grows cannot be retained."""
WARNED = {
    "deepseekv3_mla": {"KV606", "KV607"},
    "gemma3vlm_dual": {"KV606", "KV607"},
}
"""MLA's two parts differ in size, and so do a window and the context: hybrids."""


@real
@pytest.mark.parametrize(
    "source", thin(WHOLE, 2), ids=lambda path: f"{path.parent.name}/{path.name[:12]}"
)
def test_a_real_export_for_the_consumer_is_taken_by_it(source: Path, tmp_path: Path, run) -> None:
    case = source.parent.name
    if not any(
        "past_" in n or "_kv." in n for path in source.rglob("*.onnx") for n in outputs(path)
    ):
        pytest.skip("an encoder")
    result = tmp_path / "out"
    renamed = run(source, "--target", "vllm-qaic", "-d", result)
    if case in REFUSED:
        assert renamed.code == 1
        assert not result.exists()
        assert run(source, "--prefix", "vllmKvCache", "-d", result).code == 0
    else:
        assert renamed.code == 0
    found = document(run("check-consumer", result, "--format", "json"))
    assert codes(found) == REFUSED.get(case, set()) | WARNED.get(case, set())
    assert found["ordered"] is True
    assert all(slot["output"] == f"{slot['input']}_RetainedState" for slot in found["slots"])
    assert [slot["layer"] for slot in found["slots"]] == sorted(s["layer"] for s in found["slots"])


def outputs(path: Path) -> list[str]:
    """Return the names of a model's outputs."""
    return [value.name for value in onnx.load(path, load_external_data=False).graph.output]


def test_a_merged_model_is_renamed_together_with_its_windows(tmp_path: Path, run) -> None:
    """Renamed alone, it would have another token than its windows (KV303)."""
    export = tmp_path / "export"
    write_windows(export / "onnx_layerwise_tmp", 2)
    model = build_window(0, 2)
    (export / "merged_0-2.onnx").write_bytes(model.SerializeToString())
    found = document(run("check-consumer", export, "--format", "json"))
    (finding,) = (each for model in found["models"] for each in model["findings"])
    assert finding["code"] == "KV601"
    assert finding["hint"] == "rename all files of the set with `--target vllm-qaic`"
    assert run(export, "--target", "vllm-qaic").code == 0
    assert run("check-consumer", export).code == 0


def test_a_rename_is_not_suggested_where_it_cannot_help(tmp_path: Path, run) -> None:
    """A cache with three axes stays one under any name."""
    path = tmp_path / "m.onnx"
    shape = ("batch_size", "ctx_len", 8)
    names = [f"past_{part}.0" for part in ("key", "value")]
    inputs = [info(name, *shape) for name in names]
    retained = [info(f"{name}_RetainedState", *shape) for name in names]
    nodes = [node("Identity", [name], [f"{name}_RetainedState"]) for name in names]
    nodes.append(node("Identity", ["x"], ["logits"]))
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [info("x", "batch_size", 1, 4), *inputs],
        [info("logits", "batch_size", 1, 4), *retained],
    )
    onnx.save(onnx.helper.make_model(graph), path)
    model = document(run("check-consumer", path, "--format", "json"))["models"][0]
    said = [(finding["code"], finding["hint"]) for finding in model["findings"]]
    assert "KV601" not in dict(said)
    assert "no option" in dict(said)["KV610"]


@pytest.mark.parametrize("target", ["vllm-qaic", "vllm-qaic-legacy", "qefficient"])
def test_a_buffer_with_the_token_on_one_side_is_not_retained(
    target: str, tmp_path: Path, run
) -> None:
    half = tmp_path / "half.onnx"
    model = onnx.load(FIXTURES / "plain" / "decoder.onnx")
    for place in (model.graph.input, model.graph.node):
        for item in place:
            if isinstance(item, onnx.ValueInfoProto) and item.name == "past_key.0":
                item.name = "past_key.0_vllmKvCache"
            elif isinstance(item, onnx.NodeProto):
                renamed = ["past_key.0_vllmKvCache" if n == "past_key.0" else n for n in item.input]
                item.input[:] = renamed
    onnx.save(model, half)
    found = document(run("check-consumer", half, "--target", target, "--format", "json"))
    assert found["exit_code"] == 1
    assert codes(found) & {"KV601", "KV602", "KV609"}
    assert "different token" not in run("check-consumer", half, "--target", target).err
    compared = run("compare", half, half, "--target", target, "--format", "json")
    assert json.loads(compared.out)["exit_code"] == 1


def test_a_counter_that_nobody_moves_leaves_decode_unknown(tmp_path: Path, run) -> None:
    """What transformers' static cache counts says where decode writes."""
    source, renamed = tmp_path / "source.onnx", tmp_path / "renamed.onnx"
    names = [f"{side}.past_key_values.layers.{{layer}}.{{part}}" for side in ("input", "output")]
    static = {"update": "inplace", "shape": ("batch_size", 2, 16, 4)}
    counter = {"update": "inplace", "shape": (), "dtype": onnx.TensorProto.INT64}
    caches = [
        *list_caches(names, parts=["cumulative_length"], **counter),
        *list_caches(names, parts=["keys", "values"], **static),
    ]
    onnx.save(build_model(caches), source)
    rules = tmp_path / "rules.toml"
    rules.write_text(STATIC_RULES)
    by_rules = ("--rules", rules)
    rename = (source, *by_rules, "-o", renamed)
    assert "KV630" in run(*rename, "--target", "vllm-qaic").err
    assert not renamed.exists()
    assert run(*rename, "--prefix", "vllmKvCache").code == 0
    found = document(run("check-consumer", renamed, *by_rules, "--format", "json"))
    assert codes(found) == {"KV630"}
    compared = json.loads(run("compare", renamed, renamed, *by_rules, "--format", "json").out)
    assert {finding["code"] for finding in compared["findings"]} == {"KV630"}
