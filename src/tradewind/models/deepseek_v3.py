"""DeepSeek-V3 and R1: V2 with another way of choosing experts (DeepSeek-V3 report 2024).

Knows: its one more name, and that layers behind the last belong to a head that guesses further tokens, which this engine does not read.
Refuses to know: routing (the card says sigmoid scores, groups, a bias that decides but does not weigh).
"""

from __future__ import annotations

from tradewind.models import deepseek_v2
from tradewind.models.deepseek_v2 import DeepseekV2

HF_PLACES: dict[str, str] = {
    **deepseek_v2.HF_PLACES,
    "model.layers.{}.mlp.gate.e_score_correction_bias": "layers.{}.mlp.router.correction",
}

LAYERS_IN_FILE = "model.layers."
"""Prefix of numbered layers: those with a number beyond the card's are not read."""


class DeepseekV3(DeepseekV2):
    """The V2 decoder, whose layers take the mixture that the card has."""
