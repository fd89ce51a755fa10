"""The border between the front's process and the engine's: messages, and a link that carries them.

Knows: what may cross and how it is framed. Refuses to know: who starts whom, and what a message leads to.

      front  --  Start, Add, Cancel, Finish, Forget, Sleep, Describe, CheckAdapter, Fault, Drain, Stop  -->  engine
      front  <--  Located, Ready, Batch (one per turn of the engine), Described, AdapterChecked, Fatal  --  engine

      on the socket      | length, 4 bytes | msgpack | length | msgpack | ...

The end of the stream is a message too: it tells the engine that the front is gone, whatever killed it, and the front that the engine is.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np

from tradewind.config.goals import Goals
from tradewind.config.plan import CachePlan, Plan, SchedulePlan
from tradewind.contract.events import Event
from tradewind.engine.columns import Report, StepTokens
from tradewind.engine.loop import Add, Cancel, Finish, Forget, Sleep
from tradewind.engine.stats import EngineStats

MAX_MESSAGE_BYTES = 1 << 30
"""A longer frame is no message of ours."""
CHUNK_BYTES = 1 << 18
BUFFER_BYTES = 1 << 20
"""Asked of the kernel for each direction; it may give less."""
_LENGTH = struct.Struct(">I")


# -- front to engine -------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message: what to build."""

    goals: Goals
    script: bytes | None = None
    """The text of a script file: its answers instead of a model's."""
    script_name: str = ""
    began_s: float = 0.0
    """When the front started this process, by `time.perf_counter`, so that no part of the start is in nobody's account."""
    faults: bool = False
    """Whether `Fault` is obeyed."""
    step_times: str = ""
    """A file that fitted step times are read from and kept in; empty: none."""
    adapters: dict[str, str] = {}
    """Name -> key (`Request.adapter`) of the adapters to begin with, where `goals.adapters` makes room; the start fails with one that the
    model cannot take."""


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Asks for `Described`; answered also while a step hangs."""


class CheckAdapter(msgspec.Struct, frozen=True, tag=True):
    """Asks whether the model can take an adapter, by its key; answered with `AdapterChecked` beside the steps. Nothing is loaded: the first
    request that names the adapter does that."""

    key: str


class Fault(msgspec.Struct, frozen=True, tag=True):
    """A fault switch, for tests of what people see: the next step stalls, waits for a disk or has no memory, or the engine dies."""

    do: str
    seconds: float = 0.0


class Drain(msgspec.Struct, frozen=True, tag=True):
    """No request follows: end when the open ones have."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End now: open requests end with "abort"."""


Order = Start | Add | Cancel | Finish | Forget | Sleep | Describe | CheckAdapter | Fault | Drain | Stop


# -- engine to front -------------------------------------------------------------------------------------------------


class Located(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model's files are there and the plan is made, so that the front can read the tokenizer while weights load."""

    path: str
    plan: Plan | None = None
    """None when a script is served: nothing was measured."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests may come."""

    schedule: SchedulePlan
    cache: CachePlan
    drafts_per_row: int = 0
    phases: tuple[tuple[str, float], ...] = ()
    """What the start took, (name, seconds), from `Start.began_s` on without a gap."""
    notices: tuple[str, ...] = ()


class Columns(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`StepTokens` as bytes: int32 columns in the machine's own order, for both ends are on one machine."""

    at_s: float
    ids: list[str]
    tokens: bytes
    generated: bytes
    cached: bytes
    prompt: bytes


class Batch(msgspec.Struct, frozen=True, tag=True):
    """Everything that one turn of the engine brought."""

    reports: list[Columns | Event]
    stats: EngineStats


class Described(msgspec.Struct, frozen=True, tag=True):
    """What `stats.describe` says, and the two facts of it that a diagnosis needs."""

    text: str
    doing: tuple[str, float] | None = None
    """The loop's verb, and for how long; None while the engine is built."""
    waits_on: str = ""
    """What the executor waits for, where it says so."""


class AdapterChecked(msgspec.Struct, frozen=True, tag=True):
    """Why the model cannot take an adapter, a whole sentence; None where it can."""

    key: str
    why: str | None = None


class Said(msgspec.Struct, frozen=True, tag=True):
    """Something for the log, which the front writes in its own form."""

    logger: str
    level: int
    """Of the package `logging`."""
    text: str


class Fatal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine cannot go on; the process ends after this."""

    why: str
    exit_code: int = 1
    by_user: bool = False
    """Something the user can put right: the text is a whole sentence with advice."""


Answer = Located | Ready | Batch | Described | AdapterChecked | Said | Fatal

ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def batch_of(reports: Sequence[Report], stats: EngineStats) -> Batch:
    """Reports as a message; the columns are copied."""
    return Batch([_packed(report) if isinstance(report, StepTokens) else report for report in reports], stats)


def reports_of(batch: Batch) -> list[Report]:
    """The reports of a message, in order; its columns are read where they lie."""
    return [_unpacked(report) if isinstance(report, Columns) else report for report in batch.reports]


def _packed(step: StepTokens) -> Columns:
    return Columns(
        at_s=step.at_s,
        ids=step.ids,
        tokens=step.tokens.tobytes(),
        generated=step.generated.tobytes(),
        cached=step.cached.tobytes(),
        prompt=step.prompt.tobytes(),
    )


def _unpacked(columns: Columns) -> StepTokens:
    return StepTokens(
        at_s=columns.at_s,
        ids=columns.ids,
        tokens=np.frombuffer(columns.tokens, np.int32),
        generated=np.frombuffer(columns.generated, np.int32),
        cached=np.frombuffer(columns.cached, np.int32),
        prompt=np.frombuffer(columns.prompt, np.int32),
    )


# -- the link --------------------------------------------------------------------------------------------------------

In = TypeVar("In")


class BrokenLink(Exception):
    """What came over the link is no message: the two ends are not of one version."""


class Frames:
    """Cuts a stream of bytes into messages' bytes. One writer."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[memoryview]:
        """Takes the next bytes and gives the messages that are whole now. They are views: to be decoded before the next call."""
        source: bytes | bytearray = data
        if self._rest:
            self._rest += data
            source = self._rest
        view = memoryview(source)
        out: list[memoryview] = []
        at, end = 0, len(source)
        while end - at >= 4:
            (length,) = _LENGTH.unpack_from(source, at)
            if length > MAX_MESSAGE_BYTES:
                raise BrokenLink(f"a message of {length} bytes is announced, more than there can be")
            if end - at - 4 < length:
                break
            out.append(view[at + 4 : at + 4 + length])
            at += 4 + length
        if at or source is data:
            self._rest = bytearray(view[at:])
        return out


class Link(Generic[In]):
    """One end of the border. `send` may be called from any thread, the receiving calls from one."""

    def __init__(self, sock: socket.socket, takes: msgspec.msgpack.Decoder[In]) -> None:
        self._socket = sock
        self._decode: Callable[[memoryview], In] = takes.decode
        self._encoder = msgspec.msgpack.Encoder()
        self._frames = Frames()
        self._ready: deque[In] = deque()
        self._lock = threading.Lock()
        self._ended = False
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)

    def fileno(self) -> int:
        """The socket's number; -1 after `close`."""
        return self._socket.fileno()

    def framed(self, message: msgspec.Struct) -> bytearray:
        """The bytes of a message."""
        frame = bytearray(4)
        self._encoder.encode_into(message, frame, 4)
        _LENGTH.pack_into(frame, 0, len(frame) - 4)
        return frame

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message, waiting while the other end is slow. Raises OSError when there is no other end."""
        frame = self.framed(message)
        with self._lock:
            self._socket.sendall(frame)

    def send_now(self, frame: bytes | bytearray | memoryview) -> int:
        """Sends as much of some bytes as goes without waiting; how much went. Raises OSError when there is no other end."""
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return 0

    def receive(self, *, timeout_s: float | None = None) -> In | None:
        """Waits for the next message; None at the end of the stream. Raises TimeoutError, and BrokenLink for bytes that are no message."""
        while not self._ready:
            if self._ended:
                return None
            try:
                if timeout_s is not None and not self._readable(timeout_s):
                    raise TimeoutError("no message came in time")
                self._take(self._socket.recv(CHUNK_BYTES))
            except ConnectionError:
                self._ended = True
        return self._ready.popleft()

    def _readable(self, timeout_s: float) -> bool:
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return bool(waiting.poll(max(0.0, timeout_s) * 1e3))

    def receive_ready(self) -> list[In] | None:
        """The messages that are there, without waiting; None when the stream has ended and all were given."""
        if not self._ended:
            try:
                self._take(self._socket.recv(CHUNK_BYTES, socket.MSG_DONTWAIT))
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self._ended = True
        if not self._ready:
            return None if self._ended else []
        out = list(self._ready)
        self._ready.clear()
        return out

    def _take(self, data: bytes) -> None:
        if not data:
            self._ended = True
            return
        try:
            self._ready.extend(self._decode(frame) for frame in self._frames.feed(data))
        except msgspec.MsgspecError as error:
            raise BrokenLink(f"a message cannot be read: {error}") from None

    def close(self) -> None:
        """Ends the stream in both directions; the other end sees it as the end of messages."""
        self._socket.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends: the first stays, the second is handed to the child. Neither is inherited unless it is named."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
