"""What one request asks for: tokens in, how to choose tokens out, and when to stop.

Knows: the meaning and legal range of every sampling value. Refuses to know: text (serving) and scheduling (engine).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from tradewind.contract.errors import RequestError
from tradewind.contract.image import Image

MAX_LOGPROBS = 20
MAX_TOP_K = 1 << 20

Pooling = Literal["last", "mean", "cls"]
"""How the final hidden states of a prompt become one vector: the last token's, the mean of all, the first token's."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the next token is chosen. Defaults are the model's own distribution; `temperature=0` is greedy.

    Order of operations: logit bias and bad words, then repetition / presence / frequency penalties, then temperature, then top-k,
    top-p and min-p on the tempered distribution, then one draw keyed by (seed, position). Logprobs are of the raw logits.
    """

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL, Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Presence and frequency count generated tokens only, as in the OpenAI API."""
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed."""
    seed: int | None = None
    """None draws a fresh seed when the request is made, so that n requests differ."""
    max_tokens: int | None = None
    """None means up to the context limit."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none. k >= 0: the chosen token's logprob and the k best."""
    prompt_logprobs: int | None = None
    n: int = 1

    def check(self, *, vocab_size: int) -> None:
        """Raises RequestError naming the first value that is out of range; changes nothing."""
        for name, low, high, what in (
            ("temperature", 0.0, 100.0, "a number from 0 (greedy) to 100"),
            ("top_p", 0.0, 1.0, "a number in (0, 1]"),
            ("min_p", 0.0, 1.0, "a number from 0 to 1"),
            ("repetition_penalty", 0.01, 100.0, "a number from 0.01 to 100"),
            ("presence_penalty", -2.0, 2.0, "a number from -2 to 2"),
            ("frequency_penalty", -2.0, 2.0, "a number from -2 to 2"),
        ):
            value = getattr(self, name)
            ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not ok or not low <= value <= high or (name == "top_p" and value == 0):
                raise RequestError(f"{name} is {value!r}; it must be {what}")
        for name, low_int, high_int in (
            ("top_k", 0, MAX_TOP_K),
            ("min_tokens", 0, 1 << 31),
            ("n", 1, 128),
            ("seed", -(1 << 63), (1 << 64) - 1),
            ("max_tokens", 1, 1 << 31),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            if value is None and name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not low_int <= value <= high_int:
                raise RequestError(f"{name} is {value!r}; it must be a whole number from {low_int} to {high_int}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, over max_tokens {self.max_tokens}")
        if any(not isinstance(s, str) or not s for s in self.stop):
            raise RequestError("a stop string is empty or not text")
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise RequestError(f"logit_bias names token {token}; the vocabulary has 0 to {vocab_size - 1}")
            if not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise RequestError(f"logit_bias of token {token} is {bias!r}; it must be a number from -100 to 100")
        for token in (*self.stop_token_ids, *(t for word in self.bad_words for t in word)):
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RequestError(f"token id {token!r} is outside the vocabulary, 0 to {vocab_size - 1}")
        if any(not word for word in self.bad_words):
            raise RequestError("a bad word is empty")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt to be continued, frozen from the client on. Tokens, never text."""

    id: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    """Resolved: sampling.max_tokens cut to the context limit; 0 when `pooling` is asked, for then nothing is generated."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end the answer unless sampling.ignore_eos."""
    seed: int = 0
    """Resolved: never None. Sample i of n uses its own Request with a seed derived from it."""
    priority: int = 0
    """Lower is served sooner (as in vLLM); 0 is normal."""
    tenant: str = ""
    traffic_class: str = ""
    """Which of the plan's classes of traffic it belongs to, and so which targets it has; empty: none."""
    cache_salt: str = ""
    adapter: str = ""
    grammar: str | None = None
    image_keys: tuple[tuple[int, int, str], ...] = ()
    """(first token, token count, content hash) of each image: part of the prefix-cache key."""
    images: tuple[Image, ...] = ()
    """In the order of their tokens; `image_keys` says the same of them without pixels."""
    arrived_s: float = 0.0
    deadline_s: float | None = None
    pooling: Pooling | None = None
    """Asks for one vector instead of tokens: the request ends when its prompt is computed, and its last event carries the vector."""
    normalise: bool = True
    """Whether that vector is divided by its length."""
    parent: str | None = None
    """Samples 2..n of one prompt name the first, so that the scheduler lets them share its pages."""
