"""Ids to text while they arrive: whole characters only, and in sum exactly the text of the whole.

Knows: how bytes of a stream become characters, and what the end of the prompt means for the first of them.
Refuses to know: stop strings (text_stream.py), which ids end a text (tokenizer.py and the engine).
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from tradewind.serving.tokenizer import TextTokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")

_MAX_CHARACTER_BYTES = 4
_WINDOW_TOKENS = 6


class Detokenizer:
    """The text of one sequence, piece by piece. One writer: whoever streams that sequence.

    With P the prompt's ids and G all generated ids, the pieces add up to `decode(P + G)` without its first `decode(P)`
    (for an empty P simply `decode(G)`), and a character that the prompt began is given whole with the id that completes it.

    ::

        bytes     61 | e2 82      | ac 62 | ff ...
        push ->   a  | (nothing)  | €b    | U+FFFD, as no later byte can make ff a character
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompt_tail_ids: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        """`prompt_tail_ids`: the prompt's ids, or at least its last dozen; empty when the text begins here."""
        self._windowed: _WindowedDecoder | None = None
        if tokenizer.kind == "other":
            self._windowed = _WindowedDecoder(tokenizer, prompt_tail_ids, skip_special=skip_special)
        self._table: Mapping[int, bytes] = tokenizer.byte_table(skip_special=skip_special)
        # A pure C decoder that holds back an unfinished character and reports a hopeless one at once.
        self._utf8 = _UTF8("replace")
        tail = b"".join(self._table[token] for token in prompt_tail_ids[-4 * _MAX_CHARACTER_BYTES :])
        self._strip = tokenizer.strips_leading_space and not tail
        if tail and not tail.isascii():
            self._utf8.decode(_unfinished(tail))

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next ids, gives the characters they complete (often one piece, possibly none)."""
        if self._windowed is not None:
            return self._windowed.push(ids)
        table = self._table
        data = table[ids[0]] if len(ids) == 1 else b"".join([table[token] for token in ids])
        if self._strip and data:
            self._strip = False
            if data[0] == 0x20:
                data = data[1:]
        return self._utf8.decode(data)

    def finish(self) -> str:
        """Ends the text: an unfinished character becomes U+FFFD, as in the whole text; the detokenizer is then spent."""
        if self._windowed is not None:
            return self._windowed.finish()
        return self._utf8.decode(b"", True)


def _unfinished(data: bytes) -> bytes:
    """The end of `data` that may still become a character: a lead byte and fewer continuation bytes than it asks for."""
    for back in range(1, min(len(data), _MAX_CHARACTER_BYTES - 1) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # a lead byte or ASCII
            return data[-back:] if byte >= 0xC0 else b""
    return b""


class _WindowedDecoder:
    """For vocabularies whose ids do not spell bytes (their decoder looks at neighbours): decodes a window twice and compares."""

    def __init__(self, tokenizer: TextTokenizer, prompt_tail_ids: Sequence[int], *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids = list(prompt_tail_ids[-_WINDOW_TOKENS:])
        self._start = 0  # ids before this are never looked at again
        self._read = len(self._ids)  # ids before this have been given out

    def push(self, ids: Sequence[int]) -> str:
        pieces = []
        for token in ids:
            self._ids.append(token)
            pieces.append(self._advance(final=False))
        return "".join(pieces)

    def finish(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read], skip_special=self._skip_special)
        now = self._tokenizer.decode(self._ids[self._start :], skip_special=self._skip_special)
        if len(now) <= len(before) or (now.endswith("\ufffd") and not final):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return now[len(before) :]
