"""What is given up under overload, and by which step times steps are paced.

Knows: what classes, targets and the quality budget allow. Refuses to know: how a ladder climbs (engine.degrade), how times are fitted.
Pure.
"""

from __future__ import annotations

from tradewind.config.choices import Choice
from tradewind.config.goals import DegradeName, Goals, Match, Means, PolicyName, TrafficClass
from tradewind.config.plan import DegradePlan, Reason

DEGRADE_WORDS: dict[DegradeName, str] = {
    "full": "guesses, room for prompts and starts of others are given up first, then the lowest class is refused and answers are shortened",
    "lossless": "guesses, room for prompts and starts of others are given up while the highest class misses its targets; no answer changes",
    "off": "everybody waits alike",
}
ALONE_TTFT_S = 1.0
"""Where the ladder is asked for and nobody has a target, the first token of the highest priority is to come within this."""


def choose_degrade(goals: Goals) -> Choice[DegradePlan | None]:
    """How far the degrade ladder may go. By itself only where a class with targets has somebody below it that can give way, and no further
    than the quality budget: a refused request and a shortened answer are losses."""
    means = goals.means
    asked = means.degrade
    if asked == "off":
        return None, Reason(choice="degrade", value="off", why=f"as asked: {DEGRADE_WORDS['off']}", pinned=True)
    above = protected(goals)
    if asked is None and not above:
        targets = any(_has_target(one, goals) for one in goals.classes)
        why = "all requests are alike to it" if targets else "no class has a TTFT or TPOT target"
        return None, Reason(
            choice="degrade", value="off", why=f"{why}: there is nobody that the others could give way to"
        )
    budget = goals.quality_loss_percent
    far: DegradeName = asked or ("full" if budget else "lossless")
    stated = (
        any(one.ttft_ms is not None or one.tpot_ms is not None for one in goals.classes) or goals.ttft_ms is not None
    )
    plan = DegradePlan(
        far=far,
        ttft_s=goals.ttft_ms / 1000 if goals.ttft_ms is not None else None if stated else ALONE_TTFT_S,
        tpot_s=None if goals.tpot_ms is None else goals.tpot_ms / 1000,
    )
    if asked is not None:
        return plan, Reason(choice="degrade", value=far, why=f"as asked: {DEGRADE_WORDS[far]}", pinned=True)
    for_whom = f"for {' and '.join(above)}"
    if far == "full":
        why = f"{for_whom}: {DEGRADE_WORDS[far]}, as far as the quality budget of {budget:g} % allows that at all"
        return plan, Reason(choice="degrade", value=far, why=why, rejected="lossless: the budget allows more")
    said = "is lossless" if budget == 0 else "is not stated"
    return plan, Reason(
        choice="degrade",
        value=far,
        why=f"{for_whom}: {DEGRADE_WORDS[far]}",
        rejected=f"full: refuses the lowest class and shortens answers, and the quality budget {said}",
    )


def protected(goals: Goals) -> tuple[str, ...]:
    """The classes with a target that everybody else gives way to; none where nobody is below them."""
    ranks = {one.name: (0 if _has_target(one, goals) else 1, one.match.priority or 0) for one in goals.classes}
    everybody = set(ranks.values())
    if not any(one.match == Match() for one in goals.classes):
        everybody.add((1, 0))  # requests that match no class
    first = min(everybody)
    if first[0] or len(everybody) == 1:
        return ()
    return tuple(name for name, rank in ranks.items() if rank == first)


def _has_target(one: TrafficClass, goals: Goals) -> bool:
    return any(value is not None for value in (one.ttft_ms, one.tpot_ms, goals.ttft_ms, goals.tpot_ms))


def choose_fit_steps(means: Means, *, policy: PolicyName, bounded: bool = False) -> Choice[bool]:
    """Whether step times are fitted to the steps that run; `bounded`: each step's length is bound, whatever the policy."""
    paced = policy == "slo" or bounded
    if means.fit_steps if means.fit_steps is not None else paced:
        why = "steps are paced by what steps like them took, as soon as there are enough, beyond them by the machine's speeds"
        if not paced:
            why = f"as asked; {policy} paces nothing, so that the times are only shown and kept"
        rejected = "off: paced by the machine's speeds and one factor" if paced else ""
        return True, Reason(
            choice="fit_steps", value="on", why=why, rejected=rejected, pinned=means.fit_steps is not None
        )
    why = "as asked: paced by the machine's speeds and one factor" if paced else f"{policy} paces no steps"
    return False, Reason(choice="fit_steps", value="off", why=why, pinned=means.fit_steps is not None)
