from __future__ import annotations

from handoff_sides import build_side_layout, describe_attention, list_codes, predict_handoff

from onnxkvrename.handoff.tensor_parallel import (
    TensorParallelSizes,
    check_tensor_parallelism,
    list_sharding_notes,
)
from onnxkvrename.layout.layout import Layout


def said(layout: Layout, prefill: int, decode: int) -> list[str]:
    found = check_tensor_parallelism(layout, layout, TensorParallelSizes(prefill, decode))
    return [f"{one.code} {one.message}" for one in found]


def heads(count: int) -> Layout:
    return build_side_layout(*describe_attention(0, 1, shape=f"{count},ctx_len,4"))


def test_heads_that_divide_are_fine_on_any_number_of_ranks() -> None:
    assert said(heads(8), 2, 4) == []
    assert said(heads(8), 8, 1) == []


def test_heads_that_do_not_divide_are_told_for_their_side() -> None:
    (found,) = said(heads(6), 2, 4)
    assert "KV619" in found
    assert "4 buffers" in found
    assert "6 heads" in found
    assert "4 ranks of decode" in found
    assert "layers 0-1" in found


def test_fewer_heads_than_ranks_are_repeated() -> None:
    assert said(heads(2), 2, 8) == []
    notes = list(list_sharding_notes(heads(2), heads(2), TensorParallelSizes(2, 8)))
    assert notes == ["decode: 2 heads on 8 ranks, each on 4 of them"]
    assert said(heads(3), 3, 6) == []
    assert len(said(heads(4), 2, 6)) == 1


def test_no_heads_at_all_are_not_divided() -> None:
    assert said(heads(0), 2, 4) == []
    assert list(list_sharding_notes(heads(0), heads(0), TensorParallelSizes(2, 4))) == []


def test_ranks_must_be_multiples_of_each_other() -> None:
    (found,) = said(heads(12), 2, 3)
    assert "KV619" in found
    assert "2 ranks" in found
    assert "3" in found


def test_mla_stands_whole_on_every_rank() -> None:
    mla = build_side_layout("compressed_kv.0:1,ctx_len,8", "k_pe.0:1,ctx_len,4")
    assert said(mla, 1, 8) == []


def test_states_divide_or_do_not_and_are_never_repeated() -> None:
    linear = build_side_layout("conv_state.0:12,3", "recurrent_state.0:2,4,4")
    assert said(linear, 1, 2) == []
    (found,) = said(linear, 1, 4)
    assert "2 state heads" in found
    assert "4 ranks of decode" in found
    assert len(said(linear, 1, 8)) == 2
    (note,) = list_sharding_notes(linear, linear, TensorParallelSizes(1, 2))
    assert "segments" in note


def test_a_hand_off_with_ranks_says_so_and_one_without_does_not() -> None:
    side = heads(6)
    assert list_codes(predict_handoff(side, side, ranks=(2, 4))) == ["KV619"]
    assert list_codes(predict_handoff(side, side, ranks=(2, 6))) == []
    assert list_codes(predict_handoff(side, side)) == []
