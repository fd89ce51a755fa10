"""The device wing's front door on one rank: contract.Executor over a StepRunner (host memory) or a runner with a device of its own.

Knows: which thread works. With `overlap` the work happens in a thread of its own, so that the engine decides step N + 1 meanwhile (C++ ops
release the interpreter); without it, `collect` does the work in the caller's thread. Same code, same tokens.
A GPU works by itself: `DeviceExecutor` needs no thread. Refuses to know: what a step does.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from tradewind.contract.errors import EngineDeadError
from tradewind.contract.step import Step, StepResult
from tradewind.runner.adapters import AdapterSlots, check_adapter
from tradewind.runner.runner import StepRunner

ResultT = TypeVar("ResultT")


class LocalExecutor:
    """contract.Executor over one StepRunner: in a thread of its own (`overlap`) or in the caller's."""

    def __init__(
        self,
        runner: StepRunner,
        *,
        overlap: bool,
        at_close: Callable[[], None] | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._runner = runner
        self._adapters = adapters
        self._at_close = at_close
        self._pending: deque[Step] = deque()
        self._steps: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._in_flight = 0
        self._dead: BaseException | None = None
        self._thread: threading.Thread | None = None
        if overlap:
            self._thread = threading.Thread(target=self._work, name="tradewind-runner", daemon=True)
            self._thread.start()

    def submit(self, step: Step) -> None:
        """Takes a step over and returns without waiting for it."""
        self._raise_if_dead()
        self._in_flight += 1
        if self._thread is None:
            self._pending.append(step)
        else:
            self._steps.put(step)

    def collect(self) -> StepResult:
        """Waits for the oldest uncollected step. Raises EngineDeadError with the cause when the device wing has failed."""
        assert self._in_flight > 0, "collect without a submitted step"
        self._raise_if_dead()
        result: StepResult | BaseException
        if self._thread is None:
            try:
                result = self._runner.run(self._pending.popleft())
            except Exception as error:
                result = error
        else:
            result = self._results.get()
        self._in_flight -= 1
        if isinstance(result, BaseException):
            self._dead = result
            self._raise_if_dead()
        assert isinstance(result, StepResult)
        return result

    def check_adapter(self, key: str) -> None:
        """Reads an adapter; changes nothing. Raises UserError where the model cannot take it. From any thread."""
        check_adapter(self._adapters, key)

    def rest(self) -> None:
        """See contract.Resting: no step flies, so that the thread, if there is one, touches nothing."""
        assert self._in_flight == 0, "rest while a step flies"
        self._runner.rest()

    def close(self) -> None:
        """Ends the thread after its current step and gives the op set's threads back. Safe to call twice."""
        if self._thread is not None:
            self._steps.put(None)
            self._thread.join()
            self._thread = None
        self._runner.close()
        if self._at_close is not None:
            self._at_close()
            self._at_close = None

    def _raise_if_dead(self) -> None:
        if self._dead is not None:
            raise EngineDeadError(f"the device wing failed: {type(self._dead).__name__}: {self._dead}") from self._dead

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                self._results.put(self._runner.run(step))
            except BaseException as error:  # handed to the owner, who is waiting in collect
                self._results.put(error)
                return


class DeviceRunner(Protocol):
    """A runner whose device works while the host goes on."""

    @property
    def prepared(self) -> bool: ...
    def submit(self, step: Step) -> None: ...
    def collect(self) -> StepResult: ...
    def close(self) -> None: ...


class DeviceExecutor:
    """contract.Executor over a DeviceRunner: submit puts work on the device and returns."""

    def __init__(
        self,
        runner: DeviceRunner,
        *,
        at_close: Callable[[], None] | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._runner = runner
        self._adapters = adapters
        self._at_close = at_close
        self._dead: BaseException | None = None

    @property
    def prepared(self) -> bool:
        """Whether no step will have to wait for a kernel to be compiled."""
        return self._runner.prepared

    def check_adapter(self, key: str) -> None:
        """Reads an adapter; changes nothing. Raises UserError where the model cannot take it. From any thread."""
        check_adapter(self._adapters, key)

    def submit(self, step: Step) -> None:
        """Puts a step on the device. Raises EngineDeadError with the cause when that failed."""
        self._guarded(lambda: self._runner.submit(step))

    def collect(self) -> StepResult:
        """Waits for the oldest uncollected step. Raises EngineDeadError with the cause when the device has failed."""
        return self._guarded(self._runner.collect)

    def close(self) -> None:
        """Waits for the device and gives everything back. Safe to call twice."""
        close, self._at_close = self._at_close, None
        if self._dead is None:
            self._runner.close()
        if close is not None:
            close()

    def _guarded(self, work: Callable[[], ResultT]) -> ResultT:
        error = self._dead
        if error is None:
            try:
                return work()
            except Exception as raised:
                error = self._dead = raised
        raise EngineDeadError(f"the device failed: {type(error).__name__}: {error}") from error
