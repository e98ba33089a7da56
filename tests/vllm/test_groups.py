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
from onnxkvrename.vllm.groups import Grouping, group_layers
from onnxkvrename.vllm.layer_specs import build_specs
from onnxkvrename.vllm.specs import ProjectionRequest


def form_groups(
    model: Layout, version: str = "0.24", block_size: int = 16, *, block_outermost: bool = False
) -> Grouping:
    request = ProjectionRequest(block_size, vllm_version=version)
    specs = build_specs(model, request).specs
    return group_layers(specs, version, block_outermost=block_outermost)


def list_layers(grouping: Grouping) -> list[tuple[int, ...]]:
    return [group.layers for group in grouping.groups]


@pytest.mark.parametrize("version", ["0.24", "0.33"])
def test_layers_with_one_spec_are_one_group(version: str) -> None:
    grouping = form_groups(build_layers(*(build_attention(layer) for layer in range(3))), version)
    assert (grouping.method, list_layers(grouping)) == ("uniform_spec", [(0, 1, 2)])
    assert grouping.uniform_page_size == 16 * 8 * 128 * 2


@pytest.mark.parametrize("version", ["0.24", "0.33"])
def test_full_attention_of_several_sizes_is_one_group_with_a_spec_for_each_layer(
    version: str,
) -> None:
    grouping = form_groups(
        build_layers(build_attention(0, heads=8), build_attention(1, heads=2)), version
    )
    assert (grouping.method, list_layers(grouping)) == ("uniform_type", [(0, 1)])
    assert [spec.page_size for spec in grouping.groups[0].specs] == [32768, 8192]
    assert grouping.uniform_page_size is None


@pytest.mark.parametrize("version", ["0.24", "0.33"])
def test_gpt_oss_has_two_groups_of_twelve(version: str) -> None:
    grouping = form_groups(build_gpt_oss(), version, block_size=64)
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
    grouping = form_groups(build_layers(build_sliding(0), build_sliding(1, window=128)))
    assert grouping.refusal is not None
    assert grouping.refusal.layers == (0,)
    assert grouping.refusal.hint == "--dim sliding_window=SIZE decides it"
    assert (
        form_groups(build_layers(build_sliding(0), build_sliding(1), build_attention(2))).refusal
        is None
    )


@pytest.mark.parametrize("version", ["0.24", "0.33"])
def test_a_page_that_divides_the_largest_gets_a_larger_block(version: str) -> None:
    grouping = form_groups(
        build_layers(build_attention(0, heads=8), build_sliding(1, heads=2, window=128)), version
    )
    assert [
        (group.first_spec.block_size, group.first_spec.page_size) for group in grouping.groups
    ] == [
        (16, 32768),
        (64, 32768),
    ]
    assert grouping.conditions == ()


def test_a_page_that_does_not_divide_is_padded_and_0_24_requires_the_backend_to_know() -> None:
    uneven = build_layers(build_attention(0, heads=8), build_sliding(1, heads=3, window=128))
    for version in ("0.24", "0.33"):
        small = form_groups(uneven, version).groups[1].first_spec
        assert (small.block_size, small.unpadded_page_size, small.page_size) == (16, 12288, 32768)
    (condition,) = form_groups(uneven, "0.24").conditions
    assert (condition.name, condition.state) == ("block stride indexing", "requires")
    assert condition.why.endswith("else vLLM refuses to pad layers 1")
    assert form_groups(uneven, "0.33").conditions == ()


def test_only_0_33_pads_states_smaller_than_attention() -> None:
    hybrid = build_layers(build_attention(0), build_linear(1, conv=(512, 3), recurrent=(8, 32, 32)))
    refusal = form_groups(hybrid, "0.24").refusal
    assert refusal is not None
    assert (refusal.layers, refusal.hint) == ((1,), "vLLM 0.33 pads them")
    assert refusal.reason == "pages of 19456 bytes beside 32768: states cannot be padded"
    assert form_groups(hybrid, "0.33").groups[1].first_spec.page_size == 32768


def test_0_33_does_not_pad_mla_and_allocates_windows_as_full_attention() -> None:
    # 16 * 576 * 2 = 18432 does not divide 32768.
    mixed = build_layers(build_mla(0), build_sliding(1, window=128))
    grouping = form_groups(mixed, "0.33")
    assert (grouping.method, list_layers(grouping)) == ("full_allocation", [(0, 1)])
    assert [spec.kind for spec in grouping.groups[0].specs] == ["mla_attention", "full_attention"]
    assert grouping.groups[0].kind == "unknown"


def test_0_33_refuses_to_pad_mla_without_windows() -> None:
    mixed = build_layers(
        build_mla(0), build_attention(1, kind="chunked_local_attention", window=128)
    )
    refusal = form_groups(mixed, "0.33").refusal
    assert refusal is not None
    assert (refusal.layers, refusal.reason) == (
        (0,),
        "pages of 18432 bytes beside 32768: pages of MLA cannot be padded",
    )
    assert form_groups(mixed, "0.33", block_outermost=True).refusal is None


def test_a_merge_of_pages_of_several_sizes_is_an_unmet_condition() -> None:
    # 0.24 does not compare the value's head, and gives both layers the first one's.
    uneven = build_layers(build_attention(0, size_v=64), build_attention(1, size_v=32))
    grouping = form_groups(uneven, "0.24")
    assert [spec.page_size for spec in grouping.groups[0].specs] == [32768, 32768]
    (condition,) = grouping.conditions
    assert (condition.name, condition.state) == ("one page", "not met")
    assert [spec.page_size for spec in form_groups(uneven, "0.33").groups[0].specs] == [
        32768,
        24576,
    ]


def test_with_unified_pages_0_24_does_not_merge_buckets() -> None:
    windows = [build_sliding(layer, heads=1, size=288, window=32) for layer in (2, 3)]
    halves = build_layers(build_mla(0), build_mla(1, rank=224), *windows)
    assert list_layers(form_groups(halves, "0.24")) == [(0,), (1,), (2,), (3,)]


def test_with_unified_pages_0_33_merges_windowed_mla() -> None:
    windows = [build_mla(2, window=32), build_mla(3, rank=224, window=32)]
    grouping = form_groups(build_layers(build_mla(0), build_mla(1), *windows), "0.33")
    assert (grouping.method, list_layers(grouping)) == ("uniform_page_size", [(0, 1), (2, 3)])


def test_no_layers_are_no_groups() -> None:
    assert form_groups(build_layers()) == Grouping("none", ())
