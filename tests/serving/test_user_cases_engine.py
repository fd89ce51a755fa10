"""User cases of memory, scheduling, adapters and start-up: one test per row, named after it, as a client of the server sees them."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from http_support import Live, chat_body, live, live_model, until
from support_engine import Engine, cache_plan, request, schedule_plan
from tiny_engine import open_llm, write_checkpoint

from tradewind.contract.events import Scheduled, TokensOut
from tradewind.contract.request import SamplingParams
from tradewind.kernels.cpu import library
from tradewind.serving.http.front import Options
from tradewind.simulate.scripted import ScriptedExecutor

ENDLESS = {"ignore_eos": True, "temperature": 0, "timing": True}


def prompt(length: int, *, seed: int) -> list[int]:
    """Token ids that share no page with those of another seed."""
    return [97 + (seed + i * (seed % 7 + 1)) % 26 for i in range(length)]


def complete(to: Live, tokens: list[int], most: int, **fields: Any) -> Any:
    """One answer, whole."""
    headers = fields.pop("headers", None)
    return to.post("/v1/completions", {"prompt": tokens, "max_tokens": most, **ENDLESS, **fields}, headers=headers)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What calls return that are made side by side, in their order."""
    found: list[Any] = [None] * len(calls)

    def call(place: int) -> None:
        found[place] = calls[place]()

    threads = [threading.Thread(target=call, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert None not in found, "an answer did not come"
    return found


@contextmanager
def streaming(to: Live, tokens: list[int], most: int, **fields: Any) -> Any:
    """A stream that has begun."""
    body = {"prompt": tokens, "max_tokens": most, "ignore_eos": True, "temperature": 0, **fields}
    with to.opened("/v1/completions", body) as events:
        next(events)
        yield events


# -- memory and order ------------------------------------------------------------------------------------------------


def test_a6_twenty_long_requests_on_a_pool_for_two_all_finish() -> None:
    with live(pages=33, step_s=0.001) as one:  # 32 pages of 16 tokens; each needs 16
        seen: list[int] = []
        done = threading.Event()

        def look() -> None:
            while not done.is_set():
                seen.append(one.get("/health")["waiting"])  # 503 here would be a stall
                time.sleep(0.01)

        watcher = threading.Thread(target=look)
        watcher.start()
        try:
            found = at_once(*(lambda i=i: complete(one, prompt(200, seed=i), 50) for i in range(20)))
        finally:
            done.set()
            watcher.join()
        assert [answer["usage"]["completion_tokens"] for answer in found] == [50] * 20
        assert max(seen) >= 10, "the queue's length was not to be seen"
        until(lambda: one.running() == 0 and one.get("/health")["waiting"] == 0, "a slot is still held")


def test_a15_a_small_request_passes_a_big_one_that_does_not_fit_until_that_is_old() -> None:
    facts = {"pages": 101, "step_s": 0.005, "max_context": 2048, "max_tokens_per_step": 2048, "age_limit_s": 0.3}
    with live(**facts) as one, streaming(one, prompt(320, seed=1), 160) as first:  # 20 to 30 of 100 pages
        big: list[Any] = []
        ask = threading.Thread(target=lambda: big.append(complete(one, prompt(1440, seed=2), 2)))
        ask.start()
        until(lambda: one.get("/health")["waiting"] == 1, "the big one does not wait")
        small = complete(one, prompt(16, seed=3), 4)
        assert not big and small["timing"]["queue_ms"] < 500, "the small one waited behind what does not fit"
        smalls = 1
        while ask.is_alive():  # they keep coming, and the big one starts all the same
            complete(one, prompt(16, seed=3 + smalls), 4)
            smalls += 1
        ask.join()
        assert len(list(first)) > 0
    (answer,) = big
    assert answer["usage"]["completion_tokens"] == 2
    assert answer["timing"]["queue_ms"] < 160 * 5 + 300 + 1000, "the first one's rest, and its age limit"
    assert smalls > 3


def test_a16_of_two_big_prompts_the_second_waits_and_nothing_is_computed_twice() -> None:
    with live(pages=101, step_s=0.002, max_context=2048) as one:  # each prompt has 70 of 100 pages
        found = at_once(*(lambda i=i: complete(one, prompt(1120, seed=i), 20) for i in range(2)))
        stats = one.rig.engine.stats()
    assert [answer["usage"]["completion_tokens"] for answer in found] == [20, 20]
    assert stats.recomputed_tokens == 0 and stats.preemptions == 0
    assert stats.prompt_tokens == 2240
    first, second = sorted(answer["timing"]["queue_ms"] for answer in found)
    assert second - first >= 20 * 2, "the second did not wait for the first one's end"


def test_a17_priority_has_an_effect_and_the_preempted_answer_as_if_nothing_was() -> None:
    facts = {"max_running": 4, "policy": "priority", "step_s": 0.01, "pages": 400}
    asked = [prompt(40, seed=i) for i in range(4)]
    with live(max_running=4) as calm:
        alone = [complete(calm, tokens, 100)["choices"][0]["text"] for tokens in asked]
    with live(**facts) as one:
        idle = complete(one, prompt(40, seed=9), 5)["timing"]["ttft_ms"]
        low: list[Any] = []
        every = [lambda t=t: complete(one, t, 100, priority=5)["choices"][0]["text"] for t in asked]
        threads = threading.Thread(target=lambda: low.extend(at_once(*every)))
        threads.start()
        until(lambda: one.running() == 4, "the low ones do not run")
        busy = complete(one, prompt(40, seed=10), 5, priority=-1)["timing"]["ttft_ms"]
        assert threads.is_alive(), "the batch was not full any more"
        threads.join()
        assert one.rig.engine.stats().preemptions == 1
    assert busy <= idle + 400, (idle, busy)  # a low one's end would be a second away
    assert low == alone


def test_a18_a_tenants_wait_does_not_depend_on_anothers_queue() -> None:
    keys = {name: {"Authorization": f"Bearer key-{name}"} for name in "xy"}
    options = Options(api_keys=("key-x", "key-y"))

    def overtaken(policy: str) -> int:
        """How many of X's fifty have ended when Y's one, sent last, has."""
        ended: list[str] = []

        def ask(tenant: str, seed: int) -> bool:
            complete(one, prompt(30, seed=seed), 10, headers=keys[tenant])
            ended.append(tenant)
            return True

        with live(max_running=2, policy=policy, step_s=0.002, options=options) as one:
            heavy = threading.Thread(target=at_once, args=[lambda i=i: ask("x", i) for i in range(50)])
            heavy.start()
            until(lambda: one.get("/health")["waiting"] >= 40, "X has no queue")
            before = len(ended)
            ask("y", 99)
            heavy.join()
        assert len(ended) == 51
        return ended.index("y") - before

    assert overtaken("fair") <= 8, "Y waits at most for those that run and one more turn"
    assert overtaken("arrival") >= 30, "the case is none"


# -- structured output -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A front on a tiny random model, which has no idea of JSON: only the masks know."""
    pytest.importorskip("llguidance")
    if why := library.why_not():
        pytest.skip(why)
    folder = write_checkpoint("full", tmp_path_factory.mktemp("model"))
    with live_model(str(folder), threads=1, max_running=16, compute="f32", kv_format="f32") as one:
        yield one


def constrained(one: Live, count: int, **fields: Any) -> list[Any]:
    """What so many answers at once say, each of them JSON to its end; they share the beginning of their prompts."""
    closing = {str(one.rig.tokenizer.encode(text, add_special=False)[0]): 6 for text in '}]"'}
    body = {"temperature": 1.0, "max_tokens": 300, "logit_bias": closing, **fields}

    def ask(i: int) -> Any:
        return one.post(
            "/v1/chat/completions", chat_body(f"a beginning that all of them share, and {i}", **body, seed=i)
        )

    found = at_once(*(lambda i=i: ask(i) for i in range(count)))
    choices = [answer["choices"][0] for answer in found]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * count
    assert one.get("/health")["status"] == "ok"
    until(lambda: one.running() == 0, "a slot is still held")
    return [json.loads(choice["message"]["content"]) for choice in choices]


def test_a22_thirty_json_objects_at_once_are_valid(model: Live) -> None:
    """Without speculation, which this version does not have."""
    found = constrained(model, 30, response_format={"type": "json_object"})
    assert all(isinstance(value, dict) for value in found)


def test_a23_a_schema_with_an_enum_and_an_array_of_fixed_length_under_concurrency(model: Live) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {
        "type": "object",
        "properties": {
            "colour": {"enum": ["red", "green", "blue"]},
            "at": {"type": "array", "items": number, "minItems": 3, "maxItems": 3},
        },
        "required": ["colour", "at"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    for value in constrained(model, 32, response_format=shape):
        assert set(value) == {"colour", "at"} and value["colour"] in ("red", "green", "blue")
        assert len(value["at"]) == 3 and all(type(one) is int and 0 <= one <= 99 for one in value["at"])


# -- adapters --------------------------------------------------------------------------------------------------------


class WithAdapters(ScriptedExecutor):
    """Keys and values depend on the adapter that computed them, as those of a model do."""

    def _write(self, step: Any, where: str, slot: int, state: Any, *rest: Any) -> None:
        coloured = copy.copy(state)
        coloured.tokens = [token + 1000 * int(state.enter.adapter or 0) for token in state.tokens]
        super()._write(step, where, slot, coloured, *rest)


def test_a41_a_prompt_is_never_shared_across_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support_engine.ScriptedExecutor", WithAdapters)

    def ask(engine: Engine, name: str, adapter: str) -> tuple[list[int], int]:
        engine.scheduler.add(request(name, range(40), max_tokens=9, adapter=adapter), engine.clock.now())
        while engine.loop.busy:
            engine.loop.run_once()
            engine.scheduler.check()
        (start,) = engine.of(Scheduled, name)
        return [token for e in engine.of(TokensOut, name) for token in e.tokens], start.cached_tokens

    def fresh() -> Engine:
        return Engine(cache=cache_plan(pages=(200,)), schedule=schedule_plan())

    cold, _ = ask(fresh(), "cold", "2")
    warm = fresh()
    first, _ = ask(warm, "a", "1")
    second, cached = ask(warm, "b", "2")
    assert second == cold != first and cached == 0
    again, cached = ask(warm, "c", "2")
    assert again == cold and cached > 0, "the same adapter shares"
    plain, cached = ask(warm, "d", "")
    assert plain not in (cold, first) and cached == 0


def test_a41_a_model_or_adapter_that_is_not_served_is_refused() -> None:
    with live() as one:
        body = {"prompt": "hi", "max_tokens": 2}
        error = one.error("/v1/completions", {**body, "model": "scripted:adapter-1"}, status=404)
        assert error["code"] == "model_not_found" and "scripted:adapter-1" in error["message"]
        for field in ("adapter", "lora", "lora_request"):
            error = one.error("/v1/completions", {**body, field: "1"})
            assert (error["code"], error["param"]) == ("unknown_parameter", field)


# -- start-up --------------------------------------------------------------------------------------------------------

SIZE = r"[0-9.]+ [KMGT]iB"


def refusal(*arguments: str) -> str:
    """What `tradewind serve` says when it refuses to start: one sentence, no traceback, exit code 2."""
    command = [sys.executable, "-m", "tradewind", "serve", "--port", "0", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("tradewind: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a10_too_little_memory_for_the_cache_is_need_have_shortfall_and_two_settings(smollm2_gguf: Path) -> None:
    said = refusal(str(smollm2_gguf), "--memory-limit", "300MiB", "--max-context", "8192")
    assert re.search(
        rf"A context of 8192 tokens does not fit .* need {SIZE}, the memory limit is 300 MiB, {SIZE} short", said
    )
    advice = re.search(r"Use --max-context (\d+) or --memory-limit (\d+)MiB", said)
    assert advice is not None and int(advice[1]) < 8192 and int(advice[2]) > 300


def test_a11_a_model_that_is_too_big_is_called_so_and_no_larger_share_is_advised(smollm2_gguf: Path) -> None:
    said = refusal(str(smollm2_gguf), "--memory-limit", "64MiB")
    assert re.search(
        rf"The weights of '.*' do not fit: .* need {SIZE}, the memory limit is 64.0 MiB, {SIZE} short", said
    )
    assert "KV" not in said and "max-context" not in said and "--memory-limit" in said


def test_a42_rope_scaling_is_applied_in_every_spelling_or_refused(tmp_path: Path) -> None:
    folder = write_checkpoint("full", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}

    def answer(**rope: Any) -> str:
        (folder / "config.json").write_text(json.dumps({**config, **rope}))
        with open_llm(folder) as llm:
            asked = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            return str(llm.generate("the quick brown fox jumps over the lazy dog " * 4, asked)[0].completions[0].tokens)

    plain = answer()
    old = answer(rope_theta=10000.0, rope_scaling={"type": "llama3", **scaling})
    new = answer(rope_theta=10000.0, rope_scaling={"rope_type": "llama3", **scaling})
    newest = answer(rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **scaling})
    assert old == new == newest != plain
    # "dynamic" changes nothing up to the length that the model was made for, and longer texts are refused.
    assert answer(rope_scaling={"type": "dynamic", "factor": 2.0}) == plain
    for unknown in ({"type": "spiral", "factor": 2.0}, {"rope_type": "spiral", "factor": 2.0}):
        (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": unknown}))
        assert "rope scaling 'spiral' is not supported" in refusal(str(folder))
    (folder / "config.json").write_text(
        json.dumps({**config, "rope_scaling": {"rope_type": "longrope", "factor": 2.0}})
    )
    assert "'short_factor' is missing" in refusal(str(folder))
    (folder / "config.json").write_text(json.dumps({**config, "rope_scaling": {"type": "linear"}}))
    assert "'factor' is missing" in refusal(str(folder))
