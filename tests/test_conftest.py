"""Tests of conftest.py: what it refuses and skips, in a separate pytest."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def run_pytest(directory: Path, test: str) -> tuple[int, str]:
    """Run one test module beside a copy of our conftest.py; its exit code and output."""
    shutil.copy(TESTS / "conftest.py", directory)
    (directory / "test_it.py").write_text(f"import pytest\n{test}", "utf-8")
    options = ("-p", "no:cacheprovider", "-o", f"pythonpath={TESTS}", "--rootdir", directory)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, options), "test_it.py"],
        cwd=directory,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_parametrization_without_cases_fails(tmp_path: Path) -> None:
    code, output = run_pytest(
        tmp_path, "@pytest.mark.parametrize('case', [])\ndef test_it(case): pass"
    )
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "test_it.py::test_it[NOTSET]: no cases were found for this test" in output


@pytest.mark.parametrize(("condition", "code"), [("True", 0), ("False", 4)])
def test_cases_may_be_absent_where_a_mark_says_why(
    condition: str, code: int, tmp_path: Path
) -> None:
    mark = f"@pytest.mark.skipif({condition}, reason='no real exports')"
    test = f"{mark}\n@pytest.mark.parametrize('case', [])\ndef test_it(case): pass"
    assert run_pytest(tmp_path, test)[0] == code
