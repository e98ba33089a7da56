from __future__ import annotations

import pytest

from onnxkvrename.text import (
    format_layer_numbers,
    format_layer_runs,
    format_layers,
    group_layer_runs,
)


@pytest.mark.parametrize(
    ("layers", "text"),
    [((), "no layer"), ((3,), "layer 3"), ((0, 1, 2, 5), "layers 0-2, 5")],
)
def test_layers_are_ranges_of_consecutive_ones(layers: tuple[int, ...], text: str) -> None:
    assert format_layers(layers) == text


def test_of_many_ranges_the_first_five_are_shown_unless_all_are_wanted() -> None:
    even = range(0, 14, 2)
    assert format_layers(even) == "layers 0, 2, 4, 6, 8 and 2 more"
    assert format_layer_numbers(even) == "0, 2, 4, 6, 8, 10, 12"


def test_runs_need_not_be_listed() -> None:
    assert group_layer_runs([4, 5, 6, 9]) == (range(4, 7), range(9, 10))
    assert format_layer_runs([range(10**9), range(3, 3)]) == "layers 0-999999999"
