"""``--target``: the token of a consumer, and whether it can take what becomes of the models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import pytest
import window_sets
from conftest import Run
from models import saved
from onnx import ModelProto

import onnxkvrename
from onnxkvrename import ModelError, load_rules
from onnxkvrename.files.find import find_jobs
from onnxkvrename.renaming.run import rename_batch
from onnxkvrename.rules.request import Request

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
TARGETED = Request(target="vllm-qaic")


def outputs(path: Path) -> list[str]:
    """Return the names of a model's outputs."""
    return [value.name for value in onnx.load(path, load_external_data=False).graph.output]


def test_a_target_gives_its_token(decoder: Path, run) -> None:
    outcome = run(decoder, "--target", "vllm-qaic")
    said = outcome.err.splitlines()
    assert (outcome.code, said[0]) == (0, f"{decoder}: 8 names changed")
    assert [line.partition(":")[0] for line in said[1:]] == ["checked for vllm-qaic"]
    assert outputs(decoder)[1] == "past_key.0_vllmKvCache_RetainedState"
    assert run(decoder, "--target", "vllm-qaic", "--check").code == 0


def test_passed_checks_are_told_on_stderr(decoder: Path, tmp_path: Path, run) -> None:
    plain = run(decoder, "--prefix", "vllmKvCache", "-n")
    both = ("--target", "vllm-qaic", "--verify")
    for options in ((*both, "-n"), both, (*both, "--check"), (*both, "--format", "github")):
        outcome = run(decoder, *options, "-o", tmp_path / "new.onnx", "--force")
        said = outcome.out if "github" in options else outcome.err
        assert "it selects, pairs and moves 4 buffers" in said
        assert "4 of 4 buffers retained" in said
        if options in (both, (*both, "-n")):
            assert outcome.out == plain.out
    (told,) = json.loads(run(decoder, *both, "-n", "--format", "json").out)["models"]
    assert (told["checked_for"], told["proved"]) == ("vllm-qaic", 4)
    (told,) = json.loads(run(decoder, "--prefix", "VLLM", "-n", "--format", "json").out)["models"]
    assert (told["checked_for"], told["proved"]) == (None, None)
    assert run(decoder, *both, "-q") == (0, "", "")
    assert "verified" not in plain.err


def test_verify_counts_only_what_it_proves(decoder: Path, run) -> None:
    """A custom operator that nobody can look into updates one of the buffers."""
    model = onnx.load(decoder)
    (node,) = (n for n in model.graph.node if "past_key.0_RetainedState" in n.output)
    node.op_type, node.domain = "Unknown", "elsewhere"
    del node.attribute[:]
    model.opset_import.add(domain="elsewhere", version=1)
    outcome = run(saved(model, decoder), "--target", "vllm-qaic", "--verify")
    assert (outcome.code, "KV113" in outcome.err) == (0, True)
    assert "3 of 4 buffers retained" in outcome.err


def test_the_same_token_may_be_given_as_well(decoder: Path, run) -> None:
    assert run(decoder, "--target", "vllm-qaic", "--prefix", "vllmKvCache").code == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--target", "vllm-qaic", "--prefix", "VLLM"], "vllm-qaic requires vllmKvCache"),
        (["--target", "vllm-qaic", "--strip"], "--strip and --target vllm-qaic cannot be combined"),
        (["--target", "vllm"], "no such target: vllm (did you mean vllm-qaic?)"),
        (["--prefix", "VLLM", "--full-transfer"], "--full-transfer requires --target"),
    ],
)
def test_what_does_not_go_with_a_target_is_refused(
    options: list[str], said: str, decoder: Path, run
) -> None:
    before = decoder.read_bytes()
    outcome = run(decoder, *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    assert decoder.read_bytes() == before


def test_what_the_consumer_cannot_take_is_not_written(tmp_path: Path, run) -> None:
    path = tmp_path / "sampler.onnx"
    shutil.copyfile(FIXTURES / "plain" / "sampler.onnx", path)
    before = path.read_bytes()
    outcome = run(path, "--target", "vllm-qaic")
    assert outcome.code == 1
    assert "error KV604: the model has no logits output" in outcome.err
    assert path.read_bytes() == before
    assert "`--prefix vllmKvCache`, without --target" in outcome.err
    assert run(path, "--prefix", "vllmKvCache").code == 0
    outcome = run("verify", path, "--target", "vllm-qaic")
    assert (outcome.code, "KV604" in outcome.err) == (1, True)
    found = onnxkvrename.verify(path, target="vllm-qaic").report.findings
    assert [finding.code for finding in found] == ["KV604"]


def test_one_such_model_keeps_all_from_being_written(decoder: Path, tmp_path: Path, run) -> None:
    path = tmp_path / "sampler.onnx"
    shutil.copyfile(FIXTURES / "plain" / "sampler.onnx", path)
    before = decoder.read_bytes()
    assert run(decoder, path, "--target", "vllm-qaic").code == 1
    assert decoder.read_bytes() == before


def test_a_model_that_mixes_up_its_buffers_is_never_called_usable(decoder: Path, run) -> None:
    """Every name looks right, but layer 0's output is made of layer 1's input, and the reverse."""
    model = onnx.load(decoder)
    first, second = "past_key.0_RetainedState", "past_key.1_RetainedState"
    exchanged = {first: second, second: first}
    for node in model.graph.node:
        node.output[:] = [exchanged.get(name, name) for name in node.output]
    mixed_up = decoder.with_name("mixed_up.onnx")
    onnx.save(model, mixed_up)

    outcome = run(mixed_up, "--target", "vllm-qaic", "-q")
    assert outcome.code == 1
    said = "past_key.0_vllmKvCache_RetainedState is computed from past_key.1_vllmKvCache, not from"
    assert f"error KV110: {said} its own input past_key.0_vllmKvCache" in outcome.err

    assert run(mixed_up, "--prefix", "vllmKvCache", "-q").code == 0  # checks names alone
    assert run(decoder, "--target", "vllm-qaic", "-q").code == 0
    layout = decoder.with_name("layout.json")
    layout.write_text(run("inspect", mixed_up, "--format", "json").out, "utf-8")
    for command in (
        ("verify", mixed_up, "--target", "vllm-qaic"),
        ("compare", decoder, mixed_up),
        ("compare", mixed_up, decoder),
        ("inspect", mixed_up),
        ("compare", decoder, layout),
    ):
        outcome = run(*command)
        assert (outcome.code, "KV110" in outcome.out + outcome.err) == (1, True), command


def test_names_are_judged_as_they_will_be(tmp_path: Path, run) -> None:
    path = tmp_path / "internal.onnx"
    model = onnx.load(FIXTURES / "plain" / "serving" / "hybrid.onnx")
    for part in model.graph.node:
        part.output[:] = [name.replace("_Ret", "_InternalRet") for name in part.output]
    for value in model.graph.output:
        value.name = value.name.replace("_Ret", "_InternalRet")
    saved(model, path)
    outcome = run(path, "--target", "vllm-qaic", "--full-transfer")
    assert outcome.code == 1
    assert "_vllmKvCache_InternalRetainedState) do not end in _RetainedState" in outcome.err
    assert "error KV602" in outcome.err
    assert run(path, "--target", "vllm-qaic", "--full-transfer", "--normalize").code == 0
    uniform = FIXTURES / "plain" / "internal_suffix.onnx"
    assert run(uniform, "--target", "vllm-qaic", "-o", tmp_path / "new.onnx").code == 0


def test_to_check_is_to_judge_them_as_they_will_be_too(decoder: Path, run) -> None:
    outcome = run(decoder, "--target", "vllm-qaic", "--check")
    assert outcome.code == 1
    assert "KV601" not in outcome.err


def test_another_token_does_not_give_way_unasked(decoder: Path, run) -> None:
    assert run(decoder, "--prefix", "VLLM").code == 0
    outcome = run(decoder, "--target", "vllm-qaic")
    assert outcome.code == 1
    assert "error KV202" in outcome.err
    assert run(decoder, "--target", "vllm-qaic", "--replace").code == 0


def test_states_that_would_be_cut_need_the_full_transfer(tmp_path: Path, run) -> None:
    path = FIXTURES / "plain" / "hybrid.onnx"
    refused = run(path, "--target", "vllm-qaic", "-o", tmp_path / "m.onnx")
    assert refused.code == 1
    assert "error KV605: recurrent_state.1_vllmKvCache" in refused.err
    taken = run(path, "--target", "vllm-qaic", "--full-transfer", "-o", tmp_path / "m.onnx")
    assert taken.code == 0
    assert "warning KV606" in taken.err
    strict = run(path, "--target", "vllm-qaic", "--full-transfer", "--strict", "-n")
    assert strict.code == 1
    assert "error KV606" in strict.err


def test_windows_are_judged_together(tmp_path: Path, run) -> None:
    """Each has logits of its own, and the model that they become has them once."""
    windows = FIXTURES / "plain" / "windows"
    assert run(windows, "--target", "vllm-qaic", "-d", tmp_path / "all", "-q") == (0, "", "")
    assert run("verify", tmp_path / "all", "--target", "vllm-qaic").code == 0


def test_a_window_of_another_shape_makes_the_whole_set_hybrid(tmp_path: Path, run) -> None:
    shutil.copytree(FIXTURES / "plain" / "windows", tmp_path / "windows")
    (path,) = (tmp_path / "windows" / "layer_1_2").glob("*.onnx")
    model = onnx.load(path, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith("past_"):
            value.type.tensor_type.shape.dim[2].dim_param = "sliding_window"
    onnx.save(model, path)
    together = run(tmp_path / "windows", "--target", "vllm-qaic", "-n")
    assert together.err.count("warning KV606") == 1
    alone = run(path, "--target", "vllm-qaic", "-n")
    assert alone.err.count("warning KV606") == 0


def test_a_finding_is_told_of_the_window_that_it_is_about(tmp_path: Path, run) -> None:
    shutil.copytree(FIXTURES / "plain" / "windows", tmp_path / "windows")
    (path,) = (tmp_path / "windows" / "layer_1_2").glob("*.onnx")
    model = onnx.load(path, load_external_data=False)
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith("past_"):
            value.type.tensor_type.elem_type = onnx.TensorProto.BFLOAT16
    onnx.save(model, path)
    outcome = run(tmp_path / "windows", "--target", "vllm-qaic", "-n", "--format", "json")
    models = json.loads(outcome.out)["models"]
    said = [[f["code"] for f in model["findings"] if f["code"] == "KV610"] for model in models]
    assert said == [[], ["KV610"], []]


def test_a_merge_is_judged_alone_and_one_on_its_way_to_it_is_not(tmp_path: Path, run) -> None:
    halfway = window_sets.build_window(1, 3)
    halfway.graph.output[0].name = halfway.graph.node[-1].output[0] = "hidden"
    saved(halfway, tmp_path / "merged_1-3.onnx")
    saved(window_sets.build_window(0, 3), tmp_path / "merged_0-3.onnx")
    assert run(tmp_path, "--target", "vllm-qaic", "-n", "-q").code == 0
    (tmp_path / "merged_0-3.onnx").unlink()
    assert "error KV604" in run(tmp_path, "--target", "vllm-qaic", "-n", "-q").err


def test_an_encoder_beside_its_decoder_is_nothing_to_the_consumer(tmp_path: Path, run) -> None:
    outcome = run(FIXTURES / "plain" / "vlm_dual", "--target", "vllm-qaic", "-d", tmp_path / "out")
    assert outcome.code == 0


def test_a_model_that_cannot_be_read_is_told_as_such(decoder: Path, tmp_path: Path, run) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"text")
    outcome = run(decoder, tmp_path / "broken.onnx", "--target", "vllm-qaic")
    assert outcome.code == 2
    assert "KV6" not in outcome.err


def test_one_buffer_in_two_scopes_is_refused(tmp_path: Path) -> None:
    model = onnx.load(FIXTURES / "plain" / "decoder.onnx")
    names = [value.name for value in (*model.graph.input, *model.graph.output)]
    for old in (name for name in names if ".1" in name):
        new = "other/" + old.replace(".1", ".0")
        for value in (*model.graph.input, *model.graph.output):
            value.name = new if value.name == old else value.name
        for node in model.graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
            node.output[:] = [new if name == old else name for name in node.output]
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    before = path.read_bytes()
    other = shutil.copyfile(FIXTURES / "VLLM" / "decoder.onnx", tmp_path / "other.onnx")
    request = TARGETED._replace(token="vllmKvCache")
    report = rename_batch(request, find_jobs([path, other]), load_rules())
    error = report.models[0].error
    assert isinstance(error, ModelError)
    assert "key of layer 0: past_key.0 and other/past_key.0" in error.message  # as in the file
    assert [finding.code for finding in report.models[1].findings] == ["KV202"]
    assert path.read_bytes() == before


def test_two_buffers_in_one_place_are_not_the_news_where_they_are_no_caches(
    decoder: Path, tmp_path: Path, run: Run
) -> None:
    """What is wrong with each has a finding, and the other models have theirs."""
    names = {"past_key.1": "other/past_key.0", "past_key.1_RetainedState": "lost"}
    path = saved(_rename_values(names), tmp_path / "m.onnx")
    outcome = run(path, decoder, "--target", "vllm-qaic", "-n", "--format", "json")
    assert outcome.code == 1
    broken, whole = json.loads(outcome.out)["models"]
    codes = {each["code"] for each in broken["findings"]}
    assert (broken["error"], "KV102" in codes) == (None, True)
    assert whole["status"] == "would-rename"


def test_the_library_checks_for_a_target_as_well(decoder: Path) -> None:
    report = rename_batch(TARGETED._replace(token="VLLM"), find_jobs([decoder]), load_rules())
    assert [finding.code for finding in report.findings] == ["KV601"]
    request = TARGETED._replace(token="vllmKvCache")
    report = rename_batch(request, find_jobs([decoder]), load_rules())
    assert report.compute_exit_code() == 0


def _rename_values(names: dict[str, str]) -> ModelProto:
    """Return a decoder with other names."""
    model = onnx.load(FIXTURES / "plain" / "decoder.onnx")
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    return model


def _name_half(token: str) -> ModelProto:
    """Return a decoder of which only the names of layer 0 carry a token."""
    names = {name: f"{name}_{token}" for name in ("past_key.0", "past_value.0")}
    names |= {f"{old}_RetainedState": f"{new}_RetainedState" for old, new in names.items()}
    return _rename_values(names)


@pytest.mark.parametrize("command", [("verify",), ("--check",)])
def test_a_half_named_model_has_one_finding_and_one_command(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """Its other names need the token too, which the same command adds."""
    monkeypatch.chdir(tmp_path)
    saved(_name_half("VLLM"), Path("m.onnx"))
    err = run(*command, "m.onnx", "--target", "vllm-qaic").err
    assert err.count("error KV") == 1
    assert "--replace" in err
    assert run("m.onnx", "--target", "vllm-qaic", "--replace").code == 0
    assert run("verify", "m.onnx", "--target", "vllm-qaic").code == 0


def test_names_without_the_token_are_counted_with_those_that_carry_another_one(
    tmp_path: Path, run: Run
) -> None:
    path = saved(_name_half("VLLM"), tmp_path / "m.onnx")
    assert (
        "8 names (first: past_key.0_VLLM) do not carry the token vllmKvCache (4 carry a "
        "different one); vllm-qaic ignores these buffers"
    ) in run("verify", path, "--target", "vllm-qaic").err


def test_a_half_named_model_with_the_right_token_gets_it_in_the_other_names(
    tmp_path: Path, run: Run
) -> None:
    path = saved(_name_half("vllmKvCache"), tmp_path / "m.onnx")
    outcome = run(path, "--target", "vllm-qaic", "--check")
    assert (outcome.code, "error KV" in outcome.err) == (1, False)
    err = run("verify", path, "--target", "vllm-qaic").err
    assert "4 names (first: past_key.1) do not carry" in err
