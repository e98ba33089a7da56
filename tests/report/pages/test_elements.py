"""Elements of pages: names from files are text in them, whatever they contain."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from onnxkvrename.report.pages.elements import (
    build,
    build_data,
    build_verbatim,
    cut_middle,
    isolate,
    isolate_words,
    offer_breaks,
    write_html,
)

HOSTILE = "</p><script>alert(1)</script>\"'&amp;\x1b[2J\u202e\x00\udcff##[error]漢"
SHOWN = "</p><script>alert(1)</script>\"'&amp;\\x1b[2J\\u202e\\x00\\xff#\\x23[error]漢"


class Document(HTMLParser):
    """The tags, the attributes and the text of an HTML document."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.text = ""
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_hostile_name_is_text_in_html() -> None:
    document = Document(write_html(build("p", "a ", isolate(HOSTILE), " b", title=HOSTILE)))
    assert document.tags == ["p", "bdi"]
    assert document.text.strip("\n") == f"a {SHOWN} b"
    assert document.attributes["title"] == SHOWN


def test_data_is_escaped_and_cannot_end_its_element() -> None:
    parser = Document(write_html(build("div", build_data("data", {"name": [HOSTILE, 3, None]}))))
    assert parser.tags == ["div", "script"]
    assert parser.attributes == {"type": "application/json", "id": "data"}
    assert json.loads(parser.text) == {"name": [SHOWN, 3, None]}
    assert "<" not in parser.text


def test_children_are_texts_elements_and_iterables_of_them() -> None:
    row = build("tr", None, (build("td", str(number)) for number in range(2)), "!")
    assert write_html(row).split("\n", 1)[1] == "<tr><td>0</td><td>1</td>!</tr>\n"


def test_words_from_right_to_left_keep_their_place() -> None:
    sizes = "[batch, 8, \u0633\u064a\u0627\u0642, 64]"
    assert write_html(build("p", isolate_words(sizes))) == (
        "<!DOCTYPE html>\n<p>[batch, 8, <bdi>\u0633\u064a\u0627\u0642</bdi>, 64]</p>\n"
    )
    assert list(isolate_words("[batch, 8]")) == ["[batch, 8]"]
    assert build("p", isolate_words("##[error]\u2026")).text == "#\\x23[error]\u2026"


def test_attributes_are_written_as_html_has_them() -> None:
    element = build("li", class_="a b", aria_hidden="true", hidden=False, value=3, id=None)
    assert element.attrib == {"class": "a b", "aria-hidden": "true", "value": "3"}
    assert build("details", open=True).attrib == {"open": ""}
    assert build("rect", x=1 / 3, stroke_width=2.0).attrib == {
        "x": "0.3333333333",
        "stroke-width": "2",
    }


@pytest.mark.parametrize("tag", ["script", "style"])
def test_a_script_or_a_style_is_never_made_from_names(tag: str) -> None:
    with pytest.raises(ValueError, match="cannot be escaped"):
        build(tag, "x")
    for text in ("a </b", "<!-- a"):
        with pytest.raises(ValueError, match="contains </"):
            build_verbatim(tag, text)


def test_a_path_breaks_after_its_slashes() -> None:
    line = build("h1", offer_breaks("KV cache of /exports/a b/model.onnx"))
    parts = [part.text for part in line.iter("span")]
    assert parts == ["/exports/", "a", "b/", "model.onnx"]
    assert "".join(line.itertext()) == "KV cache of /exports/a b/model.onnx"


def test_a_long_name_keeps_both_ends() -> None:
    assert cut_middle("abcdefghij", 10) == "abcdefghij"
    assert cut_middle("abcdefghijk", 10) == "abcde…hijk"
