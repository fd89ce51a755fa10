"""What one step brought for many requests, as columns.

Knows: how to spell the columns out as one `TokensOut` per request. Refuses to know: who reads them.

512 `TokensOut` a step cost more host time than the whole decision; so the scheduler reports rows that have nothing special (one token, no
finish, no logprobs) in one record, and the client spells out only what somebody reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nlargest
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from tradewind.contract.events import Event, TokensOut
from tradewind.contract.step import Ints, StepResult

GRAMMARS_TOLD = 64
"""Of so many rows at most a step says what their grammars cost."""


class StepTokens(msgspec.Struct, frozen=True, kw_only=True):
    """One token each for several requests; all columns have the same length."""

    at_s: float
    ids: list[str]
    tokens: Ints
    generated: Ints
    cached: Ints
    prompt: Ints

    def one(self, place: int) -> TokensOut:
        """The event at one place; changes nothing."""
        return TokensOut(
            request_id=self.ids[place],
            at_s=self.at_s,
            tokens=(int(self.tokens[place]),),
            cached_tokens=int(self.cached[place]),
            prompt_tokens=int(self.prompt[place]),
            generated_tokens=int(self.generated[place]),
        )

    def each(self) -> Iterator[TokensOut]:
        """The same as single events; changes nothing."""
        for request_id, token, generated, cached, prompt in zip(
            self.ids,
            self.tokens.tolist(),
            self.generated.tolist(),
            self.cached.tolist(),
            self.prompt.tolist(),
            strict=True,
        ):
            yield TokensOut(
                request_id=request_id,
                at_s=self.at_s,
                tokens=(token,),
                cached_tokens=cached,
                prompt_tokens=prompt,
                generated_tokens=generated,
            )


def grammars_told(result: StepResult, ids: npt.NDArray[np.object_]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """(whose, seconds) of what a step's grammars cost, those with most of it; `ids` are the rows' requests. Changes nothing."""
    parts = result.grammar_rows
    rows = parts if len(parts) <= GRAMMARS_TOLD else nlargest(GRAMMARS_TOLD, parts, key=lambda row: parts[row])
    told = [(str(ids[row]), parts[row]) for row in rows if ids[row]]
    return tuple(name for name, _ in told), tuple(seconds for _, seconds in told)


Report = Event | StepTokens
"""What the scheduler tells: events, and columns of them."""


@runtime_checkable
class ReportSink(Protocol):
    """A `contract.events.Sink` that takes what one turn of the engine brought as it is; must return at once and never raise."""

    def take_reports(self, reports: list[Report]) -> None: ...


def spelled_out(reports: list[Report]) -> Iterator[Event]:
    """The reports as single events, in order; changes nothing."""
    for report in reports:
        if isinstance(report, StepTokens):
            yield from report.each()
        else:
            yield report
