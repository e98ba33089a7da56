"""Write a page for a browser: the template of a command, with its style and its script in it.

What a name contains becomes text, never markup: templates escape each value, and as in a terminal
controls and characters that reorder or hide others are shown as escapes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from onnxkvrename.files.read import read_text_file
from onnxkvrename.report.inert import escape_json, escape_text, shorten_text
from onnxkvrename.text import format_bytes, format_count

_SOURCES = Path(__file__).parent
_MAX_NAME = 120
_MAX_TEXT = 1500


def render_page(command: str, *, with_script: bool, more_style: str = "", **values: Any) -> str:
    """Return a page that needs nothing but itself: no network, no other file.

    Its Content-Security-Policy allows this one style and this one script, by their digests. So no
    element may have a ``style`` or an ``on...`` attribute; a script may set ``element.style``.

    Args:
        command: The command that makes it, such as ``inspect``, and has its template.
        with_script: Whether there is anything on the page that a script can move.
        more_style: CSS of ours, after that of the page.
        values: The other values of the template.
    """
    environment = Environment(
        loader=FileSystemLoader(_SOURCES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_escape_value,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "count": format_count,
        "data": _show_data,
        "name": _show_name,
        "text": _show_text,
    }
    style = "".join(read_text_file(_SOURCES / f"{name}.css") for name in ("page", command))
    style += more_style
    script = read_text_file(_SOURCES / f"{command}.js") if with_script else ""
    template = environment.get_template(f"{command}.html.j2")
    page = template.render(
        mark=make_mark(command),
        command=command,
        style=Markup(style),
        style_digest=_compute_digest(style),
        script=Markup(script),
        script_digest=_compute_digest(script) if script else "none",
        **values,
    )
    return f"{page}\n"


def make_mark(command: str) -> str:
    """Return what a page of a command says of itself."""
    return f"made by onnxkvrename {command}"


def build_start_pattern(command: str) -> str:
    """Return a regular expression for the beginning of a page; only such files are replaced."""
    return re.escape(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="generator" content="{make_mark(command)}">'
    )


def shorten_path(path: str, limit: int) -> str:
    """Return a path for a heading: both ends of a long one."""
    half = limit // 2
    return path if len(path) <= limit else f"{path[:half]}…{path[half + 1 - limit :]}"


def _compute_digest(text: str) -> str:
    """Return the digest of an inline style or script, as a policy names it."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _escape_value(value: object) -> object:
    """Return a value of a template without what a reader would not see; markup is ours."""
    return escape_text(value) if isinstance(value, str) and type(value) is not Markup else value


def _show_name(name: str) -> Markup:
    """Return a name in an element of its own, whatever direction its letters have.

    A path may break after its slashes.
    """
    shown = shorten_text(escape_text(name), _MAX_NAME)
    return Markup("<bdi>{}</bdi>").format(Markup("/<wbr>").join(shown.split("/")))


def _show_text(text: str) -> Markup:
    """Return a text, its commands as code, and each word from right to left in its own element.

    Else a shape such as ``[batch, 8, ctx, 64]`` would seem to have another order of its sizes.
    """
    shown = shorten_text(escape_text(text), _MAX_TEXT)
    parts = shown.split("`") if shown.count("`") % 2 == 0 else [shown]  # else it is in a name
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else _isolate_words(part)
        for number, part in enumerate(parts)
    )


def _isolate_words(text: str) -> Markup:
    if text.isascii():
        return Markup.escape(text)
    return Markup("").join(
        Markup("<bdi>{}</bdi>").format(word) if _is_reversed(word) else word
        for word in re.split(r"([\s,;:()\[\]]+)", text)
    )


def _is_reversed(word: str) -> bool:
    return any(unicodedata.bidirectional(char) in ("R", "AL") for char in word)


def _show_data(value: object) -> Markup:
    """Return JSON values for a script, which must put texts of it in place as text."""
    text = escape_json(json.dumps(_escape_strings(value), separators=(",", ":")))
    return Markup(text.replace("<", "\\u003c"))


def _escape_strings(value: object) -> object:
    if isinstance(value, str):
        return escape_text(value)
    if isinstance(value, dict):
        return {key: _escape_strings(item) for key, item in value.items()}
    return list(map(_escape_strings, value)) if isinstance(value, list | tuple) else value
