"""Is a renamed model right? Ask a full, independent ModelProto patch of its source.

`oracle.py SOURCE TARGET [SOURCE TARGET ...]` prints one JSON document: a verdict and, in words,
what is not as it should be.

- clean: nothing differs from the patch
- changed: something beside the names is gone or different, but the model still says the same
- wrong: a name, a node, a weight or a reference is not what it must be

Weights are compared by hash, in a stream: see `skeleton`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import onnx
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from onnx import GraphProto, ModelProto
from protowire import RECORD, Field, header, record, walk

BUFFER = re.compile(r"(past_key|past_value)\.(\d+)(_RetainedState)?")
TOKEN = "VLLM"
GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9
LARGE = 1 << 16
CHUNK = 1 << 20
HARMLESS = re.compile(
    r"\.(doc_string|metadata_props|denotation|producer_name|producer_version|model_version"
    r"|value_info|unknown field)\b|^model\.(domain|ir_version) |\b(graph|g|node)\.name "
    r"|^model\.opset_import (added|lost|reordered)|\.(node|initializer) reordered"
)
SINGULAR_KEYS = ("name", "key", "tensor_name", "domain")


def skeleton(path: Path) -> ModelProto:
    """The model with every large weight replaced by its hash."""
    with path.open("rb") as file:
        data = bytearray()
        for field in walk(file, 0, path.stat().st_size):
            if field.number == GRAPH and field.wire == RECORD:
                data += record(GRAPH, b"".join(_graph_parts(file, field)))
            else:
                data += _bytes(file, field.start, field.end)
    model = ModelProto()
    model.ParseFromString(bytes(data))
    return model


def _graph_parts(file: BinaryIO, graph: Field) -> Iterator[bytes]:
    for field in walk(file, graph.body, graph.end):
        if field.number == INITIALIZER and field.end - field.body > LARGE:
            yield record(INITIALIZER, b"".join(_tensor_parts(file, field)))
        else:
            yield _bytes(file, field.start, field.end)


def _tensor_parts(file: BinaryIO, tensor: Field) -> Iterator[bytes]:
    for field in walk(file, tensor.body, tensor.end):
        if field.number == RAW_DATA:
            yield header(RAW_DATA, 32) + _digest(file, field.body, field.end)
        else:
            yield _bytes(file, field.start, field.end)


def _bytes(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


def _digest(file: BinaryIO, start: int, end: int) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    file.seek(start)
    for at in range(start, end, CHUNK):
        digest.update(file.read(min(CHUNK, end - at)))
    return digest.digest()


def renamed(model: ModelProto) -> ModelProto:
    """A copy of the model as it should come out."""
    result = ModelProto()
    result.CopyFrom(model)
    names = {}
    for value in (*model.graph.input, *model.graph.output):
        if match := BUFFER.fullmatch(value.name):
            names[value.name] = f"{match[1]}.{match[2]}_{TOKEN}{match[3] or ''}"
    _rename_graph(result.graph, names)
    return result


def _rename_graph(graph: GraphProto, names: dict[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = names.get(sparse.values.name, sparse.values.name)
    for annotation in graph.quantization_annotation:
        annotation.tensor_name = names.get(annotation.tensor_name, annotation.tensor_name)
        for entry in annotation.quant_parameter_tensor_names:
            entry.value = names.get(entry.value, entry.value)
    for node in graph.node:
        for place in (node.input, node.output):
            if any(name in names for name in place):
                place[:] = [names.get(name, name) for name in place]
        for inner in _subgraphs(node):
            own = _defined(inner)
            _rename_graph(inner, {old: new for old, new in names.items() if old not in own})


def _subgraphs(node: onnx.NodeProto) -> list[GraphProto]:
    graphs = []
    for attribute in node.attribute:
        if attribute.HasField("g"):
            graphs.append(attribute.g)
        graphs.extend(attribute.graphs)
    return graphs


def _defined(graph: GraphProto) -> set[str]:
    names = {value.name for value in (*graph.input, *graph.initializer)}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    return names | {name for node in graph.node for name in node.output}


def broken_references(graph: GraphProto, outer: frozenset[str] = frozenset()) -> Iterator[str]:
    """Names read that nothing defines by then, and names defined twice."""
    known = set(outer) | {value.name for value in (*graph.input, *graph.initializer)}
    known |= {sparse.values.name for sparse in graph.sparse_initializer}
    for node in graph.node:
        for name in node.input:
            if name and name not in known:
                yield f"reads {name}, which nothing defines"
        for inner in _subgraphs(node):
            yield from broken_references(inner, frozenset(known))
        for name in node.output:
            if name and name in known:
                yield f"defines {name} twice"
            known.add(name)
    for value in graph.output:
        if value.name not in known:
            yield f"returns {value.name}, which nothing defines"


def differences(expected: Any, actual: Any, place: str) -> Iterator[str]:
    """Yield the differences of two messages, down to single fields, unknown ones included."""
    if _same(expected, actual):
        return
    for field in expected.DESCRIPTOR.fields:
        here = f"{place}.{field.name}"
        left, right = getattr(expected, field.name), getattr(actual, field.name)
        if not isinstance(left, Message) and not isinstance(left, (str, bytes, int, float)):
            if (left and isinstance(left[0], Message)) or (right and isinstance(right[0], Message)):
                yield from _item_differences(left, right, here)
            elif list(left) != list(right):
                yield f"{here} changed"
        elif isinstance(left, Message):
            yield from _presence(expected, actual, field.name, here)
            if expected.HasField(field.name) and actual.HasField(field.name):
                yield from differences(left, right, here)
        elif left != right:
            lost = not actual.HasField(field.name)
            yield f"{here} lost" if lost else f"{here} changed"
    if _unknown(expected) != _unknown(actual):
        yield f"{place}.unknown field lost"


def _presence(expected: Any, actual: Any, name: str, place: str) -> Iterator[str]:
    if expected.HasField(name) and not actual.HasField(name):
        yield f"{place} lost"
    elif actual.HasField(name) and not expected.HasField(name):
        yield f"{place} added"


def _item_differences(left: Iterable[Any], right: Iterable[Any], place: str) -> Iterator[str]:
    """Repeated messages are matched by what they are called."""
    wanted, given = _keyed(left), _keyed(right)
    for key in wanted:
        if key not in given:
            yield f"{place} lost"
        else:
            yield from differences(wanted[key], given[key], place)
    for key in given:
        if key not in wanted:
            yield f"{place} added"
    if [key for key in wanted if key in given] != [key for key in given if key in wanted]:
        yield f"{place} reordered"


def _keyed(items: Iterable[Any]) -> dict[tuple[Any, int], Any]:
    """By what each is called, and which of those it is."""
    keyed, seen = {}, Counter[Any]()
    for item in items:
        key = _key(item)
        keyed[key, seen[key]] = item
        seen[key] += 1
    return keyed


def _key(item: Any) -> Any:
    if hasattr(item, "op_type"):
        return tuple(item.output)
    if hasattr(item, "overload"):
        return (item.domain, item.name, item.overload)
    if hasattr(item, "values"):
        return item.values.name
    return next((getattr(item, key) for key in SINGULAR_KEYS if hasattr(item, key)), "")


def _same(left: Message, right: Message) -> bool:
    return bool(
        left.SerializeToString(deterministic=True) == right.SerializeToString(deterministic=True)
    )


def _unknown(message: Message) -> list[tuple[int, Any]]:
    return [(field.field_number, field.data) for field in UnknownFieldSet(message)]


def restore_function_names(before: ModelProto, after: ModelProto) -> None:
    """Give values inside local functions their old names back, where one name stands for one.

    They are a scope of their own, which no caller sees: a tool may rename in it or not.
    """
    for old, new in zip(before.functions, after.functions, strict=False):
        was, now = list(_function_places(old)), list(_function_places(new))
        pairs = set(zip(_flatten(was), _flatten(now), strict=False))
        names = {renamed: name for name, renamed in pairs}
        if [*map(len, was)] == [*map(len, now)] and len(names) == len(dict(pairs)) == len(pairs):
            for place in now:
                place[:] = [names[name] for name in place]


def _function_places(function: onnx.FunctionProto) -> Iterator[Any]:
    """Yield each list of names of values, but not those in the bodies of control flow."""
    yield from (function.input, function.output)
    for node in function.node:
        yield from (node.input, node.output)


def _flatten(places: Iterable[Iterable[str]]) -> Iterator[str]:
    return (name for place in places for name in place)


def judge(source: Path, target: Path) -> tuple[str, list[str]]:
    """The verdict on one result, and what is not as it should be."""
    before, after = skeleton(source), skeleton(target)
    restore_function_names(before, after)
    found = Counter(differences(renamed(before), after, "model"))
    words = [f"{what} ({count})" if count > 1 else what for what, count in found.items()]
    wrong = any(not HARMLESS.search(what) for what in found)
    broken = list(broken_references(after.graph)) or rejected(source, target)
    if broken:
        words.append(f"{broken[0]} ({len(broken)} such)" if len(broken) > 1 else broken[0])
    missing = [name for name in _data_files(after) if not (target.parent / name).is_file()]
    words += [f"its data file {name} is not beside it" for name in missing]
    if broken or wrong or missing:
        return "wrong", words
    return ("changed" if words else "clean"), words


def rejected(source: Path, target: Path) -> list[str]:
    """Return new messages of onnx's checker; big models are left to the other checks."""
    if max(source.stat().st_size, target.stat().st_size) > 100 * CHUNK:
        return []
    onnx.checker.check_model(source)
    try:
        onnx.checker.check_model(target)
    except Exception as error:
        return [f"onnx's checker rejects it: {str(error).splitlines()[0][:100]}"]
    return []


def _data_files(model: ModelProto) -> set[str]:
    entries = (entry for tensor in model.graph.initializer for entry in tensor.external_data)
    return {entry.value for entry in entries if entry.key == "location"}


def main(paths: list[str]) -> None:
    """The worst verdict over all pairs; words once each."""
    order = ("clean", "changed", "wrong")
    worst, words = "clean", dict[str, None]()
    for source, target in zip(paths[::2], paths[1::2], strict=True):
        verdict, said = judge(Path(source), Path(target))
        worst = max(worst, verdict, key=order.index)
        words.update(dict.fromkeys(said))
    print(json.dumps({"verdict": worst, "words": list(words)}))


if __name__ == "__main__":
    main(sys.argv[1:])
