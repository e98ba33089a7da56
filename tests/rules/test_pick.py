"""A model is renamed by the profile that knows its names, and the answer names that profile."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import onnx
import pytest
from conftest import FIXTURES
from exporter_models import build_decoder, build_qnn_decoder
from models import saved

import onnxkvrename
from onnxkvrename import CheckError, RulesError
from onnxkvrename.rules import load
from onnxkvrename.rules.pick import pick_rules

COMMANDS = ("verify", "inspect")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A decoder with Hugging Face's names."""
    return saved(build_decoder(), tmp_path / "model.onnx")


def test_the_default_knows_whose_names_these_are(model: Path, run) -> None:
    before = model.read_bytes()
    outcome = run(model, "--prefix", "VLLM")
    assert outcome.code == 0
    assert "using profile huggingface" in outcome.err
    assert "past_key_values.0.key -> past_key_values.0.key_VLLM\n" in outcome.out
    assert run(model, "--strip", "-q") == (0, "", "")
    assert model.read_bytes() == before


def test_a_full_disk_does_not_hide_whose_names_these_are(
    model: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def little(path: object) -> os.statvfs_result:
        given = list(real(model.parent))
        given[1], given[4] = 1, 8  # f_frsize, f_bavail
        return os.statvfs_result(given)

    monkeypatch.setattr(os, "statvfs", little, raising=False)
    outcome = run(model, "--prefix", "VLLM", "-o", model.with_name("new.onnx"))
    assert (outcome.code, "KV001" in outcome.err) == (2, False)
    assert "the disk has 8 left" in outcome.err


def test_a_name_in_json_says_who_picked_it(model: Path, run) -> None:
    picked = {"name": "huggingface", "picked": True, "also": []}
    answer = run(model, "--prefix", "VLLM", "--format", "json")
    assert json.loads(answer.out)["profile"] == picked
    for command in COMMANDS:
        answer = run(command, model, "--format", "json")
        assert json.loads(answer.out)["profile"] == picked, command
    answer = run("compare", model, model, "--format", "json")
    assert json.loads(answer.out)["profile"] == picked
    named = run("verify", model, "--profile", "huggingface", "--format", "json")
    assert json.loads(named.out)["profile"] == {**picked, "picked": False}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_it_on_stderr(command: str, model: Path, run) -> None:
    outcome = run(command, model, "--format", "text")
    assert "using profile huggingface" in outcome.err


def test_what_qefficient_exports_is_no_news(decoder: Path, run) -> None:
    outcome = run(decoder, "--prefix", "VLLM", "--format", "json")
    assert json.loads(outcome.out)["profile"] == {"name": "qeff", "picked": False, "also": []}
    assert "profile" not in run("verify", decoder).err
    outcome = run("verify", decoder, "--profile", "auto")
    assert "using profile qeff" in outcome.err


def test_a_rename_of_qefficients_loads_no_other_profile(
    decoder: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    read_rules = load._read_rules_file
    monkeypatch.setattr(
        load, "_read_rules_file", lambda path: read.append(path) or read_rules(path)
    )
    assert run(decoder, "--prefix", "VLLM").code == 0
    assert [path.name for path in read] == ["qeff.toml"]


def test_models_of_one_command_share_a_profile(tmp_path: Path, run) -> None:
    (tmp_path / "in").mkdir()
    saved(build_decoder(), tmp_path / "in" / "a.onnx")
    saved(build_decoder(), tmp_path / "in" / "b.onnx")
    outcome = run(tmp_path / "in", "--prefix", "VLLM", "-d", tmp_path / "out")
    assert outcome.code == 0
    assert outcome.err.count("profile huggingface") == 1


def test_a_model_that_only_another_profile_knows_is_no_success(tmp_path: Path, run) -> None:
    for name in ("a", "b"):
        saved(build_decoder(), tmp_path / f"{name}.onnx")
    other = saved(build_qnn_decoder(), tmp_path / "qnn.onnx")
    before = other.read_bytes()
    for words in ((tmp_path, "--prefix", "VLLM", "-q"), ("verify", tmp_path, "-q")):
        outcome = run(*words)
        assert outcome.code == 1
        assert "KV001: profile huggingface" in outcome.err
        assert "profile qnn does" in outcome.err
        assert "`--profile huggingface`, then with `--profile qnn`" in outcome.err
    assert other.read_bytes() == before
    for source, profile in ((tmp_path, "huggingface"), (tmp_path / "out", "qnn")):
        words = (source, "--prefix", "VLLM", "--profile", profile)
        assert run(*words, *(("-d", tmp_path / "out") if source == tmp_path else ())).code == 0
    renamed = tmp_path / "out" / "qnn.onnx"
    assert run("verify", renamed, "--prefix", "VLLM", "--profile", "qnn").code == 0


def test_beside_qefficients_a_model_of_another_exporter_is_a_warning(decoder: Path, run) -> None:
    saved(build_decoder(), decoder.parent / "other.onnx")
    outcome = run(decoder.parent, "--prefix", "VLLM", "--check", "-q")
    assert "other.onnx: warning KV001: profile qeff" in outcome.err
    assert run(decoder.parent, "--prefix", "VLLM", "-q", "--strict").code == 1


def test_two_that_know_the_names_equally_well_are_an_error(
    model: Path, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "profiles"
    shutil.copytree(load.PROFILES_DIRECTORY, folder)
    shutil.copyfile(folder / "huggingface.toml", folder / "twin.toml")
    monkeypatch.setattr(load, "PROFILES_DIRECTORY", folder)
    before = model.read_bytes()
    for arguments in ((model, "--prefix", "VLLM"), ("verify", model, "--profile", "auto")):
        outcome = run(*arguments)
        assert outcome.code == 2
        assert "2 profiles" in outcome.err
        assert "huggingface, twin" in outcome.err
        assert all(f"--profile {name}`" in outcome.err for name in ("huggingface", "twin"))
    assert model.read_bytes() == before
    assert run(model, "--prefix", "VLLM", "--profile", "twin").code == 0


def test_the_one_that_knows_more_is_picked_and_the_other_is_named(
    tmp_path: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "profiles"
    shutil.copytree(load.PROFILES_DIRECTORY, folder)
    names = [
        f"{side}put = 'past_(?P<part>key)_{{layer}}{{token}}_{side}'" for side in ("in", "out")
    ]
    (folder / "keys-only.toml").write_text("\n".join(("[[kv]]", "kind = 'attention'", *names)))
    monkeypatch.setattr(load, "PROFILES_DIRECTORY", folder)
    model = saved(build_qnn_decoder(), tmp_path / "model.onnx")
    outcome = run(model, "--prefix", "VLLM", "--check")
    assert "using profile qnn" in outcome.err
    assert "--profile keys-only" in outcome.err


def test_a_model_that_nobody_knows_is_refused_as_before(tmp_path: Path, run) -> None:
    model = saved(
        build_decoder(("cache_{layer}_{part}", "new_{layer}_{part}")), tmp_path / "m.onnx"
    )
    for arguments in ((), ("--profile", "auto")):
        outcome = run(model, "--prefix", "VLLM", *arguments)
        assert outcome.code == 1
        assert "error KV001" in outcome.err
        assert "profile huggingface" not in outcome.err


def test_the_library_picks_in_the_same_way(model: Path, tmp_path: Path) -> None:
    report = onnxkvrename.rename(model, "VLLM", output=tmp_path / "new.onnx")
    assert report.name_map["past_key_values.0.key"] == "past_key_values.0.key_VLLM"
    assert onnxkvrename.verify(model).report.pairs
    assert onnxkvrename.inspect(model, rules="auto").buffers
    assert onnxkvrename.load_layout(model).layout.buffers
    assert onnxkvrename.compare(model, model).pair_results
    data = onnxkvrename.rename_bytes(model.read_bytes(), "VLLM")
    assert data == (tmp_path / "new.onnx").read_bytes()
    assert onnxkvrename.rename_bytes(model.read_bytes(), "VLLM", rules="auto") == data
    with pytest.raises(CheckError):
        onnxkvrename.rename_bytes(model.read_bytes(), "VLLM", rules="qeff")
    with pytest.raises(RulesError, match="no such profile: autos"):
        onnxkvrename.rename(model, "VLLM", rules="autos")


def test_a_file_that_is_no_model_does_not_count(model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"\xff")
    assert pick_rules([tmp_path], None, None).name == "huggingface"
    assert pick_rules([FIXTURES / "plain" / "decoder.onnx"], None, None).choice is None


def test_the_whole_result_is_a_model_that_onnx_reads(model: Path, run) -> None:
    run(model, "--prefix", "VLLM")
    names = {value.name for value in onnx.load(model).graph.input}
    assert {"past_key_values.0.key_VLLM", "past_key_values.1.value_VLLM"} <= names
