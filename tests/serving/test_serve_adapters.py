"""`tradewind serve` with adapters, the engine in a process of its own: answers are those of merged weights, adapters come and go, and what
cannot be served ends the start with one sentence."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn")

from adapter_support import merge, write_adapter
from process_support import PATIENCE_S, Server, Stream, wait_until
from safetensors.numpy import load_file, save_file

from tests.engine.tiny_engine import open_llm, write_checkpoint
from tradewind.contract.request import SamplingParams
from tradewind.kernels.cpu import library

pytestmark = pytest.mark.timeout(240)

NAMES = ("red", "green", "blue")
MEANS = ("--backend", "cpu", "--compute", "f32", "--kv-format", "f32", "--threads", "1")
PROMPTS = ([5, 6, 7], [*range(40, 120)], [9] * 30)
TOKENS = 24
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass(frozen=True)
class Tiny:
    """A model, adapters of it, and what it says to each of PROMPTS with each merged into its weights; "" is the model alone."""

    folder: Path
    adapters: Path
    wanted: dict[str, list[list[int]]]

    @property
    def name(self) -> str:
        return self.folder.name


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    if why := library.why_not():
        pytest.skip(why)
    base = tmp_path_factory.mktemp("adapters")
    model = write_checkpoint("full", base / "tiny")
    wanted = {"": answers_of(model)}
    for seed, name in enumerate(NAMES):
        targets = {"green": {"targets": ("self_attn.q_proj", "self_attn.v_proj")}}.get(name, {})
        adapter = write_adapter(base / "in" / name, model, seed=seed, rank=4 + 6 * seed, **targets)  # type: ignore[arg-type]
        wanted[name] = answers_of(merge(model, adapter, base / f"merged-{name}"))
    assert len({str(each) for each in wanted.values()}) == 4, "every adapter was to say something of its own"
    return Tiny(model, base / "in", wanted)


def answers_of(folder: Path) -> list[list[int]]:
    with open_llm(folder) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
        return [list(out.completions[0].tokens) for out in llm.generate([list(p) for p in PROMPTS], sampling)]


def serve(tiny: Tiny, tmp_path: Path, *options: str) -> Server:
    command = ["serve", str(tiny.folder), "--port", "0", *MEANS, *options]
    return Server(tmp_path, program=f"import sys; from tradewind.cli import main; sys.exit(main({command!r}))")


def given(tiny: Tiny, *names: str) -> list[str]:
    return [word for name in names for word in ("--adapter", f"{name}={tiny.adapters / name}")]


@pytest.fixture
def live(tiny: Tiny, tmp_path: Path) -> Iterator[Server]:
    made = serve(
        tiny, tmp_path, *given(tiny, *NAMES), "--adapter-folder", str(tiny.adapters), "--adapter-slots", "3",
        "--restart-engine",
    )  # fmt: skip
    try:
        yield made
    finally:
        made.close()


def ask(server: Server, tiny: Tiny, name: str, which: int = 0) -> tuple[int, Any]:
    status, answer, _ = server.post(
        "/v1/completions", model=name or tiny.name, prompt=list(PROMPTS[which]), max_tokens=TOKENS, temperature=0,
        ignore_eos=True, return_token_ids=True,
    )  # fmt: skip
    return status, answer


def said(server: Server, tiny: Tiny, name: str, which: int = 0) -> list[int]:
    status, answer = ask(server, tiny, name, which)
    assert status == 200, answer
    return list(answer["choices"][0]["token_ids"])


def cached(server: Server, tiny: Tiny, name: str) -> int:
    status, answer = ask(server, tiny, name, 1)
    assert status == 200 and list(answer["choices"][0]["token_ids"]) == tiny.wanted[name][1], name
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def narrow(tensors: dict[str, Any]) -> dict[str, Any]:
    """An adapter for a model of fewer channels."""
    return {name: value[:, :60].copy() if ".lora_A." in name else value for name, value in tensors.items()}


def renamed(tensors: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {name.replace(old, new): value for name, value in tensors.items()}


def test_answers_of_merged_weights_side_by_side(live: Server, tiny: Tiny) -> None:
    """Everybody at once, the model alone among them, in one engine's steps."""
    asked = [(name, which) for which in range(len(PROMPTS)) for name in ("", *NAMES)] * 2
    got: dict[int, list[int]] = {}
    gate = threading.Barrier(len(asked))

    def one(index: int) -> None:
        gate.wait(PATIENCE_S)
        got[index] = said(live, tiny, *asked[index])

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(asked))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for index, (name, which) in enumerate(asked):
        assert got[index] == tiny.wanted[name][which], (name, which)
    listed = {each["id"]: each for each in live.get("/v1/models")[1]["data"]}
    assert list(listed) == [tiny.name, *NAMES]
    assert {listed[name]["parent"] for name in NAMES} == {tiny.name}


def test_no_prefix_is_shared_across_adapters(live: Server, tiny: Tiny) -> None:
    for name in ("", *NAMES):
        assert cached(live, tiny, name) == 0, name
    for name in ("", *NAMES):
        assert cached(live, tiny, name) > 0, name
    # Another name of the same version is the same adapter; other files under a known name are another one.
    assert live.post(LOAD, lora_name="crimson", lora_path="red")[0] == 200
    status, answer = ask(live, tiny, "crimson", 1)
    assert status == 200 and answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert answer["choices"][0]["token_ids"] == tiny.wanted["red"][1]
    assert live.post(LOAD, lora_name="red", lora_path="blue")[0] == 200
    assert said(live, tiny, "red", 0) == tiny.wanted["blue"][0]


def test_adapters_come_and_go_while_one_is_in_use(live: Server, tiny: Tiny) -> None:
    body: dict[str, Any] = {"model": "blue", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with Stream(live, list(PROMPTS[0]), max_tokens=400, **body) as stream:  # type: ignore[arg-type]
        stream.events(2)
        status, answer, _ = live.post(UNLOAD, lora_name="blue")
        assert (status, answer["loaded"]) == (200, ["red", "green"])
        assert ask(live, tiny, "blue")[0] == 404
        # Others need its place meanwhile; it is not taken from whoever uses it.
        write_adapter(tiny.adapters / "grey", tiny.folder, seed=7)
        assert live.post(LOAD, lora_name="grey", lora_path="grey")[0] == 200
        for name in ("red", "green"):
            assert said(live, tiny, name) == tiny.wanted[name][0]
        assert ask(live, tiny, "grey")[0] == 200
        stream.rest()
        whole = stream.text
        assert stream.done and stream.finish == "length" and stream.error is None
    assert live.post(LOAD, lora_name="blue", lora_path="blue")[0] == 200
    status, answer, _ = live.post("/v1/completions", prompt=list(PROMPTS[0]), max_tokens=400, **body)
    assert status == 200 and answer["choices"][0]["text"] == whole


def test_what_cannot_be_loaded_is_refused_before_anybody_asks(live: Server, tiny: Tiny) -> None:
    """Shapes and names of matrices are known to the engine alone, which is asked across the border."""
    bad = tiny.adapters / "bad"
    write_adapter(bad, tiny.folder, seed=0)
    tensors = load_file(bad / "adapter_model.safetensors")
    lm_head = "base_model.model.lm_head.lora_{}.weight"
    changes: list[tuple[dict[str, Any], str]] = [
        (narrow(tensors), "it was made for another model"),
        (renamed(tensors, "q_proj", "x_proj"), "which a llama model does not have"),
        (
            {lm_head.format("A"): np.zeros((4, 64), np.float32), lm_head.format("B"): np.zeros((260, 4), np.float32)},
            "which cannot be changed",
        ),
    ]
    for change, message in changes:
        save_file(change, bad / "adapter_model.safetensors")
        status, answer, _ = live.post(LOAD, lora_name="bad", lora_path="bad")
        assert status == 400 and message in answer["error"]["message"], answer
    (bad / "adapter_model.safetensors").write_bytes(b"no tensors")
    status, answer, _ = live.post(LOAD, lora_name="bad", lora_path="bad")
    assert status == 400, answer
    write_adapter(bad, tiny.folder, seed=0, rank=32)
    status, answer, _ = live.post(LOAD, lora_name="bad", lora_path="bad")
    assert (
        status == 400 and "has rank 32; the largest that this engine has room for is 16" in answer["error"]["message"]
    )
    assert [each["id"] for each in live.get("/v1/models")[1]["data"]] == [tiny.name, *NAMES]
    assert said(live, tiny, "red") == tiny.wanted["red"][0]


def test_another_engine_has_them_again(live: Server, tiny: Tiny) -> None:
    assert live.post(LOAD, lora_name="crimson", lora_path="red")[0] == 200
    assert said(live, tiny, "red") == tiny.wanted["red"][0]
    first = live.engine_pid
    os.kill(first, signal.SIGKILL)
    wait_until(
        lambda: live.engines() not in ([], [first]) and ask(live, tiny, "")[0] == 200,
        limit_s=120,
        what="another engine",
    )
    assert live.engine_pid != first
    for name in (*NAMES, ""):
        assert said(live, tiny, name, 1) == tiny.wanted[name][1], name
    assert said(live, tiny, "crimson", 1) == tiny.wanted["red"][1]


# -- starts that cannot be -----------------------------------------------------------------------------------------------


def refused(tiny: Tiny, *options: str) -> str:
    command = [sys.executable, "-m", "tradewind", "serve", str(tiny.folder), "--port", "0", *MEANS, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, (done.returncode, done.stderr)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("tradewind: ") and not done.stdout and "Traceback" not in done.stderr
    return line


def test_starts_that_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    red = str(tiny.adapters / "red")
    other = write_adapter(tmp_path / "other", tiny.folder, seed=0)
    tensors = load_file(other / "adapter_model.safetensors")
    save_file(narrow(tensors), other / "adapter_model.safetensors")
    moe = write_adapter(tmp_path / "moe", tiny.folder, seed=0)
    save_file(renamed(tensors, "mlp.", "mlp.experts.0."), moe / "adapter_model.safetensors")
    script = tmp_path / "script.json"
    script.write_text('{"tokenizer": "bytes"}')
    for options, message in (
        (["--adapter", f"x={tmp_path}/nothing"], "nothing' is no adapter"),
        (["--adapter", f"x={red}", "--adapter-rank", "2"], "'x' has rank 4; the largest that this engine has room for is 2"),
        (["--adapter", f"x={other}"], "adapter 'x': the adapter's change of layers."),
        (["--adapter", f"x={moe}"], "which a llama model does not have"),
        (["--adapter", f"x={red}", "--adapter", f"x={red}"], "two adapters are called 'x'"),
        (["--adapter", f"{tiny.name}={red}"], "the model's own"),
        (["--adapter", red], "is not a name and a folder; give NAME=DIR"),
        (["--adapter-folder", f"{tmp_path}/nothing"], "is no folder"),
        (["--adapter", f"x={red}", "--script", str(script)], "a script's answers know no adapters"),
        (["--adapter-slots", "2000"], "adapter slots is 2000; it must be a whole number from 1 to 1024"),
        (["--adapter", f"x={red}", "--adapter-slots", "900", "--memory-limit", "200MiB"], "--adapter-slots"),
        (["--lora-modules", "x=y"], "--adapter NAME=DIR"),
        (["--max-loras", "4"], "--adapter-slots N"),
        (["--max-lora-rank", "64"], "--adapter-rank R"),
        (["--enable-lora"], "--adapter NAME=DIR"),
    ):  # fmt: skip
        assert message in refused(tiny, *options), options


def test_more_adapters_than_slots_take_turns(tiny: Tiny, tmp_path: Path) -> None:
    server = serve(tiny, tmp_path, *given(tiny, *NAMES), "--adapter-slots", "1")
    try:
        for name in ("red", "blue", "red", "", "green"):
            assert said(server, tiny, name) == tiny.wanted[name][0]
        assert server.post(LOAD, lora_name="x", lora_path="red")[0] == 403
    finally:
        server.close()


def test_the_offline_commands_take_one(tiny: Tiny, tmp_path: Path) -> None:
    """The same prompt through `generate` with the adapter, and through `generate` on merged weights."""
    adapter = write_adapter(tmp_path / "a", tiny.folder, seed=1)
    merged = merge(tiny.folder, adapter, tmp_path / "merged")

    def generate(model: Path, *options: str, code: int = 0) -> str:
        command = [
            sys.executable,
            "-m",
            "tradewind",
            "generate",
            "hello there",
            "--model",
            str(model),
            "--raw",
            "--quiet",
            "--json",
        ]
        command += ["--max-tokens", "16", "--ignore-eos", *MEANS, *options]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout.partition('"tokens"')[2].partition("]")[0]

    wanted = generate(merged)
    assert generate(tiny.folder, "--adapter", str(adapter)) == wanted
    assert generate(tiny.folder) != wanted
    assert "is no adapter" in generate(tiny.folder, "--adapter", str(tmp_path), code=2)
    shutil.rmtree(merged)
