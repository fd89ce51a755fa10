"""Files of FP8 with scales by blocks on a GPU: what the plan says of them, and what the ledger counts."""

from __future__ import annotations

import msgspec
import pytest

from tests.host.plans import SMOLLM2, bf16, gpu
from tradewind.config import ledger, ledger_cuda
from tradewind.config.card import LatentFacts, MoeFacts
from tradewind.config.card_parts import fp8_matrices, with_weights
from tradewind.config.goals import Goals, Means
from tradewind.config.resolve import resolve
from tradewind.contract.errors import UserError

PLAIN = bf16(msgspec.structs.replace(SMOLLM2, source="hf"))
BLOCKS = with_weights(PLAIN, tensors=None, assumed="BF16", fp8_blocks=True)


def test_a_card_without_tensors_has_its_matrices_so() -> None:
    matrices = fp8_matrices(BLOCKS)
    assert BLOCKS.weight_formats == {"BF16": BLOCKS.parameters - matrices, "F8_E4M3": matrices}
    assert BLOCKS.weight_bytes == 2 * BLOCKS.parameters - matrices
    moe = MoeFacts(experts=8, per_token=2, intermediate=64, layers=(True,) * PLAIN.layers)
    mixture = msgspec.structs.replace(PLAIN, moe=moe)
    each = 3 * 8 * 64 * PLAIN.hidden + 2 * PLAIN.hidden * PLAIN.head_dim * (PLAIN.heads + PLAIN.kv_heads)
    assert fp8_matrices(mixture) == PLAIN.layers * each, "the router is none of them"


def test_they_stay_as_they_are_unless_asked_for() -> None:
    plan = resolve(Goals(model="m"), BLOCKS, gpu())
    (reason,) = (one for one in plan.reasons if one.choice == "quantization")
    assert plan.numerics.quantization == "none" and "stays as it is" in reason.why and "second time" in reason.rejected
    weights = next(line for line in plan.ledger if line.name == "weights")
    kept = fp8_matrices(BLOCKS)
    assert weights.bytes == ledger_cuda.weight_bytes(PLAIN, quantization="none") - kept + 4 * kept // 2048
    assert "as in the file" in weights.how
    again = resolve(Goals(model="m", means=Means(quantization="fp8")), BLOCKS, gpu())
    (reason,) = (one for one in again.reasons if one.choice == "quantization")
    assert again.numerics.quantization == "fp8" and "a second time" in reason.why
    sizes = [
        ledger.read_bytes(BLOCKS, compute="bf16", quantization="none", backend=backend) for backend in ("cpu", "cuda")
    ]
    assert sizes[1] < sizes[0], "a CPU dequantises them"


def test_what_makes_keys_of_latents_is_widened() -> None:
    latent = LatentFacts(rank=32, query_rank=0, nope=32, rope=32, value=64)
    card = msgspec.structs.replace(BLOCKS, latent=latent)
    card = msgspec.structs.replace(card, weight_formats={"F8_E4M3": fp8_matrices(card)})
    up = card.layers * 32 * card.heads * 96
    assert ledger_cuda.kept_fp8(card, quantization="none") == fp8_matrices(card) - up
    assert ledger_cuda.kept_fp8(card, quantization="fp8") == 0


def test_an_older_gpu_refuses_them() -> None:
    older = msgspec.structs.replace(gpu(), features=("sm_80",), name="A100")
    with pytest.raises(UserError, match="needs fp8 tensor cores, and A100 has none"):
        resolve(Goals(model="m"), BLOCKS, older)
