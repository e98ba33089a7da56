from __future__ import annotations

import io

from rich.console import Console

from onnxkvrename.report.tables import build_table

HEADS = ("KIND", "PARTS", "SHAPE")
ROWS = [
    ("sliding_window", "recurrent_state", "[batch_size=1, 2, sliding_window=128, 4]"),
    ("full_attention", "key, value", "[batch_size=1, 2, ctx_len=4096, 4]"),
]


def draw(width: int, *rows: tuple[object, ...]) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(build_table(HEADS, rows or ROWS))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_table_with_room_has_a_line_for_each_row() -> None:
    assert draw(100) == [
        "kind            parts            shape",
        "sliding_window  recurrent_state  [batch_size=1, 2, sliding_window=128, 4]",
        "full_attention  key, value       [batch_size=1, 2, ctx_len=4096, 4]",
    ]


def test_cells_break_between_words_only() -> None:
    assert draw(56) == [
        "kind            parts            shape",
        "sliding_window  recurrent_state  [batch_size=1, 2,",
        "                                 sliding_window=128, 4]",
        "full_attention  key, value       [batch_size=1, 2,",
        "                                 ctx_len=4096, 4]",
    ]
    assert all(word in " ".join(draw(51)) for row in ROWS for cell in row for word in cell.split())


def test_where_no_row_fits_each_is_a_paragraph() -> None:
    assert draw(30)[:4] == [
        "kind   sliding_window",
        "parts  recurrent_state",
        "shape  [batch_size=1, 2,",
        "       sliding_window=128, 4]",
    ]


def test_markup_is_text_and_an_empty_table_has_its_heads() -> None:
    assert draw(80, ("[red]x[/red]", 1, ""))[1] == "[red]x[/red]  1"
