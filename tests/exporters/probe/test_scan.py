"""Who stopped a scan, and whom it passed over: on stand-ins of schedulers, as before and since vLLM 0.31."""

from __future__ import annotations

from collections import deque
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_slo.exporters.probe import blocked
from vllm_slo.exporters.probe.life import Life
from vllm_slo.exporters.probe.scan import Scan
from vllm_slo.exporters.probe.versions import VERSIONS

OLD, NEW, NEWEST = VERSIONS[1], VERSIONS[3], VERSIONS[4]


class Pause(Enum):
    UNPAUSED = 0
    PAUSED_NEW = 1


class Fifo(deque[Any]):
    """vLLM's first-come queue."""

    def peek_request(self) -> Any:
        return self[0]


def request(name: str, status: str = "WAITING", **more: Any) -> Any:
    values = {
        "request_id": name,
        "status": SimpleNamespace(name=status),
        "num_stale_output_tokens": 0,
        "is_prefill_chunk": False,
        "drop_stale_output": False,
        "lora_request": None,
        "has_encoder_inputs": False,
        "num_tokens": 100,
        "num_computed_tokens": 0,
    }
    return SimpleNamespace(**{**values, **more})


def scheduler(**more: Any) -> Any:
    values = {
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=256, enable_chunked_prefill=True),
        "vllm_config": SimpleNamespace(speculative_config=None),
        "max_num_scheduled_tokens": 256,
        "max_num_running_reqs": 4,
        "max_num_active_reqs": 4,
        "num_waiting_for_streaming_input": 0,
        "num_spec_tokens": 0,
        "block_size": 16,
        "num_prefill_lookahead": 0,
        "prefill_capacity_bound": False,
        "_pause_state": Pause.UNPAUSED,
        "running": [],
        "waiting": Fifo(),
        "skipped_waiting": Fifo(),
        "kv_holding_waiting": Fifo(),
        "deferred_waiting": [],
        "lora_config": None,
        "connector": None,
        "ec_connector": None,
        "kv_cache_manager": SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: 100)),
    }
    return SimpleNamespace(**{**values, **more})


def test_since_0_31_a_request_passed_over_now_is_one_that_joined_the_passed_over() -> None:
    s = scheduler(connector=object())
    scan = looking(s, NEW)
    skipped, head = request("skipped"), request("head")
    scan.handled(s, skipped, True)
    scan.handled(s, head, True)
    s.deferred_waiting.append(skipped)
    s.waiting += [skipped, head]
    found, stopped = scan.passed_over(s, {})
    assert [(one.request_id, why) for one, why in found] == [("skipped", "kv_transfer"), ("head", None)]
    assert stopped is head


def test_since_0_31_the_last_one_looked_at_may_have_been_passed_over() -> None:
    s = scheduler(connector=object())
    scan = looking(s, NEW)
    last = request("last")
    scan.handled(s, last, True)
    s.deferred_waiting.append(last)
    s.waiting.append(last)
    assert scan.passed_over(s, {}) == ([(last, "kv_transfer")], None)


def test_up_to_0_30_a_request_passed_over_has_changed_its_queue() -> None:
    s = scheduler(connector=object())
    scan = looking(s, OLD)
    skipped, head = request("skipped"), request("head")
    s.waiting += [skipped, head]
    scan.selected(s, s.waiting)
    s.skipped_waiting.append(s.waiting.popleft())
    scan.selected(s, s.waiting)
    found, stopped = scan.passed_over(s, {})
    assert [(one.request_id, why) for one, why in found] == [("skipped", "kv_transfer"), ("head", None)]
    assert stopped is head
    scan.selected(s, None)
    assert len(scan.looked) == 2


@pytest.mark.parametrize("row", [OLD, NEW])
def test_outside_of_a_scan_nobody_is_looked_at(row: Any) -> None:
    s = scheduler()
    s.waiting.append(request("one"))
    scan = Scan(s, row)
    scan.selected(s, s.waiting)
    scan.handled(s, request("one"), True)
    assert scan.looked == []
    scan.begin(s, False)
    scan.handled(s, request("one"), True)
    assert len(scan.looked) == 1


def free_blocks(number: int) -> Any:
    return SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: number))


def test_a_connector_that_still_does_not_know_is_not_a_lack_of_blocks() -> None:
    s = scheduler(connector=object())
    scan, last = looking(s, NEW), request("last")
    s.deferred_waiting.append(last)
    s.waiting.append(last)
    scan.handled(s, last, True)
    assert scan.passed_over(s, {}) == ([(last, "kv_transfer")], None)
    s.kv_cache_manager = free_blocks(6)
    assert scan.passed_over(s, {}) == ([(last, None)], last)


@pytest.mark.parametrize(("row", "why"), [(NEW, None), (NEWEST, "encoder")])
def test_since_0_33_the_scan_goes_on_behind_an_encoder_input_that_does_not_fit(row: Any, why: str | None) -> None:
    s = scheduler()
    scan, picture = looking(s, row), request("picture", has_encoder_inputs=True)
    s.deferred_waiting.append(picture)
    scan.handled(s, picture, True)
    assert scan.passed_over(s, {})[0] == [(picture, why)]


def test_since_0_33_the_scan_goes_on_where_a_chunk_would_be_too_short_to_draft_from() -> None:
    s = scheduler(num_prefill_lookahead=2)
    scan, one = looking(s, NEWEST), request("one")
    scan.handled(s, one, True)
    s.deferred_waiting.append(one)
    assert scan.passed_over(s, {}) == ([(one, "prefill_lookahead")], None)


def test_whoever_is_deferred_waits_for_no_budget_though_the_scan_did_not_come_to_it() -> None:
    s = scheduler()
    held = request("held", "WAITING_FOR_REMOTE_KVS")
    s.kv_holding_waiting.append(held)
    s.deferred_waiting.append(held)
    assert looking(s, NEW).stopped_by(s, 256, 1, len(s.waiting) + 1, 0, None) == blocked.NOTHING
    s.waiting.append(request("behind"))
    assert looking(s, NEW).stopped_by(s, 256, 1, len(s.waiting) + 1, 0, None) == blocked.TOKEN_BUDGET


def test_whoever_is_no_longer_deferred_waits_like_the_rest() -> None:
    s = scheduler(kv_cache_manager=free_blocks(2))
    one = request("one")
    s.waiting.append(one)
    s.deferred_waiting.append(one)
    scan = looking(s, NEW)
    scan.handled(s, one, True)
    found, stopped = scan.passed_over(s, {})
    assert (found, stopped) == ([(one, None)], one)
    assert scan.stopped_by(s, 100, 1, 1, 0, stopped) == blocked.KV_BLOCKS


def looking(s: Any, row: Any, throttled: bool = False) -> Scan:
    scan = Scan(s, row)
    scan.begin(s, throttled)
    return scan


class TestPrefillInterval:
    """Prefills are held back where vLLM itself would hold them back."""

    decoding = request("decoding")

    def reason(self, s: Any, throttled: bool = False) -> int:
        one = request("one")
        s.waiting.append(one)
        scan = looking(s, NEWEST, throttled)
        return scan.stopped_by(s, 100, 1, 1, 0, one)

    def test_of_a_data_parallel_engine(self) -> None:
        assert self.reason(scheduler(running=[self.decoding]), throttled=True) == blocked.PREFILL_INTERVAL

    def test_nobody_decodes_who_could_be_disturbed(self) -> None:
        assert self.reason(scheduler(running=[]), throttled=True) == blocked.KV_BLOCKS
        chunk = request("chunk", is_prefill_chunk=True)
        assert self.reason(scheduler(running=[chunk]), throttled=True) == blocked.KV_BLOCKS

    def test_the_queue_is_too_long_to_hold_back(self) -> None:
        s = scheduler(running=[self.decoding], prefill_capacity_bound=True)
        assert self.reason(s, throttled=True) == blocked.KV_BLOCKS

    @pytest.mark.parametrize(
        ("executed", "why"), [(12, blocked.PREFILL_INTERVAL), (13, blocked.KV_BLOCKS), (40, blocked.KV_BLOCKS)]
    )
    def test_since_0_33_an_engine_has_one_of_its_own(self, executed: int, why: int) -> None:
        s = scheduler(
            running=[self.decoding], local_prefill_interval=4, num_executed_steps=executed, last_prefill_step=10
        )
        assert self.reason(s) == why


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ("WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR", "grammar"),
        ("WAITING_FOR_REMOTE_KVS", "kv_transfer"),
        ("WAITING_FOR_STREAMING_REQ", "streaming"),
    ],
)
@pytest.mark.parametrize("row", [OLD, NEW])
def test_a_status_that_may_not_run_is_the_reason(row: Any, status: str, why: str) -> None:
    s = scheduler()
    scan = looking(s, row)
    one = request("one", status)
    s.waiting.append(one)
    if row is OLD:
        scan.selected(s, s.waiting)
    else:
        scan.handled(s, one, False)
    assert scan.passed_over(s, {}) == ([(one, why)], None)


def test_output_of_before_a_preemption_is_a_reason() -> None:
    s = scheduler()
    scan = looking(s, NEW)
    one = request("one", "PREEMPTED", num_stale_output_tokens=3)
    scan.handled(s, one, True)
    assert scan.passed_over(s, {}) == ([(one, "stale_output")], None)


def test_an_adapter_is_a_reason_only_where_all_places_are_taken() -> None:
    def adapter(number: int) -> Any:
        return SimpleNamespace(lora_int_id=number)

    s = scheduler(lora_config=SimpleNamespace(max_loras=1))
    scan = looking(s, NEW)
    one = request("one", lora_request=adapter(2))
    scan.handled(s, one, True)
    assert scan.passed_over(s, {}) == ([(one, None)], one)
    s.running.append(request("other", lora_request=adapter(1)))
    assert scan.passed_over(s, {"other": 1}) == ([(one, "lora")], None)
    # Not in this step, it has its place only since 0.33.
    assert scan.passed_over(s, {}) == ([(one, None)], one)
    newest = looking(s, NEWEST)
    newest.handled(s, one, True)
    assert newest.passed_over(s, {}) == ([(one, "lora")], None)


def test_whoever_was_scheduled_was_not_passed_over() -> None:
    s = scheduler()
    scan = looking(s, NEW)
    scan.handled(s, request("one"), True)
    assert scan.passed_over(s, {"one": 100}) == ([], None)


def stopped_by(
    s: Any, tokens: int, stopped: Any = None, sequences: int = 1, waiting: int = 1, **scan_state: Any
) -> int:
    scan = Scan(s, NEW)
    for name, value in scan_state.items():
        setattr(scan, name, value)
    return scan.stopped_by(s, tokens, sequences, waiting, 0, stopped)


def test_limits_stop_a_scan() -> None:
    assert stopped_by(scheduler(), 256) == blocked.TOKEN_BUDGET
    assert stopped_by(scheduler(running=[1, 2, 3, 4]), 100) == blocked.SEQUENCE_CAP
    assert stopped_by(scheduler(running=[1, 2, 3], num_waiting_for_streaming_input=1), 100) == blocked.SEQUENCE_CAP
    assert stopped_by(scheduler(_pause_state=Pause.PAUSED_NEW), 100) == blocked.PAUSED
    assert stopped_by(scheduler(), 100, preempted=True) == blocked.KV_BLOCKS
    assert stopped_by(scheduler(), 256, waiting=0) == blocked.NOTHING


def test_places_of_drafts_count_in_the_budget_of_inputs() -> None:
    s = scheduler(vllm_config=SimpleNamespace(speculative_config=SimpleNamespace(max_num_new_slots_for_drafting=3)))
    assert stopped_by(s, 200, sequences=17) == blocked.KV_BLOCKS
    assert stopped_by(s, 200, sequences=18) == blocked.TOKEN_BUDGET


def test_a_request_that_every_limit_leaves_room_for_lacks_blocks_or_something_of_its_own() -> None:
    text, picture = request("text"), request("picture", has_encoder_inputs=True)
    assert stopped_by(scheduler(), 100, text) == blocked.KV_BLOCKS
    assert stopped_by(scheduler(), 100, picture) == blocked.ENCODER
    none_free = SimpleNamespace(block_pool=SimpleNamespace(get_num_free_blocks=lambda: 2))
    assert stopped_by(scheduler(kv_cache_manager=none_free), 100, picture) == blocked.KV_BLOCKS
    whole = SimpleNamespace(max_num_batched_tokens=256, enable_chunked_prefill=False)
    assert stopped_by(scheduler(scheduler_config=whole), 200, text) == blocked.TOKEN_BUDGET
    assert stopped_by(scheduler(num_spec_tokens=3), 253, text) == blocked.TOKEN_BUDGET


def test_the_head_is_the_first_that_is_not_deferred() -> None:
    s = scheduler()
    scan = Scan(s, NEW)
    lives = {name: Life(name, 1) for name in ("grammar", "first", "second")}
    lives["grammar"].deferred_reason = "grammar"
    s.waiting += [request("grammar"), request("first"), request("second")]
    assert scan.head(s, None, lives) is lives["first"]
    assert scan.head(s, request("second"), lives) is lives["second"]
    s.kv_holding_waiting.append(request("unknown"))
    assert scan.head(s, None, lives) is lives["first"]
    assert scan.head(scheduler(), None, lives) is None
