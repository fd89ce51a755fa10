"""One matcher per constrained slot: which tokens may come next.

Knows: when a mask is computed and where it lies. Refuses to know: how a grammar is compiled, and how a token is drawn.

A row cannot be sampled before the token before it is known, and that is all a mask depends on. Steps run in order on one rank, so the
token of step N is known long before the sampler of step N + 1 wants the mask:

      runner      | forward N | sample N | advance |  forward N + 1                | sample N + 1
      mask thread                        | masks of the rows that got a token  |   ^ waits here, as a rule not at all

So the scheduler needs to know nothing of masks: steps overlap as ever. What it is told is when a grammar is complete.

      thinking          everything but the end of text, until the token that ends reasoning; no matcher runs
      matching          what the matcher allows
      complete, over    nothing more can follow, or an end-of-text token came: the row is about to leave
      failed            the row ends with a reason; the engine goes on
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from tradewind.contract.errors import UserError
from tradewind.contract.step import Enter, Ints
from tradewind.sampling.grammar_compile import Compiled, GrammarCompiler, first_line, words

Bits = npt.NDArray[np.uint32]

BLANKS_FREE = 48
"""So many tokens of nothing but white space cost nothing; past them they must stay fewer than the others."""
ALONE = 4
"""From so many rows on, masks of one step are computed by several threads."""
SLOW_S = 0.001
"""When those took longer, one of the next ones, each row's in turn, is computed by itself: so it is known whose are slow."""


class _Held:
    """One slot's constraint and how far its answer is. Written by the runner; its matcher by the mask thread while `masks` may wait."""

    __slots__ = (
        "blanks", "compiled", "complete", "cost_s", "error", "fresh", "matcher", "others", "over", "stops", "thinking", "usual_s",
    )  # fmt: skip

    def __init__(self, compiled: Compiled | None, *, stops: Sequence[int], error: str | None = None) -> None:
        self.compiled = compiled
        self.matcher: Any = None if compiled is None else compiled.fresh()
        self.stops = tuple(stops)
        self.error = error
        self.thinking = compiled is not None and compiled.grammar.thinking
        self.fresh = True
        """No token yet: reasoning may begin."""
        self.complete = self.over = False
        self.blanks = self.others = 0
        self.cost_s = 0.0
        """What its next mask took the mask thread ..."""
        self.usual_s = 1e-6
        """... and what the last one that was computed by itself took."""

    @property
    def masked(self) -> bool:
        return self.error is None and not self.complete and not self.over

    def take(self, token: int) -> None:
        """Goes on by one token that was sampled; sets `complete`, `over` or `error` when it was the last."""
        if not self.masked:
            return
        compiled = self.compiled
        assert compiled is not None
        grammar = compiled.grammar
        fresh, self.fresh = self.fresh, False
        if self.thinking:
            self.thinking = token != grammar.end
        elif fresh and token == grammar.begin:
            self.thinking = True
        elif token in self.stops:
            self.over = True
        elif token in compiled.eos_ids and self.matcher.is_accepting():
            self.complete = True  # the request ignores the end of text, but there was nothing else
        elif not self.matcher.consume_token(token):
            self.error = f"the grammar stopped: {first_line(self.matcher.get_error())}"
        else:
            if compiled.blank[token // 32] >> np.uint32(token % 32) & np.uint32(1):
                self.blanks += 1
            else:
                self.others += 1
            if self.matcher.is_stopped():
                if self.matcher.is_error():
                    self.error = f"the grammar became too complex: {first_line(self.matcher.get_error())}"
                self.complete = True

    @property
    def flooded(self) -> bool:
        """Whether white space was so much that no more is let in; stays so."""
        assert self.compiled is not None
        return self.compiled.grammar.spare_blanks and self.blanks > BLANKS_FREE and self.blanks > self.others


class GrammarSlots:
    """Matchers and masks of all slots. Called by the runner's thread; has one thread of its own, started with the first grammar."""

    def __init__(self, *, compiler: GrammarCompiler, slots: int, rows: int) -> None:
        """`rows`: most rows that are sampled at once."""
        self._compiler = compiler
        self._width = words(compiler.vocab_size)
        self._held: dict[int, _Held] = {}
        self._slots, self._rows = slots, rows
        self._table: Bits | None = None
        self._gathered: Bits | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._team: Any = None
        self._running: Future[None] | None = None
        self._spent_s = 0.0
        self._costs: dict[int, float] = {}
        """By slot, what the masks handed out since `spent` was asked had cost the mask thread."""
        self._slow, self._turn = False, 0
        """Of the mask thread, see SLOW_S."""

    def enter(self, enter: Enter) -> None:
        """A sequence takes a slot: its matcher is brought to where its generated tokens end. Never raises for a bad grammar."""
        self._held.pop(enter.slot, None)
        if enter.grammar is None:
            return
        began = perf_counter()
        try:
            held = _Held(self._compiler.compiled(enter.grammar), stops=enter.eos_ids)
        except UserError as refused:
            held = _Held(None, stops=(), error=str(refused))
        for token in map(int, enter.tokens[enter.prompt_tokens :]):
            held.take(token)
        self._held[enter.slot] = held
        self._compute([enter.slot])
        self._spent_s += perf_counter() - began

    def leave(self, slot: int) -> None:
        """The slot's constraint is over."""
        if self._held.pop(slot, None) is not None:
            self._settle()  # the mask thread may be writing its row

    def masks(self, slot: Ints) -> tuple[Bits | None, dict[int, str]]:
        """The bitmasks [L, ceil(V / 32)] of the rows that sample, None when none is constrained; and the rows that cannot go on.

        Waits for the mask thread. The array is used again by the next call.
        """
        if not self._held:
            return None, {}
        held = {row: self._held[s] for row, s in enumerate(map(int, slot)) if s in self._held}
        if not held:
            return None, {}
        began = perf_counter()
        self._settle()
        failed = {row: one.error for row, one in held.items() if one.error is not None}
        if self._gathered is None:
            self._gathered = np.zeros((self._rows, self._width), np.uint32)
        bits = self._gathered[: len(slot)]
        bits.fill(0xFFFFFFFF)
        for row, one in held.items():
            if one.masked and self._table is not None:
                bits[row] = self._table[slot[row], : self._width]
            self._costs[int(slot[row])], one.cost_s = one.cost_s, 0.0
        self._spent_s += perf_counter() - began
        return bits, failed

    def advance(self, slot: Ints, tokens: Ints) -> list[int]:
        """Takes the tokens just sampled and begins with the next masks; the places in `slot` whose grammar is complete."""
        if not self._held:
            return []
        began = perf_counter()
        self._settle()
        complete: list[int] = []
        going: list[int] = []
        for place, (s, token) in enumerate(zip(map(int, slot), map(int, tokens), strict=True)):
            held = self._held.get(s)
            if held is None:
                continue
            held.take(token)
            if held.masked:
                going.append(s)
            elif held.complete and held.error is None:
                complete.append(place)
        if going:
            self._compute(going)
        self._spent_s += perf_counter() - began
        return complete

    def spent(self, slot: Ints) -> tuple[float, dict[int, float]]:
        """How long the runner was held up here since the last call, and by row of `slot` that row's part of it; begins to count anew.

        Parts are as what the rows' masks had cost, wherever that was computed.
        """
        seconds, costs = self._spent_s, self._costs
        if not costs:  # entered, and nothing drawn yet: the step that draws first bears it
            return 0.0, {}
        self._spent_s, self._costs = 0.0, {}
        rows = [int(row) for row in np.flatnonzero(np.isin(slot, list(costs)))]
        parts = [costs[int(slot[row])] for row in rows]
        total_s = sum(parts)
        if total_s <= 0:
            return seconds, dict.fromkeys(rows, seconds / len(rows)) if rows else {}
        return seconds, {row: seconds * part / total_s for row, part in zip(rows, parts, strict=True)}

    def constrained(self, slot: int) -> bool:
        """Whether a slot's next token must obey a grammar."""
        return slot in self._held

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    # -- masks -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Waits until no mask is being computed."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _compute(self, slots: list[int]) -> None:
        """Begins with the masks of these slots, in the mask thread, after those begun before."""
        work = [(slot, held) for slot in slots if (held := self._held[slot]).masked]
        if not work:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="tradewind-masks")
        if self._table is None:  # as wide as the tokenizer: its vocabulary may be larger than the model's
            compiled = work[0][1].compiled
            assert compiled is not None
            self._table = np.zeros((self._slots, len(compiled.blank)), np.uint32)
        before = self._running
        self._running = self._thread.submit(self._fill, self._table, work, before)

    def _fill(self, table: Bits, work: list[tuple[int, _Held]], before: Future[None] | None) -> None:
        """In the mask thread: writes the rows' masks into the table."""
        if before is not None:
            before.result()  # one thread, so it is done: this passes its error on
        matching = [(slot, held) for slot, held in work if not held.thinking]
        row_bytes = table.strides[0]
        if len(matching) < ALONE:
            for slot, held in matching:
                began = perf_counter()
                held.matcher.unsafe_compute_mask_ptr(table[slot].ctypes.data, row_bytes)
                held.usual_s = perf_counter() - began
                held.cost_s += held.usual_s
        else:
            if self._team is None:
                import llguidance

                self._team = llguidance.LLExecutor()
            began = perf_counter()
            together = matching
            if self._slow:
                self._turn = (self._turn + 1) % len(matching)
                slot, alone = matching[self._turn]
                together = matching[: self._turn] + matching[self._turn + 1 :]
                alone.matcher.unsafe_compute_mask_ptr(table[slot].ctypes.data, row_bytes)
                alone.usual_s = perf_counter() - began
            pairs = [(held.matcher, slot) for slot, held in together]
            self._team.unsafe_compute_mask_ptr(pairs, table.ctypes.data, row_bytes, len(table))
            took_s = perf_counter() - began
            self._slow = took_s > SLOW_S
            usual_s = sum(held.usual_s for _, held in matching)
            for _, held in matching:
                held.cost_s += took_s * held.usual_s / usual_s
        for slot, held in work:
            self._finish(table[slot], held)

    def _finish(self, bits: Bits, held: _Held) -> None:
        """Makes a matcher's mask the row's: end of text as this request has it, reasoning, white space; finds rows without a way out."""
        compiled = held.compiled
        assert compiled is not None
        if held.thinking:
            bits.fill(0xFFFFFFFF)
            _set(bits, (*held.stops, *compiled.eos_ids), False)
            return
        if held.matcher.is_error():
            held.error = f"the grammar became too complex: {first_line(held.matcher.get_error())}"
            return
        if held.flooded:
            without = bits & ~compiled.blank
            if without.any():
                bits[:] = without
        if held.matcher.is_accepting():
            _set(bits, compiled.eos_ids, False)
            ends = held.stops or (() if bits.any() else compiled.eos_ids)
            _set(bits, ends, True)
        if held.fresh and compiled.grammar.begin is not None:
            _set(bits, (compiled.grammar.begin,), True)
        if not bits.any():
            held.error = "the grammar allows no token of this vocabulary here"


def _set(bits: Bits, tokens: Sequence[int], to: bool) -> None:
    for token in tokens:
        word, bit = token // 32, np.uint32(1 << token % 32)
        if word < len(bits):
            bits[word] = bits[word] | bit if to else bits[word] & ~bit
