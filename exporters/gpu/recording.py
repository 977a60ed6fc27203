"""Raw answers of NVML as a file, and such a file in the place of ``pynvml``: function -> value or error.

A recording is one JSON object: ``gpus``, ``time``, and ``calls``, a list of ``{device, function, arguments}`` with
``value`` or ``error``. ``device`` is ``[]`` for the driver, ``[0]`` for a GPU, ``[0, 1]`` for its MIG device 1;
``arguments`` are numbers and names of constants. A structure is ``{"struct": its name, its fields...}``, a union the
hexadecimal bytes of its memory.
"""

from __future__ import annotations

import ctypes
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.gpu.nvml import DRIVER, GPU_HANDLE, MIG_HANDLE, Address, Nvml, Refused
from vllm_slo.exporters.gpu.series import Constant

_STRUCT = "struct"
_UNION = "union"
_FRIENDLY = "nvmlFriendlyObject"
"""What ``pynvml`` makes of a process: an object without fixed fields."""


class Recorder(Nvml):
    """NVML that keeps each call with its answer in ``calls``."""

    def __init__(self, binding: Any) -> None:
        super().__init__(binding)
        self.calls: list[dict[str, Any]] = []

    def open(self, address: Address) -> None:
        """As ``Nvml.open``; a handle means nothing later, so only a refusal is kept."""
        function = MIG_HANDLE if len(address) > 1 else GPU_HANDLE
        self._keep(address, function, (), lambda: super(Recorder, self).open(address))

    def ask(self, address: Address, function: str, arguments: tuple[Constant, ...] = ()) -> Any:
        """As ``Nvml.ask``."""
        return self._keep(address, function, arguments, lambda: super(Recorder, self).ask(address, function, arguments))

    def _keep(self, address: Address, function: str, arguments: tuple[Constant, ...], ask: Callable[[], Any]) -> Any:
        call: dict[str, Any] = {"device": list(address), "function": function, "arguments": list(arguments)}
        self.calls.append(call)
        try:
            answer = ask()
        except Refused as refusal:
            call["error"] = refusal.error
            raise
        call["value"] = _plain(answer)
        return answer

    def save(self, file: Path, time: str) -> None:
        """Write what was asked so far. Raises SloError."""
        lines = ",\n".join(f"  {json.dumps(call)}" for call in self.calls)
        try:
            file.write_text(f'{{"time": {json.dumps(time)}, "calls": [\n{lines}\n]}}\n')
        except OSError as error:
            raise SloError(f"--record {file}: {error.strerror}; give a file that can be written") from error


class Replay:
    """Stands in for the module ``binding`` (``pynvml``) with the answers of a recording.

    Constants, structures and exceptions are the module's own. A function that the module lacks is an AttributeError,
    one that it has but was not recorded is refused as not found, and arguments must fit its signature.
    """

    def __init__(self, recording: dict[str, Any], binding: Any) -> None:
        self._binding = binding
        self._constants = Nvml(binding)
        self._answers = {
            (call["function"], tuple(call["device"]), _key(map(self._resolve, call["arguments"]))): call
            for call in recording["calls"]
        }

    @classmethod
    def load(cls, file: Path, binding: Any) -> Replay:
        """The recording in a file."""
        return cls(json.loads(file.read_text()), binding)

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._binding, name)
        if not name.startswith("nvml") or not inspect.isfunction(real):
            return real
        signature = inspect.signature(real)

        def answer(*arguments: Any) -> Any:
            signature.bind(*arguments)
            return self._answer(name, arguments)

        return answer

    def __dir__(self) -> list[str]:
        return dir(self._binding)

    def _answer(self, function: str, arguments: tuple[Any, ...]) -> Any:
        opened = _handle(function, arguments)
        if opened is not None:
            address, rest = opened, ()
        elif arguments and isinstance(arguments[0], _Handle):
            address, rest = arguments[0].address, arguments[1:]
        else:
            address, rest = DRIVER, arguments
        call = self._answers.get((function, address, _key(rest)))
        if call is None:
            missing = "NVML_ERROR_NOT_FOUND" if opened is not None else "NVML_ERROR_FUNCTION_NOT_FOUND"
            raise self._binding.NVMLError(getattr(self._binding, missing))
        if "error" in call:
            raise self._binding.NVMLError(getattr(self._binding, call["error"]))
        return _Handle(address) if opened is not None else self._rebuilt(call["value"])

    def _resolve(self, argument: Any) -> Any:
        return self._constants.constant(_tuples(argument))

    def _rebuilt(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._rebuilt(each) for each in value]
        if not isinstance(value, dict):
            return value
        kind = getattr(self._binding, value.get(_STRUCT) or value[_UNION])
        if _UNION in value:
            return kind.from_buffer_copy(bytes.fromhex(value["bytes"]))
        fields = {name: self._rebuilt(each) for name, each in value.items() if name != _STRUCT}
        if value[_STRUCT] == _FRIENDLY:
            return kind(fields)
        made = kind()
        for name, each in fields.items():
            if name not in dict(kind._fields_):
                raise AttributeError(f"{value[_STRUCT]} has no field {name}")
            setattr(made, name, each)
        return made


class _Handle:
    """What a replayed device handle is: the address of the device."""

    def __init__(self, address: Address) -> None:
        self.address = address


def _handle(function: str, arguments: tuple[Any, ...]) -> Address | None:
    """The address of the device whose handle this call gets; None for any other call."""
    if function == GPU_HANDLE:
        return (arguments[0],)
    if function == MIG_HANDLE:
        return (*arguments[0].address, arguments[1])
    return None


def _key(arguments: Any) -> str:
    return json.dumps(list(arguments))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """A result of ``pynvml`` as JSON. A handle, which means nothing later, is null."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, ctypes.Union):
        return {_UNION: type(value).__name__, "bytes": bytes(value).hex()}
    if isinstance(value, ctypes.Structure):
        fields = {name: _plain(getattr(value, name)) for name, *_ in value._fields_}
        return {_STRUCT: type(value).__name__, **fields}
    if isinstance(value, (list, tuple, ctypes.Array)):
        return [_plain(each) for each in value]
    if type(value).__name__ == _FRIENDLY:
        return {_STRUCT: _FRIENDLY, **{name: _plain(each) for name, each in vars(value).items()}}
    return None
