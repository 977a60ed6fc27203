"""What is read of a GPU, and from where: the one table behind the code, the documentation and the tests.

Functions, structures and constants of NVML are named as in NVIDIA's Python binding (``pynvml``), fields of DCGM as in
the DCGM exporter. Units differ: NVML has milliwatts, millijoules, megahertz, percent and nanoseconds, DCGM has
mebibytes and watts. ``scale`` makes base units of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "vllm_slo_gpu_"
DEVICE_LABELS: tuple[str, ...] = ("gpu", "uuid", "name")
"""Labels of every series of a GPU: NVML's index, the UUID, the product's name."""
INSTANCE_LABELS: tuple[str, ...] = ("gpu_instance", "profile")
"""Further labels of a MIG instance: NVML's number of the GPU instance, and its profile (``3g.40gb``)."""

COMPARED = "nvmlGpmMetricsGet"
"""Not asked as the others are: it compares two samples, see ``gpm``."""

Scope = Literal["gpu", "mig", "process"]
Constant = int | str | tuple["Constant", ...]
"""A number, the name of a constant of ``pynvml``, or a list of them."""

_MIB = float(2**20)
_KIB = 1024.0
_MEGAHERTZ = 1e6
_PERCENT = 0.01
_MILLI = 0.001
_NANO = 1e-9
ALL_LINKS = 0xFFFFFFFF
"""Scope of an NVLink field that means: summed over all links."""


def scaled(value: float, scale: float) -> float:
    """``value * scale``, without the noise that a factor such as 0.01 brings.

    >>> scaled(57, 0.01)
    0.57
    """
    return value * scale if scale >= 1 else value / round(1 / scale)


@dataclass(frozen=True)
class Ask:
    """One value from NVML: a function, and what to take of its result.

    ``field`` is an attribute of the structure, a position in the list, or None for the result itself. With ``bit`` the
    result is a mask, and the value is whether that bit is set, told only where the mask that ``within`` gives has it.
    ``otherwise`` is asked where the driver does not know the function.
    """

    function: str
    arguments: tuple[Constant, ...] = ()
    field: str | int | None = None
    scale: float = 1.0
    labels: tuple[str, ...] = ()
    bit: int | None = None
    within: str | None = None
    otherwise: Ask | None = None


@dataclass(frozen=True)
class Field:
    """One value from DCGM: a field, under any of its names, the newest last."""

    names: tuple[str, ...]
    scale: float = 1.0
    labels: tuple[str, ...] = ()
    bit: int | None = None


@dataclass(frozen=True)
class Series:
    """One series: ``labels`` beside those of its scope; several asks differ in the values of ``labels``."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    nvml: tuple[Ask, ...]
    dcgm: tuple[Field, ...] = ()
    labels: tuple[str, ...] = ()
    scope: Scope = "gpu"

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Every label, in the order of the values."""
        return DEVICE_LABELS + (INSTANCE_LABELS if self.scope == "mig" else ()) + self.labels


REASONS: tuple[tuple[str, int, str], ...] = (
    ("gpu_idle", 0x1, "GpuIdle"),
    ("applications_clocks_setting", 0x2, "ApplicationsClocksSetting"),
    ("sw_power_cap", 0x4, "SwPowerCap"),
    ("hw_slowdown", 0x8, "HwSlowdown"),
    ("sync_boost", 0x10, "SyncBoost"),
    ("sw_thermal_slowdown", 0x20, "SwThermalSlowdown"),
    ("hw_thermal_slowdown", 0x40, "HwThermalSlowdown"),
    ("hw_power_brake_slowdown", 0x80, "HwPowerBrakeSlowdown"),
    ("display_clock_setting", 0x100, "DisplayClockSetting"),
)
"""Why clocks are held down: label, bit (``nvml.h``; DCGM has the same), and the end of the constant's name."""

POLICIES: tuple[tuple[str, str, str], ...] = (
    ("power", "NVML_PERF_POLICY_POWER", "DCGM_FI_DEV_POWER_VIOLATION"),
    ("thermal", "NVML_PERF_POLICY_THERMAL", "DCGM_FI_DEV_THERMAL_VIOLATION"),
    ("sync_boost", "NVML_PERF_POLICY_SYNC_BOOST", "DCGM_FI_DEV_SYNC_BOOST_VIOLATION"),
    ("board_limit", "NVML_PERF_POLICY_BOARD_LIMIT", "DCGM_FI_DEV_BOARD_LIMIT_VIOLATION"),
    ("low_utilization", "NVML_PERF_POLICY_LOW_UTILIZATION", "DCGM_FI_DEV_LOW_UTIL_VIOLATION"),
    ("reliability", "NVML_PERF_POLICY_RELIABILITY", "DCGM_FI_DEV_RELIABILITY_VIOLATION"),
)
"""Both sources count nanoseconds, whatever older lists of the DCGM exporter say: DCGM passes NVML's number on."""


def _memory(field: str) -> tuple[Ask, ...]:
    """Version 2 of the structure; a driver before 510 has version 1, where the reserve is part of what is used."""
    older = None if field == "reserved" else Ask("nvmlDeviceGetMemoryInfo", (), field)
    return (Ask("nvmlDeviceGetMemoryInfo", ("nvmlMemory_v2",), field, otherwise=older),)


def _field_value(name: str, *scope: int, scale: float = 1.0, labels: tuple[str, ...] = ()) -> Ask:
    wanted: Constant = (name, *scope) if scope else name
    return Ask("nvmlDeviceGetFieldValues", ((wanted,),), "value", scale, labels)


def _reason(label: str, bit: int) -> Ask:
    older = Ask(
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        labels=(label,),
        bit=bit,
        within="nvmlDeviceGetSupportedClocksThrottleReasons",
    )
    return Ask(
        "nvmlDeviceGetCurrentClocksEventReasons",
        labels=(label,),
        bit=bit,
        within="nvmlDeviceGetSupportedClocksEventReasons",
        otherwise=older,
    )


def _clock(function: str, domain: str, constant: str) -> Ask:
    return Ask(function, (constant,), scale=_MEGAHERTZ, labels=(domain,))


def _errors(label: str, constant: str) -> Ask:
    return Ask("nvmlDeviceGetTotalEccErrors", (constant, "NVML_VOLATILE_ECC"), labels=(label,))


SERIES: tuple[Series, ...] = (
    Series(
        "memory_used_bytes",
        "gauge",
        "Device memory in use by processes. Drivers before 510 add the driver's reserve.",
        _memory("used"),
        (Field(("DCGM_FI_DEV_FB_USED",), _MIB),),
    ),
    Series(
        "memory_free_bytes",
        "gauge",
        "Device memory that can be taken.",
        _memory("free"),
        (Field(("DCGM_FI_DEV_FB_FREE",), _MIB),),
    ),
    Series(
        "memory_reserved_bytes",
        "gauge",
        "Device memory that driver and firmware keep for themselves.",
        _memory("reserved"),
        (Field(("DCGM_FI_DEV_FB_RESERVED",), _MIB),),
    ),
    Series(
        "memory_total_bytes",
        "gauge",
        "Device memory in all.",
        _memory("total"),
        (Field(("DCGM_FI_DEV_FB_TOTAL",), _MIB),),
    ),
    Series(
        "utilization_ratio",
        "gauge",
        "Share of the last sampling period in which a kernel ran; says nothing of how much of the GPU it used. "
        "Absent while MIG is on.",
        (Ask("nvmlDeviceGetUtilizationRates", (), "gpu", _PERCENT),),
        (Field(("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL_RATIO"), _PERCENT),),
    ),
    Series(
        "memory_copy_utilization_ratio",
        "gauge",
        "Share of the last sampling period in which device memory was read or written; not how full it is.",
        (Ask("nvmlDeviceGetUtilizationRates", (), "memory", _PERCENT),),
        (Field(("DCGM_FI_DEV_MEM_COPY_UTIL",), _PERCENT),),
    ),
    Series(
        "power_watts",
        "gauge",
        "Power drawn by the board.",
        (Ask("nvmlDeviceGetPowerUsage", scale=_MILLI),),
        (Field(("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_BOARD_POWER_WATTS")),),
    ),
    Series(
        "power_limit_watts",
        "gauge",
        "The power limit that holds now, the lowest of all that are set.",
        (Ask("nvmlDeviceGetEnforcedPowerLimit", scale=_MILLI),),
        (Field(("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", "DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS")),),
    ),
    Series(
        "energy_joules_total",
        "counter",
        "Energy drawn since the driver was loaded.",
        (Ask("nvmlDeviceGetTotalEnergyConsumption", scale=_MILLI),),
        (Field(("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",), _MILLI),),
    ),
    Series(
        "temperature_celsius",
        "gauge",
        "Temperature of the chip and, where it has a sensor, of the memory.",
        (
            Ask("nvmlDeviceGetTemperature", ("NVML_TEMPERATURE_GPU",), labels=("gpu",)),
            _field_value("NVML_FI_DEV_MEMORY_TEMP", labels=("memory",)),
        ),
        (
            Field(("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS"), labels=("gpu",)),
            Field(("DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_MEMORY_TEMP_CELSIUS"), labels=("memory",)),
        ),
        ("sensor",),
    ),
    Series(
        "clock_hertz",
        "gauge",
        "Clock that runs now, by domain.",
        (
            _clock("nvmlDeviceGetClockInfo", "sm", "NVML_CLOCK_SM"),
            _clock("nvmlDeviceGetClockInfo", "memory", "NVML_CLOCK_MEM"),
        ),
        (
            Field(("DCGM_FI_DEV_SM_CLOCK",), _MEGAHERTZ, ("sm",)),
            Field(("DCGM_FI_DEV_MEM_CLOCK",), _MEGAHERTZ, ("memory",)),
        ),
        ("domain",),
    ),
    Series(
        "clock_max_hertz",
        "gauge",
        "Highest clock, by domain.",
        (
            _clock("nvmlDeviceGetMaxClockInfo", "sm", "NVML_CLOCK_SM"),
            _clock("nvmlDeviceGetMaxClockInfo", "memory", "NVML_CLOCK_MEM"),
        ),
        (
            Field(("DCGM_FI_DEV_MAX_SM_CLOCK",), _MEGAHERTZ, ("sm",)),
            Field(("DCGM_FI_DEV_MAX_MEM_CLOCK",), _MEGAHERTZ, ("memory",)),
        ),
        ("domain",),
    ),
    Series(
        "throttle_reason",
        "gauge",
        "1 while the clocks are held down for this reason, else 0. gpu_idle is no fault.",
        tuple(_reason(label, bit) for label, bit, _ in REASONS),
        tuple(
            Field(("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"), 1.0, (label,), bit)
            for label, bit, _ in REASONS
        ),
        ("reason",),
    ),
    Series(
        "throttle_seconds_total",
        "counter",
        "Time for which the clocks were held down, by cause, since the driver was loaded.",
        tuple(
            Ask("nvmlDeviceGetViolationStatus", (policy,), "violationTime", _NANO, (label,))
            for label, policy, _ in POLICIES
        ),
        tuple(Field((field,), _NANO, (label,)) for label, _, field in POLICIES),
        ("cause",),
    ),
    Series(
        "ecc_enabled",
        "gauge",
        "1 where memory errors are corrected and counted, 0 where that is switched off.",
        (Ask("nvmlDeviceGetEccMode", (), 0),),
        (Field(("DCGM_FI_DEV_ECC_CURRENT",)),),
    ),
    Series(
        "ecc_errors_total",
        "counter",
        "Memory errors since the driver was loaded (volatile counts).",
        (
            _errors("corrected", "NVML_MEMORY_ERROR_TYPE_CORRECTED"),
            _errors("uncorrected", "NVML_MEMORY_ERROR_TYPE_UNCORRECTED"),
        ),
        (
            Field(("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",), labels=("corrected",)),
            Field(("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",), labels=("uncorrected",)),
        ),
        ("error",),
    ),
    Series(
        "pcie_replays_total",
        "counter",
        "Packets sent again over PCIe: a rising count is a bad slot, riser or cable.",
        (Ask("nvmlDeviceGetPcieReplayCounter"),),
        (Field(("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_FI_DEV_PCIE_REPLAY_TOTAL")),),
    ),
    Series(
        "pcie_bytes_total",
        "counter",
        "Bytes over PCIe as the GPU sees it, where the driver keeps the count (from Hopper on).",
        (
            _field_value("NVML_FI_DEV_PCIE_COUNT_TX_BYTES", labels=("sent",)),
            _field_value("NVML_FI_DEV_PCIE_COUNT_RX_BYTES", labels=("received",)),
        ),
        (
            Field(("DCGM_FI_PROF_PCIE_TX_BYTES_TOTAL",), labels=("sent",)),
            Field(("DCGM_FI_PROF_PCIE_RX_BYTES_TOTAL",), labels=("received",)),
        ),
        ("direction",),
    ),
    Series(
        "nvlink_bytes_total",
        "counter",
        "Payload over all NVLinks of the GPU.",
        (
            _field_value("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", ALL_LINKS, scale=_KIB, labels=("sent",)),
            _field_value("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", ALL_LINKS, scale=_KIB, labels=("received",)),
        ),
        labels=("direction",),
    ),
    Series(
        "mig_enabled",
        "gauge",
        "1 while the GPU is cut into MIG instances, else 0.",
        (Ask("nvmlDeviceGetMigMode", (), 0),),
        (Field(("DCGM_FI_DEV_MIG_MODE",)),),
    ),
    Series(
        "mig_memory_used_bytes",
        "gauge",
        "Memory of the MIG instance in use.",
        _memory("used"),
        (Field(("DCGM_FI_DEV_FB_USED",), _MIB),),
        scope="mig",
    ),
    Series(
        "mig_memory_free_bytes",
        "gauge",
        "Memory of the MIG instance that can be taken.",
        _memory("free"),
        (Field(("DCGM_FI_DEV_FB_FREE",), _MIB),),
        scope="mig",
    ),
    Series(
        "mig_memory_total_bytes",
        "gauge",
        "Memory of the MIG instance in all.",
        _memory("total"),
        (Field(("DCGM_FI_DEV_FB_TOTAL",), _MIB),),
        scope="mig",
    ),
    Series(
        "mig_utilization_ratio",
        "gauge",
        "Share of the time since the last reading in which the MIG instance computed. NVML tells it from Hopper on.",
        (Ask(COMPARED),),
        (Field(("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO")),),
        scope="mig",
    ),
    Series(
        "process_memory_used_bytes",
        "gauge",
        "Device memory of one process, by its number outside of containers. Only with --processes.",
        (Ask("nvmlDeviceGetComputeRunningProcesses", (), "usedGpuMemory"),),
        labels=("pid",),
        scope="process",
    ),
)
"""In the order in which they are shown."""

BY_NAME: dict[str, Series] = {series.name: series for series in SERIES}
