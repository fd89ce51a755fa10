"""The official client against `tradewind serve` with real weights: two processes, SmolLM2, everything between socket and logits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

pytestmark = pytest.mark.timeout(300)

SKY: Any = [
    {"role": "user", "content": "Why is the sky blue? Tell me in a few words that a child of six can understand."}
]
TOOL: Any = {
    "type": "function",
    "function": {
        "strict": True,
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


# SmolLM2's own knows no tools; this is ChatML too, with tools as Hermes models are told of them.
TEMPLATE = """{% if tools %}<|im_start|>system
You may call functions: <tools>{{ tools | tojson }}</tools>. Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture(scope="module")
def url(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as an operator starts it; in the end it is asked to leave, and must do so in order."""
    template = tmp_path_factory.mktemp("live") / "template.jinja"
    template.write_text(TEMPLATE)
    command = [sys.executable, "-m", "tradewind", "serve", str(smollm2_gguf), "--port", "0", "--max-context", "1024"]
    command += ["--chat-template", str(template), "--tool-format", "hermes"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if "ready on" in line:
            break
    assert lines and "ready on" in lines[-1], "".join(lines)
    drain = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    drain.start()
    try:
        yield "http://" + lines[-1].rpartition("http://")[2].strip('"}\n')
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, "".join(lines)
    finally:
        process.kill()
        process.wait()
        drain.join(5)
        process.stderr.close()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one


@pytest.fixture(scope="module")
def model(client: Any) -> str:
    (served,) = client.models.list().data
    return str(served.id)


def test_the_served_name_is_the_file_s(model: str, smollm2_gguf: Path) -> None:
    assert model == smollm2_gguf.stem and os.sep not in model


def test_chat_and_its_stream_say_the_same(client: Any, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": SKY, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and "sky" in text.lower()
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 12
    assert chunks[-1].usage.completion_tokens == 12 and chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    # The second one found the first one's pages.
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    entries = whole.choices[0].logprobs.content
    assert len(entries) == 12 and all(entry.top_logprobs[0].token == entry.token for entry in entries), "greedy"
    assert "".join(entry.token for entry in entries) == text


def test_many_at_once_answer_as_each_alone(url: str, client: Any, model: str) -> None:
    prompts = ["The sea is", "One two three", "Paris is", "Water boils at"]
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": 16}
    alone = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in prompts]

    async def one(clients: Any, prompt: str) -> str:
        text = ""
        async for chunk in await clients.completions.create(prompt=prompt, stream=True, **asked):
            text += chunk.choices[0].text
        return text

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as clients:
            return list(await asyncio.gather(*(one(clients, prompt) for prompt in prompts * 2)))

    assert asyncio.run(run()) == alone * 2


def test_seed(client: Any, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "Once upon a time", "temperature": 1.5, "max_tokens": 12}
    first, again, other = (client.completions.create(**asked, seed=seed).choices[0].text for seed in (7, 7, 8))
    assert first == again != other


def test_json_schema(client: Any, model: str) -> None:
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"fruit": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
        "required": ["fruit", "count"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name a fruit and how many of it you have, as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "fruit", "schema": schema, "strict": True}},
        temperature=0,
        max_tokens=64,
    )
    said = json.loads(answer.choices[0].message.content)
    assert set(said) == {"fruit", "count"} and isinstance(said["count"], int) and said["count"] <= 99
    assert answer.choices[0].finish_reason == "stop"


def test_parsed(client: Any, model: str) -> None:
    pytest.importorskip("llguidance")
    pydantic = pytest.importorskip("pydantic")
    city = pydantic.create_model("City", name=(str, ...), capital=(bool, ...))
    asked: Any = {"model": model, "messages": [{"role": "user", "content": "Paris?"}], "temperature": 0}
    answer = client.chat.completions.parse(**asked, response_format=city, max_tokens=96)
    assert isinstance(answer.choices[0].message.parsed.capital, bool)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools(client: Any, model: str, choice: Any) -> None:
    pytest.importorskip("llguidance")
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    asked: dict[str, Any] = {"model": model, "tools": [TOOL], "tool_choice": choice, "temperature": 0, "max_tokens": 96}
    asked["parallel_tool_calls"] = False
    whole = client.chat.completions.create(messages=messages, **asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    (call,) = whole.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and set(arguments) == {"city", "unit"} and arguments["unit"] in "CF"
    deltas = [
        part
        for chunk in client.chat.completions.create(messages=messages, stream=True, **asked)
        for part in chunk.choices[0].delta.tool_calls or ()
    ]
    assert "".join(part.function.arguments or "" for part in deltas) == call.function.arguments
    assert [part.function.name for part in deltas if part.function.name] == ["get_weather"]
    # And the result goes back, as people send it.
    messages += [whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain, 7 C"}]
    after = client.chat.completions.create(
        model=model, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=8
    )
    assert after.choices[0].finish_reason in ("stop", "length") and not after.choices[0].message.tool_calls


def test_responses(client: Any, model: str) -> None:
    answer = client.responses.create(model=model, input="Name three colours.", temperature=0, max_output_tokens=48)
    events = list(
        client.responses.create(
            model=model, input="Name three colours.", temperature=0, max_output_tokens=48, stream=True
        )
    )
    assert answer.output_text and events[-1].response.output_text == answer.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer.output_text


def test_embeddings(client: Any, model: str) -> None:
    texts = ["The cat sits on the mat.", "A cat is on a mat.", "Interest rates rose in March."]
    answer = client.embeddings.create(model=model, input=texts)
    vectors = [row.embedding for row in answer.data]
    assert [row.index for row in answer.data] == [0, 1, 2] and answer.usage.prompt_tokens > 10
    assert all(abs(sum(x * x for x in vector) - 1) < 1e-4 for vector in vectors)

    def near(a: int, b: int) -> float:
        return float(sum(x * y for x, y in zip(vectors[a], vectors[b], strict=True)))

    assert near(0, 1) > near(0, 2)
    floats = client.embeddings.create(model=model, input=texts[0], encoding_format="float").data[0].embedding
    assert max(abs(x - y) for x, y in zip(floats, vectors[0], strict=True)) < 1e-3, "base64, which the client asks for"


def test_leaving_frees_the_slot(client: Any, model: str, url: str) -> None:
    import urllib.request

    with client.completions.create(model=model, prompt="a b c", max_tokens=900, stream=True) as stream:
        next(iter(stream))
    began = time.monotonic()
    while True:
        with urllib.request.urlopen(url + "/health") as answer:
            health = json.loads(answer.read())
        if not health["running"] and not health["waiting"]:
            break
        assert time.monotonic() - began < 1.0, health
    assert not any(health["pages_used"]), "what nobody holds but the prefix cache does not count"


def test_too_long_is_refused(client: Any, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt="sea " * 2000, max_tokens=4)
    assert refused.value.code == "context_length_exceeded"
