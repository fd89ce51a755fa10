"""Who gets in: the queue, and the checks before a sequence is given a slot and pages.

Knows: queue order, what a prompt needs, which prefixes are there or being computed. Refuses to know: what a step brings, and who listens.

A sequence is admitted when its whole prompt and one decode page fit beside what the running ones hold and were promised. One that does
not fit may be passed by smaller ones while it is young; once older than the age limit, nothing passes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter

from tradewind.cache.lease import PageLease, common_chunks
from tradewind.cache.pages import NULL_PAGE
from tradewind.config.plan import SchedulePlan
from tradewind.contract.errors import UserError
from tradewind.contract.events import Cause, Delayed, Held, Scheduled, Woken
from tradewind.contract.grammar import GrammarGate
from tradewind.engine.budget import room_for_more
from tradewind.engine.columns import Report
from tradewind.engine.policies import Policy
from tradewind.engine.queue import WaitingQueue
from tradewind.engine.running import Running
from tradewind.engine.seen import SeenPrefixes
from tradewind.engine.sequence import Sequence, State

MISSES_PER_STEP = 16
"""So many waiting sequences that do not fit are looked at in a step."""
FIRST_ONES = 2
"""So many where nothing has changed but the time."""
WHOLE_PROMPT = 1 << 30
"""`held_pages` of a sibling: it waits until the prompt is computed to its end."""


class Admission:
    """The waiting side of the scheduler, written by it only.

    `live` are all sequences by id; `preempt(victim, now, for_whom, cause)` takes slot and pages from a running one; `out` takes reports.
    """

    def __init__(
        self,
        *,
        schedule: SchedulePlan,
        policy: Policy,
        running: Running,
        live: dict[str, Sequence],
        burst_tokens: int,
        preempt: Callable[[Sequence, float, str, Cause], None],
        out: list[Report],
        grammars: GrammarGate | None = None,
    ) -> None:
        self.compiling: list[Sequence] = []
        """BLOCKED until their grammars are compiled, in order of arrival."""
        self._grammars = grammars
        self.queue: WaitingQueue = policy.queue()
        self.recomputed_tokens = 0
        self._schedule = schedule
        self._policy = policy
        self._running = running
        self._cache = running.cache
        self._live = live
        self._burst_tokens = burst_tokens
        self._preempt = preempt
        self._out = out
        self._told: dict[str, str] = {}
        """Why a request's delay was last told."""
        self._held: tuple[Cause | None, str] = (None, "")
        """What was last told about the whole queue: the cause, and who has most of what lacks."""
        self._seen = SeenPrefixes()

    # -- in and out of the queue -------------------------------------------------------------------------------------

    def push(self, sequence: Sequence, now: float) -> None:
        """Queues a waiting sequence, but blocks it on its grammar, or on the first sample of its prompt where that is at it."""
        grammar = sequence.request.grammar
        if grammar is not None:
            assert self._grammars is not None, "a request with a grammar was let in without a gate"
            try:
                ready = self._grammars.ready(grammar)
            except UserError:
                ready = False  # `take_grammars` ends it
            if not ready:
                sequence.await_grammar()
                self.compiling.append(sequence)
                self._delay(sequence, now, "grammar", lambda: "its grammar is being compiled")
                return
        parent = self._parent(sequence)
        if parent is not None and not self._prompt_done(parent):
            sequence.block(parent, pages=WHOLE_PROMPT)
            self._delay(
                sequence,
                now,
                "sample",
                lambda: "the first sample of its prompt is not computed yet",
                blocked_by=parent.id,
            )
            return
        self.queue.push(sequence)
        self._running.changed = True

    def wake(self, owner: Sequence, now: float, *, published: int) -> None:
        """Lets those go on that wait for the owner's pages, as far as it has published them."""
        for waiter in list(owner.waiters):
            if published >= waiter.held_pages:
                waiter.wake()
                self.queue.push(waiter)
                self._running.changed = True
                self._out.append(Woken(request_id=waiter.id, at_s=now))

    def take_grammars(self, now: float) -> list[tuple[Sequence, str]]:
        """Queues those whose grammars are compiled; returns those whose grammars cannot be, and why. They are still BLOCKED."""
        if not self.compiling:
            return []
        waiting, self.compiling = self.compiling, []
        refused: list[tuple[Sequence, str]] = []
        assert self._grammars is not None
        for sequence in waiting:
            assert sequence.request.grammar is not None
            try:
                ready = self._grammars.ready(sequence.request.grammar)
            except UserError as error:
                self.compiling.append(sequence)
                refused.append((sequence, str(error)))
                continue
            if ready:
                sequence.wake()
                self._out.append(Woken(request_id=sequence.id, at_s=now))
                self.push(sequence, now)
            else:
                self.compiling.append(sequence)
        return refused

    def forget(self, sequence: Sequence) -> None:
        """A sequence ends: takes it out of the queue if it is there."""
        self._told.pop(sequence.id, None)
        if sequence.state is State.WAITING:
            self.queue.remove(sequence)
            self._running.changed = True
        elif sequence in self.compiling:
            self.compiling.remove(sequence)

    def cached(self, sequence: Sequence) -> int:
        """How many leading tokens of a sequence that comes are in the prefix cache now; changes nothing."""
        return self._found(sequence) * self._cache.page_tokens

    # -- admitting ---------------------------------------------------------------------------------------------------

    def admit(
        self, now: float, budget: int, *, step: int, admits: Callable[[Sequence, int], bool] | None = None
    ) -> None:
        """Gives slots and pages to waiting sequences in queue order, as far as `budget` tokens leave room for their prompts.

        `admits`: whether one may start beside so many that run; those that may not are passed over.
        """
        running = self._running
        if not len(self.queue):
            self._hold_up(None, None, now)
            return
        if not running.changed and not self._policy.timed:
            return
        # Where nothing was given back, only somebody whose time runs out can get in, by making another give way: the first ones.
        most = len(running.free_slots) + MISSES_PER_STEP if running.changed else FIRST_ONES
        running.changed = False
        self.queue.advance(now)
        # Those who may not start now must not hide those who may.
        cause, first = self._admit(now, budget, step, admits, most=most if admits is None else len(self.queue))
        self._hold_up(cause if len(self.queue) else None, first, now)

    def _admit(
        self, now: float, budget: int, step: int, admits: Callable[[Sequence, int], bool] | None, *, most: int
    ) -> tuple[Cause | None, Sequence | None]:
        """See `admit`, of the first `most`; what holds up those that stay, and the first that it holds up."""
        running = self._running
        timed = self._policy.timed
        room = room_for_more(running.spans(), budget)
        slots_spoken_for = misses = 0
        cause: Cause | None = None
        first: Sequence | None = None
        for sequence in self.queue.first(most):
            if admits is not None and not admits(sequence, len(running.rows) - len(running.free_slots)):
                continue
            if timed:
                room = room_for_more(running.spans(before=sequence), budget)
            if room <= 0:
                running.changed = True
                return ("tokens", sequence) if first is None else (cause, first)
            reserved = self._policy.reserved_slots(sequence)
            if reserved and len(running.free_slots) <= reserved:
                self._delay(sequence, now, "slot", lambda: "the slots left are kept for requests with targets")
                if first is None:
                    cause, first = "slot", sequence
                continue
            if not running.free_slots:
                if slots_spoken_for >= len(running.draining) and not self._evict_for_slot(sequence, now):
                    self._delay(sequence, now, "slot", lambda: "all slots are in use")
                    return ("slot", sequence) if first is None else (cause, first)
                if not running.free_slots:
                    slots_spoken_for += 1
                    if first is None:
                        cause, first = "slot", sequence
                    continue
            found = self._found(sequence)
            lack = self._lack_at_best(sequence, found, keep=reserved)
            if not any(lack):
                if self._hold(sequence, found, now):
                    continue
                lack = self._try_admit(sequence, now, step)
                if not any(lack):
                    room = room_for_more(running.spans(), budget)
                    continue
            # It does not fit. Smaller ones may pass it while it is young, but not into pages that are on their way to it.
            self._delay(sequence, now, "pages", partial(self._page_reason, lack))
            misses += 1
            if first is None:
                cause, first = "pages", sequence
            coming = self._pages_coming_for(sequence, lack, now)
            if coming or misses == MISSES_PER_STEP or now - sequence.arrived_s > self._schedule.age_limit_s:
                break
        return cause, first

    def _found(self, sequence: Sequence) -> int:
        """How many leading chunks are there to be shared, in the tree or with the first sample of the same prompt."""
        limit = self._reusable_chunks(sequence)
        if not self._cache.prefix_cache:
            return limit if self._sharing_parent(sequence) is not None else 0
        return self._cache.match(sequence.namespace, sequence.chunks(self._cache.page_tokens), limit=limit)

    def _lack_at_best(self, sequence: Sequence, found: int, *, keep: int) -> list[int]:
        """By group, a lower bound of the pages that lack when `found` chunks can be shared; cheap, changes nothing.

        keep: slots that are kept from it; of the pages the same part is, unless it would be alone.
        """
        peak, spare = self._need(sequence)
        slots = len(self._running.rows)
        if len(self._running.free_slots) == slots:
            keep = 0
        return [
            max(0, most - found + more + self._cache.pools[group].total * keep // slots - self._cache.available(group))
            for group, (most, more) in enumerate(zip(peak, spare, strict=True))
        ]

    def _hold(self, sequence: Sequence, found: int, now: float) -> bool:
        """Blocks a sequence whose prefix another one is computing right now, beyond the `found` chunks that the tree has already.

        So of many that arrive together with a common prefix one computes it, and the others start a step later with it cached:

              owner     [ c0 | c1 | c2 | own ....]       being computed, not yet in the tree
              waiter    [ c0 | c1 | c2 | other .. ]      BLOCKED until three pages are published, or the owner leaves
        """
        limit = self._reusable_chunks(sequence)
        if not self._cache.prefix_cache or not limit or not self._running.filling:
            return False
        keys = sequence.chunks(self._cache.page_tokens)[:limit]
        for owner in self._running.filling:
            theirs = owner.chunks(self._cache.page_tokens)
            if owner.namespace != sequence.namespace or theirs[:1] != keys[:1]:
                continue
            same = common_chunks(keys, theirs, limit=limit)
            assert owner.lease is not None
            if same > max(found, owner.lease.published):
                self.queue.remove(sequence)
                sequence.block(owner, pages=same)
                self._delay(
                    sequence, now, "prefix", lambda: "another request is computing the same prefix", blocked_by=owner.id
                )
                return True
        return False

    def _try_admit(self, sequence: Sequence, now: float, step: int) -> list[int]:
        """Admits a sequence if its whole prompt fits. Returns by group the pages that lack; unless all are zero, nothing changed."""
        running = self._running
        limit = self._reusable_chunks(sequence)
        lease = self._cache.open(sequence.namespace, sequence.chunks(self._cache.page_tokens), limit=limit)
        parent = self._sharing_parent(sequence)
        if parent is not None and not self._cache.prefix_cache and limit:
            assert parent.lease is not None
            lease.fork(parent.lease, chunks=limit)
        start = lease.shared * self._cache.page_tokens
        peak, spare = self._need(sequence)
        lack = lease.promise(peak, spare=spare)
        if any(lack):
            lease.release()
            return lack
        if parent is not None and self._copy_last_page(parent, sequence, lease, limit):
            start = sequence.known - 1
        self.queue.take(sequence, start=start)
        running.enter(sequence, lease, start=start)
        resumed = sequence.preemptions > 0
        seen = 0
        if not resumed and self._cache.prefix_cache:
            page = self._cache.page_tokens
            whole = (sequence.prompt_tokens - 1) // page
            seen = page * self._seen.note(sequence.namespace, sequence.chunks(page)[:whole])
        if resumed:
            self.recomputed_tokens += max(0, sequence.lost_tokens - start)
        self._told.pop(sequence.id, None)
        self._out.append(
            Scheduled(
                request_id=sequence.id,
                at_s=now,
                step=step,
                cached_tokens=start,
                waited_s=now - sequence.arrived_s,
                resumed=resumed,
                seen_tokens=seen,
            )
        )
        return lack

    def _reusable_chunks(self, sequence: Sequence) -> int:
        """How many leading pages a sequence may reuse at most: its last token is always computed, for its logits are needed.

        None where something is needed of earlier tokens, too: the cache has their keys and values, not their logits or hidden states.
        """
        if wants_prompt_logprobs(sequence) or sequence.request.pooling in ("mean", "cls"):
            return 0
        return (sequence.known - 1) // self._cache.page_tokens

    def _need(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """By group: pages to promise at admission, and pages that must be there besides.

        All known tokens and one decode page; all it can ever have, once it was preempted so often that it must not be again.
        """
        if sequence.need is None:
            most = self._cache.peak_pages(sequence.positions, burst_tokens=self._burst_tokens)
            peak = self._cache.peak_pages(sequence.known, burst_tokens=self._burst_tokens)
            spare = [min(1, top - now) for top, now in zip(most, peak, strict=True)]
            protected = sequence.preemptions >= self._schedule.max_preemptions
            sequence.need = (most, [0] * len(most)) if protected else (peak, spare)
        return sequence.need

    def _page_reason(self, lack: list[int]) -> str:
        have = [self._cache.available(group) for group in range(len(lack))]
        need = [free + more for free, more in zip(have, lack, strict=True)]
        return f"needs {', '.join(map(str, need))} more pages, {', '.join(map(str, have))} are free"

    def _delay(
        self, sequence: Sequence, now: float, cause: Cause, reason: Callable[[], str], *, blocked_by: str = ""
    ) -> None:
        """Tells once per cause and request why it cannot start."""
        if self._told.get(sequence.id) != cause:
            self._told[sequence.id] = cause
            self._out.append(
                Delayed(request_id=sequence.id, at_s=now, reason=reason(), blocked_by=blocked_by, cause=cause)
            )

    def _hold_up(self, cause: Cause | None, first: Sequence | None, now: float) -> None:
        """Tells what holds up the queue where that has changed, or where whoever was blamed for it is gone."""
        told, blamed = self._held
        if cause == told and (cause is None or blamed in self._live):
            return
        blamed = self._who_has_most(cause) if cause is not None else ""
        self._held = (cause, blamed)
        self._out.append(
            Held(at_s=now, cause=cause, request_id=first.id if first is not None else "", blocked_by=blamed)
        )

    def _who_has_most(self, cause: Cause) -> str:
        """Of what lacks; changes nothing."""
        running = self._running
        rows = running.rows
        holders = filter(None, rows.sequences)
        if cause == "tokens" and running.filling:
            return max(running.filling, key=lambda s: int(rows.fill[s.slot] - rows.next[s.slot])).id
        if cause == "pages":
            most = max(holders, key=lambda s: sum(s.lease.held) if s.lease is not None else 0, default=None)
        else:
            most = min(holders, key=attrgetter("arrived_s"), default=None)
        return most.id if most is not None else ""

    # -- making room -------------------------------------------------------------------------------------------------

    def evictable(self) -> list[Sequence]:
        """Running sequences that may be preempted; changes nothing."""
        limit = self._schedule.max_preemptions
        return [
            s
            for s in self._running.rows.sequences
            if s is not None and s.state is State.RUNNING and s.preemptions < limit and s not in self._running.entered
        ]

    def _less_urgent(self, sequence: Sequence, now: float) -> list[Sequence]:
        """Running ones that may be evicted to let this one in."""
        return [s for s in self.evictable() if self._policy.may_evict(s, sequence, now)]

    def _evict_for_slot(self, sequence: Sequence, now: float) -> bool:
        """Under a policy that preempts, takes the slot of the least urgent one; False when there is nobody to give way."""
        if not self._policy.preempts_for(sequence, now):
            return False
        victim = self._policy.victim(self._less_urgent(sequence, now))
        if victim is None:
            return False
        self._preempt(victim, now, sequence.id, "slot")
        return True

    def _pages_coming_for(self, sequence: Sequence, lack: list[int], now: float) -> bool:
        """Whether the pages that lack are on their way; under a policy that preempts, sees to it."""
        coming = self._running.incoming()
        if all(need <= more for need, more in zip(lack, coming, strict=True)):
            return True
        if not self._policy.preempts_for(sequence, now):
            return False
        victims: list[Sequence] = []
        candidates = self._less_urgent(sequence, now)
        while any(need > more for need, more in zip(lack, coming, strict=True)):
            victim = self._policy.victim(candidates)
            if victim is None:
                return False
            candidates.remove(victim)
            victims.append(victim)
            assert victim.lease is not None
            coming = [more + pages for more, pages in zip(coming, victim.lease.reclaimable(), strict=True)]
        for victim in victims:
            self._preempt(victim, now, sequence.id, "pages")
        return True

    # -- samples of one prompt ---------------------------------------------------------------------------------------

    def _parent(self, sequence: Sequence) -> Sequence | None:
        """The first sample of the same prompt, while it lives and shares what makes KV equal."""
        request = sequence.request
        parent = self._live.get(request.parent) if request.parent else None
        if parent is None or parent is sequence or request.sampling.prompt_logprobs is not None:
            return None
        theirs = parent.request
        same = theirs.tokens == request.tokens and theirs.image_keys == request.image_keys
        return parent if same and parent.namespace == sequence.namespace else None

    def _prompt_done(self, parent: Sequence) -> bool:
        if parent.generated > 0:
            return True
        if parent.state is not State.RUNNING:
            return parent.state is State.DRAINING
        return bool(self._running.rows.computed[parent.slot] >= parent.prompt_tokens)

    def _sharing_parent(self, sequence: Sequence) -> Sequence | None:
        """The first sample, if a sample that starts now can use its pages."""
        parent = self._parent(sequence)
        if parent is None or parent.state is not State.RUNNING or sequence.generated:
            return None
        return parent if self._running.rows.computed[parent.slot] >= sequence.prompt_tokens else None

    def _copy_last_page(self, parent: Sequence, sequence: Sequence, lease: PageLease, index: int) -> bool:
        """Copies the parent's page that holds the end of the prompt, if the sample has all pages before it.

              parent's pages     [ full ][ full ][ part ....]      prompt ends within the third
              sample 2           [ full ][ full ][ copy ....]      two by reference, the third copied before its first row

        The sample then computes only the last prompt token. Where that is the first of its page there is nothing to copy.
        """
        assert parent.lease is not None
        if lease.shared != index or (sequence.known - 1) % self._cache.page_tokens == 0:
            return False
        sources = [own[index] for own in parent.lease.pages]
        if NULL_PAGE in sources or not lease.extend(sequence.known):
            return False
        for group, source in enumerate(sources):
            self._running.copy(group, source, lease.pages[group][index])
        return True


def wants_prompt_logprobs(sequence: Sequence) -> bool:
    """Whether the prompt's logprobs are still owed: then every prompt token is computed, whatever the cache has."""
    return sequence.request.sampling.prompt_logprobs is not None and sequence.generated == 0
