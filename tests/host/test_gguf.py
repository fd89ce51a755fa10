"""GGUF files: against the gguf package, lazily decoded arrays, lies and damage."""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tradewind.contract.errors import UserError
from tradewind.quantization.blocks import BLOCKS, dequantise, quantise_q4_1, quantise_q8_0
from tradewind.weights.checkpoint import CheckpointError, RawTensor, open_checkpoint
from tradewind.weights.gguf import TENSOR_TYPES, open_gguf, write_gguf

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "a.negative": -3,
    "a.large": 2**40,
    "a.huge": 2**63,
    "a.bool": True,
    "a.double": np.float64(0.1),
    "a.byte": np.uint8(7),
    "tokenizer.ggml.tokens": ["<s>", "Ġhello", "é", "", "🙂"],
    "tokenizer.ggml.scores": np.array([0.0, -1.5, 2.0], np.float32),
    "tokenizer.ggml.token_type": [3, 1, 1, 1, 6],
    "a.flags": [True, False, True],
    "tokenizer.chat_template": "{{ messages }}",
    "tokenizer.chat_template.tool_use": "{{ tools }}",
}


def small_tensors() -> dict[str, RawTensor | np.ndarray]:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((3, 64)).astype(np.float32)
    return {
        "norm.weight": np.arange(5, dtype=np.float32),
        "half.weight": weight.astype(np.float16),
        "q8.weight": RawTensor("", (3, 64), "Q8_0", quantise_q8_0(weight).reshape(-1)),
        "q4.weight": RawTensor("", (3, 64), "Q4_1", quantise_q4_1(weight).reshape(-1)),
        "ids": np.arange(6, dtype=np.int32).reshape(2, 3),
        "scalar": np.array(2.5, np.float32),
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, METADATA, small_tensors())
    return path


def raw_gguf(
    *, version: int = 3, tensors: int = 0, pairs: int = 0, body: bytes = b"", magic: bytes = b"GGUF", data: bytes = b""
) -> bytes:
    head = magic + struct.pack("<IQQ", version, tensors, pairs) + body
    return head + bytes(-len(head) % 32) + data


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, offset)


def refused(path: Path, content: bytes) -> CheckpointError:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_gguf(path)
    error = caught.value
    assert isinstance(error, UserError)
    assert error.path == path
    assert error.offset is not None
    assert 0 <= error.offset <= len(content)
    assert str(path) in str(error)
    assert str(error.offset) in str(error)
    assert "\n" not in str(error)
    return error


def test_what_was_written_is_read(small: Path) -> None:
    file = open_gguf(small)
    assert (file.version, file.alignment, file.path) == (3, 32, small)
    assert list(file.metadata) == list(METADATA)
    for key in ("general.architecture", "llama.block_count", "a.negative", "a.large", "a.huge", "a.byte"):
        assert file.metadata[key] == METADATA[key]
        assert type(file.metadata[key]) in (int, str)
    assert file.metadata["a.bool"] is True
    assert file.metadata["a.double"] == 0.1
    assert file.metadata["tokenizer.ggml.tokens"] == tuple(METADATA["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    np.testing.assert_array_equal(file.metadata["tokenizer.ggml.scores"], METADATA["tokenizer.ggml.scores"])
    np.testing.assert_array_equal(file.metadata["a.flags"], [True, False, True])
    assert file.metadata["a.flags"].dtype == np.bool_  # type: ignore[attr-defined]
    for name, written in small_tensors().items():
        tensor = file.tensors[name]
        assert tensor.name == name
        if isinstance(written, RawTensor):
            assert (tensor.shape, tensor.format) == (written.shape, written.format)
            np.testing.assert_array_equal(tensor.data, written.data)
        else:
            assert tensor.shape == written.shape
            assert tensor.data.tobytes() == written.tobytes()
    assert file.tensors["norm.weight"].data.flags.writeable is False
    assert file.tensors["q8.weight"].nbytes == 3 * 2 * 34
    assert file.tensors["q8.weight"].count == 192


def test_the_gguf_package_reads_what_is_written(small: Path) -> None:
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(small)
    ours = open_gguf(small)
    theirs = {tensor.name: tensor for tensor in reader.tensors}
    # The package's own reader cannot take a tensor without dimensions apart by itself; the others must agree.
    for name, tensor in ours.tensors.items():
        other = theirs[name]
        assert other.tensor_type.name == tensor.format
        assert tuple(int(size) for size in other.shape)[::-1] == tensor.shape
        assert other.data.tobytes() == tensor.data.tobytes()
        if tensor.format in BLOCKS:
            oracle = gguf.quants.dequantize(np.asarray(other.data), other.tensor_type)
            np.testing.assert_array_equal(dequantise(tensor.data, tensor.format, tensor.shape).ravel(), oracle.ravel())
    assert reader.fields["tokenizer.ggml.tokens"].contents() == list(METADATA["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    assert reader.fields["llama.block_count"].contents() == 2


def test_reads_what_the_gguf_package_writes(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_uint32("qwen2.block_count", 4)
    writer.add_token_list(["a", "b", "ü"])
    writer.add_token_scores([0.5, 1.5, -2.0])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_custom_alignment(64)
    weight = np.random.default_rng(1).standard_normal((4, 64)).astype(np.float32)
    writer.add_tensor("w", weight)
    writer.add_tensor(
        "q", gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    assert file.alignment == 64
    assert file.metadata["general.architecture"] == "qwen2"
    assert file.metadata["qwen2.block_count"] == 4
    assert file.metadata["tokenizer.ggml.tokens"] == ("a", "b", "ü")
    assert [list(part) for part in file.metadata["nested"]] == [[1, 2], [3]]  # type: ignore[attr-defined]
    assert file.tensors["w"].data.tobytes() == weight.tobytes()
    assert np.abs(dequantise(file.tensors["q"].data, "Q8_0", file.tensors["q"].shape) - weight).max() < 0.02


def test_tensor_types_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    for number, name in TENSOR_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == name


@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_alignment_is_honoured(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "a.gguf"
    tensors = {f"t{n}": np.arange(n, dtype=np.float32) for n in (1, 3, 9, 70)}
    write_gguf(path, {"general.alignment": alignment}, tensors)
    file = open_gguf(path)
    assert file.alignment == alignment
    base = path.read_bytes()
    for name, array in tensors.items():
        tensor = file.tensors[name]
        assert tensor.data.tobytes() == array.tobytes()
        start = tensor.data.__array_interface__["data"][0] - file.tensors["t1"].data.__array_interface__["data"][0]
        assert start % alignment == 0
    assert len(base) % alignment == 0


def test_version_2_is_the_same_layout(tmp_path: Path) -> None:
    write_gguf(tmp_path / "2.gguf", METADATA, small_tensors(), version=2)
    file = open_gguf(tmp_path / "2.gguf")
    assert file.version == 2
    assert len(file.tensors) == 6


def test_long_string_arrays_are_stepped_over_quickly_and_decoded_once(tmp_path: Path) -> None:
    tokens = [f"token-{n}" for n in range(262_144)]
    merges = [f"a{n} b{n}" for n in range(262_144)]
    path = tmp_path / "big.gguf"
    write_gguf(path, {"tokens": tokens, "merges": merges, "scores": np.zeros(262_144, np.float32)}, {})
    times = []
    for _ in range(3):
        start = time.perf_counter()
        file = open_gguf(path)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3  # about 0.06 s for the half million strings
    assert file.metadata.array_length("tokens") == 262_144
    assert file.metadata.array_length("scores") == 262_144
    assert file.metadata.array_length("absent") is None
    assert file.metadata["tokens"] == tuple(tokens)
    assert file.metadata["tokens"] is file.metadata["tokens"]
    assert file.metadata.array_length("tokens") == 262_144


def test_open_checkpoint_of_a_file_and_of_a_folder(small: Path) -> None:
    for path in (small, small.parent):
        checkpoint = open_checkpoint(path)
        assert checkpoint.kind == "gguf"
        assert checkpoint.path == small
        assert checkpoint.metadata["general.architecture"] == "llama"
        assert checkpoint.chat_template == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
        assert checkpoint.tokenizer_json is None
        assert checkpoint.generation_config is None
        assert checkpoint.nbytes == sum(tensor.nbytes for tensor in checkpoint.tensors.values())


def test_opening_a_checkpoint_does_not_decode_the_token_list(small: Path) -> None:
    metadata = open_checkpoint(small).metadata
    assert type(metadata._values["tokenizer.ggml.tokens"]).__name__ == "_Array"  # type: ignore[attr-defined]


def test_folders_that_are_not_one_model(tmp_path: Path, small: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither config\.json"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(tmp_path / "absent")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(small.read_bytes())
    with pytest.raises(CheckpointError, match=r"2 GGUF files; name one of them: a.gguf, b.gguf"):
        open_checkpoint(tmp_path)


def test_a_part_of_a_split_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m-00001-of-00003.gguf", {"split.count": np.uint16(3)}, {})
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        open_checkpoint(tmp_path)


# --------------------------------------------------------------------------------------------------- lies and damage


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert refused(path, b"").offset == 0
    assert "not a GGUF file" in refused(path, b"PK\3\4" + bytes(100)).reason
    assert "version 1 " in refused(path, raw_gguf(version=1)).reason
    assert "version 4 " in refused(path, raw_gguf(version=4)).reason
    assert "big-endian" in refused(path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0)).reason
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_gguf(tmp_path)


@pytest.mark.parametrize("count", [2**60, 2**64 - 1, 10**6])
def test_absurd_counts_are_refused_at_once(tmp_path: Path, count: int) -> None:
    path = tmp_path / "x.gguf"
    start = time.perf_counter()
    assert refused(path, raw_gguf(tensors=count)).offset == 8
    assert refused(path, raw_gguf(pairs=count)).offset == 16
    for kind in (0, 4, 8, 12):
        array = text("k") + struct.pack("<IIQ", 9, kind, count)
        assert "cannot be" in refused(path, raw_gguf(pairs=1, body=array)).reason
    nested = text("k") + struct.pack("<IIQ", 9, 9, count)
    refused(path, raw_gguf(pairs=1, body=nested))
    assert time.perf_counter() - start < 1


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    body = text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0)
    assert "nested" in refused(tmp_path / "x.gguf", raw_gguf(pairs=1, body=body)).reason


def test_strings_over_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for length in (10**6, 2**63, 2**64 - 1):
        error = refused(path, raw_gguf(pairs=1, body=struct.pack("<Q", length) + b"key"))
        assert error.offset == 24
        assert str(length) in error.reason
        array = text("k") + struct.pack("<IIQ", 9, 8, 2) + text("ok") + struct.pack("<Q", length)
        error = refused(path, raw_gguf(pairs=1, body=array))
        assert "run over the end" in error.reason
        assert error.offset == 24 + 9 + 16 + 10


def test_metadata_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    pair = text("k") + struct.pack("<II", 4, 1)
    assert "appears twice" in refused(path, raw_gguf(pairs=2, body=pair + pair)).reason
    assert "unknown type 13" in refused(path, raw_gguf(pairs=1, body=text("k") + struct.pack("<II", 13, 1))).reason
    unknown = text("k") + struct.pack("<IIQ", 9, 77, 0)
    assert "unknown type 77" in refused(path, raw_gguf(pairs=1, body=unknown)).reason
    bad = struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", 4, 1)
    assert "not UTF-8" in refused(path, raw_gguf(pairs=1, body=bad)).reason
    for alignment in (0, 3, 2**31 + 1):
        body = text("general.alignment") + struct.pack("<II", 4, alignment)
        assert "power of two" in refused(path, raw_gguf(pairs=1, body=body)).reason
    body = text("general.alignment") + struct.pack("<I", 8) + text("wide")
    assert "power of two" in refused(path, raw_gguf(pairs=1, body=body)).reason


def test_broken_unicode_in_a_token_list_is_told_on_access(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    body = text("k") + struct.pack("<IIQ", 9, 8, 2) + text("ok") + struct.pack("<Q", 1) + b"\xff"
    path.write_bytes(raw_gguf(pairs=1, body=body))
    file = open_gguf(path)
    with pytest.raises(CheckpointError, match="not UTF-8") as caught:
        file.metadata["k"]
    assert path.read_bytes()[caught.value.offset or 0] == 0xFF


def test_tensors_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"

    def one(shape: tuple[int, ...], kind: int, offset: int, data: bytes = bytes(64)) -> str:
        return refused(path, raw_gguf(tensors=1, body=entry("w", shape, kind, offset), data=data)).reason

    assert "truncated or lies" in one((17,), 0, 0)
    assert "truncated or lies" in one((1,), 0, 64)
    assert "truncated or lies" in one((2**40, 2**40), 0, 0)
    assert "truncated or lies" in one((1,), 0, 2**64 - 32)
    assert "not a multiple of 32" in one((1,), 0, 4)
    assert "type 12345 (which no GGUF version defines)" in one((1,), 12345, 0)
    assert "type 23 (IQ4_XS), not read here" in one((256,), 23, 0)
    assert "a row of 33 values is not a multiple of the 32 of Q8_0" in one((33,), 8, 0)
    assert "dimension of 0" in one((4, 0), 0, 0)
    body = text("w") + struct.pack("<I", 5) + struct.pack("<5Q", 1, 1, 1, 1, 1) + struct.pack("<IQ", 0, 0)
    assert "5 dimensions" in refused(path, raw_gguf(tensors=1, body=body, data=bytes(64))).reason

    def two(first: bytes, second: bytes) -> str:
        return refused(path, raw_gguf(tensors=2, body=first + second, data=bytes(128))).reason

    assert "tensor 'w' appears twice" in two(entry("w", (1,), 0, 0), entry("w", (1,), 0, 32))
    assert "tensors v and w overlap" in two(entry("w", (8,), 0, 32), entry("v", (9,), 0, 0))
    assert "overlap" in two(entry("w", (8,), 0, 32), entry("v", (8,), 0, 32))


def test_a_name_full_of_control_characters_is_shown_harmlessly(tmp_path: Path) -> None:
    body = entry("w\x1b[31m\n" * 500, (17,), 0, 0)
    error = refused(tmp_path / "x.gguf", raw_gguf(tensors=1, body=body))
    assert "\x1b" not in str(error)
    assert len(str(error)) < 600


def test_every_truncation_is_refused(tmp_path: Path, small: Path) -> None:
    content = small.read_bytes()
    last = max(tensor.nbytes for tensor in open_gguf(small).tensors.values() if tensor.name == "scalar")
    needed = len(content) - (32 - last)  # the padding behind the last tensor is not missed
    path = tmp_path / "cut.gguf"
    for length in range(0, needed, 7):
        refused(path, content[:length])
    refused(path, content[: needed - 1])
    path.write_bytes(content[:needed])
    assert len(open_gguf(path).tensors) == 6


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=2000)
@given(data=st.data())
def test_random_damage_never_raises_anything_else(tmp_path: Path, small: Path, data: st.DataObject) -> None:
    content = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, min(len(content), 1100) - 1))
        width = data.draw(st.sampled_from([1, 1, 4, 8]))
        content[at : at + width] = data.draw(st.binary(min_size=width, max_size=width))
    content = content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        file = open_gguf(path)
        for key in file.metadata:
            repr(file.metadata[key])
        for tensor in file.tensors.values():
            assert int(tensor.data.sum()) >= 0
            if tensor.format in BLOCKS:
                with np.errstate(all="ignore"):
                    assert dequantise(tensor.data, tensor.format, tensor.shape).shape == tensor.shape
    except CheckpointError as error:
        str(error).encode()


@given(content=st.binary(max_size=400))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_after_a_good_head(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + content)
    with contextlib.suppress(CheckpointError):
        open_gguf(path)


def test_writing_refuses_what_gguf_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    for value in ({"a": 1}, None, 2**64, ["a", 1], np.zeros((2, 2), np.float32), 1j):
        with pytest.raises((TypeError, ValueError)):
            write_gguf(path, {"k": value}, {})
    with pytest.raises(TypeError, match="complex"):
        write_gguf(path, {}, {"w": np.zeros(2, np.complex64)})
    with pytest.raises(ValueError, match="F8_E4M3"):
        write_gguf(path, {}, {"w": RawTensor("w", (4,), "F8_E4M3", np.zeros(4, np.uint8))})
    with pytest.raises(ValueError, match="power of two"):
        write_gguf(path, {"general.alignment": 12}, {})
    assert list(tmp_path.iterdir()) == []
