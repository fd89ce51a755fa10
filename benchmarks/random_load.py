"""Random requests, as mixed as people's, over one engine for some time; what was asked, what came back, and what was wrong with it.

Knows: how requests are drawn and what an answer owes to its request whatever the model says (lengths, logprobs, forbidden tokens, grammar).
Refuses to know: how the engine works and where it computes. Used by gpu_check.py (`load`); what it has found is handed out at intervals, so
that a run that is cut keeps it.
"""

from __future__ import annotations

import json
import math
import random
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from tradewind.assemble import Engine
from tradewind.config.plan import Plan
from tradewind.contract.events import Preempted, Scheduled, TokensOut
from tradewind.contract.grammar import Grammar
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import TokenLogprobs
from tradewind.engine.columns import spelled_out
from tradewind.engine.loop import Add, Cancel, Finish, Forget
from tradewind.serving.intake import Intake

WORDS = ("north", "south", "east", "west", "nowhere")
GRAMMARS: dict[str, Grammar] = {
    "choice": Grammar(kind="choice", text="start: " + " | ".join(f'"{word}"' for word in WORDS)),
    "json schema": Grammar(
        kind="json_schema",
        text='start: %json {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, '
        '"age": {"type": "integer"}}, "required": ["name", "age"], "additionalProperties": false}',
        spare_blanks=True,
    ),
    "regex": Grammar(kind="regex", text="start: /[a-z]{2,9}( [a-z]{2,9}){0,5}/"),
}
"""In llguidance's Lark."""
GRAMMAR_OF_TEXT = {grammar.encode(): name for name, grammar in GRAMMARS.items()}
LONG_PROMPT, LONG_ANSWER = 700, 150
KEEP_S, SAY_S = 5.0, 10.0
MOST_KEPT = 20
"""So many failures are kept in words; all are counted."""


# ------------------------------------------------------------------------------------------------------------- requests


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
        constrained = self.grammars and draw.random() < 0.2
        vocab = self.intake.limits.vocab_size
        values: dict[str, Any] = {"max_tokens": new, "ignore_eos": draw.random() < 0.5}
        values["temperature"] = draw.choice((0.0, 0.0, 0.6, 1.0, 1.6))
        if draw.random() < 0.7:
            values["seed"] = draw.randrange(1 << 63)
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
            grammar = GRAMMARS[draw.choice(sorted(GRAMMARS))].encode()
            made = tuple(msgspec.structs.replace(request, grammar=grammar) for request in made)
        return made


def kinds_of(request: Request) -> Iterator[str]:
    """What is special about a request; the names under which it is counted."""
    asked, plain = request.sampling, SamplingParams()
    if request.grammar is not None:
        yield "constrained"
        yield GRAMMAR_OF_TEXT.get(request.grammar, "other grammar")
    yield "greedy" if asked.temperature == 0 else "drawn"
    if asked.seed is not None:
        yield "own seed"
    if (asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty) != (1.0, 0.0, 0.0):
        yield "penalties"
    if len(request.tokens) >= LONG_PROMPT:
        yield "long prompt"
    if request.max_tokens >= LONG_ANSWER:
        yield "long answer"
    if request.deadline_s is not None:
        yield "deadline"
    if asked.n > 1:
        yield "several samples"
    for name in (
        "bad_words", "logit_bias", "logprobs", "min_p", "min_tokens", "prompt_logprobs", "stop_token_ids", "top_k", "top_p",
    ):  # fmt: skip
        if getattr(asked, name) != getattr(plain, name):
            yield name


# -------------------------------------------------------------------------------------------------------------- answers


@dataclass
class Received:
    """What has come back for one request, and what happened to it."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    told_to_end: bool = False
    """A Cancel or Finish order was given: the answer may end anywhere."""

    def take(self, event: TokensOut) -> None:
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs


def wrong_with(received: Received, last: TokensOut, *, vocab_size: int) -> str | None:
    """What an ended answer owes to its request and does not keep, in words; None when all is kept. The model's words are not judged."""
    request, tokens, asked = received.request, received.tokens, received.request.sampling
    if not all(0 <= token < vocab_size for token in tokens):
        return f"a token outside the vocabulary of {vocab_size}: {[t for t in tokens if not 0 <= t < vocab_size][:3]}"
    if last.generated_tokens != len(tokens):
        return f"{len(tokens)} tokens came, the last event says {last.generated_tokens}"
    if len(tokens) > request.max_tokens:
        return f"{len(tokens)} tokens, over max_tokens {request.max_tokens}"
    if last.finish == "length" and len(tokens) != request.max_tokens:
        return f"ended by length after {len(tokens)} of {request.max_tokens} tokens"
    if last.finish == "stop" and not received.told_to_end and len(tokens) < min(asked.min_tokens, request.max_tokens):
        return f"stopped after {len(tokens)} tokens, under min_tokens {asked.min_tokens}"
    if last.finish == "abort" and not received.told_to_end and request.deadline_s is None:
        return "ended by abort, which nobody asked for"
    banned = {word[0] for word in asked.bad_words if len(word) == 1}
    if banned & set(tokens):
        return f"a bad word was said: {sorted(banned & set(tokens))[:3]}"
    wrong = None
    if asked.logprobs is not None:
        wrong = wrong_logprobs(received.logprobs, tokens, top=asked.logprobs)
        if wrong is None and asked.logprobs and set(kinds_of(request)) <= BEST_IS_TAKEN:
            wrong = not_the_best(received.logprobs)
    elif received.logprobs:
        wrong = "logprobs that nobody asked for"
    unbegun = received.told_to_end and not received.tokens  # it was told before its prompt was computed
    if wrong is None and asked.prompt_logprobs is not None and last.finish in ("stop", "length") and not unbegun:
        wrong = wrong_logprobs(received.prompt_logprobs, request.tokens[1:], top=asked.prompt_logprobs, of="the prompt")
    return wrong


BEST_IS_TAKEN = {
    "deadline", "greedy", "logprobs", "long answer", "long prompt", "min_p", "own seed", "prompt_logprobs", "several samples",
    "stop_token_ids", "top_k", "top_p",
}  # fmt: skip
"""Kinds of requests whose every token is the likeliest one."""


def not_the_best(rows: Sequence[TokenLogprobs]) -> str | None:
    """Where a greedy answer took another token than the likeliest; equal ones may change places."""
    for place, row in enumerate(rows):
        if row.logprob < row.top_logprobs[0] - 1e-4:
            return f"greedy, and took token {row.token} of logprob {row.logprob:.4f} beside {row.top_logprobs[0]:.4f} at {place}"
    return None


def wrong_logprobs(
    rows: Sequence[TokenLogprobs], tokens: Sequence[int], *, top: int, of: str = "the answer"
) -> str | None:
    """What is wrong with the logprobs of these tokens."""
    if [row.token for row in rows] != list(tokens):
        return f"{len(rows)} logprobs for {len(tokens)} tokens of {of}, or of other tokens"
    for place, row in enumerate(rows):
        best = row.top_logprobs
        if len(best) != top or len(set(row.top_ids)) != top:
            return f"{len(best)} best tokens instead of {top} at {place} of {of}"
        if not math.isfinite(row.logprob) and of == "the prompt":
            return f"a logprob of {row.logprob} at {place} of {of}"
        if row.logprob > 1e-3 or row.rank < 1 or any(a < b for a, b in pairwise(best)):
            return f"logprob {row.logprob}, rank {row.rank}, best {best[:3]} at {place} of {of}"
    return None


def breaks_grammar(engine: Engine, received: Received, last: TokensOut) -> bool | None:
    """Whether a complete answer is none that its grammar allows; None where an answer ended early and proves nothing."""
    request = received.request
    if last.finish != "stop" or received.told_to_end or not received.tokens or request.grammar is None:
        return None
    ids = [token for token in received.tokens if token not in request.eos_ids]
    text = b"".join(engine.tokenizer.token_bytes(token) for token in ids).decode("utf-8", errors="replace")
    return not said_by(GRAMMAR_OF_TEXT[request.grammar], text)


def said_by(name: str, text: str) -> bool:
    """Whether a grammar of this file has the text in its language."""
    if name == "choice":
        return text in WORDS
    if name == "regex":
        return re.fullmatch(r"[a-z]{2,9}( [a-z]{2,9}){0,5}", text) is not None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and set(value) == {"name", "age"}
        and isinstance(value["age"], int)
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
    )


# ----------------------------------------------------------------------------------------------------------------- time


@dataclass
class Tally:
    """What a load has brought so far."""

    seconds: float = 0.0
    turns: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    constrained_complete: int = 0
    asked: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    ended_by_kind: Counter[str] = field(default_factory=Counter)
    orders: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    """Failures by sort: error, wrong, grammar."""
    failures: list[str] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)

    def fail(self, sort: str, text: str) -> None:
        self.counts[sort] += 1
        if len(self.failures) < MOST_KEPT:
            self.failures.append(f"{sort}: {text}"[:600])

    def record(self, *, over: bool) -> dict[str, Any]:
        """As JSON; `over` says that the load came to its end."""
        return {
            "over": over,
            "seconds": round(self.seconds, 1),
            "requests": sum(self.ended.values()),
            "turns": self.turns,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "prefix_hits": self.prefix_hits,
            "preemptions": self.preemptions,
            "constrained_complete": self.constrained_complete,
            "ended": dict(sorted(self.ended.items())),
            "ended_by_kind": dict(sorted(self.ended_by_kind.items())),
            "asked_by_kind": dict(sorted(self.asked.items())),
            "orders": dict(sorted(self.orders.items())),
            "failures": dict(self.counts),
            "first_failures": self.failures,
            "memory": self.memory,
        }


def crowded(plan: Plan) -> int:
    """So few pages that running answers must sometimes give way to each other, and the longest request fits all the same."""
    size = plan.cache.page_tokens
    return max(-(-2000 // size) + 4, plan.schedule.max_running * 100 // size)


def held_after(engine: Engine) -> dict[str, int]:
    """What an idle engine with an empty prefix cache still holds; each should be 0. Raises AssertionError where counts do not add up."""
    scheduler = engine.client.loop.scheduler
    scheduler.check()
    held = {
        "requests": scheduler.unfinished,
        "slots": scheduler.running,
        "flying": scheduler.flying,
        "pages": sum(pool.total - 1 - pool.free for pool in scheduler.cache.pools),
        "pinned": sum(pool.pinned for pool in scheduler.cache.pools),
        "promised": sum(scheduler.cache.promised),
    }
    # Who compiles grammars counts who uses each; there is no public word for it.
    entries = getattr(scheduler._grammars, "_entries", {})
    return {**held, "grammars": sum(entry.uses for entry in entries.values())}


def memory_now() -> dict[str, float]:
    """MiB of this process: most ever resident, resident now (Linux), and what torch has allocated on a GPU."""
    found = {"most_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    statm = Path("/proc/self/statm")
    if statm.is_file():
        found["resident"] = int(statm.read_text().split()[1]) * resource.getpagesize() / 2**20
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["on_gpu"] = torch.cuda.memory_allocated() / 2**20
    return {name: round(value, 1) for name, value in found.items()}


def run_load(
    engine: Engine,
    mix: Mix,
    *,
    until: float,
    keep: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
    check_s: float = 20.0,
) -> Tally:
    """Random requests until `time.perf_counter()` says so, then until the last has ended.

    `keep` is given the record every KEEP_S, `say` a line every SAY_S; pages and prefix tree are recounted every `check_s` (AssertionError
    when they do not add up).
    """
    loop, draw, tally = engine.client.loop, mix.draw, Tally()
    # More than fit into the slots, so that some always wait.
    crowd = round(1.3 * engine.plan.schedule.max_running)
    vocab_size, open_requests = engine.plan.card.vocab_size, dict[str, Received]()
    began = time.perf_counter()
    kept = said = checked = began
    while open_requests or time.perf_counter() < until:
        now = time.perf_counter()
        while len(open_requests) < crowd and now < until:
            for request in mix.requests():
                loop.check(request)
                loop.post(Add(request))
                open_requests[request.id] = Received(request)
                tally.asked.update(kinds_of(request))
        _orders(loop.post, draw, open_requests, tally)
        tally.turns += 1
        for report in spelled_out(loop.run_once()):
            if isinstance(report, Preempted):
                tally.preemptions += 1
            elif isinstance(report, Scheduled) and not report.resumed:
                tally.prefix_hits += report.cached_tokens > 0
                tally.cached_tokens += report.cached_tokens
            elif isinstance(report, TokensOut):
                tally.tokens += len(report.tokens)
                received = open_requests[report.request_id]
                received.take(report)
                if report.finish is not None:
                    del open_requests[report.request_id]
                    _end(engine, received, report, tally, vocab_size=vocab_size)
        tally.seconds = now - began
        if now - kept > KEEP_S:
            kept = now
            tally.memory.append({"at_s": round(now - began, 1), **memory_now()})
            keep(tally.record(over=False))
        if now - said > SAY_S:
            said = now
            say(_line(tally))
        if now - checked > check_s:
            checked = now
            loop.scheduler.check()
    tally.seconds = time.perf_counter() - began
    return tally


def _orders(post: Callable[[Any], None], draw: random.Random, open_requests: dict[str, Received], tally: Tally) -> None:
    """Now and then somebody goes away, an answer has what it wanted, or the prefix cache is emptied."""
    for name, order, often in (("cancel", Cancel, 0.02), ("finish", Finish, 0.005)):
        if draw.random() < often and open_requests:
            chosen = draw.choice(list(open_requests))
            open_requests[chosen].told_to_end = True
            post(order(chosen))
            tally.orders[name] += 1
    if draw.random() < 0.001:
        post(Forget())
        tally.orders["forget"] += 1


def _end(engine: Engine, received: Received, last: TokensOut, tally: Tally, *, vocab_size: int) -> None:
    """Counts an ended answer and judges it."""
    request = received.request
    assert last.finish is not None
    tally.ended[last.finish] += 1
    tally.prompt_tokens += len(request.tokens)
    tally.ended_by_kind.update(f"{kind}: {last.finish}" for kind in kinds_of(request))
    if last.finish == "error":
        tally.fail("error", f"{request.id}: {last.error} ({request.sampling})")
        return
    wrong = wrong_with(received, last, vocab_size=vocab_size)
    if wrong is not None:
        tally.fail("wrong", f"{request.id}: {wrong} ({request.sampling})")
    broken = breaks_grammar(engine, received, last)
    if broken is not None:
        tally.constrained_complete += 1
        if broken:
            tally.fail("grammar", f"{request.id}: {GRAMMAR_OF_TEXT[request.grammar or '']} answered {received.tokens}")


def _line(tally: Tally) -> str:
    """Where a load is."""
    ended = ", ".join(f"{count} {name}" for name, count in sorted(tally.ended.items()))
    memory = tally.memory[-1] if tally.memory else {}
    where = f", {memory['on_gpu']:.0f} MiB on the GPU" if "on_gpu" in memory else ""
    return (
        f"    {tally.seconds:5.0f} s: {ended}; {tally.tokens} tokens, {tally.preemptions} preemptions, {tally.prefix_hits} prefix hits, "
        f"{sum(tally.counts.values())} failures{where}"
    )
