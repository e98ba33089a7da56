"""The settings of one worker as a ``vllm serve`` line gives them.

A setting that the line does not have is ``None`` here; what vLLM then does depends on its version,
and on the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class ServeSettings(NamedTuple):
    """What a ``vllm serve`` line says about KV caches and their hand-over.

    Attributes:
        model: The model's name or path; empty if the line has flags alone.
        tensor_parallel_size: vLLM's ``--tensor-parallel-size``, in ranks.
        pipeline_parallel_size: vLLM's ``--pipeline-parallel-size``, in stages.
        context_parallel_size: Ranks over which the tokens of one request are divided: vLLM's
            ``--decode-context-parallel-size`` times ``--prefill-context-parallel-size``.
        block_size: vLLM's ``--block-size``, in tokens.
        kv_cache_dtype: vLLM's ``--kv-cache-dtype``, except ``auto``.
        dtype: vLLM's ``--dtype``, except ``auto``.
        kv_cache_memory_bytes: vLLM's ``--kv-cache-memory-bytes``, for each GPU.
        max_model_len: vLLM's ``--max-model-len``: tokens of a prompt and its answer.
        max_num_seqs: vLLM's ``--max-num-seqs``: requests that run at once.
        has_prefix_caching: vLLM's ``--enable-prefix-caching``.
        has_hybrid_manager: Whether groups of several kinds are allowed: the opposite of
            ``--disable-hybrid-kv-cache-manager``.
        speculative_config: vLLM's ``--speculative-config``, as it was given.
        connector: The ``kv_connector`` of ``--kv-transfer-config``; ``None`` without that flag.
        kv_role: Its ``kv_role``; empty if it has none.
        extra_config: Its ``kv_connector_extra_config``.
        attention_backend: vLLM's ``--attention-backend``, or ``VLLM_ATTENTION_BACKEND``.
        kv_cache_layout: ``VLLM_KV_CACHE_LAYOUT``.
        ssm_conv_state_layout: ``VLLM_SSM_CONV_STATE_LAYOUT``.
        uses_v2_model_runner: ``VLLM_USE_V2_MODEL_RUNNER``.
        notes: A sentence for each flag or variable that could matter and is not understood.
    """

    model: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    dtype: str | None = None
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    has_prefix_caching: bool | None = None
    has_hybrid_manager: bool | None = None
    speculative_config: Mapping[str, object] | None = None
    connector: str | None = None
    kv_role: str = ""
    extra_config: Mapping[str, object] = MappingProxyType({})
    attention_backend: str | None = None
    kv_cache_layout: str | None = None
    ssm_conv_state_layout: str | None = None
    uses_v2_model_runner: bool | None = None
    notes: tuple[str, ...] = ()
