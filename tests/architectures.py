"""Random architectures, to compare projections with vLLM's own planning."""

from __future__ import annotations

import random
from typing import NamedTuple

from build_layouts import build_attention, build_layers, build_linear, build_mla

from onnxkvrename.layout.layout import KvBuffer, Layout

_KINDS_OF_MODELS = [
    ["full_attention"],
    ["sliding_window"],
    ["mla_attention"],
    ["mamba"],
    ["full_attention", "sliding_window"],
    ["full_attention", "sliding_window"],
    ["full_attention", "mamba"],
    ["mla_attention", "mamba"],
    ["full_attention", "sliding_window", "mamba"],
    ["mla_attention", "sliding_window_mla"],
    ["mla_attention", "sliding_window_mla"],
    ["sliding_window_mla"],
    ["mla_attention", "sliding_window"],
    ["mla_attention", "sliding_window", "sliding_window_mla"],
    ["mla_attention", "full_attention"],
    ["full_attention", "chunked_local_attention"],
    ["chunked_local_attention"],
    ["full_attention", "cross_attention"],
]
_DTYPES = ["FLOAT16", "BFLOAT16", "FLOAT", "FLOAT8E4M3FN"]


class LayerShape(NamedTuple):
    """An attention layer, or a layer of states, of a random architecture."""

    kind: str
    heads: int
    head_size: int
    head_size_v: int
    window: int | None
    state_shapes: tuple[tuple[int, ...], ...]
    dtype: str


class Architecture(NamedTuple):
    """Layers, and the settings of vLLM that they are projected with."""

    layers: tuple[LayerShape, ...]
    block_size: int
    tp: int


def draw_architecture(seed: int) -> Architecture:
    """Return an architecture: a few kinds of layers, in turns, at random or in runs."""
    rng = random.Random(seed)
    kinds = rng.choice(_KINDS_OF_MODELS)
    dtype = rng.choice(_DTYPES)
    has_shared_heads = rng.random() < 0.5
    drawn_heads = (rng.choice([1, 2, 4, 8]), rng.choice([64, 80, 128]))
    heads = drawn_heads if has_shared_heads else None
    shapes = [_draw_layer(rng, kind, dtype, heads) for kind in kinds]
    shapes += [_draw_layer(rng, rng.choice(kinds), dtype, heads)] * rng.randint(0, 2)
    count = rng.randint(1, 30)
    pattern = rng.choice(["turns", "random", "runs"])
    layers_by_pattern = {
        "turns": [shapes[index % len(shapes)] for index in range(count)],
        "random": [rng.choice(shapes) for _ in range(count)],
        "runs": [shapes[index * len(shapes) // count] for index in range(count)],
    }
    layers = tuple(layers_by_pattern[pattern])
    return Architecture(layers, rng.choice([16, 64, 128]), rng.choice([1, 1, 2, 4, 8]))


def _draw_layer(
    rng: random.Random, kind: str, dtype: str, shared_heads: tuple[int, int] | None
) -> LayerShape:
    heads, size = shared_heads or (
        rng.choice([1, 2, 4, 6, 8]),
        rng.choice([64, 80, 96, 128, 256]),
    )
    size_v = rng.choice([size, size, size, 48])
    if kind in ("cross_attention", "chunked_local_attention"):
        size_v = size
    is_windowed = kind in ("sliding_window", "sliding_window_mla", "chunked_local_attention")
    window = rng.choice([128, 512, 1000]) if is_windowed else None
    if kind == "mamba":
        states = _draw_states(rng)
        return LayerShape(kind, 0, 0, 0, None, states, rng.choice(["FLOAT16", "FLOAT"]))
    if "mla" in kind:
        heads, size, size_v = 1, rng.choice([256, 512]), rng.choice([32, 64])
    return LayerShape(kind, heads, size, size_v, window, (), dtype)


def _draw_states(rng: random.Random) -> tuple[tuple[int, ...], ...]:
    """Return a convolution's state and a recurrent one: Mamba 2's or GDN's, else Mamba 1's."""
    heads, size, state_size = rng.choice([8, 16, 32]), 64, rng.choice([64, 128])
    if rng.random() < 0.15:
        return (heads * size, 3), (heads * size, 16)
    projections = 2 * rng.choice([128, 256, 512])
    return (heads * size + projections, 3), (heads, size, state_size)


def build_layout(architecture: Architecture) -> Layout:
    """Return the layout that an export of the architecture would have."""
    layers = enumerate(architecture.layers)
    return build_layers(*(_build_buffers(index, shape) for index, shape in layers))


def _build_buffers(index: int, shape: LayerShape) -> tuple[KvBuffer, ...]:
    if shape.kind == "mamba":
        return build_linear(index, *shape.state_shapes, dtype=shape.dtype)
    if "mla" in shape.kind:
        return build_mla(index, shape.head_size, shape.head_size_v, shape.window, shape.dtype)
    return build_attention(
        index,
        shape.heads,
        shape.head_size,
        shape.head_size_v,
        shape.kind,
        shape.window,
        shape.dtype,
    )
