"""What vLLM's attention backends and connectors decide on a KV cache, as far as it is fixed.

This follows ``get_supported_kernel_block_sizes``, ``get_preferred_block_size`` and
``supported_kv_cache_layouts`` of the backends in ``v1/attention/backends`` of vLLM 0.24.0 and
0.33.0, ``update_block_size_for_backend`` in ``platforms/interface.py``,
``select_common_block_size`` in ``v1/worker/utils.py``, and the connectors that ``SupportsHMA``
marks, on CUDA and ROCm. What depends on the GPU is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename.vllm.serve import NIXL_CONNECTORS, ServeSettings

DEFAULT_BLOCK_SIZE = 16
"""Tokens in a block without ``--block-size``, unless a backend does not take it."""


class AttentionBackend(NamedTuple):
    """An attention backend of one version.

    Attributes:
        multiple: It takes blocks of a multiple of so many tokens undivided; 0 if it takes those
            of its sizes only.
        sizes: Tokens in its own blocks, into which it divides others.
        sure_up_to: The largest block for which these are known: larger ones depend on the GPU.
        preferred: Tokens in a block that it prefers to the default; 0 without a preference.
        layouts: The layouts of 0.33 that it takes on every GPU; empty for all.
    """

    multiple: int = 0
    sizes: tuple[int, ...] = ()
    sure_up_to: int = 1 << 30
    preferred: int = 0
    layouts: tuple[str, ...] = ()

    def choose_kernel_block(self, block_size: int) -> int | None:
        """Return the tokens in a kernel's block; ``None`` if not known, or if vLLM refuses."""
        if block_size > self.sure_up_to:
            return None
        if block_size in self.sizes or (self.multiple and block_size % self.multiple == 0):
            return block_size
        return max((size for size in self.sizes if block_size % size == 0), default=None)

    def choose_block(self) -> int:
        """Return the tokens in a block without ``--block-size``."""
        smallest = min(self.sizes or (self.multiple,))
        is_taken = any(DEFAULT_BLOCK_SIZE % size == 0 for size in self.sizes or (self.multiple,))
        return self.preferred or (DEFAULT_BLOCK_SIZE if is_taken else smallest)


_MULTIPLE_16 = AttentionBackend(multiple=16)
_BACKENDS = {
    "FLASH_ATTN": _MULTIPLE_16,
    "FLASH_ATTN_DIFFKV": _MULTIPLE_16,
    "TRITON_ATTN": _MULTIPLE_16,
    "TRITON_ATTN_DIFFKV": _MULTIPLE_16,
    "FLEX_ATTENTION": AttentionBackend(multiple=16, layouts=("LBNHC",)),
    "ROCM_ATTN": AttentionBackend(multiple=16, layouts=("LHBNC", "LBHNC")),
    "ROCM_AITER_UNIFIED_ATTN": AttentionBackend(16, preferred=64, layouts=("LBHNC",)),
    "ROCM_AITER_FA": AttentionBackend(sizes=(16, 32), layouts=("LBHNC", "LHBNC")),
    "FLASHINFER": AttentionBackend(sizes=(16, 32, 64), sure_up_to=127, layouts=("LBHNC", "BLHNC")),
    "FLASH_ATTN_MLA": _MULTIPLE_16,
    "TRITON_MLA": _MULTIPLE_16,
    "ROCM_AITER_MLA": AttentionBackend(multiple=1),
    "ROCM_AITER_TRITON_MLA": AttentionBackend(multiple=1),
    "FLASHMLA": AttentionBackend(sizes=(64,)),
    "CUTLASS_MLA": AttentionBackend(sizes=(128,)),
    "FLASHINFER_MLA": AttentionBackend(sizes=(32, 64)),
    "TOKENSPEED_MLA": AttentionBackend(sizes=(32, 64)),
}
BACKENDS: Mapping[str, Mapping[str, AttentionBackend]] = MappingProxyType(
    {
        "0.24": {**_BACKENDS, "FLASHMLA_SPARSE": AttentionBackend(sizes=(64,))},
        "0.33": {**_BACKENDS, "HPC_ATTN": AttentionBackend(sizes=(64,), layouts=("LBNHC",))},
    }
)
"""The attention backends that are known here, by version and name."""
CROSS_LAYERS_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
"""The backends with which 0.24's NIXL connector prefers cross-layer blocks."""
_HYBRID_CONNECTORS = frozenset(
    {
        *NIXL_CONNECTORS,
        "DecodeBenchConnector",
        "ExampleHiddenStatesConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)
_PLAIN_CONNECTORS = frozenset(
    {"ExampleConnector", "FlexKVConnectorV1", "HF3FSKVConnector", "LMCacheConnectorV1"}
)


def find_backend(serve: ServeSettings, vllm_version: str) -> AttentionBackend | None:
    """Return the backend that a line names; ``None`` if it names none that is known here.

    The version is a release of vLLM: what its neighbors have is not known of it.
    """
    return BACKENDS.get(vllm_version, {}).get(serve.attention_backend or "")


def choose_block_size(serve: ServeSettings, vllm_version: str) -> int:
    """Return vLLM's block size, in tokens: that of the line, else what its backend prefers."""
    backend = find_backend(serve, vllm_version)
    return serve.block_size or (DEFAULT_BLOCK_SIZE if backend is None else backend.choose_block())


def hands_over_alone(connector: str) -> bool:
    """Return whether a connector is known, and hands over by itself, not by NIXL.

    Those that are not known may be built on NIXL's, as Dynamo's ``PdConnector`` is.
    """
    return connector in (_HYBRID_CONNECTORS | _PLAIN_CONNECTORS) - set(NIXL_CONNECTORS)


def supports_hybrid(connector: str, vllm_version: str) -> bool | None:
    """Return whether a connector allows groups of several kinds; ``None`` if not known."""
    if connector in _HYBRID_CONNECTORS or (connector, vllm_version) == ("MoRIIOConnector", "0.33"):
        return True
    return False if connector in _PLAIN_CONNECTORS else None
