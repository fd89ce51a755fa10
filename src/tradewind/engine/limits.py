"""Requests that can never run, refused when they arrive.

Knows: the arithmetic of need and have. Refuses to know: what is running now. Pure.
"""

from __future__ import annotations

from tradewind.cache.lease import KVCache
from tradewind.config.plan import SchedulePlan
from tradewind.contract.errors import LimitError, RequestError
from tradewind.contract.request import Request


def check_fits(request: Request, *, cache: KVCache, schedule: SchedulePlan, burst_tokens: int) -> None:
    """Raises RequestError or LimitError when the request could not run even alone; changes nothing."""
    prompt, max_context = len(request.tokens), schedule.max_context
    if prompt == 0:
        raise RequestError("the prompt is empty: give at least one token")
    if request.images:
        _check_images(request, schedule=schedule)
    if request.pooling is not None:
        _check_pooling(request, cache=cache, schedule=schedule, burst_tokens=burst_tokens)
        return
    if schedule.whole_prompts:
        raise RequestError("this model is an encoder: it gives embeddings and generates nothing")
    if request.max_tokens < 1:
        if prompt >= max_context:
            raise LimitError(
                f"the prompt has {prompt} tokens but the context limit is {max_context}, which leaves no room for an answer: "
                f"shorten the prompt by at least {prompt - max_context + 1} tokens"
            )
        raise RequestError(f"max_tokens is {request.max_tokens}: ask for at least 1 token")
    if prompt + request.max_tokens > max_context:
        raise LimitError(
            f"the prompt has {prompt} tokens and up to {request.max_tokens} are asked for, together {prompt + request.max_tokens}, "
            f"but the context limit is {max_context}: {prompt + request.max_tokens - max_context} tokens over; "
            + (
                f"shorten the prompt by at least {prompt - max_context + 1} tokens"
                if prompt >= max_context
                else f"lower max_tokens to at most {max_context - prompt} or shorten the prompt"
            )
        )
    positions = prompt + request.max_tokens - 1  # the KV of the last token is never computed
    size = cache.page_tokens
    for index, need in enumerate(cache.peak_pages(positions, burst_tokens=burst_tokens)):
        have = cache.pools[index].total - 1
        if need <= have:
            continue
        asked = f"the prompt has {prompt} tokens and up to {request.max_tokens} are asked for"
        window = cache.groups[index].window
        if window is not None and need < -(-positions // size):
            raise LimitError(
                f"{asked}: the layers with a window of {window} tokens then hold {need * size} tokens ({need} pages) at once, but their "
                f"cache holds {have * size} tokens ({have} pages), {(need - have) * size} tokens ({need - have} pages) short; "
                "lower max_tokens_per_step or give the cache more memory"
            )
        fits = have * size + 1 - prompt
        advice = (
            f"lower max_tokens to at most {fits}"
            if fits >= 1
            else f"shorten the prompt by at least {prompt - have * size} tokens"
        )
        raise LimitError(
            f"{asked}, which needs {positions} tokens ({need} pages) of cache, but the cache holds {have * size} tokens ({have} pages), "
            f"{positions - have * size} tokens ({need - have} pages) short; {advice}, or give the cache more memory"
        )


def _check_images(request: Request, *, schedule: SchedulePlan) -> None:
    """The same for its images."""
    if schedule.images is None:
        raise RequestError("this model reads no images: send text alone, or serve a model that has an image tower")
    most, end = schedule.images.largest, 0
    for place, image in enumerate(request.images):
        if image.count > most:
            raise LimitError(f"image {place + 1} has {image.count} tokens, and one may have {most}: make it smaller")
        if not end <= image.first < image.end <= len(request.tokens):
            raise RequestError(f"image {place + 1} does not stand within the prompt, behind the image before it")
        end = image.end


def _check_pooling(request: Request, *, cache: KVCache, schedule: SchedulePlan, burst_tokens: int) -> None:
    """The same for a prompt of which an embedding is wanted: it is computed to its end, and nothing follows."""
    prompt = len(request.tokens)
    assert request.max_tokens == 0 and request.parent is None and request.grammar is None, "nothing is generated"
    limit, what = schedule.max_context, "the context limit"
    if schedule.whole_prompts and schedule.max_tokens_per_step < limit:
        limit, what = schedule.max_tokens_per_step, "a step, in which it must be computed whole,"
    if prompt > limit:
        verb = "is" if limit == schedule.max_context else "has"
        raise LimitError(
            f"the text has {prompt} tokens but {what} {verb} {limit}: shorten the text by at least {prompt - limit} tokens"
        )
    for index, need in enumerate(cache.peak_pages(prompt, burst_tokens=burst_tokens)):
        have = cache.pools[index].total - 1
        if need > have:
            size = cache.page_tokens
            raise LimitError(
                f"the text has {prompt} tokens, which needs {need * size} tokens ({need} pages) of cache, but the cache holds "
                f"{have * size} tokens ({have} pages), {need - have} pages short; shorten the text or give the cache more memory"
            )
