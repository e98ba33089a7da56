"""Windows of one model are summarized together: one map over all layers."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from window_sets import write_windows

from onnxkvrename import load_rules
from onnxkvrename.layout.inspect import ModelSummary, fold_windows, inspect_model


def inspect_all(root: Path) -> list[ModelSummary]:
    """The summaries of all models below a directory."""
    return [inspect_model(path, load_rules()) for path in sorted(root.rglob("*.onnx"))]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("set")


def test_windows_are_one_summary_of_all_their_layers(here: Path) -> None:
    windows = inspect_all(write_windows(here, 12, token="VLLM", weights=512))
    (folded,) = fold_windows(windows)
    assert (folded.path, len(folded.windows)) == ("set", 12)
    assert folded.layers == tuple(range(12))
    assert [item.layer for item in folded.buffers] == sorted([*range(12)] * 2)
    assert folded.token_counts == (("VLLM", 48),)
    assert folded.name_count == 48
    assert folded.size == sum(window.size for window in windows)
    assert folded.node_count == sum(window.node_count for window in windows) > 12
    assert [item.name for item in folded.kept] == ["logits"]


def test_what_is_different_from_window_to_window_stays_visible(here: Path) -> None:
    write_windows(here, 3)
    onnx_path = here / "layer_1_2" / "Tiny_layer_tmp_1_2.onnx"
    onnx_path.write_bytes(onnx_path.read_bytes().replace(b"past_key.1_Ret", b"past_oth.1_Ret"))
    (folded,) = fold_windows(inspect_all(here))
    assert {item.layer: item.state for item in folded.buffers if item.buffer == "past_key"} == {
        0: "plain",
        1: "broken",
        2: "plain",
    }
    assert folded.failed


def test_windows_of_other_sets_and_other_exports_stay_apart(here: Path) -> None:
    write_windows(here / "a", 3)
    write_windows(here / "b", 2)
    path = here / "a" / "layer_2_3" / "Tiny_layer_tmp_2_3.onnx"
    model = onnx.load(path)
    model.producer_name = "another"
    path.write_bytes(model.SerializeToString())
    assert [len(summary.windows) for summary in fold_windows(inspect_all(here))] == [2, 0, 2]


def test_windows_with_the_same_layer_stay_apart(here: Path) -> None:
    write_windows(here, 2)
    twice = here / "layer_1_2" / "Tiny_layer_tmp_1_2.onnx"
    (here / "layer_0_2").mkdir()
    (here / "layer_0_2" / "Tiny_layer_tmp_0_2.onnx").write_bytes(twice.read_bytes())
    assert [summary.windows for summary in fold_windows(inspect_all(here))] == [(), (), ()]


def test_a_window_alone_and_one_that_cannot_be_read_stay_as_they_are(here: Path) -> None:
    write_windows(here, 2)
    broken = here / "layer_1_2" / "Tiny_layer_tmp_1_2.onnx"
    broken.write_text("import onnx\n")
    windows = inspect_all(here)
    assert fold_windows(windows) == tuple(windows)
