"""The outbox: bounded, never in the way whatever the receiver does, counted, whole after a fork and at the end."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from receiving import receiving, spans_of
from vllm_slo.exporters.probe import outbox as module
from vllm_slo.exporters.probe.outbox import EXPORT_THREAD, OncePerMinute, Outbox
from vllm_slo.exporters.probe.settings import Settings
from vllm_slo.exporters.probe.spans import SpanData, sender

QUICK = {"VLLM_SLO_EXPORT_INTERVAL_SECONDS": "0.05"}
SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
START = 1_790_000_000_000_000_000


@dataclass
class Item:
    """A record of one number."""

    number: int

    def span(self) -> SpanData:
        return SpanData("vllm_slo.engine_request", START, START + 1, {"n": self.number}, None, f"r-{self.number}")


@dataclass
class Broken:
    """A record of which no span can be made."""

    def span(self) -> SpanData:
        raise ValueError("broken")


@dataclass
class Fake:
    """An exporter that does as told: ``accept`` says whether it takes what is sent; it hangs while ``hang`` is set."""

    accept: bool = True
    batch: int = 512
    sent: list[list[int]] = field(default_factory=list)
    hang: threading.Event = field(default_factory=threading.Event)
    closed: threading.Event = field(default_factory=threading.Event)

    def send(self, records: Sequence[SpanData]) -> bool:
        self.sent.append([record.attributes["n"] for record in records])
        if self.hang.is_set():
            self.closed.wait(30)
            return False
        return self.accept

    def close(self) -> None:
        self.closed.set()


def settings(**more: str) -> Settings:
    return Settings.from_environment({**QUICK, **more})


def until(met: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def boxes() -> Iterator[Callable[..., Outbox]]:
    """Makes outboxes and closes them at the end."""
    made: list[Outbox] = []

    def make(exporter: Fake, **more: str) -> Outbox:
        made.append(Outbox(settings(**more), lambda: exporter))
        return made[-1]

    yield make
    for box in made:
        box.close(0.2)


def test_everything_put_arrives_once_in_order_and_in_batches(boxes: Callable[..., Outbox]) -> None:
    fake = Fake(batch=50)
    box = boxes(fake)
    for number in range(1000):
        box.put(Item(number))
    until(lambda: box.exported == 1000)
    assert [number for batch in fake.sent for number in batch] == list(range(1000))
    assert max(map(len, fake.sent)) == 50
    assert (box.dropped, box.failed, len(box)) == (0, 0, 0)


def test_when_the_queue_is_full_records_are_dropped_and_counted_and_the_oldest_kept(
    boxes: Callable[..., Outbox],
) -> None:
    fake = Fake()
    fake.hang.set()
    box = boxes(fake, VLLM_SLO_QUEUE_SIZE="100")
    box.put(Item(0))
    until(lambda: fake.sent)
    for number in range(1, 301):
        box.put(Item(number))
    assert (box.dropped, len(box)) == (200, 101)
    assert box.lost == 200


def test_putting_takes_no_time_while_the_receiver_hangs(boxes: Callable[..., Outbox]) -> None:
    fake = Fake()
    fake.hang.set()
    box = boxes(fake, VLLM_SLO_QUEUE_SIZE="1000")
    box.put(Item(0))
    until(lambda: fake.sent)
    item, began = Item(1), time.perf_counter()
    for _ in range(10_000):
        box.put(item)
    assert time.perf_counter() - began < 0.1, "10 us each on a busy machine; 0.2 us on an idle one"


def test_a_batch_that_is_refused_is_tried_again_and_arrives_once(
    boxes: Callable[..., Outbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_BACKOFF_SECONDS", 0.05)
    fake = Fake(accept=False)
    box = boxes(fake)
    box.put(Item(0))
    until(lambda: len(fake.sent) >= 3)
    box.put(Item(1))
    fake.accept = True
    until(lambda: box.exported == 2)
    assert fake.sent[-1] == [1]
    assert {tuple(batch) for batch in fake.sent[:-1]} == {(0,)}, "what comes later waits in the queue"
    assert box.lost == 0


def test_a_batch_that_is_refused_for_too_long_is_counted_as_failed_and_the_next_one_gets_its_turn(
    boxes: Callable[..., Outbox], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LONGEST_BACKOFF_SECONDS", 0.05)
    monkeypatch.setattr(module, "GIVE_UP_SECONDS", 0.2)
    fake = Fake(accept=False)
    box = boxes(fake)
    box.put(Item(0))
    until(lambda: box.failed == 1)
    box.put(Item(1))
    until(lambda: fake.sent[-1] == [1])
    told = [line for line in caplog.messages if "does not take" in line]
    assert len(told) == 1, "a line a minute"


def test_a_record_of_which_no_span_can_be_made_costs_its_neighbours_nothing(boxes: Callable[..., Outbox]) -> None:
    fake = Fake()
    box = boxes(fake)
    for each in (Broken(), Item(1), Broken(), Item(2)):
        box.put(each)
    until(lambda: box.exported == 2)
    assert fake.sent == [[1, 2]]
    assert box.failed == 2


def test_an_exporter_that_raises_is_one_that_refuses(boxes: Callable[..., Outbox]) -> None:
    fake = Fake()
    fake.send = lambda records: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    box = boxes(fake)
    box.put(Item(0))
    time.sleep(0.2)
    box.close(0.5)
    assert (box.exported, box.failed) == (0, 1)


def test_an_exporter_that_cannot_be_made_switches_the_outbox_off_loudly(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Fake:
        raise ImportError("no grpc")

    box = Outbox(settings(), fail)
    box.put(Item(0))
    until(lambda: box.lost == 1)
    box.put(Item(1))
    assert box.lost == 2
    assert any("no grpc" in message for message in caplog.messages)


def test_the_work_of_each_second_goes_on_while_the_receiver_hangs_and_one_failure_stops_no_other(
    boxes: Callable[..., Outbox],
) -> None:
    fake, calls = Fake(), []
    fake.hang.set()
    box = boxes(fake)
    box.every_second += [lambda: 1 / 0, lambda: calls.append(time.monotonic())]
    box.put(Item(0))
    until(lambda: len(calls) == 3)
    assert fake.sent == [[0]], "it hangs"
    assert box.errors == 3
    gaps = [later - earlier for earlier, later in itertools.pairwise(calls)]
    assert all(0.5 < gap < 3 for gap in gaps)


def test_close_sends_what_waits(boxes: Callable[..., Outbox]) -> None:
    fake = Fake(batch=10)
    box = boxes(fake, VLLM_SLO_EXPORT_INTERVAL_SECONDS="60")
    for number in range(35):
        box.put(Item(number))
    box.close(2)
    assert box.exported == 35
    assert fake.closed.is_set()
    box.put(Item(99))
    assert (box.exported, box.dropped) == (35, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == EXPORT_THREAD]


def test_close_is_over_in_its_time_when_the_receiver_hangs_and_what_is_lost_is_counted(
    boxes: Callable[..., Outbox],
) -> None:
    fake = Fake(batch=10)
    fake.hang.set()
    box = boxes(fake)
    for number in range(35):
        box.put(Item(number))
    until(lambda: fake.sent)
    began = time.monotonic()
    box.close(1)
    assert time.monotonic() - began < 1.5
    assert (box.exported, box.failed) == (0, 35)


def test_memory_is_bounded_by_the_size_of_the_queue(boxes: Callable[..., Outbox]) -> None:
    fake = Fake()
    fake.hang.set()
    box = boxes(fake, VLLM_SLO_QUEUE_SIZE="1000")
    box.put(Item(0))
    until(lambda: fake.sent)
    for number in range(1000):
        box.put(Item(number))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(50_000):
            box.put(Item(number))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 50_000
    assert box.dropped == 50_000


def test_a_forked_child_sends_its_own_records_and_none_of_its_parents(tmp_path: Path) -> None:
    # A process of its own: the child of a fork ends without running this process's tests again.
    code = f"""
import os, sys, time
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from test_outbox import Fake, Item, settings
from vllm_slo.exporters.probe.outbox import Outbox
fake = Fake()
box = Outbox(settings(VLLM_SLO_EXPORT_INTERVAL_SECONDS="0.5"), lambda: fake)
for number in range(5):
    box.put(Item(number))
if os.fork() == 0:
    assert len(box) == 0
    box.put(Item(100))
    box.close()
    print("child", fake.sent, box.exported, flush=True)
    os._exit(0)
os.wait()
box.close()
print("parent", fake.sent, box.exported)
"""
    done = _python(code)
    assert done.stdout.splitlines() == ["child [[100]] 1", "parent [[0, 1, 2, 3, 4]] 5"], done.stderr


@pytest.mark.parametrize("method", ["exit", "fork", "spawn"])
def test_what_waits_is_sent_when_the_process_ends(tmp_path: Path, method: str) -> None:
    script = tmp_path / "ending.py"
    script.write_text(
        f"""
import multiprocessing, sys, time
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from test_outbox import Item, settings
from vllm_slo.exporters.probe.outbox import Outbox
from vllm_slo.exporters.probe.spans import sender

def work():
    global box
    own = settings(VLLM_SLO_OTLP_ENDPOINT=sys.argv[1], VLLM_SLO_EXPORT_INTERVAL_SECONDS="60")
    box = Outbox(own, sender(own, None, "engine_core"))
    for number in range(7):
        box.put(Item(number))
    while box._exporter is None:  # gRPC cannot be imported once the interpreter ends
        time.sleep(0.01)

if __name__ == "__main__":
    if {method!r} == "exit":
        work()
    else:
        child = multiprocessing.get_context({method!r}).Process(target=work)
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""
    )
    with receiving(tmp_path) as running:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, str(script), f"http://{running.grpc_address}"],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert time.monotonic() - began < 20
        assert sum(len(spans_of(body)) for body in running.spooled()) == 7, done.stderr


@pytest.mark.parametrize("kind", ["refuses", "hangs"])
def test_a_receiver_that_is_away_costs_one_line_a_minute_and_close_its_time(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if kind == "hangs":
            listening.listen()
        own = settings(VLLM_SLO_OTLP_ENDPOINT=f"http://127.0.0.1:{listening.getsockname()[1]}")
        box = Outbox(own, sender(own, None, "engine_core"))
        for number in range(2000):
            box.put(Item(number))
        time.sleep(3.5)
        box.put(Item(0))
        began = time.monotonic()
        box.close(2)
        assert time.monotonic() - began < 2.5
    assert (box.exported, box.lost) == (0, 2001)
    assert len([each for each in caplog.records if each.name.startswith("opentelemetry")]) <= 1
    assert len([each for each in caplog.records if "does not take" in each.getMessage()]) <= 1


@contextmanager
def receiver_on(port: int) -> Iterator[list[bytes]]:
    """A receiver on a given port that keeps the bodies."""
    bodies: list[bytes] = []

    def export(body: bytes, context: grpc.ServicerContext) -> bytes:
        bodies.append(body)
        return b""

    handler = grpc.method_handlers_generic_handler(SERVICE, {"Export": grpc.unary_unary_rpc_method_handler(export)})
    server = grpc.server(ThreadPoolExecutor(1), handlers=(handler,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield bodies
    finally:
        server.stop(None).wait()


def test_a_receiver_that_comes_back_gets_everything() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = settings(VLLM_SLO_OTLP_ENDPOINT=f"http://127.0.0.1:{port}")
    box = Outbox(own, sender(own, None, "engine_core"))
    try:
        for number in range(700):
            box.put(Item(number))
        time.sleep(1.5)
        assert box.exported == 0
        with receiver_on(port) as bodies:
            until(lambda: box.exported == 700, 30)
        found = [span.attributes[0].value.int_value for body in bodies for span in spans_of(body)]
        assert found == list(range(700))
        assert box.lost == 0
    finally:
        box.close(1)


def test_only_the_lines_of_the_probes_own_thread_are_limited() -> None:
    now = [0.0]
    limit = OncePerMinute("mine", lambda: now[0])

    def line(thread: str) -> logging.LogRecord:
        record = logging.LogRecord("opentelemetry", logging.ERROR, "", 0, "", (), None)
        record.threadName = thread
        return record

    assert [bool(limit.filter(line("mine"))) for _ in range(3)] == [True, False, False]
    assert all(limit.filter(line("BatchSpanProcessor")) for _ in range(3))
    now[0] = 61.0
    assert limit.filter(line("mine"))


def _python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
