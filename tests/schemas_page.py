"""The tables in docs/schemas.md; run as a script, this file writes them again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from schemas import SCHEMAS, load_schema

PAGE = Path(__file__).resolve().parent.parent / "docs" / "schemas.md"
COMMANDS = {
    "report-1.json": "`onnxkvrename MODEL... --format json`",
    "verify-1.json": "`onnxkvrename verify MODEL... --format json`",
    "inspect-1.json": "`onnxkvrename inspect MODEL... --format json`",
    "check-consumer-1.json": "`onnxkvrename check-consumer MODEL... --format json`",
    "compare-1.json": "`onnxkvrename compare PREFILL DECODE --format json`",
    "manifest-1.json": "`onnxkvrename manifest MODEL...`",
    "projection-1.json": "`vllm` of a manifest with `--block-size N`",
    "pairs-1.json": "`onnxkvrename pairs MODEL... --format json`",
    "recover-1.json": "`onnxkvrename recover DIRECTORY --format json`",
}
"""Each schema with what prints such a document."""

_TABLES = re.compile(r"(?<=<!-- schemas -->\n).*(?=<!-- /schemas -->)", re.DOTALL)


class Field(NamedTuple):
    """A row of a table."""

    name: str
    type: str
    meaning: str


def render_page(text: str) -> str:
    """Return the page with the tables of all schemas as they are now."""
    return _TABLES.sub(lambda match: render_tables(), text)


def render_tables() -> str:
    """Return an overview, and for each schema a table for the document and for each part."""
    overview = ["| document | schema |", "|---|---|"]
    sections = []
    for file, command in COMMANDS.items():
        schema = load_schema(file)
        name = file.removesuffix(".json")
        title = name.removesuffix("-1")
        overview.append(f"| {command} | [{name}](#{title}) |")
        link = f"../onnxkvrename/report/schemas/{file}"
        sections += [f"## {title}", f"{schema['title']}: {command} ([schema]({link}))."]
        sections.append(_render_fields(schema, title, schema))
        for part, definition in schema.get("$defs", {}).items():
            if "properties" in definition or "oneOf" in definition:
                sections.append(f"### {title}: {part}")
                if "description" in definition:
                    sections.append(definition["description"])
                sections.append(_render_fields(definition, title, schema))
    return "\n".join(overview) + "\n\n" + "\n\n".join(sections) + "\n"


def list_fields(schema: dict[str, Any], title: str, root: dict[str, Any]) -> Iterator[Field]:
    """Yield the fields of an object, those of objects in it with the name of both."""
    alternatives = schema.get("oneOf", ())
    for part in (schema, *alternatives):
        for name, value in part.get("properties", {}).items():
            meaning = value.get("description", "")
            yield Field(f"`{name}`", _format_type(value, title, root), meaning)
            for holder, suffix in _list_holders(value):
                for inner in list_fields(holder, title, root):
                    yield inner._replace(name=f"`{name}{suffix}.{inner.name[1:]}")


def _list_holders(value: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the schemas inside a value that have fields of their own, each with its suffix."""
    suffix = ""
    while "items" in value:
        value, suffix = value["items"], f"{suffix}[]"
    yield value, suffix


def _render_fields(schema: dict[str, Any], title: str, root: dict[str, Any]) -> str:
    rows = [
        f"| {name} | {kind} | {meaning} |".replace("  |", " |")
        for name, kind, meaning in list_fields(schema, title, root)
    ]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])


def _format_type(value: dict[str, Any], title: str, root: dict[str, Any]) -> str:
    """Return the type of a value in words, with links to the parts of its document."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        definition = root["$defs"].get(name) if value["$ref"].startswith("#") else None
        if definition is None:
            return f"[{name.removesuffix('-1.json')}](#{name.removesuffix('-1.json')})"
        if "properties" in definition or "oneOf" in definition:
            return f"[{name}](#{title}-{name})"
        return _format_type(definition, title, root)
    for key in ("oneOf", "anyOf"):
        if key in value:
            return " or ".join(_format_type(each, title, root) for each in value[key])
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join("null" if each is None else f"`{each}`" for each in value["enum"])
    kinds = value.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join(_format_plain_type(kind, value, title, root) for kind in kinds)


def _format_plain_type(kind: str, value: dict[str, Any], title: str, root: dict[str, Any]) -> str:
    if kind == "array" and "items" in value:
        return f"list of {_format_type(value['items'], title, root)}"
    values = value.get("additionalProperties")
    if kind == "object" and isinstance(values, dict):
        return f"object of {_format_type(values, title, root)}"
    return {"array": "list", "boolean": "true or false"}.get(kind, kind)


def find_undescribed(schema: dict[str, Any]) -> list[str]:
    """Return the fields of a schema that have no description."""
    parts = [schema, *schema.get("$defs", {}).values()]
    return [
        field.name for part in parts for field in list_fields(part, "", schema) if not field.meaning
    ]


def list_schema_files() -> list[str]:
    """Return the names of the schemas that the package ships."""
    return sorted(path.name for path in SCHEMAS.glob("*.json"))


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text("utf-8")), "utf-8")
