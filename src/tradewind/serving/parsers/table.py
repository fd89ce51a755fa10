"""The formats that are known, and which one a checkpoint speaks.

Knows: one row for each format and for each pair of reasoning markers, and what in a checkpoint speaks for which.
Refuses to know: how any of them works.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from tradewind.contract.errors import UserError
from tradewind.serving.parsers import (
    deepseek,
    guided_json,
    harmony,
    hermes,
    llama3_json,
    llama3_pythonic,
    llama4,
    mistral,
    qwen3_coder,
    tool_call_lists,
)
from tradewind.serving.parsers.parser import Circumstances, GrammarHint, OutputParser, ReasoningMarkers
from tradewind.serving.parsers.plain import PlainParser


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """One row: a way to write calls."""

    make: Callable[[Circumstances], OutputParser]
    summary: str
    grammar_hint: GrammarHint | None
    """How a forced call is spelled; None when a call cannot be."""
    wants_special_tokens: bool = False
    """Its markers are special tokens, which the detokenizer must show (`hidden_markers` says which)."""
    markers: tuple[str, ...] = ()
    """Every marker it looks for."""
    stops_at: tuple[str, ...] = ()
    """Markers that end the answer. They are among the checkpoint's end-of-text ids where its files are right."""


PARSERS: dict[str, Format] = {
    "deepseek_v3": Format(
        make=deepseek.DeepSeekParser,
        summary="DeepSeek V3 and R1: call tokens, arguments in a fenced block",
        grammar_hint=deepseek.HINT_V3,
        wants_special_tokens=True,
        markers=deepseek.HINT_V3.tokens,
    ),
    "deepseek_v31": Format(
        make=deepseek.DeepSeekParser,
        summary="DeepSeek V3.1: call tokens, bare arguments",
        grammar_hint=deepseek.HINT_V31,
        wants_special_tokens=True,
        markers=deepseek.HINT_V31.tokens,
    ),
    "granite": Format(
        make=tool_call_lists.GraniteParser,
        summary="Granite 3: <|tool_call|>[JSON list]",
        grammar_hint=tool_call_lists.GRANITE_HINT,
        wants_special_tokens=True,
        markers=tool_call_lists.GRANITE_HINT.tokens,
    ),
    "harmony": Format(
        make=harmony.HarmonyParser,
        summary="gpt-oss: channels for reasoning, calls and content",
        grammar_hint=harmony.HINT,
        wants_special_tokens=True,
        markers=harmony.HINT.tokens,
        stops_at=(harmony.CALL, harmony.RETURN),
    ),
    "hermes": Format(
        make=hermes.HermesParser,
        summary="Hermes, Qwen 2.5 and 3: <tool_call>{JSON}</tool_call>",
        grammar_hint=hermes.HINT,
        markers=hermes.HINT.tokens,
    ),
    "json": Format(
        make=guided_json.GuidedJsonParser,
        summary="bare JSON that a grammar forces, for models without a format of their own",
        grammar_hint=guided_json.HINT,
    ),
    "llama3_json": Format(
        make=llama3_json.Llama3JsonParser,
        summary='Llama 3.1 and later: {"name": ..., "parameters": ...}, also behind <|python_tag|>',
        grammar_hint=llama3_json.HINT,
        wants_special_tokens=True,
        markers=(llama3_json.TAG,),
    ),
    "llama3_pythonic": Format(
        make=llama3_pythonic.Llama3PythonicParser,
        summary="Llama 3.2, and 4 where the prompt asks for it: [f(a=1), g()]",
        grammar_hint=llama3_pythonic.HINT,
        wants_special_tokens=True,
        markers=(llama3_pythonic.BEGIN, llama3_pythonic.END),
    ),
    "llama4": Format(
        make=llama4.Llama4Parser,
        summary='Llama 4: {"name": ..., "parameters": ...} or [f(a=1), g()], also behind <|python_start|>',
        grammar_hint=llama4.HINT,
        wants_special_tokens=True,
        markers=(llama3_pythonic.BEGIN, llama3_pythonic.END),
    ),
    "mistral": Format(
        make=mistral.MistralParser,
        summary="Mistral up to tokenizer v7: [TOOL_CALLS] [JSON list]",
        grammar_hint=mistral.HINT,
        wants_special_tokens=True,
        markers=mistral.HINT.tokens,
    ),
    "mistral_v11": Format(
        make=mistral.MistralParser,
        summary="Mistral since tokenizer v11: [TOOL_CALLS]name[ARGS]{JSON}",
        grammar_hint=mistral.HINT_V11,
        wants_special_tokens=True,
        markers=mistral.HINT_V11.tokens,
    ),
    "phi4_mini": Format(
        make=tool_call_lists.PhiParser,
        summary="Phi 4 mini: <|tool_call|>[JSON list]<|/tool_call|> or functools[JSON list]",
        grammar_hint=tool_call_lists.PHI_HINT,
        wants_special_tokens=True,
        markers=tool_call_lists.PHI_HINT.tokens,
    ),
    "plain": Format(make=PlainParser, summary="no calls, only content and reasoning", grammar_hint=None),
    "qwen3_coder": Format(
        make=qwen3_coder.Qwen3CoderParser,
        summary="Qwen3-Coder: <function=name><parameter=key>value</parameter></function>",
        grammar_hint=qwen3_coder.HINT,
        markers=qwen3_coder.HINT.tokens,
    ),
    "seed_oss": Format(
        make=qwen3_coder.SeedParser,
        summary="Seed-OSS: as Qwen3-Coder, between <seed:tool_call> and </seed:tool_call>",
        grammar_hint=qwen3_coder.HINT_SEED,
        wants_special_tokens=True,
        markers=qwen3_coder.HINT_SEED.tokens,
    ),
}

REASONING: dict[str, ReasoningMarkers | None] = {
    "mistral": ReasoningMarkers(begin="[THINK]", end="[/THINK]"),
    "none": None,
    "seed": ReasoningMarkers(begin="<seed:think>", end="</seed:think>"),
    "think": ReasoningMarkers(begin="<think>", end="</think>"),
}


def format_named(name: str) -> Format:
    """The row of a format; raises UserError with the names there are."""
    if name not in PARSERS:
        raise UserError(f"there is no tool format {name!r}; known are {', '.join(PARSERS)}")
    return PARSERS[name]


def reasoning_named(name: str) -> ReasoningMarkers | None:
    """The reasoning markers of a name; raises UserError with the names there are."""
    if name not in REASONING:
        raise UserError(f"there are no reasoning markers {name!r}; known are {', '.join(REASONING)}")
    return REASONING[name]


def make_parser(name: str, circumstances: Circumstances | None = None) -> OutputParser:
    """A fresh parser for one answer; raises UserError for a name that is not known."""
    circumstances = circumstances or Circumstances()
    row = format_named(name)
    if not circumstances.calls and name != "harmony":  # whose channels are more than calls
        row = PARSERS["plain"]
    return row.make(circumstances)


def hidden_markers(
    name: str,
    reasoning: ReasoningMarkers | None,
    *,
    token_id: Callable[[str], int | None],
    special_ids: Collection[int],
) -> tuple[int, ...]:
    """The ids of a format's and its reasoning's markers that a detokenizer leaves out as special tokens, and must not."""
    markers = format_named(name).markers + ((reasoning.begin, reasoning.end) if reasoning is not None else ())
    ids = (token_id(marker) for marker in markers)
    return tuple(sorted({found for found in ids if found is not None and found in special_ids}))


class ParserChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which format and which reasoning markers a checkpoint speaks, and why."""

    name: str
    reasoning: str
    reasons: tuple[str, ...]

    @property
    def format(self) -> Format:
        return PARSERS[self.name]


class _Sign(msgspec.Struct, frozen=True):
    """A template that holds all of `texts` speaks `name`; an empty name is a format that is not known here."""

    texts: tuple[str, ...]
    name: str


# The first that fits decides: the more particular ones stand first.
_TEMPLATE_SIGNS = (
    _Sign((harmony.CHANNEL, harmony.MESSAGE), "harmony"),
    _Sign(("<arg_key>",), ""),  # GLM 4.5
    _Sign(("<minimax:tool_call>",), ""),
    _Sign(("<|tool_calls_section_begin|>",), ""),  # Kimi K2
    _Sign(("\uff5cDSML\uff5c",), ""),  # DeepSeek V3.2
    _Sign((qwen3_coder.SEED_BEGIN,), "seed_oss"),
    _Sign((qwen3_coder.FUNCTION, qwen3_coder.PARAMETER), "qwen3_coder"),
    _Sign((hermes.BEGIN,), "hermes"),
    _Sign((deepseek.CALL_BEGIN, deepseek.FENCE + "json"), "deepseek_v3"),
    _Sign((deepseek.CALL_BEGIN,), "deepseek_v31"),
    _Sign((mistral.BEGIN, mistral.ARGUMENTS), "mistral_v11"),
    _Sign((mistral.BEGIN,), "mistral"),
    _Sign((tool_call_lists.BEGIN,), "granite"),
    _Sign((tool_call_lists.TOOLS,), "phi4_mini"),
    _Sign((llama3_pythonic.BEGIN, '"parameters": '), "llama4"),
    _Sign((llama3_pythonic.BEGIN,), "llama3_pythonic"),
    _Sign(("[func_name1(",), "llama3_pythonic"),
    _Sign((llama3_json.TAG,), "llama3_json"),
    _Sign(("<|start_header_id|>", '"parameters": '), "llama3_json"),
)

# Without a template, a token that exists for nothing else.
_TOKEN_SIGNS = (
    (harmony.CHANNEL, "harmony"),
    (deepseek.CALL_BEGIN, "deepseek_v3"),
    (mistral.ARGUMENTS, "mistral_v11"),
    (mistral.BEGIN, "mistral"),
    (tool_call_lists.END, "phi4_mini"),
    (tool_call_lists.BEGIN, "granite"),
    (llama3_pythonic.BEGIN, "llama4"),
    (llama3_json.TAG, "llama3_json"),
    (hermes.BEGIN, "hermes"),
)

# DeepSeek-V2, Gemma and OLMo have no row: their templates take no tools. Llama has none: which of its formats it is, only a template tells.
_FAMILIES = {
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "harmony",
    "granite": "granite",
    "llama4": "llama4",
    "mistral": "mistral",
    "mixtral": "mistral",
    "qwen2": "hermes",
    "qwen2_5_vl": "hermes",
    "qwen2_moe": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
}


def parser_for(
    family: str,
    template: str | None,
    *,
    token_id: Callable[[str], int | None],
    name: str | None = None,
    reasoning: str | None = None,
) -> ParserChoice:
    """The format a checkpoint speaks, with reasons; `name` and `reasoning` overrule it. Raises UserError for unknown names.

    `template` is the chat template's source, None when there is none; `token_id` looks a token up in the vocabulary.
    """
    if name is not None:
        format_named(name)
        why = "the tool format is the one asked for"
    else:
        name, why = _format_for(family, template, token_id)
    if reasoning is not None:
        reasoning_named(reasoning)
        why_reasoning = "the reasoning markers are the ones asked for"
    elif name == "harmony":
        reasoning, why_reasoning = "none", "reasoning is a channel of its own in this format"
    else:
        reasoning, why_reasoning = _reasoning_for(template, token_id)
    return ParserChoice(name=name, reasoning=reasoning, reasons=(f"{name}: {why}", f"{reasoning}: {why_reasoning}"))


def _format_for(family: str, template: str | None, token_id: Callable[[str], int | None]) -> tuple[str, str]:
    if template is not None:
        for sign in _TEMPLATE_SIGNS:
            if all(text in template for text in sign.texts):
                texts = " and ".join(sign.texts)
                if not sign.name:
                    return "plain", f"the chat template writes calls with {texts}, a format that is not known here"
                return sign.name, f"the chat template holds {texts}"
        if "tools" in template:
            return "plain", "the chat template takes tools, but writes calls in no format that is known here"
        return "plain", "the chat template takes no tools, so the model is never told of any"
    for token, name in _TOKEN_SIGNS:
        if token_id(token) is not None:
            return name, f"there is no chat template, and the vocabulary has the token {token}"
    if family in _FAMILIES:
        return _FAMILIES[family], f"there is no chat template, and models of the family {family} usually speak it"
    return "plain", f"there is no chat template, and nothing is known of calls in the family {family}"


def _reasoning_for(template: str | None, token_id: Callable[[str], int | None]) -> tuple[str, str]:
    for name, markers in REASONING.items():
        if markers is None:
            continue
        if template is not None and (markers.begin in template or markers.end in template):
            return name, f"the chat template holds {markers.begin if markers.begin in template else markers.end}"
        if token_id(markers.begin) is not None and token_id(markers.end) is not None:
            return name, f"the vocabulary has the tokens {markers.begin} and {markers.end}"
    return "none", "neither the chat template nor the vocabulary has reasoning markers"
