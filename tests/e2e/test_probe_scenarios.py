"""Loads that must look like what they are, on real servers with the probe.

Two servers side by side: one whose three limits are all tiny, so that the load decides which of them is in the way, and
one with room, for a long prompt among short ones and for a load at which nothing is wrong. The same on scheduler
objects, limit by limit and with asynchronous scheduling, is in `exporters/probe/test_real_schedulers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e import recomputed
from e2e.probe_load import LONG_TOKENS, Job, burst, prompt, send
from e2e.probe_rows import Row, rows_of, total
from e2e.probe_system import ProbedServer, probed_server
from e2e.product import Up, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

TIGHT = (
    *("--max-num-seqs", "2", "--max-num-batched-tokens", "8", "--max-model-len", "2048"),
    *("--num-gpu-blocks-override", "66", "--no-enable-prefix-caching"),
)
"""Two sequences, 8 tokens a step, 65 blocks of 32 tokens."""
LIGHT_TOLERANCE = 0.05
"""Share of a light load's time that may have been spent in the queue (the rest of a step that does nothing for it) and
in gaps of the prefill."""
LIGHT_SLOWDOWN_TOLERANCE = 0.25
"""Share of its decode time that may count as slow-down: every step that is longer than the mean of its kind adds to it,
so on a busy machine its jitter is in there."""


@dataclass(frozen=True)
class Servers:
    """Both of them and where their rows are."""

    tight: ProbedServer
    roomy: ProbedServer
    lake: Path


@pytest.fixture(scope="module")
def servers(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Started at the same time; requests sent to them end up in one lake."""
    folder = tmp_path_factory.mktemp("scenarios")
    up = Up(folder / "lake", folder / "up.log")
    with up.running(), ExitStack() as stack, ThreadPoolExecutor(2) as pool:

        def start(instance: str, arguments: tuple[str, ...]) -> ProbedServer:
            return stack.enter_context(
                probed_server(
                    vllm_python,
                    folder,
                    instance=instance,
                    probe_port=up.grpc_port,
                    stock_port=up.grpc_port,
                    arguments=arguments,
                )
            )

        tight, roomy = pool.submit(start, "tight-0", TIGHT), pool.submit(start, "roomy-0", ())
        yield Servers(tight.result(), roomy.result(), folder / "lake")


def scheduled(server: ProbedServer, name: str) -> bool:
    """Whether the scheduler has chosen a step with that request."""
    return any(f"cmpl-{name}-0-" in line for line in witnessed(server) if line.startswith('{"step"'))


def answered(server: ProbedServer, name: str) -> bool:
    """Whether that request has had a token."""
    return any(f"cmpl-{name}-0-" in line for line in witnessed(server) if line.startswith('{"update"'))


def witnessed(server: ProbedServer) -> list[str]:
    """Lines of the witness, none before the first request."""
    return server.witness_log.read_text().splitlines() if server.witness_log.exists() else []


def waited(found: list[Row]) -> list[Row]:
    """Those that were still in the queue after the scheduler had looked at them once."""
    return [row for row in found if row["queue"] > row["queue_step"]]


def share(found: list[Row], stem: str) -> float:
    """Of the queue time after the scheduler's first look."""
    return total(found, stem) / (total(found, "queue") - total(found, "queue_step"))


def test_short_requests_wait_for_one_of_two_sequences(servers: Servers) -> None:
    seen = send(servers.tight.url, burst("cap", [(6, 60)] * 10, seed=1))
    found = rows_of(servers.lake, seen)
    assert len(waited(found)) >= 6
    assert share(found, "queue_sequence_cap") >= 0.95
    assert total(found, "queue_kv_blocks") == 0


def test_short_requests_wait_for_the_budget_that_a_long_prompt_takes(servers: Servers) -> None:
    long = Job("budget-long", prompt(7, 1_900), 4)
    short = [Job(f"budget-{n:02}", prompt(70 + n, 24), 4, at_seconds=0.05 + n / 10) for n in range(12)]
    eater, *found = rows_of(servers.lake, send(servers.tight.url, [long, *short]))
    came = [row for row in found if eater["scheduled_ns"] < row["queued_ns"] < eater["first_token_ns"]]
    assert came, "the machine is too slow: no short request came while the long prompt was computed"
    first = min(came, key=lambda row: row["queued_ns"])
    assert first["token_budget_blocker"] == eater["engine_request_id"], first
    assert first["queue_token_budget"] >= 0.95 * (first["queue"] - first["queue_step"]) > 0, first


def test_requests_that_outgrow_the_blocks_are_preempted_and_wait_for_blocks(servers: Servers) -> None:
    seen = send(servers.tight.url, burst("blocks", [(400, 900)] * 4, seed=3))
    found = rows_of(servers.lake, seen)
    assert total(found, "queue_kv_blocks") > 0
    log = recomputed.read(servers.tight.witness_log)
    lost = {row["engine_request_id"]: recomputed.lost_tokens(log, row["engine_request_id"]) for row in found}
    assert sum(map(len, lost.values())) > 0
    for row in found:
        mine = lost[row["engine_request_id"]]
        # Without a prefix cache everything that was lost is computed again.
        assert (row["preemptions"], row["lost_tokens"] or 0, row["recomputed_tokens"] or 0) == (
            len(mine),
            sum(mine),
            sum(mine),
        )
        assert (row["preempted"] > 0) == (row["recompute"] > 0) == bool(mine)


def test_a_long_prompt_keeps_new_ones_waiting_and_slows_running_ones(servers: Servers) -> None:
    server = servers.roomy
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(send, server.url, burst("running", [(32, 3_000)] * 3, seed=4))
        wait_until(
            lambda: all(answered(server, f"running-{number:04}") for number in range(3)), "nothing runs", every=0.02
        )
        long = pool.submit(send, server.url, [Job("long", prompt(8, LONG_TOKENS), 4)])
        wait_until(lambda: scheduled(server, "long"), "the long prompt does not run", every=0.02)
        new_ones = [Job(f"new-{number}", prompt(90 + number, 40), 8, at_seconds=number / 5) for number in range(3)]
        seen = send(server.url, new_ones)
        found = rows_of(servers.lake, [*running.result(), *long.result(), *seen])
    before, (eater,), new = found[:3], found[3:4], found[4:]
    assert [row["queue_kv_blocks"] + row["queue_sequence_cap"] for row in new] == [0, 0, 0]
    for row in new:
        assert row["token_budget_blocker"] == eater["engine_request_id"], row
        assert row["queue_token_budget"] >= 0.95 * (row["queue"] - row["queue_step"]) > 0, row
    for row in before:
        # The whole prefill of the long prompt falls into their decoding.
        assert row["first_token_ns"] < eater["scheduled_ns"] < eater["first_token_ns"] < row["engine_end_ns"]
        assert 0.8 * eater["prefill"] <= row["decode_interference"] <= 1.1 * total(found, "prefill"), row


def test_at_a_light_load_nothing_is_blamed(servers: Servers) -> None:
    seen = send(servers.roomy.url, burst("light", [(64, 24)] * 12, seed=5), one_at_a_time=True)
    found = rows_of(servers.lake, seen)
    for stem in ("queue_sequence_cap", "queue_token_budget", "queue_kv_blocks", "queue_deferred"):
        assert total(found, stem) == 0
    for stem in ("prefill_interference", "decode_interference", "preempted", "recompute"):
        assert total(found, stem) == 0
    duration = total(found, "request_duration")
    assert total(found, "queue") <= LIGHT_TOLERANCE * duration
    assert total(found, "prefill_other") <= LIGHT_TOLERANCE * duration
    assert total(found, "decode_slowdown") <= LIGHT_SLOWDOWN_TOLERANCE * total(found, "decode")
