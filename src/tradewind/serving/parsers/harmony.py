"""gpt-oss (harmony): messages with a channel each, `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final...`.

`analysis` is reasoning; `final`, and `commentary` to nobody, are content; a message to `functions.NAME` is a call. Messages to
other recipients (built-in tools) are calls if a tool has that name, otherwise they stay what their channel is.
Headers are never text: a cut one is left out.
"""

from __future__ import annotations

import re

from tradewind.serving.parsers.json_reader import MAX_NAME, SPACE, JsonReader
from tradewind.serving.parsers.machine import Machine, Markers
from tradewind.serving.parsers.parser import Circumstances, GrammarHint
from tradewind.serving.parsers.pieces import Piece

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MAX_HEADER = 1024

HINT = GrammarHint(
    before_name=CHANNEL + "commentary to=functions.",
    after_name=" " + CONSTRAIN + "json" + MESSAGE,
    after_arguments=CALL,
    between=START + "assistant",
    trigger=CHANNEL + "commentary to=functions.",
    tokens=(START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN),
)

_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_RECIPIENT_FIRST = "to="


class HarmonyParser(Machine):
    """Channels in, pieces out. Brings its own reasoning; other reasoning markers are not looked for."""

    _any = Markers((START, CHANNEL, MESSAGE, END, CALL, RETURN))
    _header_marks = Markers((MESSAGE, END, CALL, RETURN))

    def __init__(self, circumstances: Circumstances) -> None:
        super().__init__(circumstances)
        self._thinks = False  # the message being read is reasoning
        self._header = ""
        self._name = ""
        self._state = self._answer_opens

    def push(self, text: str) -> list[Piece]:
        """See OutputParser."""
        if self._finished or not text:
            return []
        self._buffer += text
        return self._run()

    def _answer_opens(self) -> bool:
        """State: the prompt ends inside a header, which the answer may go on with."""
        come = self._comes(_RECIPIENT_FIRST, after_space=True)
        if come is None:
            return False
        if come:
            self._header = _RECIPIENT_FIRST
            self._state = self._reads_header
        else:
            self._state = self._message
        return True

    def _message(self) -> bool:
        """State: text of a message, or between messages."""
        place, marker = self._any.find(self._buffer, self._at)
        self._tell(self._buffer[self._at : place])
        self._at = place
        if marker is None:
            return False
        self._at += len(marker)
        if marker in (START, CHANNEL):
            self._header = marker
            self._state = self._reads_header
        else:
            self._content.marker()
            self._thought.marker()
            self._thinks = False
        return True

    def _tell(self, text: str) -> None:
        if self._thinks:
            self._think(text)
        else:
            self._say(text)

    def _reads_header(self) -> bool:
        """State: between a marker and `<|message|>`."""
        place, marker = self._header_marks.find(self._buffer, self._at)
        self._header += self._buffer[self._at : place]
        self._at = place
        if len(self._header) > MAX_HEADER:
            self._say(self._header)
            self._header, self._thinks = "", False
            self._state = self._message
            return True
        if marker is None:
            return False
        self._at += len(marker)
        self._thinks = False
        self._state = self._message
        if marker == MESSAGE:
            self._opens_message(self._header)
        self._header = ""
        return True

    def _opens_message(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1] if recipient is not None else ""
        if name.startswith("functions."):
            name = name.removeprefix("functions.")
        elif name not in self._tools:
            name = ""
        if 0 < len(name) <= MAX_NAME and name.isprintable():
            self._name = name
            self._state = self._call_opens
            return
        self._thinks = channel is not None and channel[1] == "analysis"
        (self._thought if self._thinks else self._content).border()

    def _call_opens(self) -> bool:
        """State: a call's arguments, or its end when it has none, must follow."""
        if not self._skip_space():
            return False
        if self._call_arguments(self._name, then=self._message):
            return True
        place, marker = self._any.find(self._buffer, self._at)
        if place == self._at and marker is None:
            return False
        if marker is not None and place == self._at:
            self._empty_call(self._name)
        else:
            self._content.border()
        self._state = self._message
        return True

    def _rest(self, rest: str) -> None:
        if self._state == self._message:
            # A cut marker: in this format the markers are single tokens, so what looks like a part of one is text.
            self._tell(rest)
        elif self._state == self._call_opens and not rest.strip(SPACE):
            # The end markers of a call are end-of-text tokens and may have been left out: the message was empty.
            pass


assert JsonReader
