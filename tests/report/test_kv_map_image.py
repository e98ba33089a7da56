from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import models
import pytest
from cache_models import MIXED, build_cache_model
from models import saved

from onnxkvrename import load_rules
from onnxkvrename.layout.inspect import ModelSummary, inspect_model
from onnxkvrename.report.kv_map_image import render_html, render_svg

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</text></pre><script>alert(1)</script>&amp;{x}{{%s}}\x1b[2J\u202e\x00\udcff漢"


@pytest.fixture
def found(tmp_path: Path) -> tuple[ModelSummary, ...]:
    """A model with buffers of every kind, and one whose names are hostile."""
    mixed = saved(build_cache_model(MIXED, tokens=("VLLM", "VLLM")), tmp_path / "mixed.onnx")
    model = build_cache_model(("full",))
    model.graph.output.append(models.info("hostile_RetainedState"))
    first, second = (
        inspect_model(path, load_rules())
        for path in (mixed, saved(model, tmp_path / "hostile.onnx"))
    )
    findings = tuple(item._replace(name=HOSTILE) for item in second.findings)
    kept = tuple(item._replace(name=HOSTILE) for item in second.kept)
    return (
        first._replace(path="mixed.onnx"),
        second._replace(path=HOSTILE, kept=kept, findings=findings),
    )


class Page(HTMLParser):
    """The text of a page, and the elements in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.tags = "", set[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def texts(picture: str) -> list[ElementTree.Element]:
    """The pieces of text in an SVG picture; rich also writes an empty one for each line's end."""
    found = ElementTree.fromstring(picture).iter(f"{SVG}text")
    return [item for item in found if (item.text or "").strip("\n")]


def lines(picture: str) -> list[str]:
    """The text of an SVG picture, line by line."""
    rows: dict[float, str] = {}
    for item in texts(picture):
        row, at = float(item.attrib["y"]), round(float(item.attrib["x"]) / (20 * 0.602))
        rows[row] = rows.get(row, "").ljust(at) + (item.text or "")
    return [rows[row].replace("\xa0", " ").rstrip() for row in sorted(rows)]


def test_a_picture_shows_what_a_terminal_does(found: tuple[ModelSummary, ...]) -> None:
    text = lines(render_svg(found[:1]))
    assert text[0].startswith("  mixed.onnx")
    assert "    past_key          F   W   .   .   S   ~   F   F" in text
    assert "    layer             0   1   2   3   4   5   6   7" in text
    page = Page(render_html(found[:1])).text
    assert "    past_key          F   W   .   .   S   ~   F   F" in page


def test_kinds_and_states_have_colours_in_pictures(found: tuple[ModelSummary, ...]) -> None:
    fills = set(re.findall(r'<rect fill="(#\w+)"', render_svg(found[:1])))
    assert len(fills) >= 5  # four kinds, and the legend's white
    assert fills <= set(re.findall(r"background-color: (#\w+)", render_html(found[:1])))


def test_pictures_stand_alone(found: tuple[ModelSummary, ...]) -> None:
    for picture in (render_svg(found), render_html(found)):
        assert set(re.findall(r"\w+://[^\s\"']+", picture)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"@import|@font-face|url\((?!#)|<link|src=", picture)


def test_a_picture_is_the_same_wherever_it_is_made(
    found: tuple[ModelSummary, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    svg, html = render_svg(found), render_html(found)
    for name, value in {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "20", "LANG": "C"}.items():
        monkeypatch.setenv(name, value)
    assert (render_svg(found), render_html(found)) == (svg, html)


def test_hostile_names_are_text_in_pictures(found: tuple[ModelSummary, ...]) -> None:
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    shown = shown.replace("\x00", "\\x00").replace("\udcff", "\\xff")
    text = "\n".join(lines(render_svg(found)))
    assert shown in text
    page = Page(render_html(found))
    assert shown in page.text
    assert page.tags == {"html", "head", "meta", "title", "style", "body", "pre", "span"}
    for picture in (render_svg(found), render_html(found)):
        assert not set(picture) & {"\x1b", "\u202e", "\x00", "\udcff"}
        assert picture.encode("utf-8")


def test_another_model_changes_only_its_own_lines(found: tuple[ModelSummary, ...]) -> None:
    one, two = (render_svg([model]) for model in (found[0], found[0]._replace(path="m.onnx")))
    assert len(set(one.splitlines()) ^ set(two.splitlines())) == 2  # all text is in one line


def test_a_long_path_is_folded(found: tuple[ModelSummary, ...]) -> None:
    long = found[0]._replace(path="x" * 300)
    assert "".join(lines(render_svg([long]))).count("x" * 80) == 3
    assert Page(render_html([long])).text.count("x") >= 300


def test_every_line_is_inside_the_picture(found: tuple[ModelSummary, ...]) -> None:
    picture = render_svg(found)
    box = ElementTree.fromstring(picture).attrib["viewBox"]
    width, height = map(float, box.split()[2:])
    for item in texts(picture):
        assert float(item.attrib["y"]) < height
        assert float(item.attrib["x"]) + float(item.attrib["textLength"]) <= width + 1


def test_no_models_are_an_empty_picture() -> None:
    assert lines(render_svg(())) == []
    assert "<body><pre>\n</pre></body>" in render_html(())
