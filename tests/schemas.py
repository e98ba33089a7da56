"""The JSON schemas that the package ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

import onnxkvrename

SCHEMAS = Path(onnxkvrename.__file__).parent / "report" / "schemas"


def load_schema(name: str) -> Any:
    """Return the parsed schema in the file ``name``."""
    return json.loads((SCHEMAS / name).read_text("utf-8"))


def validate(document: Any, schema: Any) -> None:
    """Check a document by a schema of ours, which tests/report/test_schemas.py has checked."""
    jsonschema.Draft202012Validator(schema).validate(document)
