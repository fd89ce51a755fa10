"""The whole host wing under random traffic: whatever happens, each answer is what the request would get alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.host.support_engine import Chunk, Engine, cache_plan, request, schedule_plan
from tradewind.cache.lease import KVCache
from tradewind.contract.errors import UserError
from tradewind.contract.events import Scheduled, TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import Enter, Step
from tradewind.engine.limits import check_fits
from tradewind.simulate import made_up
from tradewind.simulate.scripted import expected_tokens

WINDOWS: list[tuple[int | None, ...]] = [(None,), (None, 6), (5,), (None, 9, 3), (None, Chunk(7)), (Chunk(4),)]


@st.composite
def worlds(draw: st.DrawFn) -> dict[str, Any]:
    windows = draw(st.sampled_from(WINDOWS))
    page_tokens = draw(st.sampled_from([1, 2, 4]))
    pages = tuple(draw(st.integers(40 // page_tokens, 100 // page_tokens)) for _ in windows)
    budget = draw(st.integers(4, 40))
    return {
        "cache": cache_plan(
            pages=pages, windows=windows, page_tokens=page_tokens, prefix_cache=draw(st.booleans() | st.just(True))
        ),
        "schedule": schedule_plan(
            max_running=draw(st.integers(1, 6)),
            max_tokens_per_step=budget,
            steps_in_flight=draw(st.sampled_from([1, 2, 2, 3])),
            policy=draw(st.sampled_from(["arrival", "fair", "priority"])),
            max_preemptions=draw(st.integers(0, 3)),
            age_limit_s=draw(st.sampled_from([0.0, 0.1, 5.0])),
        ),
        "drafts": draw(st.sampled_from([0, 0, 0, 1, 3])),
        "accept": lambda name, position: (len(name) + position) % 4,
        "fail": draw(st.sampled_from([{}, {}, {}, {("r0", 10): "logits are not finite"}])),
    }


@st.composite
def traffic(draw: st.DrawFn, windows: tuple[int | None, ...]) -> list[tuple[int, str, Any]]:
    """(turn, what, argument): requests whose prompts often share prefixes, and some cancels."""
    stems = [[s * 100 + i for i in range(24)] for s in range(2)]
    groups = cache_plan(pages=(2,) * len(windows), windows=windows).groups
    out: list[tuple[int, str, Any]] = []
    for number in range(draw(st.integers(1, 9))):
        turn = draw(st.integers(0, 25))
        stem = draw(st.sampled_from(stems))[: draw(st.integers(0, 24))]
        prompt = stem + draw(st.lists(st.integers(1000, 1002), min_size=0 if stem else 1, max_size=6))
        name = f"r{number}"
        most = draw(st.integers(1, 14))
        base = request(
            name,
            prompt,
            max_tokens=most,
            eos_ids=(expected_tokens(prompt, most, groups=groups)[-1],) if draw(st.integers(0, 2)) == 0 else (),
            priority=draw(st.integers(0, 2)),
            cache_salt=draw(st.sampled_from(["", "", "", "s"])),
            sampling=SamplingParams(
                temperature=0,
                prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
                logprobs=draw(st.sampled_from([None, None, 1])),
                min_tokens=draw(st.sampled_from([0, 0, most])),
                ignore_eos=draw(st.sampled_from([False, False, True])),
            ),
        )
        out.append((turn, "add", base))
        samples = draw(st.sampled_from([0, 0, 0, 1, 3]))
        out.extend((turn, "add", request_like(base, f"{name}.{i}", parent=name)) for i in range(samples))
        if draw(st.integers(0, 3)) == 0:
            pooling = draw(st.sampled_from(["last", "mean", "cls"]))
            out.append(
                (turn + draw(st.integers(0, 3)), "add", request(f"e{number}", prompt, max_tokens=0, pooling=pooling))
            )
        if draw(st.integers(0, 4)) == 0:
            out.append((turn + draw(st.integers(0, 10)), draw(st.sampled_from(["cancel", "finish"])), name))
    return sorted(out, key=lambda item: item[0])


def request_like(base: Request, name: str, *, parent: str) -> Request:
    return request(
        name, base.tokens, max_tokens=base.max_tokens, priority=base.priority, cache_salt=base.cache_salt, parent=parent
    )


def run(engine: Engine, plan: list[tuple[int, str, Any]], *, limit: int = 3000) -> dict[str, Request]:
    """Plays the traffic, checking every invariant after every turn; the requests that were accepted."""
    accepted: dict[str, Request] = {}
    waiting = list(plan)
    turn = 0
    probe = KVCache(groups=engine.cache.groups, pages=engine.cache.pages)
    while waiting or engine.loop.busy:
        while waiting and waiting[0][0] <= turn:
            _, what, argument = waiting.pop(0)
            if what == "add":
                try:
                    check_fits(
                        argument, cache=probe, schedule=engine.schedule, burst_tokens=engine.scheduler.burst_tokens
                    )
                except UserError:
                    continue
                engine.scheduler.add(argument, engine.clock.now())
                accepted[argument.id] = argument
            elif what == "cancel":
                engine.scheduler.cancel(argument, engine.clock.now())
            else:
                engine.scheduler.finish(argument, engine.clock.now())
        engine.loop.run_once()
        engine.scheduler.check()
        turn += 1
        assert turn < limit, f"{engine.scheduler.unfinished} requests starve"
    return accepted


def embedding_of(wanted: Request) -> bytes:
    """What the scripted device makes up for the prompt."""
    tokens = np.array(wanted.tokens, np.int32)
    enter = Enter(
        slot=0, epoch=0, request_id="", tokens=tokens, prompt_tokens=len(tokens), capacity_tokens=0, sampling=wanted.sampling, seed=0,
        eos_ids=(), normalise=wanted.normalise,
    )  # fmt: skip
    return made_up.embedding(enter).tobytes()


def check_answers(engine: Engine, accepted: dict[str, Request]) -> None:
    answers: dict[str, list[int]] = {name: [] for name in accepted}
    ends: dict[str, list[TokensOut]] = {name: [] for name in accepted}
    for event in engine.of(TokensOut):
        answers[event.request_id].extend(event.tokens)
        assert event.generated_tokens == len(answers[event.request_id])
        assert not ends[event.request_id], "tokens after the end"
        if event.finish is not None:
            ends[event.request_id].append(event)
    for name, wanted in accepted.items():
        (end,) = ends[name]
        if wanted.pooling is not None:
            assert (end.finish, answers[name], end.embedding) == ("stop", [], embedding_of(wanted))
            continue
        assert end.embedding is None
        sampling = wanted.sampling
        expected = expected_tokens(wanted.tokens, wanted.max_tokens, groups=engine.cache.groups)
        stop = next(
            (
                i
                for i, t in enumerate(expected)
                if t in wanted.eos_ids and i >= sampling.min_tokens and not sampling.ignore_eos
            ),
            None,
        )
        assert answers[name] == expected[: len(answers[name])], f"{name} differs from what it gets alone"
        if end.finish == "length":
            assert answers[name] == expected and stop is None
        elif end.stop_token is not None:
            assert stop is not None and answers[name] == expected[: stop + 1] and end.finish == "stop"
        else:
            assert end.finish in ("abort", "stop") or (end.finish == "error" and end.error == "logits are not finite")
        if wanted.sampling.prompt_logprobs is not None and answers[name]:
            spoken = [t.token for e in engine.of(TokensOut, name) for t in e.prompt_logprobs]
            assert spoken == list(wanted.tokens[1:])
        if wanted.sampling.logprobs is not None:
            assert [t.token for e in engine.of(TokensOut, name) for t in e.logprobs] == answers[name]


def check_budget(steps: list[Step], limit: int) -> None:
    for step in steps:
        assert step.tokens <= limit, f"step {step.number} has {step.tokens} tokens"


@settings(max_examples=250, report_multiple_bugs=False)
@given(st.data())
def test_any_traffic_gives_each_request_its_own_answer(data: st.DataObject) -> None:
    world = data.draw(worlds())
    plan = data.draw(traffic(tuple(group.window for group in world["cache"].groups)))
    note(f"{world} {plan}")
    engine = Engine(**world)
    accepted = run(engine, plan)
    check_answers(engine, accepted)
    check_budget(engine.device.steps, engine.schedule.max_tokens_per_step)
    for pool in engine.scheduler.cache.pools:
        assert pool.free + pool.idle == pool.total - 1
    for event in engine.of(Scheduled):
        assert event.cached_tokens < len(accepted[event.request_id].tokens) + accepted[event.request_id].max_tokens
