"""Workloads as token lists: what is asked of an engine, the same for every engine.

Knows: the L1-L4 workloads (real text: the licence that comes with the embedded model) and a synthetic mix with the length distribution of
chat logs. Refuses to know: engines and clocks. Everything is fixed by seeds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts that arrive at once, and how many tokens each must generate (greedy, end of text ignored)."""

    name: str
    title: str
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.new_tokens, strict=True))

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def output_tokens(self) -> int:
        return sum(self.new_tokens)


NEEDED_IDS = 2190
"""The text must give this many tokens: L4 reads up to token 700 + 97 * 15 + 32."""


def cpu_workloads(ids: Sequence[int]) -> dict[str, Workload]:
    """L1-L4 from the token ids of a text of at least NEEDED_IDS tokens.

    L1 decode: 64 in, 128 out. L2 prefill: 512 in, 1 out. L3 batch: 16 prompts of 64..256 (shuffled), 64 out each.
    L4 shared prefix: 16 prompts of the same 512 and 32 own, 32 out each.
    """
    if len(ids) <= NEEDED_IDS:
        raise ValueError(f"the text has {len(ids)} tokens; the workloads need over {NEEDED_IDS}")
    ids = tuple(ids)
    lengths = [64 + round(i * 192 / 15) for i in range(16)]
    random.Random(0).shuffle(lengths)
    starts = [(i * 137) % (len(ids) - 260) for i in range(16)]
    mixed = tuple(ids[start : start + length] for start, length in zip(starts, lengths, strict=True))
    shared = ids[100:612]
    branches = tuple(shared + ids[700 + 97 * i : 700 + 97 * i + 32] for i in range(16))
    return {
        "L1": Workload(name="L1", title="decode, batch 1", prompts=(ids[40:104],), new_tokens=(128,)),
        "L2": Workload(name="L2", title="prefill 512", prompts=(ids[300:812],), new_tokens=(1,)),
        "L3": Workload(name="L3", title="16 requests at once", prompts=mixed, new_tokens=(64,) * 16),
        "L4": Workload(name="L4", title="16 with a shared prefix of 512", prompts=branches, new_tokens=(32,) * 16),
    }


def chat_mix(ids: Sequence[int], *, requests: int, max_context: int, seed: int = 0) -> Workload:
    """A synthetic mix whose lengths look like those of chat logs: log-normal, prompts of median 60, a long tail, answers of median 120.

    The text of every prompt is a stretch of `ids` at a random place, so that prefixes differ.
    """
    draw = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    outputs: list[int] = []
    longest = max(16, min(1024, max_context // 2, len(ids) // 2))
    for _ in range(requests):
        length = min(longest, max(4, round(draw.lognormvariate(math.log(60), 1.1))))
        answer = min(256, max_context - length, max(4, round(draw.lognormvariate(math.log(120), 0.8))))
        start = draw.randrange(len(ids) - length)
        prompts.append(tuple(ids[start : start + length]))
        outputs.append(answer)
    return Workload(
        name="chat", title=f"{requests} chat-like requests", prompts=tuple(prompts), new_tokens=tuple(outputs)
    )
