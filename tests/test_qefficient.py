"""The blocks of docs/qefficient.md: what people copy is tested as far as it needs no device."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ci_machine
import pytest
import qefficient_exports
from ci_machine import ROOT, Machine
from kill_commands import read_directory
from real_exports import EXPORTS
from tiers import full

from onnxkvrename import rename
from onnxkvrename.findings import CODES

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
TEXT = (ROOT / "docs" / "qefficient.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"<!-- ([\w-]+) -->\n```\w+\n(.*?)```\n<!-- /\1 -->", TEXT, re.DOTALL))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return ci_machine.build_machine(tmp_path)


@pytest.fixture
def cache(machine: Machine) -> Path:
    """Return the directory of QEfficient's exports, in a path with a space."""
    return machine.temp / ".cache" / "qeff_models"


@pytest.fixture
def plain(cache: Path) -> Path:
    return qefficient_exports.write_export(cache)


@pytest.fixture
def twin(tmp_path: Path) -> Path:
    return qefficient_exports.write_export(tmp_path / "twins", token="VLLM")


def says(machine: Machine, name: str, **paths: Path) -> str:
    """Return stdout and stderr of a block; check that it succeeds."""
    done = machine.run_script(BLOCKS[name], **{key: str(path) for key, path in paths.items()})
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


class Exporter:
    """A class of QEfficient's, as far as it looks for an export of the fixtures' decoder."""

    cache: Path
    taken: Path

    @classmethod
    def from_pretrained(cls, checkpoint: str) -> Exporter:
        return cls()

    def compile(
        self, onnx_path: str | None = None, *, kv_cache_prefix: str = "", **options: Any
    ) -> None:
        """Find the model that would be compiled; there is none to export."""
        token = f"_{kv_cache_prefix}" if kv_cache_prefix else ""
        names = [f"past_{part}.{n}{token}" for n in (0, 1) for part in ("key", "value")]
        outputs = ["logits", *(f"{name}_RetainedState" for name in names)]
        if onnx_path is None:
            params = qefficient_exports.build_params(
                outputs, qefficient_exports.CAUSAL, kv_cache_prefix
            )
            path = (
                self.cache
                / f"Tiny-{qefficient_exports.compute_params_hash(params)}"
                / "decoder.onnx"
            )
        else:
            path = Path(onnx_path)
        assert qefficient_exports.read_output_names(path) == outputs
        type(self).taken = path


@pytest.fixture
def qefficient(cache: Path, monkeypatch: pytest.MonkeyPatch) -> type[Exporter]:
    """A stand-in for the package."""
    stand_in = type("QEFFAutoModelForCausalLM", (Exporter,), {"cache": cache})
    module = ModuleType("QEfficient")
    module.QEFFAutoModelForCausalLM = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "QEfficient", module)
    return stand_in


def test_step_by_step(machine: Machine, plain: Path, twin: Path, qefficient) -> None:
    target = plain.parent / twin.name
    before = read_directory(plain)
    assert "4 of 4 buffers retained by dataflow" in says(machine, "verify", EXPORT=plain)
    assert f"would change -> {target / 'decoder.onnx'}" in says(machine, "look", EXPORT=plain)
    assert os.listdir(plain.parent) == [plain.name]
    with pytest.raises(FileNotFoundError):  # without the token QEfficient would export now
        exec(BLOCKS["compile"], {})
    assert f"changed -> {target / 'decoder.onnx'}" in says(machine, "seed", EXPORT=plain)
    assert read_directory(target) == read_directory(twin)
    assert read_directory(plain) == before
    assert "is already up to date" in says(machine, "seed", EXPORT=plain)
    assert "is already up to date" in says(machine, "check", EXPORT=plain)
    assert says(machine, "where", EXPORT=plain).startswith(f"{target / 'decoder.onnx'}\n")
    exec(BLOCKS["compile"], {})
    assert qefficient.taken == target / "decoder.onnx"
    shutil.rmtree(plain)
    says(machine, "strip", SEEDED=target)
    assert read_directory(plain) == before
    assert os.listdir(plain.parent) == [plain.name]


def test_several_directories(machine: Machine, cache: Path, tmp_path: Path) -> None:
    encoder, decoder = qefficient_exports.write_dual_export(cache)
    _, twin = qefficient_exports.write_dual_export(tmp_path / "twins", "VLLM")
    says(machine, "dual", CACHE=cache)
    assert sorted(os.listdir(cache)) == sorted([encoder.name, decoder.name, twin.name])
    assert read_directory(cache / twin.name) == read_directory(twin)


def test_files_that_repeat_the_names(machine: Machine, plain: Path) -> None:
    entries = " - IOName: past_key.0\n   Precision: mxint8 # kept\n"
    compiled = plain / "qpc-0123456789abcdef"
    compiled.mkdir()
    for directory in (plain, compiled):
        (directory / "custom_io.yaml").write_text(entries)
    says(machine, "seed", EXPORT=plain)
    (seeded,) = (path for path in plain.parent.iterdir() if path != plain)
    renamed = entries.replace("past_key.0", "past_key.0_VLLM")
    assert (seeded / "custom_io.yaml").read_text() == renamed
    assert not (seeded / compiled.name).exists()
    for directory in (plain, compiled):
        assert (directory / "custom_io.yaml").read_text() == entries


def test_by_path(
    machine: Machine, plain: Path, qefficient, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(machine, "directory", EXPORT=plain)
    monkeypatch.chdir(machine.workspace)
    exec(BLOCKS["by-path"], {"model": qefficient()})
    assert qefficient.taken == Path("renamed/decoder.onnx")


@pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS} is not there")
@full
def test_of_dynamo_with_subfunctions_the_export_with_the_token_is_broken_and_the_plain_one_is_not(
    machine: Machine,
) -> None:
    case = EXPORTS / "llama2l_dynamo_subfn"
    (plain,), (broken,) = case.glob("plain-*"), case.glob("VLLM-*")
    assert "4 of 4 buffers retained by dataflow" in says(machine, "verify", EXPORT=plain)
    told = machine.run_script(BLOCKS["verify"], EXPORT=str(broken))
    assert (told.returncode, "KV106" in told.stderr) == (1, True)
    shutil.copytree(plain, machine.temp / plain.name, copy_function=shutil.copyfile)
    there = machine.temp / broken.name.replace("VLLM", "plain")
    shutil.copytree(broken, there, copy_function=shutil.copyfile)
    told = machine.run_script(BLOCKS["seed"], EXPORT=str(machine.temp / plain.name))
    assert (told.returncode, "KV504" in told.stderr) == (1, True)
    forced = BLOCKS["seed"].rstrip() + " --force"
    assert machine.run_script(forced, EXPORT=str(machine.temp / plain.name)).returncode == 0
    (model,) = there.glob("*.onnx")
    report = rename(model, "VLLM", dry_run=True, verify=True)
    assert (report.status, report.findings) == ("unchanged", ())


def test_every_block_is_run_here() -> None:
    own = Path(__file__).read_text("utf-8")
    run = re.findall(r'says\(\w+, "([\w-]+)"|BLOCKS\["([\w-]+)"\]', own)
    assert {one or other for one, other in run} == BLOCKS.keys()
    assert TEXT.count("```") == 2 * len(BLOCKS)


def test_the_codes_are_codes() -> None:
    codes = set(re.findall(r"KV[0-9]{3}", TEXT))
    assert codes
    assert codes <= CODES.keys()
