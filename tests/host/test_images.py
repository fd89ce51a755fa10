"""Images in the scheduler: no row over an image whose features are not there, limits of a step and of what is kept, no deadlock."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support_engine import cache_plan, schedule_plan

from tradewind.config.plan import ImagePlan, StepCostPlan
from tradewind.contract.errors import LimitError, RequestError
from tradewind.contract.image import Image, ImageSpan, image_key
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import Step, StepResult
from tradewind.device.axes import image_positions
from tradewind.engine.client import LocalClient
from tradewind.engine.images import overlapping
from tradewind.engine.loop import Add, EngineLoop
from tradewind.engine.scheduler import Scheduler
from tradewind.engine.sequence import Sequence
from tradewind.engine.stats import describe
from tradewind.engine.wire import ORDERS, Link
from tradewind.simulate.clock import VirtualClock
from tradewind.simulate.scripted import ScriptedExecutor

MARK = 7


class Watching(ScriptedExecutor):
    """A device that keeps an account of features, and fails where a row reads those that are not there."""

    def __init__(self, plan: ImagePlan, **facts: Any) -> None:
        super().__init__(**facts)
        self.plan = plan
        self.held: dict[str, int] = {}
        self.spans: dict[int, tuple[ImageSpan, ...]] = {}
        self.encoded: Counter[str] = Counter()
        self.within = 0
        """Rows that began or ended within an image."""

    def submit(self, step: Step) -> None:
        for key in step.drop:
            del self.held[key]
        assert len(step.encode) <= 1 or sum(i.count for i in step.encode) <= self.plan.tokens_per_step
        for image in step.encode:
            assert image.key not in self.held, "what is there is not encoded again"
            self.held[image.key] = image.count
            self.encoded[image.key] += 1
        assert sum(self.held.values()) <= self.plan.cache_tokens
        for enter in step.enter:
            self.spans[enter.slot] = enter.images
            assert all(not hasattr(span, "pixels") for span in enter.images)
        for slot, start, count in zip(step.slot.tolist(), step.start.tolist(), step.count.tolist(), strict=True):
            for span in self.spans[slot]:
                if span.first < start + count and span.end > start:
                    assert span.key in self.held, f"step {step.number} reads an image that is not there"
                    self.within += start > span.first or start + count < span.end
        super().submit(step)

    def collect(self) -> StepResult:
        return super().collect()


def image(content: int, count: int, *, first: int = 0) -> Image:
    pixels = content.to_bytes(4, "little")
    return Image(key=image_key(pixels, rows=1, columns=count), first=first, rows=1, columns=count, pixels=pixels)


def request(name: str, parts: list[int | tuple[int, int]], **facts: Any) -> Request:
    """Parts are numbers of text tokens, and (content, tokens) of images."""
    tokens: list[int] = []
    images: list[Image] = []
    for part in parts:
        if isinstance(part, tuple):
            images.append(image(*part, first=len(tokens)))
            tokens += [MARK] * part[1]
        else:
            tokens += [100 + len(tokens) + index for index in range(part)]
    return Request(
        id=name, tokens=tuple(tokens), sampling=SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), max_tokens=3,
        image_keys=tuple((one.first, one.count, one.key) for one in images), images=tuple(images), **facts,
    )  # fmt: skip


def engine(plan: ImagePlan, *, pages: int = 129, **schedule: Any) -> tuple[LocalClient, Watching, Scheduler]:
    clock, cache = VirtualClock(), cache_plan(pages=(pages,))
    limits = msgspec.structs.replace(
        schedule_plan(**schedule), images=plan, step_cost=StepCostPlan(base_s=0.01, token_s=0.001)
    )
    device = Watching(plan, groups=cache.groups, pages=cache.pages, max_running=limits.max_running, clock=clock)
    scheduler = Scheduler(schedule=limits, cache=cache, clock=clock.now)
    return LocalClient(EngineLoop(scheduler=scheduler, executor=device, clock=clock.now)), device, scheduler


def run(client: LocalClient, asked: list[Request]) -> list[tuple[int, ...]]:
    handles = client.run(asked)
    for handle in handles:
        assert handle.last is not None and handle.last.error is None, handle.last
        assert handle.last.finish == "length"
    return [tuple(handle.tokens) for handle in handles]


PLAN = ImagePlan(largest=20, tokens_per_step=24, cache_tokens=40)


def test_an_image_is_encoded_once_for_all_who_have_it() -> None:
    client, device, _ = engine(PLAN)
    run(client, [request("a", [5, (1, 12), 4]), request("b", [9, (1, 12), 4]), request("c", [9, (2, 12)])])
    assert device.encoded == {image(1, 12).key: 1, image(2, 12).key: 1}
    said = describe(client.loop)
    assert "images: features of 24 tokens are held, of 40 at most; 24 were encoded since the start" in said


def test_a_cached_prefix_needs_no_image() -> None:
    client, device, _ = engine(PLAN)
    run(client, [request("a", [4, (1, 12), 12])])
    run(client, [request("x", [(3, 20)]), request("y", [(4, 20)])])  # the first image gives way
    assert image(1, 12).key not in device.held
    run(client, [request("b", [4, (1, 12), 12])])
    assert device.encoded[image(1, 12).key] == 1, "its pages were there, and nothing of it was computed again"


def test_the_budget_of_a_step() -> None:
    client, device, _ = engine(PLAN, max_tokens_per_step=64)
    run(client, [request("a", [(1, 20), (2, 20), (3, 20)])])
    assert [len(step.encode) for step in device.steps if step.encode] == [1, 1, 1]
    client, device, _ = engine(msgspec.structs.replace(PLAN, tokens_per_step=5), max_tokens_per_step=64)
    run(client, [request("a", [(1, 20), (2, 2), (3, 3), (4, 3)])])
    assert [len(step.encode) for step in device.steps if step.encode] == [1, 2, 1], "one image at least, however large"


def test_chunks_end_within_images() -> None:
    client, device, _ = engine(PLAN, max_tokens_per_step=8)
    run(client, [request("a", [3, (1, 20), 5])])
    assert device.within >= 2
    assert device.encoded[image(1, 20).key] == 1


def test_a_prompt_that_gets_nothing_needs_no_image() -> None:
    """It may stand within one all the same."""
    sequence = Sequence(request("a", [3, (1, 8), 2]), arrived_s=0.0, place=0)
    assert [overlapping(sequence, *span) for span in ((5, 5), (0, 3), (11, 13))] == [[], [], []]
    assert all(len(overlapping(sequence, *span)) == 1 for span in ((5, 6), (0, 4), (10, 13)))


def test_text_beside_images_is_not_held_up() -> None:
    """Somebody who waits for room does not stop those behind."""
    client, device, _ = engine(PLAN, max_tokens_per_step=16, max_running=4)
    run(client, [request("a", [(1, 20), 4]), request("b", [(2, 20), (3, 20), 4]), request("c", [30])])
    assert device.within


def test_forgetting_drops_what_nobody_needs() -> None:
    client, device, scheduler = engine(PLAN)
    run(client, [request("a", [5, (1, 12), 4])])
    assert len(device.held) == 1
    client.forget()
    run(client, [request("b", [3])])
    assert not device.held
    run(client, [request("c", [5, (1, 12), 4])])
    assert device.encoded[image(1, 12).key] == 2
    scheduler.check()


parts = st.lists(st.integers(1, 9) | st.tuples(st.integers(1, 4), st.integers(1, 20)), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(parts, min_size=1, max_size=8),
    st.integers(1, 30),
    st.integers(20, 45),
    st.integers(3, 40),
    st.integers(1, 2),
    st.integers(1, 5),
    st.sampled_from(["arrival", "fair", "length", "priority", "slo"]),
)
def test_everybody_is_answered_whatever_comes(
    asked: list[list[Any]], per_step: int, cache_tokens: int, step: int, in_flight: int, running: int, policy: Any
) -> None:
    """With room for one image or two, small steps, few slots and too few pages for all: all end, each as it would alone."""
    plan = ImagePlan(largest=20, tokens_per_step=per_step, cache_tokens=cache_tokens)
    requests = [
        request(f"r{index}", each, priority=index % 3, tenant=str(index % 2)) for index, each in enumerate(asked)
    ]
    client, device, scheduler = engine(
        plan,
        pages=31,
        max_tokens_per_step=max(step, running),
        steps_in_flight=in_flight,
        max_running=running,
        policy=policy,
    )
    got = run(client, requests)
    scheduler.check()
    alone, _, _ = engine(plan)
    for one, tokens in zip(requests, got, strict=True):
        assert run(alone, [msgspec.structs.replace(one, id=f"alone {one.id}")]) == [tokens]
    assert scheduler.images is not None
    assert sum(device.held.values()) == scheduler.images.tokens <= cache_tokens


def test_what_can_never_run_is_refused() -> None:
    client, _, _ = engine(PLAN)
    with pytest.raises(LimitError, match="image 1 has 21 tokens, and one may have 20: make it smaller"):
        client.submit(request("a", [(1, 21)]))
    whole = request("b", [3, (1, 5), 2])
    with pytest.raises(RequestError, match="image 1 does not stand within the prompt"):
        client.submit(msgspec.structs.replace(whole, tokens=whole.tokens[:6]))
    clock, cache = VirtualClock(), cache_plan()
    limits = schedule_plan()
    device = ScriptedExecutor(groups=cache.groups, pages=cache.pages, max_running=limits.max_running, clock=clock)
    blind = LocalClient(
        EngineLoop(scheduler=Scheduler(schedule=limits, cache=cache, clock=clock.now), executor=device, clock=clock.now)
    )
    with pytest.raises(RequestError, match="this model reads no images"):
        blind.submit(whole)


def test_images_cross_the_process_border() -> None:
    asked = request("a", [3, (1, 5), 2, (2, 9)])
    link: Link[Any] = Link.__new__(Link)
    link._encoder = msgspec.msgpack.Encoder()
    assert ORDERS.decode(link.framed(Add(asked))[4:]) == Add(asked)


def test_positions() -> None:
    spans = [ImageSpan(key="k", first=2, rows=2, columns=3)]
    positions, shift = image_positions(spans, tokens=10)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert shift == -3
    plain, none = image_positions([], tokens=4)
    assert np.array_equal(plain, np.tile(np.arange(4), (3, 1)))
    assert none == 0
