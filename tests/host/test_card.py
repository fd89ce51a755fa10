"""Model cards against the configuration classes of `transformers`, against the real SmolLM2 file, and with broken input."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tradewind.config.card import ModelCard, RopeFacts
from tradewind.config.card_parts import active_parameters
from tradewind.config.card_reader import CardError, card_from_gguf, card_from_hf, count_parameters, llama3_factors
from tradewind.config.kv_sizing import groups_of
from tradewind.config.ledger import kv_line

transformers = pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [1.0 + 2.0 * pair for pair in range(8)],
    "original_max_position_embeddings": 64,
}


MSCALE = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}


def saved(config: Any, folder: Path) -> dict[str, Any]:
    """What `transformers` writes into config.json."""
    config.save_pretrained(folder)
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def configs() -> dict[str, Any]:
    t = transformers
    return {
        "llama": t.LlamaConfig(**TINY),
        "llama-biased": t.LlamaConfig(**TINY, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        "llama-head-dim": t.LlamaConfig(**TINY, head_dim=32),
        "llama3": t.LlamaConfig(**TINY, rope_parameters=dict(LLAMA3)),
        "llama-yarn": t.LlamaConfig(**TINY, rope_parameters=dict(YARN)),
        "llama-linear": t.LlamaConfig(**TINY, rope_parameters=dict(LINEAR)),
        "mistral": t.MistralConfig(**TINY, sliding_window=None),
        "mistral-window": t.MistralConfig(**TINY, sliding_window=32),
        "qwen2": t.Qwen2Config(**TINY),
        "qwen2-window": t.Qwen2Config(**TINY, use_sliding_window=True, sliding_window=32, max_window_layers=2),
        "qwen2_moe": t.Qwen2MoeConfig(**TINY),
        "qwen2_moe-some": t.Qwen2MoeConfig(
            **TINY, num_experts=5, decoder_sparse_step=2, mlp_only_layers=[1], use_sliding_window=True, sliding_window=9
        ),
        "qwen3_moe": t.Qwen3MoeConfig(**TINY, head_dim=32, num_experts=12, moe_intermediate_size=48),
        "qwen3": t.Qwen3Config(**TINY, head_dim=32, tie_word_embeddings=True),
        "qwen3-biased": t.Qwen3Config(**TINY, head_dim=16, attention_bias=True),
        "llama-dynamic": t.LlamaConfig(**TINY, rope_parameters=dict(DYNAMIC)),
        "llama-longrope": t.LlamaConfig(**TINY, rope_parameters=dict(LONGROPE)),
        "deepseek_v2": t.DeepseekV2Config(**TINY, **LATENT, q_lora_rank=None, rope_parameters=dict(MSCALE)),
        "deepseek_v2-grouped": t.DeepseekV2Config(
            **TINY, **LATENT, q_lora_rank=24, topk_method="group_limited_greedy", n_group=3, topk_group=2
        ),
        "deepseek_v3": t.DeepseekV3Config(**TINY, **LATENT, q_lora_rank=40, n_group=3, topk_group=2),
        "deepseek_v3-yarn": t.DeepseekV3Config(
            **TINY, **LATENT, q_lora_rank=40, n_group=1, topk_group=1, rope_parameters={**MSCALE, "mscale": 0.5}
        ),
        "gpt_oss": t.GptOssConfig(
            **TINY, head_dim=32, num_local_experts=6, sliding_window=24, rope_parameters={**YARN, "truncate": False}
        ),
        "granite": t.GraniteConfig(**TINY, attention_multiplier=0.1, attention_bias=True, mlp_bias=True),
        "granite-tied": t.GraniteConfig(**TINY, tie_word_embeddings=True, logits_scaling=8.0),
        "mixtral": t.MixtralConfig(**TINY, num_local_experts=6),
        "olmo2": t.Olmo2Config(**TINY),
        "olmo2-biased": t.Olmo2Config(**TINY, attention_bias=True),
        "phi3": t.Phi3Config(**TINY, sliding_window=32),
        "phi3-long": t.Phi3Config(**TINY, rope_parameters=dict(LONGROPE), original_max_position_embeddings=64),
        "phi3-short": t.Phi3Config(**{**TINY, "max_position_embeddings": 64}, rope_parameters=dict(LONGROPE)),
        "gemma2": t.Gemma2Config(**TINY, head_dim=32, sliding_window=24, query_pre_attn_scalar=16),
        "gemma2-uncapped": t.Gemma2Config(
            **TINY, head_dim=32, attn_logit_softcapping=None, final_logit_softcapping=None
        ),
        "gemma3": t.Gemma3TextConfig(**TINY, head_dim=32, sliding_window=24, query_pre_attn_scalar=16),
        "gemma3-capped": t.Gemma3TextConfig(
            **TINY, head_dim=32, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
        ),
        "gemma3-scaled": t.Gemma3TextConfig(
            **TINY,
            head_dim=32,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    }


@pytest.mark.parametrize("case", configs())
def test_card_agrees_with_transformers(case: str, tmp_path: Path) -> None:
    """Shapes, windows, rope and parameter count equal those of the model that `transformers` builds from the same file."""
    import torch

    config = configs()[case]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    card = card_from_hf(saved(config, tmp_path), name=case)
    config = model.config

    assert card.family == case.split("-")[0].removesuffix("3" if case == "llama3" else "-")
    assert (card.vocab_size, card.hidden, card.layers, card.intermediate) == (320, 64, 4, 96)
    attention = model.model.layers[0].self_attn
    assert card.head_dim == (attention.head_dim if card.latent is None else attention.qk_head_dim)
    if card.family == "phi3":  # q, k, v in one matrix, gate and up in another
        assert attention.qkv_proj.out_features == (card.heads + 2 * card.kv_heads) * card.head_dim
        projections = (attention.qkv_proj, attention.o_proj, model.model.layers[0].mlp.gate_up_proj)
    elif card.latent is not None:
        queries = attention.q_proj if card.latent.query_rank == 0 else attention.q_b_proj
        assert queries.out_features == card.heads * card.head_dim
        assert attention.kv_a_proj_with_mqa.out_features == card.latent.width
        assert attention.kv_b_proj.in_features == card.latent.rank
        assert attention.o_proj.in_features == card.heads * card.latent.value
        projections = (queries, attention.o_proj, model.model.layers[0].mlp.up_proj)
    else:
        assert card.heads * card.head_dim == attention.q_proj.out_features
        assert card.kv_heads * card.head_dim == attention.k_proj.out_features
        mlp = next((layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "up_proj")), None)
        projections = (attention.q_proj, attention.o_proj, *([mlp.up_proj] if mlp is not None else []))
    biases = tuple(projection.bias is not None for projection in projections)
    assert (card.qkv_bias, card.output_bias, card.mlp_bias)[: len(biases)] == biases
    for index, layer in enumerate(model.model.layers):
        experts = getattr(layer.mlp, "experts", None)
        assert (card.moe is not None and card.moe.layers[index]) == (experts is not None)
        if card.moe is not None and experts is not None:
            router = layer.mlp.router if card.family == "gpt_oss" else layer.mlp.gate
            assert experts.down_proj.numel() == card.moe.experts * card.hidden * card.moe.intermediate
            assert card.moe.per_token == router.top_k
            assert card.moe.normalised == getattr(router, "norm_topk_prob", card.family != "deepseek_v2")
            shared = getattr(layer.mlp, "shared_experts", None) or getattr(layer.mlp, "shared_expert", None)
            assert card.moe.shared_intermediate == (0 if shared is None else shared.up_proj.out_features)
            assert card.moe.scale == getattr(router, "routed_scaling_factor", 1.0)
            if card.latent is not None and card.moe.groups > 1:
                assert (card.moe.groups, card.moe.groups_kept) == (router.num_group, router.topk_group)
            assert card.moe.biases == hasattr(router, "bias")
    assert card.attention_sinks == hasattr(attention, "sinks")
    if hasattr(attention, "q_norm"):
        assert attention.q_norm.weight.numel() == card.head_dim * (card.heads if card.qk_norm_whole else 1)
    assert (card.qk_norm or card.qk_norm_whole) == hasattr(attention, "q_norm")
    assert card.sandwich_norms == hasattr(model.model.layers[0], "pre_feedforward_layernorm")
    assert card.tied_embeddings == config.tie_word_embeddings
    assert math.isclose((card.attention_scale or card.head_dim**-0.5), attention.scaling)
    assert card.residual_scale == getattr(config, "residual_multiplier", 1.0)
    assert card.logit_scale == 1 / getattr(config, "logits_scaling", 1.0)
    assert card.norm_eps == config.rms_norm_eps
    assert card.attention_softcap == getattr(config, "attn_logit_softcapping", None)
    assert card.logit_softcap == getattr(config, "final_logit_softcapping", None)
    assert card.norm_offset == (1.0 if card.family.startswith("gemma") else 0.0)
    assert (card.bos_id, card.eos_ids) == (1, (2,))
    if card.family not in ("mistral", "mixtral", "phi3"):  # whose attention asks the configuration when it runs
        windows = tuple(getattr(layer.self_attn, "sliding_window", None) or None for layer in model.model.layers)
        assert card.layer_windows == windows
    else:
        assert card.layer_windows == (config.sliding_window,) * 4
    tied = {id(parameter): parameter for parameter in model.parameters()}
    counted = sum(parameter.numel() for parameter in tied.values())
    counted += sum(
        buffer.numel() for name, buffer in model.named_buffers() if "correction" in name
    )  # stored like parameters
    if card.tied_embeddings and model.lm_head.weight is not model.model.embed_tokens.weight:
        counted -= model.lm_head.weight.numel()
    assert card.parameters == counted == count_parameters(card)


@pytest.mark.parametrize("case", [case for case in configs() if not case.startswith(("gemma3", "phi3"))])
def test_rope_gives_the_same_frequencies(case: str) -> None:
    """Inverse frequencies and attention factor from the card's facts equal those of `transformers`."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = configs()[case]
    rotary = LlamaRotaryEmbedding(config)
    card = card_from_hf(config.to_dict(), name=case)
    frequencies, factor = inverse_frequencies(card.rope, card.rope.rotary_dims or card.head_dim)
    assert np.allclose(frequencies, rotary.inv_freq.numpy(), rtol=1e-5)
    assert math.isclose(factor, rotary.attention_scaling, rel_tol=1e-6)


def inverse_frequencies(rope: RopeFacts, head_dim: int) -> tuple[np.ndarray, float]:
    """The formulas of the papers, written once more and plainly."""
    base = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "none":
        return base, 1.0
    if rope.kind == "linear":
        return base / rope.factor, 1.0
    assert rope.original_max_positions
    if rope.kind == "longrope":  # without a text the library says its short list
        growth = 1 + math.log(rope.factor) / math.log(rope.original_max_positions)
        return base / np.array(rope.short_factors), math.sqrt(growth)
    if rope.kind == "llama3":
        return base / np.array(llama3_factors(rope, rotary=head_dim)), 1.0

    def dim_of(turns: float) -> float:
        return head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0, low), min(head_dim - 1, high)
    keep = 1 - np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    attention = rope.attention_factor or 0.1 * math.log(rope.factor) + 1.0
    return base / rope.factor * (1 - keep) + base * keep, attention


def test_old_and_new_spellings_of_rope_agree() -> None:
    """`rope_theta` + `rope_scaling` with "type" or "rope_type" means the same as `rope_parameters`."""
    base = {"model_type": "llama", **TINY}
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    new = card_from_hf({**base, "rope_parameters": LLAMA3}, name="x").rope
    old = card_from_hf({**base, "rope_theta": 500000.0, "rope_scaling": scaling}, name="x").rope
    older = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    oldest = card_from_hf({**base, "rope_theta": 500000.0, "rope_scaling": older}, name="x").rope
    assert new == old == oldest
    assert new == RopeFacts(theta=500000.0, kind="llama3", factor=8.0, original_max_positions=64)
    assert card_from_hf({**base, "rope_scaling": None}, name="x").rope == RopeFacts()


def test_gemma3_ropes_in_all_spellings() -> None:
    """Full and windowed layers have their own base; scaling touches the full ones only."""
    base = {"model_type": "gemma3_text", **TINY, "head_dim": 32}
    spellings: list[dict[str, Any]] = [
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        {"rope_parameters": {"rope_type": "linear", "factor": 8.0}},
    ]
    for spelling in spellings:
        card = card_from_hf({**base, **spelling}, name="x")
        assert card.rope == RopeFacts(theta=1e6, kind="linear", factor=8.0), spelling
        assert card.rope_local == RopeFacts(theta=1e4), spelling


def test_gemma3_with_a_text_config_that_omits_defaults() -> None:
    """The published 4B file names only what differs from its library's defaults."""
    config = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
    }
    card = card_from_hf(config, name="gemma")
    assert (card.vocab_size, card.heads, card.kv_heads, card.head_dim) == (262208, 8, 4, 256)
    assert card.layer_windows[:7] == (1024,) * 5 + (None, 1024)
    assert card.layer_windows.count(None) == 5
    assert card.eos_ids == (1, 106)
    assert card.tied_embeddings
    assert card.weight_formats == {"BF16": card.parameters}


def test_windows_that_are_off_stay_off() -> None:
    """Qwen 2 files state a window they do not use; null means none for Mistral; a missing one means the library's."""
    qwen = {"model_type": "qwen2", **TINY, "sliding_window": 128, "max_window_layers": 0}
    assert card_from_hf(qwen, name="x").layer_windows == (None,) * 4
    assert card_from_hf({**qwen, "use_sliding_window": True}, name="x").layer_windows == (128,) * 4
    mistral = {"model_type": "mistral", **TINY}
    assert card_from_hf({**mistral, "sliding_window": None}, name="x").layer_windows == (None,) * 4
    assert card_from_hf(mistral, name="x").layer_windows == (4096,) * 4
    pattern = {"model_type": "gemma3_text", **TINY, "head_dim": 16, "sliding_window": 8, "sliding_window_pattern": 2}
    assert card_from_hf(pattern, name="x").layer_windows == (8, None, 8, None)


def test_generation_config_adds_ends() -> None:
    """Llama 3 instruct models name the end of turn only there."""
    card = card_from_hf({"model_type": "llama", **TINY}, name="x", generation_config={"eos_token_id": [2, 9, 8]})
    assert card.eos_ids == (2, 9, 8)


def test_yarn_stretches_the_context() -> None:
    """Files that switch YaRN on by hand keep the unstretched limit."""
    card = card_from_hf({"model_type": "qwen2", **TINY, "rope_scaling": {"type": "yarn", "factor": 4.0}}, name="x")
    assert (card.rope.kind, card.rope.original_max_positions, card.max_positions) == ("yarn", 256, 1024)


def test_longrope_in_old_and_new_spellings() -> None:
    """Phi-3 files say "su" and keep the original length outside the rope; both factor lists are kept as they are."""
    facts = RopeFacts(
        kind="longrope",
        factor=4.0,
        original_max_positions=64,
        short_factors=tuple(LONGROPE["short_factor"]),  # type: ignore[arg-type]
        long_factors=tuple(LONGROPE["long_factor"]),  # type: ignore[arg-type]
    )
    base = {"model_type": "phi3", **TINY, "original_max_position_embeddings": 64}
    lists = {key: LONGROPE[key] for key in ("short_factor", "long_factor")}
    for kind in ("su", "longrope"):
        assert card_from_hf({**base, "rope_scaling": {"type": kind, **lists}}, name="x").rope == facts
    assert card_from_hf({**base, "rope_parameters": LONGROPE}, name="x").rope == facts
    partial = {key: values[:6] for key, values in lists.items()}  # type: ignore[index]
    card = card_from_hf(
        {**base, "partial_rotary_factor": 0.75, "rope_scaling": {"type": "longrope", **partial}}, name="x"
    )
    assert (card.rope.rotary_dims, card.rope.long_factors) == (12, facts.long_factors[:6])
    with pytest.raises(CardError, match="a list of 6 numbers over 0"):
        card_from_hf({**base, "partial_rotary_factor": 0.75, "rope_scaling": {"type": "longrope", **lists}}, name="x")


def test_dynamic_rope_is_plain_within_its_positions() -> None:
    """It only changes texts beyond max_position_embeddings, and those are refused."""
    card = card_from_hf({"model_type": "llama", **TINY, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, name="x")
    assert (card.rope, card.max_positions) == (RopeFacts(), 256)


def test_active_parameters_are_those_that_one_token_meets() -> None:
    """Qwen3-30B-A3B: 30.5 billion parameters, 3.0 in the matrices of its layers for one token (3.3 with the head)."""
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }
    card = card_from_hf(config, name="30b-a3b")
    attention, expert = 2048 * 128 * (2 * 32 + 2 * 4), 3 * 2048 * 768
    assert active_parameters(card) == 48 * (attention + 8 * expert + 128 * 2048)
    assert card.parameters == 30_532_122_624
    dense = card_from_hf({**config, "model_type": "qwen3"}, name="dense")
    assert active_parameters(dense) == 48 * (attention + 3 * 2048 * 6144)


V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}


def test_deepseek_v3_as_published() -> None:
    """671 billion parameters, nearly 37 of them for one token (with the head), and 70 KB of bf16 latents a token."""
    card = card_from_hf(V3, name="v3")
    assert card.latent is not None
    assert card.moe is not None
    assert card.parameters == 671_026_419_200
    assert 36.5e9 < active_parameters(card) + 129280 * 7168 < 37e9
    assert (card.max_positions, card.head_dim, card.rope.rotary_dims) == (163840, 192, 64)
    assert card.rope.attention_factor == 1.0
    growth = 0.1 * math.log(40) + 1
    assert math.isclose(card.attention_scale or 0, 192**-0.5 * growth**2)
    (group,) = groups_of(card, page_tokens=16, format="bf16")
    assert (group.kind, group.kv_heads, group.head_dim) == ("latent", 1, 576)
    assert group.bytes_per_page == 16 * 61 * 576 * 2
    assert kv_line(group, pages=3).how.startswith("3 pages x 16 tokens x 61 layers x 576 bf16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "'attention_bias' is True; it must be false"),
        ({"first_k_dense_replace": -1}, "'first_k_dense_replace' is -1"),
        ({"kv_lora_rank": 500}, "'kv_lora_rank' is 500; it must be a multiple of 16"),
        ({"moe_layer_freq": 2}, "'moe_layer_freq' is 2; it must be 1"),
        ({"n_group": 7}, "'n_group' is 7; it must be a divisor of n_routed_experts, 256"),
        ({"num_experts_per_tok": 200}, "'topk_group' is 4; it must be large enough for num_experts_per_tok, 200"),
        ({"qk_rope_head_dim": 65}, "'qk_rope_head_dim' is 65; it must be a multiple of 16"),
        ({"quantization_config": {"quant_method": "fp8"}}, "'weight_block_size' is missing; it must be \\[128, 128\\]"),
        ({"rope_interleave": False}, "'rope_interleave' is False; it must be true"),
        ({"scoring_func": "softmax"}, "'scoring_func' is 'softmax'; it must be sigmoid"),
        ({"topk_group": 9}, "'topk_group' is 9; it must be a whole number from 1 to 8"),
        ({"topk_method": "greedy"}, "'topk_method' is 'greedy'; it must be noaux_tc"),
        ({"model_type": "deepseek_v2"}, "'topk_method' is 'noaux_tc'; it must be greedy or group_limited_greedy"),
        (
            {"model_type": "deepseek_v2", "topk_method": None, "scoring_func": None},
            "'norm_topk_prob' is True; it must be false",
        ),
    ],
)
def test_what_deepseek_is_not_computed_with_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CardError, match=message):
        card_from_hf({**V3, **change}, name="x")


def test_experts_are_checked() -> None:
    base = {"model_type": "qwen3_moe", **TINY, "num_experts": 4, "num_experts_per_tok": 2}
    assert card_from_hf(base, name="x").moe is not None
    for change, message in (
        ({"num_experts_per_tok": 5}, "'num_experts_per_tok' is 5; it must be at most num_experts, 4"),
        ({"num_experts": 0}, "'num_experts' is 0"),
        ({"num_experts": 4096}, "'num_experts' is 4096; it must be a whole number from 1 to 1024"),
        ({"mlp_only_layers": [4]}, "a list of layers from 0 to 3"),
        ({"mlp_only_layers": 3}, "a list of layers from 0 to 3"),
        ({"decoder_sparse_step": 0}, "'decoder_sparse_step' is 0"),
        ({"norm_topk_prob": 1}, "'norm_topk_prob' is 1; it must be true or false"),
    ):
        with pytest.raises(CardError) as refusal:
            card_from_hf({**base, **change}, name="x")
        assert message in str(refusal.value)


def test_gpt_oss_without_rope_scaling_is_refused() -> None:
    """Plain rope would be another model, and no published file means it."""
    base = {"model_type": "gpt_oss", **TINY, "head_dim": 16}
    with pytest.raises(CardError, match="'rope_scaling' is missing"):
        card_from_hf(base, name="x")
    scaled = {**base, "rope_scaling": {key: value for key, value in YARN.items() if key != "rope_theta"}}
    card = card_from_hf(scaled, name="x")
    assert (card.rope.theta, card.layer_windows) == (150000.0, (128, None, 128, None))
    with pytest.raises(CardError, match="'swiglu_limit' is 6"):
        card_from_hf({**scaled, "swiglu_limit": 6}, name="x")


def test_gemma2_that_omits_defaults() -> None:
    """Published files leave out the caps or state them; null turns them off."""
    base = {"model_type": "gemma2", **TINY, "head_dim": 32}
    card = card_from_hf(base, name="x")
    assert (card.attention_softcap, card.logit_softcap) == (50.0, 30.0)
    assert card.layer_windows == (4096, None, 4096, None)
    card = card_from_hf({**base, "attn_logit_softcapping": None}, name="x")
    assert (card.attention_softcap, card.logit_softcap) == (None, 30.0)


BROKEN: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "mamba"},
        "model_type 'mamba' is not supported; known are bert, deepseek_v2, deepseek_v3, gemma2, gemma3",
    ),
    ({"model_type": None}, "'model_type' is None"),
    ({"hidden_size": None}, "'hidden_size' is None"),
    ({"hidden_size": "64"}, "'hidden_size' is '64'"),
    ({"hidden_size": True}, "'hidden_size' is True"),
    ({"hidden_size": -64}, "'hidden_size' is -64"),
    ({"hidden_size": 66}, "'hidden_size' is 66; it must be a multiple of num_attention_heads, 4"),
    ({"num_attention_heads": 0}, "'num_attention_heads' is 0"),
    ({"num_key_value_heads": 3}, "num_attention_heads is 4 and num_key_value_heads 3"),
    ({"head_dim": 15}, "head_dim is 15; rotary embedding needs an even number"),
    ({"vocab_size": 1e9}, "'vocab_size' is 1000000000.0"),
    ({"rms_norm_eps": 0}, "'rms_norm_eps' is 0"),
    ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
    ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; it must be a whole number from 1 to 4096"),
    ({"hidden_act": "relu"}, "'hidden_act' is 'relu'"),
    ({"eos_token_id": 320}, "'eos_token_id' is 320; it must be a token id from 0 to 319"),
    ({"eos_token_id": ["a"]}, "'eos_token_id' is ['a']"),
    ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no'; it must be true or false"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'short_factor' is missing; it must be a list of 8"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [0.0] * 8}}, "a list of 8 numbers over 0"),
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope scaling 'ntk' is not supported"),
    ({"partial_rotary_factor": 0.05}, "partial_rotary_factor is 0.05; it must be a number over 0 and up to 1"),
    ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
    ({"rope_scaling": "linear"}, "'rope_scaling' is 'linear'; it must be an object"),
    (
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 5.0}},
        "'low_freq_factor' is 5.0; it must be at most high_freq_factor, 4",
    ),
    ({"rope_theta": -1.0}, "'rope_theta' is -1.0"),
    ({"quantization_config": {"quant_method": "gptq"}}, "weights quantised by 'gptq' are not supported"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=lambda value: str(value)[:40])
def test_broken_config_is_refused_with_field_and_value(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CardError) as refusal:
        card_from_hf({"model_type": "llama", **TINY, **change}, name="mine")
    assert message in str(refusal.value)
    assert "config.json of 'mine'" in str(refusal.value)


def test_layer_types_are_checked() -> None:
    base = {"model_type": "qwen3", **TINY}
    with pytest.raises(CardError, match="a list of 4 words"):
        card_from_hf({**base, "layer_types": ["full_attention"]}, name="x")
    with pytest.raises(CardError, match="'linear_attention'"):
        card_from_hf({**base, "layer_types": ["linear_attention"] * 4}, name="x")
    with pytest.raises(CardError, match="window is off"):
        card_from_hf({**base, "layer_types": ["sliding_attention"] * 4}, name="x")


def test_not_an_object() -> None:
    with pytest.raises(CardError, match="must be an object"):
        card_from_hf([1], name="x")  # type: ignore[arg-type]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    *TINY,
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "head_dim",
    "tie_word_embeddings",
    "hidden_act",
    "use_sliding_window",
    "max_window_layers",
    "decoder_sparse_step",
    "dtype",
    "mlp_only_layers",
    "n_group",
    "n_routed_experts",
    "num_experts",
    "num_experts_per_tok",
    "q_lora_rank",
    "qk_rope_head_dim",
    "text_config",
    "topk_group",
    "quantization_config",
]


@given(
    st.sampled_from(
        [
            "deepseek_v2",
            "deepseek_v3",
            "gemma2",
            "gemma3",
            "gemma3_text",
            "gpt_oss",
            "granite",
            "llama",
            "mistral",
            "mixtral",
            "olmo2",
            "phi3",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
        ]
    ),
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
)
def test_any_damage_is_a_card_or_a_refusal(model_type: str, damage: dict[str, Any]) -> None:
    """No JSON value in any field gives anything but a valid card or a CardError."""
    try:
        card = card_from_hf({"model_type": model_type, **TINY, **damage}, name="x")
    except CardError:
        return
    assert len(card.layer_windows) == card.layers
    assert card.heads % card.kv_heads == 0
    assert card.head_dim % 2 == 0
    assert card.parameters > 0


# ----------------------------------------------------------------------------------------------------------------- GGUF


@dataclass(frozen=True)
class FakeTensor:
    shape: tuple[int, ...]
    format: str
    nbytes: int
    data: Any = None


def gguf_metadata(arch: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "general.architecture": arch,
        "block_count": 4,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(320)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }
    outside = ("general.", "tokenizer.")
    return {
        (key if key.startswith(outside) else f"{arch}.{key}"): value
        for key, value in values.items()
        if value is not None
    }


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_gguf_and_hf_describe_the_same_model(arch: str) -> None:
    """Both readers agree on every fact that both files state."""
    config = configs()[arch].to_dict()
    changes: dict[str, Any] = {"rope.freq_base": 1e6 if arch == "gemma3" else 1e4}
    if arch in ("qwen3", "gemma3"):
        changes["attention.key_length"] = changes["attention.value_length"] = 32
    if arch == "gemma3":
        changes["attention.sliding_window"] = 24
        config["query_pre_attn_scalar"] = 32
    ours = card_from_gguf(gguf_metadata(arch, **changes), name="x")
    theirs = card_from_hf(config, name="x")
    differs = {
        "source",
        "norm_offset",
        "weight_formats",
        "weight_bytes",
        "embedding_format",
        "tied_embeddings",
        "parameters",
    }
    for field in ModelCard.__struct_fields__:
        if field not in differs:
            assert getattr(ours, field) == getattr(theirs, field), field


def test_gguf_facts_that_only_tensors_tell() -> None:
    tensors = {
        "token_embd.weight": FakeTensor((384, 64), "Q8_0", 26112),
        "output.weight": FakeTensor((384, 64), "Q6_K", 20160),
        "blk.0.attn_q.bias": FakeTensor((64,), "F32", 256),
    }
    card = card_from_gguf(gguf_metadata("qwen2"), name="x", tensors=tensors)
    assert card.vocab_size == 384, "padded rows of the table count"
    assert card.qkv_bias
    assert not card.tied_embeddings
    assert card.embedding_format == "Q8_0"
    assert card.weight_formats == {"F32": 64, "Q6_K": 24576, "Q8_0": 24576}
    assert (card.parameters, card.weight_bytes) == (49216, 46528)
    del tensors["output.weight"], tensors["blk.0.attn_q.bias"]
    card = card_from_gguf(gguf_metadata("llama"), name="x", tensors=tensors)
    assert card.tied_embeddings
    assert not card.qkv_bias


def test_gguf_llama3_scaling_is_found_in_its_factors() -> None:
    rope = RopeFacts(theta=500000.0, kind="llama3", factor=32.0, original_max_positions=8192)
    factors = np.array(llama3_factors(rope, rotary=64), dtype=np.float32)
    metadata = gguf_metadata(
        "llama", **{"rope.freq_base": 500000.0, "rope.dimension_count": 64, "attention.key_length": 64}
    )
    embedding = FakeTensor((320, 64), "F16", 40960)
    good = FakeTensor((32,), "F32", 128, factors.view(np.uint8))
    tensors = {"token_embd.weight": embedding, "rope_freqs.weight": good}
    assert card_from_gguf(metadata, name="x", tensors=tensors).rope == rope
    other = factors.copy()
    other[20] *= 1.5
    tensors["rope_freqs.weight"] = FakeTensor((32,), "F32", 128, other.view(np.uint8))
    with pytest.raises(CardError, match="not those of Llama 3"):
        card_from_gguf(metadata, name="x", tensors=tensors)
    tensors["rope_freqs.weight"] = FakeTensor((16,), "F32", 64, other[:16].view(np.uint8))
    with pytest.raises(CardError, match="must be 32 F32 values"):
        card_from_gguf(metadata, name="x", tensors=tensors)


def test_gguf_window_pattern_as_number_or_flags() -> None:
    def windows(pattern: Any) -> tuple[int | None, ...]:
        changes = {"attention.sliding_window": 24, "attention.sliding_window_pattern": pattern}
        return card_from_gguf(gguf_metadata("gemma3", **changes), name="x").layer_windows

    assert windows(2) == (24, None, 24, None)
    assert windows([False, True, True, False]) == (None, 24, 24, None)
    assert windows(None) == (24,) * 4
    with pytest.raises(CardError, match="or 4 flags"):
        windows([True])
    with pytest.raises(CardError, match="sliding_window' is missing"):
        card_from_gguf(gguf_metadata("gemma3"), name="x")


def test_gguf_yarn() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    changes = {f"rope.scaling.{key}": value for key, value in scaling.items()}
    rope = card_from_gguf(gguf_metadata("qwen2", **changes), name="x").rope
    assert (rope.kind, rope.factor, rope.original_max_positions, rope.attention_factor) == ("yarn", 4.0, 64, None)
    with pytest.raises(CardError, match="yarn_ext_factor"):
        card_from_gguf(gguf_metadata("qwen2", **changes, **{"rope.scaling.yarn_ext_factor": 0.5}), name="x")


def test_gguf_end_of_turn_is_found_by_name() -> None:
    tokens = [f"t{index}" for index in range(320)]
    tokens[7] = "<|im_end|>"
    metadata = gguf_metadata("qwen2", **{"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eot_token_id": 5})
    assert card_from_gguf(metadata, name="x").eos_ids == (2, 5, 7)


BROKEN_GGUF: list[tuple[dict[str, Any], str]] = [
    (
        {"general.architecture": "rwkv"},
        "architecture 'rwkv' is not supported; known are gemma2, gemma3, granite, llama, llama4, olmo2, phi3, qwen2, qwen2moe",
    ),
    ({"block_count": None}, "'llama.block_count' is missing"),
    ({"attention.head_count": [4, 4, 2, 4]}, "the same whole number for every layer"),
    ({"attention.head_count_kv": 3}, "llama.attention.head_count is 4 and llama.attention.head_count_kv 3"),
    ({"attention.value_length": 8}, "'llama.attention.value_length' is 8; it must be the key length, 16"),
    ({"attention.layer_norm_rms_epsilon": "x"}, "'llama.attention.layer_norm_rms_epsilon' is 'x'"),
    ({"rope.dimension_count": 15}, "'llama.rope.dimension_count' is 15"),
    ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type 'longrope' is not supported"),
    ({"rope.scaling.type": "yarn"}, "'llama.rope.scaling.factor'"),
    ({"tokenizer.ggml.eos_token_id": 400}, "'tokenizer.ggml.eos_token_id' is 400"),
    ({"embedding_length": 0}, "'llama.embedding_length' is 0"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN_GGUF, ids=lambda value: str(value)[:40])
def test_broken_gguf_is_refused_with_key_and_value(change: dict[str, Any], message: str) -> None:
    arch = change.get("general.architecture", "llama")
    with pytest.raises(CardError) as refusal:
        card_from_gguf(gguf_metadata(arch, **change), name="mine")
    assert message in str(refusal.value)


def test_gguf_head_counts_by_layer_and_numpy_numbers() -> None:
    changes = {"attention.head_count": [4] * 4, "attention.head_count_kv": np.full(4, 2), "block_count": np.uint32(4)}
    card = card_from_gguf(gguf_metadata("llama", **changes), name="x")
    assert (card.heads, card.kv_heads) == (4, 2)


@pytest.mark.weights
def test_smollm2(smollm2_gguf: Path) -> None:
    """The real file, value by value as its publisher states them."""
    from tradewind.weights.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(smollm2_gguf)
    card = card_from_gguf(checkpoint.metadata, name="smollm2", tensors=checkpoint.tensors)
    assert (card.family, card.hidden, card.layers, card.heads, card.kv_heads, card.head_dim) == (
        "llama",
        576,
        30,
        9,
        3,
        64,
    )
    assert (card.intermediate, card.vocab_size, card.max_positions) == (1536, 49152, 8192)
    assert card.rope == RopeFacts(theta=100000.0)
    assert card.norm_eps == pytest.approx(1e-5)
    assert card.tied_embeddings
    assert (card.bos_id, card.eos_ids) == (1, (2,))
    assert card.parameters == 134515008 == count_parameters(card)
    assert card.weight_formats == {"F32": 35136, "Q4_1": 106168320, "Q8_0": 28311552}
    assert card.weight_bytes == 96576768
