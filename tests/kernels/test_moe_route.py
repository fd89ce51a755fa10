"""route: the reference against the published formulas, plain and C++ against the reference; always valid experts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.cpu_support import count, cpu_ops, error, floats
from tradewind.kernels import reference_moe
from tradewind.kernels.ops import Routing
from tradewind.kernels.plain import PlainOps
from tradewind.kernels.table import OPS

ROUTINGS: dict[str, tuple[int, Routing, bool]] = {
    "mixtral": (8, Routing(top_k=2), False),
    "qwen2_moe": (60, Routing(top_k=4, normalise=False), False),
    "qwen3_moe": (128, Routing(top_k=8), False),
    "one expert": (1, Routing(top_k=1), False),
    "all experts": (6, Routing(top_k=6, normalise=False, scale=2.0), False),
    "deepseek_v2": (32, Routing(top_k=6, normalise=False, scale=16.0, groups=8, groups_kept=3), False),
    "deepseek_v3": (
        64,
        Routing(top_k=8, score="sigmoid", scale=2.5, groups=8, groups_kept=4, group_top=2),
        True,
    ),
    "groups of one": (8, Routing(top_k=3, score="sigmoid", groups=8, groups_kept=3, group_top=2), True),
}
"""Name -> experts, routing, whether there is a correction bias."""

cases = pytest.mark.parametrize("case", ROUTINGS)


def routed(ops: Any, logits: Any, routing: Routing, bias: Any, *, live: int | None = None) -> tuple[Any, Any]:
    ids = np.full((len(logits), routing.top_k), -9, np.int32)
    weights = np.full((len(logits), routing.top_k), -9, np.float32)
    ops.route(logits, routing, bias=bias, ids=ids, weights=weights, count=count(len(logits) if live is None else live))
    return ids, weights


def by_hand(logits: Any, routing: Routing, bias: Any) -> tuple[list[list[int]], Any]:
    """The same in float64 and plain Python."""
    all_ids, all_weights = [], []
    for row in logits.astype(np.float64):
        score = (
            1 / (1 + np.exp(-row))
            if routing.score == "sigmoid"
            else np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        )
        deciding = score + (0 if bias is None else bias)
        size = len(row) // routing.groups
        groups = [deciding[g * size : (g + 1) * size] for g in range(routing.groups)]
        worth = [sum(sorted(group)[::-1][: routing.group_top]) for group in groups]
        kept = sorted(range(routing.groups), key=lambda g: -worth[g])[: routing.groups_kept]
        candidates = [e for e in range(len(row)) if e // size in kept]
        ids = sorted(candidates, key=lambda e: -deciding[e])[: routing.top_k]
        weights = score[ids]
        all_ids.append(ids)
        all_weights.append((weights / weights.sum() if routing.normalise else weights) * routing.scale)
    return all_ids, np.array(all_weights)


@cases
def test_reference_by_hand(case: str) -> None:
    experts, routing, corrected = ROUTINGS[case]
    rng = np.random.default_rng(0)
    logits = floats(rng, 40, experts, scale=2)
    bias = floats(rng, experts, scale=0.3) if corrected else None
    ids, weights = reference_moe.route(
        torch.from_numpy(logits).double(), routing, bias=None if bias is None else torch.from_numpy(bias).double()
    )
    wanted_ids, wanted_weights = by_hand(logits, routing, bias)
    assert ids.tolist() == wanted_ids
    assert error(weights, wanted_weights) < 1e-12
    if routing.normalise:
        assert np.allclose(weights.sum(-1), routing.scale)


def test_reference_is_mixtrals_and_qwens() -> None:
    """The routers of `transformers` give the same experts and weights."""
    from transformers import MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    x = torch.randn(30, 16, generator=torch.Generator().manual_seed(0))
    for router, routing in (
        (MixtralTopKRouter(MixtralConfig(hidden_size=16, num_local_experts=6)), Routing(top_k=2)),
        (
            Qwen2MoeTopKRouter(Qwen2MoeConfig(hidden_size=16, num_experts=9, num_experts_per_tok=3)),
            Routing(top_k=3, normalise=False),
        ),
        (
            Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=16, num_experts=12, norm_topk_prob=True)),
            Routing(top_k=8),
        ),
    ):
        torch.nn.init.normal_(router.weight)
        with torch.no_grad():
            logits, wanted, wanted_ids = router(x)
        ids, weights = reference_moe.route(logits, routing)
        assert torch.equal(ids.long(), wanted_ids)
        torch.testing.assert_close(weights, wanted)


@cases
@pytest.mark.parametrize("name", ["cpu", "plain"])
def test_op_sets_match_the_reference(case: str, name: str) -> None:
    experts, routing, corrected = ROUTINGS[case]
    rng = np.random.default_rng(1)
    logits = floats(rng, 50, experts, scale=2)
    bias = floats(rng, experts, scale=0.3) if corrected else None
    wanted_ids, wanted = reference_moe.route(
        torch.from_numpy(logits), routing, bias=None if bias is None else torch.from_numpy(bias)
    )
    for threads, live in ((1, 50), (3, 50), (2, 7), (2, 0)):
        with cpu_ops(threads=threads) as cpu:
            ids, weights = routed(cpu if name == "cpu" else PlainOps(), logits, routing, bias, live=live)
        assert (ids[:live] == wanted_ids.numpy()[:live]).all()
        assert error(weights[:live], wanted[:live]) < OPS["route"].tolerance
        assert (ids[live:] == -9).all()
        assert (weights[live:] == -9).all()


@pytest.mark.parametrize("name", ["cpu", "plain"])
def test_equal_scores_go_to_the_lower_id(name: str) -> None:
    logits = np.zeros((2, 12), np.float32)
    logits[1, [3, 7, 11]] = 1
    with cpu_ops() as cpu:
        ids, weights = routed(cpu if name == "cpu" else PlainOps(), logits, Routing(top_k=4), None)
    assert ids.tolist() == [[0, 1, 2, 3], [3, 7, 11, 0]]
    assert np.allclose(weights[0], 0.25)


@cases
@pytest.mark.parametrize("name", ["cpu", "plain"])
def test_routers_of_zero_send_every_token_to_the_same_experts(case: str, name: str) -> None:
    """What load format dummy-one-route rests on."""
    experts, routing, corrected = ROUTINGS[case]
    bias = np.zeros(experts, np.float32) if corrected else None
    with cpu_ops(threads=3) as cpu:
        ids, weights = routed(cpu if name == "cpu" else PlainOps(), np.zeros((40, experts), np.float32), routing, bias)
    assert (ids == np.arange(routing.top_k)).all(), "the first, in the first groups"
    assert np.unique(weights).size == 1 and (weights > 0).all()


def test_flat_weights_tie_in_bf16_and_not_in_float32() -> None:
    """Why a peer that takes a router's softmax in bf16 had one route under dummy weights, and we, in float32, have not: V2-Lite's shape."""
    source = torch.Generator().manual_seed(0)
    experts, hidden, routing = 64, 2048, Routing(top_k=6, normalise=False)

    def flat(*shape: int) -> torch.Tensor:
        return torch.empty(shape).uniform_(-1e-3, 1e-3, generator=source)

    x = flat(50, hidden)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * flat(hidden)
    logits = x @ flat(experts, hidden).T
    assert 1e-6 < logits.std() < 1e-4
    scores = logits.bfloat16().softmax(-1)
    assert scores.unique().tolist() == [2**-6]
    assert (reference_moe.best(scores, 6) == torch.arange(6)).all()
    precise = logits.softmax(-1)
    assert min(len(row.unique()) for row in precise) > experts // 2
    assert len(reference_moe.route(logits, routing)[0].unique()) > experts // 2, "tokens go to experts of their own"


@cases
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -200.0])
def test_experts_are_valid_whatever_the_logits(case: str, value: float) -> None:
    """A broken row must not send a thread to memory that is no expert, nor spoil its neighbours."""
    experts, routing, corrected = ROUTINGS[case]
    rng = np.random.default_rng(2)
    logits = floats(rng, 5, experts)
    bias = floats(rng, experts) if corrected else None
    with cpu_ops() as ops:
        sane = routed(ops, logits, routing, bias)
        logits[1, 0] = logits[3] = value
        ids, weights = routed(ops, logits, routing, bias)
    assert ((ids >= 0) & (ids < experts)).all()
    assert all(len(set(row)) == routing.top_k for row in ids.tolist())
    for row in (0, 2, 4):
        assert (ids[row] == sane[0][row]).all()
        assert weights[row].tobytes() == sane[1][row].tobytes()
