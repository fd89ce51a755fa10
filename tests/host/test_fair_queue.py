"""Fairness between tenants: the queue alone, and on the real scheduler with a scripted device."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.host.support_engine import Engine, cache_plan, request, schedule_plan
from tradewind.contract.events import Arrived, Preempted, Scheduled, TokensOut
from tradewind.engine.accounts import GENERATED, REMEMBERED, Accounts
from tradewind.engine.policies import FairPolicy
from tradewind.engine.queue import WaitingQueue
from tradewind.engine.sequence import Sequence


def sequence(name: str, *, place: int, prompt: int = 100) -> Sequence:
    """`name` begins with the letter of its tenant."""
    return Sequence(request(name, [1] * prompt, tenant=name[0]), arrived_s=float(place), place=place)


def filled(policy: FairPolicy, *names: str, at: int = 0, prompt: int = 100) -> tuple[WaitingQueue, dict[str, Sequence]]:
    queue = policy.queue()
    made = {name: sequence(name, place=at + i, prompt=prompt) for i, name in enumerate(names)}
    for item in made.values():
        queue.push(item)
    return queue, made


def names(sequences: Any) -> list[str]:
    return [s.id for s in sequences]


def test_tenants_take_turns_and_each_ones_requests_keep_their_order() -> None:
    queue, made = filled(FairPolicy(), "x1", "x2", "x3", "y1", "x4", "z1", "y2")
    assert names(queue.first(5)) == ["x1", "y1", "z1", "x2", "y2"]
    assert names(queue) == ["x1", "y1", "z1", "x2", "y2", "x3", "x4"] and len(queue) == 7
    queue.remove(made["x1"])
    queue.take(made["y1"], start=90)  # most of its prompt is cached: it is charged for 10 tokens
    assert made["y1"].account is not None and made["y1"].account.served == 10
    assert names(queue) == ["x2", "z1", "y2", "x3", "x4"]
    queue.push(made["x1"])
    assert names(queue)[0] == "x1" and len(queue) == 6


def test_generated_tokens_count_and_a_preempted_request_is_not_charged_again() -> None:
    policy = FairPolicy()
    queue, made = filled(policy, "x1", "y1", "x2", "y2")
    queue.take(made["x1"], start=0)
    account = made["x1"].account
    assert account is not None and policy.accounts is not None
    policy.accounts.generated(account, 7)
    assert account.served == 100 + GENERATED * 7
    queue.take(made["y1"], start=0)
    assert names(queue) == ["y2", "x2"], "y is behind by what x generated"
    made["x1"].preemptions = 1
    queue.push(made["x1"])
    queue.take(made["x1"], start=0)
    assert account.served == 100 + GENERATED * 7


def test_idle_time_is_not_saved_up_and_leaving_pays_nothing() -> None:
    policy = FairPolicy()
    queue, made = filled(policy, "x1", "x2", "x3", "x4")
    for name in ("x1", "x2"):
        queue.take(made[name], start=0)
    late = sequence("y1", place=9)
    queue.push(late)
    assert late.account is not None and late.account.served == 200, "lifted to the level of those that wait"
    assert names(queue) == ["x3", "y1", "x4"]
    for name in ("x3", "x4"):
        queue.take(made[name], start=0)
    queue.take(late, start=0)
    assert len(queue) == 0
    again = sequence("x5", place=10)
    queue.push(again)
    assert again.account is made["x1"].account and again.account.served == 400, "what it was served is not forgotten"
    queue.remove(again)
    stranger = sequence("z1", place=11)
    queue.push(stranger)
    assert stranger.account is not None and stranger.account.served == 400, "the level of the last that waited"


def test_the_last_of_the_tenant_served_most_gives_way() -> None:
    policy = FairPolicy()
    queue, made = filled(policy, "x1", "x2", "y1")
    for item in made.values():
        queue.take(item, start=0)
    victim = policy.victim(made.values())
    assert victim is not None and victim.id == "x2"
    assert policy.victim([]) is None


def test_accounts_of_many_names_are_forgotten() -> None:
    accounts = Accounts()
    kept = accounts.of("kept")
    kept.served = 5
    for number in range(2 * REMEMBERED):
        accounts.lift(accounts.of(str(number)), among=[kept])
    assert len(accounts) <= REMEMBERED + 1
    assert accounts.of("kept") is kept, "somebody of it waits"
    assert accounts.of("0").served == 0, "forgotten"


# -- on the scheduler ------------------------------------------------------------------------------------------------


def served(engine: Engine) -> dict[str, int]:
    """By tenant, prompt tokens computed plus twice the tokens generated, from what the engine told."""
    tenants = {e.request_id: e for e in engine.of(Arrived)}
    out: dict[str, int] = {}
    for event in engine.of(Scheduled):
        arrived = tenants[event.request_id]
        computed = 0 if event.resumed else arrived.prompt_tokens - event.cached_tokens
        out[arrived.tenant] = out.get(arrived.tenant, 0) + computed
    for event in engine.of(TokensOut):
        out[tenants[event.request_id].tenant] += GENERATED * len(event.tokens)
    return out


def test_a18_one_request_does_not_wait_for_anothers_fifty() -> None:
    def started_before(policy: Any) -> int:
        engine = Engine(schedule=schedule_plan(max_running=4, policy=policy), cache=cache_plan(pages=(200,)))
        for number in range(50):
            engine.scheduler.add(request(f"x{number}", [100 + number] * 20, max_tokens=10, tenant="x"), 0.0)
        engine.loop.run_once()
        engine.scheduler.add(request("y", [9] * 20, max_tokens=10, tenant="y"), engine.clock.now())
        while engine.loop.busy:
            engine.loop.run_once()
            engine.scheduler.check()
        order = [e.request_id for e in engine.of(Scheduled)]
        assert len(order) == 51
        return order.index("y") - 4

    assert started_before("arrival") == 46
    assert started_before("fair") == 0, "the first slot that becomes free is its"


@st.composite
def backlogs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """(tenant, prompt, max_tokens) of many requests, all there from the beginning."""
    out = []
    for tenant in draw(st.sampled_from(["xy", "xyz"])):
        size = st.tuples(st.integers(1, 24), st.integers(1, 24))
        out += [(tenant, *one) for one in draw(st.lists(size, min_size=4, max_size=25))]
    return draw(st.permutations(out))


@settings(max_examples=60, deadline=None)
@given(
    wanted=backlogs(),
    slots=st.integers(1, 5),
    pages=st.integers(16, 60),
    budget=st.integers(8, 40),
    flights=st.sampled_from([1, 2]),
)
def test_service_of_tenants_that_wait_differs_by_a_bounded_amount(
    wanted: list[tuple[str, int, int]], slots: int, pages: int, budget: int, flights: int
) -> None:
    """Counters stay within GENERATED * M of each other while both wait, M the tokens that fit the pool and the slots."""
    engine = Engine(
        cache=cache_plan(pages=(pages,)),
        # age_limit_s=0: nobody is passed because it does not fit.
        schedule=schedule_plan(
            max_running=slots, max_tokens_per_step=budget, policy="fair", steps_in_flight=flights, age_limit_s=0.0
        ),
    )
    tenants: dict[str, str] = {}
    for number, (tenant, prompt, most) in enumerate(wanted):
        tokens = [1000 * number + i for i in range(prompt)]
        engine.scheduler.add(request(f"r{number}", tokens, max_tokens=most, tenant=tenant), 0.0)
        tenants[f"r{number}"] = tenant
    engine.clock.advance(1.0)
    room = min((pages - 1) * 4, slots * max(prompt + most for _, prompt, most in wanted))
    while engine.loop.busy:
        engine.loop.run_once()
        engine.scheduler.check()
        started = {e.request_id for e in engine.of(Scheduled) if not e.resumed}
        waiting = {tenant for name, tenant in tenants.items() if name not in started}
        totals = [service for tenant, service in served(engine).items() if tenant in waiting]
        totals += [0] * (len(waiting) - len(totals))
        if len(totals) > 1:
            assert max(totals) - min(totals) <= GENERATED * room, (totals, room)
    ended = [e for e in engine.of(TokensOut) if e.finish is not None]
    assert len(ended) == len(wanted) and all(e.finish == "length" for e in ended), "nobody starves"


Coming = list[tuple[int, str, int, int]]


@st.composite
def comings(draw: st.DrawFn) -> Coming:
    """(turn, tenant, prompt, max_tokens): bursts of tenants that come, are served, go, and come back when they like."""
    out: Coming = []
    turn = 0
    for _ in range(draw(st.integers(4, 12))):
        tenant = draw(st.sampled_from("xyz"))
        for _ in range(draw(st.integers(1, 10))):
            out.append((turn, tenant, draw(st.integers(1, 24)), draw(st.integers(1, 16))))
        turn += draw(st.sampled_from([0, 1, 3, 15, 60]))
    return out


@settings(max_examples=60, deadline=None)
@given(
    wanted=comings(),
    slots=st.integers(1, 5),
    pages=st.integers(16, 60),
    flights=st.sampled_from([1, 2]),
    weights=st.sampled_from([{}, {"x": 3.0}, {"x": 4.0, "y": 2.0}]),
)
def test_over_any_time_in_which_two_tenants_wait_they_are_served_alike(
    wanted: Coming, slots: int, pages: int, flights: int, weights: dict[str, float]
) -> None:
    """Tenants come and go. Between any two moments with both waiting all the time, service / weight differs by
    2 * GENERATED * M / least weight at most.

    What was saved up by being away, or gained by leaving and coming back, would show here. M: what can run at once, however much waits.
    """
    plan = schedule_plan(max_running=slots, max_tokens_per_step=40, policy="fair", steps_in_flight=flights)
    plan = msgspec.structs.replace(
        plan, tenant_weights=weights, age_limit_s=0.0
    )  # nobody is passed because it does not fit
    engine = Engine(cache=cache_plan(pages=(pages,)), schedule=plan)
    clock = engine.clock
    clock.advance(1.0)
    room = min((pages - 1) * 4, slots * max(prompt + most for _, _, prompt, most in wanted))
    tenants: dict[str, str] = {}
    history: list[tuple[set[str], dict[str, float]]] = []
    due = sorted(enumerate(wanted), key=lambda item: item[1][0])
    turn = 0
    while due or engine.loop.busy:
        while due and due[0][1][0] <= turn:
            number, (_, tenant, prompt, most) = due.pop(0)
            tokens = [1000 * number + i for i in range(prompt)]
            engine.scheduler.add(request(f"r{number}", tokens, max_tokens=most, tenant=tenant), clock.now())
            tenants[f"r{number}"] = tenant
        if engine.loop.busy:
            engine.loop.run_once()
            engine.scheduler.check()
        turn += 1
        started = {e.request_id for e in engine.of(Scheduled) if not e.resumed}
        waiting = {tenant for name, tenant in tenants.items() if name not in started}
        history.append(
            (waiting, {tenant: units / weights.get(tenant, 1.0) for tenant, units in served(engine).items()})
        )
    bound = 2 * GENERATED * room / min(weights.get(tenant, 1.0) for tenant in "xyz")
    for one, other in (("x", "y"), ("x", "z"), ("y", "z")):
        ahead: list[float] = []
        for waiting, service in history:
            if {one, other} <= waiting:
                ahead.append(service.get(one, 0.0) - service.get(other, 0.0))
                assert max(ahead) - min(ahead) <= bound, (one, other, ahead, bound)
            else:
                ahead = []
    assert sum(e.finish == "length" for e in engine.of(TokensOut)) == len(wanted), "nobody starves"


def test_a_light_tenant_is_served_at_once_while_a_heavy_one_keeps_coming() -> None:
    """A stream of new names, each lifted to the lowest level, does not push anybody back either."""
    engine = Engine(schedule=schedule_plan(max_running=2, policy="fair"), cache=cache_plan(pages=(400,)))
    for number in range(20):
        engine.scheduler.add(request(f"x{number}", [number + 1] * 8, max_tokens=6, tenant="x"), 0.0)
    turn = 0
    while engine.loop.busy:
        engine.loop.run_once()
        turn += 1
        if turn == 5:
            engine.scheduler.add(request("light", [7000] * 8, max_tokens=6, tenant="light"), engine.clock.now())
        if turn < 150 and turn % 3 == 0:
            engine.scheduler.add(
                request(f"n{turn}", [8000 + turn] * 8, max_tokens=6, tenant=f"n{turn}"), engine.clock.now()
            )
    order = [e.request_id for e in engine.of(Scheduled)]
    at = {e.request_id: e for e in engine.of(Scheduled)}
    light = order.index("light")
    assert light <= 4, order
    assert all(at[f"n{t}"].at_s >= at["light"].at_s for t in range(6, 150, 3)), "who came later starts later"
    assert not engine.of(Preempted)
