"""The program as a whole: its help, its commands, what a shell completes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import FIXTURES
from tiers import thin

from onnxkvrename.cli.main import COMMANDS, EXAMPLES, load_command
from onnxkvrename.options import Example


def test_help_lists_the_commands_before_the_main_options_of_rename(run: Any) -> None:
    text = run("--help").out
    places = [text.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places)
    assert places[-1] < text.index("--prefix, --token TOKEN")
    assert "--seed-cache" not in text
    assert len(text.splitlines()) <= 50


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("command", ["", *thin(COMMANDS, 3)])
def test_help_is_as_wide_as_the_terminal_and_breaks_no_name(
    command: str, columns: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = run(*command.split(), "--help").out.splitlines()
    assert [line for line in lines if re.search(r"\w-$", line)] == []
    *_, longest = sorted(len(line) for line in lines if "onnxkvrename" not in line)
    assert int(columns) - 25 < longest <= int(columns)


def test_nothing_typed_is_answered_by_the_help_on_stderr(run: Any) -> None:
    assert run() == (2, "", run("--help").out)


@pytest.mark.parametrize("words", [(), ("verify",), ("help",), ("model.onnx",)])
def test_help_is_a_word_too(words: tuple[str, ...], run: Any) -> None:
    command = words[0] if words and words[0] in COMMANDS else "rename"
    page = run(command, "--help") if words and words[0] != "help" else run("--help")
    assert run("help", *words) == page


def test_help_of_what_is_not_there_suggests_what_is(run: Any) -> None:
    outcome = run("help", "verfy")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: verfy: no such command (did you mean verify?)\n"


LISTED = [example for name in COMMANDS for example in load_command(name).command.examples]


@pytest.mark.parametrize("example", [*EXAMPLES, *LISTED], ids=lambda example: example.line)
def test_each_example_of_the_help_does_its_work(
    example: Example, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = FIXTURES / "plain" / "serving" / "decoder.onnx"
    shutil.copy(model, "model.onnx")
    shutil.copytree(FIXTURES / "plain" / "windows", "exports")
    assert run("model.onnx", "--target", "vllm-qaic", "-o", "renamed.onnx").code == 0
    for side in ("prefill.onnx", "decode.onnx"):
        shutil.copy("renamed.onnx", side)
    line, _, output = example.line.partition(" > ")
    outcome = run(*shlex.split(line)[1:])
    assert outcome.code == 0, outcome
    assert outcome.out or not output


def test_each_command_has_examples_of_its_own(run: Any) -> None:
    for name in COMMANDS:
        lines = [example.line for example in load_command(name).command.examples]
        assert len(lines) >= 2
        own = "onnxkvrename" if name == "rename" else f"onnxkvrename {name}"
        assert [line for line in lines if not f"{line} ".startswith(f"{own} ")] == []
        text = run(name, "--help").out
        assert [line for line in lines if f"\n  {line}\n" not in text] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_own_help_and_the_program_tells_the_version(
    name: str, run: Any
) -> None:
    assert run(name, "-h").out.startswith(f"Usage: onnxkvrename {name} ")
    assert "no such option: -V (`onnxkvrename" in run(name, "-V").err


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_called_like_its_module(name: str) -> None:
    assert load_command(name).command.name == name


def test_token_is_another_name_of_prefix(decoder: Path, run: Any) -> None:
    assert (
        run(decoder, "--token", "VLLM", "--check").out
        == run(decoder, "--prefix", "VLLM", "--check").out
    )


def test_a_misspelled_command_is_not_taken_for_a_model(run: Any) -> None:
    assert run("verfy").err == "error: verfy: no such file or command (did you mean verify?)\n"


COMPLETED = [
    ("onnxkvrename ver", ["verify"]),
    ("onnxkvrename verify --renamed", ["--renamed-from"]),
    ("onnxkvrename model.onnx --targ", ["--target"]),
    ("onnxkvrename model.onnx --format gi", ["github"]),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(("line", "expected"), thin(COMPLETED, 3))
def test_bash_completes(line: str, expected: list[str], tmp_path: Path) -> None:
    command = tmp_path / "onnxkvrename"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m onnxkvrename "$@"\n')
    command.chmod(0o755)
    for name in ("model.onnx", "my model.onnx", "notes.txt"):
        tmp_path.joinpath(name).touch()
    tmp_path.joinpath("m").mkdir()
    script = f"""
        eval "$(_ONNXKVRENAME_COMPLETE=bash_source onnxkvrename)"
        compopt() {{ :; }}  # it works only while a user types
        COMP_WORDS=({line}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        _onnxkvrename_completion onnxkvrename "${{COMP_WORDS[COMP_CWORD]}}" ""
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    root = Path(__file__).resolve().parents[2]
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(root),
    }
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert [each for each in done.stdout.split() if each in expected] == expected, done.stderr
    assert not {"my", "notes.txt"} & {*done.stdout.split()}, "a path in parts, or not a model"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_documented_lines_print_a_script(shell: str) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "commands.md").read_text("utf-8")
    assert f"_ONNXKVRENAME_COMPLETE={shell}_source onnxkvrename" in page
    environment = {
        **os.environ,
        "_ONNXKVRENAME_COMPLETE": f"{shell}_source",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    command = [sys.executable, "-m", "onnxkvrename"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, "_onnxkvrename_completion" in done.stdout) == (0, True)
