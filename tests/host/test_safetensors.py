"""Safetensors files and folders: against the library, shards, chat templates, lies and damage."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tradewind.quantization.blocks import dequantise
from tradewind.weights.checkpoint import CheckpointError, open_checkpoint
from tradewind.weights.safetensors import INDEX_NAME, open_safetensors, open_sharded


def packed(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def write(path: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A small writer of its own, so that the tests need no library."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int32": "I32", "uint8": "F8_E4M3"}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        span = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": span}
        data += array.tobytes()
    path.write_bytes(packed(header, data))
    return path


def refused(path: Path, content: bytes) -> CheckpointError:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_safetensors(path)
    error = caught.value
    assert error.path == path
    assert error.offset is not None
    assert 0 <= error.offset <= max(len(content), 8)
    assert str(path) in str(error)
    assert "\n" not in str(error)
    return error


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.standard_normal((2, 2, 2)).astype(np.float16),
        "ids": np.arange(4, dtype=np.int64),
        "flag": np.array([True, False]),
        "scalar": np.array(3.0, np.float64),
        "empty": np.zeros((0, 4), np.float32),
    }
    path = tmp_path / "model.safetensors"
    library.save_file(tensors, path, metadata={"format": "np"})
    ours = open_safetensors(path)
    assert set(ours) == set(tensors)
    for name, array in tensors.items():
        assert ours[name].shape == array.shape
        assert ours[name].data.tobytes() == array.tobytes()
        assert not ours[name].data.flags.writeable
        assert ours[name].file == path
        assert path.read_bytes()[ours[name].offset :].startswith(array.tobytes())
    assert {name: tensor.format for name, tensor in ours.items()} == {
        "a": "F32",
        "b": "F16",
        "ids": "I64",
        "flag": "BOOL",
        "scalar": "F64",
        "empty": "F32",
    }
    np.testing.assert_array_equal(dequantise(ours["b"].data, "F16", (2, 2, 2)), tensors["b"].astype(np.float32))


def test_bfloat16_without_a_framework(tmp_path: Path) -> None:
    values = np.array([[1.0, -2.5], [3e38, 0.0]], np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    tensor = open_safetensors(write(tmp_path / "x.safetensors", {"w": bits}))["w"]
    assert (tensor.format, tensor.shape, tensor.nbytes) == ("BF16", (2, 2), 8)
    np.testing.assert_allclose(dequantise(tensor.data, "BF16", (2, 2)), values, rtol=2**-7)


def test_header_lies_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"

    def lie(tensors: object, data: bytes = bytes(16)) -> str:
        return refused(path, packed(tensors, data)).reason

    def w(**changes: object) -> dict[str, object]:
        return {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}

    path.write_bytes(packed(w(), bytes(16)))
    assert open_safetensors(path)["w"].nbytes == 16
    assert "needs 20 bytes and has 16" in lie(w(shape=[5]))
    assert "truncated or lies" in lie(w(data_offsets=[0, 17]))
    assert "truncated or lies" in lie(w(data_offsets=[16, 0]))
    assert "leaves a gap" in lie(w(data_offsets=[4, 16], shape=[3]))
    assert "4 bytes after the last tensor" in lie(w(), bytes(20))
    assert "unknown dtype 'F128'" in lie(w(dtype="F128"))
    assert "unknown dtype" in lie(w(dtype=["F32"]))
    assert "unknown dtype 'Q8_0" not in lie(w(shape=[2**62, 2**62]))
    for shape in ([-4], [4.0], [True], ["4"], "4", None, [2**63], [1] * 65):
        assert "shape" in lie(w(shape=shape))
    for offsets in ([0], [0, 16, 16], [-1, 16], [0, 16.0], None, "016", [0, 2**64]):
        assert "data_offsets" in lie(w(data_offsets=offsets))
    assert "has no dtype" in lie({"w": 3})
    half = {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}
    assert "whole byte" in lie({"w": half}, bytes(1))
    two = {**w(), "v": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}
    assert "tensor 'v' overlaps" in lie(two)
    same = {**w(), "v": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    assert "overlaps" in lie(same)


def test_block_format_names_are_not_safetensors_dtypes(tmp_path: Path) -> None:
    entry = {"w": {"dtype": "Q8_0", "shape": [32], "data_offsets": [0, 34]}}
    assert "unknown dtype 'Q8_0'" in refused(tmp_path / "x.safetensors", packed(entry, bytes(34))).reason


def test_broken_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for size in range(8):
        assert "header length" in refused(path, bytes(size)).reason
    for length in (9, 10**9, 2**63, 2**64 - 1):
        error = refused(path, struct.pack("<Q", length) + b"{}".ljust(8))
        assert str(length) in error.reason
        assert error.offset == 0
    assert refused(path, packed(b'{"w": }')).offset == 8 + 6
    assert "an object is needed" in refused(path, packed(b"[1, 2]")).reason
    assert "not UTF-8" in refused(path, packed(b'{"\xff": 1}')).reason
    assert "nested too deep" in refused(path, packed(b"[" * 200_000)).reason
    assert "appears twice" in refused(path, packed(b'{"w": 1, "w": 2}')).reason
    assert "broken JSON" in refused(path, packed(b'{"w": ' + b"9" * 5000 + b"}")).reason
    error = refused(path, packed(b'{"\\ud800\\u001b": 3}'))
    str(error).encode()
    assert "\x1b" not in str(error)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = write(tmp_path / "x.safetensors", {"a": np.ones(5, np.float32), "b": np.ones(3, np.float16)}).read_bytes()
    for length in range(len(content)):
        refused(tmp_path / "cut.safetensors", content[:length])
    assert len(open_safetensors(tmp_path / "x.safetensors")) == 2


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=2000)
@given(data=st.data())
def test_random_damage_never_raises_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    tensors = {"a": np.ones(5, np.float32), "b": np.ones((2, 3), np.float16), "c": np.ones(2, np.int32)}
    content = bytearray(write(tmp_path / "x.safetensors", tensors).read_bytes())
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(
            st.one_of(st.integers(0, 255), st.sampled_from(b'0123456789[]{}",:-.eE'))
        )
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))])
    try:
        for tensor in open_safetensors(path).values():
            assert tensor.data.nbytes == tensor.nbytes
    except CheckpointError as error:
        str(error).encode()


# ------------------------------------------------------------------------------------------------------------ folders


def sharded(folder: Path) -> dict[str, Any]:
    write(folder / "model-00001-of-00002.safetensors", {"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)})
    write(folder / "model-00002-of-00002.safetensors", {"c": np.ones(4, np.float32)})
    shard = "model-0000{}-of-00002.safetensors".format
    index = {"metadata": {"total_size": 36}, "weight_map": {"a": shard(1), "b": shard(1), "c": shard(2)}}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return index


def test_sharded_by_index_and_by_number(tmp_path: Path) -> None:
    sharded(tmp_path)
    assert {name: tensor.shape for name, tensor in open_sharded(tmp_path).items()} == {"a": (2,), "b": (3,), "c": (4,)}
    (tmp_path / INDEX_NAME).unlink()
    assert set(open_sharded(tmp_path)) == {"a", "b", "c"}
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "model-00003-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"shards \[1\] of 2 are missing"):
        open_sharded(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors: this shard is missing; 1 of 2"):
        open_sharded(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    index = sharded(tmp_path)
    index["weight_map"]["d"] = "model-00002-of-00002.safetensors"
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lacks tensor 'd'"):
        open_sharded(tmp_path)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "a\\b", "", ".", "..", None, 3, "a\0b", ["x"]])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path, shard: object) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError):
        open_sharded(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_NAME).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        open_sharded(tmp_path)
    assert caught.value.path == tmp_path / INDEX_NAME


def test_which_files_belong_together(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no"):
        open_sharded(tmp_path)
    write(tmp_path / "weights.safetensors", {"a": np.ones(1, np.float32)})
    assert set(open_sharded(tmp_path)) == {"a"}
    write(tmp_path / "other.safetensors", {"b": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match=r"which belong together\? \(other\.safetensors, weights\.safetensors\)"):
        open_sharded(tmp_path)
    write(tmp_path / "model.safetensors", {"c": np.ones(1, np.float32)})
    assert set(open_sharded(tmp_path)) == {"c"}


def test_a_name_in_two_numbered_shards_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path / f"m-0000{number}-of-00002.safetensors", {"a": np.ones(1, np.float32)})
    with pytest.raises(CheckpointError, match="'a' is in an earlier shard too"):
        open_sharded(tmp_path)


def test_a_whole_folder(tmp_path: Path) -> None:
    sharded(tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    bare = open_checkpoint(tmp_path)
    assert (bare.kind, bare.path, bare.metadata) == ("hf", tmp_path, {"model_type": "llama"})
    assert bare.tokenizer_json is bare.tokenizer_config is bare.generation_config is bare.chat_template is None
    assert bare.nbytes == 36
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    named = [{"name": "default", "template": "old"}, {"name": "rag", "template": "rag!"}, {"name": "broken"}, 3]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": named}))
    full = open_checkpoint(tmp_path)
    assert full.tokenizer_json == tmp_path / "tokenizer.json"
    assert full.generation_config == {"eos_token_id": [1, 2]}
    assert full.chat_template == {"default": "old", "rag": "rag!"}
    (tmp_path / "chat_template.jinja").write_text("new {{ é }}", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert open_checkpoint(tmp_path).chat_template == {"default": "new {{ é }}", "rag": "rag!", "tool_use": "tools"}


def test_broken_side_files_are_named_with_their_byte(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": np.ones(1, np.float32)})
    (tmp_path / "config.json").write_text('{"é": 1, }', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json at byte \d+: broken JSON") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.offset in (8, 10)  # the comma or the brace after it: Python versions differ
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_bytes(b"abc\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja at byte 3"):
        open_checkpoint(tmp_path)


def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, a format that can run code"):
        open_checkpoint(tmp_path)


def test_tensors_can_be_read_again_after_their_pages_were_let_go(tmp_path: Path) -> None:
    values = np.arange(4096, dtype=np.float32)
    write(tmp_path / "model.safetensors", {"a": values})
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    before = checkpoint.tensors["a"].data.copy()
    checkpoint.let_go()
    assert np.array_equal(checkpoint.tensors["a"].data, before)
