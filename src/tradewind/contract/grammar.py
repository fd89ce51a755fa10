"""What `Request.grammar` says, and the door at which a sequence waits until it is compiled.

Knows: the text form of a constraint on an answer. Refuses to know: where it comes from (serving), how it is compiled and kept (sampling).

      serving/structured.py            Grammar -> text, in Request.grammar
      sampling/grammar_compile.py      text -> matcher, in threads of its own; a GrammarGate
      engine/admission.py              BLOCKED while the gate says "not yet"
      sampling/grammar.py              one matcher per slot, one mask per sampled row
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

from tradewind.contract.errors import RequestError

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "tools", "structural_tag"]

LIMITS: dict[str, Any] = {
    "max_grammar_size": 200_000,  # symbols
    "max_lexer_states": 30_000,  # 1 to 2 kB each
    "initial_lexer_fuel": 2_000_000,  # about 40 ms
    "step_lexer_fuel": 200_000,  # about 14 ms a mask
    "step_max_items": 50_000,
    "verbose_errors": False,
}
"""llguidance's limits (LLParserLimits), the same where a grammar is checked and where it is compiled."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A constraint on the tokens of one answer."""

    kind: Kind
    """For messages only."""
    text: str
    """The language of the answer as llguidance reads it: Lark in its dialect, or its JSON of several grammars."""
    thinking: bool = False
    """The answer begins inside reasoning: nothing is constrained until the token `end` has come."""
    begin: int | None = None
    """A token that may open reasoning as the answer's first."""
    end: int | None = None
    """The token that ends reasoning; None when there is none, or when `text` describes the reasoning itself."""
    spare_blanks: bool = False
    """White space carries nothing in this language (JSON), so that a flood of it is stemmed."""

    def encode(self) -> str:
        """The text form; equal grammars have equal texts."""
        return msgspec.json.encode(self).decode()


def decode_grammar(text: str) -> Grammar:
    """The grammar of a text form. Raises RequestError when it is none."""
    try:
        return msgspec.json.decode(text, type=Grammar)
    except msgspec.DecodeError as error:
        raise RequestError(f"the request's grammar cannot be read: {error}") from None


class GrammarGate(Protocol):
    """Compiles beside the engine. Every `open` is paired with one `close`; in between the result is kept. Thread-safe."""

    def open(self, text: str) -> None:
        """Begins to compile a text unless that was done; does not wait."""

    def ready(self, text: str) -> bool:
        """Whether an opened text is compiled. Raises RequestError, in one sentence, when it cannot be, or took too long."""

    def close(self, text: str) -> None:
        """Gives back one `open`."""

    def wait(self, timeout_s: float) -> None:
        """Returns when a compilation ends, or after the time-out."""
