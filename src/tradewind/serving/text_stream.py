"""One sequence's text as the user sees it: characters out, stop strings never, not even their beginning.

Knows: where a stop string completes, which text must wait because it may become one, how many ids were used until then.
Refuses to know: how ids become characters (detokenize.py), stop ids and lengths (the engine ends those).

The non-streamed answer is the sum of the stream: there is no second path.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tradewind.contract.errors import RequestError
from tradewind.serving.detokenize import Detokenizer
from tradewind.serving.tokenizer import TextTokenizer

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024


class StopStrings:
    """Watches a text that arrives in pieces for the first stop string to complete. One writer.

    The hit is the stop that completes earliest; of those that complete with the same character, the longest. It does not
    depend on how the text is cut into pieces::

        stops "lo w", "world"      he | llo wo | rld
        emit                       he | l        <- "lo w" completed; the rest is dropped
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`include` puts the stop string itself at the end of the emitted text. Raises RequestError for stops that make no sense."""
        self._stops = check_stops(stops)
        self._include = include
        self._held = ""  # suffix of the text so far that is the beginning of some stop
        self._first = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._hit: str | None = None

    @property
    def hit(self) -> str | None:
        """The stop string that completed, or None so far."""
        return self._hit

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece; gives (text that is safe to show, the stop string if it completed here or before)."""
        if self._hit is not None:
            return "", self._hit
        if not self._stops or not text:
            return text, None
        buffer = self._held + text
        best_end = best_start = len(buffer) + 1
        hit = None
        for stop in self._stops:
            # Each stop's first place is also where it completes first.
            start = buffer.find(stop)
            if start >= 0 and (start + len(stop), start) < (best_end, best_start):
                best_start, best_end, hit = start, start + len(stop), stop
        if hit is not None:
            self._hit, self._held = hit, ""
            return buffer[: best_end if self._include else best_start], hit
        keep = self._beginning_of_stop(buffer)
        self._held = buffer[keep:]
        return buffer[:keep], None

    def finish(self) -> str:
        """Ends the text: gives what was held back, since no stop can complete any more."""
        held, self._held = self._held, ""
        return held

    def _beginning_of_stop(self, buffer: str) -> int:
        """Where the longest suffix of `buffer` begins that is the beginning of a stop; its length when there is none."""
        first = self._first
        for place in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[place] in first:
                suffix = buffer[place:]
                if any(stop.startswith(suffix) for stop in self._stops):
                    return place
        return len(buffer)


def check_stops(stops: object) -> tuple[str, ...]:
    """The stop strings as a tuple without repeats; raises RequestError, in one sentence, for what cannot be a stop string."""
    if isinstance(stops, str):
        stops = (stops,)
    if not isinstance(stops, Sequence):
        raise RequestError(f"stop must be a string or a list of strings, not {type(stops).__name__}")
    for place, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise RequestError(f"stop string number {place + 1} is of type {type(stop).__name__}; it must be a string")
        if not stop:
            raise RequestError(f"stop string number {place + 1} is empty, which would stop every text before it begins")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop string number {place + 1} has {len(stop)} characters; at most {MAX_STOP_CHARACTERS} are allowed"
            )
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{len(stops)} stop strings were given; at most {MAX_STOPS} are allowed")
    return tuple(dict.fromkeys(stops))


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one push added to a sequence's text."""

    text: str
    token_count: int
    """Ids used so far in this sequence, those of this push included."""
    consumed: int
    """Ids of this push that were used; fewer than were pushed when a stop string completed inside it."""
    finish: str | None = None
    """`stop` when a stop string completed; otherwise the reason given to `finish`; None while the text goes on."""
    stop: str | None = None
    """The stop string that completed."""


class TextStream:
    """Detokenizer and stop strings of one sequence. One writer: the front that streams that sequence.

    Invariant: the texts of all deltas up to now, plus what is held back, are the decoded text up to the stop string.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        prompt_tail_ids: Sequence[int] = (),
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """`min_tokens`: stop strings that begin before so many ids are there are passed over."""
        self._detokenizer = Detokenizer(tokenizer, prompt_tail_ids, skip_special=skip_special)
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._count = 0
        self._finish: str | None = None

    @property
    def finished(self) -> str | None:
        """The finish reason, or None while the text goes on."""
        return self._finish

    def push(self, ids: Sequence[int]) -> TextDelta:
        """Takes the next ids (one, or several accepted at once) and gives the text that is now certain.

        After a stop string completed, further ids are not used: the delta is empty with `consumed` 0.
        """
        if self._finish is not None:
            return TextDelta(text="", token_count=self._count, consumed=0, finish=self._finish, stop=self._hit())
        if self._stops is None:
            self._count += len(ids)
            text = self._detokenizer.push(ids) if ids else ""
            return TextDelta(text=text, token_count=self._count, consumed=len(ids))
        pieces: list[str] = []
        for used, token in enumerate(ids, start=1):
            self._count += 1
            text = self._detokenizer.push((token,))
            if self._count < self._min_tokens:
                pieces.append(text)
                continue
            text, hit = self._stops.push(text)
            pieces.append(text)
            if hit is not None:
                self._finish = "stop"
                return TextDelta(
                    text="".join(pieces), token_count=self._count, consumed=used, finish=self._finish, stop=hit
                )
        return TextDelta(text="".join(pieces), token_count=self._count, consumed=len(ids))

    def finish(self, reason: str) -> TextDelta:
        """Ends the text for a reason of the engine's (`stop`, `length`, `abort`) and gives what was held back.

        A stop string that already completed keeps its reason. A second call gives an empty delta.
        """
        if self._finish is not None:
            return TextDelta(text="", token_count=self._count, consumed=0, finish=self._finish, stop=self._hit())
        text = self._detokenizer.finish()
        self._finish = reason
        hit = None
        if self._stops is not None:
            text, hit = self._stops.push(text)
            if hit is not None:
                self._finish = "stop"
            text += self._stops.finish()
        return TextDelta(text=text, token_count=self._count, consumed=0, finish=self._finish, stop=hit)

    def _hit(self) -> str | None:
        return None if self._stops is None else self._stops.hit
