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

import gpu_engine
import gpu_options
import gpu_results
import gpu_start
import msgspec
from random_load import GRAMMARS, Mix, crowded, held_after, run_load

from tradewind.assemble import Engine, build_planned, make_plan
from tradewind.config.goals import Goals, Means
from tradewind.config.plan import Plan
from tradewind.contract.errors import UserError
from tradewind.contract.events import Preempted, TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import TokenLogprobs
from tradewind.engine.columns import spelled_out
from tradewind.engine.loop import Add, Forget
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
        gpu_results.save(self.result, self.out)


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
    """How near a set of greedy answers is to the true ones: equal ones, the widest gap that was crossed, how far logprobs moved.

    "parted" has [answer, place, the truth's gap between its two best tokens there] of each that is not equal.
    """
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
        "parted": [[number, where[0], round(where[1], 4)] for number, where in enumerate(parted) if where is not None],
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
            raise gpu_engine.OutOfTimeError("no time left for another engine")
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
        gpu_results.say(f"    engine ({pinned}) ready in {time.perf_counter() - began:.1f} s")
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


def load(shop: Shop, checks: Checks, arguments: argparse.Namespace) -> None:
    """Random requests for some minutes; then every page, slot and request must be back."""
    grammars = find_spec("llguidance") is not None
    if not grammars:
        checks.line("load", "grammars", None, "llguidance is not installed: no request has a grammar")
    with shop.engine(pages=arguments.load_pages or crowded) as engine:
        mix = Mix(intake_of(engine, "mix"), text_tokens(engine, 6000), random.Random(arguments.seed), grammars)
        probe = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)
        first = answers(engine, asked(engine, [mix.text[:50]], probe, prefix="begin"))[0][0]

        def keep(record: dict[str, Any]) -> None:
            checks.result["load"] = {"seed": arguments.seed, **record}
            gpu_results.save(checks.result, checks.out)

        until = min(time.perf_counter() + 60 * arguments.minutes, shop.deadline_s)
        tally = run_load(engine, mix, until=until, keep=keep, say=gpu_results.say)
        keep(tally.record(over=True))
        forget(engine)
        said = (
            f"{sum(tally.ended.values())} requests, {tally.tokens} tokens and {tally.turns} turns in {tally.seconds:.0f} s; "
            f"{dict(sorted(tally.ended.items()))}, {tally.preemptions} preemptions, {tally.prefix_hits} prefix hits"
        )
        counts, shown = tally.counts, "; first of them: " + "; ".join(tally.failures[:3]) if tally.failures else ""
        checks.line("load", "no request failed", not counts["error"], f"{said}{shown if counts['error'] else ''}")
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(tally.asked.items()))
        tried = set(tally.asked) >= {"logprobs", "penalties", *(GRAMMARS if grammars else ())}
        tried = tried and tally.preemptions > 0 and tally.prefix_hits > 0 and tally.orders["cancel"] > 0
        checks.line(
            "load", "everything was tried", tried or None, f"{kinds}; orders: {dict(sorted(tally.orders.items()))}"
        )
        checks.line(
            "load", "answers are what was asked for", not counts["wrong"],
            f"{counts['wrong']} with wrong lengths, logprobs or tokens{shown if counts['wrong'] else ''}",
        )  # fmt: skip
        if grammars:
            broken = f"{counts['grammar']} of {tally.constrained_complete} complete answers break their grammar"
            checks.line("load", "grammars kept", not counts["grammar"], broken + (shown if counts["grammar"] else ""))
        held = held_after(engine)
        checks.line("load", "nothing is kept", not any(held.values()), f"held after the end: {held}", held=held)
        # The engine still answers as in the beginning.
        last = answers(engine, asked(engine, [mix.text[:50]], probe, prefix="end"))[0][0]
        parted = difference(first, last)
        good = last.error is None and bool(last.tokens) and (parted is None or parted[1] <= MOST_MOVED)
        gap = "" if parted is None else f"; they part at a gap of {parted[1]:.3f}"
        checks.line("load", "answers as before the load", good, f"{first.tokens} before, {last.tokens} after{gap}")


def memory(shop: Shop, checks: Checks, arguments: argparse.Namespace) -> None:
    """The ledger against the device, for the models whose weights can be dummies."""
    if shop.backend != "cuda":
        checks.line("memory", "ledger", None, "the device's own figure is a GPU's")
        return
    for model in arguments.memory_models.split(","):
        options = gpu_options.parsed(["--model", model, "--backend", shop.backend])
        found = gpu_start.child(options, "--start-only", "--compare-memory", timeout_s=120)
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
        name: gpu_options.parsed_value(value) for name, _, value in (text.partition("=") for text in arguments.means)
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
        "command": [Path(__file__).name, *(gpu_results.nameless(word) for word in sys.argv[1:])],
        "card": card_name(arguments.backend),
        "versions": gpu_results.versions(),
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
        except gpu_engine.OutOfTimeError as error:
            checks.line(name, "runs to its end", None, str(error))
        except Exception as error:  # the other parts still tell something
            traceback.print_exc()
            checks.line(name, "runs to its end", False, f"{type(error).__name__}: {str(error)[:400]}")
        faulthandler.cancel_dump_traceback_later()
        result["took_s"][name] = round(time.perf_counter() - began, 1)
        gpu_results.say(f"    {name} took {result['took_s'][name]} s")
    gpu_results.save(result, arguments.out)
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
