"""llama-cpp-python on the suite's workloads: `python run_llama_cpp.py JOB.json SPAWNED_S`. Prints one JSON line.

Knows: llama_cpp's Python classes and, for requests at once, its C batch. Needs the standard library and llama_cpp only.
Its high-level class runs one request at a time; L3 and L4 therefore go through the C API, sixteen sequences to a batch and without prefix
sharing, which is what that library offers a Python program that wants more.
"""

import json
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    spawned_s = float(sys.argv[2])
    works = job["workloads"]
    longest = max((len(p) + n for w in works.values() for p, n in zip(w["prompts"], w["new"], strict=True)), default=0)
    many = any(len(w["prompts"]) > 1 for w in works.values())
    threads = job["threads"]
    llm = llama_cpp.Llama(
        job["model"],
        n_ctx=max(longest, 512) + 8,
        n_batch=512,
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    first = one(llm, job["start"]["prompts"][0], 1)
    report = {
        "engine": "llama.cpp",
        "version": llama_cpp.__version__,
        "start_s": time.time() - spawned_s,
        "first": first[0][:1],
    }
    report["start_rss_mb"] = peak_rss_mb()
    results, answers = {}, {}
    for name, work in works.items():
        if len(work["prompts"]) > 1:
            continue
        rates = []
        for repeat in range(job["warm"] + job["repeats"]):
            began = time.perf_counter()
            tokens, stamps = one(llm, work["prompts"][0], work["new"][0])
            rate = (
                len(work["prompts"][0]) / (stamps[0] - began)
                if name == "L2"
                else (len(tokens) - 1) / (stamps[-1] - stamps[0])
            )
            if repeat >= job["warm"]:
                rates.append(rate)
        results[name], answers[name] = rates, [tokens]
    llm.close()
    if many:
        batch = Batch(job["model"], works, threads=threads)
        for name, work in works.items():
            if len(work["prompts"]) == 1:
                continue
            rates = []
            for repeat in range(job["warm"] + job["repeats"]):
                began = time.perf_counter()
                tokens = batch.run(work["prompts"], work["new"])
                if repeat >= job["warm"]:
                    rates.append(sum(work["new"]) / (time.perf_counter() - began))
            results[name], answers[name] = rates, tokens
    print(json.dumps(report | {"results": results, "answers": answers, "rss_mb": peak_rss_mb()}))


def one(llm: "llama_cpp.Llama", prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    """Greedy tokens of one request and when each was there; nothing is kept from the request before."""
    llm.reset()
    llm._ctx.kv_cache_clear()
    tokens, stamps = [], []
    for token in llm.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0, reset=False):
        tokens.append(int(token))
        stamps.append(time.perf_counter())
        if len(tokens) == new:
            break
    return tokens, stamps


class Batch:
    """Several sequences through llama_decode: prompts in batches of 512 tokens, then one token of each a step."""

    def __init__(self, path: str, works: dict, *, threads: int, n_batch: int = 512) -> None:
        sizes = [(len(w["prompts"]), sum(map(len, w["prompts"])) + sum(w["new"])) for w in works.values()]
        self.n_batch = n_batch
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max(total for _, total in sizes) + 64
        params.n_batch = params.n_ubatch = n_batch
        params.n_seq_max = max(rows for rows, _ in sizes)
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(n_batch, 0, 1)

    def run(self, prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        """Greedy tokens of every prompt."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        answers = [[] for _ in prompts]
        pending = [
            (token, position, row, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        while pending:
            drawn = []
            for begin in range(0, len(pending), self.n_batch):
                drawn += self.decode(pending[begin : begin + self.n_batch])
            for row, token in drawn:
                answers[row].append(token)
            pending = [
                (answers[row][-1], len(prompts[row]) + len(answers[row]) - 1, row, True)
                for row in range(len(prompts))
                if len(answers[row]) < new[row]
            ]
        return answers

    def decode(self, entries: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """One llama_decode; returns (row, best token) of the entries that wanted logits."""
        batch = self.batch
        batch.n_tokens = len(entries)
        for i, (token, position, row, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = row
        if llama_cpp.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        drawn = []
        for i, (_, _, row, wanted) in enumerate(entries):
            if wanted:
                logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, i), shape=(self.vocab,))
                drawn.append((row, int(logits.argmax())))
        return drawn


def peak_rss_mb() -> float:
    """Most memory this process has held, in MB. Not ru_maxrss: that counts the process which started this one too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit("no VmHWM in /proc/self/status")


if __name__ == "__main__":
    main()
