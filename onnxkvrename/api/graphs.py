"""Rename the values of live graphs: of onnx_graphsurgeon and of onnx_ir.

A graph is described as a model without weights, and that is renamed as a file: rules, checks and
report are the same. Both models list their names in one order, which is also that of the objects
they belong to; so each object gets its new name, whatever graph or function it is in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from onnx import (
    IR_VERSION,
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    load,
)
from onnx.helper import make_attribute, make_opsetid, set_model_props

from onnxkvrename.api.arguments import (
    RulesLike,
    build_request,
    find_graph_library,
    read_arguments,
    speak_python,
)
from onnxkvrename.api.files import run_rename
from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.files.read import MEMORY
from onnxkvrename.files.scratch import open_scratch_file
from onnxkvrename.findings import Finding
from onnxkvrename.rules.request import Request
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.verification.pairs.other_sides import MEMORY_HINT

if TYPE_CHECKING:
    from onnx_graphsurgeon import Graph
    from onnx_ir import Model

_PATH = str(MEMORY)
_KEPT_BYTES = 1 << 10
"""The largest values of a tensor that are described: shapes, axes and conditions, no weights."""
_ANNOTATION_KEY = "quant_parameter_tensor_names"
"""Where onnx_ir keeps the names that a quantization annotation gives to a value."""


@speak_python
def rename_graph(
    graph: Graph | Model,
    token: str | None = None,
    *,
    target: str | None = None,
    strip: bool = False,
    replace: bool = False,
    normalize: bool = False,
    rules: RulesLike = None,
    strict: bool = False,
    dry_run: bool = False,
) -> ModelReport:
    """Rename the KV buffers of a live graph, in place.

    The values get the names that they have in the renamed file of the exported graph. After an
    exception, or a report that failed, the graph is as it was. Weights are neither read nor
    copied. A value that belongs to two models has one name: it changes in both.

    Args:
        graph: An ``onnx_graphsurgeon.Graph``, the main graph of a model, or an
            ``onnx_ir.Model``.
        token: The infix token to add; with ``strip`` the one to remove, ``None`` for any.
        target: The consumer of the result, such as ``vllm-qaic``: its token is added, and the
            result is checked for it.
        strip: Remove the token.
        replace: Replace a different token.
        normalize: Give outputs the suffix that consumers pair with an input.
        rules: Rules, a profile's name or the path of a rules file.
        strict: Treat every warning as an error.
        dry_run: Plan and check only.

    Returns:
        The report, as of `rename`; its path is ``<memory>``.

    Raises:
        RulesError: The token or the rules cannot be used.
        ModelError: The graph cannot be described as a model, or one object would need two names.
        WriteError: The model without weights cannot be written to a temporary file.
        KvRenameError: The target does not exist, or requires another token.
        TypeError: An argument has the wrong type.
        ValueError: Two arguments contradict each other.

    Examples:
        >>> import onnx, onnx_graphsurgeon
        >>> graph = onnx_graphsurgeon.import_onnx(onnx.load("model.onnx"))
        >>> report = onnxkvrename.rename_graph(graph, "VLLM")
        >>> report.status, graph.inputs[2].name
        ('renamed', 'past_key.0_VLLM')
    """
    arguments = read_arguments(rename_graph, locals())
    live = _LIVE_MODELS[find_graph_library(graph)](graph)
    try:
        old = live.build()
    except Exception as error:  # whatever an object lacks that it should have
        raise ModelError(f"the graph cannot be exported: {error}") from error
    with open_scratch_file("model.onnx", old.SerializeToString()) as path:
        request = build_request(Request, arguments, models=(path,), jobs=1, sidecars="off")
        try:
            (report,) = run_rename(request).models
            if report.error is not None:
                raise report.error
        except KvRenameError as error:
            if error.path == str(path):
                error.path = None
            error.hint = error.hint and _hide_path(error.hint, path)
            raise
        if report.status == "renamed":
            new = load(path, load_external_data=False)
            _apply(tuple(live.plan_changes(old, new)))
    findings = tuple(
        item._replace(
            message=_hide_path(item.message, path),
            hint=MEMORY_HINT if _is_command_for_file(item) else _hide_path(item.hint, path),
        )
        for item in report.findings
    )
    return report._replace(path=_PATH, output=_PATH, feed_back_call=None, findings=findings)


def _is_command_for_file(finding: Finding) -> bool:
    """Return whether a hint renames the file of a graph whose names no profile matches."""
    return finding.code in ("KV001", "KV101", "KV102") and "`onnxkvrename " in finding.hint


def _hide_path(text: str, path: Path) -> str:
    """Return a text that calls the exported graph what a user may call it."""
    return text.replace(str(path), str(MEMORY / "graph"))


class _Change(NamedTuple):
    """An attribute of a live object that gets another value, and how to set it."""

    assign: Callable[[Any], None]
    old: Any
    new: Any


def _apply(changes: Sequence[_Change]) -> None:
    """Make all changes, or none if one fails."""
    try:
        for change in changes:
            change.assign(change.new)
    except BaseException:
        for change in reversed(changes):
            with suppress(Exception):  # what cannot be set has not changed
                change.assign(change.old)
        raise


class _LiveModel(ABC):
    """A live model, from which one without weights is built.

    A graph of onnx_ir is the sequence of its nodes, and one of onnx_graphsurgeon has them.

    Attributes:
        model: The live model.
        values: The object of each name in the model without weights, in the order of
            `_list_names`; ``None`` for an omitted input.
        main_count: How many of them are not in local functions.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.values: list[Any] = []
        self.main_count = 0

    def build_model(self, graph: Any, functions: Iterable[Any], **header: Any) -> ModelProto:
        """Return the model without weights, of its main graph, local functions and versions."""
        model = ModelProto(graph=self.build_graph(graph), **header)
        self.main_count = len(self.values)
        model.functions.extend(map(self.build_function, functions))
        return model

    def build_graph(self, graph: Any) -> GraphProto:
        """Return a graph without weights, and add its objects to `values`."""
        weights, inner_values = self.list_inner_values(graph)
        self.values += [*graph.inputs, *graph.outputs, *weights]
        return GraphProto(
            name=graph.name or "",
            input=map(self.build_value, graph.inputs),
            output=map(self.build_value, graph.outputs),
            initializer=map(self.build_weight, weights),
            node=map(self.build_node, getattr(graph, "nodes", graph)),
            value_info=map(self.build_value, inner_values),
        )

    def build_function(self, function: Any) -> FunctionProto:
        """Return a local function, and add its objects to `values`."""
        self.values += [*function.inputs, *function.outputs]
        defaults = list(self.build_attributes(function))  # before the nodes, as they are listed
        return FunctionProto(
            name=function.name,
            domain=function.domain,
            overload=_read_overload(function),
            input=[value.name for value in function.inputs],
            output=[value.name for value in function.outputs],
            attribute_proto=defaults,
            node=map(self.build_node, getattr(function, "nodes", function)),
        )

    def build_node(self, node: Any) -> NodeProto:
        """Return a node, and add its objects and those of its bodies to `values`."""
        self.values += [*node.inputs, *node.outputs]
        return NodeProto(
            name=node.name or "",
            op_type=node.op if hasattr(node, "op") else node.op_type,
            domain=node.domain or "",
            overload=_read_overload(node),
            input=["" if value is None else value.name for value in node.inputs],
            output=[value.name for value in node.outputs],
            attribute=self.build_attributes(node),
        )

    @abstractmethod
    def build(self) -> ModelProto:
        """Return the model without weights."""

    @abstractmethod
    def list_inner_values(self, graph: Any) -> tuple[list[Any], list[Any]]:
        """Return the weights of a graph, and its values that are neither inputs nor outputs."""

    @abstractmethod
    def build_value(self, value: Any) -> Any: ...

    @abstractmethod
    def build_weight(self, value: Any) -> TensorProto:
        """Return a weight; small values come with it, if they are in memory."""

    @abstractmethod
    def build_attributes(self, holder: Any) -> Any:
        """Return the attributes of a node, or those of a function that have a default value."""

    def plan_changes(self, old: ModelProto, new: ModelProto) -> Iterator[_Change]:
        """Yield what changes, given the model without weights before and after the rename.

        Raises:
            ModelError: An object is a value that changes, and another one that does not.
        """
        names: dict[int, tuple[Any, str]] = {}
        for value, name in zip(self.values, _list_names(new), strict=True):
            known = names.setdefault(id(value), (value, name))[1]
            if known != name:
                raise ModelError(
                    f"one object is two values {value.name!r}, in a graph and in a body or function"
                    f" of it: it would need the names {known!r} and {name!r}",
                    hint="give each of them an object of its own",
                )
        changed = (item for item in names.values() if item[0] is not None)
        yield from self.plan_names([item for item in changed if item[0].name != item[1]])
        pairs = zip(_list_symbols(old.graph), _list_symbols(new.graph), strict=True)
        symbols = {before: after for before, after in pairs if before != after}
        for value in self.values[: self.main_count] if symbols else ():
            shape = None if value is None else value.shape
            dims = [getattr(dim, "value", dim) for dim in shape or ()]
            if not symbols.keys().isdisjoint(dims):
                renamed = self.build_shape(shape, [symbols.get(dim, dim) for dim in dims])
                yield _Change(partial(setattr, value, "shape"), shape, renamed)

    def plan_names(self, names: Sequence[tuple[Any, str]]) -> Iterator[_Change]:
        """Yield the changes of names, given each object with its new one."""
        for value, name in names:
            yield _Change(partial(setattr, value, "name"), value.name, name)

    def build_shape(self, shape: Any, dims: list[Any]) -> Any:
        """Return a shape of the same kind with other dimensions."""
        return type(shape)(dims)


class _SurgeonGraph(_LiveModel):
    """A graph of onnx_graphsurgeon."""

    def build(self) -> ModelProto:
        import onnx_graphsurgeon
        from onnx_graphsurgeon.exporters import onnx_exporter

        self.library, self.exporter = onnx_graphsurgeon, onnx_exporter
        graph = self.model
        return self.build_model(
            graph,
            graph.functions,
            ir_version=graph.ir_version or IR_VERSION,
            producer_name=graph.producer_name or "",
            opset_import=graph.import_domains or [make_opsetid("", graph.opset)],
        )

    def list_inner_values(self, graph: Any) -> tuple[list[Any], list[Any]]:
        held = (value for node in graph.nodes for value in (*node.inputs, *node.outputs))
        values = {value.name: value for value in (*graph.inputs, *held, *graph.outputs)}
        weights = [each for each in values.values() if isinstance(each, self.library.Constant)]
        for value in (*graph.inputs, *graph.outputs, *weights):
            values.pop(value.name, None)
        return weights, [value for name, value in values.items() if name]

    def build_value(self, value: Any) -> Any:
        return self.exporter.OnnxExporter.export_value_info_proto(value, False)

    def build_weight(self, value: Any) -> TensorProto:
        proto = TensorProto()
        held = value._values  # the public attribute would load them
        if held.nbytes <= _KEPT_BYTES and not hasattr(getattr(held, "tensor", None), "indices"):
            proto.CopyFrom(self.exporter.OnnxExporter.export_tensor_proto(value))
            proto.ClearField("data_location")
            proto.ClearField("external_data")
        else:
            proto.data_type = self.exporter.dtype_to_onnx(value.export_dtype)
            proto.dims.extend(value.shape)
        proto.name = value.name
        return proto

    def build_attributes(self, holder: Any) -> Any:
        attributes = {name: value for name, value in holder.attrs.items() if value is not None}
        for name, value in holder.attrs.items():
            if isinstance(value, self.library.Tensor):
                attributes[name] = self.build_weight(value)
            elif isinstance(value, self.library.Graph):
                attributes[name] = self.build_graph(value)
        return self.exporter.OnnxExporter.export_attributes(attributes)


class _IrModel(_LiveModel):
    """A model of onnx_ir."""

    def build(self) -> ModelProto:
        import onnx_ir

        self.library, self.serde = onnx_ir, onnx_ir.serde
        model = self.model
        proto = self.build_model(
            model.graph,
            model.functions.values(),
            ir_version=model.ir_version,
            producer_name=model.producer_name or "",
            opset_import=starmap(make_opsetid, model.opset_imports.items()),
        )
        set_model_props(proto, model.metadata_props)
        return proto

    def list_inner_values(self, graph: Any) -> tuple[list[Any], list[Any]]:
        made = (value for node in graph for value in node.outputs)
        inner = [value for value in made if value.type and not value.is_graph_output()]
        return list(graph.initializers.values()), inner

    def build_graph(self, graph: Any) -> GraphProto:
        start = len(self.values)
        proto = super().build_graph(graph)
        for value in self.values[start:]:
            if names := _get_annotation(value):
                annotation = proto.quantization_annotation.add(tensor_name=value.name)
                for key, name in names.items():
                    annotation.quant_parameter_tensor_names.add(key=key, value=name)
        return proto

    def build_value(self, value: Any) -> Any:
        return self.serde.serialize_value(value)

    def build_weight(self, value: Any) -> TensorProto:
        return self.build_tensor(value.const_value, value.name)

    def build_tensor(self, tensor: Any, name: str) -> TensorProto:
        """Return a tensor; small values come with it, if they are in memory."""
        proto = TensorProto()
        in_memory = (self.library.Tensor, self.library.StringTensor, self.serde.TensorProtoTensor)
        if isinstance(tensor, in_memory) and tensor.nbytes <= _KEPT_BYTES:
            self.serde.serialize_tensor_into(proto, tensor)
        elif tensor is not None:
            proto.data_type = tensor.dtype.value
            proto.dims.extend(tensor.shape.numpy())
        proto.name = name
        return proto

    def build_attributes(self, holder: Any) -> Any:
        kind = self.library.AttributeType
        for attribute in holder.attributes.values():
            name, value = attribute.name, attribute.value
            if attribute.is_ref():
                yield self.serde.serialize_reference_attribute(attribute)
            elif attribute.type == kind.GRAPH:
                yield make_attribute(name, self.build_graph(value))
            elif attribute.type == kind.GRAPHS:
                yield make_attribute(name, [self.build_graph(graph) for graph in value])
            elif attribute.type == kind.TENSOR:
                yield make_attribute(name, self.build_tensor(value, value.name or ""))
            elif value is not None:  # as one that a function requires
                yield self.serde.serialize_attribute(attribute)

    def plan_names(self, names: Sequence[tuple[Any, str]]) -> Iterator[_Change]:
        """Yield the changes of names, and of what a graph or an annotation has by name."""
        graphs = {id(value.graph): value.graph for value, _ in names if value.is_initializer()}
        weights = [(graph, tuple(graph.initializers.values())) for graph in graphs.values()]
        for graph, values in weights:  # a graph refuses a second one of a name, even for a moment
            yield _Change(partial(_set_initializers, graph), values, ())
        yield from super().plan_names(names)
        for graph, values in weights:
            yield _Change(partial(_set_initializers, graph), (), values)
        name_map = {value.name: name for value, name in names}
        for value in {id(value): value for value in self.values}.values():
            if old := _get_annotation(value):
                new = {key: name_map.get(name, name) for key, name in old.items()}
                yield _Change(partial(value.meta.__setitem__, _ANNOTATION_KEY), old, new)

    def build_shape(self, shape: Any, dims: list[Any]) -> Any:
        denotations = map(shape.get_denotation, range(len(dims)))
        return self.library.Shape(dims, denotations, frozen=shape.frozen)


_LIVE_MODELS: Mapping[str, Callable[[Any], _LiveModel]] = {
    "onnx_graphsurgeon": _SurgeonGraph,
    "onnx_ir": _IrModel,
}


def _read_overload(item: Any) -> str:
    """Return the overload of a node or a function; a class without overloads has none.

    Its class and its own attributes say so: to ask the object would run the ``__getattr__`` of
    onnx-graphsurgeon's functions, which logs an error.
    """
    has_overload = hasattr(type(item), "overload") or "overload" in getattr(item, "__dict__", ())
    return str(item.overload) if has_overload else ""


def _get_annotation(value: Any) -> dict[str, str]:
    """Return the names that a quantization annotation gives to a value of onnx_ir."""
    found: dict[str, str] | None = None if value is None else value.meta.get(_ANNOTATION_KEY)
    return found or {}


def _set_initializers(graph: Any, values: Iterable[Any]) -> None:
    graph.initializers.clear()
    for value in values:
        graph.initializers.add(value)


def _list_names(model: ModelProto) -> Iterator[str]:
    """Yield the name of each value wherever it occurs, as `_LiveModel.values` has its object."""
    for graph in (model.graph, *model.functions):
        yield from _list_graph_names(graph)


def _list_graph_names(graph: GraphProto | FunctionProto) -> Iterator[str]:
    if isinstance(graph, GraphProto):
        yield from (value.name for value in (*graph.input, *graph.output, *graph.initializer))
    else:
        yield from (*graph.input, *graph.output)
        for body in _list_bodies(graph.attribute_proto):
            yield from _list_graph_names(body)
    for node in graph.node:
        yield from (*node.input, *node.output)
        for body in _list_bodies(node.attribute):
            yield from _list_graph_names(body)


def _list_bodies(attributes: Iterable[AttributeProto]) -> Iterator[GraphProto]:
    for attribute in attributes:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def _list_symbols(graph: GraphProto) -> Iterator[str]:
    """Yield the symbol of each dimension in a graph and its bodies, empty where it has none."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        type_ = value.type
        while (kind := type_.WhichOneof("value")) in ("sequence_type", "optional_type"):
            type_ = getattr(type_, kind).elem_type
        if kind in ("tensor_type", "sparse_tensor_type"):
            yield from (dim.dim_param for dim in getattr(type_, kind).shape.dim)
    for node in graph.node:
        for body in _list_bodies(node.attribute):
            yield from _list_symbols(body)
