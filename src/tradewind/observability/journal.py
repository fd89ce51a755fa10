"""The journal of a server's traffic: what came when, how long it was, what its prompts had in common, and how it went.

Knows: files of lines, their rotation, and what is left out of them. Refuses to know: HTTP, text, and what is done with a journal (replay).

A journal is redacted unless it was asked to be raw. Of a prompt it then holds its length and one number for each of its blocks of tokens:
a keyed hash of the block and of all before it. Equal numbers mean equal beginnings; the key is drawn when the server starts and is written
nowhere, so that no text can be tried against the numbers.

      prompt + answer    | block 0 | block 1 | block 2 | rest |
      blocks             [  h0        h1        h2  ]              h1 = keyed hash of (h0, tokens of block 1);  h0 of (cache namespace, ...)

Requests are taken in by the server's thread, as references; a thread of the journal's own hashes, spells and writes. What it cannot keep up
with is dropped and counted.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import re
import secrets
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from tradewind.contract.errors import UserError
from tradewind.contract.request import Request, SamplingParams
from tradewind.observability.lives import ReceiptLike
from tradewind.observability.receipts import ItemisedReceipt

LOG = logging.getLogger("tradewind.journal")

FORMAT, VERSION = "tradewind-journal", 1
MAX_FILE_BYTES = 64 << 20
MAX_BYTES = 1 << 30
"""So much of a folder the files of a journal take at most; the oldest are deleted first."""
WAITING = 4096
"""So many requests may wait to be written, and so many for their other half ..."""
WAITING_TOKENS = 4 << 20
"""... and so many tokens of requests that wait to be written, for these are kept in memory."""
NAME = re.compile(r"journal-(\d{13})-(\d{5})\.jsonl")

Kind = Literal["chat", "completion", "responses", "embedding"]
KINDS: dict[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "responses",
    "/v1/embeddings": "embedding",
}


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of each file."""

    format: str
    version: int
    run: str
    """Files of one start of the server have the same; only their block numbers can be compared."""
    began: float
    """Unix time of that start."""
    redacted: bool
    block_tokens: int
    vocab_size: int
    model: str


class SequenceEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sample of one prompt."""

    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    blocks: tuple[int, ...] = ()
    """Of the prompt and the answer behind it, whole blocks only."""
    prompt: tuple[int, ...] | None = None
    output: tuple[int, ...] | None = None
    """Tokens; only in a raw journal, and not of a prompt with images, whose pixels no journal has."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One HTTP request that has ended."""

    id: str
    at: float
    """Unix time of its arrival."""
    kind: Kind
    stream: bool
    n: int = 1
    """Samples of each prompt."""
    sampling: Literal["greedy", "sampled"] = "greedy"
    constrained: bool = False
    """Its answer had to fit a grammar."""
    priority: int = 0
    traffic_class: str = ""
    tenant: str = ""
    """A hash that is the same again in this run only."""
    namespace: str = ""
    """A hash of what keeps its prefixes apart from others' (cache salt, adapter); empty for what all share."""
    sequences: tuple[SequenceEntry, ...]
    receipt: ItemisedReceipt | None = None
    """How it went; what a client wrote into it is left out where the journal is redacted."""
    params: SamplingParams | None = None
    grammar: str | None = None
    """Only in a raw journal."""


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """What was read."""

    header: Header
    """Of the latest run."""
    entries: tuple[Entry, ...]
    """In order of arrival."""
    notes: tuple[str, ...] = ()
    """What was left out, one sentence each."""


# -- hashing -------------------------------------------------------------------------------------------------------------


def block_chain(tokens: Sequence[int], *, block_tokens: int, key: bytes, namespace: str = "") -> tuple[int, ...]:
    """One number (60 bits) for each whole block, that depends on it and all before it. Pure; `key` is 16 bytes or more."""
    data = array("i", tokens).tobytes()
    size = 4 * block_tokens
    chain = hashlib.blake2b(namespace.encode(), digest_size=8, key=key).digest()
    out: list[int] = []
    for at in range(0, len(data) - size + 1, size):
        chain = hashlib.blake2b(chain + data[at : at + size], digest_size=8, key=key).digest()
        out.append(int.from_bytes(chain, "little") >> 4)
    return tuple(out)


# -- writing -------------------------------------------------------------------------------------------------------------


class JournalWriter:
    """Writes one journal. `take` and `take_itemised` are called by one thread, return at once and never raise; `close` waits.

    `dropped` counts requests that were lost because the disk was slow or full.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        vocab_size: int,
        block_tokens: int = 16,
        raw: bool = False,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_bytes: int = MAX_BYTES,
        key: bytes | None = None,
    ) -> None:
        """Makes the folder and the first file. Raises UserError when that fails. `key` is drawn unless it is given (for tests)."""
        self._folder, self._raw = folder, raw
        self._max_file_bytes, self._max_bytes = max_file_bytes, max_bytes
        self._key = secrets.token_bytes(32) if key is None else key
        began = time.time()
        self._header = Header(
            format=FORMAT,
            version=VERSION,
            run=secrets.token_hex(8),
            began=began,
            redacted=not raw,
            block_tokens=block_tokens,
            vocab_size=vocab_size,
            model=model,
        )
        self._stem = f"journal-{int(began * 1e3):013d}"
        self._files = 0
        self._bytes = 0
        self._out: int | None = None
        self.dropped = 0
        self.written = 0
        self._broken = False
        self._put_tokens = self._got_tokens = 0
        """Tokens that were queued, counted by the server's thread, and taken from the queue, counted by the journal's."""
        self._asked: OrderedDict[str, tuple[ReceiptLike, Sequence[tuple[Request, Sequence[int]]]]] = OrderedDict()
        self._made: OrderedDict[str, ItemisedReceipt] = OrderedDict()
        self._queue: queue.SimpleQueue[
            tuple[ReceiptLike, Sequence[tuple[Request, Sequence[int]]], ItemisedReceipt] | None
        ]
        self._queue = queue.SimpleQueue()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise UserError(
                f"the journal cannot be written to {folder}: {error.strerror or error}; name another folder with --record"
            ) from None
        self._thread = threading.Thread(target=self._run, name="tradewind-journal", daemon=True)
        self._thread.start()

    # -- from the server's thread

    def take(self, receipt: ReceiptLike, asked: Sequence[tuple[Request, Sequence[int]]]) -> None:
        """What was asked and answered: `serving.http.front.Front.on_record`. The sequences are not copied and must not change."""
        made = self._made.pop(receipt.id, None)
        if made is not None:
            self._put(receipt, asked, made)
            return
        self._asked[receipt.id] = (receipt, asked)
        if len(self._asked) > WAITING:
            self._asked.popitem(last=False)
            self.dropped += 1

    def take_itemised(self, made: ItemisedReceipt, receipt: ReceiptLike | None) -> None:
        """How it went: `hub.Hub.on_itemised`."""
        found = self._asked.pop(made.id, None)
        if found is not None:
            self._put(*found, made)
            return
        self._made[made.id] = made
        if len(self._made) > WAITING:
            self._made.popitem(last=False)

    def _put(self, receipt: ReceiptLike, asked: Sequence[tuple[Request, Sequence[int]]], made: ItemisedReceipt) -> None:
        waiting = self._put_tokens - self._got_tokens
        if self._broken or self._queue.qsize() >= WAITING or waiting >= WAITING_TOKENS:
            self.dropped += 1
            return
        self._put_tokens += _tokens(asked)
        self._queue.put((receipt, asked, made))

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Writes what waits and closes the file; a second call does nothing."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout_s)
        if self.dropped:
            LOG.warning("the journal has lost %d requests: the disk was too slow, or full", self.dropped)

    # -- in its own thread

    def _run(self) -> None:
        encode = msgspec.json.Encoder().encode
        while (item := self._queue.get()) is not None:
            self._got_tokens += _tokens(item[1])
            if self._broken:
                self.dropped += 1
                continue
            try:
                self._write(encode(self._entry(*item)) + b"\n")
                self.written += 1
            except OSError as error:
                self._broken = True
                self.dropped += 1
                LOG.error("the journal in %s ends here: %s", self._folder, error.strerror or error)
            except Exception as error:  # one entry that cannot be spelled must not end the journal
                self.dropped += 1
                LOG.error("a request could not be written to the journal", exc_info=error)
        if self._out is not None:
            os.close(self._out)
            self._out = None

    def _write(self, line: bytes) -> None:
        if self._bytes and self._bytes + len(line) > self._max_file_bytes:
            self._open()
        assert self._out is not None
        left = memoryview(line)
        while left:  # a file may take less than it is given
            left = left[os.write(self._out, left) :]
        self._bytes += len(line)

    def _open(self) -> None:
        """Begins the next file and makes room for it."""
        if self._out is not None:
            os.close(self._out)
            self._out = None
        path = self._folder / f"{self._stem}-{self._files:05d}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        self._out = os.open(path, flags, 0o600)  # whoever may not run the server shall not read what people ask
        self._files += 1
        self._bytes = 0
        self._write(msgspec.json.encode(self._header) + b"\n")
        sizes = [(file, file.stat().st_size) for file in journal_files(self._folder)]
        total = sum(size for _, size in sizes) + self._max_file_bytes
        for file, size in sizes[:-1]:
            if total <= self._max_bytes:
                break
            file.unlink(missing_ok=True)
            total -= size

    def _hash(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), digest_size=6, key=self._key).hexdigest() if text else ""

    def _entry(
        self, receipt: ReceiptLike, asked: Sequence[tuple[Request, Sequence[int]]], made: ItemisedReceipt
    ) -> Entry:
        first, _ = asked[0]
        space = f"{first.cache_salt}\n{first.adapter}" if first.cache_salt or first.adapter else ""
        if not self._raw:
            made = msgspec.structs.replace(
                made, request_id="", error=None if made.error is None else "left out of a redacted journal"
            )
        return Entry(
            id=made.id,
            at=made.arrived,
            kind=KINDS.get(made.endpoint, "completion"),
            stream=made.stream,
            n=max(1, first.sampling.n),
            sampling="greedy" if first.sampling.temperature == 0 else "sampled",
            constrained=first.grammar is not None,
            priority=first.priority,
            traffic_class=first.traffic_class,
            tenant=self._hash(first.tenant),
            namespace=self._hash(space),
            sequences=tuple(self._sequence(request, tokens, space) for request, tokens in asked),
            receipt=made,
            params=first.sampling if self._raw else None,
            grammar=first.grammar if self._raw else None,
        )

    def _sequence(self, request: Request, output: Sequence[int], space: str) -> SequenceEntry:
        whole = [*request.tokens, *output]
        for (
            first,
            count,
            image,
        ) in request.image_keys:  # their tokens are all the same mark: what stands there is the image's
            whole[first : first + count] = _spelled(image, count)
        raw = self._raw and not request.image_keys  # no journal has pixels, so that prompt could not be sent again
        return SequenceEntry(
            prompt_tokens=len(request.tokens),
            output_tokens=len(output),
            max_tokens=request.max_tokens,
            blocks=block_chain(whole, block_tokens=self._header.block_tokens, key=self._key, namespace=space),
            prompt=request.tokens if raw else None,
            output=tuple(output) if raw else None,
        )


def _spelled(image: str, count: int) -> list[int]:
    """So many numbers for an image: the same for the same one."""
    drawn = hashlib.shake_128(image.encode()).digest(4 * count)
    return array("i", drawn).tolist()


def _tokens(asked: Sequence[tuple[Request, Sequence[int]]]) -> int:
    """Prompt tokens of a request; its answers may still grow, so that they cannot be counted twice alike."""
    return sum(len(request.tokens) for request, _ in asked)


# -- reading -------------------------------------------------------------------------------------------------------------


def journal_files(folder: Path) -> list[Path]:
    """The files of a folder's journals, oldest first."""
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))


def read_entries(place: Path) -> Iterator[Header | Entry | str]:
    """What a folder of journals or one file says, in order: headers, entries, and a sentence where something was left out.

    Raises UserError, with file and line, for what is no journal. Only a last line that was cut (the server died) is left out.
    """
    try:
        files = journal_files(place) if place.is_dir() else [place]
        if not files:
            raise UserError(
                f"there is no journal in {place}: it has no file journal-*.jsonl; tradewind serve --record makes one"
            )
        for path in files:
            yield from _file_entries(path)
    except OSError as error:
        raise UserError(f"the journal {place} cannot be read: {error.strerror or error}") from None


def _file_entries(path: Path) -> Iterator[Header | Entry | str]:
    entries = msgspec.json.Decoder(Entry)
    if not path.stat().st_size:
        raise UserError(f"{path} is empty, so it is no journal")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if number == 1:
                    yield _header(line)
                elif line.strip():
                    yield entries.decode(line)
            except msgspec.DecodeError as error:
                if number > 1 and not line.endswith(b"\n"):
                    yield f"{path.name}: the last line was cut and is left out"
                    return
                raise UserError(f"{path}, line {number}: this is no line of a journal: {error}") from None
            except UnicodeDecodeError:
                raise UserError(f"{path}, line {number}: this is no text") from None
            except UserError as error:
                raise UserError(f"{path}, line {number}: {error}") from None


def _header(line: bytes) -> Header:
    header = msgspec.json.decode(line, type=Header)
    if header.format != FORMAT:
        raise UserError(f"the format is {header.format!r}, not {FORMAT!r}")
    if header.version != VERSION:
        raise UserError(f"version {header.version} of the journal's format is not known; this is version {VERSION}")
    if header.block_tokens < 1 or header.vocab_size < 1:
        raise UserError(
            f"block_tokens is {header.block_tokens} and vocab_size {header.vocab_size}; both must be at least 1"
        )
    return header


def read_journal(place: Path, *, limit: int | None = None) -> Journal:
    """The latest run of a folder, or of one file, in order of arrival; at most the first `limit` requests. Raises UserError.

    Earlier runs have other keys, so that their prefixes cannot be compared; a note says how many requests they had.
    """
    header: Header | None = None
    entries: list[Entry] = []
    notes: list[str] = []
    earlier = 0
    for item in read_entries(place):
        if isinstance(item, Header):
            if header is not None and item.run != header.run:
                earlier += len(entries)
                entries.clear()
            header = item
        elif isinstance(item, Entry):
            entries.append(item)
        else:
            notes.append(item)
    assert header is not None, "a file without a header was read"
    if earlier:
        notes.append(f"{earlier} requests of earlier starts of the server are left out; name their files to read them")
    entries.sort(key=lambda entry: entry.at)
    if limit is not None and len(entries) > limit:
        notes.append(f"only the first {limit} of {len(entries)} requests are read")
        del entries[limit:]
    return Journal(header=header, entries=tuple(entries), notes=tuple(notes))
