"""The SLO file as the probe reads it: its thresholds become bounds of histograms and are watched while requests run.

    slos:
      - name: chat-ttft
        sli: time_to_first_token
        threshold_seconds: 0.5
        objective: 0.99
        bucket: short          # optional, as are model, shard and priority

YAML needs PyYAML, which every vLLM has; JSON needs nothing.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.probe.meters import (
    INTER_TOKEN_LATENCY,
    QUEUE,
    REQUEST_DURATION,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
)

SLIS: tuple[str, ...] = (QUEUE, TIME_TO_FIRST_TOKEN, INTER_TOKEN_LATENCY, TIME_PER_OUTPUT_TOKEN, REQUEST_DURATION)
NEEDED: tuple[str, ...] = ("name", "sli", "threshold_seconds", "objective")
FILTERS: tuple[str, ...] = ("model", "shard", "bucket", "priority")
LONGEST_SECONDS = 86400.0


class ObjectivesError(SloError):
    """Every fault of an SLO file, one a line."""


@dataclass(frozen=True)
class Objective:
    """A share ``objective`` of the requests that the filters choose has its SLI within ``threshold_seconds``.

    A filter that is null chooses all. ``priority`` is vLLM's number; it stands for the class that it is in.
    """

    name: str
    sli: str
    threshold_seconds: float
    objective: float
    model: str | None = None
    shard: str | None = None
    bucket: str | None = None
    priority: int | None = None


def read(path: Path, buckets: Sequence[str]) -> tuple[Objective, ...]:
    """The objectives of a file. ObjectivesError names every fault with its place and cure; ``buckets`` are known."""
    document = _document(path)
    faults: list[str] = []
    found: list[Objective] = []
    for place, item in _items(document, path.name, faults):
        before = len(faults)
        objective = _objective(place, item, buckets, faults)
        if len(faults) == before and objective is not None:
            if any(objective.name == other.name for other in found):
                faults.append(f"{place}: name {objective.name!r} is taken; give each objective its own")
            found.append(objective)
    if faults:
        raise ObjectivesError("\n".join(faults))
    return tuple(found)


def read_or_none(path: Path | None, buckets: Sequence[str], warn: Callable[[str], None]) -> tuple[Objective, ...]:
    """The same for a server that runs on whatever is in the file: none after a warning, where the file is at fault."""
    if path is None:
        return ()
    try:
        return read(path, buckets)
    except (ObjectivesError, OSError, ValueError, RecursionError) as error:
        faults = "".join(f"\n  {line}" for line in (str(error) or repr(error)).splitlines())
        warn(f"no objectives, histograms have their default bounds; VLLM_SLO_FILE is at fault:{faults}")
        return ()


def thresholds(objectives: Iterable[Objective]) -> dict[str, tuple[float, ...]]:
    """Histogram -> thresholds in seconds, for `Meters`.

    Those of other models and shards too: histograms of one fleet add up only where they have the same bounds.
    """
    found: dict[str, tuple[float, ...]] = {}
    for one in objectives:
        found[one.sli] = (*found.get(one.sli, ()), one.threshold_seconds)
    return found


def _document(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except ValueError as error:
            raise ObjectivesError(f"{path.name}: no JSON: {error}; mend it there") from error
    try:
        import yaml
    except ImportError as error:
        raise ObjectivesError(
            f"{path.name}: reading YAML needs PyYAML; install it, or write {path.stem}.json"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ObjectivesError(f"{path.name}: no YAML: {where}; mend it there, one document a file") from error


def _items(document: Any, file: str, faults: list[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """(Place, entry) of each objective, whatever the file's form. A further form, such as OpenSLO, is read here."""
    if isinstance(document, Mapping) and "apiVersion" in document:
        faults.append(f"{file}: apiVersion {document['apiVersion']!r} is not read; write a list under slos")
        return []
    if not isinstance(document, Mapping) or not isinstance(document.get("slos"), list):
        faults.append(f"{file}: no list under slos; write slos: with a line - name: ... for each objective")
        return []
    faults.extend(f"{file}: {key!r} is not known here; only slos is" for key in document if key != "slos")
    found = []
    for number, item in enumerate(document["slos"], 1):
        if isinstance(item, Mapping):
            name = item.get("name")
            found.append((f"{file}: slo {name!r}" if isinstance(name, str) and name else f"{file}: slo {number}", item))
        else:
            faults.append(
                f"{file}: slo {number}: {item!r} has no fields; write name, sli, threshold_seconds, objective"
            )
    return found


def _objective(place: str, item: Mapping[str, Any], buckets: Sequence[str], faults: list[str]) -> Objective | None:
    def fault(text: str) -> None:
        faults.append(f"{place}: {text}")

    fields = (*NEEDED, *FILTERS)
    for key in item:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, 1)
            fault(
                f"{key!r} is not known; " + (f"did you mean {close[0]}?" if close else f"known are {', '.join(fields)}")
            )
    for key in NEEDED:
        if item.get(key) is None:
            fault(f"{key} is missing; add it")
    name, sli, threshold, share = (item.get(key) for key in NEEDED)
    if name is not None and not (isinstance(name, str) and name):
        fault(f"name {name!r} is no text; write a short one such as chat-ttft")
    if sli is not None and sli not in SLIS:
        fault(f"sli {sli!r} is not one of {', '.join(SLIS)}")
    if threshold is not None and not (_number(threshold) and 1e-6 <= threshold <= LONGEST_SECONDS):
        fault(f"threshold_seconds {threshold!r} is no number of seconds up to a day; write one such as 0.5")
    if share is not None and not (_number(share) and 0 < share < 1):
        cure = f"{share / 100:.10g}" if _number(share) and 1 < share < 100 else "a share such as 0.99"
        fault(f"objective {share!r} is not in (0, 1); write {cure}")
    for key in ("model", "shard", "bucket"):
        if item.get(key) is not None and not isinstance(item[key], str):
            fault(f"{key} {item[key]!r} is no text; put it in quotes")
    bucket, priority = item.get("bucket"), item.get("priority")
    if isinstance(bucket, str) and bucket not in buckets:
        fault(f"bucket {bucket!r} is not one of {', '.join(buckets)}; see VLLM_SLO_BUCKETS")
    if priority is not None and (not isinstance(priority, int) or isinstance(priority, bool)):
        fault(f"priority {priority!r} is no whole number; write vLLM's, such as 0")
    if not (_number(threshold) and _number(share)):
        return None
    return Objective(
        name=str(name),
        sli=str(sli),
        threshold_seconds=float(threshold),
        objective=float(share),
        model=item.get("model"),
        shard=item.get("shard"),
        bucket=bucket,
        priority=priority if isinstance(priority, int) else None,
    )


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
