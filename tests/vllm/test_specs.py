from __future__ import annotations

import pytest
from layers import attention, buffer, layout, linear, mla, sliding

from onnxkvrename.errors import KvRenameError
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.vllm.layer_specs import ModelSpecs, align_blocks, build_specs
from onnxkvrename.vllm.specs import ProjectionRequest, RefusalError, check_request


def of(*layers: tuple[Buffer, ...], tp: int = 1, block: int = 16, **sizes: int) -> ModelSpecs:
    return build_specs(layout(*layers, sizes=sizes), ProjectionRequest(block, tp))


def page(*layers: tuple[Buffer, ...], tp: int = 1, block: int = 16, **sizes: int) -> int:
    found = of(*layers, tp=tp, block=block, **sizes)
    assert found.refusals == ()
    return found.specs[0].page_size


def reason(found: ModelSpecs) -> str:
    assert found.specs == ()
    (refusal,) = found.refusals
    return refusal.reason


def test_a_page_of_attention_holds_key_and_value_of_a_block() -> None:
    assert page(attention(0, heads=8, size=64)) == 16 * 8 * (64 + 64) * 2
    assert page(attention(0, heads=8, size=64), block=64) == 131072
    assert page(attention(0, heads=8, size=64, dtype="FLOAT")) == 16 * 8 * 128 * 4
    assert page(attention(0, heads=8, size=64, dtype="FLOAT8E4M3FN")) == 16 * 8 * 128


def test_a_value_may_be_smaller_than_its_key() -> None:
    assert page(attention(0, heads=4, size=192, size_v=128)) == 16 * 4 * (192 + 128) * 2


def test_a_page_of_mla_holds_latent_and_rope_once() -> None:
    assert page(mla(0, rank=512, rope=64)) == 16 * (512 + 64) * 2
    assert page(mla(0, rank=512, rope=64), tp=8) == 16 * (512 + 64) * 2


def test_a_page_of_states_is_as_large_as_they_are_whatever_the_block() -> None:
    states = linear(0, conv=(8192, 3), recurrent=(32, 128, 128))
    assert page(states) == page(states, block=64) == (8192 * 3 + 32 * 128 * 128) * 2
    assert page(states, tp=4) == (2048 * 3 + 8 * 128 * 128) * 2


def test_states_may_be_of_several_dtypes() -> None:
    conv, recurrent = linear(0, conv=(512, 3), recurrent=(8, 64, 64))
    assert page((conv, recurrent._replace(dtype="FLOAT"))) == 512 * 3 * 2 + 8 * 64 * 64 * 4


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_ranks_share_heads_or_hold_the_same_one(tp: int, heads: int) -> None:
    assert of(attention(0, heads=8), tp=tp).specs[0].kv_heads == heads


@pytest.mark.parametrize(("heads", "tp"), [(8, 3), (6, 4), (8, 12)])
def test_heads_that_ranks_cannot_share_are_refused(heads: int, tp: int) -> None:
    (refusal,) = of(attention(0, heads=heads), attention(5, heads=heads), tp=tp).refusals
    assert (refusal.code, refusal.layers) == ("KV619", (0, 5))
    assert refusal.reason == (f"{heads} KV heads do not divide by {tp} ranks, nor ranks by heads")


def test_states_that_ranks_cannot_share_are_refused() -> None:
    found = of(linear(3, recurrent=(6, 64, 64)), tp=4)
    assert [(r.code, r.layers) for r in found.refusals] == [("KV619", (3,))]
    assert reason(found) == "a state of 6 does not divide by 4 ranks"
    assert of(linear(3, recurrent=(8, 64, 64)), tp=4).refusals == ()


def test_the_context_needs_no_size_and_heads_do() -> None:
    found = of(attention(0, heads="kv_heads"))
    assert reason(found) == "a size of key is not known: kv_heads"
    assert found.refusals[0].hint == "--dim kv_heads=SIZE says it"
    assert page(attention(0, heads="kv_heads"), kv_heads=2) == 16 * 2 * 128 * 2


@pytest.mark.parametrize("size", [0, -1, None])
def test_a_size_that_is_none_is_refused(size: int | None) -> None:
    assert reason(of((buffer(0, "key", "full_attention", ("b", 2, "ctx_len", size)),))) == (
        f"a size of key is not known: {size}"
    )


def test_a_cache_that_no_memory_holds_is_refused() -> None:
    assert reason(of(attention(0, heads=1 << 62, size=2))) == "key is larger than any memory"
    assert page(attention(0, heads=1 << 61, size=2)) == 16 * 4 * 2 << 61
    states = linear(0, recurrent=(1 << 62,) * 300)
    assert reason(of(states)) == "recurrent_state is larger than any memory"


def test_a_state_of_a_batch_alone_is_refused() -> None:
    found = of((*linear(0), buffer(0, "odd", "mamba", ("batch_size",))))
    assert (reason(found), found.refusals[0].code) == (
        "a state has no axis behind the batch",
        "KV622",
    )


def test_a_window_is_told_by_its_symbol_until_its_size_is_known() -> None:
    assert of(sliding(0)).specs[0].window == "sliding_window"
    assert of(sliding(0), sliding_window=128).specs[0].window == 128


@pytest.mark.parametrize("dtype", ["MXINT8", "INT8", "UINT8", "DOUBLE"])
def test_a_dtype_that_vllm_has_not_is_refused(dtype: str) -> None:
    assert reason(of(attention(0, dtype=dtype))) == f"vLLM has no such cache in {dtype}"


def test_states_have_no_dtype_of_eight_bits() -> None:
    assert reason(of(linear(0, dtype="FLOAT8E4M3FN"))) == ("vLLM has no such cache in FLOAT8E4M3FN")


def test_a_key_without_its_value_is_refused() -> None:
    key, value = attention(0)
    assert reason(of((key,))) == "a page holds a key and a value"
    assert reason(of((key, value._replace(dtype="FLOAT")))) == (
        "its parts are FLOAT and FLOAT16: a page of vLLM has one dtype"
    )
    (other,) = (b for b in attention(0, heads=2) if b.part == "value")
    assert reason(of((key, other))) == "key and value differ in their heads"
    assert reason(of(mla(0)[:1])) == "a page of MLA holds one latent and its rope"


def test_fixed_sizes_are_no_cache_and_no_state() -> None:
    fixed = buffer(0, "key", "unknown", (1, 2, 128, 4))
    assert reason(of((fixed,))) == "every size is fixed, so a cache and a state look alike"
    shapeless = buffer(0, "key", "full_attention", None)
    assert reason(of((shapeless,))) == "key has no known context axis"
    assert reason(of((buffer(0, "conv_state", "mamba", None),))) == (
        "the shape of conv_state is not known"
    )


def test_cross_attention_is_a_spec_beside_the_layers_own() -> None:
    cross = tuple(
        buffer(0, part, "cross_attention", ("batch_size", 4, 1500, 64))._replace(sequence_axis=None)
        for part in ("key_cross", "value_cross")
    )
    own = attention(0, heads=4)
    found = of((*cross, *own))
    assert [(spec.layer, spec.kind) for spec in found.specs] == [
        (0, "full_attention"),
        (0, "cross_attention"),
    ]
    assert {spec.page_size for spec in found.specs} == {16 * 4 * 128 * 2}
    assert "encoder" in {condition.name for condition in found.conditions}


def test_cross_attention_has_one_head_size() -> None:
    assert reason(of(attention(0, size=64, size_v=32, kind="cross_attention"))) == (
        "key and value of cross_attention differ in size"
    )


def test_heads_that_share_an_axis_with_the_size_are_one_as_long_as_there_is_one_rank() -> None:
    parts = tuple(
        buffer(0, part, "full_attention", ("batch_size", "ctx_len", 256))
        for part in ("key", "value")
    )
    assert page(parts) == 16 * 512 * 2
    assert "heads" in {condition.name for condition in of(parts).conditions}
    assert reason(of(parts, tp=2)).startswith("heads and size share one axis")


def names(found: ModelSpecs) -> set[str]:
    assert {condition.state for condition in found.conditions} == {"requires"}
    return {condition.name for condition in found.conditions}


def test_what_a_graph_cannot_decide_is_listed() -> None:
    plain = names(of(attention(0)))
    assert plain == {"kv_cache_dtype", "kernel block size", "layer order", "parallelism"}
    hybrid = names(of(attention(0), linear(1)))
    assert hybrid - plain == {
        "hybrid KV cache manager",
        "conv state",
        "state dtype",
        "mamba_cache_mode",
    }
    assert names(of(attention(0), linear(1), tp=2)) - hybrid == {"state shards"}
    assert "sliding_window_mla" in names(of(mla(0, window=128)))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (ProjectionRequest(16, vllm_version="0.25"), "vLLM 0.25 is not known here"),
        (ProjectionRequest(0), "a block size of 0 is too small"),
        (ProjectionRequest(16, tensor_parallel_size=0), "a tensor parallelism of 0 is too small"),
        (ProjectionRequest(16, prompt_lengths=(1, 0)), "a prompt of 0 is too small"),
        (ProjectionRequest(1 << 31), "a block size of 2147483648 is too large"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: ProjectionRequest, message: str) -> None:
    with pytest.raises(KvRenameError, match=message):
        check_request(asked)


def test_the_largest_sizes_make_sense() -> None:
    most = (1 << 31) - 1
    check_request(ProjectionRequest(most, most, prompt_lengths=(most,)))


def aligned(found: Layout, era: str = "0.24", block: int = 16) -> list[tuple[int | None, int]]:
    asked = ProjectionRequest(block, vllm_version=era)
    return [
        (spec.block_size, spec.page_size)
        for spec in align_blocks(build_specs(found, asked).specs, asked)
    ]


def test_a_block_of_attention_grows_until_it_covers_a_state() -> None:
    # A token takes 2 * 2 * 256 * 2 = 2048 bytes, the states 1097728: 536 tokens, 544 in sixteens.
    hybrid = layout(attention(0, heads=2, size=256), linear(1))
    assert aligned(hybrid) == [(544, 544 * 2048), (None, 544 * 2048)]
    assert aligned(hybrid, block=128) == [(640, 640 * 2048), (None, 640 * 2048)]
    assert aligned(hybrid, block=1024) == [(1024, 1024 * 2048), (None, 1024 * 2048)]


def test_a_value_of_its_own_size_counts_as_a_key_where_blocks_are_aligned() -> None:
    hybrid = layout(attention(0, heads=2, size=256, size_v=128), linear(1))
    assert aligned(hybrid) == [(544, 544 * 2 * 384 * 2), (None, 544 * 2048)]


def test_where_a_block_just_covers_the_largest_state_none_is_padded() -> None:
    large = linear(1, conv=(4096, 2), recurrent=(8, 32, 32))
    small = linear(2, conv=(512, 2), recurrent=(8, 32, 32))
    hybrid = layout(attention(0, heads=2, size=256), large, small)
    assert aligned(hybrid) == [(16, 32768), (None, 32768), (None, 18432)]


def test_beside_states_0_33_takes_blocks_of_mla_in_128_tokens() -> None:
    # A token takes 1152 bytes: 953 tokens for the states, 960 in sixteens, 1024 in 128s.
    hybrid = layout(mla(0), linear(1))
    assert aligned(hybrid, "0.24")[0] == (960, 960 * 1152)
    assert aligned(hybrid, "0.33")[0] == (1024, 1024 * 1152)


def test_without_states_or_without_attention_blocks_stay() -> None:
    assert aligned(layout(attention(0))) == [(16, 16 * 2048)]
    assert aligned(layout(linear(0))) == [(None, 1097728)]


def test_attention_of_two_sizes_beside_states_is_not_known() -> None:
    asked = ProjectionRequest(16)
    found = build_specs(layout(attention(0), attention(1, heads=2), linear(2)), asked).specs
    with pytest.raises(RefusalError, match="attention layers of several sizes beside states"):
        align_blocks(found, asked)
