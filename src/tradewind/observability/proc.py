"""What the operating system says of a process: memory, CPU time, open files.

Knows: Linux's /proc. Refuses to know: which process that is. Where there is no /proc, and when the process is gone, there is no answer.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """One process at one moment."""

    resident_bytes: int
    virtual_bytes: int
    cpu_s: float
    start_unix_s: float
    open_files: int | None
    """None where another user's process does not tell."""
    threads: int


def process_facts(pid: int | None = None) -> ProcessFacts | None:
    """The facts of a process, this one by default; None when there are none to have. Changes nothing."""
    place = Path("/proc") / ("self" if pid is None else str(pid))
    try:
        # Counted after the command's name, which may hold anything; see stat(5).
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        boot_s = next(
            int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
        )
        return ProcessFacts(
            resident_bytes=int(fields[21]) * resource.getpagesize(),
            virtual_bytes=int(fields[20]),
            cpu_s=(int(fields[11]) + int(fields[12])) / ticks,
            start_unix_s=boot_s + int(fields[19]) / ticks,
            open_files=_open_files(place),
            threads=int(fields[17]),
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def resident_bytes(pid: int | None = None) -> int | None:
    """Memory of a process that is in RAM; None when there is no such process or no /proc. Changes nothing."""
    try:
        pages = (Path("/proc") / ("self" if pid is None else str(pid)) / "statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None


def _open_files(place: Path) -> int | None:
    try:
        return len(os.listdir(place / "fd"))
    except OSError:
        return None


def max_open_files() -> int:
    """The limit of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
