from __future__ import annotations

import shlex

import pytest

from onnxkvrename.report.formats import Line, Span, build_line
from onnxkvrename.report.tables import fold_text, render_table, wrap_line

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


def rows(text: str, width: int) -> list[str]:
    return [line.text for line in wrap_line(Line(text, err=True), width)]


def test_lines_break_between_words_and_go_on_indented() -> None:
    text = "model.onnx: error KV102: past_key.0 has no retained output (export again)"
    assert rows(text, 30) == [
        "model.onnx: error KV102:",
        "  past_key.0 has no retained",
        "  output (export again)",
    ]
    assert rows(text, 80) == [text]


def test_a_long_name_stays_whole() -> None:
    assert rows(f"a {'x' * 90} b", 40) == ["a", f"  {'x' * 90}", "  b"]


def test_a_command_stays_whole_so_that_it_can_be_copied() -> None:
    command = "onnxkvrename model.onnx --prefix VLLM --replace -o elsewhere.onnx"
    assert rows(f"some words (take one; {command}; or none)", 30) == [
        "some words (take one;",
        f"  {command};",
        "  or none)",
    ]
    quoted = "`pip install 'onnxkvrename[run]' --upgrade`"
    assert f"  {quoted}" in rows(f"some words that are here, then {quoted} and more", 30)


def test_an_arrow_has_its_command_on_the_same_row() -> None:
    command = "`onnxkvrename model.onnx --target vllm-qaic`"
    assert rows(f"  -> {command} renames it", 30) == [f"  -> {command}", "     renames it"]


@pytest.mark.parametrize("path", ["r;x y.onnx", "a`b c.onnx", "it's ; a `.onnx", "no end.onnx"])
@pytest.mark.parametrize("marks", [("", ";"), ("`", "`")])
def test_no_path_breaks_a_command(path: str, marks: tuple[str, str]) -> None:
    """The first row alone could be another command: one without its ``-o``."""
    command = f"onnxkvrename {shlex.quote(path)} --replace --target vllm-qaic -o elsewhere.onnx"
    shown = f"{marks[0]}{command}{marks[1]}"
    assert f"  {shown}" in rows(f"some words that are here, then {shown} and more words", 30)


def test_an_apostrophe_opens_no_quote_that_never_ends() -> None:
    assert rows("the exporter's cache and `it's there` and then onnxkvrename isn't", 30) == [
        "the exporter's cache and",
        "  `it's there` and then",
        "  onnxkvrename isn't",
    ]


def test_styles_stay_with_their_words() -> None:
    line = build_line(Span("error " * 6 + "end", "31"), " plain words", err=True)
    first, second = wrap_line(line, 40)
    assert first.spans == (Span(("error " * 6 + "end").strip(), "31"),)
    assert second.spans == (Span("  "), Span("plain words"))
    assert all(part.text == "".join(span.text for span in part.spans) for part in (first, second))


def test_a_narrow_terminal_and_an_empty_line_are_left_alone() -> None:
    assert rows("some words", 3) == ["some words"]
    assert rows("", 80) == [""]
    assert rows(" " * 100, 80) == [" " * 100]
