"""Asking the NVIDIA driver: a driver of our own stands in for it, with every way of refusing."""
# ruff: noqa: N802 - the driver's own names

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import pytest

from tests.host.plans import GiB
from tradewind.config import gpu_probe, hardware_probe
from tradewind.config.gpu_probe import Gpu, find_gpu, free_bytes, rough_speeds, why_no_cuda
from tradewind.config.hardware_probe import measure

H200 = {16: 132, 13: 1_980_000, 36: 3_201_000, 37: 6144, 75: 9, 76: 0}
NO_DEVICE = 100


class Driver:
    """libcuda: answers through pointers as the C library does; `fails` is a call and the code that it answers."""

    def __init__(
        self, *, fails: str = "", code: int = NO_DEVICE, devices: int = 1, facts: dict[int, int] | None = None
    ) -> None:
        self.fails, self.code, self.devices = fails, code, devices
        self.name, self.total, self.facts = b"NVIDIA H200", 140 * GiB, facts or H200

    def _answer(self, call: str) -> int:
        return self.code if call == self.fails else 0

    def cuInit(self, flags: Any) -> int:
        assert flags.value == 0
        return self._answer("cuInit")

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.devices
        return self._answer("cuDeviceGetCount")

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        device._obj.value = ordinal.value
        return self._answer("cuDeviceGet")

    def cuDeviceGetName(self, name: Any, length: Any, device: Any) -> int:
        assert length.value == len(name)
        name.value = self.name
        return self._answer("cuDeviceGetName")

    def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:
        size._obj.value = self.total
        return self._answer("cuDeviceTotalMem")

    def cuDeviceGetAttribute(self, value: Any, attribute: Any, device: Any) -> int:
        value._obj.value = self.facts.get(attribute.value, 0)
        return 0 if attribute.value in self.facts else 1

    def cuDeviceGetPCIBusId(self, place: Any, length: Any, device: Any) -> int:
        place.value = b"00000000:18:00.0"
        return self._answer("cuDeviceGetPCIBusId")

    def cuGetErrorName(self, code: Any, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_NO_DEVICE" if code.value == NO_DEVICE else None
        return 0


class Management:
    """NVML."""

    def __init__(self, *, free: int = 139 * GiB, fails: str = "") -> None:
        self.free, self.fails, self.open = free, fails, 0

    def nvmlInit_v2(self) -> int:
        self.open += self.fails != "init"
        return int(self.fails == "init")

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, place: bytes, handle: Any) -> int:
        assert place == b"00000000:18:00.0"
        handle._obj.value = 7
        return int(self.fails == "handle")

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        assert handle.value == 7
        memory._obj.free = self.free
        return int(self.fails == "memory")


def loading(driver: Any = None, management: Any = None) -> gpu_probe.Load:
    found = {"libcuda.so.1": driver, "libnvidia-ml.so.1": management}

    def load(name: str) -> Any:
        if found[name] is None:
            raise OSError(f"{name}: cannot open shared object file")
        return found[name]

    return load


def test_a_known_gpu_has_its_measured_speeds() -> None:
    management = Management()
    found = find_gpu(load=loading(Driver(), management))
    assert isinstance(found, Gpu)
    assert (found.name, found.capability, found.multiprocessors) == ("NVIDIA H200", (9, 0), 132)
    assert (found.memory_bytes, found.memory_free_bytes) == (140 * GiB, 139 * GiB)
    assert found.speeds is gpu_probe.SPEEDS["NVIDIA H200"]
    assert found.features == ("fp8", "sm_90")
    assert management.open == 0, "NVML is left as it was found"


def test_rough_speeds_come_near_the_measured_ones() -> None:
    """The same arithmetic on a GPU that was measured is within a fifth of what it does."""
    rough = rough_speeds((9, 0), multiprocessors=132, clock_hz=1.83e9, memory_clock_hz=3.201e9, bus_bits=6144)
    known = gpu_probe.SPEEDS["NVIDIA H200"]
    assert rough.memory_bytes_per_s == pytest.approx(known.memory_bytes_per_s, rel=0.2)
    assert rough.bf16_flops_per_s == pytest.approx(known.bf16_flops_per_s, rel=0.2)
    assert rough.fp8_flops_per_s == pytest.approx(known.fp8_flops_per_s, rel=0.2)


@pytest.mark.parametrize(
    ("capability", "features"), [((8, 0), ("sm_80",)), ((8, 9), ("fp8", "sm_89")), ((10, 3), ("fp8", "sm_103"))]
)
def test_an_unknown_gpu_has_rough_speeds(capability: tuple[int, int], features: tuple[str, ...]) -> None:
    driver = Driver(facts={**H200, 75: capability[0], 76: capability[1]})
    driver.name = b"NVIDIA Unheard Of"
    found = find_gpu(load=loading(driver))
    assert isinstance(found, Gpu)
    assert found.features == features
    assert found.speeds.memory_bytes_per_s == pytest.approx(0.9 * 2 * 3.201e9 * 6144 / 8)
    assert (found.speeds.fp8_flops_per_s > 0) == ("fp8" in features)
    assert found.memory_free_bytes == found.memory_bytes, "without NVML nobody says what is free"


def test_a_driver_that_tells_no_clocks_gives_no_zero() -> None:
    """Speeds are divisors."""
    driver = Driver(facts={75: 9, 76: 0})
    driver.name = b"?"
    found = find_gpu(load=loading(driver))
    assert isinstance(found, Gpu)
    assert min(found.speeds.memory_bytes_per_s, found.speeds.bf16_flops_per_s) >= 1e9


def test_no_driver() -> None:
    assert find_gpu(load=loading()) == "no NVIDIA driver (libcuda.so.1 was not found)"


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceTotalMem"])
def test_a_driver_that_refuses_is_quoted(call: str) -> None:
    said = find_gpu(load=loading(Driver(fails=call)))
    assert said == f"the NVIDIA driver cannot be used: {call} answers CUDA_ERROR_NO_DEVICE"
    assert (
        find_gpu(load=loading(Driver(fails=call, code=999)))
        == f"the NVIDIA driver cannot be used: {call} answers error 999"
    )


def test_no_gpu_and_a_foreign_library() -> None:
    assert find_gpu(load=loading(Driver(devices=0))) == "the NVIDIA driver shows no GPU"
    said = find_gpu(load=loading(object()))
    assert isinstance(said, str)
    assert said.startswith("the NVIDIA driver cannot be asked (")


@pytest.mark.parametrize("fails", ["init", "handle", "memory"])
def test_management_that_fails_is_as_if_it_were_not_there(fails: str) -> None:
    management = Management(fails=fails)
    assert free_bytes(b"00000000:18:00.0", load=loading(None, management)) is None
    assert management.open == 0
    found = find_gpu(load=loading(Driver(), management))
    assert isinstance(found, Gpu)
    assert found.memory_free_bytes == found.memory_bytes


def test_free_memory_is_never_over_the_total() -> None:
    """A part of a GPU (MIG): NVML tells of the whole one."""
    found = find_gpu(load=loading(Driver(), Management(free=500 * GiB)))
    assert isinstance(found, Gpu)
    assert found.memory_free_bytes == 140 * GiB
    assert free_bytes(b"", load=loading(None, Management())) is None
    assert free_bytes(b"x", load=loading(None, object())) is None


def test_what_the_cuda_backend_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = Driver(facts={**H200, 75: 7, 76: 5})
    assert why_no_cuda(load=loading()) == gpu_probe.NO_DRIVER
    assert why_no_cuda(load=loading(old)) == "NVIDIA H200 has compute capability 7.5, and 8.0 is needed"

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    installed: dict[str, Any] = {}
    monkeypatch.setattr(gpu_probe, "find_spec", installed.get)
    assert why_no_cuda(load=loading(Driver())) == "torch is not installed"
    installed["torch"] = Spec
    assert why_no_cuda(load=loading(Driver())) == "the installed torch was built without CUDA"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").write_text("")
    assert why_no_cuda(load=loading(Driver())) == "triton is not installed"
    installed["triton"] = Spec
    compilers: dict[str, str] = {}
    monkeypatch.setattr(gpu_probe, "which", compilers.get)
    monkeypatch.delenv("CC", raising=False)
    assert why_no_cuda(load=loading(Driver())) == "Triton needs a C compiler, and there is none of cc, gcc, clang"
    compilers["gcc"] = "/usr/bin/gcc"
    assert why_no_cuda(load=loading(Driver())) is None


def test_measure_takes_the_gpu_where_it_can_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = find_gpu(load=loading(Driver(), Management()))
    monkeypatch.setattr(gpu_probe, "find_gpu", lambda **_more: found)
    monkeypatch.setattr(hardware_probe, "read_speed", lambda *_args, **_more: 5e9)
    monkeypatch.setattr(hardware_probe, "matmul_speed", lambda *_args, **_more: 7e9)
    machine = measure(tmp_path, missing={})
    assert (machine.kind, machine.name, machine.multiprocessors) == ("cuda", "NVIDIA H200", 132)
    assert (machine.memory_bytes_per_s, machine.matmul_flops_per_s, machine.fp8_flops_per_s) == (
        4.4e12,
        690e12,
        1300e12,
    )
    assert machine.cores >= 1
    assert 0 < machine.host_memory_free_bytes <= machine.host_memory_bytes
    assert list(tmp_path.iterdir()) == [], "nothing was timed, so nothing is kept"
    assert measure(tmp_path, prefer="cuda", missing={}).kind == "cuda"
    assert measure(tmp_path, prefer="cpu", missing={}).kind == "cpu"
    assert measure(tmp_path, missing={"cuda": "torch is not installed"}).kind == "cpu"
    monkeypatch.setattr(gpu_probe, "find_gpu", lambda **_more: "it went away")
    assert measure(tmp_path, prefer="cuda", missing={}).kind == "cpu"


def test_this_machine_answers_quickly_whatever_it_has() -> None:
    start = time.perf_counter()
    said = find_gpu()
    assert isinstance(said, Gpu | str)
    assert time.perf_counter() - start < 2.0
    assert ctypes.sizeof(gpu_probe._Memory) == 24
