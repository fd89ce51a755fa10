"""Streaming to a device, on the CPU: bytes, conversions, whole models, progress, and what happens to a broken file."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.reference.driver import Driver
from tests.reference.op_sets import load
from tests.reference.tiny import make_tiny, token_ids
from tradewind.attention.backend import BACKENDS
from tradewind.config.card_reader import card_from_hf
from tradewind.kernels.ops import PackedMatrix, RowTable
from tradewind.kernels.plain import PlainOps
from tradewind.kernels.triton import upload
from tradewind.kernels.triton.upload import Uploader
from tradewind.models.registry import family_of
from tradewind.quantization.blocks import dequantise, quantise_q4_0
from tradewind.quantization.fp8 import quantise_fp8
from tradewind.quantization.scheme import Numerics
from tradewind.weights.checkpoint import open_checkpoint
from tradewind.weights.load import WeightsError, load_model
from tradewind.weights.safetensors import open_safetensors
from tradewind.weights.tensor import RawTensor

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
BF16 = Numerics(compute="bf16", quantization="none")


def uploader(**options: Any) -> Uploader:
    return Uploader("cpu", read_blocks=dequantise, **{"readers": 3, "piece_bytes": 1024, **options})


def raw(values: torch.Tensor, format: str) -> RawTensor:
    """A tensor in memory, as that format."""
    if format == "Q4_0":
        data = quantise_q4_0(values.numpy()).reshape(-1)
    else:
        data = values.to(TORCH[format]).view(torch.uint8).reshape(-1).numpy()
    return RawTensor("w", tuple(values.shape), format, data)


def exact(tensor: RawTensor) -> torch.Tensor:
    return torch.from_numpy(dequantise(tensor.data, tensor.format, tensor.shape))


class StreamingOps(PlainOps):
    """The plain op set with the upload of the CUDA one: weights stay bf16 or FP8 as they were sent and are widened when multiplied."""

    def __init__(self, **options: Any) -> None:
        super().__init__(read_blocks=dequantise)
        self.uploader = uploader(**options)

    def pack_stored(self, parts: Any, *, layout: Any, gated: bool) -> PackedMatrix:
        return upload.pack_stored(self.uploader, parts, layout=layout, gated=gated)

    def stored_rows(self, table: Any) -> RowTable:
        return upload.stored_rows(self.uploader, table)

    def matrix_of_rows(self, table: RowTable) -> PackedMatrix:
        return upload.matrix_of_rows(table)

    def embed(self, ids: Any, table: RowTable, **rest: Any) -> None:
        super().embed(ids, replace(table, data=table.data.float()), **rest)

    def linear(self, x: Any, weight: PackedMatrix, **rest: Any) -> None:
        super().linear(x, widened(weight), **rest)

    def gated_linear(self, x: Any, weight: PackedMatrix, **rest: Any) -> None:
        gate, up = widened(weight).data[0].chunk(2)
        interleaved = torch.stack([gate, up], 1).flatten(0, 1)
        super().gated_linear(x, replace(weight, data=(interleaved,), layout="bf16"), **rest)


class RoundingOps(PlainOps):
    """The plain way to the same values: a table rounded to bf16 as on the device, FP8 by the numpy rule."""

    def __init__(self) -> None:
        super().__init__(read_blocks=dequantise)

    def row_table(self, *raw: Any, **sizes: Any) -> RowTable:
        table = super().row_table(*raw, **sizes)
        return replace(table, data=table.data.bfloat16().float())

    def pack_fp8(self, values: np.ndarray) -> PackedMatrix:
        stored, scale = quantise_fp8(values)
        return self.pack_matrix(stored * scale[:, None], compute="bf16")


def widened(weight: PackedMatrix) -> PackedMatrix:
    values = weight.data[0].float()
    if weight.layout == "fp8":
        values = (values * weight.data[1][:, None]).bfloat16().float()
    return replace(weight, data=(values,), layout="bf16")


@pytest.mark.parametrize("format", ["BF16", "F16", "F32", "Q4_0"])
@pytest.mark.parametrize("shape", [(1, 32), (7, 96), (257, 64)])
def test_values_arrive(format: str, shape: tuple[int, int]) -> None:
    tensor = raw(torch.randn(shape, generator=torch.Generator().manual_seed(0)), format)
    sender = uploader()
    for dtype in (torch.bfloat16, torch.float32):
        into = sender.empty(shape, dtype)
        sender.put(tensor, into)
        sender.finish()
        assert torch.equal(into, exact(tensor).to(dtype))


@pytest.mark.parametrize("format", ["BF16", "F32", "Q4_0"])
def test_fp8_is_the_numpy_rule(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "VALUES_AT_ONCE", 1000)  # several pieces, the last one short
    values = torch.randn((53, 96), generator=torch.Generator().manual_seed(1)) * 0.02
    values[3] = 0
    tensor, sender = raw(values, format), uploader()
    stored, scale = sender.empty((53, 96), torch.float8_e4m3fn), sender.empty((53,), torch.float32)
    sender.put_fp8(tensor, stored, scale)
    sender.finish()
    wanted, wanted_scale = quantise_fp8(exact(tensor).numpy())
    assert np.array_equal(stored.float().numpy(), wanted)
    assert np.array_equal(scale.numpy(), wanted_scale)
    direct = upload.pack_fp8(exact(tensor), gated=False)
    assert (direct.layout, direct.n, direct.k, direct.bits, direct.nbytes) == ("fp8", 53, 96, 8, 53 * 96 + 4 * 53)
    assert torch.equal(direct.data[0].float(), stored.float()) and torch.equal(direct.data[1], scale)


def test_stacking_unlike_parts() -> None:
    generator = torch.Generator().manual_seed(2)
    parts = [
        raw(torch.randn((n, 64), generator=generator), format)
        for n, format in ((48, "BF16"), (16, "F32"), (16, "Q4_0"))
    ]
    whole = torch.cat([exact(part) for part in parts])
    sender = uploader()
    plain = upload.pack_stored(sender, parts, layout="bf16")
    gated = upload.pack_stored(sender, parts[1:], layout="fp8", gated=True)
    table = upload.stored_rows(sender, parts[0])
    sender.finish()
    assert (plain.layout, plain.n, plain.k, plain.gated, plain.nbytes) == ("bf16", 80, 64, False, 80 * 64 * 2)
    assert torch.equal(plain.data[0], whole.bfloat16())
    assert (gated.layout, gated.n, gated.gated) == ("fp8", 32, True)
    assert np.array_equal(gated.data[0].float().numpy(), quantise_fp8(whole[48:].numpy())[0])
    head = upload.matrix_of_rows(table)
    assert head.data[0].data_ptr() == table.data.data_ptr()
    assert torch.equal(head.data[0], exact(parts[0]).bfloat16())


def test_files_are_read_in_pieces_and_closed(tmp_path: Path) -> None:
    make_tiny("llama2", tmp_path)
    tensors = open_safetensors(tmp_path / "model.safetensors")
    sender = uploader(piece_bytes=1000)  # pieces that end inside a value
    targets = {}
    for name, tensor in tensors.items():
        assert tensor.file == tmp_path / "model.safetensors"
        targets[name] = sender.empty(tensor.shape, torch.float32)
        sender.put(tensor, targets[name])
    left: list[int] = []
    sender.finish(left.append)
    assert left == sorted(left, reverse=True) and left[-1] == 0
    for name, tensor in tensors.items():
        assert targets[name].view(torch.uint8).numpy().tobytes() == tensor.data.tobytes(), name
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tradewind-upload")]


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    make_tiny("llama2", tmp_path)
    checkpoint, ops = open_checkpoint(tmp_path), StreamingOps()
    card = card_from_hf(checkpoint.metadata, name="tiny", tensors=checkpoint.tensors)
    file = tmp_path / "model.safetensors"
    other = tmp_path / "shorter"
    other.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    other.rename(file)  # a new file under the old name: the mapping still shows the old one
    with pytest.raises(WeightsError, match=r"cannot be read: .*model\.safetensors ended at byte \d+"):
        load_model(
            checkpoint, family=family_of(card), card=card, ops=ops, numerics=BF16, attention=BACKENDS["plain"](ops)
        )  # fmt: skip
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tradewind-upload")]


def test_a_model_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    make_tiny("llama2", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "surplus": np.ones(4, np.float32)}, file)
    with pytest.raises(WeightsError, match="surplus"):
        load(tmp_path, StreamingOps(), numerics=BF16)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tradewind-upload")]


@pytest.mark.parametrize("name", ["llama_biases", "qwen2_5_tied", "gemma3"])
@pytest.mark.parametrize("numerics", [BF16, Numerics(compute="bf16", quantization="fp8")])
@pytest.mark.parametrize("half", [False, True])
def test_models_are_those_of_the_plain_way(tmp_path: Path, name: str, numerics: Numerics, half: bool) -> None:
    """From F32 and BF16 files: bit for bit."""
    oracle = make_tiny(name, tmp_path)
    if half:
        oracle.bfloat16().save_pretrained(tmp_path)
    ids = token_ids(count=48)

    def logits(ops: Any, numerics: Numerics) -> np.ndarray:
        model, card = load(tmp_path, ops, numerics=numerics)
        if card.tied_embeddings and hasattr(ops, "matrix_of_rows"):
            assert model.head.weight.data[0].data_ptr() == model.embedding.table.data.data_ptr()
        return Driver(model, card=card, ops=ops).step([(0, ids)])[0]

    np.testing.assert_array_equal(logits(StreamingOps(), numerics), logits(RoundingOps(), numerics))


def test_gguf_blocks_and_progress(tmp_path: Path) -> None:
    """A quantised file through the readers; progress ends at all bytes."""
    make_tiny("llama2", tmp_path)
    checkpoint, ops = open_checkpoint(tmp_path), StreamingOps()
    quantised = {
        name: replace(tensor, format="Q4_0", data=quantise_q4_0(exact(tensor).numpy()).reshape(-1), file=None)
        if name.endswith("proj.weight")
        else tensor
        for name, tensor in checkpoint.tensors.items()
    }
    checkpoint = replace(checkpoint, tensors=quantised)
    card = card_from_hf(checkpoint.metadata, name="tiny", tensors=checkpoint.tensors)
    seen: list[tuple[int, int]] = []
    model: Any = load_model(
        checkpoint,
        family=family_of(card),
        card=card,
        ops=ops,
        numerics=BF16,
        attention=BACKENDS["plain"](ops),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1] == (checkpoint.nbytes, checkpoint.nbytes)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(model.layers[1].mlp.down.weight.data[0], exact(quantised[name]).bfloat16())


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_the_cuda_op_set_gets_what_it_multiplies(tmp_path: Path, quantization: Any) -> None:
    """Its own verbs, on the CPU: layouts, stacking, sharing of the tied table."""
    cuda = pytest.importorskip("tradewind.kernels.triton.ops")
    make_tiny("qwen2_5_tied", tmp_path)
    checkpoint, ops = open_checkpoint(tmp_path), cuda.CudaOps(device="cpu", read_blocks=dequantise)
    card = card_from_hf(checkpoint.metadata, name="tiny", tensors=checkpoint.tensors)
    numerics = Numerics(compute="bf16", quantization=quantization)
    model: Any = load_model(
        checkpoint, family=family_of(card), card=card, ops=ops, numerics=numerics, attention=None
    )  # fmt: skip
    layer = model.layers[1]
    layout = "bf16" if quantization == "none" else "fp8"
    for matrix, names in (
        (layer.attention.qkv.weight, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (layer.mlp.gate_up.weight, ("mlp.gate_proj", "mlp.up_proj")),
    ):
        parts = [checkpoint.tensors[f"model.layers.1.{name}.weight"] for name in names]
        whole = torch.cat([exact(part) for part in parts])
        assert (matrix.layout, matrix.n, matrix.k, matrix.gated) == (layout, *whole.shape, len(names) == 2)
        if layout == "bf16":
            assert torch.equal(matrix.data[0], whole.bfloat16())
        else:
            stored, scale = quantise_fp8(whole.numpy())
            assert np.array_equal(matrix.data[0].float().numpy(), stored)
            assert np.array_equal(matrix.data[1].numpy(), scale)
    assert model.head.weight.layout == "bf16"
    assert model.head.weight.data[0].data_ptr() == model.embedding.table.data.data_ptr()
