"""Calls written as JSON objects: one, several behind each other, or a list of them.

Knows: that shape, which Hermes, Llama 3, Mistral and guided JSON share. Refuses to know: the markers around it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from tradewind.serving.parsers.json_reader import CallReader
from tradewind.serving.parsers.machine import Machine, skip


class JsonCalls(Machine):
    """States for calls written as JSON objects."""

    closer: ClassVar[str] = ""
    """The marker behind the calls, if any; a missing one is forgiven."""
    separators: ClassVar[str] = ""
    """Characters that may stand between calls outside a list."""
    strict: ClassVar[bool] = False
    """Only the keys of a call, and only tools that exist: for text that no marker announces."""

    _reader: CallReader
    _listed = False
    _told = False  # the call of the object being read has begun

    def _opens(self, marker: str) -> Callable[[], bool]:
        return self._calls_open

    def _bare_opens(self) -> bool:
        self._state = self._calls_open
        return True

    def _calls_open(self) -> bool:
        """State: an object or a list of objects must follow."""
        if not self._skip_space():
            return False
        self._listed = self._buffer[self._at] == "["
        if self._listed:
            self._take(self._at + 1)
        self._state = self._call_opens
        return True

    def _call_opens(self) -> bool:
        """State: an object must follow."""
        if not self._skip_space():
            return False
        character = self._buffer[self._at]
        if character == "]" and self._listed and self._calls:  # a comma too many
            self._take(self._at + 1)
            self._state = self._closes
            return True
        if character != "{":
            return self._give_back()
        accepts: Callable[[str], bool] = self._accepts if self.strict else bool
        self._reader = CallReader(accepts, strict=self.strict, needs_arguments=self.strict and not self._tools)
        self._told = False
        self._state = self._call
        return True

    def _call(self) -> bool:
        """State: inside an object."""
        reader = self._reader
        self._take(reader.feed(self._buffer, self._at))
        if not self._told and reader.started and reader.name is not None:
            self._begin(reader.name, reader.id)
            self._told = True
        if self._open:
            self._argue(reader.take())
            if reader.finished:
                self._end(complete=True)
        if reader.status == "more":
            return False
        if reader.status == "done":
            self._suspect(1, consumed=0)
            self._state = self._between
            return True
        if self._open:
            return self._break_off(reader.leftover)
        if not self._told:
            return self._give_back()
        # The call was whole before its object went wrong, as when the last brace is missing.
        self._state = self._closes
        return True

    def _between(self) -> bool:
        """State: behind an object."""
        buffer = self._buffer
        place = skip(buffer, self._at)
        if place == len(buffer):
            return False
        character = buffer[place]
        if (self._listed and character == ",") or character in self.separators:
            self._take(place + 1)
            self._state = self._call_opens
        elif character == "{" and not self._listed:
            self._state = self._call_opens
        else:
            if character == "]" and self._listed:
                self._take(place + 1)
            self._state = self._closes
        return True

    def _closes(self) -> bool:
        """State: the closing marker follows, or is missing."""
        self._raw.clear()
        self._back = 0
        if self.closer and self._comes(self.closer, after_space=True) is None:
            return False
        self._state = self._text_state
        return True
