"""Real exports, held against the same models exported with the token."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from kill_commands import read_directory
from models import list_names
from qefficient_exports import PARAMS
from real_exports import BROKEN, ENCODER, EXPORTS, VARYING, names
from tiers import thin

from onnxkvrename import load_rules, rename
from onnxkvrename.files.find import find_jobs
from onnxkvrename.renaming.run import rename_batch
from onnxkvrename.rules.request import Request

pytestmark = pytest.mark.skipif(
    not EXPORTS.is_dir(), reason=f"no real exports to compare with: {EXPORTS} is not there"
)


def variant(kind: str) -> dict[str, Path]:
    """The exports of one kind, by case and file name."""
    return {
        f"{path.relative_to(EXPORTS).parts[0]}/{path.name}": path
        for path in sorted(EXPORTS.glob(f"*/{kind}-*/**/*.onnx"))
    }


PLAIN, TWIN = variant("plain"), variant("VLLM")
SOUND = sorted(PLAIN.keys() - {ENCODER})


def test_every_export_has_a_twin() -> None:
    assert PLAIN.keys() == TWIN.keys()
    assert len(PLAIN) >= 14
    assert PLAIN.keys() > VARYING


@pytest.mark.parametrize("case", SOUND)
def test_renamed_and_stripped_again_an_export_is_what_it_was(case: str, tmp_path: Path) -> None:
    renamed, stripped = tmp_path / "renamed" / "m.onnx", tmp_path / "stripped" / "m.onnx"
    report = rename(PLAIN[case], "VLLM", output=renamed)
    assert (report.status, {f.code for f in report.findings} <= {"KV120"}) == ("renamed", True)
    assert rename(renamed, strip=True, output=stripped).status == "renamed"
    assert stripped.read_bytes() == PLAIN[case].read_bytes()


@pytest.mark.parametrize("case", sorted(set(SOUND) - VARYING))
def test_a_renamed_export_is_the_one_with_the_token(case: str, tmp_path: Path) -> None:
    rename(PLAIN[case], "VLLM", output=tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == TWIN[case].read_bytes()


@pytest.mark.parametrize("case", sorted(set(TWIN) - {ENCODER, BROKEN}))
def test_an_export_with_the_token_needs_nothing(case: str) -> None:
    report = rename(TWIN[case], "VLLM", dry_run=True)
    assert (report.status, report.name_map) == ("unchanged", {})
    assert {finding.code for finding in report.findings} <= {"KV120"}


@pytest.mark.parametrize("case", sorted((VARYING - {BROKEN}) & PLAIN.keys()))
def test_where_exports_vary_every_name_of_the_graph_is_the_same(case: str, tmp_path: Path) -> None:
    rename(PLAIN[case], "VLLM", output=tmp_path / "m.onnx")
    assert names(tmp_path / "m.onnx") == names(TWIN[case])


@pytest.mark.parametrize("case", sorted((VARYING - {BROKEN}) & PLAIN.keys()))
def test_where_exports_vary_names_of_buffers_in_functions_are_the_same(
    case: str, tmp_path: Path
) -> None:
    rename(PLAIN[case], "VLLM", output=tmp_path / "m.onnx")
    assert read_inner_names(tmp_path / "m.onnx") == read_inner_names(TWIN[case])


def test_a_cache_with_all_exports_is_seeded_by_one_command(tmp_path: Path, snapshot, run) -> None:
    """Exports of QEfficient that are not equal to the byte are named, and give way by force."""
    cache = tmp_path / "cache"
    for source in sorted(EXPORTS.glob("*/*-*[0-9a-f]")):
        if (source / PARAMS).is_file():
            target = cache / f"{source.parent.name}-{source.name.rpartition('-')[2]}"
            shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
    before = read_directory(cache)
    outcome = run(cache, "--prefix", "VLLM", "--seed-cache", "-q")
    assert (outcome.code, outcome.err.count("error KV504"), "KV106" in outcome.err) == (1, 2, True)
    assert read_directory(cache) == before
    assert run(cache, "--prefix", "VLLM", "--seed-cache", "--force").code == 0
    after = read_directory(cache)
    changed = {path.partition("-")[0] for path in after if after[path] != before.get(path)}
    varying = {case.partition("/")[0] for case in VARYING}
    assert (after.keys(), changed) == (before.keys(), varying)
    seeded = snapshot(cache)
    assert run(cache, "--prefix", "VLLM", "--seed-cache").code == 0
    assert snapshot(cache) == seeded


def read_inner_names(path: Path) -> set[str]:
    """Return the names of buffers in local functions, whichever layer has given them."""
    functions = onnx.load(path, load_external_data=False).functions
    inside = {name for function in functions for name in list_names(function)}
    return {re.sub(r"\.[0-9]+", ".N", name) for name in inside if name.startswith("past_")}


def test_the_layer_function_of_an_export_has_the_token_inside() -> None:
    names = read_inner_names(TWIN["llama2l_subfn/LlamaForCausalLM.onnx"])
    ends = ("", "_InternalRetainedState")
    assert names == {f"past_{part}.N_VLLM{end}" for part in ("key", "value") for end in ends}


def results(path: Path) -> list[Any]:
    """Return the results of a model for the same feeds, in the order of its outputs."""
    ort = pytest.importorskip("onnxruntime")
    ort.set_default_logger_severity(4)
    try:
        session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own have no common base
        pytest.skip(f"onnxruntime does not load this model: {error}")
    random, sizes = (
        np.random.default_rng(0),
        {"batch_size": 1, "seq_len": 4, "ctx_len": 4},
    )  # a full cache
    feeds = {}
    for value in session.get_inputs():
        shape = [sizes.get(dim, dim) for dim in value.shape]
        if value.name == "position_ids":
            feeds[value.name] = np.arange(4, dtype=np.int64).reshape(shape)
        elif value.type == "tensor(int64)":
            feeds[value.name] = random.integers(0, 16, shape)
        else:
            feeds[value.name] = random.random(shape, np.float32)
    return list(session.run(None, feeds))


@pytest.mark.parametrize("case", thin(sorted(VARYING & PLAIN.keys()), 1))
def test_a_renamed_export_still_gives_the_same_results(case: str, tmp_path: Path) -> None:
    rename(PLAIN[case], "VLLM", output=tmp_path / "m.onnx")
    before, after = results(PLAIN[case]), results(tmp_path / "m.onnx")
    assert len(before) == len(after) > 1
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_encoder_stays_as_it_is_beside_its_decoder(tmp_path: Path) -> None:
    decoder = "gemma3vlm_dual/Gemma3DecoderWrapper.onnx"
    jobs = find_jobs([PLAIN[ENCODER], PLAIN[decoder]], directory=tmp_path)
    report = rename_batch(Request(token="VLLM"), jobs, load_rules())
    assert [model.status for model in report.models] == ["unchanged", "renamed"]
    assert report.compute_exit_code() == 0
    assert jobs[0].output.read_bytes() == TWIN[ENCODER].read_bytes()
    assert jobs[1].output.read_bytes() == TWIN[decoder].read_bytes()
    assert "vision_embeds_RetainedState" in {kept.name for kept in report.models[1].unchanged_names}


def test_the_broken_export_of_dynamo_with_the_token_is_refused() -> None:
    report = rename(TWIN[BROKEN], "VLLM", dry_run=True)
    assert report.status == "failed"
    assert {finding.code for finding in report.findings} == {"KV106"}
    buffers = {finding.name for finding in report.findings}
    assert buffers == {
        f"past_{part}.{n}_VLLM_RetainedState" for part in ("key", "value") for n in (0, 1)
    }


def test_an_export_with_the_token_on_its_outputs_only_is_repaired(tmp_path: Path) -> None:
    case = "llama2l/LlamaForCausalLM.onnx"
    model = onnx.load(TWIN[case])
    inputs = [value for value in model.graph.input if value.name.endswith("_VLLM")]
    plain = {value.name: value.name.removesuffix("_VLLM") for value in inputs}
    for value in inputs:
        value.name = plain[value.name]
    for node in model.graph.node:
        node.input[:] = [plain.get(name, name) for name in node.input]
    path = tmp_path / "mixed.onnx"
    onnx.save(model, path)
    report = rename(path, "VLLM")
    assert report.name_map == {old: new for new, old in plain.items()}
    assert path.read_bytes() == TWIN[case].read_bytes()


def test_a_set_of_windows_is_renamed_in_natural_order(tmp_path: Path) -> None:
    source = next(EXPORTS.glob("lw_qwen3moe/plain-*/onnx_layerwise_tmp"))
    shutil.copytree(source, tmp_path / "windows", copy_function=shutil.copyfile)
    jobs = find_jobs([tmp_path / "windows"])
    assert [job.model.parent.name for job in jobs] == ["layer_0_1", "layer_1_2"]
    assert rename_batch(Request(token="VLLM"), jobs, load_rules()).compute_exit_code() == 0
    for job in jobs:
        assert job.model.read_bytes() == TWIN[f"lw_qwen3moe/{job.model.name}"].read_bytes()
