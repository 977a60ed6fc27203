"""What the probe costs a vLLM server: per step, per request, per sample, in memory, and end to end.

Needs an interpreter that has vLLM, named by VLLM_SLO_VLLM_PYTHON; the probe of this checkout runs in it.

    python benchmarks/probe.py --json figures.json            # everything, about 15 minutes on two idle cores
    python benchmarks/probe.py --quick --json figures.json    # the same with few repetitions: does it work at all
    python benchmarks/probe.py --only hot-path                # or: end-to-end

The hot path is measured on vLLM's own schedulers without a model (`probe_hot_path.py` says how), end to end on two
real servers by turns (`abba.py` says how). Bars: at most 15 µs a step with 64 running, whatever waits; 60 µs a finished
request; 1 ms a sample with 512 running; CPU seconds per request at most 1.01 times those without the probe; lower
bound of the throughput's ratio at least 0.97. The figures are printed, and the exit code says nothing about the bars.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import abba

ROOT = Path(__file__).resolve().parent.parent
DEAD_RECEIVER = "http://127.0.0.1:9"


def hot_path(python: str, core: int, quick: bool) -> dict[str, Any]:
    """Figures of the hooks alone."""
    found: dict[str, Any] = {"steps": {}, "requests": {}}
    waiting = ["0", "1000"] if quick else ["0", "1000", "10000"]
    for kind in ([],) if quick else ([], ["--asynchronous"]):
        name = "AsyncScheduler" if kind else "Scheduler"
        steps: dict[str, Any] = {}
        for running, repeat in (("64", 4),) if quick else (("1", 25), ("64", 25), ("512", 8)):
            steps |= _child(
                python, core, "steps", "--running", running, "--waiting", *waiting, "--blocks", str(repeat), *kind
            )
        found["hooks"] = steps.pop("hooks")
        found["steps"][name] = steps
        found["requests"][name] = _child(python, core, "requests", "--blocks", "10" if quick else "60", *kind)
    running = ["512"] if quick else ["64", "512"]
    found["sample"] = _child(python, core, "sample", "--running", *running, "--blocks", "20" if quick else "100")
    found["memory"] = _child(python, core, "memory", "--count", "20000" if quick else "200000")
    sixty_four = [
        cost["us"] for steps in found["steps"].values() for name, cost in steps.items() if name.startswith("64 ")
    ]
    return {
        "step_us_64_running": max(sixty_four),
        "step_us_64_running_by_waiting": sixty_four,
        "request_us": max(cost["us"] for cost in found["requests"].values()),
        "request_background_us": max(cost["background_us"] for cost in found["requests"].values()),
        "sample_ms_512_running": found["sample"]["512"]["ms"],
        "memory_growth_mib": found["memory"]["last_mib"] - found["memory"]["half_mib"],
        "hot_path": found,
    }


def _child(python: str, core: int, *arguments: str) -> dict[str, Any]:
    """The JSON of one run of `probe_hot_path.py` in vLLM's interpreter, on one core."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "VLLM_SLO_OTLP_ENDPOINT": DEAD_RECEIVER,
        "VLLM_SLO_METRICS_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }
    print(f"probe: {' '.join(arguments)}", file=sys.stderr, flush=True)
    script = Path(__file__).with_name("probe_hot_path.py")
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [python, str(script), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=1_800,
            check=False,
            preexec_fn=lambda: os.sched_setaffinity(0, [core]),
        )
        if done.returncode != 0:
            errors.seek(0)
            raise SystemExit(f"probe_hot_path.py {' '.join(arguments)} failed:\n{errors.read()[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if arguments[0] != "steps":
        del result["hooks"]
    return result


def _cores(every: Sequence[int]) -> dict[str, Sequence[int]]:
    """The client has the last core, the servers have the others, or the same when there is only one."""
    return {"client": every[-1:], "server": every[:-1] or every}


def main() -> None:
    """Print the figures, and write them as JSON where asked to."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--quick", action="store_true", help="few repetitions: the figures are rough")
    parser.add_argument("--only", choices=("hot-path", "end-to-end"), help="one half")
    parser.add_argument("--pairs", type=int, help="pairs of runs end to end (24; quick: 2)")
    parser.add_argument("--requests", type=int, help="requests in one run (96; quick: 16)")
    options = parser.parse_args()
    python = os.environ.get("VLLM_SLO_VLLM_PYTHON", "")
    if shutil.which(python) is None:
        raise SystemExit("VLLM_SLO_VLLM_PYTHON names no interpreter; set it to one that has vLLM")
    every = sorted(os.sched_getaffinity(0))
    figures: dict[str, Any] = {}
    if options.only != "end-to-end":
        figures |= hot_path(python, every[0], options.quick)
    if options.only != "hot-path":
        load = abba.Load(requests=options.requests or (16 if options.quick else 96))
        figures |= abba.measure(python, options.pairs or (2 if options.quick else 24), load, _cores(every))
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
