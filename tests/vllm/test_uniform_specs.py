from __future__ import annotations

import pytest
from layers import attention, layout, linear, mla, sliding

from onnxkvrename.layout.layout import Buffer
from onnxkvrename.vllm.layer_specs import build_specs
from onnxkvrename.vllm.specs import (
    VLLM_VERSIONS,
    KvCacheSpec,
    ProjectionRequest,
    build_merged_group,
    can_merge,
    count_most_common_page,
    is_uniform_type,
)


def of(*layers: tuple[Buffer, ...]) -> tuple[KvCacheSpec, ...]:
    return build_specs(layout(*layers), ProjectionRequest(16)).specs


@pytest.mark.parametrize(
    ("layers", "eras"),
    [
        ((attention(0), attention(1)), VLLM_VERSIONS),
        ((attention(0), attention(1, heads=4)), ()),
        ((attention(0), attention(1, size_v=32)), ("0.24",)),
        ((attention(0), mla(1)), ()),
        ((mla(0), mla(1, rank=256)), ("0.24",)),
        ((mla(0, window=8), mla(1, rank=256, window=8)), VLLM_VERSIONS),
        ((mla(0, window=8), mla(1, window=16)), ()),
        ((sliding(0, window=8), sliding(1, window=8)), VLLM_VERSIONS),
        ((sliding(0, window=8), sliding(1, window=16)), ()),
        ((linear(0), linear(1)), VLLM_VERSIONS),
        ((linear(0), linear(1, conv=(64, 3))), ()),
    ],
)
def test_specs_that_merge(layers: tuple[tuple[Buffer, ...], ...], eras: tuple[str, ...]) -> None:
    found = of(*layers)
    assert [era for era in VLLM_VERSIONS if can_merge(found, era)] == list(eras)


@pytest.mark.parametrize(
    ("layers", "eras"),
    [
        ((attention(0), attention(1, heads=4), mla(2)), VLLM_VERSIONS),
        ((attention(0), sliding(1, window=8)), ()),
        ((sliding(0, window=8), sliding(1, heads=4, window=8)), VLLM_VERSIONS),
        ((sliding(0, window=8), mla(1, window=8)), VLLM_VERSIONS),
        ((mla(0, window=8), sliding(1, window=8)), ()),
        ((linear(0), linear(1, conv=(64, 3))), ("0.24",)),
        ((attention(0), linear(1)), ()),
        ((attention(0), attention(0, kind="cross_attention")), ()),
        (
            (attention(0, kind="cross_attention"), attention(1, 4, kind="cross_attention")),
            VLLM_VERSIONS,
        ),
    ],
)
def test_specs_of_one_type(layers: tuple[tuple[Buffer, ...], ...], eras: tuple[str, ...]) -> None:
    found = of(*layers)
    assert [era for era in VLLM_VERSIONS if is_uniform_type(found, era)] == list(eras)


def test_blocks_of_several_sizes_are_not_of_one_type() -> None:
    one, other = of(attention(0), attention(1, heads=4))
    assert not is_uniform_type([one, other._replace(block_size=32)], "0.33")


def test_a_merged_group_has_the_first_spec_and_keeps_its_layers() -> None:
    found = build_merged_group(of(mla(3), mla(5, rank=256)))
    assert found.layers == (3, 5)
    assert found.bytes_per_block == 2 * 16 * 576 * 2


def test_repeats_are_the_layers_of_the_most_frequent_page() -> None:
    assert count_most_common_page(of(mla(0), mla(1, rank=256), mla(2))) == 2
