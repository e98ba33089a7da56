"""Each hint is a command that works when it is pasted.

Beside these, every command that is run by the fixture ``run`` has the commands of its hints tried
(:mod:`hint_trials`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import onnx
import pytest
from conftest import FIXTURES, Run, Sample
from exporter_models import build_decoder
from hint_trials import find_hints, split_words
from models import saved
from tiers import thin

import onnxkvrename
from onnxkvrename.cli.hints.complete import CARRIED_OPTIONS, REPLACED_OPTIONS, complete_hint
from onnxkvrename.cli.hints.typed_command import TypedCommand, read_typed_command
from onnxkvrename.cli.main import COMMANDS, load_command
from onnxkvrename.report.inert import escape_text

NAME = "onnxkvrename rename "


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with and without a token, in a directory to run commands in."""
    monkeypatch.chdir(tmp_path)
    for source, name in (
        ("plain/decoder.onnx", "m.onnx"),
        ("plain/decoder.onnx", "my model.onnx"),
        ("plain/decoder.onnx", "-m.onnx"),
        ("VLLM/decoder.onnx", "v.onnx"),
        ("VLLM/decoder.onnx", "größe.onnx"),
        ("plain/internal_suffix.onnx", "suffix.onnx"),
    ):
        shutil.copyfile(FIXTURES / source, name)
    shutil.copyfile("v.onnx", "other.onnx")
    shutil.copyfile("m.onnx", "target.onnx")
    Path("linked.onnx").symlink_to("target.onnx")
    Path("other").mkdir()
    for name, token in (("q.onnx", "vllmKvCache"), ("wrong.onnx", "vllmkvcache")):
        onnxkvrename.rename("m.onnx", token, output=name)
    shutil.copytree(FIXTURES / "VLLM" / "windows", "set")
    shutil.copytree(FIXTURES / "plain" / "windows", "half")
    window = "windows/layer_1_2/Tiny_layer_tmp_1_2.onnx"
    shutil.copyfile(FIXTURES / "VLLM" / window, window.replace("windows", "half"))


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        # A different token: replace it, in all that was asked for, where it was asked for.
        ("v.onnx --prefix X", "v.onnx --prefix X --replace"),
        ("v.onnx --target vllm-qaic", "v.onnx --target vllm-qaic --replace"),
        ("v.onnx m.onnx --prefix X -d out", "v.onnx m.onnx --prefix X -d out --replace"),
        ("größe.onnx --token X", "'größe.onnx' --prefix X --replace"),
        ("v.onnx --strip --prefix X", "v.onnx --strip --prefix VLLM"),
        # Verified with a token that the model does not have: the command that puts it in.
        ("verify m.onnx --prefix X", "m.onnx --prefix X"),
        ("verify v.onnx --prefix X", "v.onnx --prefix X --replace"),
        ("verify 'my model.onnx' --prefix X -q", "'my model.onnx' --prefix X"),
        ("verify m.onnx --prefix X --profile qeff", "m.onnx --prefix X --profile qeff"),
        ("verify m.onnx --prefix X --pairs dataflow", "m.onnx --prefix X --pairs dataflow"),
        ("verify set --prefix X", "set --prefix X --replace"),
        ("verify --prefix X -- -m.onnx", "./-m.onnx --prefix X"),
        # A token with the wrong capitals: that of the consumer, never the one that was typed.
        ("m.onnx --prefix vllmkvcache", "rename m.onnx --prefix vllmKvCache --replace"),
        ("m.onnx --prefix vllmkvcache -n", "rename m.onnx --prefix vllmKvCache --replace"),
        ("verify m.onnx --prefix vllmkvcache", "m.onnx --prefix vllmKvCache"),
        ("verify v.onnx --prefix vllmkvcache", "v.onnx --prefix vllmKvCache --replace"),
        ("verify q.onnx --prefix vllmkvcache", "verify q.onnx --prefix vllmKvCache"),
        ("verify wrong.onnx", "rename wrong.onnx --prefix vllmKvCache --replace"),
        ("wrong.onnx --prefix vllmkvcache", "rename wrong.onnx --prefix vllmKvCache --replace"),
        # A set of which only some files are renamed, as after a run that was stopped.
        ("verify half", "half --prefix VLLM"),
        # A suffix that consumers do not pair.
        ("suffix.onnx --prefix X --strict", "suffix.onnx --normalize --prefix X --strict"),
        ("verify suffix.onnx", "suffix.onnx --target vllm-qaic --normalize"),
        # A file in the way.
        ("m.onnx --prefix X -o v.onnx", "m.onnx --prefix X -o v.onnx --force"),
        ("m.onnx --prefix X -o other", "m.onnx --prefix X -d other"),
        ("m.onnx v.onnx --strip -o one.onnx", "m.onnx v.onnx --strip -d renamed"),
        # A hint that says what changes in files leaves out what keeps them as they are.
        ("v.onnx --prefix X -n", "v.onnx --prefix X --replace"),
        ("v.onnx --prefix X --check", "v.onnx --prefix X --replace"),
        ("v.onnx --prefix X --diff", "v.onnx --prefix X --replace"),
        ("suffix.onnx --prefix X --check", "suffix.onnx --normalize --prefix X"),
        ("m.onnx --prefix X -o v.onnx -n", "m.onnx --prefix X -o v.onnx --force"),
        ("linked.onnx --prefix X -n", "linked.onnx --prefix X -d renamed"),
        ("m.onnx --check", "m.onnx --check --target vllm-qaic"),
        # A word that is an option here.
        ("strip v.onnx", "v.onnx --strip"),
        ("undo v.onnx --prefix VLLM -d out", "v.onnx --prefix VLLM -d out --strip"),
        ("strip", "--help"),
        ("help", "--help"),
        ("help rename", "rename --help"),
        ("m.onnx vllm-qaic -d out", "m.onnx -d out --target vllm-qaic"),
        ("vllm-qaic 'my model.onnx'", "'my model.onnx' --target vllm-qaic"),
        # Without rules for names: what takes a token out still does.
        ("v.onnx --strip --pairs dataflow",
         "rename v.onnx --strip --prefix VLLM --pairs dataflow"),
        ("v.onnx --pairs dataflow", "v.onnx --pairs dataflow --target vllm-qaic"),
        # A check after a rename is one of its results.
        ("m.onnx --prefix X --target onnxruntime-genai -d set",
         "check-consumer set --target onnxruntime-genai"),
        ("m.onnx --prefix X --target onnxruntime-genai",
         "check-consumer m.onnx --target onnxruntime-genai"),
        # Not understood at all.
        ("m.onnx --strip --jobs 2 --dask x", "rename --help"),
        ("verify", "verify --help"),
        ("explain KV999", "explain"),
    ],
)  # fmt: skip
def test_a_hint_repeats_what_was_typed(typed: str, suggested: str, run: Run) -> None:
    outcome = run(*shlex.split(typed))
    assert next(find_hints("", outcome.err)).command == f"onnxkvrename {suggested}"


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("check-consumer pair", "check-consumer pair/decoder.onnx"),
        ("check-consumer ./pair/ --target vllm-qaic --strict",
         "check-consumer pair/decoder.onnx --target vllm-qaic --strict"),
        ("check-consumer pair/an_encoder.onnx pair/decoder.onnx",
         "check-consumer pair/decoder.onnx"),
        ("manifest pair", "manifest pair/decoder.onnx"),
        ("manifest m.onnx --block-size 16 --draft pair",
         "manifest m.onnx --block-size 16 --draft pair/decoder.onnx"),
        ("compare pair pair", "compare pair/decoder.onnx pair/decoder.onnx"),
        ("compare m.onnx pair --tokens 5", "compare m.onnx pair/decoder.onnx --tokens 5"),
    ],
)  # fmt: skip
def test_of_a_folder_with_several_models_the_decoder_is_passed(
    typed: str, suggested: str, run: Run
) -> None:
    """An encoder computes buffers too, but nothing keeps them from step to step."""
    encoder = onnx.load("m.onnx")
    del encoder.graph.input[1:]
    Path("pair").mkdir()
    saved(encoder, Path("pair/an_encoder.onnx"))
    shutil.copyfile("m.onnx", "pair/decoder.onnx")
    outcome = run(*shlex.split(typed))
    hint = next(find_hints("", outcome.err)).command
    assert (outcome.code, hint) == (2, f"onnxkvrename {suggested}")
    assert run(*shlex.split(suggested)).code in (0, 1)


@pytest.mark.parametrize("trial", thin(["--check", "--diff", "-n"], 1))
@pytest.mark.parametrize(
    "typed",
    [
        *("half --prefix VLLM", "half --target vllm-qaic", "v.onnx --prefix X"),
        *("v.onnx --target vllm-qaic", "suffix.onnx --prefix X", "wrong.onnx --prefix vllmKvCache"),
        *("m.onnx --prefix X -o v.onnx", "linked.onnx --prefix X"),
    ],
)
def test_a_fix_writes_though_it_was_found_by_a_trial(typed: str, trial: str, run: Run) -> None:
    """A trial finds the same again, as nothing is written."""
    for hint in find_hints("", run(*shlex.split(typed), trial).err):
        words = shlex.split(hint.command)[1:]
        assert not {"--check", "--diff", "-n", "verify"} & {*words}
        assert run(*words).code == 0
        assert f" {hint.code}:" not in run(*words, "--check").err


@pytest.mark.parametrize("trial", ["--check", "--diff", "-n"])
@pytest.mark.parametrize(
    "typed",
    [
        *("m.onnx", "m.onnx --prefix X --target vllm-qaic", "m.onnx -o new.onnx"),
        *("hybrid.onnx --target vllm-qaic", "m.onnx --prefix X --profile huggingface"),
    ],
)
def test_a_corrected_command_is_still_a_trial(typed: str, trial: str, run: Run) -> None:
    """What was typed is wrong or lacks something, and the files need no change for it."""
    shutil.copyfile(FIXTURES / "plain" / "hybrid.onnx", "hybrid.onnx")
    hints = list(find_hints("", run(*shlex.split(typed), trial).err))
    assert hints
    assert all(trial in shlex.split(hint.command) for hint in hints)


def test_a_model_is_missed_before_its_token(run: Run) -> None:
    error = "error: none.onnx: no such file"
    assert run("none.onnx").err.startswith(error)
    assert run("m.onnx", "none.onnx", "-n").err.startswith(error)
    Path("strip").mkdir()
    assert "no such file" not in run("strip").err


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("m.onnx --target vllm-qaic --check", "m.onnx --target vllm-qaic"),
        ("rename m.onnx --target vllm-qaic --diff -q", "m.onnx --target vllm-qaic"),
        ("'my model.onnx' m.onnx --prefix X --check", "'my model.onnx' m.onnx --prefix X"),
        ("m.onnx --check --prefix X -d 'a%25, b::c'", "m.onnx --prefix X -d 'a%25, b::c'"),
        ("set --strip --check --no-set", "set --strip --no-set"),
        ("v.onnx --check --prefix X --replace --strict", "v.onnx --prefix X --replace --strict"),
        ("m.onnx target.onnx linked.onnx --check --prefix X --force",
         "m.onnx target.onnx linked.onnx --prefix X --force"),
    ],
)  # fmt: skip
def test_github_shows_the_command_that_changes_the_names(
    typed: str, command: str, run: Run
) -> None:
    """In one line for each file; the command is run like that of every other hint."""
    outcome = run(*shlex.split(typed), "--format", "github")
    lines = [line for line in outcome.out.splitlines() if "title=names" in line]
    assert (outcome.code, bool(lines)) == (1, True)
    for line in lines:
        message = line.rpartition("title=names::")[2].replace("%25", "%")
        assert re.fullmatch(rf"\d+ names would change \({re.escape(NAME + command)}\)", message)
    assert run(*split_words(NAME + command)[1:]).code == 0


def test_github_shows_no_command_for_names_that_cannot_change_yet(run: Run) -> None:
    out = run("m.onnx", "v.onnx", "--prefix", "X", "--check", "--format", "github").out
    assert out.splitlines()[0].endswith("title=names::8 names would change")
    assert "v.onnx --prefix X --replace" in out


def test_a_long_command_is_whole_in_an_annotation(run: Run) -> None:
    folder = Path("d" * 118, "e" * 118, "f" * 118)
    folder.mkdir(parents=True)
    shutil.copyfile("m.onnx", folder / "m.onnx")
    out = run(folder, "--prefix", "X", "--check", "--format", "github").out
    assert out.endswith(f" (onnxkvrename rename {folder} --prefix X)\n")


def _typed(*args: str) -> TypedCommand:
    name = args[0] if args[0] in COMMANDS else "rename"
    typed = read_typed_command(name, load_command(name).command, args)
    assert typed is not None
    return typed


@pytest.mark.parametrize(
    ("hint", "completed"),
    [
        ("`--force`", "onnxkvrename a.onnx b.onnx --rules r.toml -d x --force"),
        ("`MODEL --force`", "onnxkvrename b.onnx --rules r.toml -d x --force"),
        ("`-d y` or `-o z`", "`onnxkvrename a.onnx b.onnx --rules r.toml -d y` or "
         "`onnxkvrename a.onnx b.onnx --rules r.toml -o z`"),
        ("one of them: `MODEL`", "one of them: `onnxkvrename b.onnx --rules r.toml -d x`"),
        ("`--profile qeff`", "onnxkvrename a.onnx b.onnx -d x --profile qeff"),
        ("`onnxkvrename verify MODEL --run`", "onnxkvrename verify b.onnx --run --rules r.toml"),
        ("`onnxkvrename inspect MODEL...`", "onnxkvrename inspect a.onnx b.onnx --rules r.toml"),
        ("`onnxkvrename 'a dir' -d y`", "onnxkvrename 'a dir' -d y --rules r.toml"),
        ("`onnxkvrename verify --help`", "onnxkvrename verify --help"),
        ("`dask scheduler`; no command", "`dask scheduler`; no command"),
    ],
)  # fmt: skip
def test_a_hint_is_made_without_a_command_line_and_completed_with_it(
    hint: str, completed: str
) -> None:
    typed = _typed("a.onnx", "b.onnx", "--rules", "r.toml", "-d", "x", "--format", "json", "-q")
    assert complete_hint(hint, typed, "b.onnx") == completed
    assert complete_hint(completed, typed, "b.onnx") == completed, "completed again it is the same"
    assert complete_hint(hint, None) == hint, "from Python nothing was typed"


@pytest.mark.parametrize("destination", ["new", "./new/", "-new"])
def test_a_command_for_one_model_of_many_writes_to_the_place_of_its_result(
    destination: str, run: Run
) -> None:
    for name in ("exp/decoder.onnx", "exp/b/m.onnx", "exp/c/m.onnx"):
        Path(name).parent.mkdir(exist_ok=True, parents=True)
    shutil.copyfile("m.onnx", "exp/decoder.onnx")
    shutil.copyfile("m.onnx", "exp/m.onnx")
    for folder in "bc":
        saved(build_decoder(), Path("exp", folder, "m.onnx"))
    typed = ("exp", "--prefix", "VLLM", f"--directory={destination}")
    dry = [shlex.split(hint.command) for hint in find_hints("", run(*typed, "-n").err)]
    assert [words[1] for words in dry] == ["exp/b", "exp/c"]
    assert not any("--force" in words for words in dry), "nothing is there yet"
    outcome = run(*typed)
    others = [Path(destination, name).read_bytes() for name in ("decoder.onnx", "m.onnx")]
    hints = list(find_hints("", outcome.err))
    assert (outcome.code, len(hints)) == (0, 2)
    for folder, hint in zip("bc", hints, strict=True):
        words = shlex.split(hint.command)[1:]
        assert (words[0], "--force" in words) == (f"exp/{folder}", True)
        assert b"VLLM" not in Path(destination, folder, "m.onnx").read_bytes(), "it was copied"
        assert run(*words).code == 0
        assert b"VLLM" in Path(destination, folder, "m.onnx").read_bytes()
    assert [Path(destination, name).read_bytes() for name in ("decoder.onnx", "m.onnx")] == others


@pytest.mark.parametrize("models", [("exp",), ("exp/decoder.onnx", "exp/other.onnx")])
def test_the_copy_of_a_model_beside_others_is_changed_where_it_is(
    models: tuple[str, ...], run: Run
) -> None:
    """Its directory would be written again with those that have their new names already."""
    Path("exp").mkdir()
    shutil.copyfile("m.onnx", "exp/decoder.onnx")
    saved(build_decoder(), Path("exp/other.onnx"))
    outcome = run(*models, "--prefix", "VLLM", "-d", "new", "--force")
    done = Path("new/decoder.onnx").read_bytes()
    (hint,) = find_hints("", outcome.err)
    assert hint.command == "onnxkvrename new/other.onnx --prefix VLLM --profile huggingface"
    assert run(*shlex.split(hint.command)[1:]).code == 0
    assert b"VLLM" in Path("new/other.onnx").read_bytes()
    assert Path("new/decoder.onnx").read_bytes() == done


def test_models_of_one_directory_are_left_to_one_command(run: Run) -> None:
    """A folder that goes along whole would else be written once for each, over the others."""
    for name in ("a", "b"):
        Path("exp/pair").mkdir(parents=True, exist_ok=True)
        saved(build_decoder(), Path(f"exp/pair/{name}.onnx"))
    shutil.copyfile("m.onnx", "exp/decoder.onnx")
    outcome = run("exp", "--prefix", "VLLM", "-d", "new")
    (hint,) = find_hints("", outcome.err)
    assert run(*shlex.split(hint.command)[1:]).code == 0
    for name in ("a", "b"):
        assert b"VLLM" in Path(f"new/pair/{name}.onnx").read_bytes()


def test_force_is_not_carried_over_to_one_model_of_many() -> None:
    """It was typed for the results of that run, of which this one was not written."""
    typed = _typed("a.onnx", "b.onnx", "--prefix", "X", "-d", "new", "--force")
    assert complete_hint("`MODEL --profile qnn`", typed, "b.onnx", "new/b.onnx") == (
        "onnxkvrename b.onnx --prefix X -d new --profile qnn"
    )


def test_models_of_one_profile_have_one_line_with_one_command(run: Run) -> None:
    """Wherever each of their results would go."""
    for number in range(5):
        Path(f"exp/{number}").mkdir(parents=True)
        saved(build_decoder(), Path(f"exp/{number}/m.onnx"))
    shutil.copyfile("m.onnx", "exp/decoder.onnx")
    for options in ((), ("--format", "github")):
        outcome = run("exp", "--prefix", "VLLM", "-d", "new", "-n", *options)
        lines = [line for line in (outcome.out + outcome.err).splitlines() if "KV001" in line]
        assert len(lines) == (5 if options else 1), "GitHub shows each beside its file"
    (hint,) = find_hints("", outcome.err or run("exp", "--prefix", "VLLM", "-d", "new", "-n").err)
    assert hint.command == ("onnxkvrename exp/0 --prefix VLLM -d new/0 -n --profile huggingface")


VALUES = {
    "--prefix": "X",
    "--target": "vllm-qaic",
    "--to": "huggingface",
    "--profile": "qeff",
    "--rules": "r.toml",
    "--pairs": "dataflow",
    "--output": "new.onnx",
    "--directory": "new",
    "--sidecar": "s.yaml",
    "--jobs": "2",
    "--dask": "tcp://localhost:1",
    "--format": "text",
}


def _type_each_option() -> list[tuple[str, ...]]:
    """Return each option of ``rename`` as it is typed, with those that it requires."""
    needed = {"--in-place": ("--seed-cache",), "--full-transfer": ("--target", "vllm-qaic")}
    typed = []
    for param in load_command("rename").command.params[1:]:
        name = max(param.opts, key=len)
        words = (name, *needed.get(name, ()), *filter(None, (VALUES.get(name),)))
        has_token = not {"--strip", "--target", "--to"}.isdisjoint(words)
        typed.append(words if has_token else ("--prefix", "X", *words))
    return typed


@pytest.mark.parametrize("typed", thin(_type_each_option(), 29), ids=" ".join)
def test_a_suggested_option_replaces_those_that_it_cannot_be_with(
    typed: tuple[str, ...], run: Run, sample: Sample
) -> None:
    words = ("bad.onnx", *typed)
    is_misused = "lists all options"
    assert is_misused not in run(*words).err
    others = (*REPLACED_OPTIONS, "--normalize", "--verify", "--sidecar", "--no-set")
    for option in sample(others, 2):
        hint = " ".join(filter(None, (option, VALUES.get(option))))
        if option == "--in-place":
            hint += " --seed-cache"
        completed = complete_hint(f"`{hint}`", _typed(*words))
        assert is_misused not in run(*shlex.split(completed)[1:]).err, completed


@pytest.mark.parametrize(
    "name",
    [
        *("new\nline", "it's\n", 'a"b\x1b[31m', "\\ \n1", "a\u202eb", "gr\u00f6\u200b\u00dfe"),
        *("\udcff\udcfe", "##vso[x]1", "$'\\x41'\t", "`\x07`", "-\n", "\U000e01001"),
    ],
)
def test_a_name_that_cannot_be_printed_is_the_same_when_the_command_is_pasted(name: str) -> None:
    completed = complete_hint("`--force`", _typed("--prefix", "X", "--rules", name, "--", name))
    assert escape_text(completed) == completed
    path = f"./{name}" if name.startswith("-") else name
    option = [f"--rules={name}"] if name.startswith("-") else ["--rules", name]
    words = ["onnxkvrename", path, "--prefix", "X", *option, "--force"]
    assert split_words(completed) == words
    if bash := shutil.which("bash"):
        script = os.fsencode(f"printf '%s\\0' {completed}")
        printed = subprocess.run([bash, "-c", script], capture_output=True, check=True).stdout
        assert printed.split(b"\0")[:-1] == list(map(os.fsencode, words))


def test_a_command_for_a_model_with_a_line_break_in_its_name_can_be_run(run: Run) -> None:
    shutil.copyfile("v.onnx", "two\nlines.onnx")
    hint = next(find_hints("", run("two\nlines.onnx", "--prefix", "X").err)).command
    assert hint == r"onnxkvrename $'two\012lines.onnx' --prefix X --replace"
    assert run(*split_words(hint)[1:]).code == 0


def test_a_hint_for_very_many_models_does_not_name_them_all() -> None:
    typed = _typed(*(f"window_{number}.onnx" for number in range(90)), "--prefix", "X")
    assert complete_hint("`--replace`", typed) == "onnxkvrename MODEL... --prefix X --replace"


def test_a_single_model_is_named_however_long_the_hint_is() -> None:
    path = f"{'d' * 200}/{'m' * 200}.onnx"
    typed = _typed(path, "--prefix", "X")
    hint = f"{'first add names to the configuration; ' * 12}`--no-sidecars` does not change it"
    assert f"`onnxkvrename {path} --prefix X --no-sidecars`" in complete_hint(hint, typed)


def test_a_model_called_like_a_command_stays_a_model() -> None:
    assert complete_hint("`--force`", _typed("rename", "verify", "--prefix", "X")) == (
        "onnxkvrename rename verify --prefix X --force"
    )


@pytest.mark.parametrize("name", CARRIED_OPTIONS)
def test_options_are_carried_only_to_commands_that_have_them(name: str) -> None:
    command: click.Command = load_command(name).command
    known = {option for param in command.params for option in param.opts}
    assert known.issuperset(CARRIED_OPTIONS[name])
