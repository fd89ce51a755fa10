"""The truth about multi-head latent attention (DeepSeek-V2 2024): both forms of one sum, as pure functions of torch tensors.

Knows: how keys and values come from latents, and which form multiplies less. Refuses to know: speed, layouts of pages, where latents come
from. As in kernels/reference.py, whose sibling this is.

    latent of a token    c [C], normed | k_rope [R], turned           one for all heads; only this is kept
    key of head h        W_k[h] c [N]  | k_rope                       W_k[h] [N, C]
    value of head h      W_v[h] c [V]                                 W_v[h] [V, C]

    naive       scores = q . key,  out = softmax(scores) @ value
    absorbed    q_nope . (W_k c) = (q_nope W_k) . c,  sum of p (W_v c) = W_v (sum of p c):
                scores = (q_nope W_k | q_rope) . latent,  out = W_v (softmax(scores) @ c)

Naive makes keys and values of every token once a step, absorbed makes longer queries instead: it is for few queries over many keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tradewind.kernels.reference import rms_norm


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Turns the neighbours (2i, 2i + 1) of the last axis; angles [T, R] = cos half, then sin half; x [T, R] or [T, H, R]."""
    cosine, sine = angles.chunk(2, -1)
    if x.dim() == 3:
        cosine, sine = cosine[:, None], sine[:, None]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack([first * cosine - second * sine, second * cosine + first * sine], -1).flatten(-2)


def latent(x: Tensor, angles: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """What is kept of tokens: x [T, C + R] -> the first C numbers normed, the last R turned."""
    rank = len(weight)
    return torch.cat([rms_norm(x[:, :rank], weight, eps=eps), rotate_pairs(x[:, rank:], angles)], -1)


def turned(q: Tensor, angles: Tensor, *, heads: int) -> Tensor:
    """q [T, H * (N + R)] with the last R dims of each head turned."""
    each = q.unflatten(-1, (heads, -1))
    nope = each.shape[-1] - angles.shape[-1]
    return torch.cat([each[..., :nope], rotate_pairs(each[..., nope:], angles)], -1).flatten(-2)


def latent_store(
    q: Tensor,
    x: Tensor,
    angles: Tensor,
    write_slots: Tensor,
    pages: Tensor,
    *,
    heads: int,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(q turned, pages with the latents of x stored): q [T, H * (N + R)], x [T, C + R], pages [pages, B, C + R]; changes nothing."""
    stored = pages.clone()
    stored.view(-1, pages.shape[-1])[write_slots.long()] = latent(x, angles, weight, eps=eps).to(pages.dtype)
    return turned(q, angles, heads=heads), stored


def naive(q: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, *, scale: float) -> Tensor:
    """The last tokens of a text: q [n, H, N + R] over latents [L, C + R] -> [n, H, V]; k_up [H, N, C], v_up [H, V, C]."""
    c, k_rope = latents[:, : k_up.shape[-1]], latents[:, k_up.shape[-1] :]
    keys = torch.cat([torch.einsum("lc,hnc->lhn", c, k_up), k_rope[:, None].expand(-1, len(k_up), -1)], -1)
    values = torch.einsum("lc,hvc->lhv", c, v_up)
    return torch.einsum("hql,lhv->qhv", weights(torch.einsum("qhd,lhd->hql", q, keys) * scale), values)


def absorbed(q: Tensor, latents: Tensor, k_up: Tensor, v_up: Tensor, *, scale: float) -> Tensor:
    """The same numbers as `naive`, up to rounding, without keys and values."""
    nope, rank = k_up.shape[1:]
    longer = torch.cat([torch.einsum("qhn,hnc->qhc", q[..., :nope], k_up), q[..., nope:]], -1)
    scores = torch.einsum("qhc,lc->hql", longer, latents) * scale
    mixed = torch.einsum("hql,lc->qhc", weights(scores), latents[:, :rank])
    return torch.einsum("qhc,hvc->qhv", mixed, v_up)


def weights(scores: Tensor) -> Tensor:
    """Causal softmax: scores [H, n, L] of the last n of L tokens."""
    n, length = scores.shape[-2:]
    sight = torch.ones(n, length, dtype=torch.bool).tril(length - n)
    return scores.masked_fill(~sight, -torch.inf).softmax(-1)


def naive_is_cheaper(tokens: int, length: int, *, rank: int, rope: int, nope: int, value: int) -> bool:
    """Whether the naive form multiplies less for the last `tokens` of `length`; per head, multiplications:

    naive      length * C (N + V)  to make keys and values    pairs * (N + R + V)
    absorbed   tokens * C (N + V)  at both ends of a query    pairs * (C + R + C)         pairs: of a query and a key it sees
    """
    pairs = tokens * length - tokens * (tokens - 1) // 2
    return (length - tokens) * rank * (nope + value) < pairs * ((2 * rank + rope) - (nope + rope + value))


def latent_attention(
    q: Tensor,
    pages: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    k_up: Tensor,
    v_up: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Rows of any length over pages of latents, each in the cheaper form: q [T, H * (N + R)], pages [pages, B, C + R] -> [T, H * V]."""
    heads, nope, rank = k_up.shape
    value, rope, size = v_up.shape[1], pages.shape[-1] - rank, pages.shape[1]
    out = torch.zeros(len(q), heads * value)
    for row, length in enumerate(lengths.tolist()):
        begin, end = query_start[row : row + 2].tolist()
        used = page_table[row, : -(-length // size)].long()
        latents = pages[used].flatten(0, 1)[:length].float()
        cheap = naive_is_cheaper(end - begin, length, rank=rank, rope=rope, nope=nope, value=value)
        form = naive if cheap else absorbed
        mine = q[begin:end].unflatten(-1, (heads, -1))
        out[begin:end] = form(mine, latents, k_up, v_up, scale=scale).flatten(-2)
    return out
