"""Every row of the contract still comes out as recorded, and no option is without a row."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from contract.matrix import build_matrix
from contract.observe import REPOSITORY, Row, observe
from contract.table import Table, describe, list_groups, read_group, read_shapes
from tiers import mark_full

TABLE: Table = {
    name: entry for group in list_groups() for name, entry in read_group(group)[1].items()
}
SHAPES = read_shapes()
LISTED = ("values --target", "values --profile", "values --format")
"""Values that are the files of a folder."""


@pytest.mark.parametrize(
    "name", [mark_full(name) if row.is_full else name for name, (row, _) in TABLE.items()]
)
def test_a_row_comes_out_as_recorded(name: str, tmp_path: Path) -> None:
    row, recorded = TABLE[name]
    if absent := row.find_absent():
        pytest.skip(f"this row needs {absent}")
    now = forget_new_names(row, recorded, describe(observe(row, tmp_path / "row"), SHAPES))
    if now != recorded:
        pytest.fail(explain(row, recorded, now), pytrace=False)


def forget_new_names(row: Row, recorded: list[str], now: list[str]) -> list[str]:
    """Leave out the codes, profiles, consumers and formats that are new: only a lost one counts."""
    known = set(" ".join(recorded).replace(",", " ").split())

    def keep(line: str) -> str:
        if row.argv == ["explain"]:
            return " ".join(word for word in line.split() if word in known)
        option, colon, names = line.partition(": ")
        if option not in LISTED:
            return line
        return option + colon + ", ".join(name for name in names.split(", ") if name in known)

    return [keep(line) for line in now]


def explain(row: Row, recorded: list[str], now: list[str]) -> str:
    """Say what of a row is different, and what to do if it is meant to be."""
    lines = [f"the row {row.name!r} came out differently:"]
    lines += [f"    given {line}" for line in row.given]
    lines += [f"    onnxkvrename {row.run}"]
    lines += [f"  - {line}" for line in recorded if line not in now]
    lines += [f"  + {line}" for line in now if line not in recorded]
    lines += [
        f"to see what it prints:  python tests/contract/record.py --show {row.name!r}",
        f"if it is meant, record it:  python tests/contract/record.py {row.name!r}",
        "and say so in CHANGELOG.md",
    ]
    return "\n".join(lines)


def find_command(row: Row) -> str:
    """Return the command of a row: its first word, or the one that can be left out."""
    return row.argv[0] if row.argv and row.argv[0] in list_options() else "rename"


@cache
def list_options() -> dict[str, list[str]]:
    """List each command with its options as its help names them, all names of one in a line."""
    return {
        row.argv[0]: [line.removeprefix("option ") for line in lines if line.startswith("option ")]
        for name, (row, lines) in TABLE.items()
        if name.startswith("usage/") and name.endswith(" --help") and row.argv[1:]
    }


def count_promises() -> int:
    """Return how many promises docs/scope.md numbers."""
    page = (REPOSITORY / "docs" / "scope.md").read_text("utf-8")
    promises = page.partition("\n## What it promises\n")[2].partition("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", promises, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    return len(numbers)


def test_no_row_serves_a_promise_that_the_page_does_not_have() -> None:
    numbers = {row.why for row, _ in TABLE.values() if row.why.isdigit()}
    assert numbers == {str(number) for number in range(1, count_promises() + 1)}


@pytest.mark.parametrize("promise", range(1, count_promises() + 1))
def test_every_promise_has_a_row_in_the_default_tier(promise: int) -> None:
    rows = [row for row, _ in TABLE.values() if row.why == str(promise)]
    assert [row.name for row in rows if not row.is_full]


def test_every_command_has_its_help_in_the_table() -> None:
    help_page = TABLE["usage/--help"][1]
    commands = {line.removeprefix("command ") for line in help_page if line.startswith("command ")}
    assert len(commands) > 5
    assert commands == set(list_options())


@pytest.mark.parametrize("command", sorted(list_options()))
def test_every_option_is_in_a_row(command: str) -> None:
    words = {
        word.partition("=")[0]
        for row, _ in TABLE.values()
        if find_command(row) == command
        for word in row.argv
    }
    options = list_options()[command]
    assert options
    missing = [names for names in options if not set(names.split(", ")) & words]
    assert missing == []


@pytest.mark.parametrize("command", sorted(list_options()))
def test_every_value_of_an_option_is_in_a_row(command: str) -> None:
    used = {
        pair
        for row, _ in TABLE.values()
        if find_command(row) == command
        for pair in zip(row.argv, row.argv[1:], strict=False)
    }
    for line in TABLE[f"usage/{command} --help"][1]:
        option, _, values = line.removeprefix("values ").partition(": ")
        if line.startswith("values "):
            assert {(option, value) for value in values.split(", ")} <= used


def test_every_fixture_and_real_export_has_its_generated_rows() -> None:
    for group, rows in build_matrix().items():
        assert [name for name in TABLE if name.startswith(f"{group}/")] == [
            row.name for row in rows
        ]


def test_every_command_of_the_readme_is_in_a_row() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    typed = re.findall(r"^(?:\$ |.*\.venv/bin/)?onnxkvrename ((?:\S+ )*\S+)", text, re.MULTILINE)
    assert len(typed) > 5
    runs = {row.run for name, (row, _) in TABLE.items() if name.startswith("readme/")}
    assert [line for line in typed if line not in runs] == []
