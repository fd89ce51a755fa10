"""Grammars compiled beside the engine: text -> matcher, in threads of its own.

Knows: llguidance (imported when the first grammar comes), its limits, and which compiled grammars are kept.
Refuses to know: JSON schemas and tools (serving/structured.py writes one text for all of them), slots and steps (grammar.py).

Compiling is lazy in llguidance: a compilation takes about a millisecond, and what a grammar's size can cost later, lexer states and
parser items, is bounded per mask. The threads here are for the few that take longer, and for the tokenizer's trie at the first grammar.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tradewind.contract.errors import MissingExtraError, RequestError, UserError
from tradewind.contract.grammar import LIMITS, Grammar, decode_grammar

THREADS = 2
"""More would only take turns with the model's own threads."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What a matcher must know of the tokenizer."""

    tokens: Sequence[bytes]
    """By id, the bytes that the detokenizer makes of it."""
    special_ids: frozenset[int]
    """Ids that are no text: a grammar can name them, but no text of a grammar matches them."""
    eos_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A grammar ready for use. Never changed: `fresh` copies."""

    grammar: Grammar
    base: Any
    eos_ids: tuple[int, ...]
    blank: np.ndarray
    """Token bitmask, uint32: tokens that are nothing but white space."""
    tokens: Sequence[bytes]

    def fresh(self) -> Any:
        """A matcher (llguidance.LLMatcher) at the beginning of the answer."""
        return self.base.deep_copy()


class _Entry:
    __slots__ = ("began_s", "compiled", "error", "uses")

    def __init__(self, began_s: float) -> None:
        self.began_s, self.uses = began_s, 0
        self.compiled: Compiled | None = None
        self.error: str | None = None


class GrammarCompiler:
    """contract.GrammarGate. Keeps the `entries` used last; more only while requests hold them."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        *,
        vocab_size: int,
        timeout_s: float = 5.0,
        entries: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`vocabulary` is called once, in a thread, with the first grammar. `vocab_size`: of the model's logits."""
        self.vocab_size = vocab_size
        self._vocabulary = vocabulary
        self._timeout_s, self._limit, self._clock = timeout_s, entries, clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._done = threading.Condition(self._lock)
        self._pool: ThreadPoolExecutor | None = None
        self._tables_lock = threading.Lock()
        self._tables: tuple[Vocabulary, Any, np.ndarray] | None = None
        self.compile_s: list[float] = []
        """How long the latest compilations took, at most 256 of them."""

    # -- GrammarGate -------------------------------------------------------------------------------------------------

    def open(self, text: str) -> None:
        """See GrammarGate."""
        with self._lock:
            entry = self._entries.get(text)
            if entry is None or (entry.error is not None and not entry.uses):  # a failure may have been a busy moment
                entry = self._entries[text] = _Entry(self._clock())
                self._threads().submit(self._compile_entry, text, entry)
            entry.uses += 1
            self._entries.move_to_end(text)
            self._trim()

    def ready(self, text: str) -> bool:
        """See GrammarGate."""
        with self._lock:
            entry = self._entries[text]
            if entry.compiled is not None:
                return True
            if entry.error is None and self._clock() - entry.began_s > self._timeout_s:
                entry.error = f"the grammar was not compiled within {self._timeout_s:g} s: make it simpler"
            if entry.error is not None:
                raise RequestError(entry.error)
            return False

    def close(self, text: str) -> None:
        """See GrammarGate."""
        with self._lock:
            entry = self._entries.get(text)
            if entry is not None and entry.uses:
                entry.uses -= 1
            self._trim()

    def wait(self, timeout_s: float) -> None:
        """See GrammarGate."""
        with self._done:
            self._done.wait(timeout_s)

    # -- for the runner ----------------------------------------------------------------------------------------------

    def compiled(self, text: str) -> Compiled:
        """A compiled grammar; compiles it here when nobody opened it. Raises RequestError or MissingExtraError."""
        with self._lock:
            entry = self._entries.get(text)
            if entry is not None and entry.compiled is not None:
                return entry.compiled
        return self._compile(text)

    def warm(self) -> Future[object]:
        """Builds what all grammars share (the tokenizer's trie, 0.1 to 0.5 s) in a thread, before the first grammar needs it.

        The future ends with it, or with the error that the first grammar will get.
        """
        with self._lock:
            return cast("Future[object]", self._threads().submit(self._shared))

    def shut(self) -> None:
        """Ends the threads after what they do now; what was queued is dropped. Safe to call twice."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tradewind-grammar")
        return self._pool

    def _trim(self) -> None:
        """Forgets the oldest that nobody holds."""
        if len(self._entries) <= self._limit:
            return
        for text in [text for text, entry in self._entries.items() if not entry.uses]:
            del self._entries[text]
            if len(self._entries) <= self._limit:
                return

    def _compile_entry(self, text: str, entry: _Entry) -> None:
        compiled, error = None, None
        try:
            compiled = self._compile(text)
        except UserError as refused:
            error = str(refused)
        except Exception as bug:  # told to the one request that needs it; the thread serves the next
            error = f"the grammar could not be compiled: {type(bug).__name__}: {bug}"
        with self._done:
            entry.compiled = compiled
            entry.error = entry.error if compiled is None and entry.error else error
            self._done.notify_all()

    def _compile(self, text: str) -> Compiled:
        grammar = decode_grammar(text)
        vocabulary, tokenizer, blank = self._shared()
        import llguidance

        began = time.perf_counter()
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(tokenizer, grammar.text, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(f"the {grammar.kind} is refused: {first_line(matcher.get_error())}")
        # The first mask builds the first lexer states, which every copy then has; and it shows a language without words.
        first = np.zeros(words(tokenizer.vocab_size), np.uint32)
        probe = matcher.deep_copy()
        probe.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
        if probe.is_error():
            raise RequestError(f"the {grammar.kind} is too complex: {first_line(probe.get_error())}")
        for token in vocabulary.eos_ids:
            first[token // 32] &= ~np.uint32(1 << token % 32)
        if not first.any():
            raise RequestError(f"the {grammar.kind} allows no answer at all (or only an empty one)")
        self.compile_s = [*self.compile_s[-255:], time.perf_counter() - began]
        return Compiled(
            grammar=grammar, base=matcher, eos_ids=vocabulary.eos_ids, blank=blank, tokens=vocabulary.tokens
        )

    def _shared(self) -> tuple[Vocabulary, Any, np.ndarray]:
        with self._tables_lock:
            if self._tables is None:
                self._tables = self._build()
            return self._tables

    def _build(self) -> tuple[Vocabulary, Any, np.ndarray]:
        try:
            import llguidance
        except ImportError:
            raise MissingExtraError(package="llguidance", extra="structured", purpose="structured output") from None
        vocabulary = self._vocabulary()
        tokenizer = llguidance.LLTokenizer(
            cast("Any", _Wrapper(vocabulary)),
            n_vocab=max(self.vocab_size, len(vocabulary.tokens)),
            eos_token=list(vocabulary.eos_ids) or None,
        )
        blank = np.zeros(words(tokenizer.vocab_size), np.uint32)
        for token, spelled in enumerate(vocabulary.tokens):
            if spelled and token not in vocabulary.special_ids and not spelled.strip(b" \t\r\n"):
                blank[token // 32] |= np.uint32(1 << token % 32)
        return vocabulary, tokenizer, blank


class _Wrapper:
    """A vocabulary as llguidance's LLTokenizer reads one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        # An end-of-text token that is spelled like a text must not be taken for it.
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.eos_ids})
        self.eos_token_id = vocabulary.eos_ids[0] if vocabulary.eos_ids else len(self.tokens) - 1
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def words(vocab_size: int) -> int:
    """32-bit words of a token bitmask."""
    return -(-vocab_size // 32)


def first_line(message: str) -> str:
    """The first line of a library's message, without what is drawn under it."""
    for line in message.splitlines():
        if line.strip():
            return line.strip()[:300]
    return "no reason was given"
