"""Pipeline stages and GPU memory; the figures are worked out by hand."""

from __future__ import annotations

import pytest
from build_layouts import build_attention, build_gpt_oss, build_layers

from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.memory import Allocation
from onnxkvrename.vllm.projection import (
    Projection,
    check_nixl,
    check_projection,
    find_nixl_allocation,
    project_layout,
)
from onnxkvrename.vllm.specs import VLLM_VERSIONS, ProjectionRequest
from onnxkvrename.vllm.stages import count_gpu_blocks

PAGE = 16 * 8 * 128 * 2
"""Bytes of a page of `build_attention`, with blocks of 16."""


def project(model: Layout, version: str = "0.24", stages: int = 1, **more: int) -> Projection:
    request = ProjectionRequest(
        16, vllm_version=version, prompt_lengths=(100,), pipeline_parallel_size=stages, **more
    )
    return project_layout(model, request)


def find_allocation(projection: Projection, name: str) -> Allocation:
    return next(a for a in projection.allocations if a.name == name)


def test_layers_that_remain_go_to_the_stages_before_the_last() -> None:
    plain = build_layers(*(build_attention(layer) for layer in range(11)))
    projection = project(plain, stages=4)
    sizes = [len(stage.layers) for stage in projection.stages]
    assert sizes == [3, 3, 3, 2]
    assert projection.stages[-1].layers == (9, 10)
    assert [stage.bytes_per_block[0] for stage in projection.stages] == [n * PAGE for n in sizes]


def test_one_stage_has_all_layers_and_the_block_of_all() -> None:
    for version in ("0.24", "0.33"):
        projection = project(build_gpt_oss(), version)
        (stage,) = projection.stages
        assert stage.layers == tuple(range(24))
        assert stage.bytes_per_block == tuple(a.bytes_per_block for a in projection.allocations)


def test_the_largest_stage_decides_how_many_blocks_fit() -> None:
    plain = build_layers(*(build_attention(layer) for layer in range(5)))
    unpacked = find_allocation(project(plain, stages=2, gpu_memory=100 * PAGE), "unpacked")
    assert unpacked.bytes_per_block == 3 * PAGE
    assert count_gpu_blocks(unpacked.bytes_per_block, 100 * PAGE) == 33
    assert unpacked.is_possible


def test_a_stage_has_no_view_and_no_transfer_of_the_whole_model() -> None:
    allocation = find_allocation(project(build_gpt_oss(), stages=2), "packed")
    assert (allocation.placements, allocation.canonical, allocation.padding_share) == (
        (),
        None,
        None,
    )
    (transfer,) = allocation.transfers
    assert (transfer.regions, transfer.descriptors, transfer.bytes) == (None, None, None)
    assert transfer.unknown == (
        "NIXL transfers of pipeline stages: vLLM 0.24 pairs tensor parallel ranks only"
    )


@pytest.mark.parametrize("stages", [3, 10**15])
def test_a_stage_without_a_cache_is_refused(stages: int) -> None:
    projection = project(build_layers(build_attention(0), build_attention(7)), stages=stages)
    (refusal,) = projection.refusals
    assert refusal.reason == f"{stages} pipeline stages: one has no layer with a KV cache"
    assert [finding.code for finding in check_projection(projection)] == ["KV622"]
    assert (projection.groupings, projection.allocations, projection.stages) == ((), (), ())


@pytest.mark.parametrize(("blocks", "possible"), [(0, False), (1, False), (2, True)])
def test_memory_for_a_single_block_is_not_enough(blocks: int, possible: bool) -> None:
    memory = blocks * 2 * PAGE + PAGE
    plain = build_layers(build_attention(0), build_attention(1))
    allocation = find_allocation(project(plain, gpu_memory=memory), "unpacked")
    assert allocation.is_possible == possible
    (condition,) = [c for c in allocation.conditions if c.name == "memory"]
    assert condition.why.startswith(f"{blocks} blocks fit")


@pytest.mark.parametrize(
    ("tokens", "is_possible", "codes"), [(64, True, []), (65, False, ["KV622"])]
)
@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_memory_for_one_request_is_what_vllm_starts_with(
    version: str, tokens: int, is_possible: bool, codes: list[str]
) -> None:
    """vLLM counts its null block only where it schedules, not where it starts."""
    plain = build_layers(build_attention(0), build_attention(1))
    memory = 4 * 2 * PAGE
    request = ProjectionRequest(16, 1, version, gpu_memory=memory, max_model_len=tokens)
    projection = project_layout(plain, request)
    allocation = find_nixl_allocation(projection)
    assert allocation is not None
    assert allocation.is_possible is is_possible
    findings = list(check_nixl(projection))
    assert [finding.code for finding in findings] == codes
    assert all("--max-model-len" in (finding.hint or "") for finding in findings)


def test_whether_a_window_fits_may_depend_on_what_is_scheduled() -> None:
    memory = 30 * 12 * PAGE
    request = ProjectionRequest(16, 1, "0.33", gpu_memory=memory, max_model_len=320)
    allocation = find_nixl_allocation(project_layout(build_gpt_oss(), request))
    assert allocation is not None
    (condition,) = [c for c in allocation.conditions if c.name == "memory"]
    assert (condition.state, allocation.is_possible) == ("requires", True)


def test_a_request_takes_a_block_of_each_group_and_two_of_a_window() -> None:
    for blocks, possible in ((3, False), (4, True)):
        memory = blocks * 12 * PAGE
        allocation = find_allocation(project(build_gpt_oss(), gpu_memory=memory), "unpacked")
        assert allocation.bytes_per_block == 12 * PAGE
        assert allocation.is_possible == possible


def test_without_memory_nothing_is_said_of_blocks() -> None:
    allocation = find_allocation(project(build_gpt_oss()), "unpacked")
    assert "memory" not in {condition.name for condition in allocation.conditions}
    assert count_gpu_blocks(allocation.bytes_per_block, None) is None
