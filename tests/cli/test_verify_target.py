"""``onnxkvrename verify --target``: can a consumer use the KV buffers of these models?"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
from exporter_models import build_model, list_caches
from hints import find_commands
from models import info, node
from tiers import thin
from window_sets import build_window, write_windows

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
EXPORTS = ROOT.parent / "shared" / "exports"

TARGET = ("--target", "vllm-qaic")
RETAINED = "4 of 4 buffers retained by dataflow, layers 0-1, updated by ScatterElements"
READY = "ready for vllm-qaic: it will select, pair and move all {} buffers"
STATIC = " (static check; not run on a device)"


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


def test_a_model_that_the_consumer_can_use_is_ready(taken: Path, run) -> None:
    outcome = run("verify", taken, *TARGET)
    assert outcome == (
        0,
        f"{taken}: {RETAINED}; token vllmKvCache\n{taken}: {READY.format(4)}{STATIC}\n",
        "",
    )
    assert run("verify", taken, *TARGET, "-q") == (0, "", "")


def test_nothing_is_written(taken: Path, run, snapshot) -> None:
    before = snapshot(taken.parent)
    run("verify", taken, *TARGET)
    assert snapshot(taken.parent) == before


def test_verbose_shows_the_slots(taken: Path, run) -> None:
    lines = run("verify", taken, *TARGET, "-v").out.splitlines()
    assert lines[5].startswith(f"{taken}: ready for vllm-qaic")
    assert lines[6] == "  0: past_key.0_vllmKvCache <- past_key.0_vllmKvCache_RetainedState"
    assert len(lines) == 10


def test_a_plain_model_cannot_be_taken_and_is_told_how(decoder: Path, run) -> None:
    outcome = run("verify", decoder, *TARGET)
    assert outcome.code == 1
    assert outcome.out.startswith(
        f"{decoder}: {RETAINED}; no token\n{decoder}: vllm-qaic cannot use it"
    )
    assert f"{decoder}: error KV601: 8 names (first: past_key.0)" in outcome.err
    (command,) = find_commands(outcome.err)
    assert run(*shlex.split(command)[1:], "-q").code == 0
    assert run("verify", decoder, *TARGET).code == 0


def test_a_verdict_has_the_colour_of_its_outcome(
    decoder: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[31mvllm-qaic cannot use it" in run("verify", decoder, *TARGET).out
    run(decoder, "--target", "vllm-qaic", "-q")
    assert "\x1b[32mready for vllm-qaic" in run("verify", decoder, *TARGET).out


def test_the_hint_is_a_command_whatever_the_model_is_called(decoder: Path, run) -> None:
    path = decoder.rename(decoder.with_name("my model; rm -rf $HOME.onnx"))
    found = document(run("verify", path, *TARGET, "--format", "json"))
    hint = found["models"][0]["findings"][0]["hint"]
    assert shlex.split(hint.strip("`")) == ["onnxkvrename", str(path), "--target", "vllm-qaic"]


def test_all_words_of_a_verdict_are_in_the_document(taken: Path, run) -> None:
    found = document(run("verify", taken, *TARGET, "--format", "json"))
    assert found["target"] == "vllm-qaic"
    (of_set,) = found["sets"]
    assert (of_set["models"], of_set["ready"]) == ([str(taken)], True)
    assert (of_set["ordered"], of_set["hybrid"], of_set["alternative"]) == (True, False, None)
    assert [(s["slot"], s["layer"], s["part"]) for s in of_set["slots"]] == [
        (0, 0, "key"),
        (1, 0, "value"),
        (2, 1, "key"),
        (3, 1, "value"),
    ]
    assert of_set["slots"][3] == {
        "slot": 3,
        "input": "past_value.1_vllmKvCache",
        "output": "past_value.1_vllmKvCache_RetainedState",
        "layer": 1,
        "part": "value",
        "kind": "full_attention",
        "dtype": "FLOAT",
        "shape": ["batch_size", 2, "ctx_len", 4],
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
    outcome = run("verify", taken, *TARGET, "--format", "json")
    found = document(outcome)
    assert outcome.code == 1
    assert codes(found) >= {"KV608"}
    slots = found["sets"][0]["slots"]
    assert slots[0]["output"] == "a_vllmKvCache_RetainedState"
    assert slots[4]["input"] is None


def test_an_output_that_is_an_input_as_well_stands_alone(taken: Path, run) -> None:
    model = onnx.load(taken)
    model.graph.input.append(next(o for o in model.graph.output if "State" in o.name))
    onnx.save(model, taken)
    outcome = run("verify", taken, *TARGET, "--format", "json")
    assert outcome.code == 1
    assert codes(document(outcome)) >= {"KV106", "KV609"}


def test_a_job_that_cannot_be_done_has_a_document_too(tmp_path: Path, run) -> None:
    outcome = run("verify", tmp_path / "none.onnx", *TARGET, "--format", "json")
    found = document(outcome)
    assert outcome.code == 2
    assert (found["target"], found["models"], found["sets"]) == (None, [], [])
    assert found["error"]["path"] == str(tmp_path / "none.onnx")


def test_a_model_that_cannot_be_read_keeps_all_from_being_checked(taken: Path, run) -> None:
    bad = taken.with_name("bad.onnx")
    bad.write_text("text")
    outcome = run("verify", taken, bad, *TARGET)
    assert (outcome.code, outcome.out) == (2, f"{taken}: {RETAINED}; token vllmKvCache\n")
    assert "the other models were not checked for vllm-qaic" in outcome.err


def test_an_unknown_consumer_is_an_error_before_a_model_is_read(tmp_path: Path, run) -> None:
    outcome = run("verify", tmp_path / "none.onnx", "--target", "nobody")
    assert (outcome.code, outcome.err) == (
        2,
        "error: no such target: nobody (targets: qefficient, vllm-qaic, vllm-qaic-legacy)\n",
    )


def test_an_exported_variable_counts_unless_a_token_is_typed(
    decoder: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNXKVRENAME_TARGET", "vllm-qaic")
    assert "error KV601" in run("verify", decoder).err
    outcome = run("verify", decoder, "--prefix", "VLLM")
    assert ("KV116" in outcome.err, "KV601" in outcome.err) == (True, False)


def test_findings_are_shown_beside_files(decoder: Path, taken: Path, run) -> None:
    found = run("verify", decoder, *TARGET, "--format", "github")
    assert found.code == 1
    assert f"::error file={decoder},title=KV601::8 names (first: past_key.0)" in found.out
    good = run("verify", taken, *TARGET, "--format", "github")
    assert f"::notice file={taken},title=target::ready for vllm-qaic: it" in good.out
    assert run("verify", taken, *TARGET, "--format", "github", "-q").out == ""


def test_states_need_the_full_transfer(tmp_path: Path, run) -> None:
    path = tmp_path / "hybrid.onnx"
    run(FIXTURES / "plain" / "hybrid.onnx", "--prefix", "vllmKvCache", "-o", path)
    assert "error KV605" in run("verify", path, *TARGET).err
    outcome = run("verify", path, *TARGET, "--full-transfer")
    assert outcome.code == 0
    assert f"{path}: {READY.format(6)}, of different shapes or dtypes{STATIC}\n" in outcome.out
    assert run("verify", path, *TARGET, "--full-transfer", "--strict").code == 1


def test_windows_are_one_model(tmp_path: Path, run) -> None:
    run(FIXTURES / "plain" / "windows", "--target", "vllm-qaic", "-d", tmp_path / "set")
    outcome = run("verify", tmp_path / "set", *TARGET)
    assert (outcome.code, outcome.err) == (0, "")
    *_, last = outcome.out.splitlines()
    assert last.startswith(f"{tmp_path / 'set'} (3 models): {READY.format(6)}{STATIC}; not there: ")
    shutil.rmtree(tmp_path / "set" / "layer_1_2")
    assert "error KV302" in run("verify", tmp_path / "set", *TARGET).err


def test_a_finding_is_told_of_the_window_that_it_is_about(tmp_path: Path, run) -> None:
    run(FIXTURES / "plain" / "windows", "--target", "vllm-qaic", "-d", tmp_path / "set")
    window = tmp_path / "set" / "layer_1_2" / "Tiny_layer_tmp_1_2.onnx"
    model = onnx.load(window, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith("past_key.1"):
            del value.type.tensor_type.shape.dim[:]
    onnx.save(model, window)
    found = document(run("verify", tmp_path / "set", *TARGET, "--format", "json"))
    said = {Path(m["path"]).name: {f["code"] for f in m["findings"]} for m in found["models"]}
    assert "KV610" in said.pop(window.name)
    assert all("KV610" not in codes for codes in said.values())
    (of_set,) = found["sets"]
    assert (len(of_set["models"]), of_set["ready"]) == (3, False)


def test_models_of_a_directory_are_checked_each_for_itself(taken: Path, decoder: Path, run) -> None:
    """A second decoder beside the first one: two models, not one with the same buffer twice."""
    run(decoder, *TARGET, "-q")
    shutil.copyfile(FIXTURES / "plain" / "mla.onnx", taken.with_name("plain.onnx"))
    outcome = run("verify", taken.parent, *TARGET)
    assert outcome.code == 1
    verdicts = [line for line in outcome.out.splitlines() if "vllm-qaic" in line]
    said = {line.partition(": ")[0]: line.partition(": ")[2][:9] for line in verdicts}
    plain = str(taken.with_name("plain.onnx"))
    assert said == {plain: "vllm-qaic", str(decoder): "ready for", str(taken): "ready for"}


def test_an_encoder_alone_has_nothing_to_take(run) -> None:
    outcome = run("verify", FIXTURES / "plain" / "vlm_dual" / "encoder.onnx", *TARGET)
    assert outcome.code == 1
    assert "ready" not in outcome.out
    assert "error KV001" in outcome.err


def test_no_buffer_is_no_success_either_where_the_source_shows_what_it_is(
    tmp_path: Path, run
) -> None:
    encoder = FIXTURES / "plain" / "vlm_dual" / "encoder.onnx"
    outcome = run("verify", encoder, "--renamed-from", encoder, *TARGET)
    assert (outcome.code, "error KV001" in outcome.err) == (1, True)


def test_an_update_that_the_graph_does_not_show_is_told(tmp_path: Path, run) -> None:
    path = tmp_path / "derived.onnx"
    shutil.copyfile(FIXTURES / "plain" / "derived_symbols.onnx", path)
    found = document(run("verify", path, "--target", "qefficient", "--format", "json"))
    assert codes(found) == {"KV113"}
    assert found["sets"][0]["ready"]
    assert run("verify", path, "--target", "qefficient", "--strict").code == 1


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
    found = document(run("verify", result, *TARGET, "--format", "json"))
    assert codes(found) == REFUSED.get(case, set()) | WARNED.get(case, set())
    for of_set in found["sets"]:
        assert of_set["ordered"] is True
        slots = of_set["slots"]
        assert all(slot["output"] == f"{slot['input']}_RetainedState" for slot in slots)
        assert [slot["layer"] for slot in slots] == sorted(slot["layer"] for slot in slots)


def outputs(path: Path) -> list[str]:
    """Return the names of a model's outputs."""
    return [value.name for value in onnx.load(path, load_external_data=False).graph.output]


def test_a_merged_model_is_renamed_together_with_its_windows(tmp_path: Path, run) -> None:
    """Renamed alone, it would have another token than its windows (KV303)."""
    export = tmp_path / "export"
    write_windows(export / "onnx_layerwise_tmp", 2)
    model = build_window(0, 2)
    (export / "merged_0-2.onnx").write_bytes(model.SerializeToString())
    found = document(run("verify", export, *TARGET, "--format", "json"))
    findings = [each for model in found["models"] for each in model["findings"]]
    assert [finding["code"] for finding in findings] == ["KV601", "KV601"]
    hint = f"`onnxkvrename {export} --target vllm-qaic`"
    assert [finding["hint"] for finding in findings] == [hint, hint]
    assert run(export, "--target", "vllm-qaic").code == 0
    assert run("verify", export, *TARGET).code == 0


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
    model = document(run("verify", path, *TARGET, "--format", "json"))["models"][0]
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
    found = document(run("verify", half, "--target", target, "--format", "json"))
    assert found["exit_code"] == 1
    assert codes(found) & {"KV601", "KV602", "KV609"}
    assert "different token" not in run("verify", half, "--target", target).err
    compared = run("compare", half, half, "--target", target, "--format", "json")
    assert json.loads(compared.out)["exit_code"] == 1


def test_a_counter_that_nobody_moves_leaves_decode_unknown(tmp_path: Path, run) -> None:
    """What transformers' static cache counts says where decode writes."""
    source, renamed = tmp_path / "source.onnx", tmp_path / "renamed.onnx"
    names = ("layers.{layer}.{part}", "layers.{layer}.{part}_RetainedState")
    static = {"update": "inplace", "shape": ("batch_size", 2, 16, 4)}
    counter = {"update": "inplace", "shape": (), "dtype": onnx.TensorProto.INT64}
    caches = [
        *list_caches(names, parts=["cumulative_length"], **counter),
        *list_caches(names, parts=["keys", "values"], **static),
    ]
    onnx.save(build_model(caches), source)
    rules = tmp_path / "rules.toml"
    rules.write_text(r"""
        update = "inplace"
        [[kv]]
        kind = "attention"
        input = 'layers\.{layer}\.{part}{token}'
        output = '{input}_RetainedState'
        roles = { key = "keys", value = "values" }
        [[keep]]
        reason = "position"
        pattern = '.*\.cumulative_length(_RetainedState)?'
        """)
    by_rules = ("--rules", rules)
    rename = (source, *by_rules, "-o", renamed)
    assert "KV630" in run(*rename, "--target", "vllm-qaic").err
    assert not renamed.exists()
    assert run(*rename, "--prefix", "vllmKvCache").code == 0
    found = document(run("verify", renamed, *TARGET, *by_rules, "--format", "json"))
    assert codes(found) == {"KV630"}
    compared = json.loads(run("compare", renamed, renamed, *by_rules, "--format", "json").out)
    assert {finding["code"] for finding in compared["findings"]} == {"KV630"}
