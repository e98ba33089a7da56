from __future__ import annotations

import pytest
from build_layouts import build_attention, build_layers, build_linear, build_mla, build_sliding

from onnxkvrename.layout.layout import KvBuffer
from onnxkvrename.vllm.layer_specs import build_specs
from onnxkvrename.vllm.specs import (
    Condition,
    ConditionState,
    KvCacheSpec,
    ProjectionRequest,
    build_merged_group,
    build_requirement,
    can_merge,
    combine_states,
    decide_condition,
    find_open_conditions,
    is_uniform_type,
)


def build(*layers: tuple[KvBuffer, ...]) -> tuple[KvCacheSpec, ...]:
    return build_specs(build_layers(*layers), ProjectionRequest(16)).specs


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((build_attention(0), build_attention(1)), True),
        ((build_attention(0), build_attention(1, heads=4)), False),
        ((build_attention(0), build_attention(1, size_v=32)), True),
        ((build_attention(0), build_mla(1)), False),
        ((build_mla(0), build_mla(1, rank=256)), True),
        ((build_mla(0, window=8), build_mla(1, rank=256, window=8)), True),
        ((build_mla(0, window=8), build_mla(1, window=16)), False),
        ((build_sliding(0, window=8), build_sliding(1, window=8)), True),
        ((build_sliding(0, window=8), build_sliding(1, window=16)), False),
        ((build_linear(0), build_linear(1)), True),
        ((build_linear(0), build_linear(1, conv=(64, 3))), False),
    ],
)
def test_can_merge_compares_what_vllm_compares(
    layers: tuple[tuple[KvBuffer, ...], ...], expected: bool
) -> None:
    assert can_merge(build(*layers)) is expected


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((build_attention(0), build_attention(1, heads=4), build_mla(2)), True),
        ((build_attention(0), build_sliding(1, window=8)), False),
        ((build_sliding(0, window=8), build_sliding(1, heads=4, window=8)), True),
        ((build_sliding(0, window=8), build_mla(1, window=8)), True),
        ((build_mla(0, window=8), build_sliding(1, window=8)), False),
        ((build_linear(0), build_linear(1, conv=(64, 3))), True),
        ((build_attention(0), build_linear(1)), False),
        ((build_attention(0), build_attention(0, kind="cross_attention")), False),
        (
            (
                build_attention(0, kind="cross_attention"),
                build_attention(1, 4, kind="cross_attention"),
            ),
            True,
        ),
    ],
)
def test_is_uniform_type_follows_the_first_spec(
    layers: tuple[tuple[KvBuffer, ...], ...], expected: bool
) -> None:
    assert is_uniform_type(build(*layers)) is expected


def test_blocks_of_several_sizes_are_not_of_one_type() -> None:
    first, second = build(build_attention(0), build_attention(1, heads=4))
    assert not is_uniform_type([first, second._replace(block_size=32)])


def test_a_merged_group_has_the_first_spec_and_keeps_its_layers() -> None:
    group = build_merged_group(build(build_mla(3), build_mla(5, rank=256)))
    assert group.layers == (3, 5)
    assert group.bytes_per_block == 2 * 16 * 576 * 2


MET, UNMET = Condition("a", "met", ""), Condition("b", "not met", "")
REQUIRED = build_requirement("c", "the graph cannot decide it")


@pytest.mark.parametrize(
    ("conditions", "state", "open_conditions"),
    [
        ((), "met", ()),
        ((MET,), "met", ()),
        ((MET, REQUIRED), "requires", (REQUIRED,)),
        ((REQUIRED, MET, UNMET), "not met", (UNMET,)),
    ],
)
def test_unmet_conditions_decide_before_required_ones(
    conditions: tuple[Condition, ...],
    state: ConditionState,
    open_conditions: tuple[Condition, ...],
) -> None:
    assert combine_states(conditions) == state
    assert find_open_conditions(conditions) == open_conditions


def test_a_decided_condition_has_the_reason_that_applies() -> None:
    assert decide_condition("a", True, "yes", why_not="no") == Condition("a", "met", "yes")
    assert decide_condition("a", False, "yes", why_not="no") == Condition("a", "not met", "no")
