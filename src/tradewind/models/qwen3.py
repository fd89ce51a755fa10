"""Qwen 3, dense: Llama with an RMS norm on every q and k head before rope, and a head size of its own (Qwen3 report 2025).

Knows: the two more names. Refuses to know: how heads are normed (one op with rope and the KV write).
"""

from __future__ import annotations

from tradewind.models import llama
from tradewind.models.llama import Llama

HF_PLACES: dict[str, str] = {
    **llama.HF_PLACES,
    "model.layers.{}.self_attn.k_norm.weight": "layers.{}.attention.k_norm.weight",
    "model.layers.{}.self_attn.q_norm.weight": "layers.{}.attention.q_norm.weight",
}

GGUF_NAMES: dict[str, str] = {
    **llama.GGUF_NAMES,
    "blk.{}.attn_k_norm.weight": "model.layers.{}.self_attn.k_norm.weight",
    "blk.{}.attn_q_norm.weight": "model.layers.{}.self_attn.q_norm.weight",
}


class Qwen3(Llama):
    """The Llama decoder with q and k norms."""
