"""A rename with inferred rules can be repeated and undone, however the buffers are called."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import read_graph_of
from named_decoders import NamedDecoder, named_decoders

from onnxkvrename import rename_bytes
from onnxkvrename.findings import CheckError
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.rules_text import find_suffixes
from onnxkvrename.verification.pairs.features import find_features
from onnxkvrename.verification.pairs.find_pairs import find_states
from onnxkvrename.verification.pairs.infer_rules import TracedModel, infer_rules

TOKENS = st.sampled_from(["VLLM", "vllmKvCache", "T1", "abc"])


def trace(data: bytes) -> TracedModel:
    """The pairs of a model in memory."""
    signature, model = read_signature(ByteSource.from_bytes(data)), onnx.load_from_string(data)
    pairs = find_states(read_graph_of(model), signature).pairs
    return TracedModel(Path("m.onnx"), signature, pairs, find_features(read_graph_of(model), pairs))


def find_rules(decoder: NamedDecoder) -> Rules:
    """The rules that ``pairs --as rules`` writes for a model."""
    return infer_rules(trace(decoder.model.SerializeToString())).rules


def list_names(data: bytes) -> set[str]:
    graph = onnx.load_from_string(data).graph
    return {value.name for value in (*graph.input, *graph.output)}


def name_by_hand(decoder: NamedDecoder, token: str, inputs: Collection[str]) -> bytes:
    """The model with a token in some pairs, as if by another program."""
    names = {}
    for name in inputs:
        output = decoder.buffers[name]
        before, after = find_suffixes(name, output)
        names[name] = f"{name.removesuffix(before)}_{token}{before}"
        names[output] = f"{output.removesuffix(after)}_{token}{after}"
    model = onnx.ModelProto.FromString(decoder.model.SerializeToString())
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for each in model.graph.node:
        each.input[:] = [names.get(name, name) for name in each.input]
        each.output[:] = [names.get(name, name) for name in each.output]
    return model.SerializeToString()


@given(named_decoders(), TOKENS)
def test_a_rename_can_be_repeated_replaced_and_undone(decoder: NamedDecoder, token: str) -> None:
    plain = decoder.model.SerializeToString()
    rename = partial(rename_bytes, rules=find_rules(decoder))
    renamed = rename(plain, token)
    assert rename(renamed, token) == renamed
    assert rename(renamed, token, strip=True) == plain
    assert rename(plain, token, strip=True) == plain
    assert rename(renamed, "OTHER", replace=True) == rename(plain, "OTHER")
    with pytest.raises(CheckError, match="KV202"):
        rename(renamed, "OTHER")


@given(named_decoders(), TOKENS)
def test_caches_and_states_are_renamed_and_features_are_not(
    decoder: NamedDecoder, token: str
) -> None:
    plain = decoder.model.SerializeToString()
    stay = list_names(plain) & list_names(rename_bytes(plain, token, rules=find_rules(decoder)))
    changed = {name for pair in decoder.buffers.items() for name in pair}
    assert not stay & changed
    assert {"ids", "logits"} <= stay
    if "vision_embeds" in decoder.others:
        assert {"vision_embeds", "vision_embeds_RetainedState"} <= stay


@given(named_decoders(), TOKENS, st.data())
def test_a_second_token_is_never_added(
    decoder: NamedDecoder, token: str, data: st.DataObject
) -> None:
    plain = decoder.model.SerializeToString()
    rename = partial(rename_bytes, rules=find_rules(decoder))
    buffers = st.sampled_from(sorted(decoder.buffers))
    half = name_by_hand(decoder, token, data.draw(st.lists(buffers, min_size=1, unique=True)))
    assert rename(half, token) == rename(plain, token)
    assert rename(half, token, strip=True) == plain
