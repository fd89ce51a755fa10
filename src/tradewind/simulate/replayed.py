"""A journal's traffic under a plan: simulated, and told in the words of a replay against a server.

Knows: which rows of the simulated trace belong to which recorded request. Refuses to know: where the plan and the step times come from.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tradewind.config.plan import Plan
from tradewind.observability.journal import Entry, Journal
from tradewind.observability.replay import Outcome, class_of
from tradewind.simulate import outcome as simulated
from tradewind.simulate.simulator import SimulateOptions, simulate_plan
from tradewind.simulate.steptime import StepTime
from tradewind.simulate.traces import journal_trace


def replay_on_plan(
    journal: Journal, plan: Plan, *, times: StepTime, speed: float = 1.0, progress: Callable[[int], None] | None = None
) -> tuple[list[Entry], list[Outcome], tuple[str, ...]]:
    """The journal's requests that had an answer, what becomes of each under the plan, and what was left out or is not sure.

    A request of several samples or prompts ends with the last of them; its first token is the earliest. Times are the engine's: no socket
    and no tokenizer takes part. Raises UserError for a journal without an answer.
    """
    entries = [entry for entry in journal.entries if any(one.output_tokens > 0 for one in entry.sequences)]
    trace = journal_trace(journal, name="journal").speed_up(speed)
    out = simulate_plan(trace, plan, times=times, options=SimulateOptions(noise=False), progress=progress)
    outcomes, row = [], 0
    for entry in entries:
        rows = sum(one.output_tokens > 0 for one in entry.sequences)
        outcomes.append(_outcome(entry, out, slice(row, row + rows)))
        row += rows
    assert row == len(trace), (row, len(trace))
    notes = [*trace.notes, f"Simulated: times are the engine's alone, from {out.times}"]
    if out.untrusted_steps:
        notes.append(
            f"{out.untrusted_steps} of {out.steps} steps are outside what the step times are fit for: {out.untrusted}"
        )
    return entries, outcomes, tuple(notes)


def _outcome(entry: Entry, out: simulated.Outcome, rows: slice) -> Outcome:
    arrival_s = float(out.trace.arrival_s[rows][0])
    indices = range(rows.start, rows.stop)
    error = next((out.refused[index] for index in indices if index in out.refused), None)
    generated = out.generated_tokens[rows]
    if error is None and bool(np.isnan(out.finish_s[rows]).any()):
        error = "never finished"
    tpot = out.tpot_s[rows]
    return Outcome(
        id=entry.id,
        traffic_class=class_of(entry),
        at_s=arrival_s,
        late_s=0.0,
        prompt_tokens=int(out.trace.prompt_tokens[rows].sum()),
        output_tokens=int(generated.sum()),
        cached_tokens=int(out.cached_tokens[rows].sum()),
        queue_s=_least(out.scheduled_s[rows] - arrival_s),
        ttft_s=_least(out.first_s[rows] - arrival_s),
        tpot_s=None if bool(np.isnan(tpot).all()) else float(np.nanmean(tpot)),
        e2e_s=max(0.0, float(np.nanmax(out.finish_s[rows]) - arrival_s)) if error is None else out.end_s - arrival_s,
        error=error,
    )


def _least(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float | None:
    return None if bool(np.isnan(values).all()) else float(np.nanmin(values))
