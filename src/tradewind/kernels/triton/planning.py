"""From a tape's calls to launches: constants chosen for a bucket, neighbours fused where the data flow allows.

Knows: which kernel serves which call at which size, and what may be folded into what. Refuses to know: models (it sees calls and buffers),
graphs, the arithmetic of kernels. A plan allocates; running one launches on the current stream, allocates nothing and waits for nothing.

    matmul of M tokens      M = 1                gemv      norm of the input, bias, SiLU-mul and residual folded in
                            up to tile_rows      tile      bias, SiLU-mul, residual; FP8: input quantised per token
                            up to 256, or more   wide      the same: shapes that were measured, and FP8 by blocks (blocks.py) of any size
                            more                 library   torch.mm / _scaled_mm, the rest in kernels of their own
                            deterministic        fixed     one tile for every M: a row's bits do not depend on its neighbours

    x, delta -> norm        a matmul that writes delta, which nothing but the next norm reads, adds to x itself
    norm, delta -> norm     one launch (norms on both sides of a block)
    add_low_rank            few tokens: a part of the matmul's own tiles (low_rank_tile.py), which are gated themselves then; else tokens
                            sorted by adapter once a step and two launches, of which for gate and up the second is `glue` as well where
                            tokens are many (low_rank.py); nothing where nobody has an adapter
    experts                 1 token, few tokens, or pairs sorted by expert (moe.py); their weighted sum in the next norm, or added to x;
                            the shared expert's answer goes the same way, and is computed on a second stream in small steps (lanes.py)
    norm -> matmuls         gemv, experts of one token: the norm is folded in; FP8 tiles, library, fixed: the norm quantises
    rope_store, attention   prompts by kind, one-token rows; one launch where these are few; angles from a table (attention_program.py)
    latents                 queries in and answers out of their space; one-token rows, or naive and absorbed forms (latent_program.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tradewind.kernels.triton import (
    attention_program,
    lanes,
    latent_program,
    low_rank,
    low_rank_tile,
    matmul_program,
    mixture,
    passes,
    small_program,
)
from tradewind.kernels.triton.planner import Planner
from tradewind.kernels.triton.program import Bucket, Program
from tradewind.kernels.triton.tape import Call, Tape

EMITTERS: dict[str, Callable[[Planner, Call], None]] = {
    "add": small_program.emit_add,
    "add_layer_norm": small_program.emit_add_layer_norm,
    "add_low_rank": low_rank.emit,
    "add_rms_norm": small_program.emit_add_rms_norm,
    "attention": attention_program.emit_attention,
    "embed": small_program.emit_embed,
    "experts": mixture.emit_experts,
    "gated_linear": matmul_program.emit_gated,
    "gather_rows": small_program.emit_gather_rows,
    "gelu": small_program.emit_gelu,
    "glue": low_rank.emit_glue,
    "latent_attention": latent_program.emit_attention,
    "latent_store": latent_program.emit_store,
    "linear": matmul_program.emit_linear,
    "quantise": matmul_program.emit_quantise,
    "rms_norm_span": small_program.emit_rms_norm_span,
    "rope_angles": attention_program.emit_angles,
    "rope_store": attention_program.emit_store,
    "route": mixture.emit_route,
    "scale": small_program.emit_scale,
    "softcap": small_program.emit_softcap,
    "temper": small_program.emit_temper,
}
"""Op -> what appends its launches."""


def plan(tape: Tape, bucket: Bucket, *, fuse: bool = True) -> Program:
    """The program of a tape for a bucket; allocates in the op set's workspace. fuse=False: one op after the other, to look for faults."""
    planner = Planner(tape, bucket, fuse=fuse)
    if not bucket.adapted:
        passes.leave_adapters_out(planner)
    if fuse:
        low_rank_tile.fold(planner)
        low_rank.fold(planner)
        attention_program.take_angles_from_tables(planner)
        attention_program.fold_rope(planner)
        latent_program.fold_stores(planner)
        attention_program.take_fresh_keys(planner)
        lanes.arrange(planner)
        passes.fold_residuals(planner)
        passes.fold_norms_of_deltas(planner)
        passes.fold_combines(planner)
        passes.fold_norms(planner)
        passes.count_while_routing(planner)
        attention_program.drop_unread_angles(planner)
    passes.quantise_inputs(planner)
    lanes.settle(planner)
    planner.weighed = frozenset(id(call["mixture"]) for call in planner.calls)
    for call in planner.calls:
        emit(planner, call)
    side = tape.ops.side_streams() if any(launch.lane for launch in planner.launches) else None
    return Program(bucket, tuple(planner.launches), side)


def emit(planner: Planner, call: Call) -> None:
    """Appends the launches of one call."""
    planner.lane = 1 if call["side"] else 0
    if planner.lane:
        planner.after_all = planner.after_all or not planner.beside
        planner.beside.append(call)
    elif lanes.conflict(call, planner.beside):
        planner.join, planner.beside = True, []
    EMITTERS[call.op](planner, call)


def kernels_change_at(tape: Tape, sizes: Iterable[int]) -> set[int]:
    """Of these numbers of tokens those from which on experts, or attention over latents, have other kernels than below."""
    wanted = sorted(sizes)
    changes = {"experts": mixture.changes_at, "latent_attention": latent_program.changes_at}
    calls = [call for call in tape.calls if call.op in changes]
    return {size for call in calls for size in changes[call.op](tape.ops, call, wanted)}
