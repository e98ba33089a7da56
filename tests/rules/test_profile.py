from __future__ import annotations

from pathlib import Path

import pytest

from onnxkvrename import RulesError
from onnxkvrename.renaming.run import check_token_change
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import PartName, SetRule, find_token_error
from onnxkvrename.rules.rewrite import rewrite_name

QEFF = load_rules()
RULES = """
description = "for the tests"
retained = '.*_out'
[[kv]]
input = '(?P<buffer>k|v)(?P<layer>[0-9]+)(?:_(?P<token>[A-Za-z0-9]+))?'
output = '(?P<buffer>k|v)(?P<layer>[0-9]+)(?:_(?P<token>[A-Za-z0-9]+))?_out'
input_name = "{buffer}{layer}[_{token}]"
output_name = "{buffer}{layer}[_{token}]_out"
[kv.kinds]
attention = ["k", "v"]
[[keep]]
reason = "vision"
pattern = "pixels"
"""


def part(table: str) -> str:
    """A table of a set's parts, before the rules that follow."""
    return f"[[set.parts]]\n{table}\n[[keep]]"


@pytest.mark.parametrize("token", ["VLLM", "a", "0", "x" * 64, "Retainedstate"])
def test_a_token_is_letters_and_digits(token: str) -> None:
    assert find_token_error(token) is None


@pytest.mark.parametrize(
    ("token", "fault"),
    [
        ("", "is empty"),
        ("V_LLM", "ASCII letters and digits"),
        ("V.1", "ASCII letters and digits"),
        ("VLLM\n", "ASCII letters and digits"),
        ("é", "ASCII letters and digits"),
        ("\u0661", "ASCII letters and digits"),
        ("aRetainedStateb", "RetainedState"),
        ("x" * 65, "longer than 64"),
    ],
)
def test_any_other_token_is_refused_with_the_reason(token: str, fault: str) -> None:
    assert fault in str(find_token_error(token))
    with pytest.raises(RulesError, match=fault) as caught:
        check_token_change(TokenChange(token))
    assert caught.value.hint == "for example VLLM"


def test_to_ask_for_no_token_and_no_strip_is_refused() -> None:
    with pytest.raises(RulesError, match="no token given") as caught:
        check_token_change(TokenChange(None))
    assert "--target" in (caught.value.hint or "")
    check_token_change(TokenChange(None, strip=True))


@pytest.mark.parametrize(
    ("side", "name", "scope", "buffer", "layer", "token"),
    [
        ("input", "past_key.0", "", "past_key", 0, ""),
        ("input", "past_value.11_VLLM", "", "past_value", 11, "VLLM"),
        ("input", "layer_5/past_key.5", "layer_5/", "past_key", 5, ""),
        ("input", "a/b/k_pe.1_X", "a/b/", "k_pe", 1, "X"),
        ("output", "compressed_kv.3_RetainedState", "", "compressed_kv", 3, ""),
        ("output", "conv_state.1_X_RetainedState", "", "conv_state", 1, "X"),
        ("output", "recurrent_state.1_InternalRetainedState", "", "recurrent_state", 1, ""),
        ("output", "é/past_key.0_RetainedState", "é/", "past_key", 0, ""),
    ],
)
def test_a_buffer_is_known_by_its_whole_name(
    side: str, name: str, scope: str, buffer: str, layer: int, token: str
) -> None:
    match = QEFF.match(side, name)
    assert match is not None
    assert match.pair_key == (scope, buffer, layer)
    assert match.token == token


@pytest.mark.parametrize(
    "name",
    [
        "",
        "past_key",
        "past_key.",
        "past_key.x",
        "past_key.01",
        "past_key.1234567",
        "past_key.\u0661",
        "past_key.0_",
        "past_key.0_A_B",
        "past_key.0\n",
        " past_key.0",
        "past_key.0/x",
        "past_keys.0",
        "my_past_key.0",
        "past_key_self.0",
        "past_key.0_RetainedState",
    ],
)
def test_a_name_that_is_nearly_a_buffer_is_none(name: str) -> None:
    assert QEFF.match("input", name) is None


@pytest.mark.parametrize(
    "raw", [b"\xff/past_key.0", b"\xed\xa0\x80/past_key.0", b"\xf4\x90\x80\x80/past_key.0"]
)
def test_bytes_that_are_no_text_do_not_upset_a_match(raw: bytes) -> None:
    name = raw.decode("utf-8", "surrogateescape")
    match = QEFF.match("input", name)
    assert match is None or rewrite_name(QEFF, match, "") == name
    assert QEFF.find_reason_to_keep(name) is None
    assert not QEFF.is_retained_name(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vision_embeds", "vision"),
        ("vision_embeds_RetainedState", "vision"),
        ("image_idx_output", "vision"),
        ("deepstack_features.1_RetainedState", "vision"),
        ("layer_0/pixel_values_InternalRetainedState", "vision"),
        ("past_repetition_penalty_buffer_RetainedState", "sampler"),
        ("past_presence_penalty_buffer", "sampler"),
        ("model.q_proj.lora_A.weight_RetainedState", "LoRA"),
        ("vision_embeds_too", None),
        ("logits", None),
    ],
)
def test_what_is_no_kv_is_kept_for_a_reason(name: str, reason: str | None) -> None:
    assert QEFF.find_reason_to_keep(name) == reason


@pytest.mark.parametrize(
    ("name", "retained"),
    [("x_RetainedState", True), ("x\n_InternalRetainedState", True), ("x_retained", False)],
)
def test_a_retained_state_is_known_by_its_suffix(name: str, retained: bool) -> None:
    assert QEFF.is_retained_name(name) is retained


@pytest.mark.parametrize(
    ("side", "name", "token", "new"),
    [
        ("input", "s/past_key.0", "VLLM", "s/past_key.0_VLLM"),
        ("input", "past_key.0_OLD", "", "past_key.0"),
        ("output", "past_key.0_RetainedState", "VLLM", "past_key.0_VLLM_RetainedState"),
        (
            "output",
            "past_key.0_OLD_InternalRetainedState",
            "X",
            "past_key.0_X_InternalRetainedState",
        ),
    ],
)
def test_the_token_goes_in_between_layer_and_suffix(
    side: str, name: str, token: str, new: str
) -> None:
    match = QEFF.match(side, name)
    assert match is not None
    assert rewrite_name(QEFF, match, token) == new


def test_normalize_gives_the_suffix_that_consumers_pair() -> None:
    match = QEFF.match("output", "past_key.0_InternalRetainedState")
    assert match is not None
    assert rewrite_name(QEFF, match, "V", normalize=True) == "past_key.0_V_RetainedState"


@pytest.mark.parametrize(
    "template",
    [
        '"{buffer}0[_{token}]_out"',
        '"{buffer}{layer}[_x{token}]_out"',
        '"k{layer}[_{token}]_out"',
        '"{layer}{buffer}[_{token}]_out"',
    ],
    ids=["loses the layer", "changes the token", "loses the buffer", "makes no buffer"],
)
def test_a_template_that_does_not_lead_back_is_refused(template: str) -> None:
    rules = parse_rules(RULES.replace('"{buffer}{layer}[_{token}]_out"', template), "mine")
    match = rules.match("output", "v1_out")
    assert match is not None
    with pytest.raises(RulesError, match="mine: output_name writes "):
        rewrite_name(rules, match, "T")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[kv]]", "[[kv]", "not TOML"),
        ("[[kv]]", "retained = 1\n[[kv]]", "not TOML"),
        ('description = "for the tests"', "a = " + "[" * 50_000, "not TOML"),
        ('description = "for the tests"', "a = " + "9" * 5_000, "not TOML"),
        ('description = "for the tests"', "description = 1", "description: must be text"),
        ('description = "for the tests"', "colour = 1", "colour: is not a known key"),
        ('description = "for the tests"', "kv = 1\n[other]", "not TOML"),
        ("retained = '.*_out'", "retained = '('", "retained: is not a regular expression"),
        ("retained = '.*_out'", "retained = '(?<x)'", "retained: is not a regular expression"),
        ("retained = '.*_out'", "retained = true", "retained: must be text"),
        ("(?P<buffer>k|v)", "(k|v)", "kv[0].input: has no group (?P<buffer>"),
        ("(?P<layer>[0-9]+)", "[0-9]+", "kv[0].input: has no group (?P<layer>"),
        (
            'input_name = "{buffer}',
            'input_name = "{scope}',
            "kv[0].input_name: {scope} is",
        ),
        ('input_name = "{buffer}', 'input_name = "{0.__class__}', "kv[0].input_name: has a {"),
        ('input_name = "{buffer}', 'input_name = "[[{buffer}]', "kv[0].input_name: has a ["),
        ('input_name = "{buffer}{layer}[_{token}]"', "", "kv[0].input_name: is missing"),
        ("[kv.kinds]", "colour = 1\n[kv.kinds]", "kv[0].colour: is not"),
        ('attention = ["k", "v"]', "", "kv[0].kinds: does not"),
        ('attention = ["k", "v"]', 'attention = "k"', "kv[0].kinds.attention: must be"),
        ('attention = ["k", "v"]', "attention = [1]", "kv[0].kinds.attention: must be"),
        ("[kv.kinds]", "kinds = 1\n[kv.other]", "kv[0].kinds: must be"),
        ("[kv.kinds]", "[kv.other]", "kv[0].kinds: is missing"),
        ('reason = "vision"', "", "keep[0].reason: is missing"),
        (
            'reason = "vision"',
            'reason = "vision"\ncolour = 1',
            "keep[0].colour: is not",
        ),
        ("[[keep]]", "[keep]", "keep: needs two brackets"),
        ("[[keep]]", "[suffixes]\na = 1\n[[keep]]", "suffixes.a: must be text"),
        ("[[keep]]", "[[feed_back]]\ninput = 'k'\n[[keep]]", "feed_back[0].call: is missing"),
        ("[[keep]]", "[[set]]\n[[keep]]", "set: must be"),
        ("[[keep]]", "[set]\ncolour = 1\n[[keep]]", "set.colour: is not"),
        ("[[keep]]", "[set]\nseam_input = 'x'\n[[keep]]", "set.seam_output: is missing"),
        ("[[keep]]", "[set]\nseam_output = 'x'\n[[keep]]", "set.seam_input: is missing"),
        ("[[keep]]", "[set]\nshared = 'x'\n[[keep]]", "set.shared: must be"),
        ("[[keep]]", "[set]\nshared = [1]\n[[keep]]", "set.shared: must be"),
        (
            "[[keep]]",
            "[set]\napart = ['mla']\n[[keep]]",
            "set.apart: mla is",
        ),
        ("[[keep]]", part("stage = 'whole'"), "set.parts[0].stage: must"),
        ("[[keep]]", part("file = 'x'"), "set.parts[0].stage: is missing"),
        ("[[keep]]", part("stage = 'window'"), "set.parts[0].file: is missing"),
        (
            "[[keep]]",
            part("stage = 'prefixed'\nfile = 'x'"),
            "parts[0].file: has no group (?P<first>",
        ),
        (
            "[[keep]]",
            part("stage = 'merged'\nfile = '(?P<first>0)'"),
            "parts[0].file: has no group (?P<end>",
        ),
        (
            "[[keep]]",
            part("stage = 'prefixed'\nfile = '(?P<first>0)'\nfolder = '('"),
            "set.parts[0].folder: is not a regular expression",
        ),
        (
            "[[keep]]",
            part("stage = 'prefixed'\nfile = '(?P<first>0)'\ncolour = 1"),
            "set.parts[0].colour: is",
        ),
    ],
)
def test_rules_that_cannot_be_used_say_where_and_why(old: str, new: str, said: str) -> None:
    assert old in RULES
    with pytest.raises(RulesError) as caught:
        parse_rules(RULES.replace(old, new), "mine.toml")
    assert str(caught.value).startswith("mine.toml: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rules_that_are_not_there_are_an_error_of_the_rules(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="no such file"):
        load_rules(path=tmp_path / "none.toml")
    with pytest.raises(RulesError) as caught:
        load_rules("nobody")
    assert "no such profile: nobody" in str(caught.value)


def test_without_retained_the_outputs_of_the_rules_count() -> None:
    rules = parse_rules(RULES.replace("retained = '.*_out'", ""), "mine")
    assert rules.is_retained_name("k1_out")
    assert not rules.is_retained_name("other_out")


@pytest.mark.parametrize("text", ["", "kv = []\nretained = 'x'", "retained = 'x'"])
def test_rules_without_a_kv_rule_are_refused(text: str) -> None:
    with pytest.raises(RulesError, match="kv: is missing"):
        parse_rules(text, "mine.toml")


def test_tables_must_be_tables() -> None:
    with pytest.raises(RulesError, match="kv: must be"):
        parse_rules("kv = [3]", "mine.toml")


def test_a_layer_too_long_to_be_one_is_no_match() -> None:
    rules = parse_rules(RULES, "mine")
    assert rules.match("input", "k" + "1" * 9) is not None
    assert rules.match("input", "k" + "1" * 10) is None


def test_the_call_that_feeds_back_goes_by_what_the_model_takes() -> None:
    call = QEFF.format_feed_back_call(["input_ids"], "m.onnx", "VLLM")
    assert call == 'model.compile(onnx_path="m.onnx", kv_cache_prefix="VLLM")'
    call = QEFF.format_feed_back_call(["input_ids", "vision_embeds"], "m.onnx", "VLLM")
    assert call == 'model.compile(lang_onnx_path="m.onnx", kv_cache_prefix="VLLM")'
    assert parse_rules(RULES, "mine").format_feed_back_call(["k0"], "m.onnx", "VLLM") is None


def part_name(file: str) -> PartName | None:
    """Parse the name of a file by the first rule that matches it."""
    names = (rule.match(file) for rule in QEFF.set_rule.part_rules)
    return next((name for name in names if name is not None), None)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("N_layer_tmp_0_1.onnx", PartName("window", "N", 0, 1)),
        ("a b_layer_tmp_5_layer_tmp_5_10.onnx", PartName("window", "a b_layer_tmp_5", 5, 10)),
        ("N\n_layer_tmp_7_3.onnx", PartName("window", "N\n", 7, 3)),
        ("pref_999999.onnx", PartName("prefixed", "", 999_999, None)),
        ("merged_3-12.onnx", PartName("merged", "", 3, 12)),
        ("merged_3-012.onnx", None),
        ("merged_3-1000000.onnx", None),
        ("merged_\u0661-2.onnx", None),
        ("pref_.onnx", None),
        ("pref_1.onnx\n", None),
        ("Pref_1.onnx", None),
        ("layer_0_1", None),
    ],
)
def test_the_name_of_a_part_says_its_layers(file: str, name: PartName | None) -> None:
    assert part_name(file) == name


def test_a_part_whose_layers_are_no_numbers_is_none() -> None:
    table = "stage = 'window'\nfile = '(?P<first>[^-]*)-(?P<end>[^-]*)'"
    (rule,) = parse_rules(RULES.replace("[[keep]]", part(table)), "mine").set_rule.part_rules
    assert rule.match("0-1") == PartName("window", "", 0, 1)
    assert rule.match("0-") == PartName("window", "", 0, None)
    assert [rule.match(file) for file in ("-1", "0-x", "x-1", "0-1-2", f"0-{'1' * 10}")] == [
        None
    ] * 5


def test_a_set_says_what_its_parts_have_in_common() -> None:
    assert (QEFF.set_rule.seam, QEFF.set_rule.shared_inputs) == (
        ("logits", "inputs_embeds"),
        ("position_ids",),
    )
    assert QEFF.set_rule.exclusive_kinds == {"attention", "mla"}
    assert parse_rules(RULES, "mine").set_rule == SetRule()
    assert parse_rules(RULES.replace("[[keep]]", "[set]\n[[keep]]"), "mine").set_rule == SetRule()


def test_a_profile_says_how_buffers_are_meant_to_be_updated() -> None:
    kinds = "[kv.kinds]"
    assert parse_rules(RULES, "r").updates_by_kind == {"attention": ""}
    whole = RULES.replace("[[kv]]", 'update = "append"\n[[kv]]', 1)
    assert parse_rules(whole, "r").updates_by_kind == {"attention": "append"}
    one_kind = whole.replace(kinds, f'update = {{ attention = "delta" }}\n{kinds}')
    assert parse_rules(one_kind, "r").updates_by_kind == {"attention": "delta"}
    for wrong, said in (
        ('update = "grows"', "update: must be one of inplace, append, delta, once"),
        ("update = 3", "update: must be text"),
    ):
        with pytest.raises(RulesError, match=said):
            parse_rules(RULES.replace("[[kv]]", f"{wrong}\n[[kv]]", 1), "r")
    for key, value in (("update", '{ mla = "once" }'), ("by_shape", '["mla"]')):
        with pytest.raises(RulesError, match=f"{key}: mla is"):
            parse_rules(RULES.replace(kinds, f"{key} = {value}\n{kinds}"), "r")


KV_TABLE = r"""
[[kv]]
input = 'past_(?P<buffer>key|value)\.(?P<layer>[0-9]+)(?:_(?P<token>[A-Za-z0-9]+))?'
output = 'past_(?P<buffer>key|value)\.(?P<layer>[0-9]+)(?:_(?P<token>[A-Za-z0-9]+))?_out'
input_name = "past_{buffer}.{layer}[_{token}]"
output_name = "past_{buffer}.{layer}[_{token}]_out"
kinds = { attention = ["key", "value"] }
"""


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        (
            r"[0-9]+)(?:_(?P<token>[A-Za-z0-9]+))?'",
            "[0-9]+)'",
            "kv[0].input: has no group (?P<token>…)",
            "(?:_(?P<token>[A-Za-z0-9]+))?",
        ),
        (
            '"past_{buffer}.{layer}[_{token}]"',
            '"past_{buffer}.{layer}"',
            "kv[0].input_name: must contain",
            'input_name = "past.{layer}.{buffer}[_{token}]"',
        ),
        (
            '"past_{buffer}.{layer}[_{token}]"',
            '"past_{buffer}.{layer}_{token}"',
            "kv[0].input_name: must contain",
            'input_name = "past.{layer}.{buffer}[_{token}]"',
        ),
        ("input =", "inputs =", "kv[0].inputs: is not", ""),
        ("[[kv]]", "[kv]", "kv: needs two brackets", ""),
        ("kv", "kvs", "kvs: is not", ""),
        ("(?P<buffer>key", "(?P<buffer>(key", "kv[0].input: is n", "input = 'past"),
        ("'past", '"past', "not TOML: ", "single quotes"),
        ("{ attention =", "[] #", "kv[0].kinds: must be a table of lists", "as in kinds = { att"),
        ('["key", "value"]', '"key"', "kv[0].kinds.attention: must", "as in k"),
    ],
)
def test_a_mistake_in_rules_names_the_place_and_shows_what_is_expected(
    old: str, new: str, message: str, hint: str
) -> None:
    parse_rules(KV_TABLE, "mine.toml")
    with pytest.raises(RulesError) as raised:
        parse_rules(KV_TABLE.replace(old, new, 1), "mine.toml")
    assert raised.value.path == "mine.toml"
    assert raised.value.message.startswith(message)
    assert hint in str(raised.value.hint)
    assert str(raised.value.hint).endswith("docs/rules.md explains each key")
