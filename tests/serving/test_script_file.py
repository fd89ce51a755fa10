"""Script files: what is accepted, what is refused and how, and what the forced device makes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.serving.process_support import END
from tradewind.config.goals import Means
from tradewind.contract.errors import EngineDeadError, UserError
from tradewind.contract.events import StepDone
from tradewind.contract.request import Request, SamplingParams
from tradewind.engine.client import Handle, LocalClient
from tradewind.engine.loop import EngineLoop
from tradewind.engine.scheduler import Scheduler
from tradewind.serving.tokenizer import TextTokenizer
from tradewind.simulate.clock import RealClock
from tradewind.simulate.forced import ForcedExecutor
from tradewind.simulate.script_file import (
    BYTE_TOKENIZER_CONFIG,
    Answers,
    Drafts,
    Fault,
    Rule,
    ScriptFile,
    byte_tokenizer_json,
    plans_of,
    read_script,
)

TOKENIZER = TextTokenizer.from_tokenizer_json(byte_tokenizer_json(), tokenizer_config=BYTE_TOKENIZER_CONFIG)


def read(**keys: Any) -> ScriptFile:
    return read_script(json.dumps(keys).encode(), name="s.json")


def answers(script: ScriptFile) -> Answers:
    return Answers(
        script,
        encode=lambda text: TOKENIZER.encode(text, add_special=False),
        decode=lambda ids: TOKENIZER.decode(ids, skip_special=False),
        name="s.json",
    )


class Scripted:
    """The whole engine on a script, in this thread."""

    def __init__(self, **keys: Any) -> None:
        self.script = read(**keys)
        schedule, cache = plans_of(self.script, Means())
        self.device = ForcedExecutor(
            self.script,
            answers(self.script),
            slots=schedule.max_running,
            vocab_size=TOKENIZER.vocab_size,
            end_token=END,
        )
        drafts = self.script.drafts.per_row if self.script.drafts else 0
        clock = RealClock().now
        self.scheduler = Scheduler(schedule=schedule, cache=cache, clock=clock, drafts_per_row=drafts)
        self.steps: list[StepDone] = []
        self.client = LocalClient(
            EngineLoop(scheduler=self.scheduler, executor=self.device, clock=clock, sinks=(self,))
        )
        self._number = 0

    def take(self, event: Any) -> None:
        if isinstance(event, StepDone):
            self.steps.append(event)

    def ask(self, prompt: str | list[int], *, max_tokens: int = 64, **sampling: Any) -> Handle:
        self._number += 1
        tokens = TOKENIZER.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt
        params = SamplingParams(temperature=0.0, **sampling)
        return self.client.submit(
            Request(id=f"r{self._number}", tokens=tuple(tokens), sampling=params, max_tokens=max_tokens, eos_ids=(END,))
        )

    def text(self, prompt: str | list[int], **more: Any) -> str:
        handle = self.ask(prompt, **more)
        assert handle.result().finish in ("stop", "length")
        return TOKENIZER.decode(handle.tokens)


# -- the tokenizer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "plain", "ümläut 🌊\n\t\0", " <|im_start|>user\nhi<|im_end|>\n", "<think>a</think>"]
)
def test_the_byte_tokenizer_is_one_id_a_byte(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special=True)
    assert TOKENIZER.decode(ids, skip_special=False) == text
    if "<" not in text:
        assert ids == list(text.encode())
    assert TOKENIZER.eos_ids >= {END} and TOKENIZER.vocab_size == 263


# -- which answer --------------------------------------------------------------------------------------------------------


def test_the_first_rule_that_fits_decides() -> None:
    engine = Scripted(
        rules=[
            {"prompt": "exactly this", "answer": "exact"},
            {"tokens": [1, 2, 3], "answer": "ids"},
            {"contains": "weather", "answer": "rain"},
            {"regex": r"\d{3}", "answer": "number"},
            {"regex": "(?i)WEATHER", "answer": "never"},
        ],
        default={"answer": "default"},
    )
    assert engine.text("exactly this") == "exact" and engine.text("exactly this!") == "default"
    assert engine.text([1, 2, 3]) == "ids" and engine.text([1, 2, 3, 4]) == "default"
    assert engine.text("the weather in 1999") == "rain" and engine.text("in 1999") == "number"
    assert engine.text("WEATHER") == "never"


def test_answers_end_repeat_and_stop_as_the_scheduler_says() -> None:
    engine = Scripted(rules=[{"contains": "r", "answer": "abc", "repeat": True}], default={"answer": "abc"})
    assert engine.text("r", max_tokens=8) == "abcabcab"
    ended = engine.ask("x", max_tokens=8)
    assert ended.result().finish == "stop" and ended.tokens == [*b"abc", END]
    assert engine.ask("x", max_tokens=3).result().finish == "length"
    assert engine.ask("x", max_tokens=8, ignore_eos=True).result().generated_tokens == 8
    assert engine.ask("x", max_tokens=8, min_tokens=6).result().generated_tokens == 7
    assert engine.ask("r", max_tokens=8, stop_token_ids=(ord("b"),)).result().generated_tokens == 2


def test_an_answer_may_be_a_list_of_ids_and_texts() -> None:
    wave = list("🌊".encode())
    engine = Scripted(default={"answer": [*wave[:2], *wave[2:], "<tool_call>", "{", "}"]})
    handle = engine.ask("x")
    handle.result()
    assert handle.tokens == [*wave, 261, ord("{"), ord("}"), END]
    assert Scripted(default={"answer": ""}).ask("x").result().generated_tokens == 1


def test_a_resumed_answer_goes_on_where_it_was() -> None:
    """A pool too small for all: sequences are preempted, computed again, and say the same."""
    engine = Scripted(default={"answer": "0123456789" * 12}, pages=20, page_tokens=4, slots=8, prefix_cache=False)
    handles = [engine.ask(f"prompt {i}", max_tokens=60) for i in range(8)]
    for handle in handles:
        assert handle.result().finish == "length" and bytes(handle.tokens) == b"0123456789" * 6
    assert engine.scheduler.recomputed_tokens > 0
    engine.scheduler.check()


def test_drafts_bring_several_tokens_a_step() -> None:
    engine = Scripted(drafts={"per_row": 3, "accepted": [3, 0, 2]}, default={"answer": "0123456789"}, steps_in_flight=1)
    handle = engine.ask("x")
    sizes = [len(event.tokens) for event in handle]
    assert sizes == [1, 4, 1, 3, 2] and bytes(handle.tokens[:-1]) == b"0123456789" and handle.tokens[-1] == END
    many = Scripted(drafts={"per_row": 2, "accepted": [1]}, default={"answer": "0123456789"})
    for each in [many.ask(f"p{i}") for i in range(20)]:
        assert each.result().finish == "stop" and bytes(each.tokens[:-1]) == b"0123456789"


# -- logprobs ------------------------------------------------------------------------------------------------------------


def test_logprobs_are_the_files_or_made_up() -> None:
    best = [[["a", -0.1], ["b", -2.5], [99, -3.0]], [["c", -0.2], ["b", -1.7]], [["z", -0.5]]]
    engine = Scripted(default={"answer": "abcd", "logprobs": best})
    handle = engine.ask("x", logprobs=2)
    spoken = [entry for event in handle for entry in event.logprobs]
    assert [entry.token for entry in spoken] == handle.tokens
    assert (spoken[0].logprob, spoken[0].rank, spoken[0].top_ids, spoken[0].top_logprobs) == (
        -0.1,
        1,
        (97, 98),
        (-0.1, -2.5),
    )
    assert (spoken[1].logprob, spoken[1].rank, spoken[1].top_ids) == (-1.7, 2, (99, 98))
    assert (spoken[2].logprob, spoken[2].rank, spoken[2].top_ids) == (-1.5, 2, (122,)), (
        "not among the best: one less than the last"
    )
    assert spoken[3].rank == 1 and spoken[3].top_ids[0] == ord("d"), "made up"
    assert all(entry.top_ids == () for event in engine.ask("x", logprobs=0) for entry in event.logprobs)


def test_prompt_logprobs_are_there_for_all_but_the_first_token() -> None:
    engine = Scripted(max_tokens_per_step=4)
    events = list(engine.ask("0123456789", prompt_logprobs=1, max_tokens=2))
    assert [entry.token for event in events for entry in event.prompt_logprobs] == list(b"123456789")


# -- time and faults -----------------------------------------------------------------------------------------------------


def test_steps_take_their_time() -> None:
    engine = Scripted(step_ms=5, prompt_token_ms=1, default={"answer": "abcdefghi"})
    began_s = RealClock().now()
    engine.text("x" * 40)
    took = [step.device_s for step in engine.steps]
    assert took[0] == pytest.approx(0.045) and took[1:] == [pytest.approx(0.005)] * (len(took) - 1)
    assert engine.steps[-1].at_s - began_s >= 0.95 * sum(took)
    slow = Scripted(rules=[{"contains": "slow", "step_ms": 20, "answer": "ab"}])
    slow.text("slow")
    assert all(step.device_s == pytest.approx(0.02) for step in slow.steps)


def test_guesses_take_their_time_and_a_mask_needs_a_grammar() -> None:
    says = {"answer": "abcdefgh", "mask_ms": 50}
    engine = Scripted(step_ms=1, drafts={"per_row": 3, "accepted": [1], "make_ms": 4}, default=says)
    assert engine.text("x") == "abcdefgh"
    guessing = [step for step in engine.steps if step.guessed]
    assert guessing and all(step.draft_s == pytest.approx(0.004) for step in guessing)
    assert all(step.device_s == pytest.approx(0.001 + step.draft_s) for step in engine.steps)
    assert all(step.draft_s == 0 for step in engine.steps if not step.guessed)
    assert all(step.grammar_s == 0 and not step.grammar_ids for step in engine.steps)


def test_faults_at_a_token_and_at_a_step() -> None:
    engine = Scripted(rules=[{"contains": "bad", "answer": "abc", "faults": [{"do": "nan", "at_token": 1}]}])
    assert engine.ask("bad").result().error == "logits are not finite"
    assert engine.text("bad") == "abc", "a fault happens once"
    always = Scripted(default={"answer": "abc", "faults": [{"do": "nan", "at_token": 0, "once": False}]})
    assert {always.ask("x").result().finish for _ in range(3)} == {"error"}
    dead = Scripted(faults=[{"do": "die", "at_step": 3}])
    assert "died in step 3" in str(dead.ask("x").result().error)
    with pytest.raises(EngineDeadError):
        dead.ask("y")
    broken = Scripted(default={"answer": "abc", "faults": [{"do": "bug", "at_token": 2}]})
    with pytest.raises(RuntimeError, match="a scripted bug in step 3"):
        broken.ask("x").result()
    stalled = Scripted(default={"answer": "abc", "faults": [{"do": "stall", "at_token": 1, "seconds": 0.2}]})
    stalled.text("x")
    assert stalled.steps[-1].at_s - stalled.steps[0].at_s >= 0.19


def test_faults_with_drafts_and_neighbours() -> None:
    bad = {"contains": "bad", "answer": "abcdefgh", "faults": [{"do": "nan", "at_token": 4, "once": False}]}
    engine = Scripted(drafts={"per_row": 3, "accepted": [3]}, rules=[bad], default={"answer": "abcdefgh"})
    handles = [engine.ask("bad" if i % 3 == 1 else f"good {i}") for i in range(9)]
    for place, handle in enumerate(handles):
        assert handle.result().finish == ("error" if place % 3 == 1 else "stop")
        assert bytes(handle.tokens[:8]) == (b"a" if place % 3 == 1 else b"abcdefgh")
    engine.scheduler.check()


# -- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rulse": []}, "$.rulse is no key that is known there; did you mean 'rules'?"),
        ({"default": {"answer": "a", "foo": 1}}, "$.default.foo is no key that is known there"),
        (
            {"rules": [{"contains": "a", "faults": [{"do": "stal"}]}]},
            "$.rules[0].faults[0].do: invalid enum value 'stal'",
        ),
        ({"slots": "many"}, "$.slots: expected `int`, got `str`"),
        ({"slots": 0}, "slots is 0; it must be at least 1"),
        ({"step_ms": -1}, "step_ms is -1.0; it must be 0 or more"),
        ({"rules": [{}]}, "$.rules[0] needs exactly one of prompt, contains, regex and tokens; it has none"),
        ({"rules": [{"prompt": "a", "regex": "b"}]}, "it has prompt and regex"),
        ({"rules": [{"regex": "("}]}, "$.rules[0].regex is no regular expression"),
        ({"default": {"answer": "", "repeat": True}}, "an empty answer cannot be repeated"),
        ({"default": {"logprobs": [[]]}}, "$.default.logprobs[0] is empty"),
        ({"default": {"logprobs": [[["a", -2], ["b", -1]]]}}, "sorted, best first"),
        ({"default": {"logprobs": [[["a", 0.5]]]}}, "at most 0"),
        ({"drafts": {"per_row": 0, "accepted": [0]}}, "$.drafts.per_row is 0"),
        ({"drafts": {"per_row": 2, "accepted": [3]}}, "$.drafts.accepted must be a list of numbers from 0 to per_row"),
        ({"drafts": {"per_row": 2, "accepted": [1], "make_ms": -1}}, "$.drafts.make_ms is -1.0; it must be 0 or more"),
        ({"default": {"mask_ms": -1}}, "$.default.mask_ms is -1.0; it must be 0 or more"),
        ({"faults": [{"do": "die"}]}, "$.faults[0] needs at_step"),
        ({"faults": [{"do": "nan", "at_step": 1}]}, "'nan' is a fault of one answer"),
        ({"faults": [{"do": "stall", "at_step": 1}]}, "'stall' needs seconds over 0"),
        ({"faults": [{"do": "die", "at_step": 1, "seconds": 1}]}, "'stall' needs seconds over 0"),
        ({"default": {"faults": [{"do": "die", "at_step": 1}]}}, "$.default.faults[0] needs at_token"),
        ({"steps_in_flight": 3}, "$.steps_in_flight"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        read(**keys)
    assert said in str(caught.value) and str(caught.value).startswith("s.json")


def test_what_is_no_json_and_what_the_vocabulary_lacks() -> None:
    with pytest.raises(UserError, match=r"s\.json is not JSON"):
        read_script(b"{", name="s.json")
    with pytest.raises(UserError, match="'ab' in logprobs is 2 tokens"):
        answers(read(default={"answer": "x", "logprobs": [[["ab", -1.0]]]}))
    with pytest.raises(UserError, match=r"\$\.rules\[0\]\.answer"):
        answers(read(rules=[{"contains": "a", "answer": [-1]}]))


DOCS = (Path(__file__).resolve().parents[2] / "docs" / "scripted.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", re.findall(r"```json\n(.*?)```", DOCS, re.DOTALL))
def test_every_example_of_the_docs_can_be_read(example: str) -> None:
    script = read_script(example.encode(), name="example")
    answers(script)


def test_the_docs_name_every_key() -> None:
    for kind in (ScriptFile, Rule, Fault, Drafts):
        for name in kind.__struct_fields__:
            assert f"`{name}`" in DOCS or f'"{name}"' in DOCS, f"{kind.__name__}.{name}"


def test_an_empty_file_is_a_whole_script() -> None:
    assert Scripted().text("anything") == "This is a scripted answer."


def test_pinned_means_win_over_the_file() -> None:
    means = Means(
        max_running=3, page_tokens=8, overlap=False, prefix_cache=False, policy="priority", max_tokens_per_step=7
    )
    schedule, cache = plans_of(read(slots=9, pages=10), means, max_context=99)
    assert (schedule.max_running, schedule.max_tokens_per_step, schedule.policy) == (3, 7, "priority")
    assert (schedule.steps_in_flight, schedule.max_context, cache.page_tokens, cache.prefix_cache) == (1, 99, 8, False)
    assert cache.pages == (11,)
