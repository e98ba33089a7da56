"""Read JSON and TOML text, and the values of a parsed document by their type."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from onnxkvrename.limits import MAX_DEPTH, MAX_INT64, shorten_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class UnreadableTextError(ValueError):
    """A text cannot be read, or does not have the expected form.

    Attributes:
        hint: How to fix it, if there is more to say than the expected form.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def build_depth_error() -> UnreadableTextError:
    """Return the error for text that is nested too deeply."""
    return UnreadableTextError(f"is nested more than {MAX_DEPTH} levels deep")


def parse_json(text: str) -> Any:
    """Return the value of a JSON text that every JSON reader understands in the same way.

    Args:
        text: The text, without a byte order mark.

    Returns:
        The value; objects keep the order of their keys.

    Raises:
        UnreadableTextError: The text is not JSON, is nested too deeply, has a key twice, NaN or an
            infinity, or a number that is too long.
    """
    import json  # a plain rename reads no JSON

    try:
        value = json.loads(
            text,
            object_pairs_hook=_build_object,
            parse_float=_parse_float,
            parse_constant=_reject_constant,
        )
    except json.JSONDecodeError as error:
        raise UnreadableTextError(f"is not JSON: {error}") from None
    except UnreadableTextError:
        raise
    except ValueError:  # Python converts no longer ones
        raise UnreadableTextError("has a number of too many digits") from None
    except RecursionError:
        raise build_depth_error() from None
    if _is_too_deep(value):
        raise build_depth_error()
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table of a TOML text.

    Raises:
        UnreadableTextError: The text is not TOML.
    """
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except (RecursionError, ValueError) as error:
        raise UnreadableTextError(f"not TOML: {error}") from None
    return table


class ObjectReader:
    """Reads the values of one object of a parsed document, each as the type it must have.

    Every method that reads raises `UnreadableTextError` with the full path of the key, for
    example ``buffers[3].layer must be an integer``, where the key is missing and has no default,
    or its value has another type. A truth value is not an integer.

    Args:
        values: An object of JSON, or a table of TOML.
        path: What messages put in front of a key.
        separator: What messages put between a key and the problem.

    Attributes:
        values: The object itself.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", separator: str = " ") -> None:
        self.values = values
        self._path = path
        self._separator = separator

    def read_string(self, key: str, default: str | None = None) -> str:
        """Return a text."""
        text: str = self._read(key, "text", str, default=default)
        return text

    def read_integer(self, key: str, minimum: int) -> int:
        """Return an integer of 64 bits that is not less than `minimum`."""
        number: int = self._read(key, "an integer", int)
        if number < minimum:
            raise self.build_error(key, f"is less than {minimum}")
        if number > MAX_INT64:
            raise self.build_error(key, "has a number that does not fit into 64 bits")
        return number

    def read_boolean(self, key: str, *, default: bool | None = None) -> bool:
        """Return a truth value."""
        value: bool = self._read(key, "true or false", bool, default=default)
        return value

    def read_strings(self, key: str, default: list[str] | None = None) -> list[str]:
        """Return a list of text."""
        return self._read_list(key, "a list of text", str, default)

    def is_null(self, key: str) -> bool:
        """Return whether a key is absent or null."""
        return self.values.get(key) is None

    def read_object(
        self, key: str, description: str = "an object", default: dict[str, Any] | None = None
    ) -> ObjectReader:
        """Return a reader of the object under a key; `description` is for the error."""
        values = self._read(key, description, dict, default=default)
        return ObjectReader(values, f"{self._path}{key}.", self._separator)

    def read_objects(
        self,
        key: str,
        description: str = "a list of objects",
        default: list[dict[str, Any]] | None = None,
    ) -> list[ObjectReader]:
        """Return a reader of each object in a list; `description` is for the error."""
        return [
            ObjectReader(values, f"{self._path}{key}[{index}].", self._separator)
            for index, values in enumerate(self._read_list(key, description, dict, default))
        ]

    def build_error(self, key: str, problem: str) -> UnreadableTextError:
        """Return the error for the value of a key; `problem` completes the sentence."""
        return UnreadableTextError(f"{self._path}{shorten_text(key)}{self._separator}{problem}")

    def _read(self, key: str, description: str, kind: type, default: Any = None) -> Any:
        if key not in self.values:
            if default is None:
                raise self.build_error(key, "is missing")
            return default
        if type(self.values[key]) is not kind:
            raise self.build_error(key, f"must be {description}")
        return self.values[key]

    def _read_list(self, key: str, description: str, kind: type, default: Any) -> list[Any]:
        items: list[Any] = self._read(key, description, list, default)
        if any(type(item) is not kind for item in items):
            raise self.build_error(key, f"must be {description}")
        return items


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise UnreadableTextError(f"has the key {shorten_text(key)!r} twice")
        values[key] = value
    return values


def _parse_float(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        raise UnreadableTextError(f"has the number {shorten_text(text)}, which is too large")
    return value


def _reject_constant(text: str) -> None:
    raise UnreadableTextError(f"has {text}, which is not JSON")


def _is_too_deep(value: Any) -> bool:
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        groups = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for group in groups for item in group if isinstance(item, (dict, list))]
    return bool(level)
