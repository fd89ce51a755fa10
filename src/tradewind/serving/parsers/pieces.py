"""The pieces an answer falls into, and their sum.

Knows: the records that parsers give and fronts send. Refuses to know: any format, any wire shape.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Content(msgspec.Struct, frozen=True, tag=True):
    """Text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, tag=True):
    """Text the model thought with."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True, tag=True):
    """A call whose name is certain. Calls are numbered from 0; a call ends before the next one begins."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True, tag=True):
    """The next characters of a call's arguments, as JSON text."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True, tag=True):
    """Nothing more of this call. When `complete`, all its arguments joined are one JSON object."""

    index: int
    complete: bool
    why: str = ""
    """`cut` (the text ended inside the call) or `malformed` (what followed is no JSON and went on as content)."""


Piece = Content | Reasoning | ToolCallBegin | ToolArguments | ToolCallEnd


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One whole call."""

    id: str
    name: str
    arguments: str
    """JSON text of an object; of an incomplete call only its beginning."""
    complete: bool
    why: str = ""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One whole answer: the sum of its pieces."""

    content: str | None
    """None when nothing was said to the reader."""
    reasoning: str | None
    calls: tuple[ToolCall, ...]


def merge(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces with neighbours of one kind joined, so that two streams of one text can be compared; changes nothing."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(piece, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + piece.text)
        elif isinstance(piece, ToolArguments) and isinstance(last, ToolArguments) and last.index == piece.index:
            merged[-1] = ToolArguments(last.index, last.text + piece.text)
        else:
            merged.append(piece)
    return merged


def collect(pieces: Iterable[Piece]) -> Message:
    """The whole answer that a stream of pieces adds up to; changes nothing."""
    content: list[str] = []
    reasoning: list[str] = []
    begun: dict[int, ToolCallBegin] = {}
    arguments: dict[int, list[str]] = {}
    ends: dict[int, ToolCallEnd] = {}
    for piece in pieces:
        match piece:
            case Content():
                content.append(piece.text)
            case Reasoning():
                reasoning.append(piece.text)
            case ToolCallBegin():
                begun[piece.index], arguments[piece.index] = piece, []
            case ToolArguments():
                arguments[piece.index].append(piece.text)
            case ToolCallEnd():
                ends[piece.index] = piece
    calls = []
    for index, begin in begun.items():
        end = ends.get(index)
        calls.append(
            ToolCall(
                id=begin.id,
                name=begin.name,
                arguments="".join(arguments[index]),
                complete=end is not None and end.complete,
                why="cut" if end is None else end.why,
            )
        )
    return Message(content="".join(content) or None, reasoning="".join(reasoning) or None, calls=tuple(calls))
