"""Records as JSON: named tuples, written as objects, read back, and described by a schema.

What the docstring of a record says of its fields is what the schema says of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from inspect import cleandoc
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from onnxkvrename import __version__
from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.errors import KvRenameError
from onnxkvrename.limits import MAX_INT64

_Record = TypeVar("_Record")
_PLAIN_TYPES = frozenset({str, int, float, bool, type(None)})


class Head(NamedTuple):
    """The first members of every document.

    Attributes:
        schema: Name and version of this format.
        version: The version of onnxkvrename that wrote the document.
        command: The command that wrote the document.
    """

    schema: str
    version: str
    command: str


class Tail(NamedTuple):
    """The last members of every document.

    Attributes:
        error: Why the job could not be done; `None` if it was done.
        exit_code: The exit code of the command.
    """

    error: KvRenameError | None
    exit_code: Literal[0, 1, 2, 130]


class Error(NamedTuple):
    """Why something could not be done.

    Attributes:
        message: What is wrong, in one sentence.
        path: The file that it is about; `None` for the job as a whole.
        hint: How to fix it.
    """

    message: str
    path: str | None
    hint: str | None


class Document(NamedTuple):
    """The JSON document of a command.

    Attributes:
        schema: Name and version of its schema.
        command: The command.
        empty: Its content for a job that could not be done: a record of the command's own members.
    """

    schema: str
    command: str
    empty: tuple[Any, ...]

    def render(
        self, content: tuple[Any, ...], code: int, error: KvRenameError | None = None
    ) -> str:
        """Return the document as text.

        Args:
            content: The command's own members, a record like `empty`.
            code: The exit code of the command.
            error: Why the job could not be done; `None` if it was done.
        """
        import json  # a dry run loads this module, and writes none

        head, tail = Head(self.schema, __version__, self.command), Tail(error, cast(Any, code))
        values = {**serialize(head), **serialize(content), **serialize(tail)}
        return json.dumps(values, indent=2)

    def build_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the document."""
        schema = build_schema(self.schema, type(self.empty), (Head,), (Tail,))
        for name, value in {"schema": self.schema, "command": self.command}.items():
            schema["properties"][name]["const"] = value
        return schema


class Spread(NamedTuple):
    """In the annotation of a field: its place in JSON is taken by the members of its record.

    Attributes:
        names: What its first members are called, without the others; by default all are there, and
            keep their names.
    """

    names: tuple[str, ...] = ()


def fill_record(record: type[_Record], source: object, **values: Any) -> _Record:
    """Return a record with the attributes of another object that have its fields' names.

    Args:
        record: The type of the record.
        source: The other object.
        values: The other fields.
    """
    names = [name for name in cast(Any, record)._fields if name not in values]
    return record(**{name: getattr(source, name) for name in names}, **values)


def serialize(value: Any) -> Any:
    """Return a value as JSON has it: records as objects, errors as the record `Error`."""
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, (tuple, list)):
        items = list(map(serialize, value))
        return _name_members(value, items) if hasattr(value, "_fields") else items
    if isinstance(value, Mapping):
        return {key: serialize(item) for key, item in value.items()}
    if isinstance(value, KvRenameError):
        return serialize(fill_record(Error, value))
    return str(value) if isinstance(value, Path) else value


def _name_members(record: Any, items: list[Any]) -> dict[str, Any]:
    """Return the members of a record as JSON has them."""
    members: dict[str, Any] = {}
    spreads = _find_spreads(cast(Any, type(record)))
    for name, item in zip(record._fields, items, strict=True):
        if name in spreads:
            members |= {to: item[own] for own, to in spreads[name].names.items()}
        else:
            members[name] = item
    return members


class _SpreadField(NamedTuple):
    """The record of a field that is spread, and what its members are called there."""

    record: Any
    names: Mapping[str, str]


@cache
def _find_spreads(record: Any) -> Mapping[str, _SpreadField]:
    """Return the fields of a record that are spread."""
    spreads = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        for detail in get_args(hint)[1:]:
            if isinstance(detail, Spread):
                inner = get_args(hint)[0]
                own = _list_members(inner)
                names = dict(zip(own, detail.names or own, strict=False))
                spreads[name] = _SpreadField(inner, names)
    return spreads


def _list_members(record: Any) -> list[str]:
    """Return the members of a record in JSON."""
    spreads = _find_spreads(record)
    members: list[str] = []
    for name in record._fields:
        members += spreads[name].names.values() if name in spreads else (name,)
    return members


def read_record(record: type[_Record], values: object) -> _Record:
    """Return the record in a parsed document.

    Members that the record does not know are ignored; those that are missing have its defaults.

    Args:
        record: The type of the record.
        values: What :func:`onnxkvrename.documents.parse_json` returns.

    Raises:
        UnreadableTextError: A member is missing, or has another type; the message begins with
            its path, as in ``buffers[3].layer: expected int, got str``. Or a number does not fit
            into 64 bits: others could not be printed once they are multiplied.
    """
    import msgspec

    try:
        found = msgspec.convert(values, _define_struct(cast(Any, record)))
    except msgspec.ValidationError as error:
        problem, _, place = str(error).replace("`", "").partition(" - at $")
        problem = f"{problem[0].lower()}{problem[1:]}"
        path = place.removeprefix(".")
        raise UnreadableTextError(f"{path}: {problem}" if path else problem) from None
    except UnicodeEncodeError:
        raise UnreadableTextError("has half a surrogate pair, which is not Unicode") from None
    return cast(_Record, _restore(found))


def _restore(value: Any) -> Any:
    """Return what msgspec read, with records instead of its structs."""
    record = getattr(value, "__record__", None)
    if record is not None:
        members = {name: _restore(getattr(value, name)) for name in value.__struct_fields__}
        return _build_record(record, members)
    if isinstance(value, dict):
        return {key: _restore(item) for key, item in value.items()}
    if isinstance(value, int) and abs(value) > MAX_INT64:
        raise UnreadableTextError("has a number that does not fit into 64 bits")
    return tuple(map(_restore, value)) if isinstance(value, tuple) else value


def _build_record(record: Any, members: Mapping[str, Any]) -> Any:
    """Return a record with these members of JSON."""
    spreads = _find_spreads(record)
    values = {name: members[name] for name in record._fields if name in members}
    for name, (inner, names) in spreads.items():
        own = {own: members[to] for own, to in names.items()}
        values[name] = _build_record(inner, own)
    return record(**values)


def build_schema(
    name: str, record: type, before: Sequence[type] = (), after: Sequence[type] = ()
) -> dict[str, Any]:
    """Return the JSON Schema of an object, which has every member and no others.

    Args:
        name: Name and version of the schema.
        record: The record with its members; the first line of its docstring is the title.
        before: Records with members that precede them.
        after: Records with members that follow them.
    """
    import msgspec

    fields = [field for part in (*before, record, *after) for field in _list_fields(part)]
    struct = msgspec.defstruct(record.__name__, fields, module=record.__module__, kw_only=True)
    (reference,), parts_by_name = msgspec.json.schema_components([struct])
    for part in parts_by_name.values():
        if "properties" in part:
            part |= {"required": list(part["properties"]), "additionalProperties": False}
            for field in part["properties"].values():
                field.pop("default", None)
    title = cleandoc(record.__doc__ or "").partition("\n")[0].removesuffix(".")
    own = parts_by_name.pop(reference["$ref"].rpartition("/")[2])
    address = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": address, "$id": name, **own, "title": title, "$defs": parts_by_name}


@cache
def _define_struct(record: Any) -> Any:
    """Return the msgspec struct with the fields of a record."""
    import msgspec

    summary = cleandoc(record.__doc__ or "").partition("\n\n")[0]
    namespace = {"__doc__": " ".join(summary.split()), "__record__": record}
    return msgspec.defstruct(
        record.__name__,
        _list_fields(record),
        module=record.__module__,
        namespace=namespace,
        kw_only=True,
    )


def _list_fields(record: Any) -> list[tuple[Any, ...]]:
    """Return the fields of a record as msgspec takes them, with what the docstring says of each."""
    import msgspec

    section = cleandoc(record.__doc__ or "").partition("\nAttributes:\n")[2]
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, re.MULTILINE))
    fields: list[tuple[Any, ...]] = []
    spreads = _find_spreads(record)
    for name, hint in get_type_hints(record, include_extras=True).items():
        if name in spreads:
            inner, names = spreads[name]
            fields += [(names[own], *rest) for own, *rest in _list_fields(inner) if own in names]
            continue
        meaning = " ".join(texts.get(name, "").split()).replace("``", "`").replace("`None`", "null")
        default = record._field_defaults.get(name, msgspec.NODEFAULT)
        kind = cast(Any, Annotated)[_translate_hint(hint), msgspec.Meta(description=meaning)]
        fields.append((name, kind, default))
    return fields


def _translate_hint(hint: Any) -> Any:
    """Return a type with structs instead of records, and with the texts that a function lists."""
    if get_origin(hint) is Annotated:
        (list_texts,) = hint.__metadata__
        return Literal[list_texts()]
    if hint is KvRenameError:
        return _define_struct(Error)
    if hint is Path:
        return str
    if hasattr(hint, "_fields"):
        return _define_struct(hint)
    kind, parts = get_origin(hint), get_args(hint)
    if kind is None or kind is Literal:
        return hint
    translated = tuple(map(_translate_hint, parts))
    return Union[translated] if kind in (Union, UnionType) else kind[translated]  # noqa: UP007
