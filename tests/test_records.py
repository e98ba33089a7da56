"""Records: written as JSON, read back by their types, described by a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import jsonschema
import pytest

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.records import (
    Document,
    Spread,
    build_schema,
    fill_record,
    read_record,
    serialize,
)


class Side(NamedTuple):
    """One side.

    Attributes:
        name: The name.
        shape: Sizes and symbols; ``None`` where
            that is not known.
    """

    name: str
    shape: tuple[int | str | None, ...] | None


class Content(NamedTuple):
    """What is in it.

    Attributes:
        sides: The sides by their labels.
        kind: One of two words.
        share: From 0 to 1.
        guessed: Whether it is a guess.
        error: Why it has none.
        path: The file.
    """

    sides: Mapping[str, Side]
    kind: Literal["old", "new"]
    share: float = 0.0
    guessed: bool = False
    error: KvRenameError | None = None
    path: Path | None = None


SIDES = MappingProxyType({"a": Side("\udcff", (1, "b", None)), "c": Side("", None)})
VALUES = {
    "sides": {"a": {"name": "\udcff", "shape": [1, "b", None]}, "c": {"name": "", "shape": None}},
    "kind": "new",
    "share": 0.5,
    "guessed": True,
    "error": None,
    "path": None,
}


def test_records_become_objects_however_deep_they_are() -> None:
    assert serialize(Content(SIDES, "new", 0.5, guessed=True)) == VALUES
    failed = Content({}, "old", error=ModelError("no such file", path="m.onnx"), path=Path("a/b"))
    assert serialize(failed)["error"] == {"message": "no such file", "path": "m.onnx", "hint": None}
    assert serialize(failed)["path"] == str(Path("a/b"))


class Place(NamedTuple):
    """Where something is.

    Attributes:
        row: The row.
        column: The column.
        note: For ourselves.
    """

    row: int
    column: int = 0
    note: str = ""


class Cell(NamedTuple):
    """A cell.

    Attributes:
        name: The name.
        place: Where it is.
    """

    name: str
    place: Annotated[Place, Spread(("row", "row_column"))]


class Table(NamedTuple):
    """A table.

    Attributes:
        cells: The cells with what is in them.
    """

    cells: tuple[FilledCell, ...]


class FilledCell(NamedTuple):
    """A cell, and what is in it.

    Attributes:
        cell: The cell.
        text: What is in it.
    """

    cell: Annotated[Cell, Spread()]
    text: str


def test_members_of_a_record_take_its_place() -> None:
    table = Table((FilledCell(Cell("a", Place(1, 2, "unseen")), "b"),))
    values = {"cells": [{"name": "a", "row": 1, "row_column": 2, "text": "b"}]}
    assert serialize(table) == values
    assert read_record(Table, values) == Table((FilledCell(Cell("a", Place(1, 2)), "b"),))
    del values["cells"][0]["row_column"]
    assert read_record(Table, values).cells[0].cell.place == Place(1)
    with pytest.raises(UnreadableTextError, match=r"cells\[0\]\.row: expected int, got str"):
        read_record(Table, {"cells": [{**values["cells"][0], "row": "1"}]})
    cell = build_schema("table/1", Table)["$defs"]["FilledCell"]
    assert list(cell["properties"]) == ["name", "row", "row_column", "text"]
    assert cell["properties"]["row_column"]["description"] == "The column."


def test_what_was_written_is_read_back_as_the_same_record() -> None:
    assert read_record(Content, VALUES) == Content(dict(SIDES), "new", 0.5, guessed=True)
    assert read_record(Content, {"sides": {}, "kind": "old", "later": []}) == Content({}, "old")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"kind": "other"}, "kind: "),
        ({"kind": None}, "kind: "),
        ({"guessed": 1}, "guessed: "),
        ({"share": "0"}, "share: "),
        ({"sides": []}, "sides: "),
        ({"sides": {"a": {"name": 1, "shape": None}}}, r"sides\[\.\.\.\]\.name: "),
        ({"sides": {"a": {"name": "", "shape": [1, True]}}}, r"sides\[\.\.\.\]\.shape\[1\]: "),
        ({"sides": {"a": {"name": ""}}}, r"sides\[\.\.\.\]: .* shape$"),
    ],
)
def test_another_type_is_refused_with_the_path_of_the_member(
    change: dict[str, object], path: str
) -> None:
    with pytest.raises(UnreadableTextError, match=f"^{path}") as refused:
        read_record(Content, {**VALUES, **change})
    assert "`" not in str(refused.value)


def test_a_number_that_nothing_counts_to_is_refused() -> None:
    side = {"name": "", "shape": [2**63 - 1]}
    assert read_record(Side, side).shape == (2**63 - 1,)
    with pytest.raises(UnreadableTextError, match="64 bits"):
        read_record(Side, {**side, "shape": [2**63]})


def test_a_document_that_is_no_object_is_refused() -> None:
    with pytest.raises(UnreadableTextError, match=r"^expected object, got array$"):
        read_record(Content, [])


def test_a_record_takes_what_has_the_names_of_its_fields() -> None:
    class Found(NamedTuple):
        more: int
        shape: None

        @property
        def name(self) -> str:
            return "a"

    assert fill_record(Side, Found(1, None)) == Side("a", None)
    assert fill_record(Side, Found(1, None), shape=(1,)) == Side("a", (1,))


def test_the_schema_says_what_the_docstrings_say() -> None:
    schema = build_schema("onnxkvrename.test/1", Content)
    assert (schema["$id"], schema["title"]) == ("onnxkvrename.test/1", "What is in it")
    assert schema["properties"]["share"] == {"description": "From 0 to 1.", "type": "number"}
    side = schema["$defs"]["Side"]
    assert side["description"] == "One side."
    meaning = side["properties"]["shape"]["description"]
    assert meaning == "Sizes and symbols; null where that is not known."


def test_the_schema_accepts_what_is_written_and_nothing_else() -> None:
    validator = jsonschema.Draft202012Validator(build_schema("onnxkvrename.test/1", Content))
    assert validator.is_valid(VALUES)
    assert not validator.is_valid({**VALUES, "more": 1})
    assert not validator.is_valid({**VALUES, "kind": "other"})
    assert not any(validator.is_valid({k: VALUES[k] for k in VALUES if k != key}) for key in VALUES)


def test_a_document_has_one_schema_and_one_command() -> None:
    document = Document("onnxkvrename.test/1", "test", Side("", None))
    validator = jsonschema.Draft202012Validator(document.build_schema())
    values = json.loads(document.render(document.empty, 2, KvRenameError("no", hint="mend")))
    assert values["error"] == {"message": "no", "path": None, "hint": "mend"}
    assert validator.is_valid(values)
    for wrong in ({"command": "other"}, {"schema": "onnxkvrename.test/2"}, {"exit_code": 3}):
        assert not validator.is_valid({**values, **wrong})
