"""Which options ``vllm serve`` has, and what to use instead of those it never had or has no more."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal


@dataclass(frozen=True)
class Retired:
    """An option that vLLM refuses: ``never`` existed in a release, or was ``removed``; ``instead`` is the cure."""

    history: Literal["never", "removed"]
    instead: str


RETIRED: dict[str, Retired] = {
    "max-batch-size": Retired("never", "Use --max-num-seqs (requests) and --max-num-batched-tokens (tokens a step)."),
    "batch-size": Retired("never", "Use --max-num-seqs (requests) and --max-num-batched-tokens (tokens a step)."),
    "enable-chunking": Retired(
        "never", "Use --enable-chunked-prefill (on by default) with --max-num-batched-tokens as the chunk's limit."
    ),
    "timeout-ms": Retired(
        "never",
        "vLLM has no timeout of a request: end it in the client or the gateway; "
        "limit waiting with --max-num-queued-reqs and --max-num-queued-tokens (503 beyond).",
    ),
    "request-timeout": Retired(
        "never",
        "vLLM has no timeout of a request: end it in the client or the gateway; "
        "limit waiting with --max-num-queued-reqs and --max-num-queued-tokens (503 beyond).",
    ),
    "prefill-parallelism": Retired(
        "never", "Nearest: --prefill-context-parallel-size, or --max-num-batched-tokens for prefill tokens a step."
    ),
    "memory-monitor-interval": Retired(
        "never", "Nearest: the environment variable VLLM_LOG_STATS_INTERVAL (seconds, 10 by default)."
    ),
    "max-queue-size": Retired("never", "Use --max-num-queued-reqs."),
    "enable-metrics": Retired("never", "Leave it out: /metrics is on unless --disable-log-stats is given."),
    "swap-space": Retired("removed", "Use --kv-offloading-size (GiB); a preempted request is computed again."),
    "preemption-mode": Retired("removed", "Leave it out: preemption is by recomputation; --watermark makes it rarer."),
    "num-scheduler-steps": Retired("removed", "Leave it out; --async-scheduling (on by default on GPUs) replaces it."),
    "multi-step-stream-outputs": Retired("removed", "Leave it out; --stream-interval sets how often tokens are sent."),
    "scheduler-delay-factor": Retired("removed", "Leave it out."),
    "num-lookahead-slots": Retired("removed", "Leave it out; --speculative-config sets it."),
    "max-num-partial-prefills": Retired("removed", "Use --long-prefill-token-threshold."),
    "max-long-partial-prefills": Retired("removed", "Use --long-prefill-token-threshold."),
    "use-v2-block-manager": Retired("removed", "Leave it out."),
    "disable-log-requests": Retired("removed", "Leave it out: requests are logged only with --enable-log-requests."),
    "disable-async-output-proc": Retired("removed", "Leave it out."),
    "disable-frontend-multiprocessing": Retired("removed", "Leave it out."),
    "worker-use-ray": Retired("removed", "Use --distributed-executor-backend ray."),
    "engine-use-ray": Retired("removed", "Use --distributed-executor-backend ray."),
    "speculative-model": Retired(
        "removed", 'Use --speculative-config \'{"model": ..., "num_speculative_tokens": ...}\'.'
    ),
    "num-speculative-tokens": Retired(
        "removed", "Use --spec-tokens, or num_speculative_tokens in --speculative-config."
    ),
    "ngram-prompt-lookup-max": Retired("removed", "Use prompt_lookup_max in --speculative-config."),
    "guided-decoding-backend": Retired("removed", "Use backend in --structured-outputs-config."),
    "max-seq-len-to-capture": Retired("removed", "Use --max-cudagraph-capture-size."),
    "max-context-len-to-capture": Retired("removed", "Use --max-cudagraph-capture-size."),
    "cuda-graph-sizes": Retired("removed", "Use --cudagraph-capture-sizes."),
    "rope-scaling": Retired("removed", "Use rope_parameters in --hf-overrides."),
    "rope-theta": Retired("removed", "Use rope_parameters in --hf-overrides."),
    "task": Retired("removed", "Use --runner and --convert."),
    "enable-reasoning": Retired("removed", "Use --reasoning-parser alone."),
    "override-pooler-config": Retired("removed", "Use --pooler-config."),
    "device": Retired("removed", "Leave it out: the platform is found by vLLM."),
    "tokenizer-pool-size": Retired("removed", "Nearest: --renderer-num-workers."),
    "enable-prompt-adapter": Retired("removed", "Leave it out."),
    "quantization-param-path": Retired("removed", "Leave it out: scales come with the checkpoint."),
}
"""Option without dashes -> why ``vllm serve`` 0.32 refuses it and the cure."""

FLAGS_VERSION = "0.32"


@dataclass(frozen=True)
class Flags:
    """``arity`` is 0, bool (with a --no- form), 1, ? or + for each option; ``aliases`` are the other spellings."""

    arity: dict[str, str]
    aliases: dict[str, str]

    def find(self, token: str) -> tuple[str, bool] | None:
        """The option a token means, without dashes, and whether it was negated; None for one that does not exist.

        As ``vllm serve`` does, underscores equal dashes and a unique beginning is enough.

        >>> known().find("--max_num_seqs"), known().find("--no-enable-prefix-caching"), known().find("-tp")
        (('max-num-seqs', False), ('enable-prefix-caching', True), ('tensor-parallel-size', False))
        """
        if token in self.aliases:
            return self.aliases[token], False
        if not token.startswith("--"):
            return None
        name = token[2:].replace("_", "-")
        if f"--{name}" in self.aliases:
            return self.aliases[f"--{name}"], False
        if name in self.arity:
            return name, False
        if name.startswith("no-") and self.arity.get(name[3:]) == "bool":
            return name[3:], True
        spellings = {flag: flag for flag in self.arity} | {alias[2:]: flag for alias, flag in self.aliases.items()}
        beginning = [flag for spelling, flag in spellings.items() if name and spelling.startswith(name)]
        return (beginning[0], False) if len(beginning) == 1 else None

    def nearest(self, name: str) -> list[str]:
        """Up to three options with a similar name."""
        return difflib.get_close_matches(name, self.arity, n=3, cutoff=0.7)


@cache
def known() -> Flags:
    """Every option of ``vllm serve`` 0.32, read from the data file beside this module."""
    data = json.loads(files("vllm_slo.exporters.vllm.doctor").joinpath("flags_0_32.json").read_text())
    return Flags(data["flags"], data["aliases"])
