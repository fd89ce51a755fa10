"""What runs: slots, the pages of running sequences, and the steps that fly.

Knows: who sits in which slot, which pages are being taken, moved or given back, what the device has not been told yet.
Refuses to know: why a sequence enters or leaves (scheduler), and who waits (admission).

Nothing that a flying step touches is given away:

      a leaving sequence    DRAINING: keeps slot and pages until its last step is collected
      a replaced page       `retiring`: kept until the last step submitted so far is collected
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tradewind.cache.lease import KVCache, PageLease
from tradewind.contract.step import Ints, Move, frozen_ints
from tradewind.engine.budget import split, split_in_order, split_whole
from tradewind.engine.images import ImageBook
from tradewind.engine.rows import Rows
from tradewind.engine.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was submitted and not collected: what `absorb` must know of it."""

    number: int
    slot: Ints
    epoch: Ints
    count: Ints
    drafts: Ints
    decode_rows: int
    decide_s: float
    prompt_tokens: int
    decided_s: float
    chunk_ids: tuple[str, ...]
    chunk_tokens: tuple[int, ...]


class Running:
    """Slots and pages in use. Written by the scheduler and by admission, which is a part of it."""

    def __init__(
        self, *, cache: KVCache, slots: int, whole_prompts: bool = False, images: ImageBook | None = None
    ) -> None:
        """whole_prompts: a prompt is computed in one step or not at all. images: None where the model reads text alone."""
        self.cache = cache
        self.images = images
        self._whole_prompts = whole_prompts
        self.rows = Rows(slots=slots)
        self.free_slots = list(range(slots - 1, -1, -1))
        self.left_slots: list[int] = []
        """Slots given up since the last step; the device is told with the next one."""
        self.filling: list[Sequence] = []
        """Sequences with prompt left to submit, in queue order."""
        self.draining: list[Sequence] = []
        self.entered: list[Sequence] = []
        """Admitted in the step being decided."""
        self.flights: deque[Flight] = deque()
        self.changed = True
        """Slots, pages or shared prefixes came since admission last looked: who did not fit may fit now."""
        self._copies: list[tuple[int, int, int]] = []
        """(group, source, target) page copies of the step being decided."""
        self._dirty: set[int] = set()
        """Slots whose page tables have entries that the device does not know."""
        self._retiring: deque[tuple[int, int, int]] = deque()
        """(number of the last step that may use it, group, page)."""

    # -- entering and leaving ----------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence, lease: PageLease, *, start: int) -> None:
        """Gives a sequence a free slot; it computes from `start` on."""
        slot = self.free_slots.pop()
        rows = self.rows
        sequence.admit(lease, slot=slot, epoch=int(rows.epoch[slot]) + 1)
        sequence.cached_tokens = start
        rows.enter(sequence, start=start, page_end=lease.length * self.cache.page_tokens)
        rows.slide_at[slot] = lease.next_slide()
        self._dirty.add(slot)
        self.entered.append(sequence)
        self.filling.append(sequence)
        self.filling.sort(key=lambda s: (s.order, s.place))

    def leave(self, sequence: Sequence) -> bool:
        """RUNNING -> DRAINING while a step with its row flies; otherwise True: `settle` it now."""
        self.rows.decoding[sequence.slot] = False
        if sequence in self.filling:
            self.filling.remove(sequence)
        if not self.rows.flying[sequence.slot]:
            return True
        sequence.drain()
        self.draining.append(sequence)
        return False

    def settle(self, sequence: Sequence) -> None:
        """Nothing that touches the sequence flies any more: publishes what it computed, gives back slot and pages."""
        rows, slot, lease = self.rows, sequence.slot, sequence.lease
        assert lease is not None and rows.flying[slot] == 0
        rows.store(slot)
        sequence.lost_tokens = int(rows.computed[slot])
        if sequence.finish != "error":
            self.publish(sequence, min(int(rows.computed[slot]), sequence.known) // self.cache.page_tokens)
        lease.release()
        rows.leave(slot)
        self.left_slots.append(slot)
        self.free_slots.append(slot)
        self.changed = True
        if sequence.state is State.DRAINING:
            self.draining.remove(sequence)

    def settled(self) -> list[Sequence]:
        """Draining sequences that no flying step touches any more; changes nothing."""
        return [s for s in self.draining if self.rows.flying[s.slot] == 0]

    # -- pages -------------------------------------------------------------------------------------------------------

    def extend(self, sequence: Sequence, tokens: int) -> bool:
        """Gets pages for positions up to `tokens`; False, and nothing changed, when they are not there."""
        lease = sequence.lease
        assert lease is not None
        if not lease.extend(tokens):
            return False
        self.rows.page_end[sequence.slot] = lease.length * self.cache.page_tokens
        self._dirty.add(sequence.slot)
        return True

    def copy(self, group: int, source: int, target: int) -> None:
        """Copies a page before the rows of the step being decided; the source is kept until that step is collected."""
        self.cache.pools[group].share(source)
        self._copies.append((group, source, target))

    def publish(self, sequence: Sequence, pages: int) -> None:
        """Puts its first `pages` pages, whose tokens are certain, into the prefix tree."""
        lease = sequence.lease
        assert lease is not None
        if pages <= lease.published or not self.cache.prefix_cache:
            return
        for group, page in lease.publish(sequence.chunks(self.cache.page_tokens)[:pages]):
            if self.flights:
                self._retiring.append((self.flights[-1].number, group, page))
            else:
                self.cache.pools[group].drop(page)
        self._dirty.add(sequence.slot)
        self.changed = True

    def slide(self, slot: int) -> None:
        """Gives back window pages that a running sequence does not read any more."""
        sequence = self.rows.sequences[slot]
        if sequence is None or sequence.state is not State.RUNNING:
            return
        assert sequence.lease is not None
        sequence.lease.slide(int(self.rows.computed[slot]))
        self.rows.slide_at[slot] = sequence.lease.next_slide()
        self._dirty.add(slot)
        self.changed = True

    def retire(self, number: int) -> None:
        """Step `number` was collected: gives back the pages that were kept for it."""
        while self._retiring and self._retiring[0][0] <= number:
            _, group, page = self._retiring.popleft()
            self.cache.pools[group].drop(page)
            self.changed = True

    def incoming(self) -> list[int]:
        """By group, pages that come back when the flying steps are collected; changes nothing."""
        coming = [0] * len(self.cache.pools)
        for sequence in self.draining:
            assert sequence.lease is not None
            for group, pages in enumerate(sequence.lease.reclaimable()):
                coming[group] += pages
        for _, group, page in self._retiring:
            coming[group] += self.cache.pools[group].refs(page) == 1
        return coming

    # -- for the step being decided ----------------------------------------------------------------------------------

    def spans(self, *, before: Sequence | None = None) -> list[tuple[int, int]]:
        """(start, remaining) of every prompt being filled, in queue order; with `before` of those before a waiting one. Changes nothing."""
        rows = self.rows
        filling = self.filling if before is None else [s for s in self.filling if s.order <= before.order]
        return [(int(rows.next[s.slot]), int(rows.fill[s.slot] - rows.next[s.slot])) for s in filling]

    def fill_start(self) -> int:
        """Where the first prompt in queue order goes on; 0 when none is being filled. Changes nothing."""
        return int(self.rows.next[self.filling[0].slot]) if self.filling else 0

    def deepest_start(self) -> int:
        """Where the prompt goes on that has most tokens behind it; 0 when none is being filled. Changes nothing."""
        return max((int(self.rows.next[sequence.slot]) for sequence in self.filling), default=0)

    def chunks(
        self, budget: int, *, in_order: bool = False, last_first: bool = False
    ) -> tuple[list[Sequence], list[int]]:
        """Prompt chunks of this step: sequences and sizes, with their pages taken.

        in_order: each before the next, and not shared out; `last_first`: beginning with the last.
        """
        if not self.filling or budget <= 0:
            return [], []
        filling, spans = self.filling, self.spans()
        if last_first:
            filling, spans = filling[::-1], spans[::-1]
        if self.images is not None:
            return self._chunks_with_images(filling, spans, budget, in_order=in_order)
        sequences: list[Sequence] = []
        sizes: list[int] = []
        if self._whole_prompts:
            counts = split_whole(spans, budget)
        elif in_order:
            counts = split_in_order(spans, budget, page_tokens=self.cache.page_tokens)
        else:
            counts = split(spans, budget, page_tokens=self.cache.page_tokens)
        for sequence, (start, _), count in zip(filling, spans, counts, strict=True):
            # Its pages were promised; they can be missing for a moment only, while replaced pages retire.
            if count and self.extend(sequence, start + count):
                sequences.append(sequence)
                sizes.append(count)
        return sequences, sizes

    def _chunks_with_images(
        self, filling: list[Sequence], spans: list[tuple[int, int]], budget: int, *, in_order: bool
    ) -> tuple[list[Sequence], list[int]]:
        """The same where a prompt may have to wait for the features of an image."""
        assert self.images is not None
        reach = self.images.reachable(filling, spans, budget=budget)
        open_ = [index for index, most in enumerate(reach) if most]
        part = split_in_order if in_order else split
        counts = [0] * len(filling)
        for index, count in zip(
            open_,
            part([(spans[i][0], reach[i]) for i in open_], budget, page_tokens=self.cache.page_tokens),
            strict=True,
        ):
            if count and self.extend(filling[index], spans[index][0] + count):
                counts[index] = count
        self.images.take(filling, spans, counts)
        taken = [index for index, count in enumerate(counts) if count]
        return [filling[index] for index in taken], [counts[index] for index in taken]

    def take_moves(self, number: int) -> tuple[Move, ...]:
        """The page copies of step `number`, one Move per group."""
        copies, self._copies = self._copies, []
        by_group: dict[int, list[tuple[int, int]]] = {}
        for group, source, target in copies:
            by_group.setdefault(group, []).append((source, target))
            self._retiring.append((number, group, source))
        return tuple(
            Move(
                kind="copy",
                group=group,
                source=frozen_ints([source for source, _ in pairs]),
                target=frozen_ints([target for _, target in pairs]),
            )
            for group, pairs in sorted(by_group.items())
        )

    def take_edits(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Page-table entries that the device does not know yet, as the Step's four columns."""
        slots: list[int] = []
        groups: list[int] = []
        indexes: list[int] = []
        ids: list[int] = []
        for slot in self._dirty:
            sequence = self.rows.sequences[slot]
            if sequence is None:
                continue  # it left, and its table with it
            assert sequence.lease is not None
            for group, index, page in sequence.lease.edits:
                slots.append(slot)
                groups.append(group)
                indexes.append(index)
                ids.append(page)
            sequence.lease.edits.clear()
        self._dirty.clear()
        return frozen_ints(slots), frozen_ints(groups), frozen_ints(indexes), frozen_ints(ids)

    def forget_flights(self) -> None:
        """The executor is gone: nothing flies any more."""
        self.flights.clear()
        self.rows.flying[:] = 0
        self._copies.clear()
        self.retire(NO_STEP)

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold; for tests, slow."""
        self.cache.check(retiring=frozenset((group, page) for _, group, page in self._retiring))
        taken = [s for s in self.rows.sequences if s is not None]
        assert len(taken) + len(self.free_slots) == len(self.rows), "slots are not conserved"
        for slot, sequence in enumerate(self.rows.sequences):
            if sequence is not None:
                assert sequence.slot == slot and sequence.state in (State.RUNNING, State.DRAINING)
                assert sequence.lease is not None and not sequence.lease.released


NO_STEP = 1 << 62
"""Greater than every step's number."""
