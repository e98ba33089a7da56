"""Elements of HTML and SVG, in which every text from a file is escaped.

A document is a tree of elements, never a string put together: what a name contains becomes text,
never markup. As in a terminal, controls and characters that reorder or hide others are shown as
escapes. `isolate` keeps letters that are written from right to left to their own name.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from onnxkvrename.report.inert import escape_json, escape_text

Child = Element | str | None
"""An element, a text, or nothing."""
Value = str | float | bool | None
"""The value of an attribute: True for one without a value; False and ``None`` leave it out."""

_LINES = frozenset(
    {
        *("article", "aside", "body", "div", "footer", "h1", "h2", "h3", "h4", "head", "header"),
        *("legend", "li", "main", "meta", "nav", "ol", "p", "script", "section", "style", "table"),
        *("tbody", "thead", "title", "tr", "ul"),
        *("defs", "g", "path", "rect", "svg", "text"),
    }
)
"""Elements that end a line of the file: white space after them means nothing."""
_VERBATIM = ("script", "style")
"""Elements of HTML whose text is not parsed, and so cannot be escaped."""


def build(tag: str, *children: Child | Iterable[Child], **attributes: Value) -> Element:
    """Return an element.

    Args:
        tag: Its name.
        children: Texts and elements, in order, or iterables of them; ``None`` is left out.
        attributes: Its attributes. An underscore is a hyphen, one at the end is dropped:
            ``class_="row"``, ``aria_label="layer 3"``.

    Raises:
        ValueError: `tag` is ``script`` or ``style``: their text cannot be escaped.
    """
    if tag in _VERBATIM:
        raise ValueError(f"{tag}: its text cannot be escaped; write_page takes it")
    element = Element(tag, _format_attributes(attributes))
    for child in children:
        if child is None or isinstance(child, str | Element):
            _append(element, child)
        else:
            for item in child:
                _append(element, item)
    return element


def isolate(name: str) -> Element:
    """Return a name in an element of its own, whatever direction its letters have."""
    return build("bdi", name)


def isolate_words(text: str, build_word: Callable[[str], Element] = isolate) -> Iterator[Child]:
    """Yield a text with each word from right to left in an element of its own.

    Else a shape such as ``[batch, 8, ctx, 64]`` would seem to have another order of its sizes.

    Args:
        text: The text.
        build_word: Returns the element of such a word.
    """
    if text.isascii():
        yield text
        return
    for word in re.split(r"([\s,;:()\[\]]+)", escape_text(text)):  # before it is in pieces
        is_reversed = any(unicodedata.bidirectional(char) in ("R", "AL") for char in word)
        yield build_word(word) if is_reversed else word


def offer_breaks(text: str) -> Iterator[Child]:
    """Yield a text whose lines rather break after a slash than inside a name.

    Each part of a path is a ``span`` of the class ``part``, which a style makes a box of its own.
    """
    for word in re.split(r"(\s+)", escape_text(text)):
        parts = re.split(r"(?<=[^/]/)(?=.)", word)
        if len(parts) == 1:
            yield from isolate_words(word)
        else:
            yield from (build("span", isolate_words(part), class_="part") for part in parts)


def cut_middle(name: str, limit: int) -> str:
    """Return a name for a heading: both ends of a long one."""
    half = limit // 2
    return name if len(name) <= limit else f"{name[:half]}…{name[half + 1 - limit :]}"


def build_data(identifier: str, value: object) -> Element:
    """Return an HTML element with a JSON value for a script, which is not run.

    Args:
        identifier: Its ``id``.
        value: What :mod:`json` can write. A script must put texts of it in place as text
            (``textContent``); they are escaped here as all texts of a page are.
    """
    text = escape_json(json.dumps(_escape_strings(value), separators=(",", ":")))
    element = Element("script", {"type": "application/json", "id": identifier})
    element.text = text.replace("<", "\\u003c")
    return element


def build_verbatim(tag: str, text: str) -> Element:
    """Return a ``style`` or ``script`` of HTML with a text of ours.

    Raises:
        ValueError: The text would end the element, or hide its end.
    """
    if "</" in text or "<!--" in text:
        raise ValueError(f"a {tag} contains </ or <!--")
    element = Element(tag)
    element.text = text
    return element


def write_html(root: Element) -> str:
    """Return an HTML document."""
    _break_lines(root)
    return f"<!DOCTYPE html>\n{ElementTree.tostring(root, encoding='unicode', method='html')}\n"


def _append(element: Element, child: Child) -> None:
    if child is None or isinstance(child, Element):
        if child is not None:
            element.append(child)
        return
    text = escape_text(child)
    if len(element):
        element[-1].tail = (element[-1].tail or "") + text
    else:
        element.text = (element.text or "") + text


def _format_attributes(attributes: dict[str, Value]) -> dict[str, str]:
    shown = {}
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        text = "" if value is True else f"{value:.10g}" if isinstance(value, float) else str(value)
        shown[name.rstrip("_").replace("_", "-")] = escape_text(text)
    return shown


def _escape_strings(value: object) -> object:
    if isinstance(value, str):
        return escape_text(value)
    if isinstance(value, dict):
        return {str(key): _escape_strings(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escape_strings(item) for item in value]
    return value


def _break_lines(root: Element) -> None:
    """Begin a line after each element that ends one, so that two pages can be compared."""
    for element in root.iter():
        if element is not root and element.tag in _LINES and element.tail is None:
            element.tail = "\n"
