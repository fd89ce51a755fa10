"""Goals and means as words on the command line: what every command that opens a model understands.

Knows: the options and their types. Refuses to know: the commands, and what becomes of goals (config).
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tradewind.contract.errors import UserError

if TYPE_CHECKING:
    from tradewind.config.goals import Goals

DEFAULT_MODEL = "smollm2"
SCENARIOS = ("balanced", "latency", "throughput", "memory")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds what states goals and pins means."""
    goals = parser.add_argument_group("goals")
    goals.add_argument("--model", help=f"local folder, .gguf file, packaged name or Hub id (default {DEFAULT_MODEL})")
    goals.add_argument(
        "--scenario", choices=SCENARIOS, default="balanced", help="what matters most (default %(default)s)"
    )
    goals.add_argument("--memory-limit", metavar="SIZE", help="ceiling for everything, e.g. 2GiB")
    goals.add_argument("--max-context", type=whole, metavar="TOKENS", help="prompt and answer together")
    goals.add_argument(
        "--slowdown",
        type=float,
        metavar="TIMES",
        help="how many times as long as without prompts a step of running answers may take, e.g. 2",
    )
    means = parser.add_argument_group("means (chosen for you, with reasons, unless pinned here)")
    means.add_argument(
        "--backend", choices=["cpu", "cuda", "plain"], help="the C++ ops, Triton on a GPU, or torch (slow, any machine)"
    )
    means.add_argument("--compute", choices=["f32", "bf16", "int16", "int8"], help="how matmuls are computed")
    means.add_argument(
        "--quantization",
        choices=["none", "int8", "int4", "fp8"],
        help="quantise weights at load: int8 and int4 on a CPU, fp8 on a GPU",
    )
    means.add_argument(
        "--kv-format", "--kv-dtype", choices=["f32", "f16", "bf16", "fp8"], help="how keys and values are kept"
    )
    means.add_argument(
        "--load-format",
        choices=["auto", "dummy", "dummy-flat", "dummy-one-route"],
        help="dummy: random weights, for measuring; answers are noise; flat: as small as other engines' dummy weights; one-route: all "
        "tokens visit the same experts",
    )
    means.add_argument("--page-tokens", type=whole, metavar="N", help="tokens of a page of keys and values")
    means.add_argument("--max-tokens-per-step", type=whole, metavar="N", help="longer prompts are computed in chunks")
    means.add_argument("--max-running", type=whole, metavar="N", help="requests that run at once")
    means.add_argument("--policy", choices=["arrival", "fair", "length", "priority", "slo"], help="who is served first")
    means.add_argument(
        "--degrade",
        choices=["full", "lossless", "off"],
        help="given up under overload for the highest class: nothing; no answer changes; also refuse and shorten",
    )
    means.add_argument("--threads", type=whole, metavar="N", help="threads that compute")
    for name, text in (
        ("fit-steps", "fit step times to the steps that run; pacing (--policy slo) then goes by them"),
        ("prefix-cache", "reuse the KV of shared prefixes"),
        ("overlap", "decide the next step while this one runs"),
        ("tape", "record a step's ops once and replay them in one call (CPU)"),
        ("graphs", "replay steps as CUDA graphs (GPU); off is for debugging"),
        ("deterministic", "the same answer alone and in any batch; on a GPU slower"),
    ):
        means.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=text)


def goals_of(arguments: argparse.Namespace) -> Goals:
    """Goals and pinned means as they were stated. Raises UserError."""
    from tradewind.config.goals import Goals, Means
    from tradewind.config.sizes import parse_bytes

    return Goals(
        model=DEFAULT_MODEL if arguments.model is None else arguments.model,
        scenario=arguments.scenario,
        memory_limit_bytes=None if arguments.memory_limit is None else parse_bytes(arguments.memory_limit),
        max_context=arguments.max_context,
        slowdown=arguments.slowdown,
        means=Means(
            backend=arguments.backend,
            compute=arguments.compute,
            quantization=arguments.quantization,
            kv_format=arguments.kv_format,
            page_tokens=arguments.page_tokens,
            max_tokens_per_step=arguments.max_tokens_per_step,
            max_running=arguments.max_running,
            policy=arguments.policy,
            degrade=arguments.degrade,
            fit_steps=arguments.fit_steps,
            threads=arguments.threads,
            prefix_cache=arguments.prefix_cache,
            overlap=arguments.overlap,
            tape=arguments.tape,
            graphs=arguments.graphs,
            deterministic=arguments.deterministic,
            load_format=arguments.load_format,
        ),
    )


def model_of(arguments: argparse.Namespace) -> str | None:
    """The model that is named, with --model or without. Raises UserError when two are."""
    if arguments.model_name is not None and arguments.model not in (None, arguments.model_name):
        raise UserError(f"two models are named, {arguments.model_name!r} and {arguments.model!r}; give one")
    name: str | None = arguments.model if arguments.model_name is None else arguments.model_name
    return name


def nothing_beside(arguments: argparse.Namespace) -> None:
    """Raises UserError when goals or means are stated beside a file of goals."""
    beside = argparse.ArgumentParser(add_help=False)
    add_model(beside)
    stated = [name for name, value in vars(beside.parse_args([])).items() if getattr(arguments, name) != value]
    if stated:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in stated)
        raise UserError(
            f"{options} and the file of goals {arguments.model_name} state the same things; write them into the file"
        )


def whole(text: str) -> int:
    """argparse type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small; at least 1")
    return value
