"""What a step launches on one GPU: buffers of fixed address, the model's tapes, and the functions that a graph captures.

Knows: where everything lies on the device, and the order of launches inside a step. Refuses to know: slots' owners, requests, and when
what is launched (graph_runner).

    fetch         header of the turn -> ids, positions, lengths, page tables of the step
    body          fetch, model.forward                                                    ends in hidden states
    sample        gather the rows that want a token, head, draw, publish                  ends in the ring of tokens
    whole         fetch, forward and head in one tape, draw, publish                      where every row has one token and wants the next
    stem, end     the same as body and sample, but for what follows the last attention,   where few rows want a token (`few_ends`)
                  which is in the second, for rows that want a token
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from itertools import pairwise
from typing import Any

from tradewind.contract.kv import KVGroup
from tradewind.device.batch import ForwardBatch, Scratch
from tradewind.kernels.ops import KVLayer, PagedRows, Tensor
from tradewind.kernels.triton import low_rank, planning
from tradewind.kernels.triton import sample as sampler
from tradewind.kernels.triton import shared as sharing
from tradewind.kernels.triton import step as kernels
from tradewind.kernels.triton.attention_program import reserve_for_splits
from tradewind.kernels.triton.graphs import Gpu
from tradewind.kernels.triton.ops import CudaOps
from tradewind.kernels.triton.program import Bucket, Fresh, Program
from tradewind.kernels.triton.tape import Tape
from tradewind.models.registry import Model
from tradewind.runner.buckets import FEW_ROWS, LONGEST, ladder, smallest
from tradewind.runner.steering import Steering
from tradewind.sampling.resident import Draw

MANY_ROWS_LONGEST = (256, 4096)
"""Attention of more than FEW_ROWS rows is cut alike up to each of these lengths, whatever LONGEST says below them."""
MOST_LOGPROBS = 20
SMALL_STEP, SMALL_STEP_ROWS = 1024, 32
"""Steps with prompts of up to so many tokens have a grid for so many rows, too: there, programs for rows that are not there are many."""
DEEP_ROWS = (1, 4)
"""Prompts of a step whose attention may be cut over their keys: one, or so few."""
LONG_CONTEXT, LONG_BESIDE = 32768, 64
"""Where prompts may be so long, steps in which one goes on beside fewer rows than that are usual (`long_prompts`) ..."""
LONG_CHUNKS = (16, 32, 64, 128, 192, 256, 384)
"""... with chunks of so many tokens ..."""
BEGINNING = 256
"""... of which so many, or more, begin it."""
PROGRAMS = 32
"""Programs that are kept where graphs are made of them: one has thousands of objects, and garbage is looked for among all of them."""
BESIDE_PROMPTS = (0, 64, 256)
"""Running rows beside prompts that fill a step, for which there are sizes."""
Key = tuple[Any, ...]


class StepPrograms:
    """One owner of the device's side of a runner. Every function here only launches; none waits."""

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
        shared: bool,
        adapted: bool = False,
        graphs: bool = False,
    ) -> None:
        self.model, self.ops, self._gpu, self.groups, self._kv = model, ops, gpu, groups, kv
        self.capacity, self.rows, self.longest = max_tokens_per_step, max_running, max_context
        self._vocab = vocab_size
        self._pdl = gpu.on_gpu
        latents = any(group.kind == "latent" for group in groups) and not ops.deterministic
        self.fresh: Fresh = "all" if latents or model.backend.name == "fa3" else "none"
        """Steps whose prompts all begin in them have programs of their own."""
        self.ways = ops.ways
        self.row_sizes = ladder(max_running)
        self.token_sizes = token_sizes(max_tokens_per_step, max_running)
        self.length_sizes = (*(size for size in LONGEST if size < max_context), max_context)
        mixed = sorted({1, FEW_ROWS, *self.ways.mixed_rows})
        self.row_classes = (*(size for size in mixed if size < max_running), max_running)

        limit = max(max_running, 16)
        self.tokens = gpu.zeros(max_running, -(-(max_context + 1) // 4) * 4)
        self.values = gpu.zeros(max_running, kernels.VALUE_WORDS)
        self.tables = tuple(gpu.zeros(max_running, _pages(max_context, group)) for group in groups)
        self.ring = gpu.pinned((kernels.RING, kernels.HEADER_FIELDS, limit))
        self.tokens_out = gpu.pinned((kernels.RING, limit))
        self._header = gpu.zeros(kernels.HEADER_FIELDS, limit)
        self._turn = gpu.zeros(4)[:1]
        self.adapted = adapted
        """Sequences may have adapters."""
        self.adapter_of = gpu.zeros(max_running, 1) - 1
        """By slot: the bank slot of the sequence's adapter, -1 where it has none."""
        self.batch = self._forward_batch()
        for paged in self.batch.rows:  # now, because a capture must not allocate them
            if shared:
                self.found(paged)
            if self.ways.partly_fresh is not None:
                self._begun(paged)
        self._samples = kernels.SampleRows.allocate(max_running, device=gpu.device)
        self.sampled = gpu.zeros(max_running)
        self.logits = gpu.reals(max_running, vocab_size)
        self._raw_logits: Tensor | None = None
        self._work = sampler.SampleWorkspace.allocate(max_running, vocab_size, device=gpu.device, penalties=True)
        self.steering = Steering(gpu, rows=max_running, vocab_size=vocab_size)
        self.logprob_out = (
            gpu.reals(max_running),
            gpu.zeros(max_running),
            gpu.zeros(max_running, MOST_LOGPROBS),
            gpu.reals(max_running, MOST_LOGPROBS),
        )
        self._head_rows = ops.empty((max_running, hidden), ops.activation)
        with ops.record() as tape:
            self.hidden = model.forward(self.batch)
        self.tapes = {"body": tape}
        """By kind of program."""
        with ops.record() as tape:
            ops.gather_rows(self.hidden, self._samples.index, out=self._head_rows, count=self._samples_count)
            model.logits(self._head_rows, out=self.logits, count=self._samples_count)
        self.tapes["head"] = tape
        self.few_ends = ops.tuning.few_ends and model.ends_by_row
        """Where few of a step's rows want a token, the last layer ends for those alone."""
        if self.few_ends:
            self._tapes_of_few_ends(hidden)
        with ops.record() as tape:  # every row has one token and wants the next: nothing to gather
            model.logits(model.forward(self.batch)[:max_running], out=self.logits, count=self._rows_count)
        self.tapes["whole"] = tape
        self._programs: OrderedDict[Key, Program] = OrderedDict()
        self._most = PROGRAMS if graphs else None
        """Programs that are kept; None: all."""
        self._short: dict[str, Tape] = {}
        """By kind of program: what sketches are planned of."""
        self._planning = threading.Lock()
        """Programs are planned one at a time, by whichever thread wants one: plans share scratch."""
        cut = [
            replace(self.mixed(tokens, rows, fresh="none"), deep=deep, deep_tokens=tokens)
            for tokens in self.token_sizes
            for rows in self.classes_of(tokens)
            for deep in self.deep_rows(tokens, rows, fresh="none")
        ]
        if cut:  # now, because a capture must not allocate
            reserve_for_splits(tape, cut)

    def _tapes_of_few_ends(self, hidden: int) -> None:
        """Records a step whose last layer ends in the rows that want a token. Nobody in it has an adapter."""
        rows, count = self.rows, self._samples_count
        with self.ops.record() as tape:
            stream, mixed = self.model.body(self.batch)
        tape.keep(stream)
        tape.keep(mixed)
        self.tapes["stem"] = tape
        some = self.ops.empty((rows, hidden), "f32"), self.ops.empty((rows, mixed.shape[1]), self.ops.activation)
        nobody = self._gpu.zeros(rows) - 1 if self.adapted else None
        batch = replace(self.batch, capacity=rows, tokens=count, scratch=Scratch(self.ops), adapters=nobody)
        with self.ops.record() as tape:
            for source, target in zip((stream, mixed), some, strict=True):
                self.ops.gather_rows(source, self._samples.index, out=target, count=count)
            self.model.logits(self.model.ending(batch, *some), out=self.logits, count=count)
        self.tapes["ending"] = tape

    def _forward_batch(self) -> ForwardBatch:
        """The batch over buffers of fixed address, filled by kernels."""
        gpu, groups = self._gpu, self.groups
        self._total = gpu.zeros(4)[:1]
        self._rows_count = self._header[0, :1]
        self._samples_count = self._header[0, kernels.SAMPLES_AT : kernels.SAMPLES_AT + 1]
        query_start, lengths = gpu.zeros(self.rows + 1), gpu.zeros(self.rows)
        return ForwardBatch(
            capacity=self.capacity,
            tokens=self._total,
            ids=gpu.zeros(self.capacity),
            positions=gpu.zeros(self.capacity),
            rows=tuple(
                PagedRows(
                    query_start=query_start,
                    lengths=lengths,
                    page_table=gpu.zeros(self.rows, _pages(self.longest, group)),
                    rows=self._rows_count,
                )
                for group in groups
            ),
            write_slots=tuple(gpu.zeros(self.capacity) for _ in groups),
            kv=self._kv,
            layer_group=tuple(_group_of(layer, groups) for layer in range(len(self._kv))),
            scratch=Scratch(self.ops),
            adapters=gpu.zeros(self.capacity) if self.adapted else None,
        )

    # ----------------------------------------------------------------------------------------------- sizes told apart

    def singles(self, rows: int, longest: int, *, shared: bool = False, adapted: bool = False) -> Bucket:
        """A step of rows with one token each, none longer than `longest`."""
        return Bucket(tokens=rows, rows=rows, singles=True, longest=longest, shared=shared, adapted=adapted)

    def mixed(self, tokens: int, rows: int, *, fresh: Fresh, shared: bool = False, adapted: bool = False) -> Bucket:
        """A step of rows with any number of tokens, of any length."""
        return Bucket(
            tokens=tokens, rows=rows, singles=False, longest=self.longest, fresh=fresh, shared=shared, adapted=adapted
        )

    def classes_of(self, tokens: int) -> tuple[int, ...]:
        """The numbers of rows that steps with prompts and so many tokens have grids for."""
        if tokens > SMALL_STEP or self.rows <= SMALL_STEP_ROWS:
            return self.row_classes
        return tuple(sorted({*self.row_classes, SMALL_STEP_ROWS}))

    def deep_rows(self, tokens: int, rows: int, *, fresh: Fresh) -> tuple[int, ...]:
        """The numbers of long prompts that steps of so many tokens and rows are told apart by (see `Bucket.deep`)."""
        least = self.ways.split_prompts
        long = least is not None and self.longest >= least and any(group.kind != "latent" for group in self.groups)
        if not long or self.ops.deterministic or fresh == "all" or tokens > self.ops.tuning.split_tokens:
            return ()
        return (1,) if rows == 1 else DEEP_ROWS

    def long_prompts(self) -> tuple[Bucket, ...]:
        """Steps in which a long prompt goes on, and those in which it begins, beside answers whose pace keeps its chunks short
        (engine/pacing.py): deep ones first. Empty where no prompt can be long."""
        if self.longest < LONG_CONTEXT:
            return ()
        deep: dict[Bucket, None] = {}
        begin: dict[Bucket, None] = {}
        for chunk in LONG_CHUNKS:
            for fewer, rows in pairwise(self.classes_of(chunk)):
                if rows > LONG_BESIDE or rows - 1 + chunk > self.capacity:
                    break
                held = (smallest(self.token_sizes, max(FEW_ROWS, chunk + answers)) for answers in range(fewer, rows))
                for tokens in dict.fromkeys(held):
                    bucket = self.mixed(tokens, rows, fresh="none")
                    if chunk >= BEGINNING:
                        begin[self.mixed(tokens, rows, fresh=self.fresh)] = begin[bucket] = None
                    for last in self.deep_rows(tokens, rows, fresh="none")[:1]:
                        own = smallest(self.token_sizes, max(FEW_ROWS, chunk))
                        deep[replace(bucket, deep=last, deep_tokens=own)] = None
        return (*deep, *begin)

    def fresh_kinds(self, rows: int) -> tuple[Fresh, ...]:
        """Those that steps of so many rows may be of."""
        if self.fresh == "none":
            return ("none",)
        return ("all", "none") if rows == 1 or self.ways.partly_fresh is None else ("all", "none", "some")

    def lengths(self, rows: int) -> tuple[int, ...]:
        """The classes of length that decode steps of so many rows are told apart by."""
        if rows <= FEW_ROWS:
            return self.length_sizes
        sizes = {*MANY_ROWS_LONGEST, *(size for size in LONGEST if size > MANY_ROWS_LONGEST[-1])}
        return (*sorted(size for size in sizes if size < self.longest), self.longest)

    def program(self, kind: str, bucket: Bucket) -> Program:
        """The launches of a size, planned when it is first asked for. Kind: "body", "head", "whole"; where there are few ends also "stem",
        "ending". From any thread; what a plan zeroes lies in the caller's stream."""
        program = self._programs.get((kind, bucket))
        if program is None:
            with self._planning:
                program = self._programs.get((kind, bucket))
                if program is None:
                    program = self._programs[kind, bucket] = planning.plan(self.tapes[kind], bucket)
                    if self._most is not None and len(self._programs) > self._most:
                        self._programs.popitem(last=False)
        return program

    def sketch(self, kind: str, bucket: Bucket) -> Program:
        """Launches of every kernel that the program of a size has, for a few of the layers. From any thread, as `program`."""
        with self._planning:
            if kind not in self._short:
                self._short[kind] = self.tapes[kind].short()
            return planning.plan(self._short[kind], bucket)

    def plan(self, key: Key) -> None:
        """Plans what a graph of that key holds: a capture must not allocate."""
        kind, size = key[:2]
        if kind in ("sample", "end"):
            self.head(size, few=kind == "end")
        else:
            self.program(kind, size)

    def head(self, size: int, *, few: bool = False) -> Program:
        """The head's program for so many rows; few: with the end of the last layer."""
        return self.program("ending" if few else "head", self.singles(size, 1))

    # ------------------------------------------------------------------------- what a graph holds: launches, nothing else

    def body(self, bucket: Bucket, *, few: bool = False) -> None:
        """From the header to hidden states; few: to what the last attention gives."""
        self.fetch(bucket)
        self.program("stem" if few else "body", bucket).run()

    def fetch(self, bucket: Bucket) -> None:
        """From the header to what the model reads."""
        b = self.batch
        kernels.fetch_header(self.ring.device, self._turn, self._header, rows=bucket.rows, pdl=self._pdl)
        for group, rows in zip(self.groups, b.rows, strict=True):
            kernels.lay_out(
                self._header[1], self._header[2], self._header[3], self._rows_count, self.tokens, self.tables[group.index],
                page_tokens=group.page_tokens, ids=b.ids[: bucket.tokens], positions=b.positions[: bucket.tokens],
                query_start=rows.query_start[: bucket.rows + 1], lengths=rows.lengths[: bucket.rows],
                write_slots=b.write_slots[group.index][: bucket.tokens], page_table=rows.page_table[: bucket.rows],
                total=self._total, begun=self._begun(rows)[: bucket.rows] if bucket.fresh == "some" else None, pdl=self._pdl,
            )  # fmt: skip
            if bucket.shared and group.kind == "full":
                sharing.find_shared(
                    rows.page_table[: bucket.rows], rows.lengths[: bucket.rows], rows.query_start[: bucket.rows + 1], self._rows_count,
                    page_tokens=group.page_tokens, least_rows=self.ops.tuning.shared_rows, least_keys=self.ways.shared_prefix or 0,
                    found=self.found(rows), pdl=self._pdl,
                )  # fmt: skip

        if bucket.adapted:
            low_rank.lay_out_adapters(
                self._header[1], b.rows[0].query_start[: bucket.rows + 1], self._rows_count, self.adapter_of,
                out=b.adapters[: bucket.tokens], pdl=self._pdl,
            )  # fmt: skip

    def _begun(self, rows: PagedRows) -> Tensor:
        """Tokens of rows that begin in the step, beside the table of rows; programs look for it there."""
        return self.ops.workspace.beside(rows.lengths, "begun", self.rows)

    def found(self, rows: PagedRows) -> Tensor:
        """How many leading keys one-token rows share, in the same way."""
        return self.ops.workspace.beside(rows.page_table, "shared", 4)

    def sample(self, size: int, draw: Draw, *, few: bool = False) -> None:
        """From where the body ends to tokens, for the rows that want one."""
        self.lay_out_samples(size, draw)
        self.head(size, few=few).run()
        self.draw(size, draw)

    def lay_out_samples(self, size: int, draw: Draw) -> None:
        """Which hidden rows want a token, and with which values they draw."""
        kernels.lay_out_samples(
            self._header, self.batch.rows[0].query_start, self.values, out=self._samples.first(size),
            columns=not draw.greedy, pdl=self._pdl,
        )  # fmt: skip

    def draw(self, size: int, draw: Draw) -> None:
        """From logits to tokens, and those to where they are wanted."""
        s = self._samples.first(size)
        logits, sampled = self.logits[:size], self.sampled[:size]
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
            logprob, rank, ids, best = (out[:size] for out in self.logprob_out)
            self.ops.logprobs(
                raw, sampled, top=draw.logprobs, out_logprob=logprob, out_rank=rank, out_ids=ids, out_top=best,
                count=self._samples_count,
            )  # fmt: skip
        self.publish(size)

    def publish(self, size: int) -> None:
        """Tokens to their slots and to the ring that the host reads; ends the turn."""
        kernels.publish(
            self.sampled[:size], self._samples.first(size), self._header, tokens=self.tokens, ring=self.tokens_out.device,
            turn=self._turn, pdl=self._pdl,
        )  # fmt: skip

    def whole(self, bucket: Bucket, draw: Draw) -> None:
        """A step in which every row has one token and wants the next."""
        self.fetch(bucket)
        self.lay_out_samples(bucket.rows, draw)
        self.program("whole", bucket).run()
        self.draw(bucket.rows, draw)

    def _columns(self, s: kernels.SampleRows, draw: Draw) -> sampler.DeviceColumns:
        plain = sampler.DeviceColumns(
            temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, seed=s.seed, position=s.position
        )
        if not draw.steered:
            return plain
        size, steering = len(s.slot), self.steering
        return sampler.DeviceColumns(
            temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, seed=s.seed, position=s.position,
            repetition=s.repetition, presence=s.presence, frequency=s.frequency,
            history=self.tokens, history_row=s.slot, history_prompt=s.prompt, history_length=s.length,
            bias_start=steering.start[: size + 1], bias_token=steering.token, bias_value=steering.value,
            mask=steering.mask[:size],
        )  # fmt: skip

    def need_raw_logits(self) -> None:
        """Memory for logits before penalties, for steered steps that want logprobs: now, because a capture must not allocate."""
        if self._raw_logits is None:
            self._raw_logits = self._gpu.reals(self.rows, self._vocab)

    def token_logprobs(self, index: Tensor, tokens: Tensor, *, top: int, live: Tensor) -> None:
        """Logprobs of given tokens after `live` of the hidden rows that `index` names, to `logprob_out`; overwrites the logits."""
        self.ops.gather_rows(self.hidden, index, out=self._head_rows, count=live)
        self.model.logits(self._head_rows, out=self.logits, count=live)
        logprob, rank, ids, best = self.logprob_out
        self.ops.logprobs(
            self.logits, tokens, top=top, out_logprob=logprob, out_rank=rank, out_ids=ids, out_top=best, count=live
        )


def token_sizes(most: int, max_running: int) -> tuple[int, ...]:
    """How many tokens steps have room for, with at most `most`, of which `max_running` are for running rows beside prompts.

    Prompts often fill what a budget has for them, beside no running row or some: a bucket of the whole budget would compute up to 6 % for
    nothing.
    """
    filled = {most - max_running + rows for rows in BESIDE_PROMPTS if rows < max_running}
    return tuple(sorted({*ladder(most), *(filled if most >= 8 * max_running else ())}))


def _pages(max_context: int, group: KVGroup) -> int:
    """Width of a page table: a multiple of 4, or kernels would be compiled for every alignment of its rows."""
    pages = -(-(max_context + 1) // group.page_tokens)
    return -(-pages // 4) * 4


def _group_of(layer: int, groups: tuple[KVGroup, ...]) -> int:
    for group in groups:
        if layer in group.layers:
            return group.index
    raise AssertionError(f"layer {layer} is in no KV group")
