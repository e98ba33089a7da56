"""A buffer that is made of no buffer is KV110, whatever command follows the graph."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import saved
from updated_models import GRAPH_COMMANDS, build_updated_model

SCATTER = "k_out = ScatterElements<axis = 2>"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def list_missing(run, code: str) -> list[str]:
    """The commands that do not end with an error of this code."""
    outcomes = {" ".join(command): run(*command) for command in GRAPH_COMMANDS}
    return [
        command
        for command, outcome in outcomes.items()
        if outcome.code != 1 or f": error {code}: " not in outcome.err
    ]


@pytest.mark.parametrize(
    "nodes",
    [
        f"s = Shape(k) empty = ConstantOfShape(s) {SCATTER}(empty, i, new)",
        f"empty = Sub(k, k) {SCATTER}(empty, i, new)",
        f"same = Identity(k) empty = Sub(same, k) {SCATTER}(empty, i, new)",
        f"negative = Neg(k) empty = Add(k, negative) {SCATTER}(empty, i, new)",
        f"a = Neg(k) b = Neg(k) empty = Sub(a, b) {SCATTER}(empty, i, new)",
        f"ones = Div(k, k) {SCATTER}(ones, i, new)",
        f"ones = Pow(k, zero) {SCATTER}(ones, i, new)",
        f"empty = Mul(k, zero) {SCATTER}(empty, i, new)",
        f"s = Shape(k) zeros = ConstantOfShape(s) empty = Mul(k, zeros) {SCATTER}(empty, i, new)",
        f"s = Shape(k) zeros = Expand(zero, s) empty = Mul(k, zeros) {SCATTER}(empty, i, new)",
        "nothing = Slice(k, start, start, two) k_out = Concat<axis = 2>(nothing, new)",
        "s = Shape(k) k_out = ConstantOfShape(s)",
        "k_out = Mul(k, zero)",
    ],
)
def test_a_buffer_of_nothing_is_an_error_of_each_command(nodes: str, here: Path, run) -> None:
    constants = "int64[1] start = {0}, int64[1] two = {2}"
    saved(build_updated_model(nodes, constants=constants), here / "m.onnx")
    assert list_missing(run, "KV110") == []


@pytest.mark.parametrize(
    "nodes",
    [
        f"{SCATTER}(k, i, new)",
        f"other = Neg(v) lost = Mul(other, zero) {SCATTER}(k, i, new)",
        f"same = Sub(k, zero) {SCATTER}(same, i, new)",
        f"a = RandomUniformLike(k) b = RandomUniformLike(k) noise = Sub(a, b) n = Mul(noise, zero)"
        f" same = Add(k, n) {SCATTER}(same, i, new)",
        f"same = Pow(k, one) {SCATTER}(same, i, new)",
        f"s = Shape(k) ones = Expand(one, s) same = Mul(k, ones) {SCATTER}(same, i, new)",
    ],
)
def test_a_buffer_that_is_kept_is_none(nodes: str, here: Path, run) -> None:
    model = build_updated_model(nodes, constants="float[1] one = {1}")
    saved(model, here / "m.onnx")
    outcomes = [run(*command) for command in GRAPH_COMMANDS]
    assert ["KV110" in outcome.err for outcome in outcomes] == [False] * len(outcomes)
    assert [outcome.code for outcome in outcomes] == [0] * len(outcomes)


def test_a_layout_file_says_it_as_well(here: Path, run) -> None:
    saved(build_updated_model(f"empty = Sub(k, k) {SCATTER}(empty, i, new)"), here / "m.onnx")
    (here / "layout.json").write_text(run("inspect", "m.onnx", "--format", "json").out, "utf-8")
    outcome = run("compare", "layout.json", "layout.json")
    assert (outcome.code, "layout.json: error KV110: " in outcome.err) == (1, True)


def test_rules_may_mean_a_buffer_that_is_written_once(here: Path, run) -> None:
    """The encoder's keys and values are computed anew for each input, whatever was kept."""
    saved(build_updated_model("s = Shape(k) k_out = Expand(zero, s)"), here / "m.onnx")
    rules = 'profile = "qefficient"\nkinds.attention.update = "once"\n'
    (here / "mine.toml").write_text(rules, "utf-8")
    outcome = run("inspect", "m.onnx", "--rules", "mine.toml")
    assert "KV110" not in outcome.err
