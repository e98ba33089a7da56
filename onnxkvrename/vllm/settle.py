"""Decide the conditions of a projection that a ``vllm serve`` line settles.

What a graph leaves open (``requires``) becomes ``met`` or ``not met`` by a flag, a variable, or
vLLM's default for one that the line lacks. What the line cannot decide either stays as it is.
Sources: ``_use_packed_kv_cache_config`` and ``prefer_cross_layer_blocks`` of vLLM 0.24.0,
``resolve_kv_cache_layout`` of 0.33.0, ``get_required_kvcache_layout`` of the NIXL connector and the
rules for the hybrid manager in ``config/vllm.py`` of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.vllm.backends import (
    CROSS_LAYERS_BACKENDS,
    AttentionBackend,
    find_backend,
    supports_hybrid,
)
from onnxkvrename.vllm.memory import is_block_outermost
from onnxkvrename.vllm.serve import DEFAULT_CONNECTOR, ServeSettings
from onnxkvrename.vllm.specs import (
    MLA_KINDS,
    Condition,
    KvCacheSpec,
    ProjectionRequest,
    build_requirement,
)

_LAYOUT_ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}
_DTYPES = {"float16": "FLOAT16", "bfloat16": "BFLOAT16", "float32": "FLOAT"}
"""The values of ``--dtype``, with ONNX dtypes."""


class _Facts(NamedTuple):
    """What conditions are decided by."""

    serve: ServeSettings
    request: ProjectionRequest
    specs: Sequence[KvCacheSpec]
    backend: AttentionBackend | None
    allocation: str = ""

    @property
    def version(self) -> str:
        return self.request.vllm_version

    @property
    def connector(self) -> str:
        return self.serve.connector or DEFAULT_CONNECTOR

    @property
    def uses_mla(self) -> bool:
        return any(spec.kind in MLA_KINDS for spec in self.specs)


def settle_conditions(
    conditions: Iterable[Condition],
    request: ProjectionRequest,
    specs: Sequence[KvCacheSpec],
    allocation: str = "",
) -> tuple[Condition, ...]:
    """Return conditions of a projection, or of one of its allocations, as a line decides them.

    Args:
        conditions: The conditions as the graph decides them.
        request: The settings; without a line, nothing is decided.
        specs: The specs, with the blocks that vLLM has in the end.
        allocation: The name of the allocation; empty for the projection itself.
    """
    serve = request.serve
    if serve is None:
        return tuple(conditions)
    backend = find_backend(serve, request.release or request.vllm_version)
    facts = _Facts(serve, request, specs, backend, allocation)
    return tuple(_settle(condition, facts) for condition in conditions)


def _settle(condition: Condition, facts: _Facts) -> Condition:
    decide = _DECISIONS.get(condition.name)
    if condition.state != "requires" or decide is None:
        return condition
    decision = decide(facts)
    if decision is None:
        return condition
    return decision._replace(name=condition.name, by_line=decision.state != "requires")


def _meet(why: str) -> Condition:
    return Condition("", "met", why)


def _miss(why: str) -> Condition:
    return Condition("", "not met", why)


def find_layout(serve: ServeSettings, vllm_version: str, *, uses_mla: bool) -> str:
    """Return the layout that a line asks for, by a variable or its connector; empty for none."""
    if serve.kv_cache_layout is not None:
        layout = serve.kv_cache_layout
    elif serve.uses_nixl and not uses_mla:
        layout = "HND"
    else:
        layout = ""
    return layout if vllm_version == "0.24" else _LAYOUT_ALIASES.get(layout, layout)


# Conditions of an allocation


def _decide_flag(facts: _Facts) -> Condition:
    """Decide whether 0.24 packs groups; whatever the connector is."""
    name = "enable_cross_layers_blocks"
    is_set = facts.serve.enables_cross_layers
    why = f"{name} is set" if is_set else f"{name} is not set"
    return _meet(why) if is_set == (facts.allocation == "packed") else _miss(why)


def _decide_connector(facts: _Facts) -> Condition | None:
    """Decide whether 0.24's connector prefers cross-layer blocks; not known for other ones."""
    if facts.allocation == "canonical" or not facts.serve.uses_nixl:
        return None
    serve, wants_blocks = facts.serve, facts.allocation == "cross_layers"
    layout = find_layout(serve, facts.version, uses_mla=facts.uses_mla) or "NHD"
    reason = ""
    if not serve.enables_cross_layers:
        reason = f"{facts.connector} without enable_cross_layers_blocks"
    elif layout != "HND":
        reason = f"{facts.connector} in the layout {layout}"
    elif facts.backend is not None and serve.attention_backend not in CROSS_LAYERS_BACKENDS:
        reason = f"{facts.connector} with {serve.attention_backend}"
    elif serve.uses_v2_model_runner and not wants_blocks:
        reason = "model runner V2"
    if reason:
        return _miss(reason) if wants_blocks else _meet(reason)
    if facts.backend is None or (not wants_blocks and serve.uses_v2_model_runner is None):
        return None
    why = f"{facts.connector} with enable_cross_layers_blocks, {layout}, {serve.attention_backend}"
    return _meet(why) if wants_blocks else _miss(why)


def _decide_runner(facts: _Facts) -> Condition | None:
    """Decide the model runner; without the variable, 0.24 chooses it by the architecture."""
    uses_v2 = facts.serve.uses_v2_model_runner
    if uses_v2 is None:
        return None
    return _miss("VLLM_USE_V2_MODEL_RUNNER=1") if uses_v2 else _meet("VLLM_USE_V2_MODEL_RUNNER=0")


def _decide_stride(facts: _Facts) -> Condition | None:
    """Decide whether 0.24's backend reads blocks at a stride, as those of CUDA do."""
    if facts.serve.attention_backend in CROSS_LAYERS_BACKENDS:
        return _meet(f"{facts.serve.attention_backend} does")
    return None


def _decide_layout(facts: _Facts) -> Condition | None:
    """Decide the layout of 0.33: the user's, else the connector's, else the backend's first."""
    serve, backend = facts.serve, facts.backend
    asked = find_layout(serve, facts.version, uses_mla=facts.uses_mla)
    if serve.kv_cache_layout is not None:
        why = f"VLLM_KV_CACHE_LAYOUT={serve.kv_cache_layout}"
        is_known = backend is not None and (not backend.layouts or asked in backend.layouts)
        why_met = why if is_known else f"{why}; vLLM stops if a backend does not take it"
        return _meet(why_met) if facts.allocation == asked else _miss(why)
    if not asked:
        return None
    if backend is None:
        # Only a backend that does not take the connector's layout leads to another one.
        why = f"{facts.connector} asks for {asked}"
        if facts.allocation != asked:
            return _miss(why)
        name = serve.attention_backend
        taken = f"if {name} takes it" if name else "if the attention backend takes it"
        return build_requirement("", f"{why}, which vLLM uses {taken}")
    if not backend.layouts or asked in backend.layouts:
        why = f"{facts.connector} asks for {asked}"
        return _meet(why) if facts.allocation == asked else _miss(why)
    why = f"{serve.attention_backend} takes {backend.layouts[0]}, and not {asked}"
    return _meet(why) if facts.allocation == backend.layouts[0] else _miss(why)


# Conditions of the whole projection


def _decide_cache_dtype(facts: _Facts) -> Condition | None:
    """Decide the cache dtype; ``auto`` is the model's, unless its checkpoint has another one."""
    serve = facts.serve
    if serve.skipped_layers:
        return _miss("--kv-cache-dtype-skip-layers: these layers have another dtype")
    if serve.kv_cache_dtype is not None:
        return _meet(f"--kv-cache-dtype {serve.kv_cache_dtype}")
    dtypes = {dtype for spec in facts.specs if not spec.is_state for dtype in spec.dtypes}
    if serve.dtype is None or facts.request.kv_cache_dtype is not None:
        return None
    if dtypes == {_DTYPES[serve.dtype]}:
        return _meet(f"--dtype {serve.dtype}, unless the checkpoint has a dtype for its cache")
    return _miss(f"--dtype {serve.dtype}, and the graph has {' and '.join(sorted(dtypes))}")


def _decide_kernel_blocks(facts: _Facts) -> Condition | None:
    """Decide whether the backend takes all blocks undivided."""
    kernel_blocks = find_kernel_blocks(facts.request, facts.specs)
    if not kernel_blocks or None in kernel_blocks.values():
        return None
    name = facts.serve.attention_backend
    for block, kernel in kernel_blocks.items():
        if block != kernel:
            return _miss(f"{name} divides blocks of {block:,} tokens into blocks of {kernel}")
    return _meet(f"{name} takes them undivided")


def find_kernel_blocks(
    request: ProjectionRequest, specs: Sequence[KvCacheSpec]
) -> Mapping[int, int | None]:
    """Return the tokens in a kernel's block for each of vLLM's block sizes; ``None`` if not known.

    FLASH_ATTN has other blocks for states of FLOAT (0.24), and with FlashAttention 4 for some sizes
    of heads (0.33). Layouts with blocks outermost have no smaller blocks.
    """
    attention = [spec for spec in specs if not spec.is_state]
    blocks = {spec.block_size for spec in attention if spec.block_size is not None}
    serve, version = request.serve, request.vllm_version
    backend = None if serve is None else find_backend(serve, request.release or version)
    if serve is None or backend is None:
        return dict.fromkeys(blocks)
    layout = find_layout(serve, version, uses_mla=any(s.kind in MLA_KINDS for s in specs))
    if is_block_outermost(layout):
        return {block: block for block in blocks}
    if serve.attention_backend in ("FLASH_ATTN", "FLASH_ATTN_DIFFKV"):
        if version == "0.24" and any("FLOAT" in spec.dtypes for spec in specs if spec.is_state):
            return dict.fromkeys(blocks)
        if version != "0.24" and any(spec.head_size in (256, 512) for spec in attention):
            return dict.fromkeys(blocks)
    return {block: backend.choose_kernel_block(block) for block in blocks}


def _decide_parallelism(facts: _Facts) -> Condition:
    serve, has_draft = facts.serve, facts.request.draft_start is not None
    if serve.context_parallel_size > 1:
        return _miss(f"context parallelism of {serve.context_parallel_size} ranks")
    if serve.has_draft_layers and not has_draft:
        return _miss("--speculative-config has layers of its own: pass them with --draft")
    if has_draft and not serve.has_draft_layers:
        return _miss("--draft, but no draft model in --speculative-config")
    config = serve.speculative_config or {}
    ranks = config.get("draft_tensor_parallel_size", serve.tensor_parallel_size)
    if has_draft and ranks != serve.tensor_parallel_size:
        return _miss(f"the draft model has {ranks} ranks")
    if has_draft:
        return _meet("no context parallelism, and the draft model has as many ranks")
    return _meet("no context parallelism, no draft model")


def _decide_memory(facts: _Facts) -> Condition:
    return _meet(f"--kv-cache-memory-bytes {facts.request.gpu_memory}")


def _decide_hybrid_manager(facts: _Facts) -> Condition | None:
    """Decide whether groups of several kinds are allowed."""
    serve = facts.serve
    if serve.has_hybrid_manager is False:
        return _miss("--disable-hybrid-kv-cache-manager: vLLM makes all layers full attention")
    supported = supports_hybrid(facts.connector, facts.version)
    if supported is None:
        return None
    if supported:
        return _meet(f"{facts.connector} supports hybrids")
    return _miss(f"{facts.connector} does not support hybrids")


def _decide_mamba_mode(facts: _Facts) -> Condition | None:
    """Decide the cache mode of states: without prefix caching, it is none."""
    if facts.serve.has_prefix_caching is False:
        return _meet("--no-enable-prefix-caching")
    if facts.serve.has_prefix_caching:
        mode = facts.serve.mamba_cache_mode
        is_given = mode is not None and mode != "none"
        return _miss(f"prefix caching makes it {mode if is_given else 'align or all'}")
    return None


def _decide_state_layout(facts: _Facts) -> Condition | None:
    if not facts.serve.uses_nixl:
        return None
    if facts.serve.ssm_conv_state_layout == "DS":
        return _meet("VLLM_SSM_CONV_STATE_LAYOUT=DS")
    return _miss("VLLM_SSM_CONV_STATE_LAYOUT=DS is not set, which NIXL's connector requires")


_DECISIONS: Mapping[str, Callable[[_Facts], Condition | None]] = {
    "flag": _decide_flag,
    "connector": _decide_connector,
    "model runner": _decide_runner,
    "block stride indexing": _decide_stride,
    "layout": _decide_layout,
    "kv_cache_dtype": _decide_cache_dtype,
    "kernel block size": _decide_kernel_blocks,
    "parallelism": _decide_parallelism,
    "memory of KV caches": _decide_memory,
    "hybrid KV cache manager": _decide_hybrid_manager,
    "mamba_cache_mode": _decide_mamba_mode,
    "state kind": _decide_state_layout,
}
"""How conditions are decided, by their names; ``None`` if the line does not say it."""
