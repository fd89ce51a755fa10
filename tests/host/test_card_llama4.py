"""Llama 4's description: as published, as `transformers` writes it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tradewind.config.card import RopeFacts, TemperFacts
from tradewind.config.card_reader import CardError, card_from_hf, count_parameters
from tradewind.config.kv_sizing import groups_of, sequence_pages
from tradewind.config.ledger import kv_line

TEXT: dict[str, Any] = {
    "model_type": "llama4_text",
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 10485760,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": 4,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "interleave_moe_layer_step": 1,
    "no_rope_layers": [],
    "use_qk_norm": True,
    "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
}
"""With the sizes of Scout."""


def test_the_large_shape() -> None:
    config = {"model_type": "llama4", "text_config": TEXT, "vision_config": {}, "torch_dtype": "bfloat16"}
    card = card_from_hf(config, name="x")
    assert (card.family, card.layers, card.intermediate, card.head_dim) == ("llama4", 48, 16384, 128)
    assert card.rope == RopeFacts(
        theta=5e5, kind="llama3", factor=16.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=1.0
    )
    assert card.layer_windows == (8192, 8192, 8192, None) * 12
    assert card.layer_ropes == (True, True, True, False) * 12
    assert card.windows_restart
    assert card.temper == TemperFacts(every=8192, slope=0.1)
    assert (card.qk_norm, card.qk_norm_weights) == (True, False)
    assert card.eos_ids == (200001, 200007, 200008)
    moe = card.moe
    assert moe is not None
    assert (moe.experts, moe.per_token, moe.intermediate, moe.shared_intermediate) == (16, 1, 8192, 8192)
    assert (moe.score, moe.normalised, moe.weigh_input, all(moe.layers)) == ("sigmoid", False, True, True)
    assert 107e9 < card.parameters < 108e9, "109 billion with the tower"

    full, chunks = groups_of(card, page_tokens=16, format="bf16")
    assert (full.kind, len(full.layers), chunks.kind, chunks.window, len(chunks.layers)) == (
        "full",
        12,
        "chunk",
        8192,
        36,
    )
    assert sequence_pages(chunks, tokens=10**6, max_tokens_per_step=512) < 550 < 62500
    assert sequence_pages(full, tokens=10**6, max_tokens_per_step=512) == 62500
    assert "chunk 8192" in kv_line(chunks, pages=3).name


def test_every_second_layer_a_mixture_no_norms_no_scaling() -> None:
    card = card_from_hf(
        {**TEXT, "num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False, "rope_scaling": None},
        name="x",
    )
    assert card.moe is not None
    assert card.moe.layers == (False, True) * 24
    assert not card.qk_norm
    assert card.rope == RopeFacts(theta=5e5)
    assert 399e9 < card.parameters < 401e9


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"attention_chunk_size": None},
        {"attn_temperature_tuning": False, "no_rope_layer_interval": 2},
        {"no_rope_layers": [0, 1, 1, 0], "moe_layers": [1, 3], "attention_bias": True},
        {"moe_layers": [], "use_qk_norm": False, "tie_word_embeddings": True},
        {"layer_types": ["full_attention", "chunked_attention"] * 2},
        {"interleave_moe_layer_step": 3, "num_experts_per_tok": 2},
    ],
    ids=str,
)
def test_card_agrees_with_transformers(values: dict[str, Any], tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    shape: dict[str, Any] = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 48, "intermediate_size_mlp": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 5, "attention_chunk_size": 24,
        "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.Llama4TextConfig(**{**shape, **values})
    with torch.device("meta"):
        model = transformers.Llama4ForCausalLM(config)
    config.save_pretrained(tmp_path)
    card = card_from_hf(json.loads((tmp_path / "config.json").read_text()), name="x")
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        chunked = config.layer_types[index] == "chunked_attention"
        assert card.layer_windows[index] == (config.attention_chunk_size if chunked else None)
        assert card.layer_ropes[index] == bool(attention.use_rope)
        if attention.use_rope:
            assert card.qk_norm == hasattr(attention, "qk_norm")
        assert (card.moe is not None and card.moe.layers[index]) == layer.is_moe_layer
    assert (card.temper is not None) == config.attn_temperature_tuning
    assert card.qkv_bias == card.output_bias == config.attention_bias
    counted = sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())
    if card.tied_embeddings and model.lm_head.weight is not model.model.embed_tokens.weight:
        counted -= model.lm_head.weight.numel()
    assert card.parameters == counted == count_parameters(card)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "a list of 48 numbers, 1 for a layer with rope and 0 for one without"),
        ({"no_rope_layers": [2] * 48}, "a list of 48 numbers"),
        ({"no_rope_layers": "none"}, "'no_rope_layers' is 'none'"),
        ({"moe_layers": [48]}, "a list of layers from 0 to 47"),
        ({"moe_layers": 3}, "a list of layers from 0 to 47"),
        ({"attention_chunk_size": 0}, "'attention_chunk_size' is 0"),
        ({"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 48}, "the window is off"),
        ({"layer_types": ["sliding_attention"] * 48}, "known are full_attention, chunked_attention"),
        ({"attn_temperature_tuning": "on"}, "'attn_temperature_tuning' is 'on'; it must be true or false"),
        ({"floor_scale": 0}, "'floor_scale' is 0"),
        ({"attn_scale": "much"}, "'attn_scale' is 'much'"),
        ({"num_experts_per_tok": 17}, "at most num_local_experts, 16"),
        ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, "weights quantised by 'fbgemm_fp8'"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CardError) as refusal:
        card_from_hf({**TEXT, **change}, name="x")
    assert message in str(refusal.value)
