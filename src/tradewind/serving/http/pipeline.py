"""The one way from token events to what is said: detokenizer, stop strings, parser. Streaming and not, for every endpoint.

Knows: the order of these steps, which tokens count, what the sum of it all is. Refuses to know: JSON, sockets, scheduling.

      TokensOut -> TextStream (text, stop strings) -> OutputParser (content | reasoning | calls) -> Said -> an encoder, or `Whole`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tradewind.contract.events import TokensOut
from tradewind.contract.request import Request
from tradewind.contract.step import TokenLogprobs
from tradewind.serving.parsers.parser import OutputParser
from tradewind.serving.parsers.pieces import Content, Message, Piece, Reasoning, collect
from tradewind.serving.text_stream import TextStream
from tradewind.serving.tokenizer import TextTokenizer

TAIL = 16
"""Prompt tokens that the detokenizer looks at to continue the text rightly."""

Finish = Literal["stop", "length", "abort", "error", "tool_calls"]


class Said:
    """What one or more events of one sequence added. Made by the pipeline, read by encoders."""

    __slots__ = ("error", "finish", "logprobs", "overloaded", "pieces", "stop", "tokens")

    def __init__(
        self,
        pieces: list[Piece],
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish: Finish | None = None,
        stop: str | int | None = None,
        error: str | None = None,
        overloaded: bool = False,
    ) -> None:
        self.overloaded = overloaded
        self.pieces, self.tokens, self.logprobs = pieces, tokens, logprobs
        self.finish, self.stop, self.error = finish, stop, error


class Voice:
    """One sequence's pipeline and the counters that go with it. One writer: the task that reads its events."""

    def __init__(
        self,
        request: Request,
        tokenizer: TextTokenizer,
        *,
        index: int,
        prompt: int = 0,
        parser: OutputParser | None = None,
        skip_special: bool = True,
        mute: bool = False,
    ) -> None:
        """`index` is the choice's number in the answer. `mute`: nothing that is generated is part of the answer (echo of a prompt only)."""
        sampling = request.sampling
        self.request, self.index, self.prompt = request, index, prompt
        self.parser = parser
        self.tokens = 0
        """Tokens that count: up to the stop string, the end token included."""
        self.reasoning_tokens = 0
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self.finish: Finish | None = None
        self.error: str | None = None
        self.over = False
        """The engine knows that the sequence ended; otherwise it must be told."""
        self._mute = mute
        self._thinking = parser is not None
        self._include_stop = sampling.include_stop
        self._stream = TextStream(
            tokenizer,
            prompt_tail_ids=request.tokens[-TAIL:],
            stops=sampling.stop,
            include_stop=sampling.include_stop,
            skip_special=skip_special,
            min_tokens=sampling.min_tokens,
        )

    def take(self, event: TokensOut) -> Said | None:
        """What an event adds; None when nothing new is certain or the answer is already over."""
        tokens = event.tokens
        if event.finish is not None:
            self.over = True
        if self.finish is not None:
            return None
        if self.first_token_s is None:
            # The first event of a sequence alone carries these.
            if tokens:
                self.first_token_s = event.at_s
            self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        if event.prompt_logprobs:
            self.prompt_logprobs += event.prompt_logprobs
        if self._mute:
            if event.finish is None:
                return None
            self.finished_s, self.finish = event.at_s, event.finish
            if event.finish in ("stop", "length"):
                self.finish = "length"
            else:
                self.error = event.error
            return Said([], (), (), self.finish, None, self.error, event.overloaded)
        # The token that ends an answer (end of text, stop token) is no part of its text unless it is asked for.
        spoken = tokens[:-1] if event.stop_token is not None and not self._include_stop else tokens
        pushed = self._stream.push(spoken)
        text = pushed.text
        used = len(tokens)
        finish: Finish | None = event.finish
        stop: str | int | None = event.stop_token
        logprobs = event.logprobs
        if pushed.finish is not None:
            finish, stop, used = "stop", pushed.stop, pushed.consumed
            tokens = tokens[:used]
            spoken = tokens
        elif finish is not None:
            tail = self._stream.finish(finish)
            text += tail.text
            if tail.stop is not None:
                finish, stop = "stop", tail.stop
        self.tokens += used
        pieces: list[Piece]
        if self.parser is None:
            pieces = [Content(text)] if text else []
        else:
            pieces = self.parser.push(text) if text else []
            if finish is not None:
                pieces += self.parser.finish(finish)
            if self._thinking:
                if pieces and not all(isinstance(piece, Reasoning) for piece in pieces):
                    self._thinking = False
                elif pieces or self.reasoning_tokens:
                    self.reasoning_tokens += used
            if finish == "stop" and self.parser.has_tool_calls:
                finish = "tool_calls"
        if logprobs and len(logprobs) > len(spoken):
            logprobs = logprobs[: len(spoken)]
        if finish is not None:
            self.finish, self.finished_s, self.error = finish, event.at_s, event.error
        elif not pieces and not logprobs and not tokens:
            return None
        return Said(pieces, tokens, logprobs, finish, stop, event.error, event.overloaded)


class Whole:
    """The sum of what one voice said: the non-streamed answer."""

    def __init__(self, voice: Voice) -> None:
        self.voice = voice
        self.pieces: list[Piece] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.stop: str | int | None = None

    def add(self, said: Said) -> None:
        """Takes the next part."""
        self.pieces += said.pieces
        self.tokens += said.tokens
        self.logprobs += said.logprobs
        if said.finish is not None:
            self.stop = said.stop

    @property
    def message(self) -> Message:
        """Content, reasoning and calls."""
        return collect(self.pieces)


class Counts:
    """Tokens of all voices of one HTTP request, as `usage` tells them."""

    def __init__(self, voices: Sequence[Voice]) -> None:
        self._voices = voices
        firsts = {voice.prompt: voice for voice in reversed(voices)}
        self._firsts = [firsts[prompt] for prompt in sorted(firsts)]
        self.prompt_tokens = sum(len(voice.request.tokens) for voice in self._firsts)

    @property
    def completion_tokens(self) -> int:
        return sum(voice.tokens for voice in self._voices)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache, by the first sample of each prompt."""
        return sum(voice.cached_tokens for voice in self._firsts)

    @property
    def reasoning_tokens(self) -> int:
        return sum(voice.reasoning_tokens for voice in self._voices)
