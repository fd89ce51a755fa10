"""Tradewind on the suite's workloads: `python run_tradewind.py JOB.json SPAWNED_S`. Prints one JSON line.

Knows: the `LLM` class, used as anybody would. Times what the other runners time, in the same places.
"""

import json
import sys
import time
from pathlib import Path


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    spawned_s = float(sys.argv[2])
    import tradewind
    from tradewind.contract.request import SamplingParams
    from tradewind.llm import LLM

    def greedy(new: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, seed=0)

    with LLM(model=job["model"]) as llm:
        outputs = llm.generate(job["start"]["prompts"], greedy(1))
        first = list(outputs[0].completions[0].tokens)
        report = {
            "engine": "tradewind",
            "version": tradewind.__version__,
            "start_s": time.time() - spawned_s,
            "first": first,
        }
        report |= {"start_rss_mb": peak_rss_mb(), "phases": {phase.name: phase.seconds for phase in llm.phases.done}}
        report["reasons"] = {reason.choice: f"{reason.value}: {reason.why}" for reason in llm.plan.reasons}
        results, answers = {}, {}
        for name, work in job["workloads"].items():
            rates = []
            for repeat in range(job["warm"] + job["repeats"]):
                llm.forget()
                began = time.perf_counter()
                outputs = llm.generate(work["prompts"], [greedy(new) for new in work["new"]])
                wall_s = time.perf_counter() - began
                tokens = [list(output.completions[0].tokens) for output in outputs]
                if name == "L1":
                    rate = (len(tokens[0]) - 1) / (outputs[0].finished_s - outputs[0].first_token_s)
                elif name == "L2":
                    rate = len(work["prompts"][0]) / wall_s
                else:
                    rate = sum(work["new"]) / wall_s
                if repeat >= job["warm"]:
                    rates.append(rate)
            results[name], answers[name] = rates, tokens
        print(json.dumps(report | {"results": results, "answers": answers, "rss_mb": peak_rss_mb()}))


def peak_rss_mb() -> float:
    """Most memory this process has held, in MB. Not ru_maxrss: that counts the process which started this one too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit("no VmHWM in /proc/self/status")


if __name__ == "__main__":
    main()
