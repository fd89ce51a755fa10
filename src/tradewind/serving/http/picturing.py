"""Images of a chat: from the parts of its messages to the prompt's tokens and what stands behind them.

Knows: where OpenAI's messages have images, which roles may, what is done in which thread. Refuses to know: files and pixels
(serving/images.py), sockets (serving/links.py).

      asked_in       which images there are                                       in the event loop
      fetched        those that are links, where the operator allows them         in a thread that may wait
      pictures_from  decoded and resized                                          in the few threads of the desk: it takes memory
      prompt_with    the prompt's tokens
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from tradewind.contract.errors import RequestError, UserError
from tradewind.contract.image import Image
from tradewind.serving.http.asking import chat_ids
from tradewind.serving.http.errors import ApiError, api_error
from tradewind.serving.http.front import Front
from tradewind.serving.http.types import ChatMessage
from tradewind.serving.images import Asked, Picture, is_link, pictures_of, placed


def asked_in(messages: Sequence[ChatMessage]) -> list[Asked]:
    """The images of a conversation, in order; none is looked at. Raises ApiError where they stand wrongly."""
    asked: list[Asked] = []
    for place, message in enumerate(messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type != "image_url":
                continue
            where = f"messages[{place}].content[{index}]"
            if part.image_url is None:
                raise ApiError(
                    400, f"{where}.image_url is missing", param=f"{where}.image_url", code="missing_required_parameter"
                )
            if message.role not in ("user", "tool"):
                raise ApiError(
                    400, f"{where} is an image in a message of the {message.role}; images stand in those of the user", param=where,
                    code="invalid_value",
                )  # fmt: skip
            asked.append(Asked(source=part.image_url.url, low=part.image_url.detail == "low"))
    return asked


async def fetched(front: Front, asked: Sequence[Asked], *, field: str) -> list[Asked]:
    """The same with files in the place of links, where links are followed. Raises ApiError."""
    if front.links is None or front.images is None or len(asked) > front.images.limits.images:
        return list(asked)
    left, out = front.options.max_body_bytes, list[Asked]()
    for place, one in enumerate(asked):
        if is_link(one.source):
            try:
                data = await asyncio.to_thread(front.links, one.source, name=f"image {place + 1}", most_bytes=left)
            except RequestError as error:
                raise api_error(error, param=field) from None
            left -= len(data)
            one = msgspec.structs.replace(one, source=data)
        out.append(one)
    return out


def pictures_from(front: Front, asked: Sequence[Asked], *, field: str) -> list[Picture]:
    """The pictures; not for the event loop. Raises ApiError."""
    try:
        return pictures_of(asked, front.images)
    except UserError as error:
        raise api_error(error, param=field) from None


def prompt_with(
    front: Front, rendered: str, pictures: Sequence[Picture], *, field: str
) -> tuple[list[int], tuple[Image, ...]]:
    """Token ids of a rendered conversation with those of its images, and the images. Raises ApiError."""
    ids = chat_ids(front, rendered, field=field)
    if not pictures or front.images is None:
        return ids, ()
    try:
        return placed(ids, pictures, token=front.images.facts.image_token)
    except RequestError as error:
        raise api_error(error, param=field) from None
