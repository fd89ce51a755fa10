"""The planner's own process: `python -m tradewind.tune.planner`, one question on standard input, one answer on standard output.

Knows: how a question of the guard is answered by simulations. Refuses to know: servers.

A process because simulations are Python that computes: in a thread of the front they would hold up every stream. It gives way to
everything else on the machine, and whoever asks bounds its time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import msgspec

from tradewind.config.goals import Goals
from tradewind.config.plan import Plan
from tradewind.contract.errors import UserError
from tradewind.observability.attainment import Timed
from tradewind.observability.drift import Arrival, Drift, Envelope
from tradewind.simulate.forecast import classified, planned_times, run_classes
from tradewind.simulate.steplog import StepRecord, host_time_of
from tradewind.simulate.steptime import StepTime, fit
from tradewind.simulate.trace_columns import Trace, TraceLine, make_trace
from tradewind.tune.guard import Proposed, Targets, targets_of, usual_targets
from tradewind.tune.propose import envelope_of, propose, timed_of, trace_of

NICE = 10
"""Beside an engine that takes all cores this is a tenth of one: 19, which is a hundredth, would not come to an end."""
FEWEST_STEPS = 200
"""Fewer steps than this say less of step times than the machine's figures do."""


class AskPlan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What should be planned for this traffic?"""

    goals: Goals
    plan: Plan
    """In force."""
    drift: Drift
    traffic: list[Arrival]
    usual: list[Arrival]
    """Traffic as it was; where the goals state no targets it says what requests can expect."""
    targets: Targets
    """The same as it was measured."""
    steps: list[StepRecord]
    """The engine's newest."""


class AskUsual(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What is usual where this plan serves this trace?"""

    goals: Goals
    plan: Plan
    trace: list[TraceLine]
    block_tokens: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """There is no answer."""

    why: str


class Usual(msgspec.Struct, frozen=True, tag=True):
    """The answer to AskUsual."""

    envelope: Envelope


class Planned(msgspec.Struct, frozen=True, tag=True):
    """The answer to AskPlan."""

    proposed: Proposed


Question = AskPlan | AskUsual
Answer = Planned | Refused | Usual


def answer(question: Question) -> Answer:
    """Simulates; some seconds. Raises nothing that traffic can cause."""
    try:
        if isinstance(question, AskUsual):
            trace = make_trace(question.trace, name="usual traffic", block_tokens=question.block_tokens)
            return Usual(envelope_of(trace, question.plan, times=planned_times(question.plan)))
        return Planned(_planned(question))
    except UserError as error:
        return Refused(str(error))


def _planned(asked: AskPlan) -> Proposed:
    times = times_of(asked.plan, asked.steps)
    recent = classified(trace_of(asked.traffic), asked.goals)
    targets = targets_of(asked.goals)
    if not targets:
        # Simulated times are judged by simulated ones: those of both may be off by the same.
        calm = classified(trace_of(asked.usual), asked.goals) if asked.usual else None
        targets = usual_targets(_went(calm if calm is not None else recent, asked.plan, times))
    found = propose(asked.goals, asked.plan, recent, times=times, targets=targets, drift=asked.drift, in_service=True)
    return Proposed(
        goals=found.goals,
        changed=found.changed,
        differs=found.differs,
        why=found.why,
        tries=found.tries,
        targets=asked.targets or targets,
        step_times=times.described(),
    )


def times_of(plan: Plan, steps: Sequence[StepRecord]) -> StepTime:
    """Step times fitted to the engine's own steps, or the machine's figures where these are too few."""
    prior = planned_times(plan)
    if len(steps) < FEWEST_STEPS:
        return prior
    return fit(steps, prior=prior, host=host_time_of(steps))


def _went(trace: Trace, plan: Plan, times: StepTime) -> list[Timed]:
    return timed_of(run_classes(trace, plan=plan, times=times))


def main() -> int:
    """Answers the one question."""
    os.nice(NICE)
    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.buffer.write(msgspec.msgpack.encode(answer(question)))
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
