"""What is said of a command line that cannot be understood, and what is suggested instead."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from conftest import FIXTURES, Run

HELP = "`onnxkvrename {} --help` lists all options"
ORDER = "the command comes first: `onnxkvrename {}`"
COMMANDS = "`onnxkvrename --help` lists all commands"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model, and a directory, to run commands beside."""
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", "m.onnx")
    Path("exports").mkdir()
    shutil.copyfile("m.onnx", "exports/decoder.onnx")
    Path("inspec-1").mkdir()


@pytest.mark.parametrize(
    ("typed", "message", "hint"),
    [
        # Values, options, commands and files near known ones, in any capitals.
        ("m.onnx --target VLLM-QAIC", "no such target", "did you mean vllm-qaic?"),
        ("m.onnx --prefix X --profile qef", "no such profile", "did you mean qeff?"),
        ("profiles Qeff", "no such profile", "did you mean qeff?"),
        ("m.onnx --full_transfer", "no such option: --full_transfer",
         "did you mean --full-transfer?"),
        ("verify m.onnx --nonsense", "no such option: --nonsense", HELP.format("verify")),
        ("verify m.onnx --targt x", "no such option: --targt", "did you mean --target?"),
        ("verify m.onnx -qz", "no such option: -z", HELP.format("verify")),
        ("Verify m.onnx", "Verify: no such file or command", "did you mean verify?"),
        ("exprots --prefix X", "exprots: no such file or command", "did you mean exports?"),
        ("verify exprots", "exprots: no such file", "did you mean exports?"),
        ("verify exports/decodr.onnx", "no such file", "did you mean exports/decoder.onnx?"),
        ("exports/Decoder.ONNX --prefix X", "no such file", "did you mean exports/decoder.onnx?"),
        ("nowhere --prefix X", "nowhere: no such file or command", COMMANDS),
        ("nowhere --dim ctx_len=4", "nowhere: no such file or command", COMMANDS),
        ("verify zzz.onnx", "zzz.onnx: no such file", ""),
        # Words without their option.
        ("verify vllm-qaic m.onnx", "no such file", "did you mean --target vllm-qaic?"),
        ("m.onnx vllm-qaic", "no such file", "did you mean --target vllm-qaic?"),
        ("vllm-qaic m.onnx", "no such file or command", "did you mean --target vllm-qaic?"),
        ("m.onnx qeff", "no such file", "did you mean --profile qeff?"),
        ("strip m.onnx", "no such file or command", "did you mean --strip?"),
        ("verify m.onnx strip", "strip: no such file", ""),
        ("m.onnx VLLM", "VLLM: no such file", "did you mean --prefix VLLM?"),
        ("VLLM m.onnx", "VLLM: no such file or command", "did you mean --prefix VLLM?"),
        ("m.onnx VLLM --prefix X", "VLLM: no such file", ""),
        ("verify m.onnx VLLM", "VLLM: no such file", ""),
        ("undo m.onnx", "no such file or command", "did you mean --strip?"),
        ("m.onnx undo", "undo: no such file", "did you mean --strip?"),
        # A command that does not come first.
        ("--target vllm-qaic verify m.onnx", "verify: no such file",
         ORDER.format("verify --target vllm-qaic m.onnx")),
        ("m.onnx inspect", "inspect: no such file", ORDER.format("inspect m.onnx")),
        ("--renamed-from m.onnx verify 'a b.onnx'", "no such option: --renamed-from",
         ORDER.format("verify --renamed-from m.onnx 'a b.onnx'")),
        ("m.onnx --prefix verify --jobs two", "'two'", HELP.format("rename")),
        # Help is about commands, and a command or an option is rather meant than a file.
        ("help nope", "nope: no such command", COMMANDS),
        ("help exprots", "exprots: no such command", COMMANDS),
        ("help verif", "verif: no such command", "did you mean verify?"),
        ("inspec --prefix X", "no such file or command", "did you mean inspect?"),
        # What is missing, too much, or no value.
        ("m.onnx --target", "'--target' requires an argument", HELP.format("rename")),
        ("m.onnx --prefix --target vllm-qaic", "'--prefix' requires an argument",
         HELP.format("rename")),
        ("m.onnx --prefix X --check=yes", "'--check'", HELP.format("rename")),
        ("m.onnx --prefix X --jobs two", "'two'", HELP.format("rename")),
        ("verify m.onnx --format JSON", "'JSON' is not one of", HELP.format("verify")),
        ("verify ''", "an empty path", HELP.format("verify")),
        ("verify", "no MODEL given", HELP.format("verify")),
        ("m.onnx --prefix X --profile my.toml", "no such profile", "--rules reads a file"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_what_was_meant(
    typed: str, message: str, hint: str, run: Run
) -> None:
    outcome = run(*shlex.split(typed))
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert message in outcome.err
    assert outcome.err.endswith(f" ({hint})\n") is bool(hint)


def test_a_value_may_be_called_like_an_option(run: Run) -> None:
    """It is a part of the word then."""
    shutil.copyfile(FIXTURES.parent / "onnxkvrename/rules/profiles/qeff.toml", "-n")
    assert run("m.onnx", "--prefix", "X", "--rules=-n").code == 0
    assert "'--rules' requires" in run("m.onnx", "--prefix", "X", "--rules", "-n").err


def test_a_file_called_like_a_command_is_a_model(run: Run) -> None:
    shutil.copyfile("m.onnx", "Verify")
    assert "no such" not in run("Verify", "--prefix", "X").err


def test_the_number_of_a_code_is_enough(run: Run) -> None:
    assert run("explain", "402") == run("explain", "KV402")
    assert run("explain", "1").out.startswith("KV001 no-kv-buffers\n")
    assert "no such finding: 999 (" in run("explain", "999").err


def test_one_model_is_both_sides(run: Run) -> None:
    run("m.onnx", "--target", "vllm-qaic")
    alone = run("compare", "m.onnx")
    assert (alone, alone.code) == (run("compare", "m.onnx", "m.onnx"), 0)
    assert "hand-off works" in alone.out
