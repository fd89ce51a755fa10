"""Tiny random checkpoints of every family, made by `transformers`, which is the oracle for their logits.

Sizes are small but unlike each other (heads, kv heads, head size, hidden, vocabulary), so that a swapped pair shows. Weights are drawn so
that attention, biases and norms matter: freshly made models have tiny weights, zero biases and norms of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

TOKENS = 200
"""Tokens of every test text: past the windows (24) and past the ropes' original lengths (64)."""

BASE: dict[str, Any] = {
    "vocab_size": 163,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    """The `rope_parameters` of a config."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)  # fmt: skip
YARN = rope("yarn", factor=8.0, original_max_position_embeddings=64)

IDS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1}
"""The library's own ids lie beyond the tiny vocabulary."""


def longrope(*, pairs: int, original: int) -> dict[str, Any]:
    """LongRoPE with factors unlike each other; `original` decides which of the two lists a text of TOKENS tokens gets."""
    long = [1.0 + 1.7 * pair for pair in range(pairs)]
    short = [1.0 + 0.1 * pair for pair in range(pairs)]
    return {
        **rope("longrope", long_factor=long, short_factor=short, original_max_position_embeddings=original),
        "original_max_position_embeddings": original,
    }


LLAMA4: dict[str, Any] = {
    **IDS,
    "head_dim": 32,
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 5,
    "attention_chunk_size": 40,
    "floor_scale": 24,
    "attn_scale": 0.6,
}
"""Chunks that no page size divides; queries that grow often and much."""

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
}
"""Of DeepSeek; sizes unlike each other. Queries of 24 + 16, values of 32, latents of 48 + 16."""


TINY: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "deepseek_v2": (  # as V2: queries through a short vector, experts in groups
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {
            **LATENT,
            "q_lora_rank": 32,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
        },
    ),
    "deepseek_v2_lite": (  # as V2-Lite: queries at once, no groups, attention that grows with YaRN
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {
            **LATENT,
            **rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=0.707, mscale_all_dim=0.707),
        },
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            **LATENT,
            "q_lora_rank": 32,
            "n_group": 3,
            "topk_group": 2,
            "kv_lora_rank": 32,
            **rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "tie_word_embeddings": True,
        },
    ),
    "gemma3_for_gguf": (  # as GGUF can say it: every third layer full, no rope scaling, queries scaled by the head
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "head_dim": 32,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            **rope("yarn", factor=8.0, original_max_position_embeddings=64, truncate=False),
        },
    ),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig,
        {
            "embedding_multiplier": 3.5,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite_biases": (GraniteForCausalLM, GraniteConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama2": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {**LLAMA3}),
    "llama4": (  # as Scout: experts in every layer, norms of q and k
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            **LLAMA4,
            "num_hidden_layers": 5,
            "no_rope_layer_interval": 3,
            **rope(
                "llama3",
                factor=16.0,
                low_freq_factor=1.0,
                high_freq_factor=1.0,
                original_max_position_embeddings=64,
                rope_theta=500000.0,
            ),
        },
    ),
    "llama4_some": (  # as Maverick: experts in every second layer, no norms; and several experts a token, biases, a full layer with rope
        Llama4ForCausalLM,
        Llama4TextConfig,
        {
            **LLAMA4,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attention_bias": True,
            "no_rope_layers": [1, 0, 1, 1],
            "layer_types": ["chunked_attention", "full_attention", "full_attention", "chunked_attention"],
        },
    ),
    "llama_biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_dynamic_rope": (LlamaForCausalLM, LlamaConfig, rope("dynamic", factor=4.0)),
    "llama_linear_rope": (LlamaForCausalLM, LlamaConfig, rope("linear", factor=4.0)),
    "llama_yarn": (LlamaForCausalLM, LlamaConfig, {**YARN}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 24}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 6, "sliding_window": 24}),
    "olmo2": (
        Olmo2ForCausalLM,
        Olmo2Config,
        {**IDS, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"sliding_window": 24, "num_hidden_layers": 2, **IDS}),
    "phi3_long": (Phi3ForCausalLM, Phi3Config, {**IDS, **longrope(pairs=8, original=64)}),
    "phi3_short": (
        Phi3ForCausalLM,
        Phi3Config,
        {**IDS, **longrope(pairs=8, original=256), "max_position_embeddings": 256},
    ),
    "phi4_mini": (
        Phi3ForCausalLM,
        Phi3Config,
        {
            **IDS,
            "hidden_size": 128,
            "tie_word_embeddings": True,
            **longrope(pairs=12, original=64),
            "partial_rotary_factor": 0.75,
        },
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"num_hidden_layers": 2}),
    "qwen2_5_tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, **YARN}),
    "qwen2_5_vl": (  # its text alone; images are in test_qwen2_5_vl.py
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        {
            **rope("default", mrope_section=[2, 3, 3]),
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 44,
                "num_heads": 2,
                "out_hidden_size": 64,
                "fullatt_block_indexes": [1],
            },
            **IDS,
        },
    ),
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 80,
        },
    ),
    "qwen2_moe_some": (  # experts in every second layer, with a dense layer between that is named as such
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            "num_hidden_layers": 4,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32, "hidden_size": 96}),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"head_dim": 32, "hidden_size": 96, "num_experts": 16, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "smollm2": (
        LlamaForCausalLM,
        LlamaConfig,
        {
            "hidden_size": 144,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "num_hidden_layers": 2,
            **rope("default", rope_theta=100000.0),
        },
    ),
}


def make_tiny(name: str, folder: Path) -> Any:
    """Writes the checkpoint into the folder and returns the oracle, in float32."""
    make_model, make_config, values = TINY[name]
    torch.manual_seed(sum(name.encode()))
    model = make_model(make_config(**{**BASE, **values}, attn_implementation="eager")).eval().float()
    offset = 1.0 if name.startswith("gemma") else 0.0  # Gemma stores norm weights as w - 1
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
            elif "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5).sub_(offset)
            else:
                parameter.normal_(std=0.5)
        for buffer_name, buffer in model.named_buffers():
            if "correction" in buffer_name:
                buffer.normal_(std=0.2)
    model.save_pretrained(folder)
    return model


def token_ids(seed: int = 0, *, count: int = TOKENS) -> list[int]:
    """Random token ids that every tiny model knows."""
    return np.random.default_rng(seed).integers(0, BASE["vocab_size"], count).tolist()


def oracle_logits(model: Any, ids: list[int]) -> np.ndarray:
    """Logits of every position, float32 [tokens, V]."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits.numpy()


def difference(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest deviation in units of the logits' own spread."""
    assert got.shape == wanted.shape
    assert np.isfinite(got).all()
    return float(np.abs(got - wanted).max() / wanted.std())
