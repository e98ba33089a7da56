"""What is said of a command line that cannot be understood, and what is suggested instead."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from conftest import FIXTURES, Run

from onnxkvrename.handoff.find_consumers import list_consumers
from onnxkvrename.rules.load import list_profiles

HELP = "`onnxkvrename {} --help` lists all options"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model, another one, and a directory, to run commands beside."""
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", "m.onnx")
    shutil.copyfile(FIXTURES / "VLLM" / "decoder.onnx", "v.onnx")
    shutil.copyfile("m.onnx", "-m.onnx")
    Path("exports").mkdir()
    shutil.copyfile("m.onnx", "exports/m.onnx")


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        # A value near a known one, in any capitals.
        ("m.onnx --target VLLM-QAIC", "no such target: VLLM-QAIC (did you mean vllm-qaic?)"),
        ("check-consumer m.onnx --target vllm", "no such target: vllm (did you mean vllm-qaic?)"),
        ("m.onnx --prefix X --profile qef", "no such profile: qef (did you mean qeff?)"),
        ("profiles Whisper", "no such profile: Whisper (did you mean whisper?)"),
        ("m.onnx --to hugginface", "no such profile: hugginface (did you mean huggingface?)"),
        ("custom-io m.onnx --precision FLOAT16",
         "unknown precision FLOAT16 (did you mean float16?)"),
        ("verify m.onnx --format JSON",
         "--format: 'JSON' is not one of 'github', 'json', 'sarif', 'text' (did you mean json?)"),
        ("m.onnx --prefix X --jobs two", f"--jobs: 'two' is not a whole number "
         f"({HELP.format('rename')})"),
        ("m.onnx --prefix X --jobs 0", f"--jobs: 0 is not a number from 1 to 10000 "
         f"({HELP.format('rename')})"),
        ("manifest m.onnx --block-size 0", f"--block-size: 0 is less than 1 "
         f"({HELP.format('manifest')})"),
        # An option near a known one, with one dash, with a letter, of another command.
        ("--verison", "no such option: --verison (`onnxkvrename --version` shows the version)"),
        ("-version", "no such option: -version (`onnxkvrename --version` shows the version)"),
        ("inspect -V", "no such option: -V (`onnxkvrename --version` shows the version)"),
        ("m.onnx -target vllm-qaic", "no such option: -target (did you mean --target?)"),
        ("m.onnx -prefix=X", "no such option: -prefix (did you mean --prefix?)"),
        ("m.onnx --full_transfer", "no such option: --full_transfer "
         "(did you mean --full-transfer?)"),
        ("m.onnx -p X", "no such option: -p (did you mean --pairs or --prefix or --profile?)"),
        ("verify m.onnx -qz", f"no such option: -z ({HELP.format('verify')})"),
        ("verify m.onnx --nonsense", f"no such option: --nonsense ({HELP.format('verify')})"),
        ("verify -m.onnx", "no such option: -m (for the file, pass ./-m.onnx)"),
        ("verify ''", "MODEL: an empty path: is a variable not set? "
         f"({HELP.format('verify')})"),
        ("verify m.onnx --target vllm-qaic", "verify has no option --target; rename, "
         "check-consumer, compare have it "
         "(onnxkvrename check-consumer m.onnx --target vllm-qaic)"),
        ("verify m.onnx --targt vllm-qaic", "no such option: --targt (did you mean --target, "
         "which rename, check-consumer, compare have?)"),
        ("inspect 'm.onnx' --run", "inspect has no option --run; verify has it "
         "(onnxkvrename verify m.onnx --run)"),
        ("verify m.onnx --seed-cache", "verify has no option --seed-cache; rename has it "
         f"({HELP.format('verify')})"),
        ("recover . --target vllm-qaic", "recover has no option --target; rename, "
         f"check-consumer, compare have it ({HELP.format('recover')})"),
        # A word near a command, or before which one is missing.
        ("Verify m.onnx", "no such file or command: Verify (did you mean verify?)"),
        ("check_consumer m.onnx",
         "no such file or command: check_consumer (did you mean check-consumer?)"),
        ("show m.onnx", "no such file or command: show (did you mean inspect?)"),
        ("convert m.onnx --prefix X", "no such file or command: convert (did you mean rename?)"),
        ("exprots --prefix X", "no such file or command: exprots (did you mean exports?)"),
        ("nowhere --prefix X", "nowhere: no such file or command "
         "(`onnxkvrename --help` lists all commands)"),
        ("m.onnx verify", "verify: no such file "
         "(`onnxkvrename verify m.onnx`: the command comes first)"),
        ("--prefix X rename m.onnx", "rename: no such file "
         "(`onnxkvrename rename --prefix X m.onnx`: the command comes first)"),
        ("m.onnx explain", "explain: no such file "
         "(`onnxkvrename explain --help`: the command comes first)"),
        ("m.onnx verfy", "verfy: no such file or command "
         "(did you mean verify? the command comes first)"),
        ("verify verfy", "verfy: no such file"),
        ("verify help", "help: no such file (onnxkvrename verify --help)"),
        ("help verify", "no such file or command: help (onnxkvrename verify --help)"),
        ("m.onnx check", "check: no such file or command "
         "(did you mean check-consumer? the command comes first)"),
        ("verify exprots", "exprots: no such file (did you mean exports?)"),
        ("exports1 --prefix X", "exports1: no such file (did you mean exports?)"),
        # A word that lacks its option.
        ("check-consumer m.onnx vllm-qaic", "vllm-qaic: no such file "
         "(onnxkvrename check-consumer m.onnx --target vllm-qaic)"),
        ("verify vllm-qaic m.onnx", "vllm-qaic: no such file "
         "(onnxkvrename check-consumer m.onnx --target vllm-qaic)"),
        ("m.onnx VLLM -n --strip", "VLLM: no such file "
         "(onnxkvrename m.onnx -n --strip --prefix VLLM)"),
        ("m.onnx --prefix VLLM KEYS", "KEYS: no such file"),
        ("m.onnx --prefix X --rules qeff", "qeff: no such file "
         "(onnxkvrename m.onnx --prefix X --profile qeff)"),
        ("m.onnx --prefix X --rules none", "none: no such file"),
        ("m.onnx --prefix X --profile my.toml", "no such profile: my.toml (--rules reads a file)"),
        ("verify m.onnx --dim ctx_len=4", "--dim requires --run "
         "(`onnxkvrename verify --help` lists all options)"),
        ("explain kv-402", "no finding has the code kv-402 (onnxkvrename explain KV402)"),
        ("explain 402,KV601", "no finding has the code 402,KV601 "
         "(onnxkvrename explain KV402 KV601)"),
        ("explain --all", f"no such option: --all ({HELP.format('explain')})"),
        # What is missing, or too much.
        ("m.onnx --target --check",
         f"--target requires a value (one of: {', '.join(list_consumers())})"),
        ("m.onnx --prefix --target vllm-qaic",
         f"--prefix requires a value ({HELP.format('rename')})"),
        ("recover", f"no PATH given: recover requires one PATH ({HELP.format('recover')})"),
        ("compare m.onnx", "no DECODE given: compare requires PREFILL and DECODE "
         f"({HELP.format('compare')})"),
        ("compare m.onnx m.onnx v.onnx", "too many arguments: v.onnx; compare takes PREFILL and "
         f"DECODE ({HELP.format('compare')})"),
        ("custom-io --precision float16", "no MODEL given: pass an .onnx file "
         f"({HELP.format('custom-io')})"),
        ("custom-io m.onnx", "custom-io requires --precision NAME "
         "(What the compiler keeps every KV buffer in: float16, mxint8, float)"),
        ("custom-io m.onnx v.onnx --precision float16", "custom-io requires one model, not 2: "
         "m.onnx, v.onnx (onnxkvrename custom-io m.onnx --precision float16)"),
        ("profiles qeff whisper", "too many arguments: whisper; profiles takes one NAME "
         f"({HELP.format('profiles')})"),
        ("m.onnx --prefix", f"--prefix requires a value ({HELP.format('rename')})"),
        ("m.onnx --target", f"--target requires a value (one of: {', '.join(list_consumers())})"),
        ("verify m.onnx --profile",
         f"--profile requires a value (one of: {', '.join(list_profiles())}, auto)"),
        ("verify m.onnx --format",
         "--format requires a value (one of: github, json, sarif, text)"),
        ("m.onnx --prefix X --check=yes",
         f"--check cannot take a value ({HELP.format('rename')})"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_what_was_meant(typed: str, error: str, run: Run) -> None:
    outcome = run(*shlex.split(typed))
    assert (outcome.code, outcome.err) == (2, f"error: {error}\n")


def test_a_suggested_command_is_safe_to_print(run: Run) -> None:
    """It repeats names that a terminal or a CI runner might act on."""
    name = "##vso[x]\x1b[31m.onnx"
    shutil.copyfile("m.onnx", name)
    err = run("verify", name, "--target", "vllm-qaic").err
    assert r"$'\043\043vso[x]\033[31m.onnx' --target vllm-qaic)" in err


def test_a_value_may_be_called_like_an_option(run: Run) -> None:
    """It is a part of the word then, as in every command of a hint."""
    shutil.copyfile(FIXTURES.parent / "onnxkvrename/rules/profiles/qeff.toml", "-n")
    assert run("m.onnx", "--prefix", "X", "--rules=-n").code == 0
    assert "--rules requires a value" in run("m.onnx", "--prefix", "X", "--rules", "-n").err


def test_a_file_called_like_a_command_is_a_model(run: Run) -> None:
    shutil.copyfile("m.onnx", "check_consumer")
    assert "no such" not in run("check_consumer", "--prefix", "X").err
