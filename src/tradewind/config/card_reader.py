"""From a model's description on disk to a `ModelCard`: the two readers under one name.

Knows: that there are two worlds. Refuses to know: either (card_hf, card_gguf).
"""

from tradewind.config.card_gguf import card_from_gguf
from tradewind.config.card_hf import card_from_hf
from tradewind.config.card_parts import FAMILIES, TensorFacts, count_parameters, llama3_factors
from tradewind.config.fields import CardError

__all__ = [
    "FAMILIES",
    "CardError",
    "TensorFacts",
    "card_from_gguf",
    "card_from_hf",
    "count_parameters",
    "llama3_factors",
]
