from __future__ import annotations

import pytest
from build_layouts import (
    build_attention,
    build_buffer,
    build_layers,
    build_linear,
    build_mla,
    build_sliding,
)

from onnxkvrename.layout.layout import KvBuffer, Layout
from onnxkvrename.vllm.layer_specs import ModelSpecs, align_blocks, build_specs
from onnxkvrename.vllm.specs import ProjectionRequest, Refusal, RefusalError


def build(
    *layers: tuple[KvBuffer, ...], tp: int = 1, block_size: int = 16, **sizes: int
) -> ModelSpecs:
    return build_specs(build_layers(*layers, sizes=sizes), ProjectionRequest(block_size, tp))


def page_size(
    *layers: tuple[KvBuffer, ...], tp: int = 1, block_size: int = 16, **sizes: int
) -> int:
    """The bytes of the first layer's page."""
    model = build(*layers, tp=tp, block_size=block_size, **sizes)
    assert model.refusals == ()
    return model.specs[0].page_size


def refuse(*layers: tuple[KvBuffer, ...], tp: int = 1) -> Refusal:
    """The reason for which the only layer has no spec."""
    model = build(*layers, tp=tp)
    assert model.specs == ()
    (refusal,) = model.refusals
    return refusal


def test_a_page_of_attention_holds_key_and_value_of_a_block() -> None:
    assert page_size(build_attention(0, heads=8, size=64)) == 16 * 8 * (64 + 64) * 2
    assert page_size(build_attention(0, heads=8, size=64), block_size=64) == 131072
    assert page_size(build_attention(0, heads=8, size=64, dtype="FLOAT")) == 16 * 8 * 128 * 4
    assert page_size(build_attention(0, heads=8, size=64, dtype="FLOAT8E4M3FN")) == 16 * 8 * 128


def test_a_value_may_be_smaller_than_its_key() -> None:
    assert page_size(build_attention(0, heads=4, size=192, size_v=128)) == 16 * 4 * (192 + 128) * 2


def test_a_page_of_mla_holds_latent_and_rope_once() -> None:
    assert page_size(build_mla(0, rank=512, rope=64)) == 16 * (512 + 64) * 2
    assert page_size(build_mla(0, rank=512, rope=64), tp=8) == 16 * (512 + 64) * 2


def test_a_page_of_states_is_as_large_as_they_are_whatever_the_block() -> None:
    states = build_linear(0, conv=(8192, 3), recurrent=(32, 128, 128))
    assert page_size(states) == page_size(states, block_size=64) == (8192 * 3 + 32 * 128 * 128) * 2
    assert page_size(states, tp=4) == (2048 * 3 + 8 * 128 * 128) * 2


def test_states_may_be_of_several_dtypes() -> None:
    conv, recurrent = build_linear(0, conv=(512, 3), recurrent=(8, 64, 64))
    assert page_size((conv, recurrent._replace(dtype="FLOAT"))) == 512 * 3 * 2 + 8 * 64 * 64 * 4


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_ranks_divide_heads_or_hold_copies_of_one(tp: int, heads: int) -> None:
    assert build(build_attention(0, heads=8), tp=tp).specs[0].kv_heads == heads


@pytest.mark.parametrize(("heads", "tp"), [(8, 3), (6, 4), (8, 12)])
def test_heads_that_ranks_cannot_share_are_refused(heads: int, tp: int) -> None:
    (refusal,) = build(
        build_attention(0, heads=heads), build_attention(5, heads=heads), tp=tp
    ).refusals
    assert refusal.layers == (0, 5)
    assert refusal.reason == (
        f"{heads} KV heads cannot be divided among {tp} ranks, nor replicated on them"
    )


def test_states_that_ranks_cannot_share_are_refused() -> None:
    refusal = refuse(build_linear(3, recurrent=(6, 64, 64)), tp=4)
    assert refusal.layers == (3,)
    assert refusal.reason == "a state of 6 cannot be divided among 4 ranks"
    assert build(build_linear(3, recurrent=(8, 64, 64)), tp=4).refusals == ()


def test_heads_need_a_size_and_the_context_does_not() -> None:
    refusal = refuse(build_attention(0, heads="kv_heads"))
    assert refusal.reason == "a size of key is unknown: kv_heads"
    assert refusal.hint == "--dim kv_heads=SIZE decides it"
    assert page_size(build_attention(0, heads="kv_heads"), kv_heads=2) == 16 * 2 * 128 * 2


@pytest.mark.parametrize("size", [0, -1, None])
def test_a_size_that_is_not_positive_is_refused(size: int | None) -> None:
    assert refuse(
        (build_buffer(0, "key", "full_attention", ("b", 2, "ctx_len", size)),)
    ).reason == (f"a size of key is unknown: {size}")


def test_a_cache_larger_than_any_memory_is_refused() -> None:
    assert (
        refuse(build_attention(0, heads=1 << 62, size=2)).reason == "key is larger than any memory"
    )
    assert page_size(build_attention(0, heads=1 << 61, size=2)) == 16 * 4 * 2 << 61
    states = build_linear(0, recurrent=(1 << 62,) * 300)
    assert refuse(states).reason == "recurrent_state is larger than any memory"


def test_a_state_with_a_batch_axis_only_is_refused() -> None:
    refusal = refuse((*build_linear(0), build_buffer(0, "odd", "mamba", ("batch_size",))))
    assert refusal.reason == "a state has no axis after the batch"


def test_a_window_is_a_symbol_until_its_size_is_known() -> None:
    assert build(build_sliding(0)).specs[0].window == "sliding_window"
    assert build(build_sliding(0), sliding_window=128).specs[0].window == 128


@pytest.mark.parametrize("dtype", ["MXINT8", "INT8", "UINT8", "DOUBLE"])
def test_a_dtype_that_vllm_does_not_support_is_refused(dtype: str) -> None:
    assert (
        refuse(build_attention(0, dtype=dtype)).reason
        == f"vLLM has no such cache with dtype {dtype}"
    )


def test_states_of_eight_bits_are_refused() -> None:
    assert refuse(build_linear(0, dtype="FLOAT8E4M3FN")).reason == (
        "vLLM has no such cache with dtype FLOAT8E4M3FN"
    )


def test_a_key_without_its_value_is_refused() -> None:
    key, value = build_attention(0)
    assert refuse((key,)).reason == "a page needs a key and a value"
    assert refuse((key, value._replace(dtype="FLOAT"))).reason == (
        "its parts are FLOAT and FLOAT16: a page of vLLM has one dtype"
    )
    _, value_of_two_heads = build_attention(0, heads=2)
    assert (
        refuse((key, value_of_two_heads)).reason == "key and value have different numbers of heads"
    )
    assert refuse(build_mla(0)[:1]).reason == "a page of MLA needs a latent and a rope"


def test_a_latent_that_was_replicated_is_refused_by_its_number_of_heads() -> None:
    latent, rope = (
        build_buffer(0, part, "mla_attention", ("batch_size", 4, "ctx_len", size))
        for part, size in (("compressed_kv", 512), ("k_pe", 64))
    )
    refusal = refuse((latent, rope))
    assert refusal.reason == "its latent has 4 heads, and a page of MLA holds one"
    assert "verify" not in refusal.hint


def test_fixed_sizes_and_unknown_shapes_are_refused() -> None:
    fixed = build_buffer(0, "key", "unknown", (1, 2, 128, 4))
    assert (
        refuse((fixed,)).reason
        == "every size is fixed, so a cache cannot be distinguished from a state"
    )
    shapeless = build_buffer(0, "key", "full_attention", None)
    assert refuse((shapeless,)).reason == "key has no known context axis"
    assert refuse((build_buffer(0, "conv_state", "mamba", None),)).reason == (
        "the shape of conv_state is unknown"
    )


def test_cross_attention_is_a_second_spec_of_its_layer() -> None:
    cross = tuple(
        build_buffer(0, part, "cross_attention", ("batch_size", 4, 1500, 64))._replace(
            sequence_axis=None
        )
        for part in ("key_cross", "value_cross")
    )
    own = build_attention(0, heads=4)
    model = build((*cross, *own))
    assert [(spec.layer, spec.kind) for spec in model.specs] == [
        (0, "full_attention"),
        (0, "cross_attention"),
    ]
    assert {spec.page_size for spec in model.specs} == {16 * 4 * 128 * 2}
    assert "encoder" in {condition.name for condition in model.conditions}


def test_cross_attention_has_one_head_size() -> None:
    assert refuse(build_attention(0, size=64, size_v=32, kind="cross_attention")).reason == (
        "key and value of cross_attention differ in size"
    )


def test_heads_that_share_an_axis_with_their_size_count_as_one_head_on_one_rank() -> None:
    parts = tuple(
        build_buffer(0, part, "full_attention", ("batch_size", "ctx_len", 256))
        for part in ("key", "value")
    )
    assert page_size(parts) == 16 * 512 * 2
    assert "heads" in {condition.name for condition in build(parts).conditions}
    assert refuse(parts, tp=2).reason.startswith("heads and size share one axis")


def condition_names(model: ModelSpecs) -> set[str]:
    assert {condition.state for condition in model.conditions} == {"requires"}
    return {condition.name for condition in model.conditions}


def test_conditions_list_what_a_graph_cannot_decide() -> None:
    plain = condition_names(build(build_attention(0)))
    assert plain == {"kv_cache_dtype", "layer order"}
    hybrid = condition_names(build(build_attention(0), build_linear(1)))
    assert hybrid - plain == {
        "hybrid KV cache manager",
        "conv state",
        "state dtype",
        "mamba_cache_mode",
        "state kind",
    }
    assert condition_names(build(build_attention(0), build_linear(1), tp=2)) - hybrid == {
        "state shards"
    }
    assert "sliding_window_mla" in condition_names(build(build_mla(0, window=128)))


def align(model: Layout, block_size: int = 16) -> list[tuple[int | None, int]]:
    """The block size in tokens and the page size in bytes of each layer."""
    request = ProjectionRequest(block_size)
    return [
        (spec.block_size, spec.page_size)
        for spec in align_blocks(build_specs(model, request).specs, request)
    ]


def test_a_block_of_attention_grows_until_it_covers_a_state() -> None:
    # A token takes 2 * 2 * 256 * 2 = 2048 bytes, the states 1097728: 536 tokens, 544 in sixteens.
    hybrid = build_layers(build_attention(0, heads=2, size=256), build_linear(1))
    assert align(hybrid) == [(544, 544 * 2048), (None, 544 * 2048)]
    assert align(hybrid, block_size=128) == [(640, 640 * 2048), (None, 640 * 2048)]
    assert align(hybrid, block_size=1024) == [(1024, 1024 * 2048), (None, 1024 * 2048)]


def test_a_value_of_its_own_size_counts_as_a_key_where_blocks_are_aligned() -> None:
    hybrid = build_layers(build_attention(0, heads=2, size=256, size_v=128), build_linear(1))
    assert align(hybrid) == [(544, 544 * 2 * 384 * 2), (None, 544 * 2048)]


def test_a_state_as_large_as_a_page_of_attention_is_not_padded() -> None:
    large = build_linear(1, conv=(4096, 2), recurrent=(8, 32, 32))
    small = build_linear(2, conv=(512, 2), recurrent=(8, 32, 32))
    hybrid = build_layers(build_attention(0, heads=2, size=256), large, small)
    assert align(hybrid) == [(16, 32768), (None, 32768), (None, 18432)]


def test_without_states_or_without_attention_blocks_keep_their_size() -> None:
    assert align(build_layers(build_attention(0))) == [(16, 16 * 2048)]
    assert align(build_layers(build_linear(0))) == [(None, 1097728)]


def test_attention_of_two_sizes_in_a_hybrid_is_refused() -> None:
    request = ProjectionRequest(16)
    specs = build_specs(
        build_layers(build_attention(0), build_attention(1, heads=2), build_linear(2)), request
    ).specs
    with pytest.raises(RefusalError, match="attention layers of several sizes beside states"):
        align_blocks(specs, request)


def test_keys_and_values_in_one_tensor_are_refused_as_a_whole_layer() -> None:
    # DeepSeek-V4 as QEfficient exports it: the compressor's buffers have fixed sizes.
    latent = ("batch_size", 1, "ctx_len", 512)
    plain = (build_buffer(0, "sliding_window_kv", "full_attention", latent),)
    compressed = (
        build_buffer(1, "sliding_window_kv", "full_attention", latent),
        build_buffer(1, "compressor_kv_buffer", "unknown", (1, 1, 128, 512)),
        build_buffer(
            1, "actual_compressed_kv", "full_attention", ("batch_size", 1, "compressed", 512)
        ),
    )
    refusal = refuse(plain, compressed)
    assert refusal.layers == (0, 1)
    assert refusal.reason.startswith("sliding_window_kv holds key and value in one, which vLLM")
    assert "the export does not show" in refusal.hint


def build_with_dtype(kv_cache_dtype: str, *layers: tuple[KvBuffer, ...]) -> ModelSpecs:
    return build_specs(build_layers(*layers), ProjectionRequest(16, kv_cache_dtype=kv_cache_dtype))


def test_a_kv_cache_dtype_replaces_the_graphs_own_but_for_states() -> None:
    attention, states = build_attention(0, heads=8, size=64), build_linear(1)
    model = build_with_dtype("fp8", attention, states)
    assert [spec.dtypes for spec in model.specs] == [("FLOAT8E4M3FN",), ("FLOAT16", "FLOAT16")]
    assert model.specs[0].page_size == 16 * 8 * 128
    (wide,) = build_with_dtype("bfloat16", build_attention(0, dtype="MXINT8")).specs
    assert wide.page_size == 16 * 8 * 128 * 2
    reasons = {condition.name: condition.why for condition in model.conditions}
    assert reasons["kv_cache_dtype"] == "--kv-cache-dtype is fp8, for all layers"


def test_a_row_of_fp8_ds_mla_has_656_bytes() -> None:
    model = build_with_dtype("fp8_ds_mla", build_mla(0), build_mla(1))
    assert [spec.page_size for spec in model.specs] == [16 * 656] * 2
    reasons = {condition.name: condition.why for condition in model.conditions}
    assert "indexer is not counted" in reasons["attention backend"]


@pytest.mark.parametrize(
    "layer",
    [build_attention(0), build_mla(0, rank=256), build_mla(0, window=128)],
    ids=["attention", "another latent", "a window"],
)
def test_fp8_ds_mla_is_for_its_own_latent_only(layer: tuple[KvBuffer, ...]) -> None:
    (refusal,) = build_with_dtype("fp8_ds_mla", layer).refusals
    assert refusal.reason.startswith("fp8_ds_mla holds a latent and a rope of 576 elements")
    assert refusal.hint == "choose --kv-cache-dtype fp8"


def test_fp8_ds_mla_beside_states_is_refused() -> None:
    request = ProjectionRequest(16, kv_cache_dtype="fp8_ds_mla")
    specs = build_with_dtype("fp8_ds_mla", build_mla(0), build_linear(1)).specs
    with pytest.raises(RefusalError, match="aligns blocks to different rows than it stores"):
        align_blocks(specs, request)
