"""`tradewind replay`: a recorded journal once more, against a server or simulated under a plan, and a report of how that went beside how it
went then.

Knows: its words on the command line, and where the report is written. Refuses to know: how a replay is done (observability.replay,
simulate.replayed).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tradewind.contract.errors import UserError

if TYPE_CHECKING:
    from tradewind.config.plan import Plan
    from tradewind.observability.attainment import Targets
    from tradewind.observability.journal import Entry, Journal
    from tradewind.observability.replay import Outcome

MAX_SPEED = 1000.0


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the command to those of argparse's `subparsers`; its `run` is set."""
    text = "Send a journal's traffic once more, with its timing and its common prefixes, and report the attainment."
    made: argparse.ArgumentParser = subparsers.add_parser("replay", help=text, description=text)
    made.add_argument("journal", metavar="DIR", help="folder of tradewind serve --record, or one file of it")
    made.add_argument(
        "--against",
        metavar="URL|PLAN",
        help="a server, for example http://127.0.0.1:8000; or simulate it: a file of goals (.toml) or a plan (tradewind plan --json)",
    )
    made.add_argument(
        "--times", metavar="FILE", help="with a plan: step times, fitted or a step log; default: a roofline"
    )
    made.add_argument("--speed", type=float, default=1.0, metavar="X", help="times as fast as it came (default 1)")
    made.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    made.add_argument("--model", metavar="NAME", help="what the server calls its model (default: its own choice)")
    made.add_argument("--api-key", metavar="KEY", help="of the server")
    made.add_argument(
        "--target",
        action="append",
        default=[],
        metavar="TARGETS",
        help="ttft=500ms,tpot=50ms,e2e=10s for all, chat:ttft=0.2s for one class; repeatable",
    )
    made.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one answer (default 600)")
    made.add_argument("--out", metavar="FILE", help="write the report as HTML, and as JSON beside it")
    made.add_argument("--trace", metavar="FILE", help="write the journal as a trace for tradewind simulate")
    made.set_defaults(run=run, parser=made)
    return made


def run(arguments: argparse.Namespace) -> int:
    """Replays, prints a short report and writes the long ones; the exit code. Raises UserError."""
    import asyncio

    from tradewind.observability.attainment import parse_targets
    from tradewind.observability.journal import read_journal

    if not 0 < arguments.speed <= MAX_SPEED:
        raise UserError(f"--speed is {arguments.speed:g}; it must be over 0 and at most {MAX_SPEED:g}")
    if arguments.limit is not None and arguments.limit < 1:
        raise UserError(f"--limit is {arguments.limit}; it must be at least 1")
    if not arguments.timeout > 0:
        raise UserError(f"--timeout is {arguments.timeout:g}; it must be over 0")
    if arguments.against is None and arguments.trace is None:
        raise UserError(
            "say what to do with the journal: --against URL sends it to a server, --against PLAN simulates it, --trace FILE writes a trace"
        )
    simulated = arguments.against is not None and _is_plan(arguments.against)
    if arguments.times is not None and not simulated:
        raise UserError("--times is for a simulation; name a plan (.json) or a file of goals (.toml) with --against")
    if simulated and (arguments.model is not None or arguments.api_key is not None):
        raise UserError("--model and --api-key are for a server; a plan names its model, leave them out")
    targets: Targets = parse_targets(arguments.target)
    journal = read_journal(Path(arguments.journal), limit=arguments.limit)
    if not journal.entries:
        raise UserError(f"the journal in {arguments.journal} has no request that ended")
    if arguments.trace is not None:
        _write(Path(arguments.trace), trace_lines(journal))
        print(f"trace: {arguments.trace}, {len(journal.entries)} requests")
    if arguments.against is None:
        return 0
    if simulated:
        entries, outcomes, notes, targets = _simulated(arguments, journal, targets)
    else:
        from tradewind.observability.replay import Replayer, plan

        replayer = Replayer(
            journal.header, arguments.against, model=arguments.model, key=arguments.api_key, timeout_s=arguments.timeout
        )
        planned = plan(journal.entries, speed=arguments.speed)
        entries, notes = list(journal.entries), journal.notes
        outcomes = asyncio.run(replayer.run(planned, told=_progress(len(planned))))
    return _report(arguments, journal, entries, outcomes, targets=targets, notes=notes)


def _is_plan(against: str) -> bool:
    return against.endswith((".toml", ".json")) and "://" not in against


def _simulated(
    arguments: argparse.Namespace, journal: Journal, targets: Targets
) -> tuple[list[Entry], list[Outcome], tuple[str, ...], Targets]:
    """The journal under a plan, on a virtual clock; targets are the plan's where none were given."""
    from tradewind.cli_simulate import times_of
    from tradewind.simulate.replayed import replay_on_plan
    from tradewind.tune.whatif import targets_of

    plan = _plan_of(arguments.against)
    progress = _progress(sum(len(entry.sequences) for entry in journal.entries))
    entries, outcomes, notes = replay_on_plan(
        journal, plan, times=times_of(arguments, plan), speed=arguments.speed, progress=progress
    )
    return entries, outcomes, notes, targets or targets_of(plan)


def _plan_of(name: str) -> Plan:
    """The plan of a file: one as `tradewind plan --json` prints it, or one that is made for a file of goals."""
    if name.endswith(".json"):
        from tradewind.cli_simulate import plan_of

        return plan_of(argparse.Namespace(plan=name, model=None))
    from tradewind.assemble import make_plan
    from tradewind.config.goals_file import read_goals

    return make_plan(read_goals(Path(name))).plan


def _report(
    arguments: argparse.Namespace,
    journal: Journal,
    entries: Sequence[Entry],
    outcomes: Sequence[Outcome],
    *,
    targets: Targets,
    notes: Sequence[str],
) -> int:
    """Prints the short report and writes the long ones; 1 when something failed."""
    from tradewind.observability.replay_report import make_report, to_html, to_json, to_text

    report = make_report(
        journal.header,
        entries,
        outcomes,
        source=Path(arguments.journal).name or arguments.journal,
        target=arguments.against,
        speed=arguments.speed,
        targets=targets,
        notes=notes,
    )
    print(to_text(report))
    if arguments.out is not None:
        page = Path(arguments.out)
        if page.suffix == ".json":
            raise UserError("--out names the HTML file; the JSON is written beside it under the same name")
        _write(page, to_html(report, entries, outcomes).encode())
        _write(page.with_suffix(".json"), to_json(report))
        print(f"report: {page}, {page.with_suffix('.json')}")
    return 0 if not any(outcome.error for outcome in outcomes) else 1


def _progress(count: int) -> Callable[[int], None] | None:
    """A line that counts, on a terminal only."""
    if not sys.stderr.isatty():
        return None

    def told(done: int) -> None:
        print(f"\r{done} of {count} requests", end="\n" if done == count else "", file=sys.stderr, flush=True)

    return told


def trace_lines(journal: Journal) -> bytes:
    """The journal as a trace file of the simulator's own format: a header, and a line for each sequence."""
    from msgspec import json

    from tradewind.observability.replay import class_of
    from tradewind.simulate.traces import FORMAT_VERSION, TraceHead, TraceLine

    size = journal.header.block_tokens
    lines = [json.encode(TraceHead(format="tradewind-trace", version=FORMAT_VERSION, block_tokens=size))]
    first = journal.entries[0].at
    numbers: dict[int, int] = {}
    for entry in journal.entries:
        for sequence in entry.sequences:
            if entry.kind == "embedding":
                continue
            whole = sequence.blocks[: sequence.prompt_tokens // size]
            line = TraceLine(
                arrival_s=round(entry.at - first, 6),
                prompt_tokens=sequence.prompt_tokens,
                output_tokens=max(1, sequence.output_tokens),
                max_tokens=max(sequence.max_tokens, sequence.output_tokens, 1),
                blocks=tuple(numbers.setdefault(block, len(numbers)) for block in whole),
                tenant=entry.tenant,
                priority=entry.priority,
                traffic_class=class_of(entry),
            )
            lines.append(json.encode(line))
    return b"\n".join(lines) + b"\n"


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
