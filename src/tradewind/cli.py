"""The commands. Each is a thin reader of arguments over `LLM` and `make_plan`.

Knows: words on a command line, exit codes, where text goes (answers to stdout, everything else to stderr).
Refuses to know: how anything is done. A user's mistake is one sentence and exit code 2; Ctrl-C is exit code 130 without a traceback.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tradewind import __version__
from tradewind.contract.errors import EngineDeadError, UserError

if TYPE_CHECKING:
    from tradewind.config.goals import Goals
    from tradewind.contract.request import SamplingParams
    from tradewind.llm import LLM

DEFAULT_MODEL = "smollm2"
DEFAULT_MAX_TOKENS = 512
SCENARIOS = ("balanced", "latency", "throughput", "memory")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    began_s = time.perf_counter()
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments, began_s)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"tradewind: {error}", file=sys.stderr)
        return error.exit_code
    except EngineDeadError as error:
        print(f"tradewind: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output left (head, less): nothing more to say, and nothing for the interpreter to flush at exit.
        sys.stdout = None  # type: ignore[assignment]
        return 0
    except KeyboardInterrupt:
        print("\ntradewind: interrupted", file=sys.stderr)
        return 130


# ------------------------------------------------------------------------------------------------------------ arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tradewind", description="An LLM inference engine that is given goals and chooses the means.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"tradewind {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(run=run)
        return made

    generate = command("generate", _generate, "Answer one or more prompts (from stdin when none is given).")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT")
    generate.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    generate.add_argument("--system", metavar="TEXT", help="system message")
    generate.add_argument("--json", action="store_true", help="one JSON object per answer instead of text")
    generate.add_argument("--quiet", action="store_true", help="no progress and no timing line")
    _add_model(generate)
    _add_sampling(generate)

    chat = command("chat", _chat, "Talk to a model. /reset forgets the conversation, /exit ends it.")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    _add_model(chat)
    _add_sampling(chat)

    plan = command("plan", _plan, "Print what would be chosen for a model, the memory ledger and every reason; loads no weights.")
    plan.add_argument("model_name", nargs="?", metavar="MODEL", default=None, help=f"as --model (default {DEFAULT_MODEL})")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    _add_model(plan)

    techniques = command("techniques", _techniques, "List every optimisation technique with its switch, price and last measured effect.")
    techniques.add_argument("--json", action="store_true", help="the table as JSON")

    bench = command("bench", _bench, "Measure.")
    bench.add_argument("what", choices=["offline"], help="offline: the engine in this process, no server")
    bench.add_argument("--workloads", metavar="NAMES", default="L1,L2,L3,L4,chat", help="comma-separated (default %(default)s)")
    bench.add_argument("--repeats", type=_whole, default=3, metavar="N", help="counted runs of each workload (default 3)")
    bench.add_argument("--out", metavar="FILE", help="write the report as JSON; a plot goes beside it as PNG")
    _add_model(bench)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    goals = parser.add_argument_group("goals")
    goals.add_argument("--model", default=DEFAULT_MODEL, help="local folder, .gguf file, packaged name or Hub id (default %(default)s)")
    goals.add_argument("--scenario", choices=SCENARIOS, default="balanced")
    goals.add_argument("--memory-limit", metavar="SIZE", help="ceiling for everything, e.g. 2GiB")
    goals.add_argument("--max-context", type=_whole, metavar="TOKENS", help="prompt and answer together")
    means = parser.add_argument_group("means (chosen for you, with reasons, unless pinned here)")
    means.add_argument("--backend", choices=["cpu", "plain"])
    means.add_argument("--compute", choices=["f32", "bf16", "int8"], help="how matmuls are computed")
    means.add_argument("--quantization", choices=["none", "int8", "int4"], help="quantise unquantised weights at load")
    means.add_argument("--kv-format", choices=["f32", "f16", "bf16"])
    means.add_argument("--page-tokens", type=_whole, metavar="N")
    means.add_argument("--max-tokens-per-step", type=_whole, metavar="N")
    means.add_argument("--max-running", type=_whole, metavar="N")
    means.add_argument("--policy", choices=["arrival", "priority"])
    means.add_argument("--threads", type=_whole, metavar="N")
    for name, text in (
        ("prefix-cache", "reuse the KV of shared prefixes"),
        ("overlap", "decide the next step while this one runs"),
        ("tape", "record a step's ops once and replay them in one call"),
    ):
        means.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=text)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=_whole, metavar="N", help=f"default {DEFAULT_MAX_TOKENS}, or what the context leaves")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N")
    group.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--repetition-penalty", type=float, default=1.0)
    group.add_argument("--presence-penalty", type=float, default=0.0)
    group.add_argument("--frequency-penalty", type=float, default=0.0)
    group.add_argument("--seed", type=int)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--n", type=int, default=1, help="answers per prompt")
    group.add_argument("--logprobs", type=int, metavar="K", help="with --json: the K best at each position")


def _whole(text: str) -> int:
    """argparse type: a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small; at least 1")
    return value


def _goals(arguments: argparse.Namespace) -> Goals:
    from tradewind.config.goals import Goals, Means
    from tradewind.config.sizes import parse_bytes

    return Goals(
        model=arguments.model,
        scenario=arguments.scenario,
        memory_limit_bytes=parse_bytes(arguments.memory_limit) if arguments.memory_limit else None,
        max_context=arguments.max_context,
        means=Means(
            backend=arguments.backend,
            compute=arguments.compute,
            quantization=arguments.quantization,
            kv_format=arguments.kv_format,
            page_tokens=arguments.page_tokens,
            max_tokens_per_step=arguments.max_tokens_per_step,
            max_running=arguments.max_running,
            policy=arguments.policy,
            threads=arguments.threads,
            prefix_cache=arguments.prefix_cache,
            overlap=arguments.overlap,
            tape=arguments.tape,
        ),
    )


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    from tradewind.contract.request import SamplingParams

    return SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        seed=arguments.seed,
        max_tokens=arguments.max_tokens,
        min_tokens=arguments.min_tokens,
        stop=tuple(arguments.stop),
        ignore_eos=arguments.ignore_eos,
        logprobs=arguments.logprobs,
        n=arguments.n,
    )


def _open(arguments: argparse.Namespace, began_s: float, *, quiet: bool = False) -> LLM:
    from tradewind.llm import LLM

    llm = LLM(goals=_goals(arguments), progress=not quiet and sys.stderr.isatty(), began_s=began_s)
    for notice in llm.notices:
        print(f"tradewind: {notice}", file=sys.stderr)
    return llm


# ------------------------------------------------------------------------------------------------------------- commands


def _generate(arguments: argparse.Namespace, began_s: float) -> int:
    import msgspec

    sampling = _sampling(arguments)
    prompts: list[str] = arguments.prompts or _from_stdin()
    if any(not prompt.strip() for prompt in prompts):
        raise UserError("the prompt is empty; give some text")
    # What can be refused without the model is refused before anything is loaded.
    sampling.check(vocab_size=1 << 31)
    with _open(arguments, began_s, quiet=arguments.quiet) as llm:
        asked: list[Any] = list(prompts)
        if not arguments.raw:
            system = [{"role": "system", "content": arguments.system}] if arguments.system else []
            asked = [[*system, {"role": "user", "content": prompt}] for prompt in prompts]
        sampling = llm.with_default_length(sampling, asked, DEFAULT_MAX_TOKENS)
        if arguments.json or len(asked) * sampling.n > 1:
            outputs = llm.generate(asked, sampling, progress=not arguments.quiet)
            for output in outputs:
                for completion in output.completions:
                    if arguments.json:
                        record = {"prompt": prompts[output.index], "prompt_tokens": len(output.prompt_tokens)}
                        record |= {"cached_tokens": output.cached_tokens, **msgspec.to_builtins(completion)}
                        print(msgspec.json.encode(record).decode())
                    else:
                        label = f"[{output.index + 1}.{completion.sample + 1}] " if sampling.n > 1 else f"[{output.index + 1}] "
                        print(label + completion.text.strip())
        else:
            _say(llm.stream(asked[0], sampling))
        if not arguments.quiet:
            print(llm.summary(), file=sys.stderr)
    return 0


def _say(deltas: Iterator[Any]) -> str:
    """Prints a streamed answer as it comes and returns it whole."""
    pieces: list[str] = []
    for delta in deltas:
        if delta.error is not None:
            raise UserError(f"the answer ended early: {delta.error}")
        pieces.append(delta.text)
        print(delta.text, end="", flush=True)
    print()
    return "".join(pieces)


def _from_stdin() -> list[str]:
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("no prompt: give one as an argument, or on standard input")
    return [sys.stdin.read()]


def _chat(arguments: argparse.Namespace, began_s: float) -> int:
    sampling = _sampling(arguments)
    if sampling.n != 1:
        raise UserError(f"--n is {sampling.n}; a chat has one answer at a time")
    sampling.check(vocab_size=1 << 31)
    with _open(arguments, began_s) as llm:
        system = [{"role": "system", "content": arguments.system}] if arguments.system else []
        messages = list(system)
        interactive = sys.stdin.isatty()
        if interactive:
            print(f"{llm.plan.model}: /reset forgets the conversation, /exit or Ctrl-D ends it", file=sys.stderr)
        while True:
            try:
                line = input("> " if interactive else "")
            except EOFError:
                return 0
            text = line.strip()
            if not text:
                continue
            if text in ("/exit", "/quit"):
                return 0
            if text == "/reset":
                messages = list(system)
                print("(forgotten)", file=sys.stderr)
                continue
            if text.startswith("/"):
                print(f"(no such command: {text.split()[0]}; there are /reset and /exit)", file=sys.stderr)
                continue
            asked = [*messages, {"role": "user", "content": text}]
            try:
                answer = _say(llm.stream(asked, llm.with_default_length(sampling, [asked], DEFAULT_MAX_TOKENS)))
            except UserError as error:
                # A conversation that grew over the limit is refused, not cut: the person decides what to forget.
                print(f"({error}; /reset starts anew)", file=sys.stderr)
                continue
            except KeyboardInterrupt:
                # Stops this answer only; the stream's clean-up has cancelled the request.
                print("\n(stopped)", file=sys.stderr)
                continue
            messages = [*asked, {"role": "assistant", "content": answer}]


def _plan(arguments: argparse.Namespace, began_s: float) -> int:
    import msgspec

    from tradewind.assemble import make_plan
    from tradewind.plan_view import plan_text
    from tradewind.weights.fetch import RichProgress, Silent

    if arguments.model_name is not None:
        arguments.model = arguments.model_name
    plan = make_plan(_goals(arguments), progress=RichProgress() if sys.stderr.isatty() else Silent()).plan
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
        return 0
    from rich.console import Console

    Console().print(plan_text(plan))
    return 0


def _techniques(arguments: argparse.Namespace, began_s: float) -> int:
    import msgspec

    from tradewind.config.techniques import TECHNIQUES

    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(TECHNIQUES), indent=2).decode())
        return 0
    from rich.console import Console

    from tradewind.plan_view import techniques_text

    Console().print(techniques_text(TECHNIQUES))
    return 0


def _bench(arguments: argparse.Namespace, began_s: float) -> int:
    from tradewind.bench.offline import run_and_report

    names = [name.strip() for name in arguments.workloads.split(",") if name.strip()]
    with _open(arguments, began_s) as llm:
        run_and_report(llm, workloads=names, repeats=arguments.repeats, out=arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
