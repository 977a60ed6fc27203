"""A real vLLM with the probe and its middleware: every request of every client is a record, with the right outcome."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from e2e.edge_clients import CHAT, COMPLETIONS, Call, Seen, chat, completion, send, send_alone
from e2e.otlp_recorder import Kept, Recorder, recorder
from e2e.probe_server import probe_environment
from e2e.product import free_port, wait_until
from e2e.vllm_server import MODEL_NAME, VllmServer, build_model, serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parent.parent.parent
MIDDLEWARE = "vllm_slo.exporters.probe.edge.Middleware"
QUEUED = 24
"""`--max-num-queued-reqs`: what the ordinary load stays below and the burst goes beyond."""
OUTCOME = "finish_reason"
ENDLESS = 30_000
"""Tokens asked for by clients that leave: more than can be made before the server knows of it."""
FRONTEND, EDGE, STOCK = "vllm_slo.frontend_request", "vllm_slo.edge_request", "llm_request"


@dataclass(frozen=True)
class Run:
    """What the clients saw and what was recorded of it; ``alone`` were sent one at a time."""

    seen: list[Seen]
    alone: list[Seen]
    recorded: Recorder

    def records(self) -> dict[str, list[Kept]]:
        """The probe's front-end and edge records by the client's own id."""
        found = defaultdict(list)
        for record in (*self.recorded.named(FRONTEND), *self.recorded.named(EDGE)):
            found[client_id(record)].append(record)
        return found


def client_id(record: Kept) -> str:
    """The X-Request-Id in vLLM's external request id."""
    name = str(record.attributes["gen_ai.request.id"])
    if name.startswith("cmpl-"):
        return name.removeprefix("cmpl-").removesuffix("-0")
    return name.removeprefix("chatcmpl-")


@contextmanager
def server(python: str, folder: Path, sink: Recorder, arguments: Sequence[str]) -> Iterator[VllmServer]:
    """A vLLM whose own spans and whose probe's go to ``sink``."""
    environment = {
        **probe_environment(folder),
        "VLLM_SLO_OTLP_PROTOCOL": "http/protobuf",
        "VLLM_SLO_OTLP_ENDPOINT": sink.endpoint,
        "VLLM_SLO_EXPORT_INTERVAL_SECONDS": "0.2",
        "VLLM_SLO_TENANT_HEADER": "X-Tenant",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    }
    model = build_model(python, ROOT / ".cache" / MODEL_NAME)
    options = ("--max-num-seqs", "4", "--max-num-queued-reqs", str(QUEUED), "--trust-request-chat-template")
    with serve(
        python,
        model,
        folder / "vllm.log",
        port=free_port(),
        otlp_endpoint=sink.endpoint,
        arguments=(*options, *arguments),
        environment=environment,
    ) as running:
        yield running


def as_vllm_serve(python: str, folder: Path) -> str:
    """An interpreter that runs `vllm serve`, which alone knows `--api-server-count`, for the module it is told to run.

    The command asks for the metadata of a distribution called vllm, builds for the CPU are called otherwise; and vLLM
    takes the platform from that version.
    """
    known = [python, "-c", "from importlib.metadata import version; version('vllm')"]
    named = subprocess.run(known, capture_output=True, check=False).returncode == 0
    metadata = folder / "site" / "vllm-0+cpu.dist-info"
    metadata.mkdir(parents=True)
    if not named:
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
    script = folder / "python"
    path = f"export PYTHONPATH={metadata.parent}:$PYTHONPATH"
    script.write_text(f'#!/bin/sh\n{path}\nshift 2\nexec {python} -m vllm.entrypoints.cli.main serve "$@"\n')
    script.chmod(0o755)
    return str(script)


def ordinary() -> list[Call]:
    """Eighty that run as their clients want, four that are left in the middle, streamed or not."""
    calls: list[Call] = []
    for number in range(20):
        tenant = ("blue", "green")[number % 2]
        seed = number * 10
        calls += [
            completion(f"whole-{number}", 64, 8, seed, tenant=tenant),
            completion(f"stream-{number}", 200, 12, seed + 1, stream=True, tenant=tenant),
            chat(f"chat-{number}", "bala dena kila " * 9, 8, tenant=tenant),
            chat(f"chat-stream-{number}", "bala dena kila " * 9, 8, stream=True, tenant=tenant),
        ]
    for number in range(4):
        calls.insert(
            20 * number + 9,
            completion(f"left-{number}", 100, ENDLESS, number + 1000, stream=True, leave_after_pieces=1 + number),
        )
    return calls


def special() -> list[Call]:
    """Several completions, several prompts, stop strings."""
    several = {"n": 2, "temperature": 0.8, "seed": 5}
    # Whatever the random model says, it says one of these soon.
    stop = [*"aeioudlmnrst"][:4]
    return [
        completion("two", 40, 6, 1, **several),
        completion("two-streamed", 40, 6, 2, stream=True, **several),
        chat("two-chats", "moda lena", 6, **several),
        completion("two-left", 40, ENDLESS, 3, stream=True, leave_after_pieces=2, **several),
        *(completion(f"stop-{number}", 30, 400, 50 + number, stop=stop) for number in range(4)),
        *(completion(f"stop-streamed-{number}", 30, 400, 60 + number, stop=stop, stream=True) for number in range(4)),
        chat("stop-chat", "moda lena", 400, stop=stop),
    ]


def impatient() -> list[Call]:
    """Slots are taken by three that go on and on; a long prompt is left while it is computed, others while queued."""
    return [
        *(completion(f"holder-{n}", 100, ENDLESS, 80 + n, leave_last=True) for n in range(3)),
        completion("prefilling", 35_000, 4, 70, stream=True, leave_after_seconds=0.5),
        completion("holder-3", 100, ENDLESS, 83, stream=True, leave_last=True),
        *(completion(f"queued-{n}", 100, 50, 90 + n, stream=True, leave_after_seconds=0.3) for n in range(4)),
        *(completion(f"queued-whole-{n}", 100, 50, 95 + n, leave_after_seconds=0.5) for n in range(2)),
    ]


def wrong() -> list[Call]:
    """What vLLM refuses: no such model, no sensible value, too long, no body at all; before and in a stream."""
    return [
        completion("no-model", 10, 4, 1, model="nobody"),
        completion("no-value", 10, 4, 2, temperature=-1.0),
        completion("no-value-streamed", 10, 4, 3, temperature=-1.0, stream=True),
        completion("too-long", 41_000, 4, 4),
        completion("late-wrong", 10, 4, 5, logit_bias={"99999999": 1.0}),
        chat("no-role", "moda", 4, messages=[{"content": "x"}]),
        Call("no-body", CHAT, {}),
        Call("no-prompt", COMPLETIONS, {"model": MODEL_NAME}),
    ]


def burst() -> list[Call]:
    """More at once than may be queued."""
    return [completion(f"burst-{n}", 64, 60, 200 + n, stream=n % 2 == 0) for n in range(2 * QUEUED)]


def drive(server: VllmServer, recorded: Recorder) -> Run:
    """Sends all of it and waits until nothing more is recorded."""
    url, one_by_one = server.url, [completion(f"alone-{n}", 50, 10, 300 + n, stream=True) for n in range(40)]
    alone = send_alone(url, one_by_one, server.process_id)
    seen = [
        *alone,
        *send(url, ordinary(), 12, spread_seconds=4.0),
        *send(url, special(), 8),
        *send(url, impatient(), 16, spread_seconds=0.2),
        *send(url, wrong(), 2),
        *send(url, burst(), 1000),
    ]
    expected = sum(len(each.outcomes) for each in seen)
    run = Run(seen, alone, recorded)
    deadline = time.monotonic() + 20
    while sum(map(len, run.records().values())) < expected and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(3)  # whatever comes twice would come by now
    return run


def differences(run: Run) -> dict[str, tuple[list[str], list[str]]]:
    """Requests whose records do not have the outcomes that their client saw."""
    records = run.records()
    found = {}
    for each in run.seen:
        outcomes = sorted(str(record.attributes[OUTCOME]) for record in records.pop(each.call.name, []))
        if outcomes != each.outcomes:
            found[each.call.name] = (each.outcomes, outcomes)
    found.update({name: ([], [str(each.attributes) for each in rest]) for name, rest in records.items()})
    return found


@pytest.fixture(scope="module")
def run(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One server, all clients."""
    folder = tmp_path_factory.mktemp("edge")
    with recorder() as sink, server(vllm_python, folder, sink, ("--middleware", MIDDLEWARE)) as running:
        yield drive(running, sink)


def test_every_request_of_every_client_is_recorded_with_its_outcome_and_none_twice(run: Run) -> None:
    assert differences(run) == {}, differences(run)
    counts = Counter(outcome for each in run.seen for outcome in each.outcomes)
    recorded = Counter(r.attributes[OUTCOME] for records in run.records().values() for r in records)
    assert recorded == counts
    assert all(counts[outcome] for outcome in ("stop", "length", "abort", "rejected", "invalid"))
    assert counts["abort"] >= 10


def test_status_route_tenant_and_disconnection_are_the_clients(run: Run) -> None:
    records = run.records()
    for each in run.seen:
        for record in records[each.call.name]:
            assert record.attributes["http_route"] == each.call.route
            assert record.attributes["tenant"] == each.call.tenant
            assert record.attributes.get("http_status") == each.status
            assert record.attributes["client_disconnected"] is each.left, each
            assert record.error is (each.answer is not None and each.answer >= 500)


def test_refused_requests_say_which_limit_refused_them(run: Run) -> None:
    rejected = [record for record in run.recorded.named(EDGE) if record.attributes[OUTCOME] == "rejected"]
    assert rejected
    assert {record.attributes["admission_rejection"] for record in rejected} == {"max_num_queued_reqs"}


def test_the_first_byte_is_timed_as_the_client_saw_it(run: Run) -> None:
    records = run.records()
    unexplained = []
    for each in run.alone:
        (record,) = records[each.call.name]
        assert each.first_byte_seconds is not None
        late = each.first_byte_seconds - record.attributes["time_to_first_byte_nanoseconds"] / 1e9
        assert late >= 0, "no client has a byte before it is sent"
        unexplained.append(late - each.scheduling_seconds)
    assert statistics.median(unexplained) <= 0.005, unexplained
    for each in run.seen:
        for record in records[each.call.name]:
            first = record.attributes.get("time_to_first_byte_nanoseconds")
            assert record.attributes["http_duration_nanoseconds"] / 1e9 <= each.duration_seconds + 0.5
            if first is not None and each.first_byte_seconds is not None:
                assert first / 1e9 <= each.first_byte_seconds


def test_what_vllm_reports_too_is_reported_alike(run: Run) -> None:
    stock = {str(span.attributes["gen_ai.request.id"]): span for span in run.recorded.named(STOCK)}
    compared = 0
    for record in run.recorded.named(FRONTEND):
        theirs = stock.get(str(record.attributes["gen_ai.request.id"]))
        if theirs is None or record.attributes["gen_ai.request.n"] > 1:
            continue
        compared += 1
        assert record.start_ns == theirs.start_ns
        assert record.attributes["request_duration_nanoseconds"] == pytest.approx(
            theirs.attributes["gen_ai.latency.e2e"] * 1e9, abs=1000
        )
        if "time_to_first_token_nanoseconds" in record.attributes:
            assert record.attributes["time_to_first_token_nanoseconds"] == pytest.approx(
                theirs.attributes["gen_ai.latency.time_to_first_token"] * 1e9, abs=1000
            )
    assert compared >= 100


def test_a_disconnection_reaches_vllm_as_soon_as_without_the_middleware(run: Run) -> None:
    """Nothing runs on for nobody: the engine's part ends with the HTTP part."""
    left = [record for record in run.recorded.named(FRONTEND) if record.attributes[OUTCOME] == "abort"]
    assert len(left) >= 10
    for record in left:
        engine, http = (record.attributes[f"{name}_duration_nanoseconds"] / 1e9 for name in ("request", "http"))
        assert engine <= http + 0.5


@pytest.mark.slow
def test_two_api_servers_lose_and_double_nothing(vllm_python: str, tmp_path: Path) -> None:
    arguments = ("--middleware", MIDDLEWARE, "--api-server-count", "2")
    # Made before the interpreter is wrapped.
    build_model(vllm_python, ROOT / ".cache" / MODEL_NAME)
    with recorder() as sink, server(as_vllm_serve(vllm_python, tmp_path), tmp_path, sink, arguments) as running:
        run = drive(running, sink)
        assert differences(run) == {}, differences(run)
        assert len({span.resource["vllm.process_id"] for span in sink.named(STOCK)}) == 2, "both had requests"


@pytest.mark.slow
def test_without_the_middleware_refusals_are_still_counted_and_once(vllm_python: str, tmp_path: Path) -> None:
    with recorder() as sink, server(vllm_python, tmp_path, sink, ()) as running:
        staying = [call for call in special() if call.leave_after_pieces is None]
        seen = send(running.url, [*staying, *burst()], 1000)
        page = httpx.get(running.url + "/metrics").text
        theirs = sum(
            float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith("vllm:") and "admission" in line and "reject" in line and "_created" not in line
        )
        refused = sum(each.answer == 503 for each in seen)
        assert refused == theirs > 0
        wait_until(lambda: len(sink.named(EDGE)) >= refused, "refusals are missing", 20)
        time.sleep(3)  # whatever comes twice would come by now
    edge = sink.named(EDGE)
    assert len(edge) == refused
    assert {record.attributes["admission_rejection"] for record in edge} == {"max_num_queued_reqs"}
    assert {record.attributes["http_status"] for record in edge} == {503}
    assert not any("http_route" in record.attributes for record in sink.named(FRONTEND))
    expected = Counter(reason for each in seen if each.answer == 200 for reason in each.outcomes)
    assert Counter(record.attributes[OUTCOME] for record in sink.named(FRONTEND)) == expected
