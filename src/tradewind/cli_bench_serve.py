"""`tradewind bench serve URL`: a load test of any OpenAI-compatible server, with intervals, on the terminal and as HTML and JSON.

Knows: its words on the command line, the progress line, where reports are written. Refuses to know: how a load is sent (bench.serve_*).
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tradewind.contract.errors import UserError

if TYPE_CHECKING:
    from tradewind.bench.serve_load import Ask
    from tradewind.bench.serve_measure import Measured, Progress
    from tradewind.bench.serve_report import ServeReport

DEFAULT_REQUESTS = 100
MAX_CLIENTS = 4096
MAX_DURATION_S = 86_400.0


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds `serve` to `bench`'s own subparsers; its `run` is set."""
    text = "Send a load to an OpenAI-compatible server and report rates, times, goodput and how sure they are."
    made: argparse.ArgumentParser = subparsers.add_parser("serve", help=text, description=text)
    made.add_argument("url", metavar="URL", help="for example http://127.0.0.1:8000, with or without /v1")
    add_load(made)
    made.add_argument("--out", metavar="FILE", help="write the report as HTML, and as JSON beside it")
    made.add_argument("--json", action="store_true", help="print the JSON instead of the tables")
    made.set_defaults(run=run, parser=made)
    return made


def add_load(made: argparse.ArgumentParser) -> None:
    """The options that say what is sent; `tradewind baseline` has them too."""
    made.add_argument("--model", metavar="NAME", help="what the server calls its model (default: its first)")
    made.add_argument("--api", choices=["chat", "completions"], default="chat", help="default %(default)s")
    made.add_argument("--api-key", metavar="KEY", help="of the server")
    made.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="sent with each request, such as 'x-traffic-class: chat'; repeatable",
    )
    load = made.add_argument_group(
        "load (closed loop of 1 client unless one of --rate, --trace, --concurrency is given)"
    )
    load.add_argument("--rate", type=float, metavar="R", help="open loop: so many requests a second")
    load.add_argument(
        "--arrivals",
        choices=["poisson", "burst", "even"],
        default="poisson",
        help="of the open loop (default %(default)s)",
    )
    load.add_argument("--burst", type=int, default=8, metavar="N", help="requests of a burst (default %(default)s)")
    load.add_argument("--trace", metavar="FILE", help="open loop: a trace or a recorded journal")
    load.add_argument("--speed", type=float, default=1.0, metavar="X", help="of the trace (default 1)")
    load.add_argument("--concurrency", type=int, metavar="N", help="closed loop: so many clients")
    load.add_argument("--think", type=float, default=0.0, metavar="S", help="closed loop: pause after an answer")
    load.add_argument(
        "--requests", type=int, metavar="N", help=f"how many (default {DEFAULT_REQUESTS}, of a trace all)"
    )
    load.add_argument("--duration", type=float, metavar="S", help="instead: send for so long")
    load.add_argument("--prompt-tokens", default="128", metavar="N", help="or LOW:HIGH (default %(default)s)")
    load.add_argument("--output-tokens", default="64", metavar="N", help="or LOW:HIGH (default %(default)s)")
    load.add_argument("--shared-prefix", type=int, default=0, metavar="N", help="tokens that all prompts begin with")
    load.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the same seed: the same times and lengths (default 0)"
    )
    load.add_argument("--warm-up", default="10%", metavar="X", help="cut at the beginning: 5s or 10%% (default 10%%)")
    load.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one answer (default 600)")
    load.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="TARGETS",
        help="ttft=500ms,tpot=50ms,e2e=10s for all, chat:ttft=0.2s for one class of a trace; goodput counts what meets them; repeatable",
    )


LOAD = (
    "api", "header", "rate", "arrivals", "burst", "trace", "speed", "concurrency", "think", "requests", "duration", "prompt_tokens",
    "output_tokens", "shared_prefix", "seed", "warm_up", "timeout", "slo",
)  # fmt: skip
"""What `settings` of a report hold: enough to do it again."""


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and writes; the exit code: 1 when a request failed. Raises UserError."""
    page = None if arguments.out is None else Path(arguments.out)
    if page is not None and page.suffix == ".json":
        raise UserError("--out names the HTML file; the JSON is written beside it under the same name")
    from tradewind.bench.serve_report import to_json
    from tradewind.bench.serve_show import show, to_html

    report, measured = measure(arguments)
    if arguments.json:
        sys.stdout.write(to_json(report).decode())
    else:
        from rich.console import Console

        show(report, Console())
    if page is not None:
        _write(page, to_html(report, measured.samples).encode())
        _write(page.with_suffix(".json"), to_json(report))
        print(f"report: {page}, {page.with_suffix('.json')}", file=sys.stderr if arguments.json else sys.stdout)
    return 1 if report.failed else 0


def measure(arguments: argparse.Namespace) -> tuple[ServeReport, Measured]:
    """One load test as the arguments say. Raises UserError."""
    from tradewind.bench.serve_client import Client
    from tradewind.bench.serve_load import Text
    from tradewind.bench.serve_measure import prepare, run_closed, run_open
    from tradewind.bench.serve_report import make_report, parse_warm_up
    from tradewind.observability.attainment import parse_targets

    check(arguments)
    warm_up, targets = parse_warm_up(arguments.warm_up), parse_targets(arguments.slo)
    asks = _asks(arguments)
    client = Client(
        arguments.url, api=arguments.api, key=arguments.api_key, headers=arguments.header, timeout_s=arguments.timeout
    )
    text = Text(seed=arguments.seed, run=time.time_ns())
    opened = arguments.rate is not None or arguments.trace is not None

    async def measured() -> Measured:
        try:
            await prepare(client, text, model=arguments.model)
            timed = not opened and arguments.duration is not None
            with _progress(None if timed else len(asks)) as progress:
                if opened:
                    return await run_open(client, asks, text, progress=progress)
                return await run_closed(
                    client,
                    asks,
                    text,
                    clients=arguments.concurrency or 1,
                    think_s=arguments.think,
                    duration_s=arguments.duration,
                    progress=progress,
                )
        finally:
            await client.close()

    import asyncio  # late: `tradewind --help` needs none

    done = asyncio.run(measured())
    report = make_report(
        done,
        url=arguments.url,
        model=client.model or "",
        api=arguments.api,
        load=described(arguments, len(asks)),
        settings={name: getattr(arguments, name) for name in LOAD},
        warm_up=warm_up,
        targets=targets,
        opened=opened,
        seed=arguments.seed,
    )
    return report, done


def check(arguments: argparse.Namespace) -> None:
    """Raises UserError for numbers and combinations that make no load."""
    from tradewind.bench.serve_client import parse_headers
    from tradewind.bench.serve_load import MAX_REQUESTS, check_rate

    parse_headers(arguments.header)
    ways = [name for name in ("rate", "trace", "concurrency") if getattr(arguments, name) is not None]
    if len(ways) > 1:
        raise UserError(f"--{ways[0]} and --{ways[1]} are two different loads; give one of them")
    if arguments.rate is not None:
        check_rate(arguments.rate)
    if arguments.requests is not None and arguments.duration is not None:
        raise UserError("--requests and --duration both say when the load ends; give one of them")
    if arguments.requests is not None and not 1 <= arguments.requests <= MAX_REQUESTS:
        raise UserError(f"--requests is {arguments.requests}; it must be from 1 to {MAX_REQUESTS:,}")
    for name, low, high in (("duration", 0.0, MAX_DURATION_S), ("timeout", 0.0, MAX_DURATION_S), ("speed", 0.0, 1e6)):
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and low < value <= high):
            raise UserError(f"--{name} is {value:g}; it must be over {low:g} and at most {high:,.0f}")
    if not 0 <= arguments.think <= MAX_DURATION_S:
        raise UserError(f"--think is {arguments.think:g} s; it must be 0 or more")
    if arguments.concurrency is not None and not 1 <= arguments.concurrency <= MAX_CLIENTS:
        raise UserError(f"--concurrency is {arguments.concurrency}; it must be from 1 to {MAX_CLIENTS}")
    if arguments.shared_prefix < 0:
        raise UserError(f"--shared-prefix is {arguments.shared_prefix}; it must be 0 or more tokens")


def _asks(arguments: argparse.Namespace) -> list[Ask]:
    from tradewind.bench.serve_load import MAX_REQUESTS, arrival_times, from_trace, made_up, parse_lengths

    prompt = parse_lengths(arguments.prompt_tokens, option="--prompt-tokens")
    output = parse_lengths(arguments.output_tokens, option="--output-tokens")
    if arguments.trace is not None:
        asks = from_trace(Path(arguments.trace), speed=arguments.speed, limit=arguments.requests)
        return asks if arguments.duration is None else [ask for ask in asks if ask.at_s < arguments.duration]
    rng = random.Random(arguments.seed)
    count = arguments.requests or (None if arguments.duration is not None else DEFAULT_REQUESTS)
    if arguments.rate is not None:
        times = arrival_times(
            arguments.arrivals,
            rate=arguments.rate,
            rng=rng,
            count=count,
            duration_s=arguments.duration,
            burst=arguments.burst,
        )
    else:
        times = [0.0] * (count or min(MAX_REQUESTS, round(10_000 * arguments.duration) + 1000))
    return made_up(times, prompt=prompt, output=output, rng=rng, shared_prefix=arguments.shared_prefix)


def described(arguments: argparse.Namespace, count: int) -> str:
    """The load in one sentence."""
    length = f"prompts of {arguments.prompt_tokens} and answers of {arguments.output_tokens} tokens"
    if arguments.trace is not None:
        speed = "" if arguments.speed == 1 else f" at {arguments.speed:g} times the speed"
        return f"{count} requests of {Path(arguments.trace).name}{speed}"
    if arguments.rate is not None:
        how = f"bursts of {arguments.burst}" if arguments.arrivals == "burst" else arguments.arrivals
        return f"open loop, {count} requests at {arguments.rate:g} a second ({how}), {length}"
    clients = arguments.concurrency or 1
    many = f"{clients} client{'' if clients == 1 else 's'}"
    often = f"{count} requests" if arguments.duration is None else f"{arguments.duration:g} s"
    return f"closed loop, {many}, {often}, {length}"


@contextmanager
def _progress(count: int | None) -> Iterator[Progress]:
    """A line with a bar, on a terminal only; gives the record that it shows."""
    from tradewind.bench.serve_measure import Progress

    progress = Progress()
    if not sys.stderr.isatty():
        yield progress
        return
    from rich import progress as bars
    from rich.console import Console

    class Numbers(bars.ProgressColumn):
        max_refresh = 0.2

        def render(self, task: bars.Task) -> str:
            task.completed = progress.ended
            failed = f", {progress.failed} failed" if progress.failed else ""
            rate = progress.tokens / task.elapsed if task.elapsed else 0.0
            done = f"{progress.ended} done" if count is None else f"{progress.ended}/{count} done"
            return f"{done}, {progress.sent - progress.ended} open{failed}, {rate:,.0f} tok/s"

    console = Console(stderr=True)
    with bars.Progress(
        bars.BarColumn(30), Numbers(), bars.TimeElapsedColumn(), console=console, transient=True
    ) as shown:
        shown.add_task("load", total=count)
        yield progress


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
