"""What an operator may get wrong on the command line of `serve`, and what a client may learn of the server's machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from http_support import Live, chat_body, live
from process_support import server

from tradewind.contract.errors import UserError
from tradewind.serve import ServeOptions, name_of, read_keys

pytestmark = pytest.mark.timeout(240)


def refused(tmp_path: Path, *options: str) -> str:
    """The sentence with which a start is refused."""
    script = tmp_path / "script.json"
    script.write_text('{"tokenizer": "bytes"}')
    command = [sys.executable, "-m", "tradewind", "serve", "--script", str(script), "--port", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2, (done.returncode, done.stderr)
    (line,) = done.stderr.splitlines()
    assert line.startswith("tradewind: ") and not done.stdout
    return line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        # `--api-key "$KEY"` with KEY not set must not start a server that is open to all.
        (["--api-key", ""], "an API key is empty"),
        (["--api-key", "good", "--api-key", ""], "an API key is empty"),
        (["--api-key", "a b"], "printable ASCII"),
        (["--api-key", "schlüssel"], "printable ASCII"),
        (["--served-name", " "], "--served-name is empty"),
        (["--cors-origin", ""], "--cors-origin is ''"),
        (["--cors-origin", "http://localhost:3000/"], "an origin is a scheme, a host and a port"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_would_not_do_what_they_say(options: list[str], said: str, tmp_path: Path) -> None:
    from tradewind.config.goals import Goals
    from tradewind.serve import serve

    keys = {"--api-key": "api_keys", "--served-name": "served_names", "--cors-origin": "cors_origins"}
    given = {keys[options[0]]: tuple(options[1::2])}
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        serve(ServeOptions(goals=Goals(model="none"), script=None, port=0, **given))  # type: ignore[arg-type]


def test_an_empty_key_ends_the_start(tmp_path: Path) -> None:
    assert "an API key is empty" in refused(tmp_path, "--api-key", "")


def test_a_template_that_is_broken_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    assert "cannot be read" in refused(tmp_path, "--chat-template", str(path))
    path.write_text("{{ messages")
    assert "the chat template is broken at line 1" in refused(tmp_path, "--chat-template", str(path))
    path.write_bytes(b"\xff\xfe")
    assert "no text in UTF-8" in refused(tmp_path, "--chat-template", str(path))


def test_a_template_of_the_operator_s_own(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("Q: {{ messages[0].content }} A:")
    rules: Any = [{"prompt": "Q: why A:", "answer": "so"}]
    with server(tmp_path, "--chat-template", str(path), rules=rules) as one:
        status, answer, _ = one.post("/v1/chat/completions", messages=[{"role": "user", "content": "why"}])
        assert status == 200 and answer["choices"][0]["message"]["content"] == "so"


def test_keys_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# for the team\n\n one \ntwo\n")
    assert read_keys(path) == ("one", "two")
    path.write_text("# nobody\n")
    with pytest.raises(UserError, match="no API key"):
        read_keys(path)


def test_a_model_is_called_by_its_last_name(tmp_path: Path) -> None:
    file = tmp_path / "Some-Model.Q4_1.gguf"
    file.touch()
    folder = tmp_path / "some-folder"
    folder.mkdir()
    assert name_of(str(file)) == "Some-Model.Q4_1" and name_of(f"{folder}/") == "some-folder"
    assert name_of("smollm2") == "smollm2" and name_of("org/model") == "org/model"


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", True),
        ("", False),
        ("two words", False),
        ("x" * 200, False),
    ],
)
def test_the_caller_s_span_reaches_the_receipt(header: str, kept: bool) -> None:
    receipts: list[Any] = []
    with live(says={"hi": "hello"}, on_receipt=receipts.append) as one:
        assert isinstance(one, Live)
        one.post("/v1/chat/completions", chat_body("hi"), headers={"traceparent": header})
    assert [receipt.traceparent for receipt in receipts] == [header if kept else ""]


def test_a_listener_in_this_process_gets_columns_whole() -> None:
    """`EngineLoop` spells a step's columns out only for sinks that want single events."""
    import time

    import numpy as np

    from tradewind.contract.events import TokensOut
    from tradewind.engine.columns import StepTokens
    from tradewind.engine.loop import EngineLoop

    class Whole:
        def __init__(self) -> None:
            self.taken: list[Any] = []

        def take_reports(self, reports: list[Any]) -> None:
            self.taken.append(reports)

    class Single:
        def __init__(self) -> None:
            self.taken: list[Any] = []

        def take(self, event: Any) -> None:
            self.taken.append(event)

    whole, single = Whole(), Single()
    unused: Any = None
    loop = EngineLoop(scheduler=unused, executor=unused, clock=time.monotonic, sinks=(whole, single))
    two = np.array([1, 2], np.int32)
    column = StepTokens(at_s=0.0, ids=["a", "b"], tokens=two, generated=two, cached=two, prompt=two)
    loop._tell([column])
    loop._tell([])
    assert whole.taken == [[column]]
    assert [type(event) for event in single.taken] == [TokensOut] * 2 and single.taken[1].tokens == (2,)
