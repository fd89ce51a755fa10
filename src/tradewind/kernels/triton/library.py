"""What torch's library computes for the op set "cuda": large matmuls, and angles once per engine.

Knows: which call of the library serves which types. Refuses to know: who wants it. All write to `out` and are safe in a graph capture.
On a CPU (Triton's interpreter, for tests) the same functions are plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def rope_angles(positions: Tensor, inv_freq: Tensor, *, scale: float, out: Tensor, angle: Tensor) -> None:
    """out [T, D] = scale * (cos | sin) of positions [T] * inv_freq [D / 2]; angle [T, D / 2] is scratch."""
    half = len(inv_freq)
    angle.copy_(positions[:, None].expand(-1, half))
    angle.mul_(inv_freq)
    torch.cos(angle, out=out[:, :half])
    torch.sin(angle, out=out[:, half:])
    if scale != 1.0:
        out.mul_(scale)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor) -> None:
    """out = x @ weight.T + bias by the library; x, weight, bias bf16, out bf16 or float32."""
    if x.device.type != "cuda":
        value = x.float() @ weight.float().T
        out.copy_(value if bias is None else value + bias.float())
    elif bias is not None:
        torch.addmm(bias, x, weight.T, out=out)
    elif out.dtype == torch.float32:
        torch.mm(x, weight.T, out_dtype=torch.float32, out=out)
    else:
        torch.mm(x, weight.T, out=out)


def scaled_matmul(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, *, out: Tensor) -> None:
    """out = (x_scale x) @ (scale weight).T by the library; x and weight e4m3, a scale per row of each, out bf16."""
    if x.device.type != "cuda":
        out.copy_((x.float() * x_scale[:, None]) @ (weight.float() * scale[:, None]).T)
    else:
        torch._scaled_mm(
            x, weight.T, x_scale[:, None], scale[None, :], out_dtype=torch.bfloat16, use_fast_accum=True, out=out
        )


def wake(weight: Tensor, scale: Tensor | None, dtype: torch.dtype, sizes: Sequence[int]) -> None:
    """Multiplies zeros by a matrix [N, K] (with its scales, or None) into `dtype` for `sizes` rows: the library loads a kernel when it is
    first used, which takes as long as some steps. Changes nothing; waits for the device, and its memory goes back.
    """
    n, k = weight.shape
    most = max(sizes, default=0)
    x = torch.zeros(most, k, dtype=weight.dtype, device=weight.device)
    one = torch.ones(most, dtype=torch.float32, device=weight.device)
    out = torch.empty(most, n, dtype=dtype, device=weight.device)
    for rows in sizes:
        if scale is None:
            matmul(x[:rows], weight, out=out[:rows])
        else:
            scaled_matmul(x[:rows], one[:rows], weight, scale, out=out[:rows])
    if weight.is_cuda:
        torch.cuda.synchronize()
        del x, one, out
        torch.cuda.empty_cache()


def copy(source: Tensor, *, out: Tensor) -> None:
    """out = source in out's type."""
    out.copy_(source)


def fresh_attention(
    q: Tensor,
    qkv: Tensor,
    query_start: Tensor,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    softcap: float | None,
    begun: Tensor | None = None,
    out: Tensor,
) -> None:
    """out [T, H D] = causal attention of every row over its own tokens in this step, by FlashAttention 3 (package fa3-fwd).

    q [T, H D]; k and v are the middle and last part of qkv [T, (H + 2G) D], k rotated; query_start int32 [R + 1]. begun int32 [R]: rows
    with 0 there are left alone, the others have their count of tokens; without it, a row with earlier keys gets a wrong answer, which its
    own kernel must overwrite.
    """
    tokens, dim = len(q), q.shape[1] // heads
    parts = qkv.view(tokens, heads + 2 * kv_heads, dim)
    k, v = parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]
    if q.device.type != "cuda":
        _fresh_in_torch(
            q.view(tokens, heads, dim), k, v, query_start, scale=scale, softcap=softcap, begun=begun, out=out
        )
        return
    import fa3_fwd._C  # noqa: F401 - brings torch.ops.fa3_fwd

    torch.ops.fa3_fwd.fwd(
        q.view(tokens, heads, dim), k, v, out=out.view(tokens, heads, dim), cu_seqlens_q=query_start, cu_seqlens_k=query_start,
        seqused_q=begun,
        max_seqlen_q=tokens, max_seqlen_k=tokens, softmax_scale=scale, is_causal=True, softcap=softcap or 0.0, num_splits=1,
    )  # fmt: skip


def serves_latents(key: int, value: int) -> bool:
    """Whether FlashAttention 3 was built for heads whose keys and values have these sizes."""
    return (key, value) == (192, 128)


def fresh_latents(
    q: Tensor,
    kv: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    *,
    heads: int,
    value: int,
    scale: float,
    used: Tensor | None = None,
    out: Tensor,
) -> None:
    """Causal attention over keys and values that were made of latents: q [T, H D], kv [K, H, D + V] keys, then values, out [T, H V].

    Row r has tokens query_start[r] .. and keys key_start[r] .. (int32 [R + 1]), the last of which are its tokens' own. used int32 [R]: rows
    with 0 there are left alone, others have their count of tokens; without it rows without keys get a wrong answer.
    """
    tokens, dim = len(q), q.shape[1] // heads
    queries, k, v = q.view(tokens, heads, dim), kv[:, :, :dim], kv[:, :, dim:]
    if q.device.type != "cuda":
        _made_in_torch(queries, k, v, query_start.tolist(), key_start.tolist(), scale=scale, out=out)
        return
    import fa3_fwd._C  # noqa: F401 - brings torch.ops.fa3_fwd

    torch.ops.fa3_fwd.fwd(
        queries, k, v, out=out.view(tokens, heads, value), cu_seqlens_q=query_start, cu_seqlens_k=key_start, seqused_q=used,
        max_seqlen_q=tokens, max_seqlen_k=len(kv), softmax_scale=scale, is_causal=True, num_splits=1,
    )  # fmt: skip


def _made_in_torch(
    q: Tensor, k: Tensor, v: Tensor, starts: list[int], keys: list[int], *, scale: float, out: Tensor
) -> None:
    """The same row by row, for the interpreter's tests."""
    for (first, end), (key, stop) in zip(pairwise(starts), pairwise(keys), strict=True):
        if stop > key:
            score = torch.einsum("qhd,khd->hqk", q[first:end].float(), k[key:stop].float()) * scale
            future = torch.ones(end - first, stop - key, dtype=torch.bool).triu(1 + stop - key - (end - first))
            weight = score.masked_fill(future, float("-inf")).softmax(-1)
            out[first:end] = torch.einsum("hqk,khd->qhd", weight, v[key:stop].float()).flatten(1).to(out.dtype)


def _fresh_in_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    *,
    scale: float,
    softcap: float | None,
    begun: Tensor | None,
    out: Tensor,
) -> None:
    """The same row by row, for the interpreter's tests."""
    start = query_start.tolist()
    wanted = [end - first for first, end in pairwise(start)] if begun is None else begun.tolist()
    for (first, end), tokens in zip(pairwise(start), wanted, strict=True):
        assert tokens in (0, end - first), f"{tokens} of a row's {end - first} tokens"
        if tokens == 0:
            continue
        repeat = q.shape[1] // k.shape[1]
        keys, values = (part[first:end].float().repeat_interleave(repeat, 1) for part in (k, v))
        score = torch.einsum("qhd,khd->hqk", q[first:end].float(), keys) * scale
        score = score if softcap is None else softcap * torch.tanh(score / softcap)
        future = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
        weight = score.masked_fill(future, float("-inf")).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weight, values).flatten(1).to(out.dtype)
