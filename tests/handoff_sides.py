"""Build the two sides of a hand-off, and transfer real bytes to check predictions.

:func:`transfer_bytes` counts and copies bytes as vllm-qaic's code does, without the package: names
sorted by layer, one piece of memory, axis 2 up to the length of the prompt.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple
from zlib import crc32

import numpy as np

from onnxkvrename import load_rules
from onnxkvrename.handoff.compare import Handoff, compare_sides
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.find_consumers import load_consumer
from onnxkvrename.handoff.worker import HandoffSide, build_handoff_side
from onnxkvrename.layout.layout import Layout, apply_sizes, build_layout
from onnxkvrename.layout.updates import BufferUpdate
from onnxkvrename.model.signature import Dim, Signature, Value
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import build_minimal_plan

QEFF = load_rules()
CONSUMER = load_consumer("vllm-qaic")
TOKEN = "vllmKvCache"
WIDTHS = {"INT8": 1, "MXINT8": 1, "FLOAT16": 2, "FLOAT": 4}


def parse_value(text: str, token: str = TOKEN) -> Value:
    """Parse ``name:2,ctx_len,4`` or ``name:2,ctx_len,4:INT8``; batch and token are added."""
    name, dims, dtype = (*text.split(":"), "FLOAT16")[:3]
    shape: list[Dim] = [int(dim) if dim.isdigit() else dim for dim in dims.split(",")]
    return Value(name + (f"_{token}" if token else ""), dtype, ("batch_size", *shape))


def build_side_layout(*texts: str, token: str = TOKEN, **sizes: int) -> Layout:
    """Build a layout of inputs, in this order, each with its retained output."""
    inputs = tuple(parse_value(text, token) for text in texts)
    outputs = tuple(value._replace(name=f"{value.name}_RetainedState") for value in inputs)
    signature = Signature(inputs, (Value("logits", "FLOAT", ("batch_size", 1, 8)), *outputs))
    plan = build_minimal_plan(signature, QEFF)
    layout = build_layout([KvModel("model.onnx", signature, plan)])
    buffers = tuple(b._replace(update=BufferUpdate("inplace")) for b in layout.buffers)
    return apply_sizes(layout._replace(buffers=buffers), sizes)


def describe_attention(
    *layers: int, shape: str = "2,ctx_len,4", dtype: str = "FLOAT16"
) -> tuple[str, ...]:
    """Describe key and value of some layers, for :func:`side_of`."""
    parts = ("past_key", "past_value")
    return tuple(f"{part}.{layer}:{shape}:{dtype}" for layer in layers for part in parts)


def draw_sides(seed: int) -> tuple[Layout, Layout]:
    """Draw two sides that are alike, or nearly."""
    draw = random.Random(seed)
    made = _draw_buffers(draw, draw.choice((1, 2, 3)))
    known = _draw_sizes(draw)
    other = known if draw.random() < 0.7 else _draw_sizes(draw)
    return build_side_layout(*made, **known), build_side_layout(
        *_change_buffers(draw, made), **other
    )


def _draw_buffers(draw: random.Random, count: int) -> list[str]:
    """Describe some layers, each of some kind."""
    made: list[str] = []
    for layer in range(count):
        kind = draw.choice(("attention", "attention", "attention", "linear", "mla"))
        if kind == "attention":
            axis = draw.choice(("ctx_len", "ctx_len", "sliding_window"))
            dtype = draw.choice(("FLOAT16", "FLOAT16", "INT8"))
            made += describe_attention(
                layer, shape=f"{draw.choice((1, 2, 3))},{axis},4", dtype=dtype
            )
        elif kind == "linear":
            made += [
                f"conv_state.{layer}:6,3",
                f"recurrent_state.{layer}:2,{draw.choice((2, 5))},4",
            ]
        else:
            made += [f"compressed_kv.{layer}:1,ctx_len,6", f"k_pe.{layer}:1,ctx_len,2"]
    return made


def _change_buffers(draw: random.Random, made: list[str]) -> list[str]:
    """Return buffers with something that goes wrong in practice, or with nothing changed."""
    made = list(made)
    for _ in range(draw.choice((0, 1, 1, 2))):
        at = draw.randrange(len(made))
        name, shape, dtype = (*made[at].split(":"), "FLOAT16")[:3]
        dims = shape.split(",")
        match draw.choice(("window", "window", "drop", "more", "heads", "dtype", "turn", "order")):
            case "window":
                other = {"ctx_len": "sliding_window", "sliding_window": "ctx_len"}
                made[at] = f"{name}:{','.join(other.get(dim, dim) for dim in dims)}:{dtype}"
            case "drop" if len(made) > 1:
                del made[at]
            case "more":
                made += describe_attention(9)
            case "heads":
                made[at] = f"{name}:{','.join(['4', *dims[1:]])}:{dtype}"
            case "dtype":
                made[at] = f"{name}:{shape}:{'INT8' if dtype == 'FLOAT16' else 'FLOAT16'}"
            case "turn" if len(dims) == 3 and "5" not in dims:
                made[at] = f"{name}:{dims[1]},{dims[0]},{dims[2]}:{dtype}"
            case "order":
                draw.shuffle(made)
    return made


def _draw_sizes(draw: random.Random) -> dict[str, int]:
    return {"ctx_len": draw.choice((9, 12)), "sliding_window": draw.choice((1, 3, 4, 7))}


def build_side(label: str, layout: Layout, consumer: Consumer = CONSUMER) -> HandoffSide:
    return build_handoff_side(label, layout, consumer, QEFF)


def predict_handoff(
    prefill: Layout,
    decode: Layout,
    *,
    consumer: Consumer = CONSUMER,
    full_transfer: bool = False,
) -> Handoff:
    """Predict the hand-off between two layouts."""
    return compare_sides(
        build_side("prefill", prefill, consumer),
        build_side("decode", decode, consumer),
        consumer,
        full_transfer=full_transfer,
    )


def list_codes(handoff: Handoff) -> list[str]:
    return [finding.code for finding in handoff.findings]


class ByteTransfer(NamedTuple):
    """The result of a transfer.

    Attributes:
        refused: Whether decode found the memory too small and stopped.
        wrong: The names of the buffers in which decode reads wrong bytes.
    """

    refused: bool
    wrong: frozenset[str]


def transfer_bytes(
    prefill: Layout, decode: Layout, tokens: int, *, full_transfer: bool = False
) -> ByteTransfer:
    """Write prefill's buffers for a prompt to memory, and check the bytes that decode reads.

    Args:
        prefill: Prefill's layout, with all sizes.
        decode: Decode's layout, with all sizes.
        tokens: The length of the prompt.
        full_transfer: Whether each buffer is moved in full.
    """
    prefill_slots = [
        _compute_slot(prefill, name, tokens, full_transfer)
        for name in _sort_selected(prefill.inputs)
    ]
    outputs = _sort_selected(prefill.outputs, "_RetainedState")
    memory = np.zeros(sum(size for _, _, size in prefill_slots), np.uint8)
    offset = 0
    for name, (shape, _, size) in zip(outputs, prefill_slots, strict=True):
        content = _draw_content(prefill, name.replace("_RetainedState", ""), tokens)
        moved = content[tuple(slice(0, length) for length in shape)]
        memory[offset : offset + size] = np.frombuffer(moved.tobytes(), np.uint8)
        offset += size
    names = _sort_selected(decode.inputs)
    decode_slots = [_compute_slot(decode, name, tokens, full_transfer) for name in names]
    if sum(size for _, _, size in decode_slots) > len(memory):
        return ByteTransfer(True, frozenset())
    wrong, offset = set(), 0
    for name, (shape, width, size) in zip(names, decode_slots, strict=True):
        received = memory[offset : offset + size].tobytes()
        offset += size
        expected = _draw_content(decode, name, tokens)
        state = np.zeros_like(expected)
        region = tuple(slice(0, length) for length in shape)
        state[region] = np.frombuffer(received, f"V{width}").reshape(shape)
        filled = _slice_filled(decode, name, tokens)
        if state[filled].tobytes() != expected[filled].tobytes():
            wrong.add(name)
    return ByteTransfer(False, frozenset(wrong))


def _sort_selected(values: tuple[Value, ...], suffix: str = "") -> list[str]:
    names = [value.name for value in values if TOKEN in value.name and value.name.endswith(suffix)]
    short = {name: name.replace("_RetainedState", "") for name in names}
    return sorted(names, key=lambda name: (int(name.split(".")[1].split("_")[0]), short[name]))


def _resolve_shape(layout: Layout, name: str) -> tuple[list[int], str]:
    selected = next(value for value in layout.inputs if value.name == name)
    assert selected.shape is not None
    dims = [1, *(layout.sizes.get(str(dim), dim) for dim in selected.shape[1:])]
    return [int(str(dim)) for dim in dims], selected.dtype


def _compute_slot(
    layout: Layout, name: str, tokens: int, full_transfer: bool
) -> tuple[list[int], int, int]:
    """Return the transferred shape, the bytes of an element, and the total bytes."""
    shape, dtype = _resolve_shape(layout, name)
    if len(shape) > 3 and not full_transfer:
        shape[2] = min(tokens, shape[2])
    return shape, WIDTHS[dtype], math.prod(shape) * WIDTHS[dtype]


def _find_token_axes(layout: Layout, name: str) -> list[int]:
    """Return the axes whose size is a symbol, which count the prompt's tokens."""
    shape = next(value.shape for value in layout.inputs if value.name == name)
    dims = [str(dim) if isinstance(dim, str) else "" for dim in (shape or ())[1:]]
    return [axis for axis, dim in enumerate(dims, 1) if dim and not dim.startswith("encoder")]


def _slice_filled(layout: Layout, name: str, tokens: int) -> tuple[slice, ...]:
    """Return the region that a prompt fills; later positions are masked until they are written."""
    token_axes = _find_token_axes(layout, name)
    return tuple(slice(0, tokens if axis in token_axes else None) for axis in range(5))[
        : len(_resolve_shape(layout, name)[0])
    ]


def _draw_content(layout: Layout, name: str, tokens: int) -> np.ndarray:
    """Return the content of a buffer after a prompt: the last token at each position, or a state.

    Once a window has wrapped around, windows of different sizes get different content, so that
    they never agree by chance.
    """
    shape, dtype = _resolve_shape(layout, name)
    token_axes = _find_token_axes(layout, name)
    width = WIDTHS[dtype]
    token_shape = [size for axis, size in enumerate(shape) if axis not in token_axes]
    count = math.prod(token_shape)
    wrapped_sizes = [shape[axis] for axis in token_axes if tokens > shape[axis]]
    generator = np.random.default_rng(
        crc32(f"{name} {token_shape} {dtype} {wrapped_sizes}".encode())
    )
    if not token_axes:
        return np.frombuffer(generator.bytes(count * width), f"V{width}").reshape(shape)
    stream = np.frombuffer(generator.bytes(tokens * count * width), f"V{width}").reshape(
        tokens, *token_shape
    )
    size = shape[token_axes[0]]
    content = np.zeros((size, *token_shape), f"V{width}")
    for token in range(tokens):
        content[token % size] = stream[token]
    return np.moveaxis(content, 0, token_axes[0])
