"""The memory ledger of a GPU: every allocation that the cuda backend makes, by its own arithmetic.

Knows: buffers of the op set, sampler and slots; what a CUDA context takes. Refuses to know: pages (they take the rest), host memory.
Three constants do not follow from shapes and are calibrated on a card: CONTEXT_BYTES, GRAPH_BYTES and ROUNDING_BYTES.
"""

from __future__ import annotations

from dataclasses import dataclass

from tradewind.config.card import ModelCard
from tradewind.config.card_parts import attention_matrices, count_parameters, fp8_matrices, mlp_matrices
from tradewind.config.plan import LedgerLine
from tradewind.config.sizes import MiB

CONTEXT_BYTES = 520 * MiB
"""CUDA context, cuBLAS and the loaded kernels."""

GRAPHS = 256
"""Captured step sizes that are kept at most (runner/graph_runner.py: MOST_GRAPHS)."""

GRAPH_BYTES = MiB
"""Device memory of one captured step: its launches and their arguments; buffers are shared with all others."""

CUBLAS_BYTES = 2 * 32 * MiB
"""cuBLAS's workspace on Hopper, for the default stream and the runner's."""

ROUNDING_BYTES = MiB
"""Lost for each large tensor on average: torch's allocator hands them out in steps of 2 MiB."""

SAMPLER_BLOCK = 1024
"""Logits that one program of the sampler reads (kernels/triton/sample.py: BLOCK)."""

SAMPLER_CANDIDATES = 1024
"""Candidates kept for each row (CANDIDATES)."""

BIASES_EACH = 512
"""Biases and banned tokens a row has room for, 8 bytes each (runner/steering.py: BIASES_EACH)."""

FEW_ROWS_PARTS, MANY_ROWS_SPLITS = 128, 4
"""Split attention: most (rows x splits) of steps up to 16 rows, and most splits of larger ones (kernels/triton/tuning.py: decode)."""

LONG_CONTEXT, LONG_ROWS, LONG_SPLITS = 32768, 64, 32
"""Longer rows, in steps of up to so many, are split into so many parts (tuning.py: decode)."""

CUT_FROM, CUT_PROGRAMS, CUT_ROWS = 2048, 4 * 2 * 132, 128
"""Prompts whose attention is cut over their keys: from so many keys on (AttentionWays.split_prompts), into at most so many programs of so
many rows (tokens x packed heads) each (tuning.py: prefill_splits), on the 132 multiprocessors of an H200."""

SHARED_ROWS_FROM, SHARED_ROWS = 24, 2 * 132 * 64
"""Keys that decoding rows share: from so many rows a step on (tuning.py: shared_rows) their parts take memory; so many rows (rows x packed
heads) of programs run at once, or as many as there are (attention_program.py: shared_keys)."""

LATENT_PARTS = 256
"""Attention over latents: most programs (rows x splits x blocks of heads) of a step whose rows are split (tuning.py: latent_decode)."""

TILE_SPLITS, TILE_ROWS, TILE_OUTPUTS = 4, 64, 5120
"""Skinny matmuls that split K: most pieces, most input rows, and the most outputs of a matrix that is split (tuning.py: tile)."""


EXPERT_BLOCK = 16
"""Fewest pairs of a block of one expert in a step that sorts them (kernels/triton/tuning.py: expert_tile)."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The choices that decide how much memory is taken, apart from pages."""

    quantization: str
    max_tokens_per_step: int
    max_running: int
    max_context: int
    page_tokens: int
    kv_groups: int
    graphs: bool


def matrix_values(card: ModelCard) -> int:
    """Weights of all layers' matmuls."""
    return sum(attention_matrices(card) + mlp_matrices(card, layer) for layer in range(card.layers))


def table_values(card: ModelCard) -> int:
    """Values of the embedding table; the head has as many, and is the same tensor where they are tied."""
    return card.vocab_size * card.hidden


def vector_values(card: ModelCard) -> int:
    """Norm weights and biases: what is neither a layer's matrix nor a table. They are kept in float32."""
    tables = table_values(card) * (1 if card.tied_embeddings else 2)
    return max(0, count_parameters(card) - matrix_values(card) - tables)


def kept_fp8(card: ModelCard, *, quantization: str) -> int:
    """Weights that stay FP8 with scales by blocks, as the file has them, unless they are quantised at load; what makes keys and values of
    latents does not."""
    if quantization != "none":
        return 0
    return max(0, min(card.weight_formats.get("F8_E4M3", 0), fp8_matrices(card)) - _latent_up(card))


def weight_bytes(card: ModelCard, *, quantization: str) -> int:
    """Weights that a token meets: the layers' matrices in bf16, in e4m3 with a float32 scale for each output, or as the file has them in
    e4m3 with one for 16 x 128; the head in bf16."""
    matrices = matrix_values(card)
    kept = kept_fp8(card, quantization=quantization)
    layers = 2 * matrices - kept + 4 * kept // (16 * 128)
    if quantization == "fp8":
        attention = (card.heads + 2 * card.kv_heads) * card.head_dim + card.hidden
        latent = card.latent
        if latent is not None:
            attention = card.heads * card.head_dim + latent.query_rank + latent.width + card.hidden
        outputs = card.layers * (attention + card.hidden) + 2 * _dense_layers(card) * card.intermediate
        layers = matrices
        if card.moe is not None:
            moe, mixtures = card.moe, card.layers - _dense_layers(card)
            outputs += mixtures * (moe.experts * (2 * moe.intermediate + card.hidden) - card.hidden)
            outputs += mixtures * (2 * moe.shared_intermediate + card.hidden) * bool(moe.shared_intermediate)
            layers += mixtures * card.hidden * (moe.experts + moe.shared_gate)  # the router stays bf16
        layers += 4 * outputs + _latent_up(card)  # what makes keys and values of latents stays bf16
    return layers + 2 * table_values(card) + 4 * vector_values(card)


def _latent_up(card: ModelCard) -> int:
    """Weights that make keys and values of latents."""
    latent = card.latent
    return 0 if latent is None else card.layers * latent.rank * card.heads * (latent.nope + latent.value)


def _dense_layers(card: ModelCard) -> int:
    """Layers with an MLP of the card's inner size."""
    return card.layers - sum(card.moe.layers) if card.moe is not None else card.layers


def expert_bytes(card: ModelCard, *, quantization: str, max_tokens_per_step: int) -> int:
    """What a mixture's kernels keep between launches: for each (token, expert) pair the inner values and the answer in bf16, its place when
    sorted by expert (fp8: and the inner values in e4m3 with a scale); for every 16 tokens how often they chose each expert, twice."""
    moe = card.moe
    if moe is None:
        return 0
    pairs, programs = max_tokens_per_step * moe.per_token, -(-max_tokens_per_step // 16)
    each = 2 * (moe.intermediate + card.hidden) + 4
    if quantization == "fp8":
        each += moe.intermediate + 4
    elif kept_fp8(card, quantization=quantization):
        each += moe.intermediate + 4 * -(-moe.intermediate // 128)
    blocks = 3 * 4 * (pairs // EXPERT_BLOCK + moe.experts + 1)
    return pairs * each + 2 * 4 * programs * moe.experts + blocks


def activation_bytes_per_token(card: ModelCard, *, quantization: str, kv_groups: int) -> int:
    """Scratch of one token, reused by every layer, and what a step's layout tells about it.

    float32: residual stream, rope angles. bf16: normed, delta and hidden (E each), qkv, q, mixed, gated (F) and, where a large step's
    matmul has no fused activation, gate and up (2F). fp8: e4m3 copies of the three kinds of inputs, a float32 scale each.
    """
    q = card.heads * card.head_dim
    qkv = q + 2 * card.kv_heads * card.head_dim
    ropes = 2 if card.rope_local is not None else 1
    floats = card.hidden + ropes * (card.rope.rotary_dims or card.head_dim)
    inner = card.intermediate if _dense_layers(card) else 0
    wide = inner  # of gate and up side by side, in one buffer for all
    halves = (4 if card.sandwich_norms else 3) * card.hidden + qkv + 2 * q
    latent = card.latent
    if (
        latent is not None
    ):  # queries and latents, answers; queries in the space of latents, or keys and values in one place
        longer = max(latent.width, card.head_dim + latent.value)
        halves += latent.query_rank + latent.width + card.heads * (latent.value + longer) - qkv - q
    if card.moe is not None:
        floats += card.moe.experts + 2 * card.moe.per_token + card.moe.shared_gate
        if card.moe.shared_intermediate:
            halves += card.hidden
            wide = max(wide, card.moe.shared_intermediate)
            inner += card.moe.shared_intermediate if card.moe.shared_intermediate != card.intermediate else 0
    mixed = q if latent is None else card.heads * latent.value + latent.query_rank
    quants = card.hidden + mixed + inner + 3 * 4 if quantization == "fp8" else 0
    if kept_fp8(
        card, quantization=quantization
    ):  # the library multiplies none of them: gate and up are never side by side
        quants, wide = sum(width + 4 * -(-width // 128) for width in (card.hidden, mixed, inner)), 0
    halves += inner + 2 * wide
    layout = 4 * (2 + kv_groups)  # id, position, and where its key goes in each pool
    return 4 * floats + 2 * halves + quants + layout


def sampler_bytes_per_row(card: ModelCard) -> int:
    """Beside the logits: counts for penalties, a grammar's mask, biases, block sums, candidates, 20 best logprobs, columns, the hidden
    state."""
    vocabulary = card.vocab_size
    blocks = -(-vocabulary // SAMPLER_BLOCK)
    lists = 188 * blocks + 4 * SAMPLER_CANDIDATES + 8 * BIASES_EACH + 640
    return 4 * vocabulary + vocabulary // 8 + lists + 2 * card.hidden


def workspace_bytes(card: ModelCard, *, max_running: int, max_context: int) -> int:
    """Partial results of split attention (float32 sums, their maxima and weights) or of split matmuls, whichever are most, and cuBLAS's
    own."""
    parts = max(FEW_ROWS_PARTS, MANY_ROWS_SPLITS * max_running)
    if max_context > LONG_CONTEXT:
        parts = max(parts, LONG_SPLITS * min(LONG_ROWS, max_running))
    attention = parts * card.heads * (card.head_dim + 2)
    if card.latent is not None:
        attention = LATENT_PARTS * min(card.heads, 64) * (card.latent.rank + 2)
    elif card.causal and max_context >= CUT_FROM:
        attention = max(attention, CUT_PROGRAMS * CUT_ROWS * card.heads // _packed_heads(card) * (card.head_dim + 2))
    return 4 * max(attention, TILE_SPLITS * TILE_ROWS * TILE_OUTPUTS) + CUBLAS_BYTES


def shared_bytes(card: ModelCard, *, max_running: int) -> int:
    """What a step's pass over keys that its rows share leaves for the next launch: a part for each row and head."""
    none_whole = bool(card.layer_windows) and None not in card.layer_windows
    if card.latent is not None or not card.causal or none_whole or max_running < SHARED_ROWS_FROM:
        return 0
    return 4 * max(max_running, SHARED_ROWS // _packed_heads(card)) * card.heads * (card.head_dim + 2)


def _packed_heads(card: ModelCard) -> int:
    """Query heads with those that fill each kv head's group up to a power of two."""
    return card.kv_heads * (1 << (card.heads // card.kv_heads - 1).bit_length())


def angle_bytes(card: ModelCard, *, max_context: int) -> int:
    """cos and sin of every position in float32 for each rope, and as much again that making the table leaves with the allocator."""
    ropes = 2 if card.rope_local is not None else 1
    return 2 * ropes * 4 * max_context * (card.rope.rotary_dims or card.head_dim)


def slot_bytes(sizes: Sizes) -> int:
    """The token table, and a page table for each pool: one by slot, one by row of the step; rows are multiples of 4 entries."""
    tokens = -(-(sizes.max_context + 1) // 4) * 4
    pages = -(-(sizes.max_context + 1) // sizes.page_tokens // 4) * 4
    return sizes.max_running * 4 * (tokens + 2 * sizes.kv_groups * pages + 32)


def fixed_lines(card: ModelCard, sizes: Sizes) -> tuple[LedgerLine, ...]:
    """Everything on the device but the pages."""
    step, rows, vocabulary = sizes.max_tokens_per_step, sizes.max_running, card.vocab_size
    matrices = matrix_values(card) / 1e6
    kind = "fp8 with a scale an output" if sizes.quantization == "fp8" else "bf16"
    if kept_fp8(card, quantization=sizes.quantization):
        kind = "fp8 with a scale for each block, as in the file"
    each = activation_bytes_per_token(card, quantization=sizes.quantization, kv_groups=sizes.kv_groups)
    ends = rows if card.causal else 0  # the last layer ends for rows that want a token (runner/programs.py: few_ends)
    tensors = 6 * card.layers + 10  # four matrices, keys and values of each layer; scratch
    head = f"{'tied ' if card.tied_embeddings else ''}head {vocabulary} x {card.hidden} bf16"
    lines = [
        (
            "weights",
            weight_bytes(card, quantization=sizes.quantization),
            f"{matrices:.1f}M in {kind}; {head}; norms float32",
        ),
        ("CUDA", CONTEXT_BYTES, "context, libraries and loaded kernels"),
        (
            "activations",
            (step + ends) * each,
            f"{step} tokens x {each} bytes, reused by every layer"
            + f", and {ends} rows at the last one's end" * bool(ends),
        ),
        (
            "experts",
            expert_bytes(card, quantization=sizes.quantization, max_tokens_per_step=step),
            f"{step} tokens at {card.moe.per_token} experts each: inner values, answers, order" if card.moe else "",
        ),
        ("logits", rows * vocabulary * 4, f"{rows} rows x {vocabulary} float32"),
        (
            "sampler",
            rows * sampler_bytes_per_row(card),
            f"{rows} rows: token counts for penalties, grammar masks, logprobs, candidates",
        ),
        ("slots", slot_bytes(sizes), f"token and page tables of {rows} sequences x {sizes.max_context} tokens"),
        (
            "rope tables",
            angle_bytes(card, max_context=sizes.max_context),
            f"cos and sin of {sizes.max_context} positions",
        ),
        (
            "workspaces",
            workspace_bytes(card, max_running=rows, max_context=sizes.max_context),
            "parts of split attention and split matmuls, and cuBLAS's",
        ),
        ("shared keys", shared_bytes(card, max_running=rows), "parts of attention over keys that decoding rows share"),
        ("rounding", tensors * ROUNDING_BYTES, f"{tensors} large tensors, each rounded up to whole steps of 2 MiB"),
    ]
    lines = [line for line in lines if line[1] or line[0] not in ("experts", "shared keys")]
    if not card.tied_embeddings:
        lines.insert(1, ("embedding table", 2 * table_values(card), f"{vocabulary} x {card.hidden} bf16"))
    if sizes.graphs:
        lines.append(("graphs", GRAPHS * GRAPH_BYTES, f"at most {GRAPHS} step sizes x {GRAPH_BYTES // MiB} MiB"))
    return tuple(LedgerLine(name=name, bytes=size, how=how) for name, size, how in lines)
