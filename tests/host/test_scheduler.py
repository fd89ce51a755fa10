"""What users were hurt by elsewhere, and the rules of admission, sharing, leaving: on the real scheduler and a scripted device."""

from __future__ import annotations

import random

import pytest

from tests.host.support_engine import Chunk, Engine, cache_plan, request, schedule_plan
from tradewind.contract.errors import LimitError, RequestError
from tradewind.contract.events import Delayed, Preempted, Scheduled, StepDone, TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import Wants
from tradewind.engine.sequence import State
from tradewind.simulate.scripted import expected_tokens


def prompt(length: int, *, seed: int = 1) -> list[int]:
    return [seed * 10_000 + i for i in range(length)]


def finished(engine: Engine) -> dict[str, TokensOut]:
    return {e.request_id: e for e in engine.of(TokensOut) if e.finish is not None}


def play(engine: Engine, *, limit: int = 5000) -> None:
    """Runs until idle, checking every invariant after each turn."""
    for _ in range(limit):
        if not engine.loop.busy:
            return
        engine.loop.run_once()
        engine.scheduler.check()
    raise AssertionError(f"{engine.scheduler.unfinished} requests did not end in {limit} turns")


def first_token_s(engine: Engine, name: str) -> float:
    return next(e.at_s for e in engine.of(TokensOut, name) if e.tokens)


def answers_alone(engine: Engine, *requests: Request) -> None:
    for wanted in requests:
        got = [t for e in engine.of(TokensOut, wanted.id) for t in e.tokens]
        assert got == expected_tokens(wanted.tokens, wanted.max_tokens, groups=engine.cache.groups)


# -- limits ----------------------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    engine = Engine(cache=cache_plan(pages=(11,)))  # 10 pages of 4
    with pytest.raises(LimitError) as refusal:
        engine.scheduler.add(request("a", prompt(30), max_tokens=20), 0.0)
    text = str(refusal.value)
    for part in ("30 tokens", "49 tokens (13 pages)", "40 tokens (10 pages)", "9 tokens (3 pages) short", "at most 11"):
        assert part in text, text
    with pytest.raises(LimitError, match="shorten the prompt by at least 10 tokens"):
        engine.scheduler.add(request("a", prompt(50), max_tokens=1), 0.0)
    engine.scheduler.add(request("a", prompt(30), max_tokens=11), 0.0)
    play(engine)
    assert finished(engine)["a"].finish == "length"
    narrow = Engine(cache=cache_plan(pages=(100, 9), windows=(None, 8)), schedule=schedule_plan(max_tokens_per_step=16))
    with pytest.raises(
        LimitError, match=r"window of 8 tokens then hold 44 tokens \(11 pages\).*12 tokens \(3 pages\) short"
    ):
        narrow.scheduler.add(request("a", prompt(100), max_tokens=20), 0.0)


@pytest.mark.parametrize(
    ("length", "most", "error", "words"),
    [
        (0, 4, RequestError, "empty"),
        (100, 0, LimitError, "limit is 100.*at least 1 tokens"),
        (250, 0, LimitError, "at least 151 tokens"),
        (90, 11, LimitError, "together 101.*1 tokens over.*max_tokens to at most 10"),
        (100, 1, LimitError, "shorten the prompt by at least 1 tokens"),
        (10, 0, RequestError, "max_tokens is 0"),
    ],
)
def test_prompts_at_and_over_the_context_limit(length: int, most: int, error: type[Exception], words: str) -> None:
    engine = Engine(schedule=schedule_plan(max_context=100))
    with pytest.raises(error, match=words):
        engine.scheduler.add(request("a", prompt(length), max_tokens=most), 0.0)
    assert engine.scheduler.idle
    engine.scheduler.add(request("a", prompt(99), max_tokens=1), 0.0)
    with pytest.raises(RequestError, match="'a' is already there"):
        engine.scheduler.add(request("a", prompt(9), max_tokens=1), 0.0)
    play(engine)


# -- user cases ------------------------------------------------------------------------------------------------------


def test_a6_many_long_requests_on_a_pool_for_two_all_finish() -> None:
    engine = Engine(cache=cache_plan(pages=(27,)))
    wanted = [request(f"r{i}", prompt(40, seed=i + 1), max_tokens=10) for i in range(20)]
    for one in wanted:
        engine.scheduler.add(one, 0.0)
    waiting = []
    while engine.loop.busy:
        engine.loop.run_once()
        engine.scheduler.check()
        waiting.append(engine.scheduler.waiting)
    assert waiting[0] == 18 and waiting[-1] == 0 and sorted(waiting, reverse=True) == waiting
    assert engine.of(StepDone)[0].waiting == 18
    assert engine.of(Delayed)[0].reason == "needs 11 more pages, 6 are free"
    answers_alone(engine, *wanted)


def test_a14_long_prompts_do_not_stop_short_traffic() -> None:
    def times(*, long: bool) -> tuple[float, Engine]:
        engine = Engine(
            cache=cache_plan(pages=(4001,)),
            schedule=schedule_plan(max_running=32, max_tokens_per_step=64, max_context=8000),
            delay_s=lambda step: 0.005 + 0.00002 * step.tokens,
        )
        if long:
            for i in range(2):
                engine.scheduler.add(request(f"long{i}", prompt(6000, seed=50 + i), max_tokens=4), 0.0)
        waits = []
        sent: dict[str, float] = {}
        turn = 0
        while turn < 600 or engine.loop.busy:
            if turn < 600 and turn % 6 == 0:
                name = f"s{turn}"
                sent[name] = engine.clock.now()
                engine.scheduler.add(request(name, prompt(10, seed=100 + turn), max_tokens=4), engine.clock.now())
            if engine.loop.busy:
                engine.loop.run_once()
            else:
                engine.clock.advance(0.002)
            turn += 1
        for name, at in sent.items():
            waits.append(first_token_s(engine, name) - at)
        assert len(finished(engine)) == len(sent) + 2 * long
        return sorted(waits)[int(0.95 * len(waits))], engine

    with_long, engine = times(long=True)
    without, _ = times(long=False)
    assert with_long <= 3 * without, (with_long, without)
    # What the scheduler can promise whatever a step costs: a short prompt is computed whole in the step it enters.
    shorts = 0
    for step in engine.device.steps:
        counts = dict(zip(step.slot.tolist(), step.count.tolist(), strict=True))
        for enter in step.enter:
            if enter.request_id.startswith("s"):
                assert counts[enter.slot] == 10
                shorts += 1
    assert shorts == 100


def test_a15_small_ones_pass_a_big_one_that_does_not_fit_until_it_is_old() -> None:
    engine = Engine(
        cache=cache_plan(pages=(101,)), schedule=schedule_plan(max_tokens_per_step=400, age_limit_s=1.0), delay_s=0.05
    )
    engine.scheduler.add(request("first", prompt(80, seed=1), max_tokens=60), 0.0)
    engine.loop.run_once()
    engine.scheduler.add(request("big", prompt(360, seed=2), max_tokens=4), engine.clock.now())
    smalls = 0
    while "big" not in {e.request_id for e in engine.of(Scheduled)}:
        engine.scheduler.add(request(f"s{smalls}", prompt(8, seed=100 + smalls), max_tokens=20), engine.clock.now())
        smalls += 1
        engine.loop.run_once()
        engine.scheduler.check()
    scheduled = {e.request_id: e for e in engine.of(Scheduled)}
    assert scheduled["s0"].at_s < scheduled["big"].at_s
    passed = [e for name, e in scheduled.items() if name.startswith("s") and e.at_s < scheduled["big"].at_s]
    assert len(passed) > 3 and all(e.at_s <= 1.1 for e in passed), "nothing passes once it is old"
    assert scheduled["big"].waited_s <= 1.0 + 60 * 0.05 + 0.2, "it starts as soon as those before it have drained"
    assert engine.of(Delayed, "big")[0].reason.startswith("needs 91 more pages")
    play(engine)
    assert finished(engine)["big"].finish == "length"


def test_a16_the_second_of_two_big_prompts_waits_and_nothing_is_computed_twice() -> None:
    engine = Engine(cache=cache_plan(pages=(101,)), schedule=schedule_plan(max_tokens_per_step=64))
    wanted = [request(f"r{i}", prompt(280, seed=i + 1), max_tokens=30) for i in range(2)]
    for one in wanted:
        engine.scheduler.add(one, 0.0)
    play(engine)
    answers_alone(engine, *wanted)
    assert engine.scheduler.recomputed_tokens == 0 and not engine.of(Preempted)
    assert sum(e.prompt_tokens for e in engine.of(StepDone)) == 560
    starts = {e.request_id: e.at_s for e in engine.of(Scheduled)}
    assert starts["r1"] >= finished(engine)["r0"].at_s


def test_a17_a_high_priority_request_gets_in_and_the_evicted_lose_nothing_but_time() -> None:
    def run(high: bool, low: bool) -> Engine:
        engine = Engine(schedule=schedule_plan(max_running=4, policy="priority"))
        lows = [request(f"low{i}", prompt(20, seed=i + 1), max_tokens=30, priority=5) for i in range(4)]
        if low:
            for one in lows:
                engine.scheduler.add(one, 0.0)
            for _ in range(12):
                engine.loop.run_once()
        engine.sent_s = engine.clock.now()  # type: ignore[attr-defined]
        if high:
            engine.scheduler.add(request("high", prompt(20, seed=9), max_tokens=5), engine.clock.now())
        play(engine)
        if low:
            answers_alone(engine, *lows)
        return engine

    idle, busy = run(True, False), run(True, True)
    waits = [first_token_s(e, "high") - e.sent_s for e in (idle, busy)]  # type: ignore[attr-defined]
    assert waits[1] <= waits[0] + 0.021, "two steps: the victim's last one is collected, then it enters"
    (victim,) = busy.of(Preempted)
    assert victim.for_whom == "high" and victim.request_id == "low3" and victim.lost_tokens > 20
    again = [e for e in busy.of(Scheduled, "low3") if e.resumed]
    assert len(again) == 1 and again[0].cached_tokens > 20, "its pages were still in the prefix cache"
    assert busy.scheduler.recomputed_tokens <= 8


def test_equal_or_lower_priority_never_evicts() -> None:
    engine = Engine(schedule=schedule_plan(max_running=2, policy="priority"))
    for i in range(2):
        engine.scheduler.add(request(f"r{i}", prompt(9, seed=i + 1), max_tokens=20, priority=1), 0.0)
    engine.loop.run_once()
    engine.scheduler.add(request("same", prompt(9, seed=7), max_tokens=5, priority=1), engine.clock.now())
    play(engine)
    assert not engine.of(Preempted)


def test_a3_five_hundred_cycles_of_cancels_leave_every_slot_and_page_free() -> None:
    engine = Engine(cache=cache_plan(pages=(400,)), schedule=schedule_plan(max_running=16, max_tokens_per_step=128))
    chance = random.Random(1)
    for cycle in range(500):
        names = [f"{cycle}.{i}" for i in range(16)]
        for i, name in enumerate(names):
            engine.scheduler.add(
                request(name, prompt(chance.randint(1, 40), seed=i + 1), max_tokens=6), engine.clock.now()
            )
        doomed = chance.sample(names, 8)
        while engine.loop.busy:
            if doomed and chance.random() < 0.7:
                engine.scheduler.cancel(doomed.pop(), engine.clock.now())
            engine.loop.run_once()
        engine.events.clear()
        engine.device.steps.clear()
        engine.device._number = 0
        engine.scheduler._number = 0
    engine.scheduler.check()
    assert engine.scheduler.running == 0 and engine.scheduler.idle
    last = request("last", prompt(33), max_tokens=5)
    engine.scheduler.add(last, engine.clock.now())
    play(engine)
    answers_alone(engine, last)


# -- prefix sharing --------------------------------------------------------------------------------------------------


def test_a_whole_prompt_in_the_cache_still_computes_its_last_page() -> None:
    engine = Engine()
    for name in ("a", "b"):
        engine.scheduler.add(request(name, prompt(16), max_tokens=3), 0.0)
        play(engine)
    assert [e.cached_tokens for e in engine.of(Scheduled)] == [0, 12]


def test_those_who_share_less_than_a_page_are_not_delayed() -> None:
    engine = Engine()
    for i in range(4):
        engine.scheduler.add(request(f"r{i}", [1, 2, 3, 100 + i, 5, 6], max_tokens=3), 0.0)
    engine.loop.run_once()
    assert engine.scheduler.running == 4 and not engine.of(Delayed)
    play(engine)


def test_a_waiter_goes_on_as_soon_as_its_part_is_published() -> None:
    engine = Engine(schedule=schedule_plan(max_tokens_per_step=16))
    shared = prompt(16)
    engine.scheduler.add(request("owner", shared + prompt(48, seed=2), max_tokens=2), 0.0)
    engine.scheduler.add(request("waiter", [*shared, 7, 8], max_tokens=2), 0.0)
    play(engine)
    scheduled = {e.request_id: e for e in engine.of(Scheduled)}
    assert scheduled["waiter"].cached_tokens == 16 and scheduled["waiter"].step <= 4
    (told,) = engine.of(Delayed, "waiter")
    assert told.blocked_by == "owner"


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_waiters_go_on_by_themselves_when_the_owner_leaves(how: str) -> None:
    engine = Engine(
        schedule=schedule_plan(max_tokens_per_step=16),
        **({"fail": {("owner", 16): "logits are not finite"}} if how == "fail" else {}),
    )
    engine.scheduler.add(request("owner", prompt(40), max_tokens=2), 0.0)
    waiters = [request(f"w{i}", [*prompt(36), i], max_tokens=4) for i in range(3)]
    for one in waiters:
        engine.scheduler.add(one, 0.0)
    engine.loop.run_once()
    assert engine.scheduler.state_of("w0") is State.BLOCKED
    if how == "cancel":
        engine.scheduler.cancel("owner", engine.clock.now())
    play(engine)
    assert finished(engine)["owner"].finish == ("abort" if how == "cancel" else "error")
    answers_alone(engine, *waiters)


def test_a_multi_turn_chat_finds_its_answer_cached() -> None:
    engine = Engine()
    first = request("a", prompt(10), max_tokens=15)
    engine.scheduler.add(first, 0.0)
    play(engine)
    history = [*first.tokens, *expected_tokens(first.tokens, 15, groups=engine.cache.groups)]
    engine.scheduler.add(request("b", [*history, 5, 6], max_tokens=2), engine.clock.now())
    play(engine)
    assert engine.of(Scheduled, "b")[0].cached_tokens == 24


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    engine = Engine(schedule=schedule_plan(max_tokens_per_step=16))
    engine.scheduler.add(request("a", prompt(30), max_tokens=2), 0.0)
    play(engine)
    wanted = request(
        "b", prompt(30), max_tokens=3, sampling=SamplingParams(temperature=0, prompt_logprobs=1, logprobs=2)
    )
    engine.scheduler.add(wanted, engine.clock.now())
    play(engine)
    assert engine.of(Scheduled, "b")[0].cached_tokens == 0
    events = engine.of(TokensOut, "b")
    assert [t.token for t in events[0].prompt_logprobs] == list(wanted.tokens[1:])
    assert all(not e.prompt_logprobs for e in events[1:]) and all(len(e.logprobs) == 1 for e in events)
    wants = [Wants(w) for s in engine.device.steps[-8:] for w in s.wants.tolist()]
    assert Wants.ALL_NO_SAMPLE in wants and Wants.ALL in wants


# -- samples of one prompt -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("length", "copies", "cached"), [(18, 3, 17), (17, 0, 16), (20, 3, 19), (3, 3, 2), (1, 0, 0)])
def test_samples_share_full_pages_and_copy_the_last(prefix_cache: bool, length: int, copies: int, cached: int) -> None:
    engine = Engine(cache=cache_plan(prefix_cache=prefix_cache))
    wanted = [request("a", prompt(length), max_tokens=9)]
    wanted += [request(f"a.{i}", prompt(length), max_tokens=9, parent="a") for i in range(3)]
    for one in wanted:
        engine.scheduler.add(one, 0.0)
    assert engine.scheduler.state_of("a.0") is State.BLOCKED
    play(engine)
    answers_alone(engine, *wanted)
    assert [e.cached_tokens for e in engine.of(Scheduled)] == [0] + [cached] * 3
    assert sum(len(m.source) for s in engine.device.steps for m in s.moves) == copies
    assert sum(e.prompt_tokens for e in engine.of(StepDone)) == length + 3 * (length - cached)


def test_samples_whose_first_is_gone_compute_for_themselves() -> None:
    engine = Engine(cache=cache_plan(prefix_cache=False), schedule=schedule_plan(max_tokens_per_step=8))
    wanted = [request(f"a.{i}", prompt(18), max_tokens=4, parent="a") for i in range(2)]
    engine.scheduler.add(request("a", prompt(18), max_tokens=4), 0.0)
    for one in wanted:
        engine.scheduler.add(one, 0.0)
    engine.loop.run_once()
    engine.scheduler.cancel("a", engine.clock.now())
    engine.scheduler.add(request("b", prompt(6), max_tokens=4, parent="nobody"), engine.clock.now())
    play(engine)
    answers_alone(engine, *wanted)


# -- leaving ---------------------------------------------------------------------------------------------------------


def test_end_of_text_is_seen_one_step_late_and_the_late_token_is_dropped() -> None:
    alone = expected_tokens(prompt(9), 9, groups=cache_plan().groups)
    engine = Engine()
    engine.scheduler.add(request("a", prompt(9), max_tokens=9, eos_ids=(alone[4],)), 0.0)
    play(engine)
    end = finished(engine)["a"]
    assert (end.finish, end.stop_token, end.generated_tokens) == ("stop", alone[4], 5)
    rows = sum(1 for s in engine.device.steps for _ in s.slot)
    assert rows == 6, "five tokens and one row that flew already"


def test_no_row_flies_past_max_tokens() -> None:
    engine = Engine()
    engine.scheduler.add(request("a", prompt(9), max_tokens=5), 0.0)
    play(engine)
    assert sum(s.tokens for s in engine.device.steps) == 9 + 4


@pytest.mark.parametrize(
    ("sampling", "finish", "length"),
    [
        (SamplingParams(temperature=0, ignore_eos=True), "length", 9),
        (SamplingParams(temperature=0, min_tokens=6), "length", 9),
        (SamplingParams(temperature=0, min_tokens=4), "stop", 5),
        (SamplingParams(temperature=0), "stop", 5),
    ],
)
def test_stops(sampling: SamplingParams, finish: str, length: int) -> None:
    alone = expected_tokens(prompt(9), 9, groups=cache_plan().groups)
    engine = Engine()
    engine.scheduler.add(request("a", prompt(9), max_tokens=9, eos_ids=(alone[4],), sampling=sampling), 0.0)
    extra = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=(*range(6), alone[2]))
    engine.scheduler.add(request("b", prompt(9), max_tokens=9, eos_ids=(alone[1],), sampling=extra), 0.0)
    play(engine)
    end = finished(engine)
    assert (end["a"].finish, end["a"].generated_tokens) == (finish, length)
    assert (end["b"].finish, end["b"].generated_tokens, end["b"].stop_token) == ("stop", 3, alone[2])


def test_pages_of_a_leaving_sequence_wait_for_its_flying_step() -> None:
    engine = Engine(cache=cache_plan(pages=(9,)))
    engine.scheduler.add(request("a", prompt(20), max_tokens=8), 0.0)
    engine.loop.run_once()  # its prompt flies
    assert engine.scheduler.flying == 1
    engine.scheduler.cancel("a", engine.clock.now())
    assert engine.scheduler.running == 1 and engine.scheduler.cache.pools[0].leased == 5
    assert engine.scheduler.unfinished == 0 and engine.scheduler.waiting == 0
    engine.scheduler.add(request("b", prompt(28, seed=2), max_tokens=2), engine.clock.now())
    assert engine.scheduler.decide(engine.clock.now()) is None
    play(engine)
    assert finished(engine)["a"].finish == "abort" and finished(engine)["b"].finish == "length"


def test_cancel_and_finish_in_every_state() -> None:
    engine = Engine(schedule=schedule_plan(max_running=2, max_tokens_per_step=8))
    for name, seed in (("run", 1), ("run2", 2), ("wait", 3)):
        engine.scheduler.add(request(name, prompt(20, seed=seed), max_tokens=5), 0.0)
    engine.scheduler.add(request("blocked", prompt(20), max_tokens=5, parent="run"), 0.0)
    engine.loop.run_once()
    states = {n: engine.scheduler.state_of(n) for n in ("run", "wait", "blocked")}
    assert states == {"run": State.RUNNING, "wait": State.WAITING, "blocked": State.BLOCKED}
    engine.scheduler.cancel("blocked", 1.0)
    engine.scheduler.cancel("wait", 1.0)
    engine.scheduler.finish("run", 1.0)
    for _ in range(2):
        engine.scheduler.cancel("run", 1.0)  # draining, or over: ignored
    play(engine)
    ends = {name: end.finish for name, end in finished(engine).items()}
    assert ends == {"blocked": "abort", "wait": "abort", "run": "stop", "run2": "length"}
    engine.scheduler.cancel("never heard of", 1.0)


def test_deadlines_end_running_and_waiting_requests() -> None:
    engine = Engine(schedule=schedule_plan(max_running=1))
    engine.scheduler.add(request("a", prompt(5), max_tokens=200, deadline_s=0.05), 0.0)
    engine.scheduler.add(request("b", prompt(5, seed=2), max_tokens=3, deadline_s=0.03), 0.0)
    engine.scheduler.add(request("c", prompt(5, seed=3), max_tokens=3, deadline_s=9.0), 0.0)
    play(engine)
    end = finished(engine)
    assert end["a"].finish == end["b"].finish == "abort" and end["c"].finish == "length"
    assert "deadline" in str(end["a"].error) and end["b"].generated_tokens == 0 < end["a"].generated_tokens


def test_a_failed_row_ends_only_its_request() -> None:
    engine = Engine(fail={("a", 9): "logits are not finite"})
    other = request("b", prompt(9, seed=2), max_tokens=6)
    engine.scheduler.add(request("a", prompt(9), max_tokens=6), 0.0)
    engine.scheduler.add(other, 0.0)
    play(engine)
    end = finished(engine)["a"]
    assert (end.finish, end.error, end.generated_tokens) == ("error", "logits are not finite", 1)
    answers_alone(engine, other)


# -- pages under pressure --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1, 3])
def test_preemptions_are_bounded_and_everybody_ends_with_the_same_text(most: int) -> None:
    engine = Engine(
        cache=cache_plan(pages=(31,), prefix_cache=False), schedule=schedule_plan(max_running=6, max_preemptions=most)
    )
    wanted = [request(f"r{i}", prompt(10, seed=i + 1), max_tokens=60) for i in range(6)]
    for one in wanted:
        engine.scheduler.add(one, 0.0)
    play(engine)
    answers_alone(engine, *wanted)
    for one in wanted:
        assert len(engine.of(Preempted, one.id)) <= most
    assert bool(engine.of(Preempted)) == (most > 0)
    assert not engine.of(Preempted, "r0"), "the first to come is never the victim of later ones"


@pytest.mark.parametrize("window", [8, Chunk(8)])
def test_window_pages_are_really_freed_so_that_a_small_pool_serves_a_long_text(window: int) -> None:
    engine = Engine(
        cache=cache_plan(pages=(130, 14), windows=(None, window)),
        schedule=schedule_plan(max_tokens_per_step=16, max_context=512),
    )
    wanted = request("a", prompt(300), max_tokens=150)
    engine.scheduler.add(wanted, 0.0)
    most = 0
    while engine.loop.busy:
        engine.loop.run_once()
        engine.scheduler.check()
        pool = engine.scheduler.cache.pools[1]
        most = max(most, pool.leased + pool.pinned)
    answers_alone(engine, wanted)
    assert most <= 12
    assert any((s.page_id == 0).any() for s in engine.device.steps)


def test_decode_comes_first_and_chunks_fill_the_rest_of_the_budget() -> None:
    engine = Engine(schedule=schedule_plan(max_tokens_per_step=20))
    for i in range(3):
        engine.scheduler.add(request(f"d{i}", prompt(4, seed=i + 1), max_tokens=30), 0.0)
    for _ in range(4):
        engine.loop.run_once()
    engine.scheduler.add(request("long", prompt(50, seed=9), max_tokens=2), engine.clock.now())
    before = len(engine.device.steps)
    for _ in range(4):
        engine.loop.run_once()
    mixed = [s for s in engine.device.steps[before:] if s.count.max() > 1]
    assert [s.count.tolist() for s in mixed] == [[1, 1, 1, 16], [1, 1, 1, 16], [1, 1, 1, 16], [1, 1, 1, 2]]
    assert [s.wants.tolist()[-1] for s in mixed] == [Wants.NONE, Wants.NONE, Wants.NONE, Wants.LAST]
    play(engine)


def test_more_decode_rows_than_budget_take_turns() -> None:
    # Guesses make a row four tokens wide: two rows fit a step, but a third sequence gets in with what they leave.
    engine = Engine(schedule=schedule_plan(max_running=3, max_tokens_per_step=9), drafts=3, accept=lambda name, at: 1)
    wanted = [request(f"r{i}", [i + 1], max_tokens=40) for i in range(3)]
    for one in wanted:
        engine.scheduler.add(one, 0.0)
    play(engine)
    answers_alone(engine, *wanted)
    ends = sorted(e.at_s for e in finished(engine).values())
    assert ends[-1] <= 1.5 * ends[0]
    assert all(len(s.slot) <= 2 or s.count.min() == 1 for s in engine.device.steps)


def test_one_step_in_flight_and_two_give_the_same_answers_in_the_same_order() -> None:
    texts = []
    for in_flight in (1, 2):
        engine = Engine(schedule=schedule_plan(steps_in_flight=in_flight, max_tokens_per_step=32))
        for i in range(6):
            engine.scheduler.add(request(f"r{i}", prompt(10 + i, seed=i + 1), max_tokens=10), 0.0)
        play(engine)
        texts.append({n: [t for e in engine.of(TokensOut, n) for t in e.tokens] for n in finished(engine)})
    assert texts[0] == texts[1] and len(texts[0]) == 6
