"""Facts about a model, read from `config.json` or GGUF metadata without touching a weight.

Knows: shapes, rope, windows, norms, token ids, weight bytes. Refuses to know: how any of it is computed or where files lie.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tradewind.config.card_vision import VisionFacts
from tradewind.contract.request import Pooling


class RopeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: base frequency and its scaling.

    Sources: llama3 (Llama 3.1 report), YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024).
    """

    theta: float = 10000.0
    kind: Literal["none", "linear", "llama3", "yarn", "longrope", "absent"] = "none"
    """"none": rope without scaling. "absent": no rope; positions come from elsewhere."""
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Factor on cos and sin of YaRN and LongRoPE. None: 0.1 ln(factor) + 1 for YaRN, sqrt(1 + ln(factor) / ln(original)) for LongRoPE."""
    short_factors: tuple[float, ...] = ()
    """LongRoPE: what each frequency is divided by in an engine whose texts stay within the original positions."""
    long_factors: tuple[float, ...] = ()
    """LongRoPE: the same for an engine that serves longer ones."""
    truncate: bool = True
    """YaRN: the bounds between which frequencies are blended are whole indices."""
    rotary_dims: int | None = None
    """None: the whole head."""
    sections: tuple[int, ...] = ()
    """Rotated pairs that turn by time, by row and by column of an image's token; empty: all turn by one position."""


class MoeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts (Shazeer et al. 2017): how tokens are sent to experts, and what an expert is."""

    experts: int
    per_token: int
    """Experts that each token is sent to."""
    intermediate: int
    """Inner size of one expert."""
    layers: tuple[bool, ...]
    """Per layer of the model: whether its MLP is a mixture; otherwise it is a plain one of the card's `intermediate`."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """From a router's logits to scores."""
    normalised: bool = True
    """The chosen scores are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights in the end."""
    groups: int = 1
    groups_kept: int = 1
    """Experts are chosen only from the best `groups_kept` of `groups` equal groups (DeepSeek-V2)."""
    group_top: int = 1
    """A group is as good as the sum of its best `group_top` scores."""
    correction: bool = False
    """A bias for each expert is added to its score where experts are chosen, not where they are weighed (DeepSeek-V3)."""
    weigh_input: bool = False
    """Weights are factors on what goes into an expert, not on what comes out (Llama 4)."""
    biases: bool = False
    """Router and experts add biases."""
    shared_intermediate: int = 0
    """Inner size of the expert that every token visits; 0: none."""
    shared_gate: bool = False
    """What the shared expert says is multiplied by a sigmoid of one more row of weights."""


class LatentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (DeepSeek-V2 2024): keys and values of all heads are made of one short vector a token."""

    rank: int
    """Numbers of a latent (kv_lora_rank)."""
    rope: int
    """Dims of the rotated key, which all heads share, and of the part of each query that meets it."""
    nope: int
    """Dims of the rest of each query, and of the keys that are made of latents."""
    value: int
    """Dims of a value."""
    query_rank: int = 0
    """Numbers of the vector that queries are made of (q_lora_rank); 0: they are made of the hidden state at once."""

    @property
    def width(self) -> int:
        """Numbers that are kept of a token."""
        return self.rank + self.rope


class TemperFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Queries that grow with their position p, by 1 + slope ln(1 + floor((p + 1) / every)): attention over many keys stays as sharp as over
    few (Nakanishi 2025; Llama 4)."""

    every: int
    slope: float


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that planning and building need to know about a decoder or a BERT-type encoder."""

    name: str
    family: str
    """Row of the model registry (models/registry.py)."""
    source: Literal["hf", "gguf"]
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_positions: int
    norm_eps: float
    tied_embeddings: bool
    activation: Literal["silu", "gelu_tanh", "gelu", "swiglu_clamped"] = "silu"
    rope: RopeFacts = RopeFacts()
    rope_local: RopeFacts | None = None
    """Rope of the windowed layers when it differs (Gemma 3)."""
    layer_windows: tuple[int | None, ...] = ()
    """Per layer: attention window in tokens, None is full attention. Always `layers` long."""
    windows_restart: bool = False
    """Windows do not slide but start anew at each multiple of their size (chunked attention, Llama 4)."""
    layer_ropes: tuple[bool, ...] = ()
    """Per layer: whether positions turn its queries and keys; empty: in all."""
    temper: TemperFacts | None = None
    """How queries of layers without rope grow; None: they do not."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Each q and k head is normed before rope."""
    qk_norm_weights: bool = True
    """These norms have weights. Without any it is the same before rope and after, and layers without rope have none (Llama 4)."""
    qk_norm_whole: bool = False
    """One norm over all q heads together and one over all k heads, instead (OLMo 2)."""
    sandwich_norms: bool = False
    """Norms after attention and after the MLP too (Gemma 2/3)."""
    norm_offset: float = 0.0
    """Added to every norm weight at load: 1 in Gemma checkpoints that store w - 1."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor on what attention and MLP add to the stream (Granite)."""
    logit_scale: float = 1.0
    attention_scale: float | None = None
    """None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    attention_sinks: bool = False
    """Each head has one more score in its softmax, which no value answers to (gpt-oss)."""
    logit_softcap: float | None = None
    latent: LatentFacts | None = None
    """None: keys and values are kept. Otherwise latents are, and `head_dim` is that of a query."""
    moe: MoeFacts | None = None
    """None: every layer's MLP is one of `intermediate`."""
    vision: VisionFacts | None = None
    """The tower that makes images into tokens; None: the model reads text alone."""
    weight_bytes: int = 0
    """Bytes of all tensors as they lie in the files."""
    parameters: int = 0
    weight_formats: dict[str, int] = msgspec.field(default_factory=dict)
    """Format name -> number of parameters stored so."""
    embedding_format: str = "BF16"
    """Format of the embedding table in the file; its rows are gathered from there."""
    causal: bool = True
    """Each token sees only those before it. Otherwise the model is an encoder: it gives embeddings, and generates nothing."""
    pooling: Pooling = "last"
    """How its hidden states become an embedding, unless a request says otherwise."""
    position_rows: int = 0
    """Rows of a table of learned positions; 0: none."""
    token_types: int = 0
    """Rows of a table of token types (of which a single text has the first); 0: none."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
