"""Chat templates: the same text as `transformers` renders, refusals in one sentence with the line, and bombs that do not go off."""

from __future__ import annotations

import datetime
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tradewind.contract.errors import RequestError, UserError
from tradewind.serving.chat_template import CHATML, ChatTemplate
from tradewind.serving.template_sandbox import TemplateLimits

USER = {"role": "user", "content": "What is the capital of France?"}
CHAT = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "  Grüße, 世界 😀\n"},
    {"role": "assistant", "content": "{% not a tag %} {{ nor this }}"},
    {"role": "user", "content": "ok?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "Wetter für <ort>", "parameters": {"type": "object", "n": 1.5}},
    }
]

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Written here in the manner of the families, each with other parts of the language.
TEMPLATES = {
    "smollm2": SMOLLM2,
    "chatml": CHATML,
    "inst": """
        {%- if messages[0]['role'] == 'system' %}
            {%- set system = messages[0]['content'] | trim %}
            {%- set loop_messages = messages[1:] %}
        {%- else %}
            {%- set loop_messages = messages %}
        {%- endif %}
        {{- bos_token }}
        {%- for m in loop_messages %}
            {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
                {{- raise_exception('roles must alternate') }}
            {%- endif %}
            {%- if m['role'] == 'user' %}
                {%- if loop.first and system is defined %}
                    {{- ' [INST] ' + system + '\\n\\n' + m['content'].strip() + ' [/INST]' }}
                {%- else %}
                    {{- ' [INST] ' ~ m.content.strip() ~ ' [/INST]' }}
                {%- endif %}
            {%- else %}
                {{- ' ' + m['content'] | upper + eos_token }}
            {%- endif %}
        {%- endfor %}""",
    "headers": """{{ bos_token }}{% for message in messages %}
{% set content = '<|h|>' + message['role'] + '<|/h|>\\n\\n' + message['content'] | trim + '<|eot|>' %}
{{ content }}
    {% endfor %}
{%- if add_generation_prompt %}{{ '<|h|>assistant<|/h|>\\n\\n' }}{% endif %}""",
    "tools": """{% macro describe(tool, depth=0) -%}
{{ '  ' * depth }}- {{ tool.function.name }}: {{ tool.function.description | replace('<', '[') }}
{{ tool | tojson(indent=2) }}{{ tool.function | tojson }}
{%- endmacro -%}
{%- set ns = namespace(found=false, names=[]) -%}
{%- if tools -%}
{%- for tool in tools -%}{{ describe(tool, depth=loop.index) }}{%- set ns.names = ns.names + [tool.function.name] -%}{%- endfor -%}
{{ ns.names | join(', ') }}{{ dict(a=1, b=[1, 2])['b'] | sum }}
{%- endif -%}
{%- for message in messages | selectattr('role', 'ne', 'system') -%}
{%- if message.role == 'assistant' -%}{% generation %}{{ message.content }}{% endgeneration %}{%- continue -%}{%- endif -%}
[{{ loop.index }}/{{ loop.length }}{{ '*' if loop.last else '' }}] {{ message.content.split('\\n')[0] | title }}
{% if loop.index > 5 %}{% break %}{% endif %}
{%- endfor -%}
{% set block %}{{ messages | length }} of {{ messages | map(attribute='role') | unique | list }}{% endset %}{{ block }}
{%- filter lower %}DONE {{ '%03d|%s' % (7, 'x') }}{{ '{:>5}'.format('y') }}{% endfilter -%}
{{ undefined_thing }}{{ (1, 2) }}{{ {'k': none} }}{{ [1, 'a'][::-1] }}{{ 3 // 2 }}{{ 2 ** 5 }}{{ -3 % 5 }}""",
    "recursive": """{% for item in [{'n': 1, 'c': [{'n': 2, 'c': []}, {'n': 3, 'c': [{'n': 4}]}]}] recursive -%}
{{ item.n }}@{{ loop.depth }}{% if item.c %}({{ loop(item.c) }}){% endif %}{% if not loop.last %},{% endif %}
{%- endfor %}{% for m in messages if m.role == 'user' -%}
{{ loop.cycle('a', 'b') }}{{ (loop.previtem or {'content': '-'}).content }}{% else %}none{% endfor %}""",
}


def transformers_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, []))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def oracle() -> Any:
    return transformers_tokenizer()


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("chat", [CHAT, [USER]], ids=["chat", "single"])
def test_renders_as_transformers(
    oracle: Any, name: str, prompt: bool, tools: list[dict[str, Any]] | None, chat: list[dict[str, Any]]
) -> None:
    ours = ChatTemplate(TEMPLATES[name], bos_token="<s>", eos_token="</s>")
    expected = oracle.apply_chat_template(
        chat, chat_template=TEMPLATES[name], tools=tools, add_generation_prompt=prompt, tokenize=False
    )
    assert ours.render(chat, tools=tools, add_generation_prompt=prompt) == expected


@settings(max_examples=60, deadline=None)
@given(contents=st.lists(st.text(max_size=20), min_size=1, max_size=6))
def test_any_content_renders_as_transformers(oracle: Any, contents: list[str]) -> None:
    chat = [{"role": "user", "content": content} for content in contents]
    for source in (SMOLLM2, TEMPLATES["headers"]):
        expected = oracle.apply_chat_template(chat, chat_template=source, add_generation_prompt=True, tokenize=False)
        assert ChatTemplate(source, bos_token="<s>").render(chat) == expected


def test_smollm2_golden_text() -> None:
    assert ChatTemplate(SMOLLM2).render([USER]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.weights
def test_smollm2_template_comes_with_the_file(smollm2_gguf: Path) -> None:
    from tradewind.serving.tokenizer import TextTokenizer
    from tradewind.weights.gguf import open_gguf

    tokenizer = TextTokenizer.from_gguf(open_gguf(smollm2_gguf).metadata)
    assert ChatTemplate.for_tokenizer(tokenizer).source == SMOLLM2


def test_variables_and_clock() -> None:
    when = datetime.datetime(2026, 11, 30, 12, 0, 0)
    template = ChatTemplate(
        "{{ strftime_now('%d %b %Y') }} {{ thinking }} {{ documents }} {{ tools }}", now=lambda: when
    )
    assert template.render([USER], thinking=True) == "30 Nov 2026 True None None"


def test_rendering_changes_no_argument() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    before = json.dumps(chat)
    ChatTemplate(CHATML).render(chat)
    assert json.dumps(chat) == before


# ------------------------------------------------------------------------------------------------- content shapes

PARTS_ONLY = "{% for m in messages %}{% for part in m['content'] %}<{{ part['text'] }}>{% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content | selectattr('type', 'eq', 'text') %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
BY_MACRO = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for p in content %}<{{ p.text }}>{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
)
TWO_PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
ONE_TEXT = [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("source", "takes_parts", "from_parts", "from_text"),
    [
        ("{{ messages[0].content }}", False, "a\nb", "ab"),
        (PARTS_ONLY, True, "<a><b>", "<ab>"),
        (EITHER, True, "<a><b>", "ab"),
        (BY_MACRO, True, "<a><b>", "ab"),
        ("{% set c = messages[0]['content'] %}{% for p in c %}<{{ p.text }}>{% endfor %}", True, "<a><b>", "<ab>"),
    ],
)
def test_content_comes_in_the_shape_the_template_reads(
    source: str, takes_parts: bool, from_parts: str, from_text: str
) -> None:
    template = ChatTemplate(source)
    assert template.takes_parts is takes_parts
    assert template.render(TWO_PARTS) == from_parts
    assert template.render(ONE_TEXT) == from_text


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "messages is empty"),
        ("hello", "must be a list of {role, content}, not str"),
        ({"role": "user"}, "must be a list"),
        (5, "not int"),
        (["hello"], "message 0 must be an object"),
        ([{"content": "x"}], "message 0 has no role"),
        ([{"role": "", "content": "x"}], "message 0 has no role"),
        ([USER, {"role": "user"}], r"message 1 \(user\) has no content"),
        ([{"role": "user", "content": 5}], "content of message 0 must be text or a list of text parts, not int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 0 has a content part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "type 'text' with a text"),
        ([{"role": "user", "content": [None]}], "part of type 'NoneType'"),
    ],
)
def test_wrong_messages_are_refused(messages: Any, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        ChatTemplate(CHATML).render(messages)


# ------------------------------------------------------------------------------------------------- default templates


class _Vocabulary:
    """As much of a tokenizer as choosing a template needs."""

    bos_token, eos_token = "<s>", "</s>"

    def __init__(self, tokens: set[str], templates: dict[str, str] | None = None) -> None:
        self._tokens = tokens
        self.chat_templates = templates or {}

    def token_id(self, token: str) -> int | None:
        return 1 if token in self._tokens else None


def test_which_template_is_used() -> None:
    chatml: Any = _Vocabulary({"<|im_start|>", "<|im_end|>"})
    own: Any = _Vocabulary(set(), {"default": "{{ bos_token }}d", "tool_use": "t"})
    assert ChatTemplate.for_tokenizer(chatml).source == CHATML
    assert ChatTemplate.for_tokenizer(own).render([USER]) == "<s>d"
    assert ChatTemplate.for_tokenizer(own, tools=True).source == "t"
    assert ChatTemplate.for_tokenizer(own, source="mine").source == "mine"
    bare: Any = _Vocabulary({"<|im_start|>"})
    with pytest.raises(UserError, match="this model has no chat template"):
        ChatTemplate.for_tokenizer(bare)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("a\n{% if %}", "broken at line 2: Expected an expression"),
        ("{{ 'x' }", "broken at line 1"),
        ("{% for x in y %}", "broken at line 1"),
        ("{% nonsense %}", "broken at line 1: Encountered unknown tag 'nonsense'"),
        ("{{ x | nonsense }}", "broken at line 1: No filter named 'nonsense'"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "nested too deeply"),
        ("x" * (256 * 1024 + 1), "has 262145 characters; at most 262144"),
    ],
)
def test_broken_templates_are_refused(source: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("\n\n{{ raise_exception('no  system\nrole') }}", "refuses these messages at line 3: no system role"),
        ("\n{{ nothing.here }}", "at line 2: it uses something the messages do not have, 'nothing' is undefined"),
        ("{{ messages[0].name.first }}", "at line 1: it uses something .* has no attribute 'name'"),
        ("{{ messages[3].content }}", "at line 1: it uses something"),
        ("a\n{% macro f() %}\n{{ 1 / 0 }}{% endmacro %}\n{{ f() }}", "fails at line 3: ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "fails at line 1: TypeError"),
        ("{% for a in none %}{% endfor %}", "fails at line 1: TypeError: 'NoneType' object is not iterable"),
        ("{{ ''.__class__.__mro__ }}", "may not at line 1: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "may not at line 1: access to attribute 'append'"),
        ("{{ messages[0].update(a=1) }}", "may not at line 1: access to attribute 'update'"),
        ("{{ namespace(__class__=1) }}", "may not at line 1: a namespace may not have the name '__class__'"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "a namespace may not have the name '_x'"),
        ("{{ range.__init__ }}{{ cycler.__init__.__globals__.os }}", "chat template"),
        ("{{ ''.format.__func__ }}{{ '{0.__class__.__mro__}'.format('') }}", "may not at line 1"),
        ("{{ namespace.__init__.__globals__ }}", "may not at line 1"),
        ("{{ strftime_now.__globals__.time }}", "may not at line 1"),
        ("{% include 'x' %}", "fails at line 1"),
        ("{% extends 'x' %}", "fails at line 1"),
    ],
)
def test_failing_templates_say_where(source: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        ChatTemplate(source).render([USER])
    assert "\n" not in str(caught.value)


def test_private_attributes_are_nothing_to_the_attr_filter() -> None:
    assert ChatTemplate("{{ '' | attr('__class__') }}").render([USER]) == ""


LIMITS = TemplateLimits(output_chars=1_000_000, items=100_000, render_s=0.3)

DOUBLING = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x%s }}"

BOMBS = {
    # time
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops over one range": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "wide range": "{% for i in range(10**12) %}{% endfor %}",
    "loop in a macro": "{% macro f() %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endmacro %}{{ f() }}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "block tree": "{% block x %}{{ self.x() }}{{ self.x() }}{% endblock %}",
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "recursive loop tree": "{% for x in range(40) recursive %}{% if x %}{{ loop(range(x)) }}{% endif %}{% endfor %}",
    "loop condition": "{% for i in range(99999) if range(99999) | list | length == 1 %}{% endfor %}",
    "lazy filters": "{% for i in range(99999) %}{{ range(99999) | map('string') | select | list | length }}{% endfor %}",
    "sum of lists": "{{ ([[1]] * 90000) | sum(start=[]) | length }}",
    "compare": DOUBLING.replace("{{ ns.x%s }}", "{{ ns.x == 1 }}%s") % ("[1]", "[ns.x, ns.x]", ""),
    # memory
    "times": "{{ 'x' * 10**9 }}",
    "times a list": "{{ [1] * 10**9 }}",
    "list of a long text": "{{ ['x' * 900000] * 90000 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "squaring": DOUBLING % ("3", "ns.x * ns.x", ""),
    "plus": DOUBLING % ("'ab'", "ns.x + ns.x", ""),
    "tilde": DOUBLING % ("'ab'", "ns.x ~ ns.x", ""),
    "plus of lists": DOUBLING % ("[1]", "ns.x + ns.x", "|length"),
    "percent": DOUBLING % ("'ab'", "'%s%s' % (ns.x, ns.x)", ""),
    "format method": DOUBLING % ("'ab'", "'{0}{0}'.format(ns.x)", ""),
    "set block": "{% set a %}{% for i in range(99999) %}{{ 'y' * 90000 }}{% endfor %}{% endset %}",
    "output": "{% for i in range(99999) %}{{ 'y' * 90000 }}{% endfor %}",
    "nested list": DOUBLING % ("['lol']", "[ns.x, ns.x]", ""),
    "nested object": DOUBLING % ("{'a': 1}", "{'a': ns.x, 'b': ns.x}", " | tojson"),
    "nested dict call": DOUBLING % ("{'a': 1}", "dict(a=ns.x, b=ns.x)", " | string"),
    "nested tuple": DOUBLING % ("(1,)", "(ns.x, ns.x)", " | join"),
    "nested batch": DOUBLING % ("[1]", "[[ns.x, ns.x]] | map('list') | list", " | upper"),
    "chain of namespaces": "{% set big = 'y' * 900000 %}{% set ns = namespace() %}"
    "{% for i in range(99999) %}{% set ns.n = namespace(p=ns.n, s=big[1:]) %}{% endfor %}",
    "printed lists": "{% set x = ['y' * 900000] %}{% set z %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format width": "{{ '{:1000000000d}'.format(1) }}",
    "format nested width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "center": "{{ 'x'.center(10**9) }}",
    "center filter": "{{ 'x' | center(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ ('\t' * 1000).expandtabs(10**8) }}",
    "replace": "{{ ('x' * 900000).replace('x', 'y' * 1000) }}",
    "replace filter": "{{ ('x' * 900000) | replace('x', 'y' * 1000) }}",
    "join": "{{ ('x' * 1000).join(['y'] * 90000) }}",
    "join filter": "{{ (['y' * 10000] * 90) | map('center', 20000) | join('z' * 900000) }}",
    "split": "{{ ('x ' * 400000).split() | length }}",
    "batch": "{{ [1] | batch(10**9, 1) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "indent": "{{ ('a\n' * 400) | indent(10**9) }}",
    "json indent": "{{ [[1]] | tojson(indent=10**9) }}",
    "fromkeys": "{{ dict.fromkeys(range(99999), 'x' * 900000) }}",
    "to_bytes": "{{ (5).to_bytes(10**9, 'big') }}",
    "encode": "{{ ('x' * 1000).encode().center(10**9) }}",
    "translate": "{{ ('x' * 1000).translate({120: 'y' * 1000000}) }}",
    "lipsum": "{{ lipsum(n=10**6) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_stopped(name: str) -> None:
    """Each is refused in about the time allowed, with one sentence; none may eat the machine's memory or hang."""
    began = time.monotonic()
    with pytest.raises(UserError, match="chat template") as caught:
        ChatTemplate(BOMBS[name], limits=LIMITS).render([USER])
    assert time.monotonic() - began < 5, "0.3 s are allowed; the rest is for a busy machine"
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_long_honest_chats_are_not_stopped() -> None:
    """A thousand turns and a megabyte of text, in a template that gathers messages in a list."""
    source = (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}{% set ns.seen = ns.seen + [m] %}"
        "{{ '<' + m.role + '>' + m.content | trim + '\\n' }}{% if loop.last %}{{ ns.seen | length }}{% endif %}{% endfor %}"
    )
    chat = [{"role": "user", "content": "word " * 200}] * 1000
    assert ChatTemplate(source).render(chat).endswith("\n1000")


def test_threads_do_not_share_a_meter() -> None:
    template = ChatTemplate(
        "{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}", limits=TemplateLimits(output_chars=3000)
    )
    results: list[str] = []

    def work() -> None:
        results.append(template.render([{"role": "user", "content": "x"}]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["x" * 2000] * 4


def test_a_turn_without_content_is_empty_text_unless_the_template_knows_none() -> None:
    turn = [{"role": "assistant", "content": None, "tool_calls": []}]
    joined = ChatTemplate("{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}")
    assert joined.render(turn) == "assistant:"
    asked = ChatTemplate("{% for m in messages %}{{ 'no text' if m.content is none else m.content }}{% endfor %}")
    assert asked.render(turn) == "no text"
