"""The scheduler: which sequences compute how many tokens in the next step, and what the last one brought.

Knows: sequences, slots, pages, budget, order. Refuses to know: text, tensors, threads, sockets; it never waits and never sleeps.

With one step in flight, decide(N + 1) comes before absorb(N):

      host     decide N+1 | submit N+1 | absorb N | decide N+2 | submit N+2 | absorb N+1 | ...
      device   ------ step N ----------> ------- step N+1 --------> ------- step N+2 ---

so a decode row of N+1 computes the token that N samples: the host knows its position but not its value. What N ends is seen one step
late, and rows of N+1 that should not have been are dropped by their epoch. Nothing that a flying step touches is given away:

      a leaving sequence    DRAINING: keeps slot and pages until its last step is collected
      a replaced page       `_retiring`: kept until the last step submitted so far is collected
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tradewind.cache.lease import KVCache, PageLease
from tradewind.cache.pages import NULL_PAGE
from tradewind.config.plan import CachePlan, SchedulePlan
from tradewind.contract.errors import RequestError
from tradewind.contract.events import Arrived, Delayed, FinishReason, Preempted, Scheduled, StepDone, TokensOut
from tradewind.contract.request import Request
from tradewind.contract.step import Enter, Ints, Move, RowLogprobs, Step, StepResult, TokenLogprobs, Wants, frozen_ints
from tradewind.engine.budget import room_for_more, split
from tradewind.engine.columns import Report, StepTokens
from tradewind.engine.limits import check_fits
from tradewind.engine.queue import POLICIES, WaitingQueue
from tradewind.engine.rows import RECENT, Rows, stop_tokens
from tradewind.engine.sequence import Sequence, State

SCAN_PAST_HEAD = 32
"""How many waiting sequences are tried behind one that does not fit."""
WHOLE_PROMPT = 1 << 30
"""`held_pages` of a sibling: it waits until the prompt is computed to its end."""


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


class Scheduler:
    """Owns every sequence; the only writer of sequences, rows and leases. Not thread-safe: one owner calls it."""

    def __init__(
        self,
        *,
        schedule: SchedulePlan,
        cache: CachePlan,
        clock: Callable[[], float],
        drafts_per_row: int = 0,
    ) -> None:
        assert schedule.max_running >= 1 and schedule.max_tokens_per_step >= 1 and schedule.steps_in_flight >= 1
        self.schedule = schedule
        self.cache = KVCache(groups=cache.groups, pages=cache.pages, prefix_cache=cache.prefix_cache)
        self.drafts_per_row = drafts_per_row
        self.recomputed_tokens = 0
        """Tokens computed a second time because of preemptions, since the start."""
        self._clock = clock
        self._policy = POLICIES[schedule.policy]()
        self._queue = WaitingQueue(self._policy)
        self._rows = Rows(slots=schedule.max_running, groups=len(cache.groups))
        self._free_slots = list(range(schedule.max_running - 1, -1, -1))
        self._left_slots: list[int] = []
        """Slots given up since the last step; the device is told with the next one."""
        self._live: dict[str, Sequence] = {}
        self._filling: list[Sequence] = []
        """Running sequences with prompt left to submit, in queue order."""
        self._draining: list[Sequence] = []
        self._entered: list[Sequence] = []
        """Admitted in the step being decided."""
        self._copies: list[tuple[int, int, int]] = []
        """(group, source, target) page copies of the step being decided."""
        self._dirty: set[int] = set()
        """Slots whose page tables have entries that the device does not know."""
        self._flights: deque[Flight] = deque()
        self._retiring: deque[tuple[int, int, int]] = deque()
        """(number of the last step that may use it, group, page)."""
        self._deadlines: list[tuple[float, int, str]] = []
        self._told: dict[str, str] = {}
        self._out: list[Report] = []
        self._number = 0
        self._places = 0
        self._turn = 0
        self._retry = True
        """Something changed since the queue was last tried in vain."""
        self.burst_tokens = schedule.max_tokens_per_step * schedule.steps_in_flight
        """Most tokens of one sequence that can be submitted and not absorbed."""

    # -- what others may ask -----------------------------------------------------------------------------------------

    @property
    def flying(self) -> int:
        """Steps decided and not absorbed."""
        return len(self._flights)

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._live) - self.running

    @property
    def running(self) -> int:
        """Slots in use, draining ones among them."""
        return self.schedule.max_running - len(self._free_slots)

    @property
    def idle(self) -> bool:
        """Nothing to decide and nothing in flight."""
        return not self._live and not self._flights

    def state_of(self, request_id: str) -> State | None:
        """Where a request is; None when it is unknown or over."""
        sequence = self._live.get(request_id)
        return sequence.state if sequence else None

    def take_reports(self) -> list[Report]:
        """Everything reported since the last call, in order."""
        out, self._out = self._out, []
        return out

    # -- from outside ------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queues a request. Raises RequestError or LimitError, and changes nothing, when it can never run."""
        if request.id in self._live:
            raise RequestError(f"a request with the id '{request.id}' is already there: ids must differ")
        check_fits(request, cache=self.cache, max_context=self.schedule.max_context, burst_tokens=self.burst_tokens)
        sequence = Sequence(request, arrived_s=now, place=self._places)
        self._places += 1
        self._live[request.id] = sequence
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, sequence.place, request.id))
        self._out.append(
            Arrived(
                request_id=request.id,
                at_s=now,
                prompt_tokens=sequence.prompt_tokens,
                tenant=request.tenant,
                priority=request.priority,
            )
        )
        parent = self._parent(sequence)
        if parent is not None and not self._prompt_done(parent):
            sequence.block(parent, pages=WHOLE_PROMPT)
        else:
            self._queue.push(sequence)
            self._retry = True

    def cancel(self, request_id: str, now: float) -> None:
        """Ends a request in any state with "abort"; unknown ids are ignored, for they may just have ended."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence, "abort", now)

    def cancel_all(self, now: float) -> None:
        """Ends every request with "abort"."""
        for sequence in list(self._live.values()):
            self._end(sequence, "abort", now)

    def finish(self, request_id: str, now: float, *, reason: FinishReason = "stop") -> None:
        """Ends a request whose text reached a stop string; unknown ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence, reason, now)

    def fail_all(self, now: float, *, error: str) -> None:
        """Ends every request with "error"; for when the executor died: flights are forgotten."""
        self._flights.clear()
        self._rows.flying[:] = 0
        while self._retiring:
            _, group, page = self._retiring.popleft()
            self.cache.pools[group].drop(page)
        for sequence in list(self._live.values()):
            self._end(sequence, "error", now, error=error)
        for sequence in list(self._draining):
            self._settle(sequence)

    # -- decide ------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Step | None:
        """The next step, or None when there is nothing to compute now. Advances the counters of what it submits."""
        began = self._clock()
        rows = self._rows
        self._expire(now)
        width = 1 + self.drafts_per_row
        decode = self._decode_rows(now, width)
        self._admit(now, self.schedule.max_tokens_per_step - len(decode) * width)
        decode = decode[rows.decoding[decode]]  # some may have been preempted since
        filling, counts = self._chunks(self.schedule.max_tokens_per_step - len(decode) * width)
        if not len(decode) and not filling and not self._entered:
            return None

        slot = np.concatenate((decode, np.array([s.slot for s in filling], dtype=np.int32))).astype(np.int32)
        start = rows.next[slot]
        count = np.minimum(rows.bound[slot] - start, width).astype(np.int32)
        drafts = count - 1
        wants = np.full(len(slot), Wants.ALL if self.drafts_per_row else Wants.LAST, dtype=np.int32)
        if filling:
            count[len(decode) :] = counts
            drafts[len(decode) :] = 0
            wants[len(decode) :] = [self._wants(s, c) for s, c in zip(filling, counts, strict=True)]
        epoch = rows.epoch[slot]
        rows.next[slot] += count
        rows.flying[slot] += 1
        for sequence in filling:
            if rows.next[sequence.slot] == rows.fill[sequence.slot]:
                rows.decoding[sequence.slot] = True
                self._filling.remove(sequence)

        self._number += 1
        enter = tuple(self._enter(sequence) for sequence in self._entered)
        moves = self._moves()
        edits = self._edits()
        leave = tuple(self._left_slots)
        self._left_slots.clear()
        self._entered.clear()
        step = Step(
            number=self._number,
            slot=frozen_ints(slot),
            epoch=frozen_ints(epoch),
            start=frozen_ints(start),
            count=frozen_ints(count),
            drafts=frozen_ints(drafts),
            wants=frozen_ints(wants),
            enter=enter,
            leave=leave,
            page_slot=frozen_ints(edits[0]),
            page_group=frozen_ints(edits[1]),
            page_index=frozen_ints(edits[2]),
            page_id=frozen_ints(edits[3]),
            moves=moves,
        )
        prompt_tokens = sum(counts)
        self._flights.append(
            Flight(
                number=self._number,
                slot=slot,
                epoch=epoch,
                count=count,
                drafts=drafts,
                decode_rows=len(decode),
                decide_s=self._clock() - began,
                prompt_tokens=prompt_tokens,
            )
        )
        return step

    def _decode_rows(self, now: float, width: int) -> Ints:
        """Slots of the sequences that compute their next token, pages made sure of; may preempt."""
        rows = self._rows
        ready = rows.decoding & (rows.next < rows.bound)
        if self.drafts_per_row:
            ready &= rows.flying == 0
        slots = np.flatnonzero(ready).astype(np.int32)
        most = self.schedule.max_tokens_per_step // width
        if len(slots) > most:
            # More rows than budget: everyone in turn.
            self._turn = (self._turn + most) % len(slots)
            slots = np.sort(np.roll(slots, -self._turn)[:most])
        short = slots[np.minimum(rows.next[slots] + width, rows.bound[slots]) > rows.page_end[slots]]
        if not len(short):
            return slots
        lacking: list[int] = []
        growing = [rows.sequences[slot] for slot in short.tolist()]
        for sequence in sorted((s for s in growing if s is not None), key=lambda s: (s.order, s.place)):
            if sequence.state is not State.RUNNING:
                continue  # preempted a moment ago for one before it
            slot = sequence.slot
            end = min(int(rows.next[slot]) + width, int(rows.bound[slot]))
            if not self._extend(sequence, end) and not self._make_room(sequence, end, now):
                lacking.append(slot)
        keep = rows.decoding[slots]
        if lacking:
            keep &= ~np.isin(slots, lacking)
        return slots[keep]

    def _extend(self, sequence: Sequence, tokens: int) -> bool:
        lease = sequence.lease
        assert lease is not None
        if not lease.extend(tokens):
            return False
        self._rows.page_end[sequence.slot] = lease.length * self.cache.page_tokens
        self._dirty.add(sequence.slot)
        return True

    def _make_room(self, sequence: Sequence, tokens: int, now: float) -> bool:
        """Preempts until the sequence's pages can grow; False when it must wait for pages to return, or was itself the victim."""
        lease = sequence.lease
        assert lease is not None
        while not self._extend(sequence, tokens):
            coming = self._incoming()
            if all(lack <= more for lack, more in zip(lease.shortage(tokens), coming, strict=True)):
                return False
            victim = self._policy.victim(self._evictable())
            if victim is None:
                return False
            self._preempt(victim, now, for_whom=sequence.id)
            if victim is sequence:
                return False
        return True

    def _evictable(self) -> list[Sequence]:
        limit = self.schedule.max_preemptions
        return [
            s
            for s in self._rows.sequences
            if s is not None and s.state is State.RUNNING and s.preemptions < limit and s not in self._entered
        ]

    def _incoming(self) -> list[int]:
        """By group, pages that come back when the flying steps are collected."""
        coming = [0] * len(self.cache.pools)
        for sequence in self._draining:
            assert sequence.lease is not None
            for group, pages in enumerate(sequence.lease.reclaimable()):
                coming[group] += pages
        for _, group, page in self._retiring:
            coming[group] += self.cache.pools[group].refs(page) == 1
        return coming

    def _chunks(self, budget: int) -> tuple[list[Sequence], list[int]]:
        """Prompt chunks of this step: sequences and sizes, pages made sure of."""
        if not self._filling or budget <= 0:
            return [], []
        rows = self._rows
        spans = [(int(rows.next[s.slot]), int(rows.fill[s.slot] - rows.next[s.slot])) for s in self._filling]
        counts = split(spans, budget, page_tokens=self.cache.page_tokens)
        filling: list[Sequence] = []
        sizes: list[int] = []
        for sequence, (start, _), count in zip(self._filling, spans, counts, strict=True):
            # Its pages were promised; they can be missing for a moment only, while replaced pages retire.
            if count and self._extend(sequence, start + count):
                filling.append(sequence)
                sizes.append(count)
        return filling, sizes

    def _wants(self, sequence: Sequence, count: int) -> Wants:
        slot = sequence.slot
        last = self._rows.next[slot] + count == self._rows.fill[slot]
        if _wants_prompt_logprobs(sequence):
            return Wants.ALL if last else Wants.ALL_NO_SAMPLE
        return Wants.LAST if last else Wants.NONE

    def _enter(self, sequence: Sequence) -> Enter:
        request = sequence.request
        return Enter(
            slot=sequence.slot,
            epoch=sequence.epoch,
            request_id=request.id,
            tokens=frozen_ints(sequence.tokens[: sequence.known]),
            prompt_tokens=sequence.prompt_tokens,
            capacity_tokens=sequence.capacity,
            sampling=request.sampling,
            seed=request.seed,
            eos_ids=stop_tokens(sequence),
            grammar=request.grammar,
            adapter=request.adapter,
        )

    def _moves(self) -> tuple[Move, ...]:
        copies, self._copies = self._copies, []
        by_group: dict[int, list[tuple[int, int]]] = {}
        for group, source, target in copies:
            by_group.setdefault(group, []).append((source, target))
            self._retiring.append((self._number, group, source))
        return tuple(
            Move(
                kind="copy",
                group=group,
                source=frozen_ints([source for source, _ in pairs]),
                target=frozen_ints([target for _, target in pairs]),
            )
            for group, pairs in sorted(by_group.items())
        )

    def _edits(self) -> tuple[list[int], list[int], list[int], list[int]]:
        slots: list[int] = []
        groups: list[int] = []
        indexes: list[int] = []
        ids: list[int] = []
        for slot in self._dirty:
            sequence = self._rows.sequences[slot]
            if sequence is None:
                continue  # it left; so does its table
            assert sequence.lease is not None
            for group, index, page in sequence.lease.edits:
                slots.append(slot)
                groups.append(group)
                indexes.append(index)
                ids.append(page)
            sequence.lease.edits.clear()
        self._dirty.clear()
        return slots, groups, indexes, ids

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, now: float, budget: int) -> None:
        """Gives slots and pages to waiting sequences, in queue order."""
        if not self._retry or not len(self._queue):
            return
        self._retry = False
        slots_spoken_for = 0
        for sequence in self._queue.first(len(self._free_slots) + SCAN_PAST_HEAD):
            if room_for_more(self._spans(), budget) <= 0:
                self._retry = True
                return
            if not self._free_slots:
                if slots_spoken_for >= len(self._draining) and not self._evict_for_slot(sequence, now):
                    self._delay(sequence, now, "slot", "all slots are in use")
                    return
                if not self._free_slots:
                    slots_spoken_for += 1
                    continue
            if self._hold(sequence, now):
                continue
            if self._try_admit(sequence, now):
                continue
            # It does not fit. Smaller ones may pass it while it is young, but not into pages that are on their way to it.
            if self._pages_coming_for(sequence, now) or now - sequence.arrived_s > self.schedule.age_limit_s:
                return

    def _spans(self) -> list[tuple[int, int]]:
        rows = self._rows
        return [(int(rows.next[s.slot]), int(rows.fill[s.slot] - rows.next[s.slot])) for s in self._filling]

    def _reusable_chunks(self, sequence: Sequence) -> int:
        """How many leading pages the sequence may reuse at most: its last token is always computed, for its logits are needed."""
        return 0 if _wants_prompt_logprobs(sequence) else (sequence.known - 1) // self.cache.page_tokens

    def _hold(self, sequence: Sequence, now: float) -> bool:
        """Blocks a sequence whose prefix another one is computing right now, beyond what the tree has already."""
        limit = self._reusable_chunks(sequence)
        if not self.cache.prefix_cache or not limit or not self._filling:
            return False
        keys = sequence.chunks(self.cache.page_tokens)
        found = -1
        for owner in self._filling:
            if owner.namespace != sequence.namespace:
                continue
            theirs = owner.chunks(self.cache.page_tokens)
            if theirs[:1] != keys[:1]:
                continue
            same = 0
            for mine, other in zip(keys[:limit], theirs, strict=False):
                if mine != other:
                    break
                same += 1
            if found < 0:
                found = self.cache.match(sequence.namespace, keys, limit=limit)
            if same > found:
                self._queue.remove(sequence)
                sequence.block(owner, pages=same)
                self._delay(sequence, now, "prefix", "another request is computing the same prefix", blocked_by=owner.id)
                return True
        return False

    def _try_admit(self, sequence: Sequence, now: float) -> bool:
        """Opens a lease and checks that the whole prompt fits; False, and nothing changed, if it does not."""
        keys = sequence.chunks(self.cache.page_tokens)
        limit = self._reusable_chunks(sequence)
        lease = self.cache.open(sequence.namespace, keys, limit=limit)
        start = self._share_with_parent(sequence, lease, limit)
        peak, spare = self._need(sequence)
        if not lease.promise(peak, spare=spare) or not (start % self.cache.page_tokens == 0 or lease.extend(sequence.known)):
            lease.release()
            self._delay(sequence, now, "pages", self._page_reason(peak, spare))
            return False
        self._queue.remove(sequence)
        slot = self._free_slots.pop()
        resumed = sequence.preemptions > 0
        sequence.admit(lease, slot=slot, epoch=int(self._rows.epoch[slot]) + 1)
        sequence.cached_tokens = start
        if resumed:
            self.recomputed_tokens += sequence.known - start
        rows = self._rows
        rows.enter(sequence, start=start, page_end=lease.length * self.cache.page_tokens)
        rows.slide_at[slot] = lease.next_slide()
        if start % self.cache.page_tokens:
            self._copy_last_page(sequence, lease, start // self.cache.page_tokens)
        self._dirty.add(slot)
        self._entered.append(sequence)
        self._file_filling(sequence)
        self._told.pop(sequence.id, None)
        self._out.append(
            Scheduled(
                request_id=sequence.id,
                at_s=now,
                step=self._number + 1,
                cached_tokens=start,
                waited_s=now - sequence.arrived_s,
                resumed=resumed,
            )
        )
        return True

    def _file_filling(self, sequence: Sequence) -> None:
        self._filling.append(sequence)
        self._filling.sort(key=lambda s: (s.order, s.place))

    def _need(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """By group: pages to promise at admission, and pages that must be there besides.

        All known tokens and one decode page; all it can ever have, once it was preempted so often that it must not be again.
        """
        most = self.cache.peak_pages(sequence.capacity - 1, burst_tokens=self.burst_tokens)
        if sequence.preemptions >= self.schedule.max_preemptions:
            return most, [0] * len(most)
        peak = self.cache.peak_pages(sequence.known, burst_tokens=self.burst_tokens)
        return peak, [min(1, top - now) for top, now in zip(most, peak, strict=True)]

    def _page_reason(self, peak: list[int], spare: list[int]) -> str:
        need = [p + s for p, s in zip(peak, spare, strict=True)]
        have = [self.cache.available(group) for group in range(len(peak))]
        return f"needs {', '.join(map(str, need))} pages, {', '.join(map(str, have))} are free"

    def _pages_coming_for(self, sequence: Sequence, now: float) -> bool:
        """Whether pages for a sequence that does not fit are on their way; under a policy that preempts, sees to it."""
        peak, spare = self._need(sequence)
        lack = [
            max(0, p + s - self.cache.available(group)) for group, (p, s) in enumerate(zip(peak, spare, strict=True))
        ]
        coming = self._incoming()
        if all(need <= more for need, more in zip(lack, coming, strict=True)):
            return any(lack)
        if not self._policy.preempts:
            return False
        victims: list[Sequence] = []
        candidates = self._less_urgent(sequence)
        while any(need > more for need, more in zip(lack, coming, strict=True)):
            victim = self._policy.victim(candidates)
            if victim is None:
                return False
            candidates.remove(victim)
            victims.append(victim)
            assert victim.lease is not None
            coming = [more + pages for more, pages in zip(coming, victim.lease.reclaimable(), strict=True)]
        for victim in victims:
            self._preempt(victim, now, for_whom=sequence.id)
        return True

    def _evict_for_slot(self, sequence: Sequence, now: float) -> bool:
        if not self._policy.preempts:
            return False
        victim = self._policy.victim(self._less_urgent(sequence))
        if victim is None:
            return False
        self._preempt(victim, now, for_whom=sequence.id)
        return True

    def _less_urgent(self, sequence: Sequence) -> list[Sequence]:
        """Running ones that may be evicted to let this one in: of lower priority, also when ageing is counted."""
        priority = sequence.request.priority
        return [s for s in self._evictable() if s.request.priority > priority and s.order > sequence.order]

    def _delay(self, sequence: Sequence, now: float, kind: str, reason: str, *, blocked_by: str = "") -> None:
        if self._told.get(sequence.id) != kind:
            self._told[sequence.id] = kind
            self._out.append(Delayed(request_id=sequence.id, at_s=now, reason=reason, blocked_by=blocked_by))

    # -- samples of one prompt ---------------------------------------------------------------------------------------

    def _parent(self, sequence: Sequence) -> Sequence | None:
        """The first sample of the same prompt, while it lives and shares what makes KV equal."""
        request = sequence.request
        parent = self._live.get(request.parent) if request.parent else None
        if parent is None or request.sampling.prompt_logprobs is not None:
            return None
        theirs = parent.request
        same = theirs.tokens == request.tokens and theirs.image_keys == request.image_keys
        return parent if same and parent.namespace == sequence.namespace else None

    def _prompt_done(self, sequence: Sequence) -> bool:
        if sequence.generated > 0:
            return True
        if sequence.state is not State.RUNNING:
            return sequence.state is State.DRAINING
        return bool(self._rows.computed[sequence.slot] >= self._rows.fill[sequence.slot])

    def _share_with_parent(self, sequence: Sequence, lease: PageLease, limit: int) -> int:
        """The position from which a sequence computes: after its shared pages, or its last prompt token if a sibling has the rest.

              parent's pages     [ full ][ full ][ part ....]      prompt ends within the third
              sample 2           [ full ][ full ][ copy ....]      the first two by reference, the third copied before its first row
        """
        size = self.cache.page_tokens
        start = lease.shared * size
        parent = self._parent(sequence)
        if parent is None or parent.state is not State.RUNNING or sequence.generated or parent.lease is None:
            return start
        if self._rows.computed[parent.slot] < sequence.prompt_tokens:
            return start
        if not self.cache.prefix_cache and limit and lease.fork(parent.lease, chunks=limit):
            start = limit * size
        last = sequence.known - 1
        if start // size != limit or last % size == 0:
            return start
        if any(own[limit] == NULL_PAGE for own in parent.lease.pages):
            return start
        return last

    def _copy_last_page(self, sequence: Sequence, lease: PageLease, index: int) -> None:
        parent = self._parent(sequence)
        assert parent is not None and parent.lease is not None
        for group, pool in enumerate(self.cache.pools):
            source = parent.lease.pages[group][index]
            pool.share(source)
            self._copies.append((group, source, lease.pages[group][index]))

    # -- absorb ------------------------------------------------------------------------------------------------------

    def absorb(self, result: StepResult, now: float) -> list[Report]:
        """Takes in what the oldest flying step brought; returns everything reported since the last call."""
        began = self._clock()
        rows = self._rows
        flight = self._flights.popleft()
        assert result.number == flight.number, f"step {result.number} came back, {flight.number} was expected"
        slot = flight.slot
        rows.flying[slot] -= 1
        brought = np.diff(result.offset)
        ok = rows.epoch[slot] == flight.epoch
        for row, reason in result.failed.items():
            sequence = rows.sequences[int(slot[row])]
            if ok[row] and sequence is not None:
                ok[row] = False
                self._end(sequence, "error", now, error=reason)
        live = slot[ok]
        if self.drafts_per_row:
            drafted = flight.drafts[ok] > 0
            rows.computed[live] += np.where(drafted, brought[ok], flight.count[ok])
            rows.next[live[drafted]] = rows.computed[live[drafted]]
        else:
            rows.computed[live] += flight.count[ok]

        for row in range(flight.decode_rows, len(slot)):
            if ok[row]:
                self._filled(int(slot[row]), result.logprobs.get(row))
        if len(result.tokens):
            self._take_tokens(result, flight, ok, brought, now)
        if self.cache.sliding:
            for passed in live[rows.computed[live] >= rows.slide_at[live]].tolist():
                self._slide(passed)
        while self._retiring and self._retiring[0][0] <= flight.number:
            _, group, page = self._retiring.popleft()
            self.cache.pools[group].drop(page)
            self._retry = True
        for sequence in [s for s in self._draining if rows.flying[s.slot] == 0]:
            self._settle(sequence)
        self._out.append(
            StepDone(
                number=flight.number,
                at_s=now,
                rows=len(slot),
                tokens=int(flight.count.sum()),
                prompt_tokens=flight.prompt_tokens,
                decide_s=flight.decide_s,
                absorb_s=self._clock() - began,
                device_s=result.device_s,
                running=self.running,
                waiting=self.waiting,
                pages_used=self.cache.used(),
                pages_total=tuple(pool.total - 1 for pool in self.cache.pools),
            )
        )
        return self.take_reports()

    def _filled(self, slot: int, logprobs: RowLogprobs | None) -> None:
        """A prompt chunk is certain: publishes its pages and wakes who waited for them."""
        sequence = self._rows.sequences[slot]
        assert sequence is not None and sequence.lease is not None
        if logprobs is not None:
            sequence.prompt_logprobs.extend(logprobs.prompt)
        if sequence.state is not State.RUNNING:
            return
        computed = int(self._rows.computed[slot])
        done = computed >= self._rows.fill[slot]
        self._publish(sequence, computed // self.cache.page_tokens)
        if done and sequence.preemptions < self.schedule.max_preemptions:
            sequence.lease.unpromise()
            self._retry = True
        for waiter in list(sequence.waiters):
            if done or sequence.lease.published >= waiter.held_pages:
                self._wake(waiter)

    def _publish(self, sequence: Sequence, pages: int) -> None:
        lease = sequence.lease
        assert lease is not None
        if pages <= lease.published or not self.cache.prefix_cache:
            return
        for group, page in lease.publish(sequence.chunks(self.cache.page_tokens)[:pages]):
            if self._flights:
                self._retiring.append((self._flights[-1].number, group, page))
            else:
                self.cache.pools[group].drop(page)
        self._dirty.add(sequence.slot)
        self._retry = True

    def _slide(self, slot: int) -> None:
        sequence = self._rows.sequences[slot]
        if sequence is None or sequence.state is not State.RUNNING:
            return
        assert sequence.lease is not None
        sequence.lease.slide(int(self._rows.computed[slot]))
        self._rows.slide_at[slot] = sequence.lease.next_slide()
        self._dirty.add(slot)
        self._retry = True

    def _take_tokens(self, result: StepResult, flight: Flight, ok: npt.NDArray[np.bool_], brought: Ints, now: float) -> None:
        """Files sampled tokens: rows with nothing special all at once, the others one by one."""
        rows = self._rows
        single = ok & (brought == 1) & ~rows.talkative[flight.slot]
        slot = flight.slot[single]
        tokens = result.tokens[result.offset[:-1][single]]
        generated = rows.generated[slot] + 1
        rows.generated[slot] = generated
        rows.recent[slot, (generated - 1) % RECENT] = tokens
        stops = (rows.stop[slot] == tokens[:, None]).any(axis=1) & (generated > rows.min_tokens[slot])
        ends = stops | (generated >= rows.max_tokens[slot])
        for full in slot[generated - rows.stored[slot] == RECENT].tolist():
            rows.store(full)
        if ends.any():
            going = ~ends
            self._report(slot[going], tokens[going], generated[going], now)
            for ended, token, stopped in zip(
                slot[ends].tolist(), tokens[ends].tolist(), stops[ends].tolist(), strict=True
            ):
                sequence = rows.sequences[ended]
                assert sequence is not None
                self._end(sequence, "stop" if stopped else "length", now, tokens=(token,), stopped=stopped)
        else:
            self._report(slot, tokens, generated, now)
        for row in np.flatnonzero(ok & (brought > 0) & ~single).tolist():
            first, last = int(result.offset[row]), int(result.offset[row + 1])
            self._take_row(int(flight.slot[row]), result.tokens[first:last].tolist(), result.logprobs.get(row), now)

    def _report(self, slot: Ints, tokens: Ints, generated: Ints, now: float) -> None:
        if len(slot):
            rows = self._rows
            self._out.append(
                StepTokens(
                    at_s=now,
                    ids=rows.ids[slot].tolist(),
                    tokens=tokens,
                    generated=generated,
                    cached=rows.cached[slot],
                    prompt=rows.prompt[slot],
                )
            )

    def _take_row(self, slot: int, tokens: list[int], logprobs: RowLogprobs | None, now: float) -> None:
        """One row's tokens, several or with logprobs; what comes after a stop is cut off."""
        rows = self._rows
        sequence = rows.sequences[slot]
        assert sequence is not None
        finish: FinishReason | None = None
        kept: list[int] = []
        for token in tokens:
            generated = int(rows.generated[slot]) + 1
            rows.recent[slot, (generated - 1) % RECENT] = token
            rows.generated[slot] = generated
            if generated - rows.stored[slot] == RECENT:
                rows.store(slot)
            kept.append(token)
            if generated > rows.min_tokens[slot] and token in rows.stop[slot]:
                finish = "stop"
            elif generated >= rows.max_tokens[slot]:
                finish = "length"
            if finish:
                break
        sampled = logprobs.sampled[: len(kept)] if logprobs is not None else ()
        if finish:
            # The KV of guesses after the end is not the text's.
            rows.computed[slot] -= len(tokens) - len(kept)
            self._end(
                sequence, finish, now, tokens=tuple(kept), logprobs=sampled, stopped=finish == "stop"
            )
            return
        self._out.append(
            TokensOut(
                request_id=sequence.id,
                at_s=now,
                tokens=tuple(kept),
                logprobs=sampled,
                prompt_logprobs=self._prompt_logprobs(sequence),
                cached_tokens=int(rows.cached[slot]),
                prompt_tokens=int(rows.prompt[slot]),
                generated_tokens=int(rows.generated[slot]),
            )
        )

    @staticmethod
    def _prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprobs, ...]:
        out = tuple(sequence.prompt_logprobs)
        sequence.prompt_logprobs.clear()
        return out

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _end(
        self,
        sequence: Sequence,
        finish: FinishReason,
        now: float,
        *,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        stopped: bool = False,
        error: str | None = None,
    ) -> None:
        """Ends a request in any state and says so, once; its slot and pages follow when no step touches them any more."""
        del self._live[sequence.id]
        self._told.pop(sequence.id, None)
        sequence.finish, sequence.error = finish, error
        rows = self._rows
        if sequence.slot >= 0:
            sequence.generated = int(rows.generated[sequence.slot])
        self._out.append(
            TokensOut(
                request_id=sequence.id,
                at_s=now,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=self._prompt_logprobs(sequence),
                finish=finish,
                stop_token=tokens[-1] if stopped else None,
                error=error,
                cached_tokens=sequence.cached_tokens,
                prompt_tokens=sequence.prompt_tokens,
                generated_tokens=sequence.generated,
            )
        )
        if sequence.state is State.WAITING:
            self._queue.remove(sequence)
            self._retry = True
            sequence.end()
        elif sequence.state is State.BLOCKED:
            sequence.end()
        else:
            rows.epoch[sequence.slot] += 1  # what still flies is dropped
            if sequence.state is State.RUNNING:
                self._leave(sequence)
        for waiter in list(sequence.waiters):
            self._wake(waiter)

    def _preempt(self, sequence: Sequence, now: float, *, for_whom: str) -> None:
        """Takes slot and pages from a running sequence, which will compute its tokens again; tokens still flying are kept."""
        self._out.append(
            Preempted(
                request_id=sequence.id,
                at_s=now,
                lost_tokens=int(self._rows.computed[sequence.slot]),
                for_whom=for_whom,
            )
        )
        self._leave(sequence)
        for waiter in list(sequence.waiters):
            self._wake(waiter)

    def _leave(self, sequence: Sequence) -> None:
        """RUNNING -> DRAINING while a step with its row flies, otherwise at once to where it goes."""
        slot = sequence.slot
        self._rows.decoding[slot] = False
        if sequence in self._filling:
            self._filling.remove(sequence)
        if self._rows.flying[slot]:
            sequence.drain()
            self._draining.append(sequence)
        else:
            self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Nothing that touches the sequence flies any more: publishes what it computed and gives back slot and pages."""
        rows, slot, lease = self._rows, sequence.slot, sequence.lease
        assert lease is not None and rows.flying[slot] == 0
        rows.store(slot)
        if sequence.finish != "error":
            self._publish(sequence, min(int(rows.computed[slot]), sequence.known) // self.cache.page_tokens)
        lease.release()
        rows.leave(slot)
        self._left_slots.append(slot)
        self._free_slots.append(slot)
        self._retry = True
        if sequence.state is State.DRAINING:
            self._draining.remove(sequence)
        if sequence.finish is not None:
            sequence.end()
            return
        sequence.pause()
        if not sequence.generated:
            sequence.prompt_logprobs.clear()
        sequence.requeue()
        self._queue.push(sequence)

    def _wake(self, sequence: Sequence) -> None:
        sequence.wake()
        self._queue.push(sequence)
        self._retry = True

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, place, request_id = heapq.heappop(self._deadlines)
            sequence = self._live.get(request_id)
            if sequence is not None and sequence.place == place:
                waited = now - sequence.arrived_s
                self._end(sequence, "abort", now, error=f"the deadline passed after {waited:.3f} s (limit {deadline:.3f} s)")

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold; for tests, slow."""
        self.cache.check(retiring=frozenset((group, page) for _, group, page in self._retiring))
        slots = [s.slot for s in self._rows.sequences if s is not None]
        assert len(slots) + len(self._free_slots) == self.schedule.max_running, "slots are not conserved"
        for slot, sequence in enumerate(self._rows.sequences):
            if sequence is not None:
                assert sequence.slot == slot and sequence.state in (State.RUNNING, State.DRAINING)
                assert sequence.lease is not None and not sequence.lease.released
        for sequence in self._queue:
            assert sequence.state is State.WAITING and sequence.lease is None
        if self.idle:
            for pool in self.cache.pools:
                assert pool.leased == 0 and pool.pinned == 0, "pages are leased though nothing runs"
            assert not any(self.cache.promised), "pages are promised though nothing runs"


def _wants_prompt_logprobs(sequence: Sequence) -> bool:
    """Whether the prompt's logprobs are still owed: then every prompt token is computed, whatever the cache has."""
    return sequence.request.sampling.prompt_logprobs is not None and sequence.generated == 0
