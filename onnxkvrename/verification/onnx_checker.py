"""Check a model by onnx's own checker.

The checker requires that the data of every tensor are there and fit its dims. It is
given a copy of the model in which each tensor without data has one element; whether
the removed data fit is computed here, from the sizes that
:mod:`onnxkvrename.verification.strip_weights` recorded.

Not checked here: where external data are (:mod:`onnxkvrename.model.external_data`
does), and the indices of large sparse tensors. Shape inference (`full_check`) is
left out: a model of a few kilobytes can keep it busy forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from onnx import GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto
from onnx.checker import ValidationError, check_model, check_tensor

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.verification.strip_weights import RemovedData, list_removed_data

_PROBE_ELEMENTS = 24
"""A number of elements that fills whole bytes, whatever their type."""
_BYTES_PER_ENTRY = {"float_data": 4, "double_data": 8}
"""Bytes of an entry, if not 1: a varint has at least one byte, and strings are counted."""


def check_onnx_validity(model: ModelProto) -> Iterator[Finding]:
    """Yield KV115, with the checker's reason, if onnx's checker refuses the model.

    Args:
        model: A model from `read_model_without_weights`; it is not changed.
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    size_faults = [
        fault for tensor in _list_tensors(copy) if (fault := _shrink_tensor(tensor)) is not None
    ]
    try:
        check_model(copy, full_check=False)
    except (ValidationError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if size_faults and "too small" in reason:
            reason = size_faults[0]
        yield build_finding(
            "KV115", "", f"is refused by onnx's checker: {reason}", "export the model again"
        )


def _list_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Yield every dense tensor of a model; then shrink the sparse ones."""
    graphs: list[GraphProto] = [model.graph]
    for training in model.training_info:
        graphs += [training.initialization, training.algorithm]
    nodes: list[NodeProto] = [node for function in model.functions for node in function.node]
    attributes = [item for function in model.functions for item in function.attribute_proto]
    sparse_tensors: list[SparseTensorProto] = []
    while graphs or nodes or attributes:
        for graph in graphs:
            yield from graph.initializer
            sparse_tensors += graph.sparse_initializer
            nodes += graph.node
        for node in nodes:
            attributes += node.attribute
        graphs, nodes, visited, attributes = [], [], attributes, []
        for attribute in visited:
            yield from attribute.tensors
            if attribute.HasField("t"):
                yield attribute.t
            sparse_tensors += attribute.sparse_tensors
            if attribute.HasField("sparse_tensor"):
                sparse_tensors.append(attribute.sparse_tensor)
            graphs += attribute.graphs
            if attribute.HasField("g"):
                graphs.append(attribute.g)
    for sparse_tensor in sparse_tensors:
        _shrink_sparse_tensor(sparse_tensor)


def _shrink_tensor(tensor: TensorProto) -> str | None:
    """Reduce a tensor without data to one element; return the fault if its data do not fit."""
    removed_data = list_removed_data(tensor)
    if _is_external(tensor):
        has_location = any(
            entry.key == "location" and entry.value for entry in tensor.external_data
        )
        if has_location and not removed_data and not _has_data(tensor):
            _replace_with_zeros(tensor)
        return None
    dims = list(tensor.dims)
    element_count = prod(dims)
    if not removed_data or min(dims, default=1) <= 0 or element_count >= 1 << 63:
        return None
    for removed in removed_data:
        if not _has_enough_data(tensor.data_type, removed, element_count):
            unit = "strings" if removed.field == "string_data" else "bytes"
            data = f"{removed.size:,} {unit} of {removed.field}"
            return f"{tensor.name} has {data}, too few for its dims {dims}"
    tensor.dims[:] = [1]
    return None


def _is_external(tensor: TensorProto) -> bool:
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def _has_data(tensor: TensorProto) -> bool:
    fields = {field.name for field, _ in tensor.ListFields()} - {"external_data"}
    return any(field.endswith("_data") for field in fields)


def _replace_with_zeros(tensor: TensorProto) -> None:
    """Replace external data by one element of zeros."""
    tensor.ClearField("data_location")
    tensor.ClearField("external_data")
    tensor.dims[:] = [1]
    if tensor.data_type == TensorProto.STRING:
        tensor.string_data.append(b"")
    else:
        tensor.raw_data = bytes(16)


def _has_enough_data(dtype: int, removed: RemovedData, element_count: int) -> bool:
    """Tell if the removed data can be enough for so many elements, judged by their size."""
    probe_entries = _find_minimum_entries(dtype, removed.field)
    if probe_entries is None:
        return True
    needed_entries = -(-element_count * probe_entries // _PROBE_ELEMENTS)
    return removed.size // _BYTES_PER_ENTRY.get(removed.field, 1) >= needed_entries


@lru_cache
def _find_minimum_entries(dtype: int, field: str) -> int | None:
    """Return how many entries onnx's checker requires for the probe; `None` if none suffice."""
    limit = 17 * _PROBE_ELEMENTS
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        if _is_accepted_by_checker(dtype, field, middle):
            high = middle
        else:
            low = middle + 1
    return low if low < limit else None


def _is_accepted_by_checker(dtype: int, field: str, entry_count: int) -> bool:
    tensor = TensorProto(name="probe", data_type=dtype, dims=[_PROBE_ELEMENTS])
    if field == "raw_data":
        tensor.raw_data = bytes(entry_count)
    else:
        getattr(tensor, field).extend([b"" if field == "string_data" else 0] * entry_count)
    try:
        check_tensor(tensor)
    except ValidationError:
        return False
    return True


def _shrink_sparse_tensor(sparse_tensor: SparseTensorProto) -> None:
    """Leave one element of a sparse tensor whose values or indices are not available."""
    parts = (sparse_tensor.values, sparse_tensor.indices)
    if any(list_removed_data(part) or _is_external(part) for part in parts):
        for part in parts:
            name, dtype = part.name, part.data_type
            part.Clear()
            part.CopyFrom(TensorProto(name=name, data_type=dtype))
            _replace_with_zeros(part)
        sparse_tensor.dims[:] = [1]
