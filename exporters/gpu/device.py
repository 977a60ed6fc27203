"""One GPU through NVML -> readings. What it does not support is left out and named."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from vllm_slo.exporters.gpu.nvml import DRIVER, GPU_HANDLE, MIG_HANDLE, Address, Refused
from vllm_slo.exporters.gpu.reading import Gpu, Instance, Reading
from vllm_slo.exporters.gpu.series import COMPARED, SERIES, Ask, Constant, Scope, Series, scaled

LOST = "NVML_ERROR_GPU_IS_LOST"
UNKNOWN_TO_DRIVER = frozenset({"NVML_ERROR_FUNCTION_NOT_FOUND", "NVML_ERROR_ARGUMENT_VERSION_MISMATCH"})
ABSENT = UNKNOWN_TO_DRIVER | {
    "NVML_ERROR_NOT_SUPPORTED",
    "NVML_ERROR_NOT_FOUND",
    "NVML_ERROR_INVALID_ARGUMENT",
    "NVML_ERROR_NO_PERMISSION",
}
"""Errors that say: not on this GPU. NVML answers an unknown field or policy with an invalid argument."""

_PROFILE = re.compile(r"(?:\d+c\.)?(\d+g\.\d+gb\S*)")
_VALUE_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of the union of a field's value, by ``nvmlValueType_t``."""


class Asked(Protocol):
    """What is needed of ``nvml.Nvml``."""

    def open(self, address: Address) -> None:
        """Find the device. Raises Refused."""

    def ask(self, address: Address, function: str, arguments: tuple[Constant, ...] = ()) -> Any:
        """One function's result. Raises Refused."""

    def error_name(self, code: int) -> str:
        """NVML's name of a return code."""


Activity = Callable[[int, int], float | None]
"""How busy a GPU instance of a GPU was, as ``gpm.MigActivity.ratio``."""


def read_gpu(nvml: Asked, index: int, *, processes: bool = False, activity: Activity | None = None) -> Gpu:
    """Everything NVML tells of one GPU now. A lost GPU is told as lost, any other refusal costs its series only."""
    look = _Look(nvml)
    name = uuid = ""
    try:
        nvml.open((index,))
        name = str(look.ask((index,), "nvmlDeviceGetName"))
        uuid = str(look.ask((index,), "nvmlDeviceGetUUID"))
        readings = [*look.readings((index,), "gpu")]
        instances = [*look.instances(index)]
        seen: set[str] = set()
        for address, instance in instances:
            if instance.gpu_instance not in seen:  # compute instances of one GPU instance share its memory
                seen.add(instance.gpu_instance)
                of = (instance.gpu_instance, instance.profile)
                told = [*look.readings(address, "mig"), *look.activity(index, instance, activity)]
                readings += [replace(reading, labels=of + reading.labels) for reading in told]
        if processes:
            readings += look.processes((index,))
    except Refused as refusal:
        lost = refusal.error == LOST
        return Gpu(str(index), uuid, name, lost=lost, failures=() if lost else ((GPU_HANDLE, refusal.error),))
    return Gpu(
        str(index),
        uuid,
        name,
        tuple(readings),
        tuple(instance for _, instance in instances),
        absent=tuple(dict.fromkeys(look.absent)),
        failures=tuple(dict.fromkeys(look.failures)),
        driver_version=look.driver_version(),
    )


class _Look:
    """One pass over a GPU: every function is called once, however many series come from it."""

    def __init__(self, nvml: Asked) -> None:
        self._nvml = nvml
        self._answers: dict[tuple[Address, str, tuple[Constant, ...]], Any] = {}
        self.absent: list[tuple[str, str]] = []
        self.failures: list[tuple[str, str]] = []

    def ask(self, address: Address, function: str, arguments: tuple[Constant, ...] = ()) -> Any:
        key = (address, function, arguments)
        if key not in self._answers:
            try:
                self._answers[key] = self._nvml.ask(address, function, arguments)
            except Refused as refusal:
                self._answers[key] = refusal
        answer = self._answers[key]
        if isinstance(answer, Refused):
            raise answer
        return answer

    def readings(self, address: Address, scope: Scope) -> Iterator[Reading]:
        for series in SERIES:
            if series.scope == scope:
                yield from self._of(series, address)

    def _of(self, series: Series, address: Address) -> Iterator[Reading]:
        for ask in series.nvml:
            if ask.function == COMPARED:
                continue
            try:
                value = self._value(ask, address)
            except Refused as refusal:
                self._note(series, ask, refusal)
            else:
                if value is not None:
                    yield Reading(series.name, scaled(value, ask.scale), ask.labels)

    def _value(self, ask: Ask, address: Address) -> float | None:
        try:
            if ask.within is not None and ask.bit is not None and not ask.bit & self._mask(ask.within, address):
                return None
            result = self.ask(address, ask.function, ask.arguments)
        except Refused as refusal:
            if refusal.error in UNKNOWN_TO_DRIVER and ask.otherwise is not None:
                return self._value(ask.otherwise, address)
            raise
        if ask.bit is not None:
            return float(bool(int(result) & ask.bit))
        if ask.function == "nvmlDeviceGetFieldValues":
            return self._field(result[0])
        return _part(result, ask.field)

    def _mask(self, function: str, address: Address) -> int:
        """The reasons that this GPU can give; all of them where it does not say."""
        try:
            return int(self.ask(address, function))
        except Refused as refusal:
            if refusal.error in UNKNOWN_TO_DRIVER or refusal.error == LOST:
                raise
            return -1

    def _field(self, answer: Any) -> float:
        if answer.nvmlReturn:
            raise Refused(self._nvml.error_name(answer.nvmlReturn))
        return float(getattr(answer.value, _VALUE_TYPES[answer.valueType]))

    def instances(self, index: int) -> Iterator[tuple[Address, Instance]]:
        """The MIG devices of a GPU; none where MIG is off or not known."""
        try:
            if not self.ask((index,), "nvmlDeviceGetMigMode")[0]:
                return
            most = int(self.ask((index,), "nvmlDeviceGetMaxMigDeviceCount"))
        except Refused as refusal:
            if refusal.error == LOST:
                raise
            return
        for position in range(most):
            address = (index, position)
            try:
                self._nvml.open(address)
                name = str(self.ask(address, "nvmlDeviceGetName"))
                found = _PROFILE.search(name)
                yield (
                    address,
                    Instance(
                        gpu_instance=str(self.ask(address, "nvmlDeviceGetGpuInstanceId")),
                        profile=found[1] if found else "",
                        uuid=str(self.ask(address, "nvmlDeviceGetUUID")),
                        compute_instance=str(self.ask(address, "nvmlDeviceGetComputeInstanceId")),
                    ),
                )
            except Refused as refusal:
                if refusal.error == LOST:
                    raise
                if refusal.error not in ABSENT:  # NOT_FOUND: no device at this position
                    self.failures.append((MIG_HANDLE, refusal.error))

    def activity(self, index: int, instance: Instance, activity: Activity | None) -> Iterator[Reading]:
        """The share of time in which a MIG instance computed, where that is told."""
        if activity is None:
            return
        for series in (series for series in SERIES if series.scope == "mig"):
            for ask in (ask for ask in series.nvml if ask.function == COMPARED):
                try:
                    value = activity(index, int(instance.gpu_instance))
                except Refused as refusal:
                    self._note(series, ask, refusal)
                else:
                    if value is not None:
                        yield Reading(series.name, value)

    def processes(self, address: Address) -> Iterator[Reading]:
        """Memory by process; a process whose memory is not told has no reading. Those in MIG instances are summed."""
        for series in (series for series in SERIES if series.scope == "process"):
            for ask in series.nvml:
                try:
                    found = self.ask(address, ask.function, ask.arguments)
                except Refused as refusal:
                    self._note(series, ask, refusal)
                    continue
                told = ((str(process.pid), _part(process, ask.field)) for process in found)
                yield from (Reading(series.name, value, (pid,)) for pid, value in _summed(told).items())

    def driver_version(self) -> str:
        try:
            return str(self.ask(DRIVER, "nvmlSystemGetDriverVersion"))
        except Refused:
            return ""

    def _note(self, series: Series, ask: Ask, refusal: Refused) -> None:
        if refusal.error == LOST:
            raise refusal
        if refusal.error in ABSENT:
            named = f"{series.name}{{{','.join(ask.labels)}}}" if ask.labels and ask.bit is None else series.name
            self.absent.append((named, refusal.error))
        else:
            self.failures.append((ask.function, refusal.error))


def _part(result: Any, field: str | int | None) -> float | None:
    """The value that is meant; None where NVML has a structure without it."""
    if isinstance(field, int):
        return float(result[field])
    value = result if field is None else getattr(result, field)
    return None if value is None else float(value)


def _summed(pairs: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for pid, value in pairs:
        if value is not None:
            sums[pid] = sums.get(pid, 0.0) + value
    return sums
