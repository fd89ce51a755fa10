"""Tuned launch constants, a table per GPU name. Nothing tunes at start.

Knows: which constants benchmarks/kernels.py found best on which GPU, and rules for shapes that were not measured. Refuses to know: kernels.
A GPU that is not in the table is served by the entry of the H200: its constants are valid (though not best) on any GPU of compute
capability 8.0 or more with 160 KB of shared memory a program.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


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
    """Attention of one-token rows: at most `splits` pieces of a row's keys, none of fewer than `least_keys`, `block_n` keys a tile."""

    splits: int
    block_n: int
    warps: int
    stages: int
    least_keys: int = 0


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
    splits: int = 1
    """At most so many pieces of a tile's keys, merged by a second launch ..."""
    least_keys: int = 1024
    """... none of fewer keys than this."""


@dataclass(frozen=True)
class LatentDecodeConfig:
    """Attention of one-token rows over latents: `block_h` heads a program, at most `splits` pieces of a row's latents, `block_n` a tile."""

    splits: int
    block_h: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True)
class LatentTileConfig:
    """Into the space of latents and out of it, for each head: `block_t` tokens by `block` outputs; out of it, `block_k` numbers a step,
    and a `block_t` of 1 is without tensor cores."""

    block_t: int
    block: int
    warps: int
    stages: int
    block_k: int = 128


@dataclass(frozen=True)
class LatentPrefillConfig:
    """Attention over latents of longer rows: `block_m` (tokens x heads, `block_h` of these) against `block_n` latents."""

    block_m: int
    block_h: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class AttentionWays:
    """Ways to compute attention in a step of mixed work, as measured (benchmarks/attention_rounds.py); None or () turns one off."""

    shared_prefix: int | None = 512
    """From so many leading keys on that all decoding rows of a step share, those are read once for all rows (shared.py)."""
    partly_fresh: int | None = 1024
    """Where some prompts of a step begin in it and others go on: from so many tokens on of the longest that begins, FlashAttention 3
    computes those that begin."""
    mixed_rows: tuple[int, ...] = (64,)
    """Further numbers of rows that steps with prompts have grids for (runner/buckets.py:FEW_ROWS and all there are)."""
    split_prompts: int | None = 2048
    """From so many keys on attention of a step's few prompts is cut over its keys, where its tokens alone do not fill the GPU."""


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
    wide_shapes: dict[tuple[int, int, bool], tuple[tuple[int, int, TileConfig], ...]] = field(default_factory=dict)
    """By (weight rows, of gate and up together; depth; FP8 weights): (above, up to, tile) for numbers of rows above `tile_rows` at which
    tiles were measured to beat cuBLAS and what must follow it."""
    split_tokens: int = 2560
    """Up to so many tokens of a step prompts may be cut over their keys; more fill the GPU several times over."""
    split_keys: int = 1024
    """Of no fewer than this a piece is made: its sums, written and read, cost about as much as 400 keys."""

    few_ends: bool = True
    """Steps of which few rows want a token compute what follows the last layer's attention for those alone."""
    stack_latents: bool = True
    """One token: its queries and its latent, made of the same input, are one launch (pair.py)."""
    few_expert_tokens: int = 16
    """Up to so many tokens (16 at most) pairs need not be sorted by expert."""
    side_from: int = 2
    """From so many tokens on shared experts may run on a second stream, beside routing and routed experts (lanes.py) ..."""
    side_tokens: int = 64
    """... and up to so many. From two on: one token's shared experts started 20 us late beside those that hold the places."""

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
        tiles = -(-weight_rows // 64)
        if tiles > self.multiprocessors:  # two programs a multiprocessor hide each other's beginning and end
            if fp8 and bm < 64 and tiles >= 2 * self.multiprocessors:
                return TileConfig(bm, 128, 128, 1, 4, 3)
            return TileConfig(bm, 64, 128, 1, 4, 3 if bm == 64 else 4)
        bk = 256 if fp8 and depth % 256 == 0 else 128
        if fp8 and bm == 16:
            return TileConfig(bm, 64, bk, 4 if tiles <= self.multiprocessors // 2 and depth % 1024 == 0 else 1, 4, 4)
        # One program a multiprocessor: it wants as much under way as its memory holds.
        pieces = self._pieces(tiles, depth // bk)
        stages = 5 if bm > 16 else 6 if depth // (bk * pieces) < 16 else 4
        return TileConfig(bm, 64, bk, pieces, 4, stages)

    def _pieces(self, tiles: int, steps: int) -> int:
        """In how many pieces the steps over K are cut: while there are places for all programs and, where half of the places have one
        already, while no piece is shorter than 16 steps."""
        pieces = 1
        while pieces < 4 and 2 * tiles * pieces <= self.multiprocessors and steps % (2 * pieces) == 0:
            if tiles * pieces >= 0.45 * self.multiprocessors and steps < 32 * pieces:
                break
            pieces *= 2
        return pieces

    def wide(self, rows: int, weight_rows: int, depth: int, *, fp8: bool) -> TileConfig | None:
        """Constants of a matmul of more than `tile_rows` rows; None where the library is better, or nothing was measured."""
        if not self.tile_rows < rows <= 256:
            return None
        ways = self.wide_shapes.get((weight_rows, depth, fp8), ())
        return next((tile for above, most, tile in ways if above < rows <= most), None)

    def block_tile(self, rows: int, weight_rows: int, depth: int) -> TileConfig:
        """Constants of a matmul of 2 and more rows by FP8 weights with scales by blocks; not measured yet. Above `tile_rows` the last two
        serve every size."""
        if rows <= self.tile_rows:
            bm = next(size for size in (16, 32, 64) if rows <= size)
            many = weight_rows // 64 >= 0.6 * self.multiprocessors
            split = 1 if many else next(pieces for pieces in (4, 2, 1) if -(-depth // 128) % pieces == 0)
            return TileConfig(bm, 64, 128, split, 4, 4 if bm < 64 else 3)
        return TileConfig(64, 64, 128, 1, 4, 4) if rows <= 128 else TileConfig(128, 128, 128, 1, 8, 3)

    def expert_gemv(self, outputs: int, depth: int, *, gated: bool, fp8: bool) -> ExpertGemvConfig:
        """Constants of the chosen experts' matmuls for one token; outputs (gated: of gate alone) and depth of one expert's matrix."""
        if fp8:
            return ExpertGemvConfig(8, 512 if gated and depth % 512 == 0 else 256, 4, 2 if gated else 4, narrow=True)
        if gated:
            return ExpertGemvConfig(4, 2048, 8, 1) if outputs < 1024 else ExpertGemvConfig(2, 2048, 4, 1)
        # The second's input is bf16 and its rows are short: one warp with all of a row under way. With more than 20 blocks it has too many
        # registers for all programs to be there at once.
        return ExpertGemvConfig(1, 256, 1, 20 if depth < 1024 else 24)

    def expert_tile(self, tokens: int, chosen: int, experts: int, depth: int, *, fp8: bool) -> TileConfig:
        """Constants of the experts' matmuls for a step of several tokens; bm is how many pairs of one expert make a block.

        Up to `few_expert_tokens` a block holds all tokens. Above, about as many as an expert gets on average: a block of more reads its
        weights once, and computes rows that are not there.
        """
        bk = next((size for size in (128, 64, 32) if depth % size == 0), 64)
        average = tokens * chosen / experts
        if tokens <= self.few_expert_tokens or average <= 12:
            return TileConfig(16, 64, bk, 1, 4, 3 if tokens <= 4 and not fp8 else 4)
        if average <= 24:
            return TileConfig(32, 64, bk, 1, 4, 3)
        if fp8:
            return TileConfig(64 if average <= 96 else 128, 128, bk, 1, 4 if average <= 96 else 8, 4)
        bk = min(bk, 64)
        if average <= 96:
            return TileConfig(64, 128, bk, 1, 4, 3)
        return TileConfig(128, 128, bk, 1, 4, 3) if average <= 192 else TileConfig(128, 256, bk, 1, 8, 3, True)

    def decode(self, rows: int, longest: int, *, packed: int = 4, fp8: bool = False) -> DecodeConfig:
        """Constants of attention for a bucket of one-token rows with at most `longest` keys each; `packed` query heads share a kv head."""
        if rows <= 2:
            if longest <= 512:
                return DecodeConfig(8, 32, 2 if packed == 4 else 4, 2)
            if longest <= 2048:
                return DecodeConfig(32, 32, 2, 2)
            return DecodeConfig(32, 64 if longest <= 32768 else 128, 4, 2)
        if longest > 32768 and rows <= 64:  # one row may be so long: it alone has to fill the GPU
            return DecodeConfig(32, 64, 4, 2, 1024)
        if rows <= 16:
            return DecodeConfig(8, 32, 2, 3)
        if longest > 8192:
            return DecodeConfig(4, 128, 4, 2)
        if fp8:  # conversions want more tiles under way
            return DecodeConfig(1, 128, 4, 5)
        if rows <= 48 and longest <= 4096:
            return DecodeConfig(1, 128, 8, 3)
        if (
            rows <= 96 or longest <= 256
        ):  # short rows: more programs a multiprocessor hide each other's beginning and end
            return DecodeConfig(1, 64, 2, 3)
        return DecodeConfig(1, 128, 4, 2)

    def latent_decode(self, rows: int, longest: int, *, heads: int) -> LatentDecodeConfig:
        """Constants of attention over latents for a bucket of one-token rows with at most `longest` latents each; 16 heads are measured."""
        block_h = 16 if heads <= 32 else 64
        tiles = rows * -(-heads // block_h)
        splits = min(
            64 if rows <= 4 else 8,
            1 << max(0, (self.multiprocessors // tiles).bit_length() - 1),  # programs that run at once
            1 << max(0, (longest // 64).bit_length() - 1),
        )
        if block_h == 64:
            return LatentDecodeConfig(splits, 64, 32, 8, 2)
        # Few rows wait for one tile after another: fewer and larger ones. Many rows want two programs in a multiprocessor's memory.
        return LatentDecodeConfig(splits, 16, 64 if tiles <= 32 else 32, 4, 5)

    def latent_absorb(self, tokens: int) -> LatentTileConfig:
        """Constants of queries' way into the space of latents."""
        return LatentTileConfig(16, 64, 4, 1) if tokens <= 128 else LatentTileConfig(64, 128, 4, 1)

    def latent_leave(self, tokens: int, *, splits: int) -> LatentTileConfig:
        """Constants of the way back, where splits are merged."""
        if tokens <= 4:
            return LatentTileConfig(1, 16, 4, 1, 512)
        if tokens <= 16:
            return LatentTileConfig(16, 32, 4, 2, 128)
        if tokens <= 256:
            return LatentTileConfig(16, 128 if splits > 1 else 64, 4, 3, 64)
        return LatentTileConfig(128, 128, 8, 3, 64)

    def latent_prefill(self) -> LatentPrefillConfig:
        """Constants of attention over latents for rows of several tokens; in deterministic mode for all."""
        return LatentPrefillConfig(64, 16, 32, 8, 2)

    def latent_keys(self) -> LatentTileConfig:
        """Constants of the matmul that makes keys and values of prompts that begin in a step."""
        return LatentTileConfig(128, 128, 8, 3, 64)

    def latent_fresh(self) -> PrefillConfig:
        """Constants of attention over those keys and values."""
        return PrefillConfig(128, 64, 8, 2)

    def shared_pass(self, head_dim: int, page_tokens: int) -> PrefillConfig:
        """Constants of the pass over keys that all decoding rows share: tiles half as high as a prompt's, two programs a multiprocessor."""
        config = self.prefill(head_dim, page_tokens)
        return PrefillConfig(64, 64, 4, 3, True) if config.tma else config

    def shared_splits(self, tiles: int, *, block_m: int) -> int:
        """Into how many pieces shared keys are cut for so many tiles of rows and kv heads: what fills the multiprocessors once."""
        return min(8, 1 << max(0, (self.shared_programs(block_m) // tiles).bit_length() - 1))

    def shared_programs(self, block_m: int) -> int:
        """How many programs of that pass run at once."""
        return self.multiprocessors * (2 if block_m <= 64 else 1)

    def prefill_splits(self, programs: int) -> int:
        """Into how many pieces keys are cut at most where rows' tokens make so many programs: so that two a multiprocessor are busy to the
        end. Each piece has its sums to write and to be read, which is why no more are made than that takes, and no more in all than four
        times as many as run at once."""
        places = 2 * self.multiprocessors

        def took(splits: int) -> float:
            return -(-programs * splits // places) / splits * (1 + 0.01 * splits)

        return min(range(1, min(32, max(1, 4 * places // programs)) + 1), key=took)

    def few_prefill(self, rows: int, usual: PrefillConfig) -> PrefillConfig:
        """Constants for so few rows (tokens x packed heads) that half of the usual tile would be empty; `usual` for all others."""
        return PrefillConfig(64, 64, 4, 3, True) if rows <= 64 and usual.tma and usual.block_m == 128 else usual

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
            # Qwen3-30B-A3B: qkv and router
            (5120, 2048, False): GemvConfig(4, 1024, 8, narrow=True),
            (128, 2048, False): GemvConfig(1, 2048, 4, narrow=True),
            (6144, 4096, True): GemvConfig(8, 512, 4, narrow=True, half=True, ahead=4),
            (4096, 4096, True): GemvConfig(8, 512, 4, narrow=True, half=True, ahead=4),
            (14336, 4096, True): GemvConfig(8, 512, 4, narrow=True, half=True, ahead=4),
            (4096, 14336, True): GemvConfig(8, 512, 4, narrow=True),
        },
        wide_shapes={
            # (256 rows by gate and up of the 8B: 3 % faster by itself, but not in sustained decoding, where power is what limits.)
            # Qwen3-0.6B: gate and up, qkv
            (6144, 1024, False): ((64, 128, TileConfig(128, 64, 128, 1, 8, 4)),),
            (4096, 1024, False): ((64, 128, TileConfig(64, 64, 128, 1, 4, 5)),),
            # Llama-3.1-8B: gate and up
            (28672, 4096, False): ((96, 128, TileConfig(128, 256, 64, 1, 8, 4)),),
            # in FP8: qkv, o, gate and up, down
            (6144, 4096, True): ((64, 128, TileConfig(128, 64, 128, 1, 4, 6)),),
            (4096, 4096, True): (
                (64, 128, TileConfig(64, 64, 128, 1, 4, 5)),
                (128, 256, TileConfig(64, 128, 128, 1, 4, 6)),
            ),
            (28672, 4096, True): ((96, 128, TileConfig(128, 128, 128, 1, 8, 3)),),
            (4096, 14336, True): (
                (64, 128, TileConfig(64, 64, 128, 1, 4, 6)),
                (128, 256, TileConfig(64, 128, 128, 1, 4, 6)),
            ),
        },
    ),
}
"""By `torch.cuda.get_device_name()`."""

DEFAULT = "NVIDIA H200"


def tuned(gpu: str) -> Tuning:
    """The constants of a GPU by name. For one that nobody measured nothing that was won by a few per cent, or wants more shared memory."""
    return TUNINGS.get(gpu) or replace(TUNINGS[DEFAULT], wide_shapes={})
