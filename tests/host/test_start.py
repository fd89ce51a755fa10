"""What a start tells about itself, and the card that is woken beside it."""
# ruff: noqa: N802 - the driver's own names

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tradewind.config.gpu_probe import NO_DRIVER, hold_context
from tradewind.phases import Phases


class Driver:
    """libcuda, as far as a context needs it; `fails` answers a code."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.held = fails, 0

    def cuInit(self, flags: Any) -> int:
        return 100 if self.fails == "cuInit" else 0

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        device._obj.value = 5
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        if self.fails == "cuDevicePrimaryCtxRetain":
            return 2
        assert device.value == 5
        self.held += 1
        return 0

    def cuGetErrorName(self, code: Any, text: Any) -> int:
        text._obj.value = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 100: b"CUDA_ERROR_NO_DEVICE"}[code.value]
        return 0


def test_the_context_is_made_and_kept() -> None:
    driver = Driver()
    assert hold_context(load=lambda name: driver) is None
    assert driver.held == 1


@pytest.mark.parametrize(
    ("fails", "word"), [("cuInit", "NO_DEVICE"), ("cuDevicePrimaryCtxRetain", "OUT_OF_MEMORY"), ("", "")]
)
def test_a_card_that_does_not_wake_is_no_error(fails: str, word: str) -> None:
    def load(name: str) -> Any:
        if not fails:
            raise OSError("no such file")
        return Driver(fails)

    assert word in (hold_context(load=load) or "?")
    assert fails or hold_context(load=load) == NO_DRIVER


def test_a_driver_without_these_calls_is_no_error() -> None:
    assert "cannot be asked" in (hold_context(load=lambda name: object()) or "")


def test_a_phase_inside_another_takes_its_part_away() -> None:
    phases = Phases()
    with phases("kernels"):
        with phases("programs"):
            time.sleep(0.02)
        time.sleep(0.01)
    parts = {phase.name: phase.seconds for phase in phases.done}
    assert list(parts) == ["programs", "kernels"]
    assert parts["programs"] >= 0.02
    assert phases.total_s == pytest.approx(sum(parts.values()))


def test_what_ran_beside_is_told_and_counts_for_nothing() -> None:
    phases = Phases(began_s=time.perf_counter() - 1)

    def work() -> None:
        with phases.beside("context"):
            time.sleep(0.01)

    thread = threading.Thread(target=work)
    with phases("torch"):
        thread.start()
        thread.join()
    (beside,) = phases.besides
    assert beside.name == "context"
    assert [phase.name for phase in phases.done] == ["torch"]
    assert "; beside them context 0.0" in phases.text()
    assert "beside" not in Phases().text()
