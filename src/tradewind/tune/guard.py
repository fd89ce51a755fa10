"""From a drift to another plan in service, and back where it serves worse: who does what when, and how long it waits in between.

Knows: the order below, and the figures that decide. Refuses to know: processes, HTTP, how a plan is simulated or put into service (Hands).

      learning -> watching -> (drift) -> gathering -> simulating -> changing -> trial -> learning     kept
                                 |                        |             |         '--> going back -> learning
                                 '- tell: learning        |             '- does not start: the old plan again -> learning
                                                          '- no better plan, or propose: learning

What traffic has become is learnt anew after each round, so that one drift is told once. A change is followed by a pause that doubles with
each plan that had to be undone, and a plan that was undone is not tried again for a day: it does not flap.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from tradewind.config.goals import Goals
from tradewind.observability.attainment import EVERY, Timed, percentile
from tradewind.observability.drift import LEARNT, WHATS, Arrival, Drift, DriftListener, Envelope, What
from tradewind.observability.lives import Life
from tradewind.observability.metrics import PREFIX, Page
from tradewind.tune.trial import Trial, Try

Mode = Literal["apply", "propose", "tell"]
State = Literal["changing", "gathering", "going back", "learning", "put off", "simulating", "trial", "watching"]
Targets = dict[str, dict[str, float]]
Outcome = Literal["changed", "put off", "failed", "dead"]
"""As `serving.replan.Changed.outcome`."""
Kind = Literal["applied", "back", "drift", "failed", "kept", "learnt", "plan stays", "proposal", "put off", "undone"]

KEPT = 64
"""Entries of the history."""
ROOM = 1.1
"""Where no target is stated: what 99 of 100 requests got while traffic was usual, and a tenth."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests and seconds each stage takes."""

    learn: int = LEARNT
    gather: int = 128
    """Requests since the drift that a proposal is made from ..."""
    gather_most_s: float = 1800.0
    """... or as many as come in this time, if they are `few` at least."""
    few: int = 32
    simulate: int = 512
    """At most so many, the newest, are simulated."""
    trial: int = 200
    backlog_s: float = 300.0
    """So long it waits at most until what came up during the change is worked off, before the trial begins."""
    loss: float = 0.05
    """The new plan may meet targets less often by this part."""
    pause_s: float = 300.0
    """From one change to the next at least; twice as long after each that was undone ..."""
    pause_most_s: float = 6 * 3600.0
    """... up to this."""
    again_s: float = 24 * 3600.0
    """A plan that was undone is not tried again for so long."""
    put_off_s: float = 60.0
    """After a change that could not be made because requests ran too long; twice as long each time."""
    put_off: int = 3
    """So often a change is put off before it is given up; going back is not given up."""


class Proposed(msgspec.Struct, frozen=True, kw_only=True):
    """What a simulation of the newest traffic says."""

    goals: Goals
    changed: bool
    differs: tuple[str, ...]
    why: str
    tries: tuple[Try, ...]
    """The plan in force first."""
    targets: Targets
    """By which they were judged."""
    step_times: str


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened."""

    at: float
    """Unix time."""
    what: Kind
    says: str


class Hands(Protocol):
    """What the guard has done for it. Both calls return at once; the answer comes as a call of the guard, in the same thread."""

    def simulate(
        self, drift: Drift, traffic: list[Arrival], *, usual: list[Arrival], targets: Targets, goals: Goals
    ) -> None:
        """Answered by `PlanGuard.simulated`."""

    def change(self, goals: Goals, *, trial: bool) -> None:
        """Answered by `PlanGuard.changed`. `trial`: the plan in force stays the one to go back to when the engine dies ..."""

    def keep(self) -> None:
        """... until this."""


class PlanGuard:
    """One server's. All calls come from one thread and never wait. `tick` is to be called about each second."""

    def __init__(
        self,
        *,
        mode: Mode,
        goals: Goals,
        hands: Hands,
        patience: Patience | None = None,
        usual: Envelope | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        log: Callable[[Kind, str], None] = lambda what, says: None,
    ) -> None:
        """`usual`: what the plan was made for; None: the first requests tell. `clock` is the engine's. `log` is told every entry of the
        history."""
        self._mode: Mode = mode
        self._goals, self._hands, self._clock, self._wall, self._log = goals, hands, clock, wall, log
        self._patience = patience or Patience()
        self.listener = DriftListener(
            usual, learn=self._patience.learn, on_drift=self._drifted, on_learnt=self._learnt, on_ended=self._ended
        )
        self.state: State = "learning" if usual is None else "watching"
        self.history: deque[Entry] = deque(maxlen=KEPT)
        self.drift: Drift | None = None
        """Traffic is not what the plan was made for."""
        self.proposal: Proposed | None = None
        self._planned_for = usual
        self._targets: Targets = targets_of(goals)
        self._stated = bool(self._targets)
        self._learning: deque[Timed] = deque(maxlen=LEARNT)
        """How the usual requests went, where no target is stated."""
        self._usual: list[Arrival] = []
        self._judged: deque[tuple[float, bool]] = deque(maxlen=4 * LEARNT)
        """(when it came, whether it met its targets)."""
        self._trial: Trial[Goals] | None = None
        self._trial_since_s = math.inf
        self._backlog: list[Life] = []
        """What was open when the new engine began ..."""
        self._backlog_until_s = 0.0
        """... and until when it is waited for."""
        self._open_before = 0
        """How many requests were open when the change began."""
        self._was = goals
        """What is gone back to."""
        self._next = goals
        self._back_because = ""
        self._again_s = 0.0
        """When a change that was put off is tried again."""
        self._put_off = 0
        self._pause_s = self._patience.pause_s
        self._pause_until_s = -1e18
        self._undone: list[tuple[float, Goals]] = []
        self.noticed: dict[What, int] = dict.fromkeys(WHATS, 0)
        self.counts: dict[Kind, int] = dict.fromkeys(("applied", "failed", "kept", "put off", "undone"), 0)

    # -- what is told it

    def tick(self) -> None:
        """Looks at the clock."""
        now, patience = self._clock(), self._patience
        self.listener.quiet(now)
        if self.state == "gathering":
            self._gather(now)
        elif self.state == "trial" and self._trial_since_s == math.inf:
            self._look_at_backlog(now)
        elif self.state == "put off" and now >= self._again_s:
            self._change(self._next, back=bool(self._back_because))
        self._undone = [(at_s, goals) for at_s, goals in self._undone if now - at_s < patience.again_s]

    def use(self, usual: Envelope) -> None:
        """This is what the plan was made for; before anything was learnt from traffic."""
        if self.state == "learning" and self._planned_for is None:
            self._planned_for = usual
            self.state = "watching"
            self.listener.use(usual)
            self._note("learnt", f"usual, by the trace: {usual.described()}")

    def simulated(self, found: Proposed | str) -> None:
        """The answer to `Hands.simulate`; a text: why there is none."""
        assert self.state == "simulating"
        if isinstance(found, str):
            self._note("plan stays", f"no other plan was found: {found}")
            self._settle()
            return
        self.proposal = found
        if not self._targets:
            self._targets = found.targets
        if not found.changed:
            self._note("plan stays", found.why)
            self._planned_for = None  # the next that is learnt: the plan is the best for it
            self._settle()
            return
        said = f"{'; '.join(found.differs)} ({found.why})"
        if self._mode == "propose":
            self._note("proposal", f"another plan would serve better: {said}")
            self._settle()
        elif any(goals == found.goals for _, goals in self._undone):
            self._note("plan stays", f"the plan that would serve better by the simulation was undone before: {said}")
            self._settle()
        else:
            self._note("proposal", f"the plan is changed: {said}")
            self._put_off = 0
            self._was = self._goals
            self._change(found.goals, back=False)

    def changed(self, outcome: Outcome, why: str = "", *, took_s: float = 0.0, waited: int = 0) -> None:
        """The answer to `Hands.change`."""
        assert self.state in ("changing", "going back")
        if outcome == "dead":
            self._note("failed", why)
            return
        back, now = self.state == "going back", self._clock()
        if outcome == "put off":
            self._postpone(why, back=back, now=now)
            return
        if outcome == "failed":
            self._count("failed")
            self._note("failed", f"the {'old' if back else 'new'} plan does not start and the other is in force: {why}")
            if not back:
                self._undone.append((now, self._next))
            self._pause(longer=True)
            self._settle()
            return
        self._goals = self._next
        took = f"after {took_s:.1f} s, for which {waited} requests waited"
        if back:
            self._count("undone")
            self._note("undone", f"the old plan is in force again {took}: {self._back_because}")
            self._pause(longer=True)
            self._settle()
            return
        before = self._attained_since(self.drift.since_s if self.drift is not None else now)
        if before is None:
            before = self.proposal.tries[0].attained if self.proposal is not None and self.proposal.tries else 0.0
        patience = self._patience
        self._trial = Trial(self._was, self._goals, before=before, requests=patience.trial, loss=patience.loss)
        self._backlog, self._backlog_until_s = self.listener.open, now + patience.backlog_s
        self._trial_since_s = math.inf
        self.state = "trial"
        self._look_at_backlog(now)
        self._count("applied")
        self._note(
            "applied",
            f"the new plan is in force {took}; it is on trial for {patience.trial} requests, of which"
            f" {100 * before:.1f} % met their targets under the old one",
        )

    def engine_died(self, why: str) -> None:
        """The engine is gone; while a plan is on trial the one before it is started again."""
        if self.state == "trial" or (self.state == "put off" and self._back_because):
            self._count("undone")
            self._undone.append((self._clock(), self._goals))
            self._goals = self._was
            self._note("undone", f"the old plan is started again, for the engine died under the new one: {why}")
            self._pause(longer=True)
            self._settle()

    # -- what the listener tells

    def _drifted(self, drift: Drift) -> None:
        self.noticed[drift.what] += 1
        if self.state not in ("watching", "learning"):
            return
        self.drift, self.proposal = drift, None
        self._note("drift", f"traffic has left what the plan was made for: {drift.described()}")
        if self._mode == "tell":
            self._settle()
            return
        self.state = "gathering"

    def _learnt(self, usual: Envelope) -> None:
        if self.state != "learning":
            return
        self.state = "watching"
        self._note("learnt", f"usual from now on: {usual.described()}")
        if not self._stated and not self._targets and self._learning:
            self._targets = usual_targets(list(self._learning))
            self._usual = self.listener.traffic(-1e18)[-self._patience.simulate :]
        if self._planned_for is None:
            self._planned_for = usual
        elif self.drift is not None and self._planned_for.near(usual):
            self._note("back", "traffic is again what the plan was made for")
            self.drift = None
        if self._planned_for is usual:
            self.drift = None

    def _ended(self, arrived_s: float, timed: Timed, left: bool) -> None:
        if not self._targets:
            if not left:
                self._learning.append(timed)
            return
        met = met_by(timed, self._targets)
        if left and met:
            return  # who leaves before a target was missed says nothing; after that, it was missed
        self._judged.append((arrived_s, met))
        # Who came before the change has waited for it, and who came soon after it behind those.
        if self._trial is None or self.state != "trial" or arrived_s < self._trial_since_s:
            return
        self._trial.done(met)
        verdict = self._trial.verdict
        if verdict is None:
            return
        trial, self._trial = self._trial, None
        before = f"{100 * trial.before:.1f} %"
        if verdict is trial.new:
            self._count("kept")
            self._note(
                "kept", f"the new plan is kept: {trial.met} of {trial.of} requests met their targets, {before} before"
            )
            self._planned_for = None
            self._hands.keep()
            self._pause(longer=False)
            self._settle()
            return
        self._undone.append((self._clock(), trial.new))
        self._put_off = 0
        self._back_because = f"under the new one {trial.met} of {trial.of} requests met their targets, {before} before"
        self._change(trial.old, back=True)

    # -- stages

    def _look_at_backlog(self, now: float) -> None:
        self._backlog = [life for life in self._backlog if life.finish is None]
        worked_off = not self._backlog and len(self.listener.open) <= self._open_before
        if worked_off or now >= self._backlog_until_s:
            self._backlog, self._trial_since_s = [], now

    def _gather(self, now: float) -> None:
        drift, patience = self.drift, self._patience
        assert drift is not None
        if now < self._pause_until_s:
            return
        traffic = self.listener.traffic(drift.since_s)
        waited_s = now - drift.at_s
        if len(traffic) < (patience.gather if waited_s < patience.gather_most_s else patience.few):
            if waited_s > 2 * patience.gather_most_s:
                self._note("plan stays", f"{len(traffic)} requests since the drift are too few to plan for")
                self._settle()
            return
        self.state = "simulating"
        self._hands.simulate(
            drift, traffic[-patience.simulate :], usual=self._usual, targets=self._targets, goals=self._goals
        )

    def _change(self, goals: Goals, *, back: bool) -> None:
        self._next = goals
        self.state = "going back" if back else "changing"
        if not self._put_off:
            self._open_before = len(self.listener.open)
        if not back:
            self._back_because = ""
        self._hands.change(goals, trial=not back)

    def _postpone(self, why: str, *, back: bool, now: float) -> None:
        self._count("put off")
        self._put_off += 1
        patience = self._patience
        if not back and self._put_off >= patience.put_off:
            self._note("put off", f"the change of plan is given up: {why}")
            self._pause(longer=True)
            self._settle()
            return
        wait_s = min(patience.put_off_s * 2.0 ** (self._put_off - 1), patience.pause_most_s)
        self._again_s = now + wait_s
        self.state = "put off"
        self._note("put off", f"the change of plan is tried again in {wait_s:g} s: {why}")

    def _pause(self, *, longer: bool) -> None:
        patience = self._patience
        if not longer:
            self._pause_s = patience.pause_s
        self._pause_until_s = self._clock() + self._pause_s
        if longer:
            self._pause_s = min(2 * self._pause_s, patience.pause_most_s)

    def _settle(self) -> None:
        """What comes from now on is usual."""
        self._trial, self._back_because = None, ""
        self.state = "learning"
        self.listener.relearn(self._clock())

    def _attained_since(self, since_s: float) -> float | None:
        mets = [met for arrived_s, met in self._judged if arrived_s >= since_s]
        return sum(mets) / len(mets) if mets else None

    def _count(self, what: Kind) -> None:
        self.counts[what] += 1

    def _note(self, what: Kind, says: str) -> None:
        self.history.append(Entry(at=self._wall(), what=what, says=says))
        self._log(what, says)

    # -- what it tells

    @property
    def says(self) -> str | None:
        """One sentence while traffic is not what the plan was made for, or a plan is being changed; None: all is as planned."""
        if self.state == "trial" and self._trial is not None:
            trial = self._trial
            if self._trial_since_s == math.inf:
                return f"another plan is in force, and works off {len(self.listener.open)} requests before its trial begins"
            return f"another plan is on trial: {trial.met} of {trial.of} requests met their targets, {100 * trial.before:.1f} % before"
        if self.state in ("changing", "going back"):
            return "the plan is being changed"
        return None if self.drift is None else self.drift.described()

    def json(self) -> bytes:
        """All of it, as GET /drift answers."""
        seen, of = self.listener.learnt
        usual = self.listener.guard.envelope if self.listener.guard is not None else None
        found = self.proposal
        return msgspec.json.encode(
            {
                "mode": self._mode,
                "state": self.state,
                "says": self.says,
                "learnt": seen,
                "learnt_of": of,
                "usual": None if usual is None else usual.described(),
                "drift": None
                if self.drift is None
                else {
                    "what": self.drift.what,
                    "planned": self.drift.planned,
                    "now": self.drift.now,
                    "says": self.drift.described(),
                },
                "proposal": None
                if found is None
                else {
                    "changed": found.changed,
                    "differs": found.differs,
                    "why": found.why,
                    "tries": found.tries,
                    "step_times": found.step_times,
                },
                "changes": self.counts,
                "history": list(self.history),
            }
        )

    def metrics(self, page: Page) -> None:
        """Adds its families to a page of metrics."""
        page.one(
            f"{PREFIX}traffic_drifted",
            "gauge",
            "1 while traffic is not what the plan was made for.",
            int(self.drift is not None),
        )
        name = f"{PREFIX}traffic_drifts_total"
        page.family(name, "counter", "Times that traffic left what was usual, by the figure that told.")
        for what, count in sorted(self.noticed.items()):
            page.sample(name, count, figure=what.replace(" ", "_"))
        name = f"{PREFIX}plan_changes_total"
        page.family(name, "counter", "Changes of the plan in service, by what became of them.")
        for outcome, count in sorted(self.counts.items()):
            page.sample(name, count, outcome=outcome.replace(" ", "_"))


def targets_of(goals: Goals) -> Targets:
    """The targets that the goals state, in seconds, by class."""
    every = {"ttft": goals.ttft_ms, "tpot": goals.tpot_ms}
    stated: dict[str, dict[str, float | None]] = {EVERY: dict(every)}
    for one in goals.classes:
        own = {"ttft": one.ttft_ms, "tpot": one.tpot_ms, "e2e": one.e2e_ms}
        stated[one.name] = {metric: ms if ms is not None else every.get(metric) for metric, ms in own.items()}
    seconds = {name: {metric: ms / 1e3 for metric, ms in own.items() if ms is not None} for name, own in stated.items()}
    return {name: own for name, own in seconds.items() if own}


def usual_targets(requests: list[Timed]) -> Targets:
    """What 99 of 100 of these got, with a tenth of room."""
    out: dict[str, float] = {}
    for metric, times in (("ttft", [one.ttft_s for one in requests]), ("tpot", [one.tpot_s for one in requests])):
        worst = percentile([value for value in times if value is not None], 99)
        if worst is not None and worst > 0:
            out[metric] = ROOM * worst
    return {EVERY: out} if out else {}


def met_by(one: Timed, targets: Targets) -> bool:
    """Whether a request met the targets of its class; what has no target has met it."""
    own = targets.get(one.traffic_class) or targets.get(EVERY) or {}
    times = {"ttft": one.ttft_s, "tpot": one.tpot_s, "e2e": one.e2e_s}
    return not one.failed and all((value := times[metric]) is None or value <= target for metric, target in own.items())
