"""An Executor whose tokens come from a script, and which checks that the scheduler keeps the contract.

Knows: everything a device must hold (slots, tokens, page tables, page contents), as plain numbers. Refuses to know: how a scheduler
decides.

It is the oracle of every test above the device wing. Its "KV cache" stores, for each page slot, the token and its position. The default
rule reads all visible tokens back *through the page table* and hashes them to the next token, so a page that was given away, shared wrongly
or copied late changes the text:

      slot's page table   [ 7  8  9 ]          store[7] = (tokens 0..3)   store[8] = (tokens 4..7)   store[9] = (8, 9, -, -)
      next token          hash(store[7] + store[8] + store[9][:2])
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tradewind.contract.errors import EngineDeadError
from tradewind.contract.kv import KVGroup
from tradewind.contract.step import (
    Enter,
    Floats,
    Ints,
    RowLogprobs,
    Step,
    StepResult,
    TokenLogprobs,
    Wants,
    frozen_ints,
)
from tradewind.simulate import made_up
from tradewind.simulate.clock import Clock, VirtualClock

Script = Sequence[int] | Callable[[Sequence[int]], int]
"""Exact answer tokens (what comes after them falls back to the rule), or a function of all tokens so far to the next."""

NOTHING = -1
NOBODY = (-1, -1)
"""Stands for the reader of a page that is copied though no slot has it in its table."""


def next_token(visible: Sequence[bytes], *, vocab_size: int, first_token: int = 3) -> int:
    """The default rule: a hash of the tokens each group can see (int32 little endian), in [first_token, vocab_size)."""
    digest = 0
    for part in visible:
        digest = zlib.crc32(part, digest)
    return first_token + digest % (vocab_size - first_token)


def expected_tokens(
    prompt: Sequence[int], count: int, *, groups: Sequence[KVGroup], vocab_size: int = 1 << 30
) -> list[int]:
    """What the default rule answers to a prompt when nothing goes wrong; needs no pages and no scheduler."""
    tokens = np.array(prompt, dtype=np.int32)
    out: list[int] = []
    for _ in range(count):
        visible = [tokens[_first_visible(group, len(tokens) - 1) :].tobytes() for group in groups]
        out.append(next_token(visible, vocab_size=vocab_size))
        tokens = np.append(tokens, np.int32(out[-1]))
    return out


class _Slot:
    """What the device holds for one sequence."""

    def __init__(self, enter: Enter, groups: int) -> None:
        self.enter = enter
        self.tokens: list[int] = enter.tokens.tolist()
        self.computed = 0
        """Highest position whose KV may be read; rows must be contiguous from the first row's start on."""
        self.started = False
        self.first = 0
        """Where its first row began; what is before it was found in the cache."""
        self.tables: list[dict[int, int]] = [{} for _ in range(groups)]

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.enter.prompt_tokens


class ScriptedExecutor:
    """Implements `contract.Executor`. Raises AssertionError, with what and where, when a step breaks the contract.

    `script` maps request ids (or prompts as tuples) to answers. `delay_s` is the time of a step, spent on `clock` at collect. `drafts` are
    accepted by `accept(request_id, position) -> number of right guesses`, and making them takes `draft_s` a step. A row with a grammar that
    draws a token takes `mask_s(request_id)` more. Faults: `die_at` (step number: collect raises EngineDeadError),
    `stall` (step number -> seconds), `fail` ((request id, position) -> reason).
    """

    def __init__(
        self,
        *,
        groups: Sequence[KVGroup],
        pages: Sequence[int],
        max_running: int,
        vocab_size: int = 1 << 30,
        script: Mapping[str | tuple[int, ...], Script] | None = None,
        clock: Clock | None = None,
        delay_s: float | Callable[[Step], float] = 0.0,
        accept: Callable[[str, int], int] | None = None,
        mask_s: Callable[[str], float] | None = None,
        draft_s: float = 0.0,
        die_at: int | None = None,
        stall: Mapping[int, float] | None = None,
        fail: Mapping[tuple[str, int], str] | None = None,
    ) -> None:
        self._groups = tuple(groups)
        self._vocab_size = vocab_size
        self._script = dict(script or {})
        self._clock = clock or VirtualClock()
        self._delay_s = delay_s
        self._accept = accept
        self._mask_s, self._draft_s = mask_s, draft_s
        self._die_at = die_at
        self._stall = dict(stall or {})
        self._fail = dict(fail or {})
        self._slots: list[_Slot | None] = [None] * max_running
        self._token: list[Ints] = [
            np.full((n, g.page_tokens), NOTHING, np.int32) for n, g in zip(pages, groups, strict=True)
        ]
        self._position: list[Ints] = [
            np.full((n, g.page_tokens), NOTHING, np.int32) for n, g in zip(pages, groups, strict=True)
        ]
        self._queue: deque[tuple[StepResult, dict[tuple[int, int], set[tuple[int, int]]]]] = deque()
        self._number = 0
        self.steps: list[Step] = []
        """Every step so far, for tests to look at."""
        self.closed = False

    # -- Executor ----------------------------------------------------------------------------------------------------

    def submit(self, step: Step) -> None:
        assert not self.closed, "submit after close"
        assert step.number == self._number + 1, f"step {step.number} after step {self._number}"
        self._number = step.number
        self.steps.append(step)
        for slot in step.leave:
            assert self._slots[slot] is not None, f"step {step.number}: slot {slot} leaves but nobody is in it"
            self._slots[slot] = None
        for enter in step.enter:
            assert self._slots[enter.slot] is None, f"step {step.number}: slot {enter.slot} is entered while occupied"
            assert len(enter.tokens) <= enter.capacity_tokens
            self._slots[enter.slot] = _Slot(enter, len(self._groups))
        self._edit_tables(step)
        touched: dict[tuple[int, int], set[tuple[int, int]]] = {}
        self._copy_pages(step, touched)
        result = self._rows(step, touched)
        self._queue.append((result, touched))

    def collect(self) -> StepResult:
        assert not self.closed, "collect after close"
        assert self._queue, "collect without a submitted step"
        result, _ = self._queue.popleft()
        delay = self._delay_s(self.steps[result.number - 1]) if callable(self._delay_s) else self._delay_s
        delay += self._stall.get(result.number, 0.0) + result.grammar_s + result.draft_s
        if delay:
            self._clock.sleep(delay)
        if self._die_at is not None and result.number >= self._die_at:
            raise EngineDeadError(f"the scripted device died in step {result.number}")
        return result

    def close(self) -> None:
        self.closed = True

    # -- inside ------------------------------------------------------------------------------------------------------

    def _live(self, slot: int, step: Step) -> _Slot:
        state = self._slots[slot]
        assert state is not None, f"step {step.number}: slot {slot} is empty"
        return state

    def _edit_tables(self, step: Step) -> None:
        for slot, group, index, page in zip(
            step.page_slot.tolist(),
            step.page_group.tolist(),
            step.page_index.tolist(),
            step.page_id.tolist(),
            strict=True,
        ):
            assert 0 <= page < len(self._token[group]), f"step {step.number}: page {page} is outside pool {group}"
            table = self._live(slot, step).tables[group]
            if page:
                table[index] = page
            else:
                table.pop(index, None)

    def _copy_pages(self, step: Step, touched: dict[tuple[int, int], set[tuple[int, int]]]) -> None:
        for move in step.moves:
            assert move.kind == "copy", f"step {step.number}: move {move.kind} is not scripted"
            for source, target in zip(move.source.tolist(), move.target.tolist(), strict=True):
                owners = self._owners(move.group, target)
                assert len(owners) == 1, f"step {step.number}: copy target {target} belongs to slots {sorted(owners)}"
                writer = self._who(owners.pop())
                self._not_flying(step, move.group, target, writer=writer)
                touched.setdefault((move.group, target), set()).add(writer)
                self._token[move.group][target] = self._token[move.group][source]
                self._position[move.group][target] = self._position[move.group][source]
                readers = {self._who(slot) for slot in self._owners(move.group, source)} or {NOBODY}
                touched.setdefault((move.group, source), set()).update(readers)

    def _owners(self, group: int, page: int) -> set[int]:
        return {
            slot for slot, state in enumerate(self._slots) if state is not None and page in state.tables[group].values()
        }

    def _who(self, slot: int) -> tuple[int, int]:
        state = self._slots[slot]
        assert state is not None
        return slot, state.enter.epoch

    def _not_flying(self, step: Step, group: int, page: int, *, writer: tuple[int, int]) -> None:
        for result, touched in self._queue:
            others = touched.get((group, page), set()) - {writer}
            assert not others, (
                f"step {step.number}: slot {writer[0]} writes page {page} of group {group}, "
                f"which step {result.number} still uses for {sorted(others)}"
            )

    def _rows(self, step: Step, touched: dict[tuple[int, int], set[tuple[int, int]]]) -> StepResult:
        owners: list[dict[int, set[int]]] = [{} for _ in self._groups]
        for slot, state in enumerate(self._slots):
            if state is not None:
                for group, table in enumerate(state.tables):
                    for page in table.values():
                        owners[group].setdefault(page, set()).add(slot)
        slots = step.slot.tolist()
        assert len(set(slots)) == len(slots), f"step {step.number}: a slot has two rows"
        tokens: list[int] = []
        offset = [0]
        logprobs: dict[int, RowLogprobs] = {}
        failed: dict[int, str] = {}
        hidden: dict[int, Floats] = {}
        masks: dict[int, float] = {}
        for row, slot in enumerate(slots):
            where = f"step {step.number}, row {row}, slot {slot}"
            state = self._live(slot, step)
            start, count, drafts = int(step.start[row]), int(step.count[row]), int(step.drafts[row])
            wants = Wants(int(step.wants[row]))
            assert state.enter.epoch == step.epoch[row], (
                f"{where}: epoch {step.epoch[row]}, entered as {state.enter.epoch}"
            )
            assert count >= 1 and 0 <= drafts < count, f"{where}: count {count}, drafts {drafts}"
            known = len(state.tokens)
            assert start == state.computed or not state.started, (
                f"{where}: starts at {start}, computed {state.computed}"
            )
            guesses = self._guess(state, drafts)
            assert start + count - drafts <= known, f"{where}: reaches {start + count}, known are {known} tokens"
            if drafts:
                assert start + count - drafts == known, f"{where}: guesses do not follow the last token"
            assert start + count < state.enter.capacity_tokens + 1, f"{where}: beyond its capacity"
            if not state.started:
                state.first = start
            state.started = True
            self._write(step, where, slot, state, start, count, guesses, owners, touched)
            state.computed = start + count
            if wants in (Wants.HIDDEN, Wants.HIDDEN_PART):
                assert state.enter.pooling is not None, f"{where}: wants hidden states that nobody asked for"
                assert (start + count == state.enter.prompt_tokens) == (wants == Wants.HIDDEN), (
                    f"{where}: {wants!r} at {start + count}"
                )
                if wants == Wants.HIDDEN:
                    self._pooled(where, state, start)
                    hidden[row] = made_up.embedding(state.enter)
            else:
                assert state.enter.pooling is None, f"{where}: a prompt to be pooled, and hidden states are not wanted"
            reason = self._fail.get((state.enter.request_id, start))
            out: list[int] = []
            if reason is not None:
                failed[row] = reason
                if wants in (Wants.LAST, Wants.ALL):
                    state.tokens.append(0)  # a row of this slot may fly already; whatever it brings is dropped
                    state.computed = len(state.tokens) - 1
            elif wants in (Wants.LAST, Wants.ALL):
                assert start + count - drafts == known, f"{where}: wants a token in the middle of its prompt"
                out = self._sample(where, slot, state, start + count - drafts, guesses, touched)
                if self._mask_s is not None and state.enter.grammar is not None:
                    masks[row] = self._mask_s(state.enter.request_id)
                state.tokens.extend(out)
                state.computed = start + count - drafts + len(out) - 1
            else:
                assert start + count <= known, f"{where}: wants nothing but guesses"
            tokens.extend(out)
            offset.append(len(tokens))
            spoken = self._logprobs(state, start, count, out, wants)
            if spoken is not None and reason is None:
                logprobs[row] = spoken
        return StepResult(
            number=step.number,
            slot=step.slot,
            epoch=step.epoch,
            offset=frozen_ints(offset),
            tokens=frozen_ints(tokens),
            logprobs=logprobs,
            hidden={row: vector for row, vector in hidden.items() if row not in failed},
            failed=failed,
            grammar_s=sum(masks.values()),
            grammar_rows=masks,
            draft_s=self._draft_s if step.drafts.any() else 0.0,
        )

    def _pooled(self, where: str, state: _Slot, start: int) -> None:
        """What must hold when a prompt that is pooled ends: nothing but "last" may have been taken from the cache."""
        for group, record in enumerate(self._groups):
            if record.window is None:
                self._read(where, state, group, state.enter.prompt_tokens - 1)
        assert state.enter.pooling == "last" or state.first == 0, (
            f"{where}: {state.enter.pooling} pooling, but the first row began at {state.first}"
        )

    def _write(
        self,
        step: Step,
        where: str,
        slot: int,
        state: _Slot,
        start: int,
        count: int,
        guesses: list[int],
        owners: list[dict[int, set[int]]],
        touched: dict[tuple[int, int], set[tuple[int, int]]],
    ) -> None:
        known = [*state.tokens, *guesses]
        who = (slot, state.enter.epoch)
        for group, record in enumerate(self._groups):
            table = state.tables[group]
            for index in range(start // record.page_tokens, (start + count - 1) // record.page_tokens + 1):
                page = table.get(index, 0)
                assert page, f"{where}: writes page {index} of group {group}, which is null"
                others = owners[group][page] - {slot}
                assert not others, (
                    f"{where}: writes page {page} of group {group}, which slots {sorted(others)} have too"
                )
                self._not_flying(step, group, page, writer=who)
                touched.setdefault((group, page), set()).add(who)
                first = index * record.page_tokens
                begin, end = max(start, first), min(start + count, first + record.page_tokens)
                self._token[group][page, begin - first : end - first] = known[begin:end]
                self._position[group][page, begin - first : end - first] = range(begin, end)
            # What the row reads: from the first position its first token sees.
            for index in range(_first_visible(record, start) // record.page_tokens, start // record.page_tokens):
                page = table.get(index, 0)
                assert page, f"{where}: reads page {index} of group {group}, which is null"
                touched.setdefault((group, page), set()).add(who)

    def _read(self, where: str, state: _Slot, group: int, last: int) -> bytes:
        """The tokens that position `last` sees in a group, through the page table."""
        record = self._groups[group]
        size = record.page_tokens
        first = _first_visible(record, last)
        pages = [state.tables[group].get(index, 0) for index in range(first // size, last // size + 1)]
        assert all(pages), f"{where}: reads a null page of group {group}"
        begin, end = first % size, last - first // size * size + 1
        positions = self._position[group][pages].reshape(-1)[begin:end]
        assert np.array_equal(positions, np.arange(first, last + 1)), (
            f"{where}: group {group} holds positions {_short(positions)} where {first}..{last} should be"
        )
        return self._token[group][pages].reshape(-1)[begin:end].tobytes()

    def _sample(
        self,
        where: str,
        slot: int,
        state: _Slot,
        length: int,
        guesses: list[int],
        touched: dict[tuple[int, int], set[tuple[int, int]]],
    ) -> list[int]:
        """The next token after position length - 1, and one more for each guess that was right."""
        out: list[int] = []
        for place in range(len(guesses) + 1):
            out.append(self._next(where, state, length - 1 + place))
            if place < len(guesses) and guesses[place] != out[-1]:
                break
        return out

    def _guess(self, state: _Slot, drafts: int) -> list[int]:
        """Guesses of which `accept` says how many are right."""
        if not drafts:
            return []
        right = self._accept(state.enter.request_id, len(state.tokens)) if self._accept else 0
        tokens = np.array(state.tokens, dtype=np.int32)
        guesses: list[int] = []
        for place in range(drafts):
            truth = self._answer(
                state, len(tokens), [tokens[_first_visible(g, len(tokens) - 1) :].tobytes() for g in self._groups]
            )
            guesses.append(truth if place < right else truth ^ 1)
            tokens = np.append(tokens, np.int32(guesses[-1]))
        return guesses

    def _next(self, where: str, state: _Slot, last: int) -> int:
        visible = [self._read(where, state, group, last) for group in range(len(self._groups))]
        return self._answer(state, last + 1, visible)

    def _answer(self, state: _Slot, position: int, visible: Sequence[bytes]) -> int:
        enter = state.enter
        script = self._script.get(enter.request_id)
        if script is None and self._script:
            script = self._script.get(tuple(state.tokens[: enter.prompt_tokens]))
        if callable(script):
            return script(state.tokens[:position])
        at = position - enter.prompt_tokens
        if script is not None and at < len(script):
            return script[at]
        return next_token(visible, vocab_size=self._vocab_size)

    def _logprobs(self, state: _Slot, start: int, count: int, out: list[int], wants: Wants) -> RowLogprobs | None:
        sampling = state.enter.sampling
        sampled: tuple[TokenLogprobs, ...] = ()
        prompt: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None and out:
            sampled = tuple(self._spoken(token, sampling.logprobs) for token in out)
        if sampling.prompt_logprobs is not None and wants in (Wants.ALL, Wants.ALL_NO_SAMPLE):
            last = min(start + count + 1, state.enter.prompt_tokens)
            prompt = tuple(self._spoken(token, sampling.prompt_logprobs) for token in state.tokens[start + 1 : last])
        return RowLogprobs(sampled=sampled, prompt=prompt) if sampled or prompt else None

    def _spoken(self, token: int, best: int) -> TokenLogprobs:
        """Made-up but fixed logprobs: the token itself is the likeliest."""
        ids = tuple((token + i) % self._vocab_size for i in range(best))
        return TokenLogprobs(
            token=token, logprob=-0.5, rank=1, top_ids=ids, top_logprobs=tuple(-0.5 - i for i in range(best))
        )


def _first_visible(group: KVGroup, position: int) -> int:
    """The first position that a token reads in a group."""
    if group.window is None:
        return 0
    return position - position % group.window if group.kind == "chunk" else max(0, position - group.window + 1)


def _short(values: Ints) -> str:
    shown = ", ".join(map(str, values[:24].tolist()))
    return f"[{shown}{', ...' if len(values) > 24 else ''}]"
