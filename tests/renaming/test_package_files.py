"""With `-d`, a folder that a runtime loads as a whole goes along with its configuration."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import models as builders
import pytest
from genai_folders import RULES, build_decoder, build_folder, render_config
from kill_commands import read_directory
from models import saved
from onnx import TensorProto

from onnxkvrename import rename_all
from onnxkvrename.limits import MAX_FILES

CONFIG = "genai_config.json"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with rules and a folder of onnxruntime-genai."""
    (tmp_path / "rules.toml").write_text(RULES)
    monkeypatch.chdir(tmp_path)
    build_folder(tmp_path / "genai")
    return tmp_path


@pytest.fixture
def go(run):
    """Run a rename with the rules."""
    return lambda *args: run(*args, "--prefix", "VLLM", "--rules", "rules.toml")


def list_names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_result_is_a_folder_that_runs(here: Path, go) -> None:
    folder = here / "genai"
    (folder / "lora").mkdir()
    (folder / "lora" / "adapter.bin").write_bytes(b"\0weights")
    outcome = go("genai", "-d", "out")
    assert outcome.code == 0
    line = f"genai/{CONFIG}: 4 names changed, 2 other files of its folder copied -> out/{CONFIG}"
    assert line in outcome.err.splitlines()
    assert list_names(here / "out") == list_names(folder)
    assert (here / "out" / "lora" / "adapter.bin").read_bytes() == b"\0weights"
    assert (here / "out" / CONFIG).read_text().count("_VLLM") == 4
    again = go("genai", "-d", "out")
    assert (again.code, "copied" in again.err) == (0, False)


def test_the_page_shows_what_happens(here: Path, run) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "sidecars.md"
    block = re.search(r"```console\n\$ onnxkvrename (.*?)\n(.*?)```", page.read_text(), re.DOTALL)
    assert block is not None
    build_folder(here / "llama-genai", model=build_decoder([0]))
    outcome = run(*shlex.split(block[1]))
    assert (outcome.code, outcome.out + outcome.err) == (0, block[2])
    before, after = ((here / name / CONFIG).read_text() for name in ("llama-genai", "renamed"))
    for sign, text in (("-", before), ("+", after)):
        assert re.search(rf"^{re.escape(sign)}(.*),$", page.read_text(), re.M)[1] in text


def test_the_disk_must_hold_its_other_files_as_well(
    here: Path, go, snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (here / "genai" / "adapter.bin").open("wb") as file:
        file.truncate(10**6)
    before, real = snapshot(here), os.statvfs

    def little(path: object) -> os.statvfs_result:
        given = list(real(here))
        given[1], given[4] = 1, 10**6  # f_frsize, f_bavail
        return os.statvfs_result(given)

    monkeypatch.setattr(os, "statvfs", little)
    outcome = go("genai", "-d", "out")
    assert (outcome.code, "the disk has" in outcome.err) == (2, True)
    assert snapshot(here) == before


def test_a_dry_run_says_what_would_be_copied(here: Path, go) -> None:
    outcome = go("genai", "-d", "out", "-n", "--format", "json")
    (text,) = json.loads(outcome.out)["texts"]
    assert (text["copied"], text["changed"], (here / "out").exists()) == (1, 4, False)
    assert "1 other file" in go("genai", "-d", "out", "-n").err


def test_python_does_the_same(here: Path) -> None:
    report = rename_all("genai", "VLLM", rules="rules.toml", directory="out")
    assert [(text.changed, text.copied) for text in report.sidecars] == [(4, 1)]
    assert list_names(here / "out") == list_names(here / "genai")


def test_external_data_come_once_and_other_models_as_they_are(here: Path, go) -> None:
    folder = here / "genai"
    weights = builders.tensor("w", *range(8))
    weights.data_location = TensorProto.EXTERNAL
    weights.ClearField("float_data")
    weights.external_data.add(key="location", value="model.onnx.data")
    model = build_decoder()
    model.graph.initializer.append(weights)
    saved(model, folder / "model.onnx")
    (folder / "model.onnx.data").write_bytes(bytes(32))
    saved(build_decoder(()), folder / "vision.onnx")
    outcome = go("genai/model.onnx", "-d", "out")
    assert outcome.code == 0
    assert "2 other files" in outcome.err  # the tokenizer and vision.onnx
    before, after = read_directory(folder), read_directory(here / "out")
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {"model.onnx", CONFIG}


def test_a_folder_whose_names_another_profile_matches_goes_along(here: Path, run) -> None:
    """Nothing changes in it, and it still runs from the directory of the results."""
    build_folder(here / "set" / "other", model=build_decoder([0]))
    saved(builders.decoder(), here / "set" / "decoder.onnx")
    outcome = run("set", "--prefix", "VLLM", "-d", "out")
    assert (outcome.code, "KV001" in outcome.err) == (0, True)
    line = f"set/other/{CONFIG}: unchanged, 1 other file of its folder copied"
    assert f"{line} -> out/other/{CONFIG}" in outcome.err.splitlines()
    assert read_directory(here / "out" / "other") == read_directory(here / "set" / "other")
    planned = run("set", "--prefix", "VLLM", "-d", "new", "-n")
    assert "unchanged, 1 other file of its folder would be copied" in planned.err


def test_a_model_without_buffers_takes_no_other_model_of_its_package_along(here: Path, run) -> None:
    """The decoder, which was not asked for, would keep its old names beside the results."""
    package = here / "set" / "package"
    for name in ("embedding", "decoder"):
        (package / name).mkdir(parents=True)
    config = render_config(
        {"filename": "decoder/model.onnx"}, embedding={"filename": "embedding/model.onnx"}
    )
    parts = {"embedding/model": build_decoder([]), "decoder/model": build_decoder([0])}
    build_folder(package, config, **parts)
    saved(builders.decoder(), here / "set" / "decoder.onnx")
    assert (
        run("set/package/embedding", "set/decoder.onnx", "--prefix", "VLLM", "-d", "out").code == 0
    )
    assert list_names(here / "out") == {"decoder.onnx", "package/embedding/model.onnx"}


def test_hidden_files_and_results_below_the_folder_stay_behind(here: Path, go) -> None:
    folder = here / "genai"
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("")
    (folder / ".env").write_text("secret")
    for _ in range(2):
        assert go("genai", "-d", "genai/out").code == 0
    assert list_names(folder / "out") == {"model.onnx", CONFIG, "tokenizer.json"}


def test_a_link_out_of_the_folder_is_left_out_and_said(here: Path, go) -> None:
    (here / "secret").write_text("secret")
    (here / "elsewhere").mkdir()
    (here / "elsewhere" / "file").write_text("secret")
    (here / "genai" / "merges.txt").symlink_to("../secret")
    (here / "genai" / "assets").symlink_to("../elsewhere")
    (here / "genai" / "vocab.json").symlink_to("tokenizer.json")
    outcome = go("genai", "-d", "out")
    assert outcome.code == 0
    assert "warning KV501: genai/merges.txt" in outcome.err
    names = {"model.onnx", CONFIG, "tokenizer.json", "vocab.json"}
    assert list_names(here / "out") == names
    assert not any((here / "out" / name).is_symlink() for name in names)
    assert go("genai", "-d", "new", "--strict").code == 1
    assert not (here / "new").exists()


def test_a_configuration_through_a_link_out_of_the_folder_is_refused(here: Path, go) -> None:
    """Its content would stand in the result, as that of any other file outside."""
    folder = build_folder(here / "genai")
    (folder / CONFIG).rename(here / "secret.json")
    (folder / CONFIG).symlink_to("../secret.json")
    outcome = go("genai", "-d", "out", "--prefix", "VLLM")
    assert outcome.code == 2
    assert f"error: genai/{CONFIG}: leads out" in outcome.err
    assert not (here / "out").exists()
    (here / "secret.json").rename(folder / "kept.json")
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to("kept.json")
    assert go("genai", "-d", "out", "--prefix", "VLLM").code == 0


def test_no_link_leads_a_copy_out_of_the_results(here: Path, go) -> None:
    for folder in ("genai/lora", "out", "elsewhere"):
        (here / folder).mkdir()
    (here / "genai" / "lora" / "adapter.bin").write_text("weights")
    (here / "out" / "lora").symlink_to("../elsewhere")
    outcome = go("genai", "-d", "out", "--force")
    assert (outcome.code, "result would leave" in outcome.err) == (2, True)
    assert list_names(here / "elsewhere") | list_names(here / "out") == set()


def test_a_file_in_the_way_stops_the_run(here: Path, go) -> None:
    (here / "out").mkdir()
    (here / "out" / "tokenizer.json").write_text("mine")
    outcome = go("genai", "-d", "out")
    assert (outcome.code, "KV504: out/tokenizer.json" in outcome.err) == (1, True)
    assert list_names(here / "out") == {"tokenizer.json"}
    assert go("genai", "-d", "out", "--force").code == 0
    assert (here / "out" / "tokenizer.json").read_text() == "{}"


def test_a_pipe_in_the_folder_does_not_hang_it(here: Path, go) -> None:
    os.mkfifo(here / "genai" / "pipe")
    outcome = go("genai", "-d", "out")
    assert (outcome.code, "not a regular" in outcome.err) == (2, True)


def test_a_folder_with_too_many_files_is_refused(here: Path, go) -> None:
    for number in range(MAX_FILES):
        (here / "genai" / f"{number}").touch()
    outcome = go("genai", "-d", "out")
    assert (outcome.code, "1,024 files" in outcome.err) == (2, True)
    assert go("genai", "-d", "out", "--sidecars", "off").code == 0
    assert list_names(here / "out") == {"model.onnx"}


def test_without_d_and_without_a_package_nothing_else_is_copied(here: Path, go) -> None:
    (here / "new").mkdir()
    assert go("genai/model.onnx", "-o", "new/model.onnx").code == 0
    assert list_names(here / "new") == {"model.onnx", CONFIG}
    (here / "plain").mkdir()
    saved(build_decoder(), here / "plain" / "model.onnx")
    (here / "plain" / "config.json").write_text("{}")
    assert go("plain", "-d", "out").code == 0
    assert list_names(here / "out") == {"model.onnx"}


def test_a_configuration_is_not_copied_to_a_result_that_it_does_not_name(here: Path, go) -> None:
    """It could not be loaded there: no file has the name in it."""
    outcome = go("genai/model.onnx", "-o", "new/renamed.onnx")
    message = f"warning KV406: genai/{CONFIG} names model.onnx, but the result is new/renamed.onnx"
    assert (outcome.code, f"{message}, so" in outcome.err) == (0, True)
    assert list_names(here / "new") == {"renamed.onnx"}
    named = go("genai/model.onnx", "-o", "other/renamed.onnx", "--sidecar", f"genai/{CONFIG}")
    assert (named.code, "error KV406" in named.err) == (1, True)
    assert not (here / "other").exists()
    assert go("genai/model.onnx", "-o", "same/model.onnx", "--sidecar", f"genai/{CONFIG}").code == 0
    assert list_names(here / "same") == {"model.onnx", CONFIG}


def test_a_part_of_a_folder_says_that_the_folder_is_needed(here: Path, go) -> None:
    folder = build_folder(
        here / "parts", render_config({"filename": "decoder/model.onnx"}), embed=build_decoder(())
    )
    (folder / "decoder").mkdir()
    saved(build_decoder(), folder / "decoder" / "model.onnx")
    outcome = go("parts/decoder/model.onnx", "-d", "out")
    assert outcome.code == 0
    message = f"KV406: parts/{CONFIG} names decoder/model.onnx, but the result is out/model.onnx"
    hint = "-> rename the whole folder parts with `-d renamed`"
    assert f"{message}, so it" in outcome.err
    assert f"{hint}" in outcome.err
    assert list_names(here / "out") == {"model.onnx"}
    whole = go("parts", "-d", "whole")
    assert (whole.code, "KV4" in whole.err) == (0, False)
    assert list_names(here / "whole") == list_names(folder)
