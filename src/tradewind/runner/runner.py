"""What one rank does with a step: Step in, StepResult out.

Knows: the order of a step (slots, moves, forward, head, sample) and the tape. Refuses to know: why rows were chosen, and text.

    step -> slots <- leave, enter, pages
            arrays <- ids, positions, write slots, row tables       device/layout.py
            page copies (copy-on-write)
            tape.run()   or   model.body(batch)                     the bulk
            model.ending and head over rows that want logits, in groups of `head_rows`
            grammar masks, logprobs, sample, token -> slot          -> result
            pooling of hidden states                                runner/pooling.py

Where few of a step's tokens want logits, what follows the last layer's attention is computed for those alone: of a prompt one token. Where
most do, or hidden states are wanted, `model.forward` computes it for all (`_wide`).

Which thread calls is the executor's business (runner/executor.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from tradewind.contract.kv import KVGroup
from tradewind.contract.step import Floats, Ints, RowLogprobs, Step, StepResult, TokenLogprobs, Wants
from tradewind.device.batch import ForwardBatch, Scratch
from tradewind.device.layout import StepArrays, lay_out
from tradewind.device.slots import Slots
from tradewind.kernels.ops import KVLayer, Ops, PagedRows, Tensor
from tradewind.models.registry import Model
from tradewind.runner.adapters import AdapterSlots
from tradewind.runner.encoder import ImageSlots
from tradewind.runner.pooling import PoolingSlots
from tradewind.sampling.columns import SlotSampling
from tradewind.sampling.grammar import GrammarSlots
from tradewind.sampling.grammar_compile import GrammarCompiler
from tradewind.sampling.logprobs import LogprobArrays

NOT_FINITE = "the model's logits are not finite"
NO_TOKEN = "no token is left: the grammar's next ones are all forbidden by bad_words or min_tokens, or the logits are not finite"


class Recorder(Protocol):
    """A recorded sequence of op calls."""

    def run(self) -> None: ...


class StepRunner:
    """Executes steps one after another. Owner of slots, KV memory and scratch. Called by one thread at a time."""

    def __init__(
        self,
        *,
        model: Model,
        ops: Ops,
        groups: tuple[KVGroup, ...],
        kv: tuple[KVLayer, ...],
        max_running: int,
        max_tokens_per_step: int,
        max_context: int,
        vocab_size: int,
        hidden: int,
        tape: bool,
        head_rows: int = 32,
        grammars: GrammarCompiler | None = None,
        adapters: AdapterSlots | None = None,
        images: ImageSlots | None = None,
    ) -> None:
        self._adapters, self._images = adapters, images
        self._model, self._ops, self._kv, self._groups = model, ops, kv, groups
        self._head_rows = head_rows
        self._capacity = max_tokens_per_step
        self._slots = Slots(slots=max_running, max_context=max_context, groups=groups)
        self._sampling = SlotSampling(slots=self._slots, rows=head_rows)
        self._grammar: GrammarSlots | None = None
        if grammars is not None:
            assert grammars.vocab_size == vocab_size, (grammars.vocab_size, vocab_size)
            self._grammar = GrammarSlots(compiler=grammars, slots=max_running, rows=head_rows)
        self._pooling = PoolingSlots()
        self._arrays = StepArrays.allocate(capacity=max_tokens_per_step, rows=max_running, slots=self._slots)
        self._batch = self._forward_batch()
        self._want_tape = tape
        self._tapes: dict[str, Recorder] = {}
        """By name of what they record."""
        self._wide = True
        """Whether this step's hidden states are computed for all tokens."""
        self._hidden: Tensor = None
        self._stream: Tensor = None
        self._mixed: Tensor = None
        # The head's own arrays: which hidden rows, how many, and what comes out.
        self._head_count = np.zeros(1, np.int32)
        self._head_index = ops.constant(np.zeros(head_rows, np.int32))
        self._head_index_host = ops.host(self._head_index)
        self._head_hidden = ops.empty((head_rows, hidden), "f32")
        self._head_mixed: Tensor = None
        # The rows of the ending: scratch memory and adapters are their own, all else of the batch it does not read.
        self._head_batch = replace(
            self._batch,
            capacity=head_rows,
            tokens=self._head_count,
            scratch=Scratch(ops),
            adapters=None if adapters is None else ops.constant(np.full(head_rows, -1, np.int32)),
        )
        self._logits = ops.empty((head_rows, vocab_size), "f32")
        self._sampled = ops.constant(np.zeros(head_rows, np.int32))

    def _forward_batch(self) -> ForwardBatch:
        """The batch over arrays of fixed address: made once, its contents change from step to step."""
        a, constant = self._arrays, self._ops.constant
        query_start, lengths = constant(a.query_start), constant(a.lengths)
        tables = tuple(constant(table) for table in a.page_table)
        rows = tuple(
            PagedRows(query_start=query_start, lengths=lengths, page_table=table, rows=a.rows) for table in tables
        )
        batch = ForwardBatch(
            capacity=self._capacity,
            tokens=a.tokens,
            ids=constant(a.ids),
            positions=constant(a.positions),
            rows=rows,
            write_slots=tuple(constant(slots) for slots in a.write_slots),
            kv=self._kv,
            layer_group=tuple(_group_of(layer, self._groups) for layer in range(len(self._kv))),
            scratch=Scratch(self._ops),
            adapters=None if self._adapters is None else constant(np.full(self._capacity, -1, np.int32)),
            images=None if self._images is None else self._images.rows,
        )
        # The op set's memory is host memory (cpu, plain): lay steps out in it directly instead of copying.
        host = self._ops.host
        self._arrays = StepArrays(
            tokens=a.tokens,
            rows=a.rows,
            ids=host(batch.ids),
            positions=host(batch.positions),
            query_start=host(query_start),
            lengths=host(lengths),
            write_slots=tuple(host(slots) for slots in batch.write_slots),
            page_table=tuple(host(table) for table in tables),
            token_slot=a.token_slot,
        )
        return batch

    def run(self, step: Step) -> StepResult:
        """Does one step and returns its result; changes slots and KV memory."""
        began = time.perf_counter()
        for slot in step.leave:
            self._slots.leave(slot)
            self._pooling.leave(slot)
            if self._adapters is not None:
                self._adapters.leave(slot)
            if self._images is not None:
                self._images.leave(slot)
            if self._grammar is not None:
                self._grammar.leave(slot)
        for enter in step.enter:
            self._slots.enter(enter)
            self._sampling.enter(enter)
            self._pooling.enter(enter)
            if self._adapters is not None:
                self._adapters.enter(enter.slot, enter.adapter)
            if self._images is not None:
                self._images.enter(enter)
            if self._grammar is not None:
                self._grammar.enter(enter)
        self._slots.turn_pages(step)
        self._check(step)
        lay_out(step, self._slots, self._arrays)
        if self._adapters is not None:
            live = int(self._arrays.tokens[0])
            self._ops.host(self._batch.adapters)[:live] = self._adapters.slot[self._arrays.token_slot[:live]]
        laid_out = time.perf_counter()
        if self._images is not None:
            self._images.turn(step)
            self._images.lay_out(step, self._arrays)
        for move in step.moves:
            assert move.kind == "copy", f"this runner has no tier for moves of kind {move.kind!r}"
            for layer in self._groups[move.group].layers:
                self._ops.copy_pages(self._kv[layer], move.source, move.target)
        if step.rows:
            self._wide = self._wants_all(step)
            self._forward()
        tokens, logprobs, failed, complete = self._choose(step)
        if self._adapters is not None and self._adapters.failed:
            for slot, reason in self._adapters.failed.items():
                for row in np.flatnonzero(step.slot == slot):
                    tokens[row], failed[int(row)] = -1, reason
        hidden = self._pool(step, failed)
        grammar_s, grammar_rows = self._grammar.spent(step.slot) if self._grammar is not None else (0.0, {})
        offset = np.zeros(step.rows + 1, np.int32)
        np.cumsum(tokens >= 0, out=offset[1:], dtype=np.int32)
        return StepResult(
            number=step.number,
            slot=step.slot,
            epoch=step.epoch,
            offset=offset,
            tokens=tokens[tokens >= 0],
            logprobs=logprobs,
            hidden=hidden,
            moved=tuple(move.ticket for move in step.moves),
            failed=failed,
            complete=complete,
            device_s=time.perf_counter() - laid_out,
            host_s=laid_out - began,
            grammar_s=grammar_s,
            grammar_rows=grammar_rows,
        )

    def _check(self, step: Step) -> None:
        """The engine's side of the contract; a breach is a bug, not a user's error."""
        assert step.rows == 0 or bool((self._slots.epoch[step.slot] == step.epoch).all()), (
            "a row names a slot of another epoch"
        )
        assert step.tokens <= self._capacity, f"{step.tokens} tokens in a step of at most {self._capacity}"
        assert not step.drafts.any(), "this runner has no drafter"

    def _wants_all(self, step: Step) -> bool:
        """Whether hidden states are wanted of so many tokens that they are best computed for all at once: the last layer's weights are read
        once then, and not for every group of `head_rows`."""
        last = int((step.wants == Wants.LAST).sum())
        more = (step.wants != Wants.LAST) & (step.wants != Wants.NONE)
        return (
            not self._model.ends_by_row
            or bool(more.any())
            or 2 * last > step.tokens
            or (last > self._head_rows and 8 * last > step.tokens)
        )

    def _forward(self) -> None:
        self._model.backend.plan(self._batch)
        if self._wide:
            self._replay("forward", self._forward_ops)
        else:
            self._replay("body", self._body_ops)

    def _forward_ops(self) -> None:
        self._hidden = self._model.forward(self._batch)

    def _body_ops(self) -> None:
        self._stream, self._mixed = self._model.body(self._batch)

    def _run_head(self) -> None:
        if self._wide:
            self._replay("head", self._head_ops)
            return
        if self._adapters is not None:
            count = int(self._head_count[0])
            own = self._ops.host(self._batch.adapters)[self._head_index_host[:count]]
            self._ops.host(self._head_batch.adapters)[:count] = own
        self._replay("ending", self._ending_ops)

    def _head_ops(self) -> None:
        self._ops.gather_rows(self._hidden, self._head_index, out=self._head_hidden, count=self._head_count)
        self._model.logits(self._head_hidden, out=self._logits, count=self._head_count)

    def _ending_ops(self) -> None:
        if self._head_mixed is None:
            self._head_mixed = self._ops.empty((self._head_rows, self._mixed.shape[1]), self._ops.activation)
        for source, rows in ((self._stream, self._head_hidden), (self._mixed, self._head_mixed)):
            self._ops.gather_rows(source, self._head_index, out=rows, count=self._head_count)
        hidden = self._model.ending(self._head_batch, self._head_hidden, self._head_mixed)
        self._model.logits(hidden, out=self._logits, count=self._head_count)

    def _replay(self, name: str, calls: Callable[[], None]) -> None:
        """Calls ops, or replays what they were when they were first called."""
        if not self._want_tape:
            calls()
            return
        if name not in self._tapes:
            with self._ops.record() as tape:  # type: ignore[attr-defined]
                calls()  # recording runs nothing: the first run is a replay like every later one
            self._tapes[name] = tape
        self._tapes[name].run()

    def rest(self) -> None:
        """Gives the memory of keys and values back to the system, where the op set can; addresses stay, contents are lost."""
        if self._images is not None:
            self._images.rest()
        release = getattr(self._ops, "release", None)
        if release is not None:
            for layer in self._kv:
                release(layer.k)
                release(layer.v)

    def close(self) -> None:
        """Ends the threads that this has started."""
        if self._grammar is not None:
            self._grammar.close()

    def _choose(self, step: Step) -> tuple[Ints, dict[int, RowLogprobs], dict[int, str], tuple[int, ...]]:
        """Logits, logprobs and one token for every row that wants them.

        (token per row or -1, logprobs, failures, rows whose grammar is complete).
        """
        chosen = np.full(step.rows, -1, np.int32)
        logprobs: dict[int, RowLogprobs] = {}
        failed: dict[int, str] = {}
        if not step.wants.any():
            return chosen, logprobs, failed, ()
        self._prompt_logprobs(step, logprobs)
        sampling = np.flatnonzero((step.wants == Wants.LAST) | (step.wants == Wants.ALL))
        last = self._arrays.query_start[1 : step.rows + 1] - 1
        for first in range(0, len(sampling), self._head_rows):
            rows = sampling[first : first + self._head_rows]
            count = len(rows)
            slot, position = step.slot[rows], step.start[rows] + step.count[rows]
            self._head_index_host[:count] = last[rows]
            self._head_count[0] = count
            self._run_head()
            wanted = self._sampling.logprobs[slot]
            # Raw logprobs need the logits twice: before sampling destroys them, and with the token that sampling chose.
            raw = self._host_logits(count) if wanted.max(initial=-1) >= 0 else None
            columns = self._sampling.gather(slot, position)
            stuck: dict[int, str] = {}
            if self._grammar is not None:
                mask, stuck = self._grammar.masks(slot)
                if mask is not None:
                    columns = replace(columns, mask=mask)
            self._ops.sample(self._logits, columns, out=self._sampled, count=self._head_count)
            tokens = self._ops.host(self._sampled)[:count].copy()
            tokens[list(stuck)] = -1
            good = tokens >= 0
            self._slots.append(slot[good], position[good], tokens[good])
            chosen[rows] = tokens
            for place in np.flatnonzero(~good):
                failed[int(rows[place])] = stuck.get(int(place)) or self._why_none(int(slot[place]))
            if raw is not None:
                arrays = self._logprobs(raw, tokens, top=int(wanted.max()))
                for i in range(count):
                    if wanted[i] >= 0 and good[i]:
                        record = arrays.record(i, token=int(tokens[i]), top=int(wanted[i]))
                        before = logprobs.get(int(rows[i]), RowLogprobs())
                        logprobs[int(rows[i])] = RowLogprobs(sampled=(record,), prompt=before.prompt)
        complete: tuple[int, ...] = ()
        if self._grammar is not None:
            drawn = np.flatnonzero(chosen >= 0)
            places = self._grammar.advance(step.slot[drawn], chosen[drawn])
            complete = tuple(int(drawn[place]) for place in places)
        return chosen, logprobs, failed, complete

    def _pool(self, step: Step, failed: dict[int, str]) -> dict[int, Floats]:
        """Embeddings of the prompts that end in this step, by row; other chunks of such prompts are added up."""
        rows = self._pooling.wanted(step)
        if not len(rows):
            return {}
        return self._pooling.take(step, rows, self._ops.host(self._hidden), self._arrays.query_start, failed)

    def _why_none(self, slot: int) -> str:
        return NO_TOKEN if self._grammar is not None and self._grammar.constrained(slot) else NOT_FINITE

    def _prompt_logprobs(self, step: Step, into: dict[int, RowLogprobs]) -> None:
        """Logprobs of the known tokens that follow each position of rows that want all their logits."""
        for row in np.flatnonzero((step.wants == Wants.ALL) | (step.wants == Wants.ALL_NO_SAMPLE)):
            slot, start, count = int(step.slot[row]), int(step.start[row]), int(step.count[row])
            known = min(
                count, int(self._slots.prompt[slot]) - start - 1
            )  # the last prompt token predicts no prompt token
            top = max(0, int(self._sampling.prompt_logprobs[slot]))
            records: list[TokenLogprobs] = []
            for first in range(0, known, self._head_rows):
                size = min(self._head_rows, known - first)
                base = int(self._arrays.query_start[row]) + first
                self._head_index_host[:size] = np.arange(base, base + size)
                self._head_count[0] = size
                self._run_head()
                following = self._slots.tokens[slot, start + first + 1 : start + first + 1 + size]
                arrays = self._logprobs(self._logits, following, top=top)
                records.extend(arrays.record(i, token=int(following[i]), top=top) for i in range(size))
            into[int(row)] = RowLogprobs(prompt=tuple(records))

    def _host_logits(self, count: int) -> Tensor:
        return self._ops.constant(self._ops.host(self._logits)[:count])

    def _logprobs(self, logits: Tensor, tokens: Ints, *, top: int) -> LogprobArrays:
        ops, count = self._ops, len(tokens)
        width = max(1, top)
        out = (
            ops.empty((count,), "f32"),
            ops.empty((count,), "i32"),
            ops.empty((count, width), "i32"),
            ops.empty((count, width), "f32"),
        )
        ops.logprobs(
            logits,
            ops.constant(np.ascontiguousarray(np.maximum(tokens, 0), np.int32)),
            top=top,
            out_logprob=out[0],
            out_rank=out[1],
            out_ids=out[2],
            out_top=out[3],
            count=np.array([count], np.int32),
        )
        logprob, rank, ids, best = (ops.host(values) for values in out)
        return LogprobArrays(logprob=logprob, rank=rank, top_ids=ids, top=best)


def _group_of(layer: int, groups: tuple[KVGroup, ...]) -> int:
    for group in groups:
        if layer in group.layers:
            return group.index
    raise AssertionError(f"layer {layer} is in no KV group")
