"""Build layouts layer by layer, without a model, for the projection onto vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnxkvrename.layout.layout import KvBuffer, Layout
from onnxkvrename.model.signature import Dim
from onnxkvrename.rules.kinds import BufferKind


def build_buffer(
    layer: int,
    part: str,
    kind: BufferKind,
    shape: tuple[Dim, ...] | None,
    dtype: str = "FLOAT16",
    window: Dim = None,
) -> KvBuffer:
    """Build a buffer, with the context on its last axis but one; a state has no context."""
    sequence = None if kind in ("mamba", "unknown") or shape is None else len(shape) - 2
    name = f"{part}.{layer}"
    return KvBuffer(
        layer,
        part,
        kind,
        part,
        "",
        name,
        f"{name}_RetainedState",
        dtype,
        shape,
        sequence,
        window,
        "model.onnx",
    )


def build_attention(
    layer: int,
    heads: Dim = 8,
    size: Dim = 64,
    size_v: Dim = None,
    kind: BufferKind = "full_attention",
    window: Dim = None,
    dtype: str = "FLOAT16",
) -> tuple[KvBuffer, ...]:
    """Build key and value of ``[batch, heads, context, size]``."""
    axis: Dim = "ctx_len" if window is None else window
    sizes = {"key": size, "value": size if size_v is None else size_v}
    return tuple(
        build_buffer(layer, part, kind, ("batch_size", heads, axis, size), dtype, window)
        for part, size in sizes.items()
    )


def build_sliding(
    layer: int, heads: Dim = 8, size: Dim = 64, window: Dim = "sliding_window"
) -> tuple[KvBuffer, ...]:
    """Build key and value of attention to a window."""
    return build_attention(layer, heads, size, kind="sliding_window", window=window)


def build_mla(
    layer: int, rank: int = 512, rope: int = 64, window: Dim = None, dtype: str = "FLOAT16"
) -> tuple[KvBuffer, ...]:
    """Build the latent and the rope of an MLA layer."""
    kind: BufferKind = "mla_attention" if window is None else "sliding_window_mla"
    axis: Dim = "ctx_len" if window is None else window
    return tuple(
        build_buffer(layer, part, kind, ("batch_size", 1, axis, size), dtype, window)
        for part, size in {"compressed_kv": rank, "k_pe": rope}.items()
    )


def build_linear(
    layer: int,
    conv: tuple[int, ...] = (8192, 3),
    recurrent: tuple[int, ...] = (32, 128, 128),
    dtype: str = "FLOAT16",
) -> tuple[KvBuffer, ...]:
    """Build the convolution state and the recurrent state of a linear layer."""
    states = {"conv_state": conv, "recurrent_state": recurrent}
    return tuple(
        build_buffer(layer, part, "mamba", ("batch_size", *shape), dtype)
        for part, shape in states.items()
    )


def build_layers(*layers: Iterable[KvBuffer], sizes: Mapping[str, int] | None = None) -> Layout:
    """Build the layout of these layers."""
    buffers = sorted((b for layer in layers for b in layer), key=lambda b: b.layer)
    return Layout(("model.onnx",), (), (), tuple(buffers), (), sizes or {})


def build_gpt_oss() -> Layout:
    """Build gpt-oss-20b: 24 layers, every other one with a window of 128 tokens."""
    return build_layers(
        *(build_attention(layer) if layer % 2 else build_sliding(layer) for layer in range(24)),
        sizes={"sliding_window": 128},
    )
