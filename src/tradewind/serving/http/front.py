"""What the HTTP front is given: the engine behind a protocol, the text tools, the facts of the plan, and the operator's options.

Knows: names and types of these. Refuses to know: where the engine lives (this process or another) and how it was built.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from starlette.routing import BaseRoute

from tradewind.config.goals import TrafficClass
from tradewind.contract.errors import UserError
from tradewind.contract.events import FinishReason, FrontTimes, TokensOut
from tradewind.contract.request import Request
from tradewind.engine.stats import EngineStats
from tradewind.serving.adapters import AdapterBook
from tradewind.serving.chat_template import ChatTemplate
from tradewind.serving.images import ImageReader
from tradewind.serving.intake import Intake
from tradewind.serving.links import LinkFetcher
from tradewind.serving.parsers.table import ParserChoice
from tradewind.serving.structured import StructuredOutput
from tradewind.serving.tokenizer import TextTokenizer

__all__ = ["EngineClient", "EngineHandle", "EngineStats", "Front", "Options", "Receipt"]


class EngineHandle(Protocol):
    """One sequence's events, for one reader in the event loop."""

    tokens: list[int]
    """Every token so far."""

    def __aiter__(self) -> AsyncIterator[TokensOut]:
        """Events as they come; the one with `finish` is the last."""

    def take(self) -> list[TokensOut]:
        """Events that are there and not read yet; does not wait."""

    def cancel(self) -> None:
        """Asks for the end with "abort"."""

    def finish(self, reason: FinishReason = "stop") -> None:
        """Says that the text is complete."""


class EngineClient(Protocol):
    """The engine as the front sees it. No call waits for a step; all are made from the event loop's thread."""

    def submit(self, request: Request) -> EngineHandle:
        """Queues a request. Raises RequestError, LimitError or EngineDeadError."""

    def cancel(self, request_id: str) -> None:
        """Ends a sequence with "abort"; unknown ids are ignored."""

    def finish(self, request_id: str, *, reason: FinishReason = "stop") -> None:
        """Ends a sequence because its text is complete; unknown ids are ignored."""

    def sleep(self) -> None:
        """As soon as nothing runs, empties the prefix cache and gives its memory back; the next request wakes the engine."""

    async def check_adapter(self, key: str) -> None:
        """Raises UserError where the model cannot take the adapter of this key (`Request.adapter`); waits for its files to be read."""

    @property
    def why_dead(self) -> str | None:
        """Why no request can be served any more; None while the engine lives."""

    def stats(self) -> EngineStats:
        """A snapshot."""

    def scheduled_s(self, request_id: str) -> float | None:
        """When the sequence first got its slot (`time.monotonic`); kept for a while after its end. None when not known."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """One finished HTTP request that reached the engine, for logs, metrics and traces. Times are of `time.monotonic`."""

    id: str
    request_id: str
    """X-Request-Id."""
    endpoint: str
    tenant: str
    stream: bool
    samples: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    arrived_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
    finish: str
    """Reasons of all samples, joined by commas; "disconnect" when the client left."""
    error: str | None = None
    traceparent: str = ""
    """The caller's, as it came."""
    sequences: tuple[str, ...] = ()
    """Ids of its sequences in the engine."""
    times: FrontTimes | None = None
    """What the front itself did, and when."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the operator chose."""

    api_keys: tuple[str, ...] = ()
    """Empty: anybody may ask."""
    ignore_unknown_fields: bool = False
    max_body_bytes: int = 16 << 20
    max_queue: int = 256
    """Sequences that may wait beyond those that run; more are answered 429."""
    max_sequences: int = 512
    """Samples times prompts of one HTTP request."""
    cors_origins: tuple[str, ...] = ()
    """Empty: no CORS headers. "*" allows every origin."""
    adapter_folder: str | None = None
    """Whose adapters may be loaded at run time, by whoever may ask anything; None: nobody's."""
    allow_sleep: bool = False
    """Whether POST /sleep is obeyed: whoever may ask anything may then stop everybody's service."""
    request_timeout_s: float | None = None
    health_timeout_s: float = 10.0
    """So long without a step while there is work, and /health answers 503."""
    keep_alive_s: float = 15.0
    """A stream that has had nothing to say for so long gets a comment."""
    tokenizer_threads: int = 2
    inline_characters: int = 2048
    """Prompts up to this size are tokenised in the event loop (under a millisecond or two), longer ones in a thread."""


@dataclass(frozen=True, kw_only=True)
class Front:
    """Everything `make_app` needs."""

    client: EngineClient
    tokenizer: TextTokenizer
    template: ChatTemplate | UserError
    intake: Intake
    model: str
    """The id that answers carry."""
    max_running: int
    served_names: tuple[str, ...] = ()
    """Other names by which the model may be asked for."""
    adapters: AdapterBook | None = None
    """Adapters of the model, asked for by their names as a model is; None: the engine has no room for any."""
    options: Options = field(default_factory=Options)
    classes: tuple[TrafficClass, ...] = ()
    """Kinds of traffic, told apart by what a request says of itself; the first that fits."""
    honours_priority: bool = True
    """The engine's queue looks at priorities (policy "priority"); otherwise a request that has one is refused."""
    speech: ParserChoice | None = None
    """How the model writes tool calls and reasoning (`parsers.table.parser_for`); None: all text is content, and tools are refused."""
    images: ImageReader | None = None
    """Makes images ready for the model; None: it reads text alone."""
    links: LinkFetcher | None = None
    """Fetches images that are sent as links; None: they are refused."""
    structured: StructuredOutput | None = None
    """Makes grammars of what an answer must look like; None: whatever needs one is refused."""
    more_routes: tuple[BaseRoute, ...] = ()
    """Routes beside the API (a page); `open_paths` of them need no API key."""
    open_paths: frozenset[str] = frozenset()
    metrics: Callable[[], str | bytes] | None = None
    on_receipt: Callable[[Receipt], None] | None = None
    on_record: Callable[[Receipt, Sequence[tuple[Request, Sequence[int]]]], None] | None = None
    """Told with each receipt what was asked and answered, sequence by sequence; only for a journal. Must return at once."""
    receipts: Callable[[str, str], bytes | None] | None = None
    """(answer id or X-Request-Id, tenant) -> the itemised receipt as JSON, None where this tenant has none. None: none are kept."""
    slowest: Callable[[int, str], bytes] | None = None
    """(how many, tenant) -> the slowest of them as JSON."""
    diagnosis: Callable[[], str | None] | None = None
    """What is wrong with the engine, where something is and somebody finds it out."""
    drift: Callable[[], str | None] | None = None
    """How traffic is other than the plan was made for, or what is done about it; None while nothing is to be said."""
    created_s: int = 0
    """Unix time that /v1/models tells."""

    @property
    def max_context(self) -> int:
        return self.intake.limits.max_context

    @property
    def names(self) -> tuple[str, ...]:
        """Every name the model answers to, its own first, those of its adapters last."""
        adapters = self.adapters.names if self.adapters is not None else ()
        return tuple(dict.fromkeys((self.model, *self.served_names, *adapters)))
