from __future__ import annotations

from onnxkvrename.report.tables import fold_text, render_table

HEADS = ("kind", "parts", "shape")
ROWS = [
    ("sliding_window", "recurrent_state", "[batch_size=1, 2, sliding_window=128, 4]"),
    ("full_attention", "key, value", "[batch_size=1, 2, ctx_len=4096, 4]"),
]


def draw(width: int | None, *rows: tuple[str, ...]) -> list[str]:
    return [line.text for line in render_table([HEADS, *(rows or ROWS)], width)]


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


def test_a_pipe_folds_nothing_and_an_empty_table_has_its_heads() -> None:
    assert draw(None, ("x" * 500, "y " * 500, "z"))[1].endswith("  z")
    assert [line.text for line in render_table([HEADS], 80)] == ["kind  parts  shape"]
    assert list(render_table([], 80)) == []


def test_words_that_do_not_fit_stay_whole_and_wide_letters_count_twice() -> None:
    assert fold_text("abcdefgh ij", 4) == ["abcdefgh", "ij"]
    assert fold_text("漢字 漢字 a", 6) == ["漢字", "漢字 a"]
