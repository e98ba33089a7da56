"""What a failing ``--check`` says: the names that lack the token, and the command that adds it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from itertools import product
from pathlib import Path

import onnx
import pytest
import qefficient_exports
from conftest import FIXTURES, Run
from hints import find_commands
from terminals import run_on_terminal

TARGET = ("--target", "vllm-qaic")
TOKEN = "vllmKvCache"
SENTENCE = f"2 of 8 names lack {TOKEN} (first: past_key.1)"
FIX = "onnxkvrename half.onnx --target vllm-qaic"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """A model of which one buffer lacks the token."""
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", "plain.onnx")
    assert run("plain.onnx", *TARGET, "-o", "half.onnx", "-q").code == 0
    model = onnx.load("half.onnx")
    missed = {f"past_key.1_{TOKEN}{end}": f"past_key.1{end}" for end in ("", "_RetainedState")}
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [missed.get(name, name) for name in names]
    for value in (*model.graph.input, *model.graph.output):
        value.name = missed.get(value.name, value.name)
    onnx.save(model, "half.onnx")


def paste(command: str, run: Run) -> int:
    """Run a command that was printed, and return its exit code."""
    program, *words = shlex.split(command)
    assert program == "onnxkvrename"
    return run(*words).code


def test_it_says_which_names_lack_the_token_and_how_to_add_it(run: Run) -> None:
    outcome = run("half.onnx", *TARGET, "--check")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == f"half.onnx: {SENTENCE}\n  -> run `{FIX}`\n"
    assert paste(FIX, run) == 0
    assert run("half.onnx", *TARGET, "--check").err.startswith("half.onnx: unchanged: every")


def test_only_a_passed_check_says_that_the_consumer_can_use_the_model(run: Run) -> None:
    assert "checked for" not in run("half.onnx", *TARGET, "--check", "--verify").err
    run("half.onnx", *TARGET)
    assert "checked for vllm-qaic: it selects" in run("half.onnx", *TARGET, "--check").err


def test_a_terminal_shows_the_same_in_two_lines() -> None:
    command = [sys.executable, "-m", "onnxkvrename", "half.onnx", *TARGET, "--check"]
    code, text = run_on_terminal(command, {"TERM": "dumb", "COLUMNS": "80", "LANG": "C.UTF-8"})
    assert code == 1
    assert text.split() == f"half.onnx: {SENTENCE} -> run `{FIX}`".split()


@pytest.mark.parametrize(
    ("typed", "sentence"),
    [
        ("half.onnx --strip", "6 of 8 names have a token (first: past_key.0_vllmKvCache)"),
        ("plain.onnx --prefix VLLM", "8 of 8 names lack VLLM (first: past_key.0)"),
        ("half.onnx --prefix VLLM --replace", "8 of 8 names lack VLLM"),
        ("plain.onnx --prefix VLLM -d 'new files'", "the result is missing -> new"),
    ],
)
def test_the_command_does_what_was_checked(typed: str, sentence: str, run: Run) -> None:
    outcome = run(*shlex.split(typed), "--check", "--format", "text")
    assert sentence in outcome.err
    assert f"  -> run `onnxkvrename {typed}`\n" in outcome.err
    assert paste(f"onnxkvrename {typed}", run) == 0
    assert run(*shlex.split(typed), "--check").code == 0


def test_what_a_variable_gave_is_in_the_command(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONNXKVRENAME_TARGET", "vllm-qaic")
    assert f"run `{FIX}`\n" in run("half.onnx", "--check").err


def test_an_annotation_has_the_sentence_and_the_command(run: Run) -> None:
    outcome = run("half.onnx", *TARGET, "--check", "--format", "github")
    assert outcome.out == (
        f"::error file=half.onnx,title=KV token missing::{SENTENCE}; run `{FIX}`\n"
    )
    stripped = run("half.onnx", "--strip", "--check", "--format=github").out
    assert stripped.startswith("::error file=half.onnx,title=KV token present::6 of 8 names")
    assert stripped.endswith("run `onnxkvrename half.onnx --strip`\n")


def test_two_hundred_files_share_one_annotation_and_one_line(run: Run) -> None:
    Path("set").mkdir()
    for number in range(200):
        source = "half.onnx" if number % 2 else "plain.onnx"
        shutil.copyfile(source, f"set/{number:03}.onnx")
    command = "onnxkvrename set --target vllm-qaic"
    annotation, total = run("set", *TARGET, "--check", "--format", "github").out.splitlines()
    assert annotation.startswith("::error file=set/000.onnx,title=KV token missing::200 files in ")
    assert f"8 of 8 names lack {TOKEN} (first: past_key.0); run `{command}`" in annotation
    assert total.startswith("::notice title=total::200 models: 200 would change")
    lines = run("set", *TARGET, "--check").err.splitlines()
    assert lines == [
        "200 files in set (first: 000.onnx): 2 to 8 of 8 names lack vllmKvCache in each "
        "(first: past_key.0)",
        "200 models: 200 would change, 0 unchanged; 800 KV buffers",
        f"  -> run `{command}`",
    ]


def test_json_has_the_sentence_and_the_command(run: Run) -> None:
    answer = json.loads(run("half.onnx", *TARGET, "--check", "--format", "json").out)
    assert (answer["models"][0]["pending"], answer["fix"]) == (SENTENCE, FIX)
    answer = json.loads(run("half.onnx", *TARGET, "--dry-run", "--format", "json").out)
    assert (answer["models"][0]["pending"], answer["fix"]) == (None, None)


def test_no_command_stands_beside_an_error_that_must_be_fixed_first(run: Run) -> None:
    Path("text.onnx").write_text("no model")
    for output_format in ("text", "github"):
        outcome = run(".", *TARGET, "--check", "--format", output_format)
        assert outcome.code == 2
        assert SENTENCE in outcome.out + outcome.err
        assert "run `" not in outcome.out + outcome.err


@pytest.mark.parametrize(
    ("where", "changed"),
    [
        *product(("-o new/m.onnx", "-d new", "--seed-cache"), ("model", "data", "missing")),
        ("--seed-cache", "parameters"),
    ],
)
def test_of_a_result_that_is_there_and_different_the_command_is_forced(
    where: str, changed: str, run: Run
) -> None:
    export = qefficient_exports.write_export(Path("cache"))
    typed = f"{export}/decoder.onnx --prefix VLLM {where}"
    assert run(*typed.split(), "-q").code == 0
    before = {path for path in Path("cache").rglob("*") if export not in path.parents}
    places = [path for path in (*before, *Path("new").glob("*")) if path.is_file()]
    ends = {"model": ".onnx", "data": ".data", "parameters": ".json", "missing": ".onnx"}
    (place,) = [path for path in places if path.name.endswith(ends[changed])]
    content = place.read_bytes()
    if changed == "missing":
        place.unlink()
    else:
        place.write_bytes(content + b"\n" if changed == "parameters" else content[:-1] + b"\1")
    outcome = run(*typed.split(), "--check")
    (command,) = set(find_commands(outcome.err))
    assert outcome.code == 1
    forced = {"--force"} if changed != "missing" else set()
    assert {*command.split()} == {"onnxkvrename", *typed.split(), *forced}
    said = {"model": "different", "data": "different", "missing": "missing"}.get(changed)
    assert said is None or f"; the result is {said} -> " in outcome.err
    assert paste(command, run) == 0
    assert place.read_bytes() == content
    assert run(*typed.split(), "--check").code == 0


@pytest.mark.parametrize("protect", ["read-only", "link", "twin"])
def test_the_command_for_a_model_that_may_not_be_replaced_writes_elsewhere(
    protect: str, run: Run
) -> None:
    if protect == "read-only":
        Path("half.onnx").chmod(0o444)
    elif protect == "link":
        Path("half.onnx").rename("real.onnx")
        Path("half.onnx").symlink_to("real.onnx")
    else:
        os.link("half.onnx", "twin.onnx")
    outcome = run("half.onnx", *TARGET, "--check")
    command = f"{FIX} -d renamed"
    assert (outcome.code, f"run `{command}`" in outcome.err) == (1, True)
    assert paste(command, run) == 0
    assert run("renamed", *TARGET, "--check").code == 0
