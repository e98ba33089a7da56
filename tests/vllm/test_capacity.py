"""How many requests fit, how long a hand-off takes, and stages of layers without a cache."""

from __future__ import annotations

import pytest
from build_layouts import (
    build_attention,
    build_gpt_oss,
    build_layers,
    build_linear,
    build_mla,
    build_sliding,
)

from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.capacity import estimate_seconds, measure_capacity, measure_token_bytes
from onnxkvrename.vllm.projection import project_layout
from onnxkvrename.vllm.specs import ProjectionRequest

PLAIN = build_layers(build_attention(0), build_attention(1))
WINDOWED = build_layers(build_attention(0), build_sliding(1, window=128))
HYBRID = build_layers(build_attention(0), build_linear(1))
CROSS = build_layers(build_attention(0), build_attention(1, kind="cross_attention"))


@pytest.mark.parametrize("version", ["0.24", "0.33"])
@pytest.mark.parametrize(
    ("layout", "length", "in_flight", "blocks"),
    [
        (PLAIN, 1000, None, (63, 63)),
        # A window holds what is scheduled as well, and may start within a block.
        (WINDOWED, 1000, 512, (63 + 41, 63 + 41)),
        (WINDOWED, 1000, 8192, (63 + 64, 63 + 64)),
        (WINDOWED, 1000, None, (63 + 9, 63 + 64)),
        (build_layers(build_mla(0)), 1001, None, (63, 63)),
        (CROSS, 1000, None, None),
        (PLAIN, None, None, None),
    ],
)
def test_a_request_takes_the_blocks_of_all_groups(
    layout: Layout,
    length: int | None,
    in_flight: int | None,
    blocks: tuple[int, int] | None,
    version: str,
) -> None:
    request = ProjectionRequest(
        16, vllm_version=version, max_model_len=length, in_flight_tokens=in_flight
    )
    projection = project_layout(layout, request)
    capacity = measure_capacity(projection.groupings[0].groups, projection.request, 1270)
    assert (None if capacity is None else capacity.blocks) == blocks
    if capacity is not None and blocks is not None:
        assert capacity.requests == (1270 / blocks[0], 1270 / blocks[1])


def test_states_take_one_block_of_a_request() -> None:
    request = ProjectionRequest(64, max_model_len=4096)
    projection = project_layout(HYBRID, request)
    capacity = measure_capacity(projection.groupings[0].groups, projection.request, None)
    size = projection.groupings[0].groups[0].first_spec.block_size or 0
    assert capacity is not None
    assert (capacity.blocks, capacity.requests) == ((-(-4096 // size) + 1,) * 2, None)


def test_a_token_adds_bytes_to_the_layers_that_keep_all_tokens() -> None:
    specs = project_layout(build_gpt_oss(), ProjectionRequest(16, tensor_parallel_size=2)).specs
    assert measure_token_bytes(specs) == 12 * 2 * 4 * 64 * 2


@pytest.mark.parametrize(
    ("transferred", "bandwidth", "seconds"),
    [(50_000_000_000, 25_000_000_000, 2.0), (None, 25, None), (1, None, None)],
)
def test_a_hand_off_takes_its_bytes_by_the_bandwidth(
    transferred: int | None, bandwidth: int | None, seconds: float | None
) -> None:
    assert estimate_seconds(transferred, bandwidth) == seconds


def list_stages(
    layer_count: int | None, partition: tuple[int, ...] = (), caches: int = 20
) -> list[int] | str:
    layout = build_layers(*(build_attention(layer) for layer in range(caches)))
    request = ProjectionRequest(
        16, pipeline_parallel_size=2, layer_count=layer_count, layer_partition=partition
    )
    projection = project_layout(layout, request)
    if projection.refusals:
        return projection.refusals[0].reason
    return [len(stage.layers) for stage in projection.stages]


def test_layers_without_a_cache_of_their_own_count_among_the_stages() -> None:
    assert list_stages(None) == [10, 10]
    assert list_stages(30) == [15, 5]
    assert list_stages(31) == [16, 4]
    assert list_stages(None, (12, 8)) == [12, 8]
    assert list_stages(30, (12, 18)) == [12, 8]
    for refused in (list_stages(None, (12, 7)), list_stages(30, (12, 8)), list_stages(20, (20,))):
        assert "VLLM_PP_LAYER_PARTITION" in refused
