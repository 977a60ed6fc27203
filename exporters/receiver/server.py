"""The receiver as a whole: spool, intake and both doors, started and stopped in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from vllm_slo.exporters.otlp.decoded import Decoder, DecodeSettings
from vllm_slo.exporters.receiver import tally as counts
from vllm_slo.exporters.receiver.grpc_edge import GrpcEdge
from vllm_slo.exporters.receiver.http_edge import HttpEdge, application
from vllm_slo.exporters.receiver.intake import Intake, Preparation
from vllm_slo.exporters.receiver.metrics import FsyncTimes, ReceiverCollector
from vllm_slo.exporters.receiver.settings import ReceiverSettings
from vllm_slo.exporters.receiver.spool import Spool
from vllm_slo.exporters.receiver.tally import Tally

_GRACE_SECONDS = 2.0


class Receiver:
    """Takes spans into ``spool`` from ``start`` to ``stop``; ``tally`` counts them, ``registry`` shows the counts.

    ``committed_time`` gives the epoch second of the last commit to the lake, for the metrics.
    """

    def __init__(
        self,
        settings: ReceiverSettings,
        spool: Spool,
        decode: Decoder,
        decode_settings: DecodeSettings,
        json_to_protobuf: Preparation,
        tally: Tally,
        registry: CollectorRegistry,
        committed_time: Callable[[], float | None] = lambda: None,
    ) -> None:
        settings.check()
        self._settings = settings
        self._spool = spool
        fsync = FsyncTimes()
        self.intake = Intake(spool, decode, decode_settings, settings.limits, tally, observe_fsync=fsync.observe)
        ReceiverCollector(tally, spool, self.intake, fsync, committed_time).register(registry)
        for name, count in (
            (counts.TORN_TAILS, spool.torn_tails),
            (counts.TORN_BYTES, spool.torn_bytes),
            (counts.DAMAGED_RECORDS, spool.damaged_records),
            (counts.SEGMENTS_QUARANTINED, spool.quarantined),
        ):
            tally.add(name, "", count)
        self._grpc = GrpcEdge(settings, self.intake) if settings.grpc is not None else None
        self._http = (
            HttpEdge(
                settings,
                application(
                    self.intake,
                    settings.limits,
                    settings.token,
                    json_to_protobuf,
                    lambda: generate_latest(registry),
                ),
                self.intake,
            )
            if settings.http is not None
            else None
        )

    @property
    def grpc_port(self) -> int:
        """Where gRPC listens; 0 when it does not."""
        return self._grpc.port if self._grpc else 0

    @property
    def http_port(self) -> int:
        """Where HTTP listens; 0 when it does not."""
        return self._http.port if self._http else 0

    async def start(self) -> None:
        """Open both doors, that of ``/healthz`` last. Raises ReceiverError when an address cannot be had."""
        self.intake.start()
        try:
            if self._grpc:
                await self._grpc.start()
            if self._http:
                await self._http.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Close the doors, answer whoever waits, seal the open segment."""
        self.intake.turn_away()
        if self._grpc:
            await self._grpc.stop(_GRACE_SECONDS)
        if self._http:
            await self._http.stop()
        await asyncio.to_thread(self.intake.stop)
