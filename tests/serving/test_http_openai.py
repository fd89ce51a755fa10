"""The official client against a live server: synchronous, asynchronous, streaming, tools, responses, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from http_support import HERMES, MODEL, Live, live, until

from tradewind.serving.http.front import Options

openai = pytest.importorskip("openai")

SAYS = {
    "greet": "Good day 🙂",
    "weather": 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>',
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "now",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
GREET: Any = [{"role": "user", "content": "greet"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(says=SAYS, speech=HERMES, options=Options(api_keys=("secret",)), max_context=4096) as one:
        yield one


@pytest.fixture
def client(server: Live) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0, timeout=10) as one:
        yield one


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=GREET, logprobs=True, top_logprobs=2, n=2, temperature=0
    )
    assert [choice.message.content for choice in answer.choices] == ["Good day 🙂"] * 2
    assert answer.choices[0].finish_reason == "stop" and answer.usage.prompt_tokens_details.cached_tokens >= 0
    entry = answer.choices[0].logprobs.content[0]
    assert entry.token == "G" and len(entry.top_logprobs) == 2 and entry.bytes == [71]


def test_chat_streamed(client: Any) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=GREET, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Good day 🙂"
    assert chunks[-1].usage.completion_tokens == 14 and chunks[0].choices[0].delta.role == "assistant"


def test_the_stream_helper_adds_up(client: Any) -> None:
    with client.chat.completions.stream(model=MODEL, messages=GREET) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Good day 🙂" and final.choices[0].finish_reason == "stop"


def test_tools(client: Any) -> None:
    ask: Any = [{"role": "user", "content": "weather"}]
    answer = client.chat.completions.create(model=MODEL, messages=ask, tools=[TOOL], tool_choice="auto")
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content == "Let me see."
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Köln"}
    with client.chat.completions.stream(model=MODEL, messages=ask, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"city": "Köln"}
    # The next turn: the client sends back what it got, as it got it.
    again = client.chat.completions.create(
        model=MODEL,
        messages=[
            *ask,
            answer.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
            *GREET,
        ],
    )
    assert again.choices[0].message.content in ("Good day 🙂", SAYS["weather"])


def test_completions(client: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["greet", [103, 114, 101, 101, 116]], max_tokens=40, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == ["Good day 🙂"] * 2
    assert answer.choices[0].logprobs.text_offset[:2] == [0, 1]
    chunks = client.completions.create(model=MODEL, prompt="greet", max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Good day 🙂"


def test_responses(client: Any) -> None:
    answer = client.responses.create(
        model=MODEL, input="greet", instructions="be kind", store=False, metadata={"k": "v"}
    )
    assert answer.output_text == "Good day 🙂" and answer.status == "completed" and answer.metadata == {"k": "v"}
    tool = {"type": "function", **TOOL["function"], "strict": False}
    answer = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "weather"}], tools=[tool], store=False
    )
    message, call = answer.output
    assert message.content[0].text == "Let me see." and json.loads(call.arguments) == {"city": "Köln"}
    follow_up = client.responses.create(
        model=MODEL, tools=[tool], store=False,
        input=[
            {"role": "user", "content": "weather"}, *[item.model_dump(exclude_none=True) for item in answer.output],
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ],
    )  # fmt: skip
    assert follow_up.status == "completed"


def test_responses_streamed(client: Any) -> None:
    with client.responses.stream(
        model=MODEL, input="weather", tools=[{"type": "function", **TOOL["function"]}], store=False
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds
    assert final.output[0].content[0].text == "Let me see." and json.loads(final.output[1].arguments) == {
        "city": "Köln"
    }


def test_errors_are_the_clients_own_kinds(client: Any, server: Live) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=GREET, temperature=200)
    assert bad.value.param == "temperature" and "from 0 to 100" in bad.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=GREET)
    assert missing.value.code == "model_not_found"
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    with pytest.raises(openai.BadRequestError) as empty:
        client.embeddings.create(model=MODEL, input="")
    assert empty.value.param == "input"
    assert client.models.retrieve(MODEL).id == MODEL and [m.id for m in client.models.list()] == [MODEL]


def test_many_at_once_asynchronously(server: Live) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0) as client:

            async def one(number: int) -> str:
                if number % 2:
                    answer = await client.chat.completions.create(model=MODEL, messages=GREET)
                    return str(answer.choices[0].message.content)
                stream = await client.chat.completions.create(model=MODEL, messages=GREET, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(*(one(number) for number in range(24))))

    assert asyncio.run(run()) == ["Good day 🙂"] * 24


def test_leaving_a_stream_early(client: Any, server: Live) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "go on"}],
        stream=True,
        max_tokens=4000,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    until(lambda: server.running() == 0, "it still runs", seconds=1)
