"""What is sent to a server and when: arrival times, lengths, and words that make up a prompt of about so many tokens.

Knows: arrival processes, lengths, and how text is drawn, all fixed by a seed. Refuses to know: sockets and clocks.

      poisson   | |  ||    |   | |||      |      gaps are independent: what many users make
      burst     |||      |||    |||              `burst` at once, bursts come as a Poisson process: the same rate, worse queues
      even      |   |   |   |   |   |            the mildest traffic of that rate
      trace     as it was recorded, with its lengths and common prefixes
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from tradewind.contract.errors import UserError

ARRIVALS = ("poisson", "burst", "even")
MAX_REQUESTS = 1_000_000
MAX_RATE = 100_000.0
MAX_LENGTH = 1 << 20

_TEXT = """
able above again air all also always among animal answer apple area arm ask autumn away back bag ball bank bare bear before began
behind bell below best big bird black blue board boat body book both box branch bread break bridge bring brother brown build busy
call came can car care carry cause change check child city class clean clear climb close cloud coat cold come cook cool copy corn
count cover cross cry cut dance dark day deep door down draw dream dress drive dry each early earth east easy eat edge egg eight
end even ever every eye face fall farm fast father feel few field fill find fine fire first fish five floor flower fly follow food
foot forest form four free friend front full game garden gave girl give glass gold good grass great green ground group grow half
hand happy hard hat head hear heart heavy help here high hill hold home horse hot hour house ice
"""
WORDS = tuple(_TEXT.split())


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request that is to be sent."""

    number: int
    at_s: float
    """When it is due, since the load's beginning; in a closed loop it is due when its turn comes."""
    prompt_tokens: int
    output_tokens: int
    traffic_class: str = ""
    blocks: tuple[int, ...] = ()
    """Names of the leading blocks: prompts whose blocks agree begin with the same text."""
    block_tokens: int = 0


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts, each as likely as the others."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """One of them; changes the generator."""
        return rng.randint(self.low, self.high)


def parse_lengths(text: str, *, option: str) -> Lengths:
    """ "128", or "64:256" for anything between. Raises UserError naming the option."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*(?::\s*(\d{1,9})\s*)?", text)
    if found is None:
        raise UserError(f"{option} is {text!r}; give a number of tokens, such as 128, or a range, such as 64:256")
    low, high = int(found[1]), int(found[2] or found[1])
    if not 1 <= low <= high <= MAX_LENGTH:
        raise UserError(f"{option} is {text!r}; it must be from 1 to {MAX_LENGTH}, the smaller number first")
    return Lengths(low=low, high=high)


def arrival_times(
    kind: str,
    *,
    rate: float,
    rng: random.Random,
    count: int | None = None,
    duration_s: float | None = None,
    burst: int = 8,
) -> list[float]:
    """Times from 0 on, in order, at `rate` a second in the long run: `count` of them, or as many as fall into `duration_s`.

    Changes the generator. Raises UserError for numbers that make no load.
    """
    check_rate(rate)
    if kind not in ARRIVALS:
        raise UserError(f"there is no arrival process {kind!r}, only {', '.join(ARRIVALS)}")
    if burst < 1:
        raise UserError(f"--burst is {burst}; it must be at least 1")
    assert count is not None or duration_s is not None
    if count is None and duration_s is not None and rate * duration_s > MAX_REQUESTS:
        raise UserError(
            f"--rate {rate:g} for {duration_s:g} s would be {rate * duration_s:,.0f} requests, over {MAX_REQUESTS:,}: lower one of them"
        )
    out: list[float] = []
    at, size = 0.0, burst if kind == "burst" else 1
    while (count is None or len(out) < count) and (duration_s is None or at < duration_s):
        out += [at] * size
        at += size / rate if kind == "even" else rng.expovariate(rate / size)
    return out[:count]


def check_rate(rate: float) -> None:
    """Raises UserError for what is no rate."""
    if not (math.isfinite(rate) and 0 < rate <= MAX_RATE):
        raise UserError(f"--rate is {rate:g} requests a second; it must be over 0 and at most {MAX_RATE:,.0f}")


def made_up(
    times: Sequence[float], *, prompt: Lengths, output: Lengths, rng: random.Random, shared_prefix: int = 0
) -> list[Ask]:
    """Requests at these times with lengths drawn anew; all begin with the same `shared_prefix` tokens. Changes the generator."""
    blocks = (0,) if shared_prefix else ()
    return [
        Ask(
            number=number,
            at_s=at,
            prompt_tokens=max(prompt.draw(rng), shared_prefix + bool(shared_prefix)),
            output_tokens=output.draw(rng),
            blocks=blocks,
            block_tokens=shared_prefix,
        )
        for number, at in enumerate(times)
    ]


def from_trace(path: Path, *, speed: float = 1.0, limit: int | None = None) -> list[Ask]:
    """A trace's requests, with its times divided by `speed`, in any format that `tradewind simulate` reads. Raises UserError."""
    from tradewind.simulate.traces import lines_of, read_trace

    if not (math.isfinite(speed) and speed > 0):
        raise UserError(f"--speed is {speed:g}; it must be over 0")
    trace = read_trace(path, limit=limit)
    lines = list(lines_of(trace))
    first = min(line.arrival_s for line in lines)
    return [
        Ask(
            number=number,
            at_s=(line.arrival_s - first) / speed,
            prompt_tokens=line.prompt_tokens,
            output_tokens=line.output_tokens,
            traffic_class=line.traffic_class,
            blocks=tuple(line.blocks),
            block_tokens=trace.block_tokens,
        )
        for number, line in enumerate(sorted(lines, key=lambda line: line.arrival_s))
    ]


class Text:
    """Words for token counts. `tokens_per_word` and `overhead` (the chat template's tokens) are measured at the server."""

    def __init__(self, *, seed: int, run: int = 0, tokens_per_word: float = 1.3, overhead: float = 0.0) -> None:
        """`run`: another number gives another text of the same lengths, which a server that saw the first one has not in its cache."""
        self._seed = (seed, run)
        self.tokens_per_word, self.overhead = tokens_per_word, overhead

    def fit(self, few: tuple[int, int], many: tuple[int, int]) -> bool:
        """Learns from two probes, (words, prompt tokens) each; False, and nothing changed, when they make no sense."""
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        if not 0.1 <= per_word <= 100:
            return False
        self.tokens_per_word = per_word
        self.overhead = max(0.0, few[1] - few[0] * per_word)
        return True

    def words(self, count: int, *, stream: tuple[int, ...]) -> str:
        """`count` words that depend on `stream`, the seed and the run only."""
        places = np.random.default_rng((*self._seed, *stream)).integers(0, len(WORDS), size=count)
        return " ".join(WORDS[place] for place in places)

    def prompt(self, ask: Ask) -> str:
        """About `prompt_tokens` tokens, at least one word: the words of its blocks, then words of its own."""
        left = max(1, round((ask.prompt_tokens - self.overhead) / self.tokens_per_word))
        parts: list[str] = []
        if ask.block_tokens:
            size = max(1, round(ask.block_tokens / self.tokens_per_word))
            for block in ask.blocks:
                if left <= size:
                    break
                parts.append(self.words(size, stream=(1, block)))
                left -= size
        parts.append(self.words(left, stream=(2, ask.number)))
        return " ".join(parts)
