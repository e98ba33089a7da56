"""Configurations by which a runtime binds names: they follow their models, or no model changes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from genai_folders import DECODER, RULES, build_decoder, build_folder, render_config
from kill_commands import read_directory
from models import saved
from onnx import load
from tiers import thin

from onnxkvrename import load_rules
from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.sidecars.bindings import (
    BindingPlan,
    BoundModels,
    find_printed_names,
    plan_bindings,
)
from onnxkvrename.sidecars.formats import BUILT_IN
from onnxkvrename.sidecars.model_names import ModelNames, OneModel
from onnxkvrename.sidecars.tree import parse_json_tree

CONFIG, YAML = "genai_config.json", "inference_metadata.yaml"
FORMAT = next(each for each in BUILT_IN if each.is_binding)
ANY_PLACE = replace(FORMAT, reads_template=None)
KEYS = ("past_key_values.%d.key", "past_key_values.%d.value", "present.%d.key", "present.%d.value")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with rules."""
    (tmp_path / "rules.toml").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def genai(here: Path) -> Path:
    """A folder of onnxruntime-genai with one decoder."""
    return build_folder(here / "genai")


@pytest.fixture
def go(run):
    """Run a rename with the rules."""
    return lambda *args: run(*args, "--rules", "rules.toml")


def with_token(text: str, token: str = "_VLLM") -> str:
    """A configuration with the token in every template and name of the default decoder."""
    for name in KEYS:
        text = text.replace(f'"{name}"', f'"{name}{token}"')
    return text


# A template follows, byte for byte, and comes back.


def test_a_template_follows_when_all_its_names_change(genai: Path, go) -> None:
    before = read_directory(genai)
    outcome = go("genai", "--prefix", "VLLM")
    assert (outcome.code, f"{genai.name}/{CONFIG}: 4 names changed" in outcome.err) == (0, True)
    assert (genai / CONFIG).read_text() == with_token(before[CONFIG].decode())
    assert go("genai", "--strip").code == 0
    assert read_directory(genai) == before


def test_it_follows_a_model_that_is_named_alone(genai: Path, go) -> None:
    assert go("genai/model.onnx", "--prefix", "VLLM").code == 0
    assert (genai / CONFIG).read_text() == with_token(render_config())
    assert go("genai/model.onnx", "--prefix", "B", "--replace").code == 0
    assert (genai / CONFIG).read_text() == with_token(render_config(), "_B")


def test_a_token_with_the_number_of_the_layer_is_no_layer(here: Path, go) -> None:
    folder = build_folder(here / "one", model=build_decoder([0]))
    before = (folder / CONFIG).read_text()
    assert go("one", "--prefix", "V0").code == 0
    assert (folder / CONFIG).read_text() == with_token(before, "_V0")
    assert go("one", "--strip").code == 0
    assert (folder / CONFIG).read_text() == before


def test_layers_may_be_missing_and_have_two_digits(here: Path, go) -> None:
    build_folder(here / "far", model=build_decoder([3, 11]))
    assert go("far", "--prefix", "VLLM").code == 0
    assert (here / "far" / CONFIG).read_text() == with_token(render_config())


def test_the_format_of_the_file_stays(genai: Path, go) -> None:
    text = '{ "model":\r\n\t{"decoder":{"filename" : "model.onnx",'
    text += '"inputs":{"k":"past_key_values.%d.key","v":"past_key_values.%d\\u002evalue"},'
    text += ' "outputs":{"k":"present.%d.key","v":"present.%d.value"}}} }'
    (genai / CONFIG).write_bytes(text.encode())
    assert go("genai", "--prefix", "VLLM").code == 0
    now = text.replace('key"', 'key_VLLM"').replace('value"', 'value_VLLM"')
    assert (genai / CONFIG).read_bytes() == now.encode()


# Which section is of which model


def test_a_pipeline_names_its_stages_one_by_one(here: Path, go) -> None:
    names = [
        f"{side}.0.{part}" for side in ("past_key_values", "present") for part in ("key", "value")
    ]
    stage = {"filename": "layers.onnx", "inputs": ["x", *names[:2]], "outputs": names[2:]}
    pipeline = [{"embeddings": {"filename": "embed.onnx", "inputs": ["x"]}, "layers": stage}]
    decoder = {**DECODER, "pipeline": pipeline}
    config = json.dumps({"model": {"decoder": decoder}})
    embed = build_decoder(())
    folder = build_folder(here / "stages", config, embed=embed, layers=build_decoder([0]))
    before = read_directory(folder)
    assert go("stages", "--prefix", "VLLM").code == 0
    now = (folder / CONFIG).read_text()
    assert now.count("_VLLM") == 8
    assert all(f'"{name}_VLLM"' in now for name in (*names, *KEYS))
    assert go("stages", "--strip").code == 0
    assert read_directory(folder) == before


def test_templates_of_a_pipeline_need_all_its_stages(here: Path, go) -> None:
    pipeline = [{name: {"filename": f"{name}.onnx"}} for name in ("first", "second")]
    config = json.dumps({"model": {"decoder": {**DECODER, "pipeline": pipeline}}})
    models = {"first": build_decoder([0]), "second": build_decoder([1])}
    folder = build_folder(here / "stages", config, **models)
    before = read_directory(folder)
    outcome = go("stages/first.onnx", "--prefix", "VLLM")
    assert outcome.code == 1
    assert f"KV406: stages/{CONFIG} cannot be" in outcome.err
    assert "past_key_values.%d.key" in outcome.err
    assert "past_key_values.1.key" in outcome.err
    assert read_directory(folder) == before
    assert go("stages", "--prefix", "VLLM").code == 0
    assert (folder / CONFIG).read_text() == with_token(config)


def test_a_section_of_another_model_stays(here: Path, go) -> None:
    config = render_config(draft={"filename": "draft.onnx", **DECODER})
    folder = build_folder(here / "two", config, model=build_decoder(), draft=build_decoder([0]))
    assert go("two/draft.onnx", "--prefix", "VLLM").code == 0
    head, tail = config.split('"draft"')
    assert (folder / CONFIG).read_text() == head + '"draft"' + with_token(tail)
    assert go("two/model.onnx", "--prefix", "VLLM").code == 0
    assert (folder / CONFIG).read_text() == with_token(config)


def test_a_model_that_no_section_names_is_none_of_its_business(genai: Path, go) -> None:
    saved(build_decoder(), genai / "other.onnx")
    outcome = go("genai/other.onnx", "--prefix", "VLLM")
    assert (outcome.code, "KV4" in outcome.err) == (0, False)
    assert (genai / CONFIG).read_text() == render_config()
    assert go("genai/model.onnx", "--prefix", "VLLM").code == 0  # and the other way round
    assert (genai / CONFIG).read_text() == with_token(render_config())


def test_the_configuration_may_be_one_directory_up(here: Path, go) -> None:
    config = render_config({"filename": "./decoder/model.onnx"})
    folder = build_folder(here / "up", config, embed=build_decoder(()))
    (folder / "decoder").mkdir()
    saved(build_decoder(), folder / "decoder" / "model.onnx")
    for model in ("up/decoder/model.onnx", "up"):
        assert go(model, "--prefix", "VLLM").code == 0
        assert (folder / CONFIG).read_text() == with_token(config)
        assert go(model, "--strip").code == 0
        assert (folder / CONFIG).read_text() == config
    (here / "up" / "decoder" / "other.onnx").write_bytes(
        (here / "up" / "decoder" / "model.onnx").read_bytes()
    )
    assert "KV4" not in go("up/decoder/other.onnx", "--prefix", "VLLM").err


@pytest.mark.parametrize("location", ["../genai/model.onnx", "{here}/genai/model.onnx"])
def test_a_location_may_lead_out_of_the_folder_and_back(location: str, here: Path, go, run) -> None:
    config = render_config({"filename": location.format(here=here)})
    folder = build_folder(here / "genai", config)
    assert go("genai", "--prefix", "VLLM").code == 0
    assert (folder / CONFIG).read_text() == with_token(config)
    assert go("genai", "--strip", "--sidecars", "off").code == 0
    outcome = run("verify", "genai/model.onnx", "--rules", "rules.toml")
    assert f"error KV406: genai/{CONFIG}" in outcome.err


@pytest.mark.parametrize("location", ["../far/model.onnx", "Model.onnx", "sub\\model.onnx", None])
def test_old_names_of_a_model_that_is_not_found_are_refused(
    location: str | None, here: Path, go
) -> None:
    """The runtime may find it all the same; a model of elsewhere is not opened."""
    decoder = {"filename": location} if location else {"filename": ""}
    text = render_config(decoder, vision={"filename": "vision.onnx"})
    folder = build_folder(here / "genai", text)
    (here / "far").mkdir()
    saved(build_decoder(), here / "far" / "model.onnx")
    before = read_directory(folder)
    outcome = go("genai", "--prefix", "VLLM")
    assert refused(outcome, f"genai/{CONFIG} cannot be updated", "past_key_values.%d.key")
    assert read_directory(folder) == before


def test_a_configuration_without_locations_is_of_the_models_beside_it(here: Path, go) -> None:
    text = json.dumps({"names": KEYS})
    folder = build_folder(here / "x", model=build_decoder())
    (folder / CONFIG).write_text(text)
    (folder / "sub").mkdir()
    saved(build_decoder(), folder / "sub" / "model.onnx")
    assert go("x/sub/model.onnx", "--prefix", "VLLM").code == 0
    assert (folder / CONFIG).read_text() == text


def test_sections_of_the_same_models_are_planned_at_once() -> None:
    """To collect the names of a model takes long, and a file may have thousands of objects."""
    counts = []
    model = OneModel(graph_values=("a.0",), name_map={"a.0": "a.0_V"})
    other = OneModel(graph_values=("b",))

    def build_names(models: Iterable[OneModel]) -> ModelNames:
        counts.append(1)
        return ModelNames.from_models(models, TokenChange("V"), load_rules())

    def plan(sections: list[list[str]], others: int) -> BindingPlan:
        tree = parse_json_tree(json.dumps([{"f": files, "t": "a.%d"} for files in sections]))
        there = {f"{number}.onnx": other._replace() for number in range(others)}
        there["model.onnx"] = model
        return plan_bindings(tree, ANY_PLACE, BoundModels(there.get, (), build_names))

    sections = [["model.onnx", f"{number}.onnx"] for number in range(300)]
    assert (len(plan(sections, 0).changes), len(counts)) == (300, 1)
    with pytest.raises(UnreadableTextError, match="256 groups"):
        plan(sections, 300)


# What cannot follow is refused, and nothing is renamed.


def refused(outcome, problem: str, *parts: str) -> bool:
    told = outcome.err.replace("\n", " ")
    named = f"error KV406: {problem}" in told and all(part in told for part in parts)
    return outcome.code == 1 and named


def test_a_template_of_names_that_do_not_all_change_is_refused(here: Path, go) -> None:
    rules = RULES + "[[keep]]\nreason = 'pinned'\npattern = '.*[.]1[.]key'\n"
    folder = build_folder(here / "genai")
    (here / "rules.toml").write_text(rules)
    before = read_directory(folder)
    outcome = go("genai", "--prefix", "VLLM")
    problem = "past_key_values.%d.key matches 2 names, and past_key_values.1.key stays"
    assert refused(outcome, f"genai/{CONFIG} cannot be updated: {problem}")
    assert read_directory(folder) == before
    outcome = go("genai", "--prefix", "VLLM", "--sidecars", "off")
    assert (outcome.code, outcome.err.count("warning KV406")) == (0, 1)
    assert (folder / CONFIG).read_bytes() == before[CONFIG]


@pytest.mark.parametrize(
    ("part", "key"), [("conv_state", "past_conv_names"), ("key", "past_key_names")]
)
def test_a_name_that_the_runtime_makes_itself_is_refused(
    part: str, key: str, here: Path, go
) -> None:
    model = build_decoder(parts=("key", "value", "conv_state"))
    config = render_config()
    if part == "key":
        config = json.dumps({"model": {"decoder": {"filename": "model.onnx"}}})
    folder = build_folder(here / "genai", config, model=model)
    before = read_directory(folder)
    outcome = go("genai", "--prefix", "VLLM")
    count = 12 if part == "key" else 4
    assert refused(outcome, f"genai/{CONFIG} cannot be updated", f"{count} names")
    said = f'first add to model.decoder.inputs: "{key}": "past_key_values.%d.{part}"'
    assert said in outcome.err
    side = '; to model.decoder.outputs: "present_'
    assert f'{side}{key.removeprefix("past_")}": "present.%d.{part}"' in outcome.err
    assert read_directory(folder) == before
    # Back to the names that the runtime makes is right again.
    assert go("genai", "--prefix", "VLLM", "--sidecars", "off").code == 0
    assert go("genai", "--strip").code == 0
    assert read_directory(folder) == before


def test_with_the_templates_written_it_follows(here: Path, go) -> None:
    model = build_decoder(parts=("key", "value", "conv_state"))
    inputs = {**DECODER["inputs"], "past_conv_names": "past_key_values.%d.conv_state"}
    outputs = {**DECODER["outputs"], "present_conv_names": "present.%d.conv_state"}
    folder = build_folder(
        here / "genai", render_config({"inputs": inputs, "outputs": outputs}), model=model
    )
    assert go("genai", "--prefix", "VLLM").code == 0
    assert (folder / CONFIG).read_text().count("_VLLM") == 6


@pytest.mark.parametrize("place", ["", "model", "model.decoder", "model.decoder.outputs", "search"])
def test_a_template_where_the_runtime_does_not_read_it_does_not_count(
    place: str, here: Path, go
) -> None:
    model = build_decoder(parts=("key", "value", "conv_state"))
    document = json.loads(render_config())
    document.setdefault("search", {})
    at = document
    for key in place.split(".") if place else ():
        at = at[key]
    at["past_conv_names"] = "past_key_values.%d.conv_state"
    document["model"]["decoder"]["outputs"]["present_conv_names"] = "present.%d.conv_state"
    folder = build_folder(here / "genai", json.dumps(document), model=model)
    before = read_directory(folder)
    outcome = go("genai", "--prefix", "VLLM")
    assert refused(outcome, f"genai/{CONFIG} cannot be updated", "2 names")
    assert (
        'first add to model.decoder.inputs: "past_conv_names": "past_key_values.%d.conv_state"'
        in outcome.err
    )
    assert "model.decoder.outputs" not in outcome.err
    assert read_directory(folder) == before
    # Where it is read, it counts, and what is elsewhere stays as it is.
    inputs = document["model"]["decoder"]["inputs"]
    inputs["past_conv_names"] = "past_key_values.%d.conv_state"
    (folder / CONFIG).write_text(json.dumps(document))
    assert go("genai", "--prefix", "VLLM").code == 0
    assert (folder / CONFIG).read_text().count("_VLLM") == 6


def test_a_name_too_long_for_the_runtime_is_refused(genai: Path, go) -> None:
    token = "V" * 40  # past_key_values.1.value_ has 24 characters, and 63 are possible
    outcome = go("genai", "--prefix", token)
    assert refused(outcome, f"genai/{CONFIG} cannot be updated", "past_key_values.%d.value")
    assert "63 bytes" in outcome.err
    assert go("genai", "--prefix", token[:-1]).code == 0


def test_a_stage_that_has_the_name_too_and_stays_is_refused(here: Path, go) -> None:
    names = ["past_key_values.0.key", "present.0.key"]
    stages = {"prompt": build_decoder([0], ["key"]), "token": build_decoder([0], ["key"])}
    pipeline = {name: {"filename": f"{name}.onnx"} for name in stages}
    config = json.dumps({"model": {"decoder": {"inputs": names, "pipeline": pipeline}}})
    folder = build_folder(here / "genai", config, **stages)
    outcome = go("genai/prompt.onnx", "--prefix", "VLLM")
    problem = (
        "past_key_values.0.key changes in one model, and in another past_key_values.0.key stays"
    )
    assert refused(outcome, f"genai/{CONFIG} cannot be updated: {problem}")
    assert go("genai", "--prefix", "VLLM").code == 0
    assert (folder / CONFIG).read_text().count("_VLLM") == 2


def test_one_that_cannot_be_read_is_refused(genai: Path, go) -> None:
    before = (genai / "model.onnx").read_bytes()
    (genai / CONFIG).write_text("{")
    outcome = go("genai", "--prefix", "VLLM")
    assert (outcome.code, "is not JSON" in outcome.err) == (2, True)
    assert (genai / "model.onnx").read_bytes() == before


def test_one_that_cannot_be_read_does_not_hide_the_profile_that_fits(genai: Path, run) -> None:
    """The default profile knows no name of the model, so its sidecars do not matter to it."""
    (genai / CONFIG).write_text("{")
    outcome = run("genai", "--prefix", "VLLM")
    assert (outcome.code, "is not JSON" in outcome.err, "KV001" in outcome.err) == (2, True, False)
    assert "using profile huggingface" in outcome.err


def test_a_text_that_makes_old_names_and_stays_is_refused(here: Path, go) -> None:
    """Each place in the file must follow: that another place does is not enough."""
    for place in ("%i.key", "%2d.key", "%03u.key", "{layer}.key", "0.%s"):
        note = {"filename": "other.onnx", "note": [f"past_key_values.{place}"]}
        model, other = build_decoder(range(101, 102)), build_decoder(())
        text = note["note"][0].replace("0.%s", "101.%s")
        note["note"] = [text]
        folder = build_folder(here / "x", render_config(o=note), model=model, other=other)
        before = read_directory(folder)
        outcome = go("x", "--prefix", "VLLM")
        assert refused(outcome, f"x/{CONFIG} cannot be updated", text, "past_key_values.101.")
        assert read_directory(folder) == before


def test_a_name_in_the_section_of_another_stage_is_refused(here: Path, go) -> None:
    """A stage hands its output on under the name of the next stage's input."""
    first, second = build_decoder([0], ["key"]), build_decoder([1], ["key"])
    forwarder = {"present.0.key": "past_key_values.1.key"}
    one = {"filename": "a.onnx", "names": ["past_key_values.0.key"], "forwarder": forwarder}
    two = {"filename": "b.onnx", "names": ["past_key_values.1.key", "present.1.key"]}
    text = json.dumps({"model": {"pipeline": [{"a": one, "b": two}]}})
    folder = build_folder(here / "x", text, a=first, b=second)
    before = read_directory(folder)
    outcome = go("x", "--prefix", "VLLM")
    assert refused(outcome, f"x/{CONFIG} cannot be updated", "past_key_values.1.key")
    assert read_directory(folder) == before


def test_a_default_counts_only_where_its_key_is_left_out(here: Path, go) -> None:
    text = with_token(render_config()).replace("s.%d.key_", "s.%i.key_")
    folder = build_folder(here / "x", render_config())
    assert go("x", "--prefix", "VLLM").code == 0
    (folder / CONFIG).write_text(text)
    outcome = go("x", "--strip")
    assert refused(outcome, f"x/{CONFIG} cannot be updated", "2 names")


def test_a_file_that_names_one_model_names_no_other_beside_it(here: Path, go) -> None:
    entry = {name: {"shape": [1]} for name in ("past_key_values.0.key", "present.0.key")}
    folder = build_folder(
        here / "x", render_config(), model=build_decoder([0]), m2=build_decoder(())
    )
    (folder / CONFIG).unlink()
    files = {"model.bin": {"inputs": entry}, "m2.onnx": {"inputs": {}}}
    (folder / "metadata.json").write_text(json.dumps({"model_files": files}))
    outcome = go("x", "--prefix", "VLLM")
    assert refused(outcome, "x/metadata.json cannot be updated", "past_key_values.0.key")


def test_a_name_below_an_anchor_is_refused(here: Path, go) -> None:
    """The alias takes it into the section of a model that keeps the old name."""
    text = (
        "a:\n  filename: model.onnx\n  io: &io\n    - [past_key_values.%d.key, "
        "past_key_values.%d.value]\n    - [present.%d.key, present.%d.value]\n"
        "b:\n  filename: draft.onnx\n  io: *io\n"
    )
    folder = build_folder(here / "x", model=build_decoder(), draft=build_decoder())
    (folder / CONFIG).unlink()
    (folder / YAML).write_text(text)
    outcome = go("x/model.onnx", "--prefix", "VLLM")
    assert refused(outcome, f"x/{YAML} cannot be updated", "past_key_values.%d.key", "YAML")
    (folder / YAML).write_text(text.replace("&io", "").replace("*io", "[]"))
    assert go("x/model.onnx", "--prefix", "VLLM").code == 0


# A stale one is said, by every command that judges a model.


def test_no_sidecars_leaves_it_and_says_what_fails(genai: Path, go) -> None:
    outcome = go("genai", "--prefix", "VLLM", "--sidecars", "off")
    assert outcome.code == 0
    assert f"warning KV406: genai/{CONFIG}" in outcome.err
    assert "onnxruntime-genai fails" in outcome.err
    assert (genai / CONFIG).read_text() == render_config()


def test_a_stale_one_is_found_and_repaired_by_the_same_command(genai: Path, go, run) -> None:
    go("genai", "--prefix", "VLLM", "--sidecars", "off")
    saved(build_decoder(), genai / "other.onnx")  # has the old names, but is not what it speaks of
    outcome = run("verify", "genai/model.onnx", "--rules", "rules.toml")
    assert f"error KV406: genai/{CONFIG}" in outcome.err
    assert "-> `onnxkvrename genai/model.onnx --prefix VLLM --rules rules.toml`" in outcome.err
    assert go("genai/model.onnx", "--prefix", "VLLM").code == 0
    assert (genai / CONFIG).read_text() == with_token(render_config())
    assert "KV406" not in run("verify", "genai/model.onnx", "--rules", "rules.toml").err


def test_one_of_another_model_that_is_named_is_refused(here: Path, genai: Path, go) -> None:
    saved(build_decoder(), here / "model.onnx")
    (here / "genai_config.json").write_text(render_config({"filename": "far.onnx"}))
    outcome = go("model.onnx", "--prefix", "VLLM", "--sidecar", CONFIG)
    assert (outcome.code, "keep the old" in outcome.err) == (1, True)
    (here / "genai_config.json").write_text('{"model": {"decoder": {"filename": "far.onnx"}}}')
    outcome = go("model.onnx", "--prefix", "VLLM", "--sidecar", CONFIG)
    assert (outcome.code, "no KV buffer" in outcome.err) == (1, True)


# Lists of names, in YAML and as keys of JSON


def test_names_in_lists_of_yaml_follow(here: Path, go) -> None:
    folder = here / "mobius"
    folder.mkdir()
    saved(build_decoder([0]), folder / "model.onnx")
    text = (
        "model:\n  io:\n    inputs:\n    - name: past_key_values.0.key  # past_key_values.0.key\n"
        "      shape: [batch, 2]\n    - {name: 'past_key_values.0.value'}\n"
        '    outputs: [present.0.key, "present.0.value"]\n'
    )
    (folder / "inference_metadata.yaml").write_text(text)
    assert go("mobius", "--prefix", "VLLM").code == 0
    now = (folder / "inference_metadata.yaml").read_text()
    comment = "# past_key_values.0.key"
    head, tail = text.split(comment)
    for name in ("s.0.key", "s.0.value", "t.0.key", "t.0.value"):
        head, tail = (part.replace(name, f"{name}_VLLM") for part in (head, tail))
    assert now == head + comment + tail
    assert go("mobius", "--strip").code == 0
    assert (folder / "inference_metadata.yaml").read_text() == text


def test_names_that_are_keys_of_a_bundle_follow(here: Path, go) -> None:
    folder = here / "bundle"
    folder.mkdir()
    saved(build_decoder([0]), folder / "model.onnx")
    entry = {"shape": [8, 1, 2], "dtype": "uint8"}
    files = {
        "part_1.bin": {
            "inputs": {
                "x": entry,
                "past_key_values.0.key": entry,
                "past_key_values.0.value": entry,
            },
            "outputs": {"present.0.key": entry, "present.0.value": entry},
        }
    }
    (folder / "metadata.json").write_text(json.dumps({"model_files": files}))
    (folder / "config.json").write_text('"past_key_values.0.key"')
    assert go("bundle", "--prefix", "VLLM").code == 0
    assert (folder / "metadata.json").read_text().count("_VLLM") == 4
    assert (folder / "config.json").read_text() == '"past_key_values.0.key"'


def test_metadata_of_something_else_stays(here: Path, go) -> None:
    saved(build_decoder([0]), here / "model.onnx")
    for text in ('{"past_key_values.0.key": 1}', "no JSON at all", ""):
        (here / "metadata.json").write_text(text)
        outcome = go("model.onnx", "--prefix", "VLLM", "-d", "out", "--force")
        assert (outcome.code, "metadata.json" in outcome.err) == (0, False)


# Files that rules name


SIDECAR = """
[[sidecar]]
file = 'my_runtime_.*[.](?:json|ya?ml)'
reader = "my runtime"
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("my_runtime_1.json", json.dumps({"names": KEYS})),
        ("my_runtime_1.yml", "".join(f"- {name}\n" for name in KEYS)),
        ("my_runtime_flow.yaml", "{a: [" + ", ".join(KEYS) + "]}"),
    ],
)
def test_a_file_that_the_rules_name_follows(name: str, text: str, here: Path, go) -> None:
    (here / "rules.toml").write_text(RULES + SIDECAR)
    saved(build_decoder(), here / "model.onnx")
    (here / name).write_text(text)
    assert go("model.onnx", "--prefix", "VLLM").code == 0
    assert (here / name).read_text().count("_VLLM") == 4
    outcome = go("model.onnx", "--strip", "--sidecars", "off")
    assert f"{name} keeps 4 old names" in outcome.err
    assert "my runtime" in outcome.err
    assert go("model.onnx", "--strip").code == 0
    assert (here / name).read_text() == text


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ("[[sidecar]]\nreader = 'x'\n", "sidecar[0].file: is missing"),
        ("[[sidecar]]\nfile = '('\n", "sidecar[0].file: is not a regular expression"),
        ("[[sidecar]]\nfile = 'a'\nnames = []\n", "sidecar[0].names: is not a known key"),
        ("[[sidecar]]\nfile = 'a'\nreader = 1\n", "sidecar[0].reader: must be text"),
        (
            "[sidecar]\nfile = 'a'\n",
            "sidecar: needs two",
        ),
    ],
)
def test_a_wrong_table_is_an_error_with_its_key(table: str, fault: str, here: Path, go) -> None:
    (here / "rules.toml").write_text(RULES + table)
    saved(build_decoder(), here / "model.onnx")
    outcome = go("model.onnx", "--prefix", "VLLM")
    assert (outcome.code, fault in outcome.err) == (2, True)


# Real exports


EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports-other"
REAL = sorted(path.parent for name in (CONFIG, YAML) for path in EXPORTS.glob(f"*/*/{name}"))


@pytest.mark.skipif(not REAL, reason=f"there are no real exports in {EXPORTS}")
@pytest.mark.parametrize("folder", thin(REAL, 1), ids=lambda path: path.name)
def test_a_real_configuration_names_what_its_models_have(folder: Path, tmp_path: Path, run) -> None:
    out = tmp_path / "out"
    outcome = run(folder, "-d", out, "--prefix", "VLLM")
    if outcome.code == 1:  # a hybrid whose states the file does not name
        assert "onnxruntime-genai" in outcome.err
        assert not out.exists()
        return
    assert outcome.code == 0
    values = {
        value.name
        for path in out.rglob("*.onnx")
        for graph in [load(path, load_external_data=False).graph]
        for value in (*graph.input, *graph.output)
    }
    (config,) = (out / path.name for path in folder.iterdir() if path.name in (CONFIG, YAML))
    names = re.findall(r"[\w.%]*_VLLM", config.read_text())
    assert names
    layer = {name: [name.replace("%d", str(number)) for number in range(8)] for name in names}
    assert all(values.intersection(generated) for generated in layer.values())
    written = {generated for name in names for generated in layer[name]}
    assert {value for value in values if "VLLM" in value} <= written
    assert run(out, "--strip", "--force").code == 0
    for path in (path for path in out.rglob("*") if path.is_file()):
        assert (folder / path.relative_to(out)).read_bytes() == path.read_bytes()


def test_a_text_with_two_places_is_held_against_long_names_in_linear_time() -> None:
    names = [f"a{'1' * 50_000}x{number}" for number in range(50)]
    assert find_printed_names("a%d%d", sorted((*names, "a12"))) == {"a12"}
