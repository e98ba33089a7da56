from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import models
import pytest
from models import node, saved

from onnxkvrename import ModelError, load_rules
from onnxkvrename.layout.layout import compute_layout_digest
from onnxkvrename.layout.load import load_layout
from onnxkvrename.layout.manifest import parse_manifest

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODEL = "decoder.onnx"
KINDS = ("decoder", "mla", "hybrid", "sampler", "internal_suffix", "functions", "control_flow")


@pytest.fixture
def here(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a sound model, a broken one, and files that are no models."""
    here = decoder.parent
    broken = models.decoder()
    broken.graph.output.pop()
    saved(broken, here / "broken.onnx")
    saved(b"import onnx\n", here / "text.onnx")
    shutil.copyfile(FIXTURES / "plain" / "vlm_dual" / "encoder.onnx", here / "encoder.onnx")
    (here / "below").mkdir()
    monkeypatch.chdir(here)
    return here


def document(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


# What is answered, and the exit code.


@pytest.mark.parametrize("path", [*(f"{kind}.onnx" for kind in KINDS), "windows", "vlm_dual"])
def test_a_fixture_of_every_kind_has_a_manifest(path: str, run) -> None:
    outcome = run("manifest", FIXTURES / "VLLM" / path, "--dim", "ctx_len=64")
    assert outcome.code == 0
    said = document(outcome.out)
    assert said["exit_code"] == 0
    assert said["sizes"] == {"ctx_len": 64}
    assert {buffer["token"] for buffer in said["buffers"]} == {"VLLM"}
    assert said["layers"] == sorted({buffer["layer"] for buffer in said["buffers"]})


def test_the_answer_is_json_unless_another_form_is_asked_for(here: Path, run) -> None:
    assert document(run("manifest", MODEL).out)["models"] == [MODEL]
    outcome = run("manifest", MODEL, "--format", "text")
    assert outcome.out.startswith("decoder.onnx: 4 buffers, layers 0-1\n  KIND ")


def test_a_model_with_a_fault_has_its_manifest_all_the_same(here: Path, run) -> None:
    outcome = run("manifest", "broken.onnx")
    assert outcome.code == 1
    said = document(outcome.out)
    assert (said["exit_code"], said["findings"][0]["code"]) == (1, "KV102")
    assert len(said["buffers"]) == 2
    assert outcome.err.startswith("broken.onnx: error KV102: ")


def test_a_warning_counts_if_it_is_to(run) -> None:
    model = FIXTURES / "plain" / "internal_suffix.onnx"
    assert run("manifest", model).code == 0
    outcome = run("manifest", model, "--strict")
    assert outcome.code == 1
    assert {found["severity"] for found in document(outcome.out)["findings"]} == {"error"}


def test_no_buffer_in_any_model_is_a_finding(here: Path, run) -> None:
    outcome = run("manifest", "encoder.onnx")
    said = document(outcome.out)
    assert (outcome.code, said["kv_layout_sha256"]) == (1, None)
    assert [found["code"] for found in said["findings"]] == ["KV001"]
    assert run("manifest", "encoder.onnx", "--format", "text").out == (
        "no KV buffer in any of the models\n"
    )


@pytest.mark.parametrize("form", [("--format", "json"), ("--format=json",)])
def test_a_job_that_could_not_be_done_is_said_in_json_too(
    form: tuple[str, ...], here: Path, run
) -> None:
    outcome = run("manifest", "text.onnx", *form)
    assert outcome.code == 2
    said = document(outcome.out)
    assert (said["exit_code"], said["error"]["path"]) == (2, "text.onnx")
    assert outcome.err.startswith("error: text.onnx: is a text file")


@pytest.mark.parametrize("form", [(), ("--format", "text")])
def test_unless_asked_for_in_json_it_is_said_on_stderr_alone(
    form: tuple[str, ...], here: Path, run
) -> None:
    outcome = run("manifest", "text.onnx", *form)
    assert (outcome.code, outcome.out) == (2, "")
    assert run("verify", "text.onnx").out == ""


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "no MODEL given: pass an .onnx file or a directory"),
        ((MODEL, "--dim", "ctx_len"), "--dim 'ctx_len': pass SYMBOL=SIZE"),
        ((MODEL, "--dim", "seq_len=1"), "--dim seq_len: buffers have no such dimension; they have"),
        ((MODEL, "--tokens", "9"), "--tokens requires --block-size N"),
        ((MODEL, "--block-size", "0"), "'--block-size': 0 is not in the range x>=1"),
        ((MODEL, "--specializations", "none.json"), "none.json: no such file"),
        ((MODEL, "--specializations", "text.onnx"), "text.onnx: is not JSON"),
        ((MODEL, "--custom-io", "text.onnx"), "text.onnx: cannot be read as custom I/O"),
        ((MODEL, "--custom-io", "none.yaml"), "none.yaml: no such file"),
        (("decodr.onnx",), "decodr.onnx: no such file (did you mean decoder.onnx?)"),
        ((".",), "text.onnx: is a text file"),
        (("below",), "below: has no .onnx file, at any depth"),
        ((MODEL, "broken.onnx"), "is one of 2 models"),
        ((MODEL, "-o", ""), "an empty path: is a variable not set?"),
    ],
)
def test_a_mistake_is_said_in_one_line(
    args: tuple[str, ...], said: str, here: Path, run, snapshot
) -> None:
    before = snapshot(here)
    outcome = run("manifest", *args)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert said in outcome.err
    assert snapshot(here) == before


def test_on_a_terminal_it_is_a_table(here: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxkvrename.cli.output.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    vllm = ("--block-size", 16, "--tokens", 100)
    outcome = run("manifest", FIXTURES / "VLLM" / "hybrid.onnx", "--format", "text", *vllm)
    lines = outcome.out.splitlines()
    heading = " ".join(lines[1:3]).split()
    assert {"KIND", "PARTS", "LAYERS", "DTYPE", "SHAPE", "UPDATE", "BYTES", "EACH"} <= {*heading}
    assert "[batch_size, 2, ctx_len, 4]" not in outcome.out
    assert [line.split()[0] for line in lines if len(line) > 80] == ["kv_layout_sha256"]
    assert {"GROUP", "ALLOCATION"} <= {line.split()[0] for line in lines}
    assert [line for line in lines if line != line.rstrip()] == []


def test_models_of_a_hostile_name_come_through(here: Path, run) -> None:
    model = models.decoder()
    for value in (*model.graph.input, *model.graph.output):
        if value.name == "logits":
            value.name = "a\u202e\n\x1b[2J"
    model.graph.node[2].output[0] = "a\u202e\n\x1b[2J"
    saved(model, here / "odd.onnx")
    said = document(run("manifest", "odd.onnx").out)
    assert [kept["name"] for kept in said["kept"]] == ["a\u202e\n\x1b[2J"]
    assert run("manifest", "odd.onnx", "--format", "text").out.replace("\n", "").isprintable()


# Into a file.


def test_it_is_written_whole_and_stands_for_the_model(here: Path, run) -> None:
    outcome = run("manifest", MODEL, "-o", "kv.json", "--dim", "ctx_len=8")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == "kv.json: 4 buffers, layers 0-1\n"
    assert (here / "kv.json").read_text() == run("manifest", MODEL, "--dim", "ctx_len=8").out
    side = load_layout([Path("kv.json")], load_rules()).layout
    assert (
        compute_layout_digest(side) == document((here / "kv.json").read_text())["kv_layout_sha256"]
    )


def test_a_faulty_model_has_its_manifest_written_too(here: Path, run) -> None:
    outcome = run("manifest", "broken.onnx", "-o", "kv.json")
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1] == "kv.json: 2 buffers, layer 0"
    assert document((here / "kv.json").read_text())["exit_code"] == 1


def test_as_text_it_is_written_as_text(here: Path, run) -> None:
    run("manifest", MODEL, "-o", "kv.txt", "--format", "text")
    assert (here / "kv.txt").read_text() == run("manifest", MODEL, "--format", "text").out


def test_a_dash_is_stdout(here: Path, run) -> None:
    assert run("manifest", MODEL, "-o", "-").out == run("manifest", MODEL).out
    assert not (here / "-").exists()


def test_it_gets_the_mode_of_any_new_file(here: Path, run) -> None:
    mask = os.umask(0o027)
    try:
        run("manifest", MODEL, "-o", "kv.json")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((here / "kv.json").stat().st_mode) == 0o640


def test_a_file_that_is_there_stays_unless_forced(here: Path, run) -> None:
    (here / "kv.json").write_text("mine")
    outcome = run("manifest", MODEL, "-o", "kv.json")
    assert outcome.code == 2
    assert outcome.err == ("error: kv.json: already exists (`--force` replaces it)\n")
    assert (here / "kv.json").read_text() == "mine"
    assert run("manifest", MODEL, "-o", "kv.json", "--force").code == 0
    document((here / "kv.json").read_text())


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (MODEL, f"is the model {MODEL}"),
        ("link.onnx", f"is the model {MODEL}"),
        ("s.json", "is what the manifest is made from"),
        ("below", "is a directory"),
        ("fifo", "already exists"),
        ("nowhere/kv.json", "cannot be written: No such file or directory"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    place: str, reason: str, force: tuple[str, ...], here: Path, run, snapshot
) -> None:
    (here / "link.onnx").symlink_to(MODEL)
    (here / "s.json").write_text('{"specializations": [{"ctx_len": "8"}]}')
    os.mkfifo(here / "fifo")
    before = snapshot(here)
    outcome = run("manifest", MODEL, "--specializations", "s.json", "-o", place, *force)
    assert outcome.code == 2
    assert outcome.err.startswith(f"error: {place}: {reason}")
    assert snapshot(here) == before
    assert stat.S_ISFIFO((here / "fifo").stat().st_mode)


def test_one_who_has_heard_enough_is_left_in_peace(here: Path, piped) -> None:
    process = piped(f"$K manifest {MODEL} | head -c 1", here)
    assert (process.returncode, process.stdout, process.stderr) == (0, "{", "")


def test_an_answer_that_cannot_be_given_is_said(here: Path, piped) -> None:
    process = piped(f"$K manifest {MODEL} > /dev/full", here)
    assert process.returncode == 2
    assert "the answer could not be given" in process.stderr


# The projection.


def test_the_projection_is_in_the_manifest_if_it_is_asked_for(here: Path, run) -> None:
    assert document(run("manifest", MODEL).out)["vllm"] is None
    outcome = run("manifest", MODEL, "--block-size", "16", "--tokens", "100")
    assert outcome.code == 0
    vllm = document(outcome.out)["vllm"]
    assert (vllm["vllm"], vllm["block_size"], vllm["tp"]) == ("0.24", 16, 1)
    assert [layer["page_size"] for layer in vllm["layers"]] == [16 * 2 * (4 + 4) * 4] * 2


def test_the_projection_is_told_as_text(here: Path, run) -> None:
    outcome = run("manifest", MODEL, "--block-size", "16", "--format", "text")
    assert "\nvLLM 0.24, blocks of 16 tokens, tensor parallel size 1\n" in outcome.out


def test_a_precision_that_vllm_has_no_cache_for_is_a_refusal(here: Path, run) -> None:
    entries = (
        f"- IOName: past_{part}.{layer}{suffix}\n  Precision: mxint8\n"
        for part in ("key", "value")
        for layer in (0, 1)
        for suffix in ("", "_RetainedState")
    )
    (here / "custom_io.yaml").write_text("".join(entries), "utf-8")
    args = ("manifest", MODEL, "--custom-io", "custom_io.yaml")
    assert run(*args).code == 0
    outcome = run(*args, "--block-size", "16")
    (refusal,) = document(outcome.out)["vllm"]["refusals"]
    assert (outcome.code, refusal["layers"]) == (0, [0, 1])
    assert refusal["reason"] == "vLLM has no such cache with dtype MXINT8"


def test_a_manifest_with_a_projection_stands_for_its_model(here: Path, run) -> None:
    run("manifest", MODEL, "--block-size", "16", "-o", "kv.json")
    text = (here / "kv.json").read_text()
    projection = document(text)["vllm"]
    assert [layer["layer"] for layer in projection["layers"]] == [0, 1]
    plain = run("manifest", MODEL).out
    assert parse_manifest(text, "kv.json")[0] == parse_manifest(plain, "kv.json")[0]
    smaller = text.replace('"block_size": 16', '"block_size": 8')
    assert document(smaller)["vllm"]["block_size"] == 8
    with pytest.raises(ModelError, match="was changed after it was written"):
        parse_manifest(smaller, "kv.json")


# More or less of it.


def test_quiet_says_only_what_is_wrong(here: Path, run) -> None:
    outcome = run("manifest", MODEL, "-q", "--format", "text")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    outcome = run("manifest", "broken.onnx", "-q", "-o", "kv.json")
    assert (outcome.code, outcome.out) == (1, "")
    assert [line.split()[2] for line in outcome.err.splitlines()[::2]] == ["KV102:"]


def test_quiet_json_is_json_all_the_same(here: Path, run) -> None:
    assert document(run("manifest", MODEL, "-q").out)["models"] == [MODEL]


def test_verbose_tells_every_finding(tmp_path: Path, run) -> None:
    states = [f"s{number}_RetainedState" for number in range(4)]
    decoder = models.decoder(*(node("Neg", ["x"], [state]) for state in states))
    decoder.graph.output.extend(models.info(state) for state in states)
    model = saved(decoder, tmp_path / "states.onnx")
    few, every = (run("manifest", model, *more).err for more in ([], ["-v"]))
    assert "; -v shows each" in few
    assert "-v shows" not in every
    assert every.count("warning KV111") == 4


def test_a_manifest_is_printed_again(here, run, tmp_path: Path) -> None:
    """To the byte, as text as well, and with what vLLM makes of it."""
    path = tmp_path / "m.json"
    assert run("manifest", MODEL, "--dim", "ctx_len=64", "-o", path).code == 0
    assert run("manifest", path).out == path.read_text("utf-8")
    options = ("--format", "text", "--block-size", "16")
    expected = run("manifest", MODEL, "--dim", "ctx_len=64", *options).out
    assert run("manifest", path, *options).out == expected
