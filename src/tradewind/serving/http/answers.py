"""The JSON shapes that go out: OpenAI's, and those of this engine's own endpoints.

Knows: names and types; the same records make /openapi.json. Refuses to know: how they are filled.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishName = Literal["stop", "length", "tool_calls", "abort", "error"]


class ErrorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What was wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Every refusal."""

    error: ErrorRecord


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the prompt tokens."""

    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of the generated tokens."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class EmbeddingsUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One vector: a list, or float32 values (little endian) in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[EmbeddingRecord]
    model: str
    usage: EmbeddingsUsage


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds, for `"timing": true`."""

    queue_ms: float | None
    prefill_ms: float | None
    ttft_ms: float | None
    decode_ms: float | None
    total_ms: float | None


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One generated token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of a chat choice."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """Name and arguments (JSON text)."""

    name: str
    arguments: str


class MadeCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the model said."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishName
    stop_reason: str | int | None = None
    """The stop string or token id that ended it."""
    token_ids: list[int] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/chat/completions without stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    service_tier: None = None
    system_fingerprint: None = None
    timing: Timing | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of a completion choice, as columns."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of one prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishName | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/completions without stream; the chunks of a stream have the same shape."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    object: Literal["text_completion"] = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None
    timing: Timing | UnsetType = UNSET


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One model name."""

    id: str
    created: int
    max_model_len: int
    root: str
    object: Literal["model"] = "model"
    owned_by: str = "tradewind"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/models."""

    data: list[ModelRecord]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    prompt: str


class AdaptersLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/load_lora_adapter, POST /v1/unload_lora_adapter."""

    loaded: list[str]
    """Names of all adapters."""


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """POST /abort."""

    aborted: int
    """Open requests with that id that were asked to end; 0 when none is open (it may just have ended)."""


class Sleeping(msgspec.Struct, frozen=True, kw_only=True):
    """POST /sleep, POST /wake_up, GET /is_sleeping."""

    is_sleeping: bool
    """True from the moment on from which nothing new is taken."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """GET /health."""

    status: Literal["ok", "asleep", "stalled", "dead", "closing"]
    running: int
    waiting: int
    since_progress_s: float
    steps: int
    pages_used: list[int]
    pages_total: list[int]
    error: str | None = None
    diagnosis: str | None = None
    """A name and the evidence, where something is wrong or a request has just failed in a way that says so."""
    drift: str | None = None
    """How traffic is other than the plan was made for, or that another plan is being tried; see GET /drift."""


# -- responses


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    """Text of a message."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprob] = msgspec.field(default_factory=list)


class OutputItem(msgspec.Struct, frozen=True, kw_only=True):
    """A message, a call, or reasoning; the fields that `type` does not have are left out."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"] | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    content: list[Any] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why an answer is not complete."""

    reason: str


class ResponsesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens, as /v1/responses names them."""

    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class ResponsesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/responses, and the `response` of its events."""

    id: str
    created_at: float
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[OutputItem]
    object: Literal["response"] = "response"
    error: dict[str, Any] | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    parallel_tool_calls: bool = True
    previous_response_id: None = None
    reasoning: dict[str, Any] | None = None
    store: Literal[False] = False
    temperature: float = 1.0
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    tool_choice: Any = "auto"
    tools: list[Any] = msgspec.field(default_factory=list)
    top_p: float = 1.0
    top_logprobs: int = 0
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None = None
    background: Literal[False] = False
    service_tier: str = "default"
    timing: Timing | UnsetType = UNSET
