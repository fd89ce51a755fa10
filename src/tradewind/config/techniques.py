"""The registry of techniques: one row for each way of being faster or smaller, with its switch, price, proof and last measured effect.

Knows: names. Refuses to know: how anything works. A field of `Means` that switches a technique must have a row (a house rule), and every
row's test must exist.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Layer = Literal["cache", "compute", "schedule", "weights"]
GoalName = Literal["memory", "throughput", "tpot", "ttft"]
Pins = dict[str, str | int | bool]


class Technique(msgspec.Struct, frozen=True, kw_only=True):
    """One means and what is known about it."""

    layer: Layer
    switch: str
    """A field of `Means`, with "means." before it, or how else it is turned on and off."""
    helps: str
    hurts: str
    prerequisites: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    goals_helped: tuple[GoalName, ...] = ()
    """Of the four goals; `helps` says how, and what else (quality, start-up) it is good for."""
    goals_hurt: tuple[GoalName, ...] = ()
    """One goal may be in both: what shortens one request's wait makes another's longer."""
    on: Pins = {}
    """Fields of `Means` that switch it on, where it is a matter of pins ..."""
    off: Pins = {}
    """... and off."""
    metric: str
    """What shows its effect."""
    test: str
    """path::name of the test that proves it."""
    effect: str = ""
    """Last measured effect with its date; empty: not measured yet."""


CPU_RUN = "2026-11-30, 2 cores of a Zen 5 EPYC, SmolLM2"
"""Where the figures of the CPU techniques were measured: medians, off and on in the same minutes (docs/notebook.md)."""

GPU_RUN = "2026-11-30, one H200"
"""Where the figures of the GPU techniques were measured, weights at random (docs/performance.md, benchmarks/results/kernels-h200.md)."""

SIMULATED = "simulated 2026-11-30, chat beside bulk at 0.8, 1.2 and 2 times what can be served"
"""Where figures of schedule techniques are from that no run has measured yet: 200 requests, made-up step times, no noise
(tests/host/test_overload.py has traffic and times; 2, 3 and 5 requests/s)."""

TECHNIQUES: dict[str, Technique] = {
    "batch_invariant": Technique(
        layer="compute",
        switch="means.deterministic",
        helps="reproducibility on a GPU: an answer is the same to the bit alone and in any batch",
        hurts="decode speed: one kernel order for every step size, also where another is faster",
        prerequisites=("a GPU; on a CPU it is always so and costs nothing",),
        goals_helped=(),
        goals_hurt=("throughput", "tpot"),
        on={"deterministic": True},
        off={"deterministic": False},
        metric="answers alone against in a batch; decode tokens per second",
        test="tests/host/test_resolve_cuda.py::test_deterministic_is_off_unless_asked_for",
    ),
    "chunked_prefill": Technique(
        layer="schedule",
        switch="means.max_tokens_per_step",
        helps="time between tokens of running answers while a long prompt arrives",
        hurts="time to first token of that prompt: weights are read once for each chunk",
        goals_helped=("tpot",),
        goals_hurt=("throughput", "ttft"),
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
        goals_helped=("throughput", "ttft"),
        goals_hurt=("tpot",),
        off={"max_running": 1},
        metric="output tokens per second; StepDone.rows",
        test="tests/engine/test_same_text.py::test_a_batch_under_any_means_equals_each_alone",
        effect=f"{CPU_RUN}: 16 rows against 1 at a time, L3 622 / 299 tok/s, 2.1x",
    ),
    "copy_on_write": Technique(
        layer="cache",
        switch="always on (n of SamplingParams)",
        helps="memory and prefill of several answers to one prompt",
        hurts="one page copy for each further answer",
        goals_helped=("memory", "ttft"),
        goals_hurt=(),
        metric="pages used by n answers against n requests",
        test="tests/host/test_scheduler.py::test_samples_share_full_pages_and_copy_the_last",
    ),
    "cuda_graphs": Technique(
        layer="compute",
        switch="means.graphs",
        helps="decode: a step is one call, and the host's cost of some hundred launches is gone",
        hurts="device memory of each captured step size, padding up to the next size, the time of the first capture",
        prerequisites=("device_slots", "a GPU"),
        conflicts=("fused_kernels", "int16_activations", "int8_activations", "kv_f16", "tape"),
        goals_helped=("throughput", "tpot"),
        goals_hurt=("memory",),
        on={"graphs": True},
        off={"graphs": False},
        metric="StepResult.host_s; decode tokens per second with --no-graphs",
        test="tests/gpu/test_triton_gpu.py::test_one_graph_serves_other_lengths_and_fewer_rows",
    ),
    "degrade_ladder": Technique(
        layer="schedule",
        switch="means.degrade (lossless; off)",
        helps="attainment of the highest class under overload: guesses, room for prompts and starts of others give way to it",
        hurts="the other classes: their prompts take more steps, half of the slots are kept from them",
        prerequisites=("classes with targets of which one is above the others, or priorities",),
        conflicts=("degrade_refusal",),
        goals_helped=("tpot", "ttft"),
        goals_hurt=("throughput", "ttft"),
        on={"degrade": "lossless"},
        off={"degrade": "off"},
        metric="tradewind:degrade_level; part of the highest class's requests that meet their targets",
        test="tests/host/test_degrade.py::test_the_high_class_keeps_its_target_under_overload_and_all_is_given_back",
        effect=f"{SIMULATED}: with slo 94 % of chat in time at 1.2 and 79 % at 2 times, off and on: it costs nothing and slo paces already",
    ),
    "degrade_refusal": Technique(
        layer="schedule",
        switch="means.degrade (full; lossless, off)",
        helps="attainment of the highest class under lasting overload: the lowest class is refused, long answers of others are cut short",
        hurts="whoever is refused or cut short; never the highest class, never an answer that has begun",
        prerequisites=("what degrade_ladder needs", "a quality budget over 0, where one is stated"),
        conflicts=("degrade_ladder",),
        goals_helped=("tpot", "ttft"),
        goals_hurt=("throughput",),
        on={"degrade": "full"},
        off={"degrade": "lossless"},
        metric="tradewind:degrade_refused_total; part of the highest class's requests that meet their targets",
        test="tests/host/test_overload.py::test_the_plans_ladder_keeps_the_chat_class_in_time",
        effect=f"{SIMULATED}: chat in time at 2 times, lossless / full: with slo 79 / 86 %, with arrival 1 / 34 %; 29 % of all refused",
    ),
    "dependent_launch": Technique(
        layer="compute",
        switch="always on from compute capability 9.0 (kernels/triton/launch.py)",
        helps="decode: a kernel begins to load while the one before it ends",
        hurts="nothing known; what was written before the predecessor's end must not be read before the wait",
        prerequisites=("a Hopper GPU or newer",),
        goals_helped=("tpot",),
        goals_hurt=(),
        metric="time of a decode step with and without",
        test="tests/gpu/test_triton_gpu.py::test_a_chain_of_dependent_launches_is_ordered",
        effect=f"{GPU_RUN}: a decode step of one row without / with, 0.6b 0.77 / 0.60 ms, 1b 0.85 / 0.74, 8b 4.10 / 3.85",
    ),
    "device_slots": Technique(
        layer="schedule",
        switch="always on (cuda: kernels/triton/step.py)",
        helps="decode on a GPU: tokens, pages and positions stay on the device, a steady step sends its header only",
        hurts="device memory of the tables",
        prerequisites=("a GPU",),
        goals_helped=("throughput", "tpot"),
        goals_hurt=("memory",),
        metric="bytes copied to the device in a step; StepResult.host_s",
        test="tests/kernels/test_triton_kernels.py::test_lay_out_equals_the_host",
    ),
    "fa3_prefill": Technique(
        layer="compute",
        switch="the extra fa3 (installed: on)",
        helps="TTFT and throughput of prompts that begin in a step: FlashAttention 3 on this step's own keys",
        hurts="27 MB on disk, a third of a second of loading; a step that continues a cut prompt does without it",
        goals_helped=("throughput", "ttft"),
        goals_hurt=(),
        prerequisites=("a GPU of sm_90", "bf16 keys", "no window"),
        metric="prompt tokens per second with one output token (W4)",
        test="tests/engine/test_gpu_engine.py::test_fresh_prompts_by_another_kernel_give_the_same_logits",
        effect=f"{GPU_RUN}, W4 off and on: qwen3-0.6b 333,165 / 379,262 tokens/s, llama-3.1-8b about 40,750 / 41,202; "
        "two cards of the kind; batch_invariant does without it",
    ),
    "fitted_pacing": Technique(
        layer="schedule",
        switch="means.fit_steps",
        helps="attainment under slo: chunks are as long as steps like them took, not as the machine's speeds promise",
        hurts="some 10 us of each step, and a fit of about 10 ms in another thread every thousand steps",
        prerequisites=("slo_pacing", "steps that were measured; until then the plan's own times are used"),
        goals_helped=("tpot", "ttft"),
        goals_hurt=(),
        on={"fit_steps": True},
        off={"fit_steps": False},
        metric="tradewind:step_time_error_ratio; part of the requests of each class that meet their targets",
        test="tests/host/test_live_times.py::test_the_scheduler_paces_by_the_refitted_model",
        effect=f"{SIMULATED}: chat in time, off / on, 100 / 99 %, 94 / 94 %, 75 / 79 %",
    ),
    "fp8_kv": Technique(
        layer="cache",
        switch="means.kv_format (fp8 against bf16)",
        helps="memory on a GPU: twice as many tokens in the pages",
        hurts="keys and values keep 4 significant bits; attention converts them and gets no faster",
        prerequisites=("a GPU of compute capability 8.9",),
        conflicts=("fused_kernels", "int16_activations", "int8_activations", "kv_f16", "tape"),
        goals_helped=("memory", "throughput"),
        goals_hurt=(),
        on={"kv_format": "fp8"},
        off={"kv_format": "bf16"},
        metric="KV bytes per token; perplexity against bf16",
        test="tests/kernels/test_triton_kernels.py::test_rope_store",
        effect=f"{GPU_RUN}: attention of 256 rows at 1k context 247 us where bf16 takes 246; perplexity +2.7 % (SmolLM2)",
    ),
    "fp8_weights": Technique(
        layer="weights",
        switch="means.quantization (fp8)",
        helps="decode and prefill on a GPU: half the bytes of weights, and fp8 tensor cores for large steps",
        hurts="quality: weights keep 4 significant bits with one scale an output, activations one scale a token",
        prerequisites=("a GPU of compute capability 8.9",),
        conflicts=("fused_kernels", "int16_activations", "int8_activations", "kv_f16", "tape"),
        goals_helped=("memory", "throughput", "tpot", "ttft"),
        goals_hurt=(),
        on={"quantization": "fp8"},
        off={"quantization": "none"},
        metric="decode and prefill tokens per second; perplexity against bf16",
        test="tests/reference/test_fp8.py::test_quality_and_what_stays_bf16",
        effect=f"{GPU_RUN}, 8b: a token alone 2.40 ms where bf16 takes 3.78; 512 requests at once 14,205 / 10,385 tok/s; "
        "prompts 69,253 / 41,202 tok/s; perplexity +2.8 % (SmolLM2)",
    ),
    "fused_kernels": Technique(
        layer="compute",
        switch="means.backend (cpu, cuda; plain: unfused torch ops)",
        helps="decode: add and norm, norm of heads with rope and KV write, gate, up and activation are one pass each",
        hurts="nothing but the size of the library",
        prerequisites=("a C++ compiler when installing",),
        conflicts=("cuda_graphs", "fp8_kv", "fp8_weights", "fused_step_kernels"),
        goals_helped=("throughput", "tpot", "ttft"),
        goals_hurt=(),
        on={"backend": "cpu"},
        off={"backend": "plain"},
        metric="decode tokens per second",
        test="tests/engine/test_same_text.py::test_the_plain_ops_agree_with_the_library",
    ),
    "fused_step_kernels": Technique(
        layer="compute",
        switch="means.graphs (off runs every op by itself, unfused)",
        helps="decode on a GPU: norm, matmul, activation and residual are one launch, rope and KV write are part of attention",
        hurts="up to 16 rows only; larger steps are limited by their matmuls and fuse less",
        prerequisites=("a GPU",),
        conflicts=("fused_kernels", "int16_activations", "int8_activations", "kv_f16", "tape"),
        goals_helped=("tpot",),
        goals_hurt=(),
        on={"graphs": True},
        off={"graphs": False},
        metric="launches in a step; decode tokens per second",
        test="tests/kernels/test_triton_kernels.py::test_fused_decode_equals_rope_store_then_decode",
        effect=f"{GPU_RUN}: rope and KV write inside attention save 1b 2.1 us a layer, 8b 0.9, 0.6b 0.1 at one row; "
        "from 32 rows on they would cost 10",
    ),
    "int16_activations": Technique(
        layer="compute",
        switch="means.compute (int16 against int8)",
        helps="quality: answers are those of the file's weights; decode speed stays, for weights are read once",
        hurts="prefill: twice the integer products of int8",
        prerequisites=("packed_weights",),
        conflicts=("cuda_graphs", "fp8_kv", "fp8_weights", "fused_step_kernels", "int8_activations"),
        goals_helped=(),
        goals_hurt=("ttft",),
        on={"compute": "int16"},
        off={"compute": "int8"},
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
        conflicts=("cuda_graphs", "fp8_kv", "fp8_weights", "fused_step_kernels", "int16_activations"),
        goals_helped=("throughput", "tpot", "ttft"),
        goals_hurt=(),
        on={"compute": "int8"},
        off={"compute": "bf16"},
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
        conflicts=("cuda_graphs", "fp8_kv", "fp8_weights", "fused_step_kernels"),
        goals_helped=("memory", "throughput"),
        goals_hurt=(),
        on={"kv_format": "f16"},
        off={"kv_format": "f32"},
        metric="KV bytes per token; logit difference to f32",
        test="tests/kernels/test_cpu_attention.py::test_decode_chunk_and_prompt_agree_bit_for_bit",
        effect=f"{CPU_RUN}: against f32, L4 593 / 613 tok/s (no gain at these lengths), half the pages' memory",
    ),
    "length_first": Technique(
        layer="schedule",
        switch="means.policy (length)",
        helps="mean wait and throughput: short requests do not stand behind long ones",
        hurts="long requests, by at most the age limit",
        conflicts=("priority_ageing", "slo_pacing", "tenant_fairness"),
        goals_helped=("throughput", "ttft"),
        goals_hurt=("ttft",),
        on={"policy": "length"},
        off={"policy": "arrival"},
        metric="Scheduled.waited_s by prompt length",
        test="tests/host/test_policies.py::test_being_short_is_worth_at_most_the_age_limit",
        effect=f"{SIMULATED}: mean TTFT against arrival 0.50 / 0.53 s, 2.8 / 3.0 s, 13.8 / 14.5 s; tokens/s alike",
    ),
    "overlap": Technique(
        layer="schedule",
        switch="means.overlap",
        helps="throughput: the scheduler's time disappears behind compute, on a GPU all of it",
        hurts="an answer's end is seen one step late; on a CPU a core shared with compute",
        prerequisites=("two cores, or a GPU",),
        goals_helped=("throughput", "tpot"),
        goals_hurt=(),
        on={"overlap": True},
        off={"overlap": False},
        metric="StepDone.decide_s + absorb_s that compute waits for",
        test="tests/engine/test_same_text.py::test_a_batch_under_any_means_equals_each_alone",
        effect=f"{CPU_RUN}: none while every core computes (L1 344 / 340, L3 632 / 663 tok/s), so it is off there",
    ),
    "packed_weights": Technique(
        layer="weights",
        switch="means.compute (int8 keeps blocks packed; bf16, f32 unpack them); means.quantization at load (int8, int4)",
        helps="decode speed and memory: 5 bits a weight are read, not 16",
        hurts="start-up: weights are laid out anew when loaded",
        goals_helped=("memory", "throughput", "tpot"),
        goals_hurt=(),
        off={"compute": "f32"},
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
        goals_helped=(),
        goals_hurt=("memory",),
        metric="phase `weights` of the start-up line",
        test="tests/reference/test_upload.py::test_files_are_read_in_pieces_and_closed",
    ),
    "preemption": Technique(
        layer="schedule",
        switch="always on when pages run out (Plan.schedule.max_preemptions)",
        helps="throughput: pages need not be reserved for the longest possible answer",
        hurts="the evicted request: its tokens are computed again",
        goals_helped=("memory", "throughput"),
        goals_hurt=("tpot",),
        metric="Preempted.lost_tokens",
        test="tests/host/test_scheduler.py::test_preemptions_are_bounded_and_everybody_ends_with_the_same_text",
    ),
    "prefix_cache": Technique(
        layer="cache",
        switch="means.prefix_cache",
        helps="time to first token of prompts that begin alike",
        hurts="a walk through the tree for each new prompt",
        goals_helped=("throughput", "ttft"),
        goals_hurt=(),
        on={"prefix_cache": True},
        off={"prefix_cache": False},
        metric="Scheduled.cached_tokens",
        test="tests/host/test_radix.py::test_match_equals_brute_force_after_anything",
        effect=f"{CPU_RUN}: L4 672 / 133 tok/s, 5.1x",
    ),
    "priority_ageing": Technique(
        layer="schedule",
        switch="means.policy (priority)",
        helps="urgent requests; ageing keeps the others from starving",
        hurts="requests of low priority wait longer",
        conflicts=("length_first", "slo_pacing", "tenant_fairness"),
        goals_helped=("ttft",),
        goals_hurt=("ttft",),
        on={"policy": "priority"},
        off={"policy": "arrival"},
        metric="Scheduled.waited_s by priority",
        test="tests/host/test_queue.py::test_priority_ages_so_that_nothing_starves",
        effect=f"{SIMULATED}: mean TTFT of a fifth at -1 before 5, against arrival 0.40 / 0.45 s, 0.66 / 1.62 s, 0.85 / 12.4 s; "
        "of the others at 2 times 14.9 / 13.2 s",
    ),
    "skinny_matmul": Technique(
        layer="compute",
        switch="always on up to 64 rows (cuda: kernels/triton/skinny.py; constants in kernels/triton/tuning.py)",
        helps="decode on a GPU: weights are read at the memory's speed, where a library's matmul leaves a third of it",
        hurts="nothing above its limit, where cuBLAS takes over",
        prerequisites=("a GPU",),
        goals_helped=("throughput", "tpot"),
        goals_hurt=(),
        metric="GB/s of the matmuls against the measured read ceiling",
        test="tests/kernels/test_triton_kernels.py::test_skinny_linear",
        effect=f"{GPU_RUN}: 8 rows against cuBLAS, 0.6b down 5.0 / 7.4 us, o 4.2 / 5.8; 8b qkv 15.3 / 15.8, gate_up 56.6 / 56.1",
    ),
    "slo_pacing": Technique(
        layer="schedule",
        switch="means.policy (slo)",
        helps="attainment: who must start soonest is first, chunks are as long as the running answers' targets allow",
        hurts="requests without a target, and those that are too late; shorter chunks read the weights more often",
        prerequisites=("classes with targets in a goals file",),
        conflicts=("length_first", "priority_ageing", "tenant_fairness"),
        goals_helped=("tpot", "ttft"),
        goals_hurt=("throughput", "ttft"),
        on={"policy": "slo"},
        off={"policy": "arrival"},
        metric="part of the requests of each class that meet their targets",
        test="tests/host/test_policies.py::test_more_targets_are_met_than_in_order_of_arrival",
        effect="measured, SmolLM2 on two cores at 0.8 of its capacity: chat in time against arrival 97.9 / 81.0 % (6 of 6 rounds); "
        f"{SIMULATED}: 99 / 67 %, 94 / 16 %, 79 / 1 %; tokens/s 169 / 169, 213 / 218, 216 / 222",
    ),
    "small_pass_big": Technique(
        layer="schedule",
        switch="Plan.schedule.age_limit_s (0 turns it off)",
        helps="throughput and small requests: they use pages that the head of the queue cannot use yet",
        hurts="the big request, by at most the age limit",
        goals_helped=("throughput", "ttft"),
        goals_hurt=("ttft",),
        metric="Delayed.blocked_by; waited_s of big requests",
        test="tests/host/test_scheduler.py::test_a15_small_ones_pass_a_big_one_that_does_not_fit_until_it_is_old",
    ),
    "split_kv_decode": Technique(
        layer="compute",
        switch="always on for few rows (cuda: DecodeConfig.splits of kernels/triton/tuning.py)",
        helps="decode of few long sequences on a GPU: a row's keys are shared out over many multiprocessors",
        hurts="a merge of the parts; with many rows one part is faster",
        prerequisites=("a GPU",),
        goals_helped=("tpot",),
        goals_hurt=(),
        metric="time of attention in a step at long context",
        test="tests/kernels/test_triton_kernels.py::test_paged_decode",
        effect=f"{GPU_RUN}: one part instead of several, 0.6b at 256 keys 0.608 -> 0.665 ms a step",
    ),
    "tape": Technique(
        layer="compute",
        switch="means.tape",
        helps="decode of small models: a step is one call, not hundreds",
        hurts="a recording per step size; errors name the tape, not the op",
        prerequisites=("fused_kernels",),
        conflicts=("cuda_graphs", "fp8_kv", "fp8_weights", "fused_step_kernels"),
        goals_helped=("throughput", "tpot"),
        goals_hurt=(),
        on={"tape": True},
        off={"tape": False},
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
        conflicts=("length_first", "priority_ageing", "slo_pacing"),
        goals_helped=("ttft",),
        goals_hurt=("ttft",),
        on={"policy": "fair"},
        off={"policy": "arrival"},
        metric="Scheduled.waited_s by Arrived.tenant",
        test="tests/host/test_fair_queue.py::test_service_of_tenants_that_wait_differs_by_a_bounded_amount",
        effect=f"{SIMULATED}: mean TTFT of a tenant with a fifth of the requests, against arrival 0.45 / 0.45 s, 0.93 / 1.62 s, "
        "2.2 / 12.4 s; of the others at 2 times 14.8 / 13.2 s",
    ),
    "threshold_sampler": Technique(
        layer="compute",
        switch="always on (cuda: kernels/triton/sample.py)",
        helps="sampling on a GPU: no sort and no wait for the host; a draw depends on seed and position only, not on neighbours",
        hurts="top-p over a flat distribution needs several passes over the logits",
        prerequisites=("a GPU",),
        goals_helped=("tpot",),
        goals_hurt=(),
        metric="time of the sampler in a step's trace",
        test="tests/kernels/test_triton_kernels.py::test_sample_equals_the_reference",
        effect=f"{GPU_RUN}: vocabulary of 128k, one row, greedy 2.7 us, drawn 10.6, top-p 0.9 over flat logits 174",
    ),
    "window_page_freeing": Technique(
        layer="cache",
        switch="always on for windowed layers (Gemma 3)",
        helps="memory of long sequences: windowed layers keep their window only",
        hurts="a prefix is found again only where its window's pages are still kept",
        goals_helped=("memory", "throughput"),
        goals_hurt=(),
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
