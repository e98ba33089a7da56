"""vLLM's own plan for an architecture, as an independent witness."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from architectures import Architecture, LayerShape
from vllmwheel import DTYPES, HAS_TORCH, WheelModules, find_wheel, make_config

BLOCK_COUNT = 7
"""The number of blocks, a prime that nothing else is a multiple of."""
REFUSALS = (AssertionError, NotImplementedError, ValueError, StopIteration)
"""The exceptions with which vLLM refuses; the last one where a group would be empty."""
_SPEC_CLASSES = {
    "full_attention": "FullAttentionSpec",
    "sliding_window": "SlidingWindowSpec",
    "mla_attention": "MLAAttentionSpec",
    "sliding_window_mla": "SlidingWindowMLASpec",
    "chunked_local_attention": "ChunkedLocalAttentionSpec",
    "cross_attention": "CrossAttentionSpec",
}


class Witness:
    """Planning by vLLM; skips the test where its wheel is missing."""

    can_allocate = False
    """Whether tensors can be made of what is planned."""

    def __init__(self) -> None:
        wheel = find_wheel()
        if isinstance(wheel, str):
            import pytest

            pytest.skip(wheel)
        self.modules = WheelModules(wheel)
        with self.modules.importable():
            import torch
            import vllm.platforms as current
            import vllm.platforms.interface as platforms
            import vllm.v1.core.kv_cache_utils as planning
            import vllm.v1.kv_cache_interface as interface

            current.current_platform = _Platform()
            self.torch, self.interface, self.planning = torch, interface, planning
            self.platform = platforms.Platform

    def make_specs(self, architecture: Architecture, *, indexed: bool = True) -> dict[str, Any]:
        """Return vLLM's spec of each layer, by layer number as text, with aligned blocks.

        `indexed` says whether the backend indexes pages by block stride.
        """
        block_size, padded = self._align_blocks(architecture)
        return {
            str(index): self._make_spec(layer, architecture.tp, block_size, padded, indexed)
            for index, layer in enumerate(architecture.layers)
        }

    def make_groups(
        self, architecture: Architecture, *, indexed: bool = True, **settings: Any
    ) -> Any:
        """Return vLLM's groups, or ``None`` where it refuses or loses layers."""
        specs = self.make_specs(architecture, indexed=indexed)
        with self.modules.importable():
            try:
                groups = self.planning.get_kv_cache_groups(make_config(**settings), dict(specs))
            except REFUSALS:
                return None
        has_all_layers = sum(len(group.layer_names) for group in groups) == len(specs)
        return groups if has_all_layers else None

    def make_plan(
        self, architecture: Architecture, block_count: int = BLOCK_COUNT, **settings: Any
    ) -> Any:
        """Return vLLM's groups and tensors for `block_count` blocks, or ``None``."""
        groups = self.make_groups(architecture, **settings)
        if groups is None:
            return None
        config = make_config(**settings)
        with self.modules.importable():
            try:
                memory = block_count * self.planning._pool_bytes_per_block(config, groups)
                return self.planning.get_kv_cache_config_from_groups(config, groups, memory)
            except REFUSALS:
                return None

    def _make_spec(
        self, layer: LayerShape, tp: int, block_size: int, padded: int | None, indexed: bool = True
    ) -> Any:
        """Make the spec that the model's layer would give vLLM."""
        name = DTYPES[layer.dtype]
        dtype = getattr(self.torch, "float8_e4m3fn" if HAS_TORCH and name == "fp8" else name)
        if layer.kind == "mamba":
            shapes = tuple((shape[0] // tp, *shape[1:]) for shape in layer.state_shapes)
            kinds = self.interface.MambaAttentionBackendEnum
            return self.interface.MambaSpec(
                block_size=4096,
                shapes=shapes,
                dtypes=(dtype,) * len(shapes),
                page_size_padded=padded,
                mamba_type=kinds.MAMBA1 if len(shapes[1]) == 2 else kinds.GDN_ATTN,
            )
        is_mla = "mla" in layer.kind
        fields: dict[str, Any] = {
            "num_kv_heads": 1 if is_mla else max(1, layer.heads // tp),
            "head_size": layer.head_size + layer.head_size_v if is_mla else layer.head_size,
        }
        if layer.kind in ("full_attention", "sliding_window"):
            fields["head_size_v"] = layer.head_size_v
        spec_class = getattr(self.interface, _SPEC_CLASSES[layer.kind])
        if "indexes_kv_by_block_stride" in spec_class.__dataclass_fields__:
            fields["indexes_kv_by_block_stride"] = indexed
        if layer.kind.startswith("sliding"):
            fields["sliding_window"] = layer.window
        if layer.kind == "chunked_local_attention":
            fields["attention_chunk_size"] = layer.window
        return spec_class(block_size=block_size, dtype=dtype, **fields)

    def _align_blocks(self, architecture: Architecture) -> tuple[int, int | None]:
        """Return the block size of attention and the padded page of states, by vLLM's platform."""
        states = [layer for layer in architecture.layers if layer.kind == "mamba"]
        attention = [layer for layer in architecture.layers if layer.kind != "mamba"]
        if not states or not attention:
            return architecture.block_size, None
        state_specs = [self._make_spec(layer, architecture.tp, 1, None) for layer in states]
        largest = max(state_specs, key=lambda spec: spec.page_size_bytes)
        first = self._make_spec(attention[0], architecture.tp, 1, None)
        cache = SimpleNamespace(
            cache_dtype="auto",
            block_size=architecture.block_size,
            mamba_block_size=None,
            user_specified_mamba_block_size=False,
            mamba_cache_mode="none",
            mamba_page_size_padded=None,
            kv_cache_dtype_skip_layers=[],
        )
        model = SimpleNamespace(
            dtype=first.dtype,
            use_mla="mla" in attention[0].kind,
            architecture="",
            get_num_kv_heads=lambda _: first.num_kv_heads,
            get_head_size=lambda: first.head_size,
        )
        config = SimpleNamespace(cache_config=cache, model_config=model, parallel_config=None)

        class Model:
            get_mamba_state_shape_from_config = staticmethod(lambda _: largest.shapes)
            get_mamba_state_dtype_from_config = staticmethod(lambda _: largest.dtypes)

        class Backend:
            get_supported_kernel_block_sizes = staticmethod(lambda: [16])
            customize_spec = staticmethod(lambda spec: spec)

        with self.modules.importable():
            import vllm.model_executor.models as models

            models.ModelRegistry = SimpleNamespace(resolve_model_cls=lambda *_, **__: (Model, ""))
            self.platform._find_non_ssm_backends = classmethod(lambda cls, config: [Backend])
            interface = self.interface
            interface.get_kv_quant_mode = lambda _: interface.KVQuantMode.NONE
            self.platform._align_hybrid_block_size(config, Backend)
        return cache.block_size, cache.mamba_page_size_padded


class _Platform(SimpleNamespace):
    """What connectors ask of the device that they run on."""

    device_type = "cuda"
    get_nixl_supported_devices = staticmethod(dict)
    get_nixl_memory_type = staticmethod(lambda: "VRAM")
    is_rocm = is_xpu = staticmethod(lambda: False)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: name
