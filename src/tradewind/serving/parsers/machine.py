"""What all formats share: content and reasoning around calls, and a call's way from a suspicion to its end.

Knows: markers cut anywhere, white space that is only layout, when a call may be told and when its text is given back.
Refuses to know: how any format spells a call; a format is a subclass with a few more states.

::

    buffer   ...... said ......|.. tentative ..|.. not yet read ..
                               ^mark           ^at
    Until a call's name and the beginning of its arguments are certain, its text is tentative: if it turns out to be no call,
    its first marker becomes content and the rest is read again. Once begun, a call cannot be unsaid: it ends complete or not,
    and what follows a malformed end goes on as content. Text outside markers is therefore never lost.

Rules of white space: content and reasoning each keep the white space inside them, and lose it at an end that touches a marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from tradewind.serving.parsers.json_reader import SPACE, JsonReader, QuotedJsonReader
from tradewind.serving.parsers.parser import Circumstances, call_id
from tradewind.serving.parsers.pieces import Content, Piece, Reasoning, ToolArguments, ToolCallBegin, ToolCallEnd, merge

_SPACES = re.compile(f"[{SPACE}]*")

_GIVEN_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")


def skip(text: str, at: int) -> int:
    """The place of the first character from `at` on that is no white space, or the end."""
    found = _SPACES.match(text, at)
    assert found is not None
    return found.end()


class Markers:
    """Finds the first of some texts in a text that is still growing."""

    def __init__(self, markers: Sequence[str]) -> None:
        """No marker may be the beginning of another."""
        self.markers = tuple(dict.fromkeys(markers))
        self.first = frozenset(marker[0] for marker in self.markers)
        self._longest = max(map(len, self.markers), default=0)
        self._pattern = re.compile("|".join(map(re.escape, self.markers)) if self.markers else r"(?!)")

    def find(self, text: str, at: int) -> tuple[int, str | None]:
        """(where a marker begins, that marker), or (where a marker may be beginning, None): before that, all is text."""
        found = self._pattern.search(text, at)
        limit = len(text) if found is None else found.start()
        for place in range(max(at, len(text) - self._longest + 1), limit):
            if text[place] in self.first:
                rest = text[place:]
                if any(marker.startswith(rest) for marker in self.markers):
                    return place, None
        return limit, None if found is None else found[0]


class Flow:
    """Text of one kind, without the white space at those of its ends that touch a marker. One writer."""

    __slots__ = ("_blank", "_touched", "started")

    def __init__(self) -> None:
        self.started = False
        self._blank = ""  # white space that is inside only if more text follows
        self._touched = False  # a marker stands next to `_blank`

    def push(self, text: str) -> str:
        """Takes text; gives what can be said of it now."""
        body = text.rstrip(SPACE)
        if not body:
            self._blank += text
            return ""
        said = self._blank + body
        if self._touched and not self.started:
            said = said.lstrip(SPACE)
        self._blank = text[len(body) :]
        self.started, self._touched = True, False
        return said

    def marker(self) -> None:
        """A marker stands here."""
        self._touched = True

    def border(self) -> None:
        """One message ends and another of this kind begins: a line break, if there is no white space and text on both sides."""
        self._touched = True
        if self.started and not self._blank:
            self._blank = "\n"

    def finish(self) -> str:
        """Ends the text; white space at its end stays unless it touches a marker."""
        blank, self._blank = self._blank, ""
        return "" if self._touched else blank


class Machine:
    """An output parser made of states: each state reads what it can and says whether to go on. One writer.

    By itself it is the format without calls: reasoning and content.
    """

    openers: ClassVar[tuple[str, ...]] = ()
    """Markers that begin a call anywhere in the content."""
    bare: ClassVar[str] = ""
    """Characters that may begin a call as the first of the content."""

    def __init__(self, circumstances: Circumstances) -> None:
        self._tools = circumstances.tools
        self._forced = circumstances.forced
        self._new_id = circumstances.new_id or self.fresh_id
        reasoning = circumstances.reasoning
        around: tuple[str, ...] = ()
        if reasoning is not None:
            reasoning.check()
            around = (reasoning.begin, reasoning.end)
        self._reasoning = reasoning
        self._text_markers = Markers((*self.openers, *around))
        self._reasoning_end = Markers(around[1:])
        self._buffer = ""
        self._at = 0  # everything before is read
        self._out: list[Piece] = []
        self._content = Flow()
        self._thought = Flow()
        self._raw: list[str] = []  # what was read of a tentative call
        self._back = 0  # characters of `_raw` that become content when it is no call: its marker
        self._calls = 0
        self._complete = 0
        self._open = False  # a call has begun and not ended
        self._arguments: JsonReader | QuotedJsonReader | None = None
        self._after_arguments: Callable[[], bool] = self._text
        self._finished = False
        self._text_state: Callable[[], bool] = self._text
        self._state: Callable[[], bool] = self._text_state
        if circumstances.starts_inside and reasoning is not None:
            self._open_reasoning()

    def fresh_id(self) -> str:
        """An id for a call that was written without one; changes nothing."""
        return call_id()

    # -- the protocol

    @property
    def has_tool_calls(self) -> bool:
        """See OutputParser."""
        return self._complete > 0

    def push(self, text: str) -> list[Piece]:
        """See OutputParser."""
        if self._finished or not text:
            return []
        if not self._buffer and self._state is self._text_state and self._content.started:
            # Almost every delta of almost every answer ends here.
            for character in self._text_markers.first:
                if character in text:
                    break
            else:
                said = self._content.push(text)
                return [Content(said)] if said else []
        self._buffer += text
        return self._run()

    def finish(self, reason: str) -> list[Piece]:
        """See OutputParser."""
        if self._finished:
            return []
        pieces = self._run()
        if not self._open and self._raw:
            # A call that was cut before it was one is content as it stands: markers in its strings are no markers.
            text = "".join((*self._raw, self._buffer[self._at :]))
            if not self._calls or text.strip(SPACE) not in (
                "",
                ",",
                ";",
            ):  # those separate calls, with no call after them
                self._say(text)
            self._state, self._at = self._nothing, len(self._buffer)
        rest = self._buffer[self._at :]
        if self._open:
            self._end(complete=False, why="cut")
        elif self._state in (self._reasoning_opens, self._reasons):
            self._think(rest)
        elif self._state is self._text_state:
            self._say(rest)
        else:
            self._rest(rest, reason)
        if blank := self._thought.finish():
            self._out.append(Reasoning(blank))
        if blank := self._content.finish():
            self._out.append(Content(blank))
        self._finished, self._buffer = True, ""
        pieces += self._out
        self._out = []
        return merge(pieces)

    def _rest(self, rest: str, reason: str) -> None:
        """What a format does with text that was held back in a state of its own when the answer ended: a cut marker, no text."""

    def _nothing(self) -> bool:
        return False

    def _run(self) -> list[Piece]:
        while self._state():
            pass
        self._buffer, self._at = self._buffer[self._at :], 0
        pieces, self._out = self._out, []
        return merge(pieces) if len(pieces) > 1 else pieces

    # -- reading

    def _take(self, end: int) -> str:
        """Reads up to `end`; the text read."""
        text = self._buffer[self._at : end]
        self._at = end
        if self._back and text:
            self._raw.append(text)
        return text

    def _skip_space(self) -> bool:
        """Reads white space; whether something else follows."""
        self._take(skip(self._buffer, self._at))
        return self._at < len(self._buffer)

    def _comes(self, expected: str, *, after_space: bool = False) -> bool | None:
        """Reads `expected` if it comes next; None while that is not certain, False when something else comes (nothing is read)."""
        buffer = self._buffer
        place = skip(buffer, self._at) if after_space else self._at
        if buffer.startswith(expected, place):
            self._take(place + len(expected))
            return True
        return None if expected.startswith(buffer[place:]) else False

    # -- content and reasoning

    def _say(self, text: str) -> None:
        said = self._content.push(text)
        if said:
            self._out.append(Content(said))

    def _think(self, text: str) -> None:
        said = self._thought.push(text)
        if said:
            self._out.append(Reasoning(said))

    def _text(self) -> bool:
        """State: content, until a marker."""
        buffer = self._buffer
        beginning = not self._content.started and not self._calls
        if beginning:
            place = skip(buffer, self._at)
            if place == len(buffer):
                return False
            if buffer[place] in self.bare:
                self._say(buffer[self._at : place])
                self._at = place
                self._suspect(1, consumed=0)
                self._state = self._bare_opens
                return True
        place, marker = self._text_markers.find(buffer, self._at)
        self._say(buffer[self._at : place])
        self._at = place
        if marker is None:
            return False
        reasoning = self._reasoning
        if reasoning is not None and marker in (reasoning.begin, reasoning.end):
            self._at += len(marker)
            if marker == reasoning.end:
                self._content.marker()  # closes nothing, but is still no text
            elif reasoning.repeats or (beginning and not self._thought.started and not self._content.started):
                self._open_reasoning()
            else:
                self._say(marker)
            return True
        self._suspect(len(marker), consumed=len(marker))
        self._state = self._opens(marker)
        return True

    def _open_reasoning(self) -> None:
        self._content.marker()
        self._thought.marker()
        self._state = self._reasoning_opens

    def _reasoning_opens(self) -> bool:
        """State: at the beginning of reasoning, where some models say the begin marker again."""
        assert self._reasoning is not None
        come = self._comes(self._reasoning.begin, after_space=True)
        if come is not None:
            self._state = self._reasons
        return come is not None

    def _reasons(self) -> bool:
        """State: reasoning, until its end marker. Calls are not looked for here."""
        place, marker = self._reasoning_end.find(self._buffer, self._at)
        self._think(self._buffer[self._at : place])
        self._at = place
        if marker is None:
            return False
        self._at += len(marker)
        self._thought.marker()
        self._content.marker()
        self._state = self._text_state
        return True

    # -- calls

    def _opens(self, marker: str) -> Callable[[], bool]:
        """The state that follows an opener."""
        raise NotImplementedError

    def _bare_opens(self) -> bool:
        """State: a bare character may have begun a call."""
        raise NotImplementedError

    def _suspect(self, back: int, *, consumed: int) -> None:
        """From here on text is tentative; `back` characters of it become content if it is no call."""
        self._raw.clear()
        self._back = back
        if consumed:
            self._take(self._at + consumed)

    def _give_back(self) -> bool:
        """It is no call: its marker is content, the rest is read again."""
        raw = "".join(self._raw)
        back = min(self._back, len(raw)) or 1
        self._buffer, self._at = raw + self._buffer[self._at :], 0
        self._raw.clear()
        self._back = 0
        self._arguments = None
        self._say(self._buffer[:back])
        self._at = min(back, len(self._buffer))
        self._state = self._text_state
        return True

    def _accepts(self, name: str) -> bool:
        """For formats without markers: only tools that exist, if they are known."""
        return not self._tools or name in self._tools

    def _begin(self, name: str, given_id: str | None = None) -> None:
        """The call is certain."""
        self._raw.clear()
        self._back = 0
        self._content.marker()
        known = given_id is not None and _GIVEN_ID.match(given_id) is not None
        self._out.append(ToolCallBegin(self._calls, given_id if known and given_id else self._new_id(), name))
        self._calls += 1
        self._open = True

    def _argue(self, text: str) -> None:
        if text:
            self._out.append(ToolArguments(self._calls - 1, text))

    def _end(self, *, complete: bool, why: str = "") -> None:
        self._out.append(ToolCallEnd(self._calls - 1, complete, why))
        self._open = False
        self._complete += complete
        self._content.marker()

    def _break_off(self, leftover: str = "") -> bool:
        """The call that has begun is malformed from here; the rest is content."""
        self._end(complete=False, why="malformed")
        self._buffer, self._at = leftover + self._buffer[self._at :], 0
        self._arguments = None
        self._state = self._text_state
        return True

    def _call_arguments(self, name: str, *, given_id: str | None = None, then: Callable[[], bool]) -> bool:
        """A call whose name is known and whose arguments stand next, as an object or as a string of one.

        Begins it and sets the state that reads them; False (nothing changed) when something else stands there. Needs one
        character to look at.
        """
        character = self._buffer[self._at]
        if character not in '{"':
            return False
        self._begin(name, given_id)
        self._arguments = JsonReader() if character == "{" else QuotedJsonReader()
        self._after_arguments = then
        self._state = self._reads_arguments
        return True

    def _reads_arguments(self) -> bool:
        """State: inside a call's arguments."""
        reader = self._arguments
        assert reader is not None
        self._at, given = reader.feed(self._buffer, self._at)
        self._argue(given)
        if reader.status == "more":
            return False
        if reader.status == "bad":
            return self._break_off(getattr(reader, "leftover", ""))
        self._arguments = None
        self._end(complete=True)
        self._state = self._after_arguments
        return True

    def _empty_call(self, name: str, given_id: str | None = None) -> None:
        """A whole call without arguments."""
        self._begin(name, given_id)
        self._argue("{}")
        self._end(complete=True)
