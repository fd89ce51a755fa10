"""From a decoded body to engine requests: sampling values, prompts, tenants, and what must be refused on the way.

Knows: which field becomes which value, which combinations make no sense. Refuses to know: how bodies are read and answers written.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tradewind.config.targets import class_of_request
from tradewind.contract.errors import LimitError, RequestError, UserError
from tradewind.contract.image import Image
from tradewind.contract.request import Request, SamplingParams
from tradewind.serving.http.edge import Caller
from tradewind.serving.http.errors import ApiError, api_error
from tradewind.serving.http.front import Front
from tradewind.serving.http.types import ChatMessage, ContentPart, Sampling
from tradewind.serving.text_stream import check_stops

RESERVED = frozenset({"self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
"""Template variables that a request may not set through chat_template_kwargs."""


def check_model(front: Front, model: str | None) -> str:
    """The name the answer carries. Raises ApiError 404 for a model that is not served here."""
    if model is None or model == front.model:
        return front.model
    if model in front.names:
        return model
    shown = model if len(model) <= 100 else model[:97] + "..."
    raise ApiError(
        404,
        f"the model {shown!r} is not served here; served: {', '.join(front.names)}",
        param="model",
        code="model_not_found",
    )


def adapter_of(front: Front, model: str | None) -> str:
    """What `Request.adapter` says for a model's name; raises ApiError 404 for an adapter that has gone since `check_model`."""
    if front.adapters is None or model is None or model in (front.model, *front.served_names):
        return ""
    try:
        return front.adapters.key(model)
    except RequestError as error:
        raise ApiError(404, str(error), param="model", code="model_not_found") from None


def sampling_of(
    front: Front,
    body: Sampling,
    *,
    max_tokens: int | None,
    n: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling values of a body; null is the default. Raises ApiError naming the field."""
    bias: dict[int, float] = {}
    vocab_size = front.intake.limits.vocab_size
    for key, value in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise ApiError(
                400,
                f"logit_bias names {key[:40]!r}; its keys must be token ids from 0 to {vocab_size - 1}",
                param="logit_bias",
                code="invalid_value",
            )
        bias[int(key)] = value
    words: list[tuple[int, ...]] = []
    for word in body.bad_words or ():
        # A word is spelled one way at the beginning of a line and another after a space.
        for spelling in dict.fromkeys((word, " " + word.lstrip())):
            ids = tuple(front.tokenizer.encode(spelling, add_special=False))
            if ids and ids not in words:
                words.append(ids)
    try:
        stop = check_stops(body.stop) if body.stop else ()
    except RequestError as error:
        raise api_error(error, param="stop") from None
    params = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=0 if body.top_k is None or body.top_k == -1 else body.top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=bias,
        bad_words=tuple(words),
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        n=n,
    )
    for name, token in (("stop_token_ids", token) for token in params.stop_token_ids):
        if token >= vocab_size:
            raise ApiError(
                400, f"{name} has {token}; token ids are 0 to {vocab_size - 1}", param=name, code="invalid_value"
            )
    return params


def make_requests(
    front: Front,
    caller: Caller,
    body: Sampling,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    id: str,
    prompt_field: str,
    limit_field: str = "max_tokens",
    images: tuple[Image, ...] = (),
) -> list[Request]:
    """Engine requests for all prompts, samples of one prompt side by side. Raises ApiError naming the field and the numbers.

    images: of the one prompt that there is then.
    """
    now = time.monotonic()
    options = front.options
    if body.priority and not front.honours_priority:
        raise ApiError(
            400, "priority is not honoured here: this server's queue does not look at it; leave it out, or serve with --policy priority",
            param="priority", code="unsupported_parameter",
        )  # fmt: skip
    count = len(prompts) * sampling.n
    if count > options.max_sequences:
        raise ApiError(
            400, f"{len(prompts)} prompts with n={sampling.n} are {count} sequences; one request may have {options.max_sequences}",
            param="n" if len(prompts) == 1 else prompt_field, code="invalid_value",
        )  # fmt: skip
    salt, adapter = body.cache_salt or "", adapter_of(front, body.model)
    tenant, traffic_class = caller.tenant or (body.user or ""), ""
    if front.classes:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in caller.sent}
        traffic_class = class_of_request(
            front.classes, tenant=tenant, headers=headers, priority=body.priority or 0, model=body.model or front.model
        )
    requests: list[Request] = []
    for place, tokens in enumerate(prompts):
        try:
            requests += front.intake.requests(
                tokens,
                sampling,
                now_s=now,
                request_id=id if len(prompts) == 1 else f"{id}-{place}",
                priority=body.priority or 0,
                tenant=tenant,
                traffic_class=traffic_class,
                # The colon cannot be part of a tenant, so no salt of one tenant equals another's.
                cache_salt=f"{caller.tenant}:{salt}" if caller.tenant or salt else "",
                adapter=adapter,
                deadline_s=None if options.request_timeout_s is None else now + options.request_timeout_s,
                images=images,
            )
        except (RequestError, LimitError) as error:
            raise _too_long(front, error, len(tokens), sampling, prompt_field, limit_field) or api_error(
                error, param=prompt_field
            ) from None
    return requests


def _too_long(
    front: Front, error: UserError, prompt_tokens: int, sampling: SamplingParams, prompt_field: str, limit_field: str
) -> ApiError | None:
    """The refusal for a request over the context limit, with the field to change; None when that is not what is wrong."""
    room = front.max_context - prompt_tokens
    if room < 1:
        return ApiError(400, str(error), param=prompt_field, code="context_length_exceeded")
    if sampling.max_tokens is not None and sampling.max_tokens > room:
        message = str(error).replace("max_tokens", limit_field)
        return ApiError(400, message, param=limit_field, code="context_length_exceeded")
    return None


# -- text to ids


def text_ids(front: Front, text: str, *, special: bool, field: str) -> list[int]:
    """Token ids of a text, as the tokenizer's `encode` gives them. Raises ApiError."""
    try:
        return front.tokenizer.encode(text, add_special=special)
    except RequestError as error:
        raise api_error(error, param=field) from None


def chat_ids(front: Front, rendered: str, *, field: str) -> list[int]:
    """Token ids of a rendered conversation, as the tokenizer's `encode_chat` gives them. Raises ApiError."""
    try:
        return front.tokenizer.encode_chat(rendered)
    except RequestError as error:
        raise api_error(error, param=field) from None


# -- chat


def conversation(front: Front, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates read them: what is not set is left out, arguments of calls are objects."""
    template = front.template
    knows_developer = not isinstance(template, UserError) and "developer" in template.source
    plain: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        one: dict[str, Any] = {"role": message.role}
        if message.role == "developer" and not knows_developer:
            one["role"] = "system"
        content = message.content
        one["content"] = (
            content
            if content is None or isinstance(content, str)
            else [_part(part, place=place, index=index) for index, part in enumerate(content)]
        )
        for name in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(message, name)
            if value is not None:
                one[name] = value
        if message.tool_calls:
            one["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
        plain.append(one)
    return plain


def _part(part: ContentPart, *, place: int, index: int) -> dict[str, str]:
    """A part as templates read it; of an image they see that it is there."""
    if part.type == "image_url":
        return {"type": "image"}
    if part.text is None:
        where = f"messages[{place}].content[{index}].text"
        raise ApiError(400, f"{where} is missing", param=where, code="missing_required_parameter")
    return {"type": "text", "text": part.text}


def _arguments(text: str) -> Any:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def render_chat(
    front: Front,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    template_kwargs: Mapping[str, Any] | None,
    field: str = "messages",
) -> str:
    """The text that a conversation becomes. Raises ApiError naming what is wrong."""
    template = front.template
    if isinstance(template, UserError):
        raise ApiError(400, str(template), param=field, code="no_chat_template")
    for name in template_kwargs or ():
        if name in RESERVED:
            raise ApiError(
                400, f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs", code="invalid_value"
            )
    goes_on = bool(continue_final_message)
    if goes_on and add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
            code="invalid_value",
        )
    if goes_on and (
        messages[-1].role != "assistant" or not isinstance(messages[-1].content, str) or not messages[-1].content
    ):
        raise ApiError(
            400,
            "continue_final_message needs a last message of the assistant with text",
            param="continue_final_message",
            code="invalid_value",
        )
    if tools and "tools" not in template.source:
        raise ApiError(
            400, "this model's chat template does not know tools", param="tools", code="unsupported_parameter"
        )
    try:
        rendered = template.render(
            conversation(front, messages),
            tools=tools or None,
            add_generation_prompt=not goes_on if add_generation_prompt is None else add_generation_prompt,
            **dict(template_kwargs or {}),
        )
    except UserError as error:
        raise api_error(error, param=field) from None
    if goes_on:
        final = str(messages[-1].content).strip()
        place = rendered.rfind(final)
        if place < 0:
            raise ApiError(
                400, "this model's chat template changes the last message, so it cannot be continued", param="continue_final_message",
                code="invalid_value",
            )  # fmt: skip
        rendered = rendered[: place + len(final)]
    return rendered


def characters_of(messages: Sequence[ChatMessage]) -> int:
    """About how much text a conversation has."""
    total = 0
    for message in messages:
        content = message.content
        if isinstance(content, str):
            total += len(content)
        elif content is not None:
            total += sum(len(part.text or "") for part in content)
        total += 32
    return total


def check_effort(front: Front, field: str) -> None:
    """Raises ApiError when the model's template does not read a reasoning effort."""
    if "reasoning_effort" not in getattr(front.template, "source", ""):
        raise ApiError(
            400,
            f"{field} is not supported: this model's chat template does not read it",
            param=field,
            code="unsupported_parameter",
        )
