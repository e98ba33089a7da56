from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from disaggregated_example import undivided
from tiers import thin

from onnxkvrename import load_rules, rename
from onnxkvrename.files.find import find_jobs
from onnxkvrename.renaming.run import rename_batch
from onnxkvrename.rules.request import Request

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
MODELS = sorted(
    str(path.relative_to(FIXTURES / "plain")) for path in (FIXTURES / "plain").rglob("*.onnx")
)
ENCODER = "vlm_dual/encoder.onnx"
SERVING = sorted(name for name in MODELS if name.startswith("serving/"))


def test_the_fixtures_are_what_their_script_builds() -> None:
    command = [sys.executable, str(FIXTURES / "build.py"), "--check"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize("name", MODELS)
def test_a_fixture_is_a_model_that_onnx_accepts(name: str) -> None:
    for kind in ("plain", "VLLM"):
        onnx.checker.check_model(str(FIXTURES / kind / name))


@pytest.mark.parametrize("name", sorted(set(MODELS) - {ENCODER}))
def test_a_fixture_becomes_its_twin_and_itself_again(name: str, tmp_path: Path) -> None:
    output, back = tmp_path / "renamed" / "m.onnx", tmp_path / "back" / "m.onnx"
    report = rename(FIXTURES / "plain" / name, "VLLM", output=output)
    assert report.status == "renamed"
    assert {f.code for f in report.findings} <= {"KV112", "KV120"}
    assert output.read_bytes() == (FIXTURES / "VLLM" / name).read_bytes()
    assert rename(output, strip=True, output=back).status == "renamed"
    assert back.read_bytes() == (FIXTURES / "plain" / name).read_bytes()


@pytest.mark.parametrize("name", sorted(set(MODELS) - {ENCODER}))
def test_a_fixture_with_its_token_needs_nothing(name: str) -> None:
    assert rename(FIXTURES / "VLLM" / name, "VLLM", dry_run=True).status == "unchanged"


@pytest.mark.parametrize("name", SERVING)
@pytest.mark.parametrize("piece", thin([1, 5], 1))
def test_a_prompt_in_pieces_gives_what_it_gives_at_once(name: str, piece: int) -> None:
    path = FIXTURES / "plain" / name
    for length in range(2, 13):
        assert undivided(path, length, piece) == undivided(path, length)


def test_a_window_needs_no_more_than_its_cache() -> None:
    whole, window = (
        [undivided(FIXTURES / "plain" / "serving" / f"{name}.onnx", n) for n in range(1, 13)]
        for name in ("window_whole", "window")
    )
    assert whole == window


def test_all_fixtures_at_once_become_the_other_tree(tmp_path: Path) -> None:
    jobs = find_jobs([FIXTURES / "plain"], directory=tmp_path / "all")
    assert rename_batch(Request(token="VLLM"), jobs, load_rules()).compute_exit_code() == 0
    trees = [
        {path.relative_to(tree): path.read_bytes() for path in tree.rglob("*") if path.is_file()}
        for tree in (tmp_path / "all", FIXTURES / "VLLM")
    ]
    assert trees[0] == trees[1]
