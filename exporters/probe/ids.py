"""Ids of spans and requests, pure: every process of a server derives the same ones from what it knows of a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?", re.ASCII | re.DOTALL)
_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}\Z", re.ASCII)
_CHILD = re.compile(r"[0-9]+_", re.ASCII)


def client_context(trace_headers: Mapping[str, str] | None) -> tuple[int, int] | None:
    """Trace id and span id of the client, by W3C Trace Context level 2; null when there are none or they are malformed.

    The sampled flag is not asked: a client that does not sample still has a request to account for.
    """
    if not trace_headers:
        return None
    text = trace_headers.get("traceparent")
    found = _TRACEPARENT.fullmatch(text.strip(" \t")) if isinstance(text, str) else None
    if found is None or found[1] == "ff" or (found[1] == "00" and found[4] is not None):
        return None
    trace, span = int(found[2], 16), int(found[3], 16)
    return (trace, span) if trace and span else None


def trace_id(trace_headers: Mapping[str, str] | None, engine_request_id: str, start_ns: int) -> int:
    """The client's trace id, else one of the request itself.

    The arrival (epoch ns, of which the microsecond counts) tells apart requests whose client sends one id again.
    """
    client = client_context(trace_headers)
    return client[0] if client else _derived(engine_request_id, start_ns, b"trace", 16)


def frontend_span_id(engine_request_id: str, start_ns: int) -> int:
    """Span id of the front end's record; its parent is the client's span."""
    return _derived(engine_request_id, start_ns, b"front end", 8)


def engine_span_id(engine_request_id: str, start_ns: int) -> int:
    """Span id of the engine core's record; its parent is the front end's."""
    return _derived(engine_request_id, start_ns, b"engine core", 8)


def external_id(engine_request_id: str, random_ids: bool = True) -> str:
    """vLLM's external request id (`gen_ai.request.id`) of an internal one.

    vLLM 0.29 to 0.33 append ``-`` and 8 hexadecimal digits, unless VLLM_DISABLE_REQUEST_ID_RANDOMIZATION is set, and
    put ``<index>_`` in front for the children of n > 1 (`InputProcessor.assign_request_id`, `ParentRequest`).
    An id of a client that begins with digits and an underscore itself cannot be told from a child's; those of the HTTP
    API begin with ``cmpl-``, ``chatcmpl-`` and the like.

    >>> external_id("1_cmpl-abc-0-9f86d081")
    'cmpl-abc-0'
    """
    whole = _RANDOM_SUFFIX.sub("", engine_request_id) if random_ids else engine_request_id
    child = _CHILD.match(whole)
    return whole[child.end() :] if child else whole


def child_index(engine_request_id: str) -> int | None:
    """Which of the n completions a request is; null for n = 1."""
    child = _CHILD.match(engine_request_id)
    return int(child[0][:-1]) if child else None


def _derived(engine_request_id: str, start_ns: int, what: bytes, size: int) -> int:
    text = f"{engine_request_id}@{start_ns // 1000}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=size, person=what).digest(), "big") or 1
