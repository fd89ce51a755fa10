"""The truth about mixtures of experts: route, dispatch, experts, combine, as pure functions of torch tensors.

Knows: which experts a token is sent to, how a batch is sorted by expert, what comes back. Refuses to know: speed, packed weights, where
routers' logits come from. As in kernels/reference.py, whose sibling this is. No token is ever dropped: an expert takes all that are sent.

    logits [T, X] -> route -> ids, weights [T, K]
    ids -> dispatch -> order [T K], start [X + 1]        pair t K + k is "token t at its k-th expert"

        order    pairs of expert 0 | pairs of expert 1 | (expert 2: none) | pairs of expert 3 ...
        start    ^0                ^2                  ^5                 ^5              ... T K

    x[order / K] -> experts -> y [T K, E] -> combine -> out [T, E]

Shape letters: X experts, K experts of a token; the others as in kernels/ops.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tradewind.kernels.ops import Routing
from tradewind.kernels.reference import gated_linear, linear

SMALLEST_SUM = 1e-20
"""Added to the sum that weights are divided by: sigmoid scores may all be 0 in float32."""


def route(logits: Tensor, routing: Routing, *, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights: logits [T, X], bias [X] -> ids int32 [T, K], weights [T, K].

    Sorted by what decides, the lower id first among equals. Sources: Shazeer et al. 2017 (top-k); DeepSeek-V2 (groups); DeepSeek-V3
    (sigmoid, and a bias that decides but does not weigh).
    """
    scores = logits.softmax(-1) if routing.score == "softmax" else torch.sigmoid(logits)
    deciding = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = deciding.unflatten(-1, (routing.groups, -1))
        group_scores = grouped.sort(-1, descending=True).values[..., : routing.group_top].sum(-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(-1, best(group_scores, routing.groups_kept), value=True)
        deciding = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
    ids = best(deciding, routing.top_k)
    weights = scores.gather(-1, ids)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
    return ids.int(), weights * routing.scale


def best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis, downwards, the lower index first among equals."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]


def dispatch(ids: Tensor, *, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs sorted by expert and where each expert's begin: ids [T, K] -> order int64 [T K], start int64 [X + 1].

    Pairs of one expert stay in the order of their tokens.
    """
    flat = ids.flatten().long()
    start = torch.zeros(experts + 1, dtype=torch.long)
    start[1:] = torch.bincount(flat, minlength=experts).cumsum(0)
    return flat.sort(stable=True).indices, start


def combine(y: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """out[t] = sum over k of weights[t, k] * (t's answer from its k-th expert): y [T K, E] in dispatch order, weights [T, K] -> [T, E]."""
    tokens, chosen = weights.shape
    unsorted = torch.empty_like(y)
    unsorted[order] = y
    return (unsorted.view(tokens, chosen, y.shape[-1]) * weights[..., None]).sum(1)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    weigh_input: bool = False,
) -> Tensor:
    """Each token through its experts, weighted and summed: x [T, E], ids and weights [T, K] -> [T, E].

    gate, up [X, F, E]; down [X, E, F]; gate_up_bias [X, 2F] is gate's, then up's; down_bias [X, E] is weighted too.
    weigh_input: what goes into an expert is weighted, and not what comes out of it (Llama 4).
    """
    order, start = dispatch(ids, experts=len(gate))
    rows = x[order // ids.shape[1]]
    if weigh_input:
        rows, weights = rows * weights.flatten()[order, None], torch.ones_like(weights)
    y = torch.empty(len(order), x.shape[1], dtype=x.dtype)
    for expert in range(len(gate)):
        mine = slice(int(start[expert]), int(start[expert + 1]))
        inner = gated_linear(
            rows[mine],
            gate[expert],
            up[expert],
            activation=activation,
            bias=None if gate_up_bias is None else gate_up_bias[expert],
        )
        y[mine] = linear(inner, down[expert], None if down_bias is None else down_bias[expert])
    return combine(y, weights, order)
