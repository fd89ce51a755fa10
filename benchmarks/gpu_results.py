"""A run's result as JSON, lines of progress, and the page that is made of many results.

Knows: what every result begins with, that a file is written whole or not at all and names no place on this machine, and which
results a page shows. Refuses to know: how anything is measured (gpu_suite), and what a figure means (gpu_figures).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_card import asked_of_driver
from gpu_places import SUITE

FORMAT = 1
BEGIN, END = "<!-- figures: begin (written by benchmarks/gpu_suite.py --report) -->", "<!-- figures: end -->"


# ----------------------------------------------------------------------------------------------------------- one result


def new_result(arguments: argparse.Namespace) -> dict[str, Any]:
    """A result with nothing measured yet."""
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [SUITE.name, *(nameless(word) for word in sys.argv[1:])],
        "kind": "ablation" if arguments.ablate else "suite",
        "model": Path(arguments.model).name,
        "quantization": arguments.quantization,
        "load_format": arguments.load_format,
        "backend": arguments.backend,
        "scale": arguments.scale,
        "off": arguments.off,
        "means": arguments.means,
        "ways": arguments.way,
        "card": platform.machine(),
        "versions": versions(),
        "workloads": {},
        "skipped": [],
    }


def versions() -> dict[str, str]:
    """Of Python, the libraries that matter and the driver, as far as they are there."""
    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    driver = asked_of_driver("driver_version")
    return found | ({"driver": driver} if driver else {})


def nameless(word: str) -> str:
    """An argument without the place on this machine: results are read elsewhere."""
    return Path(word).name if word.startswith(("/", "~", "..")) else word


def save(result: dict[str, Any], path: Path | None) -> None:
    """Writes the JSON whole or not at all."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(result, indent=1, default=float) + "\n", encoding="utf-8")
    beside.replace(path)


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------- a page of them


def report(folder: Path, *, into: Path | None) -> int:
    """Prints the tables of all results of a folder, newest last; `into` takes them between its two marks instead."""
    import gpu_figures

    paths = sorted(folder.glob("gpu-*.json"))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    # Runs with choices pinned or with less work are experiments, not results.
    suites = [one for one in found if one.get("kind") == "suite" and one["scale"] == "full"]
    suites = [one for one in suites if not one["off"] and not one["means"]]
    # The newest run of a model (and kind of weights) is the one that counts.
    latest = {gpu_figures.title_of(one): one for one in sorted(suites, key=lambda one: one["date"])}
    results = [latest[title] for title in sorted(latest)]
    parts = [gpu_figures.short_table(results), ""] if results else ["No result yet.", ""]
    parts += [gpu_figures.section(one) + "\n" for one in results]
    for one in found:
        if one.get("kind") == "ablation":
            parts += [
                f"### Techniques, turned one at a time: {gpu_figures.title_of(one)}",
                "",
                gpu_figures.ablation_table(one),
                "",
            ]
    for path, one in zip(paths, found, strict=True):
        if one.get("kind") == "trace":
            drawn = path.with_suffix(".png")
            # Links are from the page that takes the figures.
            picture = os.path.relpath(drawn, (into or folder / "x").parent) if drawn.is_file() else None
            parts += [gpu_figures.trace_section(one, picture=picture), ""]
        elif one.get("kind") == "check":
            parts += [gpu_figures.check_section(one), ""]
    text = "\n".join(parts).rstrip() + "\n"
    if into is None:
        print(text)
        return 0
    page = into.read_text(encoding="utf-8")
    head, mark, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not mark or not end:
        print(f"gpu_suite: {into} lacks the lines '{BEGIN}' and '{END}'", file=sys.stderr)
        return 2
    into.write_text(f"{head}{BEGIN}\n\n{text}\n{END}{tail}", encoding="utf-8")
    return 0
