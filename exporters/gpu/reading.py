"""What one look at a GPU gave: plain data that either source makes and the pages are drawn from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """One value in base units. ``series`` and the meaning of ``labels`` are in ``series.SERIES``."""

    series: str
    value: float
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Instance:
    """One MIG device: a compute instance of a GPU instance. NVML's numbers; DCGM does not tell ``compute``."""

    gpu_instance: str
    profile: str
    uuid: str = ""
    compute_instance: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment. What it does not support has no reading.

    ``absent`` says what that is and why, ``failures`` what ought to have worked: function and error.
    ``lost``: it fell off the bus, and there is nothing else to tell.
    ``stale``: the source did not answer in time, and this is its last answer; ``read_time`` is when (epoch seconds).
    """

    index: str
    uuid: str = ""
    name: str = ""
    readings: tuple[Reading, ...] = ()
    instances: tuple[Instance, ...] = ()
    absent: tuple[tuple[str, str], ...] = ()
    failures: tuple[tuple[str, str], ...] = ()
    lost: bool = False
    driver_version: str = ""
    read_time: float = 0.0
    stale: bool = False

    @property
    def identity(self) -> tuple[str, str, str]:
        """The values of ``series.DEVICE_LABELS``."""
        return (self.index, self.uuid, self.name)
