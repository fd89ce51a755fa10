"""`tradewind baseline record|check`: keep a measurement, and later say whether a new one is worse by more than noise.

Knows: its words on the command line, files, exit codes. Refuses to know: how it is compared (bench.baseline) and measured (bench.serve_*).

      exit code 0: nothing is worse    1: something is worse    2: a mistake of the command line    3: too noisy to say
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tradewind import __version__
from tradewind.cli_bench_serve import LOAD, add_load, measure
from tradewind.contract.errors import UserError

if TYPE_CHECKING:
    from tradewind.bench.baseline import Baseline, Compared, Series

REPEATS = 5
WORSE, UNSURE = 1, 3


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the command to those of argparse's `subparsers`; `run` is set in both of its own."""
    text = "Keep a measurement, and say later whether a new one is worse by more than noise."
    made: argparse.ArgumentParser = subparsers.add_parser("baseline", help=text, description=text)
    kinds = made.add_subparsers(dest="what", required=True, metavar="{record,check}")
    record = kinds.add_parser("record", help="measure a server, or take reports, and keep that")
    check = kinds.add_parser("check", help="measure again as it was recorded, and compare")
    for one in (record, check):
        one.add_argument("file", metavar="FILE", help="the baseline, as JSON")
        one.add_argument("url", nargs="?", metavar="URL", help="measure this server now")
        one.add_argument(
            "--from", dest="reports", nargs="+", metavar="REPORT", help="instead: reports of tradewind bench, as JSON"
        )
        one.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help="runs (default %(default)s)")
    add_load(record)
    record.set_defaults(run=run_record, parser=record)
    check.add_argument("--api-key", metavar="KEY", help="of the server")
    check.add_argument("--model", metavar="NAME", help="where it is called otherwise now")
    check.add_argument("--metrics", metavar="NAMES", help="comma-separated; default: medians and rates")
    check.add_argument("--band", type=float, default=5.0, metavar="PERCENT", help="never less than this (default 5)")
    check.add_argument(
        "--see", type=float, default=10.0, metavar="PERCENT", help="what must not be missed (default 10)"
    )
    check.add_argument("--json", action="store_true", help="the comparison as JSON")
    check.set_defaults(run=run_check, parser=check)
    return made


def run_record(arguments: argparse.Namespace) -> int:
    """Measures or reads, and writes the baseline; the exit code. Raises UserError."""
    from msgspec import json

    from tradewind.bench.baseline import make_baseline

    _check_source(arguments)
    path = Path(arguments.file)
    series, settings, what = _measured(arguments)
    made = make_baseline(series, settings=settings, what=what, version=__version__, machine=machine())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(json.format(json.encode(made), indent=1) + b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    runs = len(series[0].values)
    print(f"baseline: {path}, {len(series)} figures of {runs} run{'' if runs == 1 else 's'}, {what}")
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Compares and says so; the exit code. Raises UserError."""
    from tradewind.bench.baseline import compare, gated, read_baseline

    _check_source(arguments)
    for name in ("band", "see"):
        if not 0 < getattr(arguments, name) <= 100:
            raise UserError(f"--{name} is {getattr(arguments, name):g} %; it must be over 0 and at most 100")
    if arguments.band >= arguments.see:
        raise UserError(
            f"--band is {arguments.band:g} % and --see is {arguments.see:g} %: what must be seen has to be over the band"
        )
    path = Path(arguments.file)
    kept = read_baseline(_read(path), name=str(path))
    names = None if arguments.metrics is None else [name.strip() for name in arguments.metrics.split(",")]
    wanted = gated(kept.series, names)
    if arguments.url is not None:
        _as_recorded(arguments, kept, path)
    series, _, what = _measured(arguments)
    now = {one.name: one for one in series}
    compared = [
        compare(one, now[one.name], floor=arguments.band / 100, see=arguments.see / 100)
        for one in wanted
        if one.name in now
    ]
    if not compared:
        raise UserError(f"{path} and what was measured now have no figure in common")
    _show(compared, kept, what=what, as_json=arguments.json, see=arguments.see)
    verdicts = {one.verdict for one in compared}
    return WORSE if "worse" in verdicts else UNSURE if "unsure" in verdicts else 0


def _check_source(arguments: argparse.Namespace) -> None:
    if (arguments.url is None) == (arguments.reports is None):
        raise UserError("say what is compared: a server's URL to measure, or --from with reports of tradewind bench")
    if not 1 <= arguments.repeats <= 1000:
        raise UserError(f"--repeats is {arguments.repeats}; it must be from 1 to 1000")


def _as_recorded(arguments: argparse.Namespace, kept: Baseline, path: Path) -> None:
    """Sets the load's options to the baseline's; changes the arguments."""
    missing = [name for name in LOAD if name not in kept.settings]
    if missing:
        raise UserError(
            f"{path} was recorded from reports without a load, so a server cannot be measured as then; use --from"
        )
    for name in LOAD:
        setattr(arguments, name, kept.settings[name])


def _measured(arguments: argparse.Namespace) -> tuple[tuple[Series, ...], dict[str, Any], str]:
    """What is to be kept or compared: series, settings, what it is."""
    from tradewind.bench.baseline import merged, series_of, series_of_load

    if arguments.reports is not None:
        read = [series_of(_read(Path(name)), name=name) for name in arguments.reports]
        whats = list(dict.fromkeys(what for _, _, what in read))
        if len(whats) > 1:
            raise UserError(f"the reports measured different loads: {whats[0]!r} and {whats[1]!r}")
        return _some(merged(series for series, _, _ in read)), read[0][1], whats[0]
    runs = []
    for run in range(arguments.repeats):
        print(f"run {run + 1} of {arguments.repeats}", file=sys.stderr, flush=True)
        report, _ = measure(arguments)
        if report.failed:
            raise UserError(
                f"{report.failed} of {report.requests} requests failed ({report.errors[0][0]}): that is no measurement"
            )
        runs.append(series_of_load(report))
    settings = {"url": arguments.url, "model": report.model, **report.settings}
    return _some(merged(runs)), settings, report.load


def _some(series: tuple[Series, ...]) -> tuple[Series, ...]:
    if not series:
        raise UserError("the runs have no figure in common")
    return series


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def machine() -> dict[str, str]:
    """Where this runs. A baseline of another machine compares machines."""
    return {"system": platform.platform(), "node": platform.node(), "cpu": platform.processor() or platform.machine()}


SIGNS = {
    "worse": "[red]worse[/red]",
    "better": "[green]better[/green]",
    "same": "same",
    "unsure": "[yellow]unsure[/yellow]",
}


def _show(compared: Sequence[Compared], kept: Baseline, *, what: str, as_json: bool, see: float) -> None:
    if as_json:
        from msgspec import json

        sys.stdout.write(json.format(json.encode(compared), indent=1).decode() + "\n")
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(f"{escape(what)}, against {escape(kept.date)} (tradewind {kept.version})", highlight=False)
    here = machine()
    if kept.machine.get("node") != here["node"]:
        console.print(
            f"[yellow]note:[/yellow] recorded on {escape(str(kept.machine.get('node')))}, this is {escape(here['node'])}"
        )
    table = Table(box=None, pad_edge=False)
    for name in ("figure", "was", "now", "worse by", "noise", "runs", ""):
        table.add_column(name, justify="left" if name in ("figure", "") else "right", no_wrap=True)
    for one in compared:
        scale, unit = (1e3, "ms") if one.unit == "s" else (1.0, one.unit)
        table.add_row(
            one.name,
            f"{one.was * scale:,.4g} {unit}",
            f"{one.now * scale:,.4g} {unit}",
            f"{one.worse_by:+.1%}",
            f"±{one.band:.1%}",
            f"{one.runs[0]} / {one.runs[1]}",
            SIGNS[one.verdict],
        )
    console.print(table, highlight=False)
    if any(one.verdict == "unsure" for one in compared):
        console.print(f"unsure: noise could hide {see:g} %; give more --repeats, or a quieter machine", highlight=False)
