"""Exports held against each other, and what is said of it."""

from __future__ import annotations

import pytest

from onnxkvrename.findings import format_layer_runs, format_layers
from onnxkvrename.model.signature import Dim, Value, format_value_type, is_type_compatible
from onnxkvrename.rules.windows import find_outliers, most_common

Shape = tuple[Dim, ...] | None


def value(shape: Shape, dtype: str = "FLOAT", name: str = "x") -> Value:
    return Value(name, dtype, shape)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([], "no layer"),
        ([3], "layer 3"),
        ([3, 4], "layers 3-4"),
        ([0, 1, 2, 5, 7, 8], "layers 0-2, 5, 7-8"),
        (range(0, 14, 2), "layers 0, 2, 4, 6, 8 and 2 more"),
    ],
)
def test_layers_are_said_in_few_words(layers: list[int], text: str) -> None:
    assert format_layers(layers) == text


def test_a_run_of_layers_is_not_counted_through() -> None:
    assert format_layer_runs([range(999_999_999)]) == "layers 0-999999998"
    assert format_layer_runs([range(5, 5)]) == "no layer"


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        ((1, 2), (1, 2), True),
        ((1, "a"), ("b", 2), True),
        ((1, None), (1, 2), True),
        (None, (1, 2), True),
        ((1, 2), None, True),
        ((), (), True),
        ((1, 2), (1, 3), False),
        ((1, 2), (1, 2, 3), False),
        ((), (1,), False),
    ],
)
def test_values_agree_as_far_as_they_are_known(one: Shape, other: Shape, fits: bool) -> None:
    assert is_type_compatible(value(one), value(other, name="y")) is fits
    assert not is_type_compatible(value(one), value(other, "INT8"))


def test_a_value_is_shown_with_what_is_known_of_it() -> None:
    assert format_value_type(value(("batch", 2, None))) == "FLOAT [batch, 2, ?]"
    assert format_value_type(value(())) == "FLOAT []"
    assert format_value_type(value(None, "INT8")) == "INT8"


def test_usual_is_what_there_is_most_of_and_of_a_tie_the_first() -> None:
    values = [value((1,)), value(("a", 2)), value(("b", 2)), value(None)]
    assert most_common(values) is values[1]
    assert most_common(values[:2]) is values[0]
    assert most_common(values[3:]) is values[3]


def test_who_differs_is_named_with_what_and_from_whom() -> None:
    most = {("size", "a"): frozenset({"1"}), ("size", "b"): frozenset({"1"})}
    models = [("one", most), ("two", most), ("three", {**most, ("size", "b"): frozenset({"2"})})]
    assert list(find_outliers(models)) == [(2, ["size 2 (1 in one)"])]
    assert list(find_outliers(models[:2])) == []
    assert list(find_outliers([])) == []


def test_what_varies_within_one_model_tells_nothing() -> None:
    values = [frozenset({"1"}), frozenset({"2"}), frozenset({"1", "2"})]
    models = [(str(at), {("size",): found}) for at, found in enumerate(values)]
    assert list(find_outliers(models)) == []
    assert list(find_outliers(models[:2])) == [(1, ["size 2 (1 in 0)"])]
