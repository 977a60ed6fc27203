"""Runs a hook so that vLLM never notices its errors: they are caught, counted, and too many end it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm_slo.exporters.probe.settings import LOGGER_NAME

OFF_AFTER = 10
"""Errors in a row after which a hook is called no more."""

errors: dict[str, int] = {}
"""Hook -> errors caught in this process."""
off: set[str] = set()
"""Hooks that are switched off in this process."""

logger = logging.getLogger(LOGGER_NAME)


def guarded(name: str, function: Callable[..., Any], gone: Callable[[], None] | None = None) -> Callable[..., Any]:
    """The function, returning None where it raised or is off; ``gone`` is called once, when it is switched off."""
    in_a_row = 0

    def hook(*arguments: Any) -> Any:
        nonlocal in_a_row
        if in_a_row >= OFF_AFTER:
            return None
        try:
            result = function(*arguments)
        except Exception as error:  # noqa: BLE001
            in_a_row += 1
            _caught(name, error, in_a_row, gone)
            return None
        if in_a_row:
            in_a_row = 0
        return result

    return hook


def _caught(name: str, error: Exception, in_a_row: int, gone: Callable[[], None] | None) -> None:
    """Counts; tells of the first error of a hook and of its end, so never a line a step."""
    count = errors[name] = errors.get(name, 0) + 1
    try:
        if in_a_row >= OFF_AFTER:
            off.add(name)
            logger.warning("vllm-slo: hook %s is off after %d errors in a row: %r", name, OFF_AFTER, error)
            if gone is not None:
                gone()
        elif count == 1:
            logger.warning("vllm-slo: error in hook %s, vLLM is not affected: %r", name, error, exc_info=error)
    except Exception:  # noqa: BLE001
        errors[name] += 1
