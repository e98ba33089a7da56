"""What a line decides of a projection, one condition of one layout at a time."""

from __future__ import annotations

import pytest
from build_layouts import (
    build_attention,
    build_gpt_oss,
    build_layers,
    build_linear,
    build_mla,
)

from onnxkvrename.errors import KvRenameError
from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.memory_v033 import KV_CACHE_LAYOUTS
from onnxkvrename.vllm.projection import (
    Projection,
    build_request,
    check_nixl,
    find_nixl_allocation,
    list_serve_notes,
    project_layout,
)
from onnxkvrename.vllm.serve import parse_serve_line

LAYOUTS: dict[str, Layout] = {
    "plain": build_layers(build_attention(0), build_attention(1)),
    "large heads": build_layers(build_attention(0, size=256), build_attention(1, size=256)),
    "window": build_gpt_oss(),
    "mla": build_layers(build_mla(0), build_mla(1)),
    "hybrid": build_layers(build_attention(0), build_linear(1)),
}
NIXL = "--kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both"
OTHER = "--kv-transfer-config.kv_connector {} --kv-transfer-config.kv_role kv_both"
CROSS = f"{NIXL} --kv-transfer-config.kv_connector_extra_config.enable_cross_layers_blocks true"
FLASH = "--attention-backend FLASH_ATTN"


def _project(name: str, line: str, version: str) -> Projection:
    request = build_request(parse_serve_line(line, version), version, (100,))
    return project_layout(LAYOUTS[name], request)


@pytest.mark.parametrize(
    ("version", "layout", "line", "name", "state"),
    [
        ("0.33", "plain", "--block-size 16", "kernel block size", "requires"),
        ("0.33", "plain", FLASH, "kernel block size", "met"),
        ("0.33", "large heads", FLASH, "kernel block size", "requires"),
        ("0.24", "large heads", FLASH, "kernel block size", "met"),
        ("0.30", "plain", FLASH, "kernel block size", "requires"),
        ("0.33", "mla", "--attention-backend FLASHMLA", "kernel block size", "met"),
        (
            "0.33",
            "mla",
            "--attention-backend FLASHMLA --block-size 128",
            "kernel block size",
            "not met",
        ),
        (
            "0.33",
            "plain",
            "--attention-backend FLASHINFER --block-size 128",
            "kernel block size",
            "requires",
        ),
        ("0.33", "plain", "-tp 2", "parallelism", "met"),
        ("0.33", "plain", "-dcp 2", "parallelism", "not met"),
        ("0.33", "plain", "--spec-method eagle --spec-tokens 1", "parallelism", "not met"),
        ("0.33", "plain", "--spec-method ngram --spec-tokens 1", "parallelism", "met"),
        ("0.33", "plain", "-pp 2", "pipeline stages", "requires"),
        (
            "0.33",
            "plain",
            "VLLM_PP_LAYER_PARTITION=1,1 vllm serve M -pp 2",
            "pipeline stages",
            "met",
        ),
        ("0.33", "plain", "--kv-cache-memory-bytes 1G", "memory of KV caches", "met"),
        ("0.33", "plain", "-tp 1", "kv_cache_dtype", "requires"),
        ("0.33", "plain", "--dtype half", "kv_cache_dtype", "met"),
        ("0.33", "plain", "--dtype bfloat16", "kv_cache_dtype", "not met"),
        ("0.33", "plain", "--kv-cache-dtype fp8", "kv_cache_dtype", "met"),
        (
            "0.33",
            "plain",
            "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0",
            "kv_cache_dtype",
            "not met",
        ),
        ("0.33", "window", "-tp 1", "hybrid KV cache manager", "met"),
        (
            "0.33",
            "window",
            "--disable-hybrid-kv-cache-manager",
            "hybrid KV cache manager",
            "not met",
        ),
        (
            "0.33",
            "window",
            OTHER.format("LMCacheConnectorV1"),
            "hybrid KV cache manager",
            "not met",
        ),
        ("0.33", "window", OTHER.format("MyConnector"), "hybrid KV cache manager", "requires"),
        ("0.24", "window", OTHER.format("MoRIIOConnector"), "hybrid KV cache manager", "requires"),
        ("0.33", "hybrid", "--no-enable-prefix-caching", "mamba_cache_mode", "met"),
        ("0.33", "hybrid", "--enable-prefix-caching", "mamba_cache_mode", "not met"),
        ("0.33", "hybrid", "-tp 1", "mamba_cache_mode", "requires"),
        ("0.33", "hybrid", NIXL, "state kind", "not met"),
        (
            "0.33",
            "hybrid",
            f"VLLM_SSM_CONV_STATE_LAYOUT=DS vllm serve M {NIXL}",
            "state kind",
            "met",
        ),
    ],
)
def test_condition_of_a_projection(
    version: str, layout: str, line: str, name: str, state: str
) -> None:
    conditions = {each.name: each for each in _project(layout, line, version).conditions}
    assert conditions[name].state == state
    assert conditions[name].by_line == (state != "requires")


@pytest.mark.parametrize(
    ("version", "layout", "line", "used", "unused"),
    [
        ("0.24", "window", "-tp 1", "unpacked", "packed"),
        ("0.24", "window", CROSS, "packed", "unpacked"),
        ("0.24", "plain", CROSS, "unpacked", "packed"),
        ("0.24", "plain", f"{CROSS} {FLASH}", "cross_layers", "packed"),
        (
            "0.24",
            "plain",
            f"VLLM_USE_V2_MODEL_RUNNER=0 vllm serve M {CROSS} {FLASH}",
            "cross_layers",
            "unpacked",
        ),
        (
            "0.24",
            "plain",
            f"VLLM_USE_V2_MODEL_RUNNER=1 vllm serve M {CROSS} {FLASH}",
            "unpacked",
            "cross_layers",
        ),
        (
            "0.24",
            "plain",
            f"VLLM_KV_CACHE_LAYOUT=NHD vllm serve M {CROSS} {FLASH}",
            "unpacked",
            "cross_layers",
        ),
        (
            "0.24",
            "plain",
            f"{CROSS} --attention-backend FLEX_ATTENTION",
            "unpacked",
            "cross_layers",
        ),
        ("0.33", "plain", "-tp 1", "LBHNC", "BLHNC"),
        ("0.33", "plain", "-tp 1", "LBHNC", "LBNHC"),
        ("0.33", "plain", NIXL, "LBHNC", "LBNHC"),
        ("0.33", "plain", "--attention-backend CUSTOM", "LBHNC", "LBNHC"),
        ("0.33", "plain", FLASH, "LBHNC", "LBNHC"),
        ("0.33", "plain", "--attention-backend FLEX_ATTENTION", "LBNHC", "LBHNC"),
        ("0.33", "plain", "VLLM_KV_CACHE_LAYOUT=BLHNC vllm serve M", "BLHNC", "LBHNC"),
        ("0.33", "plain", "VLLM_KV_CACHE_LAYOUT=NHD vllm serve M", "LBNHC", "LBHNC"),
        ("0.33", "mla", "VLLM_KV_CACHE_LAYOUT=BLNHC vllm serve M", "BLNHC", "LBNHC"),
    ],
)
def test_allocation_that_a_line_selects(
    version: str, layout: str, line: str, used: str, unused: str
) -> None:
    projection = _project(layout, line, version)
    allocation = find_nixl_allocation(projection)
    assert allocation is not None
    assert allocation.name == used
    assert {each.name: each.state for each in projection.allocations}[unused] == "not met"


@pytest.mark.parametrize(
    ("layout", "line", "possible"),
    [
        ("plain", "-tp 1", {"LBHNC": "requires"}),
        ("plain", NIXL, {"LBHNC": "requires"}),
        ("plain", "--attention-backend CUSTOM", {"LBHNC": "requires"}),
        ("plain", FLASH, {"LBHNC": "met"}),
        ("plain", OTHER.format("OffloadingConnector"), dict.fromkeys(KV_CACHE_LAYOUTS, "requires")),
        ("mla", NIXL, dict.fromkeys(KV_CACHE_LAYOUTS, "requires")),
    ],
)
def test_only_a_layout_that_a_connector_asks_for_has_transfers(
    layout: str, line: str, possible: dict[str, str]
) -> None:
    allocations = _project(layout, line, "0.33").allocations
    for allocation in allocations:
        states = {each.name: each for each in allocation.conditions}
        if allocation.name in KV_CACHE_LAYOUTS:
            assert states["layout"].state == possible.get(allocation.name, "not met")
            assert states["layout"].by_line == (states["layout"].state != "requires")
    assert {each.name for each in allocations if each.is_possible} == {*possible}


@pytest.mark.parametrize(
    ("line", "layout", "count"),
    [
        (NIXL, "hybrid", 1),
        (f"VLLM_SSM_CONV_STATE_LAYOUT=DS vllm serve M {NIXL}", "hybrid", 0),
        ("-tp 1", "hybrid", 0),  # what is assumed is not a finding
        (OTHER.format("OffloadingConnector"), "hybrid", 0),
    ],
)
def test_states_that_nixl_does_not_take(line: str, layout: str, count: int) -> None:
    findings = [*check_nixl(_project(layout, f"{line} --block-size 16", "0.24"))]
    assert [finding.code for finding in findings] == ["KV622"] * count


@pytest.mark.parametrize(
    ("version", "line", "size"),
    [
        ("0.33", "vllm serve M", 16),
        ("0.33", FLASH, 16),
        ("0.33", "--attention-backend flashmla", 64),
        ("0.24", "--attention-backend FLASHINFER_MLA", 32),
        ("0.24", "--attention-backend ROCM_AITER_UNIFIED_ATTN", 64),
        ("0.33", "--attention-backend HPC_ATTN", 64),
        ("0.24", "--attention-backend CUSTOM", 16),
        ("0.33", "--attention-backend FLASHMLA --block-size 128", 128),
    ],
)
def test_block_size_of_a_line(version: str, line: str, size: int) -> None:
    serve = parse_serve_line(line, version)
    assert build_request(serve, version).block_size == size
    notes = " ".join(list_serve_notes(serve, version))
    assert (f"blocks of {size} tokens are assumed" in notes) == (serve.block_size is None)
    assert "NixlConnector is assumed" in notes


def test_pages_that_are_not_known() -> None:
    serve = parse_serve_line("--kv-cache-dtype int8_per_token_head", "0.33")
    with pytest.raises(KvRenameError, match="pages of --kv-cache-dtype int8_per_token_head"):
        build_request(serve, "0.33")
