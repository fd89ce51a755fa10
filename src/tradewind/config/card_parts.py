"""What both readers of model descriptions share: families, checks, rope formulas, and counting weights.

Knows: a card. Refuses to know: the field names of either world (card_hf, card_gguf).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import msgspec

from tradewind.config.card import ModelCard, RopeFacts
from tradewind.config.fields import CardError, Fields

FAMILIES: dict[str, str] = {
    "bert": "BERT and MiniLM encoders",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3 and R1",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gpt_oss": "gpt-oss",
    "granite": "Granite 3",
    "llama": "Llama 2 and 3, SmolLM2",
    "llama4": "Llama 4",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmo2": "OLMo 2",
    "phi3": "Phi 3 and 4",
    "qwen2": "Qwen 2 and 2.5",
    "qwen2_5_vl": "Qwen 2.5 VL, which reads images",
    "qwen2_moe": "Qwen 1.5 and 2 with experts",
    "qwen3": "Qwen 3",
    "qwen3_moe": "Qwen 3 with experts",
}
"""Families that a card can describe; each is a row of the model registry."""

BYTES_PER_VALUE = {"F32": 4, "F16": 2, "BF16": 2}


class TensorFacts(Protocol):
    """What is asked of a tensor in a file: never its values."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


Tensors = Mapping[str, TensorFacts]


def check_heads(fields: Fields, *, heads: int, kv_heads: int, head_dim: int, names: tuple[str, str, str]) -> None:
    """Raises CardError when the head counts cannot go together."""
    if heads % kv_heads:
        raise CardError(
            f"{fields.origin}: {names[0]} is {heads} and {names[1]} {kv_heads}; the first must be a multiple of the second"
        )
    if head_dim % 2:
        raise CardError(f"{fields.origin}: {names[2]} is {head_dim}; rotary embedding needs an even number")


def with_weights(card: ModelCard, *, tensors: Tensors | None, assumed: str, fp8_blocks: bool = False) -> ModelCard:
    """The card with parameters, bytes and formats; without tensors they follow from the shapes and the `assumed` format, of layers'
    matrices (but for routers) from `fp8_blocks`."""
    if tensors is None:
        count = count_parameters(card)
        small = fp8_matrices(card) if fp8_blocks else 0
        known = {"F8_E4M3": small, assumed: count - small} if small else {assumed: count}
        return msgspec.structs.replace(
            card,
            parameters=count,
            weight_bytes=small + (count - small) * BYTES_PER_VALUE[assumed],
            weight_formats=dict(sorted(known.items())),
            embedding_format=assumed,
        )
    embedding = next((tensors[name] for name in EMBEDDING_NAMES if name in tensors), None)
    formats: dict[str, int] = {}
    for name, tensor in tensors.items():
        format, count = tensor.format, math.prod(tensor.shape)
        if name.endswith("_blocks") and format == "U8":  # two 4-bit floats a byte
            format, count = "MXFP4", 2 * count
        elif (name.endswith("_scales") and format == "U8") or name.endswith("_scale_inv"):
            continue
        formats[format] = formats.get(format, 0) + count
    return msgspec.structs.replace(
        card,
        parameters=sum(formats.values()),
        weight_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        weight_formats=dict(sorted(formats.items())),
        embedding_format=assumed if embedding is None else embedding.format,
    )


EMBEDDING_NAMES = (
    "token_embd.weight",
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "embed_tokens.weight",
    "embeddings.word_embeddings.weight",
    "bert.embeddings.word_embeddings.weight",
)


def attention_matrices(card: ModelCard) -> int:
    """Weights of the matmuls of one layer's attention."""
    if card.latent is not None:
        latent, queries = card.latent, card.heads * card.head_dim
        q = latent.query_rank * (card.hidden + queries) if latent.query_rank else card.hidden * queries
        up = latent.rank * card.heads * (latent.nope + latent.value)
        return q + card.hidden * latent.width + up + card.heads * latent.value * card.hidden
    return card.hidden * card.head_dim * (2 * card.heads + 2 * card.kv_heads)


def mlp_matrices(card: ModelCard, layer: int, *, active: bool = False) -> int:
    """Weights of the matmuls of one layer's MLP or mixture, router included; `active`: those that one token meets."""
    moe = card.moe
    if moe is None or not moe.layers[layer]:
        return (3 if card.causal else 2) * card.hidden * card.intermediate
    experts = moe.per_token if active else moe.experts
    return card.hidden * (3 * (experts * moe.intermediate + moe.shared_intermediate) + moe.experts + moe.shared_gate)


def fp8_matrices(card: ModelCard) -> int:
    """Weights that files with FP8 by blocks have so: the matmuls of all layers, but for routers and their like."""
    found = sum(attention_matrices(card) + mlp_matrices(card, layer) for layer in range(card.layers))
    if card.moe is not None:
        found -= sum(card.moe.layers) * card.hidden * (card.moe.experts + card.moe.shared_gate)
    return found


def active_parameters(card: ModelCard) -> int:
    """Weights of all layers' matmuls that one token is multiplied with: of a mixture only the experts that it is sent to."""
    return sum(attention_matrices(card) + mlp_matrices(card, layer, active=True) for layer in range(card.layers))


def count_parameters(card: ModelCard) -> int:
    """Parameters that follow from the shapes: embeddings, matmuls, norms, biases."""
    matrices = sum(attention_matrices(card) + mlp_matrices(card, layer) for layer in range(card.layers))
    if not card.causal:
        tables = (card.vocab_size + card.position_rows + card.token_types + 2) * card.hidden  # the norm's two rows too
        return tables + matrices + card.layers * (card.intermediate + 9 * card.hidden)
    norms = card.hidden * (4 if card.sandwich_norms else 2)
    norms += 2 * card.head_dim if card.qk_norm and card.qk_norm_weights else 0
    norms += card.latent.rank + card.latent.query_rank if card.latent is not None else 0
    norms += (card.heads + card.kv_heads) * card.head_dim * card.qk_norm_whole
    biases = (card.heads + 2 * card.kv_heads) * card.head_dim * card.qkv_bias + card.hidden * card.output_bias
    biases += (2 * card.intermediate + card.hidden) * card.mlp_bias
    biases += card.heads * card.attention_sinks
    moe_vectors = 0
    if card.moe is not None:
        each = card.moe.correction + (1 + 2 * card.moe.intermediate + card.hidden) * card.moe.biases
        moe_vectors = sum(card.moe.layers) * card.moe.experts * each
    tables = card.vocab_size * card.hidden * (1 if card.tied_embeddings else 2)
    tower = card.vision.parameters if card.vision is not None else 0
    return tables + matrices + card.layers * (norms + biases) + moe_vectors + card.hidden + tower


def every_nth_full(layers: int, *, window: int | None, pattern: int) -> tuple[int | None, ...]:
    """Windows for layers of which each `pattern`-th sees everything."""
    return tuple(window if (index + 1) % pattern else None for index in range(layers))


def yarn_factor(factor: float, scale: float) -> float:
    """YaRN's growth of attention with the stretch (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def llama3_factors(rope: RopeFacts, *, rotary: int) -> list[float]:
    """What each frequency is divided by, `rotary / 2` numbers (Llama 3.1's scaling)."""
    original = float(rope.original_max_positions or 0)
    factors = []
    for index in range(rotary // 2):
        turns = original / (2 * math.pi * rope.theta ** (2 * index / rotary))
        width = rope.high_freq_factor - rope.low_freq_factor
        smooth = (turns - rope.low_freq_factor) / width if width else float(turns >= rope.low_freq_factor)
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1.0 / ((1.0 - smooth) / rope.factor + smooth))
    return factors
