"""Tell whether two models are the same but for names that nothing outside of them uses.

QEfficient numbers values anew from export to export, and a layer function has the names of
whichever layer it was made from. One model adopts the names of the other, value by value; then
both are compared completely, so a wrong guess on the way finds a difference, never an equality.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from secrets import token_bytes
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.message_diff import list_differences
from onnxkvrename.verification.strip_weights import read_model_without_weights

_T = TypeVar("_T")
_Body = Any
"""A `GraphProto` or a `FunctionProto`."""
_Key = tuple[str, str, str]


class _DifferentError(Exception):
    """The models differ in more than names, or in a place where names are not followed."""


class _Pairing(Generic[_T]):
    """Which name of the one model each name of the other stands for, one to one."""

    def __init__(self) -> None:
        self.expected_by_actual: dict[_T, _T] = {}
        self.actual_by_expected: dict[_T, _T] = {}

    def add(self, expected: _T, actual: _T) -> bool:
        """Add a pair, and return whether it is new."""
        is_new = actual not in self.expected_by_actual
        if (
            self.expected_by_actual.setdefault(actual, expected) != expected
            or self.actual_by_expected.setdefault(expected, actual) != actual
        ):
            raise _DifferentError
        return is_new

    def find(self, actual: _T) -> _T:
        """Return what a name stands for: itself, if nothing else is known."""
        if actual not in self.expected_by_actual:
            self.add(actual, actual)
        return self.expected_by_actual[actual]


def differ_only_in_inner_names(expected: ByteSource, actual: ByteSource) -> bool:
    """Return whether two models are equal but for names of inner values, nodes and functions.

    Graph inputs and outputs have the same names, weights the same contents or places. Notes do not
    count: doc strings, and metadata of nodes, values, functions and graphs.

    Raises:
        ModelError: onnx cannot parse one of them.
    """
    key = token_bytes(16)
    first, second = (read_model_without_weights(s, digest_key=key) for s in (expected, actual))
    try:
        _adopt_names(first, second)
    except _DifferentError:
        return False
    return not any(difference.text for difference in list_differences(first, second))


def _adopt_names(expected: ModelProto, actual: ModelProto) -> None:
    """Give the values, nodes and functions of a model the names that they have in another one."""
    for model in (expected, actual):
        _clear_notes([model.graph, *model.functions])
        if model.training_info:
            raise _DifferentError
    functions = [_group_functions(model) for model in (expected, actual)]
    calls = _Pairing[_Key]()
    todo: list[tuple[_Body, _Body]] = [(expected.graph, actual.graph)]
    while todo:
        first, second = todo.pop()
        names = _Pairing[str]()
        names.add("", "")
        if isinstance(second, GraphProto):
            for value in (*second.input, *second.output):
                names.add(value.name, value.name)
        for pair in zip(_list_names(first), _list_names(second), strict=False):
            names.add(*pair)
        for one, other in zip(_walk_nodes(first), _walk_nodes(second), strict=False):
            keys = _build_key(one, one.op_type), _build_key(other, other.op_type)
            if keys[0] in functions[0] and keys[1] in functions[1] and calls.add(*keys):
                todo += zip(functions[0][keys[0]], functions[1][keys[1]], strict=False)
        _rename_values(second, names)
    for function in actual.functions:
        _set_names(function, "name", calls.find(_build_key(function, function.name)))
    for body in (actual.graph, *actual.functions):
        for node in _walk_nodes(body):
            if _build_key(node, node.op_type) in functions[1]:
                _set_names(node, "op_type", calls.find(_build_key(node, node.op_type)))


def _group_functions(model: ModelProto) -> dict[_Key, list[FunctionProto]]:
    groups: dict[_Key, list[FunctionProto]] = {}
    for function in model.functions:
        groups.setdefault(_build_key(function, function.name), []).append(function)
    return groups


def _build_key(message: FunctionProto | NodeProto, name: str) -> _Key:
    return message.domain, name, message.overload


def _set_names(message: Message, name_field: str, key: _Key) -> None:
    for field, text in zip(("domain", name_field, "overload"), key, strict=True):
        if getattr(message, field) != text:  # an empty text differs from none
            setattr(message, field, text)


def _walk_bodies(body: _Body) -> Iterator[_Body]:
    """Walk a graph or function, and the graphs in it."""
    yield body
    for node in body.node:
        for attribute in node.attribute:
            for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
                yield from _walk_bodies(graph)


def _walk_nodes(body: _Body) -> Iterator[NodeProto]:
    for part in _walk_bodies(body):
        yield from part.node


def _list_names(body: _Body) -> Iterator[str]:
    """Yield the names of values where their order has a meaning."""
    for part in _walk_bodies(body):
        for value in (*part.input, *part.output):
            yield value.name if isinstance(part, GraphProto) else value
        for node in part.node:
            yield from (*node.input, "", *node.output, "")


def _rename_values(body: _Body, names: _Pairing[str]) -> None:
    for part in _walk_bodies(body):
        holders: list[Any] = list(part.value_info)
        if isinstance(part, GraphProto):
            holders += (*part.input, *part.output, *part.initializer)
            holders += (sparse.values for sparse in part.sparse_initializer)
        for holder in holders:
            if holder.name:
                holder.name = names.find(holder.name)
        lists = chain.from_iterable((node.input, node.output) for node in part.node)
        for values in (
            *lists,
            *(() if isinstance(part, GraphProto) else (part.input, part.output)),
        ):
            values[:] = [names.find(name) for name in values]


def _clear_notes(bodies: Iterable[_Body]) -> None:
    """Remove names of nodes and notes; raise where names are in places that are not followed."""
    for part in chain.from_iterable(map(_walk_bodies, bodies)):
        if isinstance(part, GraphProto):
            if part.quantization_annotation:
                raise _DifferentError
            part.ClearField("name")
            values: list[Message] = [*part.input, *part.output]
        else:
            values = []
        for message in (part, *part.node, *part.value_info, *values):
            message.ClearField("doc_string")
            message.ClearField("metadata_props")
        for node in part.node:
            if node.device_configurations:
                raise _DifferentError
            node.ClearField("name")
