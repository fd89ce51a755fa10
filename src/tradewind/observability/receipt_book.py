"""Where the time of each request went: parts that sum to the measured TTFT and to the whole, what bound it, what would have helped.

Knows: the engine's reports and the front's own times of one request. Refuses to know: HTTP, and who asks (explain, a trace, a journal).

The time of a request is cut where something was reported, and never counted twice:

      front   | read | parse | tokenise |                                            | delivery | detokenise | socket |
      engine                            | inbox | queue: by cause | prefill | decode |
                                                                  | own, others' prefill, others' rows, ... in each step |

What a step's time was for is shared out by a fitted cost (step_cost). The shares of all steps are running sums, so that a request costs two
readings of them for each of its phases, however long it lives:

      sums at the begin of a phase ----------- steps ----------- sums at its end          part = difference
"""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import msgspec

from tradewind.contract.events import Arrived, Delayed, FrontTimes, Held, Preempted, Scheduled, StepDone, Woken
from tradewind.observability.counterfactual import Asked, counterfactual
from tradewind.observability.lives import Life, Listener, ReceiptLike
from tradewind.observability.receipt_sums import Bill, QueueHolds, Sums, Track, front_out
from tradewind.observability.receipts import (
    BINDINGS,
    NOTABLE,
    OF_CAUSE,
    SAYS,
    Binding,
    BindingCause,
    ItemisedReceipt,
    PartName,
)
from tradewind.observability.step_cost import StepFit

KEPT = 2048
"""Receipts that can be asked for, the latest ones ..."""
SLOWEST = 100
"""... and besides these the slowest ones."""
PENDING = 4096
"""So many sequences that have ended may wait for their HTTP request's end, and requests for their sequences."""
CHUNKS = 4096
"""So many of the latest prompt chunks are remembered by name, to say whose they were."""
SCANNED = 1024
"""Of these so many are looked at for one receipt."""
STEPS = 32
"""So many steps ago a request may have come when it is first heard of: while it waited for the engine's turn."""
LINE: tuple[PartName, ...] = ("inbox", "queue_step")
"""What is waited in line, until the step that runs is done: nobody held the request up, but somebody was in that step."""


class ReceiptBook(Listener):
    """Keeps the receipts of one server. Fed by `lives.Lives` and, where requests come over HTTP, by the front's own receipts; one thread.

    Memory is bounded: by the open sequences, and by the constants above.
    """

    def __init__(
        self,
        *,
        page_tokens: int = 16,
        max_tokens_per_step: int = 2048,
        with_front: bool = True,
        kept: int = KEPT,
        wall_minus_monotonic_s: float | None = None,
        on_made: Callable[[ItemisedReceipt, ReceiptLike | None], None] | None = None,
    ) -> None:
        """`with_front`: a receipt is made when a request and all its sequences have ended; otherwise for each sequence when it ends.

        `on_made` is told every receipt, once.
        """
        self.fit = StepFit()
        self._page_tokens, self._max_tokens_per_step = page_tokens, max_tokens_per_step
        self._with_front, self._kept, self._on_made = with_front, kept, on_made
        self._shift_s = time.time() - time.monotonic() if wall_minus_monotonic_s is None else wall_minus_monotonic_s
        self._tracks: dict[str, Track] = {}
        self._ended: OrderedDict[str, Track] = OrderedDict()
        self._waiting: OrderedDict[str, ReceiptLike] = OrderedDict()
        """Requests some of whose sequences have not ended, by id."""
        self._waits_for: dict[str, str] = {}
        """Such a sequence -> its request."""
        self._made: OrderedDict[str, tuple[str, ItemisedReceipt]] = OrderedDict()
        """By id: tenant, receipt."""
        self._names: dict[str, str] = {}
        """X-Request-Id -> id, of the receipts that are kept."""
        self._slowest: list[tuple[float, int, str, ItemisedReceipt]] = []
        """Ascending by time."""
        self._count = 0
        self._tenants: OrderedDict[str, str] = OrderedDict()
        """Of the latest sequences."""
        self._sums = Sums()
        self._end_s: float | None = None
        """Up to when the steps are counted."""
        self._unmarked: list[tuple[float, Track, int]] = []
        """Moments that no step has reached yet."""
        self._before: deque[tuple[float, float, Sums, Sums]] = deque(maxlen=2 * STEPS)
        """(begin, end, sums at the begin, what was added) of the latest steps and of the time before each."""
        self._queue = QueueHolds()
        self._lately: deque[tuple[float, str, float]] = deque(maxlen=CHUNKS)
        """(end of the step, whose prompt, seconds)."""
        self._masks_lately: deque[tuple[float, str, float]] = deque(maxlen=CHUNKS)
        """The same of grammars' masks, of each step those two that took most."""

    def replanned(self, *, page_tokens: int, max_tokens_per_step: int) -> None:
        """Another plan is in force."""
        self._page_tokens, self._max_tokens_per_step = page_tokens, max_tokens_per_step

    # -- what happened -----------------------------------------------------------------------------------------------

    def arrived(self, life: Life, event: Arrived) -> None:
        """See Listener."""
        taken_s = max(event.at_s, event.taken_s)
        track = self._tracks[life.id] = Track(life, taken_s=taken_s, tenant=event.tenant)
        track.held_at = self._queue.at(taken_s)
        self._tenants[life.id] = event.tenant
        if len(self._tenants) > 2 * PENDING:
            self._tenants.popitem(last=False)

    def phase(self, life: Life) -> None:
        """See Listener."""
        track = self._tracks.get(life.id)
        if track is None:
            return
        at_s = life.phases[-1][1] if life.finish is None else life.ended_s
        if self._end_s is not None and at_s < self._end_s:
            track.marks.append(self._sums_at(at_s))
            return
        track.marks.append(None)
        self._unmarked.append((at_s, track, len(track.marks) - 1))
        if len(self._unmarked) > 2 * PENDING:  # requests come and go, and no step is made: all of it is idle time
            del self._unmarked[:PENDING]

    def delayed(self, event: Delayed) -> None:
        """See Listener."""
        track = self._tracks.get(event.request_id)
        if track is not None and event.cause in ("grammar", "prefix", "sample") and track.life.scheduled_s is None:
            self._waited(track, event.at_s)
            track.blocked, track.blocked_by = event.cause, event.blocked_by

    def woken(self, event: Woken) -> None:
        """See Listener."""
        track = self._tracks.get(event.request_id)
        if track is not None and track.life.scheduled_s is None:
            self._waited(track, event.at_s)
            track.blocked = None

    def held(self, event: Held) -> None:
        """See Listener."""
        self._queue.change(event)

    def engine_ended(self, at_s: float) -> None:
        """The engine is gone, and with it whatever held up its queue."""
        self._queue.change(Held(at_s=at_s, cause=None))

    def scheduled(self, life: Life, event: Scheduled, recomputed_tokens: int) -> None:
        """See Listener."""
        track = self._tracks.get(life.id)
        if track is not None and not event.resumed:
            self._waited(track, event.at_s)
            track.seen = event.seen_tokens
        elif track is not None and "preempted" not in track.who:
            begin_s = next(begin for phase, begin in reversed(life.phases) if phase == "preempted")
            who = self._queue.who("pages", begin_s, event.at_s, but=life.id)
            if who:
                track.who["preempted"] = who

    def preempted(self, life: Life, event: Preempted) -> None:
        """See Listener."""
        track = self._tracks.get(life.id)
        if (
            track is not None and event.for_whom != life.id
        ):  # otherwise it was the last that came, and gave way to all the others
            track.who["preempted"] = event.for_whom

    def _waited(self, track: Track, at_s: float) -> None:
        """Counts the wait since the last change of what this sequence waited for."""
        begin_s = track.taken_s + sum(track.causes.values())
        now = self._queue.at(at_s)
        gone_s = max(0.0, at_s - begin_s)
        if track.blocked is not None:
            self._add(track, OF_CAUSE[track.blocked], gone_s, track.blocked_by)
        else:
            rest_s = gone_s
            for cause, total_s in now.items():
                part_s = min(rest_s, total_s - track.held_at.get(cause, 0.0))
                if part_s > 0:
                    self._add(track, OF_CAUSE[cause], part_s, self._queue.who(cause, begin_s, at_s, but=track.life.id))
                    rest_s -= part_s
            if rest_s > 0:
                self._add(track, "queue_step", rest_s, "")
        track.held_at = now

    @staticmethod
    def _add(track: Track, name: PartName, seconds: float, who: str) -> None:
        before = track.causes.get(name, 0.0)
        track.causes[name] = before + seconds
        if who and seconds >= before:
            track.who[name] = who

    def step(self, event: StepDone) -> None:
        """See Listener."""
        end_s = event.at_s
        before_s = self._end_s if self._end_s is not None else min(end_s, event.decided_s or end_s)
        begin_s = min(end_s, max(before_s, event.decided_s))
        prefill, decode = event.prompt_tokens, event.tokens - event.prompt_tokens
        if event.device_s or event.collect_s:  # the rest of the time it waited for the engine's host side
            begin_s = max(begin_s, end_s - max(event.device_s, event.collect_s))
        took_s = end_s - begin_s
        # What it stood still for is known; the rest was spent on its tokens.
        masks_s = min(event.grammar_s, took_s)
        draft_s = min(event.draft_s, took_s - masks_s)
        tokens_s = took_s - masks_s - draft_s
        stalled = self.fit.is_stall(prefill=prefill, decode=decode, seconds=tokens_s)
        self.fit.learn(prefill=prefill, decode=decode, seconds=tokens_s)
        share = self._share(event, tokens_s, stalled=stalled)
        share.masks, share.draft = masks_s, share.draft + draft_s
        idle = Sums(idle=max(0.0, begin_s - before_s))
        working = self._sums.plus(idle)
        self._mark(before_s, begin_s, self._sums, idle)
        self._mark(begin_s, end_s, working, share)
        self._before.append((before_s, begin_s, self._sums, idle))
        self._before.append((begin_s, end_s, working, share))
        self._sums, self._end_s = working.plus(share), end_s
        self._count_chunks(event, share)
        if masks_s > 0:
            self._count_masks(event, masks_s / event.grammar_s)

    def _share(self, event: StepDone, took_s: float, *, stalled: bool) -> Sums:
        """What the time that one step spent on its tokens was for."""
        cost = self.fit.cost
        prefill, decode = event.prompt_tokens, event.tokens - event.prompt_tokens
        expected_s = cost.step_s(prefill=prefill, decode=decode)
        if expected_s <= 0:
            return Sums(base=took_s, mixed=took_s if prefill else 0.0, prompt_steps=float(prefill > 0))
        worked_s = expected_s if stalled else took_s
        scale = worked_s / expected_s
        base_s, prompt_s = scale * cost.base_s, scale * cost.prefill_s * prefill
        wrong_s = scale * cost.decode_s * event.wrong
        decode_s = worked_s - base_s - prompt_s - wrong_s
        rows = max(1, event.rows - len(event.chunk_ids))
        return Sums(
            base=base_s,
            prefill=prompt_s,
            decode=decode_s,
            draft=wrong_s,
            stall=took_s - worked_s,
            mixed=base_s if prefill else 0.0,
            row=decode_s / rows,
            prompt_steps=float(prefill > 0),
        )

    def _mark(self, begin_s: float, end_s: float, before: Sums, share: Sums) -> None:
        """Notes the sums for those moments that a stretch of time reaches."""
        if not self._unmarked:
            return
        later: list[tuple[float, Track, int]] = []
        for moment in self._unmarked:
            at_s, track, place = moment
            if at_s > end_s:
                later.append(moment)
            else:
                part = 1.0 if end_s <= begin_s else max(0.0, at_s - begin_s) / (end_s - begin_s)
                track.marks[place] = before.plus(share, part)
        self._unmarked = later

    def _sums_at(self, at_s: float) -> Sums:
        """The sums at a moment that has passed, as far back as is remembered."""
        for begin_s, end_s, before, share in reversed(self._before):
            if begin_s <= at_s:
                return before.plus(share, min(1.0, (at_s - begin_s) / (end_s - begin_s)) if end_s > begin_s else 1.0)
        return self._before[0][2]

    def _count_chunks(self, event: StepDone, share: Sums) -> None:
        if not event.prompt_tokens:
            return
        each_s = share.prefill / event.prompt_tokens
        rows = event.tokens - event.prompt_tokens
        for request_id, tokens in zip(event.chunk_ids, event.chunk_tokens, strict=True):
            self._lately.append((event.at_s, request_id, tokens * each_s))
            track = self._tracks.get(request_id) or self._ended.get(request_id)
            if track is None:
                continue
            place = next(
                (i for i in range(len(track.life.phases) - 1, -1, -1) if track.life.phases[i][0] == "prefill"), -1
            )
            track.own[place] = track.own.get(place, 0.0) + share.base + tokens * each_s
            track.chunks += 1
            track.chunk_rows += rows

    def _count_masks(self, event: StepDone, scale: float) -> None:
        told = sorted(zip(event.grammar_parts, event.grammar_ids, strict=True), reverse=True)
        self._masks_lately.extend((event.at_s, name, scale * seconds) for seconds, name in told[:2])
        for seconds, name in told:
            track = self._tracks.get(name) or self._ended.get(name)
            if track is None:
                continue
            # The phase that it was in before this step's token, which may have ended it.
            phases = track.life.phases
            place = next((i for i in range(len(phases) - 1, 0, -1) if phases[i][1] < event.at_s), 0)
            track.masks[place] = track.masks.get(place, 0.0) + scale * seconds

    def ended(self, life: Life) -> None:
        """See Listener."""
        track = self._tracks.pop(life.id, None)
        if track is None:
            return
        if life.scheduled_s is None:
            self._waited(track, life.ended_s)
        if not self._with_front:
            self._make(None, [track])
            return
        self._ended[life.id] = track
        request = self._waits_for.pop(life.id, None)
        if request is not None:
            self._settle(self._waiting[request])
        if len(self._ended) > PENDING:
            self._ended.popitem(last=False)

    def take_receipt(self, receipt: ReceiptLike) -> None:
        """A finished HTTP request."""
        if receipt.sequences and receipt.times is not None:
            self._settle(receipt)

    def _settle(self, receipt: ReceiptLike) -> None:
        """Makes the receipt of a request when all its sequences have ended; until then it waits."""
        missing = [name for name in receipt.sequences if name in self._tracks]
        if missing:
            self._waiting[receipt.id] = receipt
            self._waits_for.update(dict.fromkeys(missing, receipt.id))
            if len(self._waiting) > PENDING:
                _, oldest = self._waiting.popitem(last=False)
                for name in oldest.sequences:
                    self._waits_for.pop(name, None)
            return
        self._waiting.pop(receipt.id, None)
        tracks = [self._ended.pop(name) for name in receipt.sequences if name in self._ended]
        if tracks:
            self._make(receipt, tracks)

    # -- what is told ------------------------------------------------------------------------------------------------

    def get(self, name: str, *, tenant: str) -> ItemisedReceipt | None:
        """The receipt of an answer id or X-Request-Id, if it is kept and the tenant's; changes nothing."""
        found = self._made.get(name) or self._made.get(self._names.get(name, ""))
        if found is None:
            found = next(((t, r) for _, _, t, r in self._slowest if name in (r.id, r.request_id)), None)
        return found[1] if found is not None and found[0] == tenant else None

    def slowest(self, count: int, *, tenant: str) -> list[ItemisedReceipt]:
        """The tenant's slowest, slowest first; changes nothing."""
        return [receipt for _, _, of, receipt in reversed(self._slowest) if of == tenant][:count]

    def json(self, name: str, tenant: str) -> bytes | None:
        """`get` as JSON."""
        found = self.get(name, tenant=tenant)
        return None if found is None else msgspec.json.encode(found)

    def slowest_json(self, count: int, tenant: str) -> bytes:
        """`slowest` as JSON: {"receipts": [...]}."""
        return msgspec.json.encode({"receipts": self.slowest(count, tenant=tenant)})

    # -- making one --------------------------------------------------------------------------------------------------

    def _make(self, receipt: ReceiptLike | None, tracks: Sequence[Track]) -> None:
        made = self._itemised(receipt, tracks)
        tenant = receipt.tenant if receipt is not None else tracks[0].tenant
        self._made[made.id] = (tenant, made)
        if made.request_id:
            self._names[made.request_id] = made.id
        if len(self._made) > self._kept:
            _, (_, oldest) = self._made.popitem(last=False)
            if self._names.get(oldest.request_id) == oldest.id:
                del self._names[oldest.request_id]
        self._count += 1
        if len(self._slowest) < SLOWEST or made.e2e_s > self._slowest[0][0]:
            insort(self._slowest, (made.e2e_s, self._count, tenant, made), key=lambda entry: entry[:2])
            del self._slowest[:-SLOWEST]
        if self._on_made is not None:
            self._on_made(made, receipt)

    def _itemised(self, receipt: ReceiptLike | None, tracks: Sequence[Track]) -> ItemisedReceipt:
        last = max(tracks, key=lambda track: track.life.ended_s)
        life = last.life
        tenant = receipt.tenant if receipt is not None else ""
        times = receipt.times if receipt is not None else None
        finished_s = receipt.finished_s if receipt is not None else life.ended_s
        if times is None:
            begin_s = min(life.arrived_s, last.taken_s)
            times = FrontTimes(received_s=begin_s, read_s=begin_s, parsed_s=begin_s, submitted_s=life.arrived_s)
        first = min(
            (track for track in tracks if track.life.first_token_s is not None),
            key=lambda track: track.life.first_token_s or 0.0,
            default=None,
        )
        whole = Bill(times.received_s)
        self._front_in(whole, times, last)
        left = receipt is not None and receipt.finish == "disconnect"
        self._engine(whole, last, self._answer_ended(last, times, finished_s, left=left))
        front_out(whole, times.turns, finished_s, left=left)
        ttft = None
        if first is not None and first.life.first_token_s is not None:
            ttft = Bill(times.received_s)
            self._front_in(ttft, times, first)
            self._engine(ttft, first, first.life.first_token_s)
            if times.first_written_s is not None:
                assert times.first_taken_s is not None and times.first_spoken_s is not None
                front_out(
                    ttft, ((times.first_taken_s, times.first_spoken_s, times.first_written_s),), times.first_written_s
                )
        who = {**(first.who if first is not None else {}), **last.who}
        steps = self._between(last)
        largest_s = 0.0
        line = self._line(last)
        line_s = line.get("others_prefill", 0.0) * sum(whole.seconds.get(name, 0.0) for name in LINE)
        if (
            line_s + whole.seconds.get("others_prefill", 0.0) + whole.seconds.get("queue_tokens", 0.0)
            > 0.05 * whole.total_s
        ):
            name, largest_s = self._neighbours(last)
            if name:
                who["others_prefill"] = name
        if whole.seconds.get("others_grammar", 0.0) > 0 or line.get("others_grammar", 0.0) > 0:
            who["others_grammar"] = self._slow_grammar(last)
        shown = {part: self._shown(name, tenant) for part, name in who.items()}
        generated = receipt.completion_tokens if receipt is not None else life.generated_tokens
        decoded_s = (life.last_token_s or 0.0) - (life.first_token_s or 0.0)
        binding = _binding(whole, line, shown, last, ttft)
        asked = Asked(
            cause=binding.cause,
            seconds=dict(whole.seconds.items()),
            ttft_seconds=dict(ttft.seconds.items()) if ttft is not None else {},
            prompt_tokens=life.prompt_tokens,
            cached_tokens=life.cached_tokens,
            generated_tokens=life.generated_tokens,
            chunks=last.chunks,
            chunk_rows=last.chunk_rows / last.chunks if last.chunks else 0.0,
            step_tokens=self._max_tokens_per_step,
            others_chunk_s=largest_s,
            others_steps=max(0, int(steps.prompt_steps)),
            line_s=line_s,
            page_tokens=self._page_tokens,
            others=whole.seconds.get("others_decode", 0.0) > 0.01 * whole.total_s,
        )
        return ItemisedReceipt(
            id=receipt.id if receipt is not None else life.id,
            request_id=receipt.request_id if receipt is not None else "",
            endpoint=receipt.endpoint if receipt is not None else "",
            sequence=life.id,
            arrived=times.received_s + self._shift_s,
            stream=receipt.stream if receipt is not None else True,
            finish=receipt.finish if receipt is not None else life.finish or "",
            prompt_tokens=receipt.prompt_tokens if receipt is not None else life.prompt_tokens,
            cached_tokens=receipt.cached_tokens if receipt is not None else life.cached_tokens,
            seen_tokens=last.seen,
            completion_tokens=generated,
            preemptions=sum(track.life.preemptions for track in tracks),
            ttft_s=ttft.total_s if ttft is not None else None,
            e2e_s=whole.total_s,
            tpot_s=decoded_s / (life.generated_tokens - 1) if life.generated_tokens > 1 and decoded_s > 0 else None,
            ttft=ttft.parts(shown) if ttft is not None else (),
            e2e=whole.parts(shown),
            binding=binding,
            ttft_binding=_binding(ttft, line, shown, last, ttft) if ttft is not None else None,
            counterfactual=counterfactual(asked, self.fit.cost),
            error=receipt.error if receipt is not None else life.error,
            cost_error=self.fit.error,
        )

    @staticmethod
    def _answer_ended(track: Track, times: FrontTimes, finished_s: float, *, left: bool) -> float:
        """When the engine's part was over: its last token, or when the front found that the text was complete before that.

        `left`: the client went away, so that the last turn is not the end.
        """
        end_s = min(track.life.ended_s, finished_s)
        if times.turns and not left and track.life.finish in ("stop", "abort"):
            end_s = min(end_s, times.turns[-1][0])
        return end_s

    @staticmethod
    def _front_in(bill: Bill, times: FrontTimes, track: Track) -> None:
        bill.until("read", times.read_s)
        bill.until("parse", times.parsed_s)
        bill.until("tokenise", times.submitted_s)
        bill.until("inbox", track.taken_s)

    def _engine(self, bill: Bill, track: Track, end_s: float) -> None:
        """The engine's part of a bill, up to a moment."""
        spans = track.life.spans()
        for place, (phase, begin_s, phase_end_s) in enumerate(spans):
            upto_s = min(phase_end_s, end_s)
            gone_s = upto_s - bill.at_s
            if gone_s <= 0:
                continue
            if phase == "queue":
                bill.spread(track.causes, gone_s, rest="queue_step")
            elif phase == "preempted":
                bill.until("preempted", upto_s)
            else:
                parts = self._of_steps(track, place, phase)
                rest: PartName = "engine" if phase == "prefill" else "decode"
                if phase_end_s > begin_s and gone_s < phase_end_s - begin_s:  # only a part of it counts
                    part = gone_s / (phase_end_s - begin_s)
                    parts = {name: seconds * part for name, seconds in parts.items()}
                bill.spread(parts, gone_s, rest=rest)
            if upto_s >= end_s:
                break
        bill.until("engine", end_s)

    def _of_steps(self, track: Track, place: int, phase: str) -> dict[PartName, float]:
        """The parts of one phase in a slot, from the running sums."""
        begin, end = self._mark_at(track, place), self._mark_at(track, place + 1)
        gone = end.since(begin)
        out: dict[PartName, float] = {"engine": gone.idle, "stall": gone.stall, "draft": gone.draft}
        if gone.masks > 0:
            out["grammar_masks"] = min(track.masks.get(place, 0.0), gone.masks)
            out["others_grammar"] = gone.masks - out["grammar_masks"]
        if phase == "prefill":
            prompts_s = gone.prefill + gone.mixed
            own_s = min(track.own.get(place, 0.0), prompts_s)
            again = any(earlier == "preempted" for earlier, _ in track.life.phases[:place])
            out["recompute" if again else "prefill"] = own_s
            out["others_prefill"] = prompts_s - own_s
            out["others_decode"] = gone.decode + gone.base - gone.mixed
        else:
            own_s = min(gone.row, gone.decode)
            out["decode"] = gone.base + own_s
            out["others_prefill"] = gone.prefill
            out["others_decode"] = gone.decode - own_s
        return out

    def _line(self, track: Track) -> dict[PartName, float]:
        """What the steps were for that went by until it was scheduled, as far as others are to blame: parts of that time, 0 to 1."""
        gone = self._mark_at(track, 1).since(self._mark_at(track, 0))
        total_s = gone.idle + gone.base + gone.prefill + gone.decode + gone.draft + gone.masks + gone.stall
        if total_s <= 0:
            return {}
        return {
            "others_prefill": (gone.prefill + gone.mixed) / total_s,
            "others_grammar": gone.masks / total_s,
            "stall": gone.stall / total_s,
        }

    def _mark_at(self, track: Track, place: int) -> Sums:
        """The sums at the begin of a phase; what no step has reached was idle time."""
        mark = track.marks[place] if place < len(track.marks) else None
        if mark is not None:
            return mark
        at_s = track.life.phases[place][1] if place < len(track.life.phases) else track.life.ended_s
        end_s = self._end_s if self._end_s is not None else at_s
        return self._sums.plus(Sums(idle=max(0.0, at_s - end_s)))

    def _between(self, track: Track) -> Sums:
        """The sums from its first slot to its end."""
        places = [place for place, (phase, _) in enumerate(track.life.phases) if phase == "prefill"]
        if not places:
            return Sums()
        return self._mark_at(track, len(track.life.phases)).since(self._mark_at(track, places[0]))

    def _neighbours(self, track: Track) -> tuple[str, float]:
        """Whose prompts took most of the time since it came, and the most that one step spent on prompts after its own first
        token; among the latest chunks."""
        times: dict[str, float] = {}
        steps: dict[float, float] = {}
        decoding_s = track.life.first_token_s if track.life.first_token_s is not None else track.life.ended_s
        for looked, (end_s, name, seconds) in enumerate(reversed(self._lately)):
            if end_s <= track.life.arrived_s or looked >= SCANNED:
                break
            if name != track.life.id and end_s <= track.life.ended_s:
                times[name] = times.get(name, 0.0) + seconds
                if end_s > decoding_s:
                    steps[end_s] = steps.get(end_s, 0.0) + seconds
        return max(times, key=lambda name: times[name], default=""), max(steps.values(), default=0.0)

    def _slow_grammar(self, track: Track) -> str:
        """Whose masks held up its steps most; among the latest ones."""
        times: dict[str, float] = {}
        for looked, (end_s, name, seconds) in enumerate(reversed(self._masks_lately)):
            if end_s <= track.life.arrived_s or looked >= SCANNED:
                break
            if name != track.life.id and end_s <= track.life.ended_s:
                times[name] = times.get(name, 0.0) + seconds
        return max(times, key=lambda name: times[name], default="")

    def _shown(self, name: str, tenant: str) -> str:
        """Another tenant's requests are nobody's business."""
        if tenant and name and self._tenants.get(name) != tenant:
            return "another tenant's request"
        return name


def _binding(
    bill: Bill, line: dict[PartName, float], who: dict[PartName, str], track: Track, ttft: Bill | None
) -> Binding:
    """What could have been spared most, if it is a notable part; otherwise its own prompt or answer, whichever is more.

    `line`: of what it waited in line for a step, how much was whose.
    """
    life, total_s = track.life, max(bill.total_s, 1e-9)
    spent = dict(bill.seconds)
    for place in LINE:
        for name, share in line.items():
            spent[name] = spent.get(name, 0.0) + share * bill.seconds.get(place, 0.0)
        spent[place] = (1.0 - sum(line.values())) * bill.seconds.get(place, 0.0)
    best = max(BINDINGS, key=lambda cause: sum(spent.get(name, 0.0) for name in BINDINGS[cause][0]))
    names, says = BINDINGS[best]
    seconds = sum(spent.get(name, 0.0) for name in names)
    prompt_s, answer_s = bill.seconds.get("prefill", 0.0), bill.seconds.get("decode", 0.0)
    if seconds >= NOTABLE * (prompt_s + answer_s):
        main = max(names, key=lambda name: spent.get(name, 0.0))
        blocked_by, says = who.get(main, ""), says or SAYS[main]
        cause: BindingCause = best
    else:
        first = ttft is not None and prompt_s >= 0.5 * ttft.total_s and prompt_s >= 0.3 * total_s
        blocked_by = ""
        if prompt_s >= answer_s or first:
            cold = 2 * life.cached_tokens < life.prompt_tokens
            cause, seconds = ("cold_prefix" if cold else "long_prompt"), prompt_s
            says = f"{life.prompt_tokens - life.cached_tokens} of {life.prompt_tokens} prompt tokens were not cached"
            if track.seen > life.cached_tokens:
                says += f", and {track.seen - life.cached_tokens} of them an earlier request had brought"
        else:
            cause, seconds, says = "answer", answer_s, f"an answer of {life.generated_tokens} tokens"
    by = f", most of it {blocked_by}" if blocked_by else ""
    sentence = f"{100 * seconds / total_s:.0f} % of {total_s * 1e3:.4g} ms: {says}{by}"
    return Binding(cause=cause, seconds=seconds, share=seconds / total_s, blocked_by=blocked_by, says=sentence)
