"""A minimal runner for tests: rows of tokens -> ForwardBatch -> logits of every token.

Pages are handed out in random order and returned when a window has passed them; a page that was returned is filled with NaN, so that
reading one shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from tradewind.cache.rules import rule_for
from tradewind.config.card import ModelCard
from tradewind.config.kv_sizing import groups_of
from tradewind.device.batch import ForwardBatch, Scratch
from tradewind.device.kv import KVStorage
from tradewind.kernels.ops import Ops, PagedRows


class Driver:
    """Runs steps of rows over one model; sequences are numbered by the caller."""

    def __init__(
        self,
        model: Any,
        *,
        card: ModelCard,
        ops: Ops,
        capacity: int = 256,
        rows: int = 8,
        max_context: int = 512,
        page_tokens: int = 16,
        kv_format: str = "f32",
        seed: int = 0,
    ) -> None:
        self.model, self.card, self.ops = model, card, ops
        self.capacity, self.max_rows, self.page_tokens = capacity, rows, page_tokens
        self.groups = groups_of(card, page_tokens=page_tokens, format=kv_format)  # type: ignore[arg-type]
        self.pages_per_row = -(-max_context // page_tokens)
        self.pool_pages = rows * self.pages_per_row + 1
        self.kv = KVStorage(ops, self.groups, [self.pool_pages] * len(self.groups))
        self.scratch = Scratch(ops)
        random = np.random.default_rng(seed)
        self.free = [list(1 + random.permutation(self.pool_pages - 1)) for _ in self.groups]
        self.tables: dict[int, list[np.ndarray]] = {}
        self.lengths: dict[int, int] = {}
        self.adapter_of: dict[int, int] | None = None
        """By sequence, where some have an adapter: its slot in the banks."""
        self.logits = ops.empty((capacity, card.vocab_size), "f32")
        self.index = ops.constant(np.arange(capacity, dtype=np.int32))
        self.gathered = ops.empty((capacity, card.hidden), "f32")

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[np.ndarray]:
        """One step: (sequence, its next tokens) per row -> float32 logits [tokens, V] per row."""
        ids, positions, starts, lengths = [], [], [0], []
        slots: list[list[int]] = [[] for _ in self.groups]
        for sequence, tokens in rows:
            first = self.lengths.get(sequence, 0)
            last = first + len(tokens)
            self._provide(sequence, first=first, last=last)
            ids += list(tokens)
            positions += list(range(first, last))
            for group, table in enumerate(self.tables[sequence]):
                slots[group] += [
                    int(table[p // self.page_tokens]) * self.page_tokens + p % self.page_tokens
                    for p in range(first, last)
                ]
            starts.append(len(ids))
            lengths.append(last)
            self.lengths[sequence] = last
        assert len(ids) <= self.capacity
        assert len(rows) <= self.max_rows
        count = np.array([len(ids)], np.int32)
        live = np.array([len(rows)], np.int32)
        batch = ForwardBatch(
            capacity=self.capacity,
            tokens=count,
            ids=self._padded(ids, self.capacity),
            positions=self._padded(positions, self.capacity),
            rows=tuple(
                PagedRows(
                    query_start=self._padded(starts, self.max_rows + 1),
                    lengths=self._padded(lengths, self.max_rows),
                    page_table=self._table(rows, group),
                    rows=live,
                )
                for group in range(len(self.groups))
            ),
            write_slots=tuple(self._padded(column, self.capacity) for column in slots),
            kv=self.kv.layers,
            layer_group=self.kv.layer_group,
            scratch=self.scratch,
            adapters=self._adapters(rows),
        )
        self.model.backend.plan(batch)
        self.last = batch, starts
        hidden = self.model.forward(batch)
        self.ops.gather_rows(hidden, self.index, out=self.gathered, count=count)
        self.model.logits(self.gathered, out=self.logits, count=count)
        logits = self.ops.host(self.logits)[: len(ids)].copy()
        return [logits[begin:end] for begin, end in pairwise(starts)]

    def ends(self) -> np.ndarray:
        """The last step again, with what follows its last attention for each row's last token alone: logits [rows, V]."""
        batch, starts = self.last
        places = np.array(starts[1:], np.int32) - 1
        size = len(places)
        count = np.array([size], np.int32)
        adapters = None if batch.adapters is None else self.ops.constant(self.ops.host(batch.adapters)[places])
        few = replace(batch, capacity=size, tokens=count, scratch=Scratch(self.ops), adapters=adapters)
        stream, mixed = self.model.body(batch)
        index = self.ops.constant(places)
        rows = self.ops.empty((size, stream.shape[1]), "f32"), self.ops.empty((size, mixed.shape[1]), "f32")
        for source, target in zip((stream, mixed), rows, strict=True):
            self.ops.gather_rows(source, index, out=target, count=count)
        logits = self.ops.empty((size, self.card.vocab_size), "f32")
        self.model.logits(self.model.ending(few, *rows), out=logits, count=count)
        return np.array(self.ops.host(logits), np.float32)

    def _adapters(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Any:
        if self.adapter_of is None:
            return None
        return self._padded([self.adapter_of.get(k, -1) for k, tokens in rows for _ in tokens], self.capacity)

    def share(self, sequence: int, *, of: int, tokens: int) -> None:
        """Lets a new sequence begin with the first `tokens`, whole pages, of another that takes no further step."""
        pages = tokens // self.page_tokens
        assert pages * self.page_tokens == tokens <= self.lengths[of]
        self.tables[sequence] = [np.where(np.arange(self.pages_per_row) < pages, table, 0) for table in self.tables[of]]
        self.lengths[sequence] = tokens

    def _provide(self, sequence: int, *, first: int, last: int) -> None:
        """Pages for positions up to `last`; windows give back what no token from `first` on can see."""
        tables = self.tables.setdefault(sequence, [np.zeros(self.pages_per_row, np.int32) for _ in self.groups])
        for index, group in enumerate(self.groups):
            if group.window is not None:
                for page in range(rule_for(group).droppable(first)):
                    if tables[index][page]:
                        self.free[index].insert(0, int(tables[index][page]))
                        self._poison(index, int(tables[index][page]))
                        tables[index][page] = 0
            for page in range(first // self.page_tokens, -(-last // self.page_tokens)):
                if not tables[index][page]:
                    tables[index][page] = self.free[index].pop()

    def _poison(self, group: int, page: int) -> None:
        for layer in self.groups[group].layers:
            for pages in (self.kv.layers[layer].k, self.kv.layers[layer].v):
                if self.kv.layers[layer].format == "f32":
                    pages[page] = float("nan")

    def _table(self, rows: Sequence[tuple[int, Sequence[int]]], group: int) -> Any:
        table = np.zeros((self.max_rows, self.pages_per_row), np.int32)
        for row, (sequence, _) in enumerate(rows):
            table[row] = self.tables[sequence][group]
        return self.ops.constant(table)

    def _padded(self, values: Sequence[int], size: int) -> Any:
        column = np.zeros(size, np.int32)
        column[: len(values)] = values
        return self.ops.constant(column)
