"""`tradewind plan GOALS.toml`: the plan for a file of goals, with every choice, what was rejected for it, and its predicted price.

Knows: words on the command line and how a price is shown. Refuses to know: how plans are chosen (resolve, choosing) and simulated.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tradewind.contract.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tradewind.config.goals import Goals
    from tradewind.config.plan import Plan
    from tradewind.simulate.choosing import Chosen
    from tradewind.simulate.forecast import Price
    from tradewind.simulate.steptime import StepTime
    from tradewind.simulate.trace_columns import Trace

REQUESTS = 300
"""So many requests of a trace are simulated unless more are asked for: a plan in seconds."""


def is_goals_file(name: str | None) -> bool:
    """Whether what stands where a model is expected is a file of goals."""
    return name is not None and name.endswith(".toml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `plan` understands besides, when it is given a file of goals."""
    group = parser.add_argument_group("a file of goals (tradewind plan GOALS.toml)")
    group.add_argument(
        "--trace", metavar="FILE", help="plan for this traffic; default: made up from the classes' shares"
    )
    group.add_argument("--times", metavar="FILE", help="step times: a fitted model, or a step log; default: a roofline")
    group.add_argument(
        "--requests", type=int, default=REQUESTS, metavar="N", help="requests to simulate (default %(default)s)"
    )
    group.add_argument("--rate", type=float, default=1.0, metavar="X", help="requests arrive X times as fast")
    group.add_argument("--no-search", action="store_true", help="only the price of the plan, no alternatives")
    group.add_argument("--out", metavar="FILE", help="write the price as JSON")


def run(arguments: argparse.Namespace, path: Path) -> int:
    """Plans and prints; 0 when the plan serves at least one request of the trace."""
    from tradewind.assemble import make_plan, missing_backends
    from tradewind.config.goals_file import read_goals
    from tradewind.config.resolve import resolve

    if arguments.requests < 1:
        raise UserError(f"--requests is {arguments.requests}; give at least 1")
    if not arguments.rate > 0:
        raise UserError(f"--rate is {arguments.rate:g}; give a number over 0")
    goals = read_goals(path)
    first = make_plan(goals).plan
    missing = missing_backends()
    shown = sys.stderr.isatty() and not arguments.json
    try:
        chosen = chosen_plan(
            goals,
            trace=trace_for(arguments, goals),
            make=lambda asked: resolve(asked, first.card, first.hardware, missing=missing),
            times=Path(arguments.times) if arguments.times else None,
            search=not arguments.no_search,
            progress=_tell if shown else None,
        )
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    if arguments.out:
        import msgspec

        Path(arguments.out).write_bytes(msgspec.json.format(msgspec.json.encode(chosen.price), indent=2) + b"\n")
    if arguments.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(chosen.plan), indent=2).decode())
    else:
        from rich.console import Console, Group
        from rich.text import Text

        from tradewind.plan_view import plan_text

        console = Console()
        with console.capture() as captured:
            console.print(Group(plan_text(chosen.plan), Text(), price_text(chosen, goals)))
        print(captured.get(), end="")
    return 0 if chosen.price.finished else 1


def trace_for(arguments: argparse.Namespace, goals: Goals) -> Trace:
    """The traffic to plan for."""
    from tradewind.simulate.forecast import trace_of
    from tradewind.simulate.traces import read_trace

    if arguments.trace:
        trace = read_trace(Path(arguments.trace), limit=arguments.requests)
    else:
        trace = trace_of(goals, requests=arguments.requests)
    return trace.speed_up(arguments.rate)


def chosen_plan(
    goals: Goals,
    *,
    trace: Trace,
    make: Callable[[Goals], Plan],
    times: Path | None = None,
    search: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Chosen:
    """The best plan for the traffic, by the step times of a file or each plan's own roofline."""
    from tradewind.simulate.choosing import choose

    return choose(goals, trace=trace, make=make, times_of=_times(times), search=search, progress=progress)


def _times(path: Path | None) -> Callable[[Plan], StepTime]:
    from tradewind.simulate.forecast import planned_times
    from tradewind.simulate.steplog import host_time_of, read_step_log
    from tradewind.simulate.steptime import StepTime, fit

    if path is None:
        return planned_times
    try:
        with path.open("rb") as file:
            first = file.readline()
    except OSError as error:
        raise UserError(f"the step times {path} cannot be read: {error.strerror}") from None
    if b'"kind":"head"' not in first.replace(b" ", b""):
        model = StepTime.load(path)
        return lambda plan: model
    steps = read_step_log(path).steps
    return lambda plan: fit(steps, prior=planned_times(plan), host=host_time_of(steps))


def _tell(what: str) -> None:
    print(f"\r\033[Ksimulating {what} ", end="", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------------- terminal


def price_text(chosen: Chosen, goals: Goals) -> RenderableType:
    """The price in the four goals, and what it was simulated with; nothing is printed here."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from tradewind.config.sizes import show_bytes

    price = chosen.price
    table = Table(title="Predicted price", title_justify="left")
    table.add_column("goal", no_wrap=True)
    table.add_column("price", overflow="fold")
    for line in latency_lines(price, goals):
        table.add_row(Text("latency"), Text(line))
    finished = "" if price.finished == price.requests else f"; {price.requests - price.finished} are not answered"
    table.add_row(
        Text("throughput"),
        Text(
            f"{price.output_tokens_per_s:.0f} output tokens/s, {price.requests} requests in {price.makespan_s:.1f} s{finished}"
        ),
    )
    table.add_row(Text("memory"), Text(f"{show_bytes(price.memory_bytes)} at most"))
    loss = price.quality_loss_percent
    table.add_row(
        Text("quality"),
        Text(f"about {loss:g} % of perplexity" if loss else "lossless: the answers of the file's weights"),
    )
    notes = [f"{price.step_times[0].upper()}{price.step_times[1:]}."]
    if price.untrusted_steps > 0.01:
        part = f"{100 * price.untrusted_steps:.0f} %"
        notes.append(f"{part} of the steps lie outside what was measured: record a step log and give it as --times.")
    notes.append(f"{chosen.tried} {'plan' if chosen.tried == 1 else 'plans'} simulated.")
    return Group(table, Text(), *(Text(note) for note in notes))


def latency_lines(price: Price, goals: Goals) -> list[str]:
    """One line for all requests, then one for each class with its targets."""
    from tradewind.simulate.report import show_s

    spreads = (("TTFT", price.ttft_s), ("TPOT", price.tpot_s), ("e2e", price.e2e_s))
    every = ", ".join(f"{name} {show_s(spread.p50)} / {show_s(spread.p99)}" for name, spread in spreads)
    lines = [f"all: {every} (p50 / p99)"]
    for one in price.classes:
        parts = []
        for metric in one.metrics:
            if metric.target_s is not None:
                met = f"{100 * metric.attained.share:.0f} %" if metric.attained is not None else "none"
                parts.append(f"{metric.metric.upper()} p99 {show_s(metric.p99_s)} of {show_s(metric.target_s)} ({met})")
        share = one.attained
        if share is not None:
            parts.insert(
                0, f"{100 * share.share:.0f} % meet all targets ({100 * share.low:.0f} to {100 * share.high:.0f} %)"
            )
        name = one.traffic_class or "(no class)"
        e2e = next(metric for metric in one.metrics if metric.metric == "e2e")
        lines.append(
            f"{name}: " + (", ".join(parts) if parts else f"no target; e2e {show_s(e2e.p50_s)} / {show_s(e2e.p99_s)}")
        )
    return lines
