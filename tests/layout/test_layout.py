"""The buffers of a model as a consumer meets them."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from onnxkvrename import ModelError, load_rules
from onnxkvrename.layout.layout import (
    KvBuffer,
    Layout,
    apply_sizes,
    build_layout,
)
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import build_minimal_plan

RULES = load_rules()
OUT = "_RetainedState"
FULL = ("batch_size", 2, "ctx_len", 4)
WINDOW = ("batch_size", 2, "sliding_window", 4)

Shapes = dict[str, tuple[int | str | None, ...] | None]


def source(
    shapes: Shapes, path: str = "m.onnx", *, token: str = "", dtype: str = "FLOAT"
) -> KvModel:
    """A model with these buffers, each retained, and logits."""
    names = {f"{name}_{token}" if token else name: shape for name, shape in shapes.items()}
    inputs = (Value("input_ids", "INT64", ("batch_size", "seq_len")),)
    inputs += tuple(Value(name, dtype, shape) for name, shape in names.items())
    outputs = (Value("logits", "FLOAT", ("batch_size", "seq_len", 9)),)
    outputs += tuple(Value(name + OUT, dtype, shape) for name, shape in names.items())
    signature = Signature(inputs, outputs)
    return KvModel(path, signature, build_minimal_plan(signature, RULES))


STATE: tuple[int | str | None, ...] = ("batch_size", 2, 4, 4)


def layer(number: int, shape: tuple[int | str | None, ...] | None = FULL) -> Shapes:
    return {f"past_key.{number}": shape, f"past_value.{number}": shape}


def state(number: int) -> Shapes:
    """A layer whose part of rank 3 shows that it has no context."""
    return {f"past_key.{number}": ("batch_size", 8, 3), f"past_value.{number}": STATE}


def layout(*shapes: Shapes, token: str = "") -> Layout:
    merged = {name: shape for group in shapes for name, shape in group.items()}
    return build_layout([source(merged, token=token)])


def parts(found: Layout) -> list[tuple[int, str, str]]:
    return [(buffer.layer, buffer.part, buffer.kind) for buffer in found.buffers]


# What a buffer is.


def test_a_buffer_says_all_that_a_consumer_must_know() -> None:
    found = layout(layer(0, WINDOW), token="VLLM")
    assert found.buffers[0] == KvBuffer(
        layer=0,
        part="key",
        kind="sliding_window",
        buffer="past_key",
        scope="",
        input="past_key.0_VLLM",
        output="past_key.0_VLLM_RetainedState",
        dtype="FLOAT",
        shape=WINDOW,
        sequence_axis=2,
        window="sliding_window",
        model="m.onnx",
        token="VLLM",
    )
    assert found.buffers[0].names == ("past_key.0_VLLM", "past_key.0_VLLM_RetainedState")
    assert found.buffers[0].sequence_shape == WINDOW[1:]
    assert found.buffers[0].token_shape == (2, 4)


def test_layers_stand_in_the_order_of_their_numbers_and_parts_in_that_of_the_rules() -> None:
    found = layout({f"past_{part}.{at}": FULL for at in (10, 2) for part in ("value", "key")})
    assert [buffer.input for buffer in found.buffers] == [
        *("past_key.2", "past_value.2", "past_key.10", "past_value.10")
    ]
    assert found.layers == (2, 10)


def test_a_linear_layers_states_are_known_by_their_ranks_whatever_they_are_called() -> None:
    states = {"past_key.0": ("batch_size", 8, 3), "past_value.0": ("batch_size", 2, 4, 4)}
    assert parts(layout(states)) == [(0, "conv_state", "mamba"), (0, "recurrent_state", "mamba")]


def test_states_of_one_rank_keep_their_names() -> None:
    states = {"past_key.0": ("batch_size", 8, 3), "past_value.0": ("batch_size", 8, 16)}
    assert parts(layout(states)) == [(0, "key", "mamba"), (0, "value", "mamba")]


def test_a_state_does_not_grow() -> None:
    (_, buffer) = layout(state(0)).buffers
    assert (buffer.kind, buffer.sequence_axis, buffer.token_shape) == ("mamba", None, None)


def test_a_buffer_of_unknown_rank_has_no_shapes() -> None:
    buffer = layout(layer(0, None)).buffers[0]
    assert (buffer.shape, buffer.sequence_shape, buffer.token_shape) == (None, None, None)


def test_a_side_that_is_missing_has_no_name() -> None:
    signature = Signature((Value("past_key.0", "FLOAT", FULL),), ())
    plan = build_minimal_plan(signature, RULES)
    (buffer,) = build_layout([KvModel("m.onnx", signature, plan)]).buffers
    assert (buffer.output, buffer.names) == (None, ("past_key.0",))


def test_names_that_carry_different_tokens_have_none_in_common() -> None:
    inputs = (Value("past_key.0", "FLOAT", FULL),)
    signature = Signature(inputs, (Value("past_key.0_VLLM_RetainedState", "FLOAT", FULL),))
    plan = build_minimal_plan(signature, RULES)
    (buffer,) = build_layout([KvModel("m.onnx", signature, plan)]).buffers
    assert buffer.token is None
    assert [buffer.token for buffer in layout(layer(0)).buffers] == ["", ""]


# Several models.


def test_windows_together_show_each_input_and_output_once() -> None:
    found = build_layout([source(layer(0), "a"), source(layer(1), "b")])
    assert found.models == ("a", "b")
    assert [buffer.model for buffer in found.buffers] == ["a", "a", "b", "b"]
    assert [value.name for value in found.inputs] == [
        *("input_ids", "past_key.0", "past_value.0", "past_key.1", "past_value.1")
    ]
    assert [kept.name for kept in found.kept] == ["logits"]


def test_the_order_of_models_does_not_matter_to_the_buffers() -> None:
    models = [source({f"past_{part}.0": FULL}, part) for part in ("value", "key")]
    assert build_layout(models).buffers == build_layout(models[::-1]).buffers


def test_two_models_with_one_buffer_are_not_one() -> None:
    with pytest.raises(ModelError) as error:
        build_layout([source(layer(0), "a.onnx"), source(layer(0), "b.onnx")])
    text = str(error.value)
    assert "b.onnx: has key of layer 0" in text
    assert "a.onnx" in text


def test_one_model_with_two_of_a_buffer_is_refused_with_their_names() -> None:
    with pytest.raises(ModelError, match=r"past_key.0 and x/past"):
        layout({"past_key.0": FULL, "x/past_key.0": FULL})


# Sizes and dtypes.


def test_sizes_are_known_or_missing() -> None:
    found = layout(layer(0), layer(1, WINDOW))
    assert found.symbols == ("batch_size", "ctx_len", "sliding_window")
    assert found.unresolved_symbols == ("ctx_len", "sliding_window")
    found = apply_sizes(found, {"ctx_len": 32})
    assert found.unresolved_symbols == ("sliding_window",)
    assert found.resolve_shape(FULL) == ("batch_size", 2, 32, 4)


def test_a_new_size_comes_before_an_old_one() -> None:
    found = apply_sizes(layout(layer(0)), {"ctx_len": 32, "batch_size": 1})
    assert apply_sizes(found, {"ctx_len": 64}).sizes == {"ctx_len": 64, "batch_size": 1}


def test_bytes_follow_from_what_is_known() -> None:
    found = layout(layer(0))
    buffer = found.buffers[0]
    assert (found.compute_token_bytes(buffer), found.compute_sequence_bytes(buffer)) == (
        2 * 4 * 4,
        None,
    )
    assert found.compute_batch_bytes(buffer) is None
    found = apply_sizes(found, {"ctx_len": 32, "batch_size": 3})
    assert found.compute_sequence_bytes(buffer) == 2 * 32 * 4 * 4
    assert found.compute_batch_bytes(buffer) == 3 * 2 * 32 * 4 * 4
    assert found.compute_state_bytes(buffer) is None


def test_a_state_takes_its_bytes_once_a_sequence() -> None:
    found = layout(state(0))
    buffer = found.buffers[1]
    assert (found.compute_token_bytes(buffer), found.compute_state_bytes(buffer)) == (
        None,
        2 * 4 * 4 * 4,
    )


def test_a_symbol_for_the_heads_leaves_a_token_without_a_size_until_it_is_given() -> None:
    found = layout(layer(0, ("batch_size", 2, "ctx_len", "Concat_dim_3")))
    assert found.compute_token_bytes(found.buffers[0]) is None
    found = apply_sizes(found, {"Concat_dim_3": 4})
    assert found.compute_token_bytes(found.buffers[0]) == 32


# The digest.


def test_a_layout_is_a_value() -> None:
    assert layout(layer(0)) == layout(layer(0))
    assert layout(layer(0)).sizes == MappingProxyType({})
