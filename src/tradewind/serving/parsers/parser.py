"""What every output parser is and is told: one protocol, one record of circumstances, one of spelling.

Knows: the facts a front, a detokenizer and a grammar compiler need of a format. Refuses to know: the formats themselves.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import msgspec

from tradewind.contract.errors import UserError
from tradewind.serving.parsers.pieces import Piece


class OutputParser(Protocol):
    """Text deltas in, pieces out. One writer: the front that streams the answer."""

    def push(self, text: str) -> list[Piece]:
        """Takes the next text and gives the pieces that are now certain; never raises, whatever the text."""

    def finish(self, reason: str) -> list[Piece]:
        """Ends the text (`stop`, `length`, `abort`, ...) and gives what was held back; a second call gives nothing.

        A call is complete when its arguments are, whatever the reason; a cut call keeps what was certain and nothing is added.
        """

    @property
    def has_tool_calls(self) -> bool:
        """At least one call is complete, so that the answer may end as `tool_calls` (a `length` stays a `length`)."""


class ReasoningMarkers(msgspec.Struct, frozen=True, kw_only=True):
    """How a model brackets its reasoning."""

    begin: str
    end: str
    repeats: bool = True
    """A begin marker counts anywhere; otherwise only at the beginning of the answer."""

    def check(self) -> None:
        """Raises UserError, in one sentence, when these cannot be markers."""
        for marker in (self.begin, self.end):
            if not marker or marker != marker.strip():
                raise UserError(f"the reasoning marker {marker!r} must not be empty nor begin or end with white space")
        if self.begin == self.end:
            raise UserError(f"the reasoning markers are both {self.begin!r}; they must differ")

    def opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends with the begin marker, so that the answer starts inside the reasoning."""
        return prompt.rstrip().endswith(self.begin)


class GrammarHint(msgspec.Struct, frozen=True, kw_only=True):
    """How calls are spelled, so that a grammar can force one::

    begin  before_name NAME after_name ARGUMENTS after_arguments  between  before_name ...  end
    """

    begin: str = ""
    before_name: str = ""
    after_name: str = ""
    after_arguments: str = ""
    between: str = ""
    """Between two calls; None of the formats needs white space elsewhere."""
    end: str = ""
    arguments: Literal["json", "parameters", "keywords"] = "json"
    """`json`: an object by the tool's schema. `parameters`: each property as `parameter`. `keywords`: Python `name=literal`."""
    parameter: tuple[str, str, str] | None = None
    """(before the property's name, before its value, after its value): text as it is, anything else as JSON."""
    trigger: str = ""
    """Under `tool_choice` auto the grammar begins where this text appears; empty: only at the beginning of the answer."""
    tokens: tuple[str, ...] = ()
    """Parts of the above that are single tokens where the vocabulary has them."""

    def call(self, name: str, arguments: str) -> str:
        """One call of a `json` format as text; changes nothing."""
        return f"{self.before_name}{name}{self.after_name}{arguments}{self.after_arguments}"


def call_id() -> str:
    """A fresh id as most clients expect it."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """A fresh id as Mistral's templates demand it: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What a parser is told about one answer."""

    tools: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)
    """Name -> JSON schema of the parameters; empty when not known. Formats without markers accept only these names."""
    reasoning: ReasoningMarkers | None = None
    starts_inside: bool = False
    """The prompt already opened the reasoning."""
    forced: str | None = None
    """The tool whose bare arguments a grammar forces (guided JSON only)."""
    calls: bool = True
    """False under `tool_choice` none: what would be a call stays content."""
    new_id: Callable[[], str] | None = None
    """Ids for calls without one; None: the format's usual."""
