"""A model of many windows: what is said of all of them takes few lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import onnx
import pytest
from exporter_models import build_decoder as build_growing_decoder
from models import decoder, saved
from onnx import ModelProto, TensorProto
from qefficient_exports import write_layerwise_export
from window_sets import build_window, write_windows

COUNT = 40
FIRST = "first: layer_0_1/Tiny_layer_tmp_0_1.onnx"
SECOND = "first: layer_1_2/Tiny_layer_tmp_1_2.onnx"


@pytest.fixture
def windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_windows(tmp_path / "windows", COUNT)
    monkeypatch.chdir(tmp_path)
    return Path("windows")


@pytest.fixture
def misfits(windows: Path) -> Path:
    """Windows of which none but the first takes what the one before it gives."""

    def take_half_floats(model: ModelProto) -> None:
        for value in model.graph.input:
            if value.name == "inputs_embeds":
                value.type.tensor_type.elem_type = TensorProto.FLOAT16

    for path in windows.rglob("*.onnx"):
        change(path, take_half_floats)
    return windows


def change(path: Path, edit: Callable[[ModelProto], None]) -> None:
    model = onnx.load(path)
    edit(model)
    onnx.save(model, path)


def list_annotations(text: str, level: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.startswith(f"::{level} "))


def test_windows_with_one_outcome_are_one_line(windows: Path, run) -> None:
    call = (windows, "--prefix", "VLLM")
    buffers = f"{2 * COUNT} KV buffers"
    checked = run(*call, "--check")
    assert (checked.code, checked.out) == (1, "")
    assert checked.err.splitlines() == [
        f"{COUNT} files in windows ({FIRST}): 4 of 4 names lack VLLM in each (first: past_key.0)",
        f"{COUNT} models: {COUNT} would change, 0 unchanged; {buffers}",
        f"  -> run `onnxkvrename {windows} --prefix VLLM`",
    ]
    assert run(*call, "--check", "-q") == (1, "", f"{COUNT} of {COUNT} models would change\n")
    renamed = run(*call)
    assert len(renamed.out.splitlines()) == 4 * COUNT  # each name, for a program
    assert renamed.err.splitlines() == [
        f"{COUNT} files in windows ({FIRST}): 4 names changed in each",
        f"{COUNT} models: {COUNT} renamed, 0 unchanged; {buffers}",
    ]
    again = run(*call)
    assert (again.code, again.out) == (0, "")
    assert again.err.splitlines() == [
        f"{COUNT} files in windows ({FIRST}): unchanged: every buffer carries VLLM",
        f"{COUNT} models: 0 renamed, {COUNT} unchanged; {buffers}",
    ]
    assert (
        run(*call, "--format", "github").out
        == f"::notice title=total::{again.err.splitlines()[1]}\n"
    )
    assert len(run(*call, "-v").err.splitlines()) == COUNT + 1


@pytest.mark.parametrize("command", [("rename", "--prefix", "X"), ("verify",)])
def test_what_all_windows_share_is_one_finding(
    command: tuple[str, ...], misfits: Path, run
) -> None:
    outcome = run(command[0], misfits, *command[1:])
    shared = [line for line in outcome.err.splitlines() if "KV305" in line]
    assert outcome.code == 1
    assert len(shared) == 1
    assert shared[0].startswith(
        f"{COUNT - 1} files in windows ({SECOND}): error KV305: for example, inputs_embeds"
    )
    assert len(outcome.out.splitlines()) + len(outcome.err.splitlines()) < 10
    assert run(command[0], misfits, *command[1:], "-v").err.count("KV305") == COUNT - 1


def test_findings_about_different_names_list_them(windows: Path, run) -> None:
    """One of them may be a KV cache that stays unrenamed, whatever the others are."""
    names = ("image_features", "compressed_kvx", "ssm_state", "latent_cache")
    for layer, name in enumerate(names):
        model = build_window(layer, layer + 1)
        model.graph.output[-1].name = f"{name}.{layer}_RetainedState"
        saved(model, windows / f"layer_{layer}_{layer + 1}/Tiny_layer_tmp_{layer}_{layer + 1}.onnx")
    (line,) = (line for line in run("verify", windows).err.splitlines() if "KV111" in line)
    assert line.startswith("4 files in windows (first: ")
    for layer, name in enumerate(names):
        assert f" {name}.{layer}_RetainedState" in line


def test_a_line_for_findings_that_differ_counts_them_and_is_an_example(tmp_path: Path, run) -> None:
    """Ten layers of one file and one layer of three others are not one layer of four files."""
    for number, layers in enumerate([10, 1, 1, 1]):
        model = build_window(0, 10)
        for value in [v for v in model.graph.input if v.name.startswith("past_key")][:layers]:
            model.graph.input.remove(value)
        saved(model, tmp_path / f"{number}.onnx")
    lines = run("verify", tmp_path).err.splitlines()
    ((line, fix),) = (pair for pair in pairwise(lines) if "KV101" in pair[0])
    assert line.startswith(f"13 findings in 4 files in {tmp_path} (first: 0.onnx): ")
    assert ": error KV101: for example, past_key.0_RetainedState has no input" in line
    assert fix.startswith("  -> ")
    assert fix.endswith("; -v shows each")


def test_an_error_about_another_file_is_an_example(
    tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(5):
        sidecar = Path("models", str(number), "custom_io.yaml")
        sidecar.mkdir(parents=True)
        saved(build_window(0, 1), sidecar.with_name("model.onnx"))
    outcome = run("models", "--prefix", "VLLM")
    example = "for example, models/0/custom_io.yaml: is a directory"
    where = "5 files in models (first: 0/model.onnx)"
    assert outcome.err.splitlines()[0].startswith(f"error: {where}: {example}")


def test_programs_get_each_finding(misfits: Path, run) -> None:
    call = (misfits, "--prefix", "VLLM", "--check", "--format")
    models = json.loads(run(*call, "json").out)["models"]
    assert sum(len(model["findings"]) for model in models) == COUNT - 1


def test_github_shows_all_annotations(misfits: Path, run) -> None:
    """It drops those of a level beyond the tenth: so they are folded, and there is a total."""
    path = "windows/layer_30_31/Tiny_layer_tmp_30_31.onnx"

    def drop_output(model: ModelProto) -> None:
        del model.graph.output[-1]

    change(misfits / path.partition("/")[2], drop_output)
    out = run(misfits, "--prefix", "VLLM", "--check", "--format", "github").out
    errors = list(list_annotations(out, "error"))
    assert len(errors) <= 10
    shared = f"{COUNT - 1} files in windows ({SECOND}): for example, inputs_embeds"
    assert sum(shared in line for line in errors) == 1
    assert any(f"file={path},title=KV102" in line for line in errors)
    (total,) = list_annotations(out, "notice")
    assert total.startswith(f"::notice title=total::{COUNT} models: 1 would change")


def test_github_hears_how_many_annotations_it_would_not_show(tmp_path: Path, run) -> None:
    """Here each model has a finding that no other has."""
    for number in range(20):
        model = build_window(0, 1)
        model.graph.output[-1].type.tensor_type.shape.dim[3].dim_value = 100 + number
        saved(model, tmp_path / f"{number}.onnx")
    out = run(tmp_path, "--prefix", "VLLM", "--format", "github").out
    for level in ("error", "warning", "notice"):
        assert len(list(list_annotations(out, level))) <= 10
    assert re.search(r"::and \d+ more annotations: KV\d+ \(\d+\)", out)


def test_one_window_that_fails_is_named_before_the_others(windows: Path, run) -> None:
    bad = windows / "layer_7_8/Tiny_layer_tmp_7_8.onnx"
    bad.write_bytes(b"no model")
    outcome = run(windows, "--prefix", "VLLM")
    reason, total = outcome.err.splitlines()
    assert outcome.code == 2
    assert reason.startswith(f"error: {bad}: ")
    assert total == (
        f"{COUNT} models: 0 renamed, 0 unchanged, 1 failed, {COUNT - 1} left alone "
        "(another model failed); nothing was written"
    )


def test_files_that_cannot_be_read_for_one_reason_are_one_line(windows: Path, run) -> None:
    for path in windows.rglob("*_tmp_[1-9]*.onnx"):
        path.write_bytes(b"no model")
    error, total = run(windows, "--prefix", "VLLM").err.splitlines()
    assert error.startswith(f"error: {COUNT - 1} files in windows ({SECOND}): ")
    assert f"{COUNT - 1} failed, 1 left alone" in total


def test_the_refusal_in_an_export_cache_comes_once(
    tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    export = write_layerwise_export(Path("cache"))
    outcome = run(export, "--prefix", "VLLM", "--check")
    (refusal,) = (line for line in outcome.err.splitlines() if "KV402" in line)
    assert refusal.startswith(f"{len(list(export.rglob('*.onnx')))} files in {export} (first: ")
    assert ": error KV402: each is in QEfficient's export cache" in refusal


def test_of_mixed_tokens_each_is_seen_however_long_the_paths(windows: Path, run) -> None:
    below = windows / ("a-long-name-" * 4)
    below.mkdir()
    for path in [path for path in windows.iterdir() if path != below]:
        path.rename(below / path.name)
    assert run(below / "layer_3_4", "--prefix", "VLLM", "-q").code == 0
    (finding,) = (line for line in run("verify", windows).err.splitlines() if "KV303" in line)
    assert f"different tokens: no token in {COUNT - 1} files (first: " in finding
    assert "); VLLM in windows/" in finding


def test_models_that_another_profile_knows_are_said_to_be_that(
    tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, model in (
        ("a", decoder()),
        ("b", build_growing_decoder()),
        ("c", build_growing_decoder()),
    ):
        Path("mix", name).mkdir(parents=True)
        saved(model, Path("mix", name, "model.onnx"))
    err = run("mix", "--prefix", "VLLM", "--check").err
    assert "profile qeff matches no KV buffer of this model, but profile huggingface does" in err
    assert "mix/c/model.onnx: unchanged: the rules match none of its names\n" in err
    assert run("mix", "--prefix", "VLLM", "-q").code == 0
    assert run("mix", "--prefix", "VLLM", "--profile", "huggingface", "-q").code == 0
    for name, profile in (("a", "qeff"), ("b", "huggingface"), ("c", "huggingface")):
        assert run("verify", f"mix/{name}", "--prefix", "VLLM", "--profile", profile).code == 0
