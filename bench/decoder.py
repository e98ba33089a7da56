"""A decoder-like ONNX graph of any size, streamed to a file.

Nothing here needs onnx or holds weights: the protobuf framing is written by hand and the weights
are seeded pseudo-random blocks, so a 2 GB model costs a few megabytes of memory.

Every layer reads `past_key.i` and `past_value.i`, writes `past_key.i_RetainedState` and
`past_value.i_RetainedState`, and reads those again, as QEfficient's exports do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import BinaryIO

from protowire import header, integer, record, text, varint

FLOAT, INT64 = 1, 7
INT, TENSOR, INTS = 2, 4, 7  # AttributeProto.type
VOCABULARY = 16
BLOCK = 1 << 20
PAGE = 4096
SHARED = ("norm", "k_scale", "v_scale", "o_scale", "h_scale", "final_scale")
PADDING = ("Constant", "Mul", "Sigmoid", "Add", "Tanh", "Neg", "Identity", "Sqrt")


@dataclass(frozen=True)
class Decoder:
    """Decoder size. With `weights` (bytes) there are 3 initializers a layer, and 8 more."""

    layers: int
    weights: int = 0
    nodes: int = 0  # at least so many, by padding the layers
    first: int = 0  # number of the first layer
    external: str = ""  # file name of the data beside the model

    @property
    def hidden(self) -> int:
        return int((self.weights / 12 / self.layers) ** 0.5) if self.weights else 64


@dataclass(frozen=True)
class Weight:
    name: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        size = 4
        for dim in self.dims:
            size *= dim
        return size


def write(path: Path, decoder: Decoder, seed: int) -> None:
    """Write the model, and its data file if it has one."""
    weights = tuple(_weights(decoder))
    heads = _tensor_heads(decoder, weights)
    before = b"".join(_nodes(decoder)) + text(2, "decoder")
    after = b"".join(_declarations(decoder))
    inline = 0 if decoder.external else 1
    tensors = [
        len(head) + inline * weight.size for head, weight in zip(heads, weights, strict=True)
    ]
    length = len(before) + sum(n + len(header(5, n)) for n in tensors) + len(after)
    with path.open("wb") as file:
        file.write(integer(1, 8) + text(2, "onnxkvrename-bench") + text(3, "1"))
        file.write(header(7, length) + before)
        for head, weight, size in zip(heads, weights, tensors, strict=True):
            file.write(header(5, size) + head)
            if inline:
                _write_payload(file, weight, seed)
        file.write(after + record(8, integer(2, 17)))
        file.write(record(14, text(1, "source") + text(2, f"seed {seed}")))
    if decoder.external:
        _write_data_file(path.parent / decoder.external, weights, seed)


def write_tiny(path: Path) -> None:
    """One layer in five nodes, without weights."""
    cache: tuple[int | str, ...] = ("batch_size", 2, "ctx_len", 16)
    key, value = "past_key.0", "past_value.0"
    nodes = (
        node("Add", (key, "update"), f"{key}_RetainedState", at="write_key"),
        node("Add", (value, "update"), f"{value}_RetainedState", at="write_value"),
        node("Mul", (f"{key}_RetainedState", f"{value}_RetainedState"), "mixed"),
        node("Sigmoid", ("mixed",), "gated"),
        node("ReduceMean", ("gated",), "logits", (_ints("axes", (1, 2)), _int("keepdims", 0))),
    )
    inputs = [value_info(name, cache) for name in (key, value)]
    outputs = [value_info(f"{name}_RetainedState", cache) for name in (key, value)]
    graph = b"".join(record(1, n) for n in nodes) + text(2, "tiny")
    graph += b"".join(record(11, v) for v in (value_info("update", (1, 1, 1, 16)), *inputs))
    graph += b"".join(record(12, v) for v in (value_info("logits", ("batch_size", 16)), *outputs))
    opset = record(8, integer(2, 17))
    path.write_bytes(integer(1, 8) + text(2, "onnxkvrename-bench") + record(7, graph) + opset)


def node(
    kind: str,
    inputs: tuple[str, ...],
    output: str,
    attributes: tuple[bytes, ...] = (),
    at: str = "",
) -> bytes:
    """A node record; it is named after its output unless `at` says otherwise."""
    head = b"".join(text(1, value) for value in inputs) + text(2, output)
    name = at or output.removesuffix("_output_0")
    return head + text(3, name) + text(4, kind) + b"".join(record(5, a) for a in attributes)


def value_info(name: str, shape: tuple[int | str, ...], dtype: int = FLOAT) -> bytes:
    dims = b"".join(
        record(1, integer(1, dim) if isinstance(dim, int) else text(2, dim)) for dim in shape
    )
    return text(1, name) + record(2, record(1, integer(1, dtype) + record(2, dims)))


def _int(name: str, value: int) -> bytes:
    return text(1, name) + integer(3, value) + integer(20, INT)


def _ints(name: str, values: tuple[int, ...]) -> bytes:
    return text(1, name) + b"".join(integer(8, value) for value in values) + integer(20, INTS)


def _constant(output: str, values: tuple[int, ...], dtype: int = INT64) -> bytes:
    size = 8 if dtype == INT64 else 4
    data = b"".join(value.to_bytes(size, "little") for value in values)
    tensor = integer(1, len(values)) + integer(2, dtype) + record(9, data)
    return node(
        "Constant", (), output, (text(1, "value") + record(5, tensor) + integer(20, TENSOR),)
    )


def _nodes(decoder: Decoder) -> Iterator[bytes]:
    """The graph's node records, the padding spread evenly over the layers."""
    layers = [_layer(decoder, layer) for layer in range(decoder.layers)]
    lacking = max(0, decoder.nodes - sum(len(nodes) + 1 for nodes in layers) - 4)
    yield record(1, _constant("axes", (1,)))
    start = "inputs_embeds"
    if decoder.weights:
        start = "/model/embedded"
        yield record(1, node("Gather", ("embed", "input_ids"), start))
    yield record(1, _scaled(decoder, start, "norm", "/model/hidden.0"))
    for layer, nodes in enumerate(layers):
        share = lacking * (layer + 1) // decoder.layers - lacking * layer // decoder.layers
        padding, last = _padding(layer, share)
        for body in (*nodes, *padding):
            yield record(1, body)
        yield record(1, _scaled(decoder, last, "h_scale", f"/model/hidden.{layer + 1}"))
    yield record(
        1, _scaled(decoder, f"/model/hidden.{decoder.layers}", "final_scale", "/model/last")
    )
    if decoder.weights:
        yield record(1, node("MatMul", ("/model/last", "lm_head"), "logits"))
    else:
        yield record(1, node("Identity", ("/model/last",), "logits"))


def _scaled(decoder: Decoder, source: str, scale: str, output: str) -> bytes:
    if decoder.weights:
        return node("Mul", (source, scale), output)
    return node("Identity", (source,), output)


def _layer(decoder: Decoder, layer: int) -> list[bytes]:
    """A layer's own nodes: project, write the caches, read them again, add to the hidden state."""
    here = f"/model/layers.{layer}"
    hidden = f"/model/hidden.{layer}"
    number = decoder.first + layer
    nodes = []
    for part, name in (("k", f"past_key.{number}"), ("v", f"past_value.{number}")):
        at = f"{here}/self_attn/{part}"
        mean = (_ints("axes", (1,)), _int("keepdims", 1))
        nodes += _project(decoder, layer, part, hidden, f"{at}_proj_output_0")
        nodes += [
            node("ReduceMean", (f"{at}_proj_output_0",), f"{at}_mean_output_0", mean),
            node("Unsqueeze", (f"{at}_mean_output_0", "axes"), f"{at}_Unsqueeze_output_0"),
            node(
                "Add", (name, f"{at}_Unsqueeze_output_0"), f"{name}_RetainedState", at=f"{at}_Add"
            ),
        ]
    reads = (f"past_key.{number}_RetainedState", f"past_value.{number}_RetainedState")
    attention = f"{here}/self_attn"
    shaped = f"{attention}/Reshape_output_0"
    mean = (_ints("axes", (1, 2)), _int("keepdims", 0))
    nodes += [
        node("Shape", (reads[0],), f"{attention}/Shape_output_0"),
        node("Mul", reads, f"{attention}/Mul_output_0"),
        node("Reshape", tuple(f"{attention}/{kind}_output_0" for kind in ("Mul", "Shape")), shaped),
        node("ReduceMean", (shaped,), f"{attention}/mix_output_0", mean),
        node("Unsqueeze", (f"{attention}/mix_output_0", "axes"), f"{attention}/mix1_output_0"),
        node("Add", (hidden, f"{attention}/mix1_output_0"), f"{here}/Add_output_0"),
    ]
    return nodes + _project(decoder, layer, "o", f"{here}/Add_output_0", f"{here}/out_output_0")


def _project(decoder: Decoder, layer: int, part: str, source: str, output: str) -> list[bytes]:
    if not decoder.weights:
        return [node("Sigmoid", (source,), output)]
    scaled = f"{output}_scaled"
    weight = f"model.layers.{decoder.first + layer}.self_attn.{part}_proj.weight"
    return [
        node("Mul", (source, f"{part}_scale"), scaled),
        node("MatMul", (scaled, weight), output),
    ]


def _padding(layer: int, count: int) -> tuple[list[bytes], str]:
    """So many cheap nodes in a chain, and the name of the value at its end."""
    here = f"/model/layers.{layer}"
    last, constant = f"{here}/out_output_0", ""
    nodes = []
    for number, kind in enumerate(islice(cycle(PADDING), count)):
        output = f"{here}/mlp/experts.{number // 64}/{kind}_{number}_output_0"
        if kind == "Constant":
            constant = output
            nodes.append(_constant(output, (0x3F800000,), FLOAT))
            continue
        inputs = (last, constant) if kind in ("Mul", "Add") else (last,)
        nodes.append(node(kind, inputs, output))
        last = output
    return nodes, last


def _declarations(decoder: Decoder) -> Iterator[bytes]:
    """The graph's inputs, outputs and value_info."""
    hidden = decoder.hidden
    state: tuple[int | str, ...] = ("batch_size", "seq_len", hidden)
    cache: tuple[int | str, ...] = ("batch_size", 2, "ctx_len", hidden)
    names = [
        f"past_{part}.{decoder.first + layer}"
        for layer in range(decoder.layers)
        for part in ("key", "value")
    ]
    if decoder.weights:
        yield record(11, value_info("input_ids", ("batch_size", "seq_len"), INT64))
    else:
        yield record(11, value_info("inputs_embeds", state))
    for name in names:
        yield record(11, value_info(name, cache))
    width = VOCABULARY if decoder.weights else hidden
    yield record(12, value_info("logits", ("batch_size", "seq_len", width)))
    for name in names:
        yield record(12, value_info(f"{name}_RetainedState", cache))
    for layer in range(decoder.layers):
        yield record(13, value_info(f"/model/hidden.{layer}", state))


def _weights(decoder: Decoder) -> Iterator[Weight]:
    if not decoder.weights:
        return
    hidden = decoder.hidden
    yield Weight("embed", (VOCABULARY, hidden))
    for name in SHARED:
        yield Weight(name, (hidden,))
    for layer in range(decoder.first, decoder.first + decoder.layers):
        for part in ("k", "v", "o"):
            yield Weight(f"model.layers.{layer}.self_attn.{part}_proj.weight", (hidden, hidden))
    yield Weight("lm_head", (hidden, VOCABULARY))


def _tensor_heads(decoder: Decoder, weights: tuple[Weight, ...]) -> list[bytes]:
    """Each TensorProto up to its raw data, or whole where the data lies in another file."""
    heads, offset = [], 0
    for weight in weights:
        head = b"".join(integer(1, dim) for dim in weight.dims) + integer(2, FLOAT)
        head += text(8, weight.name)
        if decoder.external:
            place = {"location": decoder.external, "offset": offset, "length": weight.size}
            for key, value in place.items():
                head += record(13, text(1, key) + text(2, str(value)))
            heads.append(head + integer(14, 1))
            offset += -(-weight.size // PAGE) * PAGE
        else:
            heads.append(head + varint(9 << 3 | 2) + varint(weight.size))
    return heads


def _payload(weight: Weight, seed: int, size: int) -> Iterator[bytes]:
    """Cheap bytes that differ from weight to weight and from block to block."""
    block = bytearray(random.Random(f"{seed} {weight.name}").randbytes(min(BLOCK, size)))
    for number in range(-(-size // BLOCK)):
        block[:8] = number.to_bytes(8, "little")
        yield bytes(memoryview(block)[: size - number * BLOCK])


def _write_payload(file: BinaryIO, weight: Weight, seed: int) -> None:
    for block in _payload(weight, seed, weight.size):
        file.write(block)


def _write_data_file(path: Path, weights: tuple[Weight, ...], seed: int) -> None:
    """Sparse: a page of content where each tensor starts, holes for the rest."""
    with path.open("wb") as file:
        offset = 0
        for weight in weights:
            file.seek(offset)
            file.write(next(_payload(weight, seed, min(PAGE, weight.size))))
            offset += -(-weight.size // PAGE) * PAGE
        file.truncate(offset)
