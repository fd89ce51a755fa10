"""Where the time from the start of the process to a ready engine goes: cold, warm, and warm again under `-X importtime`.

    python benchmarks/start_profile.py --model llama-3.1-8b --out benchmarks/results/start-llama-3.1-8b.json     (under a minute on an H200)
    python benchmarks/start_profile.py --model tiny --backend cpu                                                  to try it anywhere

Every start is a process of its own that does what `gpu_suite.py --start-only` does. Instruments lie around what Python can see (imports,
Triton's compiler and loader, torch's first use of the card); what the engine itself tells (phases, and what ran beside them) is stored too.
JSON is written after every process, so that a run that is cut loses nothing. Refuses to know: what the engine could do about it.

    probes (bare interpreter, numpy, torch, the driver, a context) -> cold -> warm -> warm, imports timed -> table
"""

from __future__ import annotations

import time

FIRST_LINE_S = time.perf_counter()

import argparse  # noqa: E402 - the first line's time is taken before anything is imported
import contextlib  # noqa: E402
import importlib.machinery  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import resource  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import threading  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

HERE = Path(__file__).resolve().parent
for place in (str(HERE), str(HERE.parent / "src")):
    if place not in sys.path:
        sys.path.insert(0, place)

FORMAT = 1
SLOWEST = 20
TIMEOUT_S = 60.0
TIMED_MODULES = (
    "numpy",
    "tokenizers",
    "torch",
    "torch._C",
    "torch.cuda",
    "tradewind.assemble",
    "tradewind.kernels.triton.ops",
    "tradewind.runner.graph_runner",
    "triton",
)
"""Modules whose import is timed in every start; under `-X importtime` all are."""

PROBES: dict[str, str] = {
    "python -S": "pass",
    "python": "pass",
    "numpy": "import numpy",
    "assemble": "import tradewind.assemble",
    "triton": "import triton",
    "torch libraries": (
        "import ctypes, importlib.util, pathlib\n"
        "lib = pathlib.Path(importlib.util.find_spec('torch').submodule_search_locations[0]) / 'lib'\n"
        "ctypes.CDLL(str(lib / 'libtorch_global_deps.so'), mode=ctypes.RTLD_GLOBAL)\n"
        "ctypes.CDLL(str(lib / 'libtorch.so'))"
    ),
    "torch": "import torch",
    "driver": "import ctypes\nassert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0",
    "context": (
        "import ctypes\nc = ctypes.CDLL('libcuda.so.1')\nassert c.cuInit(0) == 0\nx = ctypes.c_void_p()\n"
        "assert c.cuDevicePrimaryCtxRetain(ctypes.byref(x), 0) == 0"
    ),
    "torch and a tensor": "import torch\ntorch.zeros(1, device='cuda')\ntorch.cuda.synchronize()",
}
"""Name -> what a bare interpreter runs; wall seconds of the whole process."""
GPU_PROBES = ("driver", "context", "torch and a tensor")


# ----------------------------------------------------------------------------------------------- inside a measured start


class Events:
    """What happened when, in seconds since the process began, with the process's own counters at that moment."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.marks: list[dict[str, Any]] = []
        self.spans: list[dict[str, Any]] = []
        self.kernels: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def mark(self, name: str, at_s: float | None = None) -> None:
        """A moment, by default now."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.marks.append(
            {
                "name": name,
                "at_s": round((time.perf_counter() if at_s is None else at_s) - self.began_s, 4),
                "user_s": round(used.ru_utime, 3),
                "system_s": round(used.ru_stime, 3),
                "read_faults": used.ru_majflt,
                "page_faults": used.ru_minflt,
            }
        )

    @contextlib.contextmanager
    def span(self, name: str) -> Any:
        """What the block takes, and in which thread."""
        began, spent = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            record = {
                "name": name,
                "at_s": round(began - self.began_s, 4),
                "seconds": round(time.perf_counter() - began, 4),
                "processor_s": round(time.thread_time() - spent, 4),
                "thread": threading.current_thread().name,
            }
            with self._lock:
                self.spans.append(record)

    def around(self, owner: Any, name: str, label: str | Callable[..., str]) -> None:
        """From now on every call of the owner's function is a span."""
        inner = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            with self.span(label if isinstance(label, str) else label(*arguments, **options)):
                return inner(*arguments, **options)

        setattr(owner, name, timed)

    def kernel(self, hash_: str, name: str) -> dict[str, Any]:
        with self._lock:
            return self.kernels.setdefault(hash_, {"name": name})


class TimedImports:
    """A finder that times the import of some modules and tells when they are there."""

    def __init__(self, events: Events, then: dict[str, Callable[[], None]]) -> None:
        self._events, self._then = events, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """See importlib.abc.MetaPathFinder; only for the modules of TIMED_MODULES."""
        if name not in TIMED_MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        events, execute, then = self._events, spec.loader.exec_module, self._then.get(name)

        def timed(module: Any) -> None:
            with events.span(f"import {name}"):
                execute(module)
            if then is not None:
                with contextlib.suppress(Exception):  # an instrument that does not fit this version is left out
                    then()

        spec.loader.exec_module = timed  # type: ignore[method-assign]
        return spec


def watch_torch(events: Events) -> None:
    """Times torch's first use of the card."""
    import torch

    events.around(torch.cuda, "_lazy_init", "torch wakes the card")


def watch_triton(events: Events) -> None:
    """Times what Triton does for each kernel: compile or find on disk, build or load its launcher, load its binary."""
    import triton
    from triton import knobs
    from triton.runtime import cache

    def compiled(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        record = events.kernel(metadata["hash"], src.name)
        record["found_on_disk"] = cache_hit
        parts = {"ir": times.ir_initialization, **dict(times.lowering_stages), "store": times.store_results}
        record["compile_ms"] = {part: round(us / 1e3, 1) for part, us in parts.items()}
        record["compiled_at_s"] = round(time.perf_counter() - events.began_s, 3)

    knobs.compilation.listener = compiled
    events.around(cache, "triton_key", "hash of Triton itself")
    began: dict[tuple[str, int], float] = {}

    def loads(module: Any, function: Any, name: str, metadata_group: Any, hash_: str) -> None:
        began[hash_, threading.get_ident()] = time.perf_counter()

    def loaded(module: Any, function: Any, name: str, metadata_group: Any, hash_: str) -> None:
        now = time.perf_counter()
        record = events.kernel(hash_, name)
        record["load_ms"] = round(1e3 * (now - began.pop((hash_, threading.get_ident()), now)), 2)
        record["loaded_at_s"] = round(now - events.began_s, 3)

    knobs.runtime.kernel_load_start_hook.add(loads)
    knobs.runtime.kernel_load_end_hook.add(loaded)
    if "nvidia" in triton.backends.backends:
        from triton.backends.nvidia import driver

        events.around(
            driver, "compile_module_from_src", lambda *a, **options: f"C module {options.get('name', a[1:2])}"
        )


def facts() -> dict[str, Any]:
    """What about this installation could make imports slow."""

    def without_bytecode(prefix: str) -> int:
        found = [m for name, m in list(sys.modules.items()) if name == prefix or name.startswith(prefix + ".")]
        cached = [getattr(module, "__cached__", None) for module in found]
        return sum(1 for path in cached if isinstance(path, str) and not os.path.exists(path))

    def kind_of(path: str) -> str:
        best = ("", "")
        with contextlib.suppress(OSError):
            for line in Path("/proc/mounts").read_text().splitlines():
                _, where, kind = line.split()[:3]
                if path.startswith(where.rstrip("/") + "/") and len(where) > len(best[0]):
                    best = (where, kind)
        return best[1]

    torch = sys.modules.get("torch")
    return {
        "writes_bytecode": not sys.flags.dont_write_bytecode,
        "modules": len(sys.modules),
        "modules_without_bytecode": {name: without_bytecode(name) for name in ("torch", "triton", "tradewind", "numpy")},
        "file_system": {"torch": kind_of(getattr(torch, "__file__", "") or ""), "tradewind": kind_of(str(HERE))},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "switch_interval_s": sys.getswitchinterval(),
        "load": list(os.getloadavg()),
        "imported_besides": sorted(
            name
            for name in ("IPython", "matplotlib", "pandas", "rich", "scipy", "sympy", "tokenizers", "torch._dynamo",
                         "torch._inductor", "torch.distributed", "transformers", "triton.testing", "xgrammar")
            if name in sys.modules
        ),
    }  # fmt: skip


def child(arguments: argparse.Namespace) -> dict[str, Any]:
    """One start, measured from inside."""
    from tradewind.phases import Phases, process_began_s

    began_s = process_began_s()
    events = Events(began_s)
    events.mark("first line", FIRST_LINE_S)
    events.mark("own imports")
    then = {"torch.cuda": lambda: None, "torch": lambda: watch_torch(events), "triton": lambda: watch_triton(events)}
    if not arguments.plain:
        sys.meta_path.insert(0, TimedImports(events, then))  # type: ignore[arg-type]
    import gpu_engine
    import gpu_options

    events.mark("suite imported")
    phases = Phases(began_s=began_s)
    same = ["--model", arguments.model, "--backend", arguments.backend, "--quantization", arguments.quantization]
    for text in arguments.means:
        same += ["--means", text]
    plan, client = gpu_engine.opened(gpu_options.goals_of(gpu_options.parsed(same)), phases=phases)
    ready_s = time.perf_counter() - began_s
    events.mark("ready")
    vocab = plan.card.vocab_size
    try:
        gpu_engine.Driven(client.loop).generate([[100 + i % (vocab - 2100) for i in range(128)]], [1])
        answer_s = time.perf_counter() - began_s
        events.mark("first answer")
        state = facts()
        until = time.perf_counter() + arguments.prepare_s
        while not client.loop.prepared and time.perf_counter() < until:
            time.sleep(0.05)
        events.mark("all kernels there" if client.loop.prepared else "kernels still being compiled")
    finally:
        client.close()
    return {
        "ready_s": round(ready_s, 3),
        "first_answer_s": round(answer_s, 3),
        "phases": [(phase.name, round(phase.seconds, 4)) for phase in phases.done],
        "besides": [(phase.name, round(phase.seconds, 4)) for phase in phases.besides],
        "marks": events.marks,
        "spans": sorted(events.spans, key=lambda span: span["at_s"]),
        "kernels_before_ready": sum(1 for one in events.kernels.values() if one.get("loaded_at_s", 1e9) <= ready_s),
        "kernels": sorted(
            events.kernels.values(), key=lambda one: -sum(one.get("compile_ms", {}).values()) - one.get("load_ms", 0)
        )[: 3 * SLOWEST],
        "facts": state,
    }


# ------------------------------------------------------------------------------------------------------------ the parent


def run_child(arguments: argparse.Namespace, *options: str, python: Sequence[str] = (), caches: str) -> dict[str, Any]:
    """One start in a process of its own; {"error": ...} when it fails."""
    command = [sys.executable, *python, str(Path(__file__).resolve()), "--child", *options]
    command += ["--model", arguments.model, "--backend", arguments.backend, "--quantization", arguments.quantization]
    for text in arguments.means:
        command += ["--means", text]
    fresh = {"TRITON_CACHE_DIR": f"{caches}/triton", "XDG_CACHE_HOME": f"{caches}/cache"}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env={**os.environ, **fresh}
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {TIMEOUT_S:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"error": f"exit code {done.returncode}", "said": done.stderr.strip().splitlines()[-12:]}
    found: dict[str, Any] = json.loads(lines[-1])
    found["process_s"] = round(time.perf_counter() - began, 3)
    if "-X" in python:
        found["imports"] = import_table(done.stderr)
    return found


def import_table(text: str) -> dict[str, Any]:
    """What `-X importtime` printed: the slowest modules with and without what they import, and sums by package."""
    own: dict[str, float] = {}
    whole: dict[str, float] = {}
    for line in text.splitlines():
        head, _, rest = line.partition("import time:")
        columns = rest.split("|")
        if head or len(columns) != 3 or not columns[0].strip().isdigit():
            continue
        name = columns[2].strip()
        own[name] = own.get(name, 0.0) + int(columns[0]) / 1e6
        whole[name] = whole.get(name, 0.0) + int(columns[1]) / 1e6

    def sums(depth: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, seconds in own.items():
            key = ".".join(name.split(".")[:depth])
            found[key] = found.get(key, 0.0) + seconds
        return top(found)

    def top(found: dict[str, float]) -> dict[str, float]:
        return {
            name: round(seconds, 4) for name, seconds in sorted(found.items(), key=lambda item: -item[1])[: 2 * SLOWEST]
        }

    return {
        "modules": len(own),
        "seconds": round(sum(own.values()), 3),
        "packages": sums(1),
        "parts": sums(2),
        "own": top(own),
        "with_theirs": top(whole),
    }


def probes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Wall seconds of bare interpreters: what a start cannot be faster than. The second of two runs each."""
    found: dict[str, Any] = {}
    for name, source in PROBES.items():
        if arguments.backend != "cuda" and name in GPU_PROBES:
            continue
        for _ in range(2 if arguments.twice else 1):
            found[name] = probe(source, *(("-S",) if name == "python -S" else ()))
    return found


def probe(source: str, *options: str) -> float | str:
    """Wall seconds of a bare interpreter that runs this, or what went wrong."""
    paths = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *options, "-c", source],
            capture_output=True,
            timeout=30,
            check=False,
            env={**os.environ, "PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired:
        return "not done after 30 s"
    seconds = round(time.perf_counter() - began, 3)
    return seconds if done.returncode == 0 else done.stderr.decode(errors="replace")[-200:]


def show(name: str, found: dict[str, Any]) -> None:
    """A start as a table."""
    if "error" in found:
        print(f"\n{name}: {found['error']}", *found.get("said", ()), sep="\n    ")
        return
    print(f"\n{name}: ready in {found['ready_s']:.2f} s, first answer after {found['first_answer_s']:.2f} s")
    print("  phases  " + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in found["phases"] if seconds >= 0.005))
    if found["besides"]:
        print("  beside  " + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in found["besides"]))
    for mark in found["marks"]:
        print(
            f"  {mark['at_s']:7.3f} s  {mark['name']:<28} processor {mark['user_s']:.2f} + {mark['system_s']:.2f} s, "
            f"{mark['page_faults']} page faults, {mark['read_faults']} of them read"
        )
    for span in sorted(found["spans"], key=lambda span: -span["seconds"])[:SLOWEST]:
        print(
            f"  {span['at_s']:7.3f} s  + {span['seconds']:.3f} s ({span['processor_s']:.3f} of one processor)  "
            f"{span['name']}  [{span['thread']}]"
        )
    print(f"  {found['kernels_before_ready']} kernels loaded before ready; the slowest of all:")
    for one in found["kernels"][: SLOWEST // 2]:
        parts = ", ".join(f"{part} {ms:.0f}" for part, ms in one.get("compile_ms", {}).items() if ms >= 1)
        print(
            f"      {one['name']:<28} {'found' if one.get('found_on_disk') else 'compiled'} ({parts or '-'} ms), "
            f"load {one.get('load_ms', 0):.1f} ms at {one.get('loaded_at_s', 0):.2f} s"
        )
    if "imports" in found:
        table = found["imports"]
        print(f"  {table['modules']} modules in {table['seconds']:.2f} s, by package and by module without its own:")
        for part in ("packages", "parts", "own"):
            print("      " + ", ".join(f"{key} {seconds:.3f}" for key, seconds in list(table[part].items())[:SLOWEST]))


def save(result: dict[str, Any], path: Path | None) -> None:
    """Writes the JSON whole or not at all."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the starts that are asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="llama-3.1-8b", help="a folder of benchmarks/models, or any folder")
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu", "plain"))
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--means", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--seconds", type=float, default=90.0, help="no process is started after this (%(default)s)")
    parser.add_argument("--prepare-s", type=float, default=8.0, help="wait so long for kernels behind the first steps")
    parser.add_argument("--once", dest="twice", action="store_false", help="each probe once, not the second of two")
    parser.add_argument("--no-probes", action="store_true")
    parser.add_argument(
        "--no-bytecode",
        action="store_true",
        help="leave our sources as they are, not compiled first as an installer does",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child:
        print(json.dumps(child(arguments)), flush=True)
        return 0
    began = time.perf_counter()
    result: dict[str, Any] = {
        "format": FORMAT,
        "kind": "start",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "command": [Path(__file__).name, *(Path(word).name for word in sys.argv[1:])],
        "model": Path(arguments.model).name,
        "backend": arguments.backend,
        "python": platform.python_version(),
        "starts": {},
    }
    if not arguments.no_bytecode:
        import compileall

        result["assemble_before_bytecode_s"] = probe(PROBES["assemble"])
        compileall.compile_dir(HERE.parent / "src", quiet=2, workers=0)
        compileall.compile_dir(HERE, quiet=2, maxlevels=0)
        result["bytecode_s"] = round(time.perf_counter() - began, 2)
    if arguments.backend == "cuda":  # reads the libraries from disk: cold is about our caches, not about the machine's
        result["first_torch_s"] = probe(PROBES["torch and a tensor"])
        print(f"the first torch of all: {result['first_torch_s']} s", flush=True)
    starts: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
        ("cold", (), ()),
        ("warm", (), ()),
        ("warm, no instruments", ("--plain",), ()),
        ("warm, imports timed", ("--plain",), ("-X", "importtime")),
    ]
    failed = False
    with tempfile.TemporaryDirectory(prefix="tradewind-start-") as caches:
        for name, options, python in starts:
            if time.perf_counter() - began > arguments.seconds:
                result.setdefault("skipped", []).append(name)
                continue
            waits = arguments.prepare_s if name == "cold" else 0.0
            found = run_child(arguments, *options, "--prepare-s", str(waits), python=python, caches=caches)
            result["starts"][name] = found
            failed |= "error" in found
            show(name, found)
            save(result, arguments.out)
    if not arguments.no_probes and time.perf_counter() - began < arguments.seconds:
        result["probes"] = probes(arguments)
        print("\nbare processes: " + ", ".join(f"{name} {seconds}" for name, seconds in result["probes"].items()))
        save(result, arguments.out)
    print(f"\n{time.perf_counter() - began:.1f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
