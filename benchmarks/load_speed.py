"""How fast weights come from a safetensors file to the device: GB/s of the file, not cached and cached, beside what limits it.

    python benchmarks/load_speed.py FOLDER [--gb 4] [--device cuda] [--out load_speed.json]

FOLDER gets a random checkpoint of that size (layers of a Llama 8B shape, BF16), which is kept for the next time. Rows:

    read            the file by the same readers in the same pieces, thrown away: disk, or page cache
    copy            pinned memory to the device, nothing else: the bus
    bf16, fp8       what loading does: read, copy, and for fp8 quantise on the device
    f32 file        a F32 file of the same size, rounded to bf16 on the device (only with --f32)

"not cached" asks the system to drop the file's pages first; where it does not (some file systems of containers), the figure says cached.
After --budget-s no further row is begun, and a row that is slow is repeated less often.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tradewind.kernels.triton import upload
from tradewind.kernels.triton.upload import MOST_READERS, PIECE_BYTES, Uploader
from tradewind.quantization.blocks import dequantise
from tradewind.weights.safetensors import open_safetensors
from tradewind.weights.tensor import RawTensor

LAYER: Mapping[str, tuple[int, int]] = {
    "q": (4096, 4096),
    "k": (1024, 4096),
    "v": (1024, 4096),
    "output": (4096, 4096),
    "gate": (14336, 4096),
    "up": (14336, 4096),
    "down": (4096, 14336),
}
STACKED: tuple[tuple[str, ...], ...] = (("q", "k", "v"), ("output",), ("gate", "up"), ("down",))
ITEM_BYTES = {"BF16": 2, "F32": 4}
ROUNDS = 3


def make_file(folder: Path, *, gb: float, format: str) -> Path:
    """A checkpoint of about `gb` (at least one layer) in the folder, written unless it is there."""
    item = ITEM_BYTES[format]
    layer_bytes = item * sum(n * k for n, k in LAYER.values())
    layers = max(1, round(gb * 1e9 / layer_bytes))
    path = folder / f"load-speed-{format.lower()}-{layers}-layers.safetensors"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    end = 0
    for layer in range(layers):
        for name, (n, k) in LAYER.items():
            header[f"{layer}.{name}"] = {
                "dtype": format, "shape": [n, k], "data_offsets": [end, end + n * k * item],
            }  # fmt: skip
            end += n * k * item
    text = json.dumps(header).encode()
    values = np.random.default_rng(0).standard_normal(4 << 20, np.float32) * np.float32(0.02)
    block = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes() if format == "BF16" else values.tobytes()
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        start, descriptor = file.tell(), file.fileno()
        # One thread copies a few GB/s into the page cache; nobody wants to wait for that.
        with ThreadPoolExecutor(min(MOST_READERS, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda at: write_at(descriptor, block[: end - at], start + at), range(0, end, len(block))))
        os.fsync(descriptor)  # pages that are not yet on the disk cannot be dropped
    partial.rename(path)
    return path


def write_at(descriptor: int, block: bytes, position: int) -> None:
    """Writes all of the block there."""
    view = memoryview(block)
    while view:
        written = os.pwrite(descriptor, view, position)
        view, position = view[written:], position + written


def drop_cache(path: Path) -> None:
    """Asks the system to forget the file's pages; does nothing where that cannot be asked."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_only(path: Path) -> None:
    """The whole file by as many readers as the uploader has, into memory that is used again."""
    size = path.stat().st_size
    readers = min(MOST_READERS, os.cpu_count() or 1)
    descriptor = os.open(path, os.O_RDONLY)
    buffers = [memoryview(bytearray(PIECE_BYTES)) for _ in range(readers)]

    def read(reader: int) -> None:
        for start in range(reader * PIECE_BYTES, size, readers * PIECE_BYTES):
            os.preadv(descriptor, [buffers[reader]], start)

    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(read, range(readers)))
    os.close(descriptor)


def load(tensors: Mapping[str, RawTensor], *, device: str, layout: Any) -> None:
    """Every matrix of the file packed on the device, as a model's loading asks for them; thrown away."""
    uploader = Uploader(device, read_blocks=dequantise)
    for layer in range(len(tensors) // len(LAYER)):
        for names in STACKED:
            parts = [tensors[f"{layer}.{name}"] for name in names]
            upload.pack_stored(uploader, parts, layout=layout, gated=len(names) == 2)
    uploader.finish()


def copy_only(nbytes: int, *, device: str) -> float:
    """Seconds for that many bytes from pinned memory to a CUDA device, in pieces."""
    source = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    target = [torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device) for _ in range(4)]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for piece in range(nbytes // PIECE_BYTES):
        target[piece % 4].copy_(source[piece % 4], non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(
    folder: Path, *, gb: float, device: str, f32: bool = False, budget_s: float = 55.0, out: Path | None = None
) -> dict[str, Any]:
    """Every row: name -> {"not cached": GB/s, "cached": GB/s of the best of a few rounds}; rows that there was no time for are missing.

    Written to `out` after every row.
    """
    begin = time.perf_counter()
    end = begin + budget_s
    path = make_file(folder, gb=gb, format="BF16")
    tensors = open_safetensors(path)
    rows: dict[str, dict[str, float]] = {}
    found = {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU memory",
        "file_bytes": path.stat().st_size,
        "file_ready_s": time.perf_counter() - begin,
        "piece_bytes": PIECE_BYTES,
        "gb_per_s": rows,
    }

    def row(name: str, file: Path, work: Callable[[], None]) -> None:
        if time.perf_counter() > end:
            return
        size = file.stat().st_size
        drop_cache(file)
        rows[name] = {"not cached": size / seconds(work) / 1e9}
        times: list[float] = []
        while len(times) < ROUNDS and (not times or time.perf_counter() + times[-1] < end):
            times.append(seconds(work))
        rows[name]["cached"] = size / min(times) / 1e9
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n")

    if device.startswith("cuda"):
        load(dict(list(tensors.items())[: len(LAYER)]), device=device, layout="fp8")  # the first time starts the device
        size = path.stat().st_size
        rows["copy"] = {"cached": size / min(copy_only(size, device=device) for _ in range(ROUNDS)) / 1e9}
    row("bf16", path, lambda: load(tensors, device=device, layout="bf16"))
    row("fp8", path, lambda: load(tensors, device=device, layout="fp8"))
    row("read", path, lambda: read_only(path))
    if f32 and time.perf_counter() < end:
        wide = make_file(folder, gb=gb, format="F32")
        row("f32 file", wide, lambda: load(open_safetensors(wide), device=device, layout="bf16"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of loading weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--f32", action="store_true", help="load a float32 file too")
    parser.add_argument("--budget-s", type=float, default=55.0, help="no row is begun after it (default %(default)s)")
    parser.add_argument("--out", type=Path, default=None, help="write the figures as JSON, after every row")
    arguments = parser.parse_args()
    found = measure(
        arguments.folder, gb=arguments.gb, device=arguments.device, f32=arguments.f32, budget_s=arguments.budget_s, out=arguments.out
    )  # fmt: skip
    print(
        f"{found['device']}, {found['file_bytes'] / 1e9:.2f} GB in pieces of {found['piece_bytes'] >> 20} MB, there after "
        f"{found['file_ready_s']:.1f} s; GB/s"
    )
    print(f"{'':10}{'not cached':>12}{'cached':>10}")
    for name, figures in found["gb_per_s"].items():
        cells = [f"{figures[column]:.2f}" if column in figures else "" for column in ("not cached", "cached")]
        print(f"{name:10}{cells[0]:>12}{cells[1]:>10}")


if __name__ == "__main__":
    main()
