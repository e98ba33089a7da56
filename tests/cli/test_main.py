from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import models
import pytest
from models import node, saved

import onnxkvrename
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.rules.load import list_profiles
from onnxkvrename.rules.results import Report

LOSSY = rb"""
retained = '.*'
[[kv]]
kind = "attention"
input = '(?P<part>past_key)\.{layer}'
output = '{input}_RetainedState'
"""
MODEL, V = "decoder.onnx", ("--prefix", "VLLM")


@pytest.fixture
def here(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with models, other files, and files that are no models."""
    here = decoder.parent
    saved(models.decoder(), here / "other.onnx")
    saved(b"import onnx\n", here / "text.onnx")
    saved(b"import onnx\n", here / "rules.toml")
    saved(LOSSY, here / "lossy.toml")
    (here / "empty").mkdir()
    (here / "parts").mkdir()
    saved(models.decoder(), here / "parts" / "x.onnx")
    monkeypatch.chdir(here)
    return here


MISTAKES = pytest.mark.parametrize(
    ("args", "said"),
    [
        (
            (MODEL,),
            "no token given: pass a target or a token (for example",
        ),
        (V, "no MODEL given"),
        ((MODEL, "--prefix"), "option '--prefix' requires an argument"),
        ((MODEL, "--prefix", "a_b"), "the token 'a_b' may contain only ASCII letters and digits"),
        ((MODEL, "--prefix", ""), "the token '' is empty"),
        ((MODEL, "--prefix", "--check"), "option '--prefix' requires an argument"),
        ((MODEL, "--prefix", "-x"), "the token '-x' begins with -, like an option"),
        (("DECODER.onnx", *V), "DECODER.onnx: no such file (did you mean decoder.onnx?)"),
        (("*.onx", *V), "*.onx: no such file (a pattern is not expanded here: pass the directory;"),
        ((MODEL, "--prefix", "RetainedStateX"), "may not contain RetainedState"),
        ((MODEL, "--prefix", "a\nb\x1b"), r"the token 'a\nb\x1b' may contain only ASCII"),
        ((MODEL, "--prefx", "VLLM"), "--prefx"),
        (
            (MODEL, *V, "--profile", "nobody"),
            f"no such profile: nobody (profiles: {', '.join(list_profiles())})",
        ),
        ((MODEL, *V, "--rules", "none.toml"), "none.toml: no such file"),
        ((MODEL, *V, "--rules", "rules.toml"), "rules.toml: not TOML"),
        (
            (MODEL, *V, "--rules", "lossy.toml"),
            "lossy.toml: kv[0].input: has no {token}: write it where",
        ),
        (("decodr.onnx", *V), "decodr.onnx: no such file (did you mean decoder.onnx?)"),
        (("nowhere/m.onnx", *V), "nowhere/m.onnx: no such file"),
        (("n" * 300, *V), f"{'n' * 300}: "),
        (("text.onnx", *V), "text.onnx: is a text file, not an ONNX model"),
        pytest.param(("", *V), "", id="an unset variable is not the working directory"),
        (("empty", *V), "empty: has no .onnx file, at any depth (pass an .onnx file, or"),
        (
            (MODEL, "other.onnx", *V, "-o", "new.onnx"),
            "new.onnx: is one file, but there are 2",
        ),
        (
            (MODEL, *V, "-o", "new.onnx", "-d", "new"),
            "--output and --directory cannot be used together",
        ),
        ((MODEL, *V, "-o", MODEL), "decoder.onnx: is the model itself"),
        ((MODEL, *V, "-o", "empty"), "empty: is a directory"),
        ((MODEL, *V, "-o", "text.onnx/new.onnx"), "text.onnx/new.onnx"),
        ((MODEL, *V, "-o", "new/" + "n" * 300), "n" * 80),
        ((MODEL, *V, "-d", "n" * 300), "n" * 100),
        ((MODEL, *V, "-d", "."), "decoder.onnx: is the model itself"),
        ((MODEL, *V, "--seed-cache", "-o", "new.onnx"), "--seed-cache and --output cannot be used"),
        ((MODEL, *V, "--seed-cache", "-d", "new"), "--seed-cache and --directory cannot be"),
        ((MODEL, *V, "--seed-cache"), "decoder.onnx: is not part of a QEfficient export"),
        (("", *V), "an empty path: is a variable not set?"),
        ((MODEL, *V, "-d", ""), "an empty path: is a variable not set?"),
    ],
)


@MISTAKES
def test_a_mistake_gets_one_line_and_exit_code_2(
    args: tuple[str, ...], said: str, here: Path, run, snapshot
) -> None:
    before = snapshot(here)
    outcome = run(*args)
    assert (outcome.code, outcome.out) == (2, "")
    error, *states = outcome.err.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert states == []
    assert "a bug in" not in error
    assert "the answer could not be given" not in error
    assert snapshot(here) == before
    assert not (here / "new").exists()


@MISTAKES
def test_a_mistake_is_told_in_json_too(args: tuple[str, ...], said: str, here: Path, run) -> None:
    outcome = run("--format", "json", *args)
    document = json.loads(outcome.out)
    errors = [document["error"], *(model["error"] for model in document["models"])]
    told = [f"{error['path']}: {error['message']} ({error['hint']})" for error in errors if error]
    assert said in told[0].removeprefix("None: ")
    assert outcome.code == document["exit_code"] == 2


@pytest.mark.parametrize(
    ("protect", "args"),
    [
        (".", (MODEL, *V)),
        ("empty", (MODEL, *V, "-o", "empty/new.onnx")),
        ("empty", (MODEL, *V, "-d", "empty/new")),
        ("parts", ("parts", *V)),
        ("empty", ("inspect", MODEL, "--html", "empty/new.html")),
        ("empty", ("compare", MODEL, MODEL, "--html", "empty/new.html")),
    ],
)
def test_a_directory_that_may_not_be_written_is_named(
    protect: str, args: tuple[str, ...], here: Path, spawn, snapshot
) -> None:
    before = snapshot(here)
    (here / protect).chmod(0o555)
    process = spawn(*args)
    (here / protect).chmod(0o755)
    assert process.returncode == 2
    assert process.stdout == ""
    assert re.search(r"cannot be written: \S* is not writable \(write to another", process.stderr)
    assert snapshot(here) == before


@pytest.mark.parametrize(
    ("hide", "args"),
    [
        (MODEL, (MODEL, *V)),
        ("parts", ("parts", *V)),
        ("parts", ("parts/x.onnx", *V)),
        ("parts", (MODEL, *V, "-o", "parts/new.onnx")),
        ("parts", (MODEL, *V, "-d", "parts/new")),
    ],
)
def test_what_may_not_be_read_is_named(hide: str, args: tuple[str, ...], here: Path, spawn) -> None:
    (here / hide).chmod(0)
    process = spawn(*args)
    (here / hide).chmod(0o755)
    assert process.returncode == 2
    assert process.stdout == ""
    assert hide in process.stderr
    reasons = ("Permission denied", "is not readable", "is not writable")
    assert any(reason in process.stderr for reason in reasons)
    assert "the answer could not be given" not in process.stderr


def test_names_are_answered_on_stdout_and_all_else_on_stderr(here: Path, run) -> None:
    outcome = run(MODEL, *V)
    assert outcome.code == 0
    assert outcome.out.splitlines()[0] == "past_key.0 -> past_key.0_VLLM"
    assert len(outcome.out.splitlines()) == 8
    assert outcome.err == "decoder.onnx: 8 names changed\n"
    outcome = run(MODEL, *V)
    assert outcome == (0, "", "decoder.onnx: unchanged: every buffer carries VLLM\n")


def test_quiet_says_nothing_but_what_is_wrong(here: Path, run) -> None:
    assert run(MODEL, *V, "-q") == (0, "", "")
    outcome = run(MODEL, "--prefix", "OTHER", "--quiet")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("decoder.onnx: error KV202: 8 names (first: past_key.0_VLLM)")
    assert len(outcome.err.splitlines()) == 2  # the finding and its fix


def test_rename_may_be_said_aloud(here: Path, run, renamed: bytes) -> None:
    assert run("rename", MODEL, *V).code == 0
    assert (here / MODEL).read_bytes() == renamed


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [("--check", 1, 0), ("--check -v", 1, 8), ("-n", 0, 8), ("--dry-run", 0, 8)],
)
def test_to_look_changes_nothing_and_tells(
    flags: str, code: int, told: int, here: Path, run, snapshot
) -> None:
    before = snapshot(here)
    look = flags.split()
    outcome = run(MODEL, *V, *look)
    assert (outcome.code, len(outcome.out.splitlines())) == (code, told)
    said = "8 of 8 names lack VLLM" if code else "8 names would change"
    assert said in outcome.err
    assert snapshot(here) == before
    run(MODEL, *V)
    assert run(MODEL, *V, *look)[:2] == (0, "")
    assert run(MODEL, "--prefix", "OTHER", *look)[:2] == (1, "")


def test_only_a_dry_run_minds_where_the_result_would_go(here: Path, run) -> None:
    (here / MODEL).chmod(0o444)
    assert run(MODEL, *V, "--check").code == 1
    assert run(MODEL, *V, "-n").code == 2
    assert run(MODEL, *V, "-n", "-o", "other.onnx").code == 1
    assert run(MODEL, *V, "-n", "-o", "other.onnx", "--force").code == 0


def test_options_reach_the_work(here: Path, run) -> None:
    before = (here / MODEL).read_bytes()
    assert run(MODEL, "--prefix", "OLD").code == 0
    assert run(MODEL, *V, "--replace").code == 0
    assert run(MODEL, "--prefix", "OLD", "--strip").code == 1
    assert run(MODEL, *V, "--strip").code == 0
    assert (here / MODEL).read_bytes() == before
    assert run(MODEL, *V).code == run(MODEL, "--strip").code == 0
    assert (here / MODEL).read_bytes() == before


def test_strict_and_normalize_reach_the_work_too(tmp_path: Path, run) -> None:
    model = models.decoder(node("Neg", ["x"], ["s_RetainedState"]))
    model.graph.output.append(models.info("s_RetainedState"))
    path = saved(model, tmp_path / "m.onnx")
    assert run(path, *V, "--strict").code == 1
    outcome = run(path, *V, "-n")
    assert (outcome.code, "warning KV111" in outcome.err) == (0, True)
    plain = Path(__file__).parents[2] / "fixtures" / "plain" / "internal_suffix.onnx"
    fixture = saved(plain.read_bytes(), tmp_path / "internal_suffix.onnx")
    assert "warning KV112" in run(fixture, *V, "-n").err
    outcome = run(fixture, *V, "-n", "--normalize")
    assert "past_key.0_InternalRetainedState -> past_key.0_VLLM_RetainedState" in outcome.out
    assert "KV112" not in outcome.err


def test_rules_of_ones_own_are_used(here: Path, run) -> None:
    (here / "rules.toml").write_text(
        """
        retained = 'logits'
        [[kv]]
        name = "one"
        input = 'input_(?P<layer>)ids(?P<token>)'
        output = 'x(?P<layer>y)(?P<token>)'
        part = "x"
        """
    )
    outcome = run(MODEL, *V, "--rules", "rules.toml")
    assert outcome.code == 1
    assert "KV001" in outcome.err
    assert "KV111: logits" in outcome.err


def swapped(path: Path) -> Path:
    """A model whose key and value change places, though every name looks right."""
    model = models.decoder()
    names = {models.KEY_OUT: models.VALUE_OUT, models.VALUE_OUT: models.KEY_OUT}
    for item in model.graph.node:
        item.output[:] = [names.get(name, name) for name in item.output]
    return saved(model, path)


@pytest.mark.parametrize(
    "place", [(), ("-o", "new.onnx"), ("-d", "new"), ("-n",), ("--check",), ("--jobs", "2")]
)
def test_to_verify_refuses_a_swap_before_anything_is_written(
    place: tuple[str, ...], here: Path, run, snapshot
) -> None:
    swapped(here / "parts" / "x.onnx")
    given = ("parts",) if "-o" in place else ("parts", MODEL)
    before = snapshot(here)
    outcome = run(*given, *V, "--verify", *place)
    assert (outcome.code, "x.onnx" in outcome.out) == (1, False)
    told = "x.onnx: error KV110: past_key.0_VLLM_RetainedState is computed from past_value.0_VLLM"
    assert told in outcome.err
    assert snapshot(here) == before
    assert not (here / "new").exists()
    if not {"-n", "--check"} & {*place}:
        assert run(*given, *V, *place).code == 0


def test_to_verify_is_to_prove_what_is_renamed_already_too(here: Path, run) -> None:
    swapped(here / "other.onnx")
    assert run("other.onnx", *V).code == run("other.onnx", *V).code == 0
    assert run("other.onnx", *V, "--verify").code == 1
    assert run("other.onnx", "--strip", "--verify").code == 1
    assert run("other.onnx", "--prefix", "NEW", "--replace", "--verify").code == 1


def test_to_verify_says_what_is_not_proved_and_goes_on_unless_strict(here: Path, run) -> None:
    model = models.decoder()
    model.graph.node[0].CopyFrom(
        node("Mystery", [models.KEY, "x"], [models.KEY_OUT], domain="local")
    )
    saved(model, here / "other.onnx")
    assert run("other.onnx", *V, "--verify", "--strict").code == 1
    assert (here / "other.onnx").read_bytes() == model.SerializeToString()
    outcome = run("other.onnx", *V, "--verify")
    assert (outcome.code, "warning KV113" in outcome.err) == (0, True)
    assert len(outcome.out.splitlines()) == 4


def test_to_verify_minds_what_onnx_refuses(here: Path, run) -> None:
    model = models.decoder(node("Neg", ["nowhere"], ["y"]))
    saved(model, here / "other.onnx")
    outcome = run("other.onnx", *V, "--verify", "--format", "json")
    assert outcome.code == 1
    document = json.loads(outcome.out)
    assert [found["code"] for found in document["models"][0]["findings"]] == ["KV115"]
    assert run("other.onnx", *V).code == 0


def test_every_fixture_is_proved_on_its_way(tmp_path: Path, run) -> None:
    fixtures = Path(__file__).parents[2] / "fixtures"
    outcome = run(fixtures / "plain", *V, "--verify", "-d", tmp_path / "new", "-q")
    assert outcome.code == 0
    assert "error" not in outcome.err
    for path in (fixtures / "VLLM").rglob("*.onnx"):
        made = tmp_path / "new" / path.relative_to(fixtures / "VLLM")
        assert made.read_bytes() == path.read_bytes()
    assert run(tmp_path / "new", "--strip", "--verify", "-q").code == 0


def test_one_bad_model_among_three_and_nothing_is_written(here: Path, run, snapshot) -> None:
    before = snapshot(here)
    for bad in ("text.onnx", "bad.onnx"):
        outcome = run(MODEL, bad, "other.onnx", *V)
        assert outcome.code == 2
        assert outcome.out == ""
        assert snapshot(here) == before
    assert run(MODEL, "other.onnx", *V).code == 0


def test_several_models_keep_their_layout_elsewhere(here: Path, run, renamed: bytes) -> None:
    (here / "text.onnx").unlink()
    outcome = run(".", *V, "-d", "new")
    assert outcome.code == 0
    assert (here / "new" / MODEL).read_bytes() == renamed
    assert sorted(str(p.relative_to(here / "new")) for p in (here / "new").rglob("*.onnx")) == [
        "decoder.onnx",
        "other.onnx",
        "parts/x.onnx",
    ]
    assert "decoder.onnx: past_key.0 -> past_key.0_VLLM" in outcome.out
    *_, last, total = outcome.err.splitlines()
    assert last == "parts/x.onnx: 4 names changed -> new/parts/x.onnx"
    assert total == "3 models: 3 renamed, 0 unchanged; 8 KV buffers"


@pytest.mark.parametrize(
    ("args", "code", "statuses"),
    [
        ((MODEL, *V), 0, ["renamed"]),
        ((MODEL, *V, "-n"), 0, ["would-rename"]),
        ((MODEL, *V, "--check"), 1, ["would-rename"]),
        ((MODEL, *V, "-o", "new/m.onnx"), 0, ["renamed"]),
        ((MODEL, "--strip"), 0, ["unchanged"]),
        ((MODEL, *V, "-o", "other.onnx"), 1, ["failed"]),
        ((MODEL, "text.onnx", *V), 2, ["would-rename", "failed"]),
        ((MODEL, "other.onnx", *V), 0, ["renamed", "renamed"]),
        (("none.onnx", *V), 2, []),
        ((MODEL, "--nonsense"), 2, []),
        ((), 2, []),
    ],
)
@pytest.mark.parametrize("spelling", [("--format", "json"), ("--format=json",)])
def test_json_is_one_valid_document_whatever_happens(
    spelling: tuple[str, ...],
    args: tuple[str, ...],
    code: int,
    statuses: list[str],
    here: Path,
    run,
) -> None:
    outcome = run(*args, *spelling)
    document = json.loads(outcome.out)
    assert outcome.code == document["exit_code"] == code
    assert [model["status"] for model in document["models"]] == statuses
    assert sum(document["summary"].values()) == len(statuses)
    failed = code == 2 and not statuses
    assert (document["error"] is not None) == failed
    assert outcome.err.startswith("error: ") if failed else True


def test_json_of_a_bug_is_a_document_too(here: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **how: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("onnxkvrename.api.files.rename_batch", fail)
    outcome = run(MODEL, *V, "--format", "json")
    assert outcome.code == 2
    document = json.loads(outcome.out)
    assert "a bug in onnxkvrename: ZeroDivisionError" in document["error"]["message"]
    assert json.loads(run(MODEL, *V, "-v", "--format", "json").out) == document


@pytest.mark.parametrize("flags", [("-v",), ("--verbose",), ("-nv",), ("-vn",)])
def test_verbose_shows_where_a_bug_is_however_it_is_spelt(
    flags: tuple[str, ...], here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the exception says cannot command a CI runner either."""

    def fail(*args: object, **how: object) -> None:
        raise ZeroDivisionError("division by zero\n::error::x\n##[y]")

    monkeypatch.setattr("onnxkvrename.api.files.rename_batch", fail)
    outcome = run(MODEL, *V, *flags)
    first, *places, last, command, older, error = outcome.err.splitlines()
    assert (outcome.code, first) == (2, "Traceback (most recent call last):")
    assert any("test_main.py" in place for place in places)
    assert last == "ZeroDivisionError: division by zero"
    assert (command, older) == ("\\x3a:error::x", "#\\x23[y]")
    assert error.startswith("error: a bug in onnxkvrename: ZeroDivisionError")
    assert re.search(r" \(test_main.py, line [0-9]+; please report it\)$", error)
    assert "Traceback" not in run(MODEL, *V, "-d", "v").err


def test_a_warning_of_a_library_is_one_line(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(*args: object, **how: object) -> Report:
        warnings.warn("of past_key.0\n::error::x", UserWarning, stacklevel=1)
        return Report(())

    monkeypatch.setattr("onnxkvrename.api.files.rename_batch", warn)
    assert run(MODEL, *V).err == "UserWarning: of past_key.0\\x0a::error::x\n"


@pytest.mark.parametrize(
    ("args", "missing"),
    [
        (("verify", "inspect"), "inspect"),
        (("verify", "renamed"), "renamed"),
        (("compare", "inspects", MODEL), "inspects"),
        (("rename", "verifi", *V), "verifi"),
    ],
)
def test_only_the_first_word_can_be_a_misspelt_command(
    args: tuple[str, ...], missing: str, here: Path, run
) -> None:
    outcome = run(*args)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {missing}: no such file")
    assert "renamed: no such file or command (did you mean rename?)" in run("renamed", *V).err


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ((), 0),
        (("failed",), 1),
        (("not_done",), 2),
        (("failed", "not_done"), 2),
        (("failed", "interrupted"), 130),
    ],
)
def test_one_function_decides_exit_codes(given: tuple[str, ...], code: int) -> None:
    assert decide_exit_code(**dict.fromkeys(given, True)) == code


def test_the_last_of_several_formats_counts_for_an_error_too(here: Path, run) -> None:
    outcome = run(MODEL, "--format", "json", "--format=github", "--nonsense", "--format", "xml")
    assert outcome.out.startswith("::error title=failed::")


def test_github_annotates_what_kept_the_job_from_being_done(here: Path, run) -> None:
    outcome = run("lost.onnx", "--prefix", "VLLM", "--format", "github")
    assert outcome.code == 2
    assert outcome.out.startswith("::error file=lost.onnx,title=failed::lost.onnx: no such file")
    outcome = run(MODEL, "--format=github")
    assert outcome.out.startswith("::error title=failed::no token given")


def test_github_annotates_the_models(here: Path, run) -> None:
    outcome = run(MODEL, "text.onnx", *V, "--format", "github")
    assert outcome.out.splitlines() == [
        "::error file=text.onnx,title=failed::text.onnx: is a text file, not an ONNX model "
        "(pass a binary .onnx file)",
        "::notice title=total::2 models: 0 renamed, 0 unchanged, 1 failed, 1 left alone "
        "(another model failed); nothing was written",
    ]
    outcome = run(MODEL, *V, "--check", "--format", "github")
    assert outcome.out == (
        "::error file=decoder.onnx,title=KV token missing::8 of 8 names lack VLLM "
        "(first: past_key.0); run `onnxkvrename decoder.onnx --prefix VLLM`\n"
    )


@pytest.mark.parametrize("flag", ["--version", "-V", "--help", "-h"])
def test_questions_about_the_command_itself_are_answered(flag: str, run) -> None:
    outcome = run(flag)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(
        f"onnxkvrename {onnxkvrename.__version__}" if "v" in flag.lower() else "Usage: onnxkvrename"
    )


def test_an_interrupted_run_says_so(here: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **how: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("onnxkvrename.api.files.rename_batch", interrupt)
    outcome = run(MODEL, *V, "--format", "json")
    assert outcome.code == json.loads(outcome.out)["exit_code"] == 130
    assert (
        outcome.err.strip()
        == "error: interrupted: no model was changed; run the same command again"
    )


# What only a process of its own can show.


def test_a_name_that_is_no_text_or_begins_with_a_dash_is_a_name(
    here: Path, renamed: bytes, piped
) -> None:
    for name in (b"-x.onnx", b"\xff.onnx", b"a\nb.onnx"):
        Path(os.fsdecode(os.path.join(os.fsencode(here), name))).write_bytes(
            (here / MODEL).read_bytes()
        )
    process = piped("LC_ALL=C $K --prefix VLLM -- -x.onnx $'\\xff.onnx' $'a\\nb.onnx'", here)
    assert process.returncode == 0
    assert (here / "-x.onnx").read_bytes() == renamed
    assert "\\xff.onnx: 8 names changed\na\\x0ab.onnx: 8 names changed\n" in process.stderr


def test_a_working_directory_that_is_gone_is_no_bug(here: Path, renamed: bytes, piped) -> None:
    command = f"mkdir gone && cd gone && rmdir ../gone && $K {here / MODEL} --prefix VLLM"
    process = piped(command, here)
    assert "bug" not in process.stderr
    assert process.returncode == 0
    assert (here / MODEL).read_bytes() == renamed


def test_the_module_runs_as_the_command_does(spawn) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "onnxkvrename", "--version"], capture_output=True, text=True
    )
    assert (
        process.stdout == spawn("--version").stdout == f"onnxkvrename {onnxkvrename.__version__}\n"
    )


def test_a_command_misspelt_is_not_taken_for_a_model(here: Path, run) -> None:
    outcome = run("verfy", MODEL)
    assert outcome.code == 2
    assert outcome.err == "error: verfy: no such file or command (did you mean verify?)\n"
    (here / "verfy").write_bytes((here / MODEL).read_bytes())
    assert run("verfy", *V).code == 0


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no fifos on this system")
def test_what_is_no_regular_file_is_never_replaced(here: Path, run) -> None:
    os.mkfifo(here / "fifo")
    outcome = run(MODEL, *V, "-o", "fifo", "--force")
    assert (outcome.code, "is not a regular file" in outcome.err) == (2, True)
    assert (here / "fifo").is_fifo()


INTERRUPTED_WHILE_STARTING = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxkvrename.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from onnxkvrename.__main__ import run
run()
"""


def test_an_interrupt_while_the_program_starts_is_one_line_too() -> None:
    command = [sys.executable, "-c", INTERRUPTED_WHILE_STARTING]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (130, "")
    assert process.stderr == (
        "error: interrupted: no model was changed; run the same command again\n"
    )


INTERRUPTED_WHILE_LOADING = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.linalg":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
from onnxkvrename.__main__ import run
run()
"""


@pytest.mark.parametrize("options", [[], ["-v"], ["--format", "json"]])
def test_what_was_half_loaded_at_an_interrupt_is_not_loaded_again(options: list[str]) -> None:
    command = [sys.executable, "-c", INTERRUPTED_WHILE_LOADING, "verify", "m.onnx", *options]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (130, "")
    assert process.stderr == (
        "error: interrupted: no model was changed; run the same command again\n"
    )


FAILED_WHILE_LOADING = """
import sys
sys.modules["onnx"] = None  # as if it were not installed
from onnxkvrename.__main__ import run
run()
"""


@pytest.mark.parametrize("options", [[], ["-v"], ["--format", "json"]])
def test_a_command_that_cannot_be_loaded_is_one_error(options: list[str]) -> None:
    command = [sys.executable, "-c", FAILED_WHILE_LOADING, "verify", "m.onnx", *options]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stderr.count("error: ")) == (2, 1)
    assert "Traceback" not in process.stderr


SIGNALLED_WHILE_STARTING = """
import os, runpy, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxkvrename.cli.main":
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever started us may ignore them
for name in ("SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
runpy.run_path(sys.argv[2], run_name="__main__")
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("redirection", ["", "2>&-", "2>/dev/full"])
def test_a_signal_while_the_console_script_starts_ends_it_with_130(
    name: str, redirection: str, tmp_path: Path, piped
) -> None:
    (tmp_path / "script.py").write_text("from onnxkvrename.__main__ import run\nrun()\n")
    (tmp_path / "signalled.py").write_text(SIGNALLED_WHILE_STARTING)
    line = f"{shlex.quote(sys.executable)} signalled.py {name} script.py {redirection}"
    process = piped(line, tmp_path)
    assert (process.returncode, process.stdout) == (130, "")
    line = "error: interrupted: no model was changed; run the same command again\n"
    assert process.stderr == ("" if redirection else line)
