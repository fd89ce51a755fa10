"""The truth: every op as a pure function of torch tensors, written to be read.

Knows: what each op of the protocol means. Refuses to know: speed, buffers, packed layouts, and where a tensor came from.
Functions take float32 or float64 tensors, compute in the type they are given and return new tensors; nothing is written in place.
Every faster version (plain, C++, later Triton) is compared with these; see kernels/table.py for how close it must be.

Shape letters as in kernels/ops.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MASK32 = (1 << 32) - 1
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
ACTIVATION_GROUP = 32
"""Neighbouring activations that share one int8 scale."""


# ------------------------------------------------------------------------------------------------- norms and matmuls


def embed(ids: Tensor, table: Tensor, *, scale: float) -> Tensor:
    """Rows of the table times a scale: ids [T], table [V, E] -> [T, E]."""
    return table[ids.long()] * scale


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after adding delta, and its norm: both [T, E]."""
    x = x if delta is None else x + delta
    return x, rms_norm(x, weight, eps=eps)


def add_layer_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """The stream after adding delta, and (x - mean) / sqrt(variance + eps) * weight + bias of it: both [T, E]. Ba et al. 2016."""
    x = x if delta is None else x + delta
    centred = x - x.mean(-1, keepdim=True)
    return x, centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias


def add(x: Tensor, delta: Tensor | None, gate: Tensor | None = None) -> Tensor:
    """x + sigmoid(gate) * delta: x and delta [T, E], gate [T, 1]; without a gate x + delta, without delta x."""
    if delta is None:
        return x
    return x + (delta if gate is None else torch.sigmoid(gate) * delta)


def rms_norm_span(x: Tensor, weight: Tensor, *, start: int, eps: float) -> Tensor:
    """x [T, N] with the columns from `start` on, as many as weights, replaced by their RMS norm."""
    end = start + len(weight)
    return torch.cat([x[:, :start], rms_norm(x[:, start:end], weight, eps=eps), x[:, end:]], -1)


def scale(x: Tensor, *, factor: float) -> Tensor:
    """factor * x."""
    return factor * x


def temper(x: Tensor, positions: Tensor, *, every: int, slope: float) -> Tensor:
    """Each row times 1 + slope ln(1 + floor((position + 1) / every)): x [T, N], positions [T]. Nakanishi 2025 (scalable softmax), as in
    Llama 4, where it starts to matter behind `every` tokens.
    """
    steps = torch.div(positions.to(x.dtype) + 1, every, rounding_mode="floor")
    return x * (1 + slope * torch.log1p(steps))[:, None]


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), Phi the normal distribution function (Hendrycks & Gimpel 2016)."""
    return x * 0.5 * torch.erfc(x * -math.sqrt(0.5))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias [N]."""
    out = x @ weight.T
    return out if bias is None else out + bias


def gated_linear(x: Tensor, gate: Tensor, up: Tensor, *, activation: str, bias: Tensor | None = None) -> Tensor:
    """activation(x @ gate.T) * (x @ up.T); bias [2F] is gate's, then up's. Source: GLU variants (Shazeer 2020)."""
    gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
    return glue(linear(x, gate, gate_bias), linear(x, up, up_bias), activation)


def glue(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Gate and up made one: activation(gate) * up; swiglu_clamped: (up + 1) g sigmoid(1.702 g), g cut at 7, up at +-7 (gpt-oss)."""
    if activation != "swiglu_clamped":
        return activate(gate, activation) * up
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)


def activate(x: Tensor, activation: str) -> Tensor:
    """silu: x sigmoid(x). gelu_tanh: the tanh form of GELU (Hendrycks & Gimpel 2016)."""
    if activation == "silu":
        return x * torch.sigmoid(x)
    assert activation == "gelu_tanh", activation
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def round_activations(x: Tensor) -> Tensor:
    """x as an int8 matmul sees it: each 32 neighbours of a row rounded to whole multiples of absmax / 127, ties to even.

    A group whose absmax is under 1e-30 is zeros.
    """
    groups = x.reshape(*x.shape[:-1], -1, ACTIVATION_GROUP)
    absmax = groups.abs().amax(-1, keepdim=True)
    rounded = (groups * (127 / absmax)).round() * (absmax / 127)
    return torch.where(absmax < 1e-30, torch.zeros_like(groups), rounded).reshape(x.shape)


def round_weights(weights: Tensor) -> Tensor:
    """Weights as packed for int8 compute: each 32 neighbours along K rounded to whole multiples of float16(absmax / 127).

    The scale is rounded first and the quants are chosen for it, so it can be kept in two bytes without a further error.
    """
    groups = weights.reshape(*weights.shape[:-1], -1, ACTIVATION_GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp(max=65504).half().to(weights.dtype)
    quants = (groups / torch.where(scale > 0, scale, torch.ones_like(scale))).round().clamp(-127, 127)
    return (quants * scale).reshape(weights.shape)


# ------------------------------------------------------------------------------------------------- rope and attention


def rope_angles(positions: Tensor, inv_freq: Tensor, *, scale: float) -> Tensor:
    """scale * (cos | sin) of position * inv_freq: positions [T], inv_freq [D/2] -> [T, D]."""
    angle = positions.to(inv_freq.dtype)[:, None] * inv_freq
    return scale * torch.cat([angle.cos(), angle.sin()], -1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Half-split rotation of the first W dims of each head: x [T, heads, D], angles [T, W]. Source: RoFormer (Su et al. 2021)."""
    width = angles.shape[-1]
    cos, sin = angles[:, None].chunk(2, -1)
    first, second = x[..., :width].chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., width:]], -1)


def rope_store(
    qkv: Tensor,
    angles: Tensor,
    write_slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    heads: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv [T, (H + 2G) D], normalises and rotates q and k, stores k and v in pages [pages, B, G, D].

    Returns q [T, H D] and the new pages. Token t goes to slot write_slots[t] = page * B + offset.
    """
    tokens = len(qkv)
    kv_heads, dim = k_pages.shape[-2:]
    q, k, v = qkv.reshape(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
    q = q if q_weight is None else rms_norm(q, q_weight, eps=eps)
    k = k if k_weight is None else rms_norm(k, k_weight, eps=eps)
    k_pages, v_pages = k_pages.clone(), v_pages.clone()
    k_pages.view(-1, kv_heads, dim)[write_slots.long()] = rotate(k, angles).to(k_pages.dtype)
    v_pages.view(-1, kv_heads, dim)[write_slots.long()] = v.to(v_pages.dtype)
    return rotate(q, angles).reshape(tokens, -1), k_pages, v_pages


def attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    *,
    heads: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    chunked: bool = False,
) -> Tensor:
    """Attention of every row over its own pages: q [T, H D] -> [T, H D].

    Row r owns tokens query_start[r] .. query_start[r + 1] and lengths[r] keys; its last token sees all of them, the one before it one
    fewer, and so on. With a window w, position p sees p - w + 1 .. p: a page wholly before that may have been dropped (page id 0), so
    what it holds must not matter. Chunked windows restart at multiples of w: position p sees p - p % w .. p. When not causal, every token
    of a row sees all of its keys, and there is no window.
    """
    assert causal or window is None, "a window looks back: it is for causal attention"
    assert window is not None or not chunked, "chunks are windows"
    out = torch.zeros_like(q)
    for row in range(len(lengths)):
        begin, end, length = int(query_start[row]), int(query_start[row + 1]), int(lengths[row])
        pages = page_table[row, : -(-length // k_pages.shape[1])].long()
        keys = k_pages[pages].flatten(0, 1)[:length].to(q.dtype)  # [length, G, D]
        values = v_pages[pages].flatten(0, 1)[:length].to(q.dtype)
        query = q[begin:end].reshape(end - begin, keys.shape[1], -1, keys.shape[2])  # [n, G, H / G, D]

        position = torch.arange(length - (end - begin), length)[:, None]
        key_position = torch.arange(length)
        seen = (key_position <= position) | torch.tensor(not causal)
        if window is not None:
            seen &= key_position >= (position - position % window if chunked else position - window + 1)
        values = torch.where(seen.any(0)[:, None, None], values, 0)  # 0 * (garbage of a dropped page) must be 0

        score = torch.einsum("ngrd,lgd->grnl", query, keys) * scale
        score = score if softcap is None else softcap * torch.tanh(score / softcap)
        score = score.masked_fill(~seen, -math.inf)
        if sinks is not None:  # a sink is one more key with a fixed score and no value
            sink = sinks.to(score.dtype).reshape(keys.shape[1], -1, 1, 1).expand(*score.shape[:-1], 1)
            weight = torch.cat([score, sink], -1).softmax(-1)[..., :-1]
        else:
            weight = score.softmax(-1)
        out[begin:end] = torch.einsum("grnl,lgd->ngrd", weight, values).reshape(end - begin, -1)
    return out


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index[i]] for each i."""
    return x[index.long()]


def softcap(x: Tensor, *, cap: float) -> Tensor:
    """cap * tanh(x / cap): keeps values within +-cap (Gemma 2 report)."""
    return cap * torch.tanh(x / cap)


def copy_pages(pages: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Pages with target[i] holding what source[i] held before any was copied."""
    pages = pages.clone()
    pages[target.long()] = pages[source.long()]
    return pages


# ----------------------------------------------------------------------------------------------------------- sampling
#
# The order, for one row of logits (the same in every op set):
#
#   mask            a token whose grammar bit is 0 becomes -inf
#   bias            logit += bias (-inf bans)
#   penalties       repetition: every token seen, prompt too: l > 0 ? l / r : l * r
#                   presence and frequency: generated tokens only: l -= presence + frequency * count
#   temperature     0: the largest logit, the lowest id among equals. Otherwise l / temperature, and then:
#   top-k           the k largest (the lower id first among equals); 0 keeps all
#   top-p           of those, sorted downwards, the shortest head whose probability reaches p
#   min-p           of those, the ones whose probability is at least min_p times the largest
#   draw            u in (0, 1) from (seed, position); the first token, in order of id, whose cumulated probability exceeds u


def sample(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    seed: int = 0,
    position: int = 0,
    history: Tensor | None = None,
    history_prompt: int = 0,
    bias: dict[int, float] | None = None,
    allowed: Tensor | None = None,
) -> int:
    """The token drawn from one row of logits [V], or -1 when a logit is NaN or none is finite.

    history: known tokens, the first `history_prompt` of them prompt. allowed: bool [V], the grammar's mask.
    """
    logits = steered(
        logits, repetition=repetition, presence=presence, frequency=frequency, history=history, history_prompt=history_prompt,
        bias=bias, allowed=allowed,
    )  # fmt: skip
    if not logits.max().isfinite():  # also NaN: max of a row with a NaN is NaN
        return -1
    if temperature == 0:
        return int((logits == logits.max()).nonzero()[0])
    weight = kept_probabilities(logits.double() / temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    cumulated = weight.cumsum(0)
    above = (cumulated > uniform(seed, position) * cumulated[-1]).nonzero()
    # A u that rounds to 1 finds nothing above it: the last kept token.
    return int(above[0]) if len(above) else int(weight.nonzero()[-1])


def steered(
    logits: Tensor,
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    history: Tensor | None = None,
    history_prompt: int = 0,
    bias: dict[int, float] | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Logits [V] after mask, bias and penalties; see the drawing above. Repetition penalty: Keskar et al. 2019 (CTRL)."""
    logits = logits.clone()
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    for token, value in (bias or {}).items():
        logits[token] += value
    if history is not None and len(history):
        vocab = len(logits)
        seen = torch.bincount(history.long(), minlength=vocab) > 0
        generated = torch.bincount(history[history_prompt:].long(), minlength=vocab)
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
        logits = logits - presence * (generated > 0) - frequency * generated
    return logits


def kept_probabilities(scores: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Probabilities [V] of the tokens that top-k, top-p and min-p leave; the rest are 0. They sum to 1 or less.

    Top-p: Holtzman et al. 2019. Min-p: Nguyen et al. 2024.
    """
    order = torch.sort(scores, descending=True, stable=True).indices  # stable: the lower id first among equals
    if 0 < top_k < len(order):
        order = order[:top_k]
    probability = scores[order].softmax(0)
    before = probability.cumsum(0) - probability
    keep = (before < top_p) & (probability >= min_p * probability[0])
    keep[0] = True
    kept = torch.zeros_like(scores)
    kept[order[keep]] = probability[keep]
    return kept


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four random 32-bit words, a function of counter and key and nothing else (Salmon et al. 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK32, (a >> 32) ^ c3 ^ k1, a & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The one random number of a draw, a float64 in (0, 1], from the first two words of Philox with key seed and counter position."""
    high, low, _, _ = philox((position & MASK32, position >> 32 & MASK32, 0, 0), (seed & MASK32, seed >> 32 & MASK32))
    return ((high << 32 | low) + 0.5) / 2.0**64


def logprobs(logits: Tensor, tokens: Tensor, *, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-softmax of raw logits [L, V]: of tokens [L], its rank (1 is best), and the `top` best ids and values [L, top].

    Rank counts larger logits, and equal ones of a lower id, so that rank and the sorted list agree.
    """
    values = logits.log_softmax(-1)
    chosen = values.gather(-1, tokens.long()[:, None])
    own = logits.gather(-1, tokens.long()[:, None])
    ids = torch.arange(logits.shape[-1])
    ahead = (logits > own) | ((logits == own) & (ids < tokens[:, None]))
    best = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :top]
    return chosen[:, 0], ahead.sum(-1) + 1, best, values.gather(-1, best)
