"""The command line of gpu_suite.py: which engine is asked for, which techniques are turned off, and the same for another process.

Knows: options, switches, and the goals that they come to. Refuses to know: what is done with them (gpu_suite).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu_places import BENCHMARKS
from gpu_works import ORDER, SCALES

from tradewind.config.choices import WORDS
from tradewind.config.goals import Goals, Means

DESCRIPTION = "W1-W6 and the start on our engine, in this process: the work that the peers' record in gpu_figures.py was measured with."
MAX_CONTEXT = 16384
SETTLE_S = 60.0
"""On a new machine kernels are still being compiled behind the first steps: 20 s for 8B dense, 54 s for a mixture of 48 layers (H200)."""
SHORT_ROWS = "1,32,256"
"""W6's batches where a switch is turned."""


# ------------------------------------------------------------------------------------------------------------- switches


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A technique that can be turned off (or a price that can be paid), and the workloads that show its effect."""

    means: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=dict)
    """Constants of kernels/triton/tuning.py that are set instead."""
    works: tuple[str, ...] = ("W1", "W3", "W6")


SWITCHES: dict[str, Switch] = {
    "chunks_of_1024": Switch(means={"max_tokens_per_step": 1024}, works=("W3", "W2")),
    "deterministic": Switch(means={"deterministic": True}),
    "fp8_kv": Switch(means={"kv_format": "fp8"}, works=("W3", "W6")),
    "fusion": Switch(means={"fusion": False}),
    "graphs": Switch(means={"graphs": False}),
    "last_layer_rows": Switch(tuning={"few_ends": False}, works=("W4", "W2")),
    "overlap": Switch(means={"overlap": False}),
    "pdl": Switch(means={"pdl": False}),
    "prefix_cache": Switch(means={"prefix_cache": False}, works=("W5",)),
    "shared_beside": Switch(tuning={"side_tokens": 0}),
}
"""By name; those whose fields `Means` does not have are left out."""


def known_switches() -> dict[str, Switch]:
    """The switches that this version has."""
    return {name: switch for name, switch in SWITCHES.items() if set(switch.means) <= set(Means.__struct_fields__)}


def retune(constants: dict[str, Any]) -> None:
    """Sets constants of every GPU's table, in this process."""
    if constants:
        from tradewind.kernels.triton.tuning import TUNINGS

        TUNINGS.update({gpu: replace(tuned, **constants) for gpu, tuned in TUNINGS.items()})


def go_ways(texts: Sequence[str]) -> None:
    """Every GPU op set that this process makes from now on computes attention these ways."""
    from tradewind.kernels.triton import ops
    from tradewind.kernels.triton.tuning import AttentionWays

    values: dict[str, Any] = {name: parsed_value(value) for name, _, value in (text.partition("=") for text in texts)}
    ways = AttentionWays(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    ops.CudaOps = functools.partial(ops.CudaOps, ways=ways)  # type: ignore[misc, assignment]


# ----------------------------------------------------------------------------------------------------- the command line


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, checked."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--model", default="qwen3-0.6b", help="a folder of benchmarks/models, or any folder")
    parser.add_argument("--quantization", default="none", help="of the weights at load: none or fp8")
    parser.add_argument(
        "--workloads",
        help=f"run in the order named; default {','.join(ORDER)}; a name may carry :t1, temperature 1 instead of greedy",
    )
    parser.add_argument("--out", type=Path, help="JSON; a picture of the same name is put beside it")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu", "plain"))
    parser.add_argument("--load-format", default="dummy", choices=WORDS["load_format"])
    parser.add_argument("--scenario", default="balanced")
    parser.add_argument("--scale", default="full", choices=sorted(SCALES))
    parser.add_argument("--rows", help="batches of W6, comma-separated")
    parser.add_argument("--repeats", type=int, help="of W6's timed calls")
    parser.add_argument(
        "--means", action="append", default=[], metavar="NAME=VALUE", help="pins a choice; may be repeated"
    )
    parser.add_argument(
        "--off", action="append", default=[], metavar="NAME", help=f"one of {', '.join(known_switches())}"
    )
    parser.add_argument(
        "--way", action="append", default=[], metavar="NAME=VALUE", help="of AttentionWays, JSON values: null or [] turns one off"
    )  # fmt: skip
    parser.add_argument("--ablate", action="store_true", help="each switch against none, each in a process of its own")
    parser.add_argument("--switches", help="those that --ablate turns, comma-separated")
    parser.add_argument(
        "--minutes", type=float, default=8.7, help="no workload goes on after this (default %(default)s)"
    )
    parser.add_argument(
        "--settle",
        type=float,
        default=SETTLE_S,
        metavar="SECONDS",
        help="before the warm-up wait so long at most for what is compiled and captured behind the start (default %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="run W2 and W3 once, not a second time")
    parser.add_argument("--no-start", action="store_true", help="do not measure the start")
    parser.add_argument("--no-ceilings", action="store_true", help="do not measure the card")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only print tables of the gpu-*.json there")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="with --report: renew the figures in this page")
    parser.add_argument("--start-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compare-memory", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ceilings-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    for name in arguments.off:
        if name not in known_switches():
            parser.error(f"--off {name}: there are {', '.join(known_switches())}")
    for name in filter(None, (arguments.workloads or "").split(",")):
        if name.removesuffix(":t1") not in ORDER:
            parser.error(f"--workloads {name}: there are {', '.join(ORDER)}, each also with :t1")
    if arguments.workloads is None:
        arguments.workloads = ",".join(ORDER)
        if arguments.off:  # the short set that shows the switches' effect
            wanted = {work for name in arguments.off for work in known_switches()[name].works}
            arguments.workloads = ",".join(work for work in ORDER if work in wanted)
            arguments.rows = arguments.rows or (SHORT_ROWS if arguments.scale == "full" else None)
            arguments.repeats, arguments.no_start = arguments.repeats or 1, True
    return arguments


def parsed_value(text: str) -> Any:
    """true, false and numbers as what they are, everything else as text."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def same_engine(arguments: argparse.Namespace) -> list[str]:
    """The options that name model and engine, for another process."""
    options = ["--model", arguments.model, "--backend", arguments.backend, "--quantization", arguments.quantization]
    for text in arguments.way:
        options += ["--way", text]
    options += ["--scenario", arguments.scenario, "--load-format", arguments.load_format, "--scale", arguments.scale]
    for name in arguments.off:
        options += ["--off", name]
    for text in arguments.means:
        options += ["--means", text]
    return options


# ----------------------------------------------------------------------------------------------------------- the engine


def goals_of(arguments: argparse.Namespace) -> Goals:
    """What the engine is asked for: a balanced engine of 16k context, with what the options pin."""
    folder = model_folder(arguments.model)
    pinned: dict[str, Any] = {"backend": arguments.backend}
    if arguments.load_format != "auto":
        pinned["load_format"] = arguments.load_format
    if arguments.quantization != "none":
        pinned["quantization"] = arguments.quantization
    for name in arguments.off:
        pinned |= known_switches()[name].means
        retune(known_switches()[name].tuning)
    for text in arguments.means:
        name, _, value = text.partition("=")
        pinned[name] = parsed_value(value)
    longest = int(config_of(arguments.model).get("max_position_embeddings", MAX_CONTEXT))
    return Goals(
        model=str(folder), scenario=arguments.scenario, max_context=min(MAX_CONTEXT, longest), means=Means(**pinned)
    )


def model_folder(name: str) -> Path:
    """The folder of one of our configs, or a folder as it was named."""
    own = BENCHMARKS / "models" / name
    return own if (own / "config.json").is_file() else Path(name)


def config_of(name: str) -> dict[str, Any]:
    """The model's config.json."""
    found: dict[str, Any] = json.loads((model_folder(name) / "config.json").read_text(encoding="utf-8"))
    return found
