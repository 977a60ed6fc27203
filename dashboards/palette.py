"""Colours: one hue, told apart by lightness, so that everything reads the same in greyscale and to the colour-blind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rgb = tuple[int, int, int]


@dataclass(frozen=True)
class Palette:
    """``low`` to ``high`` is the ramp of intensity; ``strong``, ``medium`` and ``weak`` draw lines and bars.

    ``slower`` is what a slower cell is, in words; ``faint`` fills the area between two lines.
    """

    slower: str
    text: str
    quiet: str
    line: str
    strong: str
    medium: str
    weak: str
    low: Rgb
    high: Rgb
    faint: str

    def shade(self, intensity: float) -> tuple[str, str]:
        """Background and text colour for an intensity of 0 to 1."""
        mixed = tuple(round(a + (b - a) * intensity) for a, b in zip(self.low, self.high, strict=True))
        luminance = sum(
            weight * (value / 255) ** 2.2 for weight, value in zip((0.2126, 0.7152, 0.0722), mixed, strict=True)
        )
        # Contrast with white is 1.05 / (L + 0.05), with black (L + 0.05) / 0.05 (WCAG 2): equal at L = 0.179.
        return f"rgb{mixed}", "#ffffff" if luminance < 0.179 else "#111111"


LIGHT = Palette(
    slower="Darker",
    text="#1f2430",
    quiet="#5b6472",
    line="#d5dae1",
    strong="#0b3559",
    medium="#2f7fbf",
    weak="#8dbbe0",
    low=(240, 246, 252),
    high=(8, 48, 96),
    faint="rgba(47, 127, 191, 0.25)",
)
DARK = Palette(
    slower="Lighter",
    text="#f0f3f7",
    quiet="#a3adba",
    line="#3d4654",
    strong="#f2f7fc",
    medium="#7fb8e6",
    weak="#3f78a8",
    low=(34, 44, 58),
    high=(200, 226, 250),
    faint="rgba(127, 184, 230, 0.3)",
)


def palette(theme: Literal["light", "dark"] | str | None) -> Palette:
    """The palette of a theme; light when it is unknown."""
    return DARK if theme == "dark" else LIGHT
