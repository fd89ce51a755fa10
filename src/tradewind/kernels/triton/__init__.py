"""Triton kernels for NVIDIA GPUs (Hopper first): tensors in, tensors out, written to caller-owned buffers.

Knows: shapes, dtypes, physical layouts, launch grids. Refuses to know: models, schedules, who owns a page.
Every launch is safe inside a CUDA graph: sizes that change from step to step (live rows, lengths, page tables) are read from device memory,
grids have static upper bounds and programs without work leave early. Plain-torch truths: kernels/reference.py. Tuned constants: tuning.py.

Programmatic dependent launch (`pdl=True`): a kernel lets its successor start at once and waits for its predecessor before the first load of
anything that a kernel wrote. What it loads before that wait are weights only. *Every* kernel of a chain launched with pdl waits, so the end
of a kernel implies the end of all before it. One exception, by name: a kernel launched with `early=True` reads lengths, page table and old
keys before its wait (attention), or what was routed two kernels before (moe.one_down); that is safe behind a kernel launched with
`late=True`, which lets its successor start only after its own wait:

    kernel i - 2 (wrote lengths ...)  ends  ->  kernel i - 1 (late) returns from its wait, lets i start  ->  kernel i (early) reads them

Shared experts of small steps run on a second stream; how that goes with dependent launches is written in lanes.py.

Physical KV layout of this op set: k and v are [pages, G, B, D]; one head of a page is one contiguous piece.
"""
