"""The command line without a model: what is wrong is said in one sentence with exit code 2, and nothing is loaded for it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

from tradewind import __version__, cli
from tradewind.config.choices import WORDS
from tradewind.config.techniques import TECHNIQUES
from tradewind.contract.errors import EngineDeadError, UserError

COMMANDS = ("generate", "chat", "embed", "plan", "serve", "techniques", "bench")


class Keyboard(io.StringIO):
    """Standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_model_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*args: object, **options: object) -> None:
        raise AssertionError("a model was opened")

    monkeypatch.setattr(cli, "_open", opened)
    monkeypatch.setattr(sys, "stdin", Keyboard())


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one sentence with which the words are refused."""
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("tradewind: ")
    return err.removeprefix("tradewind: ").strip()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["genrate", "x"],
            "; did you mean generate?",
        ),
        (["Why is the sky blue?"], 'to ask something: tradewind generate "Why is the sky blue?"'),
        (["generate", "x", "--temprature", "1"], "there is no option --temprature; did you mean --temperature?"),
        (["generate", "x", "--temprature=1"], "there is no option --temprature; did you mean --temperature?"),
        (["generate", "x", "--colour"], "there is no option --colour; see tradewind generate --help"),
        (["generate", "x", "--temp", "1"], "there is no option --temp"),
        (["chat", "hello"], "'hello' is one word too many"),
        (["plan", "a", "b"], "'b' is one word too many"),
        (["generate", "x", "--max-tokens", "0"], "argument --max-tokens: 0 is too small; at least 1"),
        (["generate", "x", "--max-tokens", "many"], "'many' is not a whole number"),
        (["generate", "x", "--max-tokens"], "argument --max-tokens: expected one argument"),
        (
            ["generate", "x", "--scenario", "memry"],
            "'memry' is none of balanced, latency, throughput, memory; did you mean memory?",
        ),
        (["generate", "x", "--temperature", "nan"], "temperature is nan; it must be a number from 0 (greedy) to 100"),
        (["generate", "x", "--temperature", "inf"], "temperature is inf"),
        (["generate", "x", "--temperature", "hot"], "argument --temperature: invalid float value: 'hot'"),
        (["generate", "x", "--top-p", "0"], "top_p is 0.0"),
        (["generate", "x", "--n", "0"], "n is 0"),
        (["generate", "x", "--min-tokens", "9", "--max-tokens", "5"], "min_tokens is 9, over max_tokens 5"),
        (["generate", "x", "--stop", ""], "stop string number 1 is empty"),
        (["generate", "x", "--logprobs", "3"], "--logprobs are shown only with --json"),
        (["generate", "x", "--raw", "--system", "y"], "--system needs the chat template, which --raw leaves out"),
        (["generate"], "there is no prompt; give one as an argument or on standard input"),
        (["generate", ""], "the prompt is empty"),
        (["generate", " \n\t"], "the prompt is empty"),
        (["generate", "a", " "], "prompt 2 of 2 is empty"),
        (["chat", "--n", "2"], "there is no option --n"),
        (["plan", "a", "--model", "b"], "two models are named, 'a' and 'b'; give one"),
        (["plan", "no such model"], "no model 'no such model': tried a local path"),
        (["plan", ""], "the model name is empty"),
        (["plan", "x", "--memory-limit", "much"], "'much' is no size"),
        (["plan", "x", "--memory-limit", ""], "'' is no size"),
        (["plan", "x", "--kv-dtype", "fp4"], "argument --kv-format/--kv-dtype: 'fp4' is none of f32, f16, bf16, fp8"),
        (["bench", "online"], "there is no command 'online', only offline, serve"),
        (["bench", "offline", "--workloads", "L1,L9"], "unknown workloads: 'L9'"),
        (["bench", "offline", "--workloads", ","], "no workload is named"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_in_one_sentence(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert said in refusal(capsys, *words)


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_tells_every_option(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: tradewind")
    if len(words) == 1:
        assert all(name in text for name in COMMANDS)
    lines = text.splitlines()
    for place, line in enumerate(lines):
        # An option whose line holds nothing but its name has its help on the next line.
        if line.startswith("  --") and "  " not in line.strip():
            assert lines[place + 1].startswith("      "), f"{line.strip()} is not explained"


def test_no_words_show_the_help_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "tradewind COMMAND --help" in err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tradewind {__version__}\n"


def test_prompts_may_stand_between_options() -> None:
    arguments = cli._parse(["generate", "a", "--max-tokens", "5", "b", "--raw", "c"])
    assert arguments.prompts == ["a", "b", "c"]
    assert (arguments.max_tokens, arguments.raw) == (5, True)
    assert cli._parse(["generate", "-5 degrees", "--", "--raw"]).prompts == ["-5 degrees", "--raw"]


def test_means_of_a_gpu_are_pinned_by_their_options() -> None:
    words = "plan x --backend cuda --quantization fp8 --kv-dtype fp8 --deterministic --load-format dummy --no-graphs"
    means = cli.goals_of(cli._parse(words.split())).means
    assert (means.backend, means.quantization, means.kv_format) == ("cuda", "fp8", "fp8")
    assert (means.deterministic, means.load_format, means.graphs) == (True, "dummy", False)
    assert cli.goals_of(cli._parse(["plan", "x", "--kv-format", "fp8"])).means.kv_format == "fp8"
    for load_format in WORDS["load_format"]:
        means = cli.goals_of(cli._parse(["plan", "x", "--load-format", load_format])).means
        assert means.load_format == load_format
    left = cli.goals_of(cli._parse(["plan", "x"])).means
    assert all(getattr(left, name) is None for name in left.__struct_fields__)


def test_standard_input_is_one_prompt_without_its_last_line_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n\n"))
    assert cli._from_stdin() == "two\nlines\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    with pytest.raises(UserError, match="standard input is not text"):
        cli._from_stdin()


def test_techniques_as_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["techniques", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(TECHNIQUES)
    assert cli.main(["techniques"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in TECHNIQUES)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("too much"), 2, "tradewind: too much\n"),
        (EngineDeadError("it broke"), 1, "tradewind: it broke\n"),
        (KeyboardInterrupt(), 130, "\ntradewind: interrupted\n"),
    ],
    ids=["user", "engine", "interrupted"],
)
def test_every_end_has_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    import signal

    def fail(arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(cli, "_open", fail)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    assert cli.main(["generate", "x"]) == code
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize("words", [["techniques", "--json"], ["plan", "no such model"]], ids=" ".join)
def test_a_reader_who_leaves_is_no_error(words: list[str]) -> None:
    """Both streams lead into a pipe that nobody reads: the exit code is the command's own, not the interpreter's 120."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run([sys.executable, "-m", "tradewind", *words], stdout=pipe, stderr=pipe, timeout=60)
    assert done.returncode == (0 if words[0] == "techniques" else 2)


def test_the_help_imports_next_to_nothing() -> None:
    program = (
        "import sys; from tradewind.cli import main; main(['generate', '--help']);"
        "print([m for m in ('torch', 'numpy', 'rich', 'jinja2', 'tokenizers', 'asyncio') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"
