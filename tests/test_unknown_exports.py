"""Whoever has an export that no page names gets through with `--prefix` and what is printed.

The exports are not in the repository: see `real_exports`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Run
from exporters_table import OTHERS, TOKEN, Row, read_table
from hints import find_commands, run_commands
from tiers import thin

ROWS = read_table()
FOUND = [row for row in ROWS if row.options]
pytestmark = pytest.mark.skipif(
    not OTHERS.is_dir(), reason=f"no other exporters' models: no {OTHERS}"
)


def list_cases(rows: list[Row], default: int) -> list[object]:
    return thin([pytest.param(row, id=row.export) for row in rows], default)


@pytest.mark.parametrize(
    "row",
    [
        *list_cases([row for row in FOUND if not row.profile], len(FOUND)),
        *list_cases([row for row in FOUND if row.profile], 2),
    ],
)
def test_an_export_is_renamed_checked_and_restored_with_the_printed_commands(
    row: Row, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the rules are written
    source, renamed, back = OTHERS / row.export, tmp_path / "new.onnx", tmp_path / "back.onnx"
    before = source.read_bytes()
    sidecars = ["--sidecars", "off"] if "--sidecars off" in row.options else []
    outcome = run(source, "--prefix", TOKEN, "-o", renamed, *sidecars)
    rules = []
    if not row.profile:
        assert (outcome.code, renamed.exists(), "error KV001" in outcome.err) == (1, False, True)
        outcome = run_commands(outcome.err, run)
        unknown = run("verify", renamed)
        assert (unknown.code, "add `--rules FILE`" in unknown.err) == (1, True)
        rules = ["--rules", "rules.toml"]
    assert (outcome.code, source.read_bytes()) == (0, before)
    names = row.names.partition(" ")[0]
    assert f"{names} names changed" in outcome.err
    assert run("verify", renamed, *rules).code == 0
    stripped = run(renamed, "--strip", "-o", back, *sidecars, *rules)
    assert (stripped.code, back.read_bytes() == before) == (0, True)


@pytest.mark.parametrize("row", list_cases([row for row in ROWS if not row.options], 2))
def test_an_export_without_a_cache_stays_and_no_command_is_offered(
    row: Row, tmp_path: Path, run: Run
) -> None:
    source, renamed = OTHERS / row.export, tmp_path / "new.onnx"
    before = source.read_bytes()
    outcome = run(source, "--prefix", TOKEN, "-o", renamed)
    assert (outcome.code, renamed.exists(), source.read_bytes() == before) == (1, False, True)
    assert find_commands(outcome.err) == []
    no_cache, other_value = "no cache found in the graph either", "a different value with the name"
    assert (no_cache in outcome.err) != (other_value in outcome.err)
