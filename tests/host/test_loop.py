from __future__ import annotations

from tests.host.support_engine import Engine, cache_plan, request, schedule_plan
from tradewind.contract.events import Scheduled
from tradewind.simulate.scripted import expected_tokens


def test_one_request_answers_as_the_rule_says() -> None:
    engine = Engine()
    prompt = list(range(10, 23))
    handle = engine.client.submit(request("a", prompt, max_tokens=9))
    events = list(handle)
    assert handle.tokens == expected_tokens(prompt, 9, groups=engine.cache.groups)
    assert [e.finish for e in events][-1] == "length" and all(e.finish is None for e in events[:-1])
    engine.client.drive()
    engine.scheduler.check()


def test_sixteen_with_a_shared_prefix_arrive_together() -> None:
    engine = Engine(
        cache=cache_plan(pages=(513,), page_tokens=16),
        schedule=schedule_plan(max_running=16, max_tokens_per_step=1024),
    )
    shared = list(range(100, 612))
    prompts = [shared + [1000 * i + j for j in range(32)] for i in range(1, 17)]
    handles = engine.client.run([request(f"r{i}", p, max_tokens=8) for i, p in enumerate(prompts)])
    for handle, prompt in zip(handles, prompts, strict=True):
        assert handle.tokens == expected_tokens(prompt, 8, groups=engine.cache.groups)
    cached = [e.cached_tokens for e in engine.of(Scheduled)]
    assert cached == [0] + [512] * 15
    engine.scheduler.check()
