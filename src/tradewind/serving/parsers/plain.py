"""No calls: reasoning and content only."""

from __future__ import annotations

from tradewind.serving.parsers.machine import Machine
from tradewind.serving.parsers.parser import GrammarHint

HINT: GrammarHint | None = None
"""A call cannot be written in this format."""


class PlainParser(Machine):
    """Everything outside the reasoning markers is content."""
