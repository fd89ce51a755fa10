"""The scheduler: which sequences compute how many tokens in the next step, and what the last one brought.

Knows: sequences, slots, pages, budget, order. Refuses to know: text, tensors, threads, sockets; it never waits and never sleeps.

With one step in flight, decide(N + 1) comes before absorb(N):

      host     decide N+1 | submit N+1 | absorb N | decide N+2 | submit N+2 | absorb N+1 | ...
      device   ------ step N ----------> ------- step N+1 --------> ------- step N+2 ---

so a decode row of N+1 computes the token that N samples: the host knows its position but not its value. What N ends is seen one step
late; a row of N+1 that should not have been is dropped by one comparison of its epoch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tradewind.cache.lease import KVCache
from tradewind.config.plan import CachePlan, SchedulePlan
from tradewind.contract.errors import RequestError
from tradewind.contract.events import Arrived, Cause, Delayed, FinishReason, Preempted, StepDone, TokensOut
from tradewind.contract.grammar import GrammarGate
from tradewind.contract.request import Request
from tradewind.contract.step import Enter, Ints, RowLogprobs, Step, StepResult, TokenLogprobs, Wants, frozen_ints
from tradewind.engine.admission import WHOLE_PROMPT, Admission, wants_prompt_logprobs
from tradewind.engine.columns import Report, StepTokens, grammars_told
from tradewind.engine.degrade import FREE, Degrade, DegradeStats, degrader_of
from tradewind.engine.images import ImageBook
from tradewind.engine.limits import check_fits
from tradewind.engine.pacing import OverloadedError, Pacer, StepClock, StepLimit, StepSeconds, planned_seconds
from tradewind.engine.policies import POLICIES, SloPolicy
from tradewind.engine.queue import OVERDUE_EVERY, SlackQueue
from tradewind.engine.rows import RECENT, stop_tokens
from tradewind.engine.running import Flight, Running
from tradewind.engine.sequence import Sequence, State


class Scheduler:
    """Owns every sequence: it, with its parts `Admission` and `Running`, is their only writer. Not thread-safe: one owner calls it."""

    def __init__(
        self,
        *,
        schedule: SchedulePlan,
        cache: CachePlan,
        clock: Callable[[], float],
        drafts_per_row: int = 0,
        grammars: GrammarGate | None = None,
        step_seconds: StepSeconds | None = None,
        degrade: Degrade | None = None,
    ) -> None:
        """Without `grammars` a request with a grammar is refused. `step_seconds`: what steps are paced by, better than the plan's own.

        `degrade`: another ladder than the plan's.
        """
        assert schedule.max_running >= 1 and schedule.max_tokens_per_step >= 1 and schedule.steps_in_flight >= 1
        self.schedule = schedule
        self.cache = KVCache(groups=cache.groups, pages=cache.pages, prefix_cache=cache.prefix_cache)
        self.drafts_per_row = drafts_per_row
        self.burst_tokens = schedule.max_tokens_per_step * schedule.steps_in_flight
        """Most tokens of one sequence that can be submitted and not absorbed."""
        self._clock = clock
        self._grammars = grammars
        self._degrade = degrade if degrade is not None else degrader_of(schedule, drafts=drafts_per_row > 0)
        if step_seconds is None and schedule.step_cost is not None:
            step_seconds = planned_seconds(schedule.step_cost)
        self._pacer: Pacer | None = None
        self._steps: StepClock | None = None
        self._limit: StepLimit | None = None
        if schedule.policy == "slo" and step_seconds is not None:
            self._steps = self._pacer = Pacer(schedule, page_tokens=cache.page_tokens, seconds=step_seconds)
        if schedule.pace is not None and step_seconds is not None:
            self._steps = self._steps or StepClock(step_seconds)
            self._limit = StepLimit(
                schedule.pace, self._steps, budget=schedule.max_tokens_per_step, page_tokens=cache.page_tokens
            )
        self._policy = POLICIES[schedule.policy](schedule, _no_time if self._pacer is None else self._pacer.prompt_s)
        self._live: dict[str, Sequence] = {}
        self._out: list[Report] = []
        self._running = Running(
            cache=self.cache,
            slots=schedule.max_running,
            whole_prompts=schedule.whole_prompts,
            images=None if schedule.images is None else ImageBook(schedule.images),
        )
        self._admission = Admission(
            schedule=schedule,
            policy=self._policy,
            running=self._running,
            live=self._live,
            burst_tokens=self.burst_tokens,
            preempt=self._preempt,
            out=self._out,
            grammars=grammars,
        )
        self._deadlines: list[tuple[float, int, str]] = []
        self._number = 0
        self._places = 0
        self._turn = 0

    # -- what others may ask -----------------------------------------------------------------------------------------

    @property
    def flying(self) -> int:
        """Steps decided and not absorbed."""
        return len(self._running.flights)

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Requests that are queued or blocked."""
        ended = sum(s.finish is not None for s in self._running.draining)
        return len(self._live) - (self.running - ended)

    @property
    def running(self) -> int:
        """Slots in use, those of leaving sequences among them."""
        return self.schedule.max_running - len(self._running.free_slots)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed a second time because of preemptions, since the start."""
        return self._admission.recomputed_tokens

    @property
    def idle(self) -> bool:
        """Nothing to decide and nothing in flight."""
        return not self._live and not self._running.flights

    @property
    def degraded(self) -> DegradeStats | None:
        """What is given up under overload; None where nothing ever is."""
        return None if self._degrade is None else self._degrade.stats()

    def rest(self, now: float) -> float | None:
        """Nothing is open: what was given up under overload comes back in its time. Seconds until there is more; None: nothing is left."""
        return self._degrade.rest(now) if self._degrade is not None and self.idle else None

    @property
    def images(self) -> ImageBook | None:
        """The account of images' features; None where the model reads text alone."""
        return self._running.images

    def wait_outside(self, timeout_s: float) -> bool:
        """Waits a moment for what is made elsewhere (grammars); False at once when no sequence waits for such a thing."""
        if not self._admission.compiling or self._grammars is None:
            return False
        self._grammars.wait(timeout_s)
        return True

    def state_of(self, request_id: str) -> State | None:
        """Where a request is; None when it is unknown or over."""
        sequence = self._live.get(request_id)
        return sequence.state if sequence else None

    def sequences(self) -> list[Sequence]:
        """Those that have not ended, for a look from outside; a copy, safe to make in any thread."""
        return list(self._live.values())

    def pace_by(self, step_seconds: StepSeconds) -> None:
        """Better step times from now on, as after a refit; changes nothing where no step is paced."""
        if self._steps is not None:
            self._steps.use(step_seconds)

    def take_reports(self) -> list[Report]:
        """Everything reported since the last call, in order."""
        out = list(self._out)
        self._out.clear()
        return out

    # -- from outside ------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queues a request. Raises, and changes nothing: RequestError or LimitError when it can never run, OverloadedError when it cannot
        meet its target now and its class wants to be told so at once."""
        if request.id in self._live:
            raise RequestError(f"a request with the id '{request.id}' is already there: ids must differ")
        check_fits(request, cache=self.cache, schedule=self.schedule, burst_tokens=self.burst_tokens)
        if self._degrade is not None:
            request = self._degrade.come(request, now, idle=self.idle)
        # The front's own time, where it is given: what a request waited in the inbox is waiting too.
        arrived_s = min(now, request.arrived_s) if request.arrived_s > 0 else now
        sequence = Sequence(request, arrived_s=arrived_s, place=self._places)
        hopeless = self._judge(sequence, now) if self._pacer is not None else None
        if request.grammar is not None:
            if self._grammars is None:
                raise RequestError("the request has a grammar, but this engine was started without structured output")
            self._grammars.open(request.grammar)
        self._places += 1
        self._live[request.id] = sequence
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, sequence.place, request.id))
        self._out.append(
            Arrived(
                request_id=request.id,
                at_s=arrived_s,
                prompt_tokens=sequence.prompt_tokens,
                tenant=request.tenant,
                priority=request.priority,
                traffic_class=request.traffic_class,
                taken_s=now,
            )
        )
        if hopeless is not None:
            self._out.append(Delayed(request_id=request.id, at_s=now, reason=hopeless))
        self._admission.push(sequence, now)

    def _judge(self, sequence: Sequence, now: float) -> str | None:
        """Why a request that comes cannot meet its TTFT target; where its class says so it is marked late, or refused (OverloadedError)."""
        policy, queue, pacer, running = self._policy, self._admission.queue, self._pacer, self._running
        assert isinstance(policy, SloPolicy) and isinstance(queue, SlackQueue) and pacer is not None
        own = policy.class_of(sequence)
        if own is None or own.ttft_s is None:
            return None
        latest = policy.latest(sequence)
        before = queue.before(latest)
        turns = len(before) + 1 - len(running.free_slots)
        if turns > 0:  # those without a target give way
            turns -= sum(1 for s in running.rows.sequences if s is not None and not policy.has_target(s))
        why = pacer.verdict(
            own,
            sequence,
            running.rows,
            cached=self._admission.cached(sequence),
            filling=self._urgent_tokens(latest),
            waiting=sum(s.known for s in before),
            turns=turns,
            now=now,
        )
        if why is not None and own.late == "refuse":
            raise OverloadedError(f"the server is too busy: {why}; try again later")
        sequence.late = why is not None and own.late == "demote"
        return why

    def _urgent_tokens(self, before: float) -> int:
        """Tokens left of prompts that run and must go on before then; changes nothing."""
        running = self._running
        if not running.filling:
            return 0
        spans = zip(running.filling, running.spans(), strict=True)
        return sum(rest for sequence, (_, rest) in spans if sequence.order < before)

    def cancel(self, request_id: str, now: float) -> None:
        """Ends a request in any state with "abort"; unknown ids are ignored, for they may just have ended."""
        self.finish(request_id, now, reason="abort")

    def finish(self, request_id: str, now: float, *, reason: FinishReason = "stop") -> None:
        """Ends a request whose text reached a stop string; unknown ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._end(sequence, reason, now)

    def cancel_all(self, now: float) -> None:
        """Ends every request with "abort"."""
        for sequence in list(self._live.values()):
            self._end(sequence, "abort", now)

    def fail_all(self, now: float, *, error: str) -> None:
        """The executor died: what flies is forgotten, every request ends with "error"."""
        self._running.forget_flights()
        if self._steps is not None:
            self._steps.forget_flights()
        for sequence in list(self._live.values()):
            self._end(sequence, "error", now, error=error)
        for sequence in self._running.settled():
            self._settle(sequence, now)

    def forget(self) -> None:
        """Empties the prefix cache of everything that no running sequence uses."""
        self.cache.tree.clear()
        running = self._running
        running.changed = True
        if running.images is not None:
            running.images.forget(running.filling, running.spans())

    # -- decide ------------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> Step | None:
        """The next step, or None when there is nothing to compute now. Advances the counters of what it submits.

        Decode rows come first, then prompt chunks in queue order; new sequences enter as far as tokens, slots and pages are left.
        """
        began = self._clock()
        running = self._running
        rows = running.rows
        self._expire(now)
        for sequence, why in self._admission.take_grammars(now):
            self._end(sequence, "error", now, error=why)
        limits = FREE
        if self._degrade is not None:
            limits = self._degrade(now, self._live.values(), flying=self.flying, generated=rows.generated)
        for sequence in limits.ended:
            self._end(sequence, "error", now, error=limits.why, overloaded=True)
        running.changed |= limits.changed
        width = 1 + (self.drafts_per_row if limits.drafts is None else min(limits.drafts, self.drafts_per_row))
        budget = self.schedule.max_tokens_per_step
        decode = self._decode_rows(now, width)
        room = budget - len(decode) * width
        pacer = self._pacer
        if pacer is not None and (running.filling or len(self._admission.queue)):
            room = pacer.chunk(decode, rows, now, most=room, start=running.fill_start())
        if self._limit is not None and (running.filling or len(self._admission.queue)):
            room = self._limit.chunk(decode, rows, most=room, start=running.deepest_start())
        if limits.chunk_tokens is not None:
            room = min(room, limits.chunk_tokens)
        budget = room + len(decode) * width
        self._admission.admit(now, room, step=self._number + 1, admits=limits.admits)
        decode = decode[rows.decoding[decode]]  # some may have been preempted since
        # Each so many-th step the last prompts go before those with targets, so that they do not stand still.
        urgent = pacer is not None
        turn = urgent and self._number % OVERDUE_EVERY == 0
        filling, sizes = running.chunks(budget - len(decode) * width, in_order=urgent, last_first=turn)
        if not len(decode) and not filling and not running.entered:
            return None

        slot = np.concatenate((decode, np.array([s.slot for s in filling], dtype=np.int32)))
        start = rows.next[slot]
        count = np.minimum(rows.bound[slot] - start, width).astype(np.int32)
        drafts = count - 1
        wants = np.full(len(slot), Wants.ALL if self.drafts_per_row else Wants.LAST, dtype=np.int32)
        if filling:
            count[len(decode) :] = sizes
            drafts[len(decode) :] = 0
            wants[len(decode) :] = [self._wants(s, size) for s, size in zip(filling, sizes, strict=True)]
        epoch = rows.epoch[slot]
        rows.next[slot] += count
        rows.flying[slot] += 1
        for sequence in filling:
            if rows.next[sequence.slot] == rows.fill[sequence.slot]:
                rows.decoding[sequence.slot] = True
                running.filling.remove(sequence)

        self._number += 1
        page_slot, page_group, page_index, page_id = running.take_edits()
        drop, encode = running.images.take_orders() if running.images is not None else ((), ())
        step = Step(
            number=self._number,
            slot=frozen_ints(slot),
            epoch=frozen_ints(epoch),
            start=frozen_ints(start),
            count=frozen_ints(count),
            drafts=frozen_ints(drafts),
            wants=frozen_ints(wants),
            enter=tuple(_enter(sequence) for sequence in running.entered),
            leave=tuple(running.left_slots),
            page_slot=page_slot,
            page_group=page_group,
            page_index=page_index,
            page_id=page_id,
            moves=running.take_moves(self._number),
            drop=drop,
            encode=encode,
        )
        if pacer is not None:
            pacer.entered(running.entered)
        if self._steps is not None:
            self._steps.submitted(
                rows=len(decode),
                context=int(start[: len(decode)].sum()),
                chunk=sum(sizes),
                start=int(start[len(decode)]) if sizes else 0,
                now=now,
            )
        running.left_slots.clear()
        running.entered.clear()
        running.flights.append(
            Flight(
                number=self._number,
                slot=slot,
                epoch=epoch,
                count=count,
                drafts=drafts,
                decode_rows=len(decode),
                decide_s=self._clock() - began,
                prompt_tokens=sum(sizes),
                decided_s=now,
                chunk_ids=tuple(sequence.id for sequence in filling),
                chunk_tokens=tuple(sizes),
            )
        )
        return step

    def _decode_rows(self, now: float, width: int) -> Ints:
        """Slots of the sequences that compute their next token, pages made sure of; may preempt."""
        rows = self._running.rows
        ready = rows.decoding & (rows.next < rows.bound)
        if self.drafts_per_row:
            ready &= rows.flying == 0  # where its next row starts is known when the guesses are judged
        slots = np.flatnonzero(ready).astype(np.int32)
        if self._pacer is not None and len(slots):
            queue = self._admission.queue
            soon = now + self._pacer.horizon_s
            urgent = self._urgent_tokens(soon)
            if isinstance(queue, SlackQueue):
                urgent += queue.urgent_tokens(self.schedule.max_tokens_per_step, before=soon)
            slots = self._pacer.rows(slots, rows, now, urgent=urgent)
        most = max(1, self.schedule.max_tokens_per_step // width)
        if len(slots) > most:  # more rows than budget: everyone in turn
            self._turn = (self._turn + most) % len(slots)
            slots = np.sort(np.roll(slots, -self._turn)[:most])
        ends = np.minimum(rows.next[slots] + width, rows.bound[slots])
        growing = ends > rows.page_end[slots]
        if not growing.any():
            return slots
        reach = dict(zip(slots[growing].tolist(), ends[growing].tolist(), strict=True))
        sequences = [s for s in (rows.sequences[slot] for slot in reach) if s is not None]
        lacking: list[int] = []
        for sequence in sorted(sequences, key=lambda s: (s.order, s.place)):
            slot = sequence.slot
            if sequence.state is not State.RUNNING:
                continue  # preempted a moment ago for one before it
            if not self._running.extend(sequence, reach[slot]) and not self._make_room(sequence, reach[slot], now):
                lacking.append(slot)
        keep = rows.decoding[slots]
        if lacking:
            keep &= ~np.isin(slots, lacking)
        return slots[keep]

    def _make_room(self, sequence: Sequence, tokens: int, now: float) -> bool:
        """Preempts until a sequence's pages can grow; False when it waits for pages to return, or was itself the victim."""
        assert sequence.lease is not None
        while not self._running.extend(sequence, tokens):
            lack = sequence.lease.shortage(tokens)
            if all(need <= more for need, more in zip(lack, self._running.incoming(), strict=True)):
                return False
            victim = self._policy.victim(self._admission.evictable())
            if victim is None:
                return False
            self._preempt(victim, now, sequence.id, "pages")
            if victim is sequence:
                return False
        return True

    def _wants(self, sequence: Sequence, count: int) -> Wants:
        rows, slot = self._running.rows, sequence.slot
        last = rows.next[slot] + count == rows.fill[slot]
        if sequence.request.pooling is not None:
            return Wants.HIDDEN if last else Wants.HIDDEN_PART
        if wants_prompt_logprobs(sequence):
            return Wants.ALL if last else Wants.ALL_NO_SAMPLE
        return Wants.LAST if last else Wants.NONE

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, place, request_id = heapq.heappop(self._deadlines)
            sequence = self._live.get(request_id)
            if sequence is not None and sequence.place == place:
                error = f"the deadline passed: not done {now - sequence.arrived_s:.3f} s after arrival"
                self._end(sequence, "abort", now, error=error)

    # -- absorb ------------------------------------------------------------------------------------------------------

    def absorb(self, result: StepResult, now: float, *, collect_s: float = 0.0) -> list[Report]:
        """Takes in what the oldest flying step brought; returns everything reported since the last call. `collect_s`: see StepDone.

        The order matters: chunks are published before window pages slide out, and pages return last.
        """
        began = self._clock()
        running = self._running
        rows = running.rows
        flight = running.flights.popleft()
        assert result.number == flight.number, f"step {result.number} came back, {flight.number} was expected"
        slot = flight.slot
        rows.flying[slot] -= 1
        brought = np.diff(result.offset)
        valid = rows.epoch[slot] == flight.epoch
        grammars = grammars_told(result, rows.ids[slot]) if result.grammar_rows else ((), ())
        for row, reason in result.failed.items():
            sequence = rows.sequences[int(slot[row])]
            if valid[row] and sequence is not None:
                valid[row] = False
                self._end(sequence, "error", now, error=reason)
        live = slot[valid]
        if self.drafts_per_row:
            guessed = flight.drafts[valid] > 0
            rows.computed[live] += np.where(guessed, brought[valid], flight.count[valid])
            rows.next[live[guessed]] = rows.computed[live[guessed]]
        else:
            rows.computed[live] += flight.count[valid]

        for row in range(flight.decode_rows, len(slot)):
            if valid[row]:
                self._take_chunk(int(slot[row]), result.logprobs.get(row), now)
        for row, vector in result.hidden.items():
            sequence = rows.sequences[int(slot[row])]
            if valid[row] and sequence is not None:
                self._end(sequence, "stop", now, embedding=vector.tobytes())
        if self._policy.accounts is not None:
            self._charge(live, brought[valid])
        if len(result.tokens):
            self._take_tokens(result, flight, valid, brought, now)
        if self._pacer is not None:
            self._pacer.absorbed(live, rows, now)
        elif self._steps is not None:
            self._steps.returned(now)
        if self.cache.sliding:
            for passed in live[rows.computed[live] >= rows.slide_at[live]].tolist():
                running.slide(passed)
        running.retire(flight.number)
        for sequence in running.settled():
            self._settle(sequence, now)
        guessed = wrong = 0
        if self.drafts_per_row:
            guessed = int(flight.drafts.sum())
            wrong = int(np.maximum(flight.drafts + 1 - brought, 0)[flight.drafts > 0].sum())
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
                decided_s=flight.decided_s,
                collect_s=collect_s,
                chunk_ids=flight.chunk_ids,
                chunk_tokens=flight.chunk_tokens,
                guessed=guessed,
                wrong=wrong,
                grammar_s=result.grammar_s,
                grammar_ids=grammars[0],
                grammar_parts=grammars[1],
                draft_s=result.draft_s,
            )
        )
        return self.take_reports()

    def _charge(self, slots: Ints, tokens: Ints) -> None:
        """Counts generated tokens to their tenants."""
        accounts, rows = self._policy.accounts, self._running.rows
        assert accounts is not None
        for slot, count in zip(slots.tolist(), tokens.tolist(), strict=True):
            sequence = rows.sequences[slot]
            if count and sequence is not None:
                accounts.generated(sequence.account, count)

    def _take_chunk(self, slot: int, logprobs: RowLogprobs | None, now: float) -> None:
        """A prompt chunk is certain: publishes its pages and wakes who waited for them."""
        rows = self._running.rows
        sequence = rows.sequences[slot]
        assert sequence is not None and sequence.lease is not None
        if logprobs is not None:
            sequence.prompt_logprobs.extend(logprobs.prompt)
        if sequence.state is not State.RUNNING:
            return  # preempted; what it computed is published when it leaves
        self._running.publish(sequence, int(rows.computed[slot]) // self.cache.page_tokens)
        done = bool(rows.computed[slot] >= rows.fill[slot])
        if done and sequence.preemptions < self.schedule.max_preemptions:
            sequence.lease.unpromise()
            self._running.changed = True
        if sequence.waiters:
            self._admission.wake(sequence, now, published=WHOLE_PROMPT if done else sequence.lease.published)

    def _take_tokens(
        self, result: StepResult, flight: Flight, valid: npt.NDArray[np.bool_], brought: Ints, now: float
    ) -> None:
        """Files sampled tokens: rows with nothing special all at once, the others one by one."""
        rows = self._running.rows
        plain = valid & (brought == 1) & ~rows.talkative[flight.slot]
        slot = flight.slot[plain]
        tokens = result.tokens[result.offset[:-1][plain]]
        generated = rows.generated[slot] + 1
        rows.generated[slot] = generated
        rows.recent[slot, (generated - 1) % RECENT] = tokens
        for full in slot[generated - rows.stored[slot] == RECENT].tolist():
            rows.store(full)
        stops = (rows.stop[slot] == tokens[:, None]).any(axis=1) & (generated > rows.min_tokens[slot])
        whole = np.isin(np.flatnonzero(plain), result.complete) if result.complete else np.zeros_like(stops)
        ends = stops | whole | (generated >= rows.max_tokens[slot])
        going = ~ends
        if going.any():
            self._out.append(
                StepTokens(
                    at_s=now,
                    ids=rows.ids[slot[going]].tolist(),
                    tokens=tokens[going],
                    generated=generated[going],
                    cached=rows.cached[slot[going]],
                    prompt=rows.prompt[slot[going]],
                )
            )
        for ended, token, stopped, complete in zip(
            slot[ends].tolist(), tokens[ends].tolist(), stops[ends].tolist(), whole[ends].tolist(), strict=True
        ):
            sequence = rows.sequences[ended]
            assert sequence is not None
            finish: FinishReason = "stop" if stopped or complete else "length"
            self._end(sequence, finish, now, tokens=(token,), stop_token=token if stopped else None)
        for row in np.flatnonzero(valid & (brought > 0) & ~plain).tolist():
            first, last = int(result.offset[row]), int(result.offset[row + 1])
            self._take_row(
                int(flight.slot[row]),
                result.tokens[first:last].tolist(),
                result.logprobs.get(row),
                now,
                whole=row in result.complete,
            )

    def _take_row(
        self, slot: int, tokens: list[int], logprobs: RowLogprobs | None, now: float, *, whole: bool = False
    ) -> None:
        """One row's tokens, several or with logprobs; what comes after the end is cut off."""
        rows = self._running.rows
        sequence = rows.sequences[slot]
        assert sequence is not None
        finish: FinishReason | None = None
        kept: list[int] = []
        stop_token: int | None = None
        for token in tokens:
            generated = int(rows.generated[slot]) + 1
            rows.recent[slot, (generated - 1) % RECENT] = token
            rows.generated[slot] = generated
            if generated - rows.stored[slot] == RECENT:
                rows.store(slot)
            kept.append(token)
            if generated > rows.min_tokens[slot] and token in rows.stop[slot]:
                finish, stop_token = "stop", token
            elif whole and len(kept) == len(tokens):
                finish = "stop"
            elif generated >= rows.max_tokens[slot]:
                finish = "length"
            if finish:
                break
        sampled = logprobs.sampled[: len(kept)] if logprobs is not None else ()
        if finish:
            rows.computed[slot] -= len(tokens) - len(kept)  # the KV of guesses after the end is not the text's
            self._end(sequence, finish, now, tokens=tuple(kept), logprobs=sampled, stop_token=stop_token)
            return
        self._out.append(
            TokensOut(
                request_id=sequence.id,
                at_s=now,
                tokens=tuple(kept),
                logprobs=sampled,
                prompt_logprobs=_take_prompt_logprobs(sequence),
                cached_tokens=sequence.cached_tokens,
                prompt_tokens=sequence.prompt_tokens,
                generated_tokens=int(rows.generated[slot]),
            )
        )

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _end(
        self,
        sequence: Sequence,
        finish: FinishReason,
        now: float,
        *,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        stop_token: int | None = None,
        error: str | None = None,
        overloaded: bool = False,
        embedding: bytes | None = None,
    ) -> None:
        """Ends a request in any state and says so, once; its slot and pages follow when no step touches them any more."""
        rows = self._running.rows
        del self._live[sequence.id]
        if sequence.request.grammar is not None and self._grammars is not None:
            self._grammars.close(sequence.request.grammar)
        sequence.finish, sequence.error = finish, error
        if sequence.slot >= 0:
            sequence.generated = int(rows.generated[sequence.slot])
        self._out.append(
            TokensOut(
                request_id=sequence.id,
                at_s=now,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=_take_prompt_logprobs(sequence),
                finish=finish,
                stop_token=stop_token,
                error=error,
                overloaded=overloaded,
                cached_tokens=sequence.cached_tokens,
                prompt_tokens=sequence.prompt_tokens,
                generated_tokens=sequence.generated,
                embedding=embedding,
            )
        )
        self._admission.forget(sequence)
        if sequence.slot < 0:
            sequence.end()
        else:
            if self._pacer is not None:
                self._pacer.ended(now)
            rows.epoch[sequence.slot] += 1  # tokens of it that still fly are dropped
            if sequence.state is State.RUNNING and self._running.leave(sequence):
                self._settle(sequence, now)
        self._admission.wake(sequence, now, published=WHOLE_PROMPT)

    def _preempt(self, sequence: Sequence, now: float, for_whom: str, cause: Cause) -> None:
        """Takes slot and pages from a running sequence, which will compute its tokens again; tokens still flying are kept."""
        lost = int(self._running.rows.computed[sequence.slot])
        self._out.append(Preempted(request_id=sequence.id, at_s=now, lost_tokens=lost, for_whom=for_whom, cause=cause))
        if self._running.leave(sequence):
            self._settle(sequence, now)
        self._admission.wake(sequence, now, published=WHOLE_PROMPT)

    def _settle(self, sequence: Sequence, now: float) -> None:
        """No flying step touches a leaving sequence any more: it gives everything back, and is over or waits again."""
        if self._pacer is not None:
            self._pacer.left(sequence.slot)
        self._running.settle(sequence)
        if sequence.finish is not None:
            sequence.end()
            return
        sequence.pause()
        if not sequence.generated:
            sequence.prompt_logprobs.clear()  # they will be computed again, from the first
        sequence.requeue()
        self._admission.push(sequence, now)

    # -- for tests ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError where an invariant does not hold; slow."""
        self._running.check()
        for sequence in self._admission.queue:
            assert sequence.state is State.WAITING and sequence.lease is None
        if self.idle:
            for pool in self.cache.pools:
                assert pool.leased == 0 and pool.pinned == 0, "pages are leased though nothing runs"
            assert not any(self.cache.promised), "pages are promised though nothing runs"


def _no_time(tokens: int) -> float:
    """How long a prompt takes where nobody knows."""
    return 0.0


def _enter(sequence: Sequence) -> Enter:
    """What the device must know of a sequence that takes a slot."""
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
        pooling=request.pooling,
        normalise=request.normalise,
        images=tuple(image.span() for image in request.images) if request.images else (),
    )


def _take_prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprobs, ...]:
    out = tuple(sequence.prompt_logprobs)
    sequence.prompt_logprobs.clear()
    return out
