"""The contrast of two colors, as WCAG 2 defines it."""

from __future__ import annotations


def _compute_luminance(color: str) -> float:
    """The relative luminance of a color, as WCAG 2 defines it."""
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def compute_contrast(first: str, second: str) -> float:
    """The contrast of two colors, from 1 to 21."""
    low, high = sorted(map(_compute_luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)
