"""Tell whether two models are the same except for names that nothing outside of them uses.

QEfficient numbers values differently from export to export, and a layer function has names of
whichever layer it was made from. Here each model gets names in the order of their appearance, so
that the same graph has the same names; then both are compared completely.
"""

from __future__ import annotations

from collections.abc import Set
from secrets import token_bytes

from google.protobuf.message import Message
from onnx import FunctionProto, ModelProto, NodeProto

from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.message_diff import list_differences
from onnxkvrename.verification.strip_weights import read_model_without_weights

_Key = str | bytes | tuple[str, str, str]
"""A name of a value, or domain, name and overload of a function."""
_NAMES = {
    *("NodeProto.input", "NodeProto.output", "FunctionProto.input", "FunctionProto.output"),
    *("ValueInfoProto.name", "TensorProto.name"),
}
_NOTES = {
    *("NodeProto.name", "GraphProto.name"),
    *(
        f"{message}.{field}"
        for message in ("NodeProto", "GraphProto", "FunctionProto", "ValueInfoProto")
        for field in ("doc_string", "metadata_props")
    ),
}
"""Fields that do not count: nothing is computed or looked up by them."""
_NOT_FOLLOWED = {"GraphProto.quantization_annotation", "NodeProto.device_configurations"}
"""Fields with names of values that get no new ones, so nothing is known of such a model."""


class _NotFollowedError(Exception):
    """A model has names in a place where they are not followed."""


class _Numbers(dict[_Key, str]):
    """New names by old ones; one that is asked for the first time gets the next number."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    def __missing__(self, name: _Key) -> str:
        self[name] = f"{self.mark}{len(self)}"
        return self[name]


def differ_only_in_inner_names(expected: ByteSource, actual: ByteSource) -> bool:
    """Return whether two models are equal except for names of inner values, nodes and functions.

    Graph inputs and outputs have the same names, weights the same contents or places. Notes do not
    count: doc strings, and metadata of nodes, values, functions and graphs.

    Raises:
        ModelError: onnx cannot parse one of them.
    """
    key = token_bytes(16)  # no name of a model can be one of the new names
    models = [read_model_without_weights(each, digest_key=key) for each in (expected, actual)]
    try:
        for model in models:
            _number_names(model, key.hex())
    except _NotFollowedError:
        return False
    return not any(difference.text for difference in list_differences(*models))


def _number_names(model: ModelProto, mark: str) -> None:
    """Give new names to inner values, and to functions in the order of their calls."""
    if model.training_info:
        raise _NotFollowedError
    functions: dict[_Key, list[FunctionProto]] = {}
    for function in model.functions:
        functions.setdefault(_build_key(function, function.name), []).append(function)
    calls, names = _Numbers(mark), _Numbers(mark)
    names.update({value.name: value.name for value in (*model.graph.input, *model.graph.output)})
    _rename(model.graph, names, calls, functions.keys())
    done = 0
    while done < len(calls):
        called = [*calls][done:]
        for key in called:
            for function in functions[key]:
                function.name = calls[key]
                function.ClearField("overload")
                _rename(function, _Numbers(mark), calls, functions.keys())
        done += len(called)


def _build_key(message: FunctionProto | NodeProto, name: str) -> _Key:
    return message.domain, name, message.overload


def _rename(message: Message, names: _Numbers, calls: _Numbers, functions: Set[_Key]) -> None:
    """Give new names to all values and calls of functions in a message, and remove notes."""
    if isinstance(message, NodeProto):
        key = _build_key(message, message.op_type)
        if key in functions:
            message.op_type = calls[key]
            message.ClearField("overload")
    for field, value in message.ListFields():
        place = f"{message.DESCRIPTOR.name}.{field.name}"
        if place in _NOT_FOLLOWED:
            raise _NotFollowedError
        if place in _NOTES:
            message.ClearField(field.name)
        elif place in _NAMES and isinstance(value, (str, bytes)):
            setattr(message, field.name, names[value])
        elif place in _NAMES:
            value[:] = [names[name] if name else "" for name in value]
        elif field.message_type is not None:
            for inner in (value,) if isinstance(value, Message) else value:
                _rename(inner, names, calls, functions)
