"""Hook for mkdocs: what pages have on the site, and not on GitHub.

Files of the repository that pages link to become part of the site. `<!-- api -->` becomes the
signatures and the docstrings of all that the package offers.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from mkdocs.structure.files import File

import onnxkvrename

ROOT = Path(__file__).resolve().parent.parent
SOURCES = "sources"
_API = "<!-- api -->"
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def find_repository_path(page: str, link: str) -> str:
    """Return where a page's link leads, from the root of the repository."""
    is_copy = page.startswith(f"{SOURCES}/")
    base = page.removeprefix(f"{SOURCES}/") if is_copy else f"docs/{page}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(base), link))


def find_site_path(path: str) -> str:
    """Return the place in the site of a file of the repository."""
    inside = path.removeprefix("docs/")
    return inside if inside != path else f"{SOURCES}/{path}"


def on_files(files: Any, config: Any) -> Any:
    """Add the linked files, and those that they link to."""
    pages = [file for file in files if file.src_uri.endswith(".md")]
    while pages:
        page = pages.pop()
        for _, link, _ in _LINK.findall(page.content_string):
            path = find_repository_path(page.src_uri, link)
            place = find_site_path(path)
            if (ROOT / path).is_file() and files.get_file_from_path(place) is None:
                file = File.generated(config, place, abs_src_path=str(ROOT / path))
                files.append(file)
                if place.endswith(".md"):
                    pages.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Let links lead to the files' places in the site, and ask mkdocstrings for docstrings."""
    source = page.file.src_uri

    def translate(match: re.Match[str]) -> str:
        place = find_site_path(find_repository_path(source, match[2]))
        relative = posixpath.relpath(place, posixpath.dirname(source) or ".")
        return f"{match[1]}{relative}{match[3] or ''}"

    return _LINK.sub(translate, markdown).replace(_API, "\n\n".join(_ask_for_docstrings()))


def _ask_for_docstrings() -> Iterator[str]:
    """Yield a block of mkdocstrings for each name, functions first and exceptions last."""
    offered = {name: getattr(onnxkvrename, name) for name in onnxkvrename.__all__}
    for title, kind in (("Functions", FunctionType), ("Results", tuple), ("Exceptions", Exception)):
        yield f"## {title}"
        for name, value in offered.items():
            if isinstance(value, kind) or (isinstance(value, type) and issubclass(value, kind)):
                yield f"::: onnxkvrename.{name}"
