"""Tuned launch constants, a table per GPU name. Nothing tunes at start.

Knows: which constants benchmarks/kernels.py found best on which GPU. Refuses to know: the kernels themselves.
A GPU that is not in the table gets the entry of `DEFAULT`; every entry is valid on every GPU of compute capability 8.0 or more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GemvConfig:
    """One input row: `rows` outputs a program (gated: of gate and of up), `block_k` columns at a time."""

    rows: int
    block_k: int
    warps: int


@dataclass(frozen=True)
class TileConfig:
    """Few input rows: `bn` weight rows x `bm` input rows a program, K in steps of `bk` and `split` pieces; `lines` 128-byte lines of every weight row
    are asked into L2 before the wait for the previous kernel."""

    bm: int
    bn: int
    bk: int
    split: int
    warps: int
    stages: int
    lines: int = 0


@dataclass(frozen=True)
class DecodeConfig:
    """Attention of one-token rows: at most `splits` pieces of a row's keys, `block_n` keys a tile."""

    splits: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class PrefillConfig:
    """Attention of longer rows: `block_m` (tokens x packed heads) against `block_n` keys; `tma`: tiles by the tensor copy engine, where a
    page holds whole tiles."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: bool = False
