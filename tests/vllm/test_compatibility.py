"""The factors of vLLM's compatibility hash: what is equal, what differs, what is not known."""

from __future__ import annotations

import pytest
from build_layouts import build_attention, build_layers, build_linear, build_mla

from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.compatibility import Compatibility, Worker, compare_factors
from onnxkvrename.vllm.serve import ServeSettings
from onnxkvrename.vllm.specs import ProjectionRequest

PLAIN = build_layers(build_attention(0), build_attention(1))
MLA = build_layers(build_mla(0), build_mla(1))
CHUNKED = build_layers(build_attention(0, kind="chunked_local_attention", window=128))
STATES_FIRST = build_layers(build_linear(0), build_attention(1, heads=2, size=256))
LINE = ServeSettings("M")
EAGLE = {"method": "eagle", "model": "D"}
CROSS = {"enable_cross_layers_blocks": "True"}


def compare(
    prefill: ServeSettings | None,
    decode: ServeSettings | None,
    model: Layout = PLAIN,
    version: str = "0.33",
) -> Compatibility:
    return compare_factors(*(build(model, settings, version) for settings in (prefill, decode)))


def build(model: Layout, settings: ServeSettings | None, version: str = "0.33") -> Worker:
    return Worker(model, ProjectionRequest(16, vllm_version=version, serve=settings))


def find_state(compatibility: Compatibility, name: str) -> str:
    return next(factor.state for factor in compatibility.factors if factor.name == name)


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "state"),
    [
        ("model", LINE, LINE, "equal"),
        ("model", LINE, ServeSettings("N"), "differs"),
        ("model", LINE, ServeSettings(), "not known"),
        ("dtype", LINE, LINE, "not known"),
        ("dtype", ServeSettings(dtype="float32"), ServeSettings(dtype="float16"), "differs"),
        ("dtype", ServeSettings(dtype="bfloat16"), ServeSettings(dtype="float16"), "differs"),
        ("dtype", ServeSettings(dtype="bfloat16"), ServeSettings(), "not known"),
        ("KV cache dtype", LINE, LINE, "equal"),
        ("KV cache dtype", LINE, ServeSettings("N"), "not known"),
        ("KV cache dtype", LINE, LINE._replace(kv_cache_dtype="fp8"), "differs"),
        ("KV cache dtype", LINE, LINE._replace(kv_cache_dtype="fp8_e4m3"), "not known"),
        (
            "KV cache dtype",
            LINE._replace(kv_cache_dtype="fp8"),
            LINE._replace(kv_cache_dtype="fp8_e4m3"),
            "differs",
        ),
        ("attention backend", LINE, LINE, "not known"),
        (
            "attention backend",
            LINE._replace(attention_backend="flash_attn"),
            LINE._replace(attention_backend="FLASH_ATTN"),
            "equal",
        ),
        (
            "attention backend",
            LINE._replace(attention_backend="FLASHINFER"),
            LINE._replace(attention_backend="FLASH_ATTN"),
            "differs",
        ),
        ("hybrid KV cache manager", LINE, LINE._replace(has_hybrid_manager=True), "equal"),
        ("hybrid KV cache manager", LINE, LINE._replace(has_hybrid_manager=False), "differs"),
        ("hybrid KV cache manager", LINE, LINE._replace(connector="Mine"), "not known"),
        ("transfer mode", LINE, LINE._replace(connector="NixlPullConnector"), "equal"),
        ("transfer mode", LINE, LINE._replace(connector="NixlPushConnector"), "differs"),
        ("speculative config", LINE, LINE._replace(speculative_config=EAGLE), "differs"),
        (
            "speculative config",
            LINE,
            LINE._replace(speculative_config={"method": "ngram"}),
            "equal",
        ),
        ("speculative config", LINE, LINE._replace(speculative_config={"model": "D"}), "not known"),
        (
            "speculative config",
            LINE,
            LINE._replace(speculative_config={"model": "D-EAGLE3"}),
            "differs",
        ),
        (
            "speculative config",
            LINE._replace(speculative_config=EAGLE),
            LINE._replace(speculative_config={**EAGLE, "num_speculative_tokens": 3}),
            "equal",
        ),
        (
            "speculative config",
            LINE._replace(speculative_config=EAGLE, kv_cache_dtype="fp8"),
            LINE._replace(
                kv_cache_dtype="fp8", speculative_config={**EAGLE, "kv_cache_dtype": "fp8"}
            ),
            "equal",
        ),
        ("KV heads", None, None, "equal"),
        ("model", None, None, "not known"),
        ("speculative config", None, LINE, "not known"),
    ],
)
def test_factors_of_settings(
    name: str, prefill: ServeSettings | None, decode: ServeSettings | None, state: str
) -> None:
    assert find_state(compare(prefill, decode), name) == state
    assert find_state(compare(decode, prefill), name) == state


@pytest.mark.parametrize(
    ("name", "model", "decode", "state"),
    [
        ("KV cache dtype", MLA, LINE, "not known"),  # some models replace it by the GPU
        ("KV cache dtype", MLA, LINE._replace(kv_cache_dtype="bfloat16"), "not known"),
        ("attention backend", STATES_FIRST, LINE._replace(attention_backend="FLASHINFER"), "equal"),
        ("hybrid KV cache manager", CHUNKED, LINE._replace(has_hybrid_manager=False), "equal"),
    ],
)
def test_what_a_model_changes(name: str, model: Layout, decode: ServeSettings, state: str) -> None:
    assert find_state(compare(LINE, decode, model), name) == state


@pytest.mark.parametrize(
    ("decode", "state"),
    [
        (LINE, "equal"),
        (LINE._replace(extra_config=CROSS), "not known"),
        (LINE._replace(extra_config=CROSS, uses_v2_model_runner=True), "equal"),
        (
            LINE._replace(
                extra_config=CROSS, uses_v2_model_runner=False, attention_backend="FLASH_ATTN"
            ),
            "differs",
        ),
    ],
)
def test_cross_layer_blocks_are_a_factor_of_0_24_only(decode: ServeSettings, state: str) -> None:
    assert find_state(compare(LINE, decode, version="0.24"), "cross-layer blocks") == state
    assert "cross-layer blocks" not in [each.name for each in compare(LINE, decode).factors]


@pytest.mark.parametrize(
    ("decode", "name"),
    [
        (build_layers(build_attention(0, heads=4), build_attention(1, heads=4)), "KV heads"),
        (build_layers(build_attention(0, size=128), build_attention(1, size=128)), "head size"),
        (build_layers(build_attention(0)), "number of layers"),
    ],
)
def test_what_the_graphs_say(decode: Layout, name: str) -> None:
    compatibility = compare_factors(build(PLAIN, LINE), build(decode, LINE))
    assert [factor.name for factor in compatibility.select("differs")] == [name]


def test_a_differing_factor_is_a_finding_that_names_both_values() -> None:
    compatibility = compare(LINE, LINE._replace(kv_cache_dtype="fp8"))
    (finding,) = compatibility.list_findings("0.33")
    assert finding.code == "KV628"
    assert "KV cache dtype: auto (prefill) and fp8 (decode)" in finding.message
    assert "--kv-cache-dtype" in finding.hint


def test_decode_decides_whether_the_hash_is_compared() -> None:
    off = LINE._replace(extra_config={"enforce_handshake_compat": False}, kv_cache_dtype="fp8")
    assert [*compare(LINE, off).list_findings("0.33")] == []
    assert any("KV cache dtype" in note for note in compare(LINE, off).list_notes())
    assert [each.code for each in compare(off, LINE).list_findings("0.33")] == ["KV628"]


def test_other_versions_never_meet() -> None:
    off = LINE._replace(extra_config={"enforce_handshake_compat": False})
    workers = (build(PLAIN, off, version) for version in ("0.24", "0.33"))
    findings = [*compare_factors(*workers).list_findings("0.33")]
    assert [finding.message.partition(":")[0] for finding in findings] == ["vLLM version"]
