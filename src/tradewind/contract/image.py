"""An image of a request: where its tokens stand in the prompt, and its colors.

Knows: what crosses from serving to the engine and on to the device wing. Refuses to know: files, formats, how big an image should be
(serving), and what a tower makes of it (layers).

Pixels cross as bytes, one for each color, after resizing and before anything else is done to them: 3 bytes a pixel, where the tower's
own input has 24 (float32, and each pixel once for each of two frames). So the front alone needs an image library, and the engine's
process only arithmetic. The key is a hash of what crosses: the same picture has one key however it came.
"""

from __future__ import annotations

import hashlib

import msgspec


class ImageSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Where an image stands in a prompt."""

    key: str
    """Hash of its size and pixels."""
    first: int
    """Position of its first token."""
    rows: int
    """Tokens from top to bottom ..."""
    columns: int
    """... and from left to right; they stand row by row."""

    @property
    def count(self) -> int:
        """Tokens."""
        return self.rows * self.columns

    @property
    def end(self) -> int:
        """Position behind its last token."""
        return self.first + self.rows * self.columns


class Image(ImageSpan, frozen=True, kw_only=True):
    """An image with its colors."""

    pixels: bytes
    """uint8 [height, width, 3]: red, green, blue; a token is a square of the same edge everywhere."""

    def span(self) -> ImageSpan:
        """The same without pixels."""
        return ImageSpan(key=self.key, first=self.first, rows=self.rows, columns=self.columns)


def image_key(pixels: bytes, *, rows: int, columns: int) -> str:
    """The key of an image; equal keys mean equal features of the tower."""
    return hashlib.sha256(f"{rows}x{columns}:".encode() + pixels).hexdigest()[:32]
