"""Correctness of a whole engine on a card, as PASS and FAIL lines: the real SmolLM2, every way to cut a step, a long mixed load.

    PYTHONPATH=src python benchmarks/gpu_check.py --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf --minutes 10 --out check.json
    ... --backend cpu --minutes 0.2          the same script where there is no GPU

    golden         greedy answers are those of float32 `transformers`, or differ at a near tie of theirs
    same           each alone = batch of 64 = prefix hit = chunks = after preemption = without graphs, or differs at a near tie
    deterministic  the same with `deterministic`: equal bit for bit, tokens and logprobs
    perplexity     of a fixed text: weights and keys in bf16 and fp8 against float32 on a CPU
    load           minutes of random requests (lengths, cancels, penalties, logprobs, grammars, seeds): nothing fails, nothing is kept
    memory         the planned ledger against the device's own figure (a process of its own)

Knows: the rules of judgement. Refuses to know: how the engine works; it is built by `assemble` and bent only in its plan (fewer pages).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
import json
import math
import platform
import random
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_suite
import msgspec

from tradewind.assemble import Engine, build_planned, make_plan
from tradewind.config.goals import Goals, Means
from tradewind.config.plan import Plan
from tradewind.contract.errors import UserError
from tradewind.contract.events import Preempted, TokensOut
from tradewind.contract.grammar import Grammar
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import TokenLogprobs
from tradewind.engine.columns import spelled_out
from tradewind.engine.loop import Add, Cancel, Finish, Forget
from tradewind.serving.intake import Intake, Limits

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "reference" / "smollm2_golden.json"
CONTEXT = 4096
NEW = 160
"""Tokens of each answer of the comparisons: more than two of the GPU's pages, so that answers outgrow what they were admitted with."""

GOLDEN_TIE = 0.05
"""Golden top-2 margin below which another order of summation may turn the answer: the rule of tests/reference/test_smollm2_golden.py."""
ROUNDED_TIE = 0.1
"""The same where activations are rounded to 8 bits (bf16): the CPU's bf16 moves logprobs by 0.08 and crosses a margin of 0.002."""
MOST_MOVED = 0.3
"""Two ways of computing the same step may move a logprob by so much where values are kept in 8 bits (bf16)."""

TEXT_TOKENS = 2048
REFERENCE_PERPLEXITY = 13.93439
"""Of TEXT_TOKENS of LICENSE, SmolLM2 Q4_1 dequantised, float32 on a CPU (this script, --backend cpu --parts perplexity)."""
REFERENCE_TEXT = "4895f98dfaf9"
"""First digits of the SHA-256 of those token ids."""


# ----------------------------------------------------------------------------------------------------------- judgements


@dataclass
class Checks:
    """The lines so far. Printed and saved as they come."""

    result: dict[str, Any]
    out: Path | None
    failed: int = 0

    def line(self, part: str, name: str, good: bool | None, detail: str, **numbers: Any) -> None:
        """One judgement; None is neither: it could not be looked at here."""
        verdict = "skip" if good is None else "PASS" if good else "FAIL"
        self.failed += good is False
        print(f"{verdict}  {part}: {name}: {detail}", flush=True)
        self.result["lines"].append({"part": part, "name": name, "verdict": verdict, "detail": detail, **numbers})
        gpu_suite.save(self.result, self.out)


@dataclass
class Answer:
    """What one request brought."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    cached: int = 0


def difference(truth: Answer, found: Answer) -> tuple[int, float] | None:
    """Where two greedy answers part, and the truth's gap between its two best tokens there; None when they are equal."""
    for place, (a, b) in enumerate(zip(truth.tokens, found.tokens, strict=False)):
        if a != b:
            best = truth.logprobs[place].top_logprobs
            return place, best[0] - best[1]
    if len(truth.tokens) != len(found.tokens):
        return min(len(truth.tokens), len(found.tokens)), math.inf
    return None


def nearness(truths: Sequence[Answer], found: Sequence[Answer]) -> dict[str, Any]:
    """How near a set of greedy answers is to the true ones: equal ones, the widest gap that was crossed, how far logprobs moved."""
    parted = [difference(truth, other) for truth, other in zip(truths, found, strict=True)]
    gaps = [gap for found_gap in parted if found_gap is not None for gap in (found_gap[1],)]
    moved = 0.0
    for truth, other, where in zip(truths, found, parted, strict=True):
        last = len(truth.tokens) if where is None else where[0]
        for a, b in zip(truth.logprobs[:last], other.logprobs[:last], strict=False):
            moved = max(moved, abs(a.logprob - b.logprob))
    return {
        "answers": len(parted),
        "equal": sum(where is None for where in parted),
        "widest_gap": max(gaps, default=0.0),
        "logprobs_moved": moved,
        "errors": [other.error for other in found if other.error][:3],
    }


def exactly_equal(truths: Sequence[Answer], found: Sequence[Answer]) -> tuple[int, float]:
    """How many answers are equal in every token and in every bit of their logprobs, and the largest distance of two logprobs."""
    equal, moved = 0, 0.0
    for truth, other in zip(truths, found, strict=True):
        equal += truth.tokens == other.tokens and truth.logprobs == other.logprobs
        for a, b in zip(truth.logprobs, other.logprobs, strict=False):
            moved = max(moved, abs(a.logprob - b.logprob))
    return equal, moved


# ----------------------------------------------------------------------------------------------------------- the engine


@dataclass(frozen=True, kw_only=True)
class Shop:
    """Builds engines on the SmolLM2 file."""

    model: Path
    backend: str
    memory_limit: int | None
    means: dict[str, Any]
    deadline_s: float
    """By time.perf_counter; no engine is built after it."""

    @contextmanager
    def engine(self, *, pages: int | Callable[[Plan], int] | None = None, **means: Any) -> Iterator[Engine]:
        """An engine with choices pinned, and with so few pages; closed and its memory given back at the end."""
        if time.perf_counter() > self.deadline_s:
            raise gpu_suite.OutOfTimeError("no time left for another engine")
        goals = Goals(
            model=str(self.model),
            max_context=CONTEXT,
            memory_limit_bytes=self.memory_limit,
            means=Means(backend=self.backend, **{**self.means, **means}),  # type: ignore[arg-type]
        )
        planned = make_plan(goals)
        if pages is not None:
            few, cache = pages if isinstance(pages, int) else pages(planned.plan), planned.plan.cache
            cache = msgspec.structs.replace(cache, pages=tuple(min(few, own) for own in cache.pages))
            planned = replace(planned, plan=msgspec.structs.replace(planned.plan, cache=cache))
        began = time.perf_counter()
        engine = build_planned(planned)
        pinned = ", ".join(f"{name} {value}" for name, value in means.items()) or "as planned"
        gpu_suite.say(f"    engine ({pinned}) ready in {time.perf_counter() - began:.1f} s")
        try:
            yield engine
        finally:
            engine.client.close()
            del engine, planned
            gc.collect()
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_available():
                torch.cuda.empty_cache()


def answers(engine: Engine, requests: Sequence[Request]) -> tuple[list[Answer], int]:
    """Every request's answer, all submitted at once, and how often one was preempted."""
    loop, found, preempted = engine.client.loop, {request.id: Answer() for request in requests}, 0
    for request in requests:
        loop.check(request)
        loop.post(Add(request))
    while any(answer.finish is None for answer in found.values()):
        for report in spelled_out(loop.run_once()):
            if isinstance(report, TokensOut):
                take(found[report.request_id], report)
            elif isinstance(report, Preempted):
                preempted += 1
    while loop.busy:
        loop.run_once()
    return [found[request.id] for request in requests], preempted


def take(answer: Answer, event: TokensOut) -> None:
    """Adds an event to an answer."""
    answer.tokens += event.tokens
    answer.logprobs += event.logprobs
    answer.prompt_logprobs += event.prompt_logprobs
    answer.finish, answer.error = event.finish or answer.finish, event.error or answer.error
    answer.cached = max(answer.cached, event.cached_tokens)


def intake_of(engine: Engine, prefix: str) -> Intake:
    """Makes requests for an engine."""
    return Intake(Limits.of(engine.plan, eos_ids=engine.tokenizer.eos_ids), prefix=prefix)


def asked(engine: Engine, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, prefix: str) -> list[Request]:
    """A request for each prompt."""
    intake = intake_of(engine, prefix)
    return [request for prompt in prompts for request in intake.requests(prompt, sampling, now_s=time.monotonic())]


def text_tokens(engine: Engine, count: int) -> list[int]:
    """The first tokens of the licence at the root of this repository, repeated where it is too short."""
    ids = engine.tokenizer.encode((ROOT / "LICENSE").read_text(encoding="utf-8"), add_special=False)
    return (ids * (count // len(ids) + 1))[:count]


def forget(engine: Engine) -> None:
    """Empties the prefix cache."""
    loop = engine.client.loop
    loop.post(Forget())
    while loop.busy:
        loop.run_once()


# ------------------------------------------------------------------------------------------------------------ the parts


def golden(shop: Shop, checks: Checks, arguments: argparse.Namespace) -> None:
    """The golden answers: fed token by token, and written freely."""
    prompts = json.loads(GOLDEN.read_text(encoding="utf-8"))["prompts"]
    with shop.engine() as engine:
        exact = engine.plan.numerics.compute in ("f32", "int16")
        tie = GOLDEN_TIE if exact else ROUNDED_TIE
        # Every golden token is fed, whatever was computed, so that one near tie does not spoil what follows.
        fed = asked(
            engine,
            [prompt["prompt_ids"] + prompt["ids"] for prompt in prompts],
            SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2),
            prefix="fed",
        )
        flips, moved, total = [], 0.0, 0
        for prompt, answer in zip(prompts, answers(engine, fed)[0], strict=True):
            first = len(prompt["prompt_ids"]) - 1
            rows = answer.prompt_logprobs[first : first + len(prompt["ids"])]
            assert len(rows) == len(prompt["ids"]), (
                f"{len(rows)} logprobs for {len(prompt['ids'])} tokens: {answer.error}"
            )
            for row, token, margin, logprob in zip(
                rows, prompt["ids"], prompt["top2_margin"], prompt["logprob"], strict=True
            ):
                assert row.token == token
                total += 1
                moved = max(moved, abs(row.logprob - logprob))
                if row.top_ids[0] != token:
                    flips.append(margin)
        widest = max(flips, default=0.0)
        checks.line(
            "golden",
            "each next token",
            widest < tie and moved < (5e-3 if exact else 0.5),
            f"{total - len(flips)} of {total} as in float32; widest margin crossed {widest:.3f} (may be {tie}), "
            f"logprobs moved by at most {moved:.4f}",
            flips=flips,
            strict=widest < GOLDEN_TIE,
            logprobs_moved=moved,
        )
        equal, wrong = 0, []
        for prompt in prompts:
            free = asked(
                engine,
                [prompt["prompt_ids"]],
                SamplingParams(temperature=0.0, max_tokens=len(prompt["ids"])),
                prefix="free",
            )
            found = answers(engine, free)[0][0]
            forget(engine)
            place = next((i for i, (a, b) in enumerate(zip(found.tokens, prompt["ids"], strict=False)) if a != b), None)
            equal += found.tokens == prompt["ids"]
            if place is not None:
                wrong.append(prompt["top2_margin"][place])
        checks.line(
            "golden",
            "free answers",
            max(wrong, default=0.0) < tie,
            f"{equal} of {len(prompts)} equal; the others part at margins {[round(margin, 3) for margin in wrong]}",
        )


def compared(shop: Shop, checks: Checks, arguments: argparse.Namespace, *, deterministic: bool) -> None:
    """Answers alone against the same in a batch, again, in chunks, after preemption and without graphs."""
    part = "deterministic" if deterministic else "same"
    means: dict[str, Any] = {"deterministic": True} if deterministic else {}
    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=2)
    draw = random.Random(11)

    def judge(name: str, found: Sequence[Answer], *, note: str = "", premise: bool = True) -> None:
        near = nearness(truths, found)
        if deterministic:
            equal, moved = exactly_equal(truths, found)
            good = equal == len(truths)
            detail = f"{equal} of {len(truths)} equal in every bit; logprobs moved by at most {moved:.2e}"
        else:
            # A near tie is a gap that rounding can close: both logits may have moved as far as equal tokens' logprobs did.
            moved, tie = near["logprobs_moved"], 2 * near["logprobs_moved"]
            good = near["widest_gap"] <= tie and moved <= MOST_MOVED and not near["errors"]
            detail = (
                f"{near['equal']} of {near['answers']} equal, the others part at gaps of at most {near['widest_gap']:.3f} (may be "
                f"{tie:.3f}, twice what the logprobs of equal tokens moved, {moved:.4f} of {MOST_MOVED})"
            )
        detail += f"; {note}" if note else ""
        checks.line(
            part, name, good and premise, detail + ("" if premise else "; NOT TRIED: it did not come to it"), **near
        )

    with shop.engine(**means) as engine:
        text = text_tokens(engine, 4000)
        prompts = []
        for _ in range(arguments.answers):
            length, start = draw.randint(24, 200), draw.randrange(3000)
            prompts.append(text[start : start + length])
        truths: list[Answer] = []
        for number, request in enumerate(asked(engine, prompts, sampling, prefix="alone")):
            truths += answers(engine, [request])[0]
            if number % 8 == 7:
                forget(engine)
        forget(engine)
        judge(f"batch of {len(prompts)}", answers(engine, asked(engine, prompts, sampling, prefix="batch"))[0])
        again = answers(engine, asked(engine, prompts, sampling, prefix="again"))[0]
        hits = sum(answer.cached > 0 for answer in again)
        judge("prefix hit", again, note=f"{hits} prompts found something", premise=hits > 0)
        size = engine.plan.cache.page_tokens
    step = 64
    with shop.engine(max_tokens_per_step=step, prefix_cache=False, **means) as engine:
        judge(f"chunks of {step}", answers(engine, asked(engine, prompts, sampling, prefix="chunk"))[0])
    needs = [-(-(len(prompt) + NEW) // size) for prompt in prompts]
    few = max(sum(needs) // 3, 2 * max(needs)) + 1
    with shop.engine(pages=few, prefix_cache=False, **means) as engine:
        found, preempted = answers(engine, asked(engine, prompts, sampling, prefix="few"))
        judge("after preemption", found, note=f"{preempted} preemptions with {few} pages", premise=preempted > 0)
    if "graphs" in Means.__struct_fields__ and shop.backend == "cuda":
        with shop.engine(graphs=False, **means) as engine:
            judge("without graphs", answers(engine, asked(engine, prompts, sampling, prefix="eager"))[0])
    with shop.engine(overlap=False, **means) as engine:
        judge("without overlap", answers(engine, asked(engine, prompts, sampling, prefix="turns"))[0])


def same(shop: Shop, checks: Checks, arguments: argparse.Namespace) -> None:
    """Without `deterministic`: up to near ties."""
    compared(shop, checks, arguments, deterministic=False)


def deterministic(shop: Shop, checks: Checks, arguments: argparse.Namespace) -> None:
    """With `deterministic`: bit for bit."""
    compared(shop, checks, arguments, deterministic=True)


VARIANTS: dict[str, dict[str, tuple[dict[str, Any], float]]] = {
    "cpu": {
        "f32": ({"compute": "f32", "kv_format": "f32"}, 1e-4),
        "the default": ({}, 0.005),
        "bf16": ({"compute": "bf16"}, 0.01),
    },
    "cuda": {
        "bf16": ({}, 0.01),
        "fp8 weights": ({"quantization": "fp8"}, 0.05),
        "fp8 keys and values": ({"kv_format": "fp8"}, 0.03),
        "fp8 weights, keys and values": ({"quantization": "fp8", "kv_format": "fp8"}, 0.08),
    },
}
"""By backend: choices, and how far the perplexity may be from float32's."""


def perplexity(shop: Shop, checks: Checks, arguments: argparse.Namespace) -> None:
    """Of one text, every format against float32."""
    for name, (means, allowed) in VARIANTS.get(shop.backend, {"plain": ({}, 1e-3)}).items():
        try:
            with shop.engine(**means) as engine:
                ids = text_tokens(engine, TEXT_TOKENS)
                mark = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]
                request = asked(
                    engine, [ids], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0), prefix="text"
                )
                answer = answers(engine, request)[0][0]
        except UserError as error:
            checks.line("perplexity", name, None, f"refused: {error}")
            continue
        assert len(answer.prompt_logprobs) == len(ids) - 1, f"{len(answer.prompt_logprobs)} logprobs: {answer.error}"
        value = math.exp(-sum(row.logprob for row in answer.prompt_logprobs) / len(answer.prompt_logprobs))
        good, versus = None, "there is no reference for this text"
        if mark == REFERENCE_TEXT:
            off = value / REFERENCE_PERPLEXITY - 1
            good, versus = (
                abs(off) <= allowed,
                f"{off:+.3%} of float32's {REFERENCE_PERPLEXITY:.4f} (may be {allowed:.2%})",
            )
        checks.line("perplexity", name, good, f"{value:.4f}, {versus}", perplexity=value, text=mark)


JSON_GRAMMAR = (
    'start: %json {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}, '
    '"required": ["name", "age"], "additionalProperties": false}'
)
WORDS_GRAMMAR = "start: /[a-z]{2,9}( [a-z]{2,9}){0,5}/"


@dataclass
class Mix:
    """Random requests over a text."""

    intake: Intake
    text: Sequence[int]
    draw: random.Random
    grammars: bool

    def requests(self) -> tuple[Request, ...]:
        """One request, or the samples of one; lengths and values as mixed as people's."""
        draw = self.draw
        length = min(1500, max(1, round(draw.lognormvariate(math.log(80), 1.0))))
        start = 0 if draw.random() < 0.3 else draw.randrange(len(self.text) - 1600)
        prompt = list(self.text[start : start + length])
        new = min(400, max(1, round(draw.lognormvariate(math.log(40), 1.0))))
        constrained = self.grammars and draw.random() < 0.15
        vocab = self.intake.limits.vocab_size
        values: dict[str, Any] = {"max_tokens": new, "ignore_eos": draw.random() < 0.5, "seed": draw.randrange(1 << 63)}
        values["temperature"] = draw.choice((0.0, 0.0, 0.6, 1.0, 1.6))
        if draw.random() < 0.3:
            values["top_k"] = draw.choice((1, 5, 50, 2000))
        if draw.random() < 0.3:
            values["top_p"] = draw.uniform(0.05, 1.0)
        if draw.random() < 0.2:
            values["min_p"] = draw.uniform(0.0, 0.5)
        if draw.random() < 0.2:
            values["repetition_penalty"] = draw.uniform(0.8, 1.6)
        if draw.random() < 0.2:
            values |= {"presence_penalty": draw.uniform(-2, 2), "frequency_penalty": draw.uniform(-2, 2)}
        if draw.random() < 0.2:
            values["logprobs"] = draw.choice((0, 1, 5, 20))
        if draw.random() < 0.05:
            values["prompt_logprobs"] = draw.choice((0, 3))
        if draw.random() < 0.1:
            values["n"] = draw.randint(2, 4)
        if not constrained:  # a grammar may be left without a token by these
            if draw.random() < 0.1:
                values["logit_bias"] = {
                    draw.randrange(vocab): draw.uniform(-100, 20) for _ in range(draw.randint(1, 40))
                }
            if draw.random() < 0.1:
                values["bad_words"] = tuple(
                    tuple(draw.randrange(vocab) for _ in range(draw.randint(1, 3))) for _ in range(draw.randint(1, 5))
                )
            if draw.random() < 0.1:
                values["min_tokens"] = draw.randint(1, new)
            if draw.random() < 0.2:
                values["stop_token_ids"] = tuple(draw.sample(range(vocab), 200))
        deadline = time.monotonic() + draw.uniform(0.01, 1.0) if draw.random() < 0.03 else None
        made = self.intake.requests(prompt, SamplingParams(**values), now_s=time.monotonic(), deadline_s=deadline)
        if constrained:
            as_json = draw.random() < 0.5
            text = JSON_GRAMMAR if as_json else WORDS_GRAMMAR
            grammar = Grammar(kind="json_schema" if as_json else "regex", text=text, spare_blanks=as_json).encode()
            made = tuple(msgspec.structs.replace(request, grammar=grammar) for request in made)
        return made


def crowded(plan: Plan) -> int:
    """So few pages that running answers must sometimes give way to each other, and the longest request fits all the same."""
    size = plan.cache.page_tokens
    return max(-(-2000 // size) + 4, plan.schedule.max_running * 100 // size)


def load(shop: Shop, checks: Checks, arguments: argparse.Namespace) -> None:
    """Random requests for some minutes; then every page, slot and request must be back."""
    draw = random.Random(arguments.seed)
    grammars = find_spec("llguidance") is not None
    if not grammars:
        checks.line("load", "grammars", None, "llguidance is not installed: no request has a grammar")
    with shop.engine(pages=arguments.load_pages or crowded) as engine:
        loop, scheduler = engine.client.loop, engine.client.loop.scheduler
        mix = Mix(intake_of(engine, "mix"), text_tokens(engine, 6000), draw, grammars)
        # More than fit into the slots, so that some always wait.
        crowd = round(1.3 * engine.plan.schedule.max_running)
        open_requests: dict[str, Request] = {}
        ended: Counter[str] = Counter()
        texts: dict[str, Answer] = {}
        errors: list[str] = []
        preempted = tokens = turns = bad_grammar = seen_grammar = 0
        began = last_said = time.perf_counter()
        until = min(began + 60 * arguments.minutes, shop.deadline_s)
        while open_requests or time.perf_counter() < until:
            now = time.perf_counter()
            while len(open_requests) < crowd and now < until:
                for request in mix.requests():
                    loop.check(request)
                    loop.post(Add(request))
                    open_requests[request.id] = request
                    texts[request.id] = Answer()
            if draw.random() < 0.02 and open_requests:
                loop.post(Cancel(draw.choice(list(open_requests))))
            if draw.random() < 0.005 and open_requests:
                loop.post(Finish(draw.choice(list(open_requests))))
            if draw.random() < 0.001:
                loop.post(Forget())
            turns += 1
            for report in spelled_out(loop.run_once()):
                if isinstance(report, Preempted):
                    preempted += 1
                elif isinstance(report, TokensOut):
                    tokens += len(report.tokens)
                    take(texts[report.request_id], report)
                    if report.finish is None:
                        continue
                    ended[report.finish] += 1
                    request, answer = open_requests.pop(report.request_id), texts.pop(report.request_id)
                    if report.finish == "error":
                        errors.append(f"{report.error} ({request.sampling})")
                    elif request.grammar is not None and report.finish == "stop" and report.generated_tokens:
                        seen_grammar += 1
                        bad_grammar += not grammar_kept(engine, request, answer, report)
            if now - last_said > 20:
                last_said = now
                gpu_suite.say(f"    {now - began:5.0f} s: {dict(ended)}, {preempted} preemptions, {len(errors)} errors")
        took_s = time.perf_counter() - began
        forget(engine)
        checks.line(
            "load",
            "no request failed",
            not errors,
            f"{sum(ended.values())} requests, {tokens} tokens and {turns} turns in {took_s:.0f} s; {dict(ended)}, {preempted} preemptions"
            + (f"; first errors: {errors[:3]}" if errors else ""),
            ended=dict(ended),
            preemptions=preempted,
            errors=errors[:20],
        )
        if grammars:
            checks.line(
                "load",
                "grammars kept",
                not bad_grammar,
                f"{bad_grammar} of {seen_grammar} complete answers break their grammar",
            )
        held = {
            "requests": scheduler.unfinished,
            "slots": scheduler.running,
            "flying": scheduler.flying,
            "pages": sum(pool.total - 1 - pool.free for pool in scheduler.cache.pools),
            "promised": sum(scheduler.cache.promised),
        }
        scheduler.cache.check()
        checks.line("load", "nothing is kept", not any(held.values()), f"held after the end: {held}", held=held)
        # The engine still answers as in the beginning.
        last = answers(
            engine, asked(engine, [mix.text[:50]], SamplingParams(temperature=0.0, max_tokens=8), prefix="end")
        )[0][0]
        checks.line("load", "still answers", last.error is None and bool(last.tokens), f"{last.tokens}")


def grammar_kept(engine: Engine, request: Request, answer: Answer, last: TokensOut) -> bool:
    """Whether a complete answer is one that its grammar allows; an answer that somebody else ended early is not judged."""
    ids = [token for token in answer.tokens if token not in request.eos_ids]
    text = b"".join(engine.tokenizer.token_bytes(token) for token in ids).decode("utf-8", errors="replace")
    if last.stop_token is None and len(answer.tokens) < request.max_tokens:
        # Ended by our own Finish order, or complete: a part of a word proves nothing.
        return True
    assert request.grammar is not None
    if "json" in request.grammar.partition('"text"')[0]:
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return set(value) == {"name", "age"} and isinstance(value["age"], int)
    return re.fullmatch(r"[a-z]{2,9}( [a-z]{2,9}){0,5}", text) is not None


def memory(shop: Shop, checks: Checks, arguments: argparse.Namespace) -> None:
    """The ledger against the device, for the models whose weights can be dummies."""
    if shop.backend != "cuda":
        checks.line("memory", "ledger", None, "the device's own figure is a GPU's")
        return
    for model in arguments.memory_models.split(","):
        options = gpu_suite.parsed(["--model", model, "--backend", shop.backend])
        found = gpu_suite.child(options, "--start-only", "--compare-memory", timeout_s=120)
        compared_memory = found.get("memory")
        if "error" in found or not compared_memory:
            checks.line("memory", model, False, found.get("error", "no figure"))
            continue
        planned, used = compared_memory["planned_bytes"], compared_memory["used_bytes"]
        off = used / planned - 1
        checks.line(
            "memory",
            model,
            abs(off) <= 0.02,
            f"planned {planned / 2**30:.2f} GiB, the device says {used / 2**30:.2f} GiB, {off:+.2%} (may be 2 %)",
            **compared_memory,
        )


PARTS: dict[str, Callable[[Shop, Checks, argparse.Namespace], None]] = {
    "golden": golden,
    "same": same,
    "deterministic": deterministic,
    "perplexity": perplexity,
    "memory": memory,
    "load": load,
}
"""In the order in which they are run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts; returns 1 when a line says FAIL."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--smollm2", type=Path, required=True, metavar="FILE", help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu", "plain"))
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the load (default %(default)s)")
    parser.add_argument(
        "--budget", type=float, default=60.0, metavar="MINUTES", help="of everything; the load is cut to it"
    )
    parser.add_argument(
        "--limit-s", type=float, default=400.0, help="of one part, the load's minutes not counted; a hang ends the run"
    )
    parser.add_argument("--answers", type=int, default=64, help="prompts of the comparisons (default %(default)s)")
    parser.add_argument("--load-pages", type=int, default=None, help="pages under load; few of them bring preemptions")
    parser.add_argument("--memory-limit", type=float, default=None, metavar="GIB", help="of each engine (cuda: 16)")
    parser.add_argument("--memory-models", default="qwen3-0.6b,llama-3.1-8b")
    parser.add_argument(
        "--means", action="append", default=[], metavar="NAME=VALUE", help="pins a choice; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    chosen = [name for name in arguments.parts.split(",") if name]
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"--parts names {', '.join(unknown)}; there are {', '.join(PARTS)}")
    limit = (
        arguments.memory_limit if arguments.memory_limit is not None else 16 if arguments.backend == "cuda" else None
    )
    means = {
        name: gpu_suite.parsed_value(value) for name, _, value in (text.partition("=") for text in arguments.means)
    }
    shop = Shop(
        model=arguments.smollm2,
        backend=arguments.backend,
        memory_limit=None if limit is None else int(limit * 2**30),
        means=means,
        deadline_s=time.perf_counter() + 60 * arguments.budget,
    )
    result: dict[str, Any] = {
        "format": 1,
        "kind": "check",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(__file__).name, *(gpu_suite.nameless(word) for word in sys.argv[1:])],
        "card": card_name(arguments.backend),
        "versions": gpu_suite.versions(),
        "lines": [],
        "took_s": {},
    }
    checks = Checks(result=result, out=arguments.out)
    for name in chosen:
        began = time.perf_counter()
        # Where a step never ends nothing else can end it: where it stands is printed, and what was judged is saved already.
        faulthandler.dump_traceback_later(
            arguments.limit_s + (60 * arguments.minutes if name == "load" else 0), exit=True
        )
        try:
            PARTS[name](shop, checks, arguments)
        except gpu_suite.OutOfTimeError as error:
            checks.line(name, "runs to its end", None, str(error))
        except Exception as error:  # the other parts still tell something
            traceback.print_exc()
            checks.line(name, "runs to its end", False, f"{type(error).__name__}: {str(error)[:400]}")
        faulthandler.cancel_dump_traceback_later()
        result["took_s"][name] = round(time.perf_counter() - began, 1)
        gpu_suite.say(f"    {name} took {result['took_s'][name]} s")
    gpu_suite.save(result, arguments.out)
    counts = Counter(line["verdict"] for line in result["lines"])
    print(f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['skip']} could not be looked at")
    return 1 if checks.failed else 0


def card_name(backend: str) -> str:
    """The GPU's name, or the processor's."""
    if backend != "cuda":
        return platform.machine()
    import torch

    return str(torch.cuda.get_device_name(0))


if __name__ == "__main__":
    sys.exit(main())
