"""The JSON schema of what `inspect` prints, which others read as a file."""

from __future__ import annotations

from typing import Any

import jsonschema
from schema_tables import SCHEMA

VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def validate(document: Any) -> None:
    """Check a document by the schema, which tests/report/test_schemas.py has checked."""
    VALIDATOR.validate(document)
