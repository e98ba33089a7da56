"""The kinds of exports that `bench/qefficient.py` makes: tiny models with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

CAUSAL = ("QEFFAutoModelForCausalLM", "AutoModelForCausalLM")
IMAGES = ("QEFFAutoModelForImageTextToText", "AutoModelForImageTextToText")
"""QEfficient's class, and the class of transformers that makes the checkpoint."""


class Kind(NamedTuple):
    """A kind of export.

    Attributes:
        name: Its name in the table.
        config: The configuration of the model, for transformers.
        load: Arguments of QEfficient's ``from_pretrained``.
        compile: Arguments of its ``compile``.
        classes: QEfficient's class and the one of transformers.
        is_varying: True if two exports of it differ from each other, so that names are compared.
        layers: For a layerwise export the number of its layers, else 0.
        attributes: What QEfficient reads of the configuration, and transformers takes out of it
            when it loads one: set on its class.
    """

    name: str
    config: Mapping[str, Any]
    load: Mapping[str, Any] = {}
    compile: Mapping[str, Any] = {}
    classes: tuple[str, str] = CAUSAL
    is_varying: bool = False
    layers: int = 0
    attributes: Mapping[str, Any] = {}


def tiny(model_type: str, **sizes: Any) -> dict[str, Any]:
    """Return a configuration of two layers."""
    usual = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "dtype": "float32",
    }
    return {"model_type": model_type, **usual, **sizes}


def gpt(model_type: str, **sizes: Any) -> dict[str, Any]:
    """Return a configuration with the names of sizes that GPT-2 uses."""
    usual = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256, "vocab_size": 256}
    return {"model_type": model_type, "dtype": "float32", **usual, **sizes}


LLAMA = tiny("llama")
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
QWEN_MOE = tiny(
    "qwen3_moe",
    head_dim=16,
    moe_intermediate_size=32,
    num_experts=2,
    num_experts_per_tok=1,
)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 128}
MLA = tiny(
    "deepseek_v3",
    num_key_value_heads=4,
    first_k_dense_replace=2,
    kv_lora_rank=16,
    moe_intermediate_size=32,
    n_group=1,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    q_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    topk_group=1,
    v_head_dim=16,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32,
    },
)
ROPE = {"rope_theta": 10000.0}
ABSORBED = {"mla_absorption": {"cache_compressed": True, "absorption": True, "online": False}}
GEMMA3_IMAGES = {
    "model_type": "gemma3",
    "dtype": "float32",
    "image_token_index": 250,
    "boi_token_index": 251,
    "eoi_token_index": 252,
    "text_config": tiny("gemma3_text", head_dim=16, sliding_window_pattern=2, **SLIDING),
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "image_size": 896,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        "patch_size": 14,
    },
}
LLAVA = {
    "model_type": "llava",
    "dtype": "float32",
    "image_token_index": 250,
    "text_config": tiny("llama", max_position_embeddings=1024),
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "image_size": 336,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "patch_size": 14,
        "projection_dim": 32,
    },
}
GEMMA3_SIZES = {
    "prefill_seq_len": 128,
    "ctx_len": 1024,
    "img_size": 896,
    "node_precision_info": "nodes.yaml",  # else QEfficient knows published checkpoints only
}
IMAGE_SIZES = {"prefill_seq_len": 784, "ctx_len": 1024, "img_size": 336}

KINDS = (
    Kind("llama", LLAMA),
    Kind("llama, fp16", tiny("llama", dtype="float16"), {"torch_dtype": "float16"}),
    Kind("llama, int8 cache", LLAMA, {}, {"mxint8_kv_cache": True}),
    Kind(
        "llama, continuous batching",
        LLAMA,
        {"continuous_batching": True},
        {"full_batch_size": 4},
    ),
    Kind(
        "llama, TLM",
        LLAMA,
        {"qaic_config": {"speculative_model_type": "target"}},
        {"num_speculative_tokens": 2},
    ),
    Kind(
        "llama, CCL",
        LLAMA,
        {"qaic_config": {"ccl_enabled": True}},
        {"ctx_len": 4096, "comp_ctx_lengths_prefill": [1024], "comp_ctx_lengths_decode": [4096]},
    ),
    Kind(
        "llama, replicated KV heads",
        LLAMA,
        {"qaic_config": {"replicate_kv_heads": True}},
        {"num_devices": 4},
    ),
    Kind(
        "llama, sampler",
        LLAMA,
        {
            "qaic_config": {
                "include_sampler": True,
                "return_pdfs": False,
                "max_top_k_ids": 16,
            }
        },
    ),
    Kind("llama, subfunctions", LLAMA, {}, {"use_onnx_subfunctions": True}, is_varying=True),
    Kind("gpt2", gpt("gpt2")),
    Kind("gpt_bigcode", gpt("gpt_bigcode")),
    Kind("codegen", gpt("codegen", n_ctx=256, rotary_dim=8)),
    Kind("mpt", {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2,
                 "max_seq_len": 256, "vocab_size": 256, "dtype": "float32"}),
    Kind("falcon", tiny("falcon", num_key_value_heads=1)),
    Kind("mistral", tiny("mistral")),
    Kind("mixtral", tiny("mixtral", **EXPERTS)),
    Kind("phi3", tiny("phi3", pad_token_id=0)),
    Kind("qwen2", tiny("qwen2")),
    Kind("gemma2", tiny("gemma2", head_dim=16)),
    Kind("gemma3, text", tiny("gemma3_text", head_dim=16, **SLIDING)),
    Kind("granitemoe", tiny("granitemoe", **EXPERTS)),
    Kind("gpt_oss", tiny("gpt_oss", head_dim=16, **EXPERTS, **SLIDING)),
    Kind("qwen3_moe", QWEN_MOE),
    Kind("qwen3_moe, layerwise", QWEN_MOE, {"layerwise": True},
         {"layerwise": True, "layerwise_window_size": 1}, is_varying=True, layers=2),
    Kind("qwen3_moe, layerwise prefill", QWEN_MOE, {"layerwise": True},
         {"layerwise": True, "layerwise_window_size": 1, "prefill_only": True,
          "enable_chunking": True, "num_cores": 2, "use_onnx_subfunctions": True,
          "prefill_seq_len": 256, "ctx_len": 512}, is_varying=True, layers=2),
    Kind("deepseek_v3, MLA", MLA, {"qaic_config": ABSORBED}, attributes=ROPE),
    Kind("deepseek_v3, MLA, replicated", MLA,
         {"qaic_config": {**ABSORBED, "replicate_kv_heads": True}}, {"num_devices": 4},
         attributes=ROPE),
    Kind("llava, one QPC", LLAVA, {"kv_offload": False}, IMAGE_SIZES, IMAGES),
    Kind("llava, two QPCs", LLAVA, {"kv_offload": True}, IMAGE_SIZES, IMAGES),
    Kind("gemma3, one QPC", GEMMA3_IMAGES, {"kv_offload": False}, GEMMA3_SIZES, IMAGES),
    Kind("gemma3, two QPCs", GEMMA3_IMAGES, {"kv_offload": True}, GEMMA3_SIZES, IMAGES),
)  # fmt: skip
