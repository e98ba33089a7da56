"""Build the two sides of a hand-off, and hand over real bytes to compare a prediction with.

:func:`handed` counts and copies bytes as vllm-qaic's code does, without the package: names
sorted by layer, one piece of memory, axis 2 up to the length of the prompt.
"""

from __future__ import annotations

import math
from typing import NamedTuple
from zlib import crc32

import numpy as np

from onnxkvrename import load_rules
from onnxkvrename.handoff.compare import Handoff, compare_sides
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.find_consumers import load_consumer
from onnxkvrename.handoff.tensor_parallel import TensorParallelSizes
from onnxkvrename.handoff.worker import HandoffSide, build_handoff_side
from onnxkvrename.layout.layout import Layout, apply_sizes, build_layout
from onnxkvrename.model.signature import Dim, Signature, Value
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import build_minimal_plan

QEFF = load_rules()
TARGET = load_consumer("vllm-qaic")
TOKEN = "vllmKvCache"
WIDTHS = {"INT8": 1, "MXINT8": 1, "FLOAT16": 2, "FLOAT": 4}


def value(text: str, token: str = TOKEN) -> Value:
    """Parse ``name:2,ctx_len,4`` or ``name:2,ctx_len,4:INT8``; batch and token are added."""
    name, dims, dtype = (*text.split(":"), "FLOAT16")[:3]
    shape: list[Dim] = [int(dim) if dim.isdigit() else dim for dim in dims.split(",")]
    return Value(name + (f"_{token}" if token else ""), dtype, ("batch_size", *shape))


def side_of(*texts: str, token: str = TOKEN, **sizes: int) -> Layout:
    """Build a layout of inputs, in this order, each with its retained output."""
    inputs = tuple(value(text, token) for text in texts)
    outputs = tuple(one._replace(name=f"{one.name}_RetainedState") for one in inputs)
    signature = Signature(inputs, (Value("logits", "FLOAT", ("batch_size", 1, 8)), *outputs))
    plan = build_minimal_plan(signature, QEFF)
    made = build_layout([KvModel("model.onnx", signature, plan)])
    return apply_sizes(made, sizes)


def attention(*layers: int, shape: str = "2,ctx_len,4", dtype: str = "FLOAT16") -> tuple[str, ...]:
    """Describe key and value of some layers, for :func:`side_of`."""
    parts = ("past_key", "past_value")
    return tuple(f"{part}.{layer}:{shape}:{dtype}" for layer in layers for part in parts)


def seen(label: str, layout: Layout, target: Consumer = TARGET) -> HandoffSide:
    return build_handoff_side(label, layout, target, QEFF)


def told(
    prefill: Layout,
    decode: Layout,
    *,
    target: Consumer = TARGET,
    whole: bool = False,
    ranks: tuple[int, int] | None = None,
    tokens: tuple[int, ...] = (),
) -> Handoff:
    """Predict the hand-off between two layouts."""
    return compare_sides(
        seen("prefill", prefill, target),
        seen("decode", decode, target),
        target,
        ranks=None if ranks is None else TensorParallelSizes(*ranks),
        full_transfer=whole,
        tokens=tokens,
    )


def codes(found: Handoff) -> list[str]:
    return [one.code for one in found.findings]


# A hand-off of real bytes.


class Handed(NamedTuple):
    """The result: whether decode refused, and the buffers in which it reads wrong bytes."""

    refused: bool
    wrong: frozenset[str]


def handed(prefill: Layout, decode: Layout, tokens: int, *, whole: bool = False) -> Handed:
    """Hand over the buffers of a prompt and compare what decode reads; all sizes are known."""
    made = [_slot(prefill, name, tokens, whole) for name in _ordered(prefill.inputs)]
    outputs = _ordered(prefill.outputs, "_RetainedState")
    memory = np.zeros(sum(size for _, _, size in made), np.uint8)
    offset = 0
    for name, (shape, _, size) in zip(outputs, made, strict=True):
        held = _content(prefill, name.replace("_RetainedState", ""), tokens)
        moved = held[tuple(slice(0, length) for length in shape)]
        memory[offset : offset + size] = np.frombuffer(moved.tobytes(), np.uint8)
        offset += size
    names = _ordered(decode.inputs)
    read = [_slot(decode, name, tokens, whole) for name in names]
    if sum(size for _, _, size in read) > len(memory):
        return Handed(True, frozenset())
    wrong, offset = set(), 0
    for name, (shape, width, size) in zip(names, read, strict=True):
        there = memory[offset : offset + size].tobytes()
        offset += size
        wanted = _content(decode, name, tokens)
        state = np.zeros_like(wanted)
        region = tuple(slice(0, length) for length in shape)
        state[region] = np.frombuffer(there, f"V{width}").reshape(shape)
        used = _used(decode, name, tokens)
        if state[used].tobytes() != wanted[used].tobytes():
            wrong.add(name)
    return Handed(False, frozenset(wrong))


def _ordered(values: tuple[Value, ...], suffix: str = "") -> list[str]:
    names = [one.name for one in values if TOKEN in one.name and one.name.endswith(suffix)]
    short = {name: name.replace("_RetainedState", "") for name in names}
    return sorted(names, key=lambda name: (int(name.split(".")[1].split("_")[0]), short[name]))


def _numbers(layout: Layout, name: str) -> tuple[list[int], str]:
    found = next(one for one in layout.inputs if one.name == name)
    assert found.shape is not None
    dims = [1, *(layout.sizes.get(str(dim), dim) for dim in found.shape[1:])]
    return [int(str(dim)) for dim in dims], found.dtype


def _slot(layout: Layout, name: str, tokens: int, whole: bool) -> tuple[list[int], int, int]:
    """Shape, bytes of an element, and bytes in all."""
    shape, dtype = _numbers(layout, name)
    if len(shape) > 3 and not whole:
        shape[2] = min(tokens, shape[2])
    return shape, WIDTHS[dtype], math.prod(shape) * WIDTHS[dtype]


def _grows(layout: Layout, name: str) -> list[int]:
    """The axis of tokens, if there is one: its size is a symbol."""
    given = next(one.shape for one in layout.inputs if one.name == name)
    return [axis for axis, dim in enumerate(given or ()) if axis and isinstance(dim, str)]


def _used(layout: Layout, name: str, tokens: int) -> tuple[slice, ...]:
    """What a prompt has filled: places behind it are masked, and written to before they count."""
    grows = _grows(layout, name)
    return tuple(slice(0, tokens if axis in grows else None) for axis in range(5))[
        : len(_numbers(layout, name)[0])
    ]


def _content(layout: Layout, name: str, tokens: int) -> np.ndarray:
    """What a buffer holds after a prompt: the last token of each place, or a state.

    A window that has come round counts as other content in a window of another size: that
    both begin with the same tokens now and then is luck.
    """
    shape, dtype = _numbers(layout, name)
    grows = _grows(layout, name)
    width = WIDTHS[dtype]
    rest = [size for axis, size in enumerate(shape) if axis not in grows]
    count = math.prod(rest)
    rounds = [shape[axis] for axis in grows if tokens > shape[axis]]
    drawn = np.random.default_rng(crc32(f"{name} {rest} {dtype} {rounds}".encode()))
    if not grows:
        return np.frombuffer(drawn.bytes(count * width), f"V{width}").reshape(shape)
    stream = np.frombuffer(drawn.bytes(tokens * count * width), f"V{width}").reshape(tokens, *rest)
    size = shape[grows[0]]
    places = np.zeros((size, *rest), f"V{width}")
    for token in range(tokens):
        places[token % size] = stream[token]
    return np.moveaxis(places, 0, grows[0])
