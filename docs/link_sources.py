"""Hook for mkdocs: what pages have on the site, and not on GitHub.

Files of the repository that pages link to become part of the site. A heading with
`<!-- api NAME -->` below it becomes the signature and the docstring of NAME.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
SOURCES = "sources"
_API = re.compile(r"^### (\w+)\n\n.+\n\n<!-- api \1 -->$", re.MULTILINE)
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

    return _API.sub(_ask_for_docstring, _LINK.sub(translate, markdown))


def _ask_for_docstring(match: re.Match[str]) -> str:
    name = match[1]
    return f'<a id="{name.lower()}"></a>\n\n::: onnxkvrename.{name}'
