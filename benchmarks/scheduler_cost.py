"""What the host pays per step: decide() and absorb() with 1, 64 and 512 running rows, the real scheduler and an executor that does nothing.

    python benchmarks/scheduler_cost.py [--steps 600] [--out scheduler_cost.json]

"steady" only decodes; "churn" also ends about 2 % of the rows per step and admits as many new ones; "full" is churn with cache for about
half of the rows and 500 requests in the queue. Times are microseconds of one thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import numpy as np

from tradewind.config.plan import CachePlan, SchedulePlan
from tradewind.contract.kv import KVGroup
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import Step, StepResult, Wants, frozen_ints
from tradewind.engine.scheduler import Scheduler

PAGE_TOKENS = 16


def plan(rows: int, *, window: int | None, pages: int) -> tuple[SchedulePlan, CachePlan]:
    """A plan with one or two groups of `pages` pages each."""
    groups = [_group(0, None)] + ([_group(1, window)] if window else [])
    schedule = SchedulePlan(
        max_running=rows,
        max_tokens_per_step=max(2048, 2 * rows),
        max_context=4096,
        policy="arrival",
        steps_in_flight=2,
        age_limit_s=5.0,
        max_preemptions=3,
    )
    return schedule, CachePlan(
        groups=tuple(groups), pages=(pages,) * len(groups), page_tokens=PAGE_TOKENS, prefix_cache=True
    )


def _group(index: int, window: int | None) -> KVGroup:
    return KVGroup(
        index=index,
        kind="window" if window else "full",
        layers=(index,),
        kv_heads=1,
        head_dim=64,
        page_tokens=PAGE_TOKENS,
        format="bf16",
        window=window,
    )


def answer(step: Step, token: int) -> StepResult:
    """A result with one token for each row that wants one."""
    samples = (step.wants == Wants.LAST).astype(np.int32)
    offset = np.concatenate(([0], np.cumsum(samples)))
    return StepResult(
        number=step.number,
        slot=step.slot,
        epoch=step.epoch,
        offset=frozen_ints(offset),
        tokens=frozen_ints(np.full(int(offset[-1]), token, dtype=np.int32)),
    )


def measure(rows: int, *, steps: int, work: str, window: int | None) -> dict[str, float | int | str]:
    """Runs one case; medians and 99th percentiles in microseconds."""
    churn = work != "steady"
    schedule, cache = plan(rows, window=window, pages=rows * 4 if work == "full" else rows * 4096 // PAGE_TOKENS + 1)
    clock = time.perf_counter
    scheduler = Scheduler(schedule=schedule, cache=cache, clock=clock)
    random = np.random.default_rng(0)
    count = 0

    def add(most: int) -> None:
        nonlocal count
        prompt = random.integers(3, 30000, size=int(random.integers(32, 96))).tolist()
        scheduler.add(
            Request(
                id=f"r{count}",
                tokens=tuple(prompt),
                sampling=SamplingParams(temperature=0.0),
                max_tokens=most,
                eos_ids=(2,),
            ),
            clock(),
        )
        count += 1

    def length() -> int:
        return int(random.integers(20, 80)) if churn else 3000

    for _ in range(rows):
        add(length())
    flying: list[Step] = []
    decide_s: list[float] = []
    absorb_s: list[float] = []
    turns = 0
    warm = 3 * rows // 10 + 60
    while len(decide_s) < steps:
        while churn and scheduler.unfinished < rows + (500 if work == "full" else 8):
            add(length())
        before = time.perf_counter()
        step = scheduler.decide(clock())
        between = time.perf_counter()
        if step is not None:
            flying.append(step)
        if len(flying) < 2:
            continue
        result = answer(flying.pop(0), 7 + turns % 1000)
        start = time.perf_counter()
        scheduler.absorb(result, clock())
        end = time.perf_counter()
        turns += 1
        if turns > warm:
            decide_s.append(between - before)
            absorb_s.append(end - start)
    decide_us, absorb_us = np.array(decide_s) * 1e6, np.array(absorb_s) * 1e6
    both = decide_us + absorb_us
    return {
        "rows": rows,
        "work": work,
        "groups": "full+window" if window else "full",
        "decide_median_us": round(float(np.median(decide_us)), 1),
        "decide_p99_us": round(float(np.percentile(decide_us, 99)), 1),
        "absorb_median_us": round(float(np.median(absorb_us)), 1),
        "absorb_p99_us": round(float(np.percentile(absorb_us, 99)), 1),
        "both_median_us": round(float(np.median(both)), 1),
        "both_p99_us": round(float(np.percentile(both, 99)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Host cost of a step.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=None, help="write the figures as JSON")
    arguments = parser.parse_args()
    cases = [
        measure(rows, steps=arguments.steps, work=work, window=window)
        for rows, work, window in (
            (1, "steady", None),
            (64, "steady", None),
            (512, "steady", None),
            (512, "steady", 256),
            (512, "churn", None),
            (512, "full", None),
        )
    ]
    names = list(cases[0])
    widths = [max(len(name), *(len(str(case[name])) for case in cases)) for name in names]
    print("  ".join(name.rjust(width) for name, width in zip(names, widths, strict=True)))
    for case in cases:
        print("  ".join(str(case[name]).rjust(width) for name, width in zip(names, widths, strict=True)))
    if arguments.out is not None:
        record = {
            "cpu": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "cases": cases,
        }
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
