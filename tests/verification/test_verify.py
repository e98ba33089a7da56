from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import models
import onnx
import pytest
import window_sets
from models import KEY, KEY_OUT, VALUE, VALUE_OUT, info, node, saved
from onnx import ModelProto
from onnx.helper import make_tensor

from onnxkvrename import ModelError, RulesError, load_rules
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import build_minimal_plan
from onnxkvrename.verification.verify import (
    VerifiedModel,
    VerifyRequest,
    prove_retention,
    verify_model,
    verify_window_sets,
)

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
QEFF = load_rules()


def verify(*paths: Path, **aim: object) -> tuple[VerifiedModel, ...]:
    """Each model, and all together."""
    asked = VerifyRequest(**aim)  # type: ignore[arg-type]
    found = [verify_model(path, QEFF, asked) for path in paths]
    return verify_window_sets(found, QEFF, asked)


def codes(*paths: Path, **aim: object) -> list[str]:
    """The findings of all models, in order."""
    return [found.code for item in verify(*paths, **aim) for found in item.report.findings]


def told(path: Path, **aim: object) -> list[str]:
    """The findings of one model, as they are worded."""
    (item,) = verify(path, **aim)
    return [
        " ".join(filter(None, (found.code, found.subject, found.message)))
        for found in item.report.findings
    ]


def changed(tmp_path: Path, names: dict[str, str], model: ModelProto | None = None) -> Path:
    """The decoder under other names, as an exporter might have written it."""
    model = model or models.decoder()
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for item in model.graph.node:
        item.input[:] = [names.get(name, name) for name in item.input]
        item.output[:] = [names.get(name, name) for name in item.output]
    return saved(model, tmp_path / "m.onnx")


def tokens(into: str = "", out: str = "", *buffers: str) -> dict[str, str]:
    """Names with a token on inputs, and one on outputs; of all buffers, or some."""
    given, made = (f"_{token}" if token else "" for token in (into, out))
    buffers = buffers or (KEY, VALUE)
    inputs = {name: f"{name}{given}" for name in buffers}
    return inputs | {f"{name}_RetainedState": f"{name}{made}_RetainedState" for name in buffers}


# What is proved of every model.


def swapped(model: ModelProto) -> None:
    """Key and value change places, though every name looks right."""
    names = {KEY_OUT: VALUE_OUT, VALUE_OUT: KEY_OUT}
    for item in model.graph.node:
        item.output[:] = [names.get(name, name) for name in item.output]


def unwritten(model: ModelProto) -> None:
    model.graph.node[0].CopyFrom(node("Identity", [KEY], [KEY_OUT]))


def opaque(model: ModelProto) -> None:
    model.graph.node[0].CopyFrom(node("Mystery", [KEY, "x"], [KEY_OUT], domain="local"))


def unsound(model: ModelProto) -> None:
    model.graph.node[2].input.append("nowhere")


def unknown(model: ModelProto) -> None:
    model.graph.node[2].op_type = "NoSuchOperator"


def unpaired(model: ModelProto) -> None:
    model.graph.output.pop()


def without_data(model: ModelProto) -> None:
    weight = model.graph.initializer.add(name="w", data_type=1, dims=[4], data_location=1)
    weight.external_data.add(key="location", value="nowhere.bin")


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (swapped, "KV110"),
        (opaque, "KV113"),
        (unwritten, "KV114"),
        (unsound, "KV115"),
        (unknown, "KV123"),
        (unpaired, "KV102"),
        (without_data, "KV502"),
    ],
)
def test_what_is_wrong_with_a_model_is_found(
    fault: Callable[[ModelProto], None], code: str, tmp_path: Path
) -> None:
    model = models.decoder()
    fault(model)
    (item,) = verify(saved(model, tmp_path / "m.onnx"))
    assert code in {found.code for found in item.report.findings}
    warning = code in {"KV113", "KV114", "KV123"}
    assert item.report.status == ("unchanged" if warning else "failed")
    (item,) = verify(Path(item.report.path), strict=True)
    assert item.report.status == "failed"


def test_the_proof_is_of_bytes_wherever_they_are() -> None:
    model = models.decoder()
    pairs = build_minimal_plan(signature(model), QEFF).pairs
    assert prove_retention(ByteSource.from_bytes(model.SerializeToString()), pairs)[1] == ()
    swapped(model)
    flows, findings = prove_retention(ByteSource.from_bytes(model.SerializeToString()), pairs)
    assert [flow.verdict for flow in flows] == ["not from its input"] * 2
    assert [found.code for found in findings] == ["KV110", "KV110"]
    with pytest.raises(ModelError, match="parsed by onnx"):
        prove_retention(ByteSource.from_bytes(b"\x3a\x02\xff\xff"), pairs)


def signature(model: ModelProto):
    """Return the signature of a model."""
    return read_signature(ByteSource.from_bytes(model.SerializeToString()))


def test_a_model_that_cannot_be_read_has_an_error_instead(tmp_path: Path) -> None:
    text = saved(b"text", tmp_path / "text.onnx")
    for path, said in ((text, "is a text file"), (tmp_path / "none.onnx", "no such file")):
        (item,) = verify(path)
        assert said in str(item.report.error)
        assert (item.report.status, item.report.findings) == ("failed", ())


def test_rules_that_could_not_be_undone_are_an_error_of_the_rules(tmp_path: Path) -> None:
    lossy = parse_rules(
        r"""
        retained = '.*'
        [[kv]]
        kind = "attention"
        input = '(?P<part>past_key)\.{layer}(?P<token>(?:_X)?)'
        output = '(?P<part>past_key)\.{layer}{token}_RetainedState'
        """,
        "lossy",
    )
    path = changed(tmp_path, tokens("", "T"))
    with pytest.raises(
        RulesError, match=r"lossy: kv\[0\]\.input: .* would become .* does not read as"
    ):
        verify_model(path, lossy, VerifyRequest())


# Tokens.


@pytest.mark.parametrize(
    ("names", "token"),
    [
        ({}, None),
        (tokens("VLLM", "VLLM"), None),
        (tokens("VLLM", "VLLM"), "VLLM"),
        (tokens("VLLM", "VLLM") | {"logits": "vllm_logits"}, "VLLM"),
        ({"logits": "VLLM_logits"}, None),
    ],
    ids=["no token at all", "one", "the one asked for", "other case", "a name, but no token"],
)
def test_a_token_on_every_pair_and_nowhere_else_is_no_finding(
    names: dict[str, str], token: str | None, tmp_path: Path
) -> None:
    assert codes(changed(tmp_path, names), token=token) == []


@pytest.mark.parametrize(
    ("names", "token", "said"),
    [
        ({}, "VLLM", f"4 names (first: {KEY}) of 4"),
        (tokens("VLLM"), None, f"2 names (first: {KEY}_VLLM) have VLLM on one side"),
        (tokens("", "VLLM"), "VLLM", f"2 names (first: {KEY}) of 4"),
        (
            tokens("V", "V", KEY),
            None,
            f"2 names (first: {VALUE}) of 4",
        ),
        (
            tokens("V", "V"),
            "VLLM",
            f"4 names (first: {KEY}_V) of 4",
        ),
        (
            tokens("VLLM", "VLLM") | {"logits": "VLLM_logits"},
            "VLLM",
            "VLLM_logits contains VLLM",
        ),
        (
            tokens("VLLM", "VLLM") | {"x": "my_VLLM", "logits": "aVLLMa"},
            None,
            "2 names (aVLLMa, my_VLLM)",
        ),
    ],
    ids=[
        "none",
        "inputs only",
        "outputs only",
        "one buffer only",
        "another token",
        "on an output too",
        "on others too",
    ],
)
def test_a_token_that_is_missing_or_on_something_else_is_found(
    names: dict[str, str], token: str | None, said: str, tmp_path: Path
) -> None:
    found = told(changed(tmp_path, names), token=token)
    assert any(line.startswith(f"KV116 {said}") for line in found)


def test_a_model_is_taken_to_mean_the_token_that_most_names_carry(tmp_path: Path) -> None:
    model = onnx.load(FIXTURES / "VLLM" / "decoder.onnx")
    odd = {"past_value.1_VLLM": "past_value.1_X"}
    found = told(changed(tmp_path, odd, model))
    assert "KV116 past_value.1_X" in found[0]
    assert "VLLM, but X" in found[0]
    assert len(found) == 1


# Several models.


def encoder(path: Path) -> Path:
    """A model without a KV buffer."""
    return Path(shutil.copyfile(FIXTURES / "plain" / "vlm_dual" / "encoder.onnx", path))


def test_no_buffer_in_any_model_is_a_finding(tmp_path: Path) -> None:
    lone = encoder(tmp_path / "a.onnx")
    assert codes(lone) == ["KV001"]
    assert "the outputs are vision_embeds, deepstack" in told(lone)[0]
    assert codes(lone, encoder(tmp_path / "b.onnx")) == ["KV001", "KV001"]
    assert codes(lone, saved(models.decoder(), tmp_path / "c.onnx")) == []
    # Who knows what is in a model that could not be read?
    assert codes(lone, saved(b"text", tmp_path / "d.onnx")) == []


def windows(root: Path, *without: int, count: int = 3) -> Sequence[Path]:
    """A set of windows but for some."""
    window_sets.write_windows(root, count)
    paths = sorted(root.rglob("*.onnx"))
    return [path for number, path in enumerate(paths) if number not in without]


def test_windows_are_held_against_each_other(tmp_path: Path) -> None:
    whole = windows(tmp_path / "w")
    assert codes(*whole) == []
    assert codes(whole[0], whole[2]) == ["KV302"]
    # One that could not be read may be the one that is missing.
    whole[1].write_bytes(b"text")
    assert codes(*whole) == []


def test_one_window_with_a_token_is_found(tmp_path: Path) -> None:
    whole = windows(tmp_path / "w")
    saved(window_sets.build_window(1, 2, "VLLM"), whole[1])
    assert codes(*whole) == ["KV303"]
    assert codes(*whole, token="VLLM") == ["KV303"]
    for number in range(3):
        saved(window_sets.build_window(number, number + 1, "VLLM"), whole[number])
    assert codes(*whole) == codes(*whole, token="VLLM") == []


def test_what_only_judges_a_set_does_not_stay(tmp_path: Path) -> None:
    (item,) = verify(windows(tmp_path / "w")[0])
    assert item.model is None
    assert verify_model(Path(item.report.path), QEFF, VerifyRequest()).model.part is not None


def test_strict_makes_what_all_show_together_an_error(tmp_path: Path) -> None:
    model = models.decoder()
    model.graph.input.append(info("past_key.3"))
    model.graph.output.append(info("past_key.3_RetainedState"))
    model.graph.node.append(node("Add", ["past_key.3", "one"], ["past_key.3_RetainedState"]))
    model.graph.initializer.append(make_tensor("one", 1, [1], [1.0]))
    path = saved(model, tmp_path / "m.onnx")
    (item,) = verify(path)
    assert {found.code for found in item.report.findings} == {"KV108", "KV109"}
    assert item.report.status == "unchanged"
    (item,) = verify(path, strict=True)
    assert {found.severity for found in item.report.findings} == {"error"}
