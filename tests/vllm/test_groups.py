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

from onnxkvrename.layout.layout import KvBuffer, Layout
from onnxkvrename.vllm.groups import Grouping, group_layers
from onnxkvrename.vllm.layer_specs import build_specs
from onnxkvrename.vllm.specs import ProjectionRequest, Refusal, RefusalError


def form_groups(model: Layout, block_size: int = 16) -> Grouping:
    return group_layers(build_specs(model, ProjectionRequest(block_size)).specs)


def refuse_groups(model: Layout) -> Refusal:
    with pytest.raises(RefusalError) as error:
        form_groups(model)
    return error.value.refusal


def list_layers(grouping: Grouping) -> list[tuple[int, ...]]:
    return [group.layers for group in grouping.groups]


def test_layers_with_one_spec_are_one_group() -> None:
    grouping = form_groups(build_layers(*(build_attention(layer) for layer in range(3))))
    assert (grouping.method, list_layers(grouping)) == ("uniform_spec", [(0, 1, 2)])
    assert grouping.uniform_page_size == 16 * 8 * 128 * 2


def test_full_attention_of_several_sizes_is_one_group_with_a_spec_for_each_layer() -> None:
    grouping = form_groups(build_layers(build_attention(0, heads=8), build_attention(1, heads=2)))
    assert (grouping.method, list_layers(grouping)) == ("uniform_type", [(0, 1)])
    assert [spec.page_size for spec in grouping.groups[0].specs] == [32768, 8192]
    assert grouping.uniform_page_size is None


def test_gpt_oss_has_two_groups_of_twelve() -> None:
    grouping = form_groups(build_gpt_oss(), block_size=64)
    assert list_layers(grouping) == [tuple(range(0, 24, 2)), tuple(range(1, 24, 2))]
    assert [group.kind for group in grouping.groups] == ["sliding_window", "full_attention"]
    assert (grouping.group_size, grouping.padding_layers, grouping.uniform_page_size) == (
        12,
        0,
        131072,
    )


def test_layers_of_a_larger_bucket_are_dealt_out_in_turn() -> None:
    # Gemma's pattern: five windows to one whole layer, and two windows over.
    layers = [
        build_sliding(layer, window=512) if layer % 6 != 5 else build_attention(layer)
        for layer in range(14)
    ]
    grouping = form_groups(build_layers(*layers))
    assert list_layers(grouping) == [
        (0, 7),
        (1, 8),
        (2, 9),
        (3, 10),
        (4, 12),
        (6, 13),
        (5, 11),
    ]
    assert (grouping.group_size, grouping.padding_layers) == (2, 0)


@pytest.mark.parametrize(
    ("full_layers", "group_size", "group_count"),
    [(12, 12, 2), (17, 17, 2), (18, 12, 3), (24, 12, 3)],
)
def test_the_largest_bucket_sets_the_size_if_it_is_less_than_half_as_large_again(
    full_layers: int, group_size: int, group_count: int
) -> None:
    layers = [build_sliding(layer, window=128) for layer in range(12)]
    grouping = form_groups(
        build_layers(*layers, *(build_attention(12 + layer) for layer in range(full_layers)))
    )
    assert (grouping.group_size, len(grouping.groups)) == (group_size, group_count)
    assert grouping.padding_layers == group_size * group_count - 12 - full_layers


def test_windows_of_two_sizes_are_separate_groups() -> None:
    layers = [build_sliding(0, window=128), build_sliding(1, window=512), build_attention(2)]
    assert list_layers(form_groups(build_layers(*layers))) == [(0,), (1,), (2,)]


def test_a_window_of_unknown_size_is_refused_if_there_is_another() -> None:
    refusal = refuse_groups(build_layers(build_sliding(0), build_sliding(1, window=128)))
    assert refusal.layers == (0,)
    assert refusal.hint == "--dim sliding_window=SIZE decides it"
    assert form_groups(build_layers(build_sliding(0), build_sliding(1), build_attention(2))).groups


def test_a_page_that_divides_the_largest_gets_a_larger_block() -> None:
    grouping = form_groups(
        build_layers(build_attention(0, heads=8), build_sliding(1, heads=2, window=128))
    )
    assert [
        (group.first_spec.block_size, group.first_spec.page_size) for group in grouping.groups
    ] == [
        (16, 32768),
        (64, 32768),
    ]
    assert grouping.conditions == ()


def test_a_page_that_does_not_divide_is_padded_and_requires_the_backend_to_know() -> None:
    uneven = build_layers(build_attention(0, heads=8), build_sliding(1, heads=3, window=128))
    grouping = form_groups(uneven)
    small = grouping.groups[1].first_spec
    assert (small.block_size, small.unpadded_page_size, small.page_size) == (16, 12288, 32768)
    (condition,) = grouping.conditions
    assert (condition.name, condition.state) == ("block stride indexing", "requires")
    assert condition.why.endswith("else vLLM refuses to pad layers 1")


def test_states_smaller_than_attention_are_refused() -> None:
    hybrid = build_layers(build_attention(0), build_linear(1, conv=(512, 3), recurrent=(8, 32, 32)))
    refusal = refuse_groups(hybrid)
    assert refusal.layers == (1,)
    assert refusal.reason == "pages of 19456 bytes beside 32768: states cannot be padded"


def test_a_merge_of_pages_of_several_sizes_is_an_unmet_condition() -> None:
    # vLLM does not compare the value's head, and gives both layers the first one's.
    uneven = build_layers(build_attention(0, size_v=64), build_attention(1, size_v=32))
    grouping = form_groups(uneven)
    assert [spec.page_size for spec in grouping.groups[0].specs] == [32768, 32768]
    (condition,) = grouping.conditions
    assert (condition.name, condition.state) == ("one page", "not met")


def test_buckets_with_unified_pages_are_not_merged() -> None:
    windows = [build_sliding(layer, heads=1, size=288, window=32) for layer in (2, 3)]
    halves = build_layers(build_mla(0), build_mla(1, rank=224), *windows)
    assert list_layers(form_groups(halves)) == [(0,), (1,), (2,), (3,)]


def test_windowed_mla_is_split_and_full_mla_stays_in_one_group() -> None:
    layers = [
        build_mla(layer) if layer % 3 == 0 else build_mla(layer, window=128) for layer in range(9)
    ]
    grouping = form_groups(build_layers(*layers))
    assert (grouping.method, list_layers(grouping)) == (
        "uniform_groups",
        [(0, 3, 6), (1, 4, 7), (2, 5, 8)],
    )


def test_windowed_mla_is_padded_to_the_next_page_of_full_mla() -> None:
    grouping = form_groups(build_layers(build_mla(0), build_mla(1, rank=256, rope=64, window=128)))
    small = grouping.groups[1].first_spec
    assert (small.unpadded_page_size, small.page_size) == (16 * 320 * 2, 16 * 576 * 2)


def test_groups_of_windowed_mla_have_the_size_that_pads_least() -> None:
    # Two layers of full MLA, ten with one window and twelve with another: of the sizes from 2 on,
    # only 2 needs no padding.
    layers = [build_mla(layer) for layer in range(2)]
    layers += [build_mla(layer, window=128) for layer in range(2, 12)]
    layers += [build_mla(layer, window=256) for layer in range(12, 24)]
    grouping = form_groups(build_layers(*layers))
    assert [len(group.layers) for group in grouping.groups] == [2] * 12


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (build_attention(0), "supports windowed MLA only together with full MLA"),
        (build_mla(0, rank=64), "a page of windowed MLA is larger than any of full MLA"),
    ],
)
def test_windowed_mla_with_other_kinds_or_larger_pages_is_refused(
    other: tuple[KvBuffer, ...], reason: str
) -> None:
    assert reason in refuse_groups(build_layers(other, build_mla(1, window=128))).reason
