"""How a step's token budget is split among prompts that are being computed.

Knows: numbers of tokens. Refuses to know: sequences and pages. Pure functions.

Decode rows come first and are paid by the scheduler; what is left is `budget` here. One long prompt must not stop short ones behind it, and
short ones must not stop the long one, so:

      1. the first in queue order gets up to half of the budget (all of it when it is alone)
      2. the others get what they need, shortest first
      3. what is left goes to the first

A chunk that does not finish its prompt ends on a page border, unless that would leave the first prompt with nothing to do. Behind the
first no sliver is begun: every later chunk reads what came before it again, and a prompt that is whole in one step is cheaper to attend.
"""

from __future__ import annotations

from collections.abc import Sequence


def aligned_chunk(start: int, remaining: int, budget: int, *, page_tokens: int) -> int:
    """The longest chunk from `start` within budget that finishes the prompt or ends on a page border; 0 when there is none."""
    if remaining <= budget:
        return remaining
    return max(0, (start + budget) // page_tokens * page_tokens - start)


def is_sliver(chunk: int, remaining: int, *, whole_budget: int) -> bool:
    """Whether a chunk is under a quarter of what its prompt still needs and under an eighth of the step."""
    return 4 * chunk < remaining and 8 * chunk < whole_budget


def split(prompts: Sequence[tuple[int, int]], budget: int, *, page_tokens: int) -> list[int]:
    """Chunk sizes for prompts given as (start, remaining) in queue order; their sum is at most `budget`."""
    counts = [0] * len(prompts)
    if not prompts or budget <= 0:
        return counts
    start, remaining = prompts[0]
    share = budget if len(prompts) == 1 else -(-budget // 2)
    counts[0] = aligned_chunk(start, remaining, share, page_tokens=page_tokens)
    left = budget - counts[0]
    for index in sorted(range(1, len(prompts)), key=lambda i: prompts[i][1]):
        begin, rest = prompts[index]
        chunk = aligned_chunk(begin, rest, left, page_tokens=page_tokens)
        counts[index] = 0 if is_sliver(chunk, rest, whole_budget=budget) else chunk
        left -= counts[index]
    counts[0] += aligned_chunk(start + counts[0], remaining - counts[0], left, page_tokens=page_tokens)
    if not any(counts):
        counts[0] = min(remaining, budget)
    return counts


def split_in_order(prompts: Sequence[tuple[int, int]], budget: int, *, page_tokens: int) -> list[int]:
    """The same where the order says who is urgent: each gets all that it can use before the next gets any."""
    counts: list[int] = []
    whole = budget
    for start, remaining in prompts:
        chunk = aligned_chunk(start, remaining, budget, page_tokens=page_tokens)
        counts.append(0 if counts and is_sliver(chunk, remaining, whole_budget=whole) else chunk)
        budget -= counts[-1]
    if prompts and budget > 0 and not any(counts):
        counts[0] = min(prompts[0][1], budget)
    return counts


def split_whole(prompts: Sequence[tuple[int, int]], budget: int) -> list[int]:
    """The same where no prompt may be cut: in queue order, each that still fits. The first always does when it fits into a step."""
    counts = []
    for _, remaining in prompts:
        counts.append(remaining if remaining <= budget else 0)
        budget -= counts[-1]
    return counts


def room_for_more(prompts: Sequence[tuple[int, int]], budget: int) -> int:
    """Tokens of the budget that a newcomer could use: each prompt before it takes at most half of what is left."""
    left = budget
    for _, remaining in prompts:
        left -= min(remaining, -(-left // 2))
    return left
