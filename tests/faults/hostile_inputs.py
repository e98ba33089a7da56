"""Models that cost much to read for their size: many small records, deep, wide or huge values.

`MODELS` holds functions from a size in bytes to a model of about that size. They are written
without a parser, so that megabytes take no time to make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

from faults.wire import field, number, varint

KEY, VALUE = "past_key.0", "past_value.0"
HUGE = (1 << 63) - 1

Build = Callable[[int], bytes]


def value_info(name: str | bytes, *dims: int | str, dtype: int = 1) -> bytes:
    """The payload of a graph input or output."""
    shape = b"".join(
        field(1, number(1, dim) if isinstance(dim, int) else field(2, dim)) for dim in dims
    )
    return field(1, name) + field(2, field(1, number(1, dtype) + field(2, shape)))


def node(inputs: Iterable[str], outputs: Iterable[str], more: bytes = b"") -> bytes:
    """The payload of a node."""
    names = [field(1, name) for name in inputs] + [field(2, name) for name in outputs]
    return b"".join(names) + field(4, "Add") + more


def operator(op_type: str, inputs: Iterable[str], outputs: Iterable[str]) -> bytes:
    """A node of an operator."""
    names = [field(1, name) for name in inputs] + [field(2, name) for name in outputs]
    return field(1, b"".join(names) + field(4, op_type))


BUFFERS = b"".join(
    field(11, value_info(name, 1, 2, 8, 4))
    + field(12, value_info(f"{name}_RetainedState", 1, 2, 8, 4))
    + field(1, node([name], [f"{name}_RetainedState"]))
    for name in (KEY, VALUE)
)
OPSET = field(8, number(2, 18))


def model(graph: bytes = b"", root: bytes = b"") -> bytes:
    """A model with one layer, and `graph` and `root` at the ends of its two messages."""
    return number(1, 10) + field(7, BUFFERS + graph) + OPSET + root


def repeat(unit: bytes, size: int) -> bytes:
    """A record again and again."""
    return unit * (size // len(unit))


def series(make: Callable[[int], bytes], size: int) -> bytes:
    """Records that differ, made from 0, 1, 2 and so on."""
    parts, total = [], 0
    for index in count():
        parts.append(make(index))
        total += len(parts[-1])
        if total >= size:
            return b"".join(parts)
    raise AssertionError


def in_graph(unit: bytes) -> Build:
    """Models with a record again and again in the graph."""
    return lambda size: model(repeat(unit, size))


def at_root(unit: bytes) -> Build:
    """Models with a record again and again beside the graph."""
    return lambda size: model(root=repeat(unit, size))


def inside(wrap: Callable[[bytes], bytes], unit: bytes) -> Build:
    """Models with a message in the graph that has a record again and again."""
    return lambda size: model(wrap(repeat(unit, size)))


def each(make: Callable[[int], bytes]) -> Build:
    """Models with records in the graph that differ."""
    return lambda size: model(series(make, size))


def pair(name: str, *dims: int | str) -> bytes:
    """A buffer, with the node that writes it."""
    output = f"{name}_RetainedState"
    return (
        field(11, value_info(name, *dims))
        + field(12, value_info(output, *dims))
        + field(1, node([name], [output]))
    )


def joined_state(number: int) -> bytes:
    """An input that one value of a long chain is joined to, and that value as an output."""
    value, before = f"c{number + 1}", f"c{number}"
    return (
        field(11, value_info(f"k{number}", 1, 4))
        + field(12, value_info(value, 1, 4))
        + operator("Identity" if number else "MatMul", [before], [value])
        + operator("Concat", [f"k{number}", value], [f"j{number}"])
    )


def branch_states(size: int) -> bytes:
    """An If whose branches read and make many values in the same place."""
    numbers = range(size // 160)
    reads = b"".join(
        operator("Constant", [], [f"d{n}"])
        + operator("Add", [f"i{n}", "w"], ["" if n else "r"])
        + operator("MatMul", [f"i{n}", "w"], [f"r{n}"])
        for n in numbers
    )
    makes = b"".join(
        operator("MatMul", ["w", f"m{n - 1}"], [f"m{n}"]) + operator("MatMul", [f"m{n}", "w"], [])
        for n in numbers
    )
    outputs = [b"".join(field(12, value_info(f"{name}{n}")) for n in numbers) for name in "dm"]
    branches = [
        field(5, field(1, name) + field(6, body) + number(20, 5))
        for name, body in (("then_branch", reads + outputs[0]), ("else_branch", makes + outputs[1]))
    ]
    names = b"".join(field(2, f"o{n}") for n in numbers)
    ends = b"".join(
        field(11, value_info(f"i{n}", 1)) + field(12, value_info(f"o{n}", 1)) for n in numbers
    )
    return model(
        ends + field(5, field(8, "w")) + field(1, names + field(4, "If") + b"".join(branches))
    )


def nested_graphs(size: int, depth: int = 30) -> bytes:
    """Subgraphs in subgraphs, each with many nodes that have a buffer's name."""
    body = b""
    nodes = repeat(field(1, node([KEY], ["y"])), size // depth)
    for _ in range(depth):
        body = nodes + field(1, node([KEY], ["y"], field(5, field(6, body))))
    return model(body)


def below_parts_limit(record: bytes, messages: int) -> Build:
    """Models with nearly as many parts as verification lets a parser have, and a long text.

    Args:
        record: A field of the graph.
        messages: The messages in it; two count as a part.
    """

    def build(size: int) -> bytes:
        most = int(1.9 * (16_384 + size // 16)) // messages
        records = record * min(size // 2 // len(record), most)
        return model(records + field(6, b"x" * (size - len(records))))

    return build


def tensor(*parts: bytes) -> bytes:
    """A tensor whose data are in a file, and whose name is that of a buffer."""
    return field(5, field(8, KEY) + number(2, 1) + number(14, 1) + b"".join(parts))


def entry(key: str, text: str) -> bytes:
    """An entry of external data."""
    return field(13, field(1, key) + field(2, text))


LOCATION = entry("location", "w.bin")
OPEN, CLOSE = varint(500 << 3 | 3), varint(500 << 3 | 4)


def own_node(unit: bytes) -> Build:
    """Models with a node of a buffer that has a record again and again."""
    return inside(lambda data: field(1, node([KEY], ["y"], data)), unit)


def own_attribute(unit: bytes) -> Build:
    """Models with an attribute of such a node that has a record again and again."""
    return inside(lambda data: field(1, node([KEY], ["y"], field(5, field(1, KEY) + data))), unit)


def input_with(dims: bytes) -> bytes:
    """An input and an output of a buffer with the records of these dims in their shapes."""
    shape = field(2, field(1, number(1, 1) + field(2, dims)))
    return field(11, field(1, "past_key.1") + shape)


def in_input(data: bytes) -> bytes:
    """An input with the name of a buffer, and other fields."""
    return field(11, field(1, "past_key.1") + data)


def deep_node(depth: int) -> bytes:
    """A node with subgraphs in subgraphs, and a buffer at the bottom."""
    body = field(1, node([KEY], ["y"]))
    for _ in range(depth):
        body = field(1, field(5, field(6, body)))
    return body


MODELS: dict[str, Build] = {
    # beside the graph
    "unknown numbers": at_root(number(500, 1)),
    "unknown texts": at_root(field(500, b"")),
    "unknown groups": at_root(OPEN + CLOSE),
    "unknown group of groups": lambda size: model(root=OPEN + repeat(OPEN + CLOSE, size) + CLOSE),
    "unknown group of numbers": lambda size: model(root=OPEN + repeat(number(1, 1), size) + CLOSE),
    "fixed numbers": at_root(varint(500 << 3 | 5) + bytes(4)),
    "ir_version": at_root(number(1, 10)),
    "producer_name": at_root(field(2, b"")),
    "opset_import": at_root(field(8, b"")),
    "opset domains": lambda size: model(root=series(lambda n: field(8, field(1, f"d{n}")), size)),
    "one opset": lambda size: model(root=field(8, repeat(number(2, 1), size))),
    "metadata_props": at_root(field(14, b"")),
    "one metadata entry": lambda size: model(root=field(14, repeat(field(1, b""), size))),
    "functions": at_root(field(25, b"")),
    "one function": lambda size: model(root=field(25, repeat(field(7, b""), size))),
    "function attributes": lambda size: model(root=field(25, repeat(field(6, b""), size))),
    "function nodes": at_root(field(25, field(7, field(3, "location") + bytes([0x28, 1])))),
    "training_info": at_root(field(20, b"")),
    "training bindings": lambda size: model(
        root=field(20, repeat(field(4, field(1, KEY) + field(2, KEY)), size))
    ),
    "empty bindings": lambda size: model(root=field(20, repeat(field(4, b""), size))),
    "spare bytes": at_root(field(500, b"", 5)),
    # in the graph
    "inputs": in_graph(field(11, b"")),
    "outputs": in_graph(field(12, b"")),
    "typed inputs": each(lambda n: field(11, value_info(f"i{n}", 1))),
    "typed outputs": each(lambda n: field(12, value_info(f"o{n}", 1))),
    "one name": in_graph(field(11, value_info(KEY, 1))),
    "one output": in_graph(field(12, value_info(f"{KEY}_RetainedState", 1))),
    "graph fields": in_graph(number(500, 1)),
    "graph texts": in_graph(field(500, b"")),
    "graph groups": in_graph(OPEN + CLOSE),
    "nodes": in_graph(field(1, b"")),
    "nodes of a buffer": in_graph(field(1, node([KEY], ["y"]))),
    "producers of a buffer": in_graph(field(1, node([], [KEY]))),
    "nodes and initializers": in_graph(field(1, b"") + field(5, b"")),
    "fields with long tags": in_graph(field(500, b"abc")),
    "numbers in the graph": in_graph(number(3, 1)),
    "initializers": in_graph(field(5, b"")),
    "initializers of a buffer": in_graph(field(5, field(8, KEY))),
    "sparse initializers": in_graph(field(15, field(1, field(8, KEY)))),
    "value_info": in_graph(field(13, b"")),
    "value_info below the limit": below_parts_limit(field(13, b""), 1),
    "types below the limit": below_parts_limit(
        field(13, field(2, field(1, field(2, field(1, b""))))), 5
    ),
    "value_info of a buffer": in_graph(field(13, value_info(KEY, 1))),
    "annotations": in_graph(field(14, b"")),
    "annotations of a buffer": in_graph(field(14, field(1, KEY))),
    "one annotation": inside(lambda data: field(14, field(1, KEY) + data), field(2, b"")),
    "quantization parameters": inside(
        lambda data: field(14, field(1, KEY) + data), field(2, field(1, "S") + field(2, KEY))
    ),
    "graph metadata": in_graph(field(16, b"")),
    # buffers
    "layers": each(lambda n: pair(f"past_key.{n + 1}", 1, 2, 8, 4)),
    "layers without shapes": each(lambda n: field(11, field(1, f"past_key.{n + 1}"))),
    "outputs only": each(lambda n: field(12, field(1, f"past_key.{n + 1}_RetainedState"))),
    "scopes of one layer": each(lambda n: pair(f"{n}/past_key.0", 1, 2, 8, 4)),
    "joined states": each(joined_state),
    "states of branches": branch_states,
    "numbers in names of states": each(
        lambda n: (
            field(11, value_info("0/" * 3_000 + f"s{n}", 1, 4))
            + field(12, value_info("0/" * 3_000 + f"t{n}", 1, 4))
            + operator("Identity", ["0/" * 3_000 + f"s{n}"], ["0/" * 3_000 + f"t{n}"])
        )
    ),
    "computed states": each(
        lambda n: (
            field(11, value_info(f"k{n}", 1, n % 999 + 1))
            + field(12, value_info(f"o{n}", 1, n % 999 + 1))
            + operator("Neg", [f"k{n}"], [f"o{n}"])
        )
    ),
    "unlike scopes": each(lambda n: pair(f"{n}/past_key.0", 1, 2, n + 1, 4)),
    "far layers": each(lambda n: pair(f"past_key.{(n * 7919) % 999_983}", 1, "ctx", 4)),
    "tokens": each(lambda n: pair(f"past_key.{n + 1}_T{n}", 1)),
    "unknown states": each(lambda n: field(12, field(1, f"s{n}_RetainedState"))),
    "vision": each(lambda n: field(12, field(1, f"vision_embeds.{n}_RetainedState"))),
    "long names": each(lambda n: field(11, field(1, f"{n}" + "a" * 60_000))),
    "long names of buffers": each(lambda n: pair("/" * 60_000 + f"past_key.{n}", 1)),
    "numbers in names": each(lambda n: pair("0/" * 30_000 + f"past_key.{n}", 1)),
    "dims": inside(input_with, field(1, b"")),
    "dims of 1": inside(input_with, field(1, number(1, 1))),
    "huge dims": inside(input_with, field(1, number(1, HUGE))),
    "symbols": inside(input_with, field(1, field(2, b""))),
    "different symbols": lambda size: model(
        input_with(series(lambda n: field(1, field(2, f"s{n}")), size))
    ),
    "derived symbols": lambda size: model(
        input_with(series(lambda n: field(1, field(2, f"{KEY}_dim_{n}")), size))
    ),
    "one dim": inside(lambda data: input_with(field(1, data)), number(1, 1)),
    "fields of an input": inside(in_input, field(3, b"")),
    "fields of a type": inside(lambda data: in_input(field(2, data)), field(6, b"")),
    "names of an input": inside(lambda data: field(11, data), field(1, KEY)),
    "dims of a buffer": lambda size: model(pair("past_key.1", *[1] * (size // 16))),
    "symbols of a buffer": lambda size: model(
        pair("past_key.1", *map("s{}".format, range(size // 25)))
    ),
    # nodes and what they hold
    "inputs of a node": own_node(field(1, b"")),
    "buffers of a node": own_node(field(1, KEY)),
    "outputs of a node": own_node(field(2, KEY)),
    "numbers in a node": own_node(number(500, 1)),
    "texts in a node": own_node(field(6, b"")),
    "attributes": own_node(field(5, b"")),
    "shardings": own_node(field(10, field(2, field(1, KEY)))),
    "one sharding": own_node(field(10, b"")),
    "floats": own_attribute(varint(7 << 3 | 5) + bytes(4)),
    "ints": own_attribute(number(8, 1)),
    "strings": own_attribute(field(9, b"")),
    "tensors": own_attribute(field(10, b"")),
    "graphs": own_attribute(field(11, b"")),
    "graphs of a buffer": own_attribute(field(11, field(1, node([KEY], ["y"])))),
    "types": own_attribute(field(15, b"")),
    "large node": inside(lambda data: field(1, data), field(5, field(5, b""))),
    "large node of graphs": inside(lambda data: field(1, field(5, data)), field(11, b"")),
    "nested graphs": nested_graphs,
    "nested graphs of one node each": lambda size: model(repeat(deep_node(30), size)),
    # tensors
    "fields of a tensor": inside(lambda data: tensor(LOCATION, data), number(500, 1)),
    "tensor dims": inside(lambda data: tensor(LOCATION, data), number(1, 1)),
    "tensor dims of 2": inside(lambda data: tensor(LOCATION, data), number(1, 2)),
    "huge tensor dims": inside(lambda data: tensor(LOCATION, data), number(1, HUGE)),
    "packed dims": inside(lambda data: tensor(LOCATION, field(1, data)), b"\1"),
    "packed dims of 2": inside(lambda data: tensor(LOCATION, field(1, data)), b"\2"),
    "huge packed dims": inside(lambda data: tensor(LOCATION, field(1, data)), varint(HUGE)),
    "dims and a length": inside(
        lambda data: tensor(LOCATION, entry("length", "4"), data), number(1, HUGE)
    ),
    "external entries": inside(lambda data: tensor(LOCATION, data), field(13, b"")),
    "external keys": lambda size: model(
        tensor(LOCATION, series(lambda n: entry(f"k{n}", ""), size))
    ),
    "external tensors": in_graph(tensor(LOCATION)),
    "external files": each(lambda n: tensor(entry("location", f"w{n}"))),
    "external problems": each(lambda n: tensor(LOCATION, entry("offset", f"x{n}"))),
    "tensor texts": inside(lambda data: field(5, field(8, KEY) + data), field(6, b"")),
    "tensor numbers": inside(lambda data: field(5, field(8, KEY) + data), number(7, 1)),
}
