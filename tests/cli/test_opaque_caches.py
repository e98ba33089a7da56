"""Every command says the same of caches under unknown names, and why the search of a graph ended.

In most of these models, an operator or a type that is not followed comes between a cache and its
next state: nothing proves the pair, and rules can name it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import onnx.parser
import pytest
from conftest import FIXTURES, Outcome, Run
from hints import find_commands, run_commands
from models import saved
from onnx import ModelProto

import onnxkvrename

RULES = ("--rules", "rules.toml")
COMMANDS = (
    ("m.onnx", "--prefix", "VLLM"),
    ("m.onnx", "--target", "vllm-qaic", "--check"),
    ("verify", "m.onnx"),
    ("verify", "m.onnx", "--target", "vllm-qaic"),
    ("inspect", "m.onnx"),
    ("compare", "m.onnx"),
)
PLUGIN = (
    "float[b,s,8] x, float[b,2,2,p,4] past_kv_0, float[b,8,3] conv_state_0, "
    "float[b,2,2,p,4] past_kv_1, float[b,8,3] conv_state_1",
    "float[b,2,2,t,4] present_kv_0, float[b,8,3] present_conv_0, "
    "float[b,2,2,t,4] present_kv_1, float[b,8,3] present_conv_1",
    """a0, present_kv_0 = trt.Attention(x, past_kv_0)
    c0, present_conv_0 = trt.Conv1d(a0, conv_state_0)
    a1, present_kv_1 = trt.Attention(c0, past_kv_1)
    y, present_conv_1 = trt.Conv1d(a1, conv_state_1)""",
)
"""The attention of TensorRT as a plug-in, and a convolution that keeps its last columns."""
NUMBERED_VALUES = (
    "float[b,s,8] x, float[b,2,p,8] in_3, float[b,2,p,8] in_4",
    "float[b,2,t,8] out_18, float[b,2,t,8] out_19",
    "n, out_18, out_19 = acme.Attention(x, in_3, in_4) y = MatMul(n, w)",
)
OPAQUE = {
    "two caches of one operator": (
        *NUMBERED_VALUES,
        "2 outputs may be caches (first: in_3 -> out_18), but that is not proved: "
        "Attention of acme has no body in the model",
    ),
    "plug-ins": (
        *PLUGIN,
        "4 outputs may be caches (first: past_kv_0 -> present_kv_0), but that is not proved: "
        "Attention of trt has no body in the model; Conv1d of trt has no body in the model",
    ),
    "the last frames of a stream": (
        "float[b,s,8] x, float[b,2,8] cache",
        "float[b,2,8] new_cache",
        """all = Concat<axis = 1>(cache, x) from = Constant<value_ints = [-2]>()
        to = Constant<value_ints = [9999]>() axis = Constant<value_ints = [1]>()
        new_cache = Slice(all, from, to, axis) y = MatMul(all, w)""",
        "1 output may be a cache (cache -> new_cache), but that is not proved: Concat joins cache "
        "and x, and new_cache may be a later state of either",
    ),
    "a sequence of tensors": (
        "float[b,s,8] x, seq(float[b,p,8]) past",
        "seq(float[b,t,8]) present",
        """zero = Constant<value_int = 0>() old = SequenceAt(past, zero)
        new = Concat<axis = 1>(old, x) present = SequenceConstruct(new) y = MatMul(new, w)""",
        "1 output may be a cache (past -> present), but that is not proved: "
        "sequence(FLOAT) is not followed",
    ),
    "an optional tensor": (
        "float[b,s,8] x, optional(float[b,p,8]) past",
        "float[b,t,8] present",
        """old = OptionalGetElement(past) present = Concat<axis = 1>(old, x)
        y = MatMul(present, w)""",
        "1 output may be a cache (past -> present), but that is not proved: "
        "optional(FLOAT) is not followed",
    ),
    "packed integers": (
        "float[b,s,8] x, int32[b,2,p,1] packed",
        "int32[b,2,t,1] packed_next",
        "packed_next, y = acme.Attention(packed, x)",
        "1 output may be a cache (packed -> packed_next), but that is not proved: "
        "INT32 is not followed",
    ),
    "another precision": (
        "float[b,s,8] x, float16[b,p,8] past",
        "float[b,t,8] present",
        """new = MatMul(x, w) old = Cast<to = 1>(past) present = Concat<axis = 1>(old, new)
        y = MatMul(present, w)""",
        "1 output may be a cache (past -> present), but that is not proved: "
        "FLOAT16 is made FLOAT on the way",
    ),
    "an operator that unpacks": (
        "float[b,s,8] x, float[b,p,8] past",
        "float[b,t,8] present",
        "old = acme.Unpack(past) present = Concat<axis = 1>(old, x) y = MatMul(present, w)",
        "1 output may be a cache (past -> present), but that is not proved: "
        "Unpack of acme has no body in the model",
    ),
    "names that share no word": (
        "int64[b,s] ids, float[b,2,p,4] alpha",
        "float[b,2,t,4] omega",
        "y, omega = acme.Layer(ids, alpha)",
        "1 output may be a cache (alpha -> omega), but that is not proved: "
        "Layer of acme has no body in the model",
    ),
}
KNOWN = (
    "float[b,s,8] x, float[b,p,8] mem_0, float[b,p,8] mem_1",
    "float[b,t,8] mem_0_next, float[b,t,8] mem_1_next",
    """n = MatMul(x, w) mem_0_next = Concat<axis = 1>(mem_0, n) m = Relu(n)
    mem_1_next = Concat<axis = 1>(mem_1, m) y = Add(mem_0_next, mem_1_next)""",
)
"""Caches that the graph proves, under names that no profile knows."""


def build_model(inputs: str, outputs: str, nodes: str, *, first: str = "float[b,s,8] y"):
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21, "acme": 1, "trt": 1]>
        main ({inputs}) => ({first}, {outputs})
        <float[8,8] w = {{{", ".join(["1"] * 64)}}}> {{ {nodes} }}
    """)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def uncomment_rules() -> None:
    """Remove the first two characters of the lines of a draft, but of those that explain it."""
    text = Path("rules.toml").read_text("utf-8")
    Path("rules.toml").write_text(re.sub("^# ", "", text, flags=re.MULTILINE), "utf-8")


def draft_rules(run: Run) -> Outcome:
    outcome = run("pairs", "m.onnx", "--as", "rules")
    Path("rules.toml").write_text(outcome.out, "utf-8")
    return outcome


@pytest.mark.parametrize("case", OPAQUE)
def test_every_command_says_what_ended_the_search(case: str, here: Path, run: Run) -> None:
    inputs, outputs, nodes, said = OPAQUE[case]
    saved(build_model(inputs, outputs, nodes), here / "m.onnx")
    for words in (*COMMANDS, ("pairs", "m.onnx")):
        outcome = run(*words)
        assert said in outcome.err, words
        first, second = find_commands(outcome.err)[:2]
        assert first == "onnxkvrename pairs m.onnx --as rules > rules.toml"
        assert second.endswith(" --rules rules.toml")
        assert outcome.code == (0 if words[0] in ("inspect", "pairs") else 1)


@pytest.mark.parametrize("case", OPAQUE)
def test_rules_are_drafted_as_comments_that_rename_nothing(case: str, here: Path, run: Run) -> None:
    saved(build_model(*OPAQUE[case][:3]), here / "m.onnx")
    drafted = draft_rules(run)
    assert (drafted.code, "no pair is proved" in drafted.err) == (0, True)
    assert all(line.startswith("#") for line in drafted.out.splitlines())
    outcome = run("m.onnx", "--prefix", "VLLM", *RULES)
    assert (outcome.code, "needs at least one [[kv]]" in outcome.err) == (2, True)


@pytest.mark.parametrize(
    ("parts", "outputs"),
    [
        (PLUGIN, ["present_kv_0_VLLM", "present_conv_0_VLLM"]),
        (NUMBERED_VALUES, ["out_18_VLLM", "out_19_VLLM"]),
    ],
)
def test_with_the_drafted_rules_a_model_is_renamed_and_restored(
    parts: tuple[str, str, str], outputs: list[str], here: Path, run: Run
) -> None:
    path = saved(build_model(*parts), here / "m.onnx")
    before = path.read_bytes()
    second = find_commands(run("m.onnx", "--prefix", "VLLM").err)[1]
    draft_rules(run)
    uncomment_rules()
    assert run_commands(f"`{second}`", run).code == 0
    assert [value.name for value in onnx.load(path).graph.output][1:3] == outputs
    assert run("verify", "m.onnx", *RULES).code == 0
    assert run("m.onnx", "--strip", *RULES).code == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("model", [build_model(*KNOWN), build_model(*PLUGIN)])
@pytest.mark.parametrize("token", ["VLLM", "vllmKvCache"])
def test_after_a_rename_by_rules_every_command_asks_for_those(
    model: ModelProto, token: str, here: Path, run: Run
) -> None:
    saved(model, here / "m.onnx")
    if "no pair is proved" in draft_rules(run).err:
        uncomment_rules()
    assert run("m.onnx", "--prefix", token, *RULES).code == 0
    renamed = Path("m.onnx").read_bytes()
    for words in (*COMMANDS, ("m.onnx", "--prefix", "OTHER"), ("m.onnx", "--strip")):
        outcome = run(*words)
        assert f"; names already carry {token}\n" in outcome.err, words
        assert "-> add `--rules FILE` with the rules of the rename" in outcome.err
        assert find_commands(outcome.err) == []
    assert Path("m.onnx").read_bytes() == renamed


@pytest.mark.parametrize("words", COMMANDS[2:])
def test_the_commands_of_a_hint_show_the_caches_that_the_graph_proves(
    words: tuple[str, ...], here: Path, run: Run
) -> None:
    saved(build_model(*KNOWN), here / "m.onnx")
    outcome = run(*words)
    assert "the graph has 2 caches (first: mem_0 -> mem_0_next)" in outcome.err
    again = run_commands(outcome.err, run)
    assert ("KV001" in again.err, bool(re.search("2 buffers|0-1", again.out))) == (False, True)


def test_compare_repeats_its_options_in_the_hint(here: Path, run: Run) -> None:
    saved(build_model(*KNOWN), here / "my decode.onnx")
    saved(build_model(*KNOWN), here / "m.onnx")
    words = ["--target", "vllm-qaic-legacy", "--dim", "p=64", "--dim", "decode:t=64"]
    outcome = run("compare", "m.onnx", "my decode.onnx", *words)
    commands = find_commands(outcome.err)
    assert f"onnxkvrename compare m.onnx 'my decode.onnx' {' '.join(words)} {' '.join(RULES)}" in (
        commands
    )
    assert outcome.out.splitlines()[0].endswith("prefill (m.onnx) has no KV buffer (KV001)")


@pytest.mark.parametrize(
    "parts",
    [
        (
            "float[b,80,3000] frames, float[b,3,224,224] pixels",
            "float[b,1500,512] states",
            "states, y = acme.Encoder(frames, pixels)",
        ),
        (
            "float[b,s,8] hidden_states, int64[b,s] attention_mask",
            "float[b,s,8] last_hidden_state",
            "last_hidden_state, y = acme.Norm(hidden_states, attention_mask)",
        ),
    ],
)
def test_an_encoder_with_custom_operators_has_no_cache(
    parts: tuple[str, str, str], here: Path, run: Run
) -> None:
    saved(build_model(*parts, first="float[b,257,64] y"), here / "m.onnx")
    outcome = run("m.onnx", "--prefix", "VLLM")
    assert "; no cache found in the graph either\n" in outcome.err
    assert find_commands(outcome.err) == []
    assert "KV001" not in run("inspect", "m.onnx").err + run("pairs", "m.onnx").err


@pytest.mark.parametrize(("model", "said"), [(KNOWN, "2 pairs"), (PLUGIN, "no output is proved")])
def test_pairs_annotates_what_it_found(
    model: tuple[str, ...], said: str, here: Path, run: Run
) -> None:
    saved(build_model(*model), here / "m.onnx")
    lines = run("pairs", "m.onnx", "--format", "github").out.splitlines()
    assert lines[-1].startswith(f"::notice file=m.onnx,title=pairs::{said}")
    assert [line.partition("::")[0] for line in lines[:-1]] == [""] * (model is PLUGIN)
    assert all("title=KV001::" in line for line in lines[:-1])


NUMBERED = {
    "values of torch, layers in the outputs": (
        [f"onnx::Concat_{n}" for n in range(100, 104)],
        [f"/model/layers.{n}/self_attn/Concat_{part}_output_0" for n in (0, 1) for part in (1, 2)],
        "layers 0-1",
    ),
    "values of torch, nothing in the outputs": (
        [f"onnx::Concat_{n}" for n in range(100, 104)],
        [f"{n}" for n in range(611, 615)],
        "no layer",
    ),
    "numbers of values": (
        [f"input.{n}" for n in (7, 9, 23, 25)],
        [f"val_{n}" for n in (81, 84, 92, 95)],
        "no layer",
    ),
    "layers of a window": (
        [f"past_{n}_{part}" for n in (6, 7) for part in "kv"],
        [f"present_{n}_{part}" for n in (6, 7) for part in "kv"],
        "layers 6-7",
    ),
    "layers of a window in the inputs only": (
        [f"past_{n}_{part}" for n in (6, 7) for part in (0, 1)],
        [f"cat_{n}" for n in (9, 11, 25, 27)],
        "layers 6-7",
    ),
    "one part of some layers": (
        [f"cache_{n}" for n in (3, 7, 11, 15)],
        [f"cache_{n}_next" for n in (3, 7, 11, 15)],
        "layers 3, 7, 11, 15",
    ),
}


@pytest.mark.parametrize("case", NUMBERED)
def test_numbers_that_are_not_layers_are_not_called_layers(case: str, here: Path, run: Run) -> None:
    inputs, outputs, layers = NUMBERED[case]
    model = build_model(
        f"float[b,s,8] x, {', '.join(f'float[b,p,8] i{n}' for n in range(4))}",
        ", ".join(f"float[b,t,8] o{n}" for n in range(4)),
        "n = MatMul(x, w) "
        + " ".join(f"o{n} = Concat<axis = 1>(i{n}, n)" for n in range(4))
        + " y = Sum(o0, o1, o2, o3)",
    )
    names = {f"{side}{n}": name for side, every in (("i", inputs), ("o", outputs))
             for n, name in enumerate(every)}  # fmt: skip
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    path = saved(model, here / "m.onnx")
    before = path.read_bytes()
    draft_rules(run)
    assert f"(4 grow along axis 1), {layers}" in run("verify", "m.onnx", *RULES).out
    shown = run("inspect", "m.onnx", *RULES).out
    assert ("of no layer" in shown) == (layers == "no layer")
    assert run("m.onnx", "--prefix", "VLLM", *RULES).code == 0
    assert f", {layers}" in run("verify", "m.onnx", *RULES).out
    assert run("m.onnx", "--strip", *RULES).code == 0
    assert path.read_bytes() == before


HALF_KNOWN = {
    "KV101": ("past_key_values_0_0", "past_key_values_0_1", "present.0.key", "present.0.value"),
    "KV102": ("past_key_0", "past_value_0", "new_key_0", "new_value_0"),
}


@pytest.mark.parametrize("code", HALF_KNOWN)
def test_compare_names_the_other_side_of_a_buffer_as_a_rename_does(
    code: str, here: Path, run: Run
) -> None:
    names = HALF_KNOWN[code]
    model = build_model(
        "float[b,s,8] x, float[b,2,p,8] k, float[b,2,p,8] v, float[b,2,1,8] h",
        "float[b,2,t,8] ko, float[b,2,t,8] vo",
        "n = MatMul(h, w) m = Neg(n) ko = Concat<axis = 2>(k, n) vo = Concat<axis = 2>(v, m) "
        "i = Constant<value_ints = [1, 2, 3]>() kr = ReduceSum<keepdims = 0>(ko, i) "
        "vr = ReduceSum<keepdims = 0>(vo, i) z = MatMul(x, w) y = Sum(z, kr, vr)",
    )
    renamed = dict(zip(("k", "v", "ko", "vo"), names, strict=True))
    for value in (*model.graph.input, *model.graph.output):
        value.name = renamed.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    saved(model, here / "m.onnx")
    said = find_lines(run("m.onnx", "--prefix", "VLLM").err, code)
    outcome = run("compare", "m.onnx")
    assert (outcome.code, find_lines(outcome.err, code)) == (1, said)
    assert find_commands(outcome.err)[1] == "onnxkvrename compare m.onnx --rules rules.toml"
    others = outcome.err.split("error KV616:")[1]
    assert find_commands(others) == []
    assert {line for line in others.splitlines() if "->" in line[:5]} == {f"  -> fix {code} first"}


def find_lines(text: str, code: str) -> list[str]:
    return [line for line in text.splitlines() if f"error {code}:" in line]


def test_compare_leaves_out_no_model_of_a_directory(here: Path, run: Run) -> None:
    Path("models").mkdir()
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", "models/a.onnx")
    saved(build_model(*KNOWN), Path("models/b.onnx"))
    outcome = run("compare", "models")
    assert outcome.code == 2
    assert "models/b.onnx: is not the same model as models/a.onnx" in outcome.err
    assert "the graph has 2 caches" in outcome.err
    assert run("compare", "models/a.onnx").code == 1


@pytest.mark.parametrize(
    ("parts", "said", "hint"),
    [
        (KNOWN, "the graph has 2 caches", "pass rules=onnxkvrename.suggest_rules(PATH)"),
        (PLUGIN, "Attention of trt has no body", "pass them as rules=PATH"),
    ],
)
def test_the_library_says_it_of_models_in_memory(
    parts: tuple[str, str, str], said: str, hint: str
) -> None:
    model = build_model(*parts)
    with pytest.raises(onnxkvrename.CheckError) as error:
        onnxkvrename.rename_model(model, "VLLM")
    found = [
        *error.value.findings,
        *onnxkvrename.verify(model).report.findings,
        *onnxkvrename.inspect(model).findings,
        *onnxkvrename.load_layout(model).reports[0].findings,
        *onnxkvrename.compare(model, model).findings,
    ]
    codes = [finding.code for finding in found]
    assert codes == ["KV001"] * len(codes)
    assert all(said in each.message and each.hint.endswith(hint) for each in found)
