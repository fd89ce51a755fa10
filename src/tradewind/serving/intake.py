"""From tokens and sampling values to Requests: the last place where a person can be told that what they ask is not possible.

Knows: the model's limits and end-of-text ids. Refuses to know: text (tokenizer, template) and the queue (engine).
"""

from __future__ import annotations

import itertools
import operator
import secrets
from collections.abc import Iterable, Sequence
from typing import SupportsIndex, get_args

import msgspec

from tradewind.config.plan import Plan
from tradewind.contract.errors import RequestError
from tradewind.contract.image import Image
from tradewind.contract.request import Pooling, Request, SamplingParams

U64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""Odd constant of splitmix64 (Steele, Lea, Flood 2014): seeds of samples 2..n are spaced by it."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What every request is held to."""

    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]
    causal: bool = True
    """False: an encoder, which generates nothing."""
    pooling: Pooling = "last"
    """How embeddings are pooled unless a request says otherwise."""
    embedding_size: int | None = None
    """Values of an embedding; None where that is not known before one is made."""

    @classmethod
    def of(cls, plan: Plan, *, eos_ids: Iterable[int]) -> Limits:
        """The limits of a planned engine; ids beyond its vocabulary are left out."""
        card = plan.card
        return cls(
            vocab_size=card.vocab_size,
            max_context=plan.schedule.max_context,
            eos_ids=tuple(sorted(token for token in {*eos_ids, *card.eos_ids} if token < card.vocab_size)),
            causal=card.causal,
            pooling=card.pooling,
            embedding_size=card.hidden,
        )


class Intake:
    """Makes Requests with fresh ids. One per engine; safe to call from several threads."""

    def __init__(self, limits: Limits, *, prefix: str = "req") -> None:
        self.limits = limits
        self._prefix = prefix
        self._numbers = itertools.count(1)

    def requests(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        *,
        now_s: float,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        traffic_class: str = "",
        cache_salt: str = "",
        adapter: str = "",
        deadline_s: float | None = None,
        images: tuple[Image, ...] = (),
    ) -> tuple[Request, ...]:
        """`sampling.n` requests for one prompt, the later ones naming the first as parent. Raises RequestError with exact numbers.

        images: whose tokens stand in the prompt already (`serving.images.placed`).
        """
        limits = self.limits
        self.check_generates()
        sampling.check(vocab_size=limits.vocab_size)
        prompt = tuple(self._token(token) for token in tokens)
        if not prompt:
            raise RequestError("the prompt is empty; at least one token is needed")
        room = limits.max_context - len(prompt)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; with at least 1 to generate the limit is {limits.max_context}"
                f" ({len(prompt) + 1 - limits.max_context} too many)"
            )
        wanted = sampling.max_tokens
        if wanted is not None and wanted > room:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {wanted}, {len(prompt) + wanted} together;"
                f" the limit is {limits.max_context}: ask for at most {room}"
            )
        if sampling.min_tokens > (wanted or room):
            raise RequestError(f"min_tokens is {sampling.min_tokens}, but only {wanted or room} can be generated")
        first = request_id or f"{self._prefix}-{next(self._numbers)}"
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed & U64
        return tuple(
            Request(
                id=first if sample == 0 else f"{first}.{sample}",
                tokens=prompt,
                sampling=sampling,
                max_tokens=room if wanted is None else wanted,
                eos_ids=limits.eos_ids,
                seed=(seed + sample * GOLDEN) & U64,
                priority=priority,
                tenant=tenant,
                traffic_class=traffic_class,
                cache_salt=cache_salt,
                adapter=adapter,
                arrived_s=now_s,
                deadline_s=deadline_s,
                parent=first if sample else None,
                image_keys=tuple((image.first, image.count, image.key) for image in images),
                images=images,
            )
            for sample in range(sampling.n)
        )

    def check_generates(self) -> None:
        """Raises RequestError when the model is one that generates nothing."""
        if not self.limits.causal:
            raise RequestError(
                "this model is an encoder: it gives embeddings (tradewind embed, LLM.embed, /v1/embeddings) and generates nothing"
            )

    def embedding(
        self,
        tokens: Sequence[int],
        *,
        now_s: float,
        pooling: Pooling | None = None,
        normalise: bool = True,
        request_id: str | None = None,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        adapter: str = "",
        deadline_s: float | None = None,
    ) -> Request:
        """A request for the pooled hidden state of a text; `pooling` None is the model's own. Raises RequestError with exact numbers."""
        limits = self.limits
        if pooling is None:
            pooling = limits.pooling
        if pooling not in get_args(Pooling):
            raise RequestError(f"pooling is {pooling!r}; it must be one of {', '.join(get_args(Pooling))}")
        if pooling == "cls" and limits.causal and limits.pooling != "cls":
            raise RequestError(
                "pooling is 'cls', but this model reads from left to right: its first token has seen nothing of the text; "
                "use 'last' or 'mean'"
            )
        text = tuple(self._token(token) for token in tokens)
        if not text:
            raise RequestError("the text is empty; at least one token is needed")
        if len(text) > limits.max_context:
            raise RequestError(
                f"the text has {len(text)} tokens; the limit is {limits.max_context} ({len(text) - limits.max_context} too many)"
            )
        return Request(
            id=request_id or f"{self._prefix}-{next(self._numbers)}",
            tokens=text,
            sampling=SamplingParams(temperature=0.0),
            max_tokens=0,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            adapter=adapter,
            arrived_s=now_s,
            deadline_s=deadline_s,
            pooling=pooling,
            normalise=normalise,
        )

    def check_dimensions(self, dimensions: int | None, *, size: int | None = None) -> None:
        """Raises RequestError unless an embedding of `size` values (None: the model's, if known) can be cut to so many."""
        size = self.limits.embedding_size if size is None else size
        if dimensions is None or isinstance(dimensions, bool) or not isinstance(dimensions, int):
            if dimensions is not None:
                raise RequestError(f"dimensions is {dimensions!r}; it must be a whole number of at least 1")
            return
        if dimensions < 1 or (size is not None and dimensions > size):
            most = "" if size is None else f" to {size}, the size of this model's embeddings"
            raise RequestError(f"dimensions is {dimensions}; it must be a whole number from 1{most}")

    def _token(self, token: object) -> int:
        """A token id as an int, from any integer type (numpy's too). Raises RequestError naming what it is instead."""
        vocab_size = self.limits.vocab_size
        if type(token) is int and 0 <= token < vocab_size:
            return token
        if isinstance(token, SupportsIndex) and not isinstance(token, bool) and 0 <= operator.index(token) < vocab_size:
            return operator.index(token)
        raise RequestError(
            f"prompt token {repr(token)[:40]} is not a token id; the vocabulary has 0 to {vocab_size - 1}"
        )
