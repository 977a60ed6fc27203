"""Prompt text out of telemetry: attributes whose key matches a pattern are removed wherever attributes can be."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate
from functools import lru_cache
from typing import Any

MEMORY = 4096
"""Keys remembered with their verdict; later ones are matched anew, so that a flood of keys cannot fill the memory."""

FEW = 16
"""Removals for which moving the rest of a repeated field each time is cheaper than copying it once."""


class PromptText:
    """Shell patterns of attribute keys, compiled once. Matching is case-sensitive."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = patterns
        self._any = re.compile("|".join(f"(?:{translate(pattern)})" for pattern in patterns)) if patterns else None
        self._each = [re.compile(translate(pattern)) for pattern in patterns]
        self._verdicts: dict[str, str | None] = {}

    def pattern(self, key: str) -> str | None:
        """The first pattern that the key matches, or None."""
        try:
            return self._verdicts[key]
        except KeyError:
            verdict = self._match(key)
            if len(self._verdicts) < MEMORY and len(key) <= 256:
                self._verdicts[key] = verdict
            return verdict

    def _match(self, key: str) -> str | None:
        if self._any is None or not self._any.match(key):
            return None
        return next(pattern for pattern, one in zip(self.patterns, self._each, strict=True) if one.match(key))

    def harmless(self, keys: Iterable[str]) -> bool:
        """Whether no pattern matches any of ``keys``."""
        return all(self.pattern(key) is None for key in keys)

    def clean_attributes(self, attributes: Any, dropped: dict[str, int]) -> bool:
        """Remove matching attributes in place, nested ones too, and count them by pattern; whether any was removed."""
        changed = False
        matching = []
        for position, attribute in enumerate(attributes):
            pattern = self.pattern(attribute.key)
            if pattern is not None:
                dropped[pattern] = dropped.get(pattern, 0) + 1
                matching.append(position)
            elif self.clean_value(attribute.value, dropped):
                changed = True
        remove(attributes, matching)
        return changed or bool(matching)

    def clean_value(self, value: Any, dropped: dict[str, int]) -> bool:
        """The same inside the key-value lists and arrays of one ``AnyValue``."""
        kind = value.WhichOneof("value")
        if kind == "kvlist_value":
            return self.clean_attributes(value.kvlist_value.values, dropped)
        if kind == "array_value":
            changed = False
            for item in value.array_value.values:
                changed |= self.clean_value(item, dropped)
            return changed
        return False

    def clean_span(self, span: Any, dropped: dict[str, int]) -> bool:
        """The same for the attributes, events and links of a span. Events keep their name and time."""
        changed = self.clean_attributes(span.attributes, dropped)
        for event in span.events:
            changed |= self.clean_attributes(event.attributes, dropped)
        for link in span.links:
            changed |= self.clean_attributes(link.attributes, dropped)
        return changed


def remove(messages: Any, positions: list[int]) -> None:
    """Take the messages at ``positions`` (ascending) out of a repeated field, in time linear in its length."""
    if len(positions) <= FEW:
        for position in reversed(positions):
            del messages[position]
        return
    gone = set(positions)
    kept = [message for position, message in enumerate(messages) if position not in gone]
    del messages[:]
    messages.extend(kept)


@lru_cache(maxsize=16)
def prompt_text(patterns: tuple[str, ...]) -> PromptText:
    """The compiled form of the patterns, one for each configuration."""
    return PromptText(patterns)
