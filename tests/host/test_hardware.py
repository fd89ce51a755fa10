"""Asking and measuring the machine: containers, damaged caches, machines that tell nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tradewind.config import hardware_probe as probe
from tradewind.config.hardware_probe import measure

GiB = 1 << 30


def test_measures_once_and_then_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure(tmp_path, prefer="cpu")
    assert first.kind == "cpu"
    assert first.name
    assert 1 <= first.cores <= (os.cpu_count() or 1)
    assert 0 < first.memory_free_bytes <= first.memory_bytes
    assert 1e8 < first.memory_bytes_per_s < 1e13
    assert 1e8 < first.matmul_flops_per_s < 1e15
    assert [path.name for path in tmp_path.iterdir()] == ["hardware.json"]

    def never(*_args: object, **_more: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(probe, "read_speed", never)
    start = time.perf_counter()
    second = measure(tmp_path, prefer="cpu")
    assert time.perf_counter() - start < 0.1
    assert second.memory_bytes_per_s == first.memory_bytes_per_s
    assert second.matmul_flops_per_s == first.matmul_flops_per_s


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"machine": 1}',
        b'{"machine": "other", "memory_bytes_per_s": 1e9, "matmul_flops_per_s": 1e9}',
        b'{"machine": "MACHINE", "memory_bytes_per_s": 0, "matmul_flops_per_s": 1e9}',
    ],
)
def test_a_damaged_or_foreign_file_is_measured_over(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "read_speed", lambda *_args, **_more: 5e9)
    monkeypatch.setattr(probe, "matmul_speed", lambda *_args, **_more: 7e9)
    measure(tmp_path, prefer="cpu")
    machine = probe.msgspec.json.decode((tmp_path / "hardware.json").read_bytes())["machine"]
    (tmp_path / "hardware.json").write_bytes(content.replace(b"MACHINE", machine.encode()))
    assert measure(tmp_path, prefer="cpu").memory_bytes_per_s == 5e9
    assert probe.remembered(tmp_path / "hardware.json", machine=machine) is not None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "read_speed", lambda *_args, **_more: 5e9)
    monkeypatch.setattr(probe, "matmul_speed", lambda *_args, **_more: 7e9)
    (tmp_path / "file").write_text("")
    assert measure(tmp_path / "file" / "cache", prefer="cpu").memory_bytes_per_s == 5e9


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        ({}, None),
    ],
)
def test_cpu_quota(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    write(tmp_path, files)
    assert probe.cpu_quota(tmp_path) == quota
    assert probe.usable_cores(cgroup=tmp_path) >= 1
    if quota == 0.5:
        assert probe.usable_cores(cgroup=tmp_path) == 1


MEMINFO = f"MemTotal: {8 * GiB >> 10} kB\nMemFree: {2 * GiB >> 10} kB\nMemAvailable: {6 * GiB >> 10} kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (8 * GiB, 6 * GiB)),
        ({"memory.max": "max", "memory.current": "0"}, (8 * GiB, 6 * GiB)),
        ({"memory.max": str(4 * GiB), "memory.current": str(GiB)}, (4 * GiB, 3 * GiB)),
        (
            {
                "memory.max": str(4 * GiB),
                "memory.current": str(2 * GiB),
                "memory.stat": f"anon 1\ninactive_file {GiB}\n",
            },
            (4 * GiB, 3 * GiB),
        ),
        ({"memory.max": str(4 * GiB), "memory.current": str(5 * GiB)}, (4 * GiB, 0)),
        ({"memory.max": str(100 * GiB), "memory.current": "0"}, (8 * GiB, 6 * GiB)),
        ({"memory/memory.limit_in_bytes": str(GiB), "memory/memory.usage_in_bytes": "0"}, (GiB, GiB)),
        ({"memory.max": "?", "memory.current": "?"}, (8 * GiB, 6 * GiB)),
    ],
)
def test_memory_of_machine_and_container(files: dict[str, str], expected: tuple[int, int], tmp_path: Path) -> None:
    write(tmp_path, {**files, "meminfo": MEMINFO})
    assert probe.memory_bytes(meminfo=tmp_path / "meminfo", cgroup=tmp_path) == expected


def test_a_machine_without_proc(tmp_path: Path) -> None:
    """As on macOS: sysconf or sysctl answer, or a careful guess is made."""
    total, free = probe.machine_memory(tmp_path / "nothing")
    assert 0 < free <= total
    name, features = probe.cpu_facts(cpuinfo=tmp_path / "nothing")
    assert name
    assert features == ()


def test_instruction_sets(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "cpuinfo": "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: sse avx2 avx512bw avx512_vnni\n\nprocessor\t: 1\n"
        },
    )
    assert probe.cpu_facts(cpuinfo=tmp_path / "cpuinfo") == ("Some CPU", ("avx2", "avx512", "avx512_vnni"))


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
