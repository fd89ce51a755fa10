"""Tokenizers against other implementations: the golden ids of a real model, the `tokenizers` library on vocabularies trained
here with the published cuts, and SentencePiece's algorithm written out naively."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tradewind.contract.errors import RequestError, UserError
from tradewind.serving.pretokenizers import RECIPES, build_pre_tokenizer, recipe_for
from tradewind.serving.tokenizer import TextTokenizer

MARK = "\u2581"

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it's not the first time; they'll do it again in 2024!",
    "def main(argv):\n    if len(argv) > 1:\n        print('hello', argv[1])\n\treturn 0\n\n\n",
    "Größe, naïve café, señor, Ελλάδα, Привет мир, 你好世界，今天天气很好。 こんにちは 世界 안녕하세요",
    "emoji 😀😃🎉 and 👩‍👩‍👧 with 1234567890 numbers 3.14159 and   many    spaces\t\ttabs\r\n",
    "CamelCaseWords and snake_case_words HTTPServer I'M YOU'RE don't DON'T",
] * 4

# Texts with what tokenizers get wrong: runs of spaces, line ends, digits, contractions, marks, halves of pairs, controls.
PIECES = [
    *("a", "the", "Ab", " ", "  ", "   ", "\n", "\r\n", "\t", "1", "23", "456", "'s", "'LL", ".", "!?", "_"),
    *("é", "e\u0301", "世界", "😀", "\U0001f469\u200d\U0001f467", "\x00", "\x7f", "\u00a0", "\u200b"),
]
texts = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(PIECES), max_size=20).map("".join),
)

# ------------------------------------------------------------------------------------------------- the real model

SYSTEM_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2),
    *(198, 1, 4093, 198),
]
ANSWER_IDS = [2, 198, 1, 520, 9531, 198]
QUESTIONS = {
    "What is the capital of France?": [1780, 314, 260, 3575, 282, 4649, 47],
    "Write one sentence about the sea.": [19161, 582, 6330, 563, 260, 3426, 30],
    "List three colours.": [6106, 1296, 14797, 30],
    "What is 2 + 2?": [1780, 314, 216, 34, 1232, 216, 34, 47],
    "Say hello in Spanish.": [36218, 33662, 281, 5071, 30],
}


@cache
def smollm2(path: Path) -> TextTokenizer:
    from tradewind.weights.gguf import open_gguf

    return TextTokenizer.from_gguf(open_gguf(path).metadata)


@pytest.mark.weights
@pytest.mark.parametrize(("question", "ids"), QUESTIONS.items())
def test_smollm2_prompts_give_the_ids_of_transformers(smollm2_gguf: Path, question: str, ids: list[int]) -> None:
    from tradewind.serving.chat_template import ChatTemplate

    tokenizer = smollm2(smollm2_gguf)
    rendered = ChatTemplate.for_tokenizer(tokenizer).render([{"role": "user", "content": question}])
    assert tokenizer.encode_chat(rendered) == [*SYSTEM_IDS, *ids, *ANSWER_IDS]
    assert tokenizer.decode(tokenizer.encode_chat(rendered), skip_special=False) == rendered


@pytest.mark.weights
def test_smollm2_facts(smollm2_gguf: Path) -> None:
    tokenizer = smollm2(smollm2_gguf)
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_ids == {0, 2}, "<|im_end|>, and <|endoftext|>, which also ends a text"
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.encode("Hi", add_special=True) == tokenizer.encode("Hi", add_special=False), "the file adds no BOS"


@pytest.mark.weights
@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_smollm2_round_trip(smollm2_gguf: Path, text: str) -> None:
    """Exact, but for the bytes this vocabulary cannot write: six control characters, and planes of Unicode not in use."""
    tokenizer = smollm2(smollm2_gguf)
    text = "".join(c for c in text if not MISSING_BYTES.intersection(c.encode()))
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids, skip_special=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


MISSING_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


@pytest.mark.weights
def test_smollm2_lacks_some_bytes(smollm2_gguf: Path) -> None:
    tokenizer = smollm2(smollm2_gguf)
    single = {tokenizer.token_bytes(i)[0] for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    assert {*range(0xC0), *range(0xC2, 0xF5)} - single == MISSING_BYTES


# ------------------------------------------------------------------------------------------------- byte-level BPE

CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")


def published(pre: str, tokenizer: Tokenizer, **split: Any) -> Tokenizer:
    """A tokenizer dressed the way the family's own tokenizer.json is."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre == "gpt-2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre == "llama-bpe":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CL100K), "isolated"), byte_level])
    elif pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def trained(pre: str) -> Tokenizer:
    tokenizer = published(pre, Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe")))
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def as_gguf(tokenizer: Tokenizer, pre: str, **more: object) -> dict[str, object]:
    """What a converter writes of a byte-level tokenizer."""
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": np.array([3 if token in special else 1 for token in tokens], np.int32),
        "tokenizer.ggml.merges": tuple(merges),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **more,
    }


@cache
def from_metadata(pre: str) -> TextTokenizer:
    return TextTokenizer.from_gguf(as_gguf(trained(pre), pre))


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@settings(max_examples=150, deadline=None)
@given(text=texts)
def test_byte_level_ids_equal_the_library(pre: str, text: str) -> None:
    oracle, ours = trained(pre), from_metadata(pre)
    ids = oracle.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special=False) == ids
    assert ours.decode(ids, skip_special=False) == oracle.decode(ids, skip_special_tokens=False)
    if pre != "qwen2":  # that family brings text to normal form C first
        assert ours.decode(ids, skip_special=False) == text


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 699), max_size=30), skip=st.booleans())
def test_byte_level_decode_of_any_ids_equals_the_library(ids: list[int], skip: bool) -> None:
    assert from_metadata("smollm").decode(ids, skip_special=skip) == trained("smollm").decode(
        ids, skip_special_tokens=skip
    )


@pytest.mark.parametrize("pre", sorted(RECIPES))
def test_every_cut_loses_nothing(pre: str) -> None:
    """Whatever the expressions, the pieces together are the text's bytes."""
    cut = build_pre_tokenizer(recipe_for(pre))
    of_character = {c: b for b, c in zip(range(256), byte_characters(), strict=True)}
    for text in [*CORPUS[:5], "".join(PIECES)]:
        spelled = "".join(piece for piece, _ in cut.pre_tokenize_str(text))
        assert bytes(of_character[c] for c in spelled) == text.encode()


def byte_characters() -> list[str]:
    """Byte b's printable stand-in, by the library: encode each byte of a character and see."""
    keep = set(range(0x21, 0x7F)) | set(range(0xA1, 0xAD)) | set(range(0xAE, 0x100))
    shifted = iter(range(0x100, 0x200))
    return [chr(b) if b in keep else chr(next(shifted)) for b in range(256)]


def test_table_is_sorted() -> None:
    assert list(RECIPES) == sorted(RECIPES)


def test_default_pre_is_used_when_the_file_names_none() -> None:
    metadata = as_gguf(trained("gpt-2"), "gpt-2")
    del metadata["tokenizer.ggml.pre"]
    tokenizer = TextTokenizer.from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("It costs 1234.", add_special=False)) == "It costs 1234."


# ------------------------------------------------------------------------------------------------- SentencePiece BPE


def sentencepiece(
    text: str, pieces: Mapping[str, int], scores: Sequence[float], of_byte: Mapping[int, int]
) -> list[int]:
    """SentencePiece's BPE, word for word: of all neighbours that make a piece join the best, leftmost first."""
    symbols = list(text)
    while True:
        best: tuple[float, int] | None = None
        for place in range(len(symbols) - 1):
            joined = pieces.get(symbols[place] + symbols[place + 1])
            if joined is not None and (best is None or scores[joined] > best[0]):
                best = (scores[joined], place)
        if best is None:
            break
        symbols[best[1] : best[1] + 2] = [symbols[best[1]] + symbols[best[1] + 1]]
    ids: list[int] = []
    for symbol in symbols:
        ids.extend([pieces[symbol]] if symbol in pieces else [of_byte[byte] for byte in symbol.encode()])
    return ids


@cache
def spm_pieces() -> tuple[str, ...]:
    """Pieces in the order a trainer scores them: merges first, then single characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", MARK)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="never")
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    vocab = tokenizer.get_vocab()
    pieces = sorted(vocab, key=vocab.__getitem__)
    return tuple([p for p in pieces if len(p) > 1] + [p for p in pieces if len(p) == 1])


CONTROL = ("<unk>", "<s>", "</s>")
USER_DEFINED = (MARK * 2, MARK * 4, "<turn>", "\n\n")
FIRST_BYTE = len(CONTROL)
FIRST_PIECE = FIRST_BYTE + 256


def spm_metadata(pieces: Sequence[str], *, user_defined: Sequence[str] = (), **more: object) -> dict[str, object]:
    tokens = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *user_defined]
    scores = [0.0] * FIRST_PIECE + [-float(rank) for rank in range(len(pieces))] + [-1000.0] * len(user_defined)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array(
            [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4] * len(user_defined), np.int32
        ),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


@cache
def spm(*, gemma: bool) -> TextTokenizer:
    more: dict[str, Any] = {"tokenizer.ggml.add_space_prefix": False} if gemma else {}
    kept = tuple(p for p in spm_pieces() if p not in USER_DEFINED)
    return TextTokenizer.from_gguf(spm_metadata(kept, user_defined=USER_DEFINED if gemma else (), **more))


def spm_oracle(text: str, *, gemma: bool) -> list[int]:
    kept = [p for p in spm_pieces() if p not in USER_DEFINED]
    pieces = {piece: FIRST_PIECE + rank for rank, piece in enumerate(kept)}
    scores = [0.0] * FIRST_PIECE + [-float(rank) for rank in range(len(kept))]
    of_byte = {byte: FIRST_BYTE + byte for byte in range(256)}
    apart = {piece.replace(MARK, " "): place for place, piece in enumerate(CONTROL)}
    if gemma:
        apart.update({p.replace(MARK, " "): FIRST_PIECE + len(kept) + i for i, p in enumerate(USER_DEFINED)})
    ids: list[int] = []
    rest, plain = text, ""

    def flush() -> None:
        if plain:
            marked = (plain if gemma else " " + plain).replace(" ", MARK)
            ids.extend(sentencepiece(marked, pieces, scores, of_byte))

    while rest:
        found = max((a for a in apart if rest.startswith(a)), key=len, default=None)
        if found is None:
            plain, rest = plain + rest[0], rest[1:]
            continue
        flush()
        plain = ""
        ids.append(apart[found])
        rest = rest[len(found) :]
    flush()
    return ids


@pytest.mark.parametrize("gemma", [False, True])
@settings(max_examples=200, deadline=None)
@given(
    text=texts | st.sampled_from(CORPUS) | st.lists(st.sampled_from([*PIECES, "<s>", "<turn>", "\n\n"])).map("".join)
)
def test_spm_ids_equal_sentencepiece(gemma: bool, text: str) -> None:
    assert spm(gemma=gemma).encode(text, add_special=False) == spm_oracle(text, gemma=gemma)


@pytest.mark.parametrize("gemma", [False, True])
@settings(max_examples=150, deadline=None)
@given(text=texts.map(lambda text: text.replace(MARK, "")))
def test_spm_round_trip(gemma: bool, text: str) -> None:
    tokenizer = spm(gemma=gemma)
    assert tokenizer.decode(tokenizer.encode(text, add_special=False), skip_special=False) == text


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_spm_merges_equal_sentencepiece_on_random_vocabularies(seed: int, data: st.DataObject) -> None:
    """Scores in random order, pieces that overlap with themselves, pieces that no merge can reach."""
    draw = random.Random(seed)
    alphabet = draw.choice(["a", "ab", "ab" + MARK])
    longer = {"".join(draw.choices(alphabet, k=draw.randint(2, 6))) for _ in range(draw.randint(1, 14))}
    pieces = [*alphabet, *sorted(longer)]
    draw.shuffle(pieces)
    tokenizer = TextTokenizer.from_gguf(spm_metadata(pieces, **{"tokenizer.ggml.add_space_prefix": False}))
    text = data.draw(st.text(alphabet=alphabet.replace(MARK, " "), max_size=24))
    of_piece = {piece: FIRST_PIECE + rank for rank, piece in enumerate(pieces)}
    scores = [0.0] * FIRST_PIECE + [-float(rank) for rank in range(len(pieces))]
    expected = sentencepiece(text.replace(" ", MARK), of_piece, scores, {})
    assert tokenizer.encode(text, add_special=False) == expected


def test_spm_space_rules() -> None:
    llama, gemma = spm(gemma=False), spm(gemma=True)
    assert llama.token_text(llama.encode("the", add_special=False)[0]).startswith(" ")
    assert not gemma.token_text(gemma.encode("the", add_special=False)[0]).startswith(" ")
    assert llama.decode(llama.encode("  the", add_special=False)) == "  the", "only the space that was added goes away"
    assert gemma.decode(gemma.encode("  the", add_special=False)) == "  the"
    assert gemma.encode("     ", add_special=False)[0] == gemma.token_id("    "), "the longest run of spaces first"


def test_spm_byte_fallback_pieces_are_bytes() -> None:
    tokenizer = spm(gemma=True)
    ids = tokenizer.encode("\u1234", add_special=False)
    assert ids == [FIRST_BYTE + byte for byte in "\u1234".encode()]
    assert [tokenizer.token_bytes(i) for i in ids] == [bytes([byte]) for byte in "\u1234".encode()]
    assert tokenizer.decode(ids[:2]) == "\ufffd"


# ------------------------------------------------------------------------------------------------- BOS, EOS, ends


@pytest.mark.parametrize(("add_bos", "add_eos"), [(True, True), (True, False), (False, True), (False, False)])
def test_add_bos_and_eos_are_honoured(add_bos: bool, add_eos: bool) -> None:
    flags = {"tokenizer.ggml.add_bos_token": add_bos, "tokenizer.ggml.add_eos_token": add_eos}
    tokenizer = TextTokenizer.from_gguf(as_gguf(trained("gpt-2"), "gpt-2", **flags))
    bare = tokenizer.encode("hello", add_special=False)
    assert tokenizer.encode("hello", add_special=True) == [*([1] * add_bos), *bare, *([2] * add_eos)]
    batch = tokenizer.encode_batch(["hello", ""], add_special=True)
    assert batch == [tokenizer.encode(text, add_special=True) for text in ("hello", "")]


@pytest.mark.parametrize("add_bos", [True, False])
@given(text=st.sampled_from(["", "hi", "<|im_start|>", "<|im_start|>hi", "<|im_start|><|im_start|>", " <|im_start|>"]))
def test_double_bos_is_impossible(add_bos: bool, text: str) -> None:
    tokenizer = bos_tokenizer(add_bos=add_bos)
    bare = tokenizer.encode(text, add_special=False)
    for ids in (tokenizer.encode_chat(text), tokenizer.encode(text, add_special=True)):
        assert ids == (bare if not add_bos or bare[:1] == [1] else [1, *bare])


@cache
def bos_tokenizer(*, add_bos: bool) -> TextTokenizer:
    return TextTokenizer.from_gguf(as_gguf(trained("gpt-2"), "gpt-2", **{"tokenizer.ggml.add_bos_token": add_bos}))


def test_families_that_add_bos_when_the_file_does_not_say() -> None:
    assert TextTokenizer.from_gguf(as_gguf(trained("llama-bpe"), "llama-bpe")).prefix_ids == (1,)
    assert TextTokenizer.from_gguf(as_gguf(trained("qwen2"), "qwen2")).prefix_ids == ()
    assert spm(gemma=True).prefix_ids == (1,)


def test_end_ids() -> None:
    metadata = as_gguf(trained("gpt-2"), "gpt-2")
    assert TextTokenizer.from_gguf(metadata).eos_ids == {0, 2}, "the end token, and <|endoftext|> by its text"
    metadata["tokenizer.ggml.eot_token_id"] = 7
    assert TextTokenizer.from_gguf(metadata).eos_ids == {0, 2, 7}
    config = {"eos_token_id": [2, 9]}
    assert TextTokenizer.from_gguf(metadata, generation_config=config).eos_ids == {2, 7, 9}
    assert TextTokenizer.from_gguf(metadata, generation_config={"eos_token_id": 5}).eos_ids == {2, 5, 7}


def test_special_ids_are_skipped_or_shown() -> None:
    tokenizer = from_metadata("gpt-2")
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", add_special=False)
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.token_bytes(1) == b"<|im_start|>"


def test_ids_past_the_vocabulary_have_no_text() -> None:
    tokenizer = from_metadata("gpt-2")
    assert tokenizer.decode([tokenizer.vocab_size, 10**6, -1]) == ""
    assert tokenizer.token_bytes(10**6) == b""


# ------------------------------------------------------------------------------------------------- tokenizer.json


def test_tokenizer_json_equals_gguf_of_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(trained("smollm").to_str(), encoding="utf-8")
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ bos_token }}"}
    ours = TextTokenizer.from_tokenizer_json(path, tokenizer_config=config)
    other = from_metadata("smollm")
    for text in CORPUS[:5]:
        ids = ours.encode(text, add_special=True)
        assert ids == other.encode(text, add_special=True)
        assert ours.decode(ids) == text
    assert (ours.kind, ours.bos_id, ours.eos_id, ours.special_ids) == ("byte_level", 1, 2, other.special_ids)
    assert ours.eos_ids == other.eos_ids
    assert ours.chat_templates == {"default": "{{ bos_token }}"}
    assert ours.vocab_size == other.vocab_size


def test_tokenizer_json_post_processor_and_config_decide_on_bos() -> None:
    library = Tokenizer.from_str(trained("gpt-2").to_str())
    library.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    library.enable_truncation(3)
    text = library.to_str()
    ours = TextTokenizer.from_tokenizer_json(text)
    assert (ours.prefix_ids, ours.suffix_ids) == ((1,), (2,))
    assert ours.encode("a b c d e f", add_special=True)[0] == 1
    assert len(ours.encode("a b c d e f", add_special=False)) > 3, "a truncation left in the file is not wanted"
    config = {"bos_token": "<|im_start|>", "add_bos_token": False, "eos_token": "<|im_end|>", "add_eos_token": False}
    assert TextTokenizer.from_tokenizer_json(text, tokenizer_config=config).encode("", add_special=True) == []


def test_tokenizer_json_spm_decodes_as_the_library() -> None:
    """The shape of Llama 2's file: prefix space, byte fallback."""
    source = spm(gemma=False)
    ours = TextTokenizer.from_tokenizer_json(source.to_json())
    library = Tokenizer.from_str(source.to_json())
    assert (ours.kind, ours.strips_leading_space) == ("spm", True)
    for text in [*CORPUS[:5], " x", "  x", "€"]:
        ids = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == ids
        assert ours.decode(ids) == library.decode(ids) == text


def test_tokenizer_json_of_an_unknown_decoder_is_left_to_the_library() -> None:
    library = Tokenizer(models.WordPiece({"[UNK]": 0, "hel": 1, "##lo": 2, "you": 3}, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece()
    ours = TextTokenizer.from_tokenizer_json(library.to_str())
    assert ours.kind == "other"
    assert ours.decode(ours.encode("hello you", add_special=False)) == "hello you"


# ------------------------------------------------------------------------------------------------- start-up


def test_heavy_libraries_are_imported_late() -> None:
    """Importing the text modules must not cost the start of a program that makes no text yet."""
    code = (
        "import sys, tradewind.serving.chat_template, tradewind.serving.text_stream, tradewind.serving.tokenizer\n"
        "sys.exit(' '.join({'torch', 'transformers', 'tokenizers', 'jinja2', 'numpy'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


# ------------------------------------------------------------------------------------------------- bad input


def broken(**changes: object) -> dict[str, object]:
    metadata = as_gguf(trained("gpt-2"), "gpt-2")
    for key, value in changes.items():
        metadata["tokenizer.ggml." + key] = value
    return metadata


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pre": "martian"}, "'martian', which is not known here; known are .*smollm"),
        ({"model": "rwkv"}, "of the kind 'rwkv'; known are 'gpt2'"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": 5}, "tokens is not a list"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["no such"]}, "merge list does not fit its vocabulary"),
        ({"merges": ["one"]}, "merge list does not fit its vocabulary"),
        ({"token_type": [1, 1]}, "token types; it is damaged"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": []}, "the token 'a' twice"),
    ],
)
def test_odd_metadata_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        TextTokenizer.from_gguf(broken(**changes))


def test_spm_without_scores_is_refused() -> None:
    metadata = spm_metadata(spm_pieces())
    metadata["tokenizer.ggml.scores"] = [0.0]
    with pytest.raises(UserError, match="1 scores; it is damaged"):
        TextTokenizer.from_gguf(metadata)


def test_broken_tokenizer_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read as a tokenizer"):
        TextTokenizer.from_tokenizer_json('{"model": 5}')
    with pytest.raises(UserError, match=r"none\.json cannot be read: No such file"):
        TextTokenizer.from_tokenizer_json(tmp_path / "none.json")


def test_what_is_not_text_is_refused() -> None:
    tokenizer = from_metadata("gpt-2")
    with pytest.raises(RequestError, match="lone surrogate\\) at position 2"):
        tokenizer.encode("ab\ud83d", add_special=False)
    with pytest.raises(RequestError, match="must be a string, not int"):
        tokenizer.encode(5, add_special=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must be a string, not NoneType"):
        tokenizer.encode_batch(["a", None], add_special=False)  # type: ignore[list-item]
