"""A rename by dataflow can be repeated and undone, however the buffers are called."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import read_graph_of
from named_decoders import NamedDecoder, named_decoders

import onnxkvrename
from onnxkvrename.findings import CheckError
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.rules.name_tokens import split_token
from onnxkvrename.rules.plan import REASON_UNKNOWN, TokenChange, build_rename_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.verification.pairs.features import find_features
from onnxkvrename.verification.pairs.find_pairs import find_state_pairs
from onnxkvrename.verification.pairs.infer_rules import (
    TracedModel,
    find_carried_tokens,
    infer_rules,
)

TOKENS = st.sampled_from(["VLLM", "vllmKvCache", "T1", "abc"])


def trace(data: bytes) -> TracedModel:
    """The pairs of a model in memory."""
    signature, model = read_signature(ByteSource.from_bytes(data)), onnx.load_from_string(data)
    pairs = find_state_pairs(read_graph_of(model), signature)
    return TracedModel(Path("m.onnx"), signature, pairs, find_features(read_graph_of(model), pairs))


def find_rules(data: bytes, token: str = "") -> Rules:
    """The rules that a command with ``--pairs dataflow`` uses."""
    traced = trace(data)
    return infer_rules([traced], find_carried_tokens([traced], token)).rules


def rename(data: bytes, token: str, **options: bool) -> bytes:
    """A model renamed with ``--pairs dataflow``."""
    return onnxkvrename.rename_bytes(data, token, rules=find_rules(data, token), **options)


def list_names(data: bytes) -> set[str]:
    graph = onnx.load_from_string(data).graph
    return {value.name for value in (*graph.input, *graph.output)}


def name_by_hand(decoder: NamedDecoder, token: str, inputs: Collection[str]) -> bytes:
    """The model with a token in some pairs, as if by another program."""
    names = {}
    for name in inputs:
        output = decoder.buffers[name]
        core, rest, suffix = split_token(name, output, ())
        names |= {name: f"{core}_{token}", output: f"{rest}_{token}{suffix}"}
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
    renamed = rename(plain, token)
    assert rename(renamed, token) == renamed
    assert rename(renamed, token, strip=True) == plain
    assert rename(plain, token, strip=True) == plain
    if token != token.lower():  # else it may be a part of the names
        other = rename(plain, "OTHER")
        assert rename(renamed, "OTHER", replace=True) == other
        with pytest.raises(CheckError, match="KV202"):
            rename(renamed, "OTHER")


@given(named_decoders(), TOKENS)
def test_caches_and_states_are_renamed_and_features_are_not(
    decoder: NamedDecoder, token: str
) -> None:
    plain = decoder.model.SerializeToString()
    stay = list_names(plain) & list_names(rename(plain, token))
    changed = {name for pair in decoder.buffers.items() for name in pair}
    assert not stay & changed
    assert {"ids", "logits"} <= stay
    if "vision_embeds" in decoder.others:
        assert {"vision_embeds", "vision_embeds_RetainedState"} <= stay


@given(named_decoders(), TOKENS)
def test_what_a_renamed_model_has_without_a_token_is_left_alone(
    decoder: NamedDecoder, token: str
) -> None:
    by_profile = name_by_hand(decoder, token, decoder.buffers)
    assert rename(by_profile, token) == by_profile
    assert rename(by_profile, token, strip=True) == decoder.model.SerializeToString()


@given(named_decoders(without="counted"), TOKENS, st.data())
def test_a_second_token_is_never_added(
    decoder: NamedDecoder, token: str, data: st.DataObject
) -> None:
    buffers = sorted(decoder.buffers)
    some = data.draw(st.lists(st.sampled_from(buffers), min_size=1, unique=True))
    partial = name_by_hand(decoder, token, some)
    completed = rename(partial, token)
    assert not any(name.count(token) > 1 for name in list_names(completed))
    assert rename(completed, token) == completed
    assert rename(partial, token, strip=True) == decoder.model.SerializeToString()
    missing = list_names(name_by_hand(decoder, token, buffers)) - list_names(completed)
    if missing:  # buffers of another kind than those with a token: the user is told
        signature = read_signature(ByteSource.from_bytes(partial))
        plan = build_rename_plan(signature, find_rules(partial, token), TokenChange(token))
        told = {item.name for item in plan.unchanged_names if item.reason == REASON_UNKNOWN}
        assert told >= {
            output
            for name, output in decoder.buffers.items()
            if {name, output} <= list_names(completed)
        }
