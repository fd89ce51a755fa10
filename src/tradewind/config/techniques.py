"""The registry of techniques: one row for each way of being faster or smaller, with its switch, price, proof and last measured effect.

Knows: names. Refuses to know: how anything works. A field of `Means` that switches a technique must have a row (a house rule), and every
row's test must exist.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Layer = Literal["cache", "compute", "schedule", "weights"]


class Technique(msgspec.Struct, frozen=True, kw_only=True):
    """One means and what is known about it."""

    layer: Layer
    switch: str
    """A field of `Means`, with "means." before it, or how else it is turned on and off."""
    helps: str
    hurts: str
    prerequisites: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    metric: str
    """What shows its effect."""
    test: str
    """path::name of the test that proves it."""
    effect: str = ""
    """Last measured effect with its date; empty: not measured yet."""


CPU_RUN = "2026-11-30, 2 cores of a Zen 5 EPYC, SmolLM2"
"""Where the figures of the CPU techniques were measured: medians, off and on in the same minutes (docs/notebook.md)."""

TECHNIQUES: dict[str, Technique] = {
    "batch_invariant": Technique(
        layer="compute",
        switch="means.deterministic",
        helps="reproducibility on a GPU: an answer is the same to the bit alone and in any batch",
        hurts="decode speed: one kernel order for every step size, also where another is faster",
        prerequisites=("a GPU; on a CPU it is always so and costs nothing",),
        metric="answers alone against in a batch; decode tokens per second",
        test="tests/host/test_resolve_cuda.py::test_deterministic_is_off_unless_asked_for",
    ),
    "chunked_prefill": Technique(
        layer="schedule",
        switch="means.max_tokens_per_step",
        helps="time between tokens of running answers while a long prompt arrives",
        hurts="time to first token of that prompt: weights are read once for each chunk",
        metric="TPOT p99 with a long prompt arriving; StepDone.prompt_tokens",
        test="tests/host/test_scheduler.py::test_decode_comes_first_and_chunks_fill_the_rest_of_the_budget",
        effect=f"{CPU_RUN}: steps of 128 tokens against 1024 cost 4 % of throughput (L3 590 / 617 tok/s); "
        "a decoding neighbour waits 50 ms instead of 400",
    ),
    "continuous_batching": Technique(
        layer="schedule",
        switch="means.max_running",
        helps="throughput: requests join and leave between any two steps",
        hurts="latency of a single answer that shares its steps",
        metric="output tokens per second; StepDone.rows",
        test="tests/engine/test_same_text.py::test_a_batch_under_any_means_equals_each_alone",
        effect=f"{CPU_RUN}: 16 rows against 1 at a time, L3 622 / 299 tok/s, 2.1x",
    ),
    "copy_on_write": Technique(
        layer="cache",
        switch="always on (n of SamplingParams)",
        helps="memory and prefill of several answers to one prompt",
        hurts="one page copy for each further answer",
        metric="pages used by n answers against n requests",
        test="tests/host/test_scheduler.py::test_samples_share_full_pages_and_copy_the_last",
    ),
    "cuda_graphs": Technique(
        layer="compute",
        switch="means.graphs",
        helps="decode: a step is one call, and the host's cost of some hundred launches is gone",
        hurts="device memory of each captured step size, padding up to the next size, the time of the first capture",
        prerequisites=("device_slots", "a GPU"),
        metric="StepResult.host_s; decode tokens per second with --no-graphs",
        test="tests/gpu/test_triton_gpu.py::test_one_graph_serves_other_lengths_and_fewer_rows",
    ),
    "dependent_launch": Technique(
        layer="compute",
        switch="always on from compute capability 9.0 (kernels/triton/launch.py)",
        helps="decode: a kernel begins to load while the one before it ends",
        hurts="nothing known; what was written before the predecessor's end must not be read before the wait",
        prerequisites=("a Hopper GPU or newer",),
        metric="time of a decode step with and without",
        test="tests/gpu/test_triton_gpu.py::test_a_chain_of_dependent_launches_is_ordered",
    ),
    "device_slots": Technique(
        layer="schedule",
        switch="always on (cuda: kernels/triton/step.py)",
        helps="decode on a GPU: tokens, pages and positions stay on the device, a steady step sends its header only",
        hurts="device memory of the tables",
        prerequisites=("a GPU",),
        metric="bytes copied to the device in a step; StepResult.host_s",
        test="tests/kernels/test_triton_kernels.py::test_lay_out_equals_the_host",
    ),
    "fp8_kv": Technique(
        layer="cache",
        switch="means.kv_format (fp8 against bf16)",
        helps="memory on a GPU: twice as many tokens in the pages",
        hurts="keys and values keep 4 significant bits; attention converts them and gets no faster",
        prerequisites=("a GPU of compute capability 8.9",),
        metric="KV bytes per token; perplexity against bf16",
        test="tests/kernels/test_triton_kernels.py::test_rope_store",
    ),
    "fp8_weights": Technique(
        layer="weights",
        switch="means.quantization (fp8)",
        helps="decode and prefill on a GPU: half the bytes of weights, and fp8 tensor cores for large steps",
        hurts="quality: weights keep 4 significant bits with one scale an output, activations one scale a token",
        prerequisites=("a GPU of compute capability 8.9",),
        metric="decode and prefill tokens per second; perplexity against bf16",
        test="tests/reference/test_fp8.py::test_quality_and_what_stays_bf16",
    ),
    "fused_kernels": Technique(
        layer="compute",
        switch="means.backend (plain: unfused torch ops)",
        helps="decode: add and norm, norm of heads with rope and KV write, gate, up and activation are one pass each",
        hurts="nothing but the size of the library",
        prerequisites=("a C++ compiler when installing",),
        metric="decode tokens per second",
        test="tests/engine/test_same_text.py::test_the_plain_ops_agree_with_the_library",
    ),
    "fused_step_kernels": Technique(
        layer="compute",
        switch="means.graphs (off runs every op by itself, unfused)",
        helps="decode on a GPU: norm, matmul, activation and residual are one launch, rope and KV write are part of attention",
        hurts="up to 16 rows only; larger steps are limited by their matmuls and fuse less",
        prerequisites=("a GPU",),
        metric="launches in a step; decode tokens per second",
        test="tests/kernels/test_triton_kernels.py::test_fused_decode_equals_rope_store_then_decode",
    ),
    "int16_activations": Technique(
        layer="compute",
        switch="means.compute (int16 against int8)",
        helps="quality: answers are those of the file's weights; decode speed stays, for weights are read once",
        hurts="prefill: twice the integer products of int8",
        prerequisites=("packed_weights",),
        conflicts=("int8_activations",),
        metric="greedy ids as in float32; prefill tokens per second",
        test="tests/reference/test_smollm2_golden.py::test_int16_compute_gives_the_golden_ids",
        effect=f"{CPU_RUN}: prefill 2,486 tok/s where int8 has 4,115; decode 415 / 411; "
        "KL to float32 under 5e-6 a token (int8: 4e-3)",
    ),
    "int8_activations": Technique(
        layer="compute",
        switch="means.compute (int8 against bf16, f32)",
        helps="prefill and decode with quantised weights: integer dot products on packed weights",
        hurts="exactness: activations are rounded per 32 values",
        prerequisites=("packed_weights",),
        metric="prefill tokens per second; logit difference to f32",
        test="tests/reference/test_smollm2_golden.py::test_int8_compute_agrees_where_the_answer_is_clear",
        effect=f"{CPU_RUN}: against bf16, decode 411 / 180 tok/s, prefill 4,115 / 3,064; "
        "greedy token as in float32 at 95.9 % of positions",
    ),
    "kv_f16": Technique(
        layer="cache",
        switch="means.kv_format",
        helps="memory and attention time: half the bytes of f32",
        hurts="keys and values keep 11 significant bits",
        metric="KV bytes per token; logit difference to f32",
        test="tests/kernels/test_cpu_attention.py::test_decode_chunk_and_prompt_agree_bit_for_bit",
        effect=f"{CPU_RUN}: against f32, L4 593 / 613 tok/s (no gain at these lengths), half the pages' memory",
    ),
    "overlap": Technique(
        layer="schedule",
        switch="means.overlap",
        helps="throughput: the scheduler's time disappears behind compute, on a GPU all of it",
        hurts="an answer's end is seen one step late; on a CPU a core shared with compute",
        prerequisites=("two cores, or a GPU",),
        metric="StepDone.decide_s + absorb_s that compute waits for",
        test="tests/engine/test_same_text.py::test_a_batch_under_any_means_equals_each_alone",
        effect=f"{CPU_RUN}: none while every core computes (L1 344 / 340, L3 632 / 663 tok/s), so it is off there",
    ),
    "packed_weights": Technique(
        layer="weights",
        switch="means.compute (int8 keeps blocks packed; bf16, f32 unpack them); means.quantization at load",
        helps="decode speed and memory: 5 bits a weight are read, not 16",
        hurts="start-up: weights are laid out anew when loaded",
        metric="weights line of the ledger; decode tokens per second",
        test="tests/kernels/test_cpu_matmul.py::test_packed_blocks_keep_every_value",
        effect=f"{CPU_RUN}: against unpacked f32, decode 420 / 110 tok/s, 3.8x; weights 92 MiB instead of 513",
    ),
    "pinned_streaming": Technique(
        layer="weights",
        switch="always on (cuda)",
        helps="start on a GPU: files are read by several threads into pinned memory while earlier parts are copied",
        hurts="some hundred MiB of pinned host memory until the weights are there",
        prerequisites=("a GPU",),
        metric="phase `weights` of the start-up line",
        test="tests/reference/test_upload.py::test_files_are_read_in_pieces_and_closed",
    ),
    "preemption": Technique(
        layer="schedule",
        switch="always on when pages run out (Plan.schedule.max_preemptions)",
        helps="throughput: pages need not be reserved for the longest possible answer",
        hurts="the evicted request: its tokens are computed again",
        metric="Preempted.lost_tokens",
        test="tests/host/test_scheduler.py::test_preemptions_are_bounded_and_everybody_ends_with_the_same_text",
    ),
    "prefix_cache": Technique(
        layer="cache",
        switch="means.prefix_cache",
        helps="time to first token of prompts that begin alike",
        hurts="a walk through the tree for each new prompt",
        metric="Scheduled.cached_tokens",
        test="tests/host/test_radix.py::test_match_equals_brute_force_after_anything",
        effect=f"{CPU_RUN}: L4 672 / 133 tok/s, 5.1x",
    ),
    "priority_ageing": Technique(
        layer="schedule",
        switch="means.policy (priority)",
        helps="urgent requests; ageing keeps the others from starving",
        hurts="requests of low priority wait longer",
        metric="Scheduled.waited_s by priority",
        test="tests/host/test_queue.py::test_priority_ages_so_that_nothing_starves",
    ),
    "skinny_matmul": Technique(
        layer="compute",
        switch="always on up to 64 rows (cuda: kernels/triton/skinny.py; constants in kernels/triton/tuning.py)",
        helps="decode on a GPU: weights are read at the memory's speed, where a library's matmul leaves a third of it",
        hurts="nothing above its limit, where cuBLAS takes over",
        prerequisites=("a GPU",),
        metric="GB/s of the matmuls against the measured read ceiling",
        test="tests/kernels/test_triton_kernels.py::test_skinny_linear",
    ),
    "small_pass_big": Technique(
        layer="schedule",
        switch="Plan.schedule.age_limit_s (0 turns it off)",
        helps="throughput and small requests: they use pages that the head of the queue cannot use yet",
        hurts="the big request, by at most the age limit",
        metric="Delayed.blocked_by; waited_s of big requests",
        test="tests/host/test_scheduler.py::test_a15_small_ones_pass_a_big_one_that_does_not_fit_until_it_is_old",
    ),
    "split_kv_decode": Technique(
        layer="compute",
        switch="always on for few rows (cuda: DecodeConfig.splits of kernels/triton/tuning.py)",
        helps="decode of few long sequences on a GPU: a row's keys are shared out over many multiprocessors",
        hurts="a merge of the parts; with many rows one part is faster",
        prerequisites=("a GPU",),
        metric="time of attention in a step at long context",
        test="tests/kernels/test_triton_kernels.py::test_paged_decode",
    ),
    "tape": Technique(
        layer="compute",
        switch="means.tape",
        helps="decode of small models: a step is one call, not hundreds",
        hurts="a recording per step size; errors name the tape, not the op",
        prerequisites=("fused_kernels",),
        metric="StepResult.host_s",
        test="tests/engine/test_same_text.py::test_a_batch_under_any_means_equals_each_alone",
        effect=f"{CPU_RUN}: L1 314 / 151 tok/s, 2.1x; L3 647 / 574, 1.13x",
    ),
    "tenant_fairness": Technique(
        layer="schedule",
        switch="means.policy (fair)",
        helps="whoever asks for little: a tenant's wait does not depend on how many requests another one sends",
        hurts="the tenant that asks for most; its requests wait though they came first",
        prerequisites=("API keys, or clients that state `user` honestly",),
        metric="Scheduled.waited_s by Arrived.tenant",
        test="tests/host/test_fair_queue.py::test_service_of_tenants_that_wait_differs_by_a_bounded_amount",
    ),
    "threshold_sampler": Technique(
        layer="compute",
        switch="always on (cuda: kernels/triton/sample.py)",
        helps="sampling on a GPU: no sort and no wait for the host; a draw depends on seed and position only, not on neighbours",
        hurts="top-p over a flat distribution needs several passes over the logits",
        prerequisites=("a GPU",),
        metric="time of the sampler in a step's trace",
        test="tests/kernels/test_triton_kernels.py::test_sample_equals_the_reference",
    ),
    "window_page_freeing": Technique(
        layer="cache",
        switch="always on for windowed layers (Gemma 3)",
        helps="memory of long sequences: windowed layers keep their window only",
        hurts="a prefix is found again only where its window's pages are still kept",
        metric="pages used of the window group",
        test="tests/host/test_scheduler.py::test_window_pages_are_really_freed_so_that_a_small_pool_serves_a_long_text",
    ),
}

NOT_TECHNIQUES: dict[str, str] = {
    "load_format": "a way to measure without a checkpoint; it makes nothing faster",
    "page_tokens": "a size, not a technique",
    "threads": "a size, not a technique",
}
"""Fields of `Means` that have no row, and why."""
