"""A configuration of onnxruntime-genai follows its models, and nothing else of its folder does."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from genai_folders import RULES, build_decoder, build_folder, render_config
from models import saved

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


def test_only_the_model_and_its_configuration_are_written(here: Path, go) -> None:
    (here / "new").mkdir()
    assert go("genai/model.onnx", "-o", "new/model.onnx").code == 0
    assert list_names(here / "new") == {"model.onnx", CONFIG}
    outcome = go("genai", "-d", "out")
    assert f"genai/{CONFIG}: 4 names changed -> out/{CONFIG}" in outcome.err.splitlines()
    assert list_names(here / "out") == {"model.onnx", CONFIG}
    assert (here / "out" / CONFIG).read_text().count("_VLLM") == 4


def test_a_copy_of_the_folder_that_is_renamed_runs(here: Path, go) -> None:
    shutil.copytree("genai", "copy")
    assert go("copy").code == 0
    assert list_names(here / "copy") == list_names(here / "genai")
    assert (here / "copy" / CONFIG).read_text().count("_VLLM") == 4


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
    assert list_names(here / "whole") == {"decoder/model.onnx", "embed.onnx", CONFIG}
