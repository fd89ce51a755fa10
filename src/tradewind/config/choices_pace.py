"""How far prompts may hold up answers that run: in proportion, by a stated time between tokens, or by what a step was meant to take.

Knows: who states such a thing, and where a machine can keep it. Refuses to know: how steps are made so long (engine.pacing). Pure.
"""

from __future__ import annotations

from tradewind.config.choices import Backend, Choice
from tradewind.config.goals import Goals, Scenario
from tradewind.config.plan import PacePlan, Reason
from tradewind.contract.errors import UserError

LEAST_SLOWDOWN = 1.1
"""Below, a step would have no time for prompts at all."""
SLOWDOWN: dict[Scenario, float] = {"latency": 2.0}
"""Of a GPU, where nothing is stated. A CPU computes some four tokens in the time that it reads the weights in: chunks so short would read
them over and over."""
WHOLE: tuple[Scenario, ...] = ("balanced", "memory")
"""On a GPU these keep the length that a step was meant to have, however deep a prompt is."""


def check_pace(goals: Goals) -> None:
    """Raises UserError for a slowdown that is out of range."""
    value = goals.slowdown
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not LEAST_SLOWDOWN <= value <= 1e6
    ):
        raise UserError(f"slowdown is {value!r}; it must be a number from {LEAST_SLOWDOWN}, as 2: twice as long")


def choose_pace(goals: Goals, *, backend: Backend, paced: bool) -> Choice[PacePlan | None]:
    """The bound on steps in which prompts go on beside running answers; `paced`: policy slo goes by the targets of classes already."""
    check_pace(goals)
    stated, scenario = goals.slowdown, goals.scenario
    step_s = goals.tpot_ms / 1000 if goals.tpot_ms is not None and not paced else None
    wanted = goals.tpot_ms is not None or goals.ttft_ms is not None or paced
    usual = SLOWDOWN.get(scenario) if backend == "cuda" and not wanted else None
    slowdown = usual if stated is None else float(stated)
    whole = backend == "cuda" and scenario in WHOLE and slowdown is None and step_s is None and not paced
    if slowdown is None and step_s is None and not whole:
        why = (
            "the targets of classes say how long steps may be"
            if paced
            else "a prompt gets what the step's budget leaves"
        )
        return None, Reason(choice="pace", value="off", why=why)
    plan = PacePlan(slowdown=slowdown, step_s=step_s, whole=whole)
    if whole:
        why = (
            "a token of a prompt costs more the more tokens are before it: deep in a long prompt chunks are made shorter, so that running "
            "answers wait no longer than for a step of the whole budget where a prompt begins"
        )
        rejected = "a slowdown of 2: prompts would take twice as long while anybody is answered"
        return plan, Reason(choice="pace", value="a whole step", why=why, rejected=rejected)
    parts = [f"{slowdown:g} times a step without prompts"] if slowdown is not None else []
    parts += [f"{goals.tpot_ms:g} ms"] if step_s is not None else []
    asked = "as asked" if stated is not None or step_s is not None else "what matters most is latency"
    why = f"{asked}: beside running answers a prompt gets so many tokens a step as fit, fewer the deeper it is"
    return plan, Reason(
        choice="pace",
        value=" and ".join(parts),
        why=why,
        rejected="the whole budget: prompts are done sooner, and each of their chunks holds every answer up",
        pinned=stated is not None or step_s is not None,
    )
