"""Hook for mkdocs: the JSON Schema of `inspect`, and on its page a table for each record.

Run as a script, it prints the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from onnxkvrename.report.documents import load_document

PAGE = "inspect.md"
MARK = "<!-- schema -->"
SCHEMA = load_document("inspect").build_schema()


def on_files(files: Any, config: Any) -> Any:
    """Add the schema to the site as a file."""
    from mkdocs.structure.files import File

    text = json.dumps(SCHEMA, indent=2)
    files.append(File.generated(config, "schemas/inspect.json", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Put tables where the page of `inspect` has its mark."""
    return render_tables(markdown) if page.file.src_uri == PAGE else markdown


def render_tables(markdown: str) -> str:
    """Return the page with a table for the document and for each record in it."""
    return markdown.replace(MARK, "\n\n".join(_list_sections()))


def _list_sections() -> Iterator[str]:
    yield "[JSON Schema](schemas/inspect.json)"
    yield _render_fields(SCHEMA)
    for name, record in SCHEMA["$defs"].items():
        yield f"### {name}"
        yield record["description"]
        yield _render_fields(record)


def _render_fields(schema: dict[str, Any]) -> str:
    rows = [
        f"| `{name}` | {_format_type(value)} | {value['description']} |"
        for name, value in schema["properties"].items()
    ]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])


def _format_type(value: dict[str, Any]) -> str:
    """Return the type of a value in words, with links to records."""
    if "$ref" in value:
        record = value["$ref"].rpartition("/")[2]
        return f"[{record}](#{record.lower()})"
    if "anyOf" in value:
        return " or ".join(map(_format_type, value["anyOf"]))
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join("null" if each is None else f"`{each}`" for each in value["enum"])
    items, values = value.get("items"), value.get("additionalProperties")
    if items:
        return f"list of {_format_type(items)}"
    if values:
        return f"object of {_format_type(values)}"
    return {"array": "list", "boolean": "true or false"}.get(value["type"], value["type"])


def find_undescribed(schema: dict[str, Any]) -> list[str]:
    """Return the fields of a schema that have no description."""
    return [
        name
        for part in (schema, *schema["$defs"].values())
        for name, field in part["properties"].items()
        if not field.get("description")
    ]


if __name__ == "__main__":
    print(json.dumps(SCHEMA, indent=2))
