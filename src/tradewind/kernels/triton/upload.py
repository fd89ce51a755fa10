"""Weights from files to the device at the speed of disk and bus: threads read ahead into pinned memory, one stream copies and converts.

Knows: pieces, pinned buffers, the order on the upload stream, conversion on the device. Refuses to know: names of tensors and models, and
the byte layouts of GGUF blocks (`read_blocks` is given).

    file --pread--> two pinned buffers of a reader --copy--> bf16 tensor in place              (BF16 kept as BF16: no pass more)
                    (threads, no lock of Python)   --copy--> staging --convert / quantise--> tensor in place    (everything else)

`put` returns at once; what it was given is there after `finish`. Everything on the device happens on one stream, so the conversion needs no
event: whoever issues the last copy of a tensor issues its conversion next. A reader fills one of its buffers while the other is copied.
With device="cpu" the same code runs without pinned memory and streams (tests).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tradewind.kernels.ops import PackedMatrix, RowTable
from tradewind.kernels.triton import blocks

FLOATS = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
PIECE_BYTES = 8 << 20
MOST_READERS = 12
"""Readers of 5 to 8 GB/s each fill the bus well before this; each has two pinned buffers of PIECE_BYTES."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
LEAST_SCALE = 2.0**-100
VALUES_AT_ONCE = 1 << 24
"""Values quantised at once: bounds the float32 temporaries on the device to a few times 64 MB."""

ReadBlocks = Callable[[NDArray[np.uint8], str, tuple[int, ...]], NDArray[np.float32]]
"""(raw bytes, format name, shape) -> float32 values."""


class Stored(Protocol):
    """A tensor as it lies in a file (`weights.tensor.RawTensor`)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def format(self) -> str: ...
    @property
    def data(self) -> NDArray[np.uint8]: ...
    @property
    def file(self) -> Path | None:
        """Where `data` lies as it is, from byte `offset` on; None: only in memory."""

    @property
    def offset(self) -> int: ...


@dataclass(eq=False)
class Transfer:
    """One tensor on its way. Guarded by its lock: readers of several pieces meet here."""

    source: Stored
    nbytes: int
    """What is copied: the tensor as it lies in the file, or float32 values read from blocks."""
    target: Tensor | None
    """uint8 [nbytes] on the device; None: staging, made when the first piece comes."""
    arrived: Callable[[Tensor], None] | None
    """Issues the conversion from the copied bytes; None when they lie where they belong."""
    pieces: int
    lock: threading.Lock


class Stacks:
    """Tensors [count, ...] that are filled one after another, as `Uploader.empty` is asked for the parts of each."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.wholes: list[Tensor] = []
        self._count, self._device = count, device
        self._number = self._next = 0

    def begin(self, number: int) -> None:
        """What is asked for from now on belongs to this one."""
        self._number, self._next = number, 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor of the one that was begun."""
        self._next += 1
        return self.place(self._next - 1, shape, dtype)

    def place(self, part: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Where the tensor `part` of the one that was begun lies."""
        if part == len(self.wholes):
            self.wholes.append(torch.empty((self._count, *shape), dtype=dtype, device=self._device))
        whole = self.wholes[part]
        assert whole.shape[1:] == tuple(shape) and whole.dtype == dtype, (
            f"{tuple(shape)} {dtype} in {tuple(whole.shape)}"
        )
        return whole[self._number]


class Uploader:
    """Sends tensors to one device; used by one thread, works with several. Reusable after `finish` or `cancel`."""

    def __init__(
        self,
        device: torch.device | str,
        *,
        read_blocks: ReadBlocks,
        readers: int | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self._device = torch.device(device)
        self._on_cuda = self._device.type == "cuda"
        self._read_blocks = read_blocks
        self._readers = readers or min(MOST_READERS, os.cpu_count() or 1)
        self._piece_bytes = piece_bytes
        self._stream: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._own = threading.local()
        self._lock = threading.Lock()
        self._files: dict[Path, int] = {}
        self._waiting: list[tuple[Future[None], int]] = []
        self._stacks: Stacks | None = None

    @contextmanager
    def stacking(self, count: int) -> Iterator[Stacks]:
        """In the block, memory that is asked for is a part of tensors [count, ...]: what is sent to it lies where it belongs when it
        arrives, and nothing waits for it."""
        assert self._stacks is None, "a stack is open already"
        self._stacks = stacks = Stacks(count, self._device)
        try:
            yield stacks
        finally:
            self._stacks = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory on the device for something to `put`; not initialised."""
        if self._stacks is not None:
            return self._stacks.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def put(self, source: Stored, into: Tensor) -> None:
        """Begins to fill `into` (contiguous, of the source's shape, on the device, a float type) with the source's values."""
        assert into.is_contiguous() and tuple(into.shape) == source.shape, (into.shape, source.shape)
        if FLOATS.get(source.format) == into.dtype:
            self._send(source, target=into.view(-1).view(torch.uint8), arrived=None)
        else:
            self._send(source, target=None, arrived=lambda raw: convert(values_of(raw, source), into))

    def put_fp8(self, source: Stored, stored: Tensor, scale: Tensor) -> None:
        """Begins to fill `stored` e4m3 [N, K] and `scale` float32 [N] with the source [N, K], quantised by output channel."""
        assert tuple(stored.shape) == source.shape, (stored.shape, source.shape)
        self._send(source, target=None, arrived=lambda raw: quantise_rows(values_of(raw, source), stored, scale))

    def put_scales(self, source: Stored, into: Tensor) -> None:
        """Begins to fill `into` float32 [N / 16, K / 128] with the source's scales of blocks [N / 128, K / 128]."""
        self._send(source, target=None, arrived=lambda raw: blocks.repeated(values_of(raw, source), into))

    def finish(self, report: Callable[[int], None] | None = None) -> None:
        """Waits until everything is on the device; `report` gets the bytes still to come. Raises what a reader raised."""
        left = sum(nbytes for _, nbytes in self._waiting)
        try:
            for future, nbytes in self._waiting:
                future.result()
                left -= nbytes
                if report is not None:
                    report(left)
        finally:
            self.cancel()
        if self._on_cuda:
            torch.cuda.empty_cache()  # staging is needed no more; the pages come next and are sized to what is free

    def cancel(self) -> None:
        """Forgets what is not yet on its way and lets go of threads, buffers and files."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()  # copies may still read the buffers
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files, self._waiting, self._pool, self._own = {}, [], None, threading.local()

    # ------------------------------------------------------------------------------------------------------- submitting

    def _send(self, source: Stored, *, target: Tensor | None, arrived: Callable[[Tensor], None] | None) -> None:
        if self._on_cuda:
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            # The targets' memory may have been used before, by work that is still running.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._readers, thread_name_prefix="tradewind-upload")
        plain = source.format in FLOATS
        nbytes = source.data.nbytes if plain else 4 * int(np.prod(source.shape))
        step = self._piece_bytes
        if not plain:
            row_bytes = 4 * source.shape[-1]
            assert row_bytes <= step, f"a row of {source.shape[-1]} values does not fit into a piece"
            step -= step % row_bytes
        starts = range(0, nbytes, step)
        transfer = Transfer(source, nbytes, target, arrived, len(starts), threading.Lock())
        for start in starts:
            stop = min(start + step, nbytes)
            self._waiting.append((self._pool.submit(self._piece, transfer, start, stop), stop - start))

    # ---------------------------------------------------------------------------------------------------------- reading

    def _piece(self, transfer: Transfer, start: int, stop: int) -> None:
        """One piece: read, copy, and the conversion when it is the tensor's last. Runs on a reader."""
        with self._on_stream():
            if self._on_cuda:
                pinned, view, copied = self._next_buffer()
                copied.synchronize()
                self._read(transfer.source, start, view[: stop - start])
                self._target(transfer)[start:stop].copy_(pinned[: stop - start], non_blocking=True)
                copied.record(self._stream)
            else:
                self._read(transfer.source, start, self._target(transfer)[start:stop].numpy())
            with transfer.lock:
                transfer.pieces -= 1
                last = transfer.pieces == 0
            if last:
                target, transfer.target = transfer.target, None
                if transfer.arrived is not None and target is not None:
                    transfer.arrived(target)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._on_cuda else nullcontext()

    def _target(self, transfer: Transfer) -> Tensor:
        with transfer.lock:
            if transfer.target is None:
                transfer.target = torch.empty(transfer.nbytes, dtype=torch.uint8, device=self._device)
            return transfer.target

    def _next_buffer(self) -> tuple[Tensor, NDArray[np.uint8], Any]:
        """The buffer of this reader that was filled longest ago: pinned memory, the same as numpy, the event of its last copy."""
        own = self._own
        if not hasattr(own, "buffers"):
            pinned = [torch.empty(self._piece_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            own.buffers = [(memory, memory.numpy(), torch.cuda.Event(blocking=True)) for memory in pinned]
        own.buffers.reverse()
        buffer: tuple[Tensor, NDArray[np.uint8], Any] = own.buffers[0]
        return buffer

    def _read(self, source: Stored, start: int, out: NDArray[np.uint8]) -> None:
        """Fills `out` with what is copied from byte `start` on."""
        if source.format not in FLOATS:
            width = source.shape[-1]
            first, count = start // (4 * width), out.nbytes // (4 * width)
            row_bytes = source.data.nbytes * width // int(np.prod(source.shape))
            raw = source.data.reshape(-1)[first * row_bytes : (first + count) * row_bytes]
            out.view(np.float32).reshape(count, width)[:] = self._read_blocks(raw, source.format, (count, width))
        elif source.file is None:
            np.copyto(out, source.data.reshape(-1)[start : start + out.nbytes])
        else:
            # Not through the mapping: reading has no page faults, and asks for a whole piece at once.
            descriptor, done, view = self._descriptor(source.file), 0, memoryview(out)
            while done < out.nbytes:
                count = os.preadv(descriptor, [view[done:]], source.offset + start + done)
                if count == 0:
                    raise OSError(
                        f"{source.file} ended at byte {source.offset + start + done}; it was cut while it was read"
                    )
                done += count

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
            return self._files[file]


# ----------------------------------------------------------------------------------------------------- on the device


def values_of(raw: Tensor, source: Stored) -> Tensor:
    """The copied bytes as the source's values; blocks were read as float32."""
    return raw.view(FLOATS.get(source.format, torch.float32)).view(source.shape)


def convert(values: Tensor, into: Tensor) -> None:
    """into = values, rounded to its type."""
    into.copy_(values)


def quantise_rows(values: Tensor, stored: Tensor, scale: Tensor) -> None:
    """values [N, K], any float type -> stored e4m3 [N, K], scale float32 [N]; the same bits as `quantization.fp8.quantise_fp8`."""
    rows = max(1, VALUES_AT_ONCE // values.shape[1])
    # As a tensor on the device: by a Python number it would be multiplied with the rounded inverse.
    largest = torch.full((1,), FP8_MAX, dtype=torch.float32, device=values.device)
    for first in range(0, values.shape[0], rows):
        some = slice(first, first + rows)
        exact = values[some].float()
        scales = (exact.abs().amax(1) / largest).clamp_min_(LEAST_SCALE)
        scale[some] = scales
        stored[some] = (exact / scales[:, None]).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def pack_fp8(values: Tensor, *, gated: bool = False) -> PackedMatrix:
    """A matrix [N, K] of any float type, on its device, as an "fp8" PackedMatrix; new memory."""
    stored = torch.empty(values.shape, dtype=FP8, device=values.device)
    scale = torch.empty(values.shape[0], dtype=torch.float32, device=values.device)
    quantise_rows(values, stored, scale)
    return fp8_matrix(stored, scale, gated=gated)


def pack_stored(
    uploader: Uploader, parts: Sequence[Stored], *, layout: Literal["bf16", "fp8"], gated: bool = False
) -> PackedMatrix:
    """Matrices of equal K stacked along N (gated: gate, then up) as one packed matrix; its values are there after `uploader.finish()`."""
    n, k = sum(part.shape[0] for part in parts), parts[0].shape[1]
    assert all(part.shape[1] == k for part in parts), f"parts of different K: {[part.shape for part in parts]}"
    stored = uploader.empty((n, k), FP8 if layout == "fp8" else torch.bfloat16)
    scale = uploader.empty((n,), torch.float32) if layout == "fp8" else None
    first = 0
    for part in parts:
        rows = slice(first, first + part.shape[0])
        if scale is None:
            uploader.put(part, stored[rows])
        else:
            uploader.put_fp8(part, stored[rows], scale[rows])
        first += part.shape[0]
    return bf16_matrix(stored, gated=gated) if scale is None else fp8_matrix(stored, scale, gated=gated)


def pack_blocks_fp8(uploader: Uploader, parts: Sequence[tuple[Stored, Stored]], *, gated: bool = False) -> PackedMatrix:
    """Matrices stored in e4m3, each with its scales by blocks of 128 x 128, stacked along N (gated: gate, then up) as they are; the values
    are there after `uploader.finish()`."""
    n, k = sum(weight.shape[0] for weight, _ in parts), parts[0][0].shape[1]
    assert all(blocks.fits(*weight.shape) and weight.shape[1] == k for weight, _ in parts), "parts that do not stack"
    stored = uploader.empty((n, k), FP8)
    scale = uploader.empty((n // blocks.ROWS, blocks.parts(k)), torch.float32)
    first = 0
    for weight, scales in parts:
        end = first + weight.shape[0]
        uploader.put(weight, stored[first:end])
        uploader.put_scales(scales, scale[first // blocks.ROWS : end // blocks.ROWS])
        first = end
    return block_matrix(stored, scale, gated=gated)


def stored_rows(uploader: Uploader, table: Stored) -> RowTable:
    """A matrix [rows, cols] whose rows are gathered, as bf16; its values are there after `uploader.finish()`."""
    rows, cols = table.shape
    values = uploader.empty((rows, cols), torch.bfloat16)
    uploader.put(table, values)
    return RowTable(format="BF16", rows=rows, cols=cols, data=values, nbytes=values.nbytes)


def matrix_of_rows(table: RowTable) -> PackedMatrix:
    """The table's memory as a matrix for `linear`: the head of a model with tied embeddings costs no second copy."""
    assert table.data.dtype == torch.bfloat16, table.data.dtype
    return bf16_matrix(table.data, gated=False)


def bf16_matrix(values: Tensor, *, gated: bool) -> PackedMatrix:
    """[N, K] as it is."""
    n, k = values.shape
    return PackedMatrix(
        layout="bf16", n=n, k=k, bits=16, group=0, gated=gated, data=(values,), nbytes=values.nbytes
    )  # fmt: skip


def fp8_matrix(stored: Tensor, scale: Tensor, *, gated: bool) -> PackedMatrix:
    """[N, K] and [N] as they are."""
    n, k = stored.shape
    return PackedMatrix(
        layout="fp8", n=n, k=k, bits=8, group=0, gated=gated, data=(stored, scale), nbytes=stored.nbytes + scale.nbytes
    )  # fmt: skip


def block_matrix(stored: Tensor, scale: Tensor, *, gated: bool) -> PackedMatrix:
    """[N, K] and [N / 16, K / 128] as they are."""
    n, k = stored.shape
    return PackedMatrix(
        layout="fp8_block", n=n, k=k, bits=8, group=blocks.COLUMNS, gated=gated, data=(stored, scale),
        nbytes=stored.nbytes + scale.nbytes,
    )  # fmt: skip
