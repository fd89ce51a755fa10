"""What the scheduler tells about waiting: why the queue is held up and by whom, who was blocked and woken, what was in a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support_receipts import PAGE, World, prompt

from tradewind.contract.events import Arrived, Delayed, Held, Preempted, Scheduled, StepDone, Woken
from tradewind.engine.seen import SeenPrefixes


class Listener:
    def __init__(self, world: World) -> None:
        self.events: list[Any] = []
        world.loop._sinks = (*world.loop._sinks, self)

    def take(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: type, name: str | None = None) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind) and (name is None or e.request_id == name)]


def heard(world: World) -> Listener:
    listener = Listener(world)
    world.run()
    return listener


def random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_held_by_a_slot_until_it_is_free() -> None:
    world = World(slots=1)
    world.submit(0.0, "first", prompt(random(), 20), max_tokens=30)
    world.submit(0.05, "second", prompt(random(1), 20), max_tokens=5)
    world.submit(0.06, "third", prompt(random(2), 20), max_tokens=5)
    held = heard(world).of(Held)
    assert [(e.cause, e.request_id, e.blocked_by) for e in held] == [
        ("slot", "second", "first"),
        ("slot", "third", "second"),
        (None, "", ""),
    ]


def test_held_by_pages_names_who_holds_most() -> None:
    world = World(pages=30)
    world.submit(0.0, "small", prompt(random(), 60), max_tokens=60)
    world.submit(0.01, "large", prompt(random(1), 250), max_tokens=60)
    world.submit(0.1, "waits", prompt(random(2), 200), max_tokens=2)
    listener = heard(world)
    held = [e for e in listener.of(Held) if e.cause == "pages"]
    assert held[0].request_id == "waits" and held[0].blocked_by == "large"
    (delayed,) = listener.of(Delayed, "waits")
    assert delayed.cause == "pages" and delayed.reason.startswith("needs ")


def test_held_by_the_step_budget_names_the_longest_prompt() -> None:
    """Every prompt leaves half of what is left to the next: with 16 tokens the sixth finds nothing."""
    world = World(chunk=16)
    for place in range(5):
        world.submit(0.0, f"long{place}", prompt(random(place), 300 + 100 * (place == 3)), max_tokens=2)
    world.submit(0.001, "next", prompt(random(9), 20), max_tokens=2)
    held = heard(world).of(Held)
    assert (held[0].cause, held[0].request_id, held[0].blocked_by) == ("tokens", "next", "long3")
    assert held[-1].cause is None


def test_blocked_and_woken() -> None:
    world = World(chunk=64, grammar_s=0.3)
    tokens = prompt(random(), 500)
    world.submit(0.0, "owner", [*tokens, 5], max_tokens=2)
    world.submit(0.001, "same", [*tokens, 6], max_tokens=2)
    world.submit(0.0, "strict", prompt(random(1), 20), max_tokens=2, grammar="g")
    world.submit(0.5, "sample", prompt(random(2), 300), max_tokens=8)
    world.submit(0.5, "sample.1", world.coming[-1][1].tokens, max_tokens=8, parent="sample")
    listener = heard(world)
    for name, cause, by in (("same", "prefix", "owner"), ("strict", "grammar", ""), ("sample.1", "sample", "sample")):
        (delayed,) = [e for e in listener.of(Delayed, name) if e.cause not in ("slot", "pages")]
        (woken,) = listener.of(Woken, name)
        (scheduled,) = listener.of(Scheduled, name)
        assert (delayed.cause, delayed.blocked_by) == (cause, by)
        assert delayed.at_s <= woken.at_s <= scheduled.at_s
    (woken,) = listener.of(Woken, "strict")
    assert woken.at_s == pytest.approx(100.3, abs=0.02)


def test_taken_is_when_the_engine_looked_at_its_inbox() -> None:
    world = World(cost=lambda step: 0.1)
    world.submit(0.0, "first", prompt(random(), 20), max_tokens=5)
    world.submit(0.05, "second", prompt(random(1), 20), max_tokens=5)
    (arrived,) = heard(world).of(Arrived, "second")
    assert arrived.at_s == pytest.approx(100.05) and arrived.taken_s == pytest.approx(100.1)


@pytest.mark.parametrize("seed", range(6))
def test_steps_say_whose_prompts_they_computed(seed: int) -> None:
    """Chunks sum to the step's prompt tokens; a request's to what it had to compute, evictions included."""
    draw = random(seed)
    world = World(pages=22, slots=6, chunk=int(draw.integers(20, 120)))
    for place in range(15):
        world.submit(
            0.01 * place, f"r{place}", prompt(draw, int(draw.integers(1, 150))), max_tokens=int(draw.integers(1, 60))
        )
    lengths = {one.id: len(one.tokens) for _, one in world.coming}
    listener = heard(world)
    computed: dict[str, int] = {}
    before_s = 0.0
    for step in listener.of(StepDone):
        assert sum(step.chunk_tokens) == step.prompt_tokens and len(step.chunk_ids) == len(step.chunk_tokens)
        assert step.decided_s <= step.at_s and 0 <= step.collect_s <= step.at_s - before_s + 1e-9
        before_s = step.at_s
        for name, tokens in zip(step.chunk_ids, step.chunk_tokens, strict=True):
            computed[name] = computed.get(name, 0) + tokens
    lost = {e.request_id for e in listener.of(Preempted)}
    assert lost, "nobody was evicted"
    for name, length in lengths.items():
        (first, *_) = listener.of(Scheduled, name)
        if name not in lost:
            assert computed[name] == length - first.cached_tokens
        else:
            assert computed[name] >= length - first.cached_tokens - world.chunk


def test_wrong_guesses_are_counted() -> None:
    world = World(drafts=3, accept=lambda name, position: 1)
    world.submit(0.0, "a", prompt(random(), 20), max_tokens=21)
    steps = heard(world).of(StepDone)
    guessed, wrong = sum(step.guessed for step in steps), sum(step.wrong for step in steps)
    assert guessed - wrong == 10, "21 tokens: the first, and ten times one and a right guess"
    assert 25 <= guessed <= 30, "the last rows guess no further than the answer may go"
    world = World()
    world.submit(0.0, "a", prompt(random(), 20), max_tokens=21)
    assert not any(step.guessed or step.wrong for step in heard(world).of(StepDone))


def test_a_slot_taken_by_priority_is_no_lack_of_pages() -> None:
    world = World(slots=1, policy="priority")
    world.submit(0.0, "low", prompt(random(), 20), max_tokens=50, priority=5)
    world.submit(0.1, "high", prompt(random(1), 20), max_tokens=3, priority=0)
    (lost,) = heard(world).of(Preempted)
    assert (lost.request_id, lost.for_whom, lost.cause) == ("low", "high", "slot")


def test_seen_prefixes() -> None:
    seen = SeenPrefixes(pages=4)
    one, other = ("", ""), ("salt", "")
    assert seen.note(one, [b"a", b"b"]) == 0
    assert seen.note(one, [b"a", b"b", b"c"]) == 2
    assert seen.note(one, [b"b", b"a"]) == 0, "what comes before a page is part of it"
    assert seen.note(other, [b"a"]) == 0, "namespaces share nothing"
    for place in range(40):
        seen.note(one, [b"x%d" % place])
        assert len(seen._young) <= 5 and len(seen._old) <= 5
    assert seen.note(one, [b"a"]) == 0, "forgotten"
    assert PAGE == 16
