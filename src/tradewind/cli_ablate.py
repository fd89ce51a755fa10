"""The command `tradewind ablate`: what each technique brings on a user's own trace.

Knows: words on the command line. Refuses to know: how anything is attributed (tune.ablate) or measured (tune.measured).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tradewind.contract.errors import UserError

if TYPE_CHECKING:
    from tradewind.config.goals import Goals

TEXT = "What each technique brings to TTFT, TPOT, throughput and memory on a trace of your own: simulated, and measured if asked."


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the command to the others; `run` is set as its default."""
    from tradewind.cli_simulate import add_plan_and_times

    made: argparse.ArgumentParser = subparsers.add_parser(
        "ablate", help=TEXT, description=TEXT, usage="%(prog)s [options] TRACE"
    )
    add_plan_and_times(made)
    made.add_argument("--requests", type=int, default=200, metavar="N", help="the first N of the trace (default 200)")
    made.add_argument("--rate", type=float, default=1.0, metavar="X", help="requests arrive X times as fast")
    made.add_argument(
        "--at", choices=["mean", "p50", "p90", "p99"], default="p90", help="of TTFT and TPOT (default p90)"
    )
    made.add_argument(
        "--shapley",
        metavar="NAMES",
        help="share the whole out among these, comma-separated; default: the few that matter most; none: nothing is",
    )
    made.add_argument(
        "--stretches",
        type=int,
        default=4,
        metavar="N",
        help="parts of the trace for the intervals (default 4; 1: none)",
    )
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of the noise of step times")
    made.add_argument(
        "--measure", action="store_true", help="run the engine, too: one start for each technique and round"
    )
    made.add_argument(
        "--measure-requests", type=int, default=16, metavar="N", help="the first N requests, at once (default 16)"
    )
    made.add_argument("--measure-only", metavar="NAMES", help="measure only these techniques, comma-separated")
    made.add_argument("--rounds", type=int, default=3, metavar="N", help="measured rounds (default 3)")
    made.add_argument("--no-simulate", action="store_true", help="only what is measured")
    made.add_argument("--json", action="store_true", help="the attributions as JSON")
    made.add_argument("--out", metavar="FILE", help="write them as JSON, too")
    made.add_argument("--quiet", action="store_true", help="no progress on standard error")
    made.set_defaults(run=run, parser=made)
    return made


def run(arguments: argparse.Namespace) -> int:
    """Attributes and prints; 0."""
    import msgspec

    from tradewind.cli_simulate import plan_of, times_of
    from tradewind.simulate.traces import read_trace
    from tradewind.tune.ablate import Ablation, ablate
    from tradewind.tune.ablate_view import ablation_text

    for name in ("requests", "stretches", "measure_requests", "rounds"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} is {getattr(arguments, name)}; give at least 1")
    if not arguments.rate > 0:
        raise UserError(f"--rate is {arguments.rate:g}; give a number over 0")
    if arguments.no_simulate and not arguments.measure:
        raise UserError("--no-simulate leaves nothing to do; give --measure with it")
    trace = read_trace(Path(arguments.trace), kind=arguments.format, limit=arguments.requests)
    plan = plan_of(arguments)
    told = _Told(arguments.quiet)
    shared = names(arguments.shapley)
    found: list[Ablation] = []
    try:
        if not arguments.no_simulate:
            found.append(
                ablate(
                    trace.speed_up(arguments.rate),
                    plan,
                    times=times_of(arguments, plan),
                    at=arguments.at,
                    shared=shared,
                    stretches=arguments.stretches,
                    seed=arguments.seed,
                    told=told,
                )
            )
        if arguments.measure:
            from tradewind.tune.measured import ablate_measured

            found.append(
                ablate_measured(
                    trace.part(0, arguments.measure_requests),
                    plan,
                    open_engine=_open_engine,
                    rounds=arguments.rounds,
                    at=arguments.at,
                    techniques=names(arguments.measure_only),
                    told=told,
                )
            )
    finally:
        told.clear()
    text = msgspec.json.format(msgspec.json.encode(found), indent=2)
    if arguments.out:
        Path(arguments.out).write_bytes(text + b"\n")
    if arguments.json:
        print(text.decode())
    else:
        from rich.console import Console

        console = Console()
        with console.capture() as captured:
            console.print(ablation_text(found))
        print(captured.get(), end="")
    return 0


def names(text: str | None) -> list[str] | None:
    """Comma-separated names; none for "none", None where nothing was said."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]


def _open_engine(goals: Goals) -> Any:
    from tradewind.llm import LLM

    return LLM(goals=goals)


class _Told:
    """What is being done, on one line of standard error, on a terminal only."""

    def __init__(self, quiet: bool) -> None:
        self._shown = not quiet and sys.stderr.isatty()

    def __call__(self, what: str) -> None:
        if self._shown:
            print(f"\r\033[K{what[:100]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Takes the line away."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
