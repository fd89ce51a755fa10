"""What pytest said, as one JSON: how many tests passed, which failed and why, which were skipped and why, and on what machine.

    python benchmarks/tests_told.py --out summary.json --log times tests.xml ...

Knows: the junit files that pytest writes, and lines NAME EXIT_CODE SECONDS of scripts/gpu-test. Refuses to know: what the tests are about.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gpu_results

CUT = 124
"""Exit code of timeout(1)."""


def told(path: Path) -> dict[str, Any]:
    """One junit file: counts, seconds, failures with their first words, reasons of skips with how often, and counts by test file."""
    counts: Counter[str] = Counter()
    files: dict[str, Counter[str]] = {}
    failures: list[dict[str, str]] = []
    skips: Counter[str] = Counter()
    root = ElementTree.parse(path).getroot()
    for case in root.iter("testcase"):
        found = {child.tag: child for child in case}
        bad = found.get("failure", found.get("error"))
        verdict = "failed" if bad is not None else "skipped" if "skipped" in found else "passed"
        name = case.get("classname") or case.get("name") or "?"
        counts[verdict] += 1
        files.setdefault(name, Counter())[verdict] += 1
        if bad is not None:
            failures.append(
                {"test": f"{name}::{case.get('name')}", "why": (bad.get("message") or bad.text or "")[:500]}
            )
        elif "skipped" in found:
            skips[reason_of(found["skipped"])] += 1
    seconds = sum(float(suite.get("time", 0)) for suite in root.iter("testsuite"))
    return {
        **{verdict: counts[verdict] for verdict in ("passed", "failed", "skipped")},
        "seconds": round(seconds, 1),
        "failures": failures,
        "skips": dict(skips),
        "files": {name: dict(found) for name, found in sorted(files.items())},
    }


def reason_of(skipped: ElementTree.Element) -> str:
    """Why a test was skipped, without the place in the file."""
    text = skipped.get("message") or ""
    if text == "collection skipped":  # the reason is in the text: (path, line, reason)
        text = skipped.text or text
    match = re.search(r"Skipped: (.*?)[\"']?\)?$", text, re.DOTALL)
    return (match.group(1) if match else text)[:300]


def jobs_of(path: Path) -> dict[str, dict[str, Any]]:
    """The lines of the script: by job, exit code, seconds, and whether its time limit cut it."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        name, code, seconds = line.split()
        found[name] = {"exit_code": int(code), "seconds": int(seconds), "cut": int(code) in (CUT, 137)}
    return found


def card() -> str:
    """The first GPU's name as its driver tells it."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(OSError, IndexError, subprocess.SubprocessError):
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    return "no GPU"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the JSON and prints its counts; 1 when a test failed, a job did, or there is no test."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("files", type=Path, nargs="*", metavar="JUNIT.xml")
    parser.add_argument("--log", type=Path, required=True, help="lines NAME EXIT_CODE SECONDS")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    result: dict[str, Any] = {
        "format": 1,
        "kind": "tests",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": card(),
        "versions": gpu_results.versions(),
        "jobs": jobs_of(arguments.log),
        "tests": {path.stem: told(path) for path in arguments.files if path.is_file()},
    }
    gpu_results.save(result, arguments.out)
    for name, tests in result["tests"].items():
        print(f"{name}: {tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped")
        for failure in tests["failures"]:
            print(f"    {failure['test']}: {failure['why'].splitlines()[0] if failure['why'] else ''}")
    bad = [name for name, job in result["jobs"].items() if job["exit_code"]]
    if bad:
        print(f"not well: {', '.join(bad)}")
    return 1 if bad or not result["tests"] or any(tests["failed"] for tests in result["tests"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
