"""The batched sampler and the log-probabilities: no sort, no host sync, no random state.

Knows: the order of steps that kernels/reference.py draws (mask, bias, penalties, temperature, top-k, top-p, min-p, draw). Refuses to
know: requests, grammars. A row's result depends on its logits, its values, its seed and its position, never on batch mates or on the
order in which programs finish: what is summed across programs are integers.

    scatter     only rows with penalties or biases: counts of history tokens into a scratch row, biases onto logits
    steer       [block, row]  mask and penalties; block maximum. The last block of a row to arrive: row maximum; greedy rows are done
    narrow      [block, row]  only rows with top-k, then with top-p, three passes each: the range of values that holds the smallest kept
    resolve     [row]         the smallest kept value, and how many of its equals are kept, from the values in that range
    draw        [block, row]  kept mass of each block; the last block of a row to arrive: uniform -> block -> token

A mass is round(2^40 exp((logit - max) / temperature)), an int64; the cumulated masses of a row stay below 2^58. Values are compared through
`ordered`, the bits of a float32 as an integer of the same order.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tradewind.kernels.triton.launch import launch_options, let_next_start, pow2, wait_for_previous

BLOCK = 1024
CANDIDATES = 1024
PROMPT = 1 << 30
"""In the scratch counts: this token occurs in the prompt. Lower bits count generated ones."""


@triton.jit
def ordered(x):
    """float32 -> int32 of the same order; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _scatter_kernel(
    logits_ptr, counts_ptr, history_ptr, history_row_ptr, history_prompt_ptr, history_length_ptr,
    bias_start_ptr, bias_token_ptr, bias_value_ptr, history_stride, V,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, PROMPT: tl.constexpr, HISTORY: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    if HISTORY:
        length = tl.load(history_length_ptr + row)
        prompt = tl.load(history_prompt_ptr + row)
        history = history_ptr + tl.load(history_row_ptr + row).to(tl.int64) * history_stride
        counts = counts_ptr + row.to(tl.int64) * V
        for start in range(tl.program_id(0) * BLOCK, length, SPLITS * BLOCK):
            at = start + i
            token = tl.load(history + at, mask=at < length, other=0)
            tl.atomic_or(counts + token, PROMPT, mask=at < tl.minimum(prompt, length), sem="relaxed")
            tl.atomic_add(counts + token, 1, mask=(at >= prompt) & (at < length), sem="relaxed")
    if BIAS:
        logits = logits_ptr + row.to(tl.int64) * V
        begin = tl.load(bias_start_ptr + row)
        end = tl.load(bias_start_ptr + row + 1)
        for start in range(begin + tl.program_id(0) * BLOCK, end, SPLITS * BLOCK):
            live = start + i < end
            token = tl.load(bias_token_ptr + start + i, mask=live, other=0)
            value = tl.load(bias_value_ptr + start + i, mask=live, other=0.0)
            tl.store(logits + token, tl.load(logits + token, mask=live, other=0.0) + value, mask=live)


@triton.jit
def _steer_kernel(
    logits_ptr, mask_ptr, counts_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, history_length_ptr,
    best_ptr, best_id_ptr, row_max_ptr, arrived_ptr, out_ptr, count_ptr, V, mask_stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_P2: tl.constexpr, PROMPT: tl.constexpr, ALL_GREEDY: tl.constexpr,
    MASK: tl.constexpr, HISTORY: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < V
    at = logits_ptr + row.to(tl.int64) * V + token
    x = tl.load(at, mask=inside, other=float("-inf"))
    if MASK:
        word = tl.load(mask_ptr + row.to(tl.int64) * mask_stride + token // 32, mask=inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
    if HISTORY:
        if tl.load(history_length_ptr + row) > 0:
            place = counts_ptr + row.to(tl.int64) * V + token
            count = tl.load(place, mask=inside, other=0)
            tl.store(place, tl.zeros([BLOCK], tl.int32), mask=inside & (count != 0))
            repetition = tl.load(repetition_ptr + row)
            x = tl.where(count != 0, tl.where(x > 0, x / repetition, x * repetition), x)
            generated = count & (PROMPT - 1)
            flat = tl.where(generated > 0, tl.load(presence_ptr + row), 0.0)
            x = x - flat - tl.load(frequency_ptr + row) * generated.to(tl.float32)
    if MASK or HISTORY:
        tl.store(at, x, mask=inside)
    # A NaN makes the row's maximum infinite, which refuses the row.
    broken = tl.max(((x != x) & inside).to(tl.int32), 0)
    best = tl.max(tl.where(x != x, float("-inf"), x), 0)
    best_id = tl.min(tl.where((x == best) & inside, token, 0x7FFFFFFF), 0)
    best = tl.where(broken != 0, float("inf"), best)
    tl.store(best_ptr + row * BLOCKS + block, best)
    tl.store(best_id_ptr + row * BLOCKS + block, best_id)
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel")
    if before != BLOCKS - 1:
        return
    tl.store(arrived_ptr + row, 0)
    b = tl.arange(0, BLOCKS_P2)
    bests = tl.load(best_ptr + row * BLOCKS + b, mask=b < BLOCKS, other=float("-inf"), cache_modifier=".cg")
    ids = tl.load(best_id_ptr + row * BLOCKS + b, mask=b < BLOCKS, other=0x7FFFFFFF, cache_modifier=".cg")
    best = tl.max(bests, 0)
    finite = (best > float("-inf")) & (best < float("inf"))
    choice = tl.where(finite, tl.min(tl.where(bests == best, ids, 0x7FFFFFFF), 0), -1)
    tl.store(row_max_ptr + row, best)
    if ALL_GREEDY:
        tl.store(out_ptr + row, choice)
    else:
        greedy = (tl.load(temperature_ptr + row) == 0) | (finite == 0)
        tl.store(out_ptr + row, choice, mask=greedy)


@triton.jit
def _rough_mass(x, best, inverse_temperature):
    """Mass as float32 exp gives it: for thresholds, where a relative 1e-7 decides nothing."""
    return (tl.exp((x - best) * inverse_temperature) * 1099511627776.0).to(tl.int64)


@triton.jit
def _amounts(source, n, pivots, best, inverse, BY_MASS: tl.constexpr, CHUNK: tl.constexpr):
    """Of source[0:n]: how many values, and how much mass (0 without BY_MASS), have a key >= each of 8 pivots. int64 [8] each."""
    i = tl.arange(0, CHUNK)
    narrow = pivots.to(tl.int32)  # a key of a finite value plus one fits
    count = tl.zeros([8, CHUNK], tl.int32)
    mass = tl.zeros([8, CHUNK], tl.int64)
    for start in range(0, n, 4 * CHUNK):
        # Four loads before the first use: one program is alone on its multiprocessor and waits for the L2.
        x0 = tl.load(source + start + i, mask=start + i < n, other=float("-inf"))
        x1 = tl.load(source + start + CHUNK + i, mask=start + CHUNK + i < n, other=float("-inf"))
        x2 = tl.load(source + start + 2 * CHUNK + i, mask=start + 2 * CHUNK + i < n, other=float("-inf"))
        x3 = tl.load(source + start + 3 * CHUNK + i, mask=start + 3 * CHUNK + i < n, other=float("-inf"))
        for u in tl.static_range(4):
            if u == 0:
                x = x0
            elif u == 1:
                x = x1
            elif u == 2:
                x = x2
            else:
                x = x3
            live = start + u * CHUNK + i < n
            at_least = (ordered(x)[None, :] >= narrow[:, None]) & live[None, :]
            count += at_least.to(tl.int32)
            if BY_MASS:
                mass += tl.where(at_least, _rough_mass(x, best, inverse)[None, :], 0)
    return tl.sum(count.to(tl.int64), 1), tl.sum(mass, 1)


@triton.jit
def _narrow(pivots, count, amount, target, low, high, count_low, count_high, above):
    """The tightest [low, high) with amount(low) >= target > amount(high) that the pivots show; `above` is amount(high)."""
    enough = amount >= target
    new_low = tl.maximum(tl.max(tl.where(enough, pivots, low), 0), low)
    new_high = tl.minimum(tl.min(tl.where(enough, high, pivots), 0), high)
    count_low = tl.where(new_low > low, tl.min(tl.where(pivots == new_low, count, 9223372036854775807), 0), count_low)
    count_high = tl.where(new_high < high, tl.max(tl.where(pivots == new_high, count, 0), 0), count_high)
    above = tl.where(new_high < high, tl.max(tl.where(pivots == new_high, amount, 0), 0), above)
    return new_low, new_high, count_low, count_high, above


@triton.jit
def _wanted(row, temperature_ptr, top_k_ptr, top_p_ptr, row_max_ptr, V, BY_MASS: tl.constexpr):
    """Whether the row has a top-p (BY_MASS) or a top-k to search for, its maximum, 1 / temperature, k and p."""
    temperature = tl.load(temperature_ptr + row)
    best = tl.load(row_max_ptr + row)
    k = tl.load(top_k_ptr + row)
    p = tl.load(top_p_ptr + row)
    asked = (p < 1.0) if BY_MASS else ((k > 0) & (k < V))
    active = asked & (temperature != 0) & (best < float("inf")) & (best > float("-inf"))
    return active, best, 1.0 / tl.where(temperature == 0, 1.0, temperature), k, p


@triton.jit
def _narrow_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row_max_ptr, state_ptr, sums_ptr, arrived_ptr, count_ptr, V,
    BY_MASS: tl.constexpr, FIRST: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, CANDIDATES: tl.constexpr,
    COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One pass of all multiprocessors over the rows that still have too many candidates: the range shrinks to one of nine parts."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    active, best, inverse, k, p = _wanted(row, temperature_ptr, top_k_ptr, top_p_ptr, row_max_ptr, V, BY_MASS)
    if active == 0:
        return
    e = tl.arange(0, 8)
    state = state_ptr + row * 8
    low = tl.full([], -2147483648, tl.int64)
    high = ordered(best).to(tl.int64) + 1
    count_low = tl.full([], 0, tl.int64) + V
    count_high = tl.full([], 0, tl.int64)
    above = tl.full([], 0, tl.int64)
    target = k.to(tl.int64)
    if FIRST:
        if BY_MASS:
            low = tl.load(state + 6)
            count_low = tl.load(state + 2)
        # Equal steps of probability; for masses the first pivot shows what lies above top-k's cut.
        far = tl.where(e == 0, 24.0, tl.where(e == 1, 16.0, tl.where(e == 2, 11.0, 8.0)))
        near = tl.where(e == 4, 5.5, tl.where(e == 5, 3.5, tl.where(e == 6, 2.0, 0.7)))
        depth = tl.where(e < 4, far, near)
        pivots = tl.maximum(ordered(best - depth / inverse).to(tl.int64), low)
        if BY_MASS:
            pivots = tl.where(e == 0, low + 1, pivots)
    else:
        low = tl.load(state)
        high = tl.load(state + 1)
        count_low = tl.load(state + 2)
        count_high = tl.load(state + 3)
        above = tl.load(state + 4)
        target = tl.load(state + 5)
        if (count_low - count_high <= CANDIDATES) | (high - low <= 1):
            return
        pivots = low + (high - low) * (e + 1).to(tl.int64) // 9
    first = block * 4 * CHUNK
    slice_ptr = logits_ptr + row.to(tl.int64) * V + first
    count, mass = _amounts(slice_ptr, tl.minimum(V - first, 4 * CHUNK), pivots, best, inverse, BY_MASS, CHUNK)
    sums = sums_ptr + row * 16
    tl.atomic_add(sums + e, count, sem="relaxed")
    if BY_MASS:
        tl.atomic_add(sums + 8 + e, mass, sem="relaxed")
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel")
    if before != BLOCKS - 1:
        return
    tl.store(arrived_ptr + row, 0)
    count = tl.load(sums + e, cache_modifier=".cg")
    amount = count
    if BY_MASS:
        amount = tl.load(sums + 8 + e, cache_modifier=".cg")
    tl.debug_barrier()
    tl.store(sums + e, tl.zeros([8], tl.int64))
    tl.store(sums + 8 + e, tl.zeros([8], tl.int64))
    if FIRST and BY_MASS:
        # What top-k keeps: all above its cut and some of those that equal it. Without top-k the cut is below every value.
        whole = tl.max(tl.where(e == 0, amount, 0), 0) + tl.where(
            low > -2147483648, tl.load(state + 7) * _rough_mass(_value(low), best, inverse), 0
        )
        target = tl.maximum((p.to(tl.float64) * whole.to(tl.float64)).to(tl.int64), 1)
    low, high, count_low, count_high, above = _narrow(
        pivots, count, amount, target, low, high, count_low, count_high, above
    )
    tl.store(state, low)
    tl.store(state + 1, high)
    tl.store(state + 2, count_low)
    tl.store(state + 3, count_high)
    tl.store(state + 4, above)
    tl.store(state + 5, target)


@triton.jit
def _resolve_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, row_max_ptr, state_ptr, cut_ptr, ties_ptr, candidates_ptr, filled_ptr, count_ptr, V,
    BY_MASS: tl.constexpr, CHUNK: tl.constexpr, CANDIDATES: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The rest of the search, one program a row: the values left in the range are gathered, and the cut is found among them."""
    let_next_start(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    active, best, inverse, _k, _p = _wanted(row, temperature_ptr, top_k_ptr, top_p_ptr, row_max_ptr, V, BY_MASS)
    state = state_ptr + row * 8
    if not BY_MASS:  # no cut, until one is found
        tl.store(cut_ptr + row, -2147483648)
        tl.store(ties_ptr + row, 0x7FFFFFFF)
        tl.store(state + 6, tl.full([], -2147483648, tl.int64))
        tl.store(state + 7, tl.full([], 0x7FFFFFFF, tl.int64))
    if active == 0:
        if not BY_MASS:
            tl.store(state + 2, tl.full([], 0, tl.int64) + V)
        return
    logits = logits_ptr + row.to(tl.int64) * V
    candidates = candidates_ptr + row.to(tl.int64) * CANDIDATES
    filled = filled_ptr + row
    low = tl.load(state)
    high = tl.load(state + 1)
    count_low = tl.load(state + 2)
    count_high = tl.load(state + 3)
    above = tl.load(state + 4)
    target = tl.load(state + 5)
    e = tl.arange(0, 8)
    i = tl.arange(0, CHUNK)
    while (count_low - count_high > CANDIDATES) & (high - low > 1):  # rare: many nearly equal values
        pivots = low + (high - low) * (e + 1).to(tl.int64) // 9
        count, mass = _amounts(logits, V, pivots, best, inverse, BY_MASS, CHUNK)
        amount = mass if BY_MASS else count
        low, high, count_low, count_high, above = _narrow(
            pivots, count, amount, target, low, high, count_low, count_high, above
        )
    if high - low > 1:
        tl.store(filled, 0)
        tl.debug_barrier()
        for start in range(0, V, 4 * CHUNK):
            for u in tl.static_range(4):
                at = start + u * CHUNK + i
                x = tl.load(logits + at, mask=at < V, other=float("-inf"))
                key = ordered(x).to(tl.int64)
                take = (key >= low) & (key < high) & (at < V)
                place = tl.atomic_add(filled + tl.zeros([CHUNK], tl.int32), 1, mask=take, sem="relaxed")
                tl.store(candidates + place, x, mask=take)
        tl.debug_barrier()
        n = (count_low - count_high).to(tl.int32)
        count_base = count_high
        base = above
        while high - low > 1:
            pivots = low + (high - low) * (e + 1).to(tl.int64) // 9
            count, mass = _amounts(candidates, n, pivots, best, inverse, BY_MASS, CHUNK)
            amount = (mass if BY_MASS else count) + base
            low, high, count_low, count_high, above = _narrow(
                pivots, count + count_base, amount, target, low, high, count_low, count_high, above
            )
    ties = target - above
    if BY_MASS:
        each = tl.maximum(_rough_mass(_value(low), best, inverse), 1)
        ties = tl.maximum((target - above + each - 1) // each, 1)
        # The same cut as top-k's: the fewer of its equals count.
        ties = tl.where(low == tl.load(state + 6), tl.minimum(ties, tl.load(state + 7)), ties)
    else:
        tl.store(state + 2, count_low)
        tl.store(state + 6, low)
        tl.store(state + 7, ties)
    tl.store(cut_ptr + row, low.to(tl.int32))
    tl.store(ties_ptr + row, tl.minimum(ties, 0x7FFFFFFF).to(tl.int32))


@triton.jit
def _value(key):
    """The float32 whose `ordered` is key (an int64); the key of no value gives -inf."""
    bits = key.to(tl.int32)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(bits == -2147483648, float("-inf"), value)


@triton.jit
def _mass(x, best, temperature):
    """round(2^40 exp((x - best) / temperature)) by float64."""
    return (tl.exp((x - best) / temperature) * 1099511627776.0 + 0.5).to(tl.int64)


@triton.jit
def _draw_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, seed_ptr, position_ptr, row_max_ptr, cut_ptr, ties_ptr, mass_ptr, tied_ptr, arrived_ptr,
    out_ptr, count_ptr, V,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_P2: tl.constexpr, CUT: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    temperature = tl.load(temperature_ptr + row).to(tl.float64)
    best32 = tl.load(row_max_ptr + row)
    if (temperature == 0) | (best32 == float("inf")) | (best32 == float("-inf")):
        return
    best = best32.to(tl.float64)
    least = (tl.load(min_p_ptr + row).to(tl.float64) * 1099511627776.0).to(tl.int64)
    cut = -2147483648
    ties = 0x7FFFFFFF
    if CUT:
        cut = tl.load(cut_ptr + row)
        ties = tl.load(ties_ptr + row)
    logits = logits_ptr + row.to(tl.int64) * V
    i = tl.arange(0, BLOCK)
    x = tl.load(logits + block * BLOCK + i, mask=block * BLOCK + i < V, other=float("-inf"))
    key = ordered(x)
    mass = _mass(x.to(tl.float64), best, temperature)
    mass = tl.where(mass >= least, mass, 0)
    tl.store(mass_ptr + row * BLOCKS + block, tl.sum(tl.where(key > cut, mass, 0), 0))
    tl.store(tied_ptr + row * BLOCKS + block, tl.sum(((key == cut) & (block * BLOCK + i < V)).to(tl.int32), 0))
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel")
    if before != BLOCKS - 1:
        return
    tl.store(arrived_ptr + row, 0)

    b = tl.arange(0, BLOCKS_P2)
    masses = tl.load(mass_ptr + row * BLOCKS + b, mask=b < BLOCKS, other=0, cache_modifier=".cg")
    tied = tl.load(tied_ptr + row * BLOCKS + b, mask=b < BLOCKS, other=0, cache_modifier=".cg")
    each = tl.max(_mass(_value(tl.full([1], 0, tl.int64) + cut).to(tl.float64), best, temperature), 0)
    each = tl.where(each >= least, each, 0)
    tied_before = tl.cumsum(tied, 0) - tied
    masses += tl.maximum(tl.minimum(ties - tied_before, tied), 0).to(tl.int64) * each
    cumulated = tl.cumsum(masses, 0)
    total = tl.sum(masses, 0)

    position = tl.load(position_ptr + row)
    c0 = (position & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zero = c0 * 0
    high, low, _, _ = tl.philox(tl.load(seed_ptr + row), c0, c1, zero, zero)
    u = (high.to(tl.float64) * 4294967296.0 + low.to(tl.float64) + 0.5) / 18446744073709551616.0
    target = (u * total.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, total - 1)  # a u that rounds to 1: the last kept token

    chosen = tl.min(tl.where((cumulated > target) & (b < BLOCKS), b, BLOCKS - 1), 0)
    start = tl.sum(tl.where(b == chosen, cumulated - masses, 0), 0)
    ties_left = ties - tl.sum(tl.where(b == chosen, tied_before, 0), 0)
    token = chosen * BLOCK + i
    x = tl.load(logits + token, mask=token < V, other=float("-inf"))
    key = ordered(x)
    mass = _mass(x.to(tl.float64), best, temperature)
    mass = tl.where(mass >= least, mass, 0)
    equal = ((key == cut) & (token < V)).to(tl.int32)
    kept = (key > cut) | ((equal != 0) & (tl.cumsum(equal, 0) - equal < ties_left))
    mass = tl.where(kept, mass, 0)
    reached = start + tl.cumsum(mass, 0)
    tl.store(out_ptr + row, tl.min(tl.where((reached > target) & (mass > 0), token, 0x7FFFFFFF), 0))


@dataclass(frozen=True)
class SampleWorkspace:
    """Buffers of the sampler for at most L rows; `arrived`, `sums` and `counts` are zero between calls. counts: only for penalties."""

    best: Tensor
    best_id: Tensor
    row_max: Tensor
    cut: Tensor
    ties: Tensor
    mass: Tensor
    arrived: Tensor
    candidates: Tensor
    filled: Tensor
    state: Tensor
    sums: Tensor
    counts: Tensor | None

    @staticmethod
    def allocate(rows: int, vocabulary: int, *, device: torch.device | str, penalties: bool) -> SampleWorkspace:
        """Fresh buffers."""
        blocks = triton.cdiv(vocabulary, BLOCK)

        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return SampleWorkspace(
            best=make(rows, blocks, dtype=torch.float32),
            best_id=make(rows, blocks, dtype=torch.int32),
            row_max=make(rows, dtype=torch.float32),
            cut=make(rows, dtype=torch.int32),
            ties=make(rows, dtype=torch.int32),
            mass=make(rows, blocks, dtype=torch.int64),
            arrived=make(rows, dtype=torch.int32),
            candidates=make(rows, CANDIDATES, dtype=torch.float32),
            filled=make(rows, dtype=torch.int32),
            state=make(rows, 8, dtype=torch.int64),
            sums=make(rows, 16, dtype=torch.int64),
            counts=make(rows, vocabulary, dtype=torch.int32) if penalties else None,
        )


@dataclass(frozen=True, kw_only=True)
class DeviceColumns:
    """`SampleColumns` of kernels/ops.py on the device, [L] each; history as a table of int32 rows instead of addresses."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    """int64 bits of the unsigned seed."""
    position: Tensor
    """int64."""
    repetition: Tensor | None = None
    presence: Tensor | None = None
    frequency: Tensor | None = None
    history: Tensor | None = None
    """int32 [slots, C]: token tables."""
    history_row: Tensor | None = None
    """int32 [L]: which of them."""
    history_prompt: Tensor | None = None
    history_length: Tensor | None = None
    """0: no penalties for this row."""
    bias_start: Tensor | None = None
    bias_token: Tensor | None = None
    bias_value: Tensor | None = None
    mask: Tensor | None = None
    """int32 bits [L, ceil(V / 32)], bit set = allowed."""


def sample(
    logits: Tensor,
    columns: DeviceColumns | None,
    *,
    out: Tensor,
    workspace: SampleWorkspace,
    filtered: bool = True,
    count: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """out[i] (int32) = the token drawn for logits row i; -1 when the row has no finite logit or holds a NaN. Changes logits.

    logits float32 [L, V].

    columns None: every row is greedy (one launch; ties go to the lowest id). filtered=False: no row has top-k or top-p (eight launches
    less). What is None in columns is used by no row. count: int32 [1] on the device, live
    rows. Meaning and order: kernels/reference.py:sample.
    """
    rows, vocabulary = logits.shape
    w, c = workspace, columns
    blocks = w.best.shape[1]
    assert blocks == triton.cdiv(vocabulary, BLOCK) and len(w.row_max) >= rows, (
        "the workspace was made for another shape"
    )
    penalised, biased = c is not None and c.history is not None, c is not None and c.bias_start is not None
    counted = {"COUNTED": count is not None}
    live = count if count is not None else w.arrived
    if penalised or biased:
        assert c is not None and (not penalised or w.counts is not None), "penalties need counts in the workspace"
        none = w.arrived
        _scatter_kernel[(4, rows)](
            logits, w.counts if penalised else none, c.history if penalised else none, c.history_row if penalised else none,
            c.history_prompt if penalised else none, c.history_length if penalised else none,
            c.bias_start if biased else none, c.bias_token if biased else none, c.bias_value if biased else logits,
            c.history.stride(0) if c.history is not None else 0, vocabulary,
            BLOCK=256, SPLITS=4, PROMPT=PROMPT, HISTORY=penalised, BIAS=biased, **launch_options(pdl=pdl, warps=4),
        )  # fmt: skip
    mask = c.mask if c is not None else None
    _steer_kernel[(blocks, rows)](
        logits, mask if mask is not None else w.arrived, w.counts if penalised else w.arrived, c.temperature if c is not None else logits,
        c.repetition if penalised else logits, c.presence if penalised else logits, c.frequency if penalised else logits,
        c.history_length if penalised else w.arrived,
        w.best, w.best_id, w.row_max, w.arrived, out, live, vocabulary, mask.stride(0) if mask is not None else 0,
        BLOCK=BLOCK, BLOCKS=blocks, BLOCKS_P2=pow2(blocks), PROMPT=PROMPT, ALL_GREEDY=c is None, MASK=mask is not None, HISTORY=penalised,
        **counted, **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip
    if c is None:
        return
    if filtered:
        chunk, fewest = 1024, {"CANDIDATES": CANDIDATES, **counted}
        passes = triton.cdiv(vocabulary, 4 * chunk)
        for by_mass in (False, True):
            for first in (True, False, False):
                _narrow_kernel[(passes, rows)](
                    logits, c.temperature, c.top_k, c.top_p, w.row_max, w.state, w.sums, w.arrived, live, vocabulary,
                    BY_MASS=by_mass, FIRST=first, CHUNK=chunk, BLOCKS=passes, **fewest, **launch_options(pdl=pdl, warps=16),
                )  # fmt: skip
            _resolve_kernel[(rows,)](
                logits, c.temperature, c.top_k, c.top_p, w.row_max, w.state, w.cut, w.ties, w.candidates, w.filled, live, vocabulary,
                BY_MASS=by_mass, CHUNK=chunk, **fewest, **launch_options(pdl=pdl, warps=16),
            )  # fmt: skip
    _draw_kernel[(blocks, rows)](
        logits, c.temperature, c.min_p, c.seed, c.position, w.row_max, w.cut, w.ties, w.mass, w.best_id, w.arrived, out, live, vocabulary,
        BLOCK=BLOCK, BLOCKS=blocks, BLOCKS_P2=pow2(blocks), CUT=filtered, **counted, **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip


@triton.jit
def _logprobs_kernel(
    logits_ptr, tokens_ptr, logprob_ptr, rank_ptr, ids_ptr, top_ptr, part_ptr, part_id_ptr, arrived_ptr, count_ptr, V, top_stride,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BLOCKS_P2: tl.constexpr, TOP: tl.constexpr, POOL: tl.constexpr,
    COUNTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_previous(PDL)
    block = tl.program_id(0)
    row = tl.program_id(1)
    if COUNTED:
        if row >= tl.load(count_ptr):
            return
    logits = logits_ptr + row.to(tl.int64) * V
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + token, mask=token < V, other=float("-inf"))
    chosen = tl.maximum(tl.load(tokens_ptr + row), 0)  # a refused row has -1
    own = tl.load(logits + chosen)
    # part of a row: BLOCKS maxima, BLOCKS sums, then TOP values of each block; part_id: BLOCKS counts, then the ids of those values.
    WIDTH: tl.constexpr = BLOCKS * (2 + TOP)
    ID_WIDTH: tl.constexpr = BLOCKS * (1 + TOP)
    part = part_ptr + row.to(tl.int64) * WIDTH
    part_id = part_id_ptr + row.to(tl.int64) * ID_WIDTH
    best = tl.max(x, 0)
    tl.store(part + block, best)
    tl.store(part + BLOCKS + block, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - best)), 0))
    tl.store(part_id + block, tl.sum(((x > own) | ((x == own) & (token < chosen))).to(tl.int32), 0))
    left = tl.where(token < V, x, float("-inf"))
    open_ = token < V
    for t in tl.static_range(TOP):
        value = tl.max(tl.where(open_, left, float("-inf")), 0)
        which = tl.min(tl.where(open_ & (left == value), token, 0x7FFFFFFF), 0)
        tl.store(part + 2 * BLOCKS + block * TOP + t, tl.where(which == 0x7FFFFFFF, float("-inf"), value))
        tl.store(part_id + BLOCKS + block * TOP + t, which)
        open_ = open_ & (token != which)
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel")
    if before != BLOCKS - 1:
        return
    tl.store(arrived_ptr + row, 0)
    b = tl.arange(0, BLOCKS_P2)
    bests = tl.load(part + b, mask=b < BLOCKS, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(part + BLOCKS + b, mask=b < BLOCKS, other=0.0, cache_modifier=".cg")
    ahead = tl.load(part_id + b, mask=b < BLOCKS, other=0, cache_modifier=".cg")
    best = tl.max(bests, 0)
    norm = best + tl.log(tl.sum(tl.where(sums > 0, sums * tl.exp(bests - best), 0.0), 0))
    tl.store(logprob_ptr + row, own - norm)
    tl.store(rank_ptr + row, tl.sum(ahead, 0) + 1)
    if TOP > 0:
        e = tl.arange(0, POOL)
        pool = tl.load(part + 2 * BLOCKS + e, mask=e < BLOCKS * TOP, other=float("-inf"), cache_modifier=".cg")
        ids = tl.load(part_id + BLOCKS + e, mask=e < BLOCKS * TOP, other=0x7FFFFFFF, cache_modifier=".cg")
        for t in range(TOP):
            value = tl.max(tl.where(ids != 0x7FFFFFFF, pool, float("-inf")), 0)
            which = tl.min(tl.where(pool == value, ids, 0x7FFFFFFF), 0)
            tl.store(top_ptr + row * top_stride + t, value - norm)
            tl.store(ids_ptr + row * top_stride + t, which)
            ids = tl.where(ids == which, 0x7FFFFFFF, ids)


def logprobs(
    logits: Tensor,
    tokens: Tensor,
    *,
    top: int,
    out_logprob: Tensor,
    out_rank: Tensor,
    out_ids: Tensor,
    out_top: Tensor,
    workspace: Tensor,
    workspace_ids: Tensor,
    arrived: Tensor,
    count: Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Log-softmax of raw logits [L, V] float32: of tokens[i], its rank (1 = best), the `top` best (at most 20, ties by lower id).

    out_ids int32 and out_top float32 [L, >= top]; workspace float32 [L blocks (2 + top)], workspace_ids int32 [L blocks (1 + top)] with
    blocks = ceil(V / 1024); arrived int32 [L], zero between calls.
    """
    rows, vocabulary = logits.shape
    blocks = triton.cdiv(vocabulary, BLOCK)
    assert 0 <= top <= 20, f"{top} logprobs asked, at most 20"
    assert workspace.numel() >= rows * blocks * (2 + top) and workspace_ids.numel() >= rows * blocks * (1 + top)
    _logprobs_kernel[(blocks, rows)](
        logits, tokens, out_logprob, out_rank, out_ids, out_top, workspace, workspace_ids, arrived, count if count is not None else arrived,
        vocabulary, out_ids.stride(0),
        BLOCK=BLOCK, BLOCKS=blocks, BLOCKS_P2=pow2(blocks), TOP=top, POOL=pow2(blocks * max(1, top)), COUNTED=count is not None,
        **launch_options(pdl=pdl, warps=4),
    )  # fmt: skip
