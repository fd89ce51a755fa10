"""How a byte-level BPE vocabulary cuts text into words before merging, by the name a GGUF file gives in `tokenizer.ggml.pre`.

Knows: one table from name to recipe (regular expressions in the order they are applied, normaliser, merge rule).
Refuses to know: vocabularies, merges, special tokens; those are tokenizer.py's.

The expressions are the ones in each family's published `tokenizer.json`; they are data of the models, as the vocabulary is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tradewind.contract.errors import UserError

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

# The GPT-2 expression is built into the `tokenizers` library; this word stands for it in a recipe.
_GPT2 = "<gpt-2>"
_GPT2_EXPRESSION = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"


def _llama3_like(digits: str, *, marks: bool = False) -> str:
    """The cl100k shape: contractions, words with one leading non-letter, digits, punctuation, line ends, spaces."""
    letters = r"[\p{L}\p{M}]" if marks else r"\p{L}"
    not_word = r"[^\s\p{L}\p{M}\p{N}]" if marks else r"[^\s\p{L}\p{N}]"
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?{not_word}+[\r\n]*|{_SPACES}"


def _case_split(digits: str, *, contraction: str) -> str:
    """The o200k shape: a word ends where lower case is followed by upper case."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{contraction}|{lead}{_UPPER}+{_LOWER}*{contraction}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACES
)
_CJK_DEEPSEEK3 = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
_CJK_DEEPSEEK_CODER = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to cut text: `splits` are applied in order, each inside the pieces the one before left."""

    splits: tuple[str, ...]
    nfc: bool = False
    """Text is brought to Unicode normal form C first (the Qwen families)."""
    ignore_merges: bool = False
    """A whole word that is in the vocabulary is one token, whatever the merges say (the tiktoken families)."""
    adds_bos: bool = False
    """A file that says nothing of `add_bos_token` means yes."""


_GPT2_RECIPE = Recipe(splits=(_GPT2,))
_DIGIT_GPT2_RECIPE = Recipe(splits=(_DIGIT, _GPT2))
_LLAMA3_RECIPE = Recipe(splits=(_llama3_like(_THREE_DIGITS),), ignore_merges=True, adds_bos=True)
_LLAMA3_MERGED_RECIPE = Recipe(splits=(_llama3_like(_THREE_DIGITS),))
_QWEN2_RECIPE = Recipe(splits=(_llama3_like(_DIGIT),), nfc=True)
_ONE_DIGIT_RECIPE = Recipe(splits=(_llama3_like(_DIGIT),))
_O200K_RECIPE = Recipe(splits=(_case_split(_THREE_DIGITS, contraction=_CONTRACTION + "?"),))
_DEEPSEEK3_RECIPE = Recipe(splits=(_THREE_DIGITS, _CJK_DEEPSEEK3, _DEEPSEEK3_WORDS))

RECIPES: dict[str, Recipe] = {
    "a.x-4.0": _GPT2_RECIPE,
    "chatglm-bpe": _LLAMA3_MERGED_RECIPE,
    "codeshell": _DIGIT_GPT2_RECIPE,
    "command-r": _DIGIT_GPT2_RECIPE,
    "dbrx": _LLAMA3_MERGED_RECIPE,
    "deepseek-coder": Recipe(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_DEEPSEEK_CODER, _DIGIT)),
    "deepseek-r1-qwen": _ONE_DIGIT_RECIPE,
    "deepseek-v3": _DEEPSEEK3_RECIPE,
    "default": Recipe(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "exaone": _DIGIT_GPT2_RECIPE,
    "exaone4": _GPT2_RECIPE,
    "falcon-h1": _LLAMA3_RECIPE,
    "falcon3": _LLAMA3_RECIPE,
    "gigachat": _GPT2_RECIPE,
    "glm4": _LLAMA3_MERGED_RECIPE,
    "gpt-2": _GPT2_RECIPE,
    "gpt-4o": _O200K_RECIPE,
    "grok-2": _ONE_DIGIT_RECIPE,
    "hunyuan": _ONE_DIGIT_RECIPE,
    "hunyuan-dense": _DEEPSEEK3_RECIPE,
    "jais": _GPT2_RECIPE,
    "jina-v5-nano": _LLAMA3_RECIPE,
    "kanana2": _O200K_RECIPE,
    "lfm2": _LLAMA3_RECIPE,
    "llama-bpe": _LLAMA3_RECIPE,
    "llama-v3": _LLAMA3_RECIPE,
    "llama3": _LLAMA3_RECIPE,
    "llama4": _O200K_RECIPE,
    "megrez": _ONE_DIGIT_RECIPE,
    "mellum": _GPT2_RECIPE,
    "mellum2": _DIGIT_GPT2_RECIPE,
    "midm-2.0": _LLAMA3_RECIPE,
    "minerva-7b": _DIGIT_GPT2_RECIPE,
    "mpt": _GPT2_RECIPE,
    "olmo": _GPT2_RECIPE,
    "phi-2": _GPT2_RECIPE,
    "pixtral": _LLAMA3_RECIPE,
    "qwen2": _QWEN2_RECIPE,
    "qwen35": Recipe(splits=(_llama3_like(_DIGIT, marks=True),), nfc=True),
    "refact": _DIGIT_GPT2_RECIPE,
    "smaug-bpe": _LLAMA3_MERGED_RECIPE,
    "smollm": _DIGIT_GPT2_RECIPE,
    "solar-open": _ONE_DIGIT_RECIPE,
    "stablelm2": _ONE_DIGIT_RECIPE,
    "starcoder": _DIGIT_GPT2_RECIPE,
    "tekken": Recipe(splits=(_case_split(_DIGIT, contraction=""),), ignore_merges=True, adds_bos=True),
    "trillion": _GPT2_RECIPE,
}
"""Sorted. Names are those that converters write; a family whose cut cannot be said in these terms is left out, not guessed."""


def recipe_for(pre: str) -> Recipe:
    """Looks up a `tokenizer.ggml.pre` name; raises UserError that names it and the known ones."""
    recipe = RECIPES.get(pre)
    if recipe is None:
        raise UserError(
            f"this GGUF file cuts text with the pre-tokenizer {pre!r}, which is not known here; known are {', '.join(sorted(RECIPES))}"
        )
    return recipe


def build_pre_tokenizer(recipe: Recipe) -> PreTokenizer:
    """Makes the library object for a recipe: its splits, then bytes spelled as printable characters."""
    from tokenizers import Regex, pre_tokenizers

    steps: list[PreTokenizer] = []
    for split in recipe.splits[:-1]:
        if split == _DIGIT:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        elif split == _GPT2:
            # The library's own GPT-2 cut comes with the byte spelling, which must be last: a later split has to see text.
            steps.append(pre_tokenizers.Split(Regex(_GPT2_EXPRESSION), "isolated"))
        else:
            steps.append(pre_tokenizers.Split(Regex(split), "isolated"))
    last = recipe.splits[-1]
    if last == _GPT2:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    else:
        steps.append(pre_tokenizers.Split(Regex(last), "isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def build_normalizer(recipe: Recipe) -> Normalizer | None:
    """Makes the recipe's normaliser, or None when text is taken as it is."""
    if not recipe.nfc:
        return None
    from tokenizers import normalizers

    return normalizers.NFC()
