"""The command ``pairs`` shows the states of a model, and writes rules for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import onnx
import onnx.parser
import pytest
from conftest import FIXTURES
from models import saved

from onnxkvrename.text import quote_path

DELTA = """
    <ir_version: 8, opset_import: ["": 17]>
    main (float[1,8,4] k_in, float[1,8,4] h, int64[1,1] ids)
    => (float[1,1,4] k_out, float[1,9,4] h2, float y)
    <float[4,4] w = {0}> {
        x = Gather(w, ids) k_out = MatMul(x, w) keys = Concat<axis = 1>(k_in, k_out)
        row = MatMul(k_out, w) h2 = Concat<axis = 1>(h, row)
        y = ReduceSum(h2)
    }
"""


@pytest.fixture
def delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model with one output of new positions only, and one that goes back as it is."""
    monkeypatch.chdir(tmp_path)
    saved(onnx.parser.parse_model(DELTA), tmp_path / "delta.onnx")
    return "delta.onnx"


def test_each_pair_is_a_row(delta: str, run) -> None:
    outcome = run("pairs", delta)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.splitlines() == [
        "delta.onnx: 2 pairs",
        "  input  output  update                           dtype  shape",
        "  k_in   k_out   new positions only along axis 1  FLOAT  [1, 8, 4]",
        "  h      h2      grows along axis 1               FLOAT  [1, 8, 4]",
        "to rename: `onnxkvrename pairs delta.onnx --as rules > rules.toml`, "
        "then `onnxkvrename delta.onnx --prefix KV --rules rules.toml`",
    ]


def test_a_model_without_states_says_so(tmp_path: Path, run) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]>'
        "main (float[a] x) => (float[a] y) {y = MatMul(x, x)}"
    )
    path = saved(model, tmp_path / "m.onnx")
    outcome = run("pairs", path)
    said = f"{path}: no output is proved to be a later state of an input\n"
    assert (outcome.code, outcome.out) == (0, said)


def test_a_node_that_chooses_by_nothing_is_not_a_bug(tmp_path: Path, run) -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        main (float[1,8,4] k, bool first, float[1,1,4] x) => (float[1,9,4] k2, float y) {
            k2 = Concat<axis = 1>(k, x)
            y = If (first) <then_branch = a () => (float p) {p = ReduceSum(k)},
                else_branch = b () => (float q) {q = Constant<value_float = 1.0>()}>
        }
    """)
    del model.graph.node[1].input[:]
    outcome = run("pairs", saved(model, tmp_path / "m.onnx"))
    assert (outcome.code, "Concat joins k and x" in outcome.err) == (0, True)


def test_the_json_document_has_its_schema(delta: str, run) -> None:
    saved(b"no model", Path("text.onnx"))
    outcome = run("pairs", "--format", "json", delta, "text.onnx")
    assert outcome.code == 2
    document = json.loads(outcome.out)
    good, bad = document["models"]
    assert [(pair["update"], pair["feeds_back"]) for pair in good["pairs"]] == [
        ("delta", False),
        ("append", True),
    ]
    assert bad["error"]["path"] == "text.onnx"


def test_a_job_that_cannot_be_done_is_a_document_too(run) -> None:
    outcome = run("pairs", "--format", "json", "missing.onnx")
    assert outcome.code == 2
    document = json.loads(outcome.out)
    assert document["error"]["path"] == "missing.onnx"


@pytest.mark.parametrize(
    ("source", "features"),
    [
        ("plain/decoder.onnx", ()),
        ("plain/hybrid.onnx", ()),
        ("plain/vlm_dual/decoder.onnx", ("vision_embeds", "deepstack_features")),
        ("delta", ()),
    ],
)
def test_the_rules_rename_exactly_the_pairs_of_the_model_and_give_them_back(
    source: str, features: tuple[str, ...], delta: str, run
) -> None:
    if source != "delta":
        shutil.copyfile(FIXTURES / source, delta)
    before = Path(delta).read_bytes()
    document = json.loads(run("pairs", delta, "--format", "json").out)
    pairs = [each for each in document["models"][0]["pairs"] if each["input"] not in features]
    names = {pair[side] for pair in pairs for side in ("input", "output")}
    outcome = run("pairs", "--as", "rules", delta)
    assert (outcome.code, outcome.err) == (0, "")
    Path("mine.toml").write_text(outcome.out, "utf-8")
    renamed = run(delta, "--prefix", "VLLM", "--rules", "mine.toml")
    assert renamed.code == 0
    assert {line.partition(" -> ")[0] for line in renamed.out.splitlines()} == names
    assert run(delta, "--prefix", "VLLM", "--rules", "mine.toml", "--check").code == 0
    assert run(delta, "--strip", "--rules", "mine.toml").code == 0
    assert Path(delta).read_bytes() == before


def test_the_rules_of_a_decoder_rename_as_its_profile_does(
    decoder: Path, renamed: bytes, run
) -> None:
    rules = decoder.parent / "mine.toml"
    rules.write_text(run("pairs", "--as", "rules", decoder).out, "utf-8")
    assert run(decoder, "--prefix", "VLLM", "--rules", rules).code == 0
    assert decoder.read_bytes() == renamed


def test_no_rules_are_written_if_a_model_cannot_be_read(delta: str, run) -> None:
    assert (
        "--as and --format cannot be used together"
        in run("pairs", "--as", "rules", "--format", "json", delta).err
    )
    saved(b"no model", Path("text.onnx"))
    for models in (("missing.onnx",), ("text.onnx",), (delta, "text.onnx")):
        outcome = run("pairs", "--as", "rules", *models)
        assert (outcome.code, outcome.out) == (2, "")


def test_names_stay_on_their_line(tmp_path: Path, run) -> None:
    model = onnx.parser.parse_model(DELTA)
    model.graph.input[0].name = model.graph.node[2].input[0] = "k\n::error::x"
    path = saved(model, tmp_path / "m.onnx")
    assert len(run("pairs", path).out.splitlines()) == 5
    (model,) = json.loads(run("pairs", "--format", "json", path).out)["models"]
    assert model["pairs"][0]["input"] == "k\n::error::x"


def test_a_model_without_a_state_is_named_in_the_command_that_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    monkeypatch.chdir(tmp_path)
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["": 17]>
        main (float[a,4] x) => (float[a,4] y) {y = Neg(x)}
    """)
    for name in ("m.onnx", "-m.onnx", "a b.onnx"):
        saved(model, tmp_path / name)
        path = quote_path(name)
        err = run("pairs", "--as", "rules", "--", name).err
        assert f"(`onnxkvrename inspect {path} --profile auto` shows what the model has)" in err
