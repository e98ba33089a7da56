"""Find the first place where two models differ, in the words of onnx's schema.

Both are parsed without their weights, which are compared by their digests. So what differs
only in its encoding is equal here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from secrets import token_bytes
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from onnxkvrename.limits import MAX_SHOWN_CHARS, shorten_text
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.strip_weights import read_model_without_weights

_NAME_FIELDS = {
    "attribute": ("name",),
    "external_data": ("key",),
    "functions": ("domain", "name", "overload"),
    "initializer": ("name",),
    "metadata_props": ("key",),
    "opset_import": ("domain",),
    "quant_parameter_tensor_names": ("key",),
    "quantization_annotation": ("tensor_name",),
    "value_info": ("name",),
}
"""Repeated fields whose order means nothing, and what makes up the name of an element."""
_Steps = tuple[tuple[str, str], ...]
"""The way to a place: names of fields, and which element of each."""


class Difference(NamedTuple):
    """A place where two models differ.

    Attributes:
        path: The place in the schema, as `graph.node.input`.
        text: The element and its values; empty if elements with names come in another order.
    """

    path: str
    text: str


def compare_models(
    expected: ByteSource, actual: ByteSource
) -> tuple[Difference | None, tuple[str, ...]]:
    """Return the first difference in content between two models, and no other.

    Without one, return also the places where elements come in another order.

    Raises:
        ModelError: onnx cannot parse one of them.
    """
    key = token_bytes(16)
    models = [read_model_without_weights(source, digest_key=key) for source in (expected, actual)]
    reordered: dict[str, None] = {}
    for difference in list_differences(models[0], models[1]):
        if difference.text:
            return difference, ()
        reordered[difference.path] = None
    return None, tuple(reordered)


def list_differences(
    expected: Message, actual: Message, steps: _Steps = ()
) -> Iterator[Difference]:
    """Yield where two messages differ, field by field in the order of the schema."""
    if _serialize(expected) == _serialize(actual):
        return
    is_explained = False
    for field in expected.DESCRIPTOR.fields:
        for difference in _compare_field(expected, actual, field, steps):
            is_explained = True
            yield difference
    if not is_explained:
        yield _describe(steps, "has another value in a field that onnx does not know")


def _serialize(message: Message) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def _compare_field(
    expected: Message, actual: Message, field: FieldDescriptor, steps: _Steps
) -> Iterator[Difference]:
    ours, theirs = _list_elements(expected, field), _list_elements(actual, field)
    for key in {**ours, **theirs}:
        one, other = ours.get(key), theirs.get(key)
        inside = (*steps, (field.name, _format_key(key, other if one is None else one)))
        if isinstance(one, Message) and isinstance(other, Message):
            yield from list_differences(one, other, inside)
        elif repr(one) != repr(other):  # so NaN is NaN, and 0 is not -0
            shown = _show_value(other), _show_value(one)
            is_visible = shown[0] != shown[1]
            yield _describe(inside, " instead of ".join(shown) if is_visible else "differs")
    if [key for key in ours if key in theirs] != [key for key in theirs if key in ours]:
        yield Difference(_format_path((*steps, (field.name, ""))), "")


def _list_elements(message: Message, field: FieldDescriptor) -> dict[Any, Any]:
    """Return what a field holds, by its name if it has one, else by its position."""
    value = getattr(message, field.name)
    if not _is_repeated(field):
        # That a field is there may mean something although it says what its absence says:
        # a dimension of size 0, a tensor without data.
        return {None: value} if message.HasField(field.name) else {}
    if field.message_type is None or field.name not in _NAME_FIELDS:
        return dict(enumerate(value))
    elements, counts = {}, Counter[tuple[str, ...]]()
    for element in value:
        name = tuple(getattr(element, part, "") for part in _NAME_FIELDS[field.name])
        elements[name, counts[name]] = element
        counts[name] += 1
    return elements


def _is_repeated(field: FieldDescriptor) -> bool:
    """Return whether a field may occur several times."""
    # protobuf has `is_repeated` from 6.31 on, and warns of `label` since then.
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED)


def _format_key(key: Any, element: Any) -> str:
    """Return which element of a field it is: `['weight']`, `[3] (MatMul)`, or nothing."""
    if key is None:
        return ""
    if isinstance(key, tuple):
        return f"[{shorten_text('.'.join(str(part) for part in key[0] if part))!r}]"
    words = (getattr(element, part, "") for part in ("op_type", "name"))
    label = shorten_text(" ".join(str(word) for word in words if word))
    return f"[{key}] ({label})" if label else f"[{key}]"


def _describe(steps: _Steps, text: str) -> Difference:
    path, place = _format_path(steps), ".".join(name + element for name, element in steps)
    return Difference(path, text if place == path else f"{place}: {text}")


def _format_path(steps: _Steps) -> str:
    return ".".join(name for name, _ in steps)


def _show_value(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Message):
        return f"a message of {value.ByteSize():,} bytes"
    if isinstance(value, bytes):
        value = value[: MAX_SHOWN_CHARS + 1].decode("utf-8", "backslashreplace")
    return repr(shorten_text(value)) if isinstance(value, str) else str(value)
