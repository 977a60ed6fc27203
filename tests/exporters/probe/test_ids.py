"""Ids that every process of a server derives alike, and those of vLLM and of the client."""

from __future__ import annotations

import string
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.exporters.probe import ids

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def parent(text: str) -> tuple[int, int] | None:
    return ids.client_context({"traceparent": text})


def test_a_clients_trace_context_is_read_whether_it_samples_or_not() -> None:
    expected = (int(TRACE, 16), int(SPAN, 16))
    assert parent(f"00-{TRACE}-{SPAN}-01") == expected
    assert parent(f"00-{TRACE}-{SPAN}-00") == expected
    assert parent(f" 00-{TRACE}-{SPAN}-03\t") == expected


def test_a_later_version_may_say_more_and_the_present_one_may_not() -> None:
    assert parent(f"01-{TRACE}-{SPAN}-01-more") == (int(TRACE, 16), int(SPAN, 16))
    assert parent(f"cc-{TRACE}-{SPAN}-01") is not None
    assert parent(f"00-{TRACE}-{SPAN}-01-more") is None
    assert parent(f"01-{TRACE}-{SPAN}-01more") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\n",
        f"0-{TRACE}-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
    ],
)
def test_malformed_trace_context_is_none(text: str) -> None:
    assert parent(text) is None


def test_what_is_no_header_at_all_is_none() -> None:
    assert ids.client_context(None) is None
    assert ids.client_context({}) is None
    assert ids.client_context({"tracestate": "a=b"}) is None
    assert ids.client_context({"traceparent": b"00"}) is None  # type: ignore[dict-item]


@given(st.text())
def test_no_text_makes_the_parser_fail(text: str) -> None:
    found = parent(text)
    assert found is None or (0 < found[0] < 1 << 128 and 0 < found[1] < 1 << 64)


def test_ids_are_the_same_in_every_process_and_differ_by_request_kind_and_arrival() -> None:
    code = (
        "from vllm_slo.exporters.probe.ids import *; r='cmpl-a-0-00112233'; s=1790000000000000000;"
        "print(trace_id(None, r, s), frontend_span_id(r, s), engine_span_id(r, s))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    request, start = "cmpl-a-0-00112233", 1_790_000_000_000_000_000
    here = (
        ids.trace_id(None, request, start),
        ids.frontend_span_id(request, start),
        ids.engine_span_id(request, start),
    )
    assert seen == {" ".join(map(str, here)) + "\n"}
    assert len({*here, *(each(request, start + 1000) for each in (ids.frontend_span_id, ids.engine_span_id))}) == 5
    assert ids.trace_id(None, request, start + 1000) != here[0], "a client may send one id again"
    assert ids.trace_id(None, request, start + 999) == here[0], "the microsecond counts, as in the tables"
    assert here[0] < 1 << 128
    assert max(here[1:]) < 1 << 64


def test_a_clients_trace_is_kept() -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
    assert ids.trace_id(headers, "cmpl-a-0-00112233", 5) == int(TRACE, 16)


def test_a_request_id_with_lone_surrogates_has_ids_too() -> None:
    assert ids.trace_id(None, "cmpl-\ud800", 5) > 0


@pytest.mark.parametrize(
    ("internal", "external", "child"),
    [
        ("cmpl-abc-0-9f86d081", "cmpl-abc-0", None),
        ("1_cmpl-abc-0-9f86d081", "cmpl-abc-0", 1),
        ("12_chatcmpl-x_y-9f86d081", "chatcmpl-x_y", 12),
        ("chatcmpl-deadbeef-9f86d081", "chatcmpl-deadbeef", None),
        ("cmpl-550e8400-e29b-41d4-a716-446655440000-0-00000000", "cmpl-550e8400-e29b-41d4-a716-446655440000-0", None),
        ("chatcmpl-0123456789abcdef0123456789abcdef", "chatcmpl-0123456789abcdef0123456789abcdef", None),
        ("cmpl-ABC-DEADBEEF", "cmpl-ABC-DEADBEEF", None),
        ("7-9f86d081", "7", None),
        ("9f86d081", "9f86d081", None),
        ("-9f86d081", "", None),
        ("cmpl-a\n-9f86d081", "cmpl-a\n", None),
        ("cmpl-a-9f86d081\n", "cmpl-a-9f86d081\n", None),
    ],
)
def test_the_external_id_is_what_the_client_knows(internal: str, external: str, child: int | None) -> None:
    assert ids.external_id(internal) == external
    assert ids.child_index(internal) == child


def test_without_random_suffixes_an_id_is_left_as_it_is_but_for_the_childs_index() -> None:
    assert ids.external_id("chatcmpl-a-deadbeef", random_ids=False) == "chatcmpl-a-deadbeef"
    assert ids.external_id("0_chatcmpl-a-deadbeef", random_ids=False) == "chatcmpl-a-deadbeef"


@given(st.text(string.printable), st.integers(0, 40), st.text("0123456789abcdef", min_size=8, max_size=8))
def test_what_vllm_makes_of_an_external_id_is_undone(text: str, index: int, suffix: str) -> None:
    external = f"cmpl-{text}"
    assert ids.external_id(f"{external}-{suffix}") == external
    assert ids.external_id(f"{index}_{external}-{suffix}") == external
