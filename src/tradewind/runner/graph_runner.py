"""What one GPU does with a step: `submit` puts it on the device and returns, `collect` reads what came of it.

Knows: the order of a step on the device, and what is captured as a graph. Refuses to know: why rows were chosen, text, and torch (behind
kernels/triton/graphs.py).

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

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from tradewind.contract.kv import KVGroup
from tradewind.contract.step import Floats, Ints, RowLogprobs, Step, StepResult, TokenLogprobs, Wants
from tradewind.device.batch import ForwardBatch, Scratch
from tradewind.device.slots import Slots
from tradewind.kernels.ops import KVLayer, PagedRows, Tensor
from tradewind.kernels.triton import library
from tradewind.kernels.triton import sample as sampler
from tradewind.kernels.triton import shared as sharing
from tradewind.kernels.triton import step as kernels
from tradewind.kernels.triton.graphs import Gpu, Graph, Mark, Pinned
from tradewind.kernels.triton.launch import COMPILES, compiling
from tradewind.kernels.triton.ops import CudaOps
from tradewind.kernels.triton.program import Launch, Program
from tradewind.kernels.triton.tape import Bucket, Fresh
from tradewind.models.registry import Model
from tradewind.runner.buckets import FEW_ROWS, LONGEST, ladder, smallest
from tradewind.runner.pooling import PoolingSlots
from tradewind.runner.runner import NO_TOKEN, NOT_FINITE
from tradewind.runner.sharing import SharedPages
from tradewind.sampling.columns import SlotSampling
from tradewind.sampling.grammar import GrammarSlots
from tradewind.sampling.grammar_compile import GrammarCompiler
from tradewind.sampling.logprobs import LogprobArrays
from tradewind.sampling.resident import Draw, ResidentSampling

MOST_GRAPHS = 160
"""Captured graphs that are kept; the one used longest ago goes first."""
SHORT = 4096
"""Attention of more than FEW_ROWS rows is cut alike up to this length."""
KERNELS_CHANGE_AT = (1, 2, 16, 32, 48, 64, 128)
"""Sizes of steps that together use every kernel of a model; the largest step is added."""
REST_THREADS = 4
"""Threads that compile behind the first steps: more would take the interpreter from the engine's own thread."""
WOKEN = 1024
"""Steps up to this size have the library's kernels loaded behind the first steps; larger ones share a few."""
COMMON_DRAWS = (
    Draw(),
    Draw(greedy=False),
    Draw(greedy=False, filtered=True),
    Draw(greedy=False, filtered=True, steered=True),
)
BIASES_EACH = 512
"""Biases and banned tokens for each row that a step has room for at first, on average over its rows."""
Key = tuple[Any, ...]


@dataclass(eq=False)
class Flight:
    """A step on its way. `finish` turns it into a result, once."""

    step: Step
    turn: int = -1
    """Its place in the rings; -1: nothing was put on the device."""
    sampling: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """Rows that want a token."""
    began: Mark | None = None
    done: Mark | None = None
    host_s: float = 0.0
    logprobs: int = -1
    logprob_parts: tuple[Pinned, ...] = ()
    prompts: list[tuple[int, int, Ints, int, tuple[Pinned, ...]]] = field(default_factory=list)
    """(row, first token of the chunk, tokens that follow, top, arrays) of prompt logprobs."""
    stuck: dict[int, str] = field(default_factory=dict)
    """Samples whose grammar allows no token, and why."""
    hidden: Pinned | None = None
    query_start: Ints | None = None
    result: StepResult | None = None


class Staging:
    """Pinned memory for a step's changes: a ring of buffers, grown when needed; one is used again when its step has long ended."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._buffers = [gpu.pinned((4096,)) for _ in range(kernels.RING)]
        self._used = 0
        self._at = 0

    def begin(self, words: int) -> None:
        """The next buffer takes `words` words. Its own order, not the header's: a step may change slots and have no row."""
        self._at, self._used = (self._at + 1) % len(self._buffers), 0
        if len(self._buffers[self._at].host) < words:
            self._buffers[self._at] = self._gpu.pinned((2 * words,))

    def put(self, values: npt.NDArray[np.int32]) -> Tensor:
        """The values where a kernel can read them."""
        buffer, first = self._buffers[self._at], self._used
        end = first + values.size
        buffer.host[first:end] = values.reshape(-1)
        self._used = -(-end // 4) * 4  # the next one is aligned as this one
        return buffer.device[first:end].view(values.shape)


class _Kernels:
    """Launches that differ in their kernel or its constants."""

    def __init__(self) -> None:
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def add(self, program: Program) -> None:
        for launch in program.launches:
            if "pdl" in launch.options:  # the others are a library's
                self._launches[launch.kernel, launch.text, launch.options.get("late")] = launch

    def run(self) -> None:
        for launch in self._launches.values():
            launch.run()


class GraphRunner:
    """Executes steps one after another on one GPU. Owner of slots, KV memory, scratch and graphs. Called by one thread at a time."""

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
    ) -> None:
        self._model, self._ops, self._gpu, self._groups, self._kv = model, ops, gpu, groups, kv
        self._capacity, self._rows, self._longest = max_tokens_per_step, max_running, max_context
        self._vocab = vocab_size
        self._pdl = gpu.on_gpu
        self._fresh: Fresh = "all" if model.backend.name == "fa3" else "none"
        """Steps whose prompts all begin in them have programs of their own."""
        self._ways = ops.ways
        self._want_graphs = graphs
        self._token_sizes, self._row_sizes = ladder(max_tokens_per_step), ladder(max_running)
        self._length_sizes = (*(size for size in LONGEST if size < max_context), max_context)
        mixed = sorted({1, FEW_ROWS, *self._ways.mixed_rows})
        self._row_classes = (*(size for size in mixed if size < max_running), max_running)
        least_keys = None if ops.deterministic else self._ways.shared_prefix
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
        limit = max(max_running, 16)
        self._tokens = gpu.zeros(max_running, -(-(max_context + 1) // 4) * 4)
        self._values = gpu.zeros(max_running, kernels.VALUE_WORDS)
        self._tables = tuple(gpu.zeros(max_running, _pages(max_context, group)) for group in groups)
        self._ring = gpu.pinned((kernels.RING, kernels.HEADER_FIELDS, limit))
        self._tokens_out = gpu.pinned((kernels.RING, limit))
        self._header = gpu.zeros(kernels.HEADER_FIELDS, limit)
        self._turn = gpu.zeros(4)[:1]
        self._next_turn = 0
        self._staging = Staging(gpu)
        self._batch = self._forward_batch()
        for paged in self._batch.rows:  # now, because a capture must not allocate them
            if self._sharing.wanted:
                self._found(paged)
            if self._ways.partly_fresh is not None:
                self._begun(paged)
        self._samples = kernels.SampleRows.allocate(max_running, device=gpu.device)
        self._sampled = gpu.zeros(max_running)
        self._logits = gpu.reals(max_running, vocab_size)
        self._raw_logits: Tensor | None = None
        self._work = sampler.SampleWorkspace.allocate(max_running, vocab_size, device=gpu.device, penalties=True)
        self._mask = gpu.zeros(max_running, -(-vocab_size // 32))
        self._masked_rows = -1
        """Rows of the mask that may hold something else than "all allowed"; -1: never written."""
        self._bias_start = gpu.zeros(max_running + 1)
        self._bias_token, self._bias_value, self._bias_ring = self._bias_buffers(max_running * BIASES_EACH)
        self._biased_before = False
        self._mask_ring = gpu.pinned((max_running, -(-vocab_size // 32)))
        width = 20
        self._logprob_out = (
            gpu.reals(max_running),
            gpu.zeros(max_running),
            gpu.zeros(max_running, width),
            gpu.reals(max_running, width),
        )
        self._head_rows = ops.empty((max_running, hidden), ops.activation)
        with ops.record() as tape:
            self._hidden = model.forward(self._batch)
        self._body_tape = tape
        with ops.record() as tape:
            ops.gather_rows(self._hidden, self._samples.index, out=self._head_rows, count=self._samples_count)
            model.logits(self._head_rows, out=self._logits, count=self._samples_count)
        self._head_tape = tape
        with ops.record() as tape:  # every row has one token and wants the next: nothing to gather
            model.logits(model.forward(self._batch)[:max_running], out=self._logits, count=self._rows_count)
        self._whole_tape = tape
        self._programs: dict[Key, Program] = {}
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()
        self._flights: deque[Flight] = deque()
        self._rest: Callable[[], None] | None = None
        self._compiler: threading.Thread | None = None
        self._awake: set[str] = set()
        """Kinds of graphs of which one was run launch by launch: its library has its handles and memory."""
        self.captures = 0
        """Graphs captured so far."""
        gpu.settle()

    def _forward_batch(self) -> ForwardBatch:
        """The batch over buffers of fixed address, filled by kernels."""
        gpu, groups = self._gpu, self._groups
        self._total = gpu.zeros(4)[:1]
        self._rows_count = self._header[0, :1]
        self._samples_count = self._header[0, kernels.SAMPLES_AT : kernels.SAMPLES_AT + 1]
        query_start, lengths = gpu.zeros(self._rows + 1), gpu.zeros(self._rows)
        return ForwardBatch(
            capacity=self._capacity,
            tokens=self._total,
            ids=gpu.zeros(self._capacity),
            positions=gpu.zeros(self._capacity),
            rows=tuple(
                PagedRows(
                    query_start=query_start,
                    lengths=lengths,
                    page_table=gpu.zeros(self._rows, _pages(self._longest, group)),
                    rows=self._rows_count,
                )
                for group in groups
            ),
            write_slots=tuple(gpu.zeros(self._capacity) for _ in groups),
            kv=self._kv,
            layer_group=tuple(_group_of(layer, groups) for layer in range(len(self._kv))),
            scratch=Scratch(self._ops),
        )

    # ------------------------------------------------------------------------------------------------------------ submit

    def submit(self, step: Step) -> None:
        """Puts a step on the device behind those before it; waits for nothing but tokens that a grammar needs."""
        began = perf_counter()
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
        assert step.tokens <= self._capacity, f"{step.tokens} tokens in a step of at most {self._capacity}"
        assert not step.drafts.any(), "this runner has no drafter"

    def _change_slots(self, step: Step) -> None:
        for slot in step.leave:
            self._slots.leave(slot)
            self._sharing.leave(slot)
            self._pooling.leave(slot)
            if self._grammar is not None:
                self._grammar.leave(slot)
        if not step.enter and not len(step.page_slot):
            return
        lengths = [len(enter.tokens) for enter in step.enter]
        words = (
            sum(lengths)
            + (6 + kernels.VALUE_WORDS) * len(lengths)
            + 3 * len(step.page_slot)
            + 4 * (8 + len(self._tables))
        )
        self._staging.begin(words)
        if step.enter:
            values = np.empty((len(step.enter), kernels.VALUE_WORDS), np.int32)
            for i, enter in enumerate(step.enter):
                self._slots.enter(enter)
                self._biases.enter(enter)
                self._pooling.enter(enter)
                if self._grammar is not None:
                    self._grammar.enter(enter)
                values[i] = self._sampling.enter(enter, constrained=enter.grammar is not None)
            slots = np.array([enter.slot for enter in step.enter], np.int32)
            count = np.array(lengths, np.int32)
            put = self._staging.put
            where = np.stack([slots, np.cumsum(count, dtype=np.int32) - count, count])
            tokens = np.concatenate([enter.tokens for enter in step.enter]).astype(np.int32, copy=False)
            kernels.write_rows(self._tokens, put(where), put(tokens))
            width = np.full(len(slots), kernels.VALUE_WORDS, np.int32)
            where = np.stack([slots, np.arange(len(slots), dtype=np.int32) * kernels.VALUE_WORDS, width])
            kernels.write_rows(self._values, put(where), put(values))
        for group, table in enumerate(self._tables):
            mine = step.page_group == group if len(self._tables) > 1 else slice(None)
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
        header = self._ring.host[flight.turn]
        header[0, 0], header[0, kernels.SAMPLES_AT] = rows, samples
        header[1, :rows], header[2, :rows], header[3, :rows] = step.slot, step.start, step.count
        header[4, :samples] = sampling

        slot = step.slot if samples == rows else step.slot[sampling]
        draw = self._sampling.draw(slot) if samples else Draw()
        late = samples > 0 and bool(self._sampling.late[slot].any())
        singles = total == rows
        longest = smallest(self._length_sizes, int((step.start + step.count).max())) if singles else self._longest
        shared = self._sharing.wanted and self._sharing.possible(
            step.slot[step.count == 1], least_rows=self._ops.tuning.shared_rows
        )
        if singles and samples == rows and not draw.steered and draw.logprobs < 0:
            size = smallest(self._row_sizes, rows)
            if size > FEW_ROWS:
                longest = max(longest, min(SHORT, self._longest))
            bucket = self._singles(size, longest, shared=shared)
            self._launch(("whole", bucket, draw), lambda: self._whole(bucket, draw))
            return
        if singles:
            size = smallest(self._row_sizes, rows)
            bucket = self._singles(size, longest, shared=shared)
        else:
            bucket = self._mixed(
                smallest(self._token_sizes, max(total, FEW_ROWS)), smallest(self._row_classes, rows), fresh=self._fresh_rows(step),
                shared=shared,
            )  # fmt: skip
        self._launch(("body", bucket), lambda: self._body(bucket))
        self._prompt_logprobs(step, flight)
        self._take_hidden(step, flight)
        if not samples:
            self._publish(1)
            return
        if late:
            # What may come next depends on the last token, which the step before has drawn; the body runs meanwhile.
            for before in self._flights:
                self._finish(before)
        if draw.steered:
            self._steer(slot, step.start[sampling] + step.count[sampling], flight)
            if draw.logprobs >= 0 and self._raw_logits is None:
                self._raw_logits = self._gpu.reals(self._rows, self._vocab)
        size = smallest(self._row_sizes, samples)
        self._launch(("sample", size, draw), lambda: self._sample(size, draw))
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
        asleep = key[0] not in self._awake
        if asleep:
            run()
            self._awake.add(key[0])
        self._graphs[key] = graph = self._gpu.capture(run)
        self.captures += 1
        if not asleep:
            graph.replay()

    # ------------------------------------------------------------------------- what a graph holds: launches, nothing else

    def _body(self, bucket: Bucket) -> None:
        self._fetch(bucket)
        self._program(("body", bucket), self._body_tape, bucket).run()

    def _fetch(self, bucket: Bucket) -> None:
        """From the header to what the model reads."""
        b = self._batch
        kernels.fetch_header(self._ring.device, self._turn, self._header, rows=bucket.rows, pdl=self._pdl)
        for group, rows in zip(self._groups, b.rows, strict=True):
            kernels.lay_out(
                self._header[1], self._header[2], self._header[3], self._rows_count, self._tokens, self._tables[group.index],
                page_tokens=group.page_tokens, ids=b.ids[: bucket.tokens], positions=b.positions[: bucket.tokens],
                query_start=rows.query_start[: bucket.rows + 1], lengths=rows.lengths[: bucket.rows],
                write_slots=b.write_slots[group.index][: bucket.tokens], page_table=rows.page_table[: bucket.rows],
                total=self._total, begun=self._begun(rows)[: bucket.rows] if bucket.fresh == "some" else None, pdl=self._pdl,
            )  # fmt: skip
            if bucket.shared and group.kind == "full":
                sharing.find_shared(
                    rows.page_table[: bucket.rows], rows.lengths[: bucket.rows], rows.query_start[: bucket.rows + 1], self._rows_count,
                    page_tokens=group.page_tokens, least_rows=self._ops.tuning.shared_rows, least_keys=self._ways.shared_prefix or 0,
                    found=self._found(rows), pdl=self._pdl,
                )  # fmt: skip

    def _begun(self, rows: PagedRows) -> Tensor:
        """Tokens of rows that begin in the step, beside the table of rows; programs look for it there."""
        return self._ops.workspace.beside(rows.lengths, "begun", self._rows)

    def _found(self, rows: PagedRows) -> Tensor:
        """How many leading keys one-token rows share, in the same way."""
        return self._ops.workspace.beside(rows.page_table, "shared", 4)

    def _fresh_rows(self, step: Step) -> Fresh:
        """Which of the rows of several tokens begin in this step, as far as that is made use of."""
        if self._fresh == "none":
            return "none"
        several = step.count > 1
        begun = step.count[several & (step.start == 0)]
        if len(begun) == several.sum():
            return "all"
        least = self._ways.partly_fresh
        return "some" if least is not None and begun.max(initial=0) >= least else "none"

    def _sample(self, size: int, draw: Draw) -> None:
        self._lay_out_samples(size, draw)
        self._program(("head", size), self._head_tape, self._singles(size, 1)).run()
        self._draw(size, draw)

    def _lay_out_samples(self, size: int, draw: Draw) -> None:
        kernels.lay_out_samples(
            self._header, self._batch.rows[0].query_start, self._values, out=self._samples.first(size),
            columns=not draw.greedy, pdl=self._pdl,
        )  # fmt: skip

    def _draw(self, size: int, draw: Draw) -> None:
        """From logits to tokens, and those to where they are wanted."""
        s = self._samples.first(size)
        logits, sampled = self._logits[:size], self._sampled[:size]
        raw = logits
        if draw.logprobs >= 0 and draw.steered:
            assert self._raw_logits is not None
            raw = self._raw_logits[:size]
            self._gpu.copy(raw, logits)
        sampler.sample(
            logits, None if draw.greedy else self._columns(s, draw), out=sampled, workspace=self._work,
            filtered=draw.filtered or draw.steered, count=self._samples_count, pdl=self._pdl,
        )  # fmt: skip
        if draw.logprobs >= 0:
            logprob, rank, ids, best = (out[:size] for out in self._logprob_out)
            self._ops.logprobs(
                raw, sampled, top=draw.logprobs, out_logprob=logprob, out_rank=rank, out_ids=ids, out_top=best,
                count=self._samples_count,
            )  # fmt: skip
        self._publish(size)

    def _publish(self, size: int) -> None:
        kernels.publish(
            self._sampled[:size], self._samples.first(size), self._header, tokens=self._tokens, ring=self._tokens_out.device,
            turn=self._turn, pdl=self._pdl,
        )  # fmt: skip

    def _whole(self, bucket: Bucket, draw: Draw) -> None:
        self._fetch(bucket)
        self._lay_out_samples(bucket.rows, draw)
        self._program(("whole", bucket), self._whole_tape, bucket).run()
        self._draw(bucket.rows, draw)

    def _columns(self, s: kernels.SampleRows, draw: Draw) -> sampler.DeviceColumns:
        plain = sampler.DeviceColumns(
            temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, seed=s.seed, position=s.position
        )
        if not draw.steered:
            return plain
        size = len(s.slot)
        return sampler.DeviceColumns(
            temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, seed=s.seed, position=s.position,
            repetition=s.repetition, presence=s.presence, frequency=s.frequency,
            history=self._tokens, history_row=s.slot, history_prompt=s.prompt, history_length=s.length,
            bias_start=self._bias_start[: size + 1], bias_token=self._bias_token, bias_value=self._bias_value,
            mask=self._mask[:size],
        )  # fmt: skip

    def _program(self, key: Key, tape: Any, bucket: Bucket) -> Program:
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = tape.program(bucket)
        return program

    # ---------------------------------------------------------------------------------------- what some steps do besides

    def _steer(self, slot: Ints, position: Ints, flight: Flight) -> None:
        """Biases and bitmasks of the rows that sample, into the device's buffers, in the stream."""
        copy, count = self._gpu.copy, len(slot)
        biased = bool(self._sampling.biased[slot].any())
        if biased or self._biased_before:
            columns = self._biases.gather(slot, position)
            self._make_room(int(columns.bias_start[count]))
            start, token, value = self._bias_ring[flight.turn % 2]
            entries = int(columns.bias_start[count])
            start.host[: count + 1] = columns.bias_start[: count + 1]
            start.host[count + 1 :] = entries
            token.host[:entries], value.host[:entries] = columns.bias_token[:entries], columns.bias_value[:entries]
            copy(self._bias_start, start.device)
            if entries:
                copy(self._bias_token[:entries], token.device[:entries])
                copy(self._bias_value[:entries], value.device[:entries])
            self._biased_before = biased
        mask, flight.stuck = self._grammar.masks(slot) if self._grammar is not None else (None, {})
        if mask is not None:
            # Late rows: every step before has ended, so nobody reads the pinned copy any more.
            self._mask_ring.host[:count] = mask.view(np.int32)
            copy(self._mask[:count], self._mask_ring.device[:count])
            self._masked_rows = max(self._masked_rows, count)
        elif self._masked_rows != 0:
            self._mask.fill_(-1)
            self._masked_rows = 0
        if mask is not None and self._masked_rows > count:
            self._mask[count:].fill_(-1)
            self._masked_rows = count

    def _bias_buffers(self, entries: int) -> tuple[Tensor, Tensor, list[tuple[Pinned, Pinned, Pinned]]]:
        """Tokens and values of a step's biases on the device, and pinned (starts, tokens, values) for two steps in flight."""
        gpu = self._gpu
        ring = [
            (gpu.pinned((self._rows + 1,)), gpu.pinned((entries,)), gpu.pinned((entries,), np.float32))
            for _ in range(2)
        ]
        return gpu.zeros(entries), gpu.reals(entries), ring

    def _make_room(self, entries: int) -> None:
        """Larger buffers where a step has more biases and banned tokens than ever before; graphs that hold the old ones go."""
        if entries <= len(self._bias_token):
            return
        self._gpu.settle()  # steps in flight read the old ones
        for key in [key for key in self._graphs if isinstance(key[-1], Draw) and key[-1].steered]:
            del self._graphs[key]
        self._bias_token, self._bias_value, self._bias_ring = self._bias_buffers(2 * entries)

    def _take_logprobs(self, flight: Flight, top: int) -> None:
        count = len(flight.sampling)
        parts = []
        for out in self._logprob_out:
            host = self._gpu.pinned(
                (count, *out.shape[1:]), np.int32 if out.dtype == self._sampled.dtype else np.float32
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
            for first in range(0, known, self._rows):
                size = min(self._rows, known - first)
                index = np.zeros(self._rows, np.int32)
                index[:size] = np.arange(starts[row] + first, starts[row] + first + size)
                live = self._ops.constant(np.array([size], np.int32))
                self._ops.gather_rows(self._hidden, self._ops.constant(index), out=self._head_rows, count=live)
                self._model.logits(self._head_rows, out=self._logits, count=live)
                following = self._slots.tokens[slot, start + first + 1 : start + first + 1 + size].copy()
                tokens = np.zeros(self._rows, np.int32)
                tokens[:size] = following
                logprob, rank, ids, best = self._logprob_out
                self._ops.logprobs(
                    self._logits, self._ops.constant(tokens), top=top, out_logprob=logprob, out_rank=rank, out_ids=ids, out_top=best,
                    count=live,
                )  # fmt: skip
                parts = []
                for out in self._logprob_out:
                    host = self._gpu.pinned(
                        (size, *out.shape[1:]), np.int32 if out.dtype == self._sampled.dtype else np.float32
                    )
                    self._gpu.copy(host.device, out[:size])
                    parts.append(host)
                flight.prompts.append((row, start + first, following, top, tuple(parts)))

    def _take_hidden(self, step: Step, flight: Flight) -> None:
        """Copies the hidden states of rows that want them, in the stream."""
        if not (step.wants >= Wants.HIDDEN).any():
            return
        total = step.tokens
        flight.hidden = self._gpu.pinned((total, self._hidden.shape[1]), np.float32)
        self._gpu.copy(flight.hidden.device, self._hidden[:total].float())
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
            tokens = self._tokens_out.host[flight.turn, : len(rows)].copy()
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
        hidden: dict[int, Floats] = {}
        if flight.hidden is not None and flight.query_start is not None:
            hidden = self._pooling.take(
                step, self._pooling.wanted(step), flight.hidden.host, flight.query_start, failed
            )
        offset = np.zeros(step.rows + 1, np.int32)
        np.cumsum(chosen >= 0, out=offset[1:], dtype=np.int32)
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

    def _lengths(self, rows: int) -> tuple[int, ...]:
        """The classes of length that decode steps of so many rows are told apart by."""
        if rows <= FEW_ROWS:
            return self._length_sizes
        return tuple(dict.fromkeys(max(most, min(SHORT, self._longest)) for most in self._length_sizes))

    def prepare(self, sizes: Sequence[int], *, prompt_sizes: Sequence[int] = (), threads: int) -> None:
        """Plans the steps that together use every kernel of the model, and compiles what `sizes` and `prompt_sizes` need (see
        `warm`): on a machine that has run these shapes before, kernels are found on disk in a moment.
        """
        changes = {*KERNELS_CHANGE_AT, *self._body_tape.kernels_change_at({*self._row_sizes, *self._token_sizes})}
        few = [size for size in self._row_sizes if size <= FEW_ROWS]
        many = [size for size in self._row_sizes if size in changes or size == self._rows]
        prompts = [
            size for size in self._token_sizes if size >= FEW_ROWS and (size in changes or size == self._capacity)
        ]
        buckets = {
            *(self._singles(rows, longest) for rows in many for longest in self._lengths(rows)),
            *(self._singles(rows, self._longest) for rows in few),
            *(
                self._mixed(tokens, rows, fresh=fresh)
                for tokens in prompts
                for rows in self._row_classes
                for fresh in self._fresh_kinds(rows)
            ),
        }
        if self._sharing.wanted:
            buckets |= {
                replace(bucket, shared=True) for bucket in buckets if bucket.rows >= self._ops.tuning.shared_rows
            }
        first = [self._singles(rows, self._length_sizes[0]) for rows in sizes]
        first += [self._mixed(tokens, self._row_classes[0], fresh=self._fresh) for tokens in prompt_sizes]
        # The largest first: its scratch serves the others.
        ordered = sorted(buckets | set(first), key=lambda bucket: (-bucket.tokens, -bucket.longest))
        now, later = _Kernels(), _Kernels()
        for bucket in ordered:
            key, tape = ("whole", self._whole_tape) if bucket.singles else ("body", self._body_tape)
            program = self._program((key, bucket), tape, bucket)
            (now if bucket in first else later).add(program)
        for size in reversed(many):
            (now if size == 1 else later).add(self._program(("head", size), self._head_tape, self._singles(size, 1)))

        if not COMPILES:
            return

        def compile_first() -> None:
            now.run()
            for bucket in first:
                self._fetch(bucket)
            for size in {1, *sizes}:  # a prompt alone wants one token
                self._lay_out_samples(size, Draw())
                self._draw(size, Draw())
            self._staging.begin(64)
            nothing = np.zeros((3, 1), np.int32)
            kernels.write_rows(self._tokens, self._staging.put(nothing), self._staging.put(nothing))
            kernels.write_entries(self._tables[0], self._staging.put(nothing))

        def compile_rest() -> None:
            later.run()
            for bucket in ordered:
                self._fetch(bucket)
            for size in many:
                for draw in COMMON_DRAWS:
                    self._lay_out_samples(size, draw)
                    self._draw(size, draw)

        with compiling(threads=threads):
            compile_first()
        self._gpu.settle()

        def rest() -> None:
            with compiling(threads=REST_THREADS):
                compile_rest()
            self._wake_library()

        self._rest = rest

    def prepare_rest(self) -> None:
        """Begins to compile, in a thread, what `prepare` left; `prepared` says when that is done. A step that needs one of them waits."""
        rest, self._rest = self._rest, None
        if rest is not None:
            self._compiler = threading.Thread(target=rest, name="tradewind-compile", daemon=True)
            self._compiler.start()

    def _wake_library(self) -> None:
        """Has the library load what matmuls of steps up to WOKEN tokens need."""
        rows = [size for size in self._row_sizes if size <= WOKEN]
        for tape, sizes in (
            (self._body_tape, sorted({*rows, *(size for size in self._token_sizes if size <= WOKEN)})),
            (self._head_tape, rows),
        ):
            found: dict[tuple[Any, ...], tuple[Tensor, Tensor | None, Any]] = {}
            for call in tape.calls:
                if call.op in ("linear", "gated_linear"):
                    weight, dtype = call["weight"], call["out"].dtype
                    scale = weight.data[1] if weight.layout == "fp8" else None
                    found[weight.n, weight.k, weight.layout, dtype] = (weight.data[0], scale, dtype)
            for weight in found.values():
                with self._gpu.quiet:
                    library.wake(*weight, sizes)

    @property
    def prepared(self) -> bool:
        """Whether every kernel of the model is compiled."""
        return self._rest is None and (self._compiler is None or not self._compiler.is_alive())

    def _singles(self, rows: int, longest: int, *, shared: bool = False) -> Bucket:
        return Bucket(tokens=rows, rows=rows, singles=True, longest=longest, shared=shared)

    def _mixed(self, tokens: int, rows: int, *, fresh: Fresh, shared: bool = False) -> Bucket:
        return Bucket(tokens=tokens, rows=rows, singles=False, longest=self._longest, fresh=fresh, shared=shared)

    def _fresh_kinds(self, rows: int) -> tuple[Fresh, ...]:
        """Those that steps of so many rows may be of."""
        if self._fresh == "none":
            return ("none",)
        return ("all", "none") if rows == 1 or self._ways.partly_fresh is None else ("all", "none", "some")

    def warm(self, sizes: Sequence[int], *, prompt_sizes: Sequence[int] = ()) -> None:
        """Captures the decode steps of these many rows and the prompt steps of these many tokens, on empty steps: changes no slot."""
        for size in sizes:
            bucket = self._singles(size, self._length_sizes[0])
            self._empty_step(("whole", bucket, Draw()), partial(self._whole, bucket, Draw()))
        for size in prompt_sizes:
            bucket = self._mixed(size, self._row_classes[0], fresh=self._fresh)
            self._empty_step(("body", bucket), partial(self._body, bucket))
        self._gpu.settle()

    def _empty_step(self, key: Key, run: Callable[[], None]) -> None:
        with self._gpu.working():
            self._ring.host[self._next_turn, 0] = 0
            self._launch(key, run)
            if key[0] == "body":
                self._publish(1)
            self._next_turn = (self._next_turn + 1) % kernels.RING
            self._gpu.settle()

    def close(self) -> None:
        """Waits for what flies and ends the threads that this has started."""
        if self._compiler is not None:
            self._compiler.join()
        self._gpu.settle()
        self._graphs.clear()
        if self._grammar is not None:
            self._grammar.close()


def _pages(max_context: int, group: KVGroup) -> int:
    """Width of a page table: a multiple of 4, or kernels would be compiled for every alignment of its rows."""
    pages = -(-(max_context + 1) // group.page_tokens)
    return -(-pages // 4) * 4


def _arrays(parts: tuple[Pinned, ...]) -> LogprobArrays:
    logprob, rank, ids, best = (part.host for part in parts)
    return LogprobArrays(logprob=logprob, rank=rank, top_ids=ids, top=best)


def _group_of(layer: int, groups: tuple[KVGroup, ...]) -> int:
    for group in groups:
        if layer in group.layers:
            return group.index
    raise AssertionError(f"layer {layer} is in no KV group")
