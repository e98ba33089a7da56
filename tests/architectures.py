"""Random architectures, to compare projections with vLLM's own planning."""

from __future__ import annotations

import random
from typing import NamedTuple

from build_layouts import build_attention, build_layers, build_linear, build_mla

from onnxkvrename.layout.layout import KvBuffer, Layout
from onnxkvrename.vllm.serve import ServeSettings

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


def draw_uneven(seed: int) -> tuple[Architecture, int]:
    """Return a few layers of attention, one of them large, and a small number of blocks.

    With few blocks, vLLM 0.33 may take the large layer for the whole memory.
    """
    rng = random.Random(seed)
    small = LayerShape(
        rng.choice(["full_attention", "full_attention", "sliding_window"]),
        rng.choice([1, 2]),
        64,
        64,
        None,
        (),
        "FLOAT16",
    )
    if small.kind == "sliding_window":
        small = small._replace(window=128)
    large = LayerShape("full_attention", rng.choice([1, 4, 8]), 256, 256, None, (), "FLOAT16")
    layers = [large, *[small] * rng.choice([1, 1, 2, 3])]
    rng.shuffle(layers)
    return Architecture(tuple(layers), 16, 1), rng.randint(4, 40)


def draw_pair(seed: int) -> tuple[Architecture, Architecture]:
    """Return an architecture as prefill and as decode have it: alike, or with other settings."""
    drawn, rng = draw_architecture(seed), random.Random(seed)
    if rng.random() < 0.4:
        return drawn, drawn
    prefill = drawn._replace(tp=rng.choice([1, 2, 4, 8]), block_size=rng.choice([16, 32, 48]))
    decode = drawn._replace(tp=rng.choice([1, 2, 4, 8]), block_size=rng.choice([16, 32, 96]))
    return prefill, decode


class World(NamedTuple):
    """What no line says of a worker: what its checkpoint and its machine decide.

    Attributes:
        model: The checkpoint's name.
        dtype: The checkpoint's dtype, by torch's name.
        cache_dtype: What ``--kv-cache-dtype auto`` becomes.
        backend: The attention backend that vLLM chooses.
        release: vLLM's ``__version__``.
    """

    model: str
    dtype: str
    cache_dtype: str
    backend: str
    release: str


class Deployment(NamedTuple):
    """One worker: its model, what its line says, and what nothing says."""

    architecture: Architecture
    settings: ServeSettings
    world: World

    @property
    def version(self) -> str:
        """vLLM's version, as ``--vllm`` says it."""
        return self.world.release.rpartition(".")[0]


_DRAFTS: list[dict[str, object] | None] = [
    {"method": "eagle", "model": "D"},
    {"method": "eagle3", "model": "D"},
    {"method": "eagle", "model": "D", "num_speculative_tokens": 3},
    {"method": "eagle", "model": "D", "kv_cache_dtype": "fp8"},
    {"method": "eagle", "model": "D", "revision": "r"},
    {"method": "deepseek_mtp"},
    {"method": "mtp"},
    {"method": "ngram"},
    {"model": "D-EAGLE3"},
    {"model": "D"},
    None,
]
_LINE_CHOICES: dict[str, list[object]] = {
    "model": ["M", "N", ""],
    "dtype": ["bfloat16", "float16", "half", None],
    "kv_cache_dtype": ["fp8", "fp8_e4m3", "bfloat16", None],
    "attention_backend": ["FLASH_ATTN", "TRITON_ATTN", None],
    "has_hybrid_manager": [True, False, None],
    "speculative_config": [*_DRAFTS],
    "connector": ["NixlConnector", "NixlPullConnector", "NixlPushConnector", None],
    "ssm_conv_state_layout": ["DS", "SD", None],
    "uses_v2_model_runner": [True, False, None],
    "extra_config": [
        {},
        {"enforce_handshake_compat": False},
        {"enable_cross_layers_blocks": "True"},
    ],
}
_LAYOUTS = {"0.24": ["HND", "NHD"], "0.33": ["HND", "NHD", "LBHNC", "LBNHC", "BLHNC"]}


def draw_deployments(seed: int, release: str) -> tuple[Deployment, Deployment]:
    """Return prefill and decode of a drawn pair: lines that are alike, but for a few settings."""
    rng = random.Random(f"deployment {seed}")
    prefill, decode = draw_pair(seed)
    if rng.random() < 0.15:
        decode = _change_architecture(rng, decode)
    choices = {**_LINE_CHOICES, "kv_cache_layout": [*_LAYOUTS[release.rpartition(".")[0]]]}
    dtypes = [_find_dtype(each) for each in (prefill, decode)]
    has_fp8 = any(layer.dtype == "FLOAT8E4M3FN" for layer in decode.layers)
    line: dict[str, object] = {
        "model": "M",
        "dtype": dtypes[0],
        "kv_cache_dtype": "fp8" if has_fp8 else None,
        "attention_backend": "FLASH_ATTN",
        "ssm_conv_state_layout": "DS",
    }
    for name in rng.sample([*choices], rng.choice([0, 0, 1, 2])):
        line[name] = rng.choice(choices[name])
    changed = rng.sample([*choices], rng.choice([0, 0, 0, 1, 1, 2]))
    other = {**line, **{name: rng.choice(choices[name]) for name in changed}}
    if prefill.layers != decode.layers:  # a graph's dtype is that of its checkpoint
        for each in (line, other):
            each.update(dtype=None, kv_cache_dtype=None, extra_config={})
    worlds = []
    cache_dtype = rng.choice([*["auto"] * 9, "fp8_e4m3"])
    for number, dtype in enumerate(dtypes):
        is_other = number == 1 and rng.random() < 0.1
        if is_other and not line["model"] == other["model"] == "M":
            cache_dtype = rng.choice(["fp8_e4m3", "auto"])
        backend = rng.choice(["FLASHINFER", "TRITON_ATTN"]) if is_other else "FLASH_ATTN"
        own_release = release if rng.random() < 0.97 else f"{release[:-1]}1"
        worlds.append(World("M", dtype, cache_dtype, backend, own_release))
    if rng.random() < 0.03:
        versions = ("0.24.0", "0.33.0")
        worlds[0] = worlds[0]._replace(release=versions[versions[0] == release])
    lines = [ServeSettings(**line), ServeSettings(**other)]  # type: ignore[arg-type]
    return (
        Deployment(prefill, lines[0], worlds[0]),
        Deployment(decode, lines[1], worlds[1]),
    )


def _find_dtype(architecture: Architecture) -> str:
    dtypes = [layer.dtype for layer in architecture.layers if layer.kind != "mamba"]
    first = dtypes[0] if dtypes else "FLOAT16"
    return {"BFLOAT16": "bfloat16", "FLOAT": "float32"}.get(first, "float16")


def _change_architecture(rng: random.Random, architecture: Architecture) -> Architecture:
    """Return another model: other heads, another dtype, or a layer more or less."""
    change = rng.choice(["heads", "dtype", "fewer", "more"])
    layers = architecture.layers
    if change == "fewer" and len(layers) > 1:
        return architecture._replace(layers=layers[:-1])
    if change == "more":
        return architecture._replace(layers=(*layers, rng.choice(layers)))
    has_mla = any("mla" in layer.kind for layer in layers)
    if change == "heads" and not has_mla:
        layers = tuple(layer._replace(heads=2 * layer.heads) for layer in layers)
    elif layers[0].dtype in ("FLOAT16", "BFLOAT16"):
        other = {"FLOAT16": "BFLOAT16", "BFLOAT16": "FLOAT16"}
        layers = tuple(
            layer
            if layer.kind == "mamba"
            else layer._replace(dtype=other.get(layer.dtype, layer.dtype))
            for layer in layers
        )
    return architecture._replace(layers=layers)


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
