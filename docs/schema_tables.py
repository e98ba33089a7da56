"""Hook for mkdocs: the JSON Schemas, and on the page about them a table for each record.

Run as a script, it prints one schema: `python docs/schema_tables.py report-1`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from onnxkvrename.report.documents import MODULES, load_document

PAGE = "schemas.md"
MARK = re.compile("<!-- (?:schema ([a-z0-9-]+)|records) -->")
SCHEMAS = {
    document.schema.partition(".")[2].replace("/", "-"): document.build_schema()
    for document in map(load_document, MODULES)
}


def on_files(files: Any, config: Any) -> Any:
    """Add each schema to the site as a file."""
    from mkdocs.structure.files import File

    for name, schema in SCHEMAS.items():
        text = json.dumps(schema, indent=2)
        files.append(File.generated(config, f"schemas/{name}.json", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Put tables where the page about the schemas has its marks."""
    return render_tables(markdown) if page.file.src_uri == PAGE else markdown


def render_tables(markdown: str) -> str:
    """Return the page with a table for each document and for each record in it."""
    return MARK.sub(lambda mark: "\n\n".join(_list_sections(mark[1])), markdown)


def _list_sections(name: str | None) -> Iterator[str]:
    """Yield the table of a document and those of its own records, or all shared records."""
    shared = list_shared_records()
    if name is None:
        yield from _render_records(shared, "")
        return
    title = name.rpartition("-")[0]
    yield f"[JSON Schema](schemas/{name}.json)"
    yield _render_fields(SCHEMAS[name], title)
    records = SCHEMAS[name]["$defs"]
    yield from _render_records({key: records[key] for key in records if key not in shared}, title)


def _render_records(records: dict[str, Any], title: str) -> Iterator[str]:
    for name, record in records.items():
        yield f"### {title}: {name}" if title else f"### {name}"
        yield record["description"]
        yield _render_fields(record, title)


@cache
def list_shared_records() -> dict[str, Any]:
    """Return the records that several documents have, by their names."""
    texts = [
        (record, json.dumps(definition))
        for schema in SCHEMAS.values()
        for record, definition in schema["$defs"].items()
    ]
    return {record: json.loads(text) for (record, text), n in Counter(texts).items() if n > 1}


def _render_fields(schema: dict[str, Any], title: str) -> str:
    rows = [
        f"| `{name}` | {_format_type(value, title)} | {value['description']} |"
        for name, value in schema["properties"].items()
    ]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])


def _format_type(value: dict[str, Any], title: str) -> str:
    """Return the type of a value in words, with links to the records of its document."""
    if "$ref" in value:
        record = value["$ref"].rpartition("/")[2]
        own = "" if record in list_shared_records() else f"{title}-"
        return f"[{record}](#{own}{record.lower()})"
    if "anyOf" in value:
        return " or ".join(_format_type(each, title) for each in value["anyOf"])
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join("null" if each is None else f"`{each}`" for each in value["enum"])
    items, values = value.get("items"), value.get("additionalProperties")
    if items:
        return f"list of {_format_type(items, title)}"
    if values:
        return f"object of {_format_type(values, title)}"
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
    print(json.dumps(SCHEMAS[sys.argv[1]], indent=2))
