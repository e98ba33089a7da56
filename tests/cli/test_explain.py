from __future__ import annotations

from typing import Any

import pytest

from onnxkvrename.findings import CODES


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_explained(code: str, run: Any) -> None:
    outcome = run("explain", code.lower())
    lines = outcome.out.splitlines()
    severity, meaning = CODES[code]
    assert (outcome.code, lines[0]) == (0, code)
    assert f"{severity}: {meaning}".startswith(lines[2])
    assert any(line.startswith("Fix: ") for line in lines)
    prose = [line for line in lines if not line.startswith("  ")]
    assert all(len(line) <= 80 and "](" not in line for line in prose)


def test_a_finding_is_shown_as_it_is_printed(run: Any) -> None:
    lines = run("explain", "KV101").out.splitlines()
    start = next(number for number, line in enumerate(lines) if "error KV101: " in line)
    assert lines[start].startswith("  model.onnx: ")
    assert lines[start + 1].startswith("    step cannot")
    assert any(line.startswith("Fix: Export again.") for line in lines)


def test_several_codes_follow_each_other(run: Any) -> None:
    assert run("explain", "KV101", "KV102").out.split("\n\nKV102\n")[0].startswith("KV101\n")


def test_without_a_code_all_are_listed(run: Any) -> None:
    assert [line.split()[0] for line in run("explain").out.splitlines()] == list(CODES)


def test_on_a_terminal_meanings_wrap_by_words(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxkvrename.cli.output.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "60")
    lines = run("explain").out.splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(CODES)
    long = next(number for number, line in enumerate(lines) if line.startswith("KV120"))
    assert lines[long + 1].startswith(" " * 16)


@pytest.mark.parametrize("code", ["KV999", "kv40", "999"])
def test_an_unknown_code_is_an_error(code: str, run: Any) -> None:
    outcome = run("explain", code)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: no finding has the code {code} (`onnxkvrename explain`")
