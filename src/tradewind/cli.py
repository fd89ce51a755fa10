"""The commands. Each is a thin reader of arguments over `LLM` and `make_plan`.

Knows: words on a command line, exit codes, where text goes (answers to stdout, everything else to stderr).
Refuses to know: how anything is done. A user's mistake is one sentence and exit code 2; Ctrl-C is exit code 130 without a traceback.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from tradewind import (
    __version__,
    cli_ablate,
    cli_baseline,
    cli_bench_serve,
    cli_explain,
    cli_plan_goals,
    cli_replay,
    cli_serve,
    cli_simulate,
    cli_whatif,
)
from tradewind.cli_goals import DEFAULT_MODEL, add_model, goals_of, model_of, nothing_beside, whole
from tradewind.contract.errors import EngineDeadError, UserError

if TYPE_CHECKING:
    from types import FrameType

    from tradewind.contract.request import SamplingParams
    from tradewind.llm import LLM
    from tradewind.serving.answer import Delta

DEFAULT_MAX_TOKENS = 512


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 (the engine failed), 2 (the user can put it right) or 130 (Ctrl-C)."""
    try:
        # What the terminal cannot show is replaced: an answer is never lost to its encoding.
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        arguments = _parse(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as error:  # argparse: help was shown, or the arguments make no sense
        return int(error.code or 0)
    except UserError as error:
        _tell(f"tradewind: {error}")
        return error.exit_code
    except EngineDeadError as error:
        _tell(f"tradewind: {error}")
        return 1
    except BrokenPipeError:
        # The reader of our output left (head, less): nothing more to say, and nothing that the interpreter could flush at exit.
        _silence(sys.stdout)
        return 0
    except KeyboardInterrupt:
        # From here on it only ends; a second Ctrl-C has nothing left to interrupt but the ending.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _tell("\ntradewind: interrupted")
        return 130


def _tell(text: str) -> None:
    """Says something to the person, not to the reader of the answers."""
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Turns a stream whose reader has left into one that nobody reads, also for what is still in its buffer."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


# ------------------------------------------------------------------------------------------------------------ arguments


class _Parser(argparse.ArgumentParser):
    """Refuses with one sentence and a close match instead of the whole usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        pointer = "" if message.endswith("?") else f"; see {self.prog} --help"
        self.exit(2, f"tradewind: {message}{pointer}\n")

    def refuse_unknown(self, unknown: Sequence[str]) -> NoReturn:
        """Says which option there is not, and which is close to it."""
        name = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        if not name.startswith("-"):
            self.error(f"{name!r} is one word too many; quote a text of several words")
        if name in OTHERS_NAMES:
            self.error(f"there is no option {name}, but {OTHERS_NAMES[name]}")
        self.error(f"there is no option {name}{_close_match(name, self._option_string_actions)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if action.choices is not None and value not in action.choices:
            close = _close_match(str(value), choices)
            if isinstance(action, argparse._SubParsersAction):
                close = close or f'; to ask something: tradewind generate "{value}"'
                raise argparse.ArgumentError(None, f"there is no command {value!r}, only {', '.join(choices)}{close}")
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(choices)}{close}")


OTHERS_NAMES = {
    "--enable-lora": "--adapter NAME=DIR, which needs no other",
    "--lora-modules": "--adapter NAME=DIR, once for each",
    "--lora-paths": "--adapter NAME=DIR, once for each",
    "--max-cpu-loras": "--adapter-slots N: the files of all others are read when they are asked for",
    "--max-lora-rank": "--adapter-rank R",
    "--max-loras": "--adapter-slots N",
    "--max-loras-per-batch": "--adapter-slots N",
}
"""What other servers call it -> what it is called here."""

MODULES = (cli_ablate, cli_baseline, cli_explain, cli_replay, cli_simulate, cli_whatif)
"""Commands with a file of their own."""


def _close_match(word: str, known: Iterable[str]) -> str:
    """The close match among the known words as the end of a sentence; empty when there is none."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of the command named in them. Exits with 2 and one sentence when they make no sense."""
    parser = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    arguments, rest = parser.parse_known_args(argv)
    prompts = getattr(arguments, "prompts", None)
    if prompts is not None and not any(word.startswith("-") for word in rest):
        prompts.extend(rest)  # prompts that stand between options
    elif rest:
        arguments.parser.refuse_unknown(rest)
    # Measured from the start of the process when this is the whole process.
    arguments.is_process = argv is None
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tradewind",
        description="An LLM inference engine that is given goals and chooses the means.",
        epilog="tradewind COMMAND --help tells about a command.",
    )
    parser.add_argument("--version", action="version", version=f"tradewind {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")

    def command(name: str, run: Any, text: str, *, arguments: str = "") -> argparse.ArgumentParser:
        usage = f"%(prog)s [options]{arguments}"
        made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, usage=usage)
        made.set_defaults(run=run, parser=made)
        return made

    generate = command("generate", _generate, "Answer one or more prompts.", arguments=" [PROMPT ...]")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="read from standard input when none is given")
    generate.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    generate.add_argument("--system", metavar="TEXT", help="system message")
    generate.add_argument("--json", action="store_true", help="one JSON object per answer instead of text")
    generate.add_argument(
        "--quiet", action="store_true", help="nothing but the answer: no progress, notices and timing line"
    )
    add_model(generate)
    _add_adapter(generate)
    _add_sampling(generate)
    generate.add_argument("--n", type=int, default=1, metavar="N", help="answers per prompt")
    generate.add_argument("--logprobs", type=int, metavar="K", help="with --json: the K best at each position")

    chat = command("chat", _chat, "Talk to a model. /reset forgets the conversation, /exit ends it.")
    chat.add_argument("--system", metavar="TEXT", help="system message")
    add_model(chat)
    _add_adapter(chat)
    _add_sampling(chat)

    embed = command("embed", _embed, "Print the embedding of each text, a JSON array a line.", arguments=" [TEXT ...]")
    embed.add_argument("prompts", nargs="*", metavar="TEXT", help="read from standard input when none is given")
    embed.add_argument("--pooling", choices=["last", "mean", "cls"], help="default: what the model was made for")
    embed.add_argument("--dimensions", type=whole, metavar="N", help="only the first N values, normalised again")
    embed.add_argument("--no-normalise", action="store_true", help="vectors as long as they come")
    embed.add_argument("--quiet", action="store_true", help="nothing but the vectors: no progress and notices")
    add_model(embed)

    text = "Print what would be chosen for a model, the memory ledger and every reason; loads no weights."
    plan = command("plan", _plan, text, arguments=" [MODEL]")
    plan.add_argument("model_name", nargs="?", metavar="MODEL", help=f"as --model (default {DEFAULT_MODEL})")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    cli_plan_goals.add_arguments(plan)
    add_model(plan)

    serve = command("serve", cli_serve.run, "Serve over HTTP, as the OpenAI API does.", arguments=" [MODEL]")
    serve.add_argument("model_name", nargs="?", metavar="MODEL", help=f"as --model (default {DEFAULT_MODEL})")
    cli_serve.add_arguments(serve)
    add_model(serve)

    techniques = command(
        "techniques", _techniques, "List every optimisation with its switch, price and last measured effect."
    )
    techniques.add_argument("--json", action="store_true", help="the table as JSON")

    bench = commands.add_parser("bench", help="Measure this engine, or any server.", description="Measure.")
    bench.set_defaults(parser=bench)
    measures = bench.add_subparsers(dest="what", required=True, metavar="WHAT", title="what to measure")
    text = "The engine in this process, no server."
    offline = measures.add_parser("offline", help=text, description=text)
    offline.set_defaults(run=_bench, parser=offline)
    offline.add_argument(
        "--workloads", metavar="NAMES", default="L1,L2,L3,L4,chat", help="comma-separated (default %(default)s)"
    )
    offline.add_argument(
        "--repeats", type=whole, default=3, metavar="N", help="counted runs of each workload (default 3)"
    )
    offline.add_argument("--out", metavar="FILE", help="write the report as JSON; a plot goes beside it as PNG")
    add_model(offline)
    cli_bench_serve.add_parser(measures)
    for module in MODULES:
        module.add_parser(commands)
    return parser


def _add_adapter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--adapter", metavar="DIR", help="answer with the low-rank adapter (LoRA) in this folder, as PEFT writes it"
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=whole, metavar="N", help=f"default {DEFAULT_MAX_TOKENS}, or what the context leaves"
    )
    group.add_argument("--min-tokens", type=int, default=0, metavar="N", help="no end before so many tokens")
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default) takes the best token, 1 draws"
    )
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="draw among the K best (0: all)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw among the best that make up P")
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="drop tokens under P of the best one's probability"
    )
    group.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="X", help="over 1: against tokens of prompt and answer"
    )
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="against tokens of the answer")
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="the same, by how often they came"
    )
    group.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same answer")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the model's end of text")


def _sampling(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling values, checked as far as that can be done without a model."""
    from tradewind.contract.request import SamplingParams
    from tradewind.serving.text_stream import check_stops

    sampling = SamplingParams(
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
        stop=check_stops(arguments.stop),
        ignore_eos=arguments.ignore_eos,
        logprobs=getattr(arguments, "logprobs", None),
        n=getattr(arguments, "n", 1),
    )
    sampling.check(vocab_size=1 << 31)
    return sampling


def _open(arguments: argparse.Namespace, *, quiet: bool = False) -> LLM:
    from tradewind.phases import Phases, process_began_s

    phases = Phases(began_s=process_began_s() if arguments.is_process else None)
    with phases("python"):
        goals = goals_of(arguments)
    with _no_ctrl_c_lost():
        from tradewind.llm import LLM

        llm = LLM(goals=goals, progress=not quiet, phases=phases, **_adapters(arguments))
    if not quiet:
        for notice in llm.notices:
            _tell(f"tradewind: {notice}")
    return llm


ADAPTER = "adapter"
"""What the adapter of a command that has one is called."""


def _adapters(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `LLM` for --adapter DIR, with just the room that it needs. Raises UserError."""
    folder = getattr(arguments, "adapter", None)
    if folder is None:
        return {}
    from tradewind.config.adapter_files import look_at

    return {"adapters": {ADAPTER: folder}, "max_adapters": 1, "max_adapter_rank": look_at(folder).rank}


def _adapter_name(arguments: argparse.Namespace) -> str | None:
    return None if arguments.adapter is None else ADAPTER


@contextmanager
def _no_ctrl_c_lost() -> Iterator[None]:
    """Ctrl-C in the block counts even when what it interrupted swallowed the exception, as extension modules do while they are imported."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


# ------------------------------------------------------------------------------------------------------------- commands


def _generate(arguments: argparse.Namespace) -> int:
    # What can be refused without the model is refused before anything is loaded.
    sampling = _sampling(arguments)
    if arguments.raw and arguments.system is not None:
        raise UserError("--system needs the chat template, which --raw leaves out; give one of the two")
    if arguments.logprobs is not None and not arguments.json:
        raise UserError("--logprobs are shown only with --json")
    prompts: list[str] = arguments.prompts or [_from_stdin()]
    for place, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            which = "the prompt" if len(prompts) == 1 else f"prompt {place} of {len(prompts)}"
            raise UserError(f"{which} is empty; give some text")
    with _open(arguments, quiet=arguments.quiet) as llm:
        asked: list[Any] = list(prompts)
        if not arguments.raw:
            asked = [[*_system(arguments), {"role": "user", "content": prompt}] for prompt in prompts]
        sampling = llm.with_default_length(sampling, asked, DEFAULT_MAX_TOKENS)
        if arguments.json or len(asked) * sampling.n > 1:
            errors = _print_outputs(
                llm.generate(asked, sampling, adapter=_adapter_name(arguments), progress=not arguments.quiet),
                prompts,
                as_json=arguments.json,
            )
        else:
            errors = _say(llm.stream(asked[0], sampling, adapter=_adapter_name(arguments)), [])
        for error in errors:
            _tell(f"tradewind: {error}")
        if not arguments.quiet:
            _tell(llm.summary())
    return 1 if errors else 0


def _embed(arguments: argparse.Namespace) -> int:
    texts: list[str] = arguments.prompts or [_from_stdin()]
    with _open(arguments, quiet=arguments.quiet) as llm:
        for vector in llm.embed(
            texts,
            pooling=arguments.pooling,
            normalise=not arguments.no_normalise,
            dimensions=arguments.dimensions,
        ):
            print("[" + ", ".join(str(value) for value in vector) + "]")
    return 0


def _print_outputs(outputs: Sequence[Any], prompts: Sequence[str], *, as_json: bool) -> list[str]:
    """Prints answers that are whole; returns why some are not."""
    import msgspec

    errors: list[str] = []
    for output in outputs:
        for completion in output.completions:
            label = (
                str(output.index + 1) if len(output.completions) == 1 else f"{output.index + 1}.{completion.sample + 1}"
            )
            if completion.error is not None:
                errors.append(f"answer {label} ended early: {completion.error}")
            if as_json:
                record = {"prompt": prompts[output.index], "prompt_tokens": len(output.prompt_tokens)}
                record |= {"cached_tokens": output.cached_tokens, **msgspec.to_builtins(completion)}
                print(msgspec.json.encode(record).decode())
            else:
                print(f"[{label}] {completion.text.strip()}")
    return errors


def _say(deltas: Generator[Delta, None, None], pieces: list[str]) -> list[str]:
    """Prints a streamed answer as it comes and adds it to `pieces`; returns why it ended early, if it did."""
    errors: list[str] = []
    with closing(deltas):
        try:
            for delta in deltas:
                pieces.append(delta.text)
                print(delta.text, end="", flush=True)
                if delta.error is not None:
                    errors.append(f"the answer ended early: {delta.error}")
        finally:
            print(flush=True)
    return errors


def _system(arguments: argparse.Namespace) -> list[dict[str, str]]:
    return [] if arguments.system is None else [{"role": "system", "content": arguments.system}]


def _from_stdin() -> str:
    """All of standard input, less the line's end that echo and editors put there."""
    if sys.stdin is None or sys.stdin.isatty():
        raise UserError("there is no prompt; give one as an argument or on standard input")
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not text: {error}") from None


def _chat(arguments: argparse.Namespace) -> int:
    sampling = _sampling(arguments)
    with _open(arguments) as llm:
        interactive = sys.stdin.isatty()
        if interactive:
            _tell(f"{llm.plan.model}: /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer")
            _edit_lines()
        messages = _system(arguments)
        while True:
            asked, said = messages, list[str]()
            try:
                text = _read_line(interactive)
                if text is None or text in ("/exit", "/quit"):
                    return 0
                if text == "/reset":
                    messages = _system(arguments)
                    _tell("(forgotten)")
                elif text.startswith("/"):
                    _tell(f"(there is no {text.split()[0]}; there are /reset and /exit)")
                elif text:
                    asked = [*messages, {"role": "user", "content": text}]
                    _turn(llm, asked, sampling, said, adapter=_adapter_name(arguments))
            except KeyboardInterrupt:
                # Ends this answer or drops this line, never the conversation; the stream's clean-up has ended the request.
                if not interactive:
                    raise
                _tell("(stopped)" if asked is not messages else "\n(Ctrl-D or /exit ends the conversation)")
            if said:
                messages = [*asked, {"role": "assistant", "content": "".join(said)}]


def _turn(
    llm: LLM, asked: list[dict[str, str]], sampling: SamplingParams, said: list[str], *, adapter: str | None
) -> None:
    """Answers once; the pieces of the answer are added to `said`."""
    try:
        sampling = llm.with_default_length(sampling, [asked], DEFAULT_MAX_TOKENS)
        errors = _say(llm.stream(asked, sampling, adapter=adapter), said)
        for error in errors:
            _tell(f"({error})")
    except UserError as error:
        # A conversation that grew over the limit is refused, not cut: the person decides what to forget.
        _tell(f"({error}; /reset starts anew)")


def _edit_lines() -> None:
    """Arrow keys and earlier lines at the prompt, where Python was built with them."""
    with suppress(ImportError):
        import readline  # noqa: F401


def _read_line(interactive: bool) -> str | None:
    """The next line without the space around it; None at the end."""
    if not interactive:
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        if sys.stdout.isatty():
            return input("> ").strip()
        # Standard output has only answers, also when it goes to a file and the person is at the keyboard.
        print("> ", end="", file=sys.stderr, flush=True)
        return input().strip()
    except EOFError:
        _tell("")
        return None


def _plan(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    import msgspec

    from tradewind.assemble import make_plan
    from tradewind.plan_view import plan_text
    from tradewind.weights.fetch import RichProgress

    if cli_plan_goals.is_goals_file(arguments.model_name):
        nothing_beside(arguments)
        return cli_plan_goals.run(arguments, Path(arguments.model_name))
    for option in ("trace", "times", "out"):
        if getattr(arguments, option) is not None:
            raise UserError(f"--{option} goes with a file of goals: tradewind plan GOALS.toml --{option} …")
    arguments.model = model_of(arguments)
    plan = make_plan(goals_of(arguments), progress=RichProgress()).plan
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(plan), indent=2).decode())
    else:
        _print_rich(plan_text(plan))
    return 0


def _techniques(arguments: argparse.Namespace) -> int:
    import msgspec

    from tradewind.config.techniques import TECHNIQUES
    from tradewind.plan_view import techniques_text

    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(TECHNIQUES), indent=2).decode())
    else:
        _print_rich(techniques_text(TECHNIQUES))
    return 0


def _print_rich(what: Any) -> None:
    """Prints tables through our own stdout, so that a reader who leaves is met the same way everywhere."""
    from rich.console import Console

    console = Console()
    with console.capture() as captured:
        console.print(what)
    print(captured.get(), end="")


def _bench(arguments: argparse.Namespace) -> int:
    from tradewind.bench.offline import check_arguments, run_and_report

    names = [name.strip() for name in arguments.workloads.split(",") if name.strip()]
    check_arguments(workloads=names, repeats=arguments.repeats)
    with _open(arguments) as llm:
        run_and_report(llm, workloads=names, repeats=arguments.repeats, out=arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
