from __future__ import annotations

import re

import pytest

from onnxkvrename.findings import (
    CODES,
    begin_message,
    build_finding,
    build_names_finding,
    promote_to_errors,
)
from onnxkvrename.text import find_similar, format_count, format_list, suggest_similar


@pytest.mark.parametrize(
    ("count", "limit", "text"),
    [
        (0, 5, ""),
        (1, 5, "0"),
        (5, 5, "0, 1, 2, 3, 4"),
        (6, 5, "0, 1, 2, 3, 4 and 1 more"),
        (3, 1, "0 and 2 more"),
        (2001, 1, "0 and 2,000 more"),
    ],
)
def test_a_long_list_is_cut_off_with_the_number_of_the_rest(
    count: int, limit: int, text: str
) -> None:
    assert format_list([str(number) for number in range(count)], limit=limit) == text


def test_a_list_has_five_names_and_commas_by_default() -> None:
    assert format_list("abcdefg") == "a, b, c, d, e and 2 more"
    assert format_list("ab", "; ") == "a; b"


def test_a_typing_error_is_told_from_another_name() -> None:
    assert find_similar("renme", ["verify", "rename"]) == "rename"
    assert suggest_similar("renme", ["verify", "rename"]) == "did you mean rename?"
    assert find_similar("VERIFY", ["rename", "Verify"]) == "Verify"
    assert find_similar("zzz", ["verify", "rename"]) is None
    assert suggest_similar("zzz", ["verify", "rename"]) is None
    assert find_similar("ab", ["axcd"], cutoff=0.3) == "axcd"


def test_a_finding_has_the_severity_of_its_code_unless_all_are_errors() -> None:
    finding = build_finding("KV111", "x", "is unknown", "name it")
    assert finding.severity == "warning"
    (promoted,) = promote_to_errors([finding])
    assert promoted == ("KV111", "error", "x", "is unknown", "name it")


def test_a_finding_about_several_names_counts_them_first() -> None:
    wrong = "carries no token", "carry no token"
    one = build_names_finding("KV116", ["a"], wrong, "rename it")
    many = build_names_finding("KV116", ["a", "b"], wrong, "rename them")
    assert (one.name, one.message) == ("a", "carries no token")
    assert (many.name, many.message) == ("a", "2 names (first: a) carry no token")
    listed = build_names_finding("KV116", ["a", "b", "c"], wrong, "rename them", shown=2)
    assert listed.message == "3 names (a, b and 1 more) carry no token"


def test_a_message_about_several_names_begins_with_their_number_and_the_first() -> None:
    one, both = (
        build_finding("KV601", names[0], f"{begin_message(names, 'is', 'are')} lost", "fix it")
        for names in (["a"], ["a", "b"])
    )
    assert (one.subject, one.message) == ("a", "is lost")
    assert (both.subject, both.message) == ("", "2 names (first: a) are lost")
    assert both.name == "a"
    assert begin_message("abc", "is", "are", "buffers") == "3 buffers (first: a) are"


def test_a_number_goes_with_its_noun() -> None:
    assert [format_count(count, "name") for count in (0, 1, 1000)] == [
        "0 names",
        "1 name",
        "1,000 names",
    ]
    assert [format_count(count, "axis", "axes") for count in (1, 2)] == ["1 axis", "2 axes"]


@pytest.mark.parametrize("code", CODES)
def test_a_row_has_a_name_in_words_and_says_why_and_what_to_do_in_sentences(code: str) -> None:
    row = CODES[code]
    assert re.fullmatch(r"[a-z]+(?:-[a-z]+){1,3}", row.name)
    assert not row.title.endswith(".")
    assert row.why.endswith(".")
    assert row.fix.endswith(".")


def test_codes_and_names_are_in_the_table_once() -> None:
    assert len({row.name for row in CODES.values()}) == len(CODES)
    assert list(CODES) == sorted(CODES)
