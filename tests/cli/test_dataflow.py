"""``--pairs dataflow`` renames, verifies and shows the pairs that the graph has."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx.parser
import pytest
from conftest import FIXTURES
from expected_pairs import find_expected_pairs, list_exports
from models import saved
from tiers import thin

from onnxkvrename.findings import quote_path

EXPORTS = list_exports()


def test_a_model_without_a_state_is_named_in_the_command_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    monkeypatch.chdir(tmp_path)
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        main (float[a,4] x) => (float[a,4] y) {y = Neg(x)}
    """)
    for name in ("m.onnx", "-m.onnx", "a b.onnx"):
        saved(model, tmp_path / name)
        path = quote_path(name)
        err = run("pairs", "--as", "rules", "--", name).err
        assert f"(`onnxkvrename inspect {path} --profile auto` shows what the model has)" in err


def test_a_rename_by_the_dataflow_is_that_of_the_profile_and_can_be_undone(
    decoder: Path, renamed: bytes, run
) -> None:
    before = decoder.read_bytes()
    assert run(decoder, "--prefix", "VLLM", "--pairs", "dataflow").code == 0
    assert decoder.read_bytes() == renamed
    again = run(decoder, "--prefix", "VLLM", "--pairs", "dataflow")
    assert (again.code, decoder.read_bytes()) == (0, renamed)
    assert run("verify", decoder, "--prefix", "VLLM", "--pairs", "dataflow").code == 0
    assert run(decoder, "--strip", "--prefix", "VLLM", "--pairs", "dataflow").code == 0
    assert decoder.read_bytes() == before


@pytest.mark.parametrize("command", ["inspect", "manifest", "check-consumer", "verify"])
def test_commands_read_the_pairs_of_the_dataflow(command: str, decoder: Path, run) -> None:
    target = ("vllmKvCache",) if command == "check-consumer" else ()
    for token in target:
        run(decoder, "--prefix", token)
    by_profile = run(command, decoder)
    by_dataflow = run(command, decoder, "--pairs", "dataflow")
    assert by_dataflow.code == by_profile.code
    assert by_dataflow.out.count("past_key") == by_profile.out.count("past_key")


def test_two_sides_are_compared_by_their_dataflow(decoder: Path, run) -> None:
    run(decoder, "--prefix", "vllmKvCache")
    other = shutil.copyfile(decoder, decoder.parent / "other.onnx")
    by_profile = run("compare", decoder, other, "--dim", "ctx_len=8")
    by_dataflow = run("compare", decoder, other, "--pairs", "dataflow", "--dim", "ctx_len=8")
    assert (by_dataflow.code, by_dataflow.out) == (by_profile.code, by_profile.out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--strip"], "--pairs needs --prefix"),
        (["--prefix", "V", "--rules", "r.toml"], "--rules and --pairs cannot be used together"),
        (["--prefix", "V", "--seed-cache"], "--seed-cache and --pairs cannot be used together"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: list[str], message: str, decoder: Path, run
) -> None:
    before = decoder.read_bytes()
    outcome = run(decoder, "--pairs", "dataflow", *options)
    assert outcome.code == 2
    assert message in outcome.err
    assert decoder.read_bytes() == before


def test_models_of_different_names_are_renamed_together(tmp_path: Path, run) -> None:
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", tmp_path / "1.onnx")
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        main (float[a,4] h_0) => (float[a,4] neg) {neg = Identity(h_0)}
    """)
    saved(model, tmp_path / "2.onnx")
    outcome = run(tmp_path, "--prefix", "V", "--pairs", "dataflow")
    assert outcome.code == 0
    assert "h_0 -> h_0_V" in outcome.out
    assert "past_key.0 -> past_key.0_V" in outcome.out


@pytest.mark.skipif(not EXPORTS, reason="the real exports are not there")
@pytest.mark.parametrize("number", thin(range(len(EXPORTS) or 1), 2))
def test_each_real_export_is_renamed_verified_and_given_back(
    number: int, tmp_path: Path, run
) -> None:
    path = EXPORTS[number]
    options = ("--prefix", "Tok", "--pairs", "dataflow", "--sidecars", "off")
    result, back = tmp_path / "renamed" / path.name, tmp_path / "back" / path.name
    pairs = find_expected_pairs(path)
    if not pairs or "dynamo_subfn/VLLM" in path.as_posix():
        outcome = run(path, *options, "-o", result)
        assert (outcome.code, result.exists()) == (2, False)
        assert "no cache found in the graph" in outcome.err
        return
    pairs.pop("vision_embeds", None)  # a state, but no cache
    if any("_VLLM" in name for name in pairs):
        outcome = run(path, *options, "-o", result)
        assert (outcome.code, result.exists()) == (1, False)
        assert f"KV202: {2 * len(pairs)} names" in outcome.err
        assert run(path, "--prefix", "VLLM", *options[2:], "--check").code == 0
        options = (*options, "--replace")
    outcome = run(path, *options, "-o", result, "--verify")
    assert outcome.code == 0, outcome.err
    assert len(outcome.out.splitlines()) == 2 * len(pairs)
    assert run(result, *options, "--check").code == 0
    if "--replace" in options:
        assert run(result, "--prefix", "VLLM", *options[2:], "-o", back).code == 0
    else:
        assert run(result, *options, "--strip", "-o", back).code == 0
    assert back.read_bytes() == path.read_bytes()
