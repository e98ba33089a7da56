"""Names of buffers within local functions follow the token of the graph, as QEfficient's do."""

from __future__ import annotations

from pathlib import Path

import onnx.helper
import pytest
from conftest import FIXTURES, Run
from models import INSIDE, KEY, VALUE, decoder, graph, list_names, node, patched, saved
from onnx import FunctionProto, ModelProto

from onnxkvrename import load_rules, rename, rename_bytes, rename_model

INTERNAL = f"{KEY}_InternalRetainedState"
OPSETS = [onnx.helper.make_opsetid("", 18)]
SOURCE, TWIN = (FIXTURES / tree / "functions.onnx" for tree in ("plain", "VLLM"))


def layer(*names: str, name: str = "Layer") -> FunctionProto:
    """A function with a formal parameter for each name, and a node that reads it."""
    body = [node("Neg", [each], [f"y{index}"]) for index, each in enumerate(names)]
    return onnx.helper.make_function("local", name, names, ["y0"], body, OPSETS)


def parameters(model: ModelProto) -> list[list[str]]:
    return [list(function.input) for function in model.functions]


def without_token_inside(path: Path) -> Path:
    """What releases made that left the names in functions."""
    model = onnx.load(TWIN)
    model.functions[0].CopyFrom(onnx.load(SOURCE).functions[0])
    return saved(model, path)


def test_an_earlier_result_with_plain_names_inside_needs_nothing(tmp_path: Path, run: Run) -> None:
    path = without_token_inside(tmp_path / "model.onnx")
    before = path.read_bytes()
    assert before != TWIN.read_bytes()
    for options in ((), ("--check",)):
        outcome = run(path, "--prefix", "VLLM", *options)
        assert (outcome.code, path.read_bytes() == before) == (0, True)
    assert run(path, "--strip").code == 0
    assert path.read_bytes() == SOURCE.read_bytes()
    assert run(path, "--prefix", "VLLM").code == 0
    assert path.read_bytes() == TWIN.read_bytes()


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        # another layer's buffers, in any function; what only begins like a buffer stays
        (
            "past_key.7 past_key.7x past_key",
            "--prefix VLLM",
            "past_key.7_VLLM past_key.7x past_key",
        ),
        ("a/past_value.0", "--prefix VLLM", "a/past_value.0_VLLM"),
        (INTERNAL, "--prefix VLLM", f"{KEY}_VLLM_InternalRetainedState"),
        # the suffix pairs nothing there
        (INTERNAL, "--prefix VLLM --normalize", f"{KEY}_VLLM_InternalRetainedState"),
        # a buffer that the graph does not have
        ("k_pe.0 pixel_values", "--prefix VLLM", "k_pe.0 pixel_values"),
        # not a token: no name of the graph has it
        (f"{KEY}_cast", "--prefix VLLM", f"{KEY}_cast"),
        (f"{KEY}_cast {KEY}", "--prefix VLLM --replace", f"{KEY}_cast {KEY}_VLLM"),
        (f"{KEY}_VLLM", "--prefix VLLM", f"{KEY}_VLLM"),
    ],
)
def test_a_name_follows_if_it_is_one_of_the_graphs_kinds_of_buffers(
    names: str, options: str, expected: str, tmp_path: Path, run: Run
) -> None:
    path = saved(decoder(functions=(layer("x"), layer(*names.split()))), tmp_path / "model.onnx")
    assert run(path, *options.split()).code == 0
    assert parameters(onnx.load(path)) == [["x"], expected.split()]


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        ("past_key.7_OLD past_key.7_cast", "--strip", "past_key.7 past_key.7_cast"),
        ("past_key.7_OLD past_key.7_cast", "--strip --prefix OLD", "past_key.7 past_key.7_cast"),
        ("past_key.7_OLD", "--prefix VLLM --replace", "past_key.7_VLLM"),
        ("past_key.7 past_value.7_OLD", "--strip", "past_key.7 past_value.7"),
    ],
)
def test_a_token_inside_counts_if_the_graph_has_it(
    names: str, options: str, expected: str, tmp_path: Path, run: Run
) -> None:
    path = saved(decoder(), tmp_path / "model.onnx")
    assert run(path, "--prefix", "OLD").code == 0
    model = onnx.load(path)
    model.functions.append(layer(*names.split()))
    assert run(saved(model, path), *options.split()).code == 0
    assert parameters(onnx.load(path)) == [expected.split()]


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        (
            [layer(KEY, f"{KEY}_VLLM")],
            f"KV201: {KEY}_VLLM is already an input of a Neg node of a local function",
        ),
        ([layer(KEY), layer(f"{KEY}_VLLM", name="Other")], None),
    ],
)
def test_names_clash_within_one_function_only(
    functions: list[FunctionProto], said: str | None, tmp_path: Path, run: Run
) -> None:
    model = decoder(functions=tuple(functions))
    path = saved(model, tmp_path / "model.onnx")
    outcome = run(path, "--prefix", "VLLM")
    assert outcome.code == (1 if said else 0)
    assert (said or "") in outcome.err
    assert (path.read_bytes() == model.SerializeToString()) == bool(said)


def test_two_names_that_become_one_are_refused(tmp_path: Path, run: Run) -> None:
    path = saved(decoder(), tmp_path / "model.onnx")
    assert run(path, "--prefix", "OLD").code == 0
    model = onnx.load(path)
    model.functions.append(layer(KEY, f"{KEY}_OLD"))
    outcome = run(saved(model, path), "--prefix", "VLLM", "--replace")
    said = f"KV201: {KEY}_VLLM is already the new name of two values of a local function"
    assert (outcome.code, said in outcome.err) == (1, True)


def test_a_graph_in_a_function_sees_its_values_unless_it_has_its_own(tmp_path: Path) -> None:
    own = graph(node("Neg", ["x"], [KEY]), node("Neg", [KEY], ["z"]))
    seeing = graph(node("Neg", [KEY], ["z"]))
    choice = node("If", ["flag"], ["y"], then_branch=own, else_branch=seeing)
    function = onnx.helper.make_function(
        "local", "Layer", [KEY, "x", "flag"], ["y"], [choice], OPSETS
    )
    model = decoder(functions=(function,))
    path = saved(model, tmp_path / "model.onnx")
    assert rename(path, "VLLM").status == "renamed"
    assert path.read_bytes() == patched(model).SerializeToString()
    (result,) = onnx.load(path).functions
    assert sorted(set(filter(INSIDE.fullmatch, list_names(result)))) == [KEY]
    assert rename(path, strip=True).status == "renamed"
    assert path.read_bytes() == model.SerializeToString()


def test_a_model_in_memory_changes_in_the_same_way() -> None:
    assert rename_bytes(SOURCE.read_bytes(), "VLLM") == TWIN.read_bytes()
    assert rename_model(onnx.load(SOURCE), "VLLM") == onnx.load(TWIN)


@pytest.mark.parametrize(
    ("key", "expected"), [("functions = true\n", f"{VALUE}_VLLM"), ("", VALUE)]
)
def test_rules_say_whether_names_inside_follow(
    key: str, expected: str, tmp_path: Path, run: Run
) -> None:
    profile = load_rules().name
    text = (FIXTURES.parent / "onnxkvrename/rules/profiles" / f"{profile}.toml").read_text("utf-8")
    assert text.count("functions = true\n") == 1
    (tmp_path / "mine.toml").write_text(text.replace("functions = true\n", key), "utf-8")
    path = saved(decoder(functions=(layer(VALUE),)), tmp_path / "model.onnx")
    assert run(path, "--prefix", "VLLM", "--rules", tmp_path / "mine.toml").code == 0
    assert parameters(onnx.load(path)) == [[expected]]


def test_the_answer_says_how_many_names_changed_inside(run: Run, tmp_path: Path) -> None:
    outcome = run(SOURCE, "--prefix", "VLLM", "-o", tmp_path / "model.onnx")
    assert "8 names changed; 4 in local functions as well" in outcome.out + outcome.err


def test_names_that_no_rule_can_read_stay(tmp_path: Path) -> None:
    names = [f"past_key.{'0' * 5000}", "past_key.٣", "past_key.0\n", "past_key.1_" + "a" * 80]
    model = decoder(functions=(layer(*names),))
    raw = model.SerializeToString().replace(b"past_key.1_aa", b"past_key.1_\xff\xfe")
    path = saved(raw, tmp_path / "model.onnx")
    assert rename(path, "VLLM").status == "renamed"
    graph_only = path.read_bytes()
    assert all(name.encode() in graph_only for name in names[:3])
    assert b"past_key.1_\xff\xfe" in graph_only
    assert rename(path, strip=True).status == "renamed"
    assert path.read_bytes() == raw
