"""The command `tradewind whatif`: attainment and the first thing to break under other traffic, or on another engine.

Knows: words on the command line and how an answer is shown. Refuses to know: how it is found (tune.whatif, tune.live).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tradewind.contract.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tradewind.tune.whatif import Side, WhatIf

TEXT = "What if traffic grew or the engine were another one: attainment, what breaks first and how far it is until then; simulated."


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the command to the others; `run` is set as its default."""
    from tradewind.cli_simulate import add_plan_and_times

    made: argparse.ArgumentParser = subparsers.add_parser(
        "whatif", help=TEXT, description=TEXT, usage="%(prog)s [options] TRACE"
    )
    add_plan_and_times(made)
    what = made.add_argument_group("what if (factors: x2, 1.3, +20%%, -10%%)")
    what.add_argument("--rate", default="x1", metavar="F", help="requests come so many times as often")
    what.add_argument("--prompt", default="x1", metavar="F", help="prompts are so many times as long")
    what.add_argument("--output", default="x1", metavar="F", help="answers are so many times as long")
    what.add_argument("--replicas", "--gpus", dest="replicas", metavar="N", help="engines: 4, or a change: +1, -1, x2")
    what.add_argument("--memory", metavar="SIZE", help="ceiling of one engine, e.g. 2GiB")
    made.add_argument("--now-replicas", type=int, default=1, metavar="N", help="engines there are now (default 1)")
    made.add_argument(
        "--router",
        choices=["least_load", "prefix_aware", "round_robin"],
        default="prefix_aware",
        help="default %(default)s",
    )
    made.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="TARGET",
        help="ttft=500ms,tpot=50ms, or CLASS:ttft=...; default: the plan's, or what today's p99 is",
    )
    made.add_argument(
        "--enough",
        type=float,
        default=0.9,
        metavar="P",
        help="part of requests that must meet its targets (default 0.9)",
    )
    made.add_argument("--requests", type=int, metavar="N", help="only the first N requests of the trace")
    made.add_argument("--no-headroom", action="store_true", help="do not look for where it breaks")
    made.add_argument("--measure", action="store_true", help="run the changed traffic on this machine's engine, too")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of the noise of step times")
    made.add_argument("--json", action="store_true", help="the answer as JSON")
    made.add_argument("--quiet", action="store_true", help="no progress on standard error")
    made.set_defaults(run=run, parser=made)
    return made


def run(arguments: argparse.Namespace) -> int:
    """Answers; 0 when the changed engine holds, 1 when it breaks."""
    import msgspec

    from tradewind.cli_simulate import plan_of, times_of
    from tradewind.config.sizes import parse_bytes
    from tradewind.observability.attainment import parse_targets
    from tradewind.simulate.simulator import SimulateOptions
    from tradewind.simulate.traces import read_trace
    from tradewind.tune.whatif import Change, count, factor, whatif

    if not 0 < arguments.enough <= 1:
        raise UserError(f"--enough is {arguments.enough:g}; give a part over 0 and at most 1")
    if arguments.requests is not None and arguments.requests < 1:
        raise UserError(f"--requests is {arguments.requests}; give at least 1")
    now = arguments.now_replicas
    if now < 1:
        raise UserError(f"--now-replicas is {now}; give at least 1")
    change = Change(
        rate=factor(arguments.rate, name="--rate"),
        prompt=factor(arguments.prompt, name="--prompt"),
        output=factor(arguments.output, name="--output"),
        replicas=None if arguments.replicas is None else count(arguments.replicas, name="--replicas", now=now),
        memory_bytes=None if arguments.memory is None else parse_bytes(arguments.memory),
    )
    targets = parse_targets(arguments.target)
    trace = read_trace(Path(arguments.trace), kind=arguments.format, limit=arguments.requests)
    plan = plan_of(arguments)
    shown = not arguments.quiet and sys.stderr.isatty()

    def told(what: str) -> None:
        if shown:
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)

    try:
        answer = whatif(
            trace,
            plan,
            change,
            times=times_of(arguments, plan),
            options=SimulateOptions(replicas=now, router=arguments.router, seed=arguments.seed),
            targets=targets,
            enough=arguments.enough,
            headroom=not arguments.no_headroom,
            told=told,
        )
        measured = _measured(arguments, trace, change, answer, told) if arguments.measure else None
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    if arguments.json:
        both = {"simulated": answer, "measured": measured}
        print(msgspec.json.format(msgspec.json.encode(both), indent=2).decode())
    else:
        from rich.console import Console

        console = Console()
        with console.capture() as captured:
            console.print(answer_text(answer, measured=measured))
        print(captured.get(), end="")
    return 0 if answer.then.holds else 1


def _measured(arguments: argparse.Namespace, trace: Any, change: Any, answer: WhatIf, told: Any) -> Side:
    """The changed traffic on an engine of this machine. Raises UserError where the change is about other machines."""
    from tradewind.assemble import make_plan
    from tradewind.tune.live import run_live, with_plan
    from tradewind.tune.measured import goals_of
    from tradewind.tune.whatif import changed_trace, judged, with_memory

    if change.replicas not in (None, 1) or arguments.now_replicas != 1:
        raise UserError("--measure runs one engine on this machine; leave --replicas out")
    from tradewind.cli_simulate import plan_of

    plan = with_memory(plan_of(arguments), change.memory_bytes)
    planned = make_plan(goals_of(plan))
    wanted = changed_trace(trace, change)
    told(f"running {len(wanted)} requests, about {wanted.duration_s:.0f} s")
    return judged(run_live(wanted, with_plan(planned, plan)), plan, targets=answer.targets, enough=arguments.enough)


# ------------------------------------------------------------------------------------------------------------- terminal


def answer_text(answer: WhatIf, *, measured: Side | None = None) -> RenderableType:
    """The answer for a terminal; nothing is printed here."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from tradewind.simulate.report import show_s
    from tradewind.tune.whatif import targets_text

    table = Table()
    table.add_column("")
    sides = [("today", answer.today), ("then", answer.then)]
    if measured is not None:
        sides.append(("then, measured", measured))
    for name, _ in sides:
        table.add_column(name, justify="right")

    def row(name: str, cells: list[str]) -> None:
        table.add_row(name, *cells)

    row("engines", [str(side.replicas) for _, side in sides])
    row("pages each", [" + ".join(str(pages) for pages in side.pages) for _, side in sides])
    row("meet their targets", [_share(side.attained) for _, side in sides])
    for name in sorted({one.traffic_class for _, side in sides for one in side.classes if one.traffic_class}):
        cells = []
        for _, side in sides:
            own = next((one.attained for one in side.classes if one.traffic_class == name), None)
            cells.append("-" if own is None else _share(own))
        row(f"  {name}", cells)
    row("TTFT p50, p99", [f"{show_s(side.ttft_p50_s)}, {show_s(side.ttft_p99_s)}" for _, side in sides])
    row("TPOT p50, p99", [f"{show_s(side.tpot_p50_s)}, {show_s(side.tpot_p99_s)}" for _, side in sides])
    row("output tokens/s", [f"{side.output_tokens_per_s:.0f}" for _, side in sides])
    if any(side.refused for _, side in sides):
        row("refused", [str(side.refused) for _, side in sides])
    for name in ("slots", "pages", "step budget"):
        row(f"waits for {name}", [f"{100 * side.strain.share(name):.0f} % of the time" for _, side in sides])
    row("device without a step", [f"{100 * side.strain.host_share:.0f} % of work" for _, side in sides])
    row("short of", [side.binding if not side.holds else f"({side.binding})" for _, side in sides])
    notes = [
        f"Targets ({answer.targets_are}): {'; '.join(targets_text(answer.targets, show_s))}.",
        f"{answer.step_times[0].upper()}{answer.step_times[1:]}.",
    ]
    if answer.untrusted_steps > 0.01 and "roofline" not in answer.step_times:
        notes.append(
            f"{100 * answer.untrusted_steps:.0f} % of the steps lie outside what the step times were fitted to."
        )
    return Group(Text(verdict(answer), style="bold"), table, *(Text(note) for note in notes))


def verdict(answer: WhatIf) -> str:
    """One or two sentences."""
    then, room = answer.then, answer.headroom
    share = f"{100 * then.attained.share:.1f} % of the requests meet their targets"
    said = f"It holds: {share}." if then.holds else f"It breaks: {share}; short of {then.binding}."
    if room is None:
        return said
    if room.breaks_at is None:
        return f"{said} Nothing breaks up to {room.holds_at:g} times that traffic."
    if room.holds_at is None:
        return f"{said} It does not hold at {room.breaks_at:.3g} times that traffic either."
    if then.holds:
        return f"{said} First to break is {room.breaks}, at {room.breaks_at:.2f} times that traffic."
    return f"{said} It would hold at {room.holds_at:.2f} times that traffic; first to break is {room.breaks}."


def _share(share: Any) -> str:
    return f"{100 * share.share:.1f} % ({100 * share.low:.0f} to {100 * share.high:.0f})"
