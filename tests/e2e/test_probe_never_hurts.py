"""A real vLLM serves on, and says the same words, whatever goes wrong in the probe or behind it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from e2e.moody_receiver import MoodyReceiver, moody_receiver
from e2e.probe_server import ROOT, probe_environment, serve_with_probe
from e2e.product import free_port, wait_until
from e2e.vllm_server import MODEL_NAME, VllmServer
from vllm_slo.exporters import records

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SITES = Path(__file__).parent / "sites"
MIDDLEWARE = ("--middleware", "vllm_slo.exporters.probe.edge.Middleware")
GRACE = ("--shutdown-timeout", "4")
"""Without it vLLM kills its engine core right after the SIGTERM, before anything can be sent. The interval is 3 s."""
QUEUE_SIZE = 40
Server = TypeVar("Server")
TRACEPARENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}


def ask(url: str, number: int, prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    """The answer to one completion; fails unless it is a whole one."""
    tokens = random.Random(number).choices(range(2, 1024), k=prompt)
    body = {
        "model": MODEL_NAME,
        "prompt": tokens,
        "max_tokens": completion,
        "ignore_eos": True,
        "temperature": 0,
        **more,
    }
    response = httpx.post(f"{url}/v1/completions", json=body, headers=TRACEPARENT, timeout=120)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["completion_tokens"] == completion * more.get("n", 1)
    assert isinstance(answer, dict)
    return answer


def stream(url: str, number: int, prompt: int, completion: int, give_up: bool = False) -> None:
    """One streamed completion, whole, or left after its first piece."""
    tokens = random.Random(number).choices(range(2, 1024), k=prompt)
    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    body = {"model": MODEL_NAME, "prompt": tokens, "max_tokens": completion, **options}
    usage = None
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line.removeprefix("data: "))
                assert "error" not in piece, piece
                usage = piece.get("usage") or usage
                if give_up:
                    return
    assert usage is not None
    assert usage["completion_tokens"] == completion


def load(url: str, seed: int) -> None:
    """40 requests of every kind, six at a time; every one must be answered in full, but those whose client leaves."""
    sizes = random.Random(seed)
    kinds: list[Callable[[int, int, int], object]] = [
        lambda number, prompt, completion: ask(url, number, prompt, completion),
        lambda number, prompt, completion: ask(url, number, prompt, completion, n=2, temperature=0.9),
        lambda number, prompt, completion: stream(url, number, prompt, completion),
        lambda number, prompt, completion: stream(url, number, prompt, completion + 200, give_up=True),
    ]
    with ThreadPoolExecutor(6) as pool:
        waiting = [
            pool.submit(kinds[number % 4], seed + number, sizes.choice((3, 40, 700, 1500)), sizes.randint(1, 12))
            for number in range(40)
        ]
        for each in waiting:
            each.result()
    assert httpx.get(f"{url}/health", timeout=10).status_code == 200


def flood(url: str) -> None:
    """More at once than the server takes and than its blocks hold: each is answered in full or refused."""
    options = {"model": MODEL_NAME, "max_tokens": 300, "ignore_eos": True}
    bodies = [{**options, "prompt": random.Random(number).choices(range(2, 1024), k=40)} for number in range(40)]
    with ThreadPoolExecutor(40) as pool, httpx.Client(timeout=120, limits=httpx.Limits(max_connections=40)) as client:
        sent = [pool.submit(client.post, f"{url}/v1/completions", json=body) for body in bodies]
        answers = [each.result() for each in sent]
    assert {answer.status_code for answer in answers} == {200, 503}
    lengths = {answer.json()["usage"]["completion_tokens"] for answer in answers if answer.status_code == 200}
    assert lengths == {300}


def words(url: str) -> list[Any]:
    """What the server says to prompts sent one at a time: text and the logarithm of each token's probability."""
    shapes = ((1, 5), (30, 20), (33, 8), (500, 16), (2100, 6), (3, 40))
    answers = [ask(url, number, *shape, logprobs=2) for number, shape in enumerate(shapes)]
    return [(answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) for answer in answers]


def lines(server: VllmServer, text: str) -> list[str]:
    """Lines of the server's log that say so."""
    return [line for line in server.log.read_text(errors="replace").splitlines() if text in line]


class OneAtATime:
    """The server that runs now; another one is started only when it has ended."""

    def __init__(self) -> None:
        self._running: tuple[str, Any] | None = None
        self._end = ExitStack()

    def get(self, name: str, start: Callable[[], AbstractContextManager[Server]]) -> Server:
        """The server of this name, started unless it runs."""
        if self._running is None or self._running[0] != name:
            self.stop()
            self._running = name, self._end.enter_context(start())
        server: Server = self._running[1]
        return server

    def stop(self) -> None:
        """Ends what runs."""
        self._end.close()
        self._running = None


@pytest.fixture(scope="module")
def servers() -> Iterator[OneAtATime]:
    servers = OneAtATime()
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def unknown(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[str]]:
    """A server of a version that the probe does not know: its words and what it logged of the probe."""
    folder = tmp_path_factory.mktemp("unknown")
    with serve_with_probe(vllm_python, folder, site=[SITES / "future"], arguments=MIDDLEWARE) as server:
        said = words(server.url)
        load(server.url, 1)
        return said, lines(server, "vllm-slo")


@pytest.fixture(scope="module")
def said_without(unknown: tuple[list[Any], list[str]]) -> list[Any]:
    return unknown[0]


def test_a_version_that_nobody_knows_is_served_without_the_probe_and_the_log_says_so(
    unknown: tuple[list[Any], list[str]],
) -> None:
    told = [line for line in unknown[1] if "the probe is off: vLLM 0.99.0 is none of the versions it knows" in line]
    assert any("(APIServer" in line or "(EngineCore" in line for line in told if "WARNING" in line)


Moody = tuple[VllmServer, MoodyReceiver]


@contextmanager
def moody_server(python: str, folder: Path) -> Iterator[Moody]:
    """A server with the whole probe, whose receiver is the one that vLLM's own option names."""
    environment = {
        "VLLM_SLO_QUEUE_SIZE": str(QUEUE_SIZE),
        "VLLM_SLO_EXPORT_INTERVAL_SECONDS": "3",
        "VLLM_SLO_METRICS_PORT": str(free_port()),
    }
    with moody_receiver() as receiver:
        endpoint = receiver.endpoint
        with serve_with_probe(
            python, folder, otlp_endpoint=endpoint, arguments=(*MIDDLEWARE, *GRACE), environment=environment
        ) as server:
            yield server, receiver


@pytest.fixture
def moody(servers: OneAtATime, vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Moody:
    return servers.get("moody", lambda: moody_server(vllm_python, tmp_path_factory.mktemp("moody")))


def test_the_server_says_the_same_words_with_and_without_the_probe(said_without: list[Any], moody: Moody) -> None:
    server, receiver = moody
    assert words(server.url) == said_without
    for name in (records.ENGINE_REQUEST, records.FRONTEND_REQUEST):
        wait_until(lambda name=name: len(receiver.records(name)) == len(said_without), f"no {name}", 20)  # type: ignore[misc]
    assert {record["gen_ai.usage.prompt_tokens"] for record in receiver.records(records.ENGINE_REQUEST)} == {
        1,
        30,
        33,
        500,
        2100,
        3,
    }


def test_stock_spans_of_a_server_with_the_probe_say_that_there_is_one(moody: Moody) -> None:
    server, receiver = moody
    # Its own tracing obeys the client's flag, so not the one that `ask` sends: not sampled.
    stream(server.url, 1, 10, 2)
    wait_until(lambda: receiver.records("llm_request"), "no span of vLLM itself")
    assert all(record.get(records.PROBE_VERSION) for record in receiver.records("llm_request"))


@pytest.mark.parametrize("mood", ["hanging", "refusing", "gone"])
def test_no_request_fails_whatever_the_receiver_does(moody: Moody, mood: str) -> None:
    server, receiver = moody
    receiver.be(mood)
    load(server.url, 100)
    if mood != "gone":
        wait_until(lambda: receiver.calls.get(mood), f"nothing was sent to a receiver that was {mood}", 30)


def test_what_was_dropped_meanwhile_is_counted_and_records_arrive_again(
    moody: Moody,
) -> None:
    server, receiver = moody
    receiver.be("accepting")
    before = len(receiver.records(records.ENGINE_REQUEST))
    dropped = "vllm_slo.probe_dropped_total"

    def counted() -> bool:
        samples = receiver.records(records.ENGINE_SAMPLE)
        return any(sample.get(dropped, 0) > 0 for sample in samples)

    wait_until(counted, "no sample says that records were dropped", 40)
    ask(server.url, 5, 20, 3)
    wait_until(lambda: len(receiver.records(records.ENGINE_REQUEST)) > before, "no record came any more", 40)


def test_the_log_is_not_flooded_by_a_receiver_that_is_away(moody: Moody) -> None:
    server, _ = moody
    assert len(lines(server, "vllm-slo")) < 30
    assert not lines(server, "Traceback")


def test_what_waits_is_sent_when_the_server_is_stopped(servers: OneAtATime, moody: Moody) -> None:
    server, receiver = moody
    asked = [f"last-{number}" for number in range(5)]
    for request_id in asked:
        ask(server.url, 6, 10, 2, request_id=request_id)
    began = time.monotonic()
    servers.stop()
    assert time.monotonic() - began < 15
    for name in (records.ENGINE_REQUEST, records.FRONTEND_REQUEST):
        ids = [record.get("gen_ai.request.id", "") for record in receiver.records(name)]
        assert [request_id for request_id in ids if "last-" in request_id] == [f"cmpl-{each}-0" for each in asked], name


Poisoned = tuple[VllmServer, Path, Path]


@contextmanager
def poisoned_server(python: str, folder: Path) -> Iterator[Poisoned]:
    """A server in whose probe all that is guarded raises on demand, that can write nowhere, and whose port is taken.

    It has so few blocks that requests are preempted, and so short a queue that they can be refused.
    """
    mode, log = folder / "mode", folder / "poison"
    mode.write_text("off")
    log.touch()
    with moody_receiver() as receiver:
        environment = {
            "POISON_MODE": str(mode),
            "POISON_LOG": str(log),
            "VLLM_SLO_STEP_LOG": "/dev/full",
            "VLLM_SLO_RUNTIME_DIR": str(log / "below-a-file"),
            "VLLM_SLO_METRICS_PORT": str(receiver.port),
            "VLLM_SLO_OTLP_ENDPOINT": receiver.endpoint,
            "VLLM_SERVER_DEV_MODE": "1",
        }
        limits = ("--max-model-len", "2304", "--num-gpu-blocks-override", "75", "--max-num-queued-reqs", "20")
        with serve_with_probe(
            python, folder, site=[SITES / "poison"], arguments=(*MIDDLEWARE, *limits), environment=environment
        ) as server:
            yield server, mode, log


@pytest.fixture
def poisoned(servers: OneAtATime, vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Poisoned:
    return servers.get("poisoned", lambda: poisoned_server(vllm_python, tmp_path_factory.mktemp("poisoned")))


def test_no_request_fails_on_a_full_disk_an_unwritable_folder_and_a_taken_port(
    poisoned: Poisoned, said_without: list[Any]
) -> None:
    server, _, _ = poisoned
    assert words(server.url) == said_without
    load(server.url, 200)


@pytest.mark.parametrize("mode", ["sometimes", "always"])
def test_no_request_fails_when_every_hook_raises(poisoned: Poisoned, said_without: list[Any], mode: str) -> None:
    server, switch, _ = poisoned
    switch.write_text(mode)
    time.sleep(0.5)
    load(server.url, 300)
    assert words(server.url) == said_without
    flood(server.url)
    for action in ("pause", "resume"):
        assert httpx.post(f"{server.url}/{action}", timeout=30).status_code == 200
    ask(server.url, 1, 10, 2)
    if mode == "sometimes":  # steps fast enough that one of them takes the sample of a second
        ask(server.url, 2, 10, 800)


def test_every_hook_of_the_probe_did_raise(poisoned: Poisoned) -> None:
    _, _, log = poisoned
    noted = [line.split(" ", 1) for line in log.read_text().splitlines()]
    made = {name for what, name in noted if what == "made"}
    raised = {name for what, name in noted if what == "raised"}
    assert len(made) > 10
    at_start = {name for name in made if name.startswith("plugin.") or name == "engine.start"}
    missing = made - raised - at_start - UNREACHABLE.keys()
    assert not missing, "hooks that this load does not reach; it must, or say why it cannot"


UNREACHABLE: dict[str, str] = {
    "stat_logger.sleep": "a CPU has no sleep mode",
    "frontend.propagate_error": "the engine would have to die",
    "engine.turn_ended": "no HTTP route streams a prompt into a running request",
}

_CASES: dict[str, tuple[dict[str, str], str]] = {
    "on": ({}, "off"),
    "told": ({"VLLM_SLO_PROBE": "0"}, "off"),
    "wrong": ({"VLLM_SLO_METRICS_PORT": "abc", "VLLM_SLO_QUEUE_SIZE": "many"}, "off"),
    "put in": ({}, "always"),
    "start": ({}, "engine.start"),
}
"""Name -> environment, and what raises."""

_EACH = """
import json, os, sys
import vllm.v1.engine.async_llm, vllm.v1.engine.core, vllm.v1.engine.llm_engine, vllm.v1.worker.worker_base
from schedulers import Engine, Shape, VirtualTime
from vllm.plugins import load_general_plugins
from vllm.v1.core.sched.scheduler import Scheduler
for name, (environment, mode) in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        open(os.environ["POISON_MODE"], "w").write(mode)
        os.environ.update(environment, POISON_LOG=os.environ["POISON_LOG"] + name)
        load_general_plugins()
        hooked = hasattr(Scheduler.schedule, "__wrapped__")
        engine = Engine(Shape(), VirtualTime())
        for _ in range(20):
            engine.add(100, 10)
        print(json.dumps([name, hooked, engine.run()]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


Started = tuple[dict[str, tuple[bool, int]], str, dict[str, set[str]]]


@pytest.fixture(scope="module")
def started(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """Processes with a real scheduler: case -> (whether it is hooked, steps), what all said, case -> poison's log."""
    folder = tmp_path_factory.mktemp("started")
    environment = probe_environment(folder)
    environment |= {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "PYTHONPATH": os.pathsep.join((str(SITES / "poison"), environment["PYTHONPATH"], str(ROOT / "benchmarks"))),
        "POISON_MODE": str(folder / "mode"),
        "POISON_LOG": str(folder / "poison "),
        "VLLM_SLO_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    command = [vllm_python, "-c", _EACH, json.dumps(_CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]
    noted = {log.name.removeprefix("poison "): set(log.read_text().splitlines()) for log in folder.glob("poison *")}
    return {name: (hooked, steps) for name, hooked, steps in lines}, done.stdout + done.stderr, noted


def test_the_probe_is_off_when_told_so_and_when_its_settings_are_wrong(started: Started) -> None:
    cases, said, _ = started
    assert {name: cases[name][0] for name in ("on", "told", "wrong")} == {"on": True, "told": False, "wrong": False}
    assert "VLLM_SLO_METRICS_PORT: 'abc' is not a port; write 1 to 65535, or 0 for none" in said
    assert "VLLM_SLO_QUEUE_SIZE: 'many'" in said


def test_a_probe_that_fails_when_it_is_put_in_or_when_the_engine_starts_lets_vllm_be(started: Started) -> None:
    cases, _, noted = started
    steps = cases["told"][1]
    assert steps > 10
    assert cases == {
        "on": (True, steps),
        "told": (False, steps),
        "wrong": (False, steps),
        "put in": (False, steps),
        "start": (True, steps),
    }
    at_start = {line.removeprefix("made ") for line in noted["put in"] if line.startswith("made plugin.")}
    assert len(at_start) > 2
    assert {f"raised {name}" for name in at_start if "__init__" not in name} <= noted["put in"]
    assert "raised engine.start" in noted["start"]
