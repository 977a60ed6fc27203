"""Lives of requests on vLLM's own OutputProcessor with the front-end hooks in place, without an engine.

Runs under an interpreter that has vLLM, with `src` on the path; the argument is the folder of a tokenizer. Prints one
JSON object: by scenario the spans of the records that were sent, beside what vLLM itself says of the same requests.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine import output_processor as module
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats, PrefillStats

from vllm_slo.exporters.probe import frontend, link
from vllm_slo.exporters.probe.http_request import HttpRequest

TOKENIZER = AutoTokenizer.from_pretrained(sys.argv[1])
SENT: list[Any] = []
STOCK: list[dict[str, Any]] = []
"""Attributes of the spans that vLLM made."""

front = frontend.Frontend(link.Link(SENT.append))
frontend.wrap(OutputProcessor, front)
module.instrument_manual = lambda **named: STOCK.append({"start": named["start_time"], **named["attributes"]})


def processor(**options: Any) -> Any:
    return OutputProcessor(TOKENIZER, **{"log_stats": True, "tracing_enabled": True, **options})


def request(name: str, **options: Any) -> Any:
    """A request as the API server hands it to the processor."""
    chosen = {"n": 1, "max_tokens": 8, "temperature": 0.0, "top_p": 0.9, "output_kind": RequestOutputKind.DELTA}
    params = SamplingParams(**{**chosen, **options.pop("params", {})})
    return EngineCoreRequest(
        **{
            "request_id": f"{name}-0badcafe",
            "external_req_id": name,
            "prompt_token_ids": [5, 6, 7, 8],
            "mm_features": None,
            "sampling_params": params,
            "pooling_params": None,
            "arrival_time": time.time(),
            "lora_request": None,
            "cache_salt": None,
            "data_parallel_rank": None,
            **options,
        }
    )


def add(to: Any, one: Any, parent: Any = None, index: int = 0, queue: Any = None) -> Any:
    queue = queue or RequestOutputCollector(RequestOutputKind.DELTA, one.request_id)
    to.add_request(one, None, parent, index, queue)
    return one


def step(of: Any, one: Any, tokens: list[int], finish: Any = None, first: bool = False) -> Any:
    """One output of the engine core."""
    stats = PrefillStats(num_prompt_tokens=4, num_computed_tokens=3, num_cached_tokens=1) if first else None
    output = EngineCoreOutput(one.request_id, tokens, finish_reason=finish, prefill_stats=stats)
    iteration = IterationStats() if of.log_stats else None
    return of.process_outputs([output], time.monotonic(), iteration)


def finished() -> None:
    """Three tokens, then the limit."""
    of = processor()
    one = add(of, request("length", lora_request=LoRARequest("adapter", 1, "/nowhere"), priority=-3))
    time.sleep(0.02)
    step(of, one, [17], first=True)
    time.sleep(0.02)
    step(of, one, [18])
    step(of, one, [19], FinishReason.LENGTH)
    assert not of.abort_requests([one.request_id], internal=True), "what has ended is not aborted"


def stop_string() -> None:
    """The text stops where the engine core would go on."""
    of = processor()
    word = TOKENIZER.encode("banana", add_special_tokens=False)
    one = add(of, request("stopped", params={"stop": [TOKENIZER.decode(word)], "detokenize": True}))
    step(of, one, [200], first=True)
    assert step(of, one, word).reqs_to_abort == [one.request_id]


def aborted_by_the_client() -> None:
    """While queued, before the first token; and in the middle."""
    of = processor()
    queued = add(of, request("queued"))
    running = add(of, request("running"))
    step(of, running, [17], first=True)
    step(of, running, [18])
    time.sleep(0.02)
    of.abort_requests((name for name in [queued.request_id, running.request_id]), internal=True)


def aborted_by_an_operator() -> None:
    """By external id, which two requests share."""
    of = processor()
    add(of, request("shared", request_id="shared-0badcafe"))
    add(of, request("shared", request_id="shared-1badcafe"))
    of.abort_requests(["shared"], internal=False)


def aborted_by_the_engine() -> None:
    """Before anything was computed: vLLM's own first-token latency of such a request is none."""
    of = processor()
    step(of, add(of, request("paused")), [], FinishReason.ABORT)
    step(of, add(of, request("faulty")), [], FinishReason.ERROR)


def parallel() -> None:
    """n = 3: one finishes, the client leaves, the others are aborted through their parent."""
    of = processor()
    whole = request("three", params={"n": 3, "temperature": 0.7})
    parent = ParentRequest(whole)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, whole.request_id)
    children = []
    for index in range(3):
        name, params = parent.get_child_info(index)
        child = request("three", request_id=name, arrival_time=whole.arrival_time)
        child.sampling_params = params
        children.append(add(of, child, parent, index, queue))
    step(of, children[0], [17], FinishReason.STOP, first=True)
    of.abort_requests([whole.request_id], internal=True)


def engine_dead() -> None:
    """Whoever is in flight gets the error, and is aborted after that."""
    of = processor()
    one, two = add(of, request("dead-a")), add(of, request("dead-b"))
    step(of, two, [17], first=True)
    of.propagate_error(RuntimeError("the engine is dead"))
    of.abort_requests([one.request_id, two.request_id], internal=True)


def refused_on_arrival() -> None:
    """vLLM 0.33: a paused engine answers with an error, which is queued before the request is forgotten."""
    of = processor()
    for name, status in (("busy", 503), ("broken", 500)):
        one = request(name)
        queue = RequestOutputCollector(RequestOutputKind.DELTA, one.request_id)
        add(of, one, queue=queue)
        failure = RuntimeError(name)
        failure.status_code = status  # type: ignore[attr-defined]
        queue.put(failure)
        of._finish_request(of.request_states[one.request_id])


def streaming_input() -> None:
    """Two parts, then the end of the input: one record."""
    of = processor()
    one = request("session", resumable=True)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, one.request_id)
    add(of, one, queue=queue)
    step(of, one, [17], FinishReason.LENGTH, first=True)
    add(of, request("session", resumable=True), queue=queue)
    step(of, one, [18], FinishReason.LENGTH, first=True)
    assert not SENT
    add(of, request("session"), queue=queue)


def without_statistics() -> None:
    """--disable-log-stats: the first token is timed by the hook."""
    of = processor(log_stats=False, tracing_enabled=False)
    one = add(of, request("plain"))
    time.sleep(0.05)
    step(of, one, [17], first=True)
    time.sleep(0.02)
    step(of, one, [18, 19], FinishReason.STOP)
    of.abort_requests([add(of, request("gone")).request_id], internal=True)


def behind_the_middleware() -> None:
    """The HTTP side comes with it, and it waits for that."""
    of = processor()
    http = HttpRequest("/v1/completions", "client-id", "blue")
    token = link.CURRENT.set(http)
    one = add(of, request("linked"))
    link.CURRENT.reset(token)
    step(of, one, [17], first=True)
    front._link._later = lambda seconds, callback: None
    step(of, one, [18], FinishReason.STOP)
    assert not SENT
    http.status, http.first_byte_ns = 200, http.began_ns + 5_000_000
    http.end_ns = http.began_ns + 9_000_000
    front._link.http_ended(http)


def failing_hook() -> None:
    """A hook that always fails: vLLM goes on, and nothing is held."""
    of, link_ended = processor(), front._link.engine_ended
    for number in range(20):
        one = add(of, request(f"faulty-{number}"))
        front._link.engine_ended = None  # type: ignore[assignment,method-assign]
        assert not step(of, one, [17], FinishReason.STOP, first=True).reqs_to_abort
        assert not of.request_states
    front._link.engine_ended = link_ended  # type: ignore[method-assign]


def microseconds_a_request() -> float:
    """What the hooks take of the event loop for a request that begins and finishes."""
    like = module.RequestState.from_new_request(
        tokenizer=None,
        request=request("cost"),
        prompt=None,
        parent_req=None,
        request_index=0,
        queue=None,
        log_stats=True,
        stream_interval=1,
    )
    requests = [request(f"cost-{number}") for number in range(3000)]
    states = {one.request_id: SimpleNamespace(**{**vars(like), "request_id": one.request_id}) for one in requests}
    of, iteration = SimpleNamespace(request_states=states, log_stats=True), IterationStats()
    front = frontend.Frontend(link.Link(lambda record: None))
    began = time.perf_counter()
    for one in requests:
        front.added(of, one, None)
        front.finished(states[one.request_id], FinishReason.STOP, iteration)
    return (time.perf_counter() - began) / len(requests) * 1e6


SCENARIOS: tuple[Callable[[], None], ...] = (
    finished,
    stop_string,
    aborted_by_the_client,
    aborted_by_an_operator,
    aborted_by_the_engine,
    parallel,
    engine_dead,
    refused_on_arrival,
    streaming_input,
    without_statistics,
    behind_the_middleware,
    failing_hook,
)


def main() -> None:
    results = {}
    for scenario in SCENARIOS:
        SENT.clear()
        STOCK.clear()
        scenario()
        spans = [record.span() for record in SENT]
        results[scenario.__name__] = {
            "spans": [
                {"name": s.name, "start": s.start_ns, "end": s.end_ns, "error": s.error, **s.attributes} for s in spans
            ],
            "stock": list(STOCK),
            "left": len(front.in_flight),
            "states": sum(record.state is not None for record in SENT if hasattr(record, "state")),
        }
    print(json.dumps({"scenarios": results, "microseconds": microseconds_a_request()}))


main()
