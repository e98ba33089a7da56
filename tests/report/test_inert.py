from __future__ import annotations

import json
import sys
import unicodedata

import pytest
from tiers import thin

from onnxkvrename.report.inert import (
    escape_json,
    escape_line,
    escape_text,
    is_inert,
    shorten_parts,
    shorten_text,
)

CODE_POINTS = thin([range(0x10000), range(sys.maxunicode + 1)], 1)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("past_key.0 é ✓ [red] :smiley: \\", "past_key.0 é ✓ [red] :smiley: \\"),
        ("a\nb\r\t", "a\\x0ab\\x0d\\x09"),
        ("\x1b[2J\x07\x9b", "\\x1b[2J\\x07\\x9b"),
        ("\u202eab\u2066\u200b", "\\u202eab\\u2066\\u200b"),
        ("\U000e0001", "\\U000e0001"),
        (b"\xff\x80".decode("utf-8", "surrogateescape"), "\\xff\\x80"),
        ("\ud800", "\\ud800"),
        ("\u2028\x85\xa0", "\\u2028\\x85\\xa0"),
        ("a\u034f\u3164\ufe0f\U000e0100", "a\\u034f\\u3164\\ufe0f\\U000e0100"),
    ],
)
def test_what_moves_hides_or_reorders_is_escaped(text: str, shown: str) -> None:
    assert escape_text(text) == shown
    assert escape_text(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("##[error]x", "#\\x23[error]x"),
        ("a ###[x", "a ##\\x23[x"),
        ("##vso[task.x]##teamcity[y", "#\\x23vso[task.x]#\\x23teamcity[y"),
        ("##\u200b[x", "##\\u200b[x"),
        ("# a ## b #[c] ##", "# a ## b #[c] ##"),
    ],
)
def test_older_commands_are_broken_anywhere(text: str, shown: str) -> None:
    assert escape_text(text) == shown
    assert escape_text(shown) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("::error::x", "\\x3a:error::x"),
        ("  ::stop-commands::x", "  \\x3a:stop-commands::x"),
        ("\u3000::x", "\\u3000::x"),
        ("a::b", "a::b"),
        (":a:", ":a:"),
    ],
)
def test_no_line_begins_with_a_command(text: str, shown: str) -> None:
    assert escape_line(text) == [shown]
    assert escape_line(text, is_command=True) == [escape_text(text)]


def test_a_command_over_the_edge_of_two_parts_of_a_line_is_found() -> None:
    assert escape_line("#" + "#[x" + "\n", (1, 4)) == ["#", "\\x23[x", "\\x0a"]
    assert escape_line(" " + ":" + ":x::", (1, 2)) == [" ", "\\x3a", ":x::"]


@pytest.mark.parametrize("code_points", CODE_POINTS)
def test_a_text_is_inert_if_nothing_in_it_needs_an_escape_wherever_lines_begin(
    code_points: range,
) -> None:
    for text in map(chr, code_points):
        assert not is_inert(text) or escape_line(text) == [text]
    for text in ("##[error]", "a::b", " ::x", "a\nb", "\u202e"):
        assert not is_inert(text)
    assert is_inert('past_key.0 -> "key:0" # [1] \\ ~')


def test_json_keeps_its_value() -> None:
    value = {"##[x]": "\\##vso[a\x7f###\\\x85\ud800"}
    text = escape_json(json.dumps(value))
    assert "##" not in text
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text) == value


@pytest.mark.parametrize("code_points", CODE_POINTS)
def test_every_code_point_is_seen_or_escaped(code_points: range) -> None:
    """Unicode's own tables are the oracle, not :meth:`str.isprintable`."""
    kept = set(escape_text("".join(map(chr, code_points))))
    categories = {unicodedata.category(char) for char in kept}
    assert not categories & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert [char for char in kept if char.isspace()] == [" "]
    assert not any(char in kept for char in "\u200b\u200e\u2028\u202e\u2066\u061c\ufeff\u115f")


def test_only_the_longest_parts_are_shortened() -> None:
    assert shorten_parts(["a" * 100, "b" * 100]) == ["a" * 100, "b" * 100]
    path, name, hint = shorten_parts(["p" * 90, "n" * 9000, "h" * 9000])
    assert (path, len(name), len(hint)) == ("p" * 90, 143, 143)
    *others, hint = shorten_parts(["p" * 300, "n" * 300, "a command " * 20])
    assert (sum(map(len, others)), hint) == (176, "a command " * 20)
    assert sum(map(len, shorten_parts(["\x00" * 9000] * 3))) <= 376


def test_a_long_path_takes_nothing_from_the_message_and_the_hint() -> None:
    path, message, hint = shorten_parts(["p" * 300, "m" * 150, "h" * 150])
    assert (len(path), message, hint) == (76, "m" * 150, "h" * 150)
    path, message, hint = shorten_parts(["p" * 300, "m " * 190, "h " * 190])
    assert (len(path), message, hint) == (60, "m " * 190, "h " * 190)


def test_a_sentence_stays_whole_as_its_middle_may_be_the_reason() -> None:
    message = (
        "4 buffers (first: past_key_cross_0) have the shape [batch_size, num_heads, kv_len, 16]; "
        "vllm-qaic cuts axis 2 to the prompt's length, but it is not the context (the encoder's "
        "output): a prompt shorter than kv_len tokens loses the rest"
    )
    hint = "set VLLM_QAIC_USE_FULL_KV_TRANSFER=1, then check: `onnxkvrename m --full-transfer`"
    parts = ["exports/" * 15 + "m.onnx", "", message, hint]
    assert shorten_parts(parts) == parts


def test_a_name_that_is_too_long_leaves_its_sentence_whole() -> None:
    name = "past" + "x" * 9000 + "_0"
    parts = ["m.onnx", "", f"8 names (first: {name}) carry a different token", "rename them"]
    *_, message, hint = shorten_parts(parts)
    assert message.startswith("8 names (first: pastxxx")
    assert " characters ...]" in message
    assert message.endswith("xxx_0) carry a different token")
    assert hint == "rename them"
    assert len(message) < 400


def test_each_side_of_a_hand_off_keeps_its_beginning_and_its_end() -> None:
    sides = [f"/exports/{role}/{'folder/' * 40}{role}.onnx" for role in ("prefill", "decode")]
    parts = [" -> ".join(sides), "past_key.0", "m" * 190, "h" * 190]
    label, *others = shorten_parts(parts)
    assert others == parts[1:]
    for whole, shown in zip(sides, label.split(" -> "), strict=True):
        head, mark, tail = shown.partition("[... ")
        assert len(shown) < len(whole)
        assert head
        assert mark
        assert whole.startswith(head)
        assert whole.endswith(tail.partition(" characters ...]")[2])
        assert tail.endswith(".onnx")
    sides[0] = "prefill.onnx"  # only what is too long loses its middle
    label = shorten_parts([" -> ".join(sides), *parts[1:]])[0]
    assert label.startswith("prefill.onnx -> /exports/")
    assert label.endswith("decode.onnx")


def test_two_paths_of_usual_length_stay_whole_in_a_long_line() -> None:
    label = " -> ".join(NAMES[:2])
    assert shorten_parts([label, "past_key.0", "m" * 190, "h" * 190])[0] == label


def test_a_shortened_text_says_how_much_is_left_out() -> None:
    assert shorten_text("a" * 50 + "b" * 50, 40) == "a" * 8 + "[... 84 characters ...]" + "b" * 8


NAMES = [f"exports/plain-{n:064x}/decoder.onnx" for n in range(9)]


@pytest.mark.parametrize("limit", range(40, 290, 7))
def test_a_text_is_cut_between_words_and_never_inside_a_path_or_a_command(limit: int) -> None:
    command = f"`onnxkvrename {NAMES[0]} --target vllm-qaic`"
    for text in (
        f"batch sizes differ: {', '.join(NAMES)} and 3 more",
        f"{command} renames it; {command} checks it, in all {len(NAMES)} directories",
    ):
        shown = shorten_text(text, limit)
        assert len(shown) <= limit
        head, mark, rest = shown.partition("[... ")
        count, end, tail = rest.partition(" characters ...]")
        assert mark
        assert end
        assert len(head) + int(count.replace(",", "")) + len(tail) == len(text)
        assert text.startswith(head)
        assert text.endswith(tail)
        assert head == "" or head.endswith(" ")
        assert tail == "" or tail.startswith(" ")
        assert (head.count("`") % 2, tail.count("`") % 2) == (0, 0)


def test_a_path_of_usual_length_stays_whole_in_a_long_line() -> None:
    path, name, *_ = shorten_parts([NAMES[0], NAMES[1], "m" * 190, "h" * 190])
    assert (path, name) == (NAMES[0], NAMES[1])


def test_a_command_that_is_too_long_is_left_out_as_a_whole() -> None:
    text = f"`onnxkvrename {' '.join(NAMES)} --target vllm-qaic`"
    assert shorten_text(text, 200) == f"[... {len(text):,} characters ...]"
