"""Values of graphs: which can stand for each other, and how they are shown."""

from __future__ import annotations

import pytest

from onnxkvrename.model.signature import Dim, Value, format_value_type, is_type_compatible

Shape = tuple[Dim, ...] | None


def value(shape: Shape, dtype: str = "FLOAT", name: str = "x") -> Value:
    return Value(name, dtype, shape)


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
