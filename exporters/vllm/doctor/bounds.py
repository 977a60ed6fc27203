"""Checks of the histograms' bounds: whether vLLM's own series can tell if an objective is met.

Default bounds: ``vllm/v1/metrics/buckets.py`` of vLLM 0.32.
"""

from __future__ import annotations

import json
import math

from vllm_slo.exporters.vllm.doctor.finding import Answer, error, needs_metrics, note, ok, unknown, warning
from vllm_slo.exporters.vllm.doctor.subject import METRICS, Subject

OPTION = "custom-histogram-buckets"
TOKENS_FAMILY = "request_tokens"
DEFAULT_BOUNDS: dict[str, tuple[float, ...]] = {
    "request_latency": (
        0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
    ),
    "time_to_first_token": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
        2560,
    ),
    "inter_token_latency": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
    ),
}  # fmt: skip
"""Family of ``--custom-histogram-buckets`` -> the bounds without it, in seconds."""


def objectives(subject: Subject) -> tuple[Answer, ...]:
    """Whether each objective lies on a bound: only then does the histogram count exactly who met it."""
    custom, fault = _custom(subject)
    if fault:
        return error(fault, f"Give --{OPTION} '{{\"request_latency\": [0.3, 0.5, 1.0]}}': bounds above 0, ascending.")
    missing: list[str] = []
    cure: dict[str, list[float]] = {}
    looked_at = 0
    for objective in subject.objectives:
        metric = METRICS[objective.metric]
        bounds = subject.page.bounds(metric.series) if subject.page else ()
        if not bounds and subject.command is not None and subject.page is None:
            bounds = tuple(custom.get(metric.family, DEFAULT_BOUNDS[metric.family]))
        if not bounds:
            continue
        looked_at += 1
        if any(math.isclose(bound, objective.seconds, rel_tol=1e-9) for bound in bounds):
            continue
        below = max((bound for bound in bounds if bound < objective.seconds), default=0.0)
        above = min((bound for bound in bounds if bound > objective.seconds), default=math.inf)
        nearest = f"the nearest bounds of vllm:{metric.series} are {below:g} and {above:g}"
        missing.append(f"{objective.metric} {objective.seconds:g} s: {nearest}")
        cure[metric.family] = sorted({*cure.get(metric.family, bounds), objective.seconds})
    if not looked_at:
        return unknown("No histogram bounds are known.", "Give the server's address or --command 'vllm serve ...'.")
    if not missing:
        return ok("Every objective lies on a bound.")
    found = f"No bound at {'; '.join(missing)}."
    if not subject.objectives_given:
        found += " (Objectives not given; these are the defaults of --objective.)"
    advice = f"Start vLLM with --{OPTION} '{json.dumps(cure)}' (vLLM 0.32). Spans need no bounds: they are exact."
    return warning(found, advice) if subject.objectives_given else note(found, advice)


def token_bounds(subject: Subject) -> tuple[Answer, ...]:
    """Whether vLLM's token histograms reach the longest contexts."""
    page = subject.page
    length = subject.command.integer("max-model-len") if subject.command else None
    ours = [bound for _, bound in subject.context_buckets]
    custom, _ = _custom(subject)
    bounds = page.bounds("request_prompt_tokens") if page else ()
    if not bounds and TOKENS_FAMILY in custom:
        bounds = tuple(custom[TOKENS_FAMILY])
    if not bounds and length is not None:
        bounds = tuple(_one_two_five(length))
    if not bounds:
        if subject.command is not None:
            return unknown(
                "--max-model-len is not given, so the bounds depend on the model.", "Give the server's address."
            )
        return needs_metrics()
    last = bounds[-1]
    beyond = 0.0
    if page is not None:
        every = page.value("request_prompt_tokens", ("_count",)) or 0.0
        within = sum(
            sample.value
            for sample in page.of("request_prompt_tokens", ("_bucket",))
            if _is(sample.labels.get("le"), last) and not math.isnan(sample.value)
        )
        beyond = every - within
    off = [bound for bound in ours if bound not in bounds and bound < (length or max(ours))]
    if not off and beyond <= 0 and (length is None or last >= length):
        return ok(f"Token bounds reach {last:g}.")
    found = f"The token histograms end at {last:g}"
    found += f" below --max-model-len {length}" if length is not None and last < length else ""
    found += f"; {beyond:g} requests lie beyond" if beyond > 0 else ""
    found += f"; the context buckets' bounds {', '.join(map(str, off))} are not among theirs" if off else ""
    wanted = sorted({*bounds, *map(float, off), *([float(length)] if length is not None and last < length else [])})
    if beyond > 0 and len(wanted) == len(bounds):
        wanted.append(2 * last)
    text = json.dumps({TOKENS_FAMILY: [int(bound) if bound == int(bound) else bound for bound in wanted]})
    return note(f"{found}.", f"Start vLLM with --{OPTION} '{text}' (vLLM 0.32). Spans carry exact token counts.")


def context_buckets(subject: Subject) -> tuple[Answer, ...]:
    """Whether the configured context buckets fit what the server accepts."""
    command = subject.command
    length = command.integer("max-model-len") if command else None
    if length is None:
        return unknown(
            "The longest context is not known: no metric holds it and --max-model-len was not given.",
            "Add --command 'vllm serve ... --max-model-len N'.",
        )
    lowers = [0, *(bound for _, bound in subject.context_buckets[:-1])]
    empty = [name for (name, _), lower in zip(subject.context_buckets, lowers, strict=True) if lower >= length]
    last_name, last_bound = subject.context_buckets[-1]
    if empty:
        return note(
            f"--max-model-len {length}: no request reaches {', '.join(empty)}.",
            "Set `buckets` in the configuration to bounds below it.",
        )
    if length > last_bound:
        return note(
            f"--max-model-len {length}: contexts over {last_bound} tokens are counted in the bucket {last_name}.",
            "Add a bucket for them to `buckets` in the configuration.",
        )
    return ok(f"Contexts up to {length} tokens fall into the configured buckets.")


def _custom(subject: Subject) -> tuple[dict[str, list[float]], str | None]:
    """The bounds given on the command line, and what is wrong with them."""
    text = subject.command.value(OPTION) if subject.command else None
    if text is None:
        return {}, None
    try:
        given = json.loads(text)
    except ValueError as fault:
        return {}, f"--{OPTION} is not JSON ({fault}): vLLM does not start."
    if not isinstance(given, dict):
        return {}, f"--{OPTION} is not a JSON object: vLLM does not start."
    families: dict[str, list[float]] = {}
    for family, bounds in given.items():
        good = isinstance(bounds, list) and bounds and all(type(b) in (int, float) and 0 < b < math.inf for b in bounds)
        if not good or sorted(set(bounds)) != bounds:
            return {}, f"--{OPTION}: the bounds of {family} are not above 0 and ascending: vLLM does not start."
        families[str(family)] = [float(bound) for bound in bounds]
    return families, None


def _one_two_five(limit: int) -> list[float]:
    """vLLM's token bounds: 1, 2, 5, 10, ... up to ``limit``."""
    return [m * 10.0**e for e in range(len(str(limit))) for m in (1, 2, 5) if m * 10**e <= limit]


def _is(le: str | None, bound: float) -> bool:
    try:
        return le is not None and math.isclose(float(le), bound)
    except ValueError:
        return False
