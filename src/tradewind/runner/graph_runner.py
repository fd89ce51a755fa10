"""What one GPU does with a step: `submit` puts it on the device and returns, `collect` reads what came of it.

Knows: the order of a step on the device, and what is captured as a graph. Refuses to know: what is launched (programs), when kernels are
compiled (preparing), why rows were chosen, text, and torch (behind kernels/triton/graphs.py).

    submit(step)    changes of slots       enter, page-table entries: read by kernels from pinned memory      only when there are any
                    header into the ring   slot, start, count of each row; which rows want a token            host memory, no copy
                    BODY   (graph)         fetch header, lay out, model.forward
                    SAMPLE (graph)         gather, head, draw, token -> slot and -> ring, next turn
                    mark
    collect()       waits for the mark; tokens from the ring, logprobs, grammar advance                       -> StepResult

A step in which every row decodes is one graph (BODY and SAMPLE). The step behind it may be submitted before its tokens are known: they are
on the device. Only a row whose grammar (or banned word) depends on the token before makes SAMPLE of the next step wait on the host, while
BODY already runs.

First time in a bucket: its launches are captured, then replayed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter

import numpy as np

from tradewind.contract.kv import KVGroup
from tradewind.contract.step import Floats, Ints, RowLogprobs, Step, StepResult, TokenLogprobs, Wants
from tradewind.device.slots import Slots
from tradewind.kernels.ops import KVLayer
from tradewind.kernels.triton import step as kernels
from tradewind.kernels.triton.graphs import Gpu, Graph, Pinned
from tradewind.kernels.triton.ops import CudaOps
from tradewind.kernels.triton.program import Bucket, Fresh
from tradewind.models.registry import Model
from tradewind.runner.adapters import AdapterSlots
from tradewind.runner.ahead import Ahead, Progress
from tradewind.runner.buckets import FEW_ROWS, smallest
from tradewind.runner.flight import Flight, Staging
from tradewind.runner.pooling import PoolingSlots
from tradewind.runner.preparing import Measure, Preparation
from tradewind.runner.programs import MANY_ROWS_LONGEST, Key, StepPrograms
from tradewind.runner.runner import NO_TOKEN, NOT_FINITE
from tradewind.runner.sharing import SharedPages
from tradewind.sampling.columns import SlotSampling
from tradewind.sampling.grammar import GrammarSlots
from tradewind.sampling.grammar_compile import GrammarCompiler
from tradewind.sampling.logprobs import LogprobArrays
from tradewind.sampling.resident import Draw, ResidentSampling

MOST_GRAPHS = 256
"""Captured graphs that are kept; the one used longest ago goes first."""


class GraphRunner:
    """Executes steps one after another on one GPU. Owner of slots, programs and graphs. Called by one thread at a time."""

    def __init__(
        self,
        *,
        model: Model,
        ops: CudaOps,
        gpu: Gpu,
        groups: tuple[KVGroup, ...],
        kv: tuple[KVLayer, ...],
        max_running: int,
        max_tokens_per_step: int,
        max_context: int,
        vocab_size: int,
        hidden: int,
        graphs: bool,
        grammars: GrammarCompiler | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._ops, self._gpu, self._groups, self._kv = ops, gpu, groups, kv
        self._want_graphs, self._adapters = graphs, adapters
        least_keys = None if ops.deterministic else ops.ways.shared_prefix
        self._sharing = SharedPages(groups, slots=max_running, least_keys=least_keys)

        # the host's side of the slots: for checks, banned words and prompt logprobs
        self._slots = Slots(slots=max_running, max_context=max_context, groups=())
        self._sampling = ResidentSampling(slots=max_running)
        self._biases = SlotSampling(slots=self._slots, rows=max_running)
        self._pooling = PoolingSlots()
        self._grammar: GrammarSlots | None = None
        if grammars is not None:
            assert grammars.vocab_size == vocab_size, (grammars.vocab_size, vocab_size)
            self._grammar = GrammarSlots(compiler=grammars, slots=max_running, rows=max_running)

        # the device's side
        self._next_turn = 0
        self._staging = Staging(gpu)
        self._programs = StepPrograms(
            model=model,
            ops=ops,
            gpu=gpu,
            groups=groups,
            kv=kv,
            max_running=max_running,
            max_tokens_per_step=max_tokens_per_step,
            max_context=max_context,
            vocab_size=vocab_size,
            hidden=hidden,
            shared=self._sharing.wanted,
            adapted=adapters is not None,
            graphs=graphs and gpu.on_gpu,
        )
        self._preparation = Preparation(self._programs, gpu, staging=self._staging, shared=self._sharing.wanted)
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()
        self._flights: deque[Flight] = deque()
        self._awake: set[str] = set()
        """Kinds of graphs of which one was run launch by launch: its library has its handles and memory."""
        self.captures = 0
        """Graphs captured so far because a step needed them."""
        self._submitted_s = perf_counter()
        self._ahead = Ahead(
            gpu,
            may_begin=lambda: self.prepared,
            last_work_s=lambda: float("inf") if self._flights else self._submitted_s,
            known=lambda key: key in self._graphs or len(self._graphs) >= MOST_GRAPHS,
            keep=self._keep_ahead,
        )
        self._draws_ahead: set[Draw] = set()
        """Ways to draw whose decode steps were asked to be captured ahead."""
        gpu.settle()

    # ------------------------------------------------------------------------------------------------------------ submit

    def submit(self, step: Step) -> None:
        """Puts a step on the device behind those before it; waits for nothing but tokens that a grammar needs."""
        began = self._submitted_s = perf_counter()
        flight = Flight(step)
        with self._gpu.working():
            self._change_slots(step)
            for move in step.moves:
                assert move.kind == "copy", f"this runner has no tier for moves of kind {move.kind!r}"
                for layer in self._groups[move.group].layers:
                    self._ops.copy_pages(self._kv[layer], move.source, move.target)
            if step.rows:
                self._check(step)
                flight.began = self._gpu.mark()
                self._run(step, flight)
            flight.done = self._gpu.mark()
        flight.host_s = perf_counter() - began
        self._flights.append(flight)

    def _check(self, step: Step) -> None:
        """The engine's side of the contract; a breach is a bug, not a user's error."""
        assert bool((self._slots.epoch[step.slot] == step.epoch).all()), "a row names a slot of another epoch"
        assert step.tokens <= self._programs.capacity, (
            f"{step.tokens} tokens in a step of at most {self._programs.capacity}"
        )
        assert not step.drafts.any(), "this runner has no drafter"

    def _change_slots(self, step: Step) -> None:
        for slot in step.leave:
            self._slots.leave(slot)
            self._sharing.leave(slot)
            self._pooling.leave(slot)
            if self._adapters is not None:
                self._adapters.leave(slot)
            if self._grammar is not None:
                self._grammar.leave(slot)
        if not step.enter and not len(step.page_slot):
            return
        lengths = [len(enter.tokens) for enter in step.enter]
        words = (
            sum(lengths)
            + (9 + kernels.VALUE_WORDS) * len(lengths)
            + 3 * len(step.page_slot)
            + 4 * (8 + len(self._programs.tables))
        )
        self._staging.begin(words)
        if step.enter:
            values = np.empty((len(step.enter), kernels.VALUE_WORDS), np.int32)
            for i, enter in enumerate(step.enter):
                self._slots.enter(enter)
                self._biases.enter(enter)
                self._pooling.enter(enter)
                if self._adapters is not None:
                    self._adapters.enter(enter.slot, enter.adapter)
                if self._grammar is not None:
                    self._grammar.enter(enter)
                values[i] = self._sampling.enter(enter, constrained=enter.grammar is not None)
            slots = np.array([enter.slot for enter in step.enter], np.int32)
            count = np.array(lengths, np.int32)
            put = self._staging.put
            where = np.stack([slots, np.cumsum(count, dtype=np.int32) - count, count])
            tokens = np.concatenate([enter.tokens for enter in step.enter]).astype(np.int32, copy=False)
            kernels.write_rows(self._programs.tokens, put(where), put(tokens))
            width = np.full(len(slots), kernels.VALUE_WORDS, np.int32)
            where = np.stack([slots, np.arange(len(slots), dtype=np.int32) * kernels.VALUE_WORDS, width])
            kernels.write_rows(self._programs.values, put(where), put(values))
            if self._adapters is not None:
                where = np.stack([slots, np.zeros_like(slots), self._adapters.slot[slots]])
                kernels.write_entries(self._programs.adapter_of, put(where))
        for group, table in enumerate(self._programs.tables):
            mine = step.page_group == group if len(self._programs.tables) > 1 else slice(None)
            where = np.stack([step.page_slot[mine], step.page_index[mine], step.page_id[mine]])
            if where.shape[1]:
                self._sharing.enter(group, where)
                kernels.write_entries(table, self._staging.put(where))

    def _run(self, step: Step, flight: Flight) -> None:
        rows, total = step.rows, step.tokens
        wants = step.wants
        sampling = np.flatnonzero((wants == Wants.LAST) | (wants == Wants.ALL)).astype(np.int32)
        flight.turn, flight.sampling = self._next_turn, sampling
        self._next_turn = (self._next_turn + 1) % kernels.RING
        samples = len(sampling)
        header = self._programs.ring.host[flight.turn]
        header[0, 0], header[0, kernels.SAMPLES_AT] = rows, samples
        header[1, :rows], header[2, :rows], header[3, :rows] = step.slot, step.start, step.count
        header[4, :samples] = sampling

        slot = step.slot if samples == rows else step.slot[sampling]
        draw = self._sampling.draw(slot) if samples else Draw()
        late = samples > 0 and bool(self._sampling.late[slot].any())
        singles = total == rows
        longest = self._programs.longest
        if singles:
            size = smallest(self._programs.row_sizes, rows)
            longest = smallest(self._programs.lengths(size), int((step.start + step.count).max()))
        adapted = self._adapters is not None and self._adapters.needed(step.slot, flight.refused)
        shared = self._sharing.wanted and self._sharing.possible(
            step.slot[step.count == 1], least_rows=self._ops.tuning.shared_rows
        )
        if singles and samples == rows and not draw.steered and draw.logprobs < 0:
            bucket = self._programs.singles(size, longest, shared=shared, adapted=adapted)
            self._launch(("whole", bucket, draw), lambda: self._programs.whole(bucket, draw))
            self._want_decode_ahead(draw)
            return
        if singles:
            bucket = self._programs.singles(size, longest, shared=shared, adapted=adapted)
        else:
            size = smallest(self._programs.token_sizes, max(total, FEW_ROWS))
            bucket = self._programs.mixed(
                size,
                smallest(self._programs.classes_of(size), rows),
                fresh=self._fresh_rows(step),
                shared=shared,
                adapted=adapted,
            )
            bucket = self._cut_over_keys(bucket, step)
        wanted = bool(((wants == Wants.LAST) | (wants == Wants.NONE)).all())
        few = self._programs.few_ends and not adapted and wanted and 2 * samples <= total
        self._launch(("stem" if few else "body", bucket), lambda: self._programs.body(bucket, few=few))
        self._prompt_logprobs(step, flight)
        self._take_hidden(step, flight)
        if not samples:
            self._programs.publish(1)
            return
        asked = self._gpu.mark() if late and self._grammar is not None else None
        if late:
            # What may come next depends on the last token, which the step before has drawn; the body runs meanwhile.
            for before in self._flights:
                self._finish(before)
        if draw.steered:
            self._steer(slot, step.start[sampling] + step.count[sampling], flight)
            if asked is not None and self._grammar is not None:
                flight.rested, flight.grammar = (asked, self._gpu.mark()), self._grammar.spent(step.slot)
            if draw.logprobs >= 0:
                self._programs.need_raw_logits()
        size = smallest(self._programs.row_sizes, samples)
        self._launch(("end" if few else "sample", size, draw), lambda: self._programs.sample(size, draw, few=few))
        if draw.logprobs >= 0:
            self._take_logprobs(flight, draw.logprobs)

    def _launch(self, key: Key, run: Callable[[], None]) -> None:
        """Replays the graph of `key`; the first time it is captured before. The first of all is run launch by launch too, which wakes the
        libraries.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            graph.replay()
            return
        if not self._want_graphs:
            run()
            return
        if len(self._graphs) >= MOST_GRAPHS:
            self._gpu.settle()  # the oldest may still be running
            self._graphs.popitem(last=False)
        self._programs.plan(key)
        asleep = key[0] not in self._awake
        if asleep:
            run()
            self._awake.add(key[0])
        self._graphs[key] = graph = self._gpu.capture(run)
        self.captures += 1
        if not asleep:
            graph.replay()

    def _keep_ahead(self, key: Key, graph: Graph) -> None:
        """From the thread that captures ahead."""
        self._graphs.setdefault(key, graph)

    def _want_decode_ahead(self, draw: Draw) -> None:
        """Decode steps of every size that draw this way will be captured when there is time."""
        if draw in self._draws_ahead or not (self._want_graphs and self._gpu.on_gpu):
            return
        self._draws_ahead.add(draw)
        programs = self._programs
        buckets = [
            programs.singles(rows, longest)
            for rows in programs.row_sizes
            for longest in programs.lengths(rows)
            if longest <= max(MANY_ROWS_LONGEST[-1], programs.length_sizes[0])
        ]
        self._ahead.want(
            (("whole", bucket, draw), partial(programs.program, "whole", bucket), partial(programs.whole, bucket, draw))
            for bucket in buckets
        )

    def _want_prompts_ahead(self) -> None:
        """The same for the head's part of steps with prompts, and for prompts: alone in small steps, in large ones beside others, and last
        the few tokens a step of long ones."""
        programs = self._programs
        sizes = [size for size in programs.token_sizes if size >= min(FEW_ROWS, programs.capacity)]
        buckets = [programs.mixed(size, 1, fresh=programs.fresh) for size in sizes if 4 * size <= programs.capacity]
        buckets += [
            programs.mixed(size, rows, fresh=fresh)
            for size in reversed(sizes)
            if 4 * size > programs.capacity
            for rows in programs.classes_of(size)
            for fresh in programs.fresh_kinds(rows)
            if rows > 1
        ]
        buckets += programs.long_prompts()
        draw, few = Draw(), programs.few_ends
        body, sample = ("stem", "end") if few else ("body", "sample")
        self._ahead.want(
            ((sample, rows, draw), partial(programs.head, rows, few=few), partial(programs.sample, rows, draw, few=few))
            for rows in programs.row_sizes
        )
        self._ahead.want(
            ((body, bucket), partial(programs.program, body, bucket), partial(programs.body, bucket, few=few))
            for bucket in buckets
        )

    def _fresh_rows(self, step: Step) -> Fresh:
        """Which of the rows of several tokens begin in this step, as far as that is made use of."""
        if self._programs.fresh == "none":
            return "none"
        several = step.count > 1
        begun = step.count[several & (step.start == 0)]
        if len(begun) == several.sum():
            return "all"
        least = self._ops.ways.partly_fresh
        return "some" if least is not None and begun.max(initial=0) >= least else "none"

    def _cut_over_keys(self, bucket: Bucket, step: Step) -> Bucket:
        """The bucket with the number of prompts at the step's end, where these are few and one of them has many keys."""
        known = self._programs.deep_rows(bucket.tokens, bucket.rows, fresh=bucket.fresh)
        least = self._ops.ways.split_prompts
        several = np.flatnonzero(step.count > 1)
        if not known or least is None or not len(several):
            return bucket
        first = int(several[0])
        if step.rows - first > known[-1] or int((step.start + step.count)[several].max()) < least:
            return bucket
        tokens = smallest(self._programs.token_sizes, max(FEW_ROWS, int(step.count[first:].sum())))
        return replace(bucket, deep=smallest(known, step.rows - first), deep_tokens=tokens)

    # ---------------------------------------------------------------------------------------- what some steps do besides

    def _steer(self, slot: Ints, position: Ints, flight: Flight) -> None:
        """Biases and bitmasks of the rows that sample, into the device's buffers, in the stream."""
        steering, count = self._programs.steering, len(slot)
        biased = bool(self._sampling.biased[slot].any())
        if steering.wants_biases(biased):
            columns = self._biases.gather(slot, position)
            entries = int(columns.bias_start[count])
            if not steering.fits(entries):
                self._gpu.settle()  # steps in flight read the old buffers
                for key in [key for key in list(self._graphs) if isinstance(key[-1], Draw) and key[-1].steered]:
                    del self._graphs[key]  # and these hold them
                steering.grow(entries)
            steering.bias(columns, count=count, turn=flight.turn, biased=biased)
        mask, flight.stuck = self._grammar.masks(slot) if self._grammar is not None else (None, {})
        steering.allow(mask, count=count)

    def _take_logprobs(self, flight: Flight, top: int) -> None:
        count = len(flight.sampling)
        parts = []
        for out in self._programs.logprob_out:
            host = self._gpu.pinned(
                (count, *out.shape[1:]), np.int32 if out.dtype == self._programs.sampled.dtype else np.float32
            )
            self._gpu.copy(host.device, out[:count])
            parts.append(host)
        flight.logprobs, flight.logprob_parts = top, tuple(parts)

    def _prompt_logprobs(self, step: Step, flight: Flight) -> None:
        """Launches the logprobs of the known tokens that follow each position of rows that want all their logits."""
        rows = np.flatnonzero((step.wants == Wants.ALL) | (step.wants == Wants.ALL_NO_SAMPLE))
        if not len(rows):
            return
        starts = np.concatenate([[0], np.cumsum(step.count)])
        for row in map(int, rows):
            slot, start, count = int(step.slot[row]), int(step.start[row]), int(step.count[row])
            known = min(
                count, int(self._slots.prompt[slot]) - start - 1
            )  # the last prompt token predicts no prompt token
            top = max(0, int(self._biases.prompt_logprobs[slot]))
            flight.prompts.append((row, start, np.zeros(0, np.int32), top, ()))
            for first in range(0, known, self._programs.rows):
                size = min(self._programs.rows, known - first)
                index = np.zeros(self._programs.rows, np.int32)
                index[:size] = np.arange(starts[row] + first, starts[row] + first + size)
                following = self._slots.tokens[slot, start + first + 1 : start + first + 1 + size].copy()
                tokens = np.zeros(self._programs.rows, np.int32)
                tokens[:size] = following
                constant = self._ops.constant
                self._programs.token_logprobs(
                    constant(index), constant(tokens), top=top, live=constant(np.array([size], np.int32))
                )
                parts = []
                for out in self._programs.logprob_out:
                    host = self._gpu.pinned(
                        (size, *out.shape[1:]), np.int32 if out.dtype == self._programs.sampled.dtype else np.float32
                    )
                    self._gpu.copy(host.device, out[:size])
                    parts.append(host)
                flight.prompts.append((row, start + first, following, top, tuple(parts)))

    def _take_hidden(self, step: Step, flight: Flight) -> None:
        """Copies the hidden states of rows that want them, in the stream."""
        if not (step.wants >= Wants.HIDDEN).any():
            return
        total = step.tokens
        flight.hidden = self._gpu.pinned((total, self._programs.hidden.shape[1]), np.float32)
        self._gpu.copy(flight.hidden.device, self._programs.hidden[:total].float())
        flight.query_start = np.concatenate([[0], np.cumsum(step.count)]).astype(np.int32)

    # ----------------------------------------------------------------------------------------------------------- collect

    def collect(self) -> StepResult:
        """Waits for the oldest step and returns its result."""
        flight = self._flights.popleft()
        return self._finish(flight)

    def _finish(self, flight: Flight) -> StepResult:  # collect point
        """The result of a step; waits for the device the first time, and brings the host's side of its slots up to date."""
        if flight.result is not None:
            return flight.result
        assert flight.done is not None
        flight.done.wait()
        step, rows = flight.step, flight.sampling
        chosen = np.full(step.rows, -1, np.int32)
        logprobs: dict[int, RowLogprobs] = {}
        failed: dict[int, str] = {}
        complete: tuple[int, ...] = ()
        if flight.turn >= 0 and len(rows):
            tokens = self._programs.tokens_out.host[flight.turn, : len(rows)].copy()
            slot, position = step.slot[rows], step.start[rows] + step.count[rows]
            tokens[list(flight.stuck)] = -1
            good = tokens >= 0
            self._slots.append(slot[good], position[good], tokens[good])
            chosen[rows] = tokens
            for place in np.flatnonzero(~good):
                failed[int(rows[place])] = flight.stuck.get(int(place)) or self._why_none(int(slot[place]))
            self._read_prompt_logprobs(flight, logprobs)
            if flight.logprobs >= 0:
                arrays = _arrays(flight.logprob_parts)
                wanted = self._sampling.logprobs[slot]
                for i in np.flatnonzero((wanted >= 0) & good):
                    record = arrays.record(int(i), token=int(tokens[i]), top=int(wanted[i]))
                    before = logprobs.get(int(rows[i]), RowLogprobs())
                    logprobs[int(rows[i])] = RowLogprobs(sampled=(record,), prompt=before.prompt)
            if self._grammar is not None:
                drawn = np.flatnonzero(chosen >= 0)
                places = self._grammar.advance(step.slot[drawn], chosen[drawn])
                complete = tuple(int(drawn[place]) for place in places)
        else:
            self._read_prompt_logprobs(flight, logprobs)
        for row, reason in flight.refused.items():
            chosen[row], failed[row] = -1, reason
        hidden: dict[int, Floats] = {}
        if flight.hidden is not None and flight.query_start is not None:
            hidden = self._pooling.take(
                step, self._pooling.wanted(step), flight.hidden.host, flight.query_start, failed
            )
        offset = np.zeros(step.rows + 1, np.int32)
        np.cumsum(chosen >= 0, out=offset[1:], dtype=np.int32)
        grammar_s, grammar_rows = flight.grammar
        if grammar_s > 0 and flight.rested is not None:  # what the body hid cost nothing
            asked, ready = flight.rested
            felt = min(1.0, max(0.0, ready.seconds_since(asked)) / grammar_s)
            grammar_s, grammar_rows = felt * grammar_s, {row: felt * part for row, part in grammar_rows.items()}
        flight.result = StepResult(
            number=step.number,
            slot=step.slot,
            epoch=step.epoch,
            offset=offset,
            tokens=chosen if offset[-1] == len(chosen) else chosen[chosen >= 0],
            logprobs=logprobs,
            hidden=hidden,
            moved=tuple(move.ticket for move in step.moves),
            failed=failed,
            complete=complete,
            device_s=flight.done.seconds_since(flight.began) if flight.began is not None else 0.0,
            host_s=flight.host_s,
            grammar_s=grammar_s,
            grammar_rows=grammar_rows,
        )
        return flight.result

    def _why_none(self, slot: int) -> str:
        return NO_TOKEN if self._grammar is not None and self._grammar.constrained(slot) else NOT_FINITE

    def _read_prompt_logprobs(self, flight: Flight, into: dict[int, RowLogprobs]) -> None:
        found: dict[int, list[TokenLogprobs]] = {}
        for row, _, following, top, parts in flight.prompts:
            records = found.setdefault(row, [])
            if parts:
                arrays = _arrays(parts)
                records.extend(arrays.record(i, token=int(token), top=top) for i, token in enumerate(following))
        for row, records in found.items():
            into[row] = RowLogprobs(prompt=tuple(records))

    # -------------------------------------------------------------------------------------------------------------- life

    def prepare(
        self,
        sizes: Sequence[int],
        *,
        prompt_sizes: Sequence[int] = (),
        threads: int,
        measure: Measure = lambda name: nullcontext(),
    ) -> None:
        """Compiles what the decode steps of so many rows and the prompt steps of so many tokens need, in `threads` threads."""
        self._preparation.prepare(sizes, prompt_sizes=prompt_sizes, threads=threads, measure=measure)

    def prepare_rest(self) -> None:
        """Begins to compile all other kernels of the model, in a thread, and then to capture usual steps while nothing is asked. A step
        that needs one of them waits for it, or captures it itself."""
        self._preparation.prepare_rest()
        if self._want_graphs and self._gpu.on_gpu:
            self._want_decode_ahead(Draw())
            self._want_prompts_ahead()

    @property
    def prepared(self) -> bool:
        """Whether every kernel of the model is compiled."""
        return self._preparation.prepared

    @property
    def captured_ahead(self) -> bool:
        """Whether the graphs of usual steps are there, too."""
        return self._ahead.done

    @property
    def behind_start(self) -> tuple[dict[str, float], Progress]:
        """What compiling behind the start took by part, as far as it is over, and how far capturing has come. From any thread."""
        return self._preparation.rest_took_s, self._ahead.progress

    def warm(self, sizes: Sequence[int], *, prompt_sizes: Sequence[int] = ()) -> None:
        """Captures the decode steps of these many rows and the prompt steps of these many tokens, on empty steps: changes no slot."""
        for size in sizes:
            bucket = self._programs.singles(size, self._programs.length_sizes[0])
            self._empty_step(("whole", bucket, Draw()), partial(self._programs.whole, bucket, Draw()))
        for size in prompt_sizes:
            bucket = self._programs.mixed(size, self._programs.row_classes[0], fresh=self._programs.fresh)
            few = self._programs.few_ends
            self._empty_step(("stem" if few else "body", bucket), partial(self._programs.body, bucket, few=few))
        self._gpu.settle()

    def _empty_step(self, key: Key, run: Callable[[], None]) -> None:
        with self._gpu.working():
            self._programs.ring.host[self._next_turn, 0] = 0
            self._launch(key, run)
            if key[0] in ("body", "stem"):
                self._programs.publish(1)
            self._next_turn = (self._next_turn + 1) % kernels.RING
            self._gpu.settle()

    def close(self) -> None:
        """Waits for what flies and ends the threads that this has started."""
        self._ahead.close()
        self._preparation.close()
        self._gpu.settle()
        self._graphs.clear()
        if self._grammar is not None:
            self._grammar.close()


def _arrays(parts: tuple[Pinned, ...]) -> LogprobArrays:
    logprob, rank, ids, best = (part.host for part in parts)
    return LogprobArrays(logprob=logprob, rank=rank, top_ids=ids, top=best)
