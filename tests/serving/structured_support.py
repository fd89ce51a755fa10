"""Answers drawn at random from what a grammar allows, with no model: the widest use of its language."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from http_support import END, EOS, VOCAB, byte_tokenizer

from tradewind.contract.request import SamplingParams
from tradewind.contract.step import Enter, frozen_ints
from tradewind.sampling.grammar import GrammarSlots
from tradewind.sampling.grammar_compile import GrammarCompiler, Vocabulary
from tradewind.serving.tokenizer import TextTokenizer


def vocabulary(tokenizer: TextTokenizer) -> Vocabulary:
    return Vocabulary(
        tokens=[tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
        special_ids=tokenizer.special_ids,
        eos_ids=tuple(sorted(tokenizer.eos_ids)),
        encode=lambda text: tokenizer.encode(text, add_special=False),
    )


def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: vocabulary(byte_tokenizer()), vocab_size=VOCAB)


def enter(slot: int, grammar: str | None, *, generated: Sequence[int] = (), stops: Sequence[int] = (EOS, END)) -> Enter:
    return Enter(
        slot=slot,
        epoch=1,
        request_id=f"r{slot}",
        tokens=frozen_ints([65, 66, *generated]),
        prompt_tokens=2,
        capacity_tokens=4096,
        sampling=SamplingParams(),
        seed=0,
        eos_ids=tuple(stops),
        grammar=grammar,
    )


def allowed(bits: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB]).tolist()


def walk(slots: GrammarSlots, grammar: str, *, seed: int, most: int = 600, calm: bool = True) -> tuple[list[int], bool]:
    """A random answer, and whether it came to an end. `calm`: end of text and closing marks are taken when they may be, half the time."""
    draw = random.Random(seed)
    slots.enter(enter(0, grammar))
    slot = np.zeros(1, np.int32)
    said: list[int] = []
    try:
        for _ in range(most):
            bits, failed = slots.masks(slot)
            assert bits is not None and not failed, failed
            may = allowed(bits[0])
            assert may
            closing = [token for token in may if token in (EOS, END, *b'"}]')]
            token = draw.choice(closing if calm and closing and draw.random() < 0.5 else may)
            if token in (EOS, END):
                return said, True
            said.append(token)
            if slots.advance(slot, np.array([token], np.int32)):
                return said, True
        return said, False
    finally:
        slots.leave(0)


def feed(slots: GrammarSlots, grammar: str, text: str | Sequence[int]) -> str:
    """What becomes of a given answer: "complete", "may end", "goes on", or "refused at N"."""
    slots.enter(enter(0, grammar))
    slot = np.zeros(1, np.int32)
    tokens = list(text.encode()) if isinstance(text, str) else list(text)
    try:
        for place, token in enumerate(tokens):
            bits, failed = slots.masks(slot)
            assert bits is not None and not failed, failed
            if token not in allowed(bits[0]):
                return f"refused at {place}"
            if slots.advance(slot, np.array([token], np.int32)):
                return "complete" if place == len(tokens) - 1 else f"complete at {place}"
        bits, failed = slots.masks(slot)
        assert bits is not None and not failed, failed
        return "may end" if EOS in allowed(bits[0]) else "goes on"
    finally:
        slots.leave(0)
