"""The JSON shapes that come in: OpenAI's requests, with the fields this engine honours and no others.

Knows: names, types and numeric ranges. They are checked while decoding, and the same records make /openapi.json. Refuses to know: what a
field does (the modules beside this one) and how answers look (`answers.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Rate = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Positive = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
TopCount = Annotated[int, Meta(ge=0, le=20)]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Identity = Annotated[str, Meta(max_length=256)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Stops = str | Annotated[list[StopText], Meta(max_length=64)] | None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream tells besides the text."""

    include_usage: bool | None = None
    """A chunk with `usage` and no choices before [DONE]."""
    continuous_usage_stats: bool | None = None
    """`usage` so far in every chunk."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen and when to stop: the same for every endpoint that generates. null is the default everywhere."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 20)] | None = None
    min_p: Rate | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    bad_words: Annotated[list[StopText], Meta(max_length=64)] | None = None
    seed: Seed | None = None
    stop: Stops = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    user: Identity | None = None
    cache_salt: Identity | None = None
    timing: bool | None = None
    return_token_ids: bool | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    structural_tag: Any = None


# -- chat


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name and arguments (JSON text) of a call the model made."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call in an assistant message."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class ImageUrl(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An image: a data URL, or a link where the server follows them."""

    url: Annotated[str, Meta(min_length=1)]
    detail: Literal["auto", "high", "low"] | None = None
    """low: in few tokens."""


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message: text, or an image for a model that reads images."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None
    input_audio: None = None
    file: None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of the conversation. The fields that answers carry are accepted, so that an answer can be sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: Identity | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Identity | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function the model may call."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool; only functions."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tool_choice` that names a function."""

    function: NamedFunction
    type: Literal["function"] = "function"


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[str] | None = None


class ChatRequest(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: TopCount | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=0)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class CompletionRequest(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    echo: bool | None = None
    logprobs: TopCount | None = None
    suffix: Literal[""] | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None


# -- responses


class InputPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of an input item."""

    type: Literal["input_image", "input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str | None = None
    image_url: Annotated[str, Meta(min_length=1)] | None = None
    """Of an image: a data URL, or a link where the server follows them."""
    detail: Literal["auto", "high", "low"] | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message, an earlier call of the model, its result, or earlier reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | None = None
    summary: list[InputPart] | None = None
    encrypted_content: None = None
    phase: str | None = None


class FlatTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function as /v1/responses spells it."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatNamedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tool_choice` that names a function."""

    name: str
    type: Literal["function"] = "function"


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`text` of /v1/responses."""

    format: TextFormat | None = None
    verbosity: None = None


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reasoning` of /v1/responses."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesRequest(Sampling, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses, without memory: nothing is stored."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: TopCount | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    max_tool_calls: None = None
    chat_template_kwargs: dict[str, Any] | None = None


# -- the rest


class EmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/embeddings."""

    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    user: Identity | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: either a prompt as for completions or messages as for chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/load_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=200)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Within the folder that the operator named."""


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=200)]


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /abort."""

    request_id: Annotated[str, Meta(min_length=1, max_length=256)]


NOT_YET: dict[str, str] = {
    "structured_outputs": "use guided_json, guided_regex, guided_choice, guided_grammar or structural_tag"
}
"""Fields that would change the answer's form and are not known by this name: refused even where unknown fields are ignored."""
