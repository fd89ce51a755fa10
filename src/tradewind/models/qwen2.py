"""Qwen 2 and 2.5: Llama with biases on q, k and v, and often tied embeddings (Yang et al. 2024).

Knows: this family's names. Refuses to know: the rest; the card has biases, windows and tying.
"""

from __future__ import annotations

from tradewind.models.llama import GGUF_NAMES, HF_PLACES, Llama

__all__ = ["GGUF_NAMES", "HF_PLACES", "Qwen2"]


class Qwen2(Llama):
    """The Llama decoder with q, k, v biases. Its GGUF files keep the rows of q and k as they are."""
