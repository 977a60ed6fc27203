"""Whatever dies when: what was acknowledged is in the lake exactly once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from e2e.product import free_port
from e2e.spans import Request, body
from probe_spans import Request as ProbeRequest
from probe_spans import body as probe_body
from probe_spans import event, sample
from vllm_slo.analytics.lake import Lake
from vllm_slo.exporters.otlp import plain
from vllm_slo.exporters.otlp.decoded import DecodeSettings
from vllm_slo.exporters.receiver import segment
from vllm_slo.exporters.receiver.spool import Record, Spool

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
KILLS = 55
COME_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
QUICK = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.min_reconnect_backoff_ms", 50)]
QUICK += [("grpc.max_reconnect_backoff_ms", 100), ("grpc.enable_retries", 0)]

SpanKey = tuple[bytes, bytes]


class Receiver:
    """`vllm-slo up --no-app` as a process that can be killed."""

    def __init__(self, lake: Path, log: Path, *arguments: str) -> None:
        self.lake = lake
        self.grpc_port, self.http_port = free_port(), free_port()
        self._log = log
        self._arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns at once; it answers when it answers."""
        command = [sys.executable, "-m", "vllm_slo", "--lake", str(self.lake), "up", "--no-app"]
        command += ["--grpc", f"127.0.0.1:{self.grpc_port}", "--http", f"127.0.0.1:{self.http_port}", *self._arguments]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def wait_until_it_answers(self) -> None:
        """Fails when it does not within half a minute."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.http_port}/healthz", timeout=1).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.02)
        raise AssertionError(f"`up` does not answer; the end of its log:\n{self._log.read_text()[-3000:]}")

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        assert self.process.poll() is None, f"it ended by itself:\n{self._log.read_text()[-3000:]}"
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM; must end within seconds and well."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(20) == 0, self._log.read_text()[-3000:]

    def wait_until_drained(self, seconds: float = 60) -> None:
        """Returns when the lake has what the spool had."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.1)
            try:
                if all(p.stat().st_size <= segment.HEADER_BYTES for p in (self.lake / "spool").glob("*.seg")):
                    return
            except FileNotFoundError:
                pass
        raise AssertionError(f"the spool was not drained; the end of the log:\n{self._log.read_text()[-3000:]}")

    def metric(self, series: str) -> float:
        """One value of ``/metrics``; 0 when it is not there."""
        for line in httpx.get(f"http://127.0.0.1:{self.http_port}/metrics").text.splitlines():
            if line.startswith(f"vllm_slo_receiver_{series} "):
                return float(line.rpartition(" ")[2])
        return 0.0


@contextmanager
def receiver(lake: Path, log: Path, *arguments: str) -> Iterator[Receiver]:
    """A receiver, not started; killed at the end if it still runs."""
    found = Receiver(lake, log, *arguments)
    try:
        yield found
    finally:
        if found.process is not None and found.process.poll() is None:
            found.process.kill()
            found.process.wait()


NOW = time.time_ns()


def requests(count: int, name: str) -> bytes:
    """A body of ``count`` finished requests; the same name gives the same requests."""
    latencies = ("time_to_first_token", "e2e", "time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    attributes: dict[str, float | int] = {f"gen_ai.latency.{key}": 0.1 for key in latencies}
    attributes |= {"gen_ai.usage.prompt_tokens": 100, "gen_ai.usage.completion_tokens": 10}
    made = [Request(f"{name}-{n}", NOW - 1_000_000_000, NOW, attributes) for n in range(count)]
    return body(made, {"service.instance.id": "general-0", "service.name": "vllm"})


def keys(data: bytes) -> list[SpanKey]:
    """(trace id, span id) of every span of a body."""
    message = ExportTraceServiceRequest.FromString(data)
    return [
        (span.trace_id, span.span_id)
        for one in message.resource_spans
        for scope in one.scope_spans
        for span in scope.spans
    ]


@dataclass
class Sender:
    """A client that never gives a body up, sends some again though acknowledged, and keeps what it was told."""

    port: int
    name: str
    rng: random.Random
    acknowledged: list[SpanKey] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Send until told to end; the last body is sent until it is acknowledged."""
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", QUICK) as channel:
            export = channel.unary_unary(EXPORT)
            sent = 0
            while not self.ending.is_set():
                sent += 1
                data = self.body(sent)
                self._until_acknowledged(export, data)
                if self.rng.random() < 0.1:
                    self._until_acknowledged(export, data)

    def body(self, number: int) -> bytes:
        """What is sent as the n-th body."""
        return requests(self.rng.choice((1, 8, 60)), f"{self.name}-{number}")

    def _until_acknowledged(self, export: grpc.UnaryUnaryMultiCallable, data: bytes) -> None:
        while True:
            try:
                reply = export(data, timeout=10)
            except grpc.RpcError as error:
                self.failures[error.code().name] += 1
                if error.code() not in COME_AGAIN:
                    self.wrong.append(f"{error.code()}: {error.details()}")
                    return
                time.sleep(0.02)
            else:
                if reply != b"":
                    self.wrong.append(f"partial: {reply!r}")
                self.acknowledged.extend(keys(data))
                return


def in_lake(lake: Path, table: str = "requests") -> Counter[SpanKey]:
    """How often each span is in a table."""
    opened = Lake.open(lake, create=False)
    rows = opened.read(table, opened.data_files(table), ["trace_id", "span_id"])
    return Counter(zip(rows["trace_id"].to_pylist(), rows["span_id"].to_pylist(), strict=True))


def counted_in_rollups(lake: Path, level: str) -> int:
    """Requests that the rollups of a level count."""
    opened = Lake.open(lake, create=False)
    rows = opened.read("rollups", opened.data_files("rollups"), ["level", "metric", "count"]).to_pylist()
    return sum(row["count"] for row in rows if row["metric"] == "requests" and row["level"] == level)


def assert_exactly_once(lake: Path, acknowledged: list[SpanKey]) -> None:
    """Every acknowledged span is there, none twice, and the rollups count them all."""
    found = in_lake(lake)
    lost = set(acknowledged) - found.keys()
    assert not lost, f"{len(lost)} of {len(set(acknowledged))} acknowledged spans are not in the lake"
    twice = [key for key, count in found.items() if count > 1]
    assert not twice, f"{len(twice)} spans are in the lake more than once"
    for level in ("minute", "hour", "day"):
        assert counted_in_rollups(lake, level) == found.total()


def killed_and_restarted(up: Receiver, senders: Sequence[Sender], kills: int, rng: random.Random) -> int:
    """Kills the receiver again and again while all send; how often it answered in between. At the end it is stopped."""
    threads = [threading.Thread(target=sender.run) for sender in senders]
    for thread in threads:
        thread.start()
    answered = 0
    for kill in range(kills):
        up.start()
        if kill % 5 == 4:
            time.sleep(rng.uniform(0.0, 0.8))  # amid its start, recovery included
        else:
            up.wait_until_it_answers()
            answered += 1
            time.sleep(rng.expovariate(1 / 0.5) if kill % 10 else 2.5)  # at times long enough for a seal by age
        up.kill()
    up.start()
    up.wait_until_it_answers()
    for sender in senders:
        sender.ending.set()
    for thread in threads:
        thread.join(60)
    up.wait_until_drained()
    assert up.metric("spans_accepted_total") > 0
    up.stop()
    assert [wrong for sender in senders for wrong in sender.wrong] == []
    return answered


@pytest.mark.timeout(400)
def test_fifty_kills_under_load_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    senders = [Sender(0, f"s{n}", random.Random(n)) for n in range(3)]
    with receiver(tmp_path / "lake", tmp_path / "up.log") as up:
        for sender in senders:
            sender.port = up.grpc_port
        answered = killed_and_restarted(up, senders, KILLS, random.Random(20261130))
    acknowledged = [key for sender in senders for key in sender.acknowledged]
    assert sum(sender.failures.total() for sender in senders) > KILLS, "the kills were felt"
    assert answered >= 40
    assert len(set(acknowledged)) > 1000
    assert len(acknowledged) > len(set(acknowledged)), "some were sent again on purpose"
    assert_exactly_once(tmp_path / "lake", acknowledged)
    assert not (tmp_path / "lake" / "quarantine").exists()


class ProbeSender(Sender):
    """Sends one sort of the records of requests that others send the other sorts of, with samples among them."""

    def __init__(self, port: int, sort: str, seed: int) -> None:
        super().__init__(port, sort, random.Random(seed))
        self.sent: list[str] = []

    def body(self, number: int) -> bytes:
        """Records of a few requests; the same number gives the same requests to every sort."""
        made = []
        for request in probed(number):
            self.sent.append(request.name)
            made.append(getattr(request, self.name)())
        if self.name == "engine":
            made.append(sample(NOW + number * 10**9))
        return probe_body(made)


def probed(number: int) -> list[ProbeRequest]:
    """A few requests of a server with the probe; every seventh aborted."""
    return [
        ProbeRequest(
            f"cmpl-{number}-{place}",
            NOW - 10**9 + number * 1000,
            finish_reason="abort" if (number + place) % 7 == 0 else "stop",
        )
        for place in range(5)
    ]


def assert_requests_once(lake: Path, sent: Mapping[str, set[str]]) -> Counter[str | None]:
    """Every request counts once, no record is lost, the rollups agree; the marks of the rows."""
    opened = Lake.open(lake, create=False)
    rows = opened.read("requests", opened.data_files("requests")).to_pylist()
    found: dict[str, set[str]] = {}
    counted: Counter[str] = Counter()
    marks: Counter[str | None] = Counter()
    for row in rows:
        # A row that has values of the stock one leaves it in the table.
        words = row["records"].split("+")
        found.setdefault(row["request_id"], set()).update(words if words == ["stock"] else set(words) - {"stock"})
        marks[row["quality"]] += 1
        counted[row["request_id"]] += row["quality"] not in ("superseded", "late_record")
    wanted = {name: {*sorts, *(("edge",) if "frontend" in sorts else ())} for name, sorts in sent.items()}
    assert found == wanted
    assert set(counted.values()) == {1}, [name for name, count in counted.items() if count != 1][:5]
    rollups = opened.read("rollups", opened.data_files("rollups"), ["level", "metric", "quality", "count"]).to_pylist()
    for level in ("minute", "hour", "day"):
        summed: Counter[str | None] = Counter()
        for row in rollups:
            if row["level"] == level and row["metric"] == "requests":
                summed[row["quality"]] += row["count"]
        assert summed == marks
    return marks


@pytest.mark.timeout(400)
def test_kills_while_a_server_with_the_probe_sends_count_every_request_once(tmp_path: Path) -> None:
    senders = [ProbeSender(0, sort, seed) for seed, sort in enumerate(("engine", "frontend", "stock"))]
    with receiver(tmp_path / "lake", tmp_path / "up.log") as up:
        for sender in senders:
            sender.port = up.grpc_port
        killed_and_restarted(up, senders, 20, random.Random(20261201))
    sent: dict[str, set[str]] = {}
    for sender in senders:
        for name in sender.sent:
            sent.setdefault(name, set()).add(sender.name)
    assert len(sent) > 200
    marks = assert_requests_once(tmp_path / "lake", sent)
    assert marks["superseded"] > 0
    assert marks[None] + marks["unfinished"] > 0.5 * len(sent), "most were merged"
    samples = [key for sender in senders if sender.name == "engine" for key in sender.acknowledged]
    opened = Lake.open(tmp_path / "lake", create=False)
    times = opened.read("engine_samples", opened.data_files("engine_samples"), ["time"])["time"].to_pylist()
    assert len(times) == len(set(times))
    assert len(times) == len(set(samples)) - len({name for name in sent if "engine" in sent[name]})


def test_a_clean_stop_leaves_nothing_in_the_spool(tmp_path: Path) -> None:
    with receiver(tmp_path / "lake", tmp_path / "up.log") as up:
        up.start()
        up.wait_until_it_answers()
        data = requests(30, "stop")
        with grpc.insecure_channel(f"127.0.0.1:{up.grpc_port}") as channel:
            channel.unary_unary(EXPORT)(data, timeout=10)
        start = time.monotonic()
        up.stop()
        assert time.monotonic() - start < 10
    assert_exactly_once(tmp_path / "lake", keys(data))
    assert all(path.stat().st_size <= segment.HEADER_BYTES for path in (tmp_path / "lake" / "spool").glob("*.seg"))


def test_a_second_receiver_on_the_same_lake_is_refused_with_the_cure(tmp_path: Path) -> None:
    with (
        receiver(tmp_path / "lake", tmp_path / "first.log") as first,
        receiver(tmp_path / "lake", tmp_path / "second.log") as second,
    ):
        first.start()
        first.wait_until_it_answers()
        second.start()
        assert second.process is not None
        assert second.process.wait(20) == 1
        assert "owns this spool" in (tmp_path / "second.log").read_text()
        first.stop()


def test_the_same_spans_in_other_batches_from_another_process_are_known(tmp_path: Path) -> None:
    first = [requests(10, f"batch{n}") for n in range(30)]
    whole = ExportTraceServiceRequest.FromString(b"".join(first))
    spans = [span for one in whole.resource_spans for scope in one.scope_spans for span in scope.spans]
    random.Random(1).shuffle(spans)
    again = []
    for start in range(0, len(spans), 37):
        message = ExportTraceServiceRequest()
        one = message.resource_spans.add(resource=whole.resource_spans[0].resource)
        one.scope_spans.add(scope=whole.resource_spans[0].scope_spans[0].scope, spans=spans[start : start + 37])
        again.append(message.SerializeToString())
    for number, data in enumerate(again):
        (tmp_path / f"{number}.bin").write_bytes(data)
    code = (
        "import sys, httpx\n"
        "for path in sys.argv[2:]:\n"
        "    headers = {'content-type': 'application/x-protobuf'}\n"
        "    httpx.post(sys.argv[1], content=open(path, 'rb').read(), headers=headers).raise_for_status()\n"
    )
    with receiver(tmp_path / "lake", tmp_path / "up.log") as up:
        up.start()
        up.wait_until_it_answers()
        with grpc.insecure_channel(f"127.0.0.1:{up.grpc_port}") as channel:
            for data in first:
                channel.unary_unary(EXPORT)(data, timeout=10)
        url = f"http://127.0.0.1:{up.http_port}/v1/traces"
        files = [str(path) for path in tmp_path.glob("*.bin")]
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, url, *files], check=True, timeout=60)
        up.wait_until_drained()
        assert up.metric("spans_duplicate_total") == len(spans)
        up.stop()
    assert_exactly_once(tmp_path / "lake", [key for data in first for key in keys(data)])


def died_between_commits(folder: Path, commits: Sequence[int]) -> None:
    """Drains a spool in processes that die after so many commits each; the last one lives."""
    command = [sys.executable, str(Path(__file__).with_name("dying_drain.py")), folder / "lake", folder / "spool"]
    died, committed = 0, []
    for count in (*commits, 0):
        arguments = [*map(str, command), str(count)]
        run = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
        committed += run.stdout.split()
        if run.returncode == 0:
            break
        assert run.returncode == 9, run.stderr
        died += 1
    assert run.returncode == 0
    assert died >= 6, f"it died between commits: {committed}"


def test_death_after_any_commit_of_records_torn_over_segments_is_made_good(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool")
    every = [request for number in range(6) for request in probed(number)]
    chance = random.Random(5)
    made = [(request, sort) for request in every for sort in ("engine", "frontend", "stock")]
    chance.shuffle(made)
    for at in range(0, len(made), 18):
        records = [getattr(request, sort)() for request, sort in made[at : at + 18]]
        again = [getattr(request, sort)() for request, sort in made[max(at - 4, 0) : at]]
        more = [sample(NOW + at * 10**9), sample(NOW), event(NOW, "started"), event(NOW + at, "changed")]
        spool.append([Record(time.time_ns(), probe_body([*records, *again, *more]))])
        spool.seal()
    spool.close()
    died_between_commits(tmp_path, [1] * 30)
    sent = {request.name: {"engine", "frontend", "stock"} for request in every}
    marks = assert_requests_once(tmp_path / "lake", sent)
    aborted = sum(request.finish_reason == "abort" for request in every)
    assert marks == {None: len(every) - aborted, "unfinished": aborted, "superseded": len(every)}
    opened = Lake.open(tmp_path / "lake", create=False)
    for table, count in (("engine_samples", 5), ("events", 6)):
        assert sum(file.rows for file in opened.data_files(table)) == count


def test_death_between_the_commits_of_two_tables_is_made_good(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool")
    mixed = ExportTraceServiceRequest.FromString(requests(20, "mixed"))
    for span in mixed.resource_spans[0].scope_spans[0].spans[::2]:
        span.name = "http"
        del span.attributes[:]
    bodies = [requests(20, "a"), mixed.SerializeToString(), requests(5, "a"), requests(20, "b")]
    for data in bodies:
        spool.append([Record(time.time_ns(), data)])
        spool.seal()
    spool.close()
    died_between_commits(tmp_path, (1, 1, 1, 2, *[1] * 8))
    found = in_lake(tmp_path / "lake") + in_lake(tmp_path / "lake", "spans")
    assert found == Counter(dict.fromkeys((key for data in bodies for key in keys(data)), 1))
    assert in_lake(tmp_path / "lake", "spans").total() == 10
    for level in ("minute", "hour", "day"):
        assert counted_in_rollups(tmp_path / "lake", level) == in_lake(tmp_path / "lake").total()


def test_a_spool_cut_anywhere_in_its_last_record_keeps_the_others(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool")
    first, last = requests(2, "first"), requests(1, "last")
    spool.append([Record(1, first)])
    whole = spool.open_bytes + segment.HEADER_BYTES
    spool.append([Record(2, last)])
    spool.close()
    data = (tmp_path / "spool" / "000000000001.seg").read_bytes()
    for cut in range(whole, len(data)):
        folder = tmp_path / f"cut{cut}" / "spool"
        folder.mkdir(parents=True)
        (folder / "000000000001.seg").write_bytes(data[:cut])
        again = Spool.open(folder)
        (record,) = again.read(1)
        assert plain.decode(record.body, record.received_ns, DecodeSettings()).rows == 2
        assert again.torn_tails == (cut > whole)
        again.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("margin_mib", [0, 6])
def test_a_full_disk_pushes_back_loses_nothing_and_recovers(tmp_path: Path, small_disk: Path, margin_mib: int) -> None:
    lake = small_disk / "lake"
    ballast = small_disk / "ballast"
    with receiver(lake, tmp_path / "up.log", "--free-space-mib", str(margin_mib)) as up:
        up.start()
        up.wait_until_it_answers()
        acknowledged: list[SpanKey] = []
        refused: list[bytes] = []
        with grpc.insecure_channel(f"127.0.0.1:{up.grpc_port}") as channel:
            export = channel.unary_unary(EXPORT)

            def accepted(data: bytes) -> bool:
                answer = export.future(data, timeout=10)
                if answer.exception() is None:
                    acknowledged.extend(keys(data))
                    return True
                assert answer.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "google.rpc.retryinfo-bin" in dict(answer.trailing_metadata())
                return False

            assert accepted(requests(1, "before"))
            room = os.statvfs(small_disk)
            ballast.write_bytes(bytes(room.f_bavail * room.f_frsize - (margin_mib << 20) - (1 << 20)))
            for number in range(400):
                data = requests(60, f"full{number}")
                if not accepted(data):
                    refused.append(data)
                if len(refused) >= 40:
                    break
            assert len(acknowledged) > 60
            assert len(refused) >= 40, "the disk never got full"
            time.sleep(1)
            assert up.metric("spool_bytes") > 0
            ballast.unlink()
            deadline = time.monotonic() + 30
            for data in refused:
                while not accepted(data):
                    assert time.monotonic() < deadline, "no recovery within 30 s"
                    time.sleep(0.2)
        up.wait_until_drained()
        up.stop()
    assert_exactly_once(lake, acknowledged)
    assert not (lake / "quarantine").exists()
