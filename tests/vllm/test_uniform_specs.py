from __future__ import annotations

import pytest
from layers import attention, layout, linear, mla, sliding

from onnxkvrename.layout.layout import Buffer
from onnxkvrename.vllm.specs import ERAS, Asked, Spec, specs
from onnxkvrename.vllm.uniform_specs import merge, merged, repeats, uniform


def of(*layers: tuple[Buffer, ...]) -> tuple[Spec, ...]:
    return specs(layout(*layers), Asked(16)).specs


@pytest.mark.parametrize(
    ("layers", "eras"),
    [
        ((attention(0), attention(1)), ERAS),
        ((attention(0), attention(1, heads=4)), ()),
        ((attention(0), attention(1, size_v=32)), ("0.24",)),
        ((attention(0), mla(1)), ()),
        ((mla(0), mla(1, rank=256)), ("0.24",)),
        ((mla(0, window=8), mla(1, rank=256, window=8)), ERAS),
        ((mla(0, window=8), mla(1, window=16)), ()),
        ((sliding(0, window=8), sliding(1, window=8)), ERAS),
        ((sliding(0, window=8), sliding(1, window=16)), ()),
        ((linear(0), linear(1)), ERAS),
        ((linear(0), linear(1, conv=(64, 3))), ()),
    ],
)
def test_specs_that_merge(layers: tuple[tuple[Buffer, ...], ...], eras: tuple[str, ...]) -> None:
    found = of(*layers)
    assert [era for era in ERAS if merge(found, era)] == list(eras)


@pytest.mark.parametrize(
    ("layers", "eras"),
    [
        ((attention(0), attention(1, heads=4), mla(2)), ERAS),
        ((attention(0), sliding(1, window=8)), ()),
        ((sliding(0, window=8), sliding(1, heads=4, window=8)), ERAS),
        ((sliding(0, window=8), mla(1, window=8)), ERAS),
        ((mla(0, window=8), sliding(1, window=8)), ()),
        ((linear(0), linear(1, conv=(64, 3))), ("0.24",)),
        ((attention(0), linear(1)), ()),
        ((attention(0), attention(0, kind="cross_attention")), ()),
        ((attention(0, kind="cross_attention"), attention(1, 4, kind="cross_attention")), ERAS),
    ],
)
def test_specs_of_one_type(layers: tuple[tuple[Buffer, ...], ...], eras: tuple[str, ...]) -> None:
    found = of(*layers)
    assert [era for era in ERAS if uniform(found, era)] == list(eras)


def test_blocks_of_several_sizes_are_not_of_one_type() -> None:
    one, other = of(attention(0), attention(1, heads=4))
    assert not uniform([one, other._replace(block_size=32)], "0.33")


def test_a_merged_group_has_the_first_spec_and_keeps_its_layers() -> None:
    found = merged(of(mla(3), mla(5, rank=256)))
    assert found.layers == (3, 5)
    assert found.bytes_per_block == 2 * 16 * 576 * 2


def test_repeats_are_the_layers_of_the_most_frequent_page() -> None:
    assert repeats(of(mla(0), mla(1, rank=256), mla(2))) == 2
