"""The table of the contract as text files: rows with what came of each, and shapes of JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from contract.observe import Observation, Row, Shape

RECORDED = Path(__file__).parent / "recorded"
SHAPES = RECORDED / "shapes.txt"
ABSENCES = ("null", "empty", "missing")
INPUTS = ("why", "given", "needs", "tier", "keep", "run")
Table = dict[str, tuple[Row, list[str]]]
"""A row by its name, and the lines that say what came of it."""
Kinds = dict[str, list[str]]
"""What may be at each path of a document, the usual first."""


def list_groups() -> list[str]:
    """List the files of the table."""
    return sorted(path.stem for path in RECORDED.glob("*.txt") if path != SHAPES)


def read_group(group: str) -> tuple[str, Table]:
    """Read one file of the table: its heading, and its rows."""
    heading, *blocks = (RECORDED / f"{group}.txt").read_text(encoding="utf-8").split("\n= ")
    table: Table = {}
    for block in blocks:
        name, *lines = block.strip().split("\n")
        words = [line.partition(" ")[::2] for line in lines]
        inputs = {key: [rest for word, rest in words if word == key] for key in INPUTS}
        row = Row(
            name=f"{group}/{name}",
            run=inputs["run"][0],
            why=inputs["why"][0],
            given=tuple(inputs["given"]),
            needs=tuple(inputs["needs"]),
            is_slow="full" in inputs["tier"],
            keeps_stdout="stdout" in inputs["keep"],
        )
        if row.name in table:
            raise ValueError(f"two rows are called {row.name}")
        table[row.name] = row, [line for line in lines if line.split(" ")[0] not in INPUTS]
    return heading.strip(), table


def write_group(group: str, heading: str, table: Table) -> None:
    """Write one file of the table."""
    text = "".join(f"\n\n= {_format_row(row, lines)}" for row, lines in table.values())
    (RECORDED / f"{group}.txt").write_text(f"{heading}{text}\n", encoding="utf-8")


def _format_row(row: Row, lines: Iterable[str]) -> str:
    return "\n".join(
        [
            row.name.partition("/")[2],
            f"why {row.why}",
            *(f"given {line}" for line in row.given),
            *(f"needs {line}" for line in row.needs),
            *(["tier full"] if row.is_slow else []),
            *(["keep stdout"] if row.keeps_stdout else []),
            f"run {row.run}",
            *lines,
        ]
    )


def read_shapes() -> dict[str, Kinds]:
    """Read which paths each JSON document may have, with what is there, the usual first."""
    shapes: dict[str, Kinds] = {}
    for block in SHAPES.read_text(encoding="utf-8").split("\n= ")[1:]:
        name, *lines = block.strip().split("\n")
        pairs = (line.partition(": ") for line in lines)
        shapes[name] = {path: kinds.split(", ") for path, _, kinds in pairs}
    return shapes


def write_shapes(shapes: dict[str, Kinds]) -> None:
    """Write which paths each JSON document may have."""
    text = "Every path of every JSON document, with what is there: the usual, then other kinds."
    for name, kinds in sorted(shapes.items()):
        text += f"\n\n= {name}\n"
        text += "\n".join(f"{path}: {', '.join(kinds[path])}" for path in sorted(kinds))
    SHAPES.write_text(f"{text}\n", encoding="utf-8")


def merge_shapes(known: dict[str, Kinds], seen: Iterable[Observation]) -> dict[str, Kinds]:
    """Return the paths and kinds that were seen, or are known.

    What is usual at a path stays so once it is recorded: else a new row could change others.
    """
    counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for each in seen:
        for path, kinds in each.shape.items():
            counts[each.schema][path].update(kinds)
    merged = {name: dict(shape) for name, shape in known.items()}
    for name, paths in counts.items():
        shape = merged.setdefault(name, {})
        for path, count in paths.items():
            usual = shape.get(path, [count.most_common()[0][0]])[0]
            shape[path] = [usual, *sorted({*shape.get(path, []), *count} - {usual})]
    return merged


def describe(seen: Observation, shapes: dict[str, Kinds]) -> list[str]:
    """Say what came of a row in lines: all that was seen, the shape by what is unusual in it."""
    if not seen.schema:
        return seen.lines
    lines = [*seen.lines, f"json {seen.schema}"]
    whole = shapes.get(seen.schema, {})
    for path in sorted(whole | seen.shape):
        known = whole.get(path, [""])
        kinds = seen.shape.get(path) or ({"missing"} if _has_parent(path, seen.shape) else set())
        if news := kinds - {*known, "missing"}:
            lines.append(f"unknown {path}: {', '.join(sorted(news))}")
        elif kinds and {_class(kind) for kind in kinds} != {_class(known[0])}:
            lines.append(f"{' or '.join(sorted({_class(kind) for kind in kinds}))} {path}")
    return lines


def _class(kind: str) -> str:
    """Return what a row says about a path: that nothing is there, or something of any type."""
    return kind if kind in ABSENCES else "some"


def _has_parent(path: str, shape: Shape) -> bool:
    """Return whether this path could be here: whether what holds it is."""
    if path.endswith("[]"):
        return False
    parent = path.rpartition(".")[0]
    return not parent or "object" in shape.get(parent, set())
