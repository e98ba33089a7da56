from __future__ import annotations

import pytest
from build_layouts import build_attention, build_layers, build_mla, build_sliding

from onnxkvrename.layout.layout import KvBuffer, Layout
from onnxkvrename.vllm.groups import Grouping, group_layers
from onnxkvrename.vllm.layer_specs import build_specs
from onnxkvrename.vllm.packed_groups import choose_group_size
from onnxkvrename.vllm.specs import ProjectionRequest


def form_groups(model: Layout, version: str, *, block_outermost: bool = False) -> Grouping:
    specs = build_specs(model, ProjectionRequest(16, vllm_version=version)).specs
    return group_layers(specs, version, block_outermost=block_outermost)


def list_layers(grouping: Grouping) -> list[tuple[int, ...]]:
    return [group.layers for group in grouping.groups]


def test_0_24_splits_windowed_mla_and_keeps_full_mla_in_one_group() -> None:
    layers = [
        build_mla(layer) if layer % 3 == 0 else build_mla(layer, window=128) for layer in range(9)
    ]
    grouping = form_groups(build_layers(*layers), "0.24")
    assert (grouping.method, list_layers(grouping)) == (
        "uniform_groups",
        [(0, 3, 6), (1, 4, 7), (2, 5, 8)],
    )


def test_windowed_mla_is_padded_to_the_next_page_of_full_mla() -> None:
    grouping = form_groups(
        build_layers(build_mla(0), build_mla(1, rank=256, rope=64, window=128)), "0.24"
    )
    small = grouping.groups[1].first_spec
    assert (small.unpadded_page_size, small.page_size) == (16 * 320 * 2, 16 * 576 * 2)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (build_attention(0), "supports windowed MLA only together with full MLA"),
        (build_mla(0, rank=64), "a page of windowed MLA is larger than any of full MLA"),
    ],
)
def test_0_24_refuses_windowed_mla_with_other_kinds_or_larger_pages(
    other: tuple[KvBuffer, ...], reason: str
) -> None:
    grouping = form_groups(build_layers(other, build_mla(1, window=128)), "0.24")
    assert grouping.refusal is not None
    assert reason in grouping.refusal.reason


def test_0_33_packs_pages_of_several_sizes_if_blocks_are_outermost() -> None:
    mixed = build_layers(build_attention(0, heads=8), build_sliding(1, heads=3, window=128))
    grouping = form_groups(mixed, "0.33", block_outermost=True)
    assert (grouping.method, list_layers(grouping)) == ("packed", [(0,), (1,)])
    assert [group.first_spec.page_size for group in grouping.groups] == [32768, 12288]


def test_packed_windows_are_split_to_fit_the_block_of_full_attention() -> None:
    # One whole layer needs 32768 bytes: two windows of 12288 fit, so five make three groups.
    layers = [
        build_attention(0),
        *(build_sliding(layer, heads=3, window=128) for layer in range(1, 6)),
    ]
    grouping = form_groups(build_layers(*layers), "0.33", block_outermost=True)
    assert list_layers(grouping) == [(0,), (1, 4), (2, 5), (3,)]


@pytest.mark.parametrize(
    ("counts", "minimum", "size"),
    [([21, 21], 1, 21), ([11, 21], 11, 11), ([12, 18], 1, 6), ([5], 9, 9), ([10, 12], 10, 12)],
)
def test_the_group_size_pads_least_and_is_the_largest_such(
    counts: list[int], minimum: int, size: int
) -> None:
    assert choose_group_size(counts, minimum) == size
