"""Builds the CPU op library while the package is built; everything else about the package is in pyproject.toml.

The library is plain C++ behind ctypes, not a Python extension: its name has no Python ABI tag and one wheel serves every Python. Without a
compiler, or when it fails, the installation goes on with one sentence of notice and the engine computes with torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOM = Path("tradewind/kernels/cpu")
SOURCES = sorted(str(path) for path in (Path("src") / ROOM / "csrc").glob("*.cpp"))
# No -march: instruction sets are chosen when the library runs, by functions compiled for a target each.
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-pthread", "-fno-math-errno"]


class build_library(build_ext):  # noqa: N801  (the name of a setuptools command)
    """Compiles one object per source, in parallel, and links them to `tradewind/kernels/cpu/libtradewind_cpu.so`."""

    def run(self) -> None:
        problem = self.compile_and_link()
        if problem:
            self.target().unlink(missing_ok=True)  # an old build must not pass for this one
            print(
                f"tradewind: the CPU op library was not built ({problem}); the engine will compute with torch, which is slower."
            )

    def compile_and_link(self) -> str:
        """Returns why there is no library, or an empty string when it is in its place."""
        if not SOURCES:
            return "no C++ sources in this tree"
        names = (os.environ.get("CXX"), "c++", "g++", "clang++")
        compiler = next((found for name in names if name and (found := shutil.which(name))), None)
        if compiler is None:
            return "no C++ compiler found; set CXX or install g++"
        work = Path(self.build_temp)
        work.mkdir(parents=True, exist_ok=True)
        objects = [str(work / f"{Path(source).stem}.o") for source in SOURCES]
        built, target = work / "libtradewind_cpu.so", self.target()
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                jobs = zip(SOURCES, objects, strict=True)
                list(pool.map(lambda job: run([compiler, *FLAGS, "-c", job[0], "-o", job[1]]), jobs))
            run([compiler, "-shared", "-pthread", *objects, "-o", str(built)])
        except (OSError, subprocess.CalledProcessError) as error:
            lines = (getattr(error, "stderr", "") or "no message").strip().splitlines()
            return f"{compiler} failed: {next((line for line in lines if 'error' in line), lines[-1])}"
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new inode: a process that has the old library mapped keeps it.
        shutil.copyfile(built, target.with_suffix(".new"))
        os.replace(target.with_suffix(".new"), target)
        return ""

    def target(self) -> Path:
        """Beside the sources for an editable install, in the wheel's tree otherwise."""
        return (
            (Path("src") if self.inplace or self.editable_mode else Path(self.build_lib)) / ROOM / "libtradewind_cpu.so"
        )

    def get_outputs(self) -> list[str]:
        return [str(self.target())] if self.target().exists() else []

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        return SOURCES


class platform_wheel(bdist_wheel):  # noqa: N801
    """A wheel for this platform and any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def run(command: list[str]) -> None:
    """Runs one compiler command; raises CalledProcessError with its stderr."""
    subprocess.run(command, check=True, capture_output=True, text=True)


setup(
    ext_modules=[Extension("tradewind.kernels.cpu.library", sources=SOURCES)],
    cmdclass={"build_ext": build_library, "bdist_wheel": platform_wheel},
)
