"""The command `tradewind serve`: its words on the command line.

Knows: options and their types. Refuses to know: how anything is served (serve).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tradewind.cli_goals import goals_of, model_of, nothing_beside, whole
from tradewind.cli_plan_goals import is_goals_file
from tradewind.contract.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `serve` understands beside goals and means."""
    group = parser.add_argument_group("serving")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default %(default)s; 0.0.0.0 is every one)"
    )
    group.add_argument("--port", type=int, default=8000, help="default %(default)s; 0 takes one that is free")
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help="ask for this key; repeatable")
    group.add_argument("--api-key-file", action="append", default=[], metavar="FILE", help="more keys, one a line")
    group.add_argument(
        "--served-name", action="append", default=[], metavar="NAME", help="what clients call the model; repeatable"
    )
    group.add_argument(
        "--max-queue",
        type=whole,
        default=256,
        metavar="N",
        help="waiting sequences; more are refused (default %(default)s)",
    )
    group.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="SIGTERM: time to finish open answers (default 30)",
    )
    group.add_argument(
        "--stall-timeout", type=_seconds, default=30.0, metavar="S", help="longest time without a step (default 30)"
    )
    group.add_argument("--restart-engine", action="store_true", help="when the engine dies start a new one, do not end")
    group.add_argument(
        "--allow-sleep", action="store_true", help="obey POST /sleep: nobody is served until POST /wake_up"
    )
    group.add_argument(
        "--allow-image-links",
        action="store_true",
        help="fetch images that are sent as http(s) links, from public hosts",
    )
    group.add_argument(
        "--ignore-unknown-fields", action="store_true", help="warn about unknown fields in a header, do not refuse"
    )
    group.add_argument(
        "--cors-origin", action="append", default=[], metavar="ORIGIN", help="let pages of this origin ask; repeatable"
    )
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")
    group.add_argument(
        "--tool-format", metavar="NAME", help="how the model writes tool calls (default: as its template says)"
    )
    group.add_argument(
        "--reasoning", metavar="NAME", help="how the model marks its reasoning (default: as its template says)"
    )
    group.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], default="info", help="default info"
    )
    group.add_argument(
        "--log-json",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="one JSON object a line (default: unless standard error is a terminal)",
    )
    group.add_argument("--log-requests", action="store_true", help="a line for each finished request")
    group.add_argument("--otlp-endpoint", metavar="URL", help="send OpenTelemetry spans there")
    group.add_argument(
        "--record", metavar="DIR", help="write a journal of the traffic there: lengths and structure, no text"
    )
    group.add_argument(
        "--step-times",
        metavar="FILE",
        help="begin with the step times in it, where there are any, and keep what is fitted; for simulate --times, too",
    )
    group.add_argument("--record-raw", action="store_true", help="with --record: the tokens too")
    group.add_argument(
        "--on-drift",
        choices=["off", "tell", "propose", "apply"],
        default="tell",
        help="when traffic leaves what the plan was made for: tell, propose another plan, or change to it (default tell)",
    )
    group.add_argument(
        "--usual-traffic",
        metavar="FILE|N",
        help="what the plan was made for: a trace, or so many of the first requests (default 1000)",
    )
    group.add_argument(
        "--script", metavar="FILE", help="answers from this file instead of a model's; see docs/scripted.md"
    )
    _add_adapters(parser)


def _add_adapters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("adapters (LoRA, as PEFT writes them)")
    group.add_argument(
        "--adapter",
        action="append",
        default=[],
        type=_named_folder,
        metavar="NAME=DIR",
        help="an adapter of the model, which clients ask for by its name as 'model'; repeatable",
    )
    group.add_argument(
        "--adapter-folder", metavar="DIR", help="let clients load and unload adapters that lie in this folder"
    )
    group.add_argument(
        "--adapter-slots",
        type=whole,
        metavar="N",
        help="adapters that run at once (default: all that are given; 8 with --adapter-folder)",
    )
    group.add_argument(
        "--adapter-rank", type=whole, metavar="R", help="largest rank of an adapter (default: of those given, or 16)"
    )


def _named_folder(text: str) -> tuple[str, str]:
    """argparse type: NAME=DIR."""
    name, equals, folder = text.partition("=")
    if not (name.strip() and equals and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name and a folder; give NAME=DIR")
    return name.strip(), folder


def _seconds(text: str) -> float:
    """argparse type: a time over 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a time; give seconds over 0")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Serves until it is told to end; the exit code. Raises UserError."""
    from tradewind.phases import process_began_s

    began_s = process_began_s() if arguments.is_process else None
    stated = None
    if is_goals_file(arguments.model_name):
        from tradewind.config.goals_file import read_goals

        nothing_beside(arguments)
        stated = read_goals(Path(arguments.model_name))
    else:
        arguments.model = model_of(arguments)
    if not 0 <= arguments.port <= 65535:
        raise UserError(f"there is no port {arguments.port}; ports are 0 to 65535")
    from tradewind.serve import ServeOptions, read_keys, serve

    options = ServeOptions(
        goals=goals_of(arguments) if stated is None else stated,
        script=None if arguments.script is None else Path(arguments.script),
        host=arguments.host,
        port=arguments.port,
        api_keys=(*arguments.api_key, *(key for file in arguments.api_key_file for key in read_keys(Path(file)))),
        served_names=tuple(arguments.served_name),
        max_queue=arguments.max_queue,
        drain_timeout_s=arguments.drain_timeout,
        stall_timeout_s=arguments.stall_timeout,
        restart_engine=arguments.restart_engine,
        allow_sleep=arguments.allow_sleep,
        allow_image_links=arguments.allow_image_links,
        ignore_unknown_fields=arguments.ignore_unknown_fields,
        cors_origins=tuple(arguments.cors_origin),
        chat_template=None if arguments.chat_template is None else Path(arguments.chat_template),
        tool_format=arguments.tool_format,
        reasoning=arguments.reasoning,
        log_level=arguments.log_level,
        log_json=arguments.log_json,
        log_requests=arguments.log_requests,
        otlp_endpoint=arguments.otlp_endpoint,
        record=None if arguments.record is None else Path(arguments.record),
        record_raw=arguments.record_raw,
        step_times=None if arguments.step_times is None else Path(arguments.step_times),
        on_drift=arguments.on_drift,
        usual_traffic=arguments.usual_traffic,
        adapters=tuple((name, Path(folder)) for name, folder in arguments.adapter),
        adapter_slots=arguments.adapter_slots,
        adapter_rank=arguments.adapter_rank,
        adapter_folder=None if arguments.adapter_folder is None else Path(arguments.adapter_folder),
    )
    return serve(options, began_s=began_s)
