"""The command `tradewind simulate`: a trace through the production scheduler on a virtual clock.

Knows: words on the command line, and where plan and step times come from. Refuses to know: how anything is simulated (simulate).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tradewind.contract.errors import UserError

if TYPE_CHECKING:
    from tradewind.config.plan import Plan
    from tradewind.simulate.steptime import StepTime

TEXT = "Simulate a trace: the real scheduler, cache and policies on a virtual clock; needs no weights and no GPU."


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the command to the others; `run` is set as its default."""
    made: argparse.ArgumentParser = subparsers.add_parser(
        "simulate", help=TEXT, description=TEXT, usage="%(prog)s [options] TRACE"
    )
    add_plan_and_times(made)
    made.add_argument("--save-times", metavar="FILE", help="write the step-time model that was used")
    made.add_argument("--requests", type=int, metavar="N", help="only the first N requests of the trace")
    made.add_argument("--rate", type=float, default=1.0, metavar="X", help="requests arrive X times as fast")
    made.add_argument("--replicas", type=int, default=1, metavar="N", help="engines behind one router (default 1)")
    made.add_argument(
        "--router",
        choices=["least_load", "prefix_aware", "round_robin"],
        default="prefix_aware",
        help="who gets a request where there are several replicas (default prefix_aware)",
    )
    made.add_argument(
        "--load-bound", type=float, default=1.25, metavar="X", help="prefix_aware: most open requests, by the mean"
    )
    made.add_argument(
        "--drafts", type=int, default=0, metavar="N", help="guesses per row, as a drafter would make them"
    )
    made.add_argument(
        "--acceptance",
        type=float,
        default=0.7,
        metavar="P",
        help="with --drafts: how probable each guess is right (default 0.7)",
    )
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of the noise of step times")
    made.add_argument("--no-noise", action="store_true", help="every step takes exactly what the model says")
    made.add_argument("--json", action="store_true", help="the report as JSON")
    made.add_argument("--out", metavar="FILE", help="write the report as JSON, too")
    made.add_argument("--plot", metavar="FILE", help="draw queue, requests, pages and tokens as PNG")
    made.add_argument("--quiet", action="store_true", help="no progress on standard error")
    made.set_defaults(run=run, parser=made)
    return made


def add_plan_and_times(made: argparse.ArgumentParser) -> None:
    """Arguments of every command that simulates a trace: it, its format, the plan and the step times."""
    made.add_argument(
        "trace",
        metavar="TRACE",
        help="ours (JSON lines), Mooncake's, Azure's, BurstGPT's, or a recorded journal's folder",
    )
    made.add_argument(
        "--plan", metavar="FILE", help="a plan as JSON (tradewind plan --json); without it one is made for --model"
    )
    made.add_argument("--model", metavar="NAME", help="plan for this model on this machine")
    made.add_argument(
        "--times", metavar="FILE", help="step times: a fitted model, or a step log to fit; default: a roofline"
    )
    made.add_argument(
        "--format", choices=["azure", "burstgpt", "mooncake", "tradewind"], help="of the trace; default: as it looks"
    )


def run(arguments: argparse.Namespace) -> int:
    """Simulates and prints the report; 0 when at least one request finished."""
    from tradewind.simulate.report import draw, report_text, summarise
    from tradewind.simulate.simulator import SimulateOptions, simulate_plan
    from tradewind.simulate.traces import read_trace

    if arguments.rate <= 0:
        raise UserError(f"--rate is {arguments.rate:g}; give a number over 0")
    if arguments.requests is not None and arguments.requests < 1:
        raise UserError(f"--requests is {arguments.requests}; give at least 1")
    if arguments.drafts < 0 or not 0 <= arguments.acceptance <= 1:
        raise UserError(
            f"--drafts is {arguments.drafts} and --acceptance {arguments.acceptance:g}; give 0 or more, and a probability"
        )
    trace = read_trace(Path(arguments.trace), kind=arguments.format, limit=arguments.requests)
    plan = plan_of(arguments)
    times = times_of(arguments, plan)
    if arguments.save_times:
        times.save(Path(arguments.save_times))
    options = SimulateOptions(
        replicas=arguments.replicas,
        router=arguments.router,
        noise=not arguments.no_noise,
        seed=arguments.seed,
        load_bound=arguments.load_bound,
        drafts_per_row=arguments.drafts,
        acceptance=arguments.acceptance,
    )
    shown = None if arguments.quiet or not sys.stderr.isatty() else _Progress(len(trace))
    try:
        outcome = simulate_plan(trace.speed_up(arguments.rate), plan, times=times, options=options, progress=shown)
    finally:
        if shown is not None:
            shown.clear()
    report = summarise(outcome)
    if arguments.out:
        Path(arguments.out).write_bytes(report.json() + b"\n")
    if arguments.plot:
        draw(report, Path(arguments.plot))
    if arguments.json:
        print(report.json().decode())
    else:
        from rich.console import Console

        console = Console()
        with console.capture() as captured:
            console.print(report_text(report))
        print(captured.get(), end="")
    return 0 if report.finished else 1


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan of --plan, or one made for --model on this machine."""
    import msgspec

    from tradewind.config.plan import Plan

    if arguments.plan is None:
        from tradewind.assemble import make_plan
        from tradewind.config.goals import Goals

        return make_plan(Goals(model=arguments.model or "smollm2")).plan
    if arguments.model is not None:
        raise UserError("--plan and --model are given; a plan already names its model, leave one out")
    try:
        return msgspec.json.decode(Path(arguments.plan).read_bytes(), type=Plan)
    except OSError as error:
        raise UserError(f"the plan {arguments.plan} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{arguments.plan} is no plan as 'tradewind plan --json' prints it: {error}") from None


def times_of(arguments: argparse.Namespace, plan: Plan) -> StepTime:
    """The step times of --times, fitted where it is a step log; without it the plan's roofline."""
    from tradewind.simulate.steplog import host_time_of, read_step_log
    from tradewind.simulate.steptime import StepTime, fit, roofline

    if arguments.times is None:
        return roofline(plan)
    path = Path(arguments.times)
    try:
        with path.open("rb") as file:
            first = file.readline()
    except OSError as error:
        raise UserError(f"the step times {path} cannot be read: {error.strerror}") from None
    if b'"kind":"head"' not in first.replace(b" ", b""):
        return StepTime.load(path)
    steps = read_step_log(path).steps
    return fit(steps, prior=roofline(plan), host=host_time_of(steps))


class _Progress:
    """How many requests were sent, on one line of standard error."""

    def __init__(self, total: int) -> None:
        self._total = total

    def __call__(self, done: int) -> None:
        print(f"\rsimulating {done} of {self._total} requests ", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Takes the line away."""
        print("\r\033[K", end="", file=sys.stderr, flush=True)
