"""A hint says what to do: with a command that works when it is pasted, or with an option to add."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import onnx
import pytest
from conftest import COMMAND, FIXTURES, Run, Sample
from finding_examples import EXAMPLES, make_files
from finding_examples import run_commands as run_quietly
from hints import find_commands, run_commands, split_words
from models import saved

import onnxkvrename
from onnxkvrename.text import quote_path
from onnxkvrename.verification.pairs import unnamed_caches

EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports-other"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with and without a token, in a directory to run commands in."""
    monkeypatch.chdir(tmp_path)
    for source, name in (
        ("plain/decoder.onnx", "m.onnx"),
        ("plain/decoder.onnx", "n.onnx"),
        ("plain/decoder.onnx", "my model; rm -rf $HOME.onnx"),
        ("plain/decoder.onnx", "-m.onnx"),
        ("plain/decoder.onnx", "two\nlines.onnx"),
        ("VLLM/decoder.onnx", "v.onnx"),
        ("plain/internal_suffix.onnx", "suffix.onnx"),
    ):
        shutil.copyfile(FIXTURES / source, name)
    shutil.copyfile("m.onnx", "target.onnx")
    Path("linked.onnx").symlink_to("target.onnx")
    Path("other").mkdir()
    onnxkvrename.rename("m.onnx", "vllmkvcache", output="wrong.onnx")
    shutil.copytree(FIXTURES / "plain" / "windows", "half")
    window = "windows/layer_1_2/Tiny_layer_tmp_1_2.onnx"
    shutil.copyfile(FIXTURES / "VLLM" / window, window.replace("windows", "half"))
    qeff = Path(onnxkvrename.__file__).parent / "rules" / "profiles" / "qeff.toml"
    shutil.copyfile(qeff, "my rules.toml")


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("verify m.onnx --prefix X", "m.onnx --prefix X"),
        ("verify v.onnx --prefix X -q", "v.onnx --prefix X --replace"),
        ("verify 'my model; rm -rf $HOME.onnx' --prefix X",
         "'my model; rm -rf $HOME.onnx' --prefix X"),
        ("verify 'two\nlines.onnx' --prefix X", r"$'two\012lines.onnx' --prefix X"),
        ("verify --prefix X -- -m.onnx", "./-m.onnx --prefix X"),
        ("verify m.onnx --prefix X --rules 'my rules.toml'",
         "m.onnx --prefix X --rules 'my rules.toml'"),
        ("verify m.onnx --target vllm-qaic", "m.onnx --target vllm-qaic"),
        ("verify ./-m.onnx --target vllm-qaic", "./-m.onnx --target vllm-qaic"),
        ("verify v.onnx --target vllm-qaic", "v.onnx --target vllm-qaic --replace"),
        ("verify half", "half --prefix VLLM"),
        ("verify half --prefix VLLM", "half --prefix VLLM"),
        ("verify half --target vllm-qaic", "half --target vllm-qaic --replace"),
        ("inspect half", "half --prefix VLLM"),
        ("compare half", "half --target vllm-qaic --replace"),
        ("compare m.onnx n.onnx", "m.onnx n.onnx --target vllm-qaic"),
    ],
)  # fmt: skip
def test_after_a_suggested_command_the_same_is_not_found_again(
    typed: str, suggested: str, run: Run
) -> None:
    words = shlex.split(typed)
    found = run(*words)
    assert find_commands(found.err) == [f"onnxkvrename {suggested}"]
    codes = re.findall(r"error (KV\d+):", found.err)
    assert run(*split_words(suggested)).code == 0
    assert codes
    assert not re.search("|".join(codes), run(*words).err)


@pytest.mark.parametrize(
    ("typed", "hint", "mended"),
    [
        ("v.onnx --prefix X", "`--replace`", "v.onnx --prefix X --replace"),
        ("v.onnx --prefix X --check", "`--replace`", "v.onnx --prefix X --replace"),
        ("v.onnx --strip --prefix X", "`--strip --prefix VLLM`", "v.onnx --strip --prefix VLLM"),
        ("m.onnx --prefix X -o v.onnx", "`--force`", "m.onnx --prefix X -o v.onnx --force"),
        ("m.onnx --prefix X -o other", "`-d other`", "m.onnx --prefix X -d other"),
        ("m.onnx n.onnx --prefix X -o new.onnx", "`-d renamed`",
         "m.onnx n.onnx --prefix X -d renamed"),
        ("linked.onnx --prefix X", "`-d renamed`", "linked.onnx --prefix X -d renamed"),
        ("m.onnx --check", "`--target vllm-qaic`", "m.onnx -n --target vllm-qaic"),
        ("m.onnx --prefix vllmkvcache --strict", "`--prefix vllmKvCache`",
         "m.onnx --prefix vllmKvCache --strict"),
        ("suffix.onnx --prefix X --strict", "`--normalize`",
         "suffix.onnx --prefix X --strict --normalize"),
        ("verify wrong.onnx --strict", "`--prefix vllmKvCache --replace`",
         "wrong.onnx --prefix vllmKvCache --replace --strict"),
        ("explain 999", "`onnxkvrename explain` lists all", "explain"),
    ],
)  # fmt: skip
def test_an_option_that_is_named_mends_the_command(
    typed: str, hint: str, mended: str, run: Run
) -> None:
    outcome = run(*shlex.split(typed))
    assert outcome.code in (1, 2)
    assert hint in outcome.err.rpartition("(")[2]
    assert run(*shlex.split(mended)).code == 0


@pytest.fixture
def unnamed(tmp_path: Path) -> Path:
    """A model with two states under names that no profile matches."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["": 17]>
        main (float[1,4] x, float[1,t,4] `a`, float[1,t,4] b)
            => (float[1,4] y, float[1,u,4] `a_next`, float[1,u,4] b_next) {
            one = Constant<value_ints = [1]>()
            new = Unsqueeze(x, one)
            a_next = Concat<axis = 1>(`a`, new)
            b_next = Concat<axis = 1>(b, new)
            s = ReduceSum(a_next, one)
            m = ReduceSum(b_next, one)
            y1 = Squeeze(s, one)
            y2 = Squeeze(m, one)
            y = Add(y1, y2)
        }
    """.replace("`", "")
    )
    return saved(model, tmp_path / "my model.onnx")


@pytest.mark.parametrize(
    "options",
    ["", "-o new.onnx", "-d out --force -n", "--strict --jobs 1", "-o '`id`.onnx'"],
)
def test_caches_that_no_profile_knows_come_with_the_command_that_renames_them(
    options: str, unnamed: Path, run: Run
) -> None:
    before = unnamed.read_bytes()
    typed = ["my model.onnx", "--prefix", "KV", *shlex.split(options)]
    outcome = run(*typed)
    assert (outcome.code, unnamed.read_bytes()) == (1, before)
    assert (
        "KV001: no built-in profile knows these names, but the graph has 2 caches "
        "(first: a -> a_next)\n" in outcome.err
    )
    commands = find_commands(outcome.err)
    assert commands[0] == "onnxkvrename pairs 'my model.onnx' --as rules > rules.toml"
    (finding,) = json.loads(run(*typed, "--format", "json").out)["models"][0]["findings"]
    assert (finding["code"], find_commands(finding["hint"])) == ("KV001", commands)
    mended = run_commands(outcome.err, run)
    assert (mended.code, "4 names changed" in mended.err) == (0, True)


def test_a_shell_runs_both_commands(
    unnamed: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = unnamed.read_bytes()
    commands = find_commands(run(unnamed, "--prefix", "KV", "-o", "$new.onnx").err)
    monkeypatch.setenv("PATH", f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}")
    shell = subprocess.run(["sh", "-c", " && ".join(commands)], capture_output=True, text=True)
    assert (shell.returncode, unnamed.read_bytes()) == (0, before)
    assert "a -> a_KV\n" in shell.stdout
    assert run("verify", "$new.onnx", "--rules", "rules.toml").code == 0
    assert run("$new.onnx", "--strip", "--rules", "rules.toml", "-o", "back.onnx").code == 0
    assert Path("back.onnx").read_bytes() == before


def test_both_commands_again_add_no_second_token(unnamed: Path, run: Run) -> None:
    hint = run(unnamed, "--prefix", "KV").err
    assert run_commands(hint, run).code == 0
    renamed = unnamed.read_bytes()
    again = run_commands(hint, run)
    assert (again.code, unnamed.read_bytes()) == (1, renamed)
    assert "KV202: 4 names (first: a_KV) already carry KV, which these rules do not" in again.err


def test_of_several_models_those_that_need_rules_are_in_the_commands(
    unnamed: Path, run: Run
) -> None:
    shutil.copyfile(unnamed, "a.onnx")
    shutil.copyfile(FIXTURES / "plain" / "vlm_dual" / "encoder.onnx", "0.onnx")
    typed = ("0.onnx", "a.onnx", unnamed, "--prefix", "KV", "-v")
    first = run(*typed)
    assert first.err.count("but the graph has 2 caches") == 2
    assert "0.onnx: error KV001: no KV buffer here: the outputs are" in first.err
    assert "; no cache found in the graph either\n" in first.err
    models = f"a.onnx {quote_path(str(unnamed))}"
    assert set(find_commands(first.err)) == {
        f"onnxkvrename pairs {models} --as rules > rules.toml",
        f"onnxkvrename {models} --prefix KV --rules rules.toml",
    }
    assert run_commands(first.err, run).code == 0
    second = run(*typed)
    assert second.err.count("(first: a_KV -> a_KV_next); names already carry KV") == 2
    assert "add `--rules FILE` with the rules of the rename" in second.err


def test_inspect_says_what_the_graph_of_unknown_names_has(unnamed: Path, run: Run) -> None:
    outcome = run("inspect", unnamed)
    assert outcome.code == 0
    assert "warning KV001: no built-in profile knows these names, but the graph" in outcome.err
    inspected = run_commands(outcome.err, run)
    assert (inspected.code, "a, b of no layer" in inspected.out) == (0, True)


def test_pairs_ends_with_the_commands_that_rename_them(unnamed: Path, run: Run) -> None:
    assert run_commands(run("pairs", unnamed).out, run).code == 0
    assert find_commands(run("pairs", unnamed).out) == []  # they carry a token
    assert find_commands(run("pairs", "m.onnx").out) == []  # a profile knows the names


def test_without_a_token_no_command_claims_to_rename(unnamed: Path, run: Run) -> None:
    outcome = run(unnamed, "--strip")
    assert "the graph has 2 caches" in outcome.err
    assert find_commands(outcome.err) == []


def test_outputs_that_only_look_like_states_are_counted(tmp_path: Path, run: Run) -> None:
    """The shift of RWKV: the state of the next step is the token, whatever it was."""
    text = """
        <ir_version: 8, opset_import: ["": 17]> main
        (float[1,8,4] aa_0, float[1,1,4] xx_0, float[1,1,4] x, float[4,4] w)
        => (float[1,9,4] aa_0_r, float[1,1,4] xx_0_r, float y) {
            n = Add(xx_0, x) m = MatMul(n, w) aa_0_r = Concat<axis = 1>(aa_0, m) xx_0_r = Tanh(x)
            y = ReduceSum(aa_0_r)
        }
    """
    saved(onnx.parser.parse_model(text), tmp_path / "shift.onnx")
    outcome = run("shift.onnx", "--prefix", "KV")
    assert ", and 1 more output may be a state (first: xx_0_r)\n" in outcome.err


def test_a_graph_without_a_cache_is_said_to_have_none(run: Run) -> None:
    encoder = FIXTURES / "plain" / "vlm_dual" / "encoder.onnx"
    outcome = run(encoder, "--prefix", "KV")
    assert (outcome.code, "no cache found in the graph either" in outcome.err) == (1, True)
    assert find_commands(outcome.err) == []


def test_a_graph_that_is_not_searched_is_not_said_to_have_no_cache(
    unnamed: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unnamed_caches, "MAX_SEARCHED_NODES", 3)
    outcome = run("my model.onnx", "--prefix", "KV")
    assert "error KV001: " in outcome.err
    assert "caches in the graph are not known" in outcome.err
    assert find_commands(outcome.err) == ["onnxkvrename pairs 'my model.onnx'"]


def test_the_library_says_it_too(unnamed: Path) -> None:
    (finding,) = onnxkvrename.rename(unnamed, "KV").findings
    assert (finding.code, "rules='rules.toml')`" in finding.hint) == ("KV001", True)
    (finding,) = onnxkvrename.inspect(unnamed).findings
    assert (finding.code, finding.severity) == ("KV001", "warning")
    with pytest.raises(onnxkvrename.CheckError, match=r"KV001: .* the graph has 2 caches") as error:
        onnxkvrename.rename_bytes(unnamed.read_bytes(), "KV")
    hint = "pass rules=onnxkvrename.suggest_rules(PATH)"
    assert str(error.value.hint).endswith(hint)
    graph = pytest.importorskip("onnx_graphsurgeon").import_onnx(onnx.load(unnamed))
    (finding,) = onnxkvrename.rename_graph(graph, "KV").findings
    assert (finding.code, finding.hint.endswith(hint)) == ("KV001", True)


_NO_CACHE = EXPORTS / "new" / "no-cache"


@pytest.mark.skipif(not _NO_CACHE.is_dir(), reason="needs ../shared/exports-other/new/no-cache")
@pytest.mark.parametrize("name", ["adam_step", "denoise_residual", "kalman", "unet_scheduler_step"])
def test_a_step_of_an_optimizer_is_not_offered_as_a_cache(name: str, run: Run) -> None:
    path = _NO_CACHE / f"{name}.onnx"
    outcome = run(path, "--prefix", "KV", "-n")
    assert (outcome.code, "no cache found in the graph either" in outcome.err) == (1, True)
    assert find_commands(outcome.err) == []


# Each hint with a command, on the examples of all findings

_FINDING = re.compile(r": (?:error|warning) (KV[0-9]+): .*\n  -> (.*)")
_OTHER_COMMANDS = (
    "verify MODELS",
    "verify MODELS --target vllm-qaic",
    "verify MODELS --prefix X",
    "inspect MODELS",
    "compare MODELS",
    "MODELS --target vllm-qaic --check",
    "MODELS --target vllm-qaic",
    "MODELS --prefix X",
    "MODELS --strip",
)
_ELSEWHERE = {"--seed-cache", "-d", "-o", "--rules"}
"""Options of commands that leave the files as they were, and so the finding about them."""
_DECISIONS = {"KV402": "whether to seed, to write elsewhere or to force is for the user to decide"}
"""Findings whose commands exclude one another."""
_NOT_TOLD = {
    "KV308": "verify and compare do not say that the rename needs the encoder as well",
    "KV401": "an export whose hash is wrong must be made again",
    "KV501": "compare reads no external data",
    "KV502": "compare reads no external data",
    "KV503": "compare reads no external data",
}
"""Examples of which commands other than their own show a hint whose command is refused."""


def list_typed(code: str) -> list[str]:
    """The command of an example, then others for the same models."""
    own = EXAMPLES[code].commands[-1]
    words = shlex.split(own)
    paths = [word for word in words[words[0] in ("verify", "inspect", "compare") :] if "." in word]
    paths += [word for word in words if word in ("windows", "cache", "export")]
    models = [path for path in paths if Path(path).exists() and not path.endswith(".toml")]
    rules = words[words.index("--rules") :][:2] if "--rules" in words else []
    typed = shlex.join([*models, *rules])
    others = [each.replace("MODELS", typed) for each in _OTHER_COMMANDS]
    return [own, *(each for each in others if each[0] != "c" or len(models) < 3)]


@pytest.mark.parametrize("code", EXAMPLES)
def test_the_command_of_a_hint_removes_the_finding(
    code: str, tmp_path: Path, run: Run, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tmp_path / "example"
    original.mkdir()
    monkeypatch.chdir(original)
    make_files(code)
    run_quietly(EXAMPLES[code].commands[:-1])
    own, *others = list_typed(code)
    for number, typed in enumerate([own, *(() if code in _NOT_TOLD else sample(others, 1))]):
        monkeypatch.chdir(shutil.copytree(original, tmp_path / f"{number}"))
        hints: dict[str, list[str]] = {}
        for found, hint in _FINDING.findall(run(*shlex.split(typed), "-v").err):
            hints.setdefault(found, []).extend(find_commands(hint))
        for found, commands in hints.items():
            if not commands or found in _DECISIONS:
                continue
            monkeypatch.chdir(shutil.copytree(original, tmp_path / f"{number}-{found}"))
            run(*shlex.split(typed), "-q")
            text = " ".join(f"`{command}`" for command in commands)
            last = run_commands(text, run)
            again = run(*shlex.split(typed), "-q")
            if not _ELSEWHERE.isdisjoint(split_words(commands[-1])):
                again = last
            assert f" {found}: " not in again.err, (typed, commands)
