from __future__ import annotations

from typing import Any

import pytest

from onnxkvrename.findings import CODES


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_explained(code: str, run: Any) -> None:
    outcome = run("explain", code.lower())
    row = CODES[code]
    heading, title, why, fix = outcome.out.split("\n\n")
    assert (outcome.code, heading) == (0, f"{code} {row.name}")
    assert title.replace("\n", " ") == f"{row.severity}: {row.title}"
    assert why[:20] == row.why[:20]
    assert fix.startswith("Fix: ")
    assert all(len(line) <= 80 and "](" not in line for line in outcome.out.splitlines())
    assert run("explain", row.name) == outcome


def test_all_that_the_table_says_is_printed(run: Any) -> None:
    assert (
        run("explain", "Growing-Cache").out
        == """\
KV120 growing-cache

warning: a cache that grows: its output does not fit into its input (an error
where it must)

The output is longer than its input, or has only the new positions. It is an
error where the rules or the consumer require in-place updates. A plain rename
does not follow the graph; it warns if the declared shapes show it.

Fix: Export with a cache of fixed size, unless the runtime grows its cache.
QEfficient writes one (not for Gemma 3 as text alone), as do `mobius
--static-cache` and the static cache of transformers; the caches of Optimum and
onnxruntime-genai grow.
"""
    )


def test_several_codes_follow_each_other(run: Any) -> None:
    first, second = run("explain", "KV101", "missing-output").out.split("\n\nKV102 ")
    assert first.startswith("KV101 missing-input\n")
    assert second.startswith("missing-output\n")


def test_without_a_code_all_are_listed(run: Any) -> None:
    rows = [line.split()[:3] for line in run("explain").out.splitlines()]
    assert rows == [[row.code, row.name, row.severity] for row in CODES.values()]


def test_on_a_terminal_titles_wrap_by_words(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxkvrename.cli.output.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("explain").out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(CODES)
    long = next(number for number, line in enumerate(lines) if line.startswith("KV120"))
    assert lines[long + 1].startswith(" " * 16)


@pytest.mark.parametrize("code", ["KV999", "kv40", "999"])
def test_an_unknown_code_is_an_error(code: str, run: Any) -> None:
    outcome = run("explain", code)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"error: no such finding: {code} (`onnxkvrename explain` lists all)\n"


def test_a_name_with_a_typing_error_has_a_suggestion(run: Any) -> None:
    outcome = run("explain", "missing-inputs")
    assert (outcome.code, outcome.out) == (2, "")
    assert "no such finding: missing-inputs (did you mean missing-input?)" in outcome.err
