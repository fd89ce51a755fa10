"""What a step costs, learned from the steps themselves: a fixed part, one for each prompt token, one for each decoding row's token.

Knows: a weighted least-squares fit of three numbers, refit as steps come. Refuses to know: context lengths, devices, who asks.

      seconds of a step  =  base_s  +  prefill_s * prompt tokens  +  decode_s * other tokens

It is made to share out the time of steps that happened, and for small what-ifs about them; it does not extrapolate to other loads.
"""

from __future__ import annotations

import msgspec
import numpy as np

DECAY = 0.999
"""What an observation still counts after the next one: the last thousand or so decide."""
EVERY = 16
"""Steps between two fits."""
BASE_TOKENS = 8.0
"""Before anything is known a step's fixed part is taken to cost as much as so many tokens."""
PRIOR = 0.01
"""How much that guess weighs, where a whole observation weighs 1."""
TRUSTED = 64
"""Steps after which outliers can be told."""
OUTLIER = 3.0
"""A step this many times as long as expected is a stall: what is beyond the expected is nobody's work."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; none is negative."""

    base_s: float
    prefill_s: float
    decode_s: float

    def step_s(self, *, prefill: float, decode: float) -> float:
        """The time of a step with so many tokens of each kind."""
        return self.base_s + self.prefill_s * prefill + self.decode_s * decode


class StepFit:
    """Learns from steps in order. One writer."""

    def __init__(self) -> None:
        self.steps = 0
        self.error = 0.0
        """Mean of |measured - expected| / measured over the last thousand or so steps, each judged before it was learned from."""
        self.cost = StepCost(base_s=0.0, prefill_s=0.0, decode_s=0.0)
        self._a = [0.0] * 6
        """Upper triangle of the normal matrix: 00 01 02 11 12 22."""
        self._b = [0.0] * 3
        self._unit_s = 0.0

    @property
    def trusted(self) -> bool:
        """Whether enough steps were seen to tell a stall."""
        return self.steps >= TRUSTED

    def is_stall(self, *, prefill: int, decode: int, seconds: float) -> bool:
        """Whether a step took so long that its work does not explain it; changes nothing."""
        return self.trusted and seconds > OUTLIER * self.cost.step_s(prefill=prefill, decode=decode) + 0.005

    def learn(self, *, prefill: int, decode: int, seconds: float) -> None:
        """Takes in one step; stalls are not learned from."""
        if seconds <= 0 or not (prefill or decode):
            return
        if self.is_stall(prefill=prefill, decode=decode, seconds=seconds):
            return
        if self.steps >= EVERY:
            off = abs(seconds - self.cost.step_s(prefill=prefill, decode=decode)) / seconds
            self.error += (off - self.error) * max(1 - DECAY, 1 / (self.steps - EVERY + 1))
        unit_s = seconds / (BASE_TOKENS + prefill + decode)
        self._unit_s += (unit_s - self._unit_s) * max(1 - DECAY, 1 / (self.steps + 1))
        # Relative errors count: a step of 2 ms teaches as much as one of 200.
        w = 1.0 / (seconds * seconds)
        a, p, d = self._a, float(prefill), float(decode)
        for place, product in enumerate((1.0, p, d, p * p, p * d, d * d)):
            a[place] = a[place] * DECAY + w * product
        b = self._b
        for place, value in enumerate((1.0, p, d)):
            b[place] = b[place] * DECAY + w * value * seconds
        self.steps += 1
        if self.steps % EVERY == 0 or self.steps <= 4:
            self.cost = self._fit()

    def _fit(self) -> StepCost:
        a00, a01, a02, a11, a12, a22 = self._a
        matrix = np.array([[a00, a01, a02], [a01, a11, a12], [a02, a12, a22]])
        right = np.array(self._b)
        guess = np.array([BASE_TOKENS * self._unit_s, self._unit_s, self._unit_s])
        weights = PRIOR / np.square(guess)
        matrix[np.diag_indices(3)] += weights
        right += weights * guess
        kept = [0, 1, 2]
        found = np.zeros(3)
        while kept:  # what would be negative is left out, the most negative first
            found[:] = 0.0
            found[kept] = np.linalg.solve(matrix[np.ix_(kept, kept)], right[kept])
            worst = min(kept, key=lambda place: found[place])
            if found[worst] >= 0:
                break
            kept.remove(worst)
        return StepCost(base_s=float(found[0]), prefill_s=float(found[1]), decode_s=float(found[2]))
