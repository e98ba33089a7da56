"""A rename within QEfficient's export cache, without --seed-cache: refused, or reported."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import qefficient_exports
from conftest import FIXTURES, Run
from hints import find_commands, split_words
from kill_commands import read_directory, run_quietly
from qefficient_exports import PARAMS, SPEECH

import onnxkvrename

VLLM = ("--prefix", "VLLM")
CHANGES = {
    "rename": (("", VLLM), ()),
    "target": (("", ("--target", "vllm-qaic")), ()),
    "strip": (("VLLM", ("--strip",)), ()),
    "replace": (("VLLM", ("--prefix", "XX", "--replace")), ()),
    "normalize": (("", (*VLLM, "--normalize")), ("internal_suffix.onnx",)),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def plain() -> Path:
    """An export of a decoder with its weights beside it."""
    return qefficient_exports.write_export(Path("cache"))


@pytest.fixture
def windows() -> Path:
    """A layerwise export of which one window is renamed."""
    export = qefficient_exports.write_layerwise_export(Path("cache"))
    assert run_quietly(export / "onnx_layerwise_tmp" / "layer_1_2", *VLLM, "--force") == 0
    return export


def find_codes(text: str) -> list[str]:
    """Return severity and code of each finding that is printed."""
    lines = (line.split(": ") for line in text.splitlines())
    return [part for line in lines for part in line if part[-5:-3] == "KV" and " " in part]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("option", ["", "-n", "--check"])
def test_a_rename_in_place_is_refused(change: str, option: str, run: Run) -> None:
    (token, args), source = CHANGES[change]
    export = qefficient_exports.write_export(Path("cache"), *source, token=token)
    before = read_directory(Path("cache"))
    outcome = run("cache", *args, *filter(None, [option]))
    assert (outcome.code, find_codes(outcome.err)[-1:]) == (1, ["error KV402"])
    typed = " ".join(args)
    assert find_commands(outcome.err) == [
        f"onnxkvrename {export} {typed} --seed-cache",
        f"onnxkvrename cache {typed} -d renamed",
        f"onnxkvrename cache {typed} --force",
    ]
    assert read_directory(Path("cache")) == before


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", range(3))
def test_each_command_of_the_refusal_renames(change: str, way: int, run: Run) -> None:
    (token, args), source = CHANGES[change]
    qefficient_exports.write_export(Path("cache"), *source, token=token)
    command = find_commands(run("cache", *args).err)[way]
    outcome = run(*split_words(command)[1:])
    assert (outcome.code, "error" in outcome.err) == (0, False)
    assert ("warning KV402" in outcome.err) == command.endswith("--force")


def test_the_commands_have_the_rules_and_what_else_was_typed(plain: Path, run: Run) -> None:
    qeff = Path(__file__).parents[2] / "onnxkvrename" / "rules" / "profiles" / "qeff.toml"
    shutil.copyfile(qeff, "my rules.toml")
    outcome = run("cache", *VLLM, "--rules", "my rules.toml", "--verify", "-q")
    commands = find_commands(outcome.err)
    assert len(commands) == 3
    for command in commands:
        assert "--rules 'my rules.toml'" in command
        assert "--verify" in command
        assert run(*split_words(command)[1:]).code == 0


def test_a_target_with_its_token_typed_is_seeded_for_the_target(plain: Path, run: Run) -> None:
    args = ("--target", "vllm-qaic", "--prefix", "vllmKvCache", "--replace")
    seed = find_commands(run(plain, *args, "-n", "--jobs", "2").err)[0]
    assert seed == f"onnxkvrename {plain} --target vllm-qaic --replace --seed-cache"
    assert run(*split_words(seed)[1:]).code == 0


def test_a_model_beside_others_is_seeded_by_its_export(plain: Path, run: Run) -> None:
    """The others are not part of an export, and one that failed by that would stop it."""
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", plain.parent / "alone.onnx")
    seed = find_commands(run(plain.parent, *VLLM, "-n").err)[0]
    assert seed == f"onnxkvrename {plain} --prefix VLLM --seed-cache"
    assert run(*split_words(seed)[1:]).code == 0


@pytest.mark.parametrize("fault", ["class", "hash", "merge"])
def test_what_cannot_be_seeded_has_the_other_commands(fault: str, run: Run) -> None:
    if fault == "merge":
        export = qefficient_exports.write_layerwise_export(Path("cache"), merged=False)
    else:
        owner = SPEECH if fault == "class" else qefficient_exports.CAUSAL
        export = qefficient_exports.write_export(Path("cache"), owner=owner)
    if fault == "hash":
        export = export.rename(export.with_name("Tiny-0123456789abcdef"))
    outcome = run(export, *VLLM)
    commands = find_commands(outcome.err)
    typed = f"onnxkvrename {export} --prefix VLLM"
    assert (outcome.code, commands) == (1, [f"{typed} -d renamed", f"{typed} --force"])
    for command in commands:
        assert run(*split_words(command)[1:]).code == 0


def test_a_forced_rename_has_a_warning_with_the_command_that_undoes_it(
    plain: Path, run: Run
) -> None:
    before = read_directory(plain)
    planned = run(plain, *VLLM, "--force", "-n")
    assert (planned.code, find_codes(planned.err)) == (0, ["warning KV402"])
    assert "--force" not in planned.err
    assert read_directory(plain) == before
    outcome = run(plain, *VLLM, "--force")
    (undo,) = find_commands(outcome.err)
    assert (outcome.code, find_codes(outcome.err)) == (0, ["warning KV402"])
    assert undo == f"onnxkvrename {plain} --strip"
    assert "has names with the token VLLM" in outcome.err
    assert run(*split_words(undo)[1:], "-q") == (0, "", "")
    assert read_directory(plain) == before


def test_strictly_a_forced_rename_is_refused(plain: Path, run: Run) -> None:
    before = read_directory(plain)
    outcome = run(plain, *VLLM, "--force", "--strict")
    assert (outcome.code, find_codes(outcome.err)) == (1, ["error KV402"])
    assert read_directory(plain) == before


@pytest.mark.parametrize(
    "args",
    [VLLM, (*VLLM, "--check"), (*VLLM, "--seed-cache"), ("verify",)],
    ids=" ".join,
)
def test_a_model_renamed_in_place_is_reported_until_it_is_restored(
    args: tuple[str, ...], plain: Path, run: Run
) -> None:
    command = ("verify", plain) if args == ("verify",) else (plain, *args)
    before = read_directory(plain)
    assert run_quietly(plain, *VLLM, "--force") == 0
    outcome = run(*command)
    assert (outcome.code, find_codes(outcome.err)) == (0, ["warning KV402"])
    assert find_commands(outcome.err) == [f"onnxkvrename {plain} --strip"]
    assert "error KV402" in run(*command, "--strict").err
    assert run_quietly(plain, "--strip") == 0
    assert read_directory(plain) == before
    assert "KV402" not in run("verify", plain).err


def test_a_seeded_model_without_its_token_is_reported_until_it_is_restored(
    plain: Path, run: Run
) -> None:
    assert run_quietly(plain, *VLLM, "--seed-cache") == 0
    (seeded,) = (path for path in plain.parent.iterdir() if path != plain)
    assert "KV402" not in run("verify", "cache").err
    assert run_quietly(seeded, "--strip", "--force") == 0
    outcome = run("verify", "cache")
    assert "names without a token" in outcome.err
    (undo,) = find_commands(outcome.err)
    assert undo == f"onnxkvrename {seeded} --prefix VLLM --replace"
    assert run(*split_words(undo)[1:]).code == 0
    assert "KV402" not in run("verify", "cache").err


@pytest.mark.parametrize(
    ("name", "args"),
    [
        (None, ("-o", "elsewhere.onnx")),
        (None, ("-d", "elsewhere")),
        (None, ("--seed-cache",)),
        ("Tiny", ()),
    ],
)
def test_a_rename_that_nobody_takes_for_the_plain_export_is_not_refused(
    name: str | None, args: tuple[str, ...], plain: Path, run: Run
) -> None:
    there = plain.rename(plain.with_name(name)) if name else plain
    outcome = run(there, *VLLM, *args)
    assert (outcome.code, "KV402" in outcome.err) == (0, False)


def test_nor_is_one_beside_parameters_that_cannot_be_read(plain: Path, run: Run) -> None:
    (plain / PARAMS).write_text("mine")
    outcome = run(plain, *VLLM)
    assert (outcome.code, "KV402" in outcome.err) == (0, False)


# Windows of which some are renamed.


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (("verify", "cache"), "error KV303"),
        (("verify", "cache", "--strict"), "error KV303"),
        (("cache", *VLLM), "error KV402"),
        (("cache", *VLLM, "-n"), "error KV402"),
        (("cache", *VLLM, "--check"), "error KV303"),
        (("cache", *VLLM, "--seed-cache"), "warning KV402"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_half_renamed_export_is_one_finding_with_one_command(
    args: tuple[str, ...], found: str, windows: Path, run: Run
) -> None:
    outcome = run(*args)
    (undo,) = find_commands(outcome.err)
    assert (outcome.code, find_codes(outcome.err)) == (int("error" in found), [found])
    assert undo == f"onnxkvrename {windows} --strip"
    assert run(*split_words(undo)[1:]).code == 0
    again = run(*args)
    assert undo not in again.err
    assert "KV303" not in again.err


def test_a_window_that_is_forced_alone_is_one_finding(run: Run) -> None:
    export = qefficient_exports.write_layerwise_export(Path("cache"))
    outcome = run(export / "onnx_layerwise_tmp" / "layer_1_2", *VLLM, "--force")
    assert (outcome.code, find_codes(outcome.err)) == (0, ["warning KV402"])
    assert find_commands(outcome.err) == [f"onnxkvrename {export} --strip"]


def test_a_half_renamed_export_leaves_others_to_their_own_finding(windows: Path, run: Run) -> None:
    other = qefficient_exports.write_export(Path("cache"))
    outcome = run("cache", *VLLM)
    assert find_codes(outcome.err) == ["error KV402"] * 2
    assert f"`onnxkvrename {windows} --strip`" in outcome.err
    assert f"`onnxkvrename {other} --prefix VLLM --seed-cache`" in outcome.err


def test_the_library_has_calls_that_rename(plain: Path) -> None:
    model = plain / "decoder.onnx"
    refused = onnxkvrename.rename(model, "VLLM")
    (hint,) = (finding.hint for finding in refused.findings)
    calls = re.findall(r"`(onnxkvrename\.[^`]*)`", hint)
    assert (refused.status, len(calls)) == ("failed", 3)
    for call in calls:
        assert not eval(call, {"onnxkvrename": onnxkvrename}).failed


# What other commands advise.


@pytest.mark.parametrize(
    "args",
    [
        ("verify", "MODEL", "--target", "vllm-qaic"),
        ("verify", "MODEL", "--prefix", "VLLM"),
        ("verify", "EXPORT", "--target", "vllm-qaic"),
        ("compare", "EXPORT", "EXPORT"),
    ],
    ids=" ".join,
)
def test_the_command_that_others_advise_seeds_an_export(
    args: tuple[str, ...], plain: Path, run: Run
) -> None:
    places = {"MODEL": str(plain / "decoder.onnx"), "EXPORT": str(plain)}
    said = run(*(places.get(word, word) for word in args)).err
    (command,) = find_commands(said)
    assert f"`{command}` makes a renamed copy: then pass that" in said
    assert command.startswith(f"onnxkvrename {plain} ")
    assert command.endswith(" --seed-cache")
    assert run(*split_words(command)[1:]).code == 0
    (seeded,) = (path for path in plain.parent.iterdir() if path != plain)
    places = {"MODEL": str(seeded / "decoder.onnx"), "EXPORT": str(seeded)}
    assert run(*(places.get(word, word) for word in args)).code == 0
