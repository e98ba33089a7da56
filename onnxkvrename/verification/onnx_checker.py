"""Is a model sound ONNX, by onnx's own checker?

The checker wants the data of every tensor to be there and to fit its dims. Of a
model without weights it is shown a copy in which each of these tensors has one
element, and is otherwise what it was; whether the data fit is reckoned here,
from the sizes that :mod:`onnxkvrename.weightless` noted.

Not judged here: where external data lie (that is
:mod:`onnxkvrename.externaldata`), and the indices of large sparse tensors.
Shape inference (``full_check``) is left out: a model of a few kilobytes can
keep it busy for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto
from onnx.checker import ValidationError, check_model, check_tensor

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.verification.strip_weights import RemovedData, list_removed_data

_PROBE_ELEMENTS = 24
"""Elements of a tensor that fill whole bytes, whatever their type."""
_BYTES_PER_ENTRY = {"float_data": 4, "double_data": 8}
"""Bytes of an entry; of a packed varint there is at least one, and one counts for each string."""


def check_onnx_validity(model: ModelProto) -> Iterator[Finding]:
    """KV115 if onnx's checker refuses the model, with what it says; nothing otherwise.

    ``model`` comes from :func:`onnxkvrename.weightless.read`, and stays as it is.
    """
    shown = ModelProto()
    shown.CopyFrom(model)
    short = [
        fault for tensor in _list_tensors(shown) if (fault := _shrink_tensor(tensor)) is not None
    ]
    try:
        check_model(shown, full_check=False)
    except (ValidationError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())
        if short and "too small" in said:
            said = short[0]
        yield build_finding(
            "KV115", "", f"is refused by onnx's checker: {said}", "export the model again"
        )


def _list_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a model; a large sparse one is first made small."""
    graphs: list[GraphProto] = [model.graph]
    for training in model.training_info:
        graphs += [training.initialization, training.algorithm]
    nodes: list[NodeProto] = [node for function in model.functions for node in function.node]
    attributes = [item for function in model.functions for item in function.attribute_proto]
    sparse: list[SparseTensorProto] = []
    while graphs or nodes or attributes:
        for graph in graphs:
            yield from graph.initializer
            sparse += graph.sparse_initializer
            nodes += graph.node
        attributes += [attribute for node in nodes for attribute in node.attribute]
        graphs, nodes, found = [], [], attributes
        attributes = []
        for attribute in found:
            yield from _list_attribute_tensors(attribute)
            sparse += attribute.sparse_tensors
            sparse += [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
            graphs += attribute.graphs
            graphs += [attribute.g] if attribute.HasField("g") else []
    for item in sparse:
        _shrink_sparse(item)


def _list_attribute_tensors(attribute: AttributeProto) -> Iterator[TensorProto]:
    yield from attribute.tensors
    if attribute.HasField("t"):
        yield attribute.t


def _shrink_tensor(tensor: TensorProto) -> str | None:
    """Give a tensor whose data are elsewhere one element; or what is wrong with their size."""
    gone = list_removed_data(tensor)
    if _is_external(tensor):
        located = any(entry.key == "location" and entry.value for entry in tensor.external_data)
        if located and not gone and not _has_data(tensor):
            _replace_with_zeros(tensor)
        return None
    dims = list(tensor.dims)
    if not gone or min(dims, default=1) <= 0 or prod(dims) >= 1 << 63:
        return None
    for part in gone:
        if not _has_enough_data(tensor.data_type, part, prod(dims)):
            unit = "strings" if part.field == "string_data" else "bytes"
            held = f"{part.size:,} {unit} of {part.field}"
            return f"{tensor.name} has {held}, too few for its dims {dims}"
    tensor.dims[:] = [1]
    return None


def _is_external(tensor: TensorProto) -> bool:
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def _has_data(tensor: TensorProto) -> bool:
    fields = {field.name for field, _ in tensor.ListFields()} - {"external_data"}
    return any(field.endswith("_data") for field in fields)


def _replace_with_zeros(tensor: TensorProto) -> None:
    """Put one element of zeros in the place of external data."""
    tensor.ClearField("data_location")
    tensor.ClearField("external_data")
    tensor.dims[:] = [1]
    if tensor.data_type == TensorProto.STRING:
        tensor.string_data.append(b"")
    else:
        tensor.raw_data = bytes(16)


def _has_enough_data(dtype: int, part: RemovedData, elements: int) -> bool:
    """Whether that much data is enough, as far as its size can tell."""
    least = _find_minimum_entries(dtype, part.field)
    return least is None or part.size // _BYTES_PER_ENTRY.get(part.field, 1) >= -(
        -elements * least // _PROBE_ELEMENTS
    )


@lru_cache
def _find_minimum_entries(dtype: int, field: str) -> int | None:
    """Entries that onnx's checker asks of 24 elements; ``None`` if no number of them will do."""
    low, high = 1, 17 * _PROBE_ELEMENTS
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if _is_accepted_by_checker(dtype, field, middle) else (middle + 1, high)
        )
    return low if low < 17 * _PROBE_ELEMENTS else None


def _is_accepted_by_checker(dtype: int, field: str, count: int) -> bool:
    tensor = TensorProto(name="probe", data_type=dtype, dims=[_PROBE_ELEMENTS])
    if field == "raw_data":
        tensor.raw_data = bytes(count)
    else:
        getattr(tensor, field).extend([b"" if field == "string_data" else 0] * count)
    try:
        check_tensor(tensor)
    except ValidationError:
        return False
    return True


def _shrink_sparse(sparse: SparseTensorProto) -> None:
    """Leave one element of a sparse tensor whose values or indices are not at hand."""
    parts = (sparse.values, sparse.indices)
    if any(list_removed_data(part) or _is_external(part) for part in parts):
        for part in parts:
            name, dtype = part.name, part.data_type
            part.Clear()
            part.CopyFrom(TensorProto(name=name, data_type=dtype))
            _replace_with_zeros(part)
        sparse.dims[:] = [1]
