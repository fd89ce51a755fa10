"""Gemma 3, text: Gemma 2 with q and k norms in place of caps, five windowed layers to each full one, two ropes (Gemma 3 report 2025).

Knows: this family's names. Refuses to know: images; which layers are windowed and by which rope they turn (the card, attention).
"""

from __future__ import annotations

from tradewind.models import gemma2, qwen3
from tradewind.models.gemma2 import Gemma2

HF_PLACES: dict[str, str] = {**qwen3.HF_PLACES, **gemma2.HF_PLACES}

GGUF_NAMES: dict[str, str] = {**qwen3.GGUF_NAMES, **gemma2.GGUF_NAMES}

# The decoder inside a vision-and-text checkpoint, in both spellings that were published, and what is left aside there.
HF_RENAMES: dict[str, str] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
HF_IGNORED: tuple[str, ...] = (
    "multi_modal_projector.",
    "model.multi_modal_projector.",
    "model.vision_tower.",
    "vision_tower.",
)


class Gemma3(Gemma2):
    """The Gemma 2 decoder; q and k norms and both ropes come from the card."""
