"""A trace on a real engine, request by request as they arrive, seen by the same listeners as a simulation.

Knows: how to send made-up prompts of the trace's structure at its times. Refuses to know: what is made of what the engine tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tradewind.assemble import Planned, build_client
from tradewind.config.plan import Plan
from tradewind.contract.events import Sink
from tradewind.contract.request import Request, SamplingParams
from tradewind.observability.strain import Strain
from tradewind.simulate.outcome import Outcome
from tradewind.simulate.simulator import END_TOKEN
from tradewind.simulate.trace_columns import Trace
from tradewind.tune.measured import prompt_of
from tradewind.tune.whatif import Run


def run_live(
    trace: Trace,
    planned: Planned,
    *,
    sinks: Sequence[Sink] = (),
    told: Callable[[int], None] = lambda sent: None,
) -> Run:
    """Runs the trace on this machine's engine in real time and waits until every answer is there; `sinks` listen, too.

    Answers have as many tokens as the trace says. What the engine refuses has no times in the outcome.
    """
    plan = planned.plan
    strain = Strain()
    outcome = Outcome.empty(trace)
    outcome.times = f"measured on {plan.hardware.name}"
    vocabulary = plan.card.vocab_size
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    with build_client(planned, sinks=(strain, *sinks)) as client:
        client.start()
        warm = client.submit(Request(id="warm", tokens=(1,) * 64, sampling=sampling, max_tokens=8))
        warm.result()
        strain.forget()
        began = time.monotonic()
        handles = {}
        for index in range(len(trace)):
            due = began + float(trace.arrival_s[index])
            if int(trace.prompt_tokens[index]) + int(trace.output_tokens[index]) > plan.schedule.max_context:
                outcome.refused[index] = "too long for the plan"
                continue
            request = Request(
                id=str(index),
                tokens=prompt_of(trace, index, vocab_size=vocabulary),
                sampling=sampling,
                max_tokens=int(trace.output_tokens[index]),
                eos_ids=(END_TOKEN,),
                priority=int(trace.priority[index]),
                tenant=trace.tenants[trace.tenant[index]],
                traffic_class=trace.classes[trace.traffic_class[index]],
                arrived_s=due,
            )
            wait = due - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            handles[index] = client.submit(request)
            told(index)
        first: dict[int, float] = {}
        for index, handle in handles.items():
            for event in handle:
                if event.tokens and index not in first:
                    first[index] = event.at_s
                if event.finish is not None and event.finish != "error":
                    outcome.first_s[index] = first.get(index, event.at_s) - began
                    outcome.finish_s[index] = event.at_s - began
                    outcome.generated_tokens[index] = event.generated_tokens
                    outcome.cached_tokens[index] = event.cached_tokens
                elif event.finish == "error":
                    outcome.refused[index] = event.error or "an error"
        outcome.end_s = time.monotonic() - began
    return Run(outcome=outcome, strain=strain.report())


def with_plan(planned: Planned, plan: Plan) -> Planned:
    """The same files under another plan."""
    return replace(planned, plan=plan)
