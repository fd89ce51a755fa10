"""How large images may be, how many of their tokens a step encodes, how many are kept; and what that takes of memory.

Knows: prices of a tower. Refuses to know: who waits for an image (engine/images.py) and how images are made smaller (serving). Pure.
"""

from __future__ import annotations

from tradewind.config.card import ModelCard
from tradewind.config.card_vision import VisionFacts
from tradewind.config.plan import ImagePlan, LedgerLine, Reason
from tradewind.config.sizes import MiB, show_bytes

LARGEST_TOKENS = 1280
"""Of one image. A tower's full layers compare every patch with every other: four times the tokens cost sixteen times as much there."""
CACHE_BYTES = 64 * MiB
CACHE_TOKENS = 16384


def image_plan(card: ModelCard, *, max_context: int, max_tokens_per_step: int) -> ImagePlan | None:
    """None where the model has no tower; changes nothing.

    An image is at most what the model's files allow, and leaves half of the context to text.
    """
    facts = card.vision
    if facts is None:
        return None
    least, allowed = tokens_of(facts.min_pixels, facts), facts.max_pixels // facts.edge**2
    largest = max(least, min(allowed, LARGEST_TOKENS, max_context // 2))
    return ImagePlan(
        largest=largest,
        # A token of an image costs the tower about what one of text costs the decoder.
        tokens_per_step=max_tokens_per_step,
        cache_tokens=max(2 * largest, min(CACHE_TOKENS, CACHE_BYTES // (4 * facts.out))),
    )


def tokens_of(pixels: int, facts: VisionFacts) -> int:
    """Tokens of an image of so many pixels, rounded up."""
    return -(-pixels // facts.edge**2)


def workspace_bytes(facts: VisionFacts, *, tokens: int) -> int:
    """The tower's buffers for one image: patches, stream, qkv, keys and values (float32), and what the MLP and the merger hold."""
    patches = tokens * facts.merge**2
    wide, pixels = facts.hidden, 3 * facts.patch**2
    each = 2 * pixels + 10 * wide + facts.intermediate + 2 * wide // facts.heads
    return 4 * (patches * each + tokens * (wide * facts.merge**2 + 2 * facts.out))


def image_lines(card: ModelCard, *, max_context: int, max_tokens_per_step: int, compute: str) -> tuple[LedgerLine, ...]:
    """What reading images takes besides the weights as the plan packs them; nothing where the model has no tower."""
    plan = image_plan(card, max_context=max_context, max_tokens_per_step=max_tokens_per_step)
    facts = card.vision
    if plan is None or facts is None:
        return ()
    bits = 16 if compute == "bf16" else 32
    tower = facts.parameters * bits // 8
    lines = (
        ("image tower", tower, f"{facts.parameters / 1e6:.1f}M parameters of {bits} bits, never quantised"),
        (
            "image workspace",
            workspace_bytes(facts, tokens=plan.largest) + max_tokens_per_step * 2 * 4 * facts.out,
            f"one image of {plan.largest} tokens ({plan.largest * facts.merge**2} patches), and a step of {max_tokens_per_step} tokens",
        ),
        (
            "image features",
            plan.cache_tokens * 4 * facts.out,
            f"{plan.cache_tokens} tokens x {facts.out} float32, kept as images come",
        ),
    )
    return tuple(LedgerLine(name=name, bytes=size, how=how) for name, size, how in lines)


def image_reasons(card: ModelCard, plan: ImagePlan | None) -> tuple[Reason, ...]:
    """Why images have these limits; nothing where the model reads none."""
    facts = card.vision
    if plan is None or facts is None:
        return ()
    allowed = facts.max_pixels // facts.edge**2
    why = f"larger images are made smaller; a step encodes {plan.tokens_per_step} tokens of images, one image at least"
    rejected = f"{allowed}, which the model's files allow: slow and large" if plan.largest < allowed else ""
    kept = show_bytes(plan.cache_tokens * 4 * facts.out)
    return (
        Reason(choice="image tokens", value=str(plan.largest), why=why, rejected=rejected),
        Reason(
            choice="image cache", value=kept, why=f"features of {plan.cache_tokens} tokens, for the next turn of a chat"
        ),
    )
