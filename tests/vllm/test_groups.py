from __future__ import annotations

import pytest
from layers import attention, gpt_oss, layout, linear, mla, sliding

from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.groups import Grouping, group_layers
from onnxkvrename.vllm.layer_specs import build_specs
from onnxkvrename.vllm.packed_groups import choose_group_size
from onnxkvrename.vllm.specs import ProjectionRequest


def grouped(
    found: Layout, era: str = "0.24", block: int = 16, *, outermost: bool = False
) -> Grouping:
    return group_layers(
        build_specs(found, ProjectionRequest(block, vllm_version=era)).specs,
        era,
        block_outermost=outermost,
    )


def members(found: Grouping) -> list[tuple[int, ...]]:
    return [one.layers for one in found.groups]


@pytest.mark.parametrize("era", ["0.24", "0.33"])
def test_layers_with_one_spec_are_one_group(era: str) -> None:
    found = grouped(layout(*(attention(at) for at in range(3))), era)
    assert (found.method, members(found)) == ("uniform_spec", [(0, 1, 2)])
    assert found.uniform_page_size == 16 * 8 * 128 * 2


@pytest.mark.parametrize("era", ["0.24", "0.33"])
def test_full_attention_of_several_sizes_is_one_group_with_pages_of_its_own(era: str) -> None:
    found = grouped(layout(attention(0, heads=8), attention(1, heads=2)), era)
    assert (found.method, members(found)) == ("uniform_type", [(0, 1)])
    assert [spec.page_size for spec in found.groups[0].specs] == [32768, 8192]
    assert found.uniform_page_size is None


@pytest.mark.parametrize("era", ["0.24", "0.33"])
def test_gpt_oss_has_two_groups_of_twelve(era: str) -> None:
    found = grouped(gpt_oss(), era, block=64)
    assert members(found) == [tuple(range(0, 24, 2)), tuple(range(1, 24, 2))]
    assert [one.kind for one in found.groups] == ["sliding_window", "full_attention"]
    assert (found.group_size, found.padding_layers, found.uniform_page_size) == (12, 0, 131072)


def test_layers_of_a_larger_kind_are_dealt_out_in_turn() -> None:
    # Gemma's pattern: five windows to one whole layer, and two windows over.
    kinds = [sliding(at, window=512) if at % 6 != 5 else attention(at) for at in range(14)]
    found = grouped(layout(*kinds))
    assert members(found) == [
        (0, 7),
        (1, 8),
        (2, 9),
        (3, 10),
        (4, 12),
        (6, 13),
        (5, 11),
    ]
    assert (found.group_size, found.padding_layers) == (2, 0)


@pytest.mark.parametrize(
    ("whole", "size", "groups"), [(12, 12, 2), (17, 17, 2), (18, 12, 3), (24, 12, 3)]
)
def test_the_most_layers_count_where_they_are_not_half_as_many_again(
    whole: int, size: int, groups: int
) -> None:
    kinds = [sliding(at, window=128) for at in range(12)]
    found = grouped(layout(*kinds, *(attention(12 + at) for at in range(whole))))
    assert (found.group_size, len(found.groups)) == (size, groups)
    assert found.padding_layers == size * groups - 12 - whole


def test_windows_of_two_sizes_are_groups_of_their_own() -> None:
    kinds = [sliding(0, window=128), sliding(1, window=512), attention(2)]
    assert members(grouped(layout(*kinds))) == [(0,), (1,), (2,)]


def test_a_window_of_unknown_size_beside_another_may_be_equal_to_it() -> None:
    found = grouped(layout(sliding(0), sliding(1, window=128)))
    assert found.refusal is not None
    assert found.refusal.layers == (0,)
    assert found.refusal.hint == "--dim sliding_window=SIZE says it"
    assert grouped(layout(sliding(0), sliding(1), attention(2))).refusal is None


@pytest.mark.parametrize("era", ["0.24", "0.33"])
def test_a_page_that_divides_the_largest_gets_a_larger_block(era: str) -> None:
    found = grouped(layout(attention(0, heads=8), sliding(1, heads=2, window=128)), era)
    assert [(one.first_spec.block_size, one.first_spec.page_size) for one in found.groups] == [
        (16, 32768),
        (64, 32768),
    ]
    assert found.conditions == ()


def test_another_page_is_padded_and_0_24_wants_the_backend_to_know() -> None:
    uneven = layout(attention(0, heads=8), sliding(1, heads=3, window=128))
    for era in ("0.24", "0.33"):
        small = grouped(uneven, era).groups[1].first_spec
        assert (small.block_size, small.unpadded_page_size, small.page_size) == (16, 12288, 32768)
    (condition,) = grouped(uneven, "0.24").conditions
    assert (condition.name, condition.state) == ("block stride indexing", "requires")
    assert condition.why.endswith("else vLLM refuses to pad layers 1")
    assert grouped(uneven, "0.33").conditions == ()


def test_states_smaller_than_attention_are_padded_by_0_33_only() -> None:
    hybrid = layout(attention(0), linear(1, conv=(512, 3), recurrent=(8, 32, 32)))
    refusal = grouped(hybrid, "0.24").refusal
    assert refusal is not None
    assert (refusal.layers, refusal.hint) == ((1,), "vLLM 0.33 pads them")
    assert refusal.reason == "pages of 19456 bytes beside 32768: states cannot be padded"
    assert grouped(hybrid, "0.33").groups[1].first_spec.page_size == 32768


def test_mla_is_not_padded_by_0_33_and_windows_beside_it_become_whole() -> None:
    # 16 * 576 * 2 = 18432 does not divide 32768.
    mixed = layout(mla(0), sliding(1, window=128))
    found = grouped(mixed, "0.33")
    assert (found.method, members(found)) == ("full_allocation", [(0, 1)])
    assert [spec.kind for spec in found.groups[0].specs] == ["mla_attention", "full_attention"]
    assert found.groups[0].kind == "unknown"


def test_mla_beside_what_cannot_become_whole_is_refused_by_0_33() -> None:
    mixed = layout(mla(0), attention(1, kind="chunked_local_attention", window=128))
    refusal = grouped(mixed, "0.33").refusal
    assert refusal is not None
    assert (refusal.layers, refusal.reason) == (
        (0,),
        "pages of 18432 bytes beside 32768: pages of MLA cannot be padded",
    )
    assert grouped(mixed, "0.33", outermost=True).refusal is None


def test_windowed_mla_in_0_24_is_split_beside_whole_mla() -> None:
    kinds = [mla(at) if at % 3 == 0 else mla(at, window=128) for at in range(9)]
    found = grouped(layout(*kinds))
    assert (found.method, members(found)) == ("uniform_groups", [(0, 3, 6), (1, 4, 7), (2, 5, 8)])


def test_windowed_mla_is_padded_to_the_next_page_of_whole_mla() -> None:
    found = grouped(layout(mla(0), mla(1, rank=256, rope=64, window=128)))
    small = found.groups[1].first_spec
    assert (small.unpadded_page_size, small.page_size) == (16 * 320 * 2, 16 * 576 * 2)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (attention(0), "takes windowed MLA beside whole MLA, and beside nothing else"),
        (mla(0, rank=64), "a page of windowed MLA is larger than any of whole MLA"),
    ],
)
def test_windowed_mla_beside_anything_else_is_refused_by_0_24(other: object, reason: str) -> None:
    found = grouped(layout(other, mla(1, window=128)))  # type: ignore[arg-type]
    assert found.refusal is not None
    assert reason in found.refusal.reason


def test_a_merge_that_does_not_look_at_every_size_is_told() -> None:
    # 0.24 does not compare the value's head, and gives both layers the first one's.
    uneven = layout(attention(0, size_v=64), attention(1, size_v=32))
    found = grouped(uneven, "0.24")
    assert [spec.page_size for spec in found.groups[0].specs] == [32768, 32768]
    (condition,) = found.conditions
    assert (condition.name, condition.state) == ("one page", "not met")
    assert [spec.page_size for spec in grouped(uneven, "0.33").groups[0].specs] == [32768, 24576]


def test_where_pages_become_equal_0_24_keeps_apart_what_would_merge() -> None:
    windows = [sliding(at, heads=1, size=288, window=32) for at in (2, 3)]
    halves = layout(mla(0), mla(1, rank=224), *windows)
    assert members(grouped(halves, "0.24")) == [(0,), (1,), (2,), (3,)]


def test_where_pages_become_equal_0_33_merges_windowed_mla() -> None:
    windows = [mla(2, window=32), mla(3, rank=224, window=32)]
    found = grouped(layout(mla(0), mla(1), *windows), "0.33")
    assert (found.method, members(found)) == ("uniform_page_size", [(0, 1), (2, 3)])


def test_a_block_with_pages_of_several_sizes_keeps_them_in_0_33() -> None:
    mixed = layout(attention(0, heads=8), sliding(1, heads=3, window=128))
    found = grouped(mixed, "0.33", outermost=True)
    assert (found.method, members(found)) == ("packed", [(0,), (1,)])
    assert [one.first_spec.page_size for one in found.groups] == [32768, 12288]


def test_packed_windows_are_split_to_what_a_block_holds_anyway() -> None:
    # One whole layer needs 32768 bytes: two windows of 12288 fit, so five make three groups.
    kinds = [attention(0), *(sliding(at, heads=3, window=128) for at in range(1, 6))]
    found = grouped(layout(*kinds), "0.33", outermost=True)
    assert members(found) == [(0,), (1, 4), (2, 5), (3,)]


def test_no_layers_are_no_groups() -> None:
    assert grouped(layout()) == Grouping("none", ())


@pytest.mark.parametrize(
    ("counts", "least", "size"),
    [([21, 21], 1, 21), ([11, 21], 11, 11), ([12, 18], 1, 6), ([5], 9, 9), ([10, 12], 10, 12)],
)
def test_a_share_pads_least_and_of_two_is_the_larger(
    counts: list[int], least: int, size: int
) -> None:
    assert choose_group_size(counts, least) == size
