"""How close the simulator comes: runs open-loop traces on the CPU engine, fits step times on some, predicts others.

    python benchmarks/simulate_check.py MODEL [--seconds 60] [--rate 2.0] [--traces 2] [--cpu-clock] [--out FILE.json --plot FILE.png]

The traces that are fitted to sweep the rate from a fifth of `--rate` to twice as much, so that steps of every size are seen; they run
before, between and after the predicted ones, so that a machine that becomes slower or faster meanwhile does not count. The predicted traces
have other seeds, other lengths and shared prefixes. Engine and simulation get the same plan and the same arrivals. Exit code 1: p50 or p99
of TTFT or TPOT are more than 10 % off.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import Progress

from tradewind.assemble import Planned, make_executor, make_ops, make_plan
from tradewind.bench.processor_time import ProcessorTimeEngine
from tradewind.config.goals import Goals, Means
from tradewind.config.plan import Plan
from tradewind.contract.request import Request, SamplingParams
from tradewind.engine.client import LocalClient
from tradewind.engine.loop import EngineLoop
from tradewind.engine.scheduler import Scheduler
from tradewind.phases import Phases
from tradewind.simulate.outcome import Outcome
from tradewind.simulate.report import show_s
from tradewind.simulate.simulator import SimulateOptions, simulate_plan
from tradewind.simulate.steplog import RequestRecord, StepLog, host_time_of, replay
from tradewind.simulate.steptime import StepTime, fit, relative_errors, roofline
from tradewind.simulate.traces import Trace, poisson_trace

SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)
WARM = Request(id="warm", tokens=tuple(range(100, 164)), sampling=SAMPLING, max_tokens=8)
MEASURES = ("ttft", "tpot")
QUANTILES = (0.5, 0.9, 0.99)
WITHIN = 0.1


def swept(*, seconds: float, rate: float, seed: int) -> Trace:
    """a trace whose rate climbs from a fifth of `rate` to twice as much."""
    draw = np.random.default_rng(seed)
    arrival: list[float] = []
    now = 0.0
    while now < seconds:
        arrival.append(now)
        now += draw.exponential(1 / (rate * (0.2 + 1.8 * now / seconds)))
    trace = poisson_trace(
        requests=len(arrival),
        per_s=1.0,
        prompt=(90, 1.0),
        output=(30, 0.7),
        longest_prompt=900,
        longest_output=150,
        seed=seed,
    )
    return replace(trace, name="fitted to", arrival_s=np.array(arrival))


def held_out(*, seconds: float, rate: float, seed: int) -> Trace:
    """Poisson arrivals of requests with common prefixes, longer answers and shorter prompts of their own."""
    trace = poisson_trace(
        requests=max(8, round(seconds * rate)),
        per_s=rate,
        prompt=(50, 0.9),
        output=(40, 0.6),
        longest_prompt=600,
        longest_output=160,
        prefixes=6,
        prefix_blocks=1,
        seed=seed,
    )
    return replace(trace, name="held out")


def live(planned: Planned, trace: Trace) -> tuple[StepLog, list[Request]]:
    """Runs a trace on the real engine, requests arriving on time whatever becomes of those before; a fresh engine, so a cold cache."""
    plan = planned.plan
    ops, _ = make_ops(plan)
    log = new_log(plan)
    executor = log.watching(make_executor(planned, ops, phases=Phases()))
    scheduler = Scheduler(schedule=plan.schedule, cache=plan.cache, clock=time.monotonic)
    requests = [WARM]
    with LocalClient(EngineLoop(scheduler=scheduler, executor=executor, clock=time.monotonic, sinks=(log,))) as client:
        client.start()
        client.submit(WARM, stream=False).result()
        handles = []
        begin_s = time.monotonic() + 0.2
        for index in range(len(trace)):
            requests.append(request_at(trace, index, begin_s + float(trace.arrival_s[index])))
            time.sleep(max(0.0, requests[-1].arrived_s - time.monotonic()))
            handles.append(client.submit(requests[-1], stream=False))
        for handle in handles:
            handle.result()
    return log, requests


def live_on_processor_time(planned: Planned, trace: Trace) -> tuple[StepLog, list[Request]]:
    """The same on the clock of this thread's processor time."""
    log = new_log(planned.plan)
    engine = ProcessorTimeEngine(planned, sinks=(log,), watching=log.watching)
    engine.run([WARM])
    sent = engine.run(request_at(trace, index, float(trace.arrival_s[index])) for index in range(len(trace)))
    engine.close()
    return log, [WARM, *sent]


def new_log(plan: Plan) -> StepLog:
    """A log that fits a plan."""
    return StepLog(
        groups=plan.cache.groups,
        slots=plan.schedule.max_running,
        steps_in_flight=plan.schedule.steps_in_flight,
        model=plan.model,
    )


def request_at(trace: Trace, index: int, arrived_s: float) -> Request:
    """One request of the trace, with as many tokens as the trace says."""
    return Request(
        id=str(index),
        tokens=tuple(trace.prompt(index).tolist()),
        sampling=SAMPLING,
        max_tokens=int(trace.max_tokens[index]),
        arrived_s=arrived_s,
    )


def measured(records: list[RequestRecord]) -> dict[str, npt.NDArray[np.float64]]:
    """TTFT and TPOT of finished requests in seconds."""
    own = [record for record in records if record.id != "warm" and record.output_tokens > 0]
    return {
        "ttft": np.array([r.first_token_s - r.arrived_s for r in own]),
        "tpot": np.array(
            [(r.finished_s - r.first_token_s) / (r.output_tokens - 1) for r in own if r.output_tokens > 1]
        ),
    }


def compared(
    real: Sequence[dict[str, npt.NDArray[np.float64]]], simulated: Sequence[Sequence[Outcome]]
) -> list[dict[str, Any]]:
    """Quantiles of all held-out requests together: measured, with the interval of so few requests, and simulated in the mean over seeds."""
    rows = []
    for measure in MEASURES:
        truth = np.concatenate([one[measure] for one in real])
        truth = truth[~np.isnan(truth)]
        drawn = np.random.default_rng(0).integers(0, len(truth), (2000, len(truth)))
        for quantile in QUANTILES:
            value = float(np.quantile(truth, quantile))
            low, high = np.quantile(np.quantile(truth[drawn], quantile, axis=1), (0.025, 0.975))
            told = float(
                np.mean(
                    [
                        np.nanquantile(np.concatenate([getattr(one, f"{measure}_s") for one in seed]), quantile)
                        for seed in simulated
                    ]
                )
            )
            rows.append(
                {
                    "measure": measure,
                    "quantile": quantile,
                    "measured_s": value,
                    "measured_low_s": float(low),
                    "measured_high_s": float(high),
                    "simulated_s": told,
                    "off": told / value - 1,
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals in each trace (default 60)")
    parser.add_argument(
        "--rate", type=float, default=2.0, help="requests per second of the predicted traces (default 2)"
    )
    parser.add_argument("--traces", type=int, default=2, help="held-out traces (default 2)")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--compute", choices=["bf16", "f32", "int16", "int8"], help="how to multiply; default: as planned"
    )
    parser.add_argument("--overlap", action="store_true", help="two steps in flight")
    parser.add_argument(
        "--cpu-clock", action="store_true", help="count processor time of one thread: for machines that others use"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--simulations", type=int, default=10, help="with as many seeds of noise (default 10)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--save-times", type=Path, help="write the fitted model, for tradewind simulate --times")
    arguments = parser.parse_args()
    logging.getLogger("tradewind").setLevel(logging.ERROR)

    means = Means(threads=arguments.threads, overlap=arguments.overlap or None, compute=arguments.compute)
    run = live
    if arguments.cpu_clock:
        means, run = Means(threads=1, overlap=False, compute=arguments.compute), live_on_processor_time
    planned = make_plan(Goals(model=arguments.model, means=means))
    plan = planned.plan
    clock = "processor time of one thread" if arguments.cpu_clock else "wall time"
    name = Path(plan.card.name).name
    print(
        f"{name}: {plan.schedule.steps_in_flight} in flight, {plan.numerics.threads} threads, {plan.numerics.compute}, {clock}"
    )
    loads = [os.getloadavg()[0]]
    sweeps: list[tuple[StepLog, list[Request]]] = []
    held: list[tuple[Trace, StepLog]] = []
    parts = arguments.traces + 1
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("traces", total=parts + arguments.traces)
        for number in range(parts):
            seed = arguments.seed + 100 * number
            sweeps.append(run(planned, swept(seconds=arguments.seconds / parts, rate=arguments.rate, seed=seed)))
            progress.advance(bar)
            if number < arguments.traces:
                trace = held_out(seconds=arguments.seconds, rate=arguments.rate, seed=seed + 50)
                held.append((trace, run(planned, trace)[0]))
                progress.advance(bar)
            loads.append(os.getloadavg()[0])

    steps = [step for log, _ in sweeps for step in log.steps]
    model: StepTime = fit(steps, prior=roofline(plan), host=host_time_of(sweeps[0][0].steps))
    if arguments.save_times:
        model.save(arguments.save_times)
    print(model.described())
    print(
        "host:", ", ".join(f"{name} {1e6 * value:.1f} us" for name, value in msgspec.structs.asdict(model.host).items())
    )
    alone = fit(list(sweeps[0][0].steps), prior=roofline(plan))
    last = sweeps[-1][0].steps
    drift = sum(r.took_s for r in last) / sum(alone.device_s(r.features) for r in last)
    print(f"the machine took {drift:.3f} times as long for the last part as for the first")
    first, requests = sweeps[0]
    again = replay(
        list(first.steps),
        list(first.requests),
        {r.id: r for r in requests},
        schedule=plan.schedule,
        cache=plan.cache,
    )
    same = "the same" if again.differs_at is None else f"different from step {again.differs_at} on"
    print(f"replayed with the logged times: {len(again.digests)} decisions, {same}")

    others = [step for _, log in held for step in log.steps]
    median, p90 = relative_errors(model, others)
    untrusted = sum(not model.trustworthy(record.features) for record in others)
    print(
        f"held-out traces: {len(others)} steps, off by {100 * median:.1f} % in the median, {100 * p90:.1f} % at p90; "
        f"{untrusted} outside what was fitted"
    )
    whole = sum(r.took_s for r in others) / sum(model.device_s(r.features) for r in others)
    print(f"time of all its steps, measured / predicted: {whole:.3f}")
    real = [measured(list(log.requests)) for _, log in held]
    simulated = [
        [simulate_plan(trace, plan, times=model, options=SimulateOptions(seed=seed)) for trace, _ in held]
        for seed in range(arguments.simulations)
    ]
    rows = compared(real, simulated)
    print(f"{sum(len(one['ttft']) for one in real)} held-out requests")
    print(f"{'':12}{'measured':>12}{'(95 %)':>22}{'simulated':>12}{'off':>8}")
    for row in rows:
        interval = f"{show_s(row['measured_low_s'])} to {show_s(row['measured_high_s'])}"
        print(
            f"{row['measure']} p{100 * row['quantile']:<8.0f}{show_s(row['measured_s']):>12}{interval:>22}{show_s(row['simulated_s']):>12}"
            f"{100 * row['off']:>7.1f}%"
        )
    judged = [row for row in rows if row["quantile"] in (0.5, 0.99)]
    within = all(abs(row["off"]) <= WITHIN for row in judged)
    print(f"p50 and p99 of TTFT and TPOT {'are' if within else 'are not'} within {100 * WITHIN:.0f} %")
    if arguments.out:
        facts = {
            "model": name,
            "machine": plan.hardware.name,
            "threads": plan.numerics.threads,
            "compute": plan.numerics.compute,
            "clock": clock,
            "load_averages": loads,
            "seconds": arguments.seconds,
            "rate": arguments.rate,
            "held_out_requests": sum(len(one["ttft"]) for one in real),
            "fitted_steps": model.steps,
            "drift": drift,
            "held_out_error_median": model.error_median,
            "held_out_error_p90": model.error_p90,
            "other_traces_error_median": median,
            "other_traces_error_p90": p90,
            "same_decisions": again.differs_at is None,
            "within_10_percent": within,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")
    if arguments.plot:
        draw(real, simulated, f"{name}, {clock}", arguments.plot)
    return 0 if within else 1


def draw(
    real: Sequence[dict[str, npt.NDArray[np.float64]]], simulated: Sequence[Sequence[Outcome]], title: str, path: Path
) -> None:
    """Both distributions of each measure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(1, len(MEASURES), figsize=(9, 3.6), layout="constrained")
    for axes, measure in zip(places, MEASURES, strict=True):
        for seed in simulated:
            told = np.sort(np.concatenate([getattr(one, f"{measure}_s") for one in seed]))
            told = told[~np.isnan(told)]
            axes.step(1000 * told, np.arange(1, len(told) + 1) / len(told), color="#e4572e", alpha=0.3, lw=0.8)
        truth = np.sort(np.concatenate([one[measure] for one in real]))
        axes.step(1000 * truth, np.arange(1, len(truth) + 1) / len(truth), color="#17324d", lw=1.6, label="measured")
        axes.plot([], [], color="#e4572e", label="simulated, one line a seed")
        axes.set_xscale("log")
        axes.set_xlabel(f"{measure.upper()}, ms")
        axes.set_ylabel("part of the requests")
        axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
