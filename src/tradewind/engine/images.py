"""Images' features on the device: which are there, which the next step computes, which give way.

Knows: keys, tokens, and how far a prompt can be computed with the features that are there. Refuses to know: pixels' meaning, pages, slots.

A row may only be scheduled over an image whose features are there or computed in the same step. A step encodes so many tokens of images
(always one image, however large), and so many are kept, the longest unused giving way:

      prompt      text  [ image A ........ ]  text  [ image B ........ ]  text
      step 1      ------------->                                              A is encoded; the chunk ends within it
      step 2                    ---------------->                             A is pinned: a row stands within it; B has no room yet
      step 3                                     ------------------------->   B is encoded, A may give way

Nobody waits for ever: what is pinned belongs to a sequence that needs no other image to leave it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Many

from tradewind.config.plan import ImagePlan
from tradewind.contract.image import Image
from tradewind.engine.sequence import Sequence


class ImageBook:
    """What the device holds, as the steps decided so far leave it. One writer: the scheduler, through `Running`."""

    def __init__(self, plan: ImagePlan) -> None:
        self.plan = plan
        self._held: OrderedDict[str, int] = OrderedDict()
        """Key -> tokens, the longest unused first."""
        self._encode: list[Image] = []
        self._drop: list[str] = []
        self.tokens = 0
        """Of images whose features the device holds."""
        self.encoded_tokens = 0
        """Since the start."""

    def reachable(self, filling: Many[Sequence], spans: Many[tuple[int, int]], *, budget: int) -> list[int]:
        """How many of each prompt's remaining tokens this step can compute at most; changes nothing. Spans are (start, remaining).

        budget: tokens of text that the step has room for; whoever paces steps by it means images too, whose tokens cost about as much.
        """
        used = self._within(filling, spans)
        budget = min(budget, self.plan.tokens_per_step)
        coming: set[str] = set()
        out: list[int] = []
        for sequence, (start, rest) in zip(filling, spans, strict=True):
            end = start + rest
            for image in overlapping(sequence, start, end):
                if image.key in used:
                    continue
                # Those that are there take room too: what is needed for one prompt must not give way to another's.
                held, room = image.key in self._held, self.plan.cache_tokens - sum(used.values())
                if image.count > room or (not held and coming and image.count > budget):
                    end = max(start, image.first)
                    break
                if not held:
                    budget -= image.count
                    coming.add(image.key)
                used[image.key] = image.count
            out.append(end - start)
        return out

    def take(self, filling: Many[Sequence], spans: Many[tuple[int, int]], sizes: Many[int]) -> None:
        """The step has these chunks, within what was reachable: what they need is encoded, and others give way.

        `spans` and `sizes` are those of all prompts that are being filled; a size may be 0.
        """
        used = self._within(filling, spans)
        needed: OrderedDict[str, Image] = OrderedDict()
        for sequence, (start, _), size in zip(filling, spans, sizes, strict=True):
            for image in overlapping(sequence, start, start + size):
                needed[image.key] = image
                used[image.key] = image.count
        for key, image in needed.items():
            if key in self._held:
                self._held.move_to_end(key)
                continue
            while self.tokens + image.count > self.plan.cache_tokens:
                gone = next(key for key in self._held if key not in used)
                self.tokens -= self._held.pop(gone)
                self._drop.append(gone)
            self._held[key] = image.count
            self.tokens += image.count
            self._encode.append(image)
            self.encoded_tokens += image.count

    def take_orders(self) -> tuple[tuple[str, ...], tuple[Image, ...]]:
        """What the step being decided drops and encodes; said once."""
        orders = tuple(self._drop), tuple(self._encode)
        self._drop.clear()
        self._encode.clear()
        return orders

    def forget(self, filling: Many[Sequence], spans: Many[tuple[int, int]]) -> None:
        """Drops everything that no prompt stands within, with the next step."""
        pinned = self._within(filling, spans)
        self._drop += [key for key in self._held if key not in pinned]
        self._held = OrderedDict((key, count) for key, count in self._held.items() if key in pinned)
        self.tokens = sum(self._held.values())

    def _within(self, filling: Many[Sequence], spans: Many[tuple[int, int]]) -> dict[str, int]:
        """Images within which a prompt stands, by key."""
        return {
            image.key: image.count
            for sequence, (start, _) in zip(filling, spans, strict=True)
            for image in sequence.request.images
            if image.first < start < image.end and image.key in self._held
        }


def overlapping(sequence: Sequence, start: int, end: int) -> list[Image]:
    """Its images with tokens among those from `start` to before `end`, in order; changes nothing."""
    return [image for image in sequence.request.images if image.first < end and image.end > start and start < end]
