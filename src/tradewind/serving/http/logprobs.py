"""Logprobs in the two shapes of the API.

Knows: how a token is spelled for people, that lists are sorted. Refuses to know: where the numbers come from.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from tradewind.contract.step import TokenLogprobs
from tradewind.serving.http.answers import TextLogprobs, TokenLogprob, TopLogprob
from tradewind.serving.tokenizer import TextTokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def token_name(tokenizer: TextTokenizer, token: int) -> str:
    """A token as text; a piece of a character as `bytes:\\xe2\\x82`, so that nothing is lost."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in data)


def _number(value: float) -> float:
    return value if value > LOWEST else LOWEST  # NaN too


def chat_logprobs(tokenizer: TextTokenizer, entries: Sequence[TokenLogprobs], *, top: int) -> list[TokenLogprob]:
    """One record per token, each with its `top` likeliest, best first."""
    return [
        TokenLogprob(
            token=token_name(tokenizer, entry.token),
            logprob=_number(entry.logprob),
            bytes=list(tokenizer.token_bytes(entry.token)),
            top_logprobs=[
                TopLogprob(
                    token=token_name(tokenizer, token), logprob=_number(value), bytes=list(tokenizer.token_bytes(token))
                )
                for token, value in best(entry, top)
            ],
        )
        for entry in entries
    ]


def best(entry: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    """The likeliest tokens, best first."""
    pairs = sorted(zip(entry.top_ids, entry.top_logprobs, strict=True), key=lambda pair: -pair[1])
    return pairs[:count]


class TextColumns:
    """The columns of a completion choice, filled while tokens come; each call of `take` gives what is new."""

    def __init__(self, tokenizer: TextTokenizer, *, top: int, skip_special: bool) -> None:
        """`skip_special`: special tokens are not in the text that the offsets count."""
        self._tokenizer, self._top = tokenizer, top
        self._shown = tokenizer.byte_table(skip_special=skip_special)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def take(self, entries: Sequence[TokenLogprobs]) -> TextLogprobs:
        """The columns of the next generated tokens."""
        names = [token_name(self._tokenizer, entry.token) for entry in entries]
        return TextLogprobs(
            tokens=names,
            token_logprobs=[_number(entry.logprob) for entry in entries],
            top_logprobs=[self._table(entry) for entry in entries] if self._top else None,
            text_offset=self._offsets([entry.token for entry in entries]),
        )

    def prompt(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs]) -> TextLogprobs:
        """The columns of an echoed prompt; nothing is known of its first token."""
        names = [token_name(self._tokenizer, token) for token in tokens]
        return TextLogprobs(
            tokens=names,
            token_logprobs=[None, *(_number(entry.logprob) for entry in entries)],
            top_logprobs=[None, *(self._table(entry) for entry in entries)] if self._top else None,
            text_offset=self._offsets(tokens),
        )

    def _table(self, entry: TokenLogprobs) -> dict[str, float] | None:
        table: dict[str, float] = {}
        for token, value in best(entry, self._top):
            table.setdefault(token_name(self._tokenizer, token), _number(value))
        # The chosen token is always told, as the API has it.
        table.setdefault(token_name(self._tokenizer, entry.token), _number(entry.logprob))
        return table

    def _offsets(self, tokens: Sequence[int]) -> list[int]:
        """Where each token's text begins, in characters; a token that only goes on with a character begins where that ends."""
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(self._shown[token]))
        return offsets


def join_columns(columns: Sequence[TextLogprobs]) -> TextLogprobs:
    """The sum of the columns of a stream."""
    with_top = any(part.top_logprobs is not None for part in columns)
    return TextLogprobs(
        tokens=[name for part in columns for name in part.tokens],
        token_logprobs=[value for part in columns for value in part.token_logprobs],
        top_logprobs=[table for part in columns for table in part.top_logprobs or ()] if with_top else None,
        text_offset=[offset for part in columns for offset in part.text_offset],
    )
