from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import models
import pytest
from models import KEY, KEY_OUT, branch, graph, info, node, tensor
from onnx import ModelProto
from onnx.helper import make_sparse_tensor, make_tensor

from onnxkvrename import Finding, load_rules, rename
from onnxkvrename.handoff.find_consumers import list_consumers, load_consumer
from onnxkvrename.model.signature import Dim, NameUses, Signature, Value
from onnxkvrename.rules.check_together import build_no_buffers_finding
from onnxkvrename.rules.checks import CONSUMER_TOKENS, check_model
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import TokenChange, build_rename_plan

QEFF = load_rules()


def value(text: str) -> Value:
    """``name:DTYPE[1,symbol,?]``; without the brackets the rank is unknown."""
    name, _, kind = text.replace("~", "_RetainedState").partition(":")
    dtype, bracket, dims = kind.rstrip("]").partition("[")
    known: dict[str, Dim] = {"?": None}
    shape = [int(dim) if dim.isdigit() else known.get(dim, dim) for dim in dims.split(",") if dim]
    return Value(name, dtype or "FLOAT", tuple(shape) if bracket else None)


def found(
    inputs: str,
    outputs: str,
    *,
    read: Iterable[str] | None = None,
    producers: Iterable[str] | None = None,
    symbols: Iterable[str] = (),
    **wish: bool,
) -> list[str]:
    """``CODE name`` of each finding; ``~`` stands for ``_RetainedState``.

    Inputs are all read, and outputs all produced, if nothing else is said.
    """
    into, out = (tuple(map(value, text.split())) for text in (inputs, outputs))
    made = [v.name for v in out] if producers is None else producers
    uses = NameUses(
        producer_op_types=dict.fromkeys(made, "Concat"),
        read_names=frozenset(v.name for v in into) if read is None else frozenset(read),
        symbols=frozenset(symbols),
    )
    signature = Signature(into, out)
    planned = build_rename_plan(signature, QEFF, TokenChange("VLLM", **wish))
    findings = check_model(signature, planned, uses)
    return [f"{f.code} {f.name}".replace("_RetainedState", "~").strip() for f in findings]


SOUND = ("past_key.0 past_value.0", "logits past_key.0~ past_value.0~")


def test_a_sound_model_has_no_findings() -> None:
    assert found(*SOUND) == []


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ("past_value.0", "past_key.0~ past_value.0~", "KV101 past_key.0~"),
        ("k_pe.0 a/compressed_kv.0", "k_pe.0~ a/compressed_kv.0~ b/k_pe.0~", "KV101 b/k_pe.0~"),
        ("past_key.0 past_value.0", "past_key.0~", "KV102 past_value.0"),
        ("past_key.0 past_value.0:INT8", "past_key.0~ past_value.0~", "KV103 past_value.0~"),
        ("k_pe.0:F[1,a,2] compressed_kv.0", "k_pe.0~:F[1,a,3] compressed_kv.0~", "KV104 k_pe.0~"),
        ("k_pe.0:F[1,b,2,2] compressed_kv.0", "k_pe.0~:F[1,b,2] compressed_kv.0~", "KV104 k_pe.0~"),
        ("k_pe.0:F[1,b] compressed_kv.0", "k_pe.0~:F[1,b] compressed_kv.0~", "KV125 k_pe.0"),
        ("k_pe.0:F compressed_kv.0", "k_pe.0~:F[] compressed_kv.0~", "KV125 k_pe.0~"),
        ("past_key.0 past_value.0", "past_key.0~ past_key.0~ past_value.0~", "KV106 past_key.0~"),
        ("past_key.0 past_key.0 past_value.0", "past_key.0~ past_value.0~", "KV106 past_key.0"),
        ("k_pe.0 k_pe.0_VLLM compressed_kv.0", "k_pe.0~ compressed_kv.0~", "KV106 k_pe.0_VLLM"),
        ("past_key.0", "past_key.0~", "KV108 past_key.0"),
        ("conv_state.0 conv_state.1 recurrent_state.1",
         "conv_state.0~ conv_state.1~ recurrent_state.1~", "KV108 conv_state.0"),
        ("past_key.0 conv_state.1 recurrent_state.1 past_value.0",
         "past_key.0~ past_value.0~ recurrent_state.1~ conv_state.1~ x~", "KV111 x~"),
        ("k_pe.0 compressed_kv.0 k_pe.2 compressed_kv.2",
         "k_pe.0~ compressed_kv.0~ k_pe.2~ compressed_kv.2~", "KV109"),
        ("k_pe.0 compressed_kv.0", "k_pe.0_Internal~ compressed_kv.0~", "KV112 k_pe.0_Internal~"),
    ],
)  # fmt: skip
def test_a_fault_is_found_alone_and_by_name(inputs: str, outputs: str, expected: str) -> None:
    outputs = outputs.replace("_Internal~", "_InternalRetainedState")
    expected = expected.replace("_Internal~", "_InternalRetainedState")
    assert found(inputs, outputs) == [expected]


def tell(
    inputs: str, outputs: str, uses: NameUses | None = None, **wish: bool
) -> dict[str, tuple[str, str]]:
    """The message and the hint of the last finding of each code."""
    signature = Signature(*(tuple(map(value, text.split())) for text in (inputs, outputs)))
    plan = build_rename_plan(signature, QEFF, TokenChange("VLLM", **wish))
    if uses is None:
        names = {item.name for side in signature for item in side}
        uses = NameUses(dict.fromkeys(names, "Concat"), frozenset(names))
    return {item.code: (item.message, item.hint) for item in check_model(signature, plan, uses)}


PAIR = "past_key.0 past_value.0"
RETAINED = "past_key.0~ past_value.0~"
TOKENS = "past_key.0_VLLM~ past_value.0_VLLM~"
INTERNAL = "past_key.0_InternalRetainedState"
GAPS = " ".join(f"{part}.{n}" for n in (0, 2, 5) for part in ("past_key", "past_value"))


@pytest.mark.parametrize(
    ("inputs", "outputs", "code", "said", "hint"),
    [
        ("past_value.0", RETAINED, "KV101", "past_key of layer 0", "export"),
        (PAIR, "past_key.0~", "KV102", "past_value of layer 0", "export"),
        ("past_key.0 past_value.0:I", "past_key.0~ past_value.0~:F", "KV103",
         "input past_value.0 is I", "memory"),
        ("past_key.0:F[1,1,2] past_value.0", "past_key.0~:F[1,1,3] past_value.0~", "KV104",
         "past_key.0 is [1, 1, 2]", "memory"),
        (PAIR, f"past_key.0~ {RETAINED}", "KV106", "graph output", "export"),
        (f"{PAIR} past_key.0", RETAINED, "KV106", "graph input", "export"),
        ("past_key.0_OLD past_key.0_VLLM past_value.0", RETAINED, "KV106",
         "same buffer as past_key.0_OLD", "[[keep]]"),
        ("past_key.0", "past_key.0~", "KV108", "layer 0 has no past_value", "all parts"),
        (GAPS, GAPS.replace(" ", "~ ") + "~", "KV109", "layers 1, 3-4", "have no cache"),
        (PAIR, f"{RETAINED} x~", "KV111", "not renamed", "--rules FILE"),
        (PAIR, f"{INTERNAL} past_value.0~", "KV112", "its input", "--normalize"),
        (PAIR, f"{INTERNAL} past_value.0_InternalRetainedState", "KV112",
         f"2 names (first: {INTERNAL})", "--normalize"),
        ("past_key.0_OLD past_value.0_OLD", "past_key.0_OLD~ past_value.0_OLD~", "KV202",
         "4 names (first: past_key.0_OLD)", "--replace"),
    ],
)  # fmt: skip
def test_a_finding_says_what_is_wrong_and_how_to_fix_it(
    inputs: str, outputs: str, code: str, said: str, hint: str
) -> None:
    message, advice = tell(inputs, outputs)[code]
    assert said in message
    assert hint in advice


@pytest.mark.parametrize(
    ("names", "code", "said", "hint"),
    [
        ((PAIR, RETAINED), "KV105", "not produced", "again"),
        ((PAIR, RETAINED), "KV107", "not read", "harmless only if"),
        ((TOKENS, TOKENS), "KV106", "both", "without the token"),
    ],
)
def test_a_buffer_that_no_node_knows_is_found(
    names: tuple[str, str], code: str, said: str, hint: str
) -> None:
    message, advice = tell(*names, NameUses())[code]
    assert said in message
    assert hint in advice


PATTERN_RULES = """
[[kv]]
kind = "attention"
input = 'in_{layer}_(?P<part>k|v){token}'
output = 'outs?_{layer}_{part}{token}'
"""


def test_rules_of_ones_own_may_be_wrong_where_a_side_is_missing() -> None:
    rules = parse_rules(PATTERN_RULES, "mine.toml")
    signature = Signature(*(tuple(map(value, t.split())) for t in ("in_0_k in_0_v", "out_0_k x")))
    plan = build_rename_plan(signature, rules, TokenChange("VLLM"))
    (finding,) = [f for f in check_model(signature, plan, NameUses()) if f.code == "KV102"]
    assert finding.name == "in_0_v"
    assert "patterns of your rules" in finding.hint
    _, hint = tell("past_key.0 past_value.0", "past_key.0~")["KV102"]
    assert "patterns" not in hint


def test_a_new_name_that_is_taken_is_said_with_its_use() -> None:
    names = ("past_key.0 past_value.0", "past_key.0~ past_value.0~")
    ends = " ".join(names).replace("~", "_RetainedState").split()
    plain = NameUses(dict.fromkeys(ends, "Concat"), frozenset(ends))
    for use in ("a value", "a value in a subgraph"):
        place = "hidden_names" if "subgraph" in use else "taken_names"
        message, hint = tell(*names, plain._replace(**{place: {"past_key.0_VLLM": use}}))["KV201"]
        assert f"already {use}" in message
        assert "rename that value" in hint
    symbols = (f"Concatpast_key.0{token}_RetainedState_dim_2" for token in ("", "_VLLM"))
    message, hint = tell(*names, plain._replace(symbols=frozenset(symbols)))["KV201"]
    assert "already a dimension" in message
    assert "rename that dimension" in hint


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ("past_key.0:F[b,c,8] past_value.0", "past_key.0~:F[d,e,8] past_value.0~"),
        ("past_key.0:F[b,8,8] past_value.0", "past_key.0~:F[1,c,8] past_value.0~"),
        ("past_key.0:F[1,?,8] past_value.0", "past_key.0~:F[1,4,8] past_value.0~"),
        ("past_key.0:F past_value.0", "past_key.0~:F[1,4,8] past_value.0~"),
        ("conv_state.0:F[b,8] recurrent_state.0:F[]", "conv_state.0~:F recurrent_state.0~:F"),
        ("past_value.0_VLLM past_key.0", "past_key.0_VLLM~ past_value.0~"),
        ("past_key.7 past_value.7", "past_key.7~ past_value.7~"),
        ("input_ids x x past_key.0 past_value.0", "y y past_key.0~ past_value.0~"),
        ("past_key.0 past_value.0 vision_embeds", "past_key.0~ past_value.0~ vision_embeds~"),
        ("k_pe.0 compressed_kv.0 past_key.1 past_value.1",
         "k_pe.0~ compressed_kv.0~ past_key.1~ past_value.1~"),
    ],
)  # fmt: skip
def test_what_only_looks_like_a_fault_is_none(inputs: str, outputs: str) -> None:
    assert found(inputs, outputs) == []


def test_few_axes_are_no_error_under_rules_of_ones_own() -> None:
    values = tuple(value(f"past_{part}.0:F[1,b]") for part in ("key", "value"))
    outputs = tuple(each._replace(name=f"{each.name}_RetainedState") for each in values)
    codes = {}
    for is_built_in in (True, False):
        signature, rules = Signature(values, outputs), QEFF._replace(is_built_in=is_built_in)
        plan = build_rename_plan(signature, rules, TokenChange("VLLM"))
        codes[is_built_in] = {f.code for f in check_model(signature, plan, NameUses())}
    assert "KV125" in codes[True] - codes[False]


def test_a_retained_output_must_be_produced_by_a_node() -> None:
    produced = ["past_value.0_RetainedState"]
    assert found(*SOUND, producers=produced) == ["KV105 past_key.0~"]


def test_a_kv_input_that_nothing_reads_is_mentioned() -> None:
    assert found(*SOUND, read=["past_key.0"]) == ["KV107 past_value.0"]


def test_one_name_for_input_and_output_is_the_broken_export_of_dynamo() -> None:
    names = "past_key.0_VLLM~ past_value.0_VLLM~"
    assert found(names, names, producers=()) == [
        "KV106 past_key.0_VLLM~",
        "KV106 past_value.0_VLLM~",
    ]


def test_normalize_mends_the_suffix_instead_of_minding_it() -> None:
    outputs = "past_key.0_InternalRetainedState past_value.0~"
    assert found(SOUND[0], outputs, normalize=True) == []


@pytest.mark.parametrize(
    ("wish", "codes"),
    [
        ({}, ["KV202 past_key.0_OLD"]),
        ({"replace": True}, []),
        ({"strip": True}, ["KV202 past_key.0_OLD"]),
        ({"strip": True, "replace": True}, []),
    ],
)
def test_another_token_is_refused_once_unless_replaced(
    wish: dict[str, bool], codes: list[str]
) -> None:
    names = "past_key.0_OLD past_value.0_OLD", "past_key.0_OLD~ past_value.0_OLD~"
    assert found(*names, **wish) == codes


def test_a_symbol_may_not_become_one_with_another() -> None:
    old, new = (f"Concatpast_key.0{token}_RetainedState_dim_2" for token in ("", "_VLLM"))
    assert found(*SOUND, symbols=[old]) == []
    assert found(*SOUND, symbols=[old, new]) == [f"KV201 {new.replace('_RetainedState', '~')}"]


def test_symbols_may_change_places() -> None:
    signature = Signature(*(tuple(map(value, names.split())) for names in SOUND))
    ends = {v.name for side in signature for v in side}
    uses = NameUses(dict.fromkeys(ends, "Neg"), frozenset(ends), frozenset({"a", "b"}))
    planned = build_rename_plan(signature, QEFF, TokenChange("VLLM"))
    assert list(check_model(signature, planned, uses)) == []


def test_two_values_may_not_get_one_name() -> None:
    """Where both sides have one pattern, their tokens alone tell them apart."""
    rules = parse_rules(
        """
        [[kv]]
        name = "one"
        input = 'k{layer}{token}'
        output = '{input}'
        part = "k"
        """,
        "mine",
    )
    signature = Signature((value("k0"),), (value("k0_A"),))
    plan = build_rename_plan(signature, rules, TokenChange("T", replace=True))
    uses = NameUses({"k0_A": "Add"}, frozenset({"k0"}))
    clash = next(each for each in check_model(signature, plan, uses) if each.code == "KV201")
    assert clash.name == "k0_T"
    assert "k0, k0_A" in clash.message


AMBIGUOUS_RULES = r"""
retained = '.*_out'
[[kv]]
kind = "attention"
input = '{part}[.]{layer}{token}'
output = '{input}_out'
"""


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_that_passes_for_another_with_a_token_is_told_until_a_rule_excludes_it(
    order: int,
) -> None:
    names = [
        f"{part}.{n}{end}" for part in ("key", "value") for n in (0, 11) for end in ("", "_scale")
    ]
    inputs = tuple(value(name) for name in names[::order])
    signature = Signature(inputs, tuple(value(f"{item.name}_out") for item in inputs))

    def check(text: str) -> list[Finding]:
        plan = build_rename_plan(signature, parse_rules(text, "mine"), TokenChange("T"))
        return list(check_model(signature, plan, NameUses()))

    findings = [finding for finding in check(AMBIGUOUS_RULES) if finding.code == "KV106"]
    assert {finding.name for finding in findings} == {
        name for item in inputs if "scale" in item.name for name in (item.name, f"{item.name}_out")
    }
    assert "token scale" in findings[0].message
    keep = "\n[[keep]]\nreason = 'scale'\npattern = '.*_scale(_out)?'\n"
    assert "KV106" not in {finding.code for finding in check(AMBIGUOUS_RULES + keep)}


def test_no_buffers_lists_a_few_of_the_outputs() -> None:
    message = build_no_buffers_finding([f"o{n}" for n in range(7)]).message
    assert message.endswith("o0, o1, o2, o3, o4 and 2 more")
    nothing = build_no_buffers_finding([])
    assert "model has no outputs" in nothing.message


# The same checks at work on whole models.

NEW, NEW_OUT = "past_key.0_VLLM", "past_key.0_VLLM_RetainedState"


def codes(model: ModelProto, tmp_path: Path, **options: bool) -> list[tuple[str, str, str]]:
    """Code, severity and name of each finding."""
    path = models.saved(model, tmp_path / "model.onnx")
    findings = rename(path, "VLLM", dry_run=True, **options).findings
    return [(f.code, f.severity, f.name) for f in findings]


def test_a_buffer_that_is_passed_through_or_only_captured_is_in_order(tmp_path: Path) -> None:
    model = models.decoder(branch(graph(node("Neg", [KEY], ["inner"]))))
    model.graph.node[0].CopyFrom(node("Identity", ["past_key.0"], [KEY_OUT]))
    assert codes(model, tmp_path) == []
    model.graph.node[0].CopyFrom(node("Identity", ["x"], [KEY_OUT]))
    assert codes(model, tmp_path) == []
    model.graph.node.pop()
    assert codes(model, tmp_path) == [("KV107", "warning", KEY)]


def test_strict_makes_warnings_errors(tmp_path: Path) -> None:
    model = models.decoder()
    model.graph.output.append(info("mystery_RetainedState"))
    assert codes(model, tmp_path) == [("KV111", "warning", "mystery_RetainedState")]
    assert codes(model, tmp_path, strict=True) == [("KV111", "error", "mystery_RetainedState")]


def in_input(model: ModelProto) -> None:
    model.graph.input.append(info(NEW))


def in_output(model: ModelProto) -> None:
    model.graph.output.append(info(NEW))


def in_value_info(model: ModelProto) -> None:
    model.graph.value_info.append(info(NEW))


def in_node_input(model: ModelProto) -> None:
    model.graph.node.append(node("Neg", [NEW], ["y"]))


def in_node_output(model: ModelProto) -> None:
    model.graph.node.append(node("Neg", ["x"], [NEW]))


def in_initializer(model: ModelProto) -> None:
    model.graph.initializer.append(tensor(NEW, 1.0))


def in_sparse_initializer(model: ModelProto) -> None:
    indices = make_tensor("", 7, [1], [0])
    model.graph.sparse_initializer.append(make_sparse_tensor(tensor(NEW, 1.0), indices, [4]))


def in_annotation(model: ModelProto) -> None:
    model.graph.quantization_annotation.add(tensor_name=NEW)


def in_sharding(model: ModelProto) -> None:
    model.graph.node[0].device_configurations.add().sharding_spec.add(tensor_name=NEW)


def in_training(model: ModelProto) -> None:
    model.training_info.add().algorithm.node.append(node("Neg", ["x"], [NEW]))


def in_subgraph(model: ModelProto) -> None:
    model.graph.node.append(branch(graph(node("Neg", ["x"], [NEW]))))


def in_subgraph_of_subgraph(model: ModelProto) -> None:
    inner = branch(graph(node("Neg", ["x"], [NEW_OUT]), name="deep"), name="inner")
    model.graph.node.append(branch(graph(inner)))


def in_subgraph_initializer(model: ModelProto) -> None:
    body = graph(node("Neg", [NEW], ["y"]))
    body.initializer.append(tensor(NEW, 1.0))
    model.graph.node.append(branch(body))


HIDDEN = " in a subgraph"


@pytest.mark.parametrize(
    ("stand", "use"),
    [
        (in_input, "a graph input"),
        (in_output, "a graph output"),
        (in_value_info, "a name in value_info"),
        (in_node_input, "an input of a Neg node"),
        (in_node_output, "an output of a Neg node"),
        (in_initializer, "an initializer"),
        (in_sparse_initializer, "an initializer"),
        (in_annotation, "a name in annotation"),
        (in_sharding, "a name in sharding"),
        (in_training, f"an output of a Neg node{HIDDEN}"),
        (in_subgraph, f"an output of a Neg node{HIDDEN}"),
        (in_subgraph_of_subgraph, f"an output of a Neg node{HIDDEN}"),
        (in_subgraph_initializer, f"an initializer{HIDDEN}"),
    ],
)
def test_a_new_name_that_stands_anywhere_is_a_collision(stand, use: str, tmp_path: Path) -> None:
    model = models.decoder()
    stand(model)
    path = models.saved(model, tmp_path / "model.onnx")
    findings = rename(path, "VLLM", dry_run=True).findings
    (message,) = [finding.message for finding in findings if finding.code == "KV201"]
    assert message.partition(";")[0] == f"is already {use}"


def test_a_new_name_may_stand_in_a_function_or_in_another_namespace(tmp_path: Path) -> None:
    model = models.decoder(node("Neg", ["x"], ["y"], name=NEW, doc_string=NEW))
    model.graph.name = NEW
    model.metadata_props.add(key=NEW, value=NEW_OUT)
    function = model.functions.add(name=NEW, domain="local", input=[NEW], output=[NEW_OUT])
    function.node.append(node("Neg", [NEW], [NEW_OUT]))
    assert codes(model, tmp_path) == []


def test_every_finding_says_what_and_how_to_mend_it() -> None:
    finding = build_no_buffers_finding(["logits"])
    assert finding == Finding("KV001", "error", "", finding.message, finding.hint)
    assert finding.hint


def test_a_model_whose_linear_layers_have_one_part_only_lacks_none() -> None:
    assert found("conv_state.0 conv_state.1", "conv_state.0~ conv_state.1~ logits") == []


def test_capitals_of_a_known_consumers_token_matter(decoder: Path, run) -> None:
    outcome = run(decoder, "--prefix", "VLLMKVCACHE", "--check", "-q")
    assert ("warning KV204: the token VLLMKVCACHE") in outcome.err
    assert run(decoder, "--prefix", "vllmkvcache", "-q").code == 0
    assert "warning KV204: the token vllmkvcache" in run("verify", decoder).err
    for token in ("vllmKvCache", "VLLM", "vllm"):
        assert "KV204" not in run(decoder, "--prefix", token, "--replace", "--check").err
    assert "KV204" not in run(decoder, "--strip", "--check").err


def test_the_tokens_of_all_known_consumers_are_compared() -> None:
    tokens = {load_consumer(name).token for name in list_consumers()} - {""}
    assert {token for token, _ in CONSUMER_TOKENS.values()} == tokens
    assert all(key == token.lower() for key, (token, _) in CONSUMER_TOKENS.items())
