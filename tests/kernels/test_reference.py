"""The reference functions against independent statements of the same thing: torch's own functions, loops, published numbers."""

from __future__ import annotations

import math
import subprocess
import sys
from inspect import getmembers, isfunction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tradewind.kernels import reference
from tradewind.kernels.ops import AdapterOps, AxesOps, ExpertOps, LatentOps, Ops
from tradewind.kernels.table import OPS, reference_of

NO_COMPUTE = {"constant", "empty", "host", "kv_layer", "latent_layer", "low_rank_bank", "row_table", "set_low_rank"}
"""Methods that only make or fill memory; those named pack_* are the other ones."""
PROTOCOLS = (Ops, ExpertOps, LatentOps, AdapterOps, AxesOps)


# --------------------------------------------------------------------------------------------------------- the op table


def test_every_op_has_a_row_and_a_reference() -> None:
    methods = {
        name for protocol in PROTOCOLS for name, _ in getmembers(protocol, isfunction) if not name.startswith("_")
    }
    compute = {name for name in methods if not name.startswith("pack_")} - NO_COMPUTE
    assert compute == set(OPS)
    assert list(OPS) == sorted(OPS)
    for name in OPS:
        assert callable(reference_of(name))


def test_reading_the_table_imports_no_torch() -> None:
    code = "import sys, tradewind.kernels.table; assert not {'torch', 'tradewind.kernels.reference'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# -------------------------------------------------------------------------------------------------- norms and matmuls


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_norm_is_torchs_and_adds_first() -> None:
    x, delta, weight = random(5, 48), random(5, 48, seed=1), random(48, seed=2)
    added, normed = reference.add_rms_norm(x, delta, weight, eps=1e-5)
    torch.testing.assert_close(added, x + delta)
    torch.testing.assert_close(normed, F.rms_norm(x + delta, (48,), weight, eps=1e-5))
    assert reference.add_rms_norm(x, None, weight, eps=1e-5)[0] is x


@pytest.mark.parametrize(
    ("activation", "function"), [("silu", F.silu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))]
)
def test_gated_linear(activation: str, function: object) -> None:
    x, gate, up, bias = random(4, 32), random(24, 32, seed=1), random(24, 32, seed=2), random(48, seed=3)
    wanted = function(F.linear(x, gate, bias[:24])) * F.linear(x, up, bias[24:])  # type: ignore[operator]
    torch.testing.assert_close(reference.gated_linear(x, gate, up, activation=activation, bias=bias), wanted)


def test_rounded_activations_are_whole_steps_of_a_group() -> None:
    x = random(3, 96)
    rounded = reference.round_activations(x)
    for row in range(3):
        for group in range(3):
            own = x[row, 32 * group : 32 * group + 32]
            step = own.abs().max() / 127
            wanted = torch.tensor([round(float(value / step)) for value in own]) * step
            torch.testing.assert_close(rounded[row, 32 * group : 32 * group + 32], wanted)
    assert not reference.round_activations(torch.zeros(1, 32)).any()
    assert reference.round_activations(torch.full((1, 32), math.inf)).isnan().all()


def test_rounded_weights_are_whole_steps_of_a_half() -> None:
    w = random(3, 64)
    w[1, :32] = 0
    rounded = reference.round_weights(w).reshape(3, 2, 32)
    step = (w.reshape(3, 2, 32).abs().amax(-1, keepdim=True) / 127).half().double()
    quants = torch.where(step > 0, rounded / step, torch.zeros_like(rounded))
    torch.testing.assert_close(quants, quants.round())
    assert quants.abs().max() == 127
    assert ((rounded - w.reshape(3, 2, 32)).abs() <= 0.51 * step).all()


# -------------------------------------------------------------------------------------------------- rope and attention


def test_rotation_depends_on_distance_only() -> None:
    q, k = random(1, 1, 16), random(1, 1, 16, seed=1)
    inv_freq = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)

    def dot(at_q: int, at_k: int) -> float:
        turned = [
            reference.rotate(x, reference.rope_angles(torch.tensor([at]), inv_freq, scale=1.0))
            for x, at in ((q, at_q), (k, at_k))
        ]
        return float((turned[0] * turned[1]).sum())

    assert dot(7, 3) == pytest.approx(dot(104, 100), abs=1e-9)
    assert dot(5, 5) == pytest.approx(float((q * k).sum()), abs=1e-9)
    assert dot(7, 3) != pytest.approx(dot(3, 7), abs=1e-3)


def test_rotation_of_part_of_a_head_leaves_the_rest() -> None:
    x = random(2, 3, 16)
    angles = reference.rope_angles(torch.tensor([1, 2]), random(4, seed=1), scale=1.0)
    turned = reference.rotate(x, angles)
    torch.testing.assert_close(turned[..., 8:], x[..., 8:])
    torch.testing.assert_close(turned[..., :8].square().sum(-1), x[..., :8].square().sum(-1))


HEADS, KV_HEADS, DIM, PAGE = 6, 2, 16, 8


def paged_case(lengths: list[int], counts: list[int]) -> tuple[torch.Tensor, ...]:
    """Random q, pages in shuffled order, and the tables that find them."""
    pages_per_row = -(-max(lengths) // PAGE)
    total = 1 + len(lengths) * pages_per_row
    order = torch.randperm(total - 1, generator=torch.Generator().manual_seed(5)) + 1
    table = order[: len(lengths) * pages_per_row].reshape(len(lengths), pages_per_row).int()
    start = torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32)
    q = random(sum(counts), HEADS * DIM)
    k, v = random(total, PAGE, KV_HEADS, DIM, seed=1), random(total, PAGE, KV_HEADS, DIM, seed=2)
    return q, k, v, start, torch.tensor(lengths, dtype=torch.int32), table


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 8, 100])
def test_attention_is_torchs_on_gathered_keys(window: int | None, chunked: bool) -> None:
    chunked &= window is not None
    lengths, counts = [1, 20, 33, 16], [1, 20, 1, 7]
    q, k, v, start, length, table = paged_case(lengths, counts)
    out = reference.attention(q, k, v, start, length, table, heads=HEADS, scale=0.3, window=window, chunked=chunked)
    for row, (n, m) in enumerate(zip(lengths, counts, strict=True)):
        keys, values = (pages[table[row].long()].flatten(0, 1)[:n].transpose(0, 1) for pages in (k, v))
        query = q[start[row] : start[row + 1]].reshape(m, HEADS, DIM).transpose(0, 1)
        seen = torch.zeros(m, n, dtype=torch.bool)
        for i in range(m):
            position = n - m + i
            first = position // (window or n) * (window or n) if chunked else max(0, position - (window or n) + 1)
            seen[i, first : position + 1] = True
        wanted = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=seen, scale=0.3, enable_gqa=True
        )[0]
        got = out[start[row] : start[row + 1]].reshape(m, HEADS, DIM).transpose(0, 1)
        torch.testing.assert_close(got, wanted)


def test_dropped_pages_do_not_matter() -> None:
    q, k, v, start, length, table = paged_case([40], [3])
    wanted = reference.attention(q, k, v, start, length, table, heads=HEADS, scale=0.3, window=10)
    table[0, :3] = 0  # positions 0 .. 23; the first query, at 37, sees 28 .. 37
    k[0], v[0] = math.nan, math.nan
    got = reference.attention(q, k, v, start, length, table, heads=HEADS, scale=0.3, window=10)
    torch.testing.assert_close(got, wanted)


def test_dropped_pages_of_older_chunks_do_not_matter() -> None:
    """Chunks of 10 over pages of 8: a page that two chunks share stays."""
    q, k, v, start, length, table = paged_case([40], [3])
    wanted = reference.attention(q, k, v, start, length, table, heads=HEADS, scale=0.3, window=10, chunked=True)
    table[0, :3] = 0  # positions 0 .. 23; the queries, at 37 .. 39, see from 30 on
    k[0], v[0] = math.nan, math.nan
    got = reference.attention(q, k, v, start, length, table, heads=HEADS, scale=0.3, window=10, chunked=True)
    torch.testing.assert_close(got, wanted)


def test_softcap_and_sinks_by_hand() -> None:
    q, k, v, start, length, table = paged_case([5], [1])
    sinks = random(HEADS, seed=9)
    out = reference.attention(q, k, v, start, length, table, heads=HEADS, scale=0.3, softcap=2.0, sinks=sinks)
    for head in range(HEADS):
        keys, values = (pages[table[0, 0].long()][:5, head // (HEADS // KV_HEADS)] for pages in (k, v))
        score = 2.0 * torch.tanh(0.3 * keys @ q[0, head * DIM : head * DIM + DIM] / 2.0)
        weight = score.exp() / (score.exp().sum() + sinks[head].exp())
        torch.testing.assert_close(out[0, head * DIM : head * DIM + DIM], weight @ values)


def test_rope_store_writes_where_attention_reads() -> None:
    qkv = random(3, (HEADS + 2 * KV_HEADS) * DIM)
    angles = reference.rope_angles(torch.arange(3), random(DIM // 2, seed=1), scale=1.0)
    empty = torch.zeros(4, PAGE, KV_HEADS, DIM, dtype=torch.float64)
    slots = torch.tensor([2 * PAGE + 7, 3 * PAGE, 1 * PAGE + 3])
    weight = random(DIM, seed=2)
    q, k, v = reference.rope_store(
        qkv, angles, slots, empty, empty, heads=HEADS, q_weight=weight, k_weight=weight, eps=1e-6
    )
    assert not empty.any()
    heads = qkv.reshape(3, -1, DIM)
    normed = reference.rotate(F.rms_norm(heads, (DIM,), weight, eps=1e-6), angles)
    torch.testing.assert_close(q.reshape(3, HEADS, DIM), normed[:, :HEADS])
    torch.testing.assert_close(k[[2, 3, 1], [7, 0, 3]], normed[:, HEADS : HEADS + KV_HEADS])
    torch.testing.assert_close(v[[2, 3, 1], [7, 0, 3]], heads[:, HEADS + KV_HEADS :])
    assert int((v != 0).any(-1).any(-1).sum()) == 3


def test_pages_are_copied_as_they_were() -> None:
    pages = random(4, 2)
    copied = reference.copy_pages(pages, torch.tensor([1, 2]), torch.tensor([2, 3]))
    torch.testing.assert_close(copied, pages[[0, 1, 1, 2]])


# ------------------------------------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize(
    ("counter", "key", "wanted"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], wanted: tuple[int, ...]
) -> None:
    assert reference.philox(counter, key) == wanted


def test_uniform_is_uniform_and_keyed() -> None:
    draws = np.array([reference.uniform(seed, position) for seed in range(40) for position in range(50)])
    assert len(set(draws.tolist())) == len(draws)
    assert ((draws > 0) & (draws <= 1)).all()
    counts, _ = np.histogram(draws, bins=20, range=(0, 1))
    assert ((counts - 100) ** 2 / 100).sum() < 43.8  # chi-square, 19 degrees of freedom, 1 in 1000
    assert reference.uniform(1 << 40, 5) != reference.uniform(0, 5)
    assert reference.uniform(0, 1 << 40) != reference.uniform(0, 0)


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.5, -math.inf, 0.3])
    count = 4000
    drawn = [reference.sample(logits, temperature=0.7, seed=11, position=p) for p in range(count)]
    wanted = (logits.double() / 0.7).softmax(0).numpy() * count
    got = np.bincount(drawn, minlength=6)
    assert got[4] == 0
    live = wanted > 0
    assert ((got - wanted)[live] ** 2 / wanted[live]).sum() < 18.5  # 4 degrees of freedom, 1 in 1000


def test_temperature_zero_is_the_first_of_the_best() -> None:
    assert reference.sample(torch.tensor([0.0, 3.0, 1.0, 3.0]), temperature=0.0) == 1


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [-math.inf, -math.inf], [math.nan, math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_meaning_draws_nothing(bad: list[float], temperature: float) -> None:
    assert reference.sample(torch.tensor(bad), temperature=temperature) == -1


@given(
    scores=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 2.0]), min_size=1, max_size=12),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
)
def test_kept_tokens_by_brute_force(scores: list[float], top_k: int, top_p: float, min_p: float) -> None:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if top_k:
        order = order[:top_k]
    total = sum(math.exp(scores[i]) for i in order)
    probability = {i: math.exp(scores[i]) / total for i in order}
    head: list[int] = []
    for i in order:
        if head and sum(probability[j] for j in head) >= top_p - 1e-12:
            break
        head.append(i)
    kept = {i for i in head if probability[i] >= min_p * probability[order[0]] - 1e-12}
    got = reference.kept_probabilities(torch.tensor(scores).double(), top_k=top_k, top_p=top_p, min_p=min_p)
    # At a border that falls on a sum exactly, either answer is right.
    border = any(abs(sum(probability[j] for j in order[:n]) - top_p) < 1e-9 for n in range(1, len(order)))
    assert {i for i in range(len(scores)) if got[i] > 0} == kept or border
    for i in kept:
        assert border or float(got[i]) == pytest.approx(probability[i])


def test_penalties_by_hand() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5])
    history = torch.tensor([0, 1, 2, 2], dtype=torch.int32)  # two of prompt, then 2 twice
    got = reference.steered(
        logits, repetition=2.0, presence=0.25, frequency=0.125, history=history, history_prompt=2, bias={3: 1.0}
    )
    torch.testing.assert_close(got, torch.tensor([1.0, -4.0, 0.5 - 0.25 - 2 * 0.125, 1.5]))
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.5]


def test_mask_and_ban() -> None:
    logits = torch.tensor([5.0, 4.0, 3.0])
    allowed = torch.tensor([False, True, True])
    assert reference.sample(logits, temperature=0.0, allowed=allowed) == 1
    assert reference.sample(logits, temperature=0.0, allowed=allowed, bias={1: -math.inf}) == 2
    assert reference.sample(logits, temperature=0.0, allowed=torch.zeros(3, dtype=torch.bool)) == -1


def test_logprobs_rank_and_order() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0, 1.0]])
    for token, rank in [(1, 1), (2, 2), (4, 3), (0, 4), (3, 5)]:
        value, got, ids, top = reference.logprobs(logits, torch.tensor([token]), top=3)
        assert int(got) == rank
        assert float(value) == pytest.approx(float(logits.log_softmax(-1)[0, token]))
        assert ids.tolist() == [[1, 2, 4]]
        torch.testing.assert_close(top, logits.log_softmax(-1)[:, [1, 2, 4]])
