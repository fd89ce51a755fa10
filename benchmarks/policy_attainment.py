"""Does order by slack keep more promises than order of arrival, on a real engine? Mixed traffic, the same traces under both, in rounds.

    python benchmarks/policy_attainment.py MODEL [--rounds 6] [--seconds 25] [--cpu-clock] [--out FILE.json --plot FILE.png]

Everything is fixed by rules before anything is compared, and told first:

    traffic   7 of 10 requests are chat (150 tokens in, 60 out, log-normal), 3 of 10 are bulk (1,200 in, 120 out) without any target
    targets   of chat: its first token within TTFT_TIMES of what an idle engine takes for one, time per token within TPOT_TIMES of an idle
              engine's; both are measured here and now, because neighbours on the machine make an idle engine slower, too
    load      LOAD of the requests per second that the engine does when all of a sample are there at once

A round is one trace (seed = round), run once under each policy in an engine of its own, in real time; every other round in the other order,
so that a slow minute meets both. Counted are chat requests that met both targets; each has its twin under the other policy. The interval of
the difference comes from resampling whole rounds, because requests of one round share its minutes. `--cpu-clock`: the engine lives on the
processor time of its thread (tradewind.bench.processor_time), for machines that others use at the same time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tradewind.assemble import Planned, make_plan
from tradewind.bench.processor_time import ProcessorTimeEngine
from tradewind.config.goals import Goals, Means, TrafficClass
from tradewind.contract.request import Request, SamplingParams
from tradewind.engine.columns import Report
from tradewind.observability.attainment import wilson
from tradewind.simulate.crossing import interval_of_mean
from tradewind.simulate.forecast import trace_of
from tradewind.simulate.outcome import Outcome, Witness
from tradewind.simulate.simulator import END_TOKEN
from tradewind.simulate.trace_columns import Trace
from tradewind.tune.live import run_live
from tradewind.tune.measured import prompt_of

TTFT_TIMES, TPOT_TIMES, LOAD = 8.0, 12.0, 0.8
POLICIES = ("arrival", "slo")
CHAT = TrafficClass(name="chat", share=0.7, prompt_tokens=150, output_tokens=60)
BULK = TrafficClass(name="bulk", share=0.3, prompt_tokens=1200, output_tokens=120)
IDLE_REQUESTS, SAMPLE = 8, 24
LONGEST = 4096

Told = Callable[[int], None]
Run = Callable[[Trace, Planned, Told], Outcome]


def nobody(sent: int) -> None:
    """Wants to hear of nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals in each run (default 25)")
    parser.add_argument("--load", type=float, default=LOAD, help=f"part of the measured capacity (default {LOAD})")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-clock", action="store_true", help="count processor time of one thread")
    parser.add_argument("--first-seed", type=int, default=1, help="of the first round's trace (default 1)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("tradewind").setLevel(logging.ERROR)
    console = Console(width=130)
    began = time.monotonic()

    open_goals = goals_of(arguments, ttft_ms=None, tpot_ms=None, requests_per_s=1.0)
    run = on_processor_time if arguments.cpu_clock else in_real_time
    means = Means(threads=1, overlap=False) if arguments.cpu_clock else Means(threads=arguments.threads)
    idle_ttft_s, idle_tpot_s, capacity_per_s = calibrated(planned_for(open_goals, policy="arrival", means=means), run)
    goals = goals_of(
        arguments,
        ttft_ms=1000 * TTFT_TIMES * idle_ttft_s,
        tpot_ms=1000 * TPOT_TIMES * idle_tpot_s,
        requests_per_s=arguments.load * capacity_per_s,
    )
    targets = (TTFT_TIMES * idle_ttft_s, TPOT_TIMES * idle_tpot_s)
    requests = max(10, round(arguments.seconds * arguments.load * capacity_per_s))
    console.print(
        f"idle: TTFT {1000 * idle_ttft_s:.0f} ms, TPOT {1000 * idle_tpot_s:.1f} ms; capacity {capacity_per_s:.2f} requests/s; "
        f"load average {os.getloadavg()[0]:.1f}\n"
        f"targets: TTFT {1000 * targets[0]:.0f} ms, TPOT {1000 * targets[1]:.0f} ms; {arguments.load * capacity_per_s:.2f} requests/s, "
        f"{requests} a round, {arguments.rounds} rounds",
        highlight=False,
    )
    plans = {policy: planned_for(goals, policy=policy, means=means) for policy in POLICIES}
    rounds: list[dict[str, object]] = []
    met: dict[str, list[npt.NDArray[np.bool_]]] = {policy: [] for policy in POLICIES}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("rounds", total=requests * len(POLICIES) * arguments.rounds)
        for number in range(arguments.rounds):
            trace = trace_of(goals, requests=requests, seed=arguments.first_seed + number)
            own: dict[str, object] = {"seed": arguments.first_seed + number}
            for policy in POLICIES if number % 2 == 0 else POLICIES[::-1]:
                progress.update(bar, description=f"round {number + 1}, {policy}")
                load_before = os.getloadavg()[0]
                outcome = run(trace, plans[policy], lambda sent: progress.advance(bar))
                kept = kept_promises(outcome, targets)
                met[policy].append(kept)
                own[policy] = {
                    **figures(outcome, trace),
                    "met": int(kept.sum()),
                    "of": len(kept),
                    "load_average": load_before,
                }
            rounds.append(own)
    facts = {
        "model": Path(next(iter(plans.values())).plan.card.name).name,
        "clock": "processor time of one thread" if arguments.cpu_clock else "wall time",
        "machine": next(iter(plans.values())).plan.hardware.name,
        "threads": next(iter(plans.values())).plan.numerics.threads,
        "rule": {"ttft_times_idle": TTFT_TIMES, "tpot_times_idle": TPOT_TIMES, "load": arguments.load},
        "idle_ttft_s": idle_ttft_s,
        "idle_tpot_s": idle_tpot_s,
        "capacity_requests_per_s": capacity_per_s,
        "target_ttft_s": targets[0],
        "target_tpot_s": targets[1],
        "requests_per_s": goals.requests_per_s,
        "requests_a_round": requests,
        **verdict(met),
        "rounds": rounds,
        "took_s": time.monotonic() - began,
    }
    show(console, facts, rounds)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    if arguments.plot is not None:
        draw(facts, rounds, arguments.plot)


def goals_of(
    arguments: argparse.Namespace, *, ttft_ms: float | None, tpot_ms: float | None, requests_per_s: float
) -> Goals:
    """The mixed traffic with these targets for chat."""
    chat = msgspec.structs.replace(CHAT, ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    return Goals(model=arguments.model, classes=(chat, BULK), requests_per_s=requests_per_s, max_context=LONGEST)


def planned_for(goals: Goals, *, policy: str, means: Means) -> Planned:
    """The plan for these goals under one policy; nothing else differs."""
    return make_plan(msgspec.structs.replace(goals, means=msgspec.structs.replace(means, policy=policy)))


def in_real_time(trace: Trace, planned: Planned, told: Told) -> Outcome:
    """The trace on an engine in a thread of its own."""
    return run_live(trace, planned, told=told).outcome


class AfterWarmUp:
    """A listener that files nothing before it is told what to file it in."""

    def __init__(self) -> None:
        self.witness: Witness | None = None

    def take_reports(self, reports: list[Report]) -> None:
        """See engine.columns.ReportSink."""
        if self.witness is not None:
            self.witness.take_reports(reports)


def on_processor_time(trace: Trace, planned: Planned, told: Told) -> Outcome:
    """The trace on an engine in this thread, whose clock is the thread's processor time."""
    listener = AfterWarmUp()
    engine = ProcessorTimeEngine(planned, sinks=(listener,))
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    engine.run([Request(id="warm", tokens=(1,) * 64, sampling=sampling, max_tokens=8)])
    outcome = Outcome.empty(trace)
    listener.witness = Witness(outcome)
    began = engine.clock.now()
    engine.run(
        (
            Request(
                id=str(index),
                tokens=prompt_of(trace, index, vocab_size=planned.plan.card.vocab_size),
                sampling=sampling,
                max_tokens=int(trace.output_tokens[index]),
                eos_ids=(END_TOKEN,),
                traffic_class=trace.classes[trace.traffic_class[index]],
                arrived_s=float(trace.arrival_s[index]),
            )
            for index in range(len(trace))
        ),
        told=told,
    )
    engine.close()
    outcome.first_s -= began
    outcome.finish_s -= began
    outcome.end_s = engine.clock.now() - began
    return outcome


def calibrated(planned: Planned, run: Run) -> tuple[float, float, float]:
    """Median TTFT and TPOT in seconds of a chat request that is alone; requests of the mixture per second when all are there at once."""
    chat = Goals(model="", classes=(CHAT,), requests_per_s=1.0)
    alone = trace_of(chat, requests=IDLE_REQUESTS, seed=0, spread=0.0)
    # Far enough apart that each is alone: the longest takes well under this.
    alone = alone.speed_up(alone.duration_s / (1.0 * IDLE_REQUESTS))
    idle = run(alone, planned, nobody)
    mixture = Goals(model="", classes=(CHAT, BULK), requests_per_s=1e6, max_context=LONGEST)
    full = run(trace_of(mixture, requests=SAMPLE, seed=0), planned, nobody)
    return float(np.median(idle.ttft_s)), float(np.median(idle.tpot_s)), SAMPLE / float(np.nanmax(full.finish_s))


def kept_promises(outcome: Outcome, targets: tuple[float, float]) -> npt.NDArray[np.bool_]:
    """Of each chat request, whether it met both targets; one without an answer did not."""
    trace = outcome.trace
    chat = np.flatnonzero(trace.traffic_class == trace.classes.index("chat"))
    ttft, tpot = outcome.ttft_s[chat], outcome.tpot_s[chat]
    single = trace.output_tokens[chat] == 1
    out: npt.NDArray[np.bool_] = (ttft <= targets[0]) & ((tpot <= targets[1]) | single)
    return out


def figures(outcome: Outcome, trace: Trace) -> dict[str, float]:
    """What else became of the requests."""
    chat = trace.traffic_class == trace.classes.index("chat")

    def at(values: npt.NDArray[np.float64], quantile: float) -> float:
        return float(np.nanquantile(values, quantile))

    return {
        "chat_ttft_p50_s": at(outcome.ttft_s[chat], 0.5),
        "chat_ttft_p90_s": at(outcome.ttft_s[chat], 0.9),
        "chat_tpot_p50_s": at(outcome.tpot_s[chat], 0.5),
        "chat_tpot_p90_s": at(outcome.tpot_s[chat], 0.9),
        "bulk_e2e_mean_s": float(np.nanmean(outcome.e2e_s[~chat])),
        "output_tokens_per_s": float(outcome.generated_tokens.sum()) / outcome.end_s,
    }


def verdict(met: dict[str, list[npt.NDArray[np.bool_]]]) -> dict[str, object]:
    """Attainment of each policy with Wilson's interval, and the paired difference."""
    whole = {policy: np.concatenate(parts) for policy, parts in met.items()}
    differences = np.array([b.mean() - a.mean() for a, b in zip(met["arrival"], met["slo"], strict=True)])
    low, high = interval_of_mean(differences)
    return {
        "attained": {policy: msgspec.to_builtins(wilson(int(all_.sum()), len(all_))) for policy, all_ in whole.items()},
        "only_arrival_met": int((whole["arrival"] & ~whole["slo"]).sum()),
        "only_slo_met": int((~whole["arrival"] & whole["slo"]).sum()),
        "difference": float(differences.mean()),
        "difference_low": low,
        "difference_high": high,
        "rounds_won_by_slo": int((differences > 0).sum()),
        "rounds_won_by_arrival": int((differences < 0).sum()),
    }


def show(console: Console, facts: dict[str, object], rounds: list[dict[str, object]]) -> None:
    """The rounds as a table and the verdict under it."""
    table = Table(title="Chat requests that met both targets")
    for column in ("round", *POLICIES, "TTFT p90", "TPOT p90", "bulk e2e", "tokens/s", "load average"):
        table.add_column(column)
    for number, own in enumerate(rounds, start=1):
        a, b = own["arrival"], own["slo"]
        assert isinstance(a, dict) and isinstance(b, dict)
        table.add_row(
            str(number),
            *(f"{one['met']} of {one['of']} ({100 * one['met'] / one['of']:.0f} %)" for one in (a, b)),
            f"{a['chat_ttft_p90_s']:.2f} / {b['chat_ttft_p90_s']:.2f} s",
            f"{1000 * a['chat_tpot_p90_s']:.0f} / {1000 * b['chat_tpot_p90_s']:.0f} ms",
            f"{a['bulk_e2e_mean_s']:.1f} / {b['bulk_e2e_mean_s']:.1f} s",
            f"{a['output_tokens_per_s']:.0f} / {b['output_tokens_per_s']:.0f}",
            f"{a['load_average']:.1f} / {b['load_average']:.1f}",
        )
    console.print(table)
    shares = facts["attained"]
    assert isinstance(shares, dict)
    for policy in POLICIES:
        one = shares[policy]
        console.print(
            f"{policy}: {one['met']} of {one['of']}, {100 * one['share']:.1f} % ({100 * one['low']:.1f} to {100 * one['high']:.1f})",
            highlight=False,
        )
    console.print(
        f"slo - arrival: {100 * facts['difference']:+.1f} points ({100 * facts['difference_low']:+.1f} to "  # type: ignore[operator]
        f"{100 * facts['difference_high']:+.1f}, rounds resampled); rounds won {facts['rounds_won_by_slo']} of {len(rounds)}; "  # type: ignore[operator]
        f"met only under slo {facts['only_slo_met']}, only under arrival {facts['only_arrival_met']}; {facts['took_s']:.0f} s",
        highlight=False,
    )


def draw(facts: dict[str, object], rounds: list[dict[str, object]], path: Path) -> None:
    """Attainment by round and policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    place = np.arange(len(rounds) + 1)
    shares = facts["attained"]
    assert isinstance(shares, dict)
    for index, (policy, color) in enumerate(zip(POLICIES, ("#9aa5b1", "#1f6f8b"), strict=True)):
        each = [wilson(own[policy]["met"], own[policy]["of"]) for own in rounds]  # type: ignore[index]
        values = [*(one.share for one in each), shares[policy]["share"]]
        below = [*(one.share - one.low for one in each), shares[policy]["share"] - shares[policy]["low"]]
        above = [*(one.high - one.share for one in each), shares[policy]["high"] - shares[policy]["share"]]
        axes.bar(
            place + 0.4 * index - 0.2,
            values,
            0.38,
            label=policy,
            color=color,
            yerr=np.maximum(0, [below, above]),
            error_kw={"lw": 0.9, "capsize": 2},
        )
    axes.set_xticks(place, [*(str(number) for number in range(1, len(rounds) + 1)), "all"])
    axes.set_xlabel("round")
    axes.set_ylabel("chat requests in time")
    axes.set_ylim(0, 1.18)
    axes.set_title(
        f"{facts['model']}: TTFT {1000 * facts['target_ttft_s']:.0f} ms, TPOT {1000 * facts['target_tpot_s']:.0f} ms, "  # type: ignore[operator]
        f"{100 * facts['rule']['load']:.0f} % of capacity",  # type: ignore[index]
        fontsize=10,
    )
    axes.legend(loc="upper left", ncols=2, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
