"""The Python face: `LLM` and its asynchronous twin.

Knows: prompts, messages and answers. Refuses to know: how an engine is built (assemble) and how requests are scheduled (engine).

    from tradewind.llm import LLM
    with LLM("smollm2") as llm:
        print(llm.generate("The sea is")[0].completions[0].text)
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any, Self

import msgspec

from tradewind.assemble import Engine, build_engine
from tradewind.config.adapter_files import look_at
from tradewind.config.goals import AdapterRoom, Goals, Means
from tradewind.config.plan import Plan
from tradewind.config.sizes import parse_bytes
from tradewind.contract.errors import EngineDeadError, RequestError, UserError
from tradewind.contract.image import Image
from tradewind.contract.request import Pooling, Request, SamplingParams
from tradewind.contract.step import Floats, TokenLogprobs
from tradewind.engine.client import Handle
from tradewind.phases import Phases
from tradewind.serving.adapters import AdapterBook
from tradewind.serving.answer import Answer, Completion, Delta
from tradewind.serving.embedding import vector_of
from tradewind.serving.images import ImageReader, pictures_of, placed, taken_out
from tradewind.serving.intake import Intake, Limits
from tradewind.serving.tokenizer import TextTokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text to be continued, token ids, or messages of a conversation; these may have images, {"type": "image", "image": ...}: a path, a data
URL, a file's bytes, a Pillow image or an array."""

Text = str | Sequence[int]
"""Text to be embedded, or its token ids as they are."""

PROGRESS_AFTER_S = 1.0
"""A call that is done sooner shows no bar."""


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """What one prompt brought. Times are of `time.monotonic`."""

    index: int
    prompt_tokens: tuple[int, ...]
    completions: tuple[Completion, ...]
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...]
    arrived_s: float
    first_token_s: float
    finished_s: float


class LLM:
    """One engine in this process. Use it as a context manager, or call `close()`.

    Calls may come from several threads and from inside a loop over a stream: each drives the engine for all.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2",
        *,
        scenario: str = "balanced",
        memory_limit: int | str | None = None,
        max_context: int | None = None,
        goals: Goals | None = None,
        progress: bool = False,
        phases: Phases | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        max_adapters: int | None = None,
        max_adapter_rank: int = 16,
        **means: Any,
    ) -> None:
        """Builds the engine: `model` is a folder, a .gguf file, a packaged name or a Hub id; `means` pins choices (config.goals.Means).

        `goals` replaces all of these but adapters. `progress` tells about downloads and long loads on standard error. `phases` goes on
        counting the start-up times of its owner. `adapters`: name -> folder of low-rank adapters (LoRA) to begin with; more may come with
        `load_adapter` where `max_adapters` (those in use at once, 8 where any are given) is not 0. Raises UserError with advice.
        """
        if goals is None:
            goals = _goals(model, scenario=scenario, memory_limit=memory_limit, max_context=max_context, means=means)
        shown = None
        if progress:
            from tradewind.weights.fetch import RichProgress

            shown = RichProgress()
        slots = (8 if adapters else 0) if max_adapters is None else max_adapters
        if slots:
            goals = msgspec.structs.replace(goals, adapters=AdapterRoom(slots=slots, rank=max_adapter_rank))
        elif adapters:
            raise UserError(f"{len(adapters)} adapters are given and max_adapters is 0; leave it out, or the adapters")
        room = goals.adapters
        self._adapters = None if room is None else AdapterBook(largest_rank=room.rank)
        if self._adapters is not None:
            for name, folder in (adapters or {}).items():
                self._adapters.load(name, Path(folder))
        keys = None if self._adapters is None else self._adapters.keys
        self._engine = build_engine(goals, progress=shown, phases=phases, adapters=keys)
        plan = self._engine.plan
        self._intake = Intake(Limits.of(plan, eos_ids=self._engine.tokenizer.eos_ids))
        self._images = ImageReader.of(plan)
        self._finished: list[Answer] = []
        # Who holds it runs the engine. Not reentrant: a turn never begins inside a turn.
        self._turn = threading.Lock()
        self._closed = False
        # A program that ends without `close` must not leave the engine to the interpreter's own ending, where its threads stand still.
        weakref.finalize(self, self._engine.client.close)

    # -- facts

    @property
    def plan(self) -> Plan:
        """What was decided, with reasons."""
        return self._engine.plan

    @property
    def phases(self) -> Phases:
        """How long the start took, by phase."""
        return self._engine.phases

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know, one sentence each."""
        return self._engine.notices

    @property
    def engine(self) -> Engine:
        """The parts, for tools."""
        return self._engine

    @property
    def tokenizer(self) -> TextTokenizer:
        """Between text and token ids."""
        return self._engine.tokenizer

    @property
    def checkpoint_path(self) -> Path:
        """The folder or file that the weights came from."""
        return self._engine.checkpoint_path

    def tokenize(self, prompt: Prompt) -> list[int]:
        """The token ids that a prompt becomes, those of its images too; changes nothing. Raises RequestError or UserError."""
        return self._read(prompt)[0]

    def _read(self, prompt: Prompt) -> tuple[list[int], tuple[Image, ...]]:
        """Token ids and images of a prompt."""
        prompt = _plain(prompt)
        if isinstance(prompt, str):
            return self._engine.tokenizer.encode(prompt, add_special=True), ()
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
            raise RequestError(f"a prompt must be text, token ids or messages, not {type(prompt).__name__}")
        if prompt and isinstance(prompt[0], Mapping):
            template = self._engine.template
            if isinstance(template, UserError):
                raise template
            messages, asked = taken_out(prompt)
            pictures = pictures_of(asked, self._images, files=True)
            ids = self._engine.tokenizer.encode_chat(template.render(messages))
            return (ids, ()) if self._images is None else placed(ids, pictures, token=self._images.facts.image_token)
        return list(prompt), ()  # type: ignore[arg-type]

    def with_default_length(self, sampling: SamplingParams, prompts: Sequence[Prompt], tokens: int) -> SamplingParams:
        """`sampling` with max_tokens filled in where it is None: `tokens`, or what the longest prompt leaves of the context."""
        if sampling.max_tokens is not None:
            return sampling
        room = self._intake.limits.max_context - max((len(self.tokenize(prompt)) for prompt in prompts), default=0)
        return msgspec.structs.replace(sampling, max_tokens=max(1, min(tokens, room), sampling.min_tokens))

    # -- adapters

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of all adapters that may be asked for."""
        return self._adapters.names if self._adapters is not None else ()

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Gives the low-rank adapter in a folder (as PEFT writes it) a name to ask for it by; a known name gets the new files. Its weights
        are read to see whether the model can take them, and again when the first request for it runs. Raises UserError."""
        if self._adapters is None:
            raise UserError("this engine has no room for adapters: make it with max_adapters")
        found = look_at(Path(folder))
        self._adapters.check(name, found)
        self._engine.client.loop.check_adapter(found.key)
        self._adapters.take(name, found)

    def unload_adapter(self, name: str) -> None:
        """Forgets a name; what runs goes on. Raises RequestError for one that is not there."""
        self._adapter_key(name)
        assert self._adapters is not None
        self._adapters.unload(name)

    def _adapter_key(self, name: str | None) -> str:
        if name is None:
            return ""
        if self._adapters is None:
            raise RequestError(
                f"adapter {name!r} is asked for, and this engine has no room for adapters: make it with max_adapters"
            )
        return self._adapters.key(name)

    # -- work

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """Answers every prompt and returns one Output each, in order. Nothing is queued unless every prompt is acceptable.

        `sampling`: one for all or one each; None is greedy. `adapter`: the name of one that all are answered with. Interrupting it (Ctrl-C)
        ends what is open. `progress` shows a bar on a terminal when the call takes over a second. A Completion with `error` set is one that
        the engine could not finish.
        """
        answers = self.prepare(_as_batch(prompts), sampling, adapter=adapter)
        wanted = sum(answer.request.max_tokens for answer in answers)
        with _bar(f"{len(answers)} answers", wanted if progress else 0) as advance:
            for delta in self._run(answers):
                advance(len(delta.tokens))
        return outputs_of(answers)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        progress: bool = False,
    ) -> list[Output]:
        """`generate` for one conversation (a list of messages) or several (a list of such lists)."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("chat needs a list of messages, each with a role and content")
        return self.generate(messages, sampling, adapter=adapter, progress=progress)

    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        pooling: Pooling | None = None,
        normalise: bool = True,
        dimensions: int | None = None,
    ) -> list[Floats]:
        """One float32 vector for each text (or list of token ids), in order: its pooled final hidden states.

        pooling: "last" token, "mean" of all, "cls" (the first token, of encoders); None is what the model was made for. `normalise`
        divides by the length. `dimensions` keeps the leading values, for models that were trained for it. Nothing is queued unless
        every text is acceptable; raises RequestError naming what is wrong.
        """
        requests = self.prepare_embeddings(
            _as_batch(texts), pooling=pooling, normalise=normalise, dimensions=dimensions
        )
        client = self._engine.client
        handles: list[Handle] = []
        try:
            with self._turn, _Uninterrupted():
                for request in requests:
                    handles.append(client.submit(request, stream=False))  # noqa: PERF401
            for handle in handles:
                while not handle.done:
                    with self._turn, _Uninterrupted():
                        if not handle.done:
                            client.drive()
        finally:
            self._end([handle for handle in handles if not handle.done])
        return [_vector(handle, dimensions=dimensions) for handle in handles]

    def prepare_embeddings(
        self, texts: Sequence[Prompt], *, pooling: Pooling | None, normalise: bool, dimensions: int | None
    ) -> list[Request]:
        """One Request per text, nothing queued yet. Raises RequestError or UserError naming what is wrong."""
        if self._closed:
            raise EngineDeadError("this LLM was closed; make a new one")
        self._intake.check_dimensions(dimensions)
        now_s, requests = time.monotonic(), list[Request]()
        for index, text in enumerate(texts):
            text = _plain(text)
            try:
                if not isinstance(text, str) and isinstance(text, Sequence) and text and isinstance(text[0], Mapping):
                    raise RequestError("embeddings are of texts or token ids, not of messages")
                ids = self.tokenize(text)
                requests.append(self._intake.embedding(ids, now_s=now_s, pooling=pooling, normalise=normalise))
            except RequestError as error:
                if len(texts) == 1:
                    raise
                raise RequestError(f"text {index + 1} of {len(texts)}: {error}") from None
        return requests

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Generator[Delta, None, None]:
        """Answers one prompt piece by piece; what is wrong with it is raised here, before the first piece is asked for.

        Leaving the loop early ends the request. Closing the LLM in the loop ends it with finish "abort".
        """
        return self._run(self.prepare([prompt], sampling, adapter=adapter))

    def forget(self) -> None:
        """Drops everything the prefix cache keeps for later and no running request uses."""
        if self._engine.client.threaded:
            self._engine.client.forget()
        else:
            with self._turn, _Uninterrupted():
                self._engine.client.forget()

    def sleep(self) -> None:
        """As soon as nothing runs, drops the prefix cache and gives its memory back to the system; the next call wakes the engine."""
        if self._engine.client.threaded:
            self._engine.client.sleep()
        else:
            with self._turn, _Uninterrupted():
                self._engine.client.sleep()

    def summary(self) -> str:
        """One line about the last call and the start, for people."""
        done = [
            answer for answer in self._finished if answer.finished_s is not None and answer.first_token_s is not None
        ]
        if not done:
            return self.phases.text()
        tokens = sum(len(answer.completion().tokens) for answer in done)
        prompt = sum(len(answer.request.tokens) for answer in done if answer.sample == 0)
        first = min(answer.first_token_s or 0.0 for answer in done) - min(answer.request.arrived_s for answer in done)
        last = max(answer.finished_s or 0.0 for answer in done)
        span = last - min(answer.first_token_s or 0.0 for answer in done)
        rate = f", {(tokens - len(done)) / span:.0f} tokens/s" if span > 0 and tokens > len(done) else ""
        return f"[{prompt} tokens in, {tokens} out, first after {first * 1e3:.0f} ms{rate}; {self.phases.text()}]"

    def close(self) -> None:
        """Ends open requests with "abort", the engine and its threads; safe to call twice."""
        self._closed = True
        if self._engine.client.threaded:
            self._engine.client.close()
        else:
            with self._turn, _Uninterrupted():
                self._engine.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- inside

    def prepare(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        *,
        adapter: str | None = None,
    ) -> list[Answer]:
        """One Answer per prompt and sample, nothing queued yet. Raises RequestError or UserError naming what is wrong."""
        if self._closed:
            raise EngineDeadError("this LLM was closed; make a new one")
        self._intake.check_generates()
        key = self._adapter_key(adapter)
        each = _sampling_each(sampling, len(prompts))
        answers: list[Answer] = []
        for index, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
            try:
                ids, images = self._read(prompt)
                requests = self._intake.requests(ids, params, now_s=time.monotonic(), adapter=key, images=images)
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                raise RequestError(f"prompt {index + 1} of {len(prompts)}: {error}") from None
            for sample, request in enumerate(requests):
                answers.append(Answer(request, self._engine.tokenizer, prompt=index, sample=sample))
        self._finished = answers
        return answers

    def _run(self, answers: list[Answer]) -> Generator[Delta, None, None]:
        """Submits, drives the engine in this thread, and yields deltas until every answer is done; ends what is open at the end."""
        client = self._engine.client
        handles: list[tuple[Handle, Answer]] = []
        try:
            with self._turn, _Uninterrupted():
                for answer in answers:  # each is known to the clean-up as soon as it is queued
                    handles.append((client.submit(answer.request), answer))  # noqa: PERF401
            waiting = list(handles)
            while waiting:
                heard = False
                still: list[tuple[Handle, Answer]] = []
                for pair in waiting:
                    handle, answer = pair
                    ended = False
                    for event in handle.take():
                        heard, ended = True, event.finish is not None
                        delta = answer.take(event)
                        if answer.stopped_by_text and not ended:
                            handle.finish()
                        if delta is not None:
                            yield delta
                    if not ended:
                        still.append(pair)
                waiting = still
                if waiting and not heard:
                    # Another thread's turn, or a call from inside our caller's loop, may have brought what we wait for.
                    with self._turn, _Uninterrupted():
                        if not any(handle.done for handle, _ in waiting):
                            client.drive()
        finally:
            self._end([handle for handle, _ in handles if not handle.done])

    def _end(self, handles: list[Handle]) -> None:
        """Cancels requests and gives their pages back."""
        for handle in handles:
            handle.cancel()
        # Whoever is inside a turn does it then: another thread, or ourselves when a forgotten stream is collected in the middle of one.
        if handles and self._turn.acquire(blocking=False):
            try:
                with _Uninterrupted():
                    while not all(handle.done for handle in handles):
                        self._engine.client.drive()
            finally:
                self._turn.release()


class _Uninterrupted:
    """Holds Ctrl-C back until the block is done, so that it never meets the engine between two of its states.

    A turn takes milliseconds to parts of a second. Only where Python's own handler would raise KeyboardInterrupt; everybody else's is
    left alone.
    """

    def __init__(self) -> None:
        self._pressed = self._mine = False

    def __enter__(self) -> None:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._mine = True
            signal.signal(signal.SIGINT, self._press)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._pressed and kind is None:
                raise KeyboardInterrupt


class AsyncLLM:
    """The same engine for asyncio: it runs in a thread of its own, and any number of calls may be open at once."""

    def __init__(self, model: str | os.PathLike[str] = "smollm2", **options: Any) -> None:
        """Takes the arguments of `LLM`. Blocks while it loads; run it in a thread where that matters."""
        self._llm = LLM(model, **options)
        self._llm.engine.client.start()

    @property
    def plan(self) -> Plan:
        """What was decided, with reasons."""
        return self._llm.plan

    @property
    def phases(self) -> Phases:
        """How long the start took, by phase."""
        return self._llm.phases

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know, one sentence each."""
        return self._llm.notices

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """As `LLM.load_adapter`."""
        self._llm.load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        """As `LLM.unload_adapter`."""
        self._llm.unload_adapter(name)

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, adapter: str | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Answers one prompt (n samples) piece by piece; what is wrong with it is raised here, before the first piece is asked for.

        Cancelling the task ends the request, and so does leaving the loop early (at once with `contextlib.aclosing`).
        """
        return self._run(self._llm.prepare([prompt], sampling, adapter=adapter))

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Output:
        """Answers one prompt and returns it whole: the sum of its stream. Many at once: `asyncio.gather`."""
        answers = self._llm.prepare([prompt], sampling, adapter=adapter)
        async for _ in self._run(answers):
            pass
        return outputs_of(answers)[0]

    async def chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Output:
        """`generate` for one conversation."""
        return await self.generate(messages, sampling, adapter=adapter)

    async def embed(
        self, text: Text, *, pooling: Pooling | None = None, normalise: bool = True, dimensions: int | None = None
    ) -> Floats:
        """The embedding of one text, as `LLM.embed`. Many at once: `asyncio.gather`."""
        (request,) = self._llm.prepare_embeddings([text], pooling=pooling, normalise=normalise, dimensions=dimensions)
        handle = self._llm.engine.client.submit(request, stream=False)
        try:
            async for _ in handle:
                pass
        finally:
            if not handle.done:
                handle.cancel()
        return _vector(handle, dimensions=dimensions)

    def forget(self) -> None:
        """Drops everything the prefix cache keeps for later and no running request uses."""
        self._llm.forget()

    def sleep(self) -> None:
        """As soon as nothing runs, drops the prefix cache and gives its memory back to the system; the next call wakes the engine."""
        self._llm.sleep()

    async def _run(self, answers: list[Answer]) -> AsyncGenerator[Delta, None]:
        import asyncio

        deltas: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()
        client = self._llm.engine.client
        handles: list[Handle] = []

        async def read(handle: Handle, answer: Answer) -> None:
            try:
                async for event in handle:
                    delta = answer.take(event)
                    if answer.stopped_by_text and event.finish is None:
                        handle.finish()
                    if delta is not None:
                        deltas.put_nowait(delta)
                deltas.put_nowait(None)
            except Exception as error:  # whoever reads the deltas must not wait for ever
                deltas.put_nowait(error)

        readers: list[asyncio.Task[None]] = []
        try:
            for answer in answers:
                handle = client.submit(answer.request)
                handles.append(handle)
                readers.append(asyncio.create_task(read(handle, answer)))
            ended = 0
            while ended < len(readers):
                delta = await deltas.get()
                if isinstance(delta, BaseException):
                    raise delta
                if delta is None:
                    ended += 1
                else:
                    yield delta
        finally:
            for handle in handles:
                if not handle.done:
                    handle.cancel()
            for reader in readers:
                reader.cancel()

    async def close(self) -> None:
        """Ends open requests with "abort", the engine and its threads; safe to call twice."""
        import asyncio

        await asyncio.to_thread(self._llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def outputs_of(answers: Sequence[Answer]) -> list[Output]:
    """One Output per prompt, from answers that are done."""
    outputs: list[Output] = []
    for index in sorted({answer.prompt for answer in answers}):
        mine = [answer for answer in answers if answer.prompt == index]
        first = mine[0]
        arrived_s = first.request.arrived_s
        outputs.append(
            Output(
                index=index,
                prompt_tokens=first.request.tokens,
                completions=tuple(answer.completion() for answer in mine),
                cached_tokens=first.cached_tokens,
                prompt_logprobs=first.prompt_logprobs,
                arrived_s=arrived_s,
                first_token_s=min(answer.first_token_s or arrived_s for answer in mine),
                finished_s=max(answer.finished_s or arrived_s for answer in mine),
            )
        )
    return outputs


def _goals(
    model: str | os.PathLike[str],
    *,
    scenario: str,
    memory_limit: int | str | None,
    max_context: int | None,
    means: Mapping[str, Any],
) -> Goals:
    """Goals from keyword arguments; every name and type is checked. Raises UserError naming the wrong one."""
    known = sorted(Means.__struct_fields__)
    for name in means:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"there is no choice named {name!r}{hint} (there are {', '.join(known)})")
    limit = parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit
    name = os.fspath(model) if isinstance(model, os.PathLike) else model
    raw = {
        "model": name,
        "scenario": scenario,
        "memory_limit_bytes": limit,
        "max_context": max_context,
        "means": dict(means),
    }
    try:
        return msgspec.convert(raw, Goals, strict=True)
    except msgspec.ValidationError as error:
        raise UserError(f"a goal or pinned choice is wrong: {error}") from None


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several -> several. A list of messages or of token ids is one prompt; a list of lists or of texts is several."""
    prompts = _plain(prompts)
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise RequestError(
            f"prompts must be text, token ids, messages, or a list of these, not {type(prompts).__name__}"
        )
    if not prompts:
        raise RequestError("there is no prompt; give at least one")
    first = _plain(prompts[0])
    if isinstance(first, str) or (isinstance(first, Sequence) and not isinstance(first, Mapping)):
        return list(prompts)  # type: ignore[arg-type]
    return [prompts]  # type: ignore[list-item]


def _vector(handle: Handle, *, dimensions: int | None) -> Floats:
    """The embedding of a request that has ended. Raises RuntimeError when the engine could not finish it."""
    last = handle.last
    assert last is not None
    if last.embedding is None:
        raise RuntimeError(f"an embedding could not be made: {last.error or 'its request was ended'}")
    return vector_of(last.embedding, dimensions=dimensions, normalise=handle.request.normalise)


def _plain(value: Any) -> Any:
    """Arrays and tensors of token ids as lists; everything else as it is."""
    return value.tolist() if not isinstance(value, memoryview) and hasattr(value, "tolist") else value


def _sampling_each(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One SamplingParams per prompt. Raises RequestError for other things and other numbers."""
    if sampling is None:
        sampling = SamplingParams(temperature=0.0)
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if not isinstance(sampling, Sequence) or not all(isinstance(one, SamplingParams) for one in sampling):
        raise RequestError(
            f"sampling must be SamplingParams, or a list with one for each prompt, not {type(sampling).__name__}"
        )
    if len(sampling) != count:
        raise RequestError(f"{count} prompts but {len(sampling)} sampling values; give one for all, or one each")
    return list(sampling)


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of tokens on standard error that appears once the work has taken PROGRESS_AFTER_S; total 0 shows none."""
    began = time.monotonic()
    shown: list[Any] = []
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        if not total:
            return
        if not shown and time.monotonic() - began > PROGRESS_AFTER_S:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            console = Console(stderr=True)
            if not console.is_terminal:
                return
            bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn(),
                console=console, transient=True,
            )  # fmt: skip
            shown.extend((bar, bar.add_task(title, total=total)))
            bar.start()
        if shown:
            shown[0].update(shown[1], completed=done)

    try:
        yield advance
    finally:
        if shown:
            shown[0].stop()
