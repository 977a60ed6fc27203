"""What the probe says of an overloaded vLLM is what its clients, its own counters and its scheduler say.

One server with too few KV blocks, its own tracing on beside the probe, both into one receiver. A twentieth of the
clients go away in the middle of their answer. The `witness` writes down each step of the scheduler.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from e2e import recomputed
from e2e.probe_load import Seen, burst, overload, send
from e2e.probe_rows import Row, rows, rows_of
from e2e.probe_system import ProbedServer, probed_server
from e2e.product import Up, wait_until
from e2e.tee import kept, tee
from vllm_slo.exporters.records import DECODE_PARTS, PREFILL_PARTS, QUEUE_PARTS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PER_SECOND = 6.0
MILLISECOND = 1_000_000
ARGUMENTS = ("--num-gpu-blocks-override", "1126", "--max-model-len", "36000")
"""A prompt of 35,000 tokens takes 1,094 of the 1,125 blocks, so it waits for blocks, and others wait behind it."""


@dataclass(frozen=True)
class Truth:
    """Everything that is known of one load."""

    server: ProbedServer
    lake: Path
    seen: list[Seen]
    rows: dict[str, Row]
    counters: dict[str, float]
    stock: dict[str, Span]
    log: recomputed.Log
    step_log: recomputed.Log


@pytest.fixture(scope="module", params=[pytest.param(25.0, id="short"), pytest.param(90.0, marks=pytest.mark.slow)])
def truth(
    request: pytest.FixtureRequest, vllm_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Truth]:
    """The load has been sent and every request of it has ended and is in the lake."""
    folder = tmp_path_factory.mktemp("truth")
    lake, copy = folder / "lake", folder / "stock.pb"
    up = Up(lake, folder / "up.log")
    with (
        up.running(),
        tee(up.grpc_port, copy) as stock_port,
        probed_server(
            vllm_python, folder, instance="truth-0", probe_port=up.grpc_port, stock_port=stock_port, arguments=ARGUMENTS
        ) as server,
    ):
        before = counters(server.url)
        jobs = overload("truth", request.param, PER_SECOND, seed=11)
        # Eight that fit into the blocks with their prompts, but not with what they generate.
        jobs += burst("squeeze", [(4_300, 300)] * 8, seed=12, at_seconds=request.param)
        seen = send(server.url, jobs)
        wait_until(lambda: idle(server.url), "the server does not come to rest")
        rows_of(lake, seen)
        ended = '"event": "ended"'
        wait_until(lambda: server.step_log.read_text().count(ended) >= len(seen), "the step log is not complete")
        after = counters(server.url)
        wait_until(lambda: len(kept(copy, "llm_request")) >= sum(not each.given_up for each in seen), "spans missing")
        yield Truth(
            server,
            lake,
            seen,
            rows(lake),
            {name: value - before.get(name, 0.0) for name, value in after.items()},
            {attribute(span, "gen_ai.request.id"): span for span in kept(copy, "llm_request")},
            recomputed.read(server.witness_log),
            recomputed.read_step_log(server.step_log),
        )


def counters(url: str) -> dict[str, float]:
    """vLLM's own counters, summed over labels other than the finish reason."""
    found: Counter[str] = Counter()
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        if match := re.fullmatch(r"vllm:(\w+_total)(?:\{(.*)\})? (\S+)", line):
            name, labels, value = match.groups()
            reason = re.search(r'finished_reason="(\w+)"', labels or "")
            found[f"{name}:{reason[1]}" if reason else name] += float(value)
    return dict(found)


def idle(url: str) -> bool:
    """Whether nothing runs and nothing waits."""
    page = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(float(v) for v in re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", page, re.M)) == 0


def attribute(span: Span, key: str) -> Any:
    """Value of one attribute."""
    value = next(a.value for a in span.attributes if a.key == key)
    return getattr(value, value.WhichOneof("value"))


def test_every_request_of_every_client_is_one_row(truth: Truth) -> None:
    assert truth.rows.keys() == {each.request_id for each in truth.seen}
    assert sum(each.given_up for each in truth.seen) >= len(truth.seen) // 25
    for each in truth.seen:
        row = truth.rows[each.request_id]
        assert (row["source"], row["prompt_tokens"]) == ("probe", len(each.job.prompt)), row
        if not each.given_up:
            assert (row["finish_reason"], row["completion_tokens"]) == ("length", each.job.output), row
    complete = sum(row["records"].split("+")[:2] == ["engine", "frontend"] for row in truth.rows.values())
    assert complete >= 0.9 * len(truth.rows)


def test_clients_that_went_away_are_aborts_unless_the_server_was_done_first(truth: Truth) -> None:
    gone = [(each, truth.rows[each.request_id]) for each in truth.seen if each.given_up]
    aborted = [row for _, row in gone if row["finish_reason"] == "abort"]
    assert len(aborted) >= 0.8 * len(gone), [(each.tokens, row["completion_tokens"]) for each, row in gone]
    for each, row in gone:
        assert row["completion_tokens"] >= each.tokens
        assert row["finish_reason"] in ("abort", "length")
    answered = {each.request_id for each in truth.seen if not each.given_up}
    assert not [row for key, row in truth.rows.items() if key in answered and row["finish_reason"] == "abort"]


def test_totals_equal_the_counters_of_vllm_where_both_count_the_same(truth: Truth) -> None:
    """Where they do not: vLLM counts no client abort as finished, and a preemption only when its victim has another
    token, so those of requests that were given up while preempted are missing there."""
    found, vllm = truth.rows.values(), truth.counters
    assert sum(row["finish_reason"] == "length" for row in found) == vllm["request_success_total:length"]
    assert all(vllm.get(f"request_success_total:{reason}", 0) == 0 for reason in ("abort", "error", "stop"))
    first_token = [row for row in found if row["first_token_ns"] is not None]
    assert sum(row["prompt_tokens"] for row in first_token) == vllm["prompt_tokens_total"]
    assert sum(row["completion_tokens"] for row in found) == vllm["generation_tokens_total"]
    assert sum(row["cached_tokens"] for row in first_token) == vllm["prompt_tokens_cached_total"]
    preempted = sum(row["preemptions"] for row in found)
    given_up = sum(row["preemptions"] for row in found if row["finish_reason"] == "abort")
    assert preempted - given_up <= vllm["num_preemptions_total"] <= preempted
    assert preempted > 0, "the load preempted nobody: it tests too little"


def test_queue_prefill_and_decode_are_those_of_vllms_own_span(truth: Truth) -> None:
    assert truth.stock.keys() <= truth.rows.keys()
    assert len(truth.stock) >= 0.9 * len(truth.rows)
    far = []
    for request_id, span in truth.stock.items():
        row = truth.rows[request_id]
        for stem in ("queue", "prefill", "decode"):
            key = {"queue": "time_in_queue", "prefill": "time_in_model_prefill", "decode": "time_in_model_decode"}[stem]
            off = abs(row[stem] - attribute(span, f"gen_ai.latency.{key}") * 1e9)
            # Both read the same clock, one after the other; the system may run something else between the two.
            if off > MILLISECOND and not recomputed.stalled(truth.log, row["engine_request_id"]):
                far.append((stem, off, row))
    assert not far


def test_the_parts_of_every_request_sum_to_the_nanosecond(truth: Truth) -> None:
    for row in truth.rows.values():
        parts = {stem: row[stem] or 0 for stem in (*QUEUE_PARTS, *PREFILL_PARTS, *DECODE_PARTS)}
        assert min(parts.values()) >= 0, row
        assert sum(parts[stem] for stem in QUEUE_PARTS) == row["queue"], row
        if row["first_token_ns"] is None:
            continue
        assert sum(parts[stem] for stem in PREFILL_PARTS) == row["prefill"], row
        later = sum(row[stem] - row[f"{stem}_before_first_token"] for stem in ("preempted", "recompute"))
        assert sum(parts[stem] for stem in DECODE_PARTS) + later == row["decode"], row


def test_what_blocked_the_queue_agrees_with_the_probes_own_step_log(truth: Truth) -> None:
    """The same clock, so to the nanosecond, where 1 % is asked for."""
    for row in truth.rows.values():
        parts = recomputed.queue_parts(truth.step_log, row["engine_request_id"])
        if parts is not None:
            assert {stem: row[stem] for stem in parts} == parts, row


def test_the_probes_step_log_tells_what_the_scheduler_did(truth: Truth) -> None:
    assert truth.step_log.added.keys() == truth.log.added.keys()
    assert len(truth.step_log.steps) == len(truth.log.steps)
    for said, done in zip(truth.step_log.steps, truth.log.steps, strict=True):
        assert (said.tokens, said.preempted) == (done.tokens, done.preempted)
        assert said.stopped_by in ("", done.stopped_by), (said, done)
        if "start" not in done.stalled:
            assert abs(said.start - done.start) <= MILLISECOND
        if said.stopped_by == "":
            continue
        assert said.prefill.keys() & said.tokens.keys() == done.prefill.keys(), (said, done)


def between_readings(truth: Truth, row: Row) -> int:
    """How far the clocks that the two logs read at the ends of its queue time may set its parts apart.

    The system may run something else between the two readings; over all requests that is little.
    """
    engine_id = row["engine_request_id"]
    added = truth.log.added[engine_id]
    starts = []
    for said, done in zip(truth.step_log.steps, truth.log.steps, strict=True):
        if done.start >= added:
            starts.append(abs(said.start - done.start))
            if engine_id in done.tokens:
                break
    return added - truth.step_log.added[engine_id] + 2 * max(starts, default=0)


def test_what_blocked_the_queue_agrees_with_the_log_of_every_step(truth: Truth) -> None:
    wrong, total = Counter[str](), Counter[str]()
    for row in truth.rows.values():
        parts = recomputed.queue_parts(truth.log, row["engine_request_id"])
        if parts is None:
            continue
        for stem, expected in parts.items():
            total[stem] += expected
            wrong[stem] += abs(row[stem] - expected)
        off = sum(abs(row[stem] - expected) for stem, expected in parts.items())
        assert off <= 0.01 * row["queue"] + MILLISECOND + between_readings(truth, row), (parts, row)
    assert sum(wrong.values()) <= 0.01 * sum(total.values()), (wrong, total)
    assert total[recomputed.BUDGET] > 0
    assert total[recomputed.KV] > 0
    assert total[recomputed.CAP] > 0


def test_own_prefill_and_others_agree_with_the_log_of_every_step(truth: Truth) -> None:
    wrong, total = 0, 0
    for row in truth.rows.values():
        parts = recomputed.prefill_parts(truth.log, row["engine_request_id"])
        if parts is None:
            continue
        total += sum(parts.values())
        wrong += sum(abs(row[stem] - expected) for stem, expected in parts.items())
    assert wrong <= 0.01 * total


def test_lost_tokens_and_preemptions_are_those_of_the_scheduler(truth: Truth) -> None:
    for row in truth.rows.values():
        lost = recomputed.lost_tokens(truth.log, row["engine_request_id"])
        assert (row["preemptions"], row["lost_tokens"] or 0) == (len(lost), sum(lost)), row
        assert 0 <= (row["recomputed_tokens"] or 0) <= sum(lost), row


def test_kv_figures_equal_a_walk_over_every_block_at_200_random_steps(truth: Truth) -> None:
    assert len(truth.log.walks) >= 200
    for probe, walked in truth.log.walks:
        assert {name: probe[name] for name in walked} == walked
    assert max(walked["slots_wasted"] for _, walked in truth.log.walks) > 0
    assert max(walked["blocks_cached"] for _, walked in truth.log.walks) > 0
    for bucket in ("short", "medium", "long"):
        assert max(walked["blocks_by_bucket"][bucket] for _, walked in truth.log.walks) > 0
