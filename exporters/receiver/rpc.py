"""The few protobuf messages of replies: google.rpc.Status, RetryInfo, ExportTraceServiceResponse."""

from __future__ import annotations

import math

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from vllm_slo.exporters.receiver.outcome import Accepted

INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND = 3, 4, 5
RESOURCE_EXHAUSTED, UNAVAILABLE, UNAUTHENTICATED = 8, 14, 16
"""google.rpc.Code"""


def response(accepted: Accepted) -> ExportTraceServiceResponse:
    """The OTLP reply; nothing is set in it on full success."""
    if not accepted.refused:
        return ExportTraceServiceResponse()
    return ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(
            rejected_spans=accepted.rejected_spans, error_message=accepted.message
        )
    )


def retry_info(seconds: float) -> RetryInfo:
    """How long a sender should wait."""
    fraction, whole = math.modf(seconds)
    return RetryInfo(retry_delay=Duration(seconds=int(whole), nanos=round(fraction * 1e9)))


def status(code: int, message: str, retry_seconds: float | None = None) -> Status:
    """A google.rpc.Status, with RetryInfo when a time to wait is given."""
    details = []
    if retry_seconds is not None:
        packed = Any()
        packed.Pack(retry_info(retry_seconds))
        details.append(packed)
    return Status(code=code, message=message, details=details)
