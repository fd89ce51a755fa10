"""A script as a JSON file: which prompts get which answers, how slowly, and what goes wrong.

Knows: the file's format and what of it fits together. Refuses to know: tokenizers (it is given two functions) and steps (forced).
docs/scripted.md describes every key with examples.

      {"tokenizer": "bytes",
       "rules":   [{"contains": "weather", "answer": "Rain."}],
       "default": {"answer": "I do not know."}}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import msgspec

from tradewind.config.goals import Means
from tradewind.config.plan import CachePlan, SchedulePlan
from tradewind.contract.errors import UserError
from tradewind.contract.kv import KVGroup
from tradewind.engine.degrade import Ladder

Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]

BYTES = "bytes"
"""The name of the tokenizer that needs no file."""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
"""The byte tokenizer's ids from 256 on; the first and third end an answer."""
DEFAULT_ANSWER = "This is a scripted answer."
MAX_ANSWER_TOKENS = 1 << 20


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that goes wrong, at one step of the engine or at one token of one answer."""

    do: Literal["stall", "disk", "die", "bug", "oom", "exit", "kill", "nan"]
    """stall: the step takes `seconds` more. disk: the same, and it says that it waits for a disk. oom: an allocation fails. die: the device
    says that it is dead. bug: an exception. exit, kill: the process is gone without a word. nan: this row fails, the others go on (only
    at a token)."""
    at_step: int | None = None
    at_token: int | None = None
    """0 is the answer's first token. Only in a rule or the default."""
    seconds: float = 0.0
    once: bool = True
    """At a token: only for the first request that comes there."""


class Says(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer."""

    answer: str | tuple[int | str, ...] = DEFAULT_ANSWER
    """Text, or a list of token ids and texts that are tokenised one by one."""
    repeat: bool = False
    """Begin again after the last token, until max_tokens; otherwise an end-of-text token follows."""
    logprobs: tuple[tuple[tuple[int | str, float], ...], ...] = ()
    """By position: the best tokens (id or text) with their logprobs, best first; positions that are not given get made-up ones."""
    step_ms: float = 0.0
    """A step with a row of this answer takes at least so long."""
    mask_ms: float = 0.0
    """A step that draws a token of this answer takes so much longer, for a mask, when the request has a grammar."""
    faults: tuple[Fault, ...] = ()


class Rule(Says, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An answer and the prompts that get it: exactly one of the four is given."""

    prompt: str | None = None
    """The whole prompt, as text with its special tokens spelled out."""
    contains: str | None = None
    regex: str | None = None
    """Searched for anywhere in that text."""
    tokens: tuple[int, ...] | None = None


class Drafts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Guesses, so that a step brings several tokens of an answer."""

    per_row: int
    accepted: tuple[int, ...]
    """How many guesses are right in an answer's first, second, ... step; then from the beginning again."""
    make_ms: float = 0.0
    """What it takes to make a step's guesses."""


class ScriptFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    tokenizer: str | None = None
    """"bytes", or the name of a model whose tokenizer and chat template are used; None: the model named on the command line."""
    chat_template: str | None = None
    """Instead of the tokenizer's own."""
    tool_format: str | None = None
    """The parser of tool calls, by its name; None: the one that fits the chat template."""
    reasoning: str | None = None
    """The reasoning markers, by their name."""
    rules: tuple[Rule, ...] = ()
    """The first that fits decides."""
    default: Says = Says()
    step_ms: float = 0.0
    """What a step takes at least."""
    prompt_token_ms: float = 0.0
    """What a step takes more for each token of a prompt."""
    drafts: Drafts | None = None
    faults: tuple[Fault, ...] = ()
    slots: int = 64
    pages: int = 4096
    """Pages of the cache that can be used."""
    page_tokens: int = 16
    max_context: int = 8192
    max_tokens_per_step: int = 2048
    steps_in_flight: Literal[1, 2] = 2
    policy: Literal["arrival", "fair", "length", "priority", "slo"] = "arrival"
    prefix_cache: bool = True
    age_limit_s: float = 5.0
    max_preemptions: int = 3
    degrade: Ladder | None = None
    """Under overload something is given up, rung by rung; {} for the usual ladder."""


def read_script(text: bytes, *, name: str) -> ScriptFile:
    """The file's content, checked; `name` is for messages. Raises UserError naming the key that is wrong, by its path."""
    try:
        script = msgspec.json.decode(text, type=ScriptFile)
    except msgspec.ValidationError as error:
        raise UserError(f"{name}: {_spoken(str(error))}") from None
    except msgspec.DecodeError as error:
        raise UserError(f"{name} is not JSON: {error}") from None
    for key in ("slots", "pages", "page_tokens", "max_context", "max_tokens_per_step"):
        if getattr(script, key) < 1:
            raise UserError(f"{name}: {key} is {getattr(script, key)}; it must be at least 1")
    for key in ("step_ms", "prompt_token_ms", "age_limit_s", "max_preemptions"):
        if not 0 <= getattr(script, key) < 1e9:
            raise UserError(f"{name}: {key} is {getattr(script, key)}; it must be 0 or more")
    if script.drafts is not None:
        _check_drafts(script.drafts, name)
    for place, fault in enumerate(script.faults):
        where = f"{name}: $.faults[{place}]"
        if fault.at_step is None or fault.at_step < 1 or fault.at_token is not None:
            raise UserError(f"{where} needs at_step, from 1 on, and no at_token, which belongs in a rule")
        if fault.do == "nan":
            raise UserError(f"{where}: 'nan' is a fault of one answer; put it into a rule with at_token")
        _check_seconds(fault, where)
    for place, rule in enumerate(script.rules):
        where = f"{name}: $.rules[{place}]"
        given = [key for key in ("prompt", "contains", "regex", "tokens") if getattr(rule, key) is not None]
        if len(given) != 1:
            said = f"has {' and '.join(given)}" if given else "has none"
            raise UserError(f"{where} needs exactly one of prompt, contains, regex and tokens; it {said}")
        if rule.regex is not None:
            try:
                re.compile(rule.regex)
            except re.error as error:
                raise UserError(f"{where}.regex is no regular expression: {error}") from None
        _check_says(rule, where)
    _check_says(script.default, f"{name}: $.default")
    return script


def _check_drafts(drafts: Drafts, name: str) -> None:
    if not 1 <= drafts.per_row <= 32:
        raise UserError(f"{name}: $.drafts.per_row is {drafts.per_row}; it must be from 1 to 32")
    if not drafts.accepted or not all(0 <= right <= drafts.per_row for right in drafts.accepted):
        raise UserError(
            f"{name}: $.drafts.accepted must be a list of numbers from 0 to per_row, which is {drafts.per_row}"
        )
    if not 0 <= drafts.make_ms < 1e9:
        raise UserError(f"{name}: $.drafts.make_ms is {drafts.make_ms}; it must be 0 or more")


def _check_says(says: Says, where: str) -> None:
    if not says.answer and says.repeat:
        raise UserError(f"{where}: an empty answer cannot be repeated")
    for key in ("step_ms", "mask_ms"):
        if not 0 <= getattr(says, key) < 1e9:
            raise UserError(f"{where}.{key} is {getattr(says, key)}; it must be 0 or more")
    for place, best in enumerate(says.logprobs):
        if not best:
            raise UserError(f"{where}.logprobs[{place}] is empty; it needs at least one token")
        if any(not logprob <= 0 for _, logprob in best) or any(a[1] < b[1] for a, b in pairwise(best)):
            raise UserError(f"{where}.logprobs[{place}] must be at most 0 and sorted, best first")
    for place, fault in enumerate(says.faults):
        if fault.at_token is None or fault.at_token < 0 or fault.at_step is not None:
            raise UserError(
                f"{where}.faults[{place}] needs at_token, from 0 on, and no at_step, which belongs at the file's top"
            )
        _check_seconds(fault, f"{where}.faults[{place}]")


def _check_seconds(fault: Fault, where: str) -> None:
    if not 0 <= fault.seconds < 1e6 or (fault.do in ("stall", "disk")) != (fault.seconds > 0):
        raise UserError(f"{where}: 'stall' needs seconds over 0, and so does 'disk'; the other faults take none")


def _spoken(message: str) -> str:
    """msgspec's message with the path first, and a close match for an unknown key."""
    what, _, path = message.partition(" - at ")
    path = path.strip("`") or "$"
    found = re.match(r"Object contains unknown field `(.*)`", what)
    if found:
        known = sorted(
            {
                *ScriptFile.__struct_fields__,
                *Rule.__struct_fields__,
                *Fault.__struct_fields__,
                *Drafts.__struct_fields__,
                *Ladder.__struct_fields__,
            }
        )
        close = get_close_matches(found[1], known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{path}.{found[1]} is no key that is known there{hint}"
    return f"{path}: {what[:1].lower() + what[1:]}"


# -- what the engine is built from ---------------------------------------------------------------------------------------


def plans_of(script: ScriptFile, means: Means, *, max_context: int | None = None) -> tuple[SchedulePlan, CachePlan]:
    """Schedule and cache as the file says, or as pinned on the command line."""
    overlap = script.steps_in_flight if means.overlap is None else 1 + means.overlap
    page_tokens = means.page_tokens or script.page_tokens
    schedule = SchedulePlan(
        max_running=means.max_running or script.slots,
        max_tokens_per_step=means.max_tokens_per_step or script.max_tokens_per_step,
        max_context=max_context or script.max_context,
        policy=means.policy or script.policy,
        steps_in_flight=overlap,
        age_limit_s=script.age_limit_s,
        max_preemptions=script.max_preemptions,
    )
    group = KVGroup(index=0, kind="full", layers=(0,), kv_heads=1, head_dim=8, page_tokens=page_tokens, format="f32")
    prefix_cache = script.prefix_cache if means.prefix_cache is None else means.prefix_cache
    cache = CachePlan(groups=(group,), pages=(script.pages + 1,), page_tokens=page_tokens, prefix_cache=prefix_cache)
    return schedule, cache


class Forced:
    """One answer as tokens."""

    __slots__ = ("faults", "logprobs", "mask_s", "repeat", "step_s", "tokens")

    def __init__(self, says: Says, *, encode: Encode, token_id: Callable[[str], int], where: str) -> None:
        """`encode` is the tokenizer's without special tokens added; `token_id` is of a text that is one token, or raises UserError."""
        if isinstance(says.answer, str):
            self.tokens = encode(says.answer) if says.answer else []
        else:
            self.tokens = []
            for piece in says.answer:
                self.tokens += [piece] if isinstance(piece, int) else encode(piece)
        if len(self.tokens) > MAX_ANSWER_TOKENS or any(token < 0 for token in self.tokens):
            raise UserError(f"{where}.answer must be at most {MAX_ANSWER_TOKENS} tokens, none of them negative")
        self.repeat = says.repeat
        self.step_s, self.mask_s = says.step_ms / 1e3, says.mask_ms / 1e3
        self.faults = says.faults
        self.logprobs = tuple(
            tuple((token if isinstance(token, int) else token_id(token), logprob) for token, logprob in best)
            for best in says.logprobs
        )


class Answers:
    """Which prompt gets which answer."""

    def __init__(self, script: ScriptFile, *, encode: Encode, decode: Decode, name: str) -> None:
        """`decode` gives a prompt's text with special tokens spelled out. Raises UserError for what the vocabulary does not have."""

        def one_token(text: str) -> int:
            ids = encode(text)
            if len(ids) != 1:
                raise UserError(
                    f"{name}: {text!r} in logprobs is {len(ids)} tokens of this tokenizer; give one token, or its id"
                )
            return ids[0]

        def forced(says: Says, where: str) -> Forced:
            return Forced(says, encode=encode, token_id=one_token, where=f"{name}: {where}")

        self.default = forced(script.default, "$.default")
        self._rules = [(rule, forced(rule, f"$.rules[{at}]")) for at, rule in enumerate(script.rules)]
        self._needs_text = any(rule.tokens is None for rule in script.rules)
        self._decode = decode
        self.of = lru_cache(maxsize=256)(self._of)
        """The answer to a prompt, given as a tuple of its tokens."""

    def _of(self, prompt: tuple[int, ...]) -> Forced:
        text = self._decode(prompt) if self._needs_text else ""
        for rule, answer in self._rules:
            if rule.tokens is not None:
                fits = rule.tokens == prompt
            elif rule.prompt is not None:
                fits = rule.prompt == text
            elif rule.contains is not None:
                fits = rule.contains in text
            else:
                assert rule.regex is not None
                fits = re.search(rule.regex, text) is not None
            if fits:
                return answer
        return self.default


def byte_tokenizer_json() -> str:
    """A `tokenizer.json` of the 256 bytes and a few special tokens, for the tokenizers library."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelling = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in spelling]
    spelling.update((byte, chr(0x100 + place)) for place, byte in enumerate(rest))
    record: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 256 + place, "content": text, "special": text.startswith("<|"), "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
            for place, text in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": False, "byte_fallback": False,
            "vocab": {spelling[byte]: byte for byte in range(256)}, "merges": [],
        },
    }  # fmt: skip
    return msgspec.json.encode(record).decode()


BYTE_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""How the byte tokenizer is spoken to in turns: ChatML, with tools and calls as Hermes writes them."""

BYTE_TOKENIZER_CONFIG: dict[str, object] = {"eos_token": "<|im_end|>", "bos_token": None}
