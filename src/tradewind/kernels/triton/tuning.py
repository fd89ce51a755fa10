"""Tuned launch constants, a table per GPU name. Nothing tunes at start.

Knows: which constants benchmarks/kernels.py found best on which GPU, and rules for shapes that were not measured. Refuses to know: kernels.
A GPU that is not in the table is served by the entry of the H200: its constants are valid (though not best) on any GPU of compute
capability 8.0 or more with 160 KB of shared memory a program.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GemvConfig:
    """One input row: `rows` outputs a program (gated: of gate and of up), `block_k` columns at a time."""

    rows: int
    block_k: int
    warps: int
    narrow: bool = False
    """Four weights a load instead of 16 bytes: for FP8, where wider loads cost a way through shared memory."""
    half: bool = False
    """FP8 weights are multiplied in float16 pairs (with narrow loads); where `block_k` does not divide K, it is as if unset."""
    ahead: int = 2
    """With `half`: how many blocks of weights are under way before the input is there."""


@dataclass(frozen=True)
class TileConfig:
    """Few input rows: `bn` weight rows x `bm` input rows a program, K in steps of `bk` and `split` pieces."""

    bm: int
    bn: int
    bk: int
    split: int
    warps: int
    stages: int
    tma: bool = False
    """Experts only: weights are loaded by the tensor copy engine."""


@dataclass(frozen=True)
class ExpertGemvConfig:
    """One token's experts: `rows` outputs a program, `block` columns at a time, `ahead` of these blocks under way; `narrow` as above."""

    rows: int
    block: int
    warps: int
    ahead: int
    narrow: bool = False


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
    pairs: bool = False
    """With `tma`: two tiles a step of the online softmax."""
    registers: int = 0
    """Bound of registers a thread (0: the compiler's choice), so that two programs fit a multiprocessor."""


@dataclass(frozen=True, kw_only=True)
class AttentionWays:
    """Ways to compute attention that were not measured on a GPU yet; each is off unless it is asked for."""

    shared_prefix: int | None = None
    """From so many leading keys on that all decoding rows of a step share, those are read once for all rows (shared.py)."""
    partly_fresh: int | None = None
    """Where some prompts of a step begin in it and others go on: from so many tokens on of the longest that begins, FlashAttention 3
    computes those that begin."""
    mixed_rows: tuple[int, ...] = ()
    """Further numbers of rows that steps with prompts have grids for (runner/buckets.py:FEW_ROWS and all there are)."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The constants of one GPU."""

    multiprocessors: int
    gemv_shapes: dict[tuple[int, int, bool], GemvConfig] = field(default_factory=dict)
    """By (outputs N, depth K, FP8 weights): shapes that were measured."""
    fuse_rope_rows: int = 16
    """Up to so many one-token rows the attention kernel does rotation and KV write itself; above, a launch of their own is faster."""
    shared_rows: int = 24
    """From so many one-token rows on shared keys are read once for all."""
    tile_rows: int = 64
    """Up to so many rows the tiles beat cuBLAS with its separate epilogues."""

    few_expert_tokens: int = 16
    """Up to so many tokens (16 at most) pairs need not be sorted by expert."""

    def gemv(self, outputs: int, depth: int, *, fp8: bool) -> GemvConfig:
        """Constants of a one-row matmul."""
        found = self.gemv_shapes.get((outputs, depth, fp8))
        if found is not None:
            return found
        if fp8:
            return GemvConfig(8, 512, 4, narrow=True, half=depth < 8192, ahead=4 if depth < 8192 else 2)
        if depth <= 1024:
            return GemvConfig(4, 1024, 4, narrow=True)
        return GemvConfig(4, 2048, 8) if outputs * depth >= 1 << 25 else GemvConfig(2, 2048, 4)

    def tile(self, rows: int, weight_rows: int, depth: int, *, fp8: bool) -> TileConfig | None:
        """Constants of a matmul of 2..`tile_rows` rows; None where another way is better. weight_rows counts gate and up."""
        if rows > self.tile_rows or depth % 128 != 0:
            return None
        bm = next(size for size in (16, 32, 64) if rows <= size)
        many = weight_rows // 64 >= 0.6 * self.multiprocessors
        if fp8 and weight_rows // 128 >= self.multiprocessors and bm < 64:
            return TileConfig(bm, 128, 128, 1, 4, 3)
        if fp8 and not many and bm == 16 and depth % 1024 == 0:
            return TileConfig(bm, 64, 256, 4, 4, 3)
        split = 1 if many else next(pieces for pieces in (4, 2, 1) if depth // 128 % pieces == 0)
        return TileConfig(bm, 64, 128, split, 4, 4 if bm < 64 else 3)

    def expert_gemv(self, depth: int, *, gated: bool, fp8: bool) -> ExpertGemvConfig:
        """Constants of the chosen experts' matmuls for one token; depth of one expert's matrix."""
        if fp8:
            return ExpertGemvConfig(4, 512 if depth % 512 == 0 else 256, 4, 4, narrow=True)
        if gated:  # its input is float32: see `narrow`
            return ExpertGemvConfig(4, 1024, 4, 2, narrow=True)
        return ExpertGemvConfig(
            2, 1024, 4, 8
        )  # blocks as wide as a program's loads, or x goes through shared memory for each

    def expert_tile(self, tokens: int, chosen: int, experts: int, depth: int, *, fp8: bool) -> TileConfig:
        """Constants of the experts' matmuls for a step of several tokens; bm is how many pairs of one expert make a block.

        Up to `few_expert_tokens` a block holds all tokens. Above, about as many as an expert gets on average: a block of more reads its
        weights once, and computes rows that are not there.
        """
        bk = next((size for size in (128, 64, 32) if depth % size == 0), 64)
        average = tokens * chosen / experts
        if tokens <= self.few_expert_tokens or average <= 12:
            return TileConfig(16, 64, bk, 1, 4, 4)
        if average <= 32:
            return TileConfig(32, 128, min(bk, 128 if fp8 else 64), 1, 4, 4)
        if average <= 96:
            return TileConfig(64, 128, min(bk, 128 if fp8 else 64), 1, 4, 4)
        return TileConfig(128, 128, min(bk, 128 if fp8 else 64), 1, 8, 4)

    def decode(self, rows: int, longest: int, *, packed: int = 4, fp8: bool = False) -> DecodeConfig:
        """Constants of attention for a bucket of one-token rows with at most `longest` keys each; `packed` query heads share a kv head."""
        if rows <= 2:
            if longest <= 512:
                return DecodeConfig(8, 32, 4 if packed <= 2 else 2, 2)
            return DecodeConfig(32, 32, 2, 2) if longest <= 2048 else DecodeConfig(32, 64, 4, 2)
        if rows <= 16:
            return DecodeConfig(8, 32, 2, 3)
        if longest > 8192:
            return DecodeConfig(4, 128, 4, 2)
        if fp8:  # conversions want more tiles under way
            return DecodeConfig(1, 128, 4, 5)
        if rows <= 48 and longest <= 4096:
            return DecodeConfig(1, 128, 8, 3)
        return DecodeConfig(1, 64, 4, 3) if rows <= 96 else DecodeConfig(1, 128, 4, 2)

    def shared_splits(self, tiles: int) -> int:
        """Into how many pieces shared keys are cut for so many tiles of rows and kv heads: about one program a multiprocessor."""
        return min(8, 1 << max(0, (self.multiprocessors // tiles).bit_length() - 1))

    def prefill(self, head_dim: int, page_tokens: int) -> PrefillConfig:
        """Constants of attention for rows of several tokens."""
        if head_dim > 128:
            return PrefillConfig(64, 64, 4, 2)
        if page_tokens % 64 == 0 and head_dim in (64, 128):
            return PrefillConfig(128, 64, 8, 2, True, registers=128)
        return PrefillConfig(128, 64, 4, 3)


TUNINGS: dict[str, Tuning] = {
    "NVIDIA H200": Tuning(
        multiprocessors=132,
        gemv_shapes={
            # Qwen3-0.6B: qkv, o, gate_up, down
            (4096, 1024, False): GemvConfig(4, 1024, 4, narrow=True),
            (1024, 2048, False): GemvConfig(1, 2048, 2),
            (3072, 1024, False): GemvConfig(2, 1024, 2, narrow=True),
            (1024, 3072, False): GemvConfig(2, 2048, 4),
            # Llama-3.2-1B
            (3072, 2048, False): GemvConfig(4, 1024, 8, narrow=True),
            (2048, 2048, False): GemvConfig(1, 2048, 2),
            (8192, 2048, False): GemvConfig(2, 2048, 4, narrow=True),
            (2048, 8192, False): GemvConfig(1, 2048, 2),
            # Llama-3.1-8B
            (6144, 4096, False): GemvConfig(8, 512, 4, narrow=True),
            (4096, 4096, False): GemvConfig(2, 2048, 4),
            (14336, 4096, False): GemvConfig(2, 4096, 8, narrow=True),
            (4096, 14336, False): GemvConfig(4, 2048, 8),
            # Qwen3-30B-A3B: qkv and router, not measured; as the shapes next to them
            (5120, 2048, False): GemvConfig(4, 1024, 8, narrow=True),
            (128, 2048, False): GemvConfig(1, 1024, 4, narrow=True),
            (6144, 4096, True): GemvConfig(8, 512, 4, narrow=True, half=True, ahead=4),
            (4096, 4096, True): GemvConfig(8, 512, 4, narrow=True, half=True, ahead=4),
            (14336, 4096, True): GemvConfig(8, 512, 4, narrow=True, half=True, ahead=4),
            (4096, 14336, True): GemvConfig(8, 512, 4, narrow=True),
        },
    ),
}
"""By `torch.cuda.get_device_name()`."""

DEFAULT = "NVIDIA H200"


def tuned(gpu: str) -> Tuning:
    """The constants of a GPU by name."""
    return TUNINGS.get(gpu, TUNINGS[DEFAULT])
