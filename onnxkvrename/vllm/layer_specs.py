"""The specs of a layout's layers, with the block sizes that vLLM chooses for them.

Shapes become specs as in ``get_kv_cache_spec`` of the layers in vLLM's
``model_executor/layers/attention`` and ``mamba/abstract.py``; ``ModelConfig.get_num_kv_heads``
(``config/model.py``) says what tensor parallelism leaves to a rank. Both are those of vLLM 0.24.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.layout.layout import KvBuffer, Layout, count_elements, format_size_option
from onnxkvrename.model.signature import Dim
from onnxkvrename.rules.kinds import BufferKind, get_vllm_kind
from onnxkvrename.vllm.specs import (
    ATTENTION_ITEMSIZES,
    CHUNKED_KINDS,
    DS_MLA_HEAD_SIZE,
    DS_MLA_ROW_BYTES,
    ENCODER_KINDS,
    KV_CACHE_DTYPES,
    MLA_KINDS,
    STATE_ITEMSIZES,
    STATE_KINDS,
    WINDOWED_KINDS,
    Condition,
    KvCacheSpec,
    ProjectionRequest,
    Refusal,
    RefusalError,
    build_requirement,
    check_kind,
)

_SINGLE_HEAD_SIZE_KINDS = ENCODER_KINDS | CHUNKED_KINDS
"""Kinds whose spec has no ``head_size_v``."""
_NO_KEY_VALUE_KINDS = MLA_KINDS | STATE_KINDS | {"unknown"}


class ModelSpecs(NamedTuple):
    """The specs of a model.

    Attributes:
        specs: One for each layer and kind of cache, by layer number.
        refusals: The layers that have no spec, with the reasons.
        conditions: The conditions under which vLLM has the same specs.
    """

    specs: tuple[KvCacheSpec, ...]
    refusals: tuple[Refusal, ...]
    conditions: tuple[Condition, ...]


def build_specs(layout: Layout, request: ProjectionRequest) -> ModelSpecs:
    """Return the spec of each layer.

    The parts of a layer that are of one kind make one spec; self and cross attention make two.
    Layers that vLLM cannot have become refusals, never exceptions.
    """
    specs, refusals = list[KvCacheSpec](), list(_refuse_joint_caches(layout.buffers))
    refused_layers = {layer for refusal in refusals for layer in refusal.layers}
    for buffers in _group_buffers(layout.buffers).values():
        if buffers[0].layer in refused_layers:
            continue
        try:
            specs.append(_build_spec(buffers, layout, request))
        except RefusalError as error:
            refusals.append(error.refusal)
    conditions = tuple(_list_conditions(layout, specs, request))
    return ModelSpecs(tuple(specs), tuple(_merge_refusals(refusals)), conditions)


def align_blocks(
    specs: Sequence[KvCacheSpec], request: ProjectionRequest
) -> tuple[KvCacheSpec, ...]:
    """Return the specs of a hybrid with attention's blocks enlarged and states padded to them.

    A block of attention gets the fewest tokens whose page covers the largest state, in multiples
    of the requested block size. This follows ``_align_hybrid_block_size`` in
    ``platforms/interface.py`` for every ``mamba_cache_mode`` but ``all`` and for backends that
    accept the block size.

    Returns:
        The aligned specs; `specs` unchanged for a model without states or without attention.

    Raises:
        RefusalError: The attention layers differ in the bytes of a token (vLLM uses those of the
            model's configuration, which the graph lacks), or the cache dtype is ``fp8_ds_mla``.
    """
    states = [spec for spec in specs if spec.is_state]
    attention = [spec for spec in specs if not spec.is_state]
    if not states or not attention:
        return tuple(specs)
    if request.kv_cache_dtype == "fp8_ds_mla":
        raise RefusalError(
            [spec.layer for spec in attention],
            "fp8_ds_mla beside states: vLLM aligns blocks to different rows than it stores",
            "choose --kv-cache-dtype fp8",
        )
    token_bytes = _resolve_token_bytes(attention)
    state_bytes = max(spec.unpadded_page_size for spec in states)
    units = -(-state_bytes // (request.block_size * token_bytes))
    block_size = max(1, units) * request.block_size
    page_size = block_size * token_bytes
    padded = None if page_size == state_bytes else page_size
    return tuple(
        spec._replace(page_size_padded=padded)
        if spec.is_state
        else spec._replace(block_size=block_size)
        for spec in specs
    )


def list_alignment_conditions(
    specs: Iterable[KvCacheSpec], request: ProjectionRequest
) -> tuple[Condition, ...]:
    """Return the conditions for the block size of a hybrid, which a graph does not show."""
    kinds = {spec.kind for spec in specs}
    if kinds.isdisjoint(STATE_KINDS) or len(kinds) == 1:
        return ()
    why = f"the smallest block of each attention backend divides {request.block_size}"
    return (build_requirement("block alignment", why),)


def _resolve_token_bytes(attention: Iterable[KvCacheSpec]) -> int:
    """Return the bytes of a token in attention that vLLM aligns blocks to.

    vLLM builds a spec of one token without ``head_size_v``, so it counts the head size of keys for
    values, too. Layers with tokens of several sizes are refused.
    """
    sizes = {
        spec.token_bytes
        if spec.kind in MLA_KINDS
        else spec._replace(head_size_v=spec.head_size).token_bytes
        for spec in attention
    }
    if len(sizes) > 1:
        raise RefusalError(
            [spec.layer for spec in attention],
            "attention layers of several sizes beside states: vLLM aligns blocks to one of them",
            "unknown: the graph does not show which size the model uses",
        )
    return sizes.pop()


def _group_buffers(buffers: Iterable[KvBuffer]) -> dict[tuple[int, BufferKind], list[KvBuffer]]:
    """Group caches by layer and kind; cross attention comes after the layer's self attention."""
    groups: dict[tuple[int, BufferKind], list[KvBuffer]] = {}
    caches = (buffer for buffer in buffers if not buffer.beside)
    for buffer in sorted(caches, key=lambda b: (b.layer, get_vllm_kind(b.kind) in ENCODER_KINDS)):
        groups.setdefault((buffer.layer, buffer.kind), []).append(buffer)
    return groups


def _refuse_joint_caches(buffers: Iterable[KvBuffer]) -> Iterator[Refusal]:
    """Yield a refusal of the layers with keys and values in one tensor, unless they are MLA.

    DeepSeek-V4 has such layers, compressed along the context. vLLM stores them in UINT8 rows of
    584 bytes and aligns pages to 576 bytes. Its caches for indexers and compressors have blocks
    and windows that the model class chooses: ``models/deepseek_v4``.
    """
    joint = [b for b in buffers if b.part.endswith("kv") and get_vllm_kind(b.kind) not in MLA_KINDS]
    if joint:
        layers = tuple(sorted({buffer.layer for buffer in joint}))
        part = joint[0].part
        reason = f"{part} holds key and value in one, which vLLM keeps in a format of its own"
        hint = "no option helps: the export does not show all that vLLM plans with"
        yield Refusal(layers, reason, hint)


def _merge_refusals(refusals: Iterable[Refusal]) -> Iterator[Refusal]:
    """Merge refusals that differ only in their layers."""
    layers: dict[Refusal, dict[int, None]] = {}
    for refusal in refusals:
        layers.setdefault(refusal._replace(layers=()), {}).update(dict.fromkeys(refusal.layers))
    for refusal, merged_layers in layers.items():
        yield refusal._replace(layers=tuple(merged_layers))


def _build_spec(
    buffers: Sequence[KvBuffer], layout: Layout, request: ProjectionRequest
) -> KvCacheSpec:
    """Build the spec of the buffers of one layer and one kind; refuse what vLLM cannot have."""
    layer, kind = buffers[0].layer, get_vllm_kind(buffers[0].kind)
    check_kind(layer, kind)
    if kind in STATE_KINDS:
        return _build_state_spec(buffers, layout, request)
    dtype = _choose_dtype(buffers, request)
    tokens = [_resolve_token_shape(buffer, layout) for buffer in buffers]
    window = _resolve_window(buffers, layout) if kind in WINDOWED_KINDS else None
    if kind in MLA_KINDS:
        heads, size, size_v = 1, _sum_latent_sizes(layer, tokens), 0
    else:
        heads, size, size_v = _resolve_heads(buffers, tokens, request.tensor_parallel_size)
    spec = KvCacheSpec(layer, kind, request.block_size, heads, size, size_v, window, (), (dtype,))
    return _pack_rows(spec) if request.kv_cache_dtype == "fp8_ds_mla" else spec


def _choose_dtype(buffers: Sequence[KvBuffer], request: ProjectionRequest) -> str:
    """Return the requested dtype, or the one that all buffers have."""
    if request.kv_cache_dtype is not None:
        return KV_CACHE_DTYPES[request.kv_cache_dtype]
    layer = buffers[0].layer
    dtypes = sorted({buffer.dtype for buffer in buffers})
    if len(dtypes) > 1:
        parts = " and ".join(dtypes)
        raise RefusalError(
            [layer], f"its parts are {parts}: a page of vLLM has one dtype", "give one"
        )
    return _check_dtype(layer, dtypes[0], ATTENTION_ITEMSIZES)


def _pack_rows(spec: KvCacheSpec) -> KvCacheSpec:
    """Return the spec with the rows of ``fp8_ds_mla``, as in DeepSeek-V3.2's layers."""
    if spec.kind != "mla_attention" or spec.head_size != DS_MLA_HEAD_SIZE:
        raise RefusalError(
            [spec.layer],
            f"fp8_ds_mla holds a latent and a rope of {DS_MLA_HEAD_SIZE} elements, without window",
            "choose --kv-cache-dtype fp8",
        )
    return spec._replace(row_bytes=DS_MLA_ROW_BYTES)


def _build_state_spec(
    buffers: Sequence[KvBuffer], layout: Layout, request: ProjectionRequest
) -> KvCacheSpec:
    """Build the spec of a layer's states; the ranks divide the first axis after the batch."""
    layer, kind = buffers[0].layer, get_vllm_kind(buffers[0].kind)
    ranks = request.tensor_parallel_size
    shapes = [_resolve_sizes(buffer, layout)[1:] for buffer in buffers]
    for shape in shapes:
        if not shape:
            raise RefusalError(
                [layer], "a state has no axis after the batch", "export the state with one"
            )
        if shape[0] % ranks:
            raise RefusalError(
                [layer],
                f"a state of {shape[0]} cannot be divided among {ranks} ranks",
                "choose a --tensor-parallel-size that divides it",
            )
    dtypes = tuple(_check_dtype(layer, buffer.dtype, STATE_ITEMSIZES) for buffer in buffers)
    divided = tuple((shape[0] // ranks, *shape[1:]) for shape in shapes)
    return KvCacheSpec(layer, kind, None, 0, 0, 0, None, divided, dtypes)


def _check_dtype(layer: int, dtype: str, allowed: Iterable[str]) -> str:
    if dtype not in allowed:
        raise RefusalError(
            [layer],
            f"vLLM has no such cache with dtype {dtype}",
            f"it has {', '.join(allowed)}: export the model with one of them",
        )
    return dtype


def _resolve_sizes(buffer: KvBuffer, layout: Layout, context_axis: int = 0) -> tuple[int, ...]:
    """Return the shape in numbers, with 1 for the batch (axis 0) and for the context."""
    layer, part = [buffer.layer], buffer.part
    if buffer.shape is None:
        raise RefusalError(layer, f"the shape of {part} is unknown", "export the model with shapes")
    sizes = list[int]()
    for axis, dim in enumerate(layout.resolve_shape(buffer.shape)):
        size = 1 if axis in (buffer.batch_axis, context_axis) else dim
        if not isinstance(size, int) or size < 1:
            hint = (
                f"{format_size_option(size)} decides it"
                if isinstance(size, str)
                else "export it with sizes"
            )
            raise RefusalError(layer, f"a size of {part} is unknown: {size}", hint)
        sizes.append(size)
    if count_elements(tuple(sizes)) is None:
        raise RefusalError(
            layer, f"{part} is larger than any memory", "export the model with real sizes"
        )
    return tuple(sizes)


def _resolve_token_shape(buffer: KvBuffer, layout: Layout) -> tuple[int, ...]:
    """Return the sizes that one token adds: heads and head size, or only the head size."""
    axis = buffer.sequence_axis
    rank = 0 if buffer.shape is None else len(buffer.shape)
    if axis is None and get_vllm_kind(buffer.kind) in ENCODER_KINDS and rank == 4:
        axis = 2  # the encoder's tokens, a fixed number
    if axis is None:
        raise RefusalError(
            [buffer.layer], f"{buffer.part} has no known context axis", "export it with shapes"
        )
    if rank not in (3, 4):
        raise RefusalError(
            [buffer.layer],
            f"{buffer.part} has {rank} axes, and a key or a value of vLLM has 3 or 4",
            "export keys and values apart",
        )
    sizes = _resolve_sizes(buffer, layout, axis)
    return tuple(size for index, size in enumerate(sizes) if index not in (buffer.batch_axis, axis))


def _resolve_window(buffers: Sequence[KvBuffer], layout: Layout) -> Dim:
    windows = set(layout.resolve_shape(tuple(buffer.window for buffer in buffers)))
    window = windows.pop()
    if windows or window is None:
        raise RefusalError(
            [buffers[0].layer], "its window is not known, or not one", "export it with a symbol"
        )
    return window


def _sum_latent_sizes(layer: int, tokens: Sequence[tuple[int, ...]]) -> int:
    """Return the sum of the sizes of MLA's latent and rope, which every rank holds whole."""
    if len(tokens) < 2:
        raise RefusalError(
            [layer], "a page of MLA needs a latent and a rope", "verify lists missing parts"
        )
    heads = max(sizes[0] if len(sizes) == 2 else 1 for sizes in tokens)
    if heads != 1:
        raise RefusalError(
            [layer],
            f"its latent has {heads} heads, and a page of MLA holds one",
            "export the model without replicated KV heads",
        )
    return sum(sizes[-1] for sizes in tokens)


def _resolve_heads(
    buffers: Sequence[KvBuffer], tokens: Sequence[tuple[int, ...]], ranks: int
) -> tuple[int, int, int]:
    """Return the KV heads on one rank, the head size of keys and that of values."""
    layer, kind = [buffers[0].layer], get_vllm_kind(buffers[0].kind)
    sides = {
        "value" if "value" in buffer.part else "key": sizes
        for buffer, sizes in zip(buffers, tokens, strict=True)
    }
    if len(buffers) != 2 or len(sides) != 2:
        raise RefusalError(layer, "a page needs a key and a value", "verify lists missing parts")
    key, value = sides["key"], sides["value"]
    if key[:-1] != value[:-1]:
        raise RefusalError(
            layer, "key and value have different numbers of heads", "vLLM has one number for both"
        )
    if kind in _SINGLE_HEAD_SIZE_KINDS and key != value:
        raise RefusalError(
            layer, f"key and value of {kind} differ in size", "vLLM has one size for both"
        )
    if len(key) == 1 and ranks > 1:
        raise RefusalError(
            layer,
            "heads and size share one axis: what a rank has is not known",
            "give --tensor-parallel-size 1",
        )
    heads = key[0] if len(key) == 2 else 1
    # Ranks in excess of the heads hold copies; other remainders vLLM refuses at start-up.
    if heads % ranks and ranks % heads:
        raise RefusalError(
            layer,
            f"{heads} KV heads cannot be divided among {ranks} ranks, nor replicated on them",
            "choose a --tensor-parallel-size that divides them, or a multiple of them",
        )
    return max(1, heads // ranks), key[-1], value[-1]


def _list_conditions(
    layout: Layout, specs: Sequence[KvCacheSpec], request: ProjectionRequest
) -> Iterator[Condition]:
    """Yield the conditions on which the specs depend and that the graph does not show."""
    kinds = {spec.kind for spec in specs}
    if not kinds <= STATE_KINDS:
        yield from _list_dtype_conditions(specs, request)
    yield build_requirement("layer order", "vLLM's layers register in the order of their numbers")
    if len(kinds) > 1:
        why = "it is on: the connector supports hybrids"
        yield build_requirement("hybrid KV cache manager", why)
    if any(map(_has_merged_heads, layout.buffers)):
        yield build_requirement("heads", "heads and size share one axis: taken as one KV head")
    if not kinds.isdisjoint(ENCODER_KINDS):
        why = "cross attention holds the encoder's tokens, not the prompt's"
        yield build_requirement("encoder", why)
    if "sliding_window_mla" in kinds:
        why = "the model class has layers of sliding_window_mla, without alignment or compression"
        yield build_requirement("sliding_window_mla", why)
    if not kinds.isdisjoint(STATE_KINDS):
        yield from _list_state_conditions(request)


def _list_dtype_conditions(
    specs: Iterable[KvCacheSpec], request: ProjectionRequest
) -> Iterator[Condition]:
    asked = request.kv_cache_dtype
    if asked is None:
        dtypes = sorted({dtype for spec in specs if not spec.is_state for dtype in spec.dtypes})
        why = f"--kv-cache-dtype, or the model's dtype, is {' and '.join(dtypes)}"
    else:
        why = f"--kv-cache-dtype is {asked}, for all layers"
    yield build_requirement("kv_cache_dtype", why)
    if asked == "fp8_ds_mla":
        why = "a sparse MLA backend with such rows; the cache of its indexer is not counted"
        yield build_requirement("attention backend", why)


def _has_merged_heads(buffer: KvBuffer) -> bool:
    has_rank_3 = buffer.shape is not None and len(buffer.shape) == 3
    return has_rank_3 and get_vllm_kind(buffer.kind) not in _NO_KEY_VALUE_KINDS


def _list_state_conditions(request: ProjectionRequest) -> Iterator[Condition]:
    why = "vLLM keeps the kernel's length less 1, and the graph shows the same"
    yield build_requirement("conv state", why)
    why = "--mamba-cache-dtype and --mamba-ssm-cache-dtype are the graph's"
    yield build_requirement("state dtype", why)
    why = "it is none: one block for a request, without align or all"
    yield build_requirement("mamba_cache_mode", why)
    why = "for NIXL: states of Mamba or GDN, with VLLM_SSM_CONV_STATE_LAYOUT=DS"
    yield build_requirement("state kind", why)
    if request.tensor_parallel_size > 1:
        why = "vLLM divides the first axis of each state, and its groups divide by the ranks too"
        yield build_requirement("state shards", why)
