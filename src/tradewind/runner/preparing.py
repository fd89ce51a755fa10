"""Kernels before they are needed: which steps use which, what is compiled before the first answer and what behind it.

Knows: the sizes that together use every kernel of a model. Refuses to know: steps and requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from tradewind.kernels.ops import Tensor
from tradewind.kernels.triton import library
from tradewind.kernels.triton import step as kernels
from tradewind.kernels.triton.graphs import Gpu
from tradewind.kernels.triton.launch import COMPILES, compiling
from tradewind.kernels.triton.planning import kernels_change_at
from tradewind.kernels.triton.program import Bucket, Launch, Program
from tradewind.runner.buckets import FEW_ROWS
from tradewind.runner.flight import Staging
from tradewind.runner.programs import StepPrograms
from tradewind.sampling.resident import Draw

KERNELS_CHANGE_AT = (1, 2, 16, 32, 48, 64, 128)
"""Sizes of steps that together use every kernel of a model; the largest step is added."""
REST_THREADS = 4
"""Threads that compile behind the first steps: more would take the interpreter from the engine's own thread."""
GIVE_WAY_S = 0.001
"""Between two plans behind the first steps: a lock that is taken again at once is had by nobody else."""
WOKEN = 1024
"""Steps up to this size have the library's kernels loaded behind the first steps; larger ones share a few."""
Measure = Callable[[str], AbstractContextManager[None]]
"""Times a block under a name."""
COMMON_DRAWS = (
    Draw(),
    Draw(greedy=False),
    Draw(greedy=False, filtered=True),
    Draw(greedy=False, filtered=True, steered=True),
)


class _Kernels:
    """Launches that differ in their kernel or its constants."""

    def __init__(self) -> None:
        self._launches: dict[tuple[Any, ...], Launch] = {}

    def add(self, program: Program) -> None:
        for launch in program.launches:
            if "pdl" in launch.options:  # the others are a library's
                options = launch.options
                self._launches[launch.kernel, launch.text, options.get("late"), options["pdl"]] = launch

    def run(self) -> None:
        for launch in self._launches.values():
            launch.run()


class Preparation:
    """Compiles a runner's kernels: `prepare` what the first steps need, `prepare_rest` all others in a thread."""

    def __init__(self, programs: StepPrograms, gpu: Gpu, *, staging: Staging, shared: bool) -> None:
        self._programs, self._gpu, self._staging, self._shared = programs, gpu, staging, shared
        self._rest: Callable[[], None] | None = None
        self._compiler: threading.Thread | None = None
        self._took: dict[str, float] = {}
        """Part of what the thread does -> seconds."""

    def prepare(
        self,
        sizes: Sequence[int],
        *,
        prompt_sizes: Sequence[int] = (),
        threads: int,
        measure: Measure = lambda name: nullcontext(),
    ) -> None:
        """Compiles what `sizes` and `prompt_sizes` need (see `warm`): on a machine that has run these shapes before, kernels are found on
        disk in a moment. The largest steps are planned too, whose scratch serves all others. `measure` takes the parts' times.
        """
        programs = self._programs
        changes = {
            *KERNELS_CHANGE_AT,
            *kernels_change_at(programs.tapes["body"], {*programs.row_sizes, *programs.token_sizes}),
        }
        few = [size for size in programs.row_sizes if size <= FEW_ROWS]
        many = [size for size in programs.row_sizes if size in changes or size == programs.rows]
        prompts = [
            size for size in programs.token_sizes if size >= FEW_ROWS and (size in changes or size == programs.capacity)
        ]
        buckets = {
            *(programs.singles(rows, longest) for rows in many for longest in programs.lengths(rows)),
            *(programs.singles(rows, programs.longest) for rows in few),
            *(
                programs.mixed(tokens, rows, fresh=fresh)
                for tokens in prompts
                for rows in programs.classes_of(tokens)
                for fresh in programs.fresh_kinds(rows)
            ),
        }
        if self._shared:
            buckets |= {
                replace(bucket, shared=True) for bucket in buckets if bucket.rows >= programs.ops.tuning.shared_rows
            }
        buckets |= {
            replace(bucket, deep=deep, deep_tokens=tokens)
            for bucket in buckets
            if not bucket.singles
            for deep in programs.deep_rows(bucket.tokens, bucket.rows, fresh=bucket.fresh)
            for tokens in {min(FEW_ROWS, bucket.tokens), bucket.tokens}
        }
        if programs.adapted:
            buckets |= {replace(bucket, adapted=True) for bucket in buckets}
        first = [programs.singles(rows, programs.length_sizes[0]) for rows in sizes]
        first += [programs.mixed(tokens, programs.row_classes[0], fresh=programs.fresh) for tokens in prompt_sizes]
        # The largest first: its scratch serves the others.
        ordered = sorted(buckets | set(first), key=lambda bucket: (-bucket.tokens, -bucket.longest))
        most = ordered[0].tokens
        large = [bucket for bucket in ordered if bucket.tokens == most and not (bucket.adapted or bucket.deep)]
        large += [programs.singles(programs.rows, programs.longest)]
        now = _Kernels()
        with measure("programs"):
            for bucket in large:
                programs.sketch(self._kind(bucket), bucket)
            for bucket in first:
                now.add(programs.program(self._kind(bucket), bucket))
            now.add(programs.head(1, few=programs.few_ends))

        def compile_first() -> None:
            now.run()
            for bucket in first:
                programs.fetch(bucket)
            for size in {1, *sizes}:  # a prompt alone wants one token
                programs.lay_out_samples(size, Draw())
                programs.draw(size, Draw())
            self._staging.begin(64)
            nothing = np.zeros((3, 1), np.int32)
            kernels.write_rows(programs.tokens, self._staging.put(nothing), self._staging.put(nothing))
            kernels.write_entries(programs.tables[0], self._staging.put(nothing))

        def plan_rest() -> _Kernels:
            # One at a time, in the stream of the steps, which then find zeroed scratch.
            later = _Kernels()
            wanted = [(self._kind(bucket), bucket) for bucket in ordered]
            ends = ("head", "ending") if programs.few_ends else ("head",)
            wanted += [(end, programs.singles(size, 1)) for end in ends for size in reversed(many)]
            for kind, bucket in wanted:
                with self._gpu.quiet, self._gpu.working():
                    later.add(programs.sketch(kind, bucket))
                time.sleep(GIVE_WAY_S)
            return later

        def compile_rest(later: _Kernels) -> None:
            later.run()
            for bucket in ordered:
                programs.fetch(bucket)
            for size in many:
                for draw in COMMON_DRAWS:
                    programs.lay_out_samples(size, draw)
                    programs.draw(size, draw)

        if COMPILES:
            with compiling(threads=threads, measure=measure, compilers=programs.ops.compilers):
                compile_first()
        self._gpu.settle()

        def rest() -> None:
            with self._timed("plan"):
                later = plan_rest()
            if COMPILES:
                compilers = programs.ops.compilers
                helpers = compilers.count if compilers is not None else REST_THREADS
                with compiling(threads=helpers, measure=self._timed, compilers=compilers):
                    compile_rest(later)
                if compilers is not None:
                    compilers.close(complete=True)
                with self._timed("library"):
                    self._wake_library()

        self._rest = rest

    def _kind(self, bucket: Bucket) -> str:
        """Of the program that most steps of a size run."""
        if bucket.singles:
            return "whole"
        return "stem" if self._programs.few_ends and not bucket.adapted else "body"

    def prepare_rest(self) -> None:
        """Begins to compile, in a thread, what `prepare` left; `prepared` says when that is done. A step that needs one of them waits."""
        rest, self._rest = self._rest, None
        if rest is not None:
            self._compiler = threading.Thread(target=rest, name="tradewind-compile", daemon=True)
            self._compiler.start()

    def _wake_library(self) -> None:
        """Has the library load what matmuls of steps up to WOKEN tokens need."""
        programs = self._programs
        rows = [size for size in programs.row_sizes if size <= WOKEN]
        for tape, sizes in (
            (programs.tapes["body"], sorted({*rows, *(size for size in programs.token_sizes if size <= WOKEN)})),
            (programs.tapes["head"], rows),
        ):
            found: dict[tuple[Any, ...], tuple[Tensor, Tensor | None, Any]] = {}
            for call in tape.calls:
                if call.op in ("linear", "gated_linear"):
                    weight, dtype = call["weight"], call["out"].dtype
                    if weight.layout == "fp8_block":  # never the library's
                        continue
                    scale = weight.data[1] if weight.layout == "fp8" else None
                    found[weight.n, weight.k, weight.layout, dtype] = (weight.data[0], scale, dtype)
            for weight in found.values():
                with self._gpu.quiet:
                    library.wake(*weight, sizes)

    @property
    def prepared(self) -> bool:
        """Whether every kernel of the model is compiled."""
        return self._rest is None and (self._compiler is None or not self._compiler.is_alive())

    @property
    def rest_took_s(self) -> dict[str, float]:
        """Seconds of those parts of `prepare_rest` that are over, in their order: plan, compile, load, library. From any thread."""
        return dict(self._took)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._took[part] = time.perf_counter() - began

    def close(self) -> None:
        """Waits for the thread that compiles."""
        if self._compiler is not None:
            self._compiler.join()
        if self._programs.ops.compilers is not None:
            self._programs.ops.compilers.close()
