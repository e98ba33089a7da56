"""Read a TOML document key by key, with errors that name the key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from onnxkvrename.errors import RulesError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_T = TypeVar("_T", str, list[Any], dict[str, Any])


class TableReader:
    """A TOML table whose keys are taken out as they are read.

    Every method that reads a key raises :class:`RulesError`, naming the document and
    the key, if the value is missing (unless there is a default) or has another type.

    Attributes:
        unread: The keys that have not been read, with their values.
    """

    def __init__(self, table: Mapping[str, Any], document: str, prefix: str = "") -> None:
        self.unread = dict(table)
        self._document = document
        self._prefix = prefix

    def build_error(self, key: str, message: str) -> RulesError:
        """Return an error about a key of this table."""
        return RulesError(f"{self._prefix}{key}: {message}", path=self._document)

    def read_string(self, key: str, default: str | None = None) -> str:
        """Read text."""
        return self._read_value(key, str, default)

    def read_strings(self, key: str) -> tuple[str, ...]:
        """Read a list of text, which may be missing."""
        values = self._read_value(key, list, [])
        if not all(isinstance(value, str) for value in values):
            raise self.build_error(key, "must be a list of text")
        return tuple(values)

    def read_string_map(self, key: str) -> dict[str, str]:
        """Read a table of text, which may be missing."""
        table = self._read_value(key, dict, {})
        if not all(isinstance(value, str) for value in table.values()):
            raise self.build_error(key, "must map text to text")
        return dict(table)

    def read_list_map(self, key: str) -> dict[str, tuple[str, ...]]:
        """Read a table of lists of text."""
        table = self._read_value(key, dict)
        for value in table.values():
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise self.build_error(key, "must map a kind to a list of buffer names")
        return {name: tuple(value) for name, value in table.items()}

    def read_table(self, key: str) -> TableReader:
        """Read a table, which may be missing."""
        table = self._read_value(key, dict, {})
        return TableReader(table, self._document, f"{self._prefix}{key}.")

    def read_tables(self, key: str) -> list[TableReader]:
        """Read a list of tables, which may be missing."""
        tables = self._read_value(key, list, [])
        if not all(isinstance(table, dict) for table in tables):
            raise self.build_error(key, f"must be tables, written [[{key}]]")
        return [
            TableReader(table, self._document, f"{self._prefix}{key}[{index}].")
            for index, table in enumerate(tables)
        ]

    def reject_unread_keys(self) -> None:
        """Raise :class:`RulesError` for the first key that has not been read."""
        for key in self.unread:
            raise self.build_error(key, "is not known here")

    def _read_value(self, key: str, expected: type[_T], default: _T | None = None) -> _T:
        value = self.unread.pop(key, default)
        if value is None:
            raise self.build_error(key, "is missing")
        if not isinstance(value, expected):
            name = type(value).__name__
            raise self.build_error(key, f"must be a {expected.__name__}, not {name}")
        return value


def parse_toml(text: str, document: str) -> TableReader:
    """Parse a TOML document.

    Args:
        text: The document.
        document: What messages call it.

    Raises:
        RulesError: The text is not TOML, or is nested too deep for the parser.
    """
    try:
        return TableReader(tomllib.loads(text), document)
    except (RecursionError, ValueError) as error:
        raise RulesError(f"not TOML: {error}", path=document) from None
