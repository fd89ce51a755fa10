"""A sequence is BLOCKED until its grammar is compiled, and nobody else waits for it."""

from __future__ import annotations

import pytest
from support_engine import Engine, cache_plan, request, schedule_plan

from tradewind.contract.errors import RequestError
from tradewind.contract.events import TokensOut
from tradewind.contract.grammar import Grammar, decode_grammar
from tradewind.engine.loop import EngineLoop
from tradewind.engine.scheduler import Scheduler
from tradewind.engine.sequence import State


class Gate:
    """A gate that the test opens."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.done: set[str] = set()
        self.bad: dict[str, str] = {}
        self.waits = 0
        self.after: int | None = None

    def open(self, text: str) -> None:
        self.held[text] = self.held.get(text, 0) + 1

    def ready(self, text: str) -> bool:
        assert self.held[text] > 0
        if text in self.bad:
            raise RequestError(self.bad[text])
        return text in self.done

    def close(self, text: str) -> None:
        self.held[text] -= 1

    def wait(self, timeout_s: float) -> None:
        self.waits += 1
        if self.after is not None and self.waits >= self.after:
            self.done |= set(self.held)


def engine_with(gate: Gate | None, **schedule: int) -> Engine:
    engine = Engine(schedule=schedule_plan(**schedule)) if schedule else Engine()
    engine.scheduler = Scheduler(schedule=engine.schedule, cache=cache_plan(), clock=engine.clock.now, grammars=gate)
    engine.loop = EngineLoop(
        scheduler=engine.scheduler, executor=engine.device, clock=engine.clock.now, sinks=(engine,)
    )
    engine.client = type(engine.client)(engine.loop)
    return engine


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    gate = Gate()
    engine = engine_with(gate)
    slow = engine.client.submit(request("slow", [1, 2, 3], grammar="g"))
    free = engine.client.submit(request("free", [4, 5, 6]))
    free.result()
    assert not slow.done and engine.scheduler.state_of("slow") is State.BLOCKED
    assert gate.waits == 0, "nobody waits for the compiler while there is a step to do"
    gate.done.add("g")
    event = slow.result()
    assert event.finish == "length" and len(slow.tokens) == 8
    assert gate.held == {"g": 0}
    assert engine.scheduler.idle
    engine.scheduler.check()


def test_the_loop_waits_without_being_stuck_when_only_grammars_are_open() -> None:
    gate = Gate()
    gate.after = 50
    engine = engine_with(gate)
    handle = engine.client.submit(request("r", [1, 2, 3], grammar="g"))
    assert handle.result().finish == "length" and gate.waits == 50


def test_a_grammar_that_cannot_be_ends_its_request_with_one_sentence() -> None:
    gate = Gate()
    gate.bad["g"] = "the grammar was not compiled within 5 s: make it simpler"
    engine = engine_with(gate)
    bad, good = engine.client.submit(request("bad", [1], grammar="g")), engine.client.submit(request("good", [1]))
    assert good.result().finish == "length"
    event = bad.result()
    assert event.finish == "error" and event.error == gate.bad["g"] and gate.held == {"g": 0}


def test_a_blocked_request_can_be_cancelled() -> None:
    gate = Gate()
    engine = engine_with(gate)
    handle = engine.client.submit(request("r", [1, 2], grammar="g"))
    engine.client.submit(request("other", [1], max_tokens=3)).result()
    handle.cancel()
    assert handle.result().finish == "abort" and gate.held == {"g": 0} and engine.scheduler.idle


def test_samples_of_one_prompt_wait_for_the_same_grammar() -> None:
    gate = Gate()
    gate.after = 3
    engine = engine_with(gate)
    first = engine.client.submit(request("r", [1, 2, 3, 4, 5, 6], grammar="g"))
    second = engine.client.submit(request("r.1", [1, 2, 3, 4, 5, 6], grammar="g", parent="r"))
    assert first.result().finish == second.result().finish == "length"
    assert gate.held == {"g": 0}
    assert engine.scheduler.idle


def test_without_a_gate_a_grammar_is_refused() -> None:
    engine = engine_with(None)
    handle = engine.client.submit(request("r", [1], grammar="g"))
    event = handle.result()
    assert isinstance(event, TokensOut) and event.finish == "error" and "structured output" in str(event.error)


def test_the_text_form_is_read_back_and_nothing_else_is() -> None:
    grammar = Grammar(kind="regex", text='start: "a"', begin=3, end=4, spare_blanks=True)
    assert decode_grammar(grammar.encode()) == grammar
    for text in ("", "{}", "start: x", '{"kind":"x","text":""}', grammar.encode()[:-1] + ',"more":1}'):
        with pytest.raises(RequestError):
            decode_grammar(text)
