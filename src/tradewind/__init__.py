"""Tradewind: an LLM inference engine that is given goals and chooses the means."""

__version__ = "0.1.0"
