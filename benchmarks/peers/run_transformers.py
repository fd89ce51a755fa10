"""transformers on the suite's workloads: `python run_transformers.py JOB.json SPAWNED_S`. Prints one JSON line.

Knows: AutoModelForCausalLM in bf16, left padding for requests at once. Needs the standard library, torch and transformers only.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    spawned_s = float(sys.argv[2])
    import torch
    import transformers

    torch.set_num_threads(job["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0
    first, _ = generate(model, job["start"]["prompts"], 1)
    version = f"{transformers.__version__}, torch {torch.__version__}"
    report = {"engine": "transformers", "version": version, "start_s": time.time() - spawned_s, "first": first[0][:1]}
    report["start_rss_mb"] = peak_rss_mb()
    results, answers = {}, {}
    for name, work in job["workloads"].items():
        rates = []
        for repeat in range(job["warm"] + job["repeats"]):
            began = time.perf_counter()
            tokens, stamps = generate(model, work["prompts"], max(work["new"]))
            if name == "L1":
                rate = (work["new"][0] - 1) / (stamps[-1] - stamps[0])
            elif name == "L2":
                rate = len(work["prompts"][0]) / (stamps[0] - began)
            else:
                rate = sum(work["new"]) / (time.perf_counter() - began)
            if repeat >= job["warm"]:
                rates.append(rate)
        results[name], answers[name] = rates, tokens
    print(json.dumps(report | {"results": results, "answers": answers, "rss_mb": peak_rss_mb()}))


def generate(model, prompts: list[list[int]], new: int) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens of every prompt, `new` of each, and when each step's were there."""
    import torch

    stamps = []

    class Stamp:
        """Called by generate with the prompt first and then with every step's tokens."""

        def put(self, value) -> None:
            stamps.append(time.perf_counter())

        def end(self) -> None:
            pass

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    streamer = Stamp() if len(prompts) == 1 else None
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=new, max_new_tokens=new, streamer=streamer
        )
    return out[:, longest:].tolist(), stamps[1:]


def peak_rss_mb() -> float:
    """Most memory this process has held, in MB. Not ru_maxrss: that counts the process which started this one too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit("no VmHWM in /proc/self/status")


if __name__ == "__main__":
    main()
