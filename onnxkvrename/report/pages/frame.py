"""The frame of a page: its head, colors for light and dark, landmarks, and what may run on it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple
from xml.etree.ElementTree import Element

from onnxkvrename.report.pages.elements import (
    Child,
    build,
    build_verbatim,
    offer_breaks,
    write_html,
)

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif'
"""The fonts of the system, for text."""
CODE_FONT = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace'
"""The fonts of the system, for names and code."""


class Color(NamedTuple):
    """A color of a page, as CSS writes it.

    Attributes:
        light: On a light page.
        dark: On a dark page.
    """

    light: str
    dark: str


COLORS: Mapping[str, Color] = MappingProxyType(
    {
        "paper": Color("#ffffff", "#0d1117"),
        "card": Color("#f6f8fa", "#161b22"),
        "ink": Color("#1f2328", "#e6edf3"),
        "muted": Color("#59636e", "#9ba3ad"),
        "line": Color("#d1d9e0", "#3d444d"),
        "accent": Color("#0860ca", "#58a6ff"),
        "bad": Color("#c21c28", "#ff7b72"),
        "warning": Color("#7d4e00", "#e3b341"),
        "good": Color("#116329", "#56d364"),
    }
)
"""The colors of a page, which a style names ``var(--paper)``.

Text can have each of them on ``paper`` and on ``card`` (WCAG AA), except for ``line``.
"""

_STYLE = f"""
* {{ box-sizing: border-box }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.5 {FONT} }}
body > * {{ padding: 0 clamp(12px, 3vw, 40px) }}
body > header {{ padding-top: 24px }}
body > footer {{ padding-bottom: 24px; color: var(--muted); font-size: .875rem }}
p, li, dd {{ max-width: 80ch }}
h1 {{ font-size: clamp(1.25rem, 4vw, 1.875rem); line-height: 1.2; margin: 0 0 8px }}
h2 {{ font-size: 1.25rem; line-height: 1.3; margin: 32px 0 8px }}
h3 {{ font-size: 1rem; margin: 20px 0 6px }}
h1, h2, h3 {{ text-wrap: balance; break-after: avoid }}
h1, h2, h3, p, li, td, th, dd, .part {{ overflow-wrap: anywhere }}
code, pre, bdi {{ font-family: {CODE_FONT}; font-size: .92em }}
.part {{ display: inline-block }}
a {{ color: var(--accent) }}
:focus-visible {{ outline: 2px solid var(--accent); outline-offset: 2px }}
@media (prefers-reduced-motion: reduce) {{ * {{ transition: none; animation: none }} }}
"""


def write_page(
    title: str,
    *,
    command: str,
    body: Iterable[Element],
    introduction: Iterable[Child] = (),
    style: str = "",
    script: str = "",
) -> str:
    """Return a page that needs nothing but itself: no network, no other file.

    Its Content-Security-Policy allows this one style and this one script, by their digests. So no
    element may have a ``style`` or an ``on...`` attribute; a script may set ``element.style``.
    The body is inside ``main``, below a ``header`` with the heading of level 1.

    Args:
        title: The title of the page, and its heading.
        command: The command that makes it, such as ``inspect``; see `make_mark`.
        body: What follows the heading; its headings begin at level 2.
        introduction: Below the heading.
        style: CSS; `COLORS` are variables in it.
        script: JavaScript, at the end of the body. It takes data from
            :func:`~onnxkvrename.report.pages.elements.build_data`.
    """
    css = f"{write_color_variables()}{_STYLE}{style}"
    policy = (
        f"default-src 'none'; style-src '{_digest(css)}'; "
        f"script-src {_quote_digest(script)}; base-uri 'none'; form-action 'none'"
    )
    head = build(
        "head",
        build("meta", charset="utf-8"),
        build("meta", name="generator", content=make_mark(command)),
        build("meta", http_equiv="Content-Security-Policy", content=policy),
        build("meta", name="viewport", content="width=device-width, initial-scale=1"),
        build("meta", name="color-scheme", content="light dark"),
        build("title", title),
        build_verbatim("style", css),
    )
    page_body = build(
        "body",
        build("header", build("h1", offer_breaks(title)), introduction),
        build("main", body),
        build("footer", build("p", "Made by ", build("code", f"onnxkvrename {command}"), ".")),
        build_verbatim("script", script) if script else None,
    )
    return write_html(build("html", head, page_body, lang="en"))


def make_mark(command: str) -> str:
    """Return what a page or picture of a command says of itself."""
    return f"made by onnxkvrename {command}"


def build_start_pattern(command: str) -> str:
    """Return a regular expression for the beginning of a page; only such files are replaced."""
    return re.escape(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="generator" content="{make_mark(command)}">'
    )


def write_color_variables(colors: Mapping[str, Color] = COLORS) -> str:
    """Return CSS that defines colors as variables, for a light page and for a dark one."""
    light, dark = (
        "; ".join(f"--{name}: {color[shade]}" for name, color in colors.items()) for shade in (0, 1)
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )


def _digest(text: str) -> str:
    """Return the digest of an inline style or script, as a policy names it."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _quote_digest(script: str) -> str:
    return f"'{_digest(script)}'" if script else "'none'"
