"""Every file that a command writes still has the bytes that ``bytes.sha256`` has of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from contract.bytes_cases import GROUPS, Case, list_cases, read_rows, run_case

CASES = list_cases()
ROWS = read_rows()
ADVICE = """\
these bytes are promised, and no line of tests/contract/bytes.sha256 ever changes:
    find out which change of the code made them different, and take it back
if the feature that this row is about goes, remove its case from tests/contract/bytes_cases.py
    and its lines from bytes.sha256"""


@pytest.mark.parametrize("source", dict.fromkeys(case.source for case in CASES))
def test_the_files_of_a_source_have_the_recorded_bytes(source: str, tmp_path: Path) -> None:
    wrong: list[str] = []
    cases = [case for case in CASES if case.source == source and case.name in ROWS]
    for number, case in enumerate(cases):
        result = run_case(case, tmp_path / str(number))
        if result.lines != ROWS[case.name]:
            wrong += explain(case, ROWS[case.name], result.lines)
        for name in result.not_restored:
            wrong.append(f"{case.name}: --strip does not restore {name}")
    if wrong:
        pytest.fail("\n".join([*wrong, ADVICE]), pytrace=False)


@pytest.mark.parametrize("group", GROUPS)
def test_every_case_has_a_row_and_every_row_a_case(group: str) -> None:
    if not GROUPS[group].is_dir():
        pytest.skip(f"the rows of {group} need the real exports in ../shared/{group}")
    cases = {case.name for case in CASES if case.group == group}
    rows = {name for name in ROWS if name.partition("/")[0] == group}
    assert cases
    if new := sorted(cases - rows):
        pytest.fail(
            f"cases without a row: {new}\nadd them: python tests/contract/record_bytes.py",
            pytrace=False,
        )
    if old := sorted(rows - cases):
        pytest.fail(
            f"rows without a case: {old}\n"
            "if their feature is gone, remove their lines from tests/contract/bytes.sha256",
            pytrace=False,
        )


def test_a_half_renamed_set_is_completed_to_what_one_command_makes() -> None:
    completed = [name for name in ROWS if name.endswith(" completed")]
    assert len(completed) > 10
    for name in completed:
        whole = name.replace(" completed", " in-place")
        if not any("VLLM" in part for part in name.split("/")):
            assert set(find_hashes(name)) == set(find_hashes(whole)), name


def find_hashes(row: str) -> list[str]:
    """Return the lines of a row without its name: the SHA-256, and the file where there is one."""
    return [line.replace(row, "") for line in ROWS[row]]


def explain(case: Case, recorded: list[str], now: list[str]) -> list[str]:
    """Say how a row is different."""
    return [
        f"the row {case.name!r} came out differently:",
        *(f"    given {line}" for line in case.given),
        *(f"    onnxkvrename {line}" for line in case.commands),
        *(f"  - {line}" for line in recorded if line not in now),
        *(f"  + {line}" for line in now if line not in recorded),
    ]
