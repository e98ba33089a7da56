"""Projections are what vLLM's own code plans, from its wheels."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
from architectures import Architecture, build_layout, draw_architecture
from witness import BLOCK_COUNT, Witness

from onnxkvrename.vllm.groups import Grouping
from onnxkvrename.vllm.memory import Allocation
from onnxkvrename.vllm.projection import Projection, project_layout
from onnxkvrename.vllm.specs import ProjectionRequest

SEEDS = range(1000)
"""The seeds of the architectures that are compared."""
MOST = 0.9 * len(SEEDS)


@pytest.fixture(scope="module")
def v024() -> Witness:
    return Witness("0.24.0")


@pytest.fixture(scope="module")
def v033() -> Witness:
    return Witness("0.33.0")


def project(architecture: Architecture, version: str) -> Projection | None:
    """The projection; ``None`` where a layer cannot be divided or aligned."""
    request = ProjectionRequest(architecture.block_size, architecture.tp, version)
    projection = project_layout(build_layout(architecture), request)
    return None if projection.refusals else projection


def find_allocation(projection: Projection, name: str) -> Allocation:
    return next(a for a in projection.allocations if a.name == name)


def measure_vllm_page(group: Any, layer_name: str) -> tuple[int, int, int]:
    """The block size, the page and the page without padding of a layer in vLLM's group."""
    spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(layer_name, group.kv_cache_spec)
    if hasattr(spec, "shapes"):
        states = zip(spec.shapes, spec.dtypes, strict=True)
        unpadded = sum(math.prod(shape) * dtype.itemsize for shape, dtype in states)
        return 0, spec.page_size_bytes, unpadded
    return spec.block_size, spec.page_size_bytes, spec.real_page_size_bytes


def list_vllm_pages(groups: Any) -> list[list[tuple[int, int, int, int]]]:
    return [
        [(int(name), *measure_vllm_page(group, name)) for name in group.layer_names]
        for group in groups
    ]


def list_projected_pages(grouping: Grouping) -> list[list[tuple[int, int, int, int]]]:
    return [
        [(s.layer, s.block_size or 0, s.page_size, s.unpadded_page_size) for s in group.specs]
        for group in grouping.groups
    ]


def list_vllm_slots(tensors: Any) -> list[tuple[list[int], int, int]]:
    """The layers that share each tensor of 0.24, its offset and its block stride."""
    return [([int(name) for name in t.shared_by], t.offset, t.block_stride) for t in tensors]


def list_projected_slots(allocation: Allocation) -> list[tuple[list[int], int, int]]:
    return [
        ([member.layer for member in p.members], p.offset, p.block_stride)
        for p in allocation.placements
    ]


def list_vllm_strides(tensors: Any) -> list[tuple[list[int], int, int, int]]:
    """The layers of each tensor of 0.33, its offset and its strides."""
    return [
        ([int(name) for name in t.layers], t.offset, t.layer_stride, t.block_stride)
        for t in tensors
    ]


def list_projected_strides(allocation: Allocation) -> list[tuple[list[int], int, int, int]]:
    strides = []
    for placement in allocation.placements:
        factor = BLOCK_COUNT if placement.per_block else 1
        layers = [member.layer for member in placement.members]
        offset, layer_stride = placement.offset * factor, placement.layer_stride * factor
        strides.append((layers, offset, layer_stride, placement.block_stride))
    return strides


def requires_indexing(grouping: Grouping) -> bool:
    return "block stride indexing" in {condition.name for condition in grouping.conditions}


def test_pages_groups_and_tensors_of_0_24_are_vllms(v024: Witness) -> None:
    methods = Counter[str]()
    for seed in SEEDS:
        architecture = draw_architecture(seed)
        projection = project(architecture, "0.24")
        if projection is None:
            methods["refused before"] += 1
            continue
        (grouping,) = projection.groupings
        methods[grouping.method] += 1
        plan = v024.make_plan(architecture)
        if plan is None:
            assert not grouping.groups, architecture
            continue
        assert list_vllm_pages(plan.kv_cache_groups) == list_projected_pages(grouping), architecture
        is_refused_unindexed = v024.make_groups(architecture, indexed=False) is None
        assert is_refused_unindexed == requires_indexing(grouping), architecture
        tensors = plan.kv_cache_tensors
        if grouping.method == "uniform_groups":
            slots = list_projected_slots(find_allocation(projection, "packed"))
        else:
            allocation = find_allocation(projection, "unpacked")
            # Tensors that are not packed have no block stride in 0.24.
            slots = [(layers, offset, 0) for layers, offset, _ in list_projected_slots(allocation)]
            sizes = [placement.page_size * BLOCK_COUNT for placement in allocation.placements]
            assert [tensor.size for tensor in tensors] == sizes, architecture
        assert list_vllm_slots(tensors) == slots, architecture
    assert methods.keys() >= {
        "none",
        "uniform_spec",
        "uniform_type",
        "uniform_groups",
        "uniform_page_size",
    }
    assert methods.total() - methods["refused before"] > MOST


@pytest.mark.parametrize("name", ["unpacked", "packed"])
def test_blocks_and_descriptors_of_0_24_are_nixls(v024: Witness, name: str) -> None:
    compared = 0
    for seed in SEEDS:
        architecture = draw_architecture(seed)
        length = random.Random(seed).choice([1, 127, 128, 129, 5000])
        block_size = architecture.block_size
        request = ProjectionRequest(block_size, architecture.tp, "0.24", (length,))
        allocations = project_layout(build_layout(architecture), request).allocations
        transfers = [t for a in allocations if a.name == name for t in a.transfers]
        if not transfers or transfers[0].descriptors is None:
            continue
        (transfer,) = transfers
        assert transfer.regions is not None
        plan = v024.make_plan(architecture, cross_layers=name == "packed")
        counts = v024.count_descriptors(plan, block_size, length, transfer.regions)
        assert counts == [*transfer.blocks, transfer.descriptors], architecture
        compared += 1
    assert compared > 0.2 * len(SEEDS)


def test_packed_tensors_of_0_24_are_vllms(v024: Witness) -> None:
    compared = 0
    for seed in SEEDS:
        architecture = draw_architecture(seed)
        projection = project(architecture, "0.24")
        if projection is None or not projection.allocations:
            continue
        packed = find_allocation(projection, "packed")
        if not packed.is_possible:
            continue
        tensors = v024.make_plan(architecture, cross_layers=True).kv_cache_tensors
        assert list_vllm_slots(tensors) == list_projected_slots(packed), architecture
        sizes = {tensor.size for tensor in tensors}
        assert sizes == {BLOCK_COUNT * (packed.bytes_per_block or 0)}
        compared += 1
    assert compared > 0.3 * len(SEEDS)


@pytest.mark.parametrize("name", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_pages_groups_and_strides_of_0_33_are_vllms(v033: Witness, name: str) -> None:
    methods = Counter[str]()
    with v033.modules.importable():
        layout = v033.interface.KVCacheLayout[name]
    for seed in SEEDS:
        architecture = draw_architecture(seed)
        projection = project(architecture, "0.33")
        if projection is None:
            methods["refused before"] += 1
            continue
        grouping = projection.groupings[int(layout.is_block_outermost)]
        methods[grouping.method] += 1
        groups = v033.make_groups(architecture, layout=layout)
        assert (groups is None) == (not grouping.groups), architecture
        if groups is None:
            continue
        assert list_vllm_pages(groups) == list_projected_pages(grouping), architecture
        allocation = find_allocation(projection, name)
        if v033.count_page_shapes(architecture) > 1 and not layout.is_block_compact:
            assert not allocation.is_possible, architecture
            continue
        plan = v033.make_plan(architecture, layout=layout)
        assert (plan is not None) == allocation.is_possible, architecture
        if plan is not None:
            tensors = plan.kv_cache_tensors
            assert list_vllm_strides(tensors) == list_projected_strides(allocation), architecture
            sizes = {tensor.size for tensor in tensors}
            assert sizes == {BLOCK_COUNT * (allocation.bytes_per_block or 0)}
    assert methods.total() - methods["refused before"] > MOST
    assert methods.keys() >= {"uniform_spec", "uniform_type", "uniform_page_size"}
    if layout.is_block_outermost:
        assert methods["packed"] > 0.3 * len(SEEDS)
    else:
        assert methods["none"] > 0.05 * len(SEEDS)
        assert methods["full_allocation"] > 0.01 * len(SEEDS)
