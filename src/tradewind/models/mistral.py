"""Mistral 7B and its relatives: Llama with a sliding window (Jiang et al. 2023).

Knows: what it shares with Llama. Refuses to know: the window itself; the card has it per layer and attention reads it there.
"""

from __future__ import annotations

from tradewind.models.llama import GGUF_INTERLEAVED, GGUF_NAMES, HF_PLACES, Llama

__all__ = ["GGUF_INTERLEAVED", "GGUF_NAMES", "HF_PLACES", "Mistral"]


class Mistral(Llama):
    """The Llama decoder; position p attends to p - window + 1 .. p when the card has a window."""
