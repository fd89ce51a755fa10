"""From an image file to the colors that the tower reads, and from messages with images to a prompt with their tokens in it.

Knows: data URLs, Pillow (the extra `vision`, imported with the first image), how large an image may be. Refuses to know: the tower, HTTP
and how links are fetched.

      part of a message -> bytes -> decoded, turned upright, RGB -> resized to whole squares -> Picture      front
      template text  ... <|image_pad|> ...  -> ids ... 7 ...                                                 one id an image
      placed         ... 7 7 7 7 7 7 ...       and Image(first, rows, columns, pixels)                       one id a token

What is not RGB becomes so, transparent or not; of several pictures in a file the first is taken.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tradewind.config.card_vision import VisionFacts
from tradewind.config.plan import Plan
from tradewind.config.sizes import show_bytes
from tradewind.contract.errors import MissingExtraError, RequestError
from tradewind.contract.image import Image, image_key

MOST_UNLIKE = 200
"""The longer edge is at most so many times the shorter."""
FORMATS = ("GIF", "JPEG", "PNG", "WEBP")
"""What Pillow is let loose on: its other readers are many and seldom looked after."""
LOW_TOKENS = 256
"""Most tokens of an image that is asked for in low detail."""
_DATA_URL = re.compile(r"data:(?P<kind>[a-zA-Z0-9.+/-]*)(?:;[a-zA-Z0-9=.+-]+)*?(?P<base64>;base64)?,")


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may bring."""

    images: int = 16
    bytes: int = 12 << 20
    """Of one file."""
    pixels: int = 40_000_000
    """Of one image when it is decoded, whatever it is resized to: a small file may hold a very large one."""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """An image that stands nowhere yet."""

    key: str
    rows: int
    columns: int
    pixels: bytes

    @property
    def count(self) -> int:
        """Tokens."""
        return self.rows * self.columns


class ImageReader:
    """Makes Pictures for one model. Changes nothing; safe to call from several threads."""

    def __init__(self, facts: VisionFacts, *, largest: int, limits: ImageLimits | None = None) -> None:
        """largest: tokens of one image."""
        self.facts, self.largest = facts, largest
        self.limits = limits or ImageLimits()

    @classmethod
    def of(cls, plan: Plan | None) -> ImageReader | None:
        """The reader for a planned engine; None where its model reads text alone."""
        if plan is None or plan.card.vision is None or plan.schedule.images is None:
            return None
        return cls(plan.card.vision, largest=plan.schedule.images.largest)

    def read(self, source: Any, *, name: str, low: bool = False, files: bool = False) -> Picture:
        """A picture of a URL (text), a file's bytes, a Pillow image or an array [height, width, 3] of uint8; with `files` also of a path.

        name: what messages call it, "image 2". low: in few tokens. Raises RequestError in one sentence, MissingExtraError without Pillow.
        """
        if isinstance(source, str) and (not files or "://" in source[:12] or source.startswith("data:")):
            source = self._of_url(source, name)
        elif files and isinstance(source, str | os.PathLike):
            source = self._of_file(Path(source), name)
        if isinstance(source, bytes | bytearray | memoryview):
            image = self._decoded(bytes(source), name)
        elif hasattr(source, "convert") and hasattr(source, "size"):
            image = _upright(source, name)
        elif hasattr(source, "shape") and hasattr(source, "dtype"):
            if str(source.dtype) != "uint8" or len(source.shape) != 3 or source.shape[2] != 3 or 0 in source.shape:
                raise RequestError(
                    f"{name} is an array of {source.dtype} {tuple(source.shape)}; it must be uint8 [height, width, 3]"
                )
            image = _pillow().fromarray(source)
        else:
            raise RequestError(f"{name} must be a URL, a file's bytes or a picture, not {type(source).__name__}")
        width, height = self.size_of(*image.size, name=name, low=low)
        resized = image.resize((width, height), resample=_pillow().Resampling.BICUBIC)
        rows, columns = height // self.facts.edge, width // self.facts.edge
        pixels = resized.tobytes()
        return Picture(key=image_key(pixels, rows=rows, columns=columns), rows=rows, columns=columns, pixels=pixels)

    def size_of(self, width: int, height: int, *, name: str, low: bool = False) -> tuple[int, int]:
        """(width, height) that an image is resized to. Raises RequestError where its edges are too unlike."""
        if max(width, height) > MOST_UNLIKE * min(width, height):
            raise RequestError(
                f"{name} is {width} x {height} pixels; its longer edge may be at most {MOST_UNLIKE} times the shorter"
            )
        facts = self.facts
        largest = min(self.largest, LOW_TOKENS) if low else self.largest
        most = min(facts.max_pixels, largest * facts.edge**2)
        height, width = smart_size(height, width, edge=facts.edge, least=min(facts.min_pixels, most), most=most)
        # Very long ones stay above what is allowed by the formula: they lose of their longer edge.
        rows, columns = height // facts.edge, width // facts.edge
        if rows * columns > largest:
            rows, columns = min(rows, max(1, largest // columns)), min(columns, max(1, largest // rows))
        return columns * facts.edge, rows * facts.edge

    def _of_url(self, url: str, name: str) -> bytes:
        match = _DATA_URL.match(url)
        if match is not None:
            return self._of_data(url, match, name)
        if is_link(url):
            raise RequestError(
                f"{name} is a link, and none is followed here: send the image itself as data:image/png;base64,..."
            )
        shown = url if len(url) <= 40 else url[:37] + "..."
        raise RequestError(f"{name} has the URL {shown!r}; it must be of the form data:image/png;base64,...")

    def _of_data(self, url: str, match: re.Match[str], name: str) -> bytes:
        kind = match["kind"]
        if kind and not kind.lower().startswith("image/"):
            raise RequestError(f"{name} is of the type {kind[:40]}; it must be an image")
        if match["base64"] is None:
            raise RequestError(f"{name} is not in base64: its URL must begin as data:image/png;base64,")
        if (len(url) - match.end()) * 3 // 4 > self.limits.bytes + 2:
            raise self._too_large((len(url) - match.end()) * 3 // 4, name)
        try:
            data = base64.b64decode(url[match.end() :], validate=True)
        except (binascii.Error, ValueError):
            raise RequestError(f"{name} has base64 that cannot be read") from None
        return self._checked(data, name)

    def _of_file(self, path: Path, name: str) -> bytes:
        try:
            with path.open("rb") as file:
                return self._checked(file.read(self.limits.bytes + 1), name)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise RequestError(f"{name} cannot be read from {str(path)[:200]!r}: {why}") from None

    def _checked(self, data: bytes, name: str) -> bytes:
        if not data:
            raise RequestError(f"{name} is empty")
        if len(data) > self.limits.bytes:
            raise self._too_large(len(data), name)
        return data

    def _too_large(self, size: int, name: str) -> RequestError:
        return RequestError(f"{name} has {show_bytes(size)}; a file may have {show_bytes(self.limits.bytes)}")

    def _decoded(self, data: bytes, name: str) -> Any:
        """The first picture of a file, upright, RGB."""
        library = _pillow()
        try:
            image = library.open(io.BytesIO(data), formats=FORMATS)
        except (library.DecompressionBombError, library.DecompressionBombWarning):
            raise self._too_many_pixels(name) from None
        except Exception:  # whatever its readers think of the bytes
            raise RequestError(f"{name} is no picture that can be read; known are {', '.join(FORMATS)}") from None
        if image.width * image.height > self.limits.pixels:  # its pixels have not been decoded yet
            raise self._too_many_pixels(name, f"{image.width} x {image.height} pixels")
        return _upright(image, name)

    def _too_many_pixels(self, name: str, has: str = "too many pixels") -> RequestError:
        return RequestError(f"{name} has {has}; an image may have {self.limits.pixels / 1e6:g} million")


def is_link(source: object) -> bool:
    """Whether an image is given as a link to fetch it by."""
    return isinstance(source, str) and source[:8].lower().startswith(("http://", "https://"))


def smart_size(height: int, width: int, *, edge: int, least: int, most: int) -> tuple[int, int]:
    """(height, width) in whole squares, with about the same proportions and between `least` and `most` pixels in all where that can be.

    The rule of the models' own image processor, so that they see images of the sizes that they were trained with. Halves round to even.
    """
    down, across = round(height / edge) * edge, round(width / edge) * edge
    if down * across > most:
        shrink = math.sqrt(height * width / most)
        return tuple(max(edge, math.floor(side / shrink / edge) * edge) for side in (height, width))  # type: ignore[return-value]
    if down * across < least:
        grow = math.sqrt(least / (height * width))
        return tuple(math.ceil(side * grow / edge) * edge for side in (height, width))  # type: ignore[return-value]
    return down, across


def _upright(image: Any, name: str) -> Any:
    """The picture as RGB, turned as its camera says."""
    from PIL import ImageOps

    try:
        turned = ImageOps.exif_transpose(image)
        if turned.mode == "P" and "transparency" in turned.info:
            turned = turned.convert("RGBA")
        return turned.convert("RGB")
    except Exception as error:  # a file may be broken anywhere behind its head
        raise RequestError(f"{name} is broken: {' '.join(str(error).split())[:200] or type(error).__name__}") from None


def _pillow() -> Any:
    """PIL.Image. Raises MissingExtraError."""
    try:
        import PIL.Image
    except ImportError:
        raise MissingExtraError(package="pillow", extra="vision", purpose="reading images") from None
    return PIL.Image


# -- prompts


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """An image of a message, as it was given."""

    source: Any
    low: bool = False


def taken_out(messages: Sequence[Any]) -> tuple[list[Any], list[Asked]]:
    """Messages with {"type": "image"} in the place of each image part, and the images in order; changes nothing.

    Image parts are {"type": "image", "image": ...} and {"type": "image_url", "image_url": {"url": ...}}. Other parts, and what is no
    message at all, stay as they are. Raises RequestError for an image part with nothing in it.
    """
    out: list[Any] = []
    images: list[Asked] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            out.append(message)
            continue
        parts: list[Any] = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in ("image", "image_url"):
                parts.append(part)
                continue
            given = part.get(kind)
            low = isinstance(given, Mapping) and given.get("detail") == "low"
            source = given.get("url") if isinstance(given, Mapping) else given
            if source is None:
                raise RequestError(
                    f"image {len(images) + 1} has nothing in it: give it as the field '{kind}' of its part"
                )
            images.append(Asked(source=source, low=low))
            parts.append({"type": "image"})
        out.append({**message, "content": parts})
    return out, images


def pictures_of(asked: Sequence[Asked], reader: ImageReader | None, *, files: bool = False) -> list[Picture]:
    """The pictures of what was asked, in order. Raises RequestError; without a reader for any image at all."""
    if not asked:
        return []
    if reader is None:
        raise RequestError("this model reads no images: send text alone, or serve a model that has an image tower")
    if len(asked) > reader.limits.images:
        raise RequestError(f"there are {len(asked)} images; one request may have {reader.limits.images}")
    return [
        reader.read(one.source, name=f"image {place + 1}", low=one.low, files=files) for place, one in enumerate(asked)
    ]


def placed(ids: Sequence[int], pictures: Sequence[Picture], *, token: int) -> tuple[list[int], tuple[Image, ...]]:
    """A prompt in which each image's one token became as many as it takes, and where they stand; changes nothing.

    Raises RequestError where there are not as many such tokens as images: a message's text may spell one.
    """
    if not pictures:
        return list(ids), ()
    found = sum(one == token for one in ids)
    if found != len(pictures):
        why = (
            "this model's chat template left some out"
            if found < len(pictures)
            else "a message's text spells the mark of an image, which it may not beside images"
        )
        raise RequestError(f"the prompt has {found} places for {len(pictures)} images: {why}")
    out: list[int] = []
    images: list[Image] = []
    left = iter(pictures)
    for one in ids:
        if one != token:
            out.append(one)
            continue
        picture = next(left)
        images.append(
            Image(key=picture.key, first=len(out), rows=picture.rows, columns=picture.columns, pixels=picture.pixels)
        )
        out += [token] * picture.count
    return out, tuple(images)
