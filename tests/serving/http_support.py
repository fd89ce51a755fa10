"""A live front over the scripted executor: real tokenizer, scheduler and HTTP, no model."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tradewind.config.goals import AdapterRoom
from tradewind.config.plan import CachePlan, SchedulePlan
from tradewind.contract.kv import KVGroup
from tradewind.contract.step import Enter, Step
from tradewind.engine.client import LocalClient
from tradewind.engine.loop import EngineLoop
from tradewind.engine.scheduler import Scheduler
from tradewind.serving.adapters import AdapterBook
from tradewind.serving.chat_template import CHATML, ChatTemplate
from tradewind.serving.http.app import make_app
from tradewind.serving.http.front import Front, Options
from tradewind.serving.http.local import LocalEngine, Watch
from tradewind.serving.images import ImageReader
from tradewind.serving.intake import Intake, Limits
from tradewind.serving.parsers.table import ParserChoice
from tradewind.serving.structured import StructuredOutput
from tradewind.serving.tokenizer import _BYTE_OF_CHARACTER, TextTokenizer
from tradewind.simulate.clock import RealClock
from tradewind.simulate.scripted import ScriptedExecutor

BOS, START, END, EOS = 256, 257, 258, 259
VOCAB = 264
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ '<|im_start|>system\\n' }}{{ tools | tojson }}{{ '<|im_end|>\\n' }}{% endif %}"
    + CHATML
)
MODEL = "scripted"
HERMES = ParserChoice(name="hermes", reasoning="none", reasons=("hermes: the test says so",))
THINKING = ParserChoice(name="hermes", reasoning="think", reasons=("hermes: the test says so",))


def byte_tokenizer() -> TextTokenizer:
    """One id per byte, so that every character beyond ASCII takes several; BOS, ChatML marks and EOS above."""
    backend = Tokenizer(models.BPE(vocab=dict(_BYTE_OF_CHARACTER), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<s>", "<|im_start|>", "<|im_end|>", "</s>")]
    )
    return TextTokenizer(
        backend,
        kind="byte_level",
        bos_id=BOS,
        eos_id=EOS,
        eos_ids=frozenset({EOS, END}),
        prefix_ids=(BOS,),
        chat_templates={"default": TEMPLATE},
    )


class Parrot(ScriptedExecutor):
    """Says what its script has for the prompt: the answer of the first key that the prompt's text contains, then end of text.

    Without one it says printable letters that depend on every visible token (and on the seed when the temperature is not 0).
    """

    def __init__(self, *, says: Mapping[str, str | bytes | Sequence[int]], **more: Any) -> None:
        super().__init__(**more)
        self._says = {
            key: list(value.encode()) if isinstance(value, str) else list(value) for key, value in says.items()
        }
        self._tokenizer = byte_tokenizer()
        self._chosen: dict[str, list[int] | None] = {}
        self.entered: list[Enter] = []

    def submit(self, step: Step) -> None:
        self.entered.extend(step.enter)
        super().submit(step)

    def _answer(self, state: Any, position: int, visible: Sequence[bytes]) -> int:
        enter: Enter = state.enter
        if enter.request_id not in self._chosen:
            text = self._tokenizer.decode(state.tokens[: enter.prompt_tokens])
            self._chosen[enter.request_id] = next((ids for key, ids in self._says.items() if key in text), None)
        answer = self._chosen[enter.request_id]
        at = position - enter.prompt_tokens
        if answer is not None:
            if at < len(answer):
                return answer[at]
            if at == len(answer):
                return EOS
        digest = 0
        for part in visible:
            digest = zlib.crc32(part, digest)
        if enter.sampling.temperature:
            digest = zlib.crc32(enter.seed.to_bytes(8, "little"), digest)
        return 97 + digest % 26


class Rig:
    """Engine and front, not yet served."""

    def __init__(
        self,
        *,
        says: Mapping[str, str | bytes | Sequence[int]] | None = None,
        max_running: int = 16,
        max_context: int = 512,
        pages: int = 1025,
        page_tokens: int = 16,
        step_s: float = 0.0,
        options: Options | None = None,
        prefix_cache: bool = True,
        stall: Mapping[int, float] | None = None,
        die_at: int | None = None,
        fail: Mapping[tuple[str, int], str] | None = None,
        drafts: int = 0,
        accept: Callable[[str, int], int] | None = None,
        max_tokens_per_step: int = 512,
        policy: Literal["arrival", "fair", "priority"] = "arrival",
        age_limit_s: float = 5.0,
        **front: Any,
    ) -> None:
        group = KVGroup(
            index=0, kind="full", layers=(0,), kv_heads=1, head_dim=8, page_tokens=page_tokens, format="f32"
        )
        cache = CachePlan(groups=(group,), pages=(pages,), page_tokens=page_tokens, prefix_cache=prefix_cache)
        schedule = SchedulePlan(
            max_running=max_running,
            max_tokens_per_step=max_tokens_per_step,
            max_context=max_context,
            policy=policy,
            steps_in_flight=2,
            age_limit_s=age_limit_s,
            max_preemptions=3,
        )
        self.device = Parrot(
            says=says or {},
            groups=cache.groups,
            pages=cache.pages,
            max_running=max_running,
            clock=RealClock(),
            delay_s=step_s,
            stall=stall,
            die_at=die_at,
            fail=fail,
            accept=accept,
            vocab_size=VOCAB,
        )
        self.watch = Watch()
        self.scheduler = Scheduler(schedule=schedule, cache=cache, clock=time.monotonic, drafts_per_row=drafts)
        self.loop = EngineLoop(
            scheduler=self.scheduler, executor=self.device, clock=time.monotonic, sinks=(self.watch,)
        )
        self.client = LocalClient(self.loop)
        self.engine = LocalEngine(self.client, self.loop, self.watch)
        self.tokenizer = byte_tokenizer()
        self.front = Front(
            client=self.engine,
            tokenizer=self.tokenizer,
            template=ChatTemplate.for_tokenizer(self.tokenizer),
            intake=Intake(Limits(vocab_size=VOCAB, max_context=max_context, eos_ids=(END, EOS))),
            model=MODEL,
            max_running=max_running,
            options=options or Options(),
            **front,
        )


@contextmanager
def served(app: Starlette) -> Iterator[int]:
    """Runs an application on a free loopback port; gives the port."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        loop="uvloop",
        http="httptools",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="http-under-test")
    thread.start()
    try:
        until(lambda: server.started, "the server did not start")
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        sock.close()


class Live:
    """A client of a live server, and what is behind it."""

    def __init__(self, port: int, rig: Rig, app: Starlette) -> None:
        self.port, self.rig, self.app = port, rig, app
        self.url = f"http://127.0.0.1:{port}"

    def send(
        self, method: str, path: str, body: Any = None, *, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers in lower case, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            self._ask(connection, method, path, body, headers)
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    @staticmethod
    def _ask(
        connection: http.client.HTTPConnection, method: str, path: str, body: Any, headers: Mapping[str, str] | None
    ) -> None:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        base = {} if data is None else {"Content-Type": "application/json"}
        connection.request(method, path, data, {**base, **(headers or {})})

    def post(self, path: str, body: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
        got, _, data = self.send("POST", path, body, headers=headers)
        assert got == status, (got, data[:500])
        return json.loads(data)

    def get(self, path: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Any:
        got, _, data = self.send("GET", path, headers=headers)
        assert got == status, (got, data[:500])
        return json.loads(data)

    def error(self, path: str, body: Any, *, status: int = 400, headers: Mapping[str, str] | None = None) -> Any:
        """The `error` of a refusal, after checking its shape."""
        answer = self.post(path, body, status=status, headers=headers)
        assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}, answer
        message = answer["error"]["message"]
        assert message and "\n" not in message and "Traceback" not in message
        return answer["error"]

    @contextmanager
    def opened(self, path: str, body: Any, *, headers: Mapping[str, str] | None = None) -> Iterator[Iterator[Any]]:
        """The events of a stream as they come; leaving closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            self._ask(connection, "POST", path, {**body, "stream": True}, headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield events_of(response)
        finally:
            sock = connection.sock
            if sock is not None:
                sock.close()
            connection.close()

    def stream(self, path: str, body: Any, *, headers: Mapping[str, str] | None = None) -> list[Any]:
        """All events of a stream; the last one must be [DONE]."""
        with self.opened(path, body, headers=headers) as events:
            seen = list(events)
        assert seen[-1] == "[DONE]", seen[-1]
        return seen[:-1]

    def chat(self, text: str, *, status: int = 200, **fields: Any) -> Any:
        return self.post("/v1/chat/completions", chat_body(text, **fields), status=status)

    def chat_stream(self, text: str, **fields: Any) -> list[Any]:
        return self.stream("/v1/chat/completions", chat_body(text, **fields))

    def running(self) -> int:
        return self.rig.engine.stats().running


def events_of(response: Any) -> Iterator[Any]:
    """SSE as written: only whole events, each `data` line JSON or [DONE]."""
    data = b""
    while True:
        line = response.readline()
        if not line:
            assert not data, f"the stream ended inside an event: {data!r}"
            return
        if line == b"\n":
            if data:
                yield data.decode() if data == b"[DONE]" else json.loads(data)
            data = b""
        elif line.startswith(b"data: "):
            data += line[6:-1]
        else:
            assert line.startswith((b"event: ", b":")), line


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


@contextmanager
def live(**facts: Any) -> Iterator[Live]:
    """A front on a scripted engine, served on loopback."""
    rig = Rig(**facts)
    app = make_app(rig.front)
    with rig.client.start(), served(app) as port:
        yield Live(port, rig, app)


def until(true: Callable[[], bool], why: str, *, seconds: float = 5.0) -> float:
    """Waits for something; how long it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, why
        time.sleep(0.005)
    return time.monotonic() - began


def content(events: Sequence[Any], index: int = 0, field: str = "content") -> str:
    """The sum of a chat stream."""
    return "".join(
        choice["delta"].get(field) or "" for event in events for choice in event["choices"] if choice["index"] == index
    )


def finishes(events: Sequence[Any]) -> list[str]:
    return [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]]


@contextmanager
def live_model(
    path: str, *, options: Options | None = None, adapters: AdapterRoom | None = None, **means: Any
) -> Iterator[Live]:
    """A front on a real model, the whole house behind it."""
    from tradewind.assemble import build_planned, make_plan
    from tradewind.config.goals import Goals, Means
    from tradewind.serving.parsers.table import parser_for

    watch = Watch()
    engine = build_planned(make_plan(Goals(model=path, adapters=adapters, means=Means(**means))), sinks=(watch,))
    plan = engine.plan
    local = LocalEngine(engine.client, engine.client.loop, watch)
    template = engine.template
    front = Front(
        client=local,
        tokenizer=engine.tokenizer,
        template=template,
        intake=Intake(Limits.of(plan, eos_ids=engine.tokenizer.eos_ids)),
        model=MODEL,
        max_running=plan.schedule.max_running,
        adapters=None if adapters is None else AdapterBook(largest_rank=adapters.rank, taken=(MODEL,)),
        options=options or Options(),
        structured=StructuredOutput(engine.tokenizer),
        images=ImageReader.of(plan),
        speech=parser_for(plan.card.family, getattr(template, "source", None), token_id=engine.tokenizer.token_id),
    )
    rig = Rig.__new__(Rig)
    rig.front, rig.engine, rig.client, rig.tokenizer, rig.watch = front, local, engine.client, engine.tokenizer, watch
    app = make_app(front)
    with engine.client.start(), served(app) as port:
        yield Live(port, rig, app)
