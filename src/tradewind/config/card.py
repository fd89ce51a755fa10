"""Facts about a model, read from `config.json` or GGUF metadata without touching a weight.

Knows: shapes, rope, windows, norms, token ids, weight bytes. Refuses to know: how any of it is computed or where files lie.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tradewind.contract.request import Pooling


class RopeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: base frequency and its scaling. Sources: llama3 (Llama 3.1 report), YaRN (Peng et al. 2023)."""

    theta: float = 10000.0
    kind: Literal["none", "linear", "llama3", "yarn", "absent"] = "none"
    """"none": rope without scaling. "absent": no rope; positions come from elsewhere."""
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """YaRN's factor on cos and sin; None: 0.1 ln(factor) + 1."""
    rotary_dims: int | None = None
    """None: the whole head."""


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that planning and building need to know about a dense decoder or a BERT-type encoder."""

    name: str
    family: str
    """Row of the model registry: "llama", "mistral", "qwen2", "qwen3", "gemma3", "bert"."""
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
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    rope: RopeFacts = RopeFacts()
    rope_local: RopeFacts | None = None
    """Rope of the windowed layers when it differs (Gemma 3)."""
    layer_windows: tuple[int | None, ...] = ()
    """Per layer: attention window in tokens, None is full attention. Always `layers` long."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    """Norms after attention and after the MLP too (Gemma 2/3)."""
    norm_offset: float = 0.0
    """Added to every norm weight at load: 1 in Gemma checkpoints that store w - 1."""
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
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
