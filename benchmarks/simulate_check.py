"""How close the simulator comes: runs open-loop traces on the CPU engine, fits step times on one, predicts another.

    python benchmarks/simulate_check.py MODEL [--seconds 60] [--rate 2.0] [--cpu-clock] [--out simulate_check.json]

The trace that is fitted to sweeps the rate from a fifth of `--rate` to twice as much, so that steps of every size are seen; one half of it
runs before the other trace and one after, so that a machine that becomes slower or faster meanwhile does not count. The predicted trace has
another seed, other lengths and shared prefixes. Engine and simulation get the same plan and the same arrivals.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from tradewind.assemble import Planned, make_executor, make_ops, make_plan
from tradewind.config.goals import Goals, Means
from tradewind.config.plan import Plan
from tradewind.contract.executor import Executor
from tradewind.contract.request import Request, SamplingParams
from tradewind.contract.step import Step, StepResult
from tradewind.engine.client import LocalClient
from tradewind.engine.loop import Add, EngineLoop
from tradewind.engine.scheduler import Scheduler
from tradewind.phases import Phases
from tradewind.simulate.report import show_s, summarise
from tradewind.simulate.simulator import SimulateOptions, simulate_plan
from tradewind.simulate.steplog import RequestRecord, StepLog, host_time_of, replay
from tradewind.simulate.steptime import StepTime, fit, relative_errors, roofline
from tradewind.simulate.traces import Trace, poisson_trace

SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)
WARM = Request(id="warm", tokens=tuple(range(100, 164)), sampling=SAMPLING, max_tokens=8)
MEASURES = ("ttft", "tpot")
QUANTILES = (0.5, 0.9, 0.99)


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


class CpuClock:
    """Counts the processor time of this thread, so that neighbours on a busy machine do not count; `skip` lets idle time pass."""

    def __init__(self) -> None:
        self._skipped_s = 1.0 - time.thread_time()

    def now(self) -> float:
        return time.thread_time() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += max(0.0, seconds)


class CpuTimed:
    """An executor that works in the caller's thread, with its device time in processor time."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def submit(self, step: Step) -> None:
        self._executor.submit(step)

    def collect(self) -> StepResult:
        began = time.thread_time()
        result = self._executor.collect()
        return msgspec.structs.replace(result, device_s=time.thread_time() - began, host_s=0.0)

    def close(self) -> None:
        self._executor.close()


def live_on_cpu_time(planned: Planned, trace: Trace) -> tuple[StepLog, list[Request]]:
    """The same on the clock of this thread's processor time: one thread does everything, and waiting for arrivals takes no time."""
    plan = planned.plan
    ops, _ = make_ops(plan)
    log = new_log(plan)
    clock = CpuClock()
    executor = log.watching(CpuTimed(make_executor(planned, ops, phases=Phases())))
    scheduler = Scheduler(schedule=plan.schedule, cache=plan.cache, clock=clock.now)
    loop = EngineLoop(scheduler=scheduler, executor=executor, clock=clock.now, sinks=(log,))
    requests = [WARM]
    loop.post(Add(WARM))
    while loop.busy:
        loop.run_once()
    begin_s = clock.now() + 0.2
    due = deque(request_at(trace, index, begin_s + float(trace.arrival_s[index])) for index in range(len(trace)))
    while due or loop.busy:
        if not loop.busy:
            clock.skip(due[0].arrived_s - clock.now())
        while due and due[0].arrived_s <= clock.now():
            requests.append(due.popleft())
            loop.post(Add(requests[-1]))
        loop.run_once()
    loop.close()
    return log, requests


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


def measured(records: list[RequestRecord]) -> dict[str, np.ndarray]:
    """TTFT and TPOT of finished requests in seconds."""
    own = [record for record in records if record.id != "warm" and record.output_tokens > 0]
    return {
        "ttft": np.array([r.first_token_s - r.arrived_s for r in own]),
        "tpot": np.array(
            [(r.finished_s - r.first_token_s) / (r.output_tokens - 1) for r in own if r.output_tokens > 1]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second of the predicted trace")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--overlap", action="store_true", help="two steps in flight")
    parser.add_argument("--cpu-clock", action="store_true", help="count processor time (one thread): for busy machines")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    means = Means(threads=arguments.threads, overlap=arguments.overlap or None)
    run = live
    if arguments.cpu_clock:
        means, run = Means(threads=1, overlap=False), live_on_cpu_time
    planned = make_plan(Goals(model=arguments.model, means=means))
    plan = planned.plan
    print(
        f"{plan.model}: {plan.schedule.steps_in_flight} in flight, {plan.numerics.threads} threads, {plan.numerics.compute}"
    )

    before, requests = run(planned, swept(seconds=arguments.seconds / 2, rate=arguments.rate, seed=arguments.seed))
    second = held_out(seconds=arguments.seconds, rate=arguments.rate, seed=arguments.seed + 1)
    log, _ = run(planned, second)
    after, _ = run(planned, swept(seconds=arguments.seconds / 2, rate=arguments.rate, seed=arguments.seed + 2))

    model: StepTime = fit([*before.steps, *after.steps], prior=roofline(plan), host=host_time_of(before.steps))
    print(model.described())
    print(
        "host:", ", ".join(f"{name} {1e6 * value:.1f} us" for name, value in msgspec.structs.asdict(model.host).items())
    )
    alone = fit(list(before.steps), prior=roofline(plan))
    drift = sum(r.took_s for r in after.steps) / sum(alone.device_s(r.features) for r in after.steps)
    print(f"the machine took {drift:.3f} times as long for the last part as for the first")
    again = replay(
        list(before.steps),
        list(before.requests),
        {r.id: r for r in requests},
        schedule=plan.schedule,
        cache=plan.cache,
    )
    same = "the same" if again.differs_at is None else f"different from step {again.differs_at} on"
    print(f"replayed with the logged times: {len(again.digests)} decisions, {same}")

    real = measured(list(log.requests))
    median, p90 = relative_errors(model, list(log.steps))
    untrusted = sum(not model.trustworthy(record.features) for record in log.steps)
    print(
        f"held-out trace: {len(log.steps)} steps, off by {100 * median:.1f} % in the median, {100 * p90:.1f} % at p90; "
        f"{untrusted} outside what was fitted"
    )
    mean = sum(r.took_s for r in log.steps) / sum(model.device_s(r.features) for r in log.steps)
    print(f"time of all its steps, measured / predicted: {mean:.3f}")
    rows = []
    outcomes = {
        name: simulate_plan(second, plan, times=model, options=SimulateOptions(noise=noise))
        for name, noise in (("noise", True), ("means", False))
    }
    print(f"{'':12}{'measured':>12}{'simulated':>12}{'off':>8}{'no noise':>12}{'off':>8}")
    for measure in MEASURES:
        for quantile in QUANTILES:
            truth = float(np.nanquantile(real[measure], quantile))
            told = {name: float(np.nanquantile(getattr(o, f"{measure}_s"), quantile)) for name, o in outcomes.items()}
            off = {name: value / truth - 1 for name, value in told.items()}
            rows.append({"measure": measure, "quantile": quantile, "measured_s": truth, **told, "off": off})
            print(
                f"{measure} p{100 * quantile:<8.0f}{show_s(truth):>12}{show_s(told['noise']):>12}{100 * off['noise']:>7.1f}%"
                f"{show_s(told['means']):>12}{100 * off['means']:>7.1f}%"
            )
    report = summarise(outcomes["noise"])
    print(f"simulated {report.simulated_requests_per_s:.0f} requests/s")
    if arguments.out:
        facts = {
            "model": plan.model,
            "machine": plan.hardware.name,
            "seconds": arguments.seconds,
            "rate": arguments.rate,
            "fitted_steps": model.steps,
            "drift": drift,
            "held_out_error_median": model.error_median,
            "held_out_error_p90": model.error_p90,
            "other_trace_error_median": median,
            "other_trace_error_p90": p90,
            "same_decisions": again.differs_at is None,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
