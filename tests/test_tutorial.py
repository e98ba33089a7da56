"""The lines of docs/tutorial.md, run as far as they need neither QEfficient nor a device."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ci_machine
import pytest
import qefficient_exports
from ci_machine import ROOT, Machine
from kill_commands import read_directory

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
TEXT = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"<!-- ([\w-]+) -->\n```\w+\n(.*?)```\n<!-- /\1 -->", TEXT, re.DOTALL))
STEPS = ("home", "export", "seed", "seeded", "prove", "gate")

QEFFICIENT = """
import json, os

class Stub:
    "A class of QEfficient's: all exports were made before, and the path of one is known."

    @classmethod
    def from_pretrained(cls, name, *, continuous_batching, **options):
        assert continuous_batching
        return cls()

    def export(self, **options):
        print("a line of a log")
        return json.loads(os.environ["EXPORTED"])

QEFFAutoModelForCausalLM = QEFFAutoModelForImageTextToText = Stub
"""


def export_causal(cache: Path, token: str = "") -> tuple[Path, Any]:
    """Write an export in one file; return its directory and what ``export`` returns."""
    directory = qefficient_exports.write_export(cache / "LlamaForCausalLM", token=token)
    return directory, str(directory / "decoder.onnx")


def export_vision(cache: Path, token: str = "") -> tuple[Path, Any]:
    """Write the exports of both parts; return the decoder's directory and both paths."""
    encoder, decoder = qefficient_exports.write_dual_export(cache / "QwenVL", token)
    return decoder, [str(encoder / "encoder.onnx"), str(decoder / "decoder.onnx")]


def export_windows(cache: Path, token: str = "") -> tuple[Path, Any]:
    """Write an export in windows; return its directory and the path of the merged file."""
    directory = qefficient_exports.write_layerwise_export(cache / "QwenMoe", token)
    return directory, str(directory / "merged_0-3.onnx")


KINDS = pytest.mark.parametrize(
    ("kind", "export"),
    [("causal", export_causal), ("vision", export_vision), ("windows", export_windows)],
)
Export = Callable[[Path], tuple[Path, Any]]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = ci_machine.build_machine(tmp_path)
    (made.temp / "QEfficient.py").write_text(QEFFICIENT, "utf-8")
    return made


def read_options(command: str) -> dict[str, str]:
    """Return the options of a command and their values; those without one have none."""
    words = shlex.split(command)
    following = [*words[1:], "--"]
    return {
        word: "" if value.startswith("-") else value
        for word, value in zip(words, following, strict=True)
        if word.startswith("-")
    }


@KINDS
def test_the_steps_from_an_export_to_a_proof(machine: Machine, kind: str, export: Export) -> None:
    directory, exported = export(machine.workspace / "qeff_cache")
    before = read_directory(directory)
    (machine.workspace / "export.py").write_text(BLOCKS[kind], "utf-8")
    script = "set -e\n" + "".join(BLOCKS[step] for step in STEPS) + 'echo "seeded: $SEEDED"\n'
    done = machine.run_script(
        script, EXPORTED=json.dumps(exported), PYTHONPATH=str(machine.temp), PYTHONUTF8="1"
    )
    assert done.returncode == 0, done.stderr
    assert "the same bytes as" in done.stdout + done.stderr
    assert "hand-off works" in done.stdout
    seeded = Path(re.findall("^seeded: (.*)$", done.stdout, re.MULTILINE)[0])
    assert (seeded.parent, read_directory(directory)) == (directory.parent, before)
    assert [str(path.relative_to(seeded)) for path in sorted(seeded.rglob("*.onnx"))] == [
        str(path.relative_to(directory)) for path in sorted(directory.rglob("*.onnx"))
    ]


def find_next(run: Any, monkeypatch: pytest.MonkeyPatch, *args: object) -> str:
    """Return the next step that a rename names on a terminal."""
    monkeypatch.setattr("onnxkvrename.cli.output.is_terminal", lambda stream: True)
    for name, value in {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    outcome = run(*args)
    assert outcome.code == 0, outcome.err
    text = re.sub("\x1b\\[[0-9;]*m", "", outcome.out + outcome.err)
    (call,) = re.findall(r"^  next  (.*\n)", text, re.MULTILINE)
    return call


@KINDS
def test_next_after_seeding_is_the_line_of_the_page(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch, kind: str, export: Export
) -> None:
    directory, _ = export(tmp_path)
    command = shlex.split(BLOCKS["seed"].replace("$EXPORT", str(directory)))[1:]
    assert find_next(run, monkeypatch, *command) == BLOCKS["next"]
    assert find_next(run, monkeypatch, *command) == BLOCKS["next"]  # which is up to date


@pytest.mark.parametrize(
    ("export", "argument"), [(export_causal, "onnx_path"), (export_vision, "lang_onnx_path")]
)
def test_next_after_a_rename_elsewhere_is_the_line_of_the_page(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch, export: Export, argument: str
) -> None:
    directory, _ = export(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    command = shlex.split(BLOCKS["directory"].replace("$EXPORT", str(directory)))[1:]
    wanted = BLOCKS["next-path"].replace("onnx_path", argument)
    assert find_next(run, monkeypatch, *command) == wanted


def test_both_workers_have_one_cache_dtype_and_each_its_role() -> None:
    lines = BLOCKS["workers"].replace("\\\n", "").splitlines()
    server, prefill, decode = (read_options(line) for line in lines if line)
    sides = [json.loads(side["--kv-transfer-config"]) for side in (prefill, decode)]
    assert [side["kv_role"] for side in sides] == ["kv_producer", "kv_consumer"]
    assert {str(side["kv_port"]) for side in sides} == {server["--port"]}
    container = read_options(BLOCKS["container"])
    for option in ("--kv-cache-dtype", "--max-model-len"):
        assert prefill[option] == decode[option] == container[option]
    for side in (prefill, decode):
        json.loads(side["--additional-config"])


def test_the_compiles_fit_the_workers(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[dict[str, Any]] = []
    model = type("Model", (), {"compile": lambda self, **options: calls.append(options)})()
    exec(BLOCKS["compile"], {"model": model})
    prefill, decode = calls
    assert (prefill.pop("prefill_only"), decode.pop("prefill_only")) == (True, False)
    assert (prefill.pop("prefill_seq_len"), decode.pop("prefill_seq_len")) == (128, 1)
    lines = BLOCKS["workers"].replace("\\\n", "").splitlines()
    for line, options in zip([line for line in lines if line][1:], calls, strict=True):
        worker = read_options(line)
        assert worker["--max-num-seqs"] == str(options.pop("full_batch_size"))
        assert worker["--max-model-len"] == str(options["ctx_len"])
        assert (worker["--kv-cache-dtype"] == "mxint8") == options["mxint8_kv_cache"]
    assert prefill == decode
