"""A directory in which one model matches a profile, and of another only the graph shows caches."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import FIXTURES, Run
from exporter_models import build_decoder, build_model, list_caches
from hints import find_commands, run_commands
from models import saved

from onnxkvrename.verification.pairs import unnamed_caches

OTHER_NAMES = ("past_{layer}_{part}", "present_{layer}_{part}")


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", "models/qeff.onnx")
    saved(build_decoder(OTHER_NAMES), tmp_path / "models" / "win.onnx")


def read_models() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path("models").iterdir()}


@pytest.mark.parametrize(
    "command",
    ["models --target vllm-qaic", "models --prefix KV -n", "models --prefix KV --check",
     "models --prefix KV --jobs 2", "models --target vllm-qaic -d out", "verify models",
     "verify models --target vllm-qaic"],
)  # fmt: skip
def test_no_model_is_left_out_silently(command: str, run: Run) -> None:
    before = read_models()
    outcome = run(*command.split(), "-v")
    assert (outcome.code, read_models(), Path("out").exists()) == (1, before, False)
    assert (
        "models/win.onnx: error KV001: no built-in profile knows these names, but the graph has 4 "
        "caches (first: past_0_key -> present_0_key)" in outcome.err
    )
    commands = [each for each in find_commands(outcome.err) if "win.onnx" in each]
    assert commands[0] == "onnxkvrename pairs models/win.onnx --as rules > rules.toml"
    fixed = run_commands("".join(f"`{each}`\n" for each in commands[:2]), run)
    assert "KV001" not in fixed.err


def test_when_that_model_has_the_token_the_others_are_renamed(run: Run) -> None:
    assert run_commands(run("models", "--prefix", "KV").err, run).code == 0
    outcome = run("models", "--prefix", "KV")
    assert outcome.code == 0
    assert "models/win.onnx: warning KV001: " in outcome.err
    assert "names already carry KV" in outcome.err
    assert run("verify", "models/qeff.onnx", "--prefix", "KV").code == 0
    checked = run("verify", "models")
    assert (checked.code, "warning KV001" in checked.err) == (0, True)


def test_a_removal_of_tokens_concerns_models_that_have_one(run: Run) -> None:
    assert run("models", "--strip").code == 0
    assert run_commands(run("models", "--prefix", "KV").err, run).code == 0
    outcome = run("models", "--strip")
    assert (outcome.code, "with the rules of the rename" in outcome.err) == (1, True)


def test_a_model_without_a_cache_stays(run: Run) -> None:
    caches = list_caches(OTHER_NAMES)
    first = build_model([each._replace(input=None) for each in caches])
    saved(first, Path("models/win.onnx"))
    shutil.copyfile(FIXTURES / "plain" / "vlm_dual" / "encoder.onnx", "models/encoder.onnx")
    outcome = run("models", "--prefix", "KV")
    assert outcome.code == 0
    assert "KV001" not in outcome.err
    assert "models/win.onnx: unchanged: no KV buffer" in outcome.err
    assert run("verify", "models").code == 0


def test_own_rules_leave_out_what_they_leave_out(run: Run) -> None:
    Path("rules.toml").write_text(run("pairs", "models/qeff.onnx", "--as", "rules").out, "utf-8")
    assert run("models", "--prefix", "KV", "--rules", "rules.toml").code == 0


def test_a_graph_that_is_too_large_to_be_searched_is_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unnamed_caches, "MAX_SEARCHED_NODES", 3)
    outcome = run("models", "--prefix", "KV")
    assert outcome.code == 0
    assert "models/win.onnx: warning KV001: no rule matches a name of this model" in outcome.err
