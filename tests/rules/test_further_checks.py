"""A further check is one file in ``rules/checks/``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxkvrename.findings import CODES, declare_code
from onnxkvrename.rules import checks

TOO_MANY = '''
"""A model with more layers than the device has memory for."""

from onnxkvrename.findings import build_finding, declare_code

declare_code("KV999", "error", "a model with more than one layer")


def check(signature, plan, uses):
    layers = {pair.layer for pair in plan.pairs}
    if len(layers) > 1:
        yield build_finding("KV999", "", f"has {len(layers)} layers", "split the model")
'''


@pytest.fixture
def one_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of checks with one file more."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "too_many_layers.py").write_text(TOO_MANY, "utf-8")
    monkeypatch.setattr(checks, "__path__", [*checks.__path__, str(tmp_path / "more")])
    before = dict(CODES)
    yield
    CODES.clear()
    CODES.update(before)
    sys.modules.pop("onnxkvrename.rules.checks.too_many_layers", None)


@pytest.mark.usefixtures("one_more")
def test_a_file_more_is_a_finding_more(decoder: Path, run) -> None:
    before = decoder.read_bytes()
    outcome = run(decoder, "--prefix", "VLLM")
    assert outcome.code == 1
    assert "error KV999" in outcome.err
    assert decoder.read_bytes() == before
    assert "KV999" in run("verify", decoder).err


def test_without_it_there_is_none(decoder: Path, run) -> None:
    assert "KV999" not in checks.load_codes()
    assert run(decoder, "--prefix", "VLLM").code == 0


def test_a_code_that_is_taken_is_refused() -> None:
    declare_code("KV101", *CODES["KV101"])
    with pytest.raises(ValueError, match="KV101 already means"):
        declare_code("KV101", "warning", "something else")


PLUGGED = """
import sys
from onnxkvrename.rules import checks
checks.__path__.append(sys.argv[1])
from onnxkvrename.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


def test_every_format_knows_the_code_also_where_workers_found_it(
    decoder: Path, tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "too_many_layers.py").write_text(TOO_MANY, "utf-8")
    other = shutil.copyfile(decoder, decoder.with_name("other.onnx"))
    command = [sys.executable, "-c", PLUGGED, tmp_path / "more", decoder, other]
    options = ["--prefix", "VLLM", "--jobs", "2", "--format", "sarif"]
    process = subprocess.run([*command, *options], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (1, "")
    (run,) = json.loads(process.stdout)["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert [result["ruleId"] for result in run["results"]] == ["KV999", "KV999"]
    assert all(rules[result["ruleIndex"]] == "KV999" for result in run["results"])
