from __future__ import annotations

from build_layouts import build_attention, build_layers, build_mla, build_sliding

from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.groups import group_layers
from onnxkvrename.vllm.layer_specs import build_specs
from onnxkvrename.vllm.nixl import (
    NixlRegion,
    NixlTransfer,
    count_blocks,
    transfer_v024,
    transfer_v033,
)
from onnxkvrename.vllm.specs import KvCacheGroup, ProjectionRequest


def form_groups(model: Layout) -> tuple[KvCacheGroup, ...]:
    return group_layers(build_specs(model, ProjectionRequest(16)).specs, "0.24").groups


WINDOWED = form_groups(build_layers(build_sliding(0, window=40), build_attention(1)))


def test_a_window_takes_one_block_more_than_it_fills() -> None:
    # 40 tokens fill three blocks of 16, and may start within a fourth.
    assert [count_blocks(WINDOWED, length) for length in (1, 16, 17, 48, 49, 64, 65, 1000)] == [
        (1, 1),
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4),
        (4, 4),
        (4, 5),
        (4, 63),
    ]


def test_without_a_block_stride_every_block_is_moved_from_every_tensor() -> None:
    assert transfer_v024(64, (4, 4), WINDOWED, (100,), None) == NixlTransfer(64, (4, 4), 2, 16, 800)


def test_with_a_block_stride_a_block_is_one_descriptor() -> None:
    assert transfer_v024(64, (4, 4), WINDOWED, (100,), 250) == NixlTransfer(64, (4, 4), 1, 8, 2000)


def test_descriptors_of_mla_with_other_attention_are_not_known() -> None:
    mixed = form_groups(build_layers(build_mla(0), build_attention(1)))
    why = "what NIXL moves where only some layers are MLA"
    assert transfer_v024(16, (1,), mixed, (100, 200), None) == NixlTransfer(
        16, (1,), None, None, None, why
    )


def test_descriptors_of_keys_and_values_of_different_size_are_not_known() -> None:
    uneven = form_groups(build_layers(build_attention(0, size=64, size_v=32)))
    assert transfer_v024(16, (1,), uneven, (100,), None).descriptors is None


def test_a_region_of_one_group_moves_its_blocks_and_a_shared_one_those_of_all() -> None:
    own, shared = NixlRegion(10, frozenset({0})), NixlRegion(100, frozenset({0, 1}))
    assert transfer_v033(64, (3, 5), (own, shared)) == NixlTransfer(64, (3, 5), 2, 11, 830)
    assert transfer_v033(64, (1, 2, 4), (shared,)) == NixlTransfer(64, (1, 2, 4), 1, 7, 700)
    assert transfer_v033(64, (3, 5), (own._replace(multiplicity=8),)) == NixlTransfer(
        64, (3, 5), 8, 24, 240
    )
    assert transfer_v033(64, (3, None), (own, shared)) == NixlTransfer(64, (3, None), 2, None, None)
    assert transfer_v033(64, (3, 5), None) == NixlTransfer(64, (3, 5), None, None, None)
