"""Check a model by onnx's own checker.

The checker requires that the data of every tensor are there and fit its dims. It is
given a model in which each tensor without data has one element; whether the removed
data fit is computed here, from the sizes that
:mod:`onnxkvrename.verification.strip_weights` recorded.

It refuses three things that do not make a model unusable, and would then judge nothing
else: operators that onnx does not define and a runtime does, a function that is
defined twice in the same words, and outputs that are declared without a type or a shape.
All are warnings here, and all else is checked: such nodes are moved to a domain that the
checker does not know, copies are left out, and such outputs get a type.

Not checked here: where external data are (:mod:`onnxkvrename.model.external_data`
does), and the indices of large sparse tensors. Shape inference (`full_check`) is
left out: a model of a few kilobytes can keep it busy forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    defs,
)
from onnx.checker import ValidationError, check_model

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.model.proto_reader import get_dtype_bits, get_dtype_name
from onnxkvrename.model.protobuf import ByteSource, read_fields
from onnxkvrename.text import format_list
from onnxkvrename.verification.strip_weights import RemovedData, hash_fields, list_removed_data

_FIXED_SIZE_FIELDS = ("raw_data", "float_data", "double_data")
"""Fields of data in which the bytes of an element tell how many there are."""
_STANDARD_DOMAINS = {
    *("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training"),
    *("ai.onnx.preview", "ai.onnx.preview.training"),
}
"""The domains in which only onnx defines operators."""
_UNCHECKED_DOMAIN = "onnxkvrename.unknown"
_FUNCTION_FIELD = 25


def check_onnx_validity(model: ModelProto, source: ByteSource) -> Iterator[Finding]:
    """Yield what onnx's checker has against a model.

    Args:
        model: The model from `read_model_without_weights`; it is used up: the checker's
            own copy is large enough.
        source: The bytes that it was read from.

    Yields:
        KV123 for operators that onnx does not know, KV124 for functions that are defined
        more than once in the same bytes, KV115 as a warning for outputs without a type or a
        shape, and KV115, with the checker's reason, if it refuses anything else.
    """
    copies = _remove_copied_functions(model, source)
    if copies:
        yield _build_copies_finding(copies)
    unknown_operators, size_faults = _prepare_for_checker(model)
    if unknown_operators:
        yield _build_unknown_operators_finding(unknown_operators)
    yield from _complete_outputs(model.graph)
    try:
        check_model(model, full_check=False)
    except (ValidationError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if size_faults and "too small" in reason:
            reason = size_faults[0]
        yield build_finding(
            "KV115", "", f"onnx's checker rejects this model: {reason}", "export the model again"
        )


def _complete_outputs(graph: GraphProto) -> Iterator[Finding]:
    """Give outputs a type and a shape where they have none; yield KV115, a warning, for those."""
    without: dict[str, list[str]] = {"type": [], "shape": []}
    for value in graph.output:
        tensor = value.type.tensor_type
        if not value.HasField("type"):
            without["type"].append(_to_text(value.name))
            tensor.elem_type = TensorProto.FLOAT
        elif value.type.HasField("tensor_type") and not tensor.HasField("shape"):
            without["shape"].append(_to_text(value.name))
        else:
            continue
        tensor.shape.SetInParent()
    for missing, names in without.items():
        if names:
            noun = "an output" if len(names) == 1 else f"{len(names):,} outputs"
            finding = build_finding(
                "KV115",
                "",
                f"has {noun} declared without a {missing} ({format_list(names)}): onnx's checker "
                "rejects this, onnxruntime accepts it",
                f"onnx.shape_inference.infer_shapes adds the {missing}",
            )
            yield finding._replace(severity="warning")


def _build_unknown_operators_finding(operators: Counter[str]) -> Finding:
    names, nodes = format_list(sorted(operators)), operators.total()
    return build_finding(
        "KV123",
        "",
        f"has {nodes:,} {'node' if nodes == 1 else 'nodes'} with operators that onnx does not "
        f"define ({names}): not checked, everything else was",
        "a run that succeeds (examples/run_retention.py) shows that onnxruntime has them",
    )


def _build_copies_finding(copies: set[str]) -> Finding:
    names = format_list(sorted(copies))
    return build_finding(
        "KV124",
        "",
        f"defines local functions more than once, byte for byte the same ({names}): onnx 1.18, "
        "which QEfficient uses, accepts this; newer onnx and onnxruntime refuse the file",
        "QEfficient's merge keeps one of each; for other tools remove the copies",
    )


def _remove_copied_functions(model: ModelProto, source: ByteSource) -> set[str]:
    """Leave one of the local functions with the same bytes; return the names of such functions.

    Weights are not in the model: what is compared is what the source says.
    """
    indices: dict[tuple[str, str, str], list[int]] = {}
    for index, function in enumerate(model.functions):
        key = function.domain, function.name, function.overload
        indices.setdefault(key, []).append(index)
    copies: set[str] = set()
    if len(indices) == len(model.functions):
        return copies
    records = [
        record for record in read_fields(source, source.root) if record.number == _FUNCTION_FIELD
    ]
    removed = []
    for (domain, name, _), (first, *others) in indices.items():
        versions = {hash_fields(source, [records[index]]) for index in (first, *others)}
        if others and len(versions) == 1:
            copies.add(f"{_to_text(domain)}::{_to_text(name)}")
            removed += others
    for index in sorted(removed, reverse=True):
        del model.functions[index]
    return copies


def _to_text(name: str | bytes) -> str:
    """Return a name of a parsed model, which has bytes for what is not UTF-8."""
    return name if isinstance(name, str) else name.decode("utf-8", "backslashreplace")


class _Parts(NamedTuple):
    """What is changed before onnx's checker sees it, of some graphs or a function.

    Attributes:
        unknown_nodes: The nodes whose operator onnx does not define.
        tensors: The initializers, and the tensors of attributes.
        sparse_tensors: The sparse ones.
    """

    unknown_nodes: list[NodeProto]
    tensors: list[TensorProto]
    sparse_tensors: list[SparseTensorProto]


def _collect_parts(roots: Iterable[GraphProto | FunctionProto], imported: Iterable[str]) -> _Parts:
    """Return the parts of graphs or a function, and of all graphs in them.

    A node is unknown only in a domain that is imported.
    """
    domains = _STANDARD_DOMAINS.intersection(imported)
    if domains & {"", "ai.onnx"}:
        domains |= {"", "ai.onnx"}
    parts = _Parts([], [], [])
    pending = list(roots)
    while pending:
        body = pending.pop()
        attributes: list[AttributeProto] = []
        if isinstance(body, GraphProto):
            parts.tensors.extend(body.initializer)
            parts.sparse_tensors.extend(body.sparse_initializer)
        else:
            attributes.extend(body.attribute_proto)
        for node in body.node:
            domain = node.domain
            if domain in domains and not _is_for_checker(node.op_type, domain):
                parts.unknown_nodes.append(node)
            attributes.extend(node.attribute)
        for attribute in attributes:
            parts.tensors.extend(attribute.tensors)
            parts.sparse_tensors.extend(attribute.sparse_tensors)
            pending.extend(attribute.graphs)
            if attribute.HasField("t"):
                parts.tensors.append(attribute.t)
            if attribute.HasField("sparse_tensor"):
                parts.sparse_tensors.append(attribute.sparse_tensor)
            if attribute.HasField("g"):
                pending.append(attribute.g)
    return parts


@lru_cache(1024)
def _is_for_checker(operator: str | bytes, domain: str) -> bool:
    """Return whether onnx defines an operator, in whatever version, or it has no such name."""
    if isinstance(operator, bytes) or not operator:
        return True  # not UTF-8, or absent
    return bool(defs.has(operator, domain.removesuffix("ai.onnx")))


def _prepare_for_checker(model: ModelProto) -> tuple[Counter[str], list[str]]:
    """Move unknown operators to a domain of their own, and shrink tensors without data.

    An operator that onnx defines in another opset stays: the model is wrong then. So does
    one whose domain is not imported.

    Returns:
        The number of nodes of each unknown operator, and the faults of data that do not fit.
    """
    infos = model.training_info
    training = [graph for info in infos for graph in (info.initialization, info.algorithm)]
    scopes = [(model, [model.graph, *training])]
    defined = {(function.domain, function.name) for function in model.functions}
    counts: Counter[str] = Counter()
    faults: list[str] = []
    for scope, roots in [*scopes, *((function, [function]) for function in model.functions)]:
        parts = _collect_parts(roots, [entry.domain for entry in scope.opset_import])
        for node in parts.unknown_nodes:
            domain = node.domain.removesuffix("ai.onnx")
            if (node.domain, node.op_type) not in defined:
                counts[f"{domain}::{node.op_type}" if domain else node.op_type] += 1
            node.domain = _UNCHECKED_DOMAIN
        if parts.unknown_nodes:
            scope.opset_import.add(domain=_UNCHECKED_DOMAIN, version=1)
        for sparse_tensor in parts.sparse_tensors:
            _shrink_sparse_tensor(sparse_tensor)
        faults += filter(None, map(_shrink_tensor, parts.tensors))
    return counts, faults


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
    """Return whether the removed data can be enough for so many elements, judged by their size.

    A varint and a string count as one byte: the one has at least one, the others are counted.
    """
    bits = get_dtype_bits(get_dtype_name(dtype)) or 8
    if removed.field not in _FIXED_SIZE_FIELDS:
        bits = min(bits, 8)
    return removed.size * 8 >= element_count * bits


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
