"""Say where two models differ: the first place with another content, in the words of onnx's schema.

Both are parsed without their weights, which are compared by their digests. So what differs
only in its encoding is equal here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from secrets import token_bytes
from typing import Any, Literal, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import TensorProto

from onnxkvrename.limits import MAX_SHOWN_CHARS, shorten_text
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.strip_weights import (
    is_repeated,
    list_removed_data,
    read_model_without_weights,
)

DifferenceKind = Literal["content", "order"]

_KEY_FIELDS = {
    "FunctionProto": ("domain", "name", "overload"),
    "TensorProto": ("name",),
    "ValueInfoProto": ("name",),
    "StringStringEntryProto": ("key",),
    "OperatorSetIdProto": ("domain",),
    "TensorAnnotation": ("tensor_name",),
    "AttributeProto": ("name",),
}
"""For each message that is found by a name the fields that make up this name."""
_UNORDERED_FIELDS = {
    "ModelProto": ("opset_import", "metadata_props", "functions"),
    "GraphProto": ("initializer", "value_info", "quantization_annotation", "metadata_props"),
    "FunctionProto": ("opset_import", "value_info", "metadata_props"),
    "NodeProto": ("attribute", "metadata_props"),
    "TensorProto": ("external_data", "metadata_props"),
    "ValueInfoProto": ("metadata_props",),
    "TensorAnnotation": ("quant_parameter_tensor_names",),
}
"""Repeated fields whose order means nothing, as each element is found by its name."""


class Difference(NamedTuple):
    """A difference between two models.

    Attributes:
        kind: `content`, or the `order` of elements that are found by their names.
        path: The place in the schema, as `graph.node.input`.
        text: What differs, and in which element.
    """

    kind: DifferenceKind
    path: str
    text: str


def compare_models(expected: ByteSource, actual: ByteSource) -> tuple[Difference, ...]:
    """Return the first difference in content between two models, and no other.

    Without one, return the places where elements come in another order.

    Raises:
        ModelError: onnx cannot parse one of them.
    """
    key = token_bytes(16)
    models = [read_model_without_weights(source, digest_key=key) for source in (expected, actual)]
    orders: dict[str, Difference] = {}
    for difference in _compare_messages(models[0], models[1], _Place("", "")):
        if difference.kind == "content":
            return (difference,)
        orders.setdefault(difference.path, difference)
    return tuple(orders.values())


class _Place(NamedTuple):
    """Where a message or a field is: in the schema, and in this model."""

    path: str
    label: str

    def enter(self, name: str, label: str = "") -> _Place:
        """Return the place of a field; `label` tells which element of a repeated one."""
        joint = "." if self.path else ""
        return _Place(f"{self.path}{joint}{name}", f"{self.label}{joint}{name}{label}")

    def report(self, text: str, kind: DifferenceKind = "content") -> Difference:
        """Return a difference at this place."""
        text = text if self.label == self.path else f"{self.label}: {text}"
        return Difference(kind, self.path, text)


def _compare_messages(expected: Message, actual: Message, place: _Place) -> Iterator[Difference]:
    """Yield where two messages differ, field by field in the order of the schema."""
    if _serialize(expected) == _serialize(actual):
        return
    if isinstance(expected, TensorProto) and isinstance(actual, TensorProto):
        removed = [list_removed_data(tensor) for tensor in (expected, actual)]
        if removed[0] != removed[1]:
            name = next((data.field for data in (*removed[1], *removed[0])), "")
            yield place.enter(name).report("differs")
            return
    is_explained = False
    for field in expected.DESCRIPTOR.fields:
        for difference in _compare_field(expected, actual, field, place):
            is_explained = True
            yield difference
    if not is_explained:
        yield place.report("has another value in a field that onnx does not know")


def _serialize(message: Message) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def _compare_field(
    expected: Message, actual: Message, field: FieldDescriptor, place: _Place
) -> Iterator[Difference]:
    ours, theirs = getattr(expected, field.name), getattr(actual, field.name)
    if is_repeated(field):
        if field.message_type is not None and field.message_type.name in _KEY_FIELDS:
            yield from _compare_by_key(ours, theirs, field, place)
        else:
            yield from _compare_in_order(ours, theirs, field, place)
        return
    inside = place.enter(field.name)
    is_there = expected.HasField(field.name), actual.HasField(field.name)
    if is_there[0] != is_there[1]:
        # That a field is there may mean something although it says what its absence says:
        # a dimension of size 0, a tensor without data.
        shown = _show_value(ours if is_there[0] else theirs)
        yield inside.report(f"{shown} is {'missing' if is_there[0] else 'new'}")
    elif field.message_type is not None:
        yield from _compare_messages(ours, theirs, inside)
    else:
        yield from _compare_values(ours, theirs, inside)


def _compare_in_order(
    expected: Sequence[Any], actual: Sequence[Any], field: FieldDescriptor, place: _Place
) -> Iterator[Difference]:
    if len(expected) != len(actual):
        entries = "entry" if len(actual) == 1 else "entries"
        text = (
            f"has {len(actual):,} {entries}, SOURCE has {len(expected):,}; "
            f"the first difference is at [{_find_first(expected, actual)}]"
        )
        yield place.enter(field.name).report(text)
        return
    for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
        if field.message_type is None:
            yield from _compare_values(one, other, place.enter(field.name, f"[{index}]"))
            continue
        label = f"[{index}]"
        if field.message_type.name == "NodeProto":
            label += f" ({shorten_text(' '.join(filter(None, (one.op_type, one.name))))})"
        yield from _compare_messages(one, other, place.enter(field.name, label))


def _compare_by_key(
    expected: Sequence[Any], actual: Sequence[Any], field: FieldDescriptor, place: _Place
) -> Iterator[Difference]:
    ours, theirs = _group_by_key(expected), _group_by_key(actual)
    for key, elements in ours.items():
        others = theirs.get(key, [])
        inside = place.enter(field.name, f"[{shorten_text(key)!r}]")
        for one, other in zip(elements, others, strict=False):
            yield from _compare_messages(one, other, inside)
        if len(elements) > len(others):
            yield inside.report("is missing")
    for key, others in theirs.items():
        if len(others) > len(ours.get(key, [])):
            yield place.enter(field.name, f"[{shorten_text(key)!r}]").report("is new")
    common = [key for key in ours if key in theirs]
    if common != [key for key in theirs if key in ours]:
        is_unordered = field.name in _UNORDERED_FIELDS.get(field.containing_type.name, ())
        kind: DifferenceKind = "order" if is_unordered else "content"
        yield place.enter(field.name).report("they are in a different order", kind)


def _group_by_key(elements: Sequence[Any]) -> dict[str, list[Any]]:
    groups: dict[str, list[Any]] = {}
    for element in elements:
        parts = (getattr(element, name, "") for name in _KEY_FIELDS[element.DESCRIPTOR.name])
        groups.setdefault(".".join(filter(None, parts)), []).append(element)
    return groups


def _compare_values(expected: Any, actual: Any, place: _Place) -> Iterator[Difference]:
    if expected == actual or (expected != expected and actual != actual):  # NaN
        return
    shown = _show_value(actual), _show_value(expected)
    if shown[0] != shown[1]:
        yield place.report(f"{shown[0]} instead of {shown[1]}")
    else:
        yield place.report(f"differs from position {_find_first(expected, actual):,} on")


def _find_first(expected: Sequence[Any], actual: Sequence[Any]) -> int:
    """Return the first index at which two sequences differ."""
    unequal = (
        index
        for index, (one, other) in enumerate(zip(expected, actual, strict=False))
        if one != other
    )
    return next(unequal, min(len(expected), len(actual)))


def _show_value(value: Any) -> str:
    if isinstance(value, Message):
        return f"a message of {value.ByteSize():,} bytes"
    if isinstance(value, bytes):
        value = value[: MAX_SHOWN_CHARS + 1].decode("utf-8", "backslashreplace")
    return repr(shorten_text(value)) if isinstance(value, str) else str(value)
