"""What only a GPU shows of the upload: pinned buffers that are used again while copies run, one stream, and the same FP8 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.load_speed import LAYER, make_file
from tradewind.kernels.triton import upload
from tradewind.quantization.blocks import dequantise
from tradewind.quantization.fp8 import quantise_fp8
from tradewind.weights.safetensors import open_safetensors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("format", ["BF16", "F32"])
def test_a_layer_arrives_whole(format: str, tmp_path: Path) -> None:
    """436 MB of BF16 or twice that of F32 in small pieces: every buffer is used many times."""
    tensors = open_safetensors(make_file(tmp_path, gb=0.4, format=format))
    uploader = upload.Uploader("cuda", read_blocks=dequantise, piece_bytes=1 << 20)
    packed = {name: upload.pack_stored(uploader, [tensors[f"0.{name}"]], layout="bf16") for name in LAYER}
    uploader.finish()
    for name, matrix in packed.items():
        tensor = tensors[f"0.{name}"]
        kind = torch.bfloat16 if format == "BF16" else torch.float32
        wanted = torch.from_numpy(tensor.data.copy()).view(kind).view(tensor.shape).bfloat16()
        assert torch.equal(matrix.data[0].cpu(), wanted), name


def test_fp8_has_the_bits_of_the_numpy_rule(tmp_path: Path) -> None:
    tensors = open_safetensors(make_file(tmp_path, gb=0.4, format="BF16"))
    uploader = upload.Uploader("cuda", read_blocks=dequantise)
    before = torch.cuda.memory_reserved()
    parts = [tensors["0.gate"], tensors["0.up"]]
    matrix = upload.pack_stored(uploader, parts, layout="fp8", gated=True)
    uploader.finish()
    stored, scale = (values.cpu() for values in matrix.data)
    first = dequantise(parts[0].data, "BF16", parts[0].shape)
    wanted, wanted_scale = quantise_fp8(first)
    assert np.array_equal(scale[: len(first)].numpy(), wanted_scale)
    assert np.array_equal(stored[: len(first)].float().numpy(), wanted)
    # Staging and temporaries are given back.
    assert torch.cuda.memory_reserved() - before < matrix.nbytes + (64 << 20)
