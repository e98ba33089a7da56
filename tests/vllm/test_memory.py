from __future__ import annotations

from build_layouts import build_attention, build_layers

from onnxkvrename.vllm.groups import group_layers
from onnxkvrename.vllm.layer_specs import build_specs
from onnxkvrename.vllm.memory import (
    Allocation,
    CanonicalKvCacheRef,
    CanonicalKvCaches,
    build_single_tensor_caches,
    compute_padding_share,
)
from onnxkvrename.vllm.specs import Condition, ProjectionRequest, build_requirement

PAGE_SIZE = 16 * 8 * (64 + 64) * 2
"""Bytes of a block of 16 tokens of `attention(0)`."""
GROUPS = group_layers(
    build_specs(build_layers(build_attention(0), build_attention(1)), ProjectionRequest(16)).specs,
    "0.33",
).groups


def test_an_allocation_is_possible_unless_a_condition_fails() -> None:
    requirement = build_requirement("layout", "the user asks for it")
    failure = Condition("version", "not met", "vLLM 0.33 has none")
    assert (Allocation("a", ()).state, Allocation("a", ()).is_possible) == ("met", True)
    assert Allocation("a", (requirement,)).is_possible
    assert not Allocation("a", (requirement, failure)).is_possible


def test_the_padding_share_is_the_part_of_a_block_without_data() -> None:
    assert compute_padding_share(GROUPS, 2 * PAGE_SIZE) == 0
    assert compute_padding_share(GROUPS, 4 * PAGE_SIZE) == 0.5


def test_a_block_for_all_layers_is_one_tensor_that_each_group_refers_to() -> None:
    groups = (*GROUPS, *GROUPS)
    reference = CanonicalKvCacheRef(0, 100)
    view = CanonicalKvCaches((100,), ((reference,), (reference,)))
    assert build_single_tensor_caches(groups, 100) == view
