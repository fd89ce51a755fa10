"""What is wrong with an engine that died, stands still or failed a request: one name, one sentence with the evidence, one advice.

Knows: how evidence becomes a name. Refuses to know: how evidence is gathered from a live engine (supervisor), and who is told.

      name             the evidence
      device_stall     the loop waits for a step's result
      host_stall       the loop decides or absorbs, which should take microseconds; or the process does not even say what it does
      slow_disk        the engine says that it reads or writes, or its threads sleep in the kernel on a block device
      nan              a row's logits or hidden states are not finite
      out_of_memory    an allocation failed, or the kernel's memory killer took the process
      worker_lost      the process is gone without a word
      device_lost      the executor says that its device is dead
      bug              an exception of our own
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import msgspec

Name = Literal["bug", "device_lost", "device_stall", "host_stall", "nan", "out_of_memory", "slow_disk", "worker_lost"]

ADVICE: dict[Name, str] = {
    "bug": "report it with the traceback above; the same request may do it again",
    "device_lost": "look at the device's own log; with --restart-engine a new engine is started",
    "device_stall": "look at the device: its load, its temperature, other programs on it; the stacks show the call that hangs",
    "host_stall": "look at the stacks: what should take microseconds holds the loop up, or the machine has no CPU time for it",
    "nan": "the weights or the format of keys and values do not fit this text: try --kv-format f32 or another --quantization",
    "out_of_memory": "give the engine a lower --memory-limit, a smaller --max-context or --max-running, or the machine more memory",
    "slow_disk": "look at the disk's load; put model and cache on a local disk, or wait until it has caught up",
    "worker_lost": "somebody ended the process, or a library crashed: look at the system's log; --restart-engine starts a new one",
}

_MEMORY = re.compile(
    r"memoryerror|out ?of ?memory|outofmemory|bad_alloc|cannot allocate|can't allocate|not enough memory|std::length_error",
    re.I,
)
_NAN = re.compile(r"\bnot finite\b|\bnan\b", re.I)
_DEVICE = re.compile(
    r"\bdevice\b.*\b(died|dead|lost|gone)\b|cuda error|device-side assert|unspecified launch failure", re.I
)
SIGKILL = -9


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong, as far as the evidence says."""

    name: Name
    says: str

    @property
    def advice(self) -> str:
        """What to do about it."""
        return ADVICE[self.name]

    def __str__(self) -> str:
        return f"{self.name}: {self.says}"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself while it stands still."""

    doing: str
    """The loop's verb, such as "collect" or "decide"."""
    for_s: float
    waits_on: str = ""
    """What its executor waits for, where it says so: "disk: ..."."""


def of_death(reason: str | None, *, code: int, memory_kills: int = 0) -> Diagnosis:
    """Of a process that is gone. `reason`: its own last words; `code`: its exit code, negative for a signal; `memory_kills`: how often the
    kernel's memory killer acted while it lived."""
    if reason:
        if _MEMORY.search(reason):
            return Diagnosis(name="out_of_memory", says=reason)
        if _NAN.search(reason):
            return Diagnosis(name="nan", says=reason)
        if _DEVICE.search(reason):
            return Diagnosis(name="device_lost", says=reason)
        return Diagnosis(name="bug", says=reason)
    if code == SIGKILL and memory_kills > 0:
        return Diagnosis(name="out_of_memory", says="the kernel's memory killer ended the engine process")
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    return Diagnosis(name="worker_lost", says=f"the engine process ended {how} and said nothing")


def of_stall(state: State | None, *, still_s: float, disk_sleepers: int = 0) -> Diagnosis:
    """Of an engine in which no step has ended for `still_s`. `state` None: it does not answer. `disk_sleepers`: threads that sleep in the
    kernel without being interruptible, which is nearly always a block device."""
    still = f"no step has ended for {still_s:.1f} s"
    if state is not None and state.waits_on.startswith("disk"):
        return Diagnosis(
            name="slow_disk", says=f"{still}: {state.waits_on.partition(':')[2].strip() or 'the disk is waited for'}"
        )
    if disk_sleepers:
        return Diagnosis(
            name="slow_disk",
            says=f"{still}: {disk_sleepers} of the engine's threads wait for a block device in the kernel",
        )
    if state is None:
        return Diagnosis(name="host_stall", says=f"{still}, and the engine process does not answer")
    if state.doing.startswith(("collect", "submit")):
        return Diagnosis(
            name="device_stall", says=f"{still}: the loop waits in '{state.doing}' for {state.for_s:.1f} s"
        )
    return Diagnosis(name="host_stall", says=f"{still}: the loop is in '{state.doing}' for {state.for_s:.1f} s")


def of_failure(error: str) -> Diagnosis | None:
    """Of one failed request; None where that says nothing about the engine (a refusal, a deadline)."""
    if _NAN.search(error):
        return Diagnosis(name="nan", says=error)
    if _MEMORY.search(error):
        return Diagnosis(name="out_of_memory", says=error)
    return None


# -- what the system knows -----------------------------------------------------------------------------------------------


def memory_kills(*, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """How often the kernel's memory killer has acted, in our control group or, where there is none, on the machine. 0 where nobody says."""
    try:
        own = (proc / "self" / "cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        return _counter(cgroups / own / "memory.events")
    except (OSError, ValueError):
        pass
    try:
        return _counter(proc / "vmstat")
    except (OSError, ValueError):
        return 0


def _counter(path: Path) -> int:
    found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.M)
    if found is None:
        raise ValueError(f"{path} does not count memory kills")
    return int(found[1])


def disk_sleepers(pid: int | None, *, proc: Path = Path("/proc")) -> int:
    """Threads of a process in state D at this moment; 0 where nobody says."""
    count = 0
    try:
        for stat in (proc / str(pid) / "task").glob("*/stat"):
            count += stat.read_text().rpartition(")")[2].split()[0] == "D"
    except (OSError, IndexError):
        return 0
    return count
