"""One sequence's way from token events to text: the same for streaming and not, for Python and (later) HTTP.

Knows: TokensOut events and the text pipeline. Refuses to know: who reads the text, and how requests are scheduled.
"""

from __future__ import annotations

import msgspec

from tradewind.contract.events import FinishReason, TokensOut
from tradewind.contract.request import Request
from tradewind.contract.step import TokenLogprobs
from tradewind.serving.text_stream import TextStream
from tradewind.serving.tokenizer import TextTokenizer

TAIL = 8
"""Prompt tokens that the detokenizer looks at to continue the text rightly."""


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of one answer; `finish` is set on its last one."""

    prompt: int
    """Which prompt of the call."""
    sample: int
    """Which of its n samples."""
    text: str
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    stop: str | int | None = None
    """The stop string or token that ended the answer."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One whole answer: the sum of its deltas."""

    sample: int
    text: str
    tokens: tuple[int, ...]
    finish: FinishReason
    stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


class Answer:
    """Turns the events of one request into deltas, and remembers their sum. One writer: the front that reads the events."""

    def __init__(self, request: Request, tokenizer: TextTokenizer, *, prompt: int = 0, sample: int = 0) -> None:
        sampling = request.sampling
        self.request = request
        self.prompt, self.sample = prompt, sample
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.first_token_s: float | None = None
        self.finished_s: float | None = None
        self._stream = TextStream(
            tokenizer,
            prompt_tail_ids=request.tokens[-TAIL:],
            stops=sampling.stop,
            include_stop=sampling.include_stop,
            min_tokens=sampling.min_tokens,
        )
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: Delta | None = None

    @property
    def done(self) -> bool:
        return self._last is not None

    @property
    def stopped_by_text(self) -> bool:
        """A stop string ended the text though the engine may still be generating: the front must tell it."""
        return self._last is not None and isinstance(self._last.stop, str)

    def take(self, event: TokensOut) -> Delta | None:
        """The delta of one event; None when nothing new is certain or the answer is already over."""
        if self._last is not None:
            return None
        if self.first_token_s is None and event.tokens:
            self.first_token_s = event.at_s
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        if event.prompt_logprobs:
            self.prompt_logprobs += event.prompt_logprobs
        tokens = event.tokens
        # The token that ends an answer (end of text, stop token) is no part of its text unless it is asked for.
        spoken = tokens[:-1] if event.stop_token is not None and not self.request.sampling.include_stop else tokens
        pushed = self._stream.push(spoken)
        text, finish, stop = pushed.text, event.finish, event.stop_token
        used = tokens
        hit: str | None = None
        if pushed.finish is not None:
            finish, hit, used = "stop", pushed.stop, tokens[: pushed.consumed]
        elif event.finish is not None:
            tail = self._stream.finish(event.finish)
            text += tail.text
            if tail.stop is not None:
                finish, hit = "stop", tail.stop
        if not used and not text and finish is None:
            return None
        delta = Delta(
            prompt=self.prompt,
            sample=self.sample,
            text=text,
            tokens=used,
            finish=finish,
            stop=hit if hit is not None else stop,
            logprobs=event.logprobs[: len(used)],
            error=event.error,
        )
        self._text.append(text)
        self._tokens.extend(used)
        self._logprobs.extend(delta.logprobs)
        if finish is not None:
            self._last = delta
            self.finished_s = event.at_s
        return delta

    def completion(self) -> Completion:
        """The whole answer; only when done."""
        assert self._last is not None, "the answer is not finished"
        assert self._last.finish is not None
        return Completion(
            sample=self.sample,
            text="".join(self._text),
            tokens=tuple(self._tokens),
            finish=self._last.finish,
            stop=self._last.stop,
            logprobs=tuple(self._logprobs),
            error=self._last.error,
        )
