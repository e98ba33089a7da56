"""Words for symbols of sizes: batch, context, window, new positions, and sums of them."""

from __future__ import annotations

import pytest

from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.plan import _name_axes

DIMS = {
    "b": "batch",
    "past": "sequence",
    "new": "new",
    "total": "past + new",
    "slid": "window",
    "slid_total": "slid + new",
    "size": "head",
}


@pytest.mark.parametrize(
    ("shape", "declared", "axes"),
    [
        (("b", 2, "past", "size"), (), ("batch", "", "sequence", "head")),
        (("b", 2, "total", 8), (), ("batch", "", "sequence", "")),
        (("b", 2, "past + new", 8), (), ("batch", "", "sequence", "")),
        (("b", 2, "past + other", 8), (), ("batch", "", "sequence", "")),
        (("b", 2, "slid_total", 8), (), ("batch", "", "window", "")),
        (("x", 2, "y", None), (), ()),
        ((1, 2, "slid", 8), ("batch", "heads", "sequence", "head"), "batch heads window head"),
        ((1, 2, 16, 8), ("batch", "heads", "sequence", "head"), "batch heads sequence head"),
        ((1, "past", 8), ("batch", "heads", "sequence", "head"), ("", "sequence", "")),
        (None, ("batch", "sequence"), ("batch", "sequence")),
    ],
)
def test_axes_have_the_words_of_rules_and_symbols(
    shape: tuple[int | str | None, ...] | None, declared: tuple[str, ...], axes: object
) -> None:
    expected = tuple(axes.split()) if isinstance(axes, str) else axes
    assert _name_axes(shape, declared, DIMS) == expected


def test_the_symbols_of_optimum_and_genai_are_known() -> None:
    dims = load_rules("huggingface").dims
    shape = ("batch_size", 2, "past_sequence_length + sequence_length", "kv_cache_dim")
    assert _name_axes(shape, (), dims) == ("batch", "", "sequence", "head")
    assert _name_axes(("num_blocks", "block_size", 2, 16), (), dims) == ("blocks", "block", "", "")
