"""gpt-oss (harmony): messages with a channel each, `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final...`.

`analysis` is reasoning; `final`, and `commentary` to nobody, are content; a message to `functions.NAME` is a call. Messages to
other recipients (built-in tools) are calls if a tool has that name, otherwise they stay what their channel is.
Headers are never text: a cut one is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tradewind.serving.parsers.json_reader import MAX_NAME
from tradewind.serving.parsers.machine import Machine, Markers
from tradewind.serving.parsers.parser import Circumstances, GrammarHint

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
_FUNCTIONS = "functions."


class HarmonyParser(Machine):
    """Channels in, pieces out. Brings its own reasoning; other reasoning markers are not looked for."""

    openers = (START, CHANNEL, MESSAGE, END, CALL, RETURN)

    _header_ends = Markers((MESSAGE, END, CALL, RETURN))

    def __init__(self, circumstances: Circumstances) -> None:
        super().__init__(circumstances)
        self._takes_calls = circumstances.calls
        self._text_markers = Markers(self.openers)
        self._text_state = self._message
        self._state = self._answer_opens
        self._header = ""
        self._name = ""

    def _answer_opens(self) -> bool:
        """State: the prompt ends inside a header, which the answer may go on with."""
        come = self._comes(_RECIPIENT_FIRST, after_space=True)
        if come is None:
            return False
        if come:
            self._header = _RECIPIENT_FIRST
            self._state = self._reads_header
        else:
            self._state = self._text_state
        return True

    def _message(self) -> bool:
        """State: content, or between messages."""
        return self._body(self._say)

    def _analysis(self) -> bool:
        """State: a message that is reasoning."""
        return self._body(self._think)

    def _body(self, tell: Callable[[str], None]) -> bool:
        place, marker = self._text_markers.find(self._buffer, self._at)
        tell(self._buffer[self._at : place])
        self._at = place
        if marker is None:
            return False
        self._at += len(marker)
        self._content.marker()
        self._thought.marker()
        if marker in (START, CHANNEL):
            self._header = marker
            self._state = self._reads_header
        else:
            self._state = self._text_state
        return True

    def _reads_header(self) -> bool:
        """State: between a marker and `<|message|>`."""
        place, marker = self._header_ends.find(self._buffer, self._at)
        self._header += self._buffer[self._at : place]
        self._at = place
        if len(self._header) > MAX_HEADER:
            self._say(self._header)
            self._state = self._text_state
            return True
        if marker is None:
            return False
        self._at += len(marker)
        self._state = self._text_state
        if marker == MESSAGE:
            self._message_opens(self._header)
        return True

    def _message_opens(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1] if recipient is not None and self._takes_calls else ""
        if name.startswith(_FUNCTIONS):
            name = name.removeprefix(_FUNCTIONS)
        elif name not in self._tools:
            name = ""
        if 0 < len(name) <= MAX_NAME and name.isprintable():
            self._name = name
            self._state = self._call_opens
        elif channel is not None and channel[1] == "analysis":
            self._thought.border()
            self._state = self._analysis
        else:
            self._content.border()

    def _call_opens(self) -> bool:
        """State: a call's arguments, or its end when it has none, must follow."""
        if not self._skip_space():
            return False
        if self._call_arguments(self._name, then=self._text_state):
            return True
        place, marker = self._text_markers.find(self._buffer, self._at)
        if place == self._at:
            if marker is None:
                return False
            self._empty_call(self._name)
        else:
            self._content.border()
        self._state = self._text_state
        return True

    def _rest(self, rest: str, reason: str) -> None:
        if self._state == self._analysis:
            self._think(rest)
        elif self._state == self._answer_opens:
            self._say(rest)
        elif self._state == self._call_opens and reason == "stop":
            # The marker that ends a call also ends the answer, and does not reach the text.
            self._empty_call(self._name)
        elif self._state == self._call_opens:
            self._begin(self._name)
            self._end(complete=False, why="cut")
