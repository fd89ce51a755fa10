"""The ops of the device wing: one protocol, one table.

Knows: the name, arguments, shapes and tolerance of every op. Refuses to know: models, pages' owners, schedules.
An op set computes in its own memory: numpy arrays for the C++ library (`cpu`), torch tensors for `plain`; layers only pass handles on, so
the same model code runs on both, and a tape or graph can record it.

Shape letters: T tokens of the step (capacity of the buffer), L rows whose logits are wanted, R rows (sequences) of the step, H query heads,
G kv heads, D head dim, E hidden, F intermediate, X experts, K/N in/out features, V vocabulary, P logical pages per row, B page_tokens.
`count` is one int32 in the op set's own memory (numpy for `cpu` and `plain`, on the device for `cuda`): how many leading rows of the
buffers are live. It is read when the op *runs*, so a recorded op follows the step's real size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Tensor = Any
"""A numpy array or a torch tensor, as the op set has it."""
Count = Any
"""One int32 in the op set's memory."""

Layout = Literal["f32", "bf16", "fp8", "fp8_block", "quant"]
Activation = Literal["silu", "gelu_tanh", "swiglu_clamped"]
"""How gate and up become one, `reference.glue`: activation(gate) * up, or the clamped form of gpt-oss."""
Compute = Literal["f32", "bf16", "int8"]


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """A weight matrix [N, K] (out, in) as an op set wants it. Opaque outside kernels; made by `Ops.pack_*`.

    `quant` holds unsigned quants of `bits` bits in groups of `group` along K with value = scale * q + minimum; `fp8` holds e4m3 values and
    one float32 scale per output; `gated` means the rows are gate and up, in the op set's own order, for `gated_linear` (N counts both).
    """

    layout: Layout
    n: int
    k: int
    bits: int
    group: int
    gated: bool
    data: tuple[Tensor, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class PackedExperts:
    """Matrices [N, K] of one layout, one for each expert of a layer. Opaque outside kernels; made by `Ops.pack_experts`."""

    experts: int
    n: int
    k: int
    layout: str
    gated: bool
    data: tuple[Tensor, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router's logits become chosen experts and weights. Every step is in kernels/reference_moe.py, `route`."""

    top_k: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    """Weights are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights, last of all."""
    groups: int = 1
    groups_kept: int = 1
    """Experts are chosen from the best `groups_kept` of `groups` equal groups."""
    group_top: int = 1
    """A group is as good as the sum of its best `group_top` scores."""


@dataclass(frozen=True, kw_only=True)
class LatentUp:
    """For each head a matrix [N, C] that makes keys of latents and one [V, C] that makes values. Opaque outside kernels; made by
    `LatentOps.pack_latent`."""

    heads: int
    nope: int
    value: int
    rank: int
    data: tuple[Tensor, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class LowRankBank:
    """For one matmul of matrices [N, K] stacked along N (its parts), room for the low-rank additions of `slots` adapters: for each part A
    [rank, K] and B [N, rank]. Opaque outside kernels; made by `AdapterOps.low_rank_bank`."""

    slots: int
    rank: int
    sizes: tuple[int, ...]
    """N of each part."""
    k: int
    data: tuple[Tensor, ...]
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """A matrix [rows, cols] whose rows are gathered (embedding): bytes as in the file, `format` a GGUF/safetensors format name."""

    format: str
    rows: int
    cols: int
    data: Tensor
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class KVLayer:
    """One layer's pages. Logical shape of k and v: [pages, B, G, D]; the physical layout belongs to the op set
    (cpu: k is [pages, G, B/16, D, 16] so that 16 keys fill a vector, v is [pages, G, B, D]).
    Of latents k is [pages, B, D] and v is empty."""

    k: Tensor
    v: Tensor
    pages: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    format: str


@dataclass(frozen=True, kw_only=True)
class PagedRows:
    """Where the rows of a step find their keys, for one KV group."""

    query_start: Tensor
    """int32 [R + 1]: tokens query_start[r] .. query_start[r + 1] belong to row r."""
    lengths: Tensor
    """int32 [R]: tokens of row r with KV after this step; token i of the row's n has position lengths[r] - n + i."""
    page_table: Tensor
    """int32 [R, P]: physical page of each logical page; 0 is the null page (dropped by a window, never read)."""
    rows: Count


@dataclass(frozen=True, kw_only=True)
class SampleColumns:
    """Per-logits-row sampling values (L rows), arrays of the op set's host memory (numpy in every op set)."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int32]
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    repetition: npt.NDArray[np.float32]
    presence: npt.NDArray[np.float32]
    frequency: npt.NDArray[np.float32]
    seed: npt.NDArray[np.uint64]
    position: npt.NDArray[np.int64]
    """Position of the token that is drawn: with `seed` the only source of randomness."""
    history: npt.NDArray[np.int64]
    """Address of the row's int32 token table (the op set's host memory)."""
    history_prompt: npt.NDArray[np.int32]
    """Prompt tokens at the head of the history (repetition penalty only)."""
    history_length: npt.NDArray[np.int32]
    """All known tokens of the history (0: no penalties are asked, history is not read)."""
    bias_start: npt.NDArray[np.int32]
    """[L + 1]: entries bias_start[i] .. of bias_token / bias_value belong to row i (-inf bans a token)."""
    bias_token: npt.NDArray[np.int32]
    bias_value: npt.NDArray[np.float32]
    mask: npt.NDArray[np.uint32] | None
    """Grammar bitmask [L, ceil(V / 32)], bit set = allowed, or None."""


class Ops(Protocol):
    """Everything a model may call. Ops write to `out` and return nothing; buffers never alias unless a docstring says so.

    Float tensors have contiguous rows: the residual stream, angles and logits are float32, everything between two matmuls is of the op
    set's `activation` type. Rows beyond `count` hold nothing that may be read.
    """

    name: str
    activation: str
    """Name of the type of values between matmuls: "f32" on a CPU, "bf16" where memory traffic decides."""

    # memory and packing (never inside a recording)
    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Fresh memory ("f32", "f16", "bf16", "i32", "i64", "u8"); not initialised except that it is safe to read as zeros."""

    def constant(self, values: npt.NDArray[Any]) -> Tensor:
        """The op set's copy of a host array."""

    def host(self, values: Tensor) -> npt.NDArray[Any]:
        """The values as numpy (a view where possible)."""

    def pack_matrix(self, weights: npt.NDArray[np.float32], *, compute: Compute) -> PackedMatrix:
        """Packs an unquantised [N, K] matrix. compute "int8" packs to 8-bit groups of 32."""

    def pack_quant(
        self,
        quants: npt.NDArray[np.uint8],
        scale: npt.NDArray[np.float32],
        minimum: npt.NDArray[np.float32],
        *,
        bits: int,
    ) -> PackedMatrix:
        """Packs [N, K] unsigned quants with scale and minimum [N, K / group]: value = scale * q + minimum. bits is 4, 5, 6 or 8."""

    def pack_blocks(self, raw: npt.NDArray[np.uint8], format: str, *, n: int, k: int) -> PackedMatrix:
        """Packs GGUF blocks (bytes as in the file, rows contiguous) without passing through float."""

    def pack_gated(self, gate: PackedMatrix, up: PackedMatrix) -> PackedMatrix:
        """Interleaves two matrices of one layout for `gated_linear`."""

    def pack_stacked(self, parts: tuple[PackedMatrix, ...]) -> PackedMatrix:
        """Stacks matrices of one layout along N (qkv). N of every part but the last is a multiple of 16."""

    def row_table(self, raw: npt.NDArray[np.uint8], format: str, *, rows: int, cols: int) -> RowTable: ...

    def kv_layer(self, *, pages: int, page_tokens: int, kv_heads: int, head_dim: int, format: str) -> KVLayer: ...

    # compute
    def embed(self, ids: Tensor, table: RowTable, *, scale: float, out: Tensor, count: Count) -> None:
        """out[t] = scale * table[ids[t]]; ids int32 [T], out [T, E]."""

    def add_rms_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, *, eps: float, out: Tensor, count: Count
    ) -> None:
        """x += delta (in place, when given); out = x / rms(x) * weight. All [T, E]; out may be delta."""

    def add_layer_norm(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, *, eps: float, out: Tensor, count: Count
    ) -> None:
        """x += delta (in place, when given); out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, variance over all E values.
        All [T, E]; out may be x (a post-norm stream) or delta."""

    def add(self, x: Tensor, delta: Tensor | None, *, gate: Tensor | None, out: Tensor | None, count: Count) -> None:
        """x += sigmoid(gate) * delta in place (without a gate x += delta, without delta nothing); then out = x, when given.
        x, delta, out [T, E]; gate [T, 1]. `out` is how a layer without a norm in front reads the float32 stream as activations."""

    def rms_norm_span(self, x: Tensor, weight: Tensor, *, start: int, eps: float, count: Count) -> None:
        """One RMS norm, in place, over the columns start .. start + len(weight) of each row of x [T, N]; the others stay as they are."""

    def scale(self, x: Tensor, *, factor: float, count: Count) -> None:
        """x = factor * x in place; x [T, N]."""

    def temper(self, x: Tensor, positions: Tensor, *, every: int, slope: float, count: Count) -> None:
        """x[t] = (1 + slope ln(1 + floor((positions[t] + 1) / every))) * x[t] in place; x [T, N], positions int32 [T]. How queries grow
        with the length of what they look back on (Llama 4)."""

    def gelu(self, x: Tensor, *, count: Count) -> None:
        """x = x Phi(x) in place, Phi the normal distribution function (the erf form, not the tanh one); x [T, F]."""

    def linear(self, x: Tensor, weight: PackedMatrix, *, bias: Tensor | None, out: Tensor, count: Count) -> None:
        """out[T, N] = x[T, K] @ weight.T + bias. With int8 compute x is quantised per 32 values (symmetric, absmax / 127)."""

    def gated_linear(
        self, x: Tensor, weight: PackedMatrix, *, activation: Activation, bias: Tensor | None, out: Tensor, count: Count
    ) -> None:
        """out[T, F] = activation(x @ gate.T) * (x @ up.T), or as `Activation` says; weight from pack_gated; bias [2F] = gate then up."""

    def rope_angles(self, positions: Tensor, inv_freq: Tensor, *, scale: float, out: Tensor, count: Count) -> None:
        """out[t] = scale * (cos | sin) of float32 positions[t] * inv_freq; inv_freq [D/2], out [T, D] = cos half, then sin half."""

    def rope_store(
        self,
        qkv: Tensor,
        angles: Tensor,
        write_slots: Tensor,
        kv: KVLayer,
        *,
        heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        out: Tensor,
        count: Count,
    ) -> None:
        """qkv [T, (H + 2G) * D] -> out q [T, H * D]: optional RMS norm per head, half-split rotation of q and k, k and v stored at
        token slot write_slots[t] = page * B + offset. Rotates the first 2 * (angles width / 2) dims of a head, leaves the rest."""

    def attention(
        self,
        q: Tensor,
        kv: KVLayer,
        rows: PagedRows,
        *,
        heads: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor,
        causal: bool = True,
        chunked: bool = False,
    ) -> None:
        """Paged attention. q, out [T, H * D]. Causal: position p sees 0 .. p; with a window w it sees p - w + 1 .. p, and when windows are
        `chunked`, which is to restart at each multiple of w, p - p % w .. p. Not causal: every token sees all `lengths` keys of its row,
        without a window (an encoder, whose whole text is one row of a step).
        Softmax in float32; `sinks` [H] adds exp(sink) to the denominator; softcap c: scores -> c tanh(scores / c)."""

    def gather_rows(self, x: Tensor, index: Tensor, *, out: Tensor, count: Count) -> None:
        """out[i] = x[index[i]]; index int32 [L]."""

    def softcap(self, x: Tensor, *, cap: float, count: Count) -> None:
        """x = cap * tanh(x / cap) in place."""

    def sample(self, logits: Tensor, columns: SampleColumns, *, out: Tensor, count: Count) -> None:
        """out[i] (int32) = token drawn for logits row i [V]; -1 when the row has no finite logit or holds a NaN. Destroys logits."""

    def logprobs(
        self,
        logits: Tensor,
        tokens: Tensor,
        *,
        top: int,
        out_logprob: Tensor,
        out_rank: Tensor,
        out_ids: Tensor,
        out_top: Tensor,
        count: Count,
    ) -> None:
        """Log-softmax of raw logits: of tokens[i] -> out_logprob[i], its rank (1 = best) -> out_rank[i], the `top` best sorted
        descending (ties by lower id) -> out_ids / out_top [L, top]."""

    def copy_pages(self, kv: KVLayer, source: npt.NDArray[np.int32], target: npt.NDArray[np.int32]) -> None:
        """Copies whole pages within one layer; outside recordings."""


class ExpertOps(Ops, Protocol):
    """An op set that computes mixtures of experts too."""

    def pack_experts(self, parts: Iterable[PackedMatrix], *, experts: int) -> PackedExperts:
        """Matrices of one layout and shape, expert by expert, made into one thing that `experts` takes. An iterable, so that an op set may
        place each part before the next is packed; parts are not used afterwards."""

    def route(
        self, logits: Tensor, routing: Routing, *, bias: Tensor | None, ids: Tensor, weights: Tensor, count: Count
    ) -> None:
        """logits float32 [T, X] -> ids int32 [T, K] (all different and valid, whatever the logits), weights float32 [T, K]. bias [X] is
        added to scores where experts are chosen, not where they are weighed."""

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: PackedExperts,
        down: PackedExperts,
        *,
        activation: Activation,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        out: Tensor,
        count: Count,
        weigh_input: bool = False,
    ) -> None:
        """out[t] = sum over k of weights[t, k] * down_e(activation(gate_e x[t]) * up_e x[t]), e = ids[t, k]; x, out [T, E]. weigh_input:
        the weight is a factor on what gate and up make of x[t] (so on x[t]) instead, before their biases, and answers are just added.

        Whatever the routing: an expert may take no token, or all of them, and none is dropped. How tokens are sorted by expert is the op
        set's own affair, on its device. Only experts that are sent a token are read. gate_up_bias [X, 2F] is gate's then up's, down_bias
        [X, E]. A token's result does not depend on its neighbours. out is not x.
        """


class LatentOps(Ops, Protocol):
    """An op set that computes attention over latents too (MLA). More letters: C numbers of a latent, N and R dims of a query that meet keys
    made of it and the rotated key that all heads share, V dims of a value. Both forms of the sum are in kernels/reference_mla.py."""

    def latent_layer(self, *, pages: int, page_tokens: int, width: int, format: str) -> KVLayer:
        """Pages of latents, `width` = C + R numbers a token."""

    def pack_latent(self, keys: npt.NDArray[np.float32], values: npt.NDArray[np.float32]) -> LatentUp:
        """What makes keys [H, N, C] and values [H, V, C] of latents. Never quantised."""

    def latent_store(
        self,
        q: Tensor,
        latent: Tensor,
        angles: Tensor,
        write_slots: Tensor,
        kv: KVLayer,
        *,
        heads: int,
        weight: Tensor,
        eps: float,
        count: Count,
    ) -> None:
        """Turns the last R dims of each head of q [T, H * (N + R)] in place; stores latent [T, C + R] at write_slots, its first C numbers
        RMS normed with weight [C], its last R turned. Turned are the pairs (2i, 2i + 1); angles [T, R] as of `rope_angles`."""

    def latent_attention(
        self, q: Tensor, kv: KVLayer, rows: PagedRows, up: LatentUp, *, scale: float, out: Tensor
    ) -> None:
        """Causal attention over latents: q [T, H * (N + R)] as `latent_store` left it -> out [T, H * V]. Key of head h at a position:
        W_k[h] c and the shared rotated key; value: W_v[h] c. Which form computes it is chosen for each row by its price."""


class AdapterOps(Ops, Protocol):
    """An op set that adds low-rank changes of weights too (LoRA), those of many adapters in one step."""

    def low_rank_bank(self, *, slots: int, rank: int, sizes: tuple[int, ...], k: int, exact: bool) -> LowRankBank:
        """Room for `slots` adapters of at most `rank`, all without effect. exact: kept in float32 where the op set can; else in bf16."""

    def set_low_rank(
        self, bank: LowRankBank, slot: int, part: int, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]
    ) -> None:
        """Writes an adapter's A [r, K] and B [N, r] for one part, r at most the bank's rank (0: no change); outside recordings, between
        steps."""

    def add_low_rank(self, x: Tensor, bank: LowRankBank, adapters: Tensor, *, out: Tensor, count: Count) -> None:
        """out[t, of part p] += B_sp (A_sp x[t]), s = adapters[t] (int32 [T]); where s is under 0 the row stays as it is. x [T, K], out
        [T, sum of all parts' N]."""

    def glue(self, x: Tensor, *, activation: Activation, out: Tensor, count: Count) -> None:
        """out [T, F] = gate and up made one as `Activation` says; x [T, 2F] is gate's, then up's. What `gated_linear` does at its end, for
        matmuls between whose parts something is added."""


class AxesOps(Ops, Protocol):
    """An op set that turns heads by several positions of a token too: those of images, A axes of them."""

    def rope_angles_axes(
        self, positions: Tensor, axes: Tensor, inv_freq: Tensor, *, scale: float, out: Tensor, count: Count
    ) -> None:
        """out[t] = scale * (cos | sin) of float32 positions[axes[j], t] * inv_freq[j]; positions int32 [A, T], axes int32 [D/2], inv_freq
        [D/2], out [T, D] = cos half, then sin half."""


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """A row of the op table: who implements the op and how close they must be to the reference."""

    name: str
    reference: str
    """"module:function" of the plain-torch truth; a string so that the table is read without importing torch."""
    cpu: str | None
    """Name of the exported C++ op."""
    tolerance: float
    """Largest allowed relative error, ||a - b|| / ||b||, of float32 compute against the reference."""
