"""An engine in this process that the caller runs turn by turn, with token ids in and no text made.

Knows: how it is opened, asked, emptied and stopped in time, and what its steps were like. Refuses to know: what is asked of it (gpu_works),
and with which goals it was opened (gpu_options).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import gpu_places  # noqa: F401 - finds the package

from tradewind.assemble import build_client, make_plan
from tradewind.config.goals import Goals
from tradewind.config.plan import Plan
from tradewind.contract.events import StepDone, TokensOut
from tradewind.contract.request import Request, SamplingParams
from tradewind.engine.client import LocalClient
from tradewind.engine.columns import StepTokens
from tradewind.engine.loop import Add, Cancel, EngineLoop, Forget
from tradewind.phases import Phases


class OutOfTimeError(Exception):
    """The time for the whole run is over."""


def opened(goals: Goals, *, phases: Phases) -> tuple[Plan, LocalClient]:
    """An engine for token ids, without a tokenizer; whoever opens it closes the client."""
    with phases("imports"):
        pass
    planned = make_plan(goals, phases=phases)
    return planned.plan, build_client(planned, phases=phases)


@dataclass
class Driven:
    """An engine that the caller runs turn by turn. Reports are kept as the loop brings them: no Python work for each token."""

    loop: EngineLoop
    deadline_s: float = float("inf")
    """By time.perf_counter; a call that is still running then is ended and raises OutOfTimeError."""
    reports: list[Any] = field(default_factory=list)
    """Of the last call."""
    _number: int = 0

    def generate(self, prompts: Sequence[Sequence[int]], out_lens: Sequence[int], temperature: float = 0.0) -> int:
        """Submits all prompts at once and runs until each has its tokens; returns how many were made. Raises RuntimeError on a failure."""
        loop, reports = self.loop, []
        self.reports = reports
        by_length = {
            tokens: SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
            for tokens in set(out_lens)
        }
        names = []
        for prompt, tokens in zip(prompts, out_lens, strict=True):
            self._number += 1
            name = f"b{self._number}"
            request = Request(
                id=name, tokens=tuple(prompt), sampling=by_length[tokens], max_tokens=tokens, seed=self._number
            )
            loop.check(request)
            loop.post(Add(request))
            names.append(name)
        still, made = len(names), 0
        while still:
            if time.perf_counter() > self.deadline_s:
                for name in names:
                    loop.post(Cancel(name))
                self.drain()
                raise OutOfTimeError(f"ended with {still} of {len(names)} requests open")
            turn = loop.run_once()
            reports += turn
            for report in turn:
                kind = type(report)
                if kind is StepTokens:
                    made += len(report.ids)
                elif kind is TokensOut:
                    made += len(report.tokens)
                    if report.finish is not None:
                        still -= 1
                        if report.finish != "length":
                            raise RuntimeError(f"a request ended with {report.finish}: {report.error}")
        return made

    def drain(self) -> None:
        """Runs until nothing is open and no step flies."""
        while self.loop.busy:
            self.reports += self.loop.run_once()

    def forget(self) -> None:
        """Empties the prefix cache; nothing is open."""
        self.drain()
        self.loop.post(Forget())
        self.drain()

    @property
    def captures(self) -> int:
        """Graphs captured since the start; 0 on an engine that has none."""
        return int(getattr(self._runner, "captures", 0))

    @property
    def prepared(self) -> bool:
        """Whether what goes on behind the start is done: kernels compiled and the graphs of usual steps captured."""
        return self.loop.prepared and bool(getattr(self._runner, "captured_ahead", True))

    @property
    def _runner(self) -> Any:
        """What captures graphs; None on an engine of another kind. There is no public word for it."""
        return getattr(getattr(self.loop, "_executor", None), "_runner", None)

    def settle(self, limit_s: float) -> dict[str, Any]:
        """Waits until all that goes on behind the start is done, so long at most (and not beyond the deadline); returns how far it is."""
        began = time.perf_counter()
        until = min(began + limit_s, self.deadline_s)
        while not self.prepared and time.perf_counter() < until:
            time.sleep(0.1)
        return {"waited_s": time.perf_counter() - began, "limit_s": limit_s, **self.behind()}

    def behind(self) -> dict[str, Any]:
        """How far what goes on behind the start has come, and what its parts took; changes nothing.

        prepared: all of it is done. compiled: every kernel is. compile_s: seconds of those parts that are over.
        graphs: counts and seconds of runner/ahead.py's Progress. Where there is none of that (a CPU), the last two are empty.
        """
        compile_s, graphs = getattr(self._runner, "behind_start", ({}, None))
        return {
            "prepared": self.prepared,
            "compiled": self.loop.prepared,
            "compile_s": compile_s,
            "graphs": asdict(graphs) if graphs is not None else {},
        }

    def steps(self, wall_s: float) -> dict[str, float]:
        """What the last call's steps were like: medians."""
        done = [report for report in self.reports if type(report) is StepDone]
        if not done:
            return {}
        return {
            "count": len(done),
            "turn_ms": 1e3 * wall_s / len(done),
            "host_us": 1e6 * statistics.median(step.decide_s + step.absorb_s for step in done),
            "device_ms": 1e3 * statistics.median(step.device_s for step in done),
            "rows": statistics.median(step.rows for step in done),
            "tokens": statistics.median(step.tokens for step in done),
            "with_prompt": sum(step.prompt_tokens > 0 for step in done),
            "most_running": max(step.running for step in done),
            "most_pages_used": max(step.pages_used[0] for step in done),
        }


def settled_text(record: dict[str, Any]) -> str:
    """One line of what `Driven.settle` returned."""
    parts = ["kernels compiled" if record["compiled"] else "kernels not all compiled"]
    parts += [f"{part} {seconds:.1f} s" for part, seconds in record["compile_s"].items()]
    if graphs := record["graphs"]:
        parts += [f"{graphs['captured'] + graphs['passed_over']} of {graphs['wanted']} graphs captured"]
        parts += [f"plan {graphs['plan_s']:.1f} s", f"capture {graphs['capture_s']:.1f} s"]
        if graphs["error"]:
            parts.append(f"captures ended with {graphs['error']}")
    went_on = "" if record["prepared"] else ", which was the limit"
    return f"settled after {record['waited_s']:.1f} s{went_on}: {', '.join(parts)}"
