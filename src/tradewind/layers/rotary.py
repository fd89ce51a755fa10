"""Rotary position embedding: frequencies of every scaling, and the brick that turns positions into angles once a step.

Knows: the published formulas. Refuses to know: which layers use which rope. RoFormer (Su et al. 2021).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from tradewind.config.card import RopeFacts
from tradewind.device.batch import ForwardBatch
from tradewind.layers.build import Build

Frequencies = NDArray[np.float64]


class Rotary:
    """cos and sin of every token's position, [T, 2 * frequencies], kept under its name in `batch.angles`."""

    def __init__(self, build: Build, name: str, rope: RopeFacts) -> None:
        self.ops = build.ops
        self.name = name
        inv_freq, self.scale = frequencies(rope, head_dim=build.card.head_dim, max_positions=build.card.max_positions)
        self.width = 2 * len(inv_freq)
        self.inv_freq = self.ops.constant(inv_freq.astype(np.float32))

    def __call__(self, batch: ForwardBatch) -> None:
        """Computes the step's angles and hangs them into the batch."""
        angles = batch.scratch.take(f"angles.{self.name}", (batch.capacity, self.width), "f32")
        self.ops.rope_angles(batch.positions, self.inv_freq, scale=self.scale, out=angles, count=batch.tokens)
        batch.angles[self.name] = angles


def frequencies(rope: RopeFacts, *, head_dim: int, max_positions: int = 0) -> tuple[Frequencies, float]:
    """(radians per position for each rotated pair of dims, factor on cos and sin); changes nothing.

    max_positions: the longest text that is served (LongRoPE chooses by it).
    Computed in float64 and rounded once by the caller; published code does each step in float32 and differs in the last bit.
    """
    dims = rope.rotary_dims or head_dim
    inv_freq = rope.theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return llama3(inv_freq, rope), 1.0
    if rope.kind == "yarn":
        return yarn(inv_freq, rope, dims=dims), yarn_attention_factor(rope)
    if rope.kind == "longrope":
        return longrope(inv_freq, rope, max_positions=max_positions), longrope_attention_factor(rope)
    if rope.kind == "absent":
        return np.zeros(1), 1.0  # one pair of dims turned by 0: cos 1, sin 0, so that the op leaves every bit as it is
    assert rope.kind == "none", rope.kind
    return inv_freq, 1.0


def llama3(inv_freq: Frequencies, rope: RopeFacts) -> Frequencies:
    """Llama 3.1: waves longer than original / low_freq_factor are stretched by `factor`, those shorter than
    original / high_freq_factor are left, those between are blended; both factors may be one (Llama 4). Source: Llama 3 report and its
    published code.
    """
    assert rope.original_max_positions is not None
    turns = rope.original_max_positions * inv_freq / (2 * math.pi)  # full turns within the original context
    width = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / width).clip(0, 1) if width else (turns >= rope.low_freq_factor) * 1.0
    return keep * inv_freq + (1 - keep) * inv_freq / rope.factor


def yarn(inv_freq: Frequencies, rope: RopeFacts, *, dims: int) -> Frequencies:
    """YaRN, "NTK by parts" (Peng et al. 2023, section 3.2): pairs that turn more than beta_fast times within the original context
    are left, those that turn less than beta_slow times are stretched, those between are blended along their index.
    """
    assert rope.original_max_positions is not None
    original = rope.original_max_positions

    def pair_that_turns(times: float) -> float:
        return dims * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    stretch = (np.arange(dims // 2) - low) / max(high - low, 0.001)
    stretch = stretch.clip(0, 1)
    return (1 - stretch) * inv_freq + stretch * inv_freq / rope.factor


def yarn_attention_factor(rope: RopeFacts) -> float:
    """YaRN's factor on cos and sin, whose square is the softmax temperature 1 / t of section 3.4: 0.1 ln(factor) + 1."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def longrope(inv_freq: Frequencies, rope: RopeFacts, *, max_positions: int) -> Frequencies:
    """LongRoPE (Ding et al. 2024): each frequency divided by a factor of its own, from the long list where texts may pass the original
    positions. The published code chooses anew for each text by its length so far; keys of both lists in one text are then wrong, and so is
    a prefix that two texts share. So the choice is made once, for the longest text that is served.
    """
    assert rope.original_max_positions is not None
    long = max_positions > rope.original_max_positions
    return inv_freq / np.array(rope.long_factors if long else rope.short_factors)


def longrope_attention_factor(rope: RopeFacts) -> float:
    """LongRoPE's factor on cos and sin, the same for both lists: sqrt(1 + ln(factor) / ln(original positions))."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    assert rope.original_max_positions is not None
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions)) if rope.factor > 1 else 1.0
