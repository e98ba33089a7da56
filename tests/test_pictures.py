"""The pictures of the pages can be read on a phone, in light and in dark."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from contrast import compute_contrast

ROOT = Path(__file__).parents[1]
PICTURES = sorted((ROOT / "docs").glob("*.svg"))
PHONE = 340
"""Pixels that a phone of 360 leaves to a picture."""


def read_paint() -> dict[str, tuple[str, str, str]]:
    """Read the colors of the hand-off's picture from the script that draws it."""
    tree = ast.parse((ROOT / "examples" / "disaggregated" / "picture.py").read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAINT":
            paint: dict[str, tuple[str, str, str]] = ast.literal_eval(node.value)
            return paint
    raise AssertionError("PAINT")


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_letters_are_large_enough_on_a_phone(path: Path) -> None:
    text = path.read_text("utf-8")
    width = float(ElementTree.fromstring(text).attrib["viewBox"].split()[2])
    sizes = [int(size) for size in re.findall(r"font(?:-size)?: (?:600 )?(\d+)px", text)]
    assert min(sizes) * PHONE / width >= 8
    assert "(prefers-color-scheme: dark)" in text


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_has_a_size_and_a_name(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text("utf-8"))
    assert root.attrib["role"] == "img"
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert root.attrib.get("aria-label") or (title is not None and title.text)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    shown = float(root.attrib["width"]) / float(root.attrib["height"])
    assert shown == pytest.approx(width / height, rel=0.01)


@pytest.mark.parametrize("shade", [1, 2], ids=["light", "dark"])
def test_text_of_the_hand_off_has_the_contrast_of_wcag_aa(shade: int) -> None:
    paint = read_paint()
    fills = {"text": ("page", "box", "key", "value", "wrong"), ".soft": ("page", "box")}
    fills[".bad"] = ("page",)
    for text, backgrounds in fills.items():
        for background in backgrounds:
            pair = (paint[text][shade], paint[f".{background}"][shade])
            assert compute_contrast(*pair) >= 4.5, (text, background)
