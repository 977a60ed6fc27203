"""When the record of a request is sent: both ends known, or the later one late, or never there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from vllm_slo.exporters.probe import link as links
from vllm_slo.exporters.probe.http_request import HttpRequest
from vllm_slo.exporters.probe.link import CURRENT, WAIT_SECONDS, Link
from vllm_slo.exporters.probe.spans import SpanData


class Engine:
    """An engine request."""

    def __init__(self) -> None:
        self.http: HttpRequest | None = None
        self.ended = False
        self.sent = False

    def span(self) -> SpanData:
        raise NotImplementedError


class World:
    """A link with its clock and its timer in the test's hand; ``sent`` is what it put."""

    def __init__(self, limit: int = links.LIMIT) -> None:
        self.sent: list[object] = []
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.link = Link(self.sent.append, self._later, lambda: self.now, limit)

    def _later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append((self.now + seconds, callback))

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= end]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now = max(self.now, first[0])
            first[1]()
        self.now = end

    def request(self, http: HttpRequest | None) -> Engine:
        """An engine request added in a task of this HTTP request."""
        side = Engine()
        token = CURRENT.set(http)
        self.link.engine_started(side)
        CURRENT.reset(token)
        return side


def test_without_the_middleware_a_record_is_sent_when_the_engine_is_done() -> None:
    world = World()
    side = world.request(None)
    assert world.sent == []
    world.link.engine_ended(side)
    assert world.sent == [side]
    assert world.timers == []


def test_a_record_waits_for_the_last_byte() -> None:
    world = World()
    http = HttpRequest("/v1/completions")
    side = world.request(http)
    world.link.engine_ended(side)
    assert world.sent == []
    http.status = 200
    world.link.http_ended(http)
    assert world.sent == [side]
    world.pass_time(60)
    assert world.sent == [side]
    assert len(world.link) == 0


def test_a_client_that_goes_first_waits_for_the_engine_as_long_as_that_takes() -> None:
    world = World()
    http = HttpRequest("/v1/responses")
    side = world.request(http)
    world.link.http_ended(http)
    world.pass_time(3600)
    assert world.sent == []
    world.link.engine_ended(side)
    assert world.sent == [side]
    assert side.http is http


def test_a_response_that_never_ends_holds_a_record_no_longer_than_the_limit() -> None:
    world = World()
    http = HttpRequest("/v1/completions")
    side = world.request(http)
    world.link.engine_ended(side)
    world.pass_time(WAIT_SECONDS - 0.01)
    assert world.sent == []
    world.pass_time(0.02)
    assert world.sent == [side]
    world.link.http_ended(http)
    assert world.sent == [side], "the end that comes later does not send it again"


def test_all_engine_requests_of_one_response_are_sent_with_it() -> None:
    world = World()
    http = HttpRequest("/v1/completions")
    sides = [world.request(http) for _ in range(3)]
    for side in sides:
        world.link.engine_ended(side)
    assert world.sent == []
    world.link.http_ended(http)
    assert world.sent == sides


def test_a_refused_request_is_a_record_of_its_own_at_once() -> None:
    world = World()
    http = HttpRequest("/v1/completions")
    http.status = 503
    world.link.http_ended(http)
    assert world.sent == [http]


def test_a_refused_request_that_has_reached_the_engine_is_no_record_of_its_own() -> None:
    world = World()
    http = HttpRequest("/v1/completions")
    side = world.request(http)
    http.status = 503
    world.link.engine_ended(side)
    world.link.http_ended(http)
    assert world.sent == [side]


def test_a_client_that_left_before_the_engine_knew_of_it_is_counted_a_little_later() -> None:
    world = World()
    http = HttpRequest("/v1/completions")
    http.client_disconnected = True
    world.link.http_ended(http)
    assert world.sent == []
    world.pass_time(WAIT_SECONDS + 0.01)
    assert world.sent == [http]


def test_an_engine_request_that_starts_after_its_response_is_not_counted_twice() -> None:
    world = World()
    http = HttpRequest("/v1/responses")
    http.status = 200
    world.link.http_ended(http)
    side = world.request(http)
    world.pass_time(60)
    world.link.engine_ended(side)
    assert world.sent == [side]


def test_a_good_answer_without_the_engine_is_no_record() -> None:
    world = World()
    http = HttpRequest("/v1/completions")
    http.status = 200
    world.link.http_ended(http)
    world.pass_time(60)
    assert world.sent == []
    assert len(world.link) == 0


def test_what_waits_is_bounded_and_nothing_is_lost_by_that() -> None:
    world = World(limit=10)
    for _ in range(100):
        world.link.engine_ended(world.request(HttpRequest("/v1/completions")))
        assert len(world.link) <= 10
    assert len(world.sent) == 90
    world.pass_time(60)
    assert len(world.sent) == 100
    assert len(world.link) == 0


def test_one_timer_serves_all_that_wait() -> None:
    world = World()
    for _ in range(50):
        world.link.engine_ended(world.request(HttpRequest("/v1/completions")))
        world.now += 0.001
    assert len(world.timers) == 1
    world.pass_time(10)
    assert len(world.sent) == 50
    assert world.timers == []


def test_an_http_request_lets_go_of_its_engine_requests_when_it_ends() -> None:
    world = World()
    http = HttpRequest("/v1/completions")
    side = world.request(http)
    world.link.engine_ended(side)
    world.link.http_ended(http)
    assert http.engine_sides == []


def test_the_end_of_the_process_sends_what_waits() -> None:
    world = World()
    side = world.request(HttpRequest("/v1/completions"))
    world.link.engine_ended(side)
    world.link.flush()
    assert world.sent == [side]


def test_tasks_of_a_handler_are_linked_to_its_request_and_to_no_other() -> None:
    link = Link([].append)
    sides: list[Engine] = []

    async def start() -> None:
        await asyncio.sleep(0)
        side = Engine()
        link.engine_started(side)
        sides.append(side)

    async def handler(http: HttpRequest | None) -> None:
        CURRENT.set(http)
        await asyncio.create_task(start())
        async with asyncio.TaskGroup() as group:
            group.create_task(start())

    async def server(requests: list[HttpRequest | None]) -> None:
        await asyncio.gather(*(handler(http) for http in requests))

    requests = [HttpRequest("/v1/completions"), None, HttpRequest("/v1/completions")]
    asyncio.run(server(requests))
    assert [side.http for side in sides].count(None) == 2
    for http in (requests[0], requests[2]):
        assert http is not None
        assert len(http.engine_sides) == 2


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, None), (400, "invalid"), (404, "invalid"), (429, "rejected"), (500, "failed"), (503, "rejected")],
)
def test_the_status_tells_how_a_request_without_the_engine_ended(status: int, outcome: str | None) -> None:
    http = HttpRequest("/v1/completions")
    http.status = status
    assert http.outcome() == outcome
    assert http.error == (status >= 500)
