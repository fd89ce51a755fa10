"""The incremental detokenizer against decoding the whole, for any ids and any way of cutting them into pushes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tradewind.serving.detokenize import Detokenizer
from tradewind.serving.tokenizer import TextTokenizer

BYTES = 256
CORPUS = ["Hello world, the sea! 世界 今天 😀🎉 naïve café ﬁ  \n\t 12", "Привет мир 안녕 👩‍👩‍👧 ok"] * 3


@cache
def byte_level() -> TextTokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<s>", "</s>"],
    )
    backend.train_from_iterator(CORPUS, trainer)
    return TextTokenizer.from_tokenizer_json(backend.to_str())


@cache
def spm(*, space_prefix: bool) -> TextTokenizer:
    pieces = ["\u2581", "\u2581the", "th", "the", "e", "t", "h", "世", "😀", "\u2581😀", "\u2581\u2581"]
    return TextTokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(BYTES)), *pieces],
            "tokenizer.ggml.scores": [0.0] * (3 + BYTES) + [-float(rank) for rank in range(len(pieces))],
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * BYTES + [1] * len(pieces),
            "tokenizer.ggml.add_space_prefix": space_prefix,
        }
    )


@cache
def word_pieces() -> TextTokenizer:
    vocab = ["[UNK]", "hel", "##lo", "you", "a", "##b", ".", "世"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocab)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    return TextTokenizer.from_tokenizer_json(backend.to_str())


TOKENIZERS = {
    "byte_level": byte_level,
    "spm with prefix space": lambda: spm(space_prefix=True),
    "spm without": lambda: spm(space_prefix=False),
    "word pieces": word_pieces,
}

numbers = st.lists(st.integers(0, 10_000), max_size=40)


def cut(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """`ids` cut into pieces of the given sizes, the rest one by one."""
    pieces, place = [], 0
    for size in [*sizes, *([1] * len(ids))]:
        pieces.append(list(ids[place : place + size]))
        place += size
    return [piece for piece in pieces if piece]


def stream(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(numbers=numbers, sizes=st.lists(st.integers(1, 4), max_size=20), skip=st.booleans())
def test_sum_of_pieces_is_the_whole(name: str, numbers: list[int], sizes: list[int], skip: bool) -> None:
    """Random ids are mostly broken UTF-8, which is the hard case."""
    tokenizer = TOKENIZERS[name]()
    ids = [number % tokenizer.vocab_size for number in numbers]
    whole = tokenizer.decode(ids, skip_special=skip)
    assert "".join(stream(Detokenizer(tokenizer, skip_special=skip), cut(ids, sizes))) == whole


@pytest.mark.parametrize("name", ["byte_level", "spm with prefix space", "spm without"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), sizes=st.lists(st.integers(1, 4), max_size=20))
def test_real_text_never_shows_half_a_character(name: str, text: str, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS[name]()
    text = text.replace("\u2581", " ").replace("\ufffd", "?")
    ids = tokenizer.encode(text, add_special=False)
    pieces = stream(Detokenizer(tokenizer), cut(ids, sizes))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == "", "nothing is left over after whole characters"


@pytest.mark.parametrize("name", ["byte_level", "spm with prefix space", "spm without"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(min_size=1, max_size=20), data=st.data())
def test_after_a_prompt_that_ends_anywhere(name: str, text: str, data: st.DataObject) -> None:
    """The prompt's text and the stream make the whole text; a character cut by the border belongs to the stream."""
    tokenizer = TOKENIZERS[name]()
    text = text.replace("\u2581", " ").replace("\ufffd", "?")
    ids = tokenizer.encode(text, add_special=False)
    border = data.draw(st.integers(0, len(ids)))
    before = tokenizer.decode(ids[:border]).rstrip("\ufffd")
    after = "".join(stream(Detokenizer(tokenizer, ids[:border]), [[i] for i in ids[border:]]))
    assert before + after == text


def test_an_emoji_waits_for_its_last_byte() -> None:
    tokenizer = spm(space_prefix=False)
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([3 + byte]) for byte in "😁".encode()] == ["", "", "", "😁"]
    assert detokenizer.finish() == ""


def test_a_broken_character_shows_when_it_is_certain() -> None:
    tokenizer = spm(space_prefix=False)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([3 + 0xF0, 3 + 0x9F]) == ""
    assert detokenizer.push([3 + ord("a")]) == "\ufffda"
    assert detokenizer.push([3 + 0xFF]) == "\ufffd", "no byte that follows can help"
    assert detokenizer.push([3 + 0xE2]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_ids_inside_a_character() -> None:
    """Left out, they do not break it, as in the whole text; shown, they do."""
    tokenizer = spm(space_prefix=False)
    e2, x82, xac = (3 + byte for byte in "€".encode())
    assert "".join(stream(Detokenizer(tokenizer), [[e2], [1], [x82], [xac]])) == "€"
    shown = stream(Detokenizer(tokenizer, skip_special=False), [[e2], [1], [x82], [xac]])
    assert "".join(shown) == tokenizer.decode([e2, 1, x82, xac], skip_special=False) == "\ufffd<s>\ufffd\ufffd"


def test_leading_space_rule() -> None:
    tokenizer = spm(space_prefix=True)
    the, space = tokenizer.token_id("\u2581the"), tokenizer.token_id("\u2581")
    assert the is not None
    assert space is not None
    assert Detokenizer(tokenizer).push([the]) == "the", "a text that begins here has no space before it"
    assert Detokenizer(tokenizer, [1]).push([the]) == "the", "BOS is no text"
    assert Detokenizer(tokenizer, [the]).push([the]) == " the", "within a text the space is meant"
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in (1, space, space, the)] == ["", "", " ", " the"]


def test_nothing_and_ids_without_text() -> None:
    detokenizer = Detokenizer(byte_level())
    assert detokenizer.push([]) == ""
    assert detokenizer.push([10**6, 0]) == ""
    assert detokenizer.finish() == ""
