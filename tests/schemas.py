"""The JSON schemas of all documents."""

from __future__ import annotations

from typing import Any

import jsonschema
from schema_tables import SCHEMAS


def load_schema(name: str) -> Any:
    """Return the schema of a document such as ``report-1``."""
    return SCHEMAS[name]


def validate(document: Any, schema: Any) -> None:
    """Check a document by a schema of ours, which tests/report/test_schemas.py has checked."""
    jsonschema.Draft202012Validator(schema).validate(document)
